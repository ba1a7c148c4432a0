"""Training, resuming, validation, prediction and export with Ultralytics, and a build.

Ultralytics has the license AGPL-3.0. Only these tests and the benchmarks depend on it, and the
tests are skipped without it. The network is a small stack of Ultralytics' blocks, and the images
are generated here.
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

import qdqtool
from qdqtool import qat
from qdqtool.errors import BuilderError, QdqtoolError
from qdqtool.qat.modules import find_quantizers
from qdqtool.qat.networks import can_merge_branches, merge_branches, switch_heads_to_export
from tests.errors import has
from tests.qat import nets
from tests.qat.backends import BACKENDS
from tests.qat.torchvision_ops import usable_torchvision

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
def training() -> Any:
    """Import `qdqtool.qat.ultralytics` late: torchvision takes too long during collection."""
    if importlib.util.find_spec("ultralytics") is None or not usable_torchvision():
        pytest.skip("needs ultralytics and torchvision (pip install ultralytics)")
    return importlib.import_module("qdqtool.qat.ultralytics")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def training_options(folder: Path, **changes: Any) -> dict[str, Any]:
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
def trained(training: Any, folder: Path) -> Path:
    yolo = open_yolo(folder / "float.pt")
    counts: dict[str, int] = {}
    shapes: list[tuple[int, ...]] = []

    class Watched(training.Trainer):  # type: ignore[misc, valid-type]
        def calibration_batches(self, count: int) -> Iterator[torch.Tensor]:
            for images in super().calibration_batches(count):
                shapes.append(tuple(images.shape))
                yield images

    def count(trainer: Any) -> None:
        norms = [m for m in trainer.model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
        counts.update(model=count_quantizers(trainer.model))
        counts.update(
            ema=count_quantizers(trainer.ema.ema), learning=sum(m.training for m in norms)
        )

    yolo.add_callback("on_train_batch_end", count)
    with pytest.warns(UserWarning, match="calibrated with 6 images"):
        yolo.train(
            trainer=Watched.with_options(freeze_norms=True),
            **training_options(folder, name="first", epochs=1),
        )
    assert shapes == [(2, 3, SIZE, SIZE)] * 3  # squares of the size of training
    assert counts["model"] == counts["ema"] == count_quantizers(yolo.model) > 20
    assert counts["learning"] == 0
    return folder / "runs" / "first" / "weights"


def count_quantizers(model: torch.nn.Module) -> int:
    return len(list(find_quantizers(model)))


def open_yolo(path: Path) -> Any:
    from ultralytics import YOLO

    return YOLO(str(path))


def test_checkpoint_keeps_ranges(folder: Path, trained: Path) -> None:
    before, after = (open_yolo(path).model for path in (folder / "float.pt", trained / "last.pt"))
    assert count_quantizers(before) == 0 and count_quantizers(after) > 20
    old, new = before.state_dict(), after.state_dict()
    assert all(float(v) > 0 for k, v in new.items() if k.endswith("_amax"))
    assert not torch.equal(new["model.0.conv.weight"], old["model.0.conv.weight"])
    frozen = "model.0.bn.running_mean"  # saved as float16
    torch.testing.assert_close(new[frozen], old[frozen], rtol=2e-3, atol=2e-3)


def test_export_of_ultralytics_keeps_pairs(trained: Path) -> None:
    options = {"format": "onnx", "imgsz": SIZE, "device": "cpu", "simplify": False}
    summary = qdqtool.predict(open_yolo(trained / "last.pt").export(**options)).summary()
    plan = qat.preparation.read_plan(open_yolo(trained / "last.pt").model)
    assert summary["int8"] == len(plan.convolutions)


def test_resume_keeps_ranges(training: Any, folder: Path) -> None:
    stopped = open_yolo(folder / "float.pt")

    def stop(trainer: Any) -> None:
        if trainer.epoch == 1:
            raise InterruptedError("as if the power had failed")

    stopped.add_callback("on_train_epoch_start", stop)
    with pytest.raises(InterruptedError), pytest.warns(UserWarning, match="calibrated with"):
        stopped.train(trainer=training.Trainer, **training_options(folder, name="second"))
    path = folder / "runs" / "second" / "weights" / "last.pt"
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    ranges = {
        k: v for k, v in checkpoint["ema"].float().state_dict().items() if k.endswith("_amax")
    }
    yolo = open_yolo(path)
    yolo.train(trainer=training.Trainer, resume=True)
    assert yolo.trainer.start_epoch == checkpoint["epoch"] + 1 == 1
    resumed = yolo.trainer.ema.ema.float().state_dict()
    assert ranges and all(torch.equal(resumed[k], v) for k, v in ranges.items())


@pytest.fixture(scope="module")
def fresh(trained: Path) -> qat.Export:
    return qat.export(
        open_yolo(trained / "best.pt"), trained / "fresh.onnx", torch.zeros(1, 3, SIZE, SIZE)
    )


def predict_image(yolo: Any, folder: Path) -> Any:
    path = str(folder / "images" / "val" / "0.png")
    return yolo.predict(path, imgsz=SIZE, device="cpu", verbose=False)


def test_export_is_as_planned(trained: Path, fresh: qat.Export) -> None:
    plan = qat.preparation.read_plan(open_yolo(trained / "best.pt").model)
    assert fresh.summary["int8"] == len(plan.convolutions) and fresh.summary["conversions"] == 1
    assert fresh.check.worst < 2e-3 and np.isfinite(fresh.noise)


def test_val_and_predict_run_with_quantizers(folder: Path, trained: Path, tmp_path: Path) -> None:
    yolo = open_yolo(trained / "best.pt")
    options = training_options(folder, project=str(tmp_path))
    yolo.val(**{k: options[k] for k in ("data", "imgsz", "device", "plots", "project", "workers")})
    predict_image(yolo, folder)


def test_fused_network_is_exported_the_same(
    trained: Path, fresh: qat.Export, tmp_path: Path
) -> None:
    """Ultralytics folds BatchNormalization itself."""
    yolo = open_yolo(trained / "best.pt")
    yolo.fuse(verbose=False)
    convolutions = len(qat.preparation.read_plan(yolo.model).convolutions)
    assert yolo.model.is_fused() and count_quantizers(yolo.model) == 2 * convolutions + 2
    fused = qat.export(yolo, tmp_path / "fused.onnx", torch.zeros(1, 3, SIZE, SIZE))
    assert fused.summary == fresh.summary


def test_ultralytics_reads_metadata_of_export(folder: Path, fresh: qat.Export) -> None:
    (result,) = predict_image(open_yolo(Path(fresh.path)), folder)
    assert result.names == {0: "a", 1: "b"}


def test_tensorrt_rtx_builds_export_as_predicted(fresh: qat.Export) -> None:
    from qdqtool.verification.api import verify_with_builder

    try:
        verification = verify_with_builder(fresh.path, "tensorrt-rtx")
    except BuilderError as error:
        pytest.skip(f"TensorRT-RTX is not installed: {error}")
    assert verification.convolutions["agree"] == verification.convolutions["total"] > 10


@pytest.mark.parametrize("trained_before", [True, False])
def test_plain_training_of_quantized_network_is_refused(
    trained_before: bool, folder: Path, trained: Path
) -> None:
    yolo = open_yolo(trained / "last.pt" if trained_before else folder / "float.pt")
    if not trained_before:
        nets.prepared(yolo, torch.zeros(1, 3, SIZE, SIZE))
    with pytest.raises(QdqtoolError, check=has("quantizers-lost", parameter="weights")):
        yolo.train(**training_options(folder, name="lost", epochs=1))


def test_export_to_torchscript_is_refused(trained: Path) -> None:
    refused = has(
        "quantizers-lost", "format='torchscript'", "'qdqtool predict ", parameter="format"
    )
    with pytest.raises(QdqtoolError, check=refused):
        open_yolo(trained / "last.pt").export(format="torchscript", imgsz=SIZE, device="cpu")


def test_trainer_keeps_plan_of_prepared_network(training: Any, folder: Path) -> None:
    yolo = open_yolo(folder / "float.pt")
    plan = qat.prepare(yolo, torch.zeros(1, 3, SIZE, SIZE), exclude=[r"^model\.0\."], report=None)
    images = torch.randint(0, 255, (2, 3, SIZE, SIZE), dtype=torch.uint8)
    with pytest.warns(UserWarning, match="calibrated with"):
        qat.calibrate(yolo, [{"img": images, "cls": []}])
    yolo.train(trainer=training.Trainer, **training_options(folder, name="hand", epochs=1))
    kept = qat.preparation.read_plan(yolo.model)
    assert kept.convolutions == plan.convolutions and "model.0.conv" not in kept.convolutions


def test_with_options_makes_trainer(training: Any) -> None:
    trainer = training.Trainer.with_options(target="trt10", exclude=["x"])
    assert (trainer.options.target, trainer.options.exclude) == ("trt10", ("x",))
    assert issubclass(trainer, training.Trainer)


def test_unknown_option_of_trainer_is_refused(training: Any) -> None:
    with pytest.raises(QdqtoolError, check=has("unknown-choice", parameter="images_")):
        training.Trainer.with_options(images_=3)


def test_trainers_of_tasks(training: Any, folder: Path) -> None:
    from ultralytics.models import rtdetr, yolo

    trainer = training.trainer_for(open_yolo(folder / "float.pt"))
    assert issubclass(trainer, yolo.detect.DetectionTrainer)
    quantized = training.find_quantized_trainer(rtdetr.train.RTDETRTrainer)
    assert issubclass(quantized, training.QuantizedTrainerMixin)


@pytest.mark.slow
def test_pickled_trainer_is_found_in_new_process(
    training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process for another GPU imports the module again."""
    from ultralytics.models import yolo

    quantized = [
        training.find_quantized_trainer(yolo.segment.SegmentationTrainer),
        training.Trainer,
    ]
    pickled = pickle.dumps(quantized)
    monkeypatch.setattr(qat, "ultralytics", training)  # restored after the new import
    monkeypatch.delitem(sys.modules, training.__name__)
    loaded = pickle.loads(pickled)
    assert [t.__name__ for t in loaded] == [t.__name__ for t in quantized]
    base = sys.modules[training.__name__].QuantizedTrainerMixin
    assert all(issubclass(t, base) for t in loaded) and not set(loaded) & set(quantized)


def test_trainer_of_user_gets_quantizers(training: Any) -> None:
    from ultralytics.models import yolo

    class Own(yolo.detect.DetectionTrainer):  # type: ignore[misc]
        pass

    quantized = training.find_quantized_trainer(Own)
    assert issubclass(quantized, Own) and issubclass(quantized, training.QuantizedTrainerMixin)


@pytest.mark.parametrize("options", [{}, {"images": 3}])
def test_trainer_chooses_class_for_task(
    options: dict[str, Any], training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training.QuantizedPoseTrainer, "__init__", lambda self, *arguments: None)
    trainer = training.Trainer.with_options(**options)(overrides={"task": "pose"})
    assert isinstance(trainer, training.QuantizedPoseTrainer)
    assert trainer.options.images == options.get("images", 128)


@pytest.mark.parametrize(
    ("total", "size", "count", "batches"),
    [
        (10, 4, 100, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (
            1000,
            16,
            128,
            [
                list(range(start, min(start + 16, 1000)))
                for start in (0, 144, 288, 432, 560, 704, 848, 992)
            ],
        ),
        (3, 1, 1, [[0]]),
    ],
)
def test_spread_batches_covers_data_set(
    training: Any, total: int, size: int, count: int, batches: list[list[int]]
) -> None:
    assert training.spread_batches(total, size, count) == batches


@pytest.mark.parametrize("backend", BACKENDS)
def test_ultralytics_does_not_mistake_quantizers_for_modelopt(backend: str, folder: Path) -> None:
    from ultralytics.utils.torch_utils import is_qat

    image = torch.rand(1, 3, SIZE, SIZE)
    with pytest.warns(UserWarning, match="calibrated with"):
        yolo = nets.ready(open_yolo(folder / "float.pt"), image, backend=backend)
    assert not is_qat(yolo.model)
    with switch_heads_to_export(yolo.model):
        before = nets.evaluate(yolo.model, image)
        after = nets.evaluate(copy.deepcopy(yolo.model).fuse(verbose=False), image)
    assert float((before - after).abs().mean()) < 0.05 * float(before.std())


def test_switch_heads_to_export_restores_anchors(folder: Path) -> None:
    model, large = open_yolo(folder / "float.pt").model, torch.rand(1, 3, 2 * SIZE, 2 * SIZE)
    expected = nets.evaluate(model, large)[0]
    with switch_heads_to_export(model):
        nets.evaluate(model, torch.rand(1, 3, SIZE, SIZE))
    assert torch.equal(nets.evaluate(model, large)[0], expected)


def test_branches_are_merged_before_quantization() -> None:
    from ultralytics.nn.modules import RepConv
    from ultralytics.nn.modules.block import RepVGGDW

    model = nets.randomise(
        torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3), RepConv(32, 32), RepVGGDW(32), torch.nn.Conv2d(32, 32, 1)
        )
    )
    x = torch.rand(1, 3, 24, 24)
    before, merged = nets.evaluate(model, x), copy.deepcopy(model)
    plan = qat.prepare(merged, x, report=None)
    assert plan.merged == ["1", "2"] and len(plan.convolutions) == 4
    assert (
        count_quantizers(model) == 0 and merge_branches(merged) == [] and can_merge_branches(model)
    )
    with qat.disabled(merged):
        torch.testing.assert_close(nets.evaluate(merged, x), before, rtol=1e-3, atol=1e-4)
    assert all(p.requires_grad for p in merged.parameters())
