import numpy as np
import pytest

from calibration import FocusMap
from qdqtool.insertion.output_errors import ReferenceOutputs, find_last_convolution_outputs
from qdqtool.ir.graph import Model
from tests.insertion.nets import Net, detector, relative_error

ZERO = np.zeros((1, 2, 2, 2), np.float32)


@pytest.mark.parametrize(
    ("before", "after"), [(ZERO, ZERO), (ZERO, ZERO + 1.0), (ZERO[:0], ZERO[:0])]
)
def test_compared_error_of_constant_output_is_zero(before: np.ndarray, after: np.ndarray) -> None:
    assert ReferenceOutputs({"a": before}, None).error({"a": after}) == 0.0


def test_compared_error_counts_focused_positions() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.normal(size=(2, 2, 3, 4, 4)).astype(np.float32)
    masks = rng.random((2, 4, 4)) < 0.4
    focus, at = FocusMap(list(masks)), np.broadcast_to(masks[:, None], before.shape)
    compared = ReferenceOutputs({"map": before}, focus)
    expected = relative_error(before[at].astype(np.float64), after[at].astype(np.float64))
    assert compared.error({"map": after}) == pytest.approx(expected, rel=1e-9)
    assert compared.nbytes == 8 * at.sum()
    row = rng.normal(size=(2, 5)).astype(np.float32)  # no map: every value counts
    assert ReferenceOutputs({"row": row}, focus).error({"row": 3.0 - row}) == pytest.approx(
        relative_error(row, 3.0 - row), rel=1e-6
    )
    assert ReferenceOutputs({"map": before, "row": row}, None).error(
        {"map": after, "row": row}
    ) == pytest.approx(relative_error(before, after) / 2)


def test_compared_tensors_of_yolov8_are_box_and_class_outputs() -> None:
    assert len(find_last_convolution_outputs(Model(detector()))) == 6  # two of each of three levels


def test_compared_tensors_of_classifier_are_outputs(net: Net) -> None:
    flat = net.op("Flatten", "flat", net.op("Relu", "r", net.conv("c", "x")))
    scores = net.op("Gemm", "fc", flat, net.const("w", np.ones((1024, 4))))
    assert find_last_convolution_outputs(net.output(net.op("Softmax", "s", scores)).index()) == [
        "s.out"
    ]
