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
from qdqtool.errors import DataError
from qdqtool.qat import batches
from qdqtool.qat.batch_norms import freeze_batch_norms, is_untrained
from tests.errors import has
from tests.qat import nets
from tests.qat.backends import BACKENDS

FOLDER = Path(__file__).parents[2] / "examples" / "qat_yolov8"


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    """Import the files of the example, which import each other as top-level modules."""
    sys.path.insert(0, str(FOLDER))
    names = ("shapes", "detector", "training", "evaluation", "naive")
    try:
        yield {n: importlib.import_module(n) for n in names}
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_example_runs_in_int8_without_avoidable_conversions(
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
    export = qat.export(model, tmp_path / "q.onnx", sample)
    assert export.summary["int8"] == len(plan.convolutions) == 37
    assert export.prediction.conversion_nodes == ["/stem/conv/_input_quantizer/QuantizeLinear"]


@pytest.mark.slow
def test_naive_placement_costs_conversions(example: dict[str, ModuleType], tmp_path: Path) -> None:
    model = nets.randomise(example["detector"].Detector(3, 96))
    sample = torch.rand(1, 3, 96, 96)
    example["naive"].prepare_naive(model)
    example["naive"].calibrate_naive(model, [sample], "max")
    path = tmp_path / "naive.onnx"
    example["naive"].export_naive(model, str(path), sample)
    summary = qdqtool.predict(path, "trt8.5").summary()
    assert summary["int8"] == 40 and summary["conversions"] > 50


def test_generated_boxes_are_inside_image(example: dict[str, ModuleType]) -> None:
    (pictures, objects), (again, _) = (example["shapes"].generate(20, 7) for _ in range(2))
    assert np.array_equal(pictures, again)
    boxes = np.concatenate(objects)[:, 1:]
    assert len(boxes) > 30 and boxes[:, :2].min() >= 0 and boxes[:, 2:].max() <= 96
    assert (boxes[:, 2:] - boxes[:, :2]).min() >= 6


def test_generated_boxes_are_exact(example: dict[str, ModuleType]) -> None:
    """The brightness changes more at the sides of a rectangle than one pixel inside it."""
    pictures, objects = example["shapes"].generate(20, 7)
    steps = []
    for picture, objects_in in zip(pictures.astype(float), objects, strict=True):
        for x1, y1, x2, y2 in objects_in[objects_in[:, 0] == 1, 1:].astype(int):
            rows = picture[:, y1:y2].mean(1)[:, max(x1 - 1, 0) : x1 + 2]
            if x1 > 0:
                steps.append(np.abs(np.diff(rows)).max(0))
            columns = picture[:, :, x1:x2].mean(2)[:, y2 - 2 : y2 + 1]
            if y2 < 96:
                steps.append(np.abs(np.diff(columns)).max(0)[::-1])
    outside, inside = np.array(steps).T
    assert len(steps) > 15 and (outside > 2 * inside).mean() > 0.9


def test_mean_average_precision(example: dict[str, ModuleType]) -> None:
    measure = example["evaluation"].mean_average_precision
    truth = [np.array([[0, 10, 10, 30, 30], [1, 50, 50, 70, 70]], np.float32)]

    def output(*boxes: tuple[float, float, float, float, int, float]) -> np.ndarray:
        result = np.zeros((1, 6, len(boxes)), np.float32)
        for i, (x1, y1, x2, y2, kind, score) in enumerate(boxes):
            result[0, :4, i] = x1, y1, x2, y2
            result[0, 4 + kind, i] = score
        return result

    right = ((10, 10, 30, 30, 0, 0.9), (50, 50, 70, 70, 1, 0.8))
    for boxes, value in (
        (right, 100),
        (right[:1], 50),
        # The IoU is a little over 0.8, which meets seven of ten thresholds.
        (((10, 10, 30, 26.1, 0, 0.9), right[1]), 50 + 50 * 0.7),
        # A wrong box with a higher score halves the precision everywhere.
        ((*right, (70, 10, 90, 30, 0, 0.95)), 50 + 25),
        # The same box twice: the second falls to suppression.
        ((*right, (10, 10, 30, 30, 0, 0.95)), 100),
    ):
        assert measure(output(*boxes), truth, 2) == pytest.approx(value), boxes


def test_loss_is_smaller_for_right_boxes_and_classes(
    example: dict[str, ModuleType],
) -> None:
    training, detector = example["training"], example["detector"]
    points, strides = detector.cells(96)
    targets = training.as_targets([np.array([[1, 16, 24, 48, 56]], np.float32)])
    raw = torch.full((1, 4 * detector.BINS + 3, points.shape[2]), -4.0)
    raw[:, : 4 * detector.BINS] = 0
    base = float(training.compute_loss(raw, targets, points, strides))
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
    loss = float(training.compute_loss(better, targets, points, strides))
    assert loss < 0.5 * base
    better[0, 4 * detector.BINS :, cell] = torch.tensor([4.0, -4.0, -4.0])  # another class
    assert float(training.compute_loss(better, targets, points, strides)) > loss


def normalized_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    )


BATCH = torch.randn(4, 3, 8, 8)


def test_frozen_norms_keep_statistics_until_train() -> None:
    network = normalized_network().train()
    freeze_batch_norms(network)
    before = copy.deepcopy(network.state_dict())
    network(BATCH)
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    assert network[0].training
    network.train()(BATCH)
    assert not torch.equal(network[1].running_mean, before["1.running_mean"])


def test_is_untrained_reads_statistics() -> None:
    network = normalized_network()
    assert is_untrained(network)
    network.train()(BATCH)
    for norm in (network[1], network[3]):
        norm.num_batches_tracked.zero_()  # as in a moving average of the weights, without integers
    assert not is_untrained(network)


@pytest.mark.parametrize(
    "module", [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(3, track_running_stats=False)]
)
def test_is_untrained_needs_statistics(module: nn.Module) -> None:
    assert not is_untrained(nn.Sequential(module))


IMAGES = torch.rand(16, 16, 8, 8, generator=torch.Generator().manual_seed(3))
LABELS = torch.arange(16)


def prepared() -> nn.Module:
    return nets.prepared(nn.Sequential(nets.conv(), nn.ReLU(), nets.conv()), IMAGES[:1])


INPUT = "0._input_quantizer"
LARGEST = float(IMAGES.abs().max())


@pytest.fixture
def model() -> nn.Module:
    return prepared()


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
def test_calibrate_accepts_data(data: object, model: nn.Module) -> None:
    assert qat.calibrate(model, data, "max").images == 16  # type: ignore[arg-type]
    assert nets.range_of(model, INPUT) == pytest.approx(LARGEST)


class Unread(dict[str, object]):
    def __repr__(self) -> str:
        raise AssertionError("a batch is not printed")

    items = values = __len__ = __iter__ = __repr__  # type: ignore[assignment]


def test_fn_reads_only_its_part_of_a_batch(model: nn.Module) -> None:
    batch = (Unread(image=IMAGES), "half a character \ud83d")
    assert qat.calibrate(model, iter([batch]), "max", fn=lambda b: b[0]["image"] * 2).images == 16
    assert nets.range_of(model, INPUT) == pytest.approx(2 * LARGEST)
    assert qat.sensitivity(model, iter([batch]), fn=lambda b: b[0]["image"])


def test_array_is_not_copied() -> None:
    """Memory maps of large files are not read, and activations keep their memory order."""
    values = IMAGES.numpy().transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
    tensor = batches.convert_batch(values, None, None, None).tensors[0]  # type: ignore[arg-type]
    assert np.shares_memory(tensor.numpy(), values)
    assert tensor.stride() == torch.from_numpy(values).stride()


def test_loader_whose_length_raises() -> None:
    class Endless:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([IMAGES])

        def __len__(self) -> int:
            raise NotImplementedError

    assert qat.calibrate(prepared(), Endless(), "max").images == 16


def test_uint8_images_are_divided_by_255(model: nn.Module) -> None:
    pictures = torch.randint(0, 256, (16, 16, 8, 8), dtype=torch.uint8)
    with pytest.warns(UserWarning, match="divided by 255"):
        qat.calibrate(model, [{"img": pictures}], "max")
    assert nets.range_of(model, INPUT) == pytest.approx(float(pictures.max()) / 255)


def test_call_before_calibration_warns() -> None:
    with pytest.warns(UserWarning, match=r"qdqtool\.qat\.calibrate"):
        prepared()(IMAGES)


def test_calibration_on_one_image_warns() -> None:
    with pytest.warns(UserWarning, match=r"\b1 image\b") as warnings:
        qat.calibrate(prepared(), [IMAGES[:1]])
    assert warnings[0].filename == __file__, "the warning names the line of the caller"


@pytest.mark.parametrize(
    ("data", "code", "value"),
    [
        pytest.param([torch.rand(0, 3, 8, 8)], "empty", "0x3x8x8", id="empty batch"),
        pytest.param([torch.rand(1, 3, 8, 8)], "wrong-call", "batch 0", id="other channels"),
        pytest.param([{"a": 1, "b": 2}], "unknown-keys", "give `fn`", id="unknown keys"),
        pytest.param([3], "wrong-type", "give `fn`", id="number as batch"),
        pytest.param([("a", "b")], "batch-without-tensor", "network", id="no tensor"),
        pytest.param(torch.rand(3), "wrong-shape", "3", id="vector"),
        pytest.param(np.array([None]), "wrong-shape", "1", id="array of objects"),
        pytest.param([np.array([None])], "unsupported-array", "object_", id="batch of objects"),
        pytest.param([], "no-batches", "batch", id="no batch"),
    ],
)
def test_calibrate_refuses_data(data: object, code: str, value: str) -> None:
    with pytest.raises(DataError, check=has(code, parameter="data"), match=value):
        qat.calibrate(prepared(), data)  # type: ignore[arg-type]


def test_batch_of_keyword_arguments() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nets.conv(), nets.conv(), nets.conv()

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return self.c(torch.relu(self.a(left)) * torch.relu(self.b(right)))

    model = nets.prepared(Two(), {"left": IMAGES[:1], "right": IMAGES[1:2]})
    qat.calibrate(model, [{"left": IMAGES, "right": IMAGES * 3, "label": LABELS}], "max")
    left, right = (nets.range_of(model, f"{name}._input_quantizer") for name in "ab")
    assert right == pytest.approx(3 * left)
