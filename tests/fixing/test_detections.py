from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.accuracy.metrics import DetectionAgreementMetric
from qdqtool.fixing.detections import DetectionJudge, DetectionVerdict
from qdqtool.fixing.judge import OutputJudge
from qdqtool.fixing.outputs import OutputError
from qdqtool.fixing.site import FixCriteria
from qdqtool.formats.fix_text import render
from qdqtool.ir.graph import Model
from qdqtool.util.notes import Note
from tests.trt.builder import Graph

OBJECTS = 16  # of 64 anchors; the others have a score of 0.007
GRID = 8.0  # coarse scale of the boxes


def detector(scale: float, zero: int = 0) -> onnx.ModelProto:
    g = Graph()
    x, choice = g.input(1, 5, 8, 8), np.eye(5, dtype=np.float32).reshape(5, 5, 1, 1)
    box = g.op("Conv", [x, g.const("w.box", choice[:4])], "box")
    logit = g.op("Conv", [x, g.const("w.score", choice[4:])], "score")
    pair = g.pair(box, "boxes", scale, zero=zero)
    joined = g.op("Concat", [pair, g.op("Sigmoid", logit, "probability")], "all", axis=1)
    proto = g.model(
        g.op("Reshape", [joined, g.const("shape", np.array([1, 5, 64], np.int64))], "flat")
    )
    proto.metadata_props.add(key="task", value="detect")
    return proto


def image(offset: float) -> np.ndarray:
    """Return boxes of 16 objects and 48 random boxes with their logits, [1, 5, 8, 8].

    The numbers of the objects' boxes are multiples of the coarse scale plus an offset.
    """
    x = np.random.default_rng(0).uniform(16, 600, (1, 5, 64)).astype(np.float32)
    x[:, 4] = -5.0
    x[:, 0, :OBJECTS] = np.arange(OBJECTS) * 4 * GRID + GRID + offset  # do not overlap
    x[:, 1:4, :OBJECTS] = 2 * GRID + offset
    x[:, 4, :OBJECTS] = np.linspace(1.0, 4.0, OBJECTS)
    return x.reshape(1, 5, 8, 8)


def judge_coarse_scale(x: np.ndarray) -> tuple[Note | None, OutputJudge]:
    before, after = Model(detector(GRID / 1.6)), Model(detector(GRID))
    judge = OutputJudge(before, [{"x": x}], 1.0, [])
    return judge.accept_if_close(
        before, after, FixCriteria((), noise_factor=1.3), fewer_errors=False
    ), judge


def test_change_that_moves_only_boxes_without_objects_is_accepted() -> None:
    refusal, judge = judge_coarse_scale(image(0.0))
    verdict = judge.verdict
    assert refusal is None and verdict is not None and verdict == judge.compare_detections()
    assert verdict.after == pytest.approx(1.0) and verdict.before < 1.0
    note = verdict.describe_kept_change(["SILU-INNER-Q"])
    assert (note.code, note.values["codes"]) == ("detections-decided", ["SILU-INNER-Q"])


def test_fix_prints_the_agreement_before_and_after() -> None:
    """A zero point of -1 becomes 0, with a scale of 128 instead of 127 steps."""
    fixed = qdqtool.fix(detector(GRID, zero=-1), inputs={"x": image(0.0)})
    numbers = fixed.as_json()["agreement"]
    assert numbers["before"] == pytest.approx(1.0) and numbers["detections"] == OBJECTS
    text = str(render(fixed, "f.onnx", 200))
    assert f"Agreement        1.000 -> {numbers['after']:.3f}" in text
    assert "with this model's own float activations, not with the float model" in text


@pytest.mark.parametrize(
    ("before", "after", "remark"),
    [
        (0.0, 0.86, ", but the model finds objects again: agreement 0.000 -> 0.860"),
        (0.3, 0.86, ""),
        (0.0, 0.1, ""),
    ],
)
def test_warning_of_a_grown_error_states_that_objects_are_found_again(
    before: float, after: float, remark: str
) -> None:
    fixed = replace(
        qdqtool.fix(detector(GRID, zero=-1), inputs={"x": image(0.0)}),
        errors=[OutputError("boxes", "", None, 0.0275, 0.0488)],
        detections=DetectionVerdict(before, after, 0.1, 0.9, 8, 80),
    )
    assert f"warning: an output error grew{remark}. Measure" in str(render(fixed, "f.onnx", 300))


def test_note_on_a_small_loss_does_not_deny_it() -> None:
    equal, loss = (
        str(DetectionVerdict(0.95, after, -0.03, 0.02, 8, 80).describe_kept_change(["A"]))
        for after in (0.95, 0.94)
    )
    assert "do not get worse" in equal and "do not get worse" not in loss
    assert "falls by at most 0.02" in loss


def test_change_that_moves_boxes_of_objects_is_refused() -> None:
    refusal, _ = judge_coarse_scale(image(0.45 * GRID))
    assert refusal is not None and refusal.code == "distance-grows" and "agreement mAP" in refusal


@pytest.mark.parametrize("objects", [0, 4])
def test_few_detections_do_not_permit_a_larger_error(objects: int) -> None:
    x = image(0.0)
    x.reshape(1, 5, 64)[:, 4, objects:] = -5.0
    refusal, judge = judge_coarse_scale(x)
    assert refusal is not None and refusal.code == "distance-grows" and "agreement" not in refusal
    assert judge.compare_detections() is None


class CountingMetric(DetectionAgreementMetric):
    decoded: ClassVar[list[str]] = []

    def prepare_reference(self, reference: Any) -> Any:
        self.decoded.append("reference")
        return super().prepare_reference(reference)

    def observe(self, reference: Any, outputs: Any, image: str) -> Any:
        self.decoded.append("model")
        return super().observe(reference, outputs, image)


def test_tries_of_a_step_share_the_reference() -> None:
    rows = np.stack([image(offset).reshape(1, 5, 64) for offset in (0.0, 2.0, 4.0, 30.0)])
    rows[:, :, 4] = 1 / (1 + np.exp(-rows[:, :, 4]))
    reference, start, first, second = ([{"y": row}] for row in rows)
    judge = DetectionJudge(CountingMetric("y", 1), start)
    verdicts = [judge.compare(outputs, reference) for outputs in (first, second)]
    assert CountingMetric.decoded.count("reference") == 1
    assert CountingMetric.decoded.count("model") == 3
    assert verdicts[0].before == verdicts[1].before > verdicts[1].after
    judge.keep(second)
    judge.start_step()
    assert judge.compare(first, reference).before == verdicts[1].after
    changes = judge.compare_all_changes(reference)
    assert (changes.before, changes.after) == (verdicts[0].before, verdicts[1].after)
    assert judge.compare(first, start).before < 1 == judge.compare(first, second).before
