"""How much of the machine one input may take: every limit that a hostile or damaged file can meet, in one place.

Each is well above what real networks, logs and photographs need, and is named in the message where it is met. Bytes
unless a name says otherwise.
"""

from __future__ import annotations

import contextlib
import os

from qdqtool.base.said import Parameter, said
from qdqtool.errors import QdqtoolError

MB = 1 << 20
GB = 1 << 30

# Files. A packed file may unpack to the first number, or to the given multiple of its own size where that is more:
# real weights and images shrink by less than half, zeros a thousandfold.
MODEL_MESSAGE = (1 << 31) - 1  # protobuf's own limit
UNPACKED_MODEL = 320 * MB
UNPACKED_ARRAYS = 512 * MB
UNPACKED_CACHE = 256 * MB
UNPACKED_TIMES = 8
LIST_FILE = 64 * MB  # a text file of paths, a calibration table, a recorded JSON
LIST_LINES = 4_000_000  # of such a text file of paths: each is an object of Python's
LISTED = 20_000  # paths in such a file that are looked for on the disk; of more, those used alone
CACHE_HEADER = 64 * MB
UNPACKED_LOG = 4 * GB  # read in one pass, never held
UNPACKED_SMALL_LOG = 512 * MB  # one that is packed may have so much, or
UNPACKED_LOG_TIMES = 100  # as many times its size; real ones have 30 (xz)
PIPED_LOG = 256 * MB  # what comes from a pipe may have no end
PIPED_LINES = 2_000_000
LOG_CONSTANTS = (
    320 * MB
)  # zeros in place of those of a network that a log tells of; YOLOv8x has 260 MB
LOG_LINE = (
    1 * MB
)  # kept of one line; the longest real ones (metadata of one big Myelin node) are far below
COMMAND = (
    1 << 17
)  # characters of a user's command: Linux takes no longer word, and a long one is split in squared time
COMMAND_OUTPUT = 64 * MB  # of a user's command, searched for a text
JSON_FILE = (
    20 * MB
)  # tens of thousands of layers; as Python's objects it takes up to forty times as much
JSON_VALUES = (
    8_000_000  # values in one JSON, counted by what divides them: as Python's objects half a GB
)
VERIFICATION_FILE = (
    8 * MB
)  # the JSON of `verify`, which lists what disagrees; real ones take some KB
EXTERNAL_DATA = 16 * GB  # all external weights of a model together
EXTERNAL_SHARED = (
    64 * MB
)  # by which tensors together may exceed the files they lie in (tied weights)

# Calibration.
SAMPLE = 512 * MB  # one sample of an array file
PICTURE_BYTES = (
    448_000_000  # that pictures take while they are decoded, over all threads: 64 million pixels
)
TOGETHER = "QDQTOOL_TOGETHER"  # in the environment of processes that share that: a folder of theirs
PICTURE_REDUCED = (
    1 << 28
)  # pixels of a JPEG, of which a half, a quarter or an eighth of each side is decoded
PICTURE_SIDE = 65_535  # pixels, JPEG's limit; a decoder keeps a pointer for each row
PICTURE_PIECES = 500_000  # that a decoder reads of a picture's file; 256 MB in chunks of a PNG of 8 KB are 130,000
PICTURE_HEADER = (
    16 * MB
)  # of a picture's file, before and behind its pixels: profiles, thumbnails, texts
PICTURE_FILE = (
    256 * MB
)  # of one that is held packed, as behind a URL, or gone through: as many pixels as there may be
INPUT_PIXELS = 1 << 24  # height times width of the network's input: 4096 x 4096
FETCHED = 256 * MB  # of wanted tensors, held by all threads together
COUNTED = (
    512 * MB
)  # of counts of values, one of each tensor for each thread and one that they are merged into
CACHE_MEMORY = 512 * MB  # statistics of all tensors of a cache

# Graphs.
Q_COPIES = 4096  # copies of quantizers that concatenations and splits make of those behind them
NAME = 1 << 16  # characters of a name of a node or tensor; exporters join a dozen of some dozens
NAMES = (
    128 * MB
)  # characters of all of them, each once; 100,000 nodes with names of 170 have a quarter of that
RANK = 64  # dimensions of a tensor; numpy's own limit
SHAPE_ENTRIES = 1 << 16  # entries of vectors at a node through which shapes may be computed
SHAPE_ENTRIES_ALL = 1 << 22  # of all these nodes
FUNCTION_LEVELS = 500  # of these in one another: what follows them, onnx as well, is recursive
FUNCTION_CALLS = 200_000  # nodes that the model's own functions stand for
FUNCTION_COPIES = 256 * MB  # of what these hold, for all calls of each beyond one

# Onnx's converter, and its inference of what it may crash on. The converter makes a dimension for each entry of what
# may be a shape, of a network's bytes 85, and compares each new name with all there are.
ONNX_BYTES = 640 * MB
ONNX_BYTES_BYTE = 256  # and for each of the model's own
ONNX_SECONDS = 120  # of the processor

TRIMMED_NODES = 20_000  # predicted in all tries of `extract` to trim a part: some 10 s; parts of 140 nodes end before
MINIMIZED_NODES = 200_000  # predicted in all tries of `--minimize` without a build, a command or a `--limit`; making a
# model that is not tried counts an eighth: a minute or two
MINIMIZED_BYTES = 16 * GB  # of the models predicted then, and of weights that are changed: a minute
ADDED_CONSTANTS = (
    512 * MB
)  # that one change to a model adds (weights copied for each of their readers)

LOOP_WORK = (
    10**15
)  # of one loop in one run of a model that is calibrated, counted as that of `fix` is: a day
SESSION_SHARE = 0.75  # of the machine's memory, which onnxruntime may take in this process: a run may decide a size
CONTAINER = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)  # what a container has of it
PROCESSES = (
    "QDQTOOL_PROCESSES"  # in the environment of processes that share that: how many they are
)
SAMPLE_ROWS = 4096  # the batch of a model that is calibrated

# Sessions of onnxruntime that `fix` opens to compare outputs.
SESSION_BYTES = 768 * MB  # tensors of one run that live at the same time, estimated from the shapes
SESSION_INPUT = 201_400_000  # one input made up of random numbers: 1x3x4096x4096
SESSION_PROCESS = 768 * MB  # what the process may take beside tensors and weights
SESSION_WORK = 3 * 10**11  # multiplications of one run: YOLOv8x at 640 x 640 has 1.3 * 10^11
INNER_NODE = 50_000  # what a node inside a Loop, Scan or If counts at each turn: 5 microseconds
SESSION_WORK_ALL = 2 * 10**12  # of all runs of one `fix`
SESSION_RUN = 10**8  # what each run counts beside its multiplications: loading the model
SESSION_WORK_BYTE = 100  # and for each byte of the model
SESSION_SECONDS = 120.0  # of the processor; a net for what cannot be counted, such as loops whose end a run decides:
# the work of one run takes a tenth of it. The first run that it ends is the last
SESSION_STUCK = 3600.0  # of the clock: for a process that neither computes nor ends, however loaded the machine is
EFFORT = 1000.0  # the most by which `--effort` raises these

# The demo.
DEMO_SIZE = 960  # side of its input: to run the quantized model takes 1 GB then

# Tuning.
TUNING_REFERENCES = 256 * MB  # what the float model does on samples, kept for the next run
TUNING_HELD = (
    256 * MB
)  # what parts of a network made of a sample, held by each worker for other candidates
TUNING_SESSIONS = (
    1024 * MB
)  # onnxruntime's, kept open for the next candidate that has the same part
TUNING_STATE = 256 * MB  # a file of what was measured
TUNING_SAMPLES = 4096  # in one set

# Drawings.
DRAWN_LAYERS = 5_000
DRAWN_POINTS = 12_000  # edges, and the rows that they pass
DRAWN_ROW = 400  # layers side by side
REPORT = 48 * MB  # a page that a browser still opens; YOLOv8x takes a fortieth

# The user's own commands and functions.
USER_SECONDS = (
    600.0  # one run of `--check` or one call of `--metric`, unless `--check-timeout` says otherwise
)


def seconds(given: float | None, name: str) -> float:
    """A limit on the user's own commands and functions.

    Raises:
        QdqtoolError: It is not a number of seconds above 0.
    """
    if given is None:
        return USER_SECONDS
    if not 0 < given <= 1e6:
        raise QdqtoolError(
            said(
                "{limit:{given!r}}: give seconds above 0, up to a million",
                limit=Parameter(name),
                given=given,
            ),
            code="out-of-range",
            parameter=name,
        )
    return float(given)


def session_memory() -> int:
    """Bytes that sessions of onnxruntime may take in this process together; 0 where the machine's memory is unknown."""
    known = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no such name, as on Windows
        known.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in CONTAINER:
        with contextlib.suppress(ValueError, OSError), open(path, encoding="ascii") as file:
            known.append(int(file.read(32)))  # "max" where there is no limit
    processes = 1
    with contextlib.suppress(ValueError):
        processes = max(1, int(os.environ.get(PROCESSES, "1")))
    return int(SESSION_SHARE * min(known, default=0) / processes)


def amount(size: float) -> str:
    """A number of bytes as people read it."""
    for unit, name in ((GB, "GB"), (MB, "MB"), (1 << 10, "KB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} bytes"


def against(size: float, limit: float, between: str = "") -> str:
    """A number of bytes and the limit that it is above, in digits that show it.

    Args:
        size: What is there, or would be.
        limit: One of this module's.
        between: What stands behind the size.
    """
    shown = [amount(size), amount(limit)]
    if shown[0] == shown[1]:
        shown = [f"{number:.0f} bytes" for number in (size, limit)]
    return f"{shown[0]}{between}; the limit is {shown[1]}"


def unpacked(limit: int, packed: int) -> int:
    """What a packed file of that size may unpack to."""
    return max(limit, UNPACKED_TIMES * packed)


def require(
    size: float,
    limit: float,
    what: str,
    kind: type[QdqtoolError] = QdqtoolError,
    *,
    path: str = "",
    code: str = "file-too-large",
) -> None:
    """Refuses what is above a limit in bytes.

    Args:
        size: What is there, or would be.
        limit: One of this module's.
        what: Beginning of the message: what of the file is too large (``its arrays take``).
        kind: Class of the error.
        path: The file, which the message begins with.
        code: Code of the error.

    Raises:
        QdqtoolError: ``size`` is above ``limit``; the message names both.
    """
    if size > limit:
        raise kind(f"{what} {against(size, limit)}", path, code=code)
