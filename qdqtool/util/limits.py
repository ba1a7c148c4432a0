"""Limits on files, images, models and the work that they cause.

Real inputs stay below the limits. If an input exceeds a limit, the message states the limit.
Units are bytes unless a comment says otherwise.
"""

from qdqtool.errors import QdqtoolError

MB = 1 << 20
GB = 1 << 30

# Files
MODEL_MESSAGE = (1 << 31) - 1  # a serialized model; protobuf reads no larger messages
UNPACKED = 512 * MB  # contents of a compressed file: model, arrays, cache or log
UNPACKED_RATIO = 8  # a compressed file may unpack to this multiple of its size
UNPACKED_LOG_RATIO = 100  # a compressed log may unpack to this multiple; real logs reach 30
LOG = 4 * GB  # a log, unpacked
PIPED_LOG = 256 * MB  # a log from a pipe, because a pipe may never end
PIPED_LINES = 2_000_000  # lines of a log from a pipe
LOG_LINE = 1 * MB  # a log line; longer lines are cut
LOG_RECORDS = 300_000  # records that are kept from a log: nodes, passes, layers, times, options
LOG_TEXT = 24 * MB  # texts of the records that are kept from a log
LOG_CONSTANTS = 320 * MB  # weights of a network that is reconstructed from a log; YOLOv8x: 260 MB
LIST_FILE = 64 * MB  # a list of images, a calibration table, a recorded JSON
JSON_FILE = 20 * MB  # a layer or profile JSON; as Python objects, it takes 40 times its size
JSON_VALUES = 8_000_000  # values in a JSON file
VERIFICATION_FILE = 8 * MB  # the JSON of `verify`
EXTERNAL_DATA = 16 * GB  # all external weights of a model
EXTERNAL_SHARED = 64 * MB  # external weights that more than one tensor refers to

# Calibration
IMAGE_PIXELS = 1 << 26  # pixels of an image after decoding
IMAGE_FILE = 256 * MB  # an image file
INPUT_PIXELS = 1 << 24  # height times width of the network's input
SAMPLE = 512 * MB  # one sample of an array file
SAMPLE_ROWS = 4096  # batch size of a network with a fixed batch
FETCHED = 256 * MB  # outputs of onnxruntime that all threads together hold at a time
COUNTED = 512 * MB  # histograms of all threads together
CACHE_MEMORY = 512 * MB  # statistics in a calibration cache

# Graphs
Q_COPIES = 4096  # copies of quantizers that TensorRT moves across Concats and Splits
NAME = 1 << 16  # characters of a node's or tensor's name
NAMES = 128 * MB  # characters of all names
RANK = 64  # dimensions of a tensor, as in numpy
SHAPE_ENTRIES = 1 << 16  # entries of a 1-D tensor that may hold a shape
SHAPE_ENTRIES_ALL = 1 << 22  # entries of all tensors that may hold shapes
FUNCTION_LEVELS = 500  # nesting depth of function calls in a model
FUNCTION_CALLS = 200_000  # nodes after all functions are expanded
FUNCTION_COPIES = 256 * MB  # copies of function bodies for repeated calls
ADDED_CONSTANTS = 512 * MB  # constants that one edit adds to a model

# onnx's converter and shape inference in a child process
ONNX_BYTES = 640 * MB  # memory of the process
ONNX_BYTES_BYTE = 256  # additional memory of the process for each byte of the model
ONNX_SECONDS = 120  # seconds that the process may run

# extract
TRIMMED_NODES = 20_000  # total nodes of all parts that are predicted while a part is trimmed
# Total nodes and bytes of all models that `--minimize` predicts. These two limits do not apply if
# `--minimize` uses a build, a command or `--limit`.
MINIMIZED_NODES = 200_000
MINIMIZED_BYTES = 16 * GB

# Sessions of onnxruntime
PROCESSES = "QDQTOOL_PROCESSES"  # environment variable: number of processes that share the memory
SESSION_BYTES = 768 * MB  # tensors in memory at the same time in one run of `fix`
SESSION_INPUT = 201_400_000  # bytes of one random input; 1x3x4096x4096 floats fit
SESSION_WORK = 3 * 10**11  # multiplications of one run; YOLOv8x at 640 x 640 has 1.3 * 10^11
SESSION_WORK_ALL = 2 * 10**12  # multiplications of all runs of one `fix`
SESSION_RUN = 10**8  # cost of loading a model, in multiplications
SESSION_WORK_BYTE = 100  # cost of each byte of a model, in multiplications
INNER_NODE = 50_000  # cost of a node in a Loop, Scan or If, in multiplications
EFFORT = 1000.0  # maximum of `--effort`, the factor by which `fix` raises these limits

# demo and tune
DEMO_SIZE = 960  # pixels of a side of the demo's input
TUNING_REFERENCES = 256 * MB  # outputs of the float network that are kept for later runs
TUNING_HELD = 256 * MB  # intermediate outputs that each worker keeps in memory
TUNING_SESSIONS = 1024 * MB  # onnxruntime sessions kept open on parts of the network
TUNING_STATE = 256 * MB  # a file of measurements
TUNING_SAMPLES = 4096  # samples of one set

# Drawings
DRAWN_LAYERS = 5_000  # layers of a drawing
DRAWN_POINTS = 12_000  # number of rows that an edge crosses, summed over all edges
DRAWN_ROW = 400  # layers in one row
REPORT = 48 * MB  # an HTML report

USER_SECONDS = 600.0  # seconds of one run of `--check` or one call of `--metric`


def check_seconds(seconds: float | None, name: str) -> float:
    """Check a time limit of the user, and return it. The default is 600 seconds.

    Args:
        seconds: Time limit in seconds; None for the default.
        name: Name of the parameter for the message.

    Raises:
        QdqtoolError: The time is not above 0, or more than a million seconds.
    """
    if seconds is None:
        return USER_SECONDS
    if not 0 < seconds <= 1e6:
        raise QdqtoolError(
            f"`{name}={seconds!r}`: give a number of seconds above 0 and up to a million",
            code="out-of-range",
            parameter=name,
        )
    return float(seconds)


def max_unpacked_size(size: int, ratio: int = UNPACKED_RATIO) -> int:
    """Return the maximum unpacked size of a compressed file, in bytes.

    Args:
        size: Size of the compressed file in bytes.
        ratio: Maximum ratio of the two sizes for files that unpack to more than 512 MB.
    """
    return max(UNPACKED, ratio * size)


def format_bytes(size: float) -> str:
    """Format a number of bytes in GB, MB or KB with three digits, or as bytes below 1 KB."""
    for unit, name in ((GB, "GB"), (MB, "MB"), (1 << 10, "KB")):
        if size >= unit:
            digits = ".0f" if size >= 999.5 * unit else ".3g"  # no exponent such as 1.02e+03
            return f"{size / unit:{digits}} {name}"
    return f"{size:.0f} bytes"


def format_excess(size: float, limit: float, suffix: str = "") -> str:
    """Format a size and the limit that it exceeds, such as ``2 GB; the limit is 1 GB``.

    Both are written with all digits if three digits would look equal.

    Args:
        size: Actual size.
        limit: One of the limits of this module.
        suffix: Text after the size.
    """
    shown = [format_bytes(size), format_bytes(limit)]
    if shown[0] == shown[1]:
        shown = [f"{size:.0f} bytes", f"{limit:.0f} bytes"]
    return f"{shown[0]}{suffix}; the limit is {shown[1]}"


def check_size(
    size: float,
    limit: float,
    subject: str,
    error: type[QdqtoolError] = QdqtoolError,
    *,
    path: str = "",
    code: str = "file-too-large",
) -> None:
    """Raise an error if a number of bytes exceeds a limit.

    Args:
        size: Actual size.
        limit: One of the limits of this module.
        subject: Subject and verb of the message, such as "its arrays take".
        error: Class of the error.
        path: File for the start of the message.
        code: Code of the error.

    Raises:
        QdqtoolError: `size` is above `limit`. The message names both.
    """
    if size > limit:
        raise error(f"{subject} {format_excess(size, limit)}", path, code=code)
