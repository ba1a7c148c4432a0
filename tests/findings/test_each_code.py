from collections.abc import Callable

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.findings import codes
from qdqtool.prediction import check_activations
from tests.findings.graphs import GRAPHS, attention, ones, split, stem_before_pool, weighted
from tests.findings.lint.test_bfloat16 import quantized
from tests.findings.test_producers import on_a_wrong_axis
from tests.insertion.test_transformers import add_pairs
from tests.insertion.transformers import vit
from tests.timing.test_gpus import network as of_two
from tests.trt.builder import Graph


def after_pair(g: Graph, make: Callable[[str], str]) -> onnx.ModelProto:
    return g.model(make(g.pair(g.input(1, 16, 16, 16), "p")))


def after_convolution(g: Graph, make: Callable[[str], str]) -> onnx.ModelProto:
    return g.model(g.conv(make(g.conv(g.input(1, 16, 16, 16), "c0", 16)), "next", 16, scale=0.05))


def large_kernel(g: Graph) -> onnx.ModelProto:
    x, w = g.pair(g.input(1, 3, 64, 64), "in"), g.weights("w", (16, 3, 32, 32), "qdq")
    return g.model(g.op("Conv", [x, w], "c", kernel_shape=[32, 32], strides=[32, 32]))


def yolo_head(g: Graph) -> onnx.ModelProto:
    stem = g.relu(g.conv(g.input(1, 16, 8, 8), "stem", 16), "r")
    bins = g.op("Softmax", g.conv(stem, "box", 16, k=1), "softmax", axis=1)
    weights = g.const("bins", np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1))
    return g.model(g.conv(stem, "score", 16, k=1), g.op("Conv", [bins, weights], "dfl"))


def output_weights(g: Graph) -> onnx.ModelProto:
    w = g.pair(ones(g), "wq")
    return g.model(weighted(g, w), w)


def with_data(scale: float, largest: float) -> qdqtool.Prediction:
    g = Graph()
    model = g.model(g.conv(g.input(1, 16, 8, 8), "c", 16, scale=scale))
    values = np.random.default_rng(0).standard_normal((1, 16, 8, 8)).astype(np.float32)
    values[0, 0, 0, 0] = largest
    prediction = qdqtool.predict(model, "trt8.5")
    check_activations(model, prediction, [{"x": values}])
    return prediction


def fp8(**options: int) -> onnx.ModelProto:
    g = Graph(opset=19, fp8=True)
    return g.model(g.conv(g.input(1, 32, 8, 8), "c", 32, **options))


def grouped(g: Graph, channels: int) -> onnx.ModelProto:
    return g.model(
        g.conv(g.op("Neg", g.input(1, 2 * channels, 8, 8), "n"), "c", 2 * channels, groups=2)
    )


def on_gpu(sm: str) -> qdqtool.Prediction:
    g = Graph()
    x = g.silu(g.conv(g.input(1, 32, 16, 16), "a", 32, groups=32), "s")
    return qdqtool.predict(
        g.model(g.conv(x, "b", 32, scale=None, weights="float")), "trt8.5", sm=sm
    )


def placeholders(g: Graph, first: float = 0.1) -> onnx.ModelProto:
    x = g.input(1, 16, 16, 16)
    for number in range(4):
        data = g.pair(x, f"p{number}", first if number == 0 else 0.1)
        weights = g.const(f"w{number}", g.random.normal(0, 0.3, (16, 16, 1, 1)))
        inputs = [data, g.pair(weights, f"w{number}.w", 0.1)]
        x = g.relu(g.op("Conv", inputs, f"c{number}", kernel_shape=[1, 1]), f"r{number}")
    return g.model(x)


NETWORKS: dict[str, Callable[[Graph], onnx.ModelProto]] = {
    "ACT-INNER-Q": lambda g: after_convolution(g, lambda x: g.relu(g.pair(x, "inner"), "r")),
    "CONST-FP16": lambda g: after_convolution(
        g, lambda x: g.op("Add", [x, g.const("k", np.float32(-1e9))], "add")
    ),
    "EINSUM-FLOAT": lambda g: after_pair(
        g,
        lambda x: g.op("Einsum", [x, g.pair(ones(g, 16, 16), "wq")], "e", equation="bchw,wv->bchv"),
    ),
    "HEAD-SCORE": yolo_head,
    "SCALE-UNIFORM": placeholders,
    "KERNEL-LARGE": large_kernel,
    "POOL-MIXED": lambda g: after_convolution(
        g,
        lambda y: g.add(
            g.conv(x := g.pool(g.relu(y, "r0"), "pool"), "c1", 16, scale=0.03), x, "sum"
        ),
    ),
    "NORM-PIECES": lambda _: add_pairs(vit(pieces=True), "b0.res1"),
    "RESIDUAL-STREAM": lambda _: add_pairs(vit(pieces=True), "b0.res1"),
    "OPSET-AXIS": lambda _: on_a_wrong_axis("OPSET-AXIS"),
    "SCALE-RANK": lambda _: on_a_wrong_axis("SCALE-RANK"),
    "QOPERATOR": lambda g: after_pair(
        g, lambda x: g.op("DequantizeLinear", g.ops("DynamicQuantizeLinear", [x], "d", 3), "dq")
    ),
    "SILU-NO-Q-AFTER": lambda g: after_convolution(
        g, lambda x: g.op("Softmax", g.silu(x, "s"), "soft", axis=1)
    ),
    "SPLIT-SCALE": lambda _: split(0.02, 0.05),
    "W-Q-OUTPUT": output_weights,
}


@pytest.mark.parametrize(("code", "make"), NETWORKS.items())
def test_network_has_finding(g: Graph, code: str, make: Callable[[Graph], onnx.ModelProto]) -> None:
    prediction = qdqtool.predict(make(g), "trt8.5")
    assert code in prediction.findings_by_code()
    for finding in prediction.findings:
        entry = codes.get(finding.code)
        assert finding.severity in (entry.severity_on("trt8.5"), *entry.other_severities), (
            entry.code
        )


PREDICTIONS: dict[str, Callable[[], qdqtool.Prediction]] = {
    "ATT-HEAD": lambda: qdqtool.predict(attention(64), "trt10"),
    "GROUP-KERNELS": lambda: qdqtool.predict(grouped(Graph(), 24), "trt10"),
    "STEM-POOL": lambda: qdqtool.predict(GRAPHS["stem-before-pool"](), "trt10"),
    "FLOAT-MIXED": lambda: qdqtool.predict(GRAPHS["float-types"](), "trt11"),
    "FLOAT-SM75": lambda: qdqtool.predict(of_two(), "rtx1.7", sm="75"),
    "ACT-SCALE": lambda: with_data(1.0, 3.0),
    "ACT-OUTLIER": lambda: with_data(3.0, 381.0),
    "FP8-GPU": lambda: qdqtool.predict(fp8(), "trt10", sm="8.6"),
    "FP8-SLOW": lambda: qdqtool.predict(fp8(groups=32), "trt10"),
    "GPU-DP4A": lambda: on_gpu("6.1"),
    "GPU-FUSION": lambda: on_gpu("6.1"),
    "GPU-NO-INT8": lambda: on_gpu("6.0"),
    "GPU-NO-FP16": lambda: on_gpu("6.1"),
    "GPU-NO-BF16": lambda: qdqtool.predict(quantized(), "trt10", sm="7.5"),
    "GPU-VERSION": lambda: on_gpu("12.0"),
    "GPU-JETSON": lambda: on_gpu("AGX Orin"),
    "GPU-KERNELS": lambda: on_gpu("GTX 1650"),
}


@pytest.mark.parametrize(("code", "make"), PREDICTIONS.items())
def test_target_data_or_gpu_has_finding(code: str, make: Callable[[], qdqtool.Prediction]) -> None:
    assert code in make().findings_by_code()


@pytest.mark.parametrize(
    ("code", "make"),
    [
        ("ATT-HEAD", lambda _: attention(32)),
        ("GROUP-KERNELS", lambda g: grouped(g, 16)),
        ("SCALE-UNIFORM", lambda g: placeholders(g, first=0.2)),
        ("STEM-POOL", lambda g: stem_before_pool(g, is_between=False)),
    ],
)
def test_similar_network_has_no_finding(
    g: Graph, code: str, make: Callable[[Graph], onnx.ModelProto]
) -> None:
    assert code not in qdqtool.predict(make(g), "trt10").findings_by_code()
