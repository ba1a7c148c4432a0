import pytest

from qdqtool.trt.passes.conv_relu_fusion import ConvReluFusion, DeconvReluFusion
from qdqtool.trt.passes.elt_relu_fusion import EltReluFusion
from qdqtool.trt.passes.scale_activation_fusion import ScaleActivationFusion
from qdqtool.trt.passes.scale_scale_fusion import ScaleScaleFusion
from qdqtool.trt.passes.shuffle_shuffle_fusion import ShuffleShuffleFusion
from qdqtool.trt.pipeline import Pass
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, run_pass


def conv(g: Graph) -> str:
    return g.conv(g.input(1, 3, 8, 8), "c", scale=None, weights="float")


def deconv(g: Graph) -> str:
    options = {"op": "ConvTranspose", "weights": "float", "scale": None}
    return g.conv(g.input(1, 8, 8, 8), "c", k=2, stride=2, **options)  # type: ignore[arg-type]


def add(g: Graph) -> str:
    return g.add(g.input(1, 4), g.input(1, 4, name="y"), "a")


def batchnorm(g: Graph) -> str:
    return g.bn(g.input(1, 3, 4, 4), "bn")


def scales(g: Graph, count: int) -> str:
    x = g.input(1, 8, 4, 4)
    for i in range(count):
        x = g.op("Mul", [x, g.const(f"k{i}", g.random.normal(0, 1, (1, 8, 1, 1)))], f"m{i}")
    return x


def shuffles(g: Graph) -> str:
    return g.reshape(g.reshape(g.input(1, 4, 4), "a", 1, 16), "b", 4, 4)


# Each row has the fused layers, a pair for each line. Without a line, the first layer stays alone.
@pytest.mark.parametrize(
    ("pass_type", "build", "fused", "layer"),
    [
        pytest.param(
            ConvReluFusion, lambda g: [g.relu(conv(g), "r")], [("c", "r")], "c + r", id="conv"
        ),
        pytest.param(
            ConvReluFusion,
            lambda g: [g.relu(g.conv(g.input(1, 3, 8, 8), "c"), "r")],
            [("c", "r")],
            "c + r",
            id="conv, quantized",
        ),
        # centerpoint-a100-trt823-fp16, line 1669.
        pytest.param(
            DeconvReluFusion, lambda g: [g.relu(deconv(g), "r")], [("c", "r")], "c + r", id="deconv"
        ),
        pytest.param(
            ConvReluFusion, lambda g: [g.relu(deconv(g), "r")], [], "c", id="deconv in another pass"
        ),
        pytest.param(
            ConvReluFusion,
            lambda g: [g.relu(g.bn(conv(g), "bn"), "r")],
            [],
            "c",
            id="conv, batchnorm between",
        ),
        pytest.param(
            ConvReluFusion, lambda g: [g.op("LeakyRelu", conv(g), "r")], [], "c", id="conv, leaky"
        ),
        pytest.param(
            ConvReluFusion,
            lambda g: [g.relu(conv(g), "r"), g.op("Neg", "c:0", "n")],
            [],
            "c",
            id="conv, second consumer",
        ),
        pytest.param(
            ConvReluFusion,
            lambda g: [g.relu(conv(g), "r"), "c:0"],
            [],
            "c",
            id="conv, network output",
        ),
        pytest.param(
            EltReluFusion, lambda g: [g.relu(add(g), "r")], [("a", "r")], "a + r", id="add"
        ),
        pytest.param(
            EltReluFusion,
            lambda g: [g.op("LeakyRelu", add(g), "l")],
            [],
            "a",
            id="add, other activation",
        ),
        pytest.param(
            EltReluFusion, lambda g: [g.relu(add(g), "r"), "a:0"], [], "a", id="add, network output"
        ),
        pytest.param(
            EltReluFusion,
            lambda g: [g.relu(add(g), "r"), g.op("Neg", "a:0", "n")],
            [],
            "a",
            id="add, second consumer",
        ),
        pytest.param(
            ScaleActivationFusion,
            lambda g: [g.relu(batchnorm(g), "r")],
            [("bn", "r")],
            "bn + r",
            id="batchnorm",
        ),
        pytest.param(
            ScaleActivationFusion,
            lambda g: [g.relu(g.add(batchnorm(g), "x", "add"), "r")],
            [],
            "bn",
            id="batchnorm, Relu after an Add",
        ),
        pytest.param(
            ScaleActivationFusion,
            lambda g: [g.relu(batchnorm(g), "r2"), g.relu(g.add("bn:0", "x", "add"), "r")],
            [],
            "bn",
            id="batchnorm, second consumer",
        ),
        *(
            pytest.param(
                ScaleActivationFusion,
                lambda g, op=op: [g.op(op, batchnorm(g), "r")],
                [],
                "bn",
                id=f"batchnorm, {op}",
            )
            for op in ("LeakyRelu", "Sigmoid", "Neg")
        ),
        pytest.param(
            ScaleScaleFusion,
            lambda g: [scales(g, 2)],
            [("k0 + m0", "k1 + m1")],
            "k0 + m0 + k1 + m1",
            id="two scales",
        ),
        pytest.param(
            ScaleScaleFusion,
            lambda g: [scales(g, 3)],
            [("k0 + m0", "k1 + m1"), ("k0 + m0 + k1 + m1", "k2 + m2")],
            "k0 + m0 + k1 + m1 + k2 + m2",
            id="three scales",
        ),
        pytest.param(
            ScaleScaleFusion,
            lambda g: [scales(g, 2), "m0:0"],
            [],
            "k0 + m0",
            id="scales, second consumer",
        ),
        pytest.param(
            ScaleScaleFusion,
            lambda g: [g.bn(g.relu(g.bn(g.input(1, 8, 4, 4), "bn"), "r"), "bn2")],
            [],
            "bn2",
            id="scales, Relu between",
        ),
        pytest.param(
            ShuffleShuffleFusion,
            lambda g: [
                g.reshape(g.op("Transpose", g.input(1, 4, 4), "t", perm=[0, 2, 1]), "r", 1, 16)
            ],
            [("t", "r")],
            "t + r",
            id="two shuffles",
        ),
        pytest.param(
            ShuffleShuffleFusion,
            lambda g: [g.op("Transpose", shuffles(g), "c", perm=[1, 0])],
            [("a", "b"), ("a + b", "c")],
            "a + b + c",
            id="three shuffles",
        ),
        pytest.param(
            ShuffleShuffleFusion,
            lambda g: [shuffles(g), g.relu("a:0", "r")],
            [],
            "a",
            id="shuffles, second consumer",
        ),
        pytest.param(
            ShuffleShuffleFusion,
            lambda g: [shuffles(g), "a:0"],
            [],
            "a",
            id="shuffles, network output",
        ),
    ],
)
def test_layer_is_fused_with_its_only_consumer(
    g: Graph, pass_type: type[Pass], build: Build, fused: list[tuple[str, str]], layer: str
) -> None:
    result = run_pass(g.model(*build(g)), pass_type)
    assert result.lines[::2] == [("Running", first) for first, _ in fused]
    assert result.lines[1::2] == [("Fusing", *names) for names in fused]
    assert result.has_layer(layer)
