"""Insertion into networks with attention, and what is predicted of them."""

from __future__ import annotations

import functools
from typing import Any

import onnx
import pytest

import qdqtool
from qdqtool.prediction import predict
from qdqtool.render.predict_text import verdict
from qdqtool.trt.faults import TakenByMyelin
from qdqtool.trt.targets import TARGETS
from qdqtool.types import Prediction
from tests.insertion.transformers import samples, vit


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
