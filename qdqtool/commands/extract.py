"""``qdqtool extract``: the smallest model that still shows it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qdqtool.base.process import INTERRUPTED
from qdqtool.base.text import as_text
from qdqtool.commands import inputs
from qdqtool.commands.usage import UsageError
from qdqtool.errors import QdqtoolError
from qdqtool.options import On, Selection, Shrinking

if TYPE_CHECKING:
    from qdqtool.extraction.result import Extraction


@click.command("extract", cls=inputs.Command)
@click.argument("model", type=click.Path())
@inputs.made_of("place", inputs.Place, output="Where to write the small model.")
@inputs.made_of("selection", Selection)
@inputs.made_of("on", On)
@inputs.made_of("shrinking", Shrinking)
@inputs.made_of("files", inputs.Files, "issue")
@inputs.made_of("further", inputs.Further, "verification")
@inputs.made_of("answer", inputs.Answer)
def command(
    model: str,
    place: inputs.Place,
    selection: Selection,
    on: On,
    shrinking: Shrinking,
    files: inputs.Files,
    further: inputs.Further,
    answer: inputs.Answer,
) -> int:
    """Cut out of a Q/DQ MODEL what a finding, a node or a failing build depends on, and write it as a model.

    The part shows the finding with the same message and fix, and the convolutions that it names as in the whole. With
    --check, COMMAND is split as a shell would and run without one; {} stands for the model, which else comes last.
    Ctrl-C while minimizing ends that: the smallest model found by then is written.

    Exit codes: 0 done, 2 bad input, 130 interrupted.
    """
    from qdqtool.base.files import reserve_output
    from qdqtool.base.outputs import write_text
    from qdqtool.extraction.job import extract
    from qdqtool.extraction.result import read_verification
    from qdqtool.model.modelfile import load, save
    from qdqtool.render.output import worded

    output, report = place.output, files.issue
    if further.verification is not None and report is None:
        raise UsageError(
            "--verification is for --report; give that as well",
            code="option-without-effect",
            parameter="verification",
        )
    index = load(model)
    reserve_output(output, "-o")
    reserve_output(report, "--report")
    seen = read_verification(further.verification) if further.verification is not None else None
    if shrinking.builder == "tensorrt-rtx":
        from qdqtool.builders.child import print_once

        print_once()
    result = extract(
        index,
        target=on.target,
        **vars(selection),
        **vars(shrinking),
        keep_interrupted=True,
    )
    text = _report(result, model, output, seen) if report is not None else None
    save(result.proto, output, source=model)
    if report is not None and text is not None:
        write_text(report, text)
    answer.give(
        lambda: {**worded(result.as_json()), "output": output, "report": report},
        lambda width: _text(result, output, report, width),
    )
    return INTERRUPTED if result.interrupted else 0


def _report(result: Extraction, model: str, output: str, seen: dict[str, Any] | None) -> str:
    """The report, without anything that --private hides.

    Raises:
        QdqtoolError: Something of it would be left.
    """
    from qdqtool.extraction.result import report

    hidden = result.private
    if hidden is None:
        return report(result, _command_line(lambda text: text), Path(output).name, seen)
    text = report(result, _command_line(hidden.name), "extract.onnx", seen)
    leak = hidden.leaked_prose(text)
    if leak is not None:
        raise QdqtoolError(
            f"'{leak}' would be left in the private report; leave out --report and write it by hand",
            code="private-name-left",
            parameter="report",
        )
    return text


def _command_line(name: Callable[[str], str]) -> str:
    """The command as it was called; paths and commands of the user's without their folders."""
    context = click.get_current_context()
    values = context.params
    words = ["qdqtool", "extract", "model.onnx"]
    for option in (
        "finding",
        "node",
        "hops",
        "inputs",
        "outputs",
        "target",
        "builder",
        "check_timeout",
        "limit",
    ):
        value = values[option]
        for item in value if isinstance(value, tuple) else [value] if value is not None else []:
            text = name(item) if option in ("node", "inputs", "outputs") else str(item)
            words += [f"--{option.replace('_', '-')}", text]
    words += [f"--{flag}" for flag in ("minimize", "private") if values[flag]]
    if values["check"]:
        words += ["--check", values["check"] if not values["private"] else "..."]
    if values["says"]:
        words += ["--says", values["says"] if not values["private"] else "..."]
    return shlex.join([*words, "-o", "extract.onnx"])


def _text(result: Extraction, output: str, report: str | None, width: int) -> str:
    from qdqtool.model.modelfile import MAX_PROTO_BYTES, byte_size
    from qdqtool.render.output import wrap

    lines = wrap(f"{result.kept}.", 2, width, "")
    lines += [line for note in result.notes for line in wrap(note, 4, width, "  - ")]
    size = byte_size(result.proto)
    written = f"{size / 1024:.0f} kB" if size < 2**20 else f"{size / 2**20:.1f} MB"
    if size > MAX_PROTO_BYTES:
        written = "over 2 GB"
    lines.append(f"written to {output} ({written})" + (f", report to {report}" if report else ""))
    return as_text(lines)
