"""Pictures as network inputs: decoding, letterbox, layout, normalisation."""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt
from PIL import BmpImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from calibration.dataset import Array, FilesSource, InputSpec
from calibration.listing import Folder
from qdqtool.base import budgets
from qdqtool.base.files import read_all, reading_problem, record_input
from qdqtool.base.options import Preprocess, Samples
from qdqtool.base.said import said
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.model.sessions import core_count

# By content, whatever the file is called: no other decoder of Pillow's, least of all EPS, which starts Ghostscript.
# Pillow loads all that it has, forty, where one that is asked for is not loaded yet.
_FORMATS = (
    JpegImagePlugin.JpegImageFile.format,
    PngImagePlugin.PngImageFile.format,
    BmpImagePlugin.BmpImageFile.format,
    BmpImagePlugin.DibImageFile.format,
    WebPImagePlugin.WebPImageFile.format,
)
STRIP_PIXELS = 1 << 20  # converted at a time; also bytes of a file that are searched at a time
_PILLOW, _ARRAY = 4, 3  # bytes a pixel: of Pillow's own image, and of ours
_WEBP = 10  # beside Pillow's: two canvases of its decoder, and the file where that is not larger
_RUNS = 24  # in place of time: Pillow unpacks the runs of a BMP in Python
_SCALES = (2, 4, 8)  # by which the decoder of a JPEG can divide the sides
_SCAN, _SCANS = (
    b"\xff\xda",
    100,
)  # of a JPEG whose scans are kept, fewer of a larger one; encoders write about ten
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


def _fit(picture: Image.Image, packed: int, least: int | None) -> int:
    """How many bytes a picture takes while it is decoded, or turned and converted behind that.

    A JPEG for which that is too much is set to be decoded with its sides divided by 2, 4 or 8, where that is not.

    Args:
        picture: Opened, not loaded.
        packed: Bytes that it holds of its file.
        least: Pixels that have to be left of it then; None where it has to be whole.

    Raises:
        DataError: It is too much, or it is a JPEG of more scans than any encoder writes.
    """
    width, height = picture.size
    scales, kept, more, limit = [1], 0, 0, budgets.PICTURE_BYTES
    most = limit
    if isinstance(picture, JpegImagePlugin.JpegImageFile):
        kept = _scans_kept(picture)
        if least is not None:
            most = budgets.PICTURE_REDUCED
            scales += [s for s in _SCALES if _divided(width, s) * _divided(height, s) >= least]
    elif picture.format == "WEBP":
        kept, more = _WEBP, max(0, packed - 2 * width * height)
    elif isinstance(picture, BmpImagePlugin.BmpImageFile) and picture.tile[0][0] == "bmp_rle":
        kept = _RUNS
    for scale in scales if width * height <= most else ():
        pixels = _divided(width, scale) * _divided(height, scale)
        size = more + max(kept * width * height + _PILLOW * pixels, (_PILLOW + _ARRAY) * pixels)
        if size <= limit:
            if scale > 1:
                picture.draft(None, (width // scale, height // scale))
            return size
    each = max(kept + _PILLOW / scales[-1] ** 2, (_PILLOW + _ARRAY) / scales[-1] ** 2)
    most = min(most, int((limit - more) / each))
    kind = "progressive " * ("progressive" in picture.info) + str(picture.format)
    raise DataError(
        f"{width}x{height} pixels; the limit for such a {kind} is {most}", code="picture-too-large"
    )


def _divided(side: int, scale: int) -> int:
    return -(-side // scale)


def _scans_kept(picture: JpegImagePlugin.JpegImageFile) -> int:
    """Bytes a pixel that a JPEG's decoder keeps: of one of several scans two for each value of each component.

    Raises:
        DataError: It has more scans than any encoder writes: each costs the time of a picture.
    """
    areas = [max(1, across * down) for _, across, down, *_ in picture.layer] or [1]
    return math.ceil(2 * sum(areas) / max(areas)) if _in_several_scans(picture, len(areas)) else 0


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
        while block := file.read(STRIP_PIXELS):
            budgets.require(
                file.tell(),
                budgets.PICTURE_FILE,
                "the file of a JPEG of several scans has",
                DataError,
            )
            scans += (last + block).count(_SCAN)
            last = block[-1:]
    finally:
        file.seek(place)
    whole = budgets.PICTURE_BYTES // (_PILLOW + _ARRAY)
    most = _SCANS * whole // max(whole, picture.width * picture.height)
    if scans > most:
        raise DataError(f"a JPEG of {scans} scans; the limit is {most}", code="too-many-scans")
    return True


def _first_scan(file: IO[bytes]) -> int:
    """How many components the first scan of a JPEG has; 0 where its segments do not lead there."""
    file.seek(2)
    while (marker := file.read(2))[:1] == b"\xff":
        if marker == b"\xff\xff":  # what is filled up
            file.seek(-1, os.SEEK_CUR)
            continue
        if (
            marker[1] in (0, 1) or 0xD0 <= marker[1] <= 0xD9
        ):  # it has no size: decoders differ in what they make of it
            return 0
        size = int.from_bytes(file.read(2), "big")
        if marker == _SCAN:
            return int.from_bytes(file.read(1), "big")
        file.seek(max(0, size - 2), os.SEEK_CUR)
    return 0


@contextlib.contextmanager
def decoded(
    source: str | os.PathLike[str] | IO[bytes], name: str = "", least: int | None = None
) -> Iterator[_Picture]:
    """As :func:`decode`, as Pillow's own image where that is RGB already.

    Until the end of the block the picture counts among those that are in memory.

    A thread that waits for its turn must not hold another one.

    Args:
        source: As there.
        name: As there.
        least: So many pixels are enough of a JPEG that is too large otherwise: its decoder divides its sides by 2, 4 or
            8, which gives the mean of as many pixels.
    """
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(source, str | os.PathLike):
                if reason := reading_problem(source):
                    exists = os.path.exists(source)
                    raise DataError(reason, code="file-unreadable" if exists else "file-missing")
                name, source = Path(source).name, stack.enter_context(open(source, "rb"))
            elif not source.seekable():
                data = read_all(source, budgets.PICTURE_FILE)
                if data is None:
                    raise DataError(
                        f"it gives more than {budgets.amount(budgets.PICTURE_FILE)}, the limit",
                        code="file-too-large",
                    )
                source = io.BytesIO(data)
            with _begun(_Pieces(source), name, least, stack) as picture:
                orientation = picture.getexif().get(_ORIENTATION, 1)
                found: _Picture = picture
                if picture.mode == "RGB" and orientation not in _TURNED:
                    picture.load()
                else:
                    found = _as_rgb(picture)
            del picture  # with its own copy of the pixels, which would live as long as the block
            if not isinstance(found, Image.Image):
                found = _turned(found, orientation)
        except QdqtoolError:
            raise
        except Exception as error:  # a damaged file can raise nearly anything in the decoders
            reason = (
                " ".join(str(getattr(error, "strerror", None) or error).split())
                or type(error).__name__
            )
            raise DataError(reason, code="file-damaged") from error
        yield found
        del found  # before another thread may begin


class _Pieces(io.RawIOBase):
    """A file of which a decoder reads so many pieces at most, and so many bytes that it holds.

    Pillow goes through headers in Python, a chunk of a PNG in four reads, what fills a JPEG up byte by byte, and keeps
    what it finds there.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._left = budgets.PICTURE_PIECES
        self.held, self.most = 0, budgets.PICTURE_HEADER
        self.flows = False  # what is read is used at once
        self.seek, self.tell = file.seek, file.tell  # type: ignore[method-assign]

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise DataError(
                f"its file is read in more than {budgets.PICTURE_PIECES} pieces, the limit",
                code="too-many-pieces",
            )
        if self.flows and size is not None and size >= 0:
            return self._file.read(size)
        room = self.most - self.held
        data = (
            read_all(self._file, room)
            if size is None or size < 0
            else self._file.read(min(size, room + 1))
        )
        if data is None or len(data) > room:
            raise DataError(
                f"more than {budgets.amount(self.most)} of its file would be held, the limit",
                code="header-too-large",
            )
        self.held += len(data)
        return data


class _Png(PngImagePlugin.PngImageFile):
    """What comes behind the pixels is held again; texts, of four bytes a character, have a quarter of the room."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, PngImagePlugin.PngStream):  # 68 kB became 266 MB, for each thread
            value.text_memory = PngImagePlugin.MAX_TEXT_MEMORY - budgets.PICTURE_HEADER // 4
        super().__setattr__(name, value)

    def load_end(self) -> None:
        self.fp.flows = False  # type: ignore[union-attr]
        super().load_end()


class _WebP(WebPImagePlugin.WebPImageFile):
    """Its decoder goes, with two canvases and the file, when it has given the pixels, before Pillow copies them."""

    def load_prepare(self) -> None:
        self._decoder = None
        super().load_prepare()


_OWN = {_Png.format: _Png, _WebP.format: _WebP}
_LARGE = threading.Lock()  # of one thread that waits for its turn and holds much of a file


def _begun(file: _Pieces, name: str, least: int | None, turn: contextlib.ExitStack) -> Image.Image:
    """A picture that is opened, as soon as it may be decoded, which it may until the end of ``turn``."""
    with _LARGE if file.seek(0, os.SEEK_END) > budgets.PICTURE_HEADER else contextlib.nullcontext():
        picture = _opened(file, name)
        if max(picture.size) > budgets.PICTURE_SIDE:
            raise DataError(
                f"{picture.width}x{picture.height} pixels; a side may have {budgets.PICTURE_SIDE}",
                code="picture-too-large",
            )
        file.flows = True
        turn.enter_context(_DECODING.reserve(_fit(picture, file.held, least)))
    return picture


def _opened(file: _Pieces, name: str) -> Image.Image:
    """As Pillow's ``Image.open``, which Ultralytics replaces by one that installs a package for what is no picture."""
    file.seek(0)
    start = file.read(16)
    for form in _FORMATS:
        factory, accept = Image.OPEN[form]
        with contextlib.suppress(
            SyntaxError, IndexError, TypeError, struct.error
        ):  # a plugin's "this is not mine"
            if accept is None or accept(start) is True:
                file.seek(0)
                file.most = budgets.PICTURE_FILE if form == _WebP.format else budgets.PICTURE_HEADER
                return _OWN.get(form, factory)(cast(IO[bytes], file), "")
    raise DataError(f"cannot identify image file {name!r}", code="wrong-format")


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
    step = max(1, STRIP_PIXELS // max(width, 1))
    for top in range(0, height, step):
        strip = picture.crop((0, top, width, min(top + step, height)))
        if strip.mode.startswith(
            "I"
        ):  # 16 bits: the high byte, as imread does; convert() would clip at 255
            result[top : top + step] = (np.asarray(strip).astype(np.int32) >> 8).clip(0, 255)[
                ..., None
            ]
        else:
            result[top : top + step] = np.asarray(strip.convert("RGB"))
    return result


class DecodingBudget:
    """Limit on the bytes that pictures take while they are decoded, over all threads; one picture alone always may.

    Processes that have the same folder in their environment (:data:`qdqtool.base.budgets.TOGETHER`) share so much for
    every eight cores, but for small pictures: many cores decode many photographs at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Wait until a picture of `size` bytes may be decoded, and count it until the end of the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + size <= self._limit)
            self._used += size
        try:
            with self._slots(size):
                yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()

    @contextlib.contextmanager
    def _slots(self, size: int) -> Iterator[None]:
        """As many slots as the size makes."""
        folder, places = os.environ.get(budgets.TOGETHER), _SLOTS * max(1, core_count() // _CORES)
        wanted = min(_SLOTS, math.ceil(size * _SLOTS / self._limit))
        with contextlib.ExitStack() as taken:
            if folder and size * _SMALL > self._limit:
                with contextlib.ExitStack() as gate:  # one at a time waits, and holds some already
                    _locked(gate, folder, "gate", wait=True)
                    while wanted:
                        for place in range(places):
                            wanted -= bool(wanted and _locked(taken, folder, f"slot{place}"))
                        time.sleep(_LOOK_SECONDS * bool(wanted))
            yield


def _locked(held: contextlib.ExitStack, folder: str, name: str, wait: bool = False) -> bool:
    """Whether a lock between processes was taken, which another one may have; it ends with ``held``, or its process.

    Raises:
        QdqtoolError: The folder cannot have locks. It is no picture's fault, none of which is passed over for it.
    """
    try:
        import fcntl

        file = Path(folder, name).open("ab")  # noqa: SIM115 - it is closed with what holds it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BaseException:
            file.close()
            raise
    except BlockingIOError:
        return False
    except (OSError, ImportError) as error:
        reason = getattr(error, "strerror", None) or error
        raise QdqtoolError(
            f"{budgets.TOGETHER}={folder}: cannot have locks: {reason}", code="no-file-locks"
        ) from None
    held.callback(file.close)
    held.callback(
        fcntl.flock, file, fcntl.LOCK_UN
    )  # a process that was forked meanwhile has the file too
    return True


_SLOTS, _CORES, _LOOK_SECONDS = 16, 8, 0.005
_SMALL = 64  # pictures of so small a part of the budget, or smaller, do not count
_DECODING = DecodingBudget(budgets.PICTURE_BYTES)


def prepare(
    pixels: _Picture,
    height: int,
    width: int,
    preprocess: Preprocess = YOLO_PREPROCESS,
    channels: int = 3,
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
    result = np.multiply(
        canvas.transpose(2, 0, 1), np.float32(preprocess.scale), dtype=np.float32, order="C"
    )
    if any(preprocess.mean):
        result -= np.asarray(preprocess.mean[:channels], np.float32)[:, None, None]
    if any(s != 1.0 for s in preprocess.std):
        result /= np.asarray(preprocess.std[:channels], np.float32)[:, None, None]
    return result[None]


def _fitted(
    pixels: _Picture, height: int, width: int, preprocess: Preprocess
) -> npt.NDArray[np.uint8]:
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
    return np.asarray(
        picture.transform(
            (width, height), Image.Transform.EXTENT, extent, Image.Resampling.BILINEAR
        )
    )


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
OTHER_PICTURES = (
    ".tif",
    ".tiff",
    ".gif",
    ".heic",
    ".heif",
    ".avif",
    ".jp2",
    ".jxl",
    ".ppm",
    ".pgm",
    ".tga",
)


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
                record_input(path)

    def describe(
        self,
        where: str,
        inputs: Sequence[InputSpec],
        preprocess: Preprocess,
        size: tuple[int, int] | None,
    ) -> None:
        """Notes what the pictures become.

        Raises:
            DataError: The model does not take pictures.
        """
        if len(inputs) != 1:
            names = ", ".join(f"'{i.name}'" for i in inputs)
            raise DataError(
                f"images cannot feed a model with {len(inputs)} inputs ({names}); give npz files",
                where,
                code="input-count",
            )
        self.spec = inputs[0]
        self.integer = self.spec.numpy_dtype.kind in "iu"
        if self.integer and preprocess.scale == YOLO_PREPROCESS.scale:
            preprocess = replace(
                preprocess, scale=1.0
            )  # the network divides by 255 itself; 0 to 1 would round to 0
        self.preprocess = preprocess
        self.nhwc, self.channels, self.height, self.width = _layout(self.spec, size)

    def settings(self) -> str:
        return f"{self.preprocess} {self.channels}x{self.height}x{self.width} nhwc={self.nhwc}"

    def load(self, index: int) -> dict[str, Array]:
        return self.prepared(self.paths[index])

    def prepared(
        self, source: str | os.PathLike[str] | IO[bytes], name: str = ""
    ) -> dict[str, Array]:
        """A picture as the network takes it; see :func:`calibration.pictures.decode`."""
        with decoded(source, name, self.height * self.width) as pixels:
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
        raise DataError(
            f"input '{spec.name}' {shown} does not take images (rank 4 needed); give npz files",
            code="wrong-rank",
            node=spec.name,
        )
    nhwc = spec.shape[3] in (1, 3) and spec.shape[1] not in (1, 3)
    dims = (spec.shape[3], spec.shape[1], spec.shape[2]) if nhwc else spec.shape[1:]
    channels, height, width = (*dims,)
    channels = 3 if channels is None else channels
    if channels not in (1, 3):
        raise DataError(
            f"input '{spec.name}' {shown} takes {channels} channels, images have 3 or 1; give npz files",
            code="wrong-channels",
            node=spec.name,
        )
    if height is None or width is None:
        if size is None:
            raise DataError(
                said(
                    "input '{name}' {shown} leaves the image size open; give {`size`}, for example "
                    "640x640",
                    name=spec.name,
                    shown=shown,
                ),
                code="missing-argument",
                parameter="size",
                node=spec.name,
            )
        height, width = height or size[0], width or size[1]
    if height < 1 or width < 1 or height * width > budgets.INPUT_PIXELS:
        raise DataError(
            f"input '{spec.name}' {shown}: image size {height}x{width} is not possible; the limit is "
            f"{budgets.INPUT_PIXELS} pixels",
            code="out-of-range",
            parameter="size",
            node=spec.name,
        )
    return nhwc, channels, height, width
