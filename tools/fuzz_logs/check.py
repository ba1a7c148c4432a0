"""Check that the log reader returns an answer or an error of one line, within SECONDS."""

import contextlib
import io
import json
import time

from qdqtool.buildlog import drawing
from qdqtool.buildlog.costs import analyze
from qdqtool.buildlog.engine_comparison import compare_engines
from qdqtool.buildlog.names import parse_layer_name
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.reconstruct import graph_from_log
from qdqtool.buildlog.summary import find_pass_lines, summarize
from qdqtool.buildlog.types import Build
from qdqtool.errors import QdqtoolError
from qdqtool.formats import build_text, log_text
from qdqtool.formats.output import TextPage

SECONDS = 10.0


class SlowFileError(AssertionError):
    """Reading a file took longer than SECONDS."""


def check(data: bytes) -> str:
    """Read a file, and compute all answers for the file.

    Returns:
        ``read``, or ``refused`` if there was an error of one line.

    Raises:
        AssertionError: An answer breaks a rule.
        Exception: The reader failed.
    """
    started = time.process_time()
    try:
        build = read_build(io.BytesIO(data))
    except QdqtoolError as error:
        outcome = "refused"
        message = str(error)
        assert message, "an error without a message"
        assert "\n" not in message, "an error of more than one line"
    else:
        outcome = "read"
        use_build(build)
    seconds = time.process_time() - started
    if seconds > SECONDS:
        raise SlowFileError(f"{seconds:.1f} s")
    return outcome


def use_build(build: Build) -> None:
    summary = summarize(build)
    json.dumps(summary, allow_nan=False)
    log_text.render(summary, 80)
    log_text.render(summary, 80, everything=True)
    for row in summary["passes"]:
        if row["pass"]:
            assert find_pass_lines(build, row["pass"])
    assert build.complete <= bool(build.layers)
    for layer in build.layers:
        parse_layer_name(layer.name)
    report = analyze(build)
    assert len(report.rows) == len(build.layers)
    json.dumps(report.as_json(), allow_nan=False)
    build_text.render(report, "ms", 80, everything=True)
    drawing.format_dot(drawing.draw_engine(report))
    if len(report.rows) < 300:
        build_text.add_engines(TextPage(), compare_engines(report, report))
    with contextlib.suppress(QdqtoolError):
        graph_from_log(build)
