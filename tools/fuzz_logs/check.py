"""What must hold for any file at all: an answer or one clear line, soon, in bounded memory."""

import contextlib
import io
import json
import time

from qdqtool.buildlog import drawing
from qdqtool.buildlog.costs import analyze, compare
from qdqtool.buildlog.names import parts
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.reconstruct import graph_from_log
from qdqtool.buildlog.summary import lines_of_pass, summarize
from qdqtool.buildlog.types import Build
from qdqtool.errors import QdqtoolError
from qdqtool.render import build_text, log_text
from qdqtool.render.output import Page

SECONDS = 10.0


class Slow(AssertionError):
    """A file took longer than SECONDS."""


def check(data: bytes) -> str:
    """Reads a file and makes everything that can be made of it.

    Returns:
        ``read``, or ``refused`` when it was refused in one line.

    Raises:
        AssertionError: An answer was not what it must be.
        Exception: Anything else that escaped: a defect.
    """
    started = time.perf_counter()
    try:
        build = read_build(io.BytesIO(data))
    except QdqtoolError as error:
        outcome = "refused"
        message = str(error)
        assert message, "a refusal without words"
        assert "\n" not in message, "a refusal of more than one line"
    else:
        outcome = "read"
        use(build)
    seconds = time.perf_counter() - started
    if seconds > SECONDS:
        raise Slow(f"{seconds:.1f} s")
    return outcome


def use(build: Build) -> None:
    """Everything the commands do with a build."""
    facts = summarize(build)
    json.dumps(facts, allow_nan=False)
    log_text.render(facts, 80)
    log_text.render(facts, 80, everything=True)
    for row in facts["passes"]:
        if row["pass"]:
            assert lines_of_pass(build, row["pass"])
    assert build.complete <= bool(build.layers)
    known = build.parse.names
    for layer in build.layers:
        parts(layer.name, known)
    report = analyze(build)
    assert len(report.rows) == len(build.layers)
    json.dumps(report.as_json(), allow_nan=False)
    build_text.render(report, "ms", 80, everything=True)
    drawing.dot(drawing.drawing_of(report))
    if len(report.rows) < 300:
        build_text.engines(Page(), compare(report, report))
    with contextlib.suppress(QdqtoolError):
        graph_from_log(build)
