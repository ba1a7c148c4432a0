"""Pictures as network inputs: decoding, letterbox, layout, normalisation; from files, and from behind URLs.

URLs (``s3://bucket/images``) are opened through fsspec and what it finds installed for the protocol.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import math
import os
import posixpath
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self, cast

import numpy as np
import numpy.typing as npt
from PIL import BmpImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from calibration.dataset import Array, FilesSource, InputSpec, printable
from calibration.listing import UNREADABLE, Folder
from qdqtool.base import budgets
from qdqtool.base.files import note_read, open_readable, unreadable
from qdqtool.base.options import Preprocess, Samples
from qdqtool.base.said import said
from qdqtool.base.text import reason_of
from qdqtool.errors import DataError

# By content, whatever the file is called: no other decoder of Pillow's, least of all EPS, which starts Ghostscript.
# Pillow loads all that it has, forty, where one that is asked for is not loaded yet.
_FORMATS = (
    JpegImagePlugin.JpegImageFile.format, PngImagePlugin.PngImageFile.format, BmpImagePlugin.BmpImageFile.format,
    BmpImagePlugin.DibImageFile.format, WebPImagePlugin.WebPImageFile.format,
)  # fmt: skip
_STRIP = 1 << 22  # pixels
_PILLOW, _WEBP = 4, 14  # bytes a pixel: of Pillow's own image; a WebP's decoder holds it packed and unpacked as well
_ARRAY = 3
_SCAN, _SCANS = b"\xff\xda", 100  # of a JPEG whose scans are kept; encoders write about ten
# Pillow's default of 16 MB glibc keeps for the thread that freed it; of more than 32 MB it keeps nothing.
Image.core.set_block_size(1 << 26)  # type: ignore[attr-defined]
_ORIENTATION = 0x0112  # EXIF's tag
_TURNED = range(2, 9)  # its values that are not upright
_Picture = npt.NDArray[np.uint8] | Image.Image

YOLO_PREPROCESS = Samples.preprocess


def decode(source: str | os.PathLike[str] | IO[bytes], name: str = "") -> npt.NDArray[np.uint8]:
    """Reads a picture as OpenCV's imread does: turned as its EXIF data says, without alpha, 8 bits.

    Args:
        source: A path, or an open file.
        name: What to call an open file in messages.

    Returns:
        uint8 [height, width, 3], RGB.

    Raises:
        DataError: It cannot be read, is no regular file, is cut off, has a side of more than
            :data:`qdqtool.base.budgets.PICTURE_SIDE` pixels, or would take more than
            :data:`qdqtool.base.budgets.PICTURE_BYTES` in between: of 64 million pixels, a WebP of half as many.
    """
    with decoded(source, name) as picture:
        return _as_array(picture)


def _bytes_each(picture: Image.Image) -> int:
    """How many bytes a pixel takes while a picture is decoded, or turned and converted behind that.

    A JPEG of several scans is kept whole as two bytes for each value of each of its components until the last is there.

    Raises:
        DataError: It is a JPEG of more scans than any encoder writes: each costs the time of a picture.
    """
    if picture.format == "WEBP":
        return _WEBP
    areas = [max(1, across * down) for _, across, down, *_ in getattr(picture, "layer", ())] or [1]
    several = picture.format == "JPEG" and _in_several_scans(picture, len(areas))
    scans_kept = math.ceil(2 * sum(areas) / max(areas)) if several else 0
    return _PILLOW + max(scans_kept, _ARRAY)


def _in_several_scans(picture: Image.Image, components: int) -> bool:
    """Whether a JPEG is progressive, or its first scan has not all components (where that is not found: it has not)."""
    file = getattr(picture, "fp", None)
    if file is None:
        return "progressive" in picture.info
    place = file.tell()
    try:
        if "progressive" not in picture.info and _first_scan(file) == components:
            return False
        file.seek(0)
        scans, last = 0, b""
        while block := file.read(_STRIP):
            scans += (last + block).count(_SCAN)
            last = block[-1:]
    finally:
        file.seek(place)
    if scans > _SCANS:
        raise DataError(f"a JPEG of {scans} scans; the limit is {_SCANS}")
    return True


def _first_scan(file: IO[bytes]) -> int:
    """How many components the first scan of a JPEG has; 0 where its segments do not lead there."""
    file.seek(2)
    while (marker := file.read(2))[:1] == b"\xff":
        if marker == b"\xff\xff":  # what is filled up
            file.seek(-1, os.SEEK_CUR)
            continue
        if marker[1] in (0, 1) or 0xD0 <= marker[1] <= 0xD9:  # it has no size: decoders differ in what they make of it
            return 0
        size = int.from_bytes(file.read(2), "big")
        if marker == _SCAN:
            return int.from_bytes(file.read(1), "big")
        file.seek(max(0, size - 2), os.SEEK_CUR)
    return 0


@contextlib.contextmanager
def decoded(source: str | os.PathLike[str] | IO[bytes], name: str = "") -> Iterator[_Picture]:
    """As :func:`decode`, as Pillow's own image where that is RGB already.

    Until the end of the block the picture counts among those that are in memory.

    A thread that waits for its turn must not hold another one.
    """
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(source, str | os.PathLike):
                if reason := unreadable(source):
                    raise DataError(reason)
                name, source = Path(source).name, stack.enter_context(open_readable(source))
            elif not source.seekable():
                source = io.BytesIO(source.read())
            with _opened(cast(IO[bytes], _Pieces(source)), name) as picture:
                if max(picture.size) > budgets.PICTURE_SIDE:
                    raise DataError(f"{picture.width}x{picture.height} pixels; a side may have {budgets.PICTURE_SIDE}")
                count, each = picture.width * picture.height, _bytes_each(picture)
                if count * each > budgets.PICTURE_BYTES:
                    kind = "progressive " * ("progressive" in picture.info) + str(picture.format)
                    raise DataError(f"{picture.width}x{picture.height} pixels; the limit for such a {kind} is "
                                    f"{budgets.PICTURE_BYTES // each}")
                stack.enter_context(_DECODING.taken(count * each))
                orientation = picture.getexif().get(_ORIENTATION, 1)
                found: _Picture = picture
                if picture.mode == "RGB" and orientation not in _TURNED:
                    picture.load()
                else:
                    found = _as_rgb(picture)
            del picture  # with its own copy of the pixels, which would live as long as the block
            if not isinstance(found, Image.Image):
                found = _turned(found, orientation)
        except DataError:
            raise
        except Exception as error:  # a damaged file can raise nearly anything in the decoders
            reason = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
            raise DataError(reason) from error
        yield found
        del found  # before another thread may begin


class _Pieces(io.RawIOBase):
    """A file of which a decoder reads so many pieces at most.

    Pillow goes through headers in Python, a chunk of a PNG in four reads, what fills a JPEG up byte by byte.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._left = budgets.PICTURE_PIECES
        self.seek, self.tell = file.seek, file.tell  # type: ignore[method-assign]

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise DataError(f"its file is read in more than {budgets.PICTURE_PIECES} pieces, the limit")
        return self._file.read(-1 if size is None else size)


def _opened(file: IO[bytes], name: str) -> Image.Image:
    """As Pillow's ``Image.open``, which Ultralytics replaces by one that installs a package for what is no picture."""
    file.seek(0)
    start = file.read(16)
    for form in _FORMATS:
        factory, accept = Image.OPEN[form]
        with contextlib.suppress(SyntaxError, IndexError, TypeError, struct.error):  # a plugin's "this is not mine"
            if accept is None or accept(start) is True:
                file.seek(0)
                return factory(file, "")
    raise DataError(f"cannot identify image file {name!r}")


def _turned(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """As EXIF's orientation says. Pillow would hold the picture twice while it turns it."""
    if orientation in (3, 4, 6, 7):
        pixels = pixels[::-1]
    if orientation in (2, 3, 7, 8):
        pixels = pixels[:, ::-1]
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    return np.ascontiguousarray(pixels)


def _as_array(picture: _Picture) -> npt.NDArray[np.uint8]:
    return _as_rgb(picture) if isinstance(picture, Image.Image) else picture


def _as_rgb(picture: Image.Image) -> npt.NDArray[np.uint8]:
    """The pixels, converted a strip at a time: Pillow's and numpy's copies of the whole would take a gigabyte."""
    width, height = picture.size
    result = np.empty((height, width, 3), np.uint8)
    step = max(1, _STRIP // max(width, 1))
    for top in range(0, height, step):
        strip = picture.crop((0, top, width, min(top + step, height)))
        if strip.mode.startswith("I"):  # 16 bits: the high byte, as imread does; convert() would clip at 255
            result[top : top + step] = (np.asarray(strip).astype(np.int32) >> 8).clip(0, 255)[..., None]
        else:
            result[top : top + step] = np.asarray(strip.convert("RGB"))
    return result


class _Decoding:
    """How many bytes may be decoded at the same time, over all threads; one picture alone always may."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + size <= self._limit)
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()


_DECODING = _Decoding(budgets.PICTURE_BYTES)


def prepare(
    pixels: _Picture, height: int, width: int, preprocess: Preprocess = YOLO_PREPROCESS, channels: int = 3
) -> npt.NDArray[np.float32]:
    """Resizes, pads and normalises one picture.

    Args:
        pixels: uint8 [h, w, 3], RGB; or an image of Pillow's, RGB.
        height: Of the result, in pixels.
        width: Of the result, in pixels.
        preprocess: See :class:`Preprocess`.
        channels: 3, or 1 for the luminance (ITU-R 601, as OpenCV's).

    Returns:
        float32 [1, channels, height, width], contiguous.
    """
    canvas = _fitted(pixels, height, width, preprocess)
    if channels == 1:
        canvas = np.asarray(Image.fromarray(canvas).convert("L"))[..., None]
    elif preprocess.bgr:
        canvas = canvas[..., ::-1]
    result = np.multiply(canvas.transpose(2, 0, 1), np.float32(preprocess.scale), dtype=np.float32, order="C")
    if any(preprocess.mean):
        result -= np.asarray(preprocess.mean[:channels], np.float32)[:, None, None]
    if any(s != 1.0 for s in preprocess.std):
        result /= np.asarray(preprocess.std[:channels], np.float32)[:, None, None]
    return result[None]


def _fitted(pixels: _Picture, height: int, width: int, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
    """The picture in a canvas of the network's size, uint8 [height, width, 3].

    The letterbox is that of Ultralytics (LetterBox, auto=False): scale by the smaller ratio, up as well as down,
    round to whole pixels, and pad both sides evenly, the odd pixel to the right and bottom.
    """
    h, w = _size(pixels)
    if (h, w) == (height, width):
        return _as_array(pixels)
    if preprocess.resize == "stretch":
        return _resized(pixels, height, width)
    ratio = min(height / h, width / w)
    new_h, new_w = max(1, round(h * ratio)), max(1, round(w * ratio))
    canvas = np.full((height, width, 3), preprocess.fill, np.uint8)
    top, left = round((height - new_h) / 2 - 0.1), round((width - new_w) / 2 - 0.1)
    canvas[top : top + new_h, left : left + new_w] = _resized(pixels, new_h, new_w)
    return canvas


def _size(pixels: _Picture) -> tuple[int, int]:
    return (pixels.height, pixels.width) if isinstance(pixels, Image.Image) else pixels.shape[:2]


def _resized(pixels: _Picture, height: int, width: int) -> npt.NDArray[np.uint8]:
    """Bilinear without antialiasing, which is what OpenCV's INTER_LINEAR does and YOLO models are trained with."""
    h, w = _size(pixels)
    if (h, w) == (height, width):
        return _as_array(pixels)
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    extent = (0, 0, w, h)
    return np.asarray(picture.transform((width, height), Image.Transform.EXTENT, extent, Image.Resampling.BILINEAR))


def describe(preprocess: Preprocess) -> str:
    """The preprocessing in a few words, for a report."""
    order = "BGR" if preprocess.bgr else "RGB"
    norm: list[Any] = [f"scale {preprocess.scale:.6g}"]
    if any(preprocess.mean):
        norm.append(f"mean {list(preprocess.mean)}")
    if any(s != 1.0 for s in preprocess.std):
        norm.append(f"std {list(preprocess.std)}")
    return f"{preprocess.resize}, {order}, {', '.join(map(str, norm))}"


# Pictures in files ---------------------------------------------------------------------------------------------------

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
OTHER_PICTURES = (".tif", ".tiff", ".gif", ".heic", ".heif", ".avif", ".jp2", ".jxl", ".ppm", ".pgm", ".tga")


class ImageSource(FilesSource):
    """Pictures for a model with one input of rank 4, NCHW or NHWC, with 3 channels or 1."""

    single_rows = is_images = True

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

    def settings(self) -> str:
        return f"{self.preprocess} {self.channels}x{self.height}x{self.width} nhwc={self.nhwc}"

    def load(self, index: int) -> dict[str, Array]:
        return self.prepared(self.paths[index])

    def prepared(self, source: str | os.PathLike[str] | IO[bytes], name: str = "") -> dict[str, Array]:
        """A picture as the network takes it; see :func:`calibration.pictures.decode`."""
        with decoded(source, name) as pixels:
            array = prepare(pixels, self.height, self.width, self.preprocess, self.channels)
            del pixels  # until here it counts
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
            raise DataError(said("input '{name}' {shown} leaves the image size open; give {`size`}, for example "
                                 "640x640", name=spec.name, shown=shown))
        height, width = height or size[0], width or size[1]
    if height < 1 or width < 1 or height * width > budgets.INPUT_PIXELS:
        raise DataError(f"input '{spec.name}' {shown}: image size {height}x{width} is not possible; the limit is "
                        f"{budgets.INPUT_PIXELS} pixels")
    return nhwc, channels, height, width


# Pictures behind URLs ------------------------------------------------------------------------------------------------

_URL = re.compile(r"[a-z][a-z0-9+.\-]+(://|::)", re.IGNORECASE)
_CHECKSUMS = ("ETag", "etag", "md5Hash", "content_md5", "checksum", "sha256")  # as the file systems call them


def is_url(text: str) -> bool:
    """Whether a text is a URL of a protocol other than ``file``."""
    return _URL.match(text) is not None and local_path(text) == text


def local_path(text: str) -> str:
    """The path of a ``file://`` URL; anything else as it is."""
    for begin in ("file://", "local://"):
        if text.lower().startswith(begin):
            return text[len(begin):]
    return text


def opened(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it.

    Raises:
        DataError: fsspec is not installed, or nothing for that protocol.
    """
    try:
        import fsspec
    except ImportError:
        raise DataError(f"{url}: URLs need fsspec: pip install fsspec, and s3fs, gcsfs or the like") from None
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise DataError(f"{url}: {' '.join(str(error).split())} (pip install it here and on every worker)") from None
    except Exception as error:  # each file system has classes of its own
        raise DataError(f"{url}: cannot be opened: {reason_of(error)}") from None
    return system, str(path)


def url_source(
    url: str, inputs: Sequence[InputSpec], preprocess: Preprocess, size: tuple[int, int] | None
) -> UrlSource:
    """Pictures under a URL, in the order of their paths, or one picture.

    Raises:
        DataError: There are none, or the URL cannot be listed.
    """
    system, path = opened(url)
    try:
        if system.isfile(path):
            folder, _, name = path.rpartition("/")
            return UrlSource(url.rpartition("/")[0], folder, [name], inputs, preprocess, size)
        names = sorted(_pictures(system, path.rstrip("/")))
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{url}: cannot be listed: {reason_of(error)}") from None
    if not len(names):
        kinds = ", ".join(sorted(s[1:] for s in IMAGE_SUFFIXES))
        raise DataError(f"{url}: no images ({kinds}) under this URL")
    return UrlSource(url, path.rstrip("/"), names, inputs, preprocess, size)


def _pictures(system: Any, root: str) -> Iterator[str]:
    """Names under a folder, one folder at a time; what begins with a dot is left out."""
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        for entry in system.ls(folder, detail=True):
            path = str(entry["name"]).rstrip("/")
            last = path.rpartition("/")[2]
            if last.startswith(".") or path == folder:
                continue
            if entry["type"] == "directory":
                waiting.append(path)
            elif posixpath.splitext(last)[1].lower() in IMAGE_SUFFIXES and "\0" not in path:
                yield path.removeprefix(root).lstrip("/")


class UrlSource(ImageSource):
    """Pictures behind a URL, each read whole and within :data:`qdqtool.base.budgets.PICTURE_FILE`."""

    def __init__(
        self, url: str, folder: str, names: Sequence[str], inputs: Sequence[InputSpec], preprocess: Preprocess,
        size: tuple[int, int] | None,
    ) -> None:
        """Describes them; nothing is read yet. ``folder`` is that of the URL in its file system."""
        self.describe(url, inputs, preprocess, size)
        self.url, self.folder, self.names = url, folder, names

    @functools.cached_property
    def _read(self) -> threading.local:
        """The picture that a thread has read and not loaded yet."""
        return threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_read"}

    def count(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return printable(self.names[index])

    def portion(self, indices: Sequence[int]) -> Self:
        part = copy.copy(self)
        part.names = [self.names[i] for i in indices]
        return part

    def digest(self, index: int) -> bytes:
        """Name and checksum: the store's own where it has one, so that the client need not read the pictures."""
        return self.name(index).encode() + self._checksum(index)

    def load(self, index: int) -> dict[str, Array]:
        data = self._content(index)[0]
        self._read.held = None
        return self.prepared(io.BytesIO(data), self.names[index].rpartition("/")[2])

    def _path(self, index: int) -> str:
        return f"{self.folder}/{self.names[index]}"

    def _checksum(self, index: int) -> bytes:
        system, _ = opened(self.url)
        try:
            mark = _mark(system.info(self._path(index)))
            return mark or self._content(index)[1]
        except Exception:
            return UNREADABLE

    def _content(self, index: int) -> tuple[bytes, bytes]:
        """What a picture's file holds, and its checksum; held until it is loaded, so that it travels once.

        Raises:
            DataError: It cannot be read, or is too large.
        """
        held = getattr(self._read, "held", None)
        if held is not None and held[0] == index:
            return held[1], held[2]
        system, _ = opened(self.url)
        try:
            with system.open(self._path(index), "rb") as file:
                details = getattr(file, "details", None)
                data = file.read(budgets.PICTURE_FILE + 1)
        except FileNotFoundError:
            raise DataError("no such file") from None
        except Exception as error:
            raise DataError(reason_of(error)) from None
        budgets.require(len(data), budgets.PICTURE_FILE, "the file has", DataError)
        mark = _mark(details) if isinstance(details, dict) else b""
        mark = mark or hashlib.blake2b(data, digest_size=16).digest()
        self._read.held = (index, data, mark)
        return data, mark


def _mark(details: dict[str, Any]) -> bytes:
    """The checksum that a store gives of a file, with its size; empty where it gives none."""
    for name in _CHECKSUMS:
        if details.get(name):
            return f"{details.get('size')} {details[name]}".encode()
    return b""
