"""Training inside Ultralytics, with quantizers where TensorRT uses them.

    from ultralytics import YOLO
    from qdqtool import qat
    from qdqtool.qat.ultralytics import RECIPE, Trainer

    yolo = YOLO("yolov8n.pt")                              # a trained checkpoint
    yolo.train(trainer=Trainer, data="coco8.yaml", **RECIPE)
    done = qat.export(yolo, "yolov8n_qdq.onnx")            # checked and predicted; YOLO("yolov8n_qdq.onnx") runs it

The trainer is Ultralytics' own: data, losses, EMA, checkpoints, resume and validation are theirs. Before the first step
the network gets its quantizers and is calibrated on training images without augmentation.

Importing this imports ``ultralytics``, which is under the AGPL-3.0. The classes made here are subclasses of its
trainers and exist only in the process that imports both; qdqtool itself contains none of Ultralytics' code and does not
depend on it. What you train and deploy with Ultralytics is under their licence to you (AGPL-3.0, or their commercial
one), with this trainer as with theirs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from ultralytics import __version__ as _version
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.models import rtdetr, yolo
from ultralytics.utils import DEFAULT_CFG, LOGGER

from qdqtool.errors import QdqtoolError
from qdqtool.qat.batch_norms import FREEZE_NORMS, freeze_batch_norms, is_untrained
from qdqtool.qat.modules import find_uncalibrated
from qdqtool.qat.networks import override_attributes, unwrap
from qdqtool.qat.options import QatOptions
from qdqtool.qat.preparation import insert_quantizers, is_prepared
from qdqtool.qat.ranges import calibrate
from qdqtool.qat.ultralytics_guard import guard_ultralytics

# Fine-tuning a trained network: a twentieth of the rate from scratch, no warm-up of the biases (it starts at 0.1),
# no mosaic (statistics as at inference), and float32: the quantizers' steps are finer than bfloat16's.
RECIPE: dict[str, Any] = {
    "epochs": 10,
    "optimizer": "AdamW",
    "lr0": 1e-4,
    "lrf": 0.01,
    "cos_lr": True,
    "warmup_epochs": 0.0,
    "mosaic": 0.0,
    "amp": False,
}


@dataclass(frozen=True)
class Options(QatOptions):
    """Options of the trainer; further ones are those of :func:`qdqtool.qat.prepare`.

    Attributes:
        method: How ranges are chosen, as for :func:`qdqtool.qat.calibrate`.
        images: Number of training images for the calibration.
        freeze_norms: Whether BatchNormalization keeps its statistics, see
            :data:`qdqtool.qat.batch_norms.FREEZE_NORMS`.
    """

    method: str = "mse"
    images: int = 128
    freeze_norms: bool = FREEZE_NORMS


class QuantizedTrainerMixin:
    """Mixed into a trainer of Ultralytics'; see :class:`Trainer` and :func:`trainer_for`."""

    options: Options = Options()
    args: Any
    data: Any
    model: Any
    device: torch.device

    @classmethod
    def with_options(cls, **changes: Any) -> type[Any]:
        """The same trainer with other :class:`Options`, for example ``Trainer.with_options(target="trt10")``."""
        listed: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in changes.items()
        }
        for name in listed.keys() - {f.name for f in fields(Options)}:
            raise QdqtoolError(
                f"Trainer.with_options: got an unexpected keyword argument '{name}'",
                code="unknown-choice",
                parameter=name,
            )
        options = replace(cls.options, **listed)
        return type(cls.__name__, (cls,), {"options": options, "__module__": cls.__module__})

    def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> Any:
        """A network that has quantizers goes on being trained; Ultralytics would build another one without."""
        if not isinstance(weights, nn.Module) or not is_prepared(weights):
            return super().get_model(cfg=cfg, weights=weights, verbose=verbose)  # type: ignore[misc]
        classes = getattr(weights.model[-1], "nc", None) or len(getattr(weights, "names", ()) or ())
        if self.args.task != "classify" and classes != self.data["nc"]:
            raise QdqtoolError(
                f"the network has {classes} classes and the data {self.data['nc']}: train the float network on the new "
                "classes first, then with quantizers",
                code="different-classes",
            )
        model = weights.float()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return model

    def set_model_attributes(self) -> None:
        """The last hook before EMA, compilation and DistributedDataParallel wrap the network."""
        super().set_model_attributes()  # type: ignore[misc]
        if getattr(self.args, "quantize", None) == 8:
            raise QdqtoolError(
                "quantize=8 is Ultralytics' own quantization-aware training; leave it out here",
                code="option-conflict",
                parameter="quantize",
            )
        network = unwrap(getattr(self.model, "student_model", self.model))
        if not is_prepared(network):
            self._insert(network)
        if find_uncalibrated(network):
            images = self.options.images
            LOGGER.info(f"qdqtool: calibrating on up to {images} training images")
            done = calibrate(
                network, self.calibration_batches(images), self.options.method, total=images
            )
            for warning in done.warnings:
                LOGGER.warning(f"qdqtool: {warning}")

    def _insert(self, network: nn.Module) -> None:
        if is_untrained(network):
            LOGGER.warning(
                "qdqtool: this network was never trained; start from a trained checkpoint"
            )
        height, width = self._size(network)
        channels = self.data.get("channels", 3)
        device = next(network.parameters()).device
        sample = torch.zeros(1, channels, height, width, device=device)
        plan = insert_quantizers(network, sample, self.options)
        LOGGER.info(f"qdqtool: {plan.text().splitlines()[0]}")

    def _size(self, network: nn.Module) -> tuple[int, int]:
        stride = max(int(torch.as_tensor(getattr(network, "stride", 32)).max()), 32)
        given = self.args.imgsz
        height, width = (given, given) if isinstance(given, int) else (given[0], given[-1])
        return -(-height // stride) * stride, -(-width // stride) * stride

    def calibration_batches(self, count: int) -> Iterator[Tensor]:
        """Batches of up to ``count`` training images, of the size of training and without augmentation."""
        trainer: Any = self
        size = max(self._size(unwrap(trainer.model)))
        stride = getattr(trainer, "stride", None)
        trainer.stride = stride if stride is not None else 32
        with override_attributes(trainer.args, imgsz=size, multi_scale=0.0, cache=False):
            per_batch = max(
                1, min(int(trainer.batch_size) if trainer.batch_size >= 1 else 16, 16, count)
            )
            given = trainer.get_dataloader(
                trainer.data["train"], batch_size=per_batch, rank=-1, mode="val"
            )
            if getattr(given.dataset, "rect", False):
                given.dataset.rect = (
                    False  # squares, as an engine gets them, and not Ultralytics' padded rectangles
                )
            chosen = spread_batches(len(given.dataset), per_batch, count)
            seen = 0
            for batch in DataLoader(
                given.dataset, batch_sampler=chosen, collate_fn=given.collate_fn
            ):
                images: Tensor = trainer.preprocess_batch(batch)["img"]
                yield images[: count - seen]
                seen += len(images)
                if seen >= count:
                    break

    def _model_train(self) -> None:
        super()._model_train()  # type: ignore[misc]
        if self.options.freeze_norms:
            freeze_batch_norms(self.model)


def spread_batches(images: int, per_batch: int, count: int) -> list[list[int]]:
    """Whole batches of about ``count`` images, evenly over a data set that is sorted by shape or by class.

    Returns:
        The indices of each batch; batches begin at multiples of ``per_batch``, since those of one shape lie together.
    """
    there, wanted = math.ceil(images / per_batch), math.ceil(min(count, images) / per_batch)
    starts = sorted(
        {round(i * (there - 1) / max(wanted - 1, 1)) * per_batch for i in range(wanted)}
    )
    return [list(range(s, min(s + per_batch, images))) for s in starts]


def quantized_trainer(base: type) -> type[Any]:
    """The quantized form of a trainer of Ultralytics', found again by pickles of this module."""
    name = f"Quantized{base.__name__}"
    if name not in globals():
        described = {"__module__": __name__, "__doc__": QuantizedTrainerMixin.__doc__}
        globals()[name] = type(name, (QuantizedTrainerMixin, base), described)
    made: type[Any] = globals()[name]
    return made


def __getattr__(name: str) -> Any:
    """Quantized trainers by name: a process that Ultralytics starts for another GPU asks for the one it was sent."""
    if name.startswith("Quantized"):
        for base in _below(BaseTrainer):
            if f"Quantized{base.__name__}" == name and not issubclass(base, QuantizedTrainerMixin):
                return quantized_trainer(base)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def _below(base: type) -> Iterator[type]:
    subclasses: list[type] = base.__subclasses__()
    for derived in subclasses:
        yield derived
        yield from _below(derived)


_TASKS = {
    "segment": yolo.segment.SegmentationTrainer,
    "pose": yolo.pose.PoseTrainer,
    "obb": yolo.obb.OBBTrainer,
    "classify": yolo.classify.ClassificationTrainer,
}


class Trainer(QuantizedTrainerMixin, yolo.detect.DetectionTrainer):  # type: ignore[misc]
    """Ultralytics' trainer for the current task, with quantizers: ``yolo.train(trainer=Trainer, ...)``.

    Choose with ``Trainer.with_options(...)``, see :class:`Options`. For World and YOLOE take :func:`trainer_for`.
    """

    def __new__(
        cls, cfg: Any = DEFAULT_CFG, overrides: dict[str, Any] | None = None, _callbacks: Any = None
    ) -> Any:
        """An instance for the task that ``overrides`` names."""
        given = overrides or {}
        base = _TASKS.get(str(given.get("task") or "detect"))
        if base is None and "rtdetr" in str(given.get("model", "")).lower():
            base = rtdetr.train.RTDETRTrainer
        if base is None or cls.__init__ is not yolo.detect.DetectionTrainer.__init__:
            return super().__new__(cls)
        made = quantized_trainer(base)
        if cls.options != made.options:
            made = type(made.__name__, (made,), {"options": cls.options, "__module__": __name__})
        return made(cfg, overrides, _callbacks)


def trainer_for(model: Any, **options: Any) -> type[Any]:
    """The quantized form of the trainer that a model (``YOLO``, ``RTDETR``, ``YOLOWorld`` ...) trains with.

    Args:
        model: Ultralytics' wrapper.
        options: See :class:`Options`.
    """
    made = quantized_trainer(model._smart_load("trainer"))
    return made.with_options(**options) if options else made


def export_output_names(network: nn.Module) -> list[str] | None:
    """Names as Ultralytics' own export gives them."""
    return ["output0", "output1"] if getattr(network, "task", "") == "segment" else None


def export_metadata(network: Any, image: Tensor, dynamic: bool) -> dict[str, str]:
    """What Ultralytics reads from an ONNX model in order to run it."""
    found = {
        "description": f"Quantized {type(network).__name__}",
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "version": _version,
        "stride": int(torch.as_tensor(getattr(network, "stride", 32)).max()),
        "task": getattr(network, "task", "detect"),
        "head": type(network.model[-1]).__name__,
        "batch": int(image.shape[0]),
        "imgsz": list(image.shape[2:]),
        "names": getattr(network, "names", {}),
        "args": {"dynamic": dynamic, "batch": int(image.shape[0])},
        "channels": int(image.shape[1]),
        "end2end": getattr(network, "end2end", False),
    }
    if hasattr(network, "kpt_shape"):
        found["kpt_shape"] = network.kpt_shape
    return {k: str(v) for k, v in found.items()}


guard_ultralytics()
__all__ = ["RECIPE", "Options", "Trainer", "trainer_for"]
