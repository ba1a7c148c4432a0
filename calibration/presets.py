"""Presets of image preprocessing, and the preprocessing in a model's metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from calibration.options import YOLO_PREPROCESS, ImageFunction, Preprocess
from qdqtool.errors import DataError
from qdqtool.ir.metadata import PREPROCESS
from qdqtool.util.notes import Note
from qdqtool.util.text import brief_repr

DEFAULT = "yolo"

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class PreprocessPreset:
    """A named preprocessing and the networks that use it.

    Attributes:
        preprocess: Conversion of an image to a network input.
        networks: Text for the user that names the networks with this preprocessing.
        source: Code or page that documents the preprocessing.
    """

    preprocess: Preprocess
    networks: str
    source: str


PRESETS: Mapping[str, PreprocessPreset] = {
    DEFAULT: PreprocessPreset(
        YOLO_PREPROCESS,
        "YOLOv5 to YOLO26: detection, segmentation, pose, OBB",
        "ultralytics 8.4, LetterBox with auto=False and BasePredictor.preprocess",
    ),
    "ultralytics-classify": PreprocessPreset(
        Preprocess("crop", interpolation="bilinear"),
        "Ultralytics models with task=classify; no mean and std",
        "ultralytics 8.4, classify_transforms (DEFAULT_MEAN 0, DEFAULT_STD 1)",
    ),
    "ultralytics-rtdetr": PreprocessPreset(
        Preprocess("stretch"),
        "RT-DETR of Ultralytics",
        "ultralytics 8.4, RTDETRPredictor.pre_transform (LetterBox with scale_fill=True)",
    ),
    "yolox": PreprocessPreset(
        Preprocess("corner", bgr=True, scale=1.0),
        "YOLOX: pixels from 0 to 255",
        "YOLOX 0.3, yolox/data/data_augment.py preproc",
    ),
    "imagenet": PreprocessPreset(
        Preprocess(
            "crop",
            mean=_IMAGENET_MEAN,
            std=_IMAGENET_STD,
            interpolation="bilinear",
            crop=0.875,
        ),
        "torchvision's classifiers: 224 of 256 pixels",
        "torchvision, transforms of the IMAGENET1K_V1 weights",
    ),
    "imagenet-stretch": PreprocessPreset(
        Preprocess("stretch", mean=_IMAGENET_MEAN, std=_IMAGENET_STD, interpolation="bilinear"),
        "segmentation and depth networks, detectors with ImageNet backbones at a fixed size",
        "torchvision, transforms of the segmentation weights, at the size of the network",
    ),
    "inception": PreprocessPreset(
        Preprocess("crop", mean=_HALF, std=_HALF, interpolation="bicubic", crop=0.875),
        "timm's Inception networks: -1 to 1",
        "timm 1.0, IMAGENET_INCEPTION_MEAN and _STD, crop_pct 0.875",
    ),
    "vit": PreprocessPreset(
        Preprocess("crop", mean=_HALF, std=_HALF, interpolation="bicubic", crop=0.9),
        "timm's ViT (augreg): -1 to 1",
        "timm 1.0, vision_transformer._cfg: crop_pct 0.9, mean and std 0.5, bicubic",
    ),
    "clip": PreprocessPreset(
        Preprocess(
            "crop",
            mean=(0.48145466, 0.4578275, 0.40821073),
            std=(0.26862954, 0.26130258, 0.27577711),
            interpolation="bicubic",
        ),
        "image encoders of CLIP",
        "openai/CLIP, clip.py _transform",
    ),
    "caffe": PreprocessPreset(
        Preprocess(
            "crop",
            bgr=True,
            scale=1.0,
            mean=(103.939, 116.779, 123.68),
            interpolation="bilinear",
            crop=0.875,
        ),
        "VGG and ResNet of Caffe, Keras' mode 'caffe': BGR minus the mean",
        "keras, imagenet_utils.preprocess_input mode='caffe'",
    ),
    "detr": PreprocessPreset(
        Preprocess("stretch", mean=_IMAGENET_MEAN, std=_IMAGENET_STD, interpolation="bilinear"),
        "DETR, Deformable DETR, DINO and RF-DETR at a fixed size",
        "rf-detr, predict(); facebookresearch/detr, make_coco_transforms (there by shorter side)",
    ),
    "rtdetr": PreprocessPreset(
        Preprocess("stretch", interpolation="bilinear"),
        "RT-DETR, RT-DETRv2 and D-FINE of their authors: 0 to 1",
        "lyuwenyu/RT-DETR, references/deploy; Peterande/D-FINE, tools/inference/torch_inf.py",
    ),
    "scrfd": PreprocessPreset(
        Preprocess("corner", scale=1.0, mean=(127.5,) * 3, std=(128.0,) * 3, fill=0),
        "SCRFD, the face detector of InsightFace",
        "deepinsight/insightface, model_zoo/scrfd.py detect() and forward()",
    ),
    "tf": PreprocessPreset(
        Preprocess("stretch", scale=1.0, mean=(127.5,) * 3, std=(127.5,) * 3),
        "MobileNet and Xception of Keras, SSD MobileNet of TensorFlow: -1 to 1",
        "keras, imagenet_utils.preprocess_input mode='tf'",
    ),
    "none": PreprocessPreset(
        Preprocess("stretch", scale=1.0),
        "networks that contain their normalization: pixels from 0 to 255",
        "",
    ),
}
ALIASES: Mapping[str, str] = {
    "identity": "none",
    "torchvision": "imagenet",
    "timm": "inception",
    "insightface": "scrfd",
    "ultralytics": DEFAULT,
    "rf-detr": "detr",
    "d-fine": "rtdetr",
}
_TASKS = {  # preset by task of Ultralytics
    "classify": "ultralytics-classify",
    **dict.fromkeys(("detect", "segment", "pose", "obb"), DEFAULT),
}


@dataclass(frozen=True)
class PreprocessChoice:
    """The preprocessing of a run and its origin.

    Attributes:
        preprocess: The preprocessing, or a function of the user.
        origin: ``option``: given by the user. ``model``: recorded in the model by qdqtool.
            ``metadata``: stated by Ultralytics' metadata in the model. ``default``: YOLO's
            preprocessing. ``function``: YOLO's preprocessing, because the model was calibrated with
            a function of the user, which the model does not contain.
    """

    preprocess: Preprocess | ImageFunction
    origin: str


def find_preprocess(value: Preprocess | str | ImageFunction) -> Preprocess | ImageFunction:
    """Return the preprocessing for a preset's name; return other valid values unchanged.

    Raises:
        DataError: No preset has the name, or the value is neither a preprocessing nor a function.
    """
    if isinstance(value, str):
        preset = PRESETS.get(ALIASES.get(value, value))
        if preset is None:
            raise DataError(
                f"`preprocess`: unknown preset {brief_repr(value)}; use one of "
                f"{', '.join(PRESETS)}",
                code="unknown-choice",
                parameter="preprocess",
            )
        return preset.preprocess
    if isinstance(value, Preprocess) or callable(value):
        return value
    raise DataError(
        f"`preprocess` is a {type(value).__name__}; give the name of a preset, a Preprocess "
        "object or a function",
        code="wrong-type",
        parameter="preprocess",
    )


def choose_preprocess(
    metadata: Mapping[str, str], value: Preprocess | str | ImageFunction | None
) -> PreprocessChoice:
    """Choose the preprocessing of the user, else of the model's metadata, else of YOLO models.

    Args:
        metadata: Metadata of the model.
        value: Preprocessing given by the user; None if the user gives none.

    Raises:
        DataError: See :func:`find_preprocess`.
    """
    if value is not None:
        return PreprocessChoice(find_preprocess(value), "option")
    recorded = _read_recorded_preprocess(metadata.get(PREPROCESS, ""))
    if recorded is not None:
        return recorded
    stated = _read_ultralytics_preprocess(metadata)
    if stated is not None:
        return PreprocessChoice(stated, "metadata")
    return PreprocessChoice(YOLO_PREPROCESS, "default")


def _read_recorded_preprocess(text: str) -> PreprocessChoice | None:
    """Return the preprocessing recorded by qdqtool; None if the text is not a valid record.

    A record without settings stands for a function of the user.
    """
    names = {f.name for f in fields(Preprocess)}
    try:
        values = json.loads(text)
        settings = {k: v for k, v in values.items() if k in names}
        if not settings:
            return PreprocessChoice(YOLO_PREPROCESS, "function")
        origin = "default" if values.get("origin") == "default" else "model"
        return PreprocessChoice(Preprocess(**settings), origin)
    except (ValueError, TypeError, AttributeError, RecursionError, DataError):
        return None


def _read_ultralytics_preprocess(metadata: Mapping[str, str]) -> Preprocess | None:
    if metadata.get("task") not in _TASKS:
        return None
    is_rtdetr = metadata.get("head") == "RTDETRDecoder" or "RT-DETR" in metadata.get(
        "description", ""
    )
    name = "ultralytics-rtdetr" if is_rtdetr else _TASKS[metadata["task"]]
    return PRESETS[name].preprocess


def name_preprocess(preprocess: object) -> str:
    """Return the name of the preset that equals a preprocessing, ``custom`` if none does.

    For a function of the user, return the function's name.
    """
    if not isinstance(preprocess, Preprocess):
        kind = type(preprocess)
        return str(getattr(preprocess, "__name__", None) or kind.__name__)
    for name, preset in PRESETS.items():
        if preset.preprocess == preprocess:
            return name
    return "custom"


def without_normalization(preprocess: Preprocess) -> Preprocess:
    """Remove the scale, mean and std from a preprocessing, for networks with integer inputs.

    Such a network takes pixels and normalizes them itself: normalized values would be rounded to
    very few integers. A preprocessing with another scale than 1/255 is returned unchanged.
    """
    if preprocess.scale != YOLO_PREPROCESS.scale:
        return preprocess
    plain = YOLO_PREPROCESS
    return replace(preprocess, scale=1.0, mean=plain.mean, std=plain.std)


_ORIGINS = {
    "option": "",
    "model": ", recorded in the model",
    "metadata": ", by the model's metadata",
    "default": ", the default",
    "function": ", the default",
}


def note_preprocess(used: Mapping[str, Any]) -> Note:
    """Return a note that describes the preprocessing of a run.

    Args:
        used: JSON of the preprocessing: ``name``, ``text``, ``size`` and ``origin``.
    """
    height, width = used["size"]
    origin = _ORIGINS.get(used.get("origin", "option"), "")
    text = f"images prepared as {used['name']} ({used['text']}, {height}x{width}){origin}"
    return Note(text, code="preprocess", name=used["name"], origin=used.get("origin"))


def note_unused_preprocess(origin: str, data: object) -> list[Note]:
    """Return a list with a note if the user gave a preprocessing for calibration data of arrays.

    Args:
        origin: Origin of the preprocessing, see :class:`PreprocessChoice`.
        data: The calibration data: arrays, or the path of a file or folder of arrays.
    """
    if origin != "option":
        return []
    holder = "the calibration data are arrays"
    if isinstance(data, str | os.PathLike):
        holder = f"{os.fspath(data)} contains arrays"
    text = f"the requested preprocessing has no effect: {holder}, which are used as they are"
    return [Note(text, code="preprocess-unused")]
