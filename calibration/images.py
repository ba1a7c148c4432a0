"""Pictures and arrays as network inputs: from whatever the user has to a Dataset.

``open_data`` turns a folder, a URL, a list of paths, npz, npy or arrays in memory into a Dataset that gives one sample
at a time, so that memory does not depend on the number of images.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from calibration.arrays import ARRAY_SUFFIXES, MemorySource, SampleFilesSource, StackedSource, rows_of
from calibration.dataset import Dataset, InputSpec, Source
from calibration.listing import files_under
from calibration.pictures import (
    IMAGE_SUFFIXES,
    OTHER_PICTURES,
    YOLO_PREPROCESS,
    ImageSource,
    Preprocess,
    decode,
    describe,
    is_url,
    local_path,
    prepare,
    url_source,
)
from qdqtool.base import budgets
from qdqtool.base.parameters import typed
from qdqtool.errors import DataError
from qdqtool.io.files import read_input

__all__ = ["Dataset", "InputSpec", "Preprocess", "decode", "describe", "open_data", "prepare"]

DEFAULT_MAX_IMAGES = 512


@typed
def open_data(
    source: object,
    inputs: Sequence[InputSpec],
    preprocess: Preprocess = YOLO_PREPROCESS,
    max_images: int = DEFAULT_MAX_IMAGES,
    size: tuple[int, int] | None = None,
) -> Dataset:
    """Opens calibration data for a model.

    Args:
        source: A folder of pictures (searched through, in the order of their paths), a ``.txt`` file with one path a
            line, one picture; a URL of a folder of pictures that fsspec opens (``s3://bucket/images``); an ``.npz`` of
            stacked arrays keyed by input name, an ``.npy``, a folder of ``.npz`` or ``.npy`` with one sample each; an
            iterable of ``{input name: array}``; or a Dataset, returned as it is.
        inputs: The model's inputs.
        preprocess: For pictures only; arrays are taken as they are.
        max_images: At most so many samples are used, evenly spread over the set.
        size: Height and width in pixels where the model leaves them open.

    Raises:
        DataError: There is nothing usable, or it does not fit the inputs.
    """
    if isinstance(source, Dataset):
        return source
    if max_images < 1:
        raise DataError(f"the number of calibration images is {max_images}; it must be at least 1")
    if not inputs:
        raise DataError("the model has no inputs to calibrate with")
    if isinstance(source, (str, os.PathLike)):
        text = os.fspath(source)
        if is_url(text):
            return Dataset(url_source(text, inputs, preprocess, size), inputs, max_images)
        return Dataset(_path_source(Path(local_path(text)), inputs, preprocess, size), inputs, max_images)
    if isinstance(source, np.ndarray):
        source = {inputs[0].name: source}
    if isinstance(source, Mapping):
        return Dataset(MemorySource(rows_of(source, inputs), inputs), inputs, max_images)
    if isinstance(source, Iterable):
        return Dataset(MemorySource(source, inputs), inputs, max_images)
    raise DataError(f"calibration data of type {type(source).__name__} is not understood; give a folder of images")


def _path_source(
    path: Path, inputs: Sequence[InputSpec], preprocess: Preprocess, size: tuple[int, int] | None
) -> Source:
    suffix = path.suffix.lower()
    if path.is_dir():
        passed = dict.fromkeys(OTHER_PICTURES, 0)
        pictures = files_under(path, IMAGE_SUFFIXES, passed)
        kinds = ", ".join(sorted(s[1:] for s in IMAGE_SUFFIXES))
        others = ", ".join(f"{number} {suffix[1:]}" for suffix, number in passed.items() if number)
        unread = f"pictures of other formats are not read ({others}): convert them to one of {kinds}" if others else ""
        if len(pictures):
            source = ImageSource(pictures, path, inputs, preprocess, size)
            source.remarks = [unread] if unread else []
            return source
        arrays = files_under(path, ARRAY_SUFFIXES)
        if len(arrays):
            return SampleFilesSource(arrays, path, inputs)
        raise DataError(f"{path}: {unread or f'no images ({kinds}) and no npz or npy files in this folder'}")
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if suffix in ARRAY_SUFFIXES:
        return StackedSource(path, inputs)
    if suffix in IMAGE_SUFFIXES:
        return ImageSource([path], path.parent, inputs, preprocess, size)
    if suffix in (".txt", ".lst", ".list"):
        return ImageSource(_listed(path), path.parent, inputs, preprocess, size)
    raise DataError(f"{path}: not a folder, a list of images (.txt), an image, .npz or .npy")


def _listed(path: Path) -> list[Path]:
    """The paths in a text file; relative ones count from the file's folder, else from the current one."""
    try:
        lines = read_input(path, budgets.LIST_FILE, error=DataError).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read as a list of images: {error}") from error
    result = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if "\0" in text:
            raise DataError(f"{path}: line {number}: no file name can hold a NUL")
        if text and not text.startswith("#"):
            beside = path.parent / text
            result.append(beside if beside.exists() or not Path(text).exists() else Path(text))
    if not result:
        raise DataError(f"{path}: lists no images")
    return result
