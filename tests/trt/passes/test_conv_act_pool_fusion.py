import onnx
import pytest

from qdqtool.trt.passes.conv_act_pool_fusion import ConvActPoolFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


def stem(
    g: Graph,
    channels: int = 3,
    stride: int = 2,
    pool: int = 3,
    pool_stride: int = 2,
    quantized: bool = True,
) -> onnx.ModelProto:
    x = g.relu(g.bn(g.conv(g.input(1, channels, 32, 32), "Conv_9", k=7, stride=stride), "bn"), "r")
    x = g.pool(x, "MaxPool_12", k=pool, stride=pool_stride)
    return g.model(g.op("Tanh", g.pair(x, "p") if quantized else x, "end"))


def test_max_pool_is_fused_into_stem(g: Graph) -> None:
    result = run_pass(stem(g), ConvActPoolFusion)
    name = "Conv_9.weight + Conv_9.w.Q + Conv_9"
    assert result.lines == [("Running", name), ("Fusing", name, "MaxPool_12")]
    assert result.layer(f"{name} + MaxPool_12").int8_out


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({}, "trt8.0"),  # centernet-resnet34-qat-trt80 keeps MaxPool_12 apart
        ({"quantized": False}, "trt8.5"),  # resnet18-a100-qat: TiledPooling, FP32
        ({"channels": 8}, "trt8.5"),
        ({"stride": 1}, "trt8.5"),
        ({"pool": 2}, "trt8.5"),
        ({"pool_stride": 1}, "trt8.5"),
    ],
    ids=["8.0", "float-output", "not-an-image", "stride-1", "2x2-pool", "pool-stride-1"],
)
def test_max_pool_is_not_fused(g: Graph, options: dict[str, int], target: str) -> None:
    result = run_pass(stem(g, **options), ConvActPoolFusion, target=target)
    assert not result.lines and result.has_layer("MaxPool_12")
