import pytest

from qdqtool.trt.passes.conv_eltwise_sum_fusion import ConvEltwiseSumFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


@pytest.fixture
def x(g: Graph) -> str:
    return g.op("Softmax", g.input(1, 8, 8, 8), "before")


@pytest.mark.parametrize("conv_first", [False, True])
def test_float_residual_add_is_fused(g: Graph, x: str, conv_first: bool) -> None:
    conv = g.bn(g.conv(x, "Conv"), "bn")
    out = g.relu(g.add(conv, x, "Add") if conv_first else g.add(x, conv, "Add"), "Relu")
    result = run_pass(g.model(g.op("Tanh", g.pair(out, "p"), "t")), ConvEltwiseSumFusion)
    name = "Conv.weight + Conv.w.Q + Conv"
    assert result.lines == [("Running", name), ("Fusing", name, "Add + Relu")]
    layer = result.layer(f"{name} + Add + Relu")
    assert layer.residual.source == "before:0" and layer.int8 and not layer.int8_out
    assert result.has_layer("p.Q")  # remains a conversion although it is the only consumer


def test_dq_of_residual_remains(g: Graph, x: str) -> None:
    # resnet18-a100-qat-residual, last block: DequantizeLinear_291 remains.
    out = g.add(g.pair(x, "skip", 0.2), g.conv(x, "Conv"), "Add")
    result = run_pass(g.model(g.op("Tanh", out, "t")), ConvEltwiseSumFusion)
    assert [r[0] for r in result.lines] == ["Running", "Fusing"] and result.has_layer("skip.DQ")


def test_downsample_convolution_fuses_add(g: Graph, x: str) -> None:
    # resnet18-a100-qat: layer2.0.downsample.0 ... + Add_97 + Relu_98. conv2 writes FP16.
    out = g.relu(
        g.add(g.bn(g.conv(x, "conv2"), "bn2"), g.bn(g.conv(x, "down", k=1), "bnd"), "Add_97"),
        "Relu_98",
    )
    assert run_pass(g.model(g.op("Tanh", out, "t")), ConvEltwiseSumFusion).lines == [
        ("Running", "down.weight + down.w.Q + down"),
        ("Fusing", "down.weight + down.w.Q + down", "Add_97 + Relu_98"),
    ]


@pytest.mark.parametrize(
    "case", ["second-consumer", "constant", "broadcast", "relu-between", "product", "int8-output"]
)
def test_add_is_not_fused(g: Graph, x: str, case: str) -> None:
    conv = g.conv(x, "Conv")
    other = {
        "constant": lambda: g.const("k", g.random.normal(0, 1, (1, 8, 8, 8))),
        "broadcast": lambda: g.op("Softmax", g.input(1, 8, 1, 1, name="y"), "small"),
    }.get(case, lambda: x)()
    left = (
        g.relu(conv, "r")
        if case == "relu-between"
        else g.pair(conv, "p")
        if case == "int8-output"
        else conv
    )
    out = g.op("Mul" if case == "product" else "Add", [left, other], "Add")
    outputs = [g.op("Tanh", out, "t"), *([conv] if case == "second-consumer" else [])]
    assert run_pass(g.model(*outputs), ConvEltwiseSumFusion).lines == []


def two_convolutions(g: Graph) -> str:
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    return g.op("Tanh", g.add(g.conv(x, "conv3"), g.conv(x, "down", k=1), "Add"), "t")


GRAPHS = {"ConvEltwiseSumFusion/two-convolutions-first": (two_convolutions, "trt10")}


@pytest.mark.parametrize(("target", "fusing"), [("trt8.5", "down"), ("trt10", "conv3")])
def test_one_of_two_convolutions_fuses_the_sum(g: Graph, target: str, fusing: str) -> None:
    # 10.16.2: unet-resnet50-orinnano-trt10162, conv3 in all four blocks.
    result = run_pass(g.model(two_convolutions(g)), ConvEltwiseSumFusion, target)
    name = f"{fusing}.weight + {fusing}.w.Q + {fusing}"
    assert result.lines == [("Running", name), ("Fusing", name, "Add")]
