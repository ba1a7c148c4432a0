from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.fixing.dla import DlaTranslation, translate_for_dla
from qdqtool.ir.graph import Model
from qdqtool.ir.qdq import is_qdq
from tests.errors import has
from tests.insertion.nets import (
    Net,
    assert_same_outputs,
    copy_model,
    images,
    one_layer,
    open_session,
    set_value,
    value_of,
)
from tests.insertion.test_calibration_cache import read_cache
from tests.notes import note, note_codes
from tests.patterns.test_fake_quantizers import DECOMPOSED, PT2E, network as network_of
from tests.trt.builder import Graph


def network() -> onnx.ModelProto:
    net = Net()
    first = net.op("Relu", "r0", net.conv("c0", "x"))
    second = net.op("Relu", "r1", net.op("Add", "add", net.conv("c1", first), first))
    return net.output(net.conv("c2", second)).model()


def quantize(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    return qdqtool.insert(model, images(), predict=False, head="none", **options).model


def translate(model: onnx.ModelProto, target: str = "8.5.2") -> DlaTranslation:
    translation = translate_for_dla(model, target)
    assert not any(is_qdq(node) for node in Model(translation.model).nodes)
    onnx.checker.check_model(translation.model)
    return translation


@pytest.mark.parametrize(("weights", "rtol", "atol"), [("float", 0, 0), ("int8", 0.02, 0.2)])
def test_float_model_is_the_one_that_was_quantized(weights: str, rtol: float, atol: float) -> None:
    translation = translate(quantize(network(), weights=weights))
    assert_same_outputs(network(), translation.model, images()[0], rtol=rtol, atol=atol)


def test_scales_of_quantizers_are_kept_and_completed(tmp_path: Path) -> None:
    inserted = qdqtool.insert(network(), images(), predict=False, head="none")
    translation = translate(inserted.model)
    expected = {q.tensor: np.float32(q.scale) for q in inserted.activations}
    scales = {t: np.float32(s) for t, s in translation.scales.scales.items()}
    assert expected.items() <= scales.items()
    report = translation.save(tmp_path / "float.onnx", tmp_path / "dla.cache")
    assert read_cache(tmp_path / "dla.cache") == scales
    assert report.header == "TRT-8502-EntropyCalibration2"
    precisions = report.precisions
    assert (precisions.layers["c2"], precisions.outputs["c2"]) == ("int8", "fp16")
    assert "c2.out" in report.scales.missing


@pytest.mark.parametrize(("target", "rule"), [("8.5.2", None), ("8.6", "unary"), ("10.3", "unary")])
def test_convolution_before_an_add_by_version_of_dla(target: str, rule: str | None) -> None:
    """DLA 3.13 fuses the convolution with the Add if its scale is 1.0.

    With earlier versions of DLA, TensorRT runs the convolution in FP16.
    """
    translation = translate(quantize(network(), residual="skip"), target)
    assert translation.scales.rules.get("c1.out") == rule


def silu_network() -> onnx.ModelProto:
    net = Net()
    first = net.conv("c0", "x")
    second = net.conv("c1", net.op("Mul", "m", first, net.op("Sigmoid", "s", first)))
    ones, zeros = (np.full(16, value, np.float32) for value in (1.5, 0.25))
    stored = [net.const(f"n{i}", v) for i, v in enumerate((ones, zeros, zeros, ones))]
    norm = net.op("BatchNormalization", "n", second, *stored)
    model = net.output(net.conv("c2", net.op("Relu", "r", norm))).model()
    for node in model.graph.node:
        node.name = node.name.strip("sm")
    return model


def test_activation_result_has_no_scale_for_the_convolution_before_it() -> None:
    translation = translate(quantize(silu_network()))
    scales = translation.scales
    assert {"c0.out", "c2.out"} == set(scales.missing)
    assert scales.scales["s.out"] == pytest.approx(1 / 127)
    producer = next(n for n in translation.model.graph.node if n.op_type == "Relu")
    assert scales.rules[producer.input[0]] == "clipped"


def test_images_give_ranges_of_all_other_tensors() -> None:
    """A convolution has its own range, not the range of the activation after it."""
    translation = translate_for_dla(quantize(silu_network()), "8.5.2", data=images())
    assert not translation.scales.missing
    model = copy_model(translation.model)
    model.graph.output.append(onnx.ValueInfoProto(name="c0.out"))
    session = open_session(model.SerializeToString())
    largest = max(float(np.abs(session.run(["c0.out"], sample)[0]).max()) for sample in images())
    scale = translation.scales.scales["c0.out"]
    assert scale * 127 == pytest.approx(largest, rel=0.25)  # entropy calibration clips a little
    assert scale != translation.scales.scales["m.out"]


def test_unnamed_nodes_get_names_for_the_layer_precisions() -> None:
    model = quantize(silu_network())
    for node in model.graph.node:
        node.name = "" if node.op_type != "Conv" else "same"
    translation = translate_for_dla(model, "8.5.2", data=images())
    names = {node.name: node.op_type for node in translation.model.graph.node}
    assert "" not in names and len(names) == len(translation.model.graph.node)
    layers = translation.precisions.layers
    assert not translation.precisions.unnamed and layers.keys() <= names.keys()
    assert [layers[name] for name, op in names.items() if op == "Conv"] == ["int8"] * 3


def change_quantizers(model: onnx.ModelProto, tensor: str, **parts: Any) -> onnx.ModelProto:
    (q,) = (n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == tensor)
    (dq,) = (n for n in model.graph.node if n.input and n.input[0] == q.output[0])
    for place, name in ((1, "scale"), (2, "zero")):
        if name in parts:
            new = f"{tensor}_{name}_new"
            model.graph.initializer.append(
                onnx.numpy_helper.from_array(np.asarray(parts[name]), new)
            )
            for node in (q, dq):
                while len(node.input) <= place:
                    node.input.append("")
                node.input[place] = new
    return model


def multiply_weight_scales(model: onnx.ModelProto, factor: float) -> np.ndarray:
    (q,) = (n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] != "x")
    scales: np.ndarray = value_of(model, q.input[1]) * np.float32(factor)
    set_value(model, q.input[1], scales)
    return scales


@pytest.mark.parametrize(
    ("zero", "amax"),
    [
        (np.int8(0), 127.0),
        (np.int8(-128), 255.0),  # 0 to 255 steps
        (np.int8(27), 155.0),  # -155 to 100
        (np.uint8(0), 255.0),
        (np.uint8(128), 128.0),
    ],
)
def test_asymmetric_scales_become_symmetric_ones_of_the_same_range(zero: Any, amax: float) -> None:
    model = change_quantizers(quantize(one_layer()), "x", scale=np.float32(0.5), zero=zero)
    assert translate(model).scales.scales["x"] == pytest.approx(0.5 * amax / 127)


def test_clipping_of_quantizers_remains_in_the_float_model() -> None:
    """A range from 0 is a Relu; weights beyond the range of their scale are clipped."""
    model = change_quantizers(quantize(one_layer()), "x", scale=np.float32(0.1), zero=np.uint8(0))
    halved, translation = multiply_weight_scales(model, 0.5), translate(model)
    (sample, *_) = images()
    floats = open_session(translation.model.SerializeToString()).run(None, sample)[0]
    sample = {"x": np.maximum(sample["x"], 0)}
    clipped = open_session(translation.model.SerializeToString()).run(None, sample)[0]
    np.testing.assert_array_equal(floats, clipped)
    conv = next(n for n in translation.model.graph.node if n.op_type == "Conv")
    largest = np.abs(value_of(translation.model, conv.input[1])).max(axis=(1, 2, 3))
    np.testing.assert_allclose(largest, 128 * halved, rtol=0.01)
    assert "weight-scales" not in note_codes(translation.notes)


def test_largest_of_several_scales_counts(g: Graph) -> None:
    x = g.input(1, 16, 8, 8)
    translation = translate(g.model(g.conv(x, "a", 16, scale=0.1), g.conv(x, "b", 16, scale=9.0)))
    assert translation.scales.scales["x"] == 9.0
    assert note("several-scales", count=1, first="x") in translation.notes


@pytest.fixture
def model() -> onnx.ModelProto:
    return quantize(one_layer())


def test_trained_weight_scales_are_noted(model: onnx.ModelProto) -> None:
    assert "weight-scales" not in note_codes(translate(model).notes)
    multiply_weight_scales(model, 1.5)
    assert note("weight-scales", count=1, first="c") in translate(model).notes


@pytest.mark.parametrize("factor", [1e-30, 0.05, np.nan, 1e22])
def test_wrong_weight_scales_do_not_change_the_weights(
    factor: float, model: onnx.ModelProto
) -> None:
    """TensorRT computes its own scales, so that a note suffices."""
    expected = translate(model)
    multiply_weight_scales(model, factor)
    translation = translate(model)
    assert_same_outputs(expected.model, translation.model, images()[0], rtol=0, atol=0)
    assert "weight-scales" in note_codes(translation.notes)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 1e22])
def test_unusable_scales_are_refused(scale: float) -> None:
    model = change_quantizers(quantize(one_layer()), "x", scale=np.float32(scale))
    with pytest.raises(ModelError, check=has("invalid-scale")):
        translate_for_dla(model)


def test_parameters_behind_other_nodes_are_folded(model: onnx.ModelProto) -> None:
    expected = translate(model).scales.scales
    (q,) = (n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "x")
    names = dict(zip(q.input[1:], ("scale_copy", "zero_copy"), strict=True))
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    for name, copy in names.items():
        model.graph.node.insert(0, onnx.helper.make_node("Identity", [name], [copy], copy))
    assert translate(model).scales.scales == expected


@pytest.mark.parametrize("name", ["dynamo", "PT2E"])
def test_simulated_quantizers_are_translated(name: str) -> None:
    forms = {**DECOMPOSED, "PT2E": PT2E}
    assert translate_for_dla(network_of(forms[name])).scales.scales["x"] == pytest.approx(0.02)


def test_quantizers_in_branches_are_refused(net: Net) -> None:
    def branch(side: str) -> onnx.GraphProto:
        node = onnx.helper.make_node("QuantizeLinear", ["x", "scale"], [f"{side}.out"], side)
        return onnx.helper.make_graph([node], side, [], [onnx.ValueInfoProto(name=f"{side}.out")])

    net.const("scale", 0.1)
    net.inputs.append(onnx.helper.make_tensor_value_info("flag", onnx.TensorProto.BOOL, []))
    branches = {f"{side}_branch": branch(side) for side in ("then", "else")}
    with pytest.raises(ModelError, match="branches"):
        translate_for_dla(net.output(net.op("If", "if", "flag", **branches)).open_model())


def test_models_and_targets_that_cannot_be_translated() -> None:
    with pytest.raises(ModelError, check=has("not-quantized")):
        translate_for_dla(one_layer())
    with pytest.raises(QdqtoolError, check=has("unsupported", parameter="target")):
        translate_for_dla(quantize(one_layer()), "11")


def test_inputs_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "q.onnx"
    onnx.save(quantize(one_layer()), path)
    translation = translate_for_dla(path)
    for outputs in ((path, tmp_path / "t.cache"), (tmp_path / "f.onnx", path)):
        with pytest.raises(QdqtoolError, check=has("output-is-input", path=str(path))):
            translation.save(*outputs)
