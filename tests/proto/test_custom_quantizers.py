import onnx
import pytest

from qdqtool.ir import qdq
from qdqtool.ir.modelfile import load
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from tools.rtx.experiments_fp8 import FP8


def custom(name: str = "FP8 custom operators") -> onnx.ModelProto:
    return FP8[name]()


def test_custom_quantizers_are_read_as_fp8() -> None:
    model = load(custom())
    quantizers = list(qdq.quantizers(model))
    assert [q.op for q in quantizers] == ["QuantizeLinear", "DequantizeLinear"] * 2
    params = [qdq.read_params(model, q) for q in quantizers]
    assert {p.precision for p in params} == {Precision.FP8}
    assert [p.scale_shape for p in params] == [(), (), (8,), (8,)]
    assert model.shape("c_y") == (1, 8, 16, 16)  # shapes are inferred past them


def test_custom_quantizers_of_stored_weights_are_read_as_fp8() -> None:
    model = load(custom("FP8 custom operators, stored weights"))
    assert {qdq.read_params(model, q).precision for q in qdq.quantizers(model)} == {Precision.FP8}


@pytest.fixture
def proto() -> onnx.ModelProto:
    return custom()


def test_model_of_the_user_is_not_changed(proto: onnx.ModelProto) -> None:
    before = proto.SerializeToString()
    load(proto)
    assert proto.SerializeToString() == before


@pytest.mark.parametrize("target", ["trt10", "trt11", "rtx1.7"])
def test_custom_quantizers_are_predicted_like_native_ones(target: str) -> None:
    assert [c.precision for c in predict(custom(), target).convolutions] == [Precision.FP8]


def test_opset_remains_if_an_operator_has_another_form_later(proto: onnx.ModelProto) -> None:
    proto.opset_import[0].version = 17
    proto.graph.node.append(
        onnx.helper.make_node("ReduceMean", ["c_y"], ["mean"], "mean", axes=[2, 3])
    )
    assert load(proto).opset == 17


def test_recorded_types_of_quantized_tensors_become_fp8(proto: onnx.ModelProto) -> None:
    tensor, uint8 = proto.graph.node[0].output[0], onnx.TensorProto.UINT8  # as ModelOpt writes it
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info(tensor, uint8, [1, 8, 16, 16]))
    onnx.checker.check_model(load(proto).proto, full_check=True)


def test_operators_of_other_domains_are_not_replaced(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        node.domain = "other" if node.domain == "trt" else node.domain
    assert not list(qdq.quantizers(load(proto)))
