"""Quantization-aware training with Ultralytics, with quantizers where TensorRT uses them.

    from ultralytics import YOLO
    from qdqtool import qat
    from qdqtool.qat.ultralytics import RECIPE, Trainer

    yolo = YOLO("yolov8n.pt")                              # a trained checkpoint
    yolo.train(trainer=Trainer, data="coco8.yaml", **RECIPE)
    result = qat.export(yolo, "yolov8n_qdq.onnx")          # checked and predicted
    YOLO("yolov8n_qdq.onnx").predict("photo.jpg")

The trainer is a subclass of Ultralytics' trainer, and uses Ultralytics' data, losses, EMA,
checkpoints, resume and validation. Before the first step, the trainer inserts quantizers into the
network and calibrates them on training images without augmentation.

This module imports ``ultralytics``, which is under the AGPL-3.0. qdqtool contains no code of
Ultralytics and does not depend on it. The license of Ultralytics (AGPL-3.0 or commercial) applies
to the models that you train and deploy with Ultralytics, also with this trainer.
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
from ultralytics.models import rtdetr, yolo
from ultralytics.utils import DEFAULT_CFG, LOGGER

from qdqtool.errors import QdqtoolError
from qdqtool.qat.batch_norms import FREEZE_NORMS, freeze_batch_norms, is_untrained
from qdqtool.qat.modules import find_uncalibrated
from qdqtool.qat.networks import override_attributes, unwrap_network
from qdqtool.qat.options import QatOptions
from qdqtool.qat.preparation import insert_quantizers, is_prepared
from qdqtool.qat.ranges import calibrate
from qdqtool.qat.ultralytics_guard import guard_ultralytics

# Arguments to fine-tune a trained network. The learning rate is a twentieth of that for a training
# from scratch. Warm-up is off, because it would start the learning rate of biases at 0.1.
# Mosaic is off, because with it the statistics of BatchNormalization would differ from those
# of inference. The training is in float32, because the steps of the quantizers are finer than those
# of bfloat16.
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
    """Options of the trainer: those of :func:`qdqtool.qat.prepare` and of the calibration.

    Attributes:
        method: Method that chooses ranges, as for :func:`qdqtool.qat.calibrate`.
        images: Number of training images on which the quantizers are calibrated.
        freeze_norms: Whether BatchNormalization keeps its statistics, see
            :data:`qdqtool.qat.batch_norms.FREEZE_NORMS`.
    """

    method: str = "mse"
    images: int = 128
    freeze_norms: bool = FREEZE_NORMS


class QuantizedTrainerMixin:
    """Mixin for a trainer of Ultralytics; see :class:`Trainer` and :func:`trainer_for`."""

    options: Options = Options()
    args: Any
    data: Any
    model: Any
    device: torch.device
    batch_size: Any

    @classmethod
    def with_options(cls, **changes: Any) -> type[Any]:
        """Return a subclass of this trainer with changed :class:`Options`.

        For example ``Trainer.with_options(target="trt10")``.

        Raises:
            QdqtoolError: An option does not exist.
        """
        for name in changes.keys() - {f.name for f in fields(Options)}:
            raise QdqtoolError(
                f"Trainer.with_options has no option '{name}'; see qdqtool.qat.ultralytics.Options",
                code="unknown-choice",
                parameter=name,
            )
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in changes.items()
        }
        changed_options = replace(cls.options, **values)

        class ConfiguredTrainer(cls):  # type: ignore[misc, valid-type]
            options = changed_options

        return ConfiguredTrainer

    def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> Any:
        """Return the network to train.

        This overrides Ultralytics' method, which always builds a new network without quantizers. If
        `weights` is a network with quantizers, `weights` itself is returned.

        Raises:
            QdqtoolError: The number of classes in the data is not that of the network with
                quantizers.
        """
        if not isinstance(weights, nn.Module) or not is_prepared(weights):
            build = super().get_model  # type: ignore[misc]
            return build(cfg=cfg, weights=weights, verbose=verbose)
        classes = getattr(weights.model[-1], "nc", None) or len(getattr(weights, "names", ()) or ())
        if self.args.task != "classify" and classes != self.data["nc"]:
            raise QdqtoolError(
                f"the network has {classes} classes, but the data has {self.data['nc']}; train the "
                "float network on the new classes first, then train with quantizers",
                code="different-classes",
            )
        model = weights.float()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return model

    def set_model_attributes(self) -> None:
        """Insert and calibrate quantizers.

        This overrides a method that Ultralytics calls just before the network is copied for EMA,
        compiled, and wrapped in DistributedDataParallel.

        Raises:
            QdqtoolError: Ultralytics' own quantization-aware training (quantize=8) is enabled.
        """
        super().set_model_attributes()  # type: ignore[misc]
        if getattr(self.args, "quantize", None) == 8:
            raise QdqtoolError(
                "quantize=8 starts Ultralytics' own quantization-aware training; leave quantize "
                "out",
                code="option-conflict",
                parameter="quantize",
            )
        network = unwrap_network(getattr(self.model, "student_model", self.model))
        if not is_prepared(network):
            self._insert_quantizers(network)
        if find_uncalibrated(network):
            images = self.options.images
            LOGGER.info(f"qdqtool: calibrating on up to {images} training images")
            batches = self.calibration_batches(images)
            total = math.ceil(images / self._calibration_batch_size(images))
            calibration = calibrate(network, batches, self.options.method, total=total)
            for warning in calibration.warnings:
                LOGGER.warning(f"qdqtool: {warning}")

    def _insert_quantizers(self, network: nn.Module) -> None:
        if is_untrained(network):
            LOGGER.warning("qdqtool: this network is untrained; start from a trained checkpoint")
        size = self._image_size(network)
        device = next(network.parameters()).device
        sample = torch.zeros(1, self.data.get("channels", 3), *size, device=device)
        plan = insert_quantizers(network, sample, self.options)
        LOGGER.info(f"qdqtool: {plan.text().splitlines()[0]}")

    def _image_size(self, network: nn.Module) -> tuple[int, int]:
        """Return height and width of training images, rounded up to multiples of the stride."""
        stride = max(int(torch.as_tensor(getattr(network, "stride", 32)).max()), 32)
        size = self.args.imgsz
        height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
        return -(-height // stride) * stride, -(-width // stride) * stride

    def _calibration_batch_size(self, count: int) -> int:
        size = int(self.batch_size) if self.batch_size >= 1 else 16
        return max(1, min(size, 16, count))

    def calibration_batches(self, count: int) -> Iterator[Tensor]:
        """Yield batches with at most ``count`` training images in total, without augmentation.

        All images are squares of the training size, like the inputs of a usual engine.
        """
        trainer: Any = self
        size = max(self._image_size(unwrap_network(trainer.model)))
        if getattr(trainer, "stride", None) is None:
            trainer.stride = 32
        with override_attributes(trainer.args, imgsz=size, multi_scale=0.0, cache=False):
            per_batch = self._calibration_batch_size(count)
            loader = trainer.get_dataloader(
                trainer.data["train"], batch_size=per_batch, rank=-1, mode="val"
            )
            dataset = loader.dataset
            if getattr(dataset, "rect", False):
                dataset.rect = False  # square images
            sampler = spread_batches(len(dataset), per_batch, count)
            remaining = count
            for batch in DataLoader(dataset, batch_sampler=sampler, collate_fn=loader.collate_fn):
                images: Tensor = trainer.preprocess_batch(batch)["img"]
                yield images[:remaining]
                remaining -= len(images)
                if remaining <= 0:
                    break

    def _model_train(self) -> None:
        super()._model_train()  # type: ignore[misc]
        if self.options.freeze_norms:
            freeze_batch_norms(self.model)


def spread_batches(images: int, per_batch: int, count: int) -> list[list[int]]:
    """Return the image indices of batches that are evenly spread over a data set.

    Ultralytics sorts images by shape, and all images of a batch have the same shape. Each batch is
    therefore a range of indices that starts at a multiple of ``per_batch``.

    Args:
        images: Number of images in the data set.
        per_batch: Number of images in a batch.
        count: Requested number of images in all batches together.
    """
    last = math.ceil(images / per_batch) - 1
    batches = math.ceil(min(count, images) / per_batch)
    steps = max(batches - 1, 1)
    starts = sorted({round(i * last / steps) * per_batch for i in range(batches)})
    return [list(range(s, min(s + per_batch, images))) for s in starts]


class QuantizedDetectionTrainer(
    QuantizedTrainerMixin,
    yolo.detect.DetectionTrainer,  # type: ignore[misc]
):
    """Ultralytics' trainer for boxes, with quantizers."""


class QuantizedSegmentationTrainer(
    QuantizedTrainerMixin,
    yolo.segment.SegmentationTrainer,  # type: ignore[misc]
):
    """Ultralytics' trainer for masks, with quantizers."""


class QuantizedPoseTrainer(QuantizedTrainerMixin, yolo.pose.PoseTrainer):  # type: ignore[misc]
    """Ultralytics' trainer for key points, with quantizers."""


class QuantizedOBBTrainer(QuantizedTrainerMixin, yolo.obb.OBBTrainer):  # type: ignore[misc]
    """Ultralytics' trainer for rotated boxes, with quantizers."""


class QuantizedClassificationTrainer(
    QuantizedTrainerMixin,
    yolo.classify.ClassificationTrainer,  # type: ignore[misc]
):
    """Ultralytics' trainer for image classification, with quantizers."""


class QuantizedRTDETRTrainer(
    QuantizedTrainerMixin,
    rtdetr.train.RTDETRTrainer,  # type: ignore[misc]
):
    """Ultralytics' trainer for RT-DETR, with quantizers."""


class QuantizedWorldTrainer(QuantizedTrainerMixin, yolo.world.WorldTrainer):  # type: ignore[misc]
    """Ultralytics' trainer for YOLO-World, with quantizers."""


class QuantizedYOLOETrainer(QuantizedTrainerMixin, yolo.yoloe.YOLOETrainer):  # type: ignore[misc]
    """Ultralytics' trainer for boxes of YOLOE, with quantizers."""


class QuantizedYOLOESegTrainer(
    QuantizedTrainerMixin,
    yolo.yoloe.YOLOESegTrainer,  # type: ignore[misc]
):
    """Ultralytics' trainer for masks of YOLOE, with quantizers."""


_TASK_TRAINERS: dict[str, type[Any]] = {
    "segment": QuantizedSegmentationTrainer,
    "pose": QuantizedPoseTrainer,
    "obb": QuantizedOBBTrainer,
    "classify": QuantizedClassificationTrainer,
}
_TRAINERS: dict[type, type[Any]] = {
    yolo.detect.DetectionTrainer: QuantizedDetectionTrainer,
    yolo.segment.SegmentationTrainer: QuantizedSegmentationTrainer,
    yolo.pose.PoseTrainer: QuantizedPoseTrainer,
    yolo.obb.OBBTrainer: QuantizedOBBTrainer,
    yolo.classify.ClassificationTrainer: QuantizedClassificationTrainer,
    rtdetr.train.RTDETRTrainer: QuantizedRTDETRTrainer,
    yolo.world.WorldTrainer: QuantizedWorldTrainer,
    yolo.yoloe.YOLOETrainer: QuantizedYOLOETrainer,
    yolo.yoloe.YOLOESegTrainer: QuantizedYOLOESegTrainer,
}


class Trainer(QuantizedDetectionTrainer):
    """Ultralytics' trainer with quantizers, for the task of the model.

    Pass the class to ``yolo.train(trainer=Trainer, ...)``. ``Trainer.with_options(...)`` changes
    :class:`Options`. For YOLO-World and YOLOE, use :func:`trainer_for`.
    """

    def __new__(
        cls, cfg: Any = DEFAULT_CFG, overrides: dict[str, Any] | None = None, _callbacks: Any = None
    ) -> Any:
        """Return an instance of the trainer class for the task in ``overrides``."""
        arguments = overrides or {}
        trainer = _TASK_TRAINERS.get(str(arguments.get("task") or "detect"))
        if trainer is None and "rtdetr" in str(arguments.get("model", "")).lower():
            trainer = QuantizedRTDETRTrainer
        if trainer is None or cls.__init__ is not yolo.detect.DetectionTrainer.__init__:
            return super().__new__(cls)
        if cls.options != trainer.options:
            trainer = trainer.with_options(**vars(cls.options))
        return trainer(cfg, overrides, _callbacks)


def trainer_for(model: Any, **options: Any) -> type[Any]:
    """Return the trainer class with quantizers for a model.

    Args:
        model: Ultralytics' wrapper: ``YOLO``, ``RTDETR``, ``YOLOWorld``, ``YOLOE``.
        options: See :class:`Options`.
    """
    trainer = find_quantized_trainer(model._smart_load("trainer"))
    return trainer.with_options(**options) if options else trainer


def find_quantized_trainer(base: type) -> type[Any]:
    """Return a subclass, with quantizers, of a trainer class of Ultralytics."""
    if base in _TRAINERS:
        return _TRAINERS[base]

    class QuantizedTrainer(QuantizedTrainerMixin, base):  # type: ignore[misc]
        """Trainer with quantizers."""

    return QuantizedTrainer


def find_output_names(network: nn.Module) -> list[str] | None:
    """Return the output names of Ultralytics' export; None if they are those of `qat.export`."""
    return ["output0", "output1"] if getattr(network, "task", "") == "segment" else None


def make_metadata(network: Any, image: Tensor, dynamic: bool) -> dict[str, str]:
    """Return the metadata that Ultralytics needs in an ONNX model.

    Args:
        network: Network of Ultralytics.
        image: Sample of shape [n, c, h, w]. The metadata contain this shape.
        dynamic: Whether the batch size is dynamic.
    """
    values = {
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
        values["kpt_shape"] = network.kpt_shape
    return {k: str(v) for k, v in values.items()}


guard_ultralytics()
__all__ = ["RECIPE", "Options", "Trainer", "trainer_for"]
