"""Metrics: which one a network gets, and what their values are."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from qdqtool.demo.model import yolov8n
from qdqtool.errors import QdqtoolError
from qdqtool.graph import Model
from qdqtool.tuning.metrics import AgreementMap, OutputAgreement, UserMetric, metric_for, resampled
from tests.tuning.nets import branchy, resnet, segmentation


def test_a_yolov8_output_gets_agreement_map() -> None:
    found = metric_for(Model(yolov8n(64, classes=3)), None)
    assert found == AgreementMap("output0", 3)
    assert "IoU" in found.sentence and ". " not in found.sentence.replace("IoU .50 to .95", "")  # one sentence


def test_an_output_with_its_last_dimensions_exchanged() -> None:
    proto = yolov8n(64, classes=3)
    proto.graph.node.append(onnx.helper.make_node("Transpose", ["output0"], ["turned"], name="turn", perm=[0, 2, 1]))
    proto.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("turned", 1, [1, 84, 7]))
    assert metric_for(Model(proto), None) == AgreementMap("turned", 3, True)


@pytest.mark.parametrize("make", [branchy, resnet, segmentation])
def test_other_networks_get_output_agreement(make: object) -> None:
    model = Model(make())  # type: ignore[operator]
    assert metric_for(model, None) == OutputAgreement(tuple(model.outputs))


def test_sorted_outputs_are_not_compared_place_by_place() -> None:
    proto = resnet()
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([3], np.int64), "k"))
    proto.graph.node.append(onnx.helper.make_node("TopK", ["fc.out", "k"], ["best", "which"], name="top"))
    del proto.graph.output[:]
    proto.graph.output.append(onnx.helper.make_tensor_value_info("best", 1, [1, 3]))
    found = metric_for(Model(proto), None)
    assert isinstance(found, OutputAgreement) and found.tensors != ("best",)


def detections(boxes: list[tuple[float, float, float, float, int, float]]) -> np.ndarray:
    """An output [1, 4 + 2, n] of boxes given as centre, size, class and score."""
    rows = np.zeros((1, 6, max(len(boxes), 8)), np.float32)
    for i, (x, y, w, h, label, score) in enumerate(boxes):
        rows[0, :4, i] = x, y, w, h
        rows[0, 4 + label, i] = score
    return rows


def test_agreement_map_by_hand() -> None:
    metric = AgreementMap("o", 2)
    reference = {"o": detections([(50, 50, 20, 20, 0, 0.9), (150, 50, 20, 20, 1, 0.8), (200, 50, 9, 9, 1, 0.1)])}
    same = metric.look(metric.kept(reference), reference, "a")
    assert metric.value([same]) == 1.0
    # One of two found, exactly: precision 1 up to a recall of a half, which are 51 of 101 points at each overlap.
    one = metric.look(metric.kept(reference), {"o": detections([(50, 50, 20, 20, 0, 0.9)])}, "a")
    assert metric.value([one]) == pytest.approx(51 / 101)
    # The other one moved by 2 of 20 pixels: it overlaps by 18 / 22 = 0.818, which counts at 7 of 10 thresholds.
    moved = {"o": detections([(50, 50, 20, 20, 0, 0.9), (152, 50, 20, 20, 1, 0.8)])}
    value = metric.value([metric.look(metric.kept(reference), moved, "a")])
    assert value == pytest.approx((7 * 1.0 + 3 * 51 / 101) / 10)
    wrong_class = {"o": detections([(50, 50, 20, 20, 0, 0.9), (150, 50, 20, 20, 0, 0.8)])}
    assert metric.value([metric.look(metric.kept(reference), wrong_class, "a")]) == pytest.approx(51 / 101)


def test_evidence_survives_json_bit_by_bit() -> None:
    rng = np.random.default_rng(0)
    metric = AgreementMap("o", 2)

    def made() -> dict[str, np.ndarray]:
        return {"o": rng.random((1, 6, 40), np.float32) * np.array([99, 99, 30, 30, 1, 1], np.float32)[None, :, None]}

    evidence = [metric.look(metric.kept(made()), made(), "a") for _ in range(4)]
    back = json.loads(json.dumps(evidence))
    assert metric.value(back) == metric.value(evidence)
    assert (resampled(metric, back, 20) == resampled(metric, evidence, 20)).all()


def test_without_reference_boxes_there_is_no_value() -> None:
    metric = AgreementMap("o", 2)
    empty = {"o": detections([])}
    assert math.isnan(metric.value([metric.look(metric.kept(empty), empty, "a")]))


def test_output_agreement_by_hand() -> None:
    metric = OutputAgreement(("o",))
    wanted, found = np.array([[1.0, 2.0, 3.0, 6.0]], np.float32), np.array([[1.0, 2.0, 4.0, 6.0]], np.float32)
    assert metric.look(metric.kept({"o": wanted}), {"o": found}, "a") == pytest.approx(1.0 - 0.5 / np.std([1, 2, 3, 6]))


def test_resamples_are_the_same_for_every_candidate() -> None:
    metric = OutputAgreement(("o",))
    low, high = resampled(metric, [0.1, 0.2, 0.3], 50), resampled(metric, [0.2, 0.3, 0.4], 50)
    assert np.allclose(high - low, 0.1)


# The user's own ---------------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mymetrics.py").write_text(
        "def top1(reference, outputs, image):\n"
        "    return float(reference['o'].argmax() == outputs['o'].argmax())\n"
        "def broken(reference, outputs, image):\n    raise KeyError('labels of ' + image)\n"
        "def leaves(reference, outputs, image):\n    raise SystemExit(3)\n"
        "def nothing(reference, outputs, image):\n    return float('nan')\n"
        "number = 3\n", "utf-8",
    )  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mymetrics", raising=False)
    return "mymetrics"


def test_a_function_by_name(module: str) -> None:
    metric = UserMetric(f"{module}:top1", ("o",))
    kept = metric.kept({"o": np.array([0.1, 0.9])})
    values = [metric.look(kept, {"o": np.array(o)}, "a") for o in ([0.2, 0.8], [0.8, 0.2])]
    assert values == [1.0, 0.0] and metric.value(values) == 0.5


def test_a_module_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def f(reference, outputs, image):\n    return 1.0\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    assert metric_for(Model(branchy()), "only_here:f").name == "only_here:f"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken", "raised KeyError on a.jpg: 'labels of a.jpg'"), ("leaves", "raised SystemExit on a.jpg: 3"),
        ("nothing", "gave nan on a.jpg; it has to be"),
    ],
)
def test_a_function_that_fails_is_named_with_the_image(module: str, function: str, message: str) -> None:
    with pytest.raises(QdqtoolError, match=f"`metric` {module}:{function}: {message}"):
        UserMetric(f"{module}:{function}", ("o",)).look({"o": np.zeros(2)}, {"o": np.zeros(2)}, "a.jpg")


@pytest.mark.parametrize(
    ("name", "message"),
    [("top1", "is not package.module:function"), (":top1", "is not package"), ("mymetrics:", "is not package"),
     ("nowhere.at.all:f", "cannot be imported: ModuleNotFoundError"), ("mymetrics:missing", "AttributeError"),
     ("mymetrics:number", "is no function")],
)  # fmt: skip
def test_a_name_that_is_none(module: str, name: str, message: str) -> None:
    with pytest.raises(QdqtoolError, match=message):
        metric_for(Model(branchy()), name)


def test_a_function_does_not_end_the_process() -> None:
    def leaves(reference: object, outputs: object, image: str) -> float:
        raise SystemExit(0)

    with pytest.raises(QdqtoolError, match="raised SystemExit"):
        UserMetric("m:f", ("o",), leaves).look({"o": np.ones(2)}, {"o": np.zeros(2)}, "a.jpg")
