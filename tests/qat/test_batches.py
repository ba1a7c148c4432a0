from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from qdqtool import qat
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.qat.amax import amax_of
from tests.qat import nets

GENERATOR = torch.Generator().manual_seed(3)
IMAGES = torch.rand(16, 16, 8, 8, generator=GENERATOR)
LABELS = torch.arange(16)


def _prepared() -> nn.Module:
    model = nn.Sequential(nets.conv(), nn.ReLU(), nets.conv())
    qat.prepare(model, IMAGES[:1], report=None)
    return model


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
    ],
)
def test_what_loaders_give(data: object) -> None:
    model = _prepared()
    done = qat.calibrate(model, data, "max")  # type: ignore[arg-type]
    assert done.images == 16
    assert _range(model) == pytest.approx(float(IMAGES.abs().max()))


def test_uint8_images_become_floats_from_0_to_1() -> None:
    model = _prepared()
    pictures = torch.randint(0, 256, (16, 16, 8, 8), dtype=torch.uint8)
    with pytest.warns(UserWarning, match="divided by 255"):
        qat.calibrate(model, [{"img": pictures}], "max")
    assert _range(model) == pytest.approx(float(pictures.max()) / 255)


def test_fn_says_what_of_a_batch() -> None:
    model = _prepared()
    qat.calibrate(model, [("name", IMAGES)], "max", fn=lambda batch: batch[1] * 2)
    assert _range(model) == pytest.approx(2 * float(IMAGES.abs().max()))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([torch.rand(1, 3, 8, 8)], r"batch 0: the network cannot be called with it \(.*\); say with fn="),
        ([{"a": 1, "b": 2}], "a batch is a dict with a, b; say with fn="),
        ([3], "a batch is a int; say with fn="),
        ([("a", "b")], "no tensor for the network"),
        (3, "the data is a int"),
        ("images", "the data is a str"),
        (torch.rand(3), r"a tensor of shape \(3,\)"),
        ([], "gave no batch"),
    ],
)
def test_what_fits_not(data: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        qat.calibrate(_prepared(), data)  # type: ignore[arg-type]


def test_keyword_arguments() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nets.conv(), nets.conv(), nets.conv()

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return self.c(torch.relu(self.a(left)) * torch.relu(self.b(right)))

    model = Two()
    sample = {"left": IMAGES[:1], "right": IMAGES[1:2]}
    qat.prepare(model, sample, report=None)
    qat.calibrate(model, [{"left": IMAGES, "right": IMAGES * 3, "label": LABELS}], "max")
    ranges = [float(amax_of(m._input_quantizer)) for m in (model.a, model.b)]  # type: ignore[arg-type]
    assert ranges[1] == pytest.approx(3 * ranges[0])


def test_too_few_images_and_no_calibration_are_told() -> None:
    model = _prepared()
    with pytest.warns(UserWarning, match="no range yet .* call qdqtool.qat.calibrate"):
        model(IMAGES)
    with pytest.warns(UserWarning, match="calibrated with 1 image: ranges of so few"):
        qat.calibrate(model, [IMAGES[:1]])


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
    assert "--" not in plan.text() and "exclude 'both'" in plan.text()
