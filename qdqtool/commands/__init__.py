"""Commands of the command line, and the overview that ``qdqtool --help`` prints.

Each command is a module of this package that has a click command with the name `command`. The
overview is printed without click, because the import of click would take most of the time.
"""

from qdqtool.util.process import terminal_columns

# One line of help for each command. `qdqtool --help` does not import the modules of the commands.
COMMANDS = {
    "insert": "Insert calibrated Q/DQ pairs where TensorRT will use them.",
    "tune": "Find the fastest choice of INT8 layers that keeps the accuracy.",
    "predict": "Predict in which type TensorRT runs each convolution, and what prevents INT8.",
    "verify": "Compare the prediction with a real TensorRT build.",
    "compare": "Compare two models, two builds, or a model and its build.",
    "report": "Write one HTML page: the network as a graph, tables and plots.",
    "fix": "Apply fixes that need no calibration to a Q/DQ model.",
    "extract": "Cut out a small part of a model that still shows a finding.",
    "explain": "Explain a finding code or a TensorRT error message.",
    "log": "Summarize a TensorRT build log.",
    "gpus": "List the GPUs for which times can be estimated.",
    "engine": "Show precision, memory, MACs and time of each layer of a built engine.",
    "build": "Build a model with TensorRT or TensorRT-RTX on this machine.",
    "demo": "Insert, predict and verify on an embedded YOLOv8-style model.",
}
_ABOUT = (
    "INT8 for TensorRT without surprises, and without a GPU.",
    "Exit codes: 0 done (and, for verify, everything agreed); "
    "1 a check failed; 2 bad input or usage.",
)
_OPTIONS = {"--version": "Show the version and exit.", "-h, --help": "Show this message and exit."}
_MORE = "qdqtool COMMAND --help lists its options, with examples."
_MIN_WIDTH, _MAX_WIDTH = 50, 78  # width of the overview, in columns


def render_overview() -> str:
    """Return the text of ``qdqtool --help``, wrapped to the width of the terminal."""
    width = max(_MIN_WIDTH, min(_MAX_WIDTH, terminal_columns() - 2))
    lines = ["Usage: qdqtool [OPTIONS] [COMMAND] [ARGS]..."]
    for paragraph in _ABOUT:
        lines += ["", *_wrap_paragraph(paragraph, "  ", "  ", width)]
    for heading, rows in (("Options", _OPTIONS), ("Commands", COMMANDS)):
        indent = max(map(len, rows)) + 4
        lines += ["", f"{heading}:"]
        for name, text in rows.items():
            lines += _wrap_paragraph(text, f"  {name}".ljust(indent), " " * indent, width)
    return "\n".join([*lines, "", *_wrap_paragraph(_MORE, "", "", width)])


def _wrap_paragraph(text: str, first: str, rest: str, width: int) -> list[str]:
    lines, line = [], first
    for word in text.split():
        if len(line) + len(word) > width and line.strip() and line != first:
            lines.append(line.rstrip())
            line = rest
        line += f"{word} "
    return [*lines, line.rstrip()]
