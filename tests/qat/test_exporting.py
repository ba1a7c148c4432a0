import copy
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from pytorch_quantization import nn as quant_nn
from torch import nn

import qdqtool
from examples import resnet
from examples.resnet import ResNet18
from qdqtool import qat
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.qat.calls import NetworkCall
from qdqtool.qat.graph_cleanup import fold_constants, merge_pairs, transpose_weights
from qdqtool.qat.modules import following_norm_factor, read_amax, set_amax
from qdqtool.qat.trace import export_proto, remove_marks
from qdqtool.testing import assert_int8
from tests.errors import has
from tests.insertion.nets import run
from tests.qat import nets
from tests.qat.backends import BACKENDS
from tests.slow import slow_after

X = torch.randn(2, 16, 16, 16, generator=torch.Generator().manual_seed(5))


def ready(model: nn.Module, sample: torch.Tensor = X, **options: object) -> nn.Module:
    return nets.ready(nets.randomise(model), sample, **options)


def run_file(path: Path, x: torch.Tensor) -> np.ndarray:
    proto = onnx.load(path)
    return run(proto, {proto.graph.input[0].name: x.numpy()})[0]


def folded_weights(path: Path, op: str) -> tuple[np.ndarray, np.ndarray]:
    graph = onnx.load(path).graph
    assert "BatchNormalization" not in {n.op_type for n in graph.node}
    producers = {o: n for n in graph.node for o in n.output}
    values = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    q = producers[producers[next(n for n in graph.node if n.op_type == op).input[1]].input[0]]
    return values[q.input[0]], values[q.input[1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_exported_network_runs_as_planned(backend: str, tmp_path: Path) -> None:
    sample = torch.randn(2, 3, 64, 64)
    model = ready(ResNet18(10, nets.WIDTH), sample, backend=backend)
    export = qat.export(model, tmp_path / "q.onnx", sample)
    assert export.summary == qdqtool.predict(tmp_path / "q.onnx", "trt8.5").summary()
    assert export.summary["int8"] == len(export.plan.convolutions) == 21
    assert export.summary["int8_to_int8"] == 20 and export.summary["conversions"] == 1
    assert_int8(export.to_graphsurgeon(), "trt8.5", max_conversions=1)
    expected = nets.evaluate(model, sample).numpy()
    error = (
        np.sqrt(np.mean((run_file(tmp_path / "q.onnx", sample) - expected) ** 2)) / expected.std()
    )
    assert error == pytest.approx(export.difference, rel=1e-3) and error < 0.05


@pytest.mark.parametrize("backend", BACKENDS)
def test_exported_linear_layers_have_no_transpose(backend: str, tmp_path: Path) -> None:
    x = torch.randn(2, 5, 32)
    export = qat.export(ready(nets.Tokens(), x, backend=backend), tmp_path / "q.onnx", x)
    assert export.summary["int8"] == 2
    assert "Transpose" not in {n.op_type for n in onnx.load(tmp_path / "q.onnx").graph.node}


def normalized() -> nn.Module:
    return ready(nn.Sequential(nets.conv(bias=False), nn.BatchNorm2d(16), nn.ReLU(), nets.conv()))


def test_folding_keeps_trained_integers(tmp_path: Path) -> None:
    model = normalized()
    with torch.no_grad():
        model[1].weight[3:5] = torch.tensor([-0.7, 0.0])
    qat.export(model, tmp_path / "q.onnx", X)
    folded, scale = folded_weights(tmp_path / "q.onnx", "Conv")
    weight = nets.float_weights(model[0]).numpy()
    trained = np.round(weight / (np.abs(weight).max((1, 2, 3), keepdims=True) / 127))
    signs = np.sign(model[1].weight.detach().numpy()).reshape(-1, 1, 1, 1)
    np.testing.assert_array_equal(np.round(folded / scale.reshape(-1, 1, 1, 1)), trained * signs)
    expected = nets.evaluate(model, X).numpy()
    np.testing.assert_allclose(
        run_file(tmp_path / "q.onnx", X), expected, atol=0.02 * expected.std()
    )


def test_export_keeps_fixed_ranges_of_weights(tmp_path: Path) -> None:
    model = normalized()
    nets.max_calibrate(model, X)
    weights = model.get_submodule("0._weight_quantizer")
    set_amax(weights, read_amax(weights) * 0.5)  # as if the weights had grown since
    export = qat.export(model, tmp_path / "q.onnx", X)
    expected = nets.evaluate(model, X).numpy()
    np.testing.assert_allclose(
        run_file(tmp_path / "q.onnx", X), expected, atol=0.02 * expected.std()
    )
    assert export.difference < 0.02


def test_export_keeps_results_that_network_holds(tmp_path: Path) -> None:
    model = ready(Keeping())
    model.train()
    model(X).sum().backward()
    assert qat.export(model, tmp_path / "q.onnx", X).summary["int8"] == 2
    assert model.kept.pyramid[0].grad_fn is not None, "the network is left as it was"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("groups", [1, 2])
def test_exported_transposed_convolution(backend: str, groups: int, tmp_path: Path) -> None:
    """All channels have one scale, and the integers are those of the folded weights."""
    model = ready(nets.UpAndDown(groups), backend=backend)
    export = qat.export(model, tmp_path / "q.onnx", X)
    assert export.summary["int8"] == 3 and export.difference < 0.02
    stored, scale = folded_weights(tmp_path / "q.onnx", "ConvTranspose")
    weight = nets.float_weights(model.up).numpy()  # [in, out / groups, 2, 2]
    parts = zip(np.split(weight, groups), np.split(norm_factor(model).numpy(), groups), strict=True)
    folded = np.concatenate([part * f.reshape(1, -1, 1, 1) for part, f in parts])
    assert scale == pytest.approx(np.abs(folded).max() / 127, rel=1e-5)
    np.testing.assert_allclose(stored, folded, rtol=1e-5, atol=1e-7)


def norm_factor(model: nn.Module) -> torch.Tensor:
    return (model.bn.weight / (model.bn.running_var + model.bn.eps).sqrt()).detach()


def test_transposed_convolution_trains_with_exported_integers() -> None:
    """The factors of the normalization differ widely, and one is zero."""
    model = ready(nets.UpAndDown())
    with torch.no_grad():
        model.bn.weight[:3] = torch.tensor([4.0, 0.0, -2.0])
        inputs = torch.relu(model.eval().down(X))
        output = model.up(inputs)
    factor = norm_factor(model).reshape(1, -1, 1, 1)
    folded = nets.float_weights(model.up) * factor
    scale = folded.abs().max() / 127
    quantized = nets.evaluate(model.get_submodule("up._input_quantizer"), inputs)
    expected = nn.functional.conv_transpose2d(quantized, (folded / scale).round() * scale, stride=2)
    torch.testing.assert_close(output * factor, expected, rtol=1e-4, atol=1e-4)
    model.train()
    model(X).square().mean().backward()
    assert dict(model.named_parameters())["up.weight"].grad is not None


def test_copy_with_folded_normalization_quantizes_weights_as_they_are() -> None:
    model = ready(nets.UpAndDown())
    copied = copy.deepcopy(model)
    copied.bn = nn.Identity()  # as if it were folded into the convolution
    assert following_norm_factor(copied.up) is None and following_norm_factor(model.up) is not None
    assert copied.up.qdq_norm[0] is copied and set(copied.state_dict()) < set(model.state_dict())


@pytest.mark.parametrize("net", [nets.Shared, nets.Skips, nets.Heads])
def test_exported_network_computes_the_same(net: type[nn.Module], tmp_path: Path) -> None:
    export = qat.export(ready(net()), tmp_path / "q.onnx", X)
    assert export.difference < 0.02 and export.summary["float"] == 0


@pytest.mark.parametrize("target", ["trt8.5", "trt10", "trt11"])
def test_layers_that_run_twice_get_their_own_weights(target: str, tmp_path: Path) -> None:
    """If two products shared a DQ of weights, one product would have no DQ."""
    model = nets.ready(nets.Again(), X, target=target)
    prediction = qat.export(model, tmp_path / "q.onnx", X).prediction
    precisions = [str(c.precision) for c in prediction.convolutions if c.weights != "computed"]
    assert set(precisions) == {"INT8"}
    assert len(precisions) >= 7  # 1 convolution, 2 attentions of 2 or more, 2 Linears
    assert not {"W-SHARED", "W-NO-DQ"} & prediction.findings_by_code().keys()


@dataclass
class Exported:
    model: nn.Module
    before: dict[str, torch.Tensor]
    path: Path

    @property
    def graph(self) -> onnx.GraphProto:
        return onnx.load(self.path).graph


@pytest.fixture(scope="module")
def resnet18(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    sample, path = torch.randn(1, 3, 64, 64), tmp_path_factory.mktemp("export") / "q.onnx"
    model = ready(ResNet18(10, nets.WIDTH), sample).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    names = {"input_names": ["images"], "output_names": ["scores"]}
    qat.export(model, path, sample, dynamic_batch=True, **names)
    return Exported(model, before, path)


@pytest.fixture
def graph(resnet18: Exported) -> onnx.GraphProto:
    return resnet18.graph


def test_names_of_exported_model(graph: onnx.GraphProto) -> None:
    assert [[v.name for v in values] for values in (graph.input, graph.output)] == [
        ["images"],
        ["scores"],
    ]
    names = {n.name for n in graph.node}
    assert len(names) == len(graph.node)
    assert {
        "/layer1/layer1.0/conv1/Conv",
        "/layer1/layer1.0/conv2/_input_quantizer/QuantizeLinear",
    } <= names


def test_scales_of_exported_model_are_constants(graph: onnx.GraphProto) -> None:
    constants = {t.name for t in graph.initializer}
    pairs = [n for n in graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert all({n.input[1], n.input[2]} <= constants for n in pairs)
    assert not {"Constant", "Identity", "Cast"} & {n.op_type for n in graph.node}


def test_consumers_of_a_tensor_share_exported_pair(graph: onnx.GraphProto) -> None:
    """Both convolutions that consume the input of ``layer2.0`` share a pair.

    The skip is another tensor.
    """
    constants = {t.name for t in graph.initializer}
    quantizers = [n.input[0] for n in graph.node if n.op_type == "QuantizeLinear"]
    activations = [tensor for tensor in quantizers if tensor not in constants]
    assert len(activations) == len(set(activations))


def test_exported_model_takes_any_batch(resnet18: Exported) -> None:
    assert run_file(resnet18.path, torch.randn(3, 3, 64, 64)).shape == (3, 10)


def test_export_leaves_network_in_training(resnet18: Exported) -> None:
    after = resnet18.model.state_dict()
    assert resnet18.model.training and resnet18.before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in resnet18.before.items())
    resnet18.model(torch.randn(2, 3, 64, 64)).sum().backward()


@pytest.mark.parametrize(
    ("network", "options", "code", "attributes"),
    [
        pytest.param(nets.conv, {}, "not-prepared", {"parameter": "model"}, id="float"),
        pytest.param(
            lambda: nets.prepared(nets.Shared(), X),
            {},
            "not-calibrated",
            {"node": "first._input_quantizer"},
            id="not calibrated",
        ),
        pytest.param(
            lambda: nets.ready(nets.Shared(), X),
            {"opset": 11},
            "opset-too-old",
            {"parameter": "opset"},
            id="opset",
        ),
        pytest.param(
            lambda: nets.ready(nets.Shared(), X),
            {"high_precision": "fp16"},
            "option-conflict",
            {"parameter": "high_precision"},
            id="high precision of INT8",
        ),
        *(
            pytest.param(
                lambda: nets.ready(nets.Shared(), X),
                {"tolerance": tolerance},
                "out-of-range",
                {"parameter": "tolerance"},
                id=f"tolerance {tolerance}",
            )
            for tolerance in (float("nan"), -1.0)
        ),
    ],
)
def test_export_is_refused(
    network: Callable[[], nn.Module],
    options: dict[str, Any],
    code: str,
    attributes: dict[str, str],
    tmp_path: Path,
) -> None:
    with pytest.raises(QdqtoolError, check=has(code, **attributes)):
        qat.export(network(), tmp_path / "q.onnx", X, **options)
    assert not list(tmp_path.iterdir())


def test_export_into_missing_folder_is_refused(tmp_path: Path) -> None:
    model = nets.ready(nets.Shared(), X)
    with pytest.raises(QdqtoolError, match="does not exist"):
        qat.export(model, tmp_path / "none" / "q.onnx", X)
    assert not list(tmp_path.iterdir())


class Doubling(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2 if torch.onnx.is_in_onnx_export() else x)


def test_export_with_different_results_is_not_written(tmp_path: Path) -> None:
    model, path = ready(Doubling(nets.conv(), nn.ReLU(), nets.conv())), tmp_path / "q.onnx"
    with pytest.raises(ModelError, check=has("different-results", path=str(path))):
        qat.export(model, path, X)
    assert not list(tmp_path.iterdir())
    with pytest.warns(UserWarning, match="written") as warnings:
        qat.export(model, path, X, tolerance=10.0)
    assert warnings[0].filename == __file__, "the warning names the line of the caller"
    assert [p.name for p in tmp_path.iterdir()] == ["q.onnx"]


class Keeping(nn.Module):
    """Network that stores its last result in an object that is not a module, as in RAFT."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nets.conv(), nets.conv()
        self.kept = SimpleNamespace(pyramid=[])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.one(x))
        self.kept.pyramid = [y]
        return self.two(y)


# Graphs are simplified after torch's export --------------------------------------------------------

SCALE = {"s": np.float32(0.05), "z": np.int8(0)}
WEIGHT = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
VALUES = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)


def parse(body: str, *outputs: str, **constants: Any) -> onnx.ModelProto:
    signature = ", ".join(f"float[2, N] {name}" for name in outputs)
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17, "qdqtool.qat": 1]>
        g (float[2, 4] x) => ({signature}) {{ {body} }}""")
    tensors = (onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items())
    model.graph.initializer.extend(tensors)
    return model


def pair(tensor: str, name: str, parameters: str = "s, z", attributes: str = "") -> str:
    return f"""
        {name}_q = QuantizeLinear {attributes} ({tensor}, {parameters})
        {name}_dq = DequantizeLinear {attributes} ({name}_q, {parameters})"""


def choice(captured: str) -> str:
    """Return the text of an If whose branches double a tensor of the graph, as in torchvision."""
    branches = ", ".join(
        f"{side}_branch = {side} () => (float[2, N] {side}_{captured}) "
        f"{{ {side}_{captured} = Add ({captured}, {captured}) }}"
        for side in ("then", "else")
    )
    return f"if_{captured} = If (yes) <{branches}>"


def clean_up_and_compare(
    model: onnx.ModelProto, clean_up: Callable[[Model], Model]
) -> list[onnx.NodeProto]:
    result = clean_up(Model(model).copy()).proto
    onnx.checker.check_model(result)
    for before, after in zip(*(run(m, {"x": VALUES}) for m in (model, result)), strict=True):
        np.testing.assert_array_equal(before, after)
    return list(result.graph.node)


@pytest.mark.parametrize(
    ("clean_up", "text", "constants"),
    [
        (
            fold_constants,
            f"""c = Constant <value = float {{0.0}}> ()
            z = Cast <to = 3> (c)
            w2 = Identity (w)
            wt = Transpose <perm = [1, 0]> (w2)
            {pair("x", "x")}
            y = MatMul (x_dq, wt)""",
            {"w": WEIGHT, "s": SCALE["s"]},
        ),
        (
            transpose_weights,
            f"""{pair("w", "w", "ws, wz", "<axis = 0>")}
            wt = Transpose <perm = [1, 0]> (w_dq)
            y = MatMul (x, wt)""",
            {
                "w": WEIGHT,
                "ws": (np.abs(WEIGHT).max(1) / 127).astype(np.float32),
                "wz": np.zeros(3, np.int8),
            },
        ),
    ],
)
def test_nodes_before_weights_are_folded_and_pairs_stay(
    clean_up: Any, text: str, constants: dict[str, np.ndarray]
) -> None:
    nodes = clean_up_and_compare(parse(text, "y", **constants), clean_up)
    assert [n.op_type for n in nodes] == ["QuantizeLinear", "DequantizeLinear", "MatMul"]


@pytest.mark.parametrize(
    ("scale", "outputs", "quantizers", "dequantizers"),
    [("s", ["y", "v"], 1, 1), ("other", ["y", "v"], 2, 2), ("s", ["a_dq", "b_dq"], 2, 2)],
    ids=["equal scales", "different scales", "DQs are outputs"],
)
def test_pairs_of_equal_scale_are_merged(
    scale: str, outputs: list[str], quantizers: int, dequantizers: int
) -> None:
    nodes = f"""{pair("x", "a")} {pair("x", "b", f"{scale}, z")}
        y = Relu (a_dq)
        v = Neg (b_dq)"""
    model = parse(nodes, *outputs, **SCALE, other=np.float32(0.1))
    ops = Counter(n.op_type for n in clean_up_and_compare(model, merge_pairs))
    assert (ops["QuantizeLinear"], ops["DequantizeLinear"]) == (quantizers, dequantizers)


def test_matrix_products_keep_their_own_dq() -> None:
    nodes = f"""{"".join(pair("x", name) for name in "abcd")}
        one = MatMul (a_dq, w)
        two = Relu (b_dq)
        three = Gemm (c_dq, w)
        four = Neg (d_dq)"""
    model = parse(nodes, "one", "two", "three", "four", **SCALE, w=WEIGHT.T.copy())
    merged = clean_up_and_compare(model, merge_pairs)
    ops = Counter(n.op_type for n in merged)
    assert (ops["QuantizeLinear"], ops["DequantizeLinear"]) == (1, 3)
    inputs = {n.output[0]: n.input[0] for n in merged}
    assert inputs["two"] == inputs["four"]
    assert len({inputs[n] for n in ("one", "two", "three")}) == 3


@pytest.mark.parametrize(
    "clean_up",
    [fold_constants, merge_pairs, lambda model: merge_pairs(fold_constants(model))],
    ids=["fold_constants", "merge_pairs", "both"],
)
def test_cleanup_keeps_tensors_of_subgraphs(clean_up: Callable[[Model], Model]) -> None:
    nodes = f"""c = Constant <value = float[4] {{1.0, 2.0, 3.0, 4.0}}> ()
        {pair("x", "a")} {pair("x", "b")}
        {choice("c")}
        {choice("b_dq")}
        sum = Add (a_dq, c)
        more = Add (sum, if_c)
        y = Add (more, if_b_dq)"""
    clean_up_and_compare(parse(nodes, "y", **SCALE, yes=np.array(True)), clean_up)


def test_remove_marks_in_subgraphs() -> None:
    nodes = f"""marked = qdqtool.qat.Mark <key = "0"> (x)
        {choice("marked")}
        y = Add (if_marked, marked)"""
    model = parse(nodes, "y", yes=np.array(True))
    remove_marks(model, {"marked": "x"})
    onnx.checker.check_model(model)
    np.testing.assert_array_equal(run(model, {"x": VALUES})[0], 3 * VALUES)


# INT8 convolutions with INT8 output (8, 12 + 7, 12 + 8) and conversions of the published engines.
PUBLISHED = {"convolutions": (8, 10), "residual": (19, 3), "pool": (20, 1)}


IMAGE = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@functools.cache
def exported(placement: str, opset: int) -> onnx.ModelProto:
    """Return a ResNet-18 with quantizers placed by hand; tests must not change it."""
    model = nets.handmade(placement)
    nets.max_calibrate(model, IMAGE)
    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    try:
        return export_proto(model, NetworkCall((IMAGE,)), opset)
    finally:
        quant_nn.TensorQuantizer.use_fb_fake_quant = False


@pytest.mark.parametrize(
    ("placement", "opset"), slow_after(1, [("convolutions", 17), ("pool", 17), ("residual", 13)])
)
def test_resnet18_is_predicted_as_published_engines(placement: str, opset: int) -> None:
    summary = qdqtool.predict(exported(placement, opset), target="trt8.5").summary()
    int8_to_int8, conversions = PUBLISHED[placement]
    keys = ("convolutions", "int8", "int8_to_int8", "float", "conversions")
    assert [summary[key] for key in keys] == [21, 21, int8_to_int8, 0, conversions]


def test_export_of_modelopt_is_predicted() -> None:
    quantization = pytest.importorskip(
        "modelopt.torch.quantization", reason="nvidia-modelopt is not installed"
    )
    model = nets.randomise(resnet.ResNet18(10, nets.WIDTH))
    quantization.quantize(
        model.eval(), quantization.INT8_DEFAULT_CFG, lambda network: network(IMAGE)
    )
    proto = export_proto(model, NetworkCall((IMAGE,)), 17)
    assert "BatchNormalization" in {n.op_type for n in proto.graph.node}  # not folded
    prediction = qdqtool.predict(proto, "trt8.5")
    summary = prediction.summary()
    assert (summary["convolutions"], summary["int8"], summary["float"]) == (21, 21, 0)
    # Each block's first convolution, and the stem, whose MaxPool is quantized; the skips are float.
    outputs = {c.name: c.int8_in_int8_out for c in prediction.convolutions}
    assert {n for n, both in outputs.items() if both} == {"/conv1/Conv"} | {
        f"/layer{stage}/layer{stage}.{block}/conv1/Conv"
        for stage in (1, 2, 3, 4)
        for block in (0, 1)
    }
    with pytest.raises(AssertionError, match="SKIP-FLOAT"):
        assert_int8(proto, "trt8.5", max_conversions=1)


def test_fp8_export_has_ranges_of_training(tmp_path: Path) -> None:
    """Convolutions with few channels are float. The others have scales of amax over 448."""
    sample = torch.randn(2, 3, 64, 64)
    model = ready(ResNet18(10, 32), sample)
    int8 = qat.export(model, tmp_path / "int8.onnx", sample)
    options: Any = {"precision": "fp8", "high_precision": "fp32"}
    fp8 = qat.export(model, tmp_path / "fp8.onnx", sample, **options)
    proto = onnx.load(tmp_path / "fp8.onnx")
    assert proto.opset_import[0].version >= 19
    counts = fp8.summary
    # The stem has 3 input channels, the last product 10 columns.
    assert (counts["int8"], counts["fp8"]) == (0, int8.summary["int8"] - 2)
    assert int8.check.text() in fp8.check.text() != int8.check.text()
    assert f"in the FP8 file, the outputs differ by {fp8.fp8_difference:.1e}" in fp8.check.text()
    scales = [
        {v.name: onnx.numpy_helper.to_array(v) for v in m.graph.initializer}
        for m in (onnx.load(tmp_path / "int8.onnx"), proto)
    ]
    for name in [n.input[1] for n in proto.graph.node if n.op_type == "QuantizeLinear"]:
        expected = scales[0][name.removesuffix("/fp8")] * 127 / 448
        np.testing.assert_allclose(scales[1][name], expected, rtol=1e-6)


@pytest.mark.parametrize(("high_precision", "type"), [(None, np.float16), ("fp32", np.float32)])
def test_fp8_export_has_an_fp16_remainder(
    tmp_path: Path, high_precision: str | None, type: Any
) -> None:
    sample = torch.randn(2, 3, 64, 64)
    model = ready(ResNet18(10, 32), sample)
    options: Any = {"precision": "fp8", "high_precision": high_precision}
    result = qat.export(model, tmp_path / "fp8.onnx", sample, **options)
    proto = onnx.load(tmp_path / "fp8.onnx")
    onnx.checker.check_model(proto, full_check=True)
    weights = [onnx.numpy_helper.to_array(v) for v in proto.graph.initializer if len(v.dims) > 1]
    assert {w.dtype for w in weights if w.dtype.kind == "f"} == {np.dtype(type)}
    ends = [*proto.graph.input, *proto.graph.output]
    assert {v.type.tensor_type.elem_type for v in ends} == {onnx.TensorProto.FLOAT}
    assert result.fp8_difference is not None and result.fp8_difference < 0.3


def test_fp8_export_keeps_large_tensors_in_fp32(tmp_path: Path) -> None:
    """The tensors exceed 65504, the largest FP16 value."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(self.first(x) * 1000.0 * 1000.0 * 0.001 * 0.001)

    sample = torch.rand(1, 32, 8, 8)
    qat.export(ready(Large(), sample), tmp_path / "fp8.onnx", sample, precision="fp8")
    proto = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "fp8.onnx"))
    types = {v.name: v.type.tensor_type.elem_type for v in proto.graph.value_info}
    products = [types[n.output[0]] for n in proto.graph.node if n.op_type == "Mul"]
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    assert products == [half, single, single, half]
