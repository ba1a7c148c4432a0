import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.insertion.fp8_conversion import convert_pairs_to_fp8
from qdqtool.ir.graph import Model
from tests.insertion.nets import Net, check, copy_model, nodes_of


def mixed_net() -> onnx.ModelProto:
    """Return a depthwise convolution between two others, of 32 channels."""
    net = Net(32)
    first = net.op("Relu", "r0", net.conv("a", "x", 32, 32))
    deep = net.op("Relu", "r1", net.conv("d", first, 32, 32, group=32))
    return net.output(net.conv("b", deep, 32, 32)).model(opset=19, ir=9)


def test_conversion_equals_insertion_by_max() -> None:
    data = np.random.default_rng(0).standard_normal((4, 32, 8, 8)).astype(np.float32)
    options = {"head": "none", "high_precision": "fp32", "predict": False}
    int8 = qdqtool.insert(mixed_net(), data, method="max", **options)
    fp8 = qdqtool.insert(mixed_net(), data, precision="fp8", **options)
    model = Model(copy_model(int8.model))
    assert convert_pairs_to_fp8(model) == ["d"]
    check(model.proto)
    assert len(nodes_of(model.proto, "QuantizeLinear")) == len(fp8.quantized) == 4
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in model.proto.graph.initializer}
    scales = [constants[n.input[1]] for n in nodes_of(model.proto, "QuantizeLinear")]
    expected = [np.asarray(q.scale) for q in fp8.quantized]
    for scale, other in zip(
        sorted(scales, key=lambda s: float(s.max())),
        sorted(expected, key=lambda s: float(s.max())),
        strict=True,
    ):
        assert scale == pytest.approx(other, rel=1e-5)
