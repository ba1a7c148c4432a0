from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import pytest

import qdqtool
from qdqtool.errors import QdqtoolError
from qdqtool.insertion.fp8_conversion import convert_pairs_to_fp8
from qdqtool.insertion.number_formats import FP8
from qdqtool.insertion.placement import PlacementRules, compute_placement
from qdqtool.insertion.rewrite import round_weights
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import save
from qdqtool.reasons.placement import FloatNode, SkipCause
from qdqtool.runtime.sessions import open_session
from qdqtool.verification.local_build import build_model
from tests.builders.models import needs_compiler
from tests.errors import has
from tests.insertion.nets import (
    Array,
    Net,
    check,
    copy_model,
    nodes_of,
    run,
    value_of,
    wide_samples,
)
from tests.notes import note_codes


def round_fp8(values: npt.NDArray[Any], scale: npt.NDArray[Any] | float) -> Array:
    """Return values after Q and DQ, by another implementation of E4M3."""
    steps = (values / np.float32(scale)).astype(np.float32)
    return np.clip(steps, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def relu_net() -> Net:
    net = Net(32)
    first = net.op("Relu", "r", net.conv("a", "x", 32, 32))
    return net.output(net.op("Relu", "end", net.conv("b", first, 32, 32)))


def insert_fp8(model: onnx.ModelProto, **options: Any) -> qdqtool.Insertion:
    options = {"head": "none", "high_precision": "fp32", **options}
    return qdqtool.insert(model, wide_samples(4), precision="fp8", **options)


def test_scales_are_largest_magnitude_over_448() -> None:
    result = insert_fp8(relu_net().model())
    largest = float(np.abs(wide_samples(4)).max())
    (first, *_) = result.activations
    assert (first.tensor, first.method) == ("x", "max")
    assert first.scale == pytest.approx(largest / 448, rel=1e-6)
    weights = np.abs(value_of(result.model, "a.weight")).reshape(32, -1).max(axis=1)
    np.testing.assert_allclose(result.weights[0].scale, weights / 448, rtol=1e-6)


def test_model_is_valid_and_has_fp8_zero_points() -> None:
    result = insert_fp8(relu_net().model(opset=13))
    check(result.model)
    assert result.model.opset_import[0].version >= 19
    assert (result.precision, result.target) == ("fp8", "trt10-strongly-typed")
    types = {t.name: t.data_type for t in result.model.graph.initializer}
    zero_points = {types[n.input[2]] for n in nodes_of(result.model, "QuantizeLinear")}
    assert zero_points == {onnx.TensorProto.FLOAT8E4M3FN}


@pytest.mark.parametrize("weights", ["float", "fp8"])
def test_onnxruntime_computes_the_numbers(weights: str) -> None:
    """The Relu before an FP8 Q has to remain: onnxruntime would drop it by default."""
    model = relu_net().model()
    result = insert_fp8(model, weights=weights)
    x_scale, r_scale = (float(np.float32(q.scale)) for q in result.activations)
    x, rounded = wide_samples(1), copy_model(model)
    for tensor in rounded.graph.initializer:
        if tensor.name.endswith("weight"):
            value = onnx.numpy_helper.to_array(tensor)
            scale = np.abs(value).max(axis=(1, 2, 3), keepdims=True) / 448
            tensor.CopyFrom(onnx.numpy_helper.from_array(round_fp8(value, scale), tensor.name))
    halves = onnx.utils.Extractor(rounded)
    second = halves.extract_model(["r.out"], ["end.out"])
    middle = run(halves.extract_model(["x"], ["r.out"]), {"x": round_fp8(x, x_scale)})[0]
    expected = run(second, {"r.out": round_fp8(middle, r_scale)})[0]
    session = open_session(result.model.SerializeToString(), 1, fold_qdq=False)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-4)


def test_rounded_weights_are_those_of_another_implementation() -> None:
    weights = np.random.default_rng(0).standard_normal((32, 16, 3, 3)).astype(np.float32)
    scale = (np.abs(weights).max(axis=(1, 2, 3)) / 448).astype(np.float32)
    expected = round_fp8(weights, scale[:, None, None, None])
    np.testing.assert_array_equal(round_weights(weights, 0, FP8), expected)


def obstacles(model: Model) -> list[SkipCause]:
    reasons = [
        s.record
        for s in compute_placement(model, PlacementRules(head="none", number_format=FP8)).skipped
    ]
    return [r.cause for r in reasons if isinstance(r, FloatNode)]


@pytest.mark.parametrize(
    ("form", "obstacle"),
    [
        ({}, None),
        ({"kernel": 5}, None),
        ({"kernel": 7}, SkipCause.FP8_KERNEL),
        ({"group": 32}, SkipCause.FP8_GROUPS),
        ({"group": 2}, SkipCause.FP8_GROUPS),
        ({"cin": 16}, SkipCause.FP8_CHANNELS),
        ({"cout": 16}, SkipCause.FP8_CHANNELS),
        ({"cin": 17, "cout": 17}, None),
    ],
)
def test_forms_of_convolutions_that_remain_float(
    form: dict[str, int], obstacle: SkipCause | None
) -> None:
    sizes = {"cin": 32, "cout": 32, **form}
    net = Net(sizes["cin"])
    model = net.output(net.conv("c", "x", **sizes)).index()
    assert obstacles(model) == ([] if obstacle is None else [obstacle])
    assert not compute_placement(
        model, PlacementRules(head="none", number_format=FP8, include=["^c$"])
    ).skipped


@pytest.mark.parametrize(
    ("shape", "columns", "obstacle"),
    [
        ((4, 32), 32, None),
        ((1, 32), 32, SkipCause.FP8_SINGLE_ROW),
        ((4, 8), 32, SkipCause.FP8_CHANNELS),
        ((4, 32), 15, SkipCause.FP8_CHANNELS),
    ],
)
def test_forms_of_products_that_remain_float(
    shape: tuple[int, int], columns: int, obstacle: SkipCause | None, net: Net
) -> None:
    net.inputs[0] = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)
    net.output(net.op("MatMul", "m", "x", net.const("w", np.ones((shape[1], columns)))))
    assert obstacles(net.index()) == ([] if obstacle is None else [obstacle])


@pytest.mark.parametrize(
    ("head", "attention", "quantized"),
    [
        (32, "auto", True),
        (64, "auto", True),
        (128, "auto", False),
        (128, "fp8", True),
        (32, "float", False),
    ],
)
def test_attention_is_quantized_where_it_fuses(
    head: int, attention: str, quantized: bool, net: Net
) -> None:
    net.inputs[0] = onnx.helper.make_tensor_value_info(
        "x", onnx.TensorProto.FLOAT, [1, 2, 64, head]
    )
    weights = [net.const(f"w{i}", np.eye(head)) for i in range(3)]
    q, k, v = (net.op("MatMul", f"l{i}", "x", w) for i, w in enumerate(weights))
    keys = net.op("Transpose", "t", k, perm=[0, 1, 3, 2])
    scores = net.op("Softmax", "s", net.op("MatMul", "qk", q, keys), axis=-1)
    net.output(net.op("MatMul", "sv", scores, v))
    rules = PlacementRules(attention=attention, max_head=64, number_format=FP8)
    placement = compute_placement(net.index(), rules)
    consumers = {e.node.name for entries in placement.inputs.values() for e in entries}
    assert ({"qk", "sv"} <= consumers) == quantized


@pytest.mark.parametrize(
    ("options", "code", "parameter"),
    [
        ({"target": "8.6"}, "unsupported", "precision"),
        ({"weights": "int8"}, "option-conflict", "weights"),
        ({"attention": "int8"}, "option-conflict", "attention"),
        ({"input_type": "uint8"}, "option-conflict", "input_type"),
        ({"gpu": "RTX 3060"}, "unsupported", "gpu"),
    ],
)
def test_options_that_do_not_fit_fp8(options: Any, code: str, parameter: str) -> None:
    with pytest.raises(QdqtoolError, check=has(code, parameter=parameter)):
        insert_fp8(relu_net().model(), **options)


def test_remainder_is_fp16_by_default() -> None:
    result = insert_fp8(relu_net().model(), high_precision=None)
    check(result.model)
    types = {t.name: t.data_type for t in result.model.graph.initializer}
    scales = {types[n.input[1]] for n in nodes_of(result.model, "DequantizeLinear")}
    assert (result.float_type, scales) == ("fp16", {onnx.TensorProto.FLOAT16})


@needs_compiler
@pytest.mark.parametrize("capability", [89, 120])
def test_tensorrt_rtx_builds_fp8_convolutions(capability: int, tmp_path: Path) -> None:
    result = insert_fp8(relu_net().model(), high_precision=None, target="rtx1.7")
    assert result.compute_capabilities == ["8.9"]
    save(result.model, tmp_path / "m.onnx")
    build = build_model(tmp_path / "m.onnx", sm=[capability])
    assert build.status == "built"
    assert {n.name: n.precision for n in build.nodes} == {
        "a": qdqtool.Precision.FP8,
        "b": qdqtool.Precision.FP8,
    }


@pytest.mark.parametrize(
    ("target", "gpu", "is_warned"),
    [
        ("10.1", None, True),
        ("10.1", "H100 SXM", True),
        ("10.2", None, True),
        ("10.2", "L4", True),
        ("10.2", "H100 SXM", False),
        ("10.3", "L4", False),
    ],
)
def test_version_without_fp8_convolutions_is_a_warning(
    target: str, gpu: str | None, is_warned: bool
) -> None:
    result = insert_fp8(relu_net().model(), target=target, gpu=gpu)
    assert ("fp8-version" in note_codes(result.warnings)) == is_warned
    assert ("FP8-VERSION" in {f.code for f in result.prediction.findings}) == is_warned
    assert f" for TensorRT {target}, strongly typed: " in repr(result)
    assert result.as_json()["requested_target"].removesuffix("-strongly-typed") == target


# Conversion of INT8 pairs


def three_convolutions() -> onnx.ModelProto:
    net = Net(32)
    first = net.op("Relu", "r0", net.conv("a", "x", 32, 32))
    deep = net.op("Relu", "r1", net.conv("d", first, 32, 32, group=32))
    return net.output(net.conv("b", deep, 32, 32)).model(opset=19, ir=9)


def test_conversion_equals_insertion_by_max() -> None:
    options = {"head": "none", "high_precision": "fp32", "predict": False}
    int8 = qdqtool.insert(three_convolutions(), wide_samples(4), method="max", **options)
    fp8 = insert_fp8(three_convolutions())
    model = Model(copy_model(int8.model))
    convert_pairs_to_fp8(model)
    assert [n.name for n in nodes_of(model.proto, "Conv") if n.input[1] in model.initializers] == [
        "d"
    ]
    check(model.proto)
    assert len(nodes_of(model.proto, "QuantizeLinear")) == len(fp8.quantized) == 4
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in model.proto.graph.initializer}
    scales = [constants[n.input[1]] for n in nodes_of(model.proto, "QuantizeLinear")]
    for scale, other in zip(
        sorted(scales, key=lambda s: float(s.max())),
        sorted([np.asarray(q.scale) for q in fp8.quantized], key=lambda s: float(s.max())),
        strict=True,
    ):
        assert scale == pytest.approx(other, rel=1e-5)
