"""Detectors with objectness: YOLOv5 and YOLOX. The networks have one level of 16 x 16 positions."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.accuracy.detections import (
    compute_average_precision,
    decode_detections,
    match_detections,
)
from tests.insertion.nets import Net, images, run

SIDE, STRIDE, CLASSES = 16, 4, 2
ROWS = 5 + CLASSES


def features(net: Net) -> str:
    return net.silu("act", net.conv("stem", "x", 3, 16, stride=STRIDE))


def anchored_detector(columns: int = ROWS) -> onnx.ModelProto:
    """Return a YOLOv5 with three anchors; rows after the class scores have no Sigmoid."""
    net = Net(3, SIDE * STRIDE)
    head = net.conv("head", features(net), 16, 3 * columns, 1)
    maps = net.reshape("maps", head, 1, 3, columns, SIDE, SIDE)
    maps = net.op("Transpose", "rows", maps, perm=[0, 1, 3, 4, 2])
    rest: list[str] = []
    if columns > ROWS:
        sizes = net.const("cut", [ROWS, columns - ROWS], np.int64)
        maps, further = net.op("Split", "points", maps, sizes, outputs=2, axis=4)
        rest.append(further)
    scores = net.op("Sigmoid", "sigmoid", maps)
    parts = net.const("parts", [2, 2, ROWS - 4], np.int64)
    xy, wh, scores = net.op("Split", "split", scores, parts, outputs=3, axis=4)
    grid = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE)), -1)[None, None]
    anchors = np.array([[8, 12], [16, 8], [20, 20]]).reshape(1, 3, 1, 1, 2)
    xy = net.op("Mul", "pixels", net.op("Add", "place", xy, net.const("grid", grid)), stride(net))
    wh = net.op("Pow", "square", net.op("Mul", "twice", wh, net.const("two", 2.0)), "two")
    wh = net.op("Mul", "sizes", wh, net.const("anchors", anchors))
    joined = net.op("Concat", "join", xy, wh, scores, *rest, axis=4)
    return net.output(net.reshape("output", joined, 1, -1, columns)).model()


def stride(net: Net) -> str:
    return net.const("stride", float(STRIDE))


def anchor_free_detector(is_decoded: bool = True) -> onnx.ModelProto:
    """Return a YOLOX, or the raw output that its export script writes by default."""
    net = Net(3, SIDE * STRIDE)
    x = features(net)
    scores = [
        net.op("Sigmoid", f"{name}.sigmoid", net.conv(name, x, 16, count, 1))
        for name, count in (("objects", 1), ("classes", CLASSES))
    ]
    joined = net.op("Concat", "join", net.conv("boxes", x, 16, 4, 1), *scores, axis=1)
    rows = net.reshape("flat", joined, 1, ROWS, SIDE * SIDE)
    rows = net.op("Transpose", "rows", rows, perm=[0, 2, 1])
    if is_decoded:
        parts = net.const("parts", [2, 2, ROWS - 4], np.int64)
        xy, wh, rest = net.op("Split", "split", rows, parts, outputs=3, axis=2)
        grid = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE)), -1).reshape(1, -1, 2)
        xy = net.op("Add", "place", xy, net.const("grid", grid))
        xy, wh = (
            net.op("Mul", f"{name}.pixels", t, stride(net) if name == "xy" else "stride")
            for name, t in (("xy", xy), ("wh", net.op("Exp", "sizes", wh)))
        )
        rows = net.op("Concat", "end", xy, wh, rest, axis=2)
    return net.output(rows).model()


@pytest.mark.parametrize("make", [anchored_detector, anchor_free_detector])
def test_agreement_of_detector_with_objectness(make: Callable[[], onnx.ModelProto]) -> None:
    """The score of a detection is objectness times class score."""
    reference, data = make(), images(3, 3, SIDE * STRIDE)
    model, matches = qdqtool.insert(reference, data, predict=False, method="max").model, []
    for sample in data:
        rows = [run(m, sample)[0].swapaxes(1, 2) for m in (reference, model)]
        truth, result = (
            decode_detections(np.concatenate([r[:, :4], r[:, 4:5] * r[:, 5:]], axis=1))
            for r in rows
        )
        matches.append(match_detections(truth.filter_by_score(0.25), result))
    agreement = qdqtool.compare(reference, model, data=data).agreement
    assert agreement is not None and agreement.measure.metric == "agreement-map"
    assert agreement.measure.count == sum(len(m.truth) for m in matches) > 0
    assert agreement.measure.value == pytest.approx(
        compute_average_precision(matches, pooled=True).mean()
    )
    assert "raw-outputs-compared" not in [note.code for note in agreement.notes]


@pytest.mark.parametrize(
    "model",
    [anchored_detector(ROWS + 4), anchor_free_detector(is_decoded=False)],
    ids=["further-rows", "raw-boxes"],
)
def test_agreement_of_unclear_detector_has_a_note(model: onnx.ModelProto) -> None:
    agreement = qdqtool.compare(model, model, data=images(1, 3, SIDE * STRIDE)).agreement
    assert agreement is not None and agreement.measure.metric == "output-agreement"
    assert "raw-outputs-compared" in [note.code for note in agreement.notes]
