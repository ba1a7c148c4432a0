"""Insertion into networks with attention, and what is predicted of them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.builders.child import is_installed
from qdqtool.errors import QdqtoolError
from qdqtool.prediction import predict
from qdqtool.render.predict_text import verdict
from qdqtool.trt.faults import TakenByMyelin
from qdqtool.trt.targets import TARGETS
from qdqtool.types import Prediction
from tests.insertion.nets import Net, images, run
from tests.insertion.transformers import samples, vit

needs_compiler = pytest.mark.skipif(not is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed")


@functools.cache
def quantized(**choices: Any) -> qdqtool.Insertion:
    return qdqtool.insert(vit(), samples(vit()), predict=False, **choices)


def taken(prediction: Prediction) -> TakenByMyelin:
    (found,) = (c.refusal for f in prediction.findings if f.code == "MYELIN-REGION" for c in f.causes)
    assert isinstance(found, TakenByMyelin)
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_products_are_counted_alike_in_json_headline_and_findings(target: str) -> None:
    """2 blocks of 6 Linears and 2 products of activations, and the head; one convolution embeds the patches."""
    prediction = predict(quantized().model, target)
    summary = prediction.summary()
    assert (summary["convolutions"], summary["int8"]) == (14, 14)
    products = [summary[f"matrix_products{kind}"] for kind in ("", "_int8", "_float")]
    assert products == [17, 13, 4] and set(prediction.float_products) == {
        f"b{i}.attn.{product}" for i in (0, 1) for product in ("qk", "av")}
    assert verdict(prediction).startswith("1 convolution: 1 INT8")
    assert "17 matrix products: 13 INT8, 4 float" in verdict(prediction)
    region = taken(prediction)
    assert region.norms == 5 and region.softmaxes == 2
    assert region.int8 == region.products - 4 and region.products in (16, 17)  # 8.x: the pooling cuts the head off


@pytest.mark.parametrize(("target", "counted"), [("trt8.6", "possible"), ("trt10", "uncertain")])
def test_conversions_are_a_range_where_the_reach_of_myelin_is_not_known(target: str, counted: str) -> None:
    """8.x: those of its Qs may be in it; 10: those behind pointwise layers may be outside."""
    prediction = predict(quantized().model, target)
    region = taken(prediction)
    sure = prediction.conversions
    assert sure is not None and getattr(region, counted) > 0
    low, high = (sure - region.possible, sure) if counted == "possible" else (sure, sure + region.uncertain)
    assert f"{low} to {high} conversions" in verdict(prediction)
    if counted == "possible":
        assert set(prediction.regions[0].possible) <= set(prediction.conversion_nodes)


def test_a_network_without_attention_has_no_word_of_it() -> None:
    from qdqtool.demo.model import yolov8n

    for target in ("trt8.6", "trt10", "rtx1.7"):
        prediction = predict(yolov8n(64, classes=2), target)
        assert "MYELIN-REGION" not in prediction.findings_by_code()
        assert "matrix product" not in verdict(prediction)
        assert prediction.summary()["matrix_products"] == 0


def test_dead_and_constant_products_are_not_counted() -> None:
    model = onnx.ModelProto()
    model.CopyFrom(vit())
    gone = onnx.helper.make_node("MatMul", ["b0.attn.q.add.out", "b0.attn.k.heads.out"], ["never"], "never")
    model.graph.node.append(gone)
    folded = onnx.helper.make_node("MatMul", ["b0.fc1.weight", "b0.fc2.weight"], ["folded"], "folded")
    model.graph.node.append(folded)
    for target in ("trt8.6", "trt10"):
        assert predict(model, target).summary()["matrix_products"] == 17
    assert "folded" not in predict(model, "rtx1.7").float_products


# Attention in INT8 ----------------------------------------------------------------------------------------------------

PRODUCTS = {f"b{i}.attn.{product}" for i in (0, 1) for product in ("qk", "av")}


def test_attention_stays_float_and_says_how_to_change_that() -> None:
    skipped = {s.node: s.reason for s in quantized().skipped}
    assert skipped.keys() == PRODUCTS and all("attention='int8'" in reason for reason in skipped.values())
    assert quantized(attention="float").model.SerializeToString() == quantized().model.SerializeToString()


def test_attention_in_int8() -> None:
    """Both inputs of both products; the Softmax's scale is 1/127 whatever the data are, all others as without."""
    result = quantized(attention="int8")
    added, before = ({q.tensor: q for q in r.activations} for r in (result, quantized()))
    assert {t: q.scale for t, q in added.items() if t in before} == {t: q.scale for t, q in before.items()}
    new = added.keys() - before.keys()
    assert new == {f"b{i}.attn.{t}.out" for i in (0, 1) for t in ("q.heads", "k.heads", "v.heads", "soft")}
    for i in (0, 1):
        soft = added[f"b{i}.attn.soft.out"]
        assert soft.scale == float(np.float32(1 / 127)) and soft.method == "fixed"
    assert not result.skipped


@pytest.mark.parametrize("target", TARGETS)
def test_predicted_of_attention_in_int8(target: str) -> None:
    prediction = predict(quantized(attention="int8").model, target)
    assert prediction.summary()["matrix_products_int8"] == 17 and not prediction.float_products
    assert {c.name for c in prediction.convolutions if c.weights == "computed"} == PRODUCTS


def test_it_computes_what_the_float_network_computes() -> None:
    feeds = samples(vit(), 1)[0]
    (expected,), (found,) = run(vit(), feeds), run(quantized(attention="int8").model, feeds)
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def test_parts_of_an_attention_can_be_chosen() -> None:
    result = quantized(attention="int8", exclude=(r"\.qk$",))
    assert {s.node for s in result.skipped} == {"b0.attn.qk", "b1.attn.qk"}
    one = quantized(include=(r"b1\.attn\.av$",))
    assert {s.node for s in one.skipped} == PRODUCTS - {"b1.attn.av"}


def test_a_network_without_attention_says_that_nothing_changes() -> None:
    net = Net()
    net.output(net.conv("c", "x"))
    result = qdqtool.insert(net.model(), images(2), attention="int8", predict=False)
    assert any("attention='int8'" in note for note in result.notes) and len(result.activations) == 1
    with pytest.raises(QdqtoolError, match="choose one of"):
        qdqtool.insert(net.model(), images(2), attention="int4")


def test_a_calibration_table_needs_no_softmax(tmp_path: Any) -> None:
    from qdqtool.insertion.calibrate import write_table

    path = tmp_path / "table.cache"
    write_table(quantized(), path)
    with open(path, "a", encoding="ascii") as file:
        for i in (0, 1):
            file.writelines(f"b{i}.attn.{part}.heads.out: 3d010a14\n" for part in "qkv")
    result = qdqtool.insert(vit(), calib_table=path, attention="int8", predict=False)
    scales = {q.tensor: q.scale for q in result.activations}
    assert scales["b0.attn.soft.out"] == float(np.float32(1 / 127)) and len(scales) == len(quantized().activations) + 8


@needs_compiler
@pytest.mark.parametrize("attention", ["float", "int8"])
def test_tensorrt_rtx_makes_one_kernel_of_each_attention(attention: str) -> None:
    """It reads INT8 where the products' inputs are quantized: all 14 or 18 layers are as predicted."""
    from tests.fuzz.driver import Lab

    model = quantized(attention=attention, target="rtx1.7").model
    with Lab() as lab:
        answer, built = lab.answer(model), {n.name: str(n.precision) for n in lab.build(model).nodes}
    assert (answer.convolutions, answer.wrong, answer.absent) == (14 if attention == "float" else 18, [], 0)
    assert {built[p] for p in PRODUCTS} == ({"INT8"} if attention == "int8" else {"FP16"})


@pytest.mark.parametrize("attention", ["float", "int8"])
def test_tune_can_take_attention_back(attention: str) -> None:
    """Each product alone and both of an attention are choices."""
    from qdqtool.graph import Model
    from qdqtool.insertion.placement import Rules
    from qdqtool.insertion.scales import MethodChoice
    from qdqtool.trt.targets import target_named
    from qdqtool.tuning.configuration import Planner
    from qdqtool.tuning.sites import ATTENTION, find_sites

    planner = Planner(Model(vit()), Rules(attention=attention), target_named("trt10"), MethodChoice())
    found = {s.name: s.nodes for s in find_sites(planner) if s.kind == ATTENTION}
    expected = {p: (p,) for p in PRODUCTS} | {
        f"attention of b{i}.attn.soft": (f"b{i}.attn.qk", f"b{i}.attn.av") for i in (0, 1)}
    assert found == (expected if attention == "int8" else {})
