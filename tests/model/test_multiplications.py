"""Operations of operators, counted by hand."""

import numpy as np
import onnx
import onnx.parser
import pytest

from qdqtool.model.live import load_of
from qdqtool.model.multiplications import COUNTERS

MAP = "[1, 6, 8, 10]"


def count_operations(
    inputs: str, output: str, op: str, constants: str = "", opset: int = 24, domain: str = ""
) -> int:
    """Return the operations of one operator between inputs and an output of given shapes."""
    initializers = f" <{constants}>" if constants else ""
    opsets = f'["" : {opset}, "ai.onnx.ml" : 3]'
    text = f"<ir_version: 11, opset_import: {opsets}> g ({inputs}) => ({output}){initializers} {{ y = {op} }}"
    model = onnx.parser.parse_model(text)
    model.graph.node[0].domain = domain
    return load_of(model, {}).operations


X = f"float{MAP} x"


@pytest.mark.parametrize(
    ("inputs", "output", "op", "expected"),
    [
        # Those that read more than they write, and those that read but a part
        (X, "float[1,1] y", "ReduceMean <keepdims = 0> (x)", 480),
        (X, "float[1,6,1,1] y", "GlobalAveragePool (x)", 480),
        (X, "int64[1,8,10] y", "ArgMax <axis = 1, keepdims = 0> (x)", 480),
        (f"{X}, float{MAP} z", f"float{MAP} y", "Sum (x, z, x)", 3 * 480),
        (f"{X}, int64[1] i", "float[1,6,8,1] y", "Gather <axis = 3> (x, i)", 6 * 8),
        (X, "int64[4] y", "Shape (x)", 4),
        # Those that sum products
        (
            f"{X}, float[12,3,3,3] w",
            "float[1,12,6,8] y",
            "Conv <group = 2> (x, w)",
            12 * 6 * 8 * 3 * 9,
        ),
        (
            f"{X}, float[6,3,3,3] w",
            "float[1,6,10,12] y",
            "ConvTranspose <group = 2> (x, w)",
            480 * 3 * 9,
        ),
        (
            "uint8[1,6,8,10] x, float s, uint8 z, uint8[12,6,3,3] w",
            "uint8[1,12,6,8] y",
            "QLinearConv (x, s, z, w, s, z, s, z)",
            12 * 6 * 8 * 6 * 9,
        ),
        (
            "uint8[5,7] x, float s, uint8 z, uint8[7,9] w",
            "uint8[5,9] y",
            "QLinearMatMul (x, s, z, w, s, z, s, z)",
            5 * 7 * 9,
        ),
        ("float[2,5,7] x, float[7,9] w", "float[2,5,9] y", "MatMul (x, w)", 2 * 5 * 7 * 9),
        ("float[7,5] x, float[7,9] w", "float[5,9] y", "Gemm <transA = 1> (x, w)", 5 * 7 * 9),
        (
            "float[2,5,7] x, float[2,7,9] w",
            "float[2,5,9] y",
            'Einsum <equation = "bij,bjk->bik"> (x, w)',
            2 * 5 * 7 * 9,
        ),
        (
            "float[2,3,5,7] x, float[7,9] w",
            "float[2,3,5,9] y",
            'Einsum <equation = "...j,jk -> ...k"> (x, w)',
            2 * 3 * 5 * 7 * 9,
        ),
        ("float[11] x, float[13] w", "float y", 'Einsum <equation = "i,j->"> (x, w)', 11 * 13),
        (
            "float[5,7] x, float[7,9] w, float[9,4] v",
            "float[5,4] y",
            'Einsum <equation = "ij,jk,kl->il"> (x, w, v)',
            2 * 5 * 7 * 9 * 4,
        ),
        (
            "float[20,2,8] x, float[2,64,8] w, float[2,64,16] r",
            "float[20,2,2,16] y",
            'LSTM <hidden_size = 16, direction = "bidirectional"> (x, w, r)',
            20 * 2 * 2 * 64 * (8 + 16),
        ),
        (
            "float[20,2,8] x, float[1,48,8] w, float[1,48,16] r",
            "float[20,1,2,16] y",
            "GRU <hidden_size = 16> (x, w, r)",
            20 * 2 * 48 * (8 + 16),
        ),
        (
            "float[1,4,30,16] q, float[1,4,50,16] k, float[1,4,50,8] v",
            "float[1,4,30,8] y",
            "Attention (q, k, v)",
            4 * 30 * 50 * (16 + 8),
        ),
        (
            "float[1,30,64] q, float[1,50,64] k, float[1,50,64] v",
            "float[1,30,64] y",
            "Attention <q_num_heads = 4, kv_num_heads = 4> (q, k, v)",
            30 * 50 * (64 + 64),
        ),
        ("float[6,8,8] x", "float[6] y", "Det (x)", 6 * 8**3),
        # Windows, samples and regions
        (X, "float[1,6,6,8] y", "MaxPool <kernel_shape = [3, 3]> (x)", max(480, 6 * 6 * 8 * 9)),
        (X, "float[1,6,1,1] y", "AveragePool <kernel_shape = [8, 10]> (x)", 480),
        (
            X,
            f"float{MAP} y",
            "AveragePool <kernel_shape = [7, 7], pads = [3, 3, 3, 3]> (x)",
            480 * 49,
        ),
        (
            X,
            f"float{MAP} y",
            "LpPool <kernel_shape = [5, 5], pads = [2, 2, 2, 2]> (x)",
            480 * 25 * 32,
        ),
        (X, f"float{MAP} y", "LRN <size = 5> (x)", 480 * (5 + 32)),
        (
            f"{X}, float[1,4,5,2] t",
            "float[1,6,4,5] y",
            'GridSample <mode = "cubic"> (x, t)',
            6 * 4 * 5 * 64,
        ),
        (
            f"{X}, float[3,4] r, int64[3] b",
            "float[3,6,2,2] y",
            "RoiAlign <output_height = 2, output_width = 2, sampling_ratio = 9> (x, r, b)",
            3 * 6 * 2 * 2 * 81 * 12,
        ),
        (
            f"{X}, float[3,4] r, int64[3] b",
            "float[3,6,2,2] y",
            "RoiAlign <output_height = 2, output_width = 2> (x, r, b)",
            3 * 6 * 80 * 12,
        ),
        (
            f"{X}, float[3,5] r",
            "float[3,6,2,2] y",
            "MaxRoiPool <pooled_shape = [2, 2]> (x, r)",
            3 * 6 * 80 * 12,
        ),
        (
            f"{X}, float[12,6,3,3] w, float[1,18,6,8] o",
            "float[1,12,6,8] y",
            "DeformConv (x, w, o)",
            6 * 8 * (12 * 6 * 9 + 6 * 9 * 12),
        ),
        # Several times over all, or by how many there are
        (X, f"float{MAP} y", "Softmax (x)", 4 * 480),
        (X, f"float{MAP} y", "LpNormalization (x)", 4 * 480),
        (X, "float[480] y", "Unique (x)", 480 * 9 * 32),
        (X, "int64[4,n] y", "NonZero (x)", 480 * 32),
        ("float[1,256,1] x", "float[1,256,2] y", "DFT (x)", 512 * 10 * 64),
    ],
)
def test_operations_of_operator(inputs: str, output: str, op: str, expected: int) -> None:
    assert count_operations(inputs, output, op) == expected


@pytest.mark.parametrize(
    ("inputs", "output", "op", "constants", "expected"),
    [
        (
            X,
            "float[1,6,16,20] y",
            'Resize <mode = "cubic"> (x, , s)',
            "float[4] s = {1, 1, 2, 2}",
            4 * 480 * 64,
        ),
        (
            X,
            "float[1,6,16,20] y",
            'Resize <mode = "linear"> (x, , s)',
            "float[4] s = {1, 1, 2, 2}",
            4 * 480 * 4,
        ),
        (X, "float[1,6,16,20] y", "Resize (x, , s)", "float[4] s = {1, 1, 2, 2}", 4 * 480),
        (
            X,
            "float[1,6,2,2] y",
            'Resize <mode = "linear", antialias = 1> (x, , s)',
            "float[4] s = {1, 1, 0.25, 0.2}",
            480 * 4,
        ),
        ("float[4,100] x", "float[4,9] y", "TopK (x, k)", "int64[1] k = {9}", 400 * 9),
        (
            "float[1,50,4] b, float[1,3,50] c",
            "int64[n,3] y",
            "NonMaxSuppression (b, c, m)",
            "int64[1] m = {7}",
            150 * 7,
        ),
        (
            "float[1,50,4] b, float[1,3,50] c",
            "int64[n,3] y",
            "NonMaxSuppression (b, c, m)",
            "int64[1] m = {99}",
            150 * 50,
        ),
        (
            "float[1,1024,1] x",
            "float[1,9,65,2] y",
            "STFT <onesided = 0> (x, t, , l)",
            "int64 t = {112}, int64 l = {128}",
            2 * 9 * 128 * 2 * 12 * 64,
        ),
    ],
)
def test_operations_that_depend_on_constants(
    inputs: str, output: str, op: str, constants: str, expected: int
) -> None:
    operations = count_operations(inputs, output, op, constants)
    assert expected <= operations <= expected * 1.1  # the constants are read as well


def test_number_from_large_weights_is_unknown() -> None:
    # The data of large weights is not at hand where operations are counted.
    model = onnx.parser.parse_model("""<ir_version: 11, opset_import: ["" : 24]>
        g (float[1,50,4] b, float[1,3,50] c) => (int64[n,3] y, int64[m,3] z) <float[8400,4] w, int64[1] first = {0}> {
            s = Shape (w)
            most = Gather <axis = 0> (s, first)
            y = NonMaxSuppression (b, c, most)
            z = NonMaxSuppression (b, c, most)
        }""")
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.ones((8400, 4), np.float32), "w")
    )
    assert 2 * 150 * 50 <= load_of(model, {}).operations < 2 * 150 * 50 * 1.1 + 8400 * 4


@pytest.mark.parametrize(
    "op",
    [
        'Einsum <equation = "ab,->...c,,"> (x, x)',
        'MaxPool <kernel_shape = "text"> (x)',
        "LRN <size = -5> (x)",
        "MaxPool <kernel_shape = [-3, 0]> (x)",
        "Conv (x)",
        "Einsum (x)",
        "Gemm (x, x)",
        "LSTM (x, x, x)",
        "RoiAlign (x)",
        "Attention (x)",
        "NonMaxSuppression (x)",
        "Det (x)",
        "Resize (x)",
        "QLinearConv (x, x)",
    ],
)
def test_damaged_operator_counts_at_least_its_elements(op: str) -> None:
    assert 480 <= count_operations(X, f"float{MAP} y", op, opset=17) < 480**3


def test_operations_of_tree_ensemble() -> None:
    op = "TreeEnsembleRegressor <nodes_featureids = [0, 1, 2, 3, 0, 1]> (x)"
    assert count_operations("float[30,4] x", "float[30,1] y", op, domain="ai.onnx.ml") == 30 * 6


def test_operators_with_attributes_that_scale_work_are_counted() -> None:
    # These attributes say how much is read for each element, or how often.
    scaling = {
        "equation",
        "hidden_size",
        "kernel_shape",
        "max_gram_length",
        "pooled_shape",
        "q_num_heads",
        "sampling_ratio",
        "size",
    }
    schemas = [s for s in onnx.defs.get_all_schemas() if s.domain == "" and not s.deprecated]
    names = {s.name for s in schemas if scaling & {*s.attributes}}
    assert names > {"Conv", "MaxPool", "LSTM", "Einsum"}
    assert names - {*COUNTERS} == {"MaxUnpool"}  # moves each element to one place
    assert {*COUNTERS} <= {s.name for s in onnx.defs.get_all_schemas()}
