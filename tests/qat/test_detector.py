"""The example's detector: its structure gets the placement that the lesson needs, and its measures are right."""

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

import qdqtool
from qdqtool import qat
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.qat import ranges
from qdqtool.qat.modules import amax_of
from qdqtool.qat.networks import freeze, untrained
from tests.qat import nets
from tests.qat.backends import BACKENDS
from tests.raising import raises

FOLDER = Path(__file__).parents[2] / "examples" / "qat_yolov8"


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    """The example's files, which import each other by bare names."""
    sys.path.insert(0, str(FOLDER))
    names = ("shapes", "detector", "training", "evaluation", "naive")
    try:
        yield {n: importlib.import_module(n) for n in names}
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_plan_runs_in_int8_without_avoidable_conversions(
    example: dict[str, ModuleType], backend: str, tmp_path: Path
) -> None:
    model = nets.randomise(example["detector"].Detector(3, 96))
    sample = torch.rand(1, 3, 96, 96)
    plan = qat.prepare(model, sample, backend=backend, report=None)
    assert {name for name, _ in plan.skipped} == {
        "detect.cv2.0.2",
        "detect.cv2.1.2",
        "detect.dfl.conv",
    }
    qat.calibrate(model, [sample])
    done = qat.export(model, tmp_path / "q.onnx", sample)
    assert done.summary["int8"] == len(plan.convolutions) == 37
    assert done.prediction.conversion_nodes == ["/stem/conv/_input_quantizer/QuantizeLinear"]


@pytest.mark.slow
def test_the_naive_placement_costs_conversions(
    example: dict[str, ModuleType], tmp_path: Path
) -> None:
    model = nets.randomise(example["detector"].Detector(3, 96))
    sample = torch.rand(1, 3, 96, 96)
    example["naive"].prepare_naive(model)
    example["naive"].calibrate_naive(model, [sample], "max")
    path = tmp_path / "naive.onnx"
    example["naive"].export_naive(model, str(path), sample)
    summary = qdqtool.predict(path, "trt8.5").summary()
    assert summary["int8"] == 40 and summary["conversions"] > 50


def test_boxes_of_pictures_are_exact(example: dict[str, ModuleType]) -> None:
    pictures, objects = example["shapes"].generate(20, 7)
    again, _ = example["shapes"].generate(20, 7)
    assert np.array_equal(pictures, again)
    assert sum(map(len, objects)) > 30
    for found in objects:
        assert (
            np.all(found[:, 1:3] >= 0)
            and np.all(found[:, 3:] <= 96)
            and np.all(found[:, 3:] - found[:, 1:3] >= 6)
        )
    masks = example["shapes"]._mask
    ys, xs = np.mgrid[0:96, 0:96].astype(np.float32)
    square = masks(1, xs, ys, 10.0, 20.0, 12.0, 8.0, np.random.default_rng(0))
    assert (np.flatnonzero(square.any(0))[[0, -1]] == [10, 21]).all()
    assert (np.flatnonzero(square.any(1))[[0, -1]] == [20, 27]).all()


def test_mean_average_precision(example: dict[str, ModuleType]) -> None:
    measure = example["evaluation"].mean_average_precision
    truth = [np.array([[0, 10, 10, 30, 30], [1, 50, 50, 70, 70]], np.float32)]

    def output(*found: tuple[float, float, float, float, int, float]) -> np.ndarray:
        result = np.zeros((1, 6, len(found)), np.float32)
        for i, (x1, y1, x2, y2, kind, score) in enumerate(found):
            result[0, :4, i] = x1, y1, x2, y2
            result[0, 4 + kind, i] = score
        return result

    right = ((10, 10, 30, 30, 0, 0.9), (50, 50, 70, 70, 1, 0.8))
    assert measure(output(*right), truth, 2) == pytest.approx(100)
    assert measure(output(right[0]), truth, 2) == pytest.approx(50)
    # 16 of 20 pixels: IoU 0.8 exactly at one side cut by 4, so that seven of ten thresholds are met.
    assert measure(output((10, 10, 30, 26.1, 0, 0.9), right[1]), truth, 2) == pytest.approx(
        50 + 50 * 0.7
    )
    # A wrong box with a higher score halves the precision everywhere.
    assert measure(output(*right, (70, 10, 90, 30, 0, 0.95)), truth, 2) == pytest.approx(50 + 25)
    # The same box twice: the second falls to suppression.
    assert measure(output(*right, (10, 10, 30, 30, 0, 0.95)), truth, 2) == pytest.approx(100)


def test_the_loss_is_least_where_boxes_and_classes_are_right(
    example: dict[str, ModuleType],
) -> None:
    training, detector = example["training"], example["detector"]
    points, strides = detector.cells(96)
    targets = training.as_targets([np.array([[1, 16, 24, 48, 56]], np.float32)])
    raw = torch.full((1, 4 * detector.BINS + 3, points.shape[2]), -4.0)
    raw[:, : 4 * detector.BINS] = 0
    base = float(training.loss_of(raw, targets, points, strides))
    cell = int(
        ((points[0, 0] * strides[0, 0] == 28) & (points[0, 1] * strides[0, 0] == 36)).nonzero()[0]
    )
    better = raw.clone()
    box = torch.tensor([16.0, 24.0, 48.0, 56.0]) / 8
    sides = torch.cat((points[0, :, cell] - box[:2], box[2:] - points[0, :, cell]))
    for side, distance in enumerate(sides):  # all weight on the two bins around the distance
        for value, weight in ((int(distance), 1 - distance % 1), (int(distance) + 1, distance % 1)):
            better[0, side * detector.BINS + value, cell] = 20 + torch.log(weight.clamp_min(1e-6))
    better[0, 4 * detector.BINS + 1, cell] = 4.0
    assert float(training.loss_of(better, targets, points, strides)) < 0.5 * base
    wrong = better.clone()
    wrong[0, 4 * detector.BINS :, cell] = torch.tensor([4.0, -4.0, -4.0])
    assert float(training.loss_of(wrong, targets, points, strides)) > float(
        training.loss_of(better, targets, points, strides)
    )


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    )


def test_statistics_of_batches() -> None:
    network = _network().train()
    freeze(network)
    before = copy.deepcopy(network.state_dict())
    network(torch.randn(4, 3, 8, 8))
    assert (
        all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
        and network[0].training
    )
    network.train()(torch.randn(4, 3, 8, 8))
    assert not torch.equal(network[1].running_mean, before["1.running_mean"])
    network = _network()
    assert untrained(network)
    network.train()(torch.randn(4, 3, 8, 8))
    for norm in (
        network[1],
        network[3],
    ):  # as in a copy by moving averages, which leaves out integers
        norm.num_batches_tracked.zero_()
    assert not untrained(network)
    assert not untrained(nn.Sequential(nn.Conv2d(3, 4, 3)))
    assert not untrained(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)))


IMAGES = torch.rand(16, 16, 8, 8, generator=torch.Generator().manual_seed(3))
LABELS = torch.arange(16)


def _prepared() -> nn.Module:
    return nets.prepared(nn.Sequential(nets.conv(), nn.ReLU(), nets.conv()), IMAGES[:1])


def _range(model: nn.Module) -> float:
    amax = amax_of(model[0]._input_quantizer)
    assert amax is not None
    return float(amax)


@pytest.mark.parametrize(
    "data",
    [
        [IMAGES],
        [(IMAGES, LABELS)],
        [[IMAGES, LABELS]],
        [{"img": IMAGES, "cls": LABELS}],
        [{"pixel_values": IMAGES, "labels": LABELS}],
        [IMAGES.numpy()],
        IMAGES,
        IMAGES.numpy(),
        IMAGES.split(4),
        (b for b in IMAGES.split(8)),
        IMAGES.numpy()[:, :, :, ::-1],
        [IMAGES.numpy().astype(">f4")],
    ],
)
def test_what_loaders_give(data: object) -> None:
    model = _prepared()
    done = qat.calibrate(model, data, "max")  # type: ignore[arg-type]
    assert done.images == 16
    assert _range(model) == pytest.approx(float(IMAGES.abs().max()))


class Unread(dict[str, object]):
    """A batch that reads a field when it is asked for, and cannot be shown."""

    def __repr__(self) -> str:
        raise AssertionError("a batch is not shown")

    items = values = __len__ = __iter__ = __repr__  # type: ignore[assignment]


def test_of_a_batch_is_read_what_is_asked_for() -> None:
    model = _prepared()
    batch = (Unread(image=IMAGES), "half a character \ud83d")
    assert qat.calibrate(model, iter([batch]), "max", fn=lambda b: b[0]["image"]).images == 16
    assert qat.sensitivity(model, iter([batch]), fn=lambda b: b[0]["image"])


def test_an_array_keeps_its_order_in_memory() -> None:
    """What torch takes as it is, is not copied: a map of a large file stays one, and activations have that order."""
    values = IMAGES.numpy().transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
    seen: list[torch.Tensor] = []

    def fn(batch: np.ndarray) -> np.ndarray:
        seen.append(ranges.call_for(batch, None, None, None).tensors[0])  # type: ignore[arg-type]
        return batch

    qat.calibrate(_prepared(), [values], fn=fn)
    assert (
        np.shares_memory(seen[0].numpy(), values)
        and seen[0].stride() == torch.from_numpy(values).stride()
    )


def test_a_loader_whose_length_raises() -> None:
    class Endless:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([IMAGES])

        def __len__(self) -> int:
            raise NotImplementedError

    assert qat.calibrate(_prepared(), Endless(), "max").images == 16


def test_batches_of_other_kinds() -> None:
    model = _prepared()
    pictures = torch.randint(0, 256, (16, 16, 8, 8), dtype=torch.uint8)
    with pytest.warns(UserWarning, match="divided by 255"):
        qat.calibrate(model, [{"img": pictures}], "max")
    assert _range(model) == pytest.approx(float(pictures.max()) / 255)
    model = _prepared()
    qat.calibrate(model, [("name", IMAGES)], "max", fn=lambda batch: batch[1] * 2)
    assert _range(model) == pytest.approx(2 * float(IMAGES.abs().max()))
    model = _prepared()
    with pytest.warns(UserWarning, match=r"qdqtool\.qat\.calibrate"):
        model(IMAGES)
    with pytest.warns(UserWarning, match=r"\b1 image\b"):
        qat.calibrate(model, [IMAGES[:1]])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([torch.rand(0, 3, 8, 8)], "_look 0x3x8x8"),
        ([torch.rand(1, 3, 8, 8)], "answer 0"),
        ([{"a": 1, "b": 2}], "_of_dict fn="),
        ([3], "call_for fn="),
        ([("a", "b")], "call_for network"),
        (3, "require data=3"),
        ("images", "require data='images'"),
        (torch.rand(3), "batches_of 3"),
        (np.array([None]), "batches_of 1"),
        ([np.array([None])], "_tensor_of object_"),
        ([], "_look batch"),
    ],
)
def test_what_fits_not(data: object, said: str) -> None:
    with raises(QdqtoolError, said):
        qat.calibrate(_prepared(), data)  # type: ignore[arg-type]


def test_keyword_arguments() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nets.conv(), nets.conv(), nets.conv()

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return self.c(torch.relu(self.a(left)) * torch.relu(self.b(right)))

    model = nets.prepared(Two(), {"left": IMAGES[:1], "right": IMAGES[1:2]})
    qat.calibrate(model, [{"left": IMAGES, "right": IMAGES * 3, "label": LABELS}], "max")
    ranges = [float(amax_of(m._input_quantizer)) for m in (model.a, model.b)]  # type: ignore[arg-type]
    assert ranges[1] == pytest.approx(3 * ranges[0])


def test_errors_name_arguments_and_not_options() -> None:
    model = _prepared()
    with pytest.raises(QdqtoolError, match="method_for") as caught:
        qat.calibrate(model, [IMAGES], method_for=[("nothing", "max")])
    assert "--" not in str(caught.value)
    broken = IMAGES.clone()
    broken[0, 0, 0, 0] = np.nan
    with pytest.raises(DataError, match="`exclude`") as caught:
        qat.calibrate(model, [broken])
    assert "--" not in str(caught.value)
    plan = qat.plan(nets.Shared(), torch.randn(1, 16, 8, 8), exclude=["both"])
    assert "--" not in plan.text() and "excluded by `exclude` both" in plan.text()
