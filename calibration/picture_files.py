"""Pictures in files as calibration samples."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np

from calibration.dataset import Array, InputSpec, Source, printable
from calibration.listing import Folder, file_digest
from calibration.pictures import YOLO_PREPROCESS, Preprocess, decoded, prepare
from qdqtool import budgets
from qdqtool.errors import DataError
from qdqtool.files import note_read

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})


class ImageSource(Source):
    """Pictures for a model with one input of rank 4, NCHW or NHWC, with 3 channels or 1."""

    single_rows = True

    def __init__(
        self,
        paths: Sequence[Path],
        root: Path,
        inputs: Sequence[InputSpec],
        preprocess: Preprocess,
        size: tuple[int, int] | None,
    ) -> None:
        self.describe(str(root), inputs, preprocess, size)
        self.paths = paths
        self.root = root
        if not isinstance(paths, Folder):  # which has been noted as a whole
            for path in paths:
                note_read(path)

    def describe(
        self, where: str, inputs: Sequence[InputSpec], preprocess: Preprocess, size: tuple[int, int] | None
    ) -> None:
        """Notes what the pictures become.

        Raises:
            DataError: The model does not take pictures.
        """
        if len(inputs) != 1:
            names = ", ".join(f"'{i.name}'" for i in inputs)
            raise DataError(f"{where}: images cannot feed a model with {len(inputs)} inputs ({names}); give npz files")
        self.spec = inputs[0]
        self.integer = self.spec.numpy_dtype.kind in "iu"
        if self.integer and preprocess.scale == YOLO_PREPROCESS.scale:
            preprocess = replace(preprocess, scale=1.0)  # the network divides by 255 itself; 0 to 1 would round to 0
        self.preprocess = preprocess
        self.nhwc, self.channels, self.height, self.width = _layout(self.spec, size)

    def count(self) -> int:
        return len(self.paths)

    @property
    def is_images(self) -> bool:
        return True

    def name(self, index: int) -> str:
        path = self.paths[index]
        return printable(path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path))

    def digest(self, index: int) -> bytes:
        return self.name(index).encode() + file_digest(self.paths[index])

    def settings(self) -> str:
        return f"{self.preprocess} {self.channels}x{self.height}x{self.width} nhwc={self.nhwc}"

    def portion(self, indices: Sequence[int]) -> ImageSource:
        part = copy.copy(self)
        part.root = Path(os.path.abspath(self.root))
        part.paths = [Path(os.path.abspath(self.paths[i])) for i in indices]
        return part

    def load(self, index: int) -> dict[str, Array]:
        return self.prepared(self.paths[index])

    def prepared(self, source: str | os.PathLike[str] | IO[bytes], name: str = "") -> dict[str, Array]:
        """A picture as the network takes it; see :func:`calibration.pictures.decode`."""
        with decoded(source, name) as pixels:
            array = prepare(pixels, self.height, self.width, self.preprocess, self.channels)
        if self.nhwc:
            array = np.ascontiguousarray(array.transpose(0, 2, 3, 1))
        if self.integer:
            limits = np.iinfo(self.spec.numpy_dtype)
            array = np.rint(array, out=array).clip(limits.min, limits.max)
        return {self.spec.name: array.astype(self.spec.numpy_dtype, copy=False)}


def _layout(spec: InputSpec, size: tuple[int, int] | None) -> tuple[bool, int, int, int]:
    """Whether the input is NHWC, its channels, height and width."""
    shown = spec.shape_text()
    if len(spec.shape) != 4:
        raise DataError(f"input '{spec.name}' {shown} does not take images (rank 4 needed); give npz files")
    nhwc = spec.shape[3] in (1, 3) and spec.shape[1] not in (1, 3)
    dims = (spec.shape[3], spec.shape[1], spec.shape[2]) if nhwc else spec.shape[1:]
    channels, height, width = (*dims,)
    channels = 3 if channels is None else channels
    if channels not in (1, 3):
        raise DataError(f"input '{spec.name}' {shown} takes {channels} channels, images have 3 or 1; give npz files")
    if height is None or width is None:
        if size is None:
            raise DataError(f"input '{spec.name}' {shown} leaves the image size open; give `size`, for example 640x640")
        height, width = height or size[0], width or size[1]
    if height < 1 or width < 1 or height * width > budgets.INPUT_PIXELS:
        raise DataError(f"input '{spec.name}' {shown}: image size {height}x{width} is not possible; the limit is "
                        f"{budgets.INPUT_PIXELS} pixels")
    return nhwc, channels, height, width
