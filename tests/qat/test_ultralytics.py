"""The whole way through a real Ultralytics: train, checkpoints, resume, val, predict, export, and a compiler's build.

Ultralytics is under the AGPL-3.0 and only a dependency of these tests and of benchmarks; where it is not installed they
skip and say so. The network is a small one of their blocks, the pictures are made here.
"""

import copy
import importlib.util
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn

import qdqtool
from qdqtool import qat
from qdqtool.errors import BuilderError, QdqtoolError
from qdqtool.qat.modules import quantizers_of
from qdqtool.qat.networks import exporting_heads, merge_branches, mergeable
from tests.qat import nets
from tests.qat.backends import BACKENDS
from tests.qat.torchvision_ops import usable_torchvision
from tests.raising import raises

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.mkdtemp(prefix="ultralytics"))
os.environ.setdefault("YOLO_OFFLINE", "True")
os.environ.setdefault("YOLO_AUTOINSTALL", "false")
SIZE = 64
CONFIG = {
    "nc": 2,
    "backbone": [
        [-1, 1, "Conv", [16, 3, 2]],
        [-1, 1, "Conv", [32, 3, 2]],
        [-1, 1, "C2f", [32, True]],
        [-1, 1, "Conv", [64, 3, 2]],
        [-1, 1, "SPPF", [64, 5]],
    ],
    "head": [
        [-1, 1, "nn.Upsample", [None, 2, "nearest"]],
        [[-1, 2], 1, "Concat", [1]],
        [-1, 1, "C2f", [32]],
        [[7, 4], 1, "Detect", ["nc"]],
    ],
}


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Importing torchvision takes as long as torch: not where these tests are only collected."""
    if importlib.util.find_spec("ultralytics") is None or not usable_torchvision():
        pytest.skip("needs ultralytics and torchvision (pip install ultralytics)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with one bright square each, their labels, and a checkpoint of a network that has seen data."""
    from ultralytics import YOLO

    where = tmp_path_factory.mktemp("ultralytics")
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        for kind in ("images", "labels"):
            (where / kind / split).mkdir(parents=True)
        for i in range(count):
            picture = (rng.random((SIZE, SIZE, 3)) * 60).astype(np.uint8)
            x, y = rng.integers(4, SIZE - 28, 2)
            picture[y : y + 24, x : x + 24] = 200
            Image.fromarray(picture).save(where / "images" / split / f"{i}.png")
            box = f"{i % 2} {(x + 12) / SIZE} {(y + 12) / SIZE} {24 / SIZE} {24 / SIZE}\n"
            (where / "labels" / split / f"{i}.txt").write_text(box)
    data = {
        "path": str(where),
        "train": "images/train",
        "val": "images/val",
        "names": {0: "a", 1: "b"},
    }
    (where / "data.yaml").write_text(yaml.safe_dump(data))
    (where / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    yolo = YOLO(str(where / "tiny.yaml"), task="detect")
    nets.randomise(yolo.model)
    yolo.save(str(where / "float.pt"))
    return where


def _options(folder: Path, **changes: Any) -> dict[str, Any]:
    from qdqtool.qat.ultralytics import RECIPE

    return {
        **RECIPE,
        "data": str(folder / "data.yaml"),
        "imgsz": SIZE,
        "batch": 2,
        "epochs": 2,
        "device": "cpu",
        "workers": 0,
        "plots": False,
        "project": str(folder / "runs"),
        "exist_ok": True,
        "verbose": False,
        **changes,
    }


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The folder of the checkpoints of an epoch."""
    from qdqtool.qat.ultralytics import Trainer

    yolo = _yolo(folder / "float.pt")
    seen: dict[str, int] = {}

    def at_end(trainer: Any) -> None:
        seen.update(model=_count(trainer.model), ema=_count(trainer.ema.ema))
        seen["frozen"] = sum(
            m.training for m in trainer.model.modules() if isinstance(m, nn.BatchNorm2d)
        )

    yolo.add_callback("on_train_batch_end", at_end)
    shapes: list[tuple[int, ...]] = []
    watched = Trainer._images

    def watching(trainer: Any, count: int) -> Iterator[torch.Tensor]:
        for images in watched(trainer, count):
            shapes.append(tuple(images.shape))
            yield images

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_images", watching)
        with pytest.warns(UserWarning, match="calibrated with 6 images"):
            yolo.train(
                trainer=Trainer.with_options(freeze_norms=True),
                **_options(folder, name="first", epochs=1),
            )
    assert shapes == [(2, 3, SIZE, SIZE)] * 3  # squares of the size of training
    assert seen["model"] == seen["ema"] == _count(yolo.model) > 20 and seen["frozen"] == 0
    return folder / "runs" / "first" / "weights"


def _count(model: nn.Module) -> int:
    return len(list(quantizers_of(model)))


def _yolo(path: Path) -> Any:
    from ultralytics import YOLO

    return YOLO(str(path))


def test_checkpoints_keep_ranges_and_export_their_pairs(folder: Path, trained: Path) -> None:
    before, after = _yolo(folder / "float.pt").model, _yolo(trained / "last.pt").model
    assert _count(before) == 0 and _count(after) > 20
    state = after.state_dict()
    assert all(float(v) > 0 for k, v in state.items() if k.endswith("_amax"))
    assert not torch.equal(state["model.0.conv.weight"], before.state_dict()["model.0.conv.weight"])
    frozen = "model.0.bn.running_mean"
    torch.testing.assert_close(
        state[frozen], before.state_dict()[frozen], rtol=2e-3, atol=2e-3
    )  # saved as float16
    written = _yolo(trained / "last.pt").export(
        format="onnx", imgsz=SIZE, device="cpu", simplify=False
    )
    summary = qdqtool.predict(written).summary()
    assert summary["int8"] == len(
        qat.preparation.plan_of(_yolo(trained / "last.pt").model).convolutions
    )


def test_resume_goes_on_with_the_quantizers(folder: Path, trained: Path) -> None:
    from qdqtool.qat.ultralytics import Trainer

    stopped = _yolo(folder / "float.pt")

    def stop(trainer: Any) -> None:
        if trainer.epoch == 1:
            raise InterruptedError("as if the power had failed")

    stopped.add_callback("on_train_epoch_start", stop)
    with pytest.raises(InterruptedError), pytest.warns(UserWarning, match="calibrated with"):
        stopped.train(trainer=Trainer, **_options(folder, name="second"))
    path = folder / "runs" / "second" / "weights" / "last.pt"
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    ranges = {
        k: v for k, v in checkpoint["ema"].float().state_dict().items() if k.endswith("_amax")
    }
    yolo = _yolo(path)
    yolo.train(trainer=Trainer, resume=True)
    assert yolo.trainer.start_epoch == checkpoint["epoch"] + 1 == 1
    resumed = yolo.trainer.ema.ema.float().state_dict()
    assert ranges and all(torch.equal(resumed[k], v) for k, v in ranges.items())


@pytest.fixture(scope="module")
def fresh(trained: Path) -> qat.Export:
    """The best checkpoint as a file."""
    return qat.export(
        _yolo(trained / "best.pt"), trained / "fresh.onnx", torch.zeros(1, 3, SIZE, SIZE)
    )


def test_val_and_predict_run_and_the_export_is_as_planned(
    folder: Path, trained: Path, fresh: qat.Export, tmp_path: Path
) -> None:
    yolo = _yolo(trained / "best.pt")
    plan = qat.preparation.plan_of(yolo.model)
    assert fresh.summary["int8"] == len(plan.convolutions) and fresh.summary["conversions"] == 1
    assert fresh.check.worst < 2e-3 and fresh.noise == fresh.noise
    yolo.val(
        data=str(folder / "data.yaml"),
        imgsz=SIZE,
        device="cpu",
        plots=False,
        project=str(tmp_path),
        workers=0,
    )
    yolo.predict(str(folder / "images" / "val" / "0.png"), imgsz=SIZE, device="cpu", verbose=False)
    yolo.fuse(verbose=False)
    assert yolo.model.is_fused() and _count(yolo.model) == 2 * len(plan.convolutions) + 2
    fused = qat.export(
        yolo, tmp_path / "fused.onnx", torch.zeros(1, 3, SIZE, SIZE)
    )  # folded by Ultralytics
    assert fused.summary == fresh.summary
    ours = _yolo(trained / "fresh.onnx")  # reads names, stride and task from the model
    result = ours.predict(
        str(folder / "images" / "val" / "0.png"), imgsz=SIZE, device="cpu", verbose=False
    )
    assert result[0].names == {0: "a", 1: "b"}


def test_the_compiler_builds_it_as_predicted(fresh: qat.Export) -> None:
    from qdqtool.verification.api import verify_with_builder

    try:
        found = verify_with_builder(fresh.path, "tensorrt-rtx")
    except BuilderError as error:
        pytest.skip(f"TensorRT-RTX is not installed: {error}")
    assert found.convolutions["agree"] == found.convolutions["total"] > 10


def test_quantizers_that_would_be_lost(folder: Path, trained: Path) -> None:
    with raises(QdqtoolError, "_check_load"):
        _yolo(trained / "last.pt").train(**_options(folder, name="lost", epochs=1))
    with raises(QdqtoolError, "_check_export format='torchscript"):
        _yolo(trained / "last.pt").export(format="torchscript", imgsz=SIZE, device="cpu")
    prepared = nets.prepared(_yolo(folder / "float.pt"), torch.zeros(1, 3, SIZE, SIZE))
    with raises(QdqtoolError, "_check_load"):
        prepared.train(**_options(folder, name="lost", epochs=1))
    from qdqtool.qat.ultralytics import Trainer

    yolo = _yolo(folder / "float.pt")
    plan = qat.prepare(yolo, torch.zeros(1, 3, SIZE, SIZE), exclude=[r"^model\.0\."], report=None)
    with pytest.warns(UserWarning, match="calibrated with"):
        qat.calibrate(
            yolo, [{"img": torch.randint(0, 255, (2, 3, SIZE, SIZE), dtype=torch.uint8), "cls": []}]
        )
    yolo.train(trainer=Trainer, **_options(folder, name="hand", epochs=1))
    kept = qat.preparation.plan_of(yolo.model)
    assert kept.convolutions == plan.convolutions and "model.0.conv" not in kept.convolutions


def test_options_and_tasks(folder: Path) -> None:
    from ultralytics.models import rtdetr, yolo

    from qdqtool.qat import ultralytics as room

    made = room.Trainer.with_options(target="trt10", exclude=["x"])
    assert (
        made.options.target == "trt10"
        and made.options.exclude == ("x",)
        and issubclass(made, room.Trainer)
    )
    with raises(QdqtoolError, "QuantizedTraining.with_options images_"):
        room.Trainer.with_options(images_=3)
    assert issubclass(room.trainer_for(_yolo(folder / "float.pt")), yolo.detect.DetectionTrainer)
    assert issubclass(room._made(rtdetr.train.RTDETRTrainer), room.QuantizedTraining)


@pytest.mark.slow
def test_the_trainer_is_found_in_the_processes_of_other_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing made it before, as in a module that is imported anew."""
    from ultralytics.models import yolo

    from qdqtool.qat import ultralytics as room

    made = [room._made(yolo.segment.SegmentationTrainer), room.Trainer]
    written = pickle.dumps(made)
    monkeypatch.setattr(qat, "ultralytics", room)  # what the import below replaces, it gets back
    monkeypatch.delitem(sys.modules, room.__name__)
    found = pickle.loads(written)
    assert [t.__name__ for t in found] == [t.__name__ for t in made]
    assert all(issubclass(t, sys.modules[room.__name__].QuantizedTraining) for t in found)
    assert not set(found) & set(made)
    with pytest.raises(AttributeError, match="QuantizedNothing"):
        room.QuantizedNothing  # noqa: B018


def test_calibration_images_are_spread_over_the_data_set() -> None:
    from qdqtool.qat.ultralytics import spread

    assert spread(10, 4, 100) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert spread(1000, 16, 128) == [
        list(range(s, min(s + 16, 1000))) for s in (0, 144, 288, 432, 560, 704, 848, 992)
    ]
    assert spread(3, 1, 1) == [[0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_of_modelopt_are_left_alone(backend: str, folder: Path) -> None:
    from ultralytics.utils.torch_utils import is_qat

    image = torch.rand(1, 3, SIZE, SIZE)
    with pytest.warns(UserWarning, match="calibrated with"):
        yolo = nets.ready(_yolo(folder / "float.pt"), image, backend=backend)
    assert not is_qat(yolo.model)
    with torch.no_grad(), exporting_heads(yolo.model):
        wanted = yolo.model.eval()(image)
        fused = copy.deepcopy(yolo.model).fuse(verbose=False)(image)
    assert float((wanted - fused).abs().mean()) < 0.05 * float(wanted.std())


def test_anchors_fit_after_the_head_was_switched(folder: Path) -> None:
    yolo = _yolo(folder / "float.pt")
    with torch.no_grad():
        wanted = yolo.model.eval()(large := torch.rand(1, 3, 2 * SIZE, 2 * SIZE))[0]
        with exporting_heads(yolo.model):
            yolo.model(torch.rand(1, 3, SIZE, SIZE))
        assert torch.equal(yolo.model(large)[0], wanted)


def test_branches_are_merged_first() -> None:
    from ultralytics.nn.modules import RepConv
    from ultralytics.nn.modules.block import RepVGGDW

    model = nets.randomise(
        nn.Sequential(nn.Conv2d(3, 32, 3), RepConv(32, 32), RepVGGDW(32), nn.Conv2d(32, 32, 1))
    )
    x = torch.rand(1, 3, 24, 24)
    with torch.no_grad():
        wanted = model.eval()(x)
        plan = qat.prepare(copied := copy.deepcopy(model), x, report=None)
        assert plan.merged == ["1", "2"] and len(plan.convolutions) == 4
        assert _count(model) == 0 and merge_branches(copied) == [] and mergeable(model)
        with qat.disabled(copied):
            torch.testing.assert_close(copied.eval()(x), wanted, rtol=1e-3, atol=1e-4)
    assert all(p.requires_grad for p in copied.parameters())
