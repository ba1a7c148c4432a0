"""``qdqtool extract``: a small model that shows the same finding as a large model."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qdqtool.commands import completion, options
from qdqtool.commands.usage import UsageError
from qdqtool.errors import QdqtoolError
from qdqtool.util.process import INTERRUPTED

if TYPE_CHECKING:
    from qdqtool.extraction.result import Extraction
    from qdqtool.formats.output import TextPage


@click.command("extract", cls=options.HelpCommand)
@click.argument("model", type=click.Path())
@options.model_output_option("Where to write the small model.", required=True)
@click.option(
    "--finding",
    shell_complete=completion.complete_codes,
    multiple=True,
    metavar="CODE[:n]",
    help="Keep the nodes on which this finding depends (CODE:n: the n-th of this code in the JSON "
    "of predict). May be repeated.",
)
@click.option(
    "--node",
    metavar="NAME",
    help="Keep the nodes on which the prediction of this node depends. With --finding: consider "
    "only findings at this node.",
)
@click.option(
    "--hops",
    type=click.IntRange(0),
    help="With --node: keep the nodes at most this many steps away instead.",
)
@click.option(
    "--inputs", multiple=True, metavar="TENSOR", help="Begin at this tensor (repeat for more)."
)
@click.option(
    "--outputs", multiple=True, metavar="TENSOR", help="End at this tensor (repeat for more)."
)
@options.target_option
@click.option("--minimize", is_flag=True, help="Shrink further: nodes, channels, pixels, weights.")
@options.builder_option(
    "Build each part on this machine, and keep only parts whose build fails, or differs from the "
    "prediction, as the build of MODEL does."
)
@click.option(
    "--check",
    metavar="COMMAND",
    help="Run this command on each part; its exit code has to be the same as for MODEL.",
)
@click.option(
    "--says",
    metavar="TEXT",
    help="Text that COMMAND prints for MODEL and has to print for the part.",
)
@options.check_timeout_option("Time limit for one run of COMMAND. [default: 600]")
@click.option(
    "--limit",
    type=click.IntRange(1),
    help=(
        "Maximum number of parts to try. [default: 2000, fewer for large models; 400 with "
        "--builder or --check]"
    ),
)
@click.option("--private", is_flag=True, help="Replace names, weights, scales and metadata.")
@click.option(
    "--report",
    "issue",
    type=click.Path(),
    help="Write the text of a bug report, in Markdown.",
)
@click.option(
    "--verification",
    type=click.Path(),
    help="JSON of 'qdqtool verify'. The report then shows the predicted and the built types.",
)
@options.output_format_option
def command(
    model: str,
    output: str,
    target: str | None,
    builder: str | None,
    issue: str | None,
    verification: str | None,
    answer: options.AnswerWriter,
    **settings: Any,
) -> int:
    """Write the part of a Q/DQ MODEL on which a finding, a node or a failing build depends.

    The part has the finding with the same message, and the convolutions of the finding have the
    same types as in MODEL. COMMAND of --check is split into words as in a shell, but runs without a
    shell. {} stands for the path of the part; without {}, the path is the last argument.
    Ctrl-C stops --minimize, and the smallest part so far is written.

    Exit codes: 0 done, 2 bad input, 130 interrupted.
    """
    from qdqtool.extraction.api import extract
    from qdqtool.extraction.result import read_verification
    from qdqtool.formats.output import use_option_names
    from qdqtool.ir.modelfile import load, save
    from qdqtool.util.files import reserve_output, write_text

    if verification is not None and issue is None:
        raise UsageError(
            "--verification has no effect without --report; give --report as well",
            code="option-without-effect",
            parameter="verification",
        )
    loaded_model = load(model)
    reserve_output(output, "-o")
    reserve_output(issue, "--report")
    seen = read_verification(verification) if verification is not None else None
    if builder == "tensorrt-rtx":
        from qdqtool.builders.compiler_process import print_license_notice

        print_license_notice()
    result = extract(
        loaded_model,
        target=options.choose_target(target),
        builder=builder,
        keep_interrupted=True,
        **settings,
    )
    text = _render_report(result, output, seen) if issue is not None else ""
    save(result.proto, output, source=model)
    if issue is not None:
        write_text(issue, text)
    answer.write(
        lambda: {**use_option_names(result.as_json()), "output": output, "report": issue},
        lambda width: _render(result, output, issue, width),
    )
    return INTERRUPTED if result.interrupted else 0


def _render_report(result: Extraction, output: str, seen: dict[str, Any] | None) -> str:
    """Return the text of the bug report, without the names that ``--private`` hides.

    Raises:
        QdqtoolError: The report would contain an original name.
    """
    from qdqtool.extraction.result import format_issue
    from qdqtool.formats.output import as_options
    from qdqtool.util.notes import Note

    # Only in the notes: elsewhere, a node's name in backticks may equal a parameter.
    result = replace(result, notes=[Note(as_options(note)) for note in result.notes])
    hidden = result.private
    if hidden is None:
        return format_issue(result, _format_command(str), Path(output).name, seen)
    text = format_issue(result, _format_command(hidden.rename), "extract.onnx", seen)
    leak = hidden.find_leak_in_prose(text)
    if leak is not None:
        raise QdqtoolError(
            f"the private report would contain '{leak}', a name of the model; leave out --report "
            "and write the report by hand",
            code="private-name-left",
            parameter="report",
        )
    return text


def _format_command(rename: Callable[[str], str]) -> str:
    """Return the command line of this call, with fixed file names in place of the user's.

    Args:
        rename: Function that replaces names of nodes and tensors.
    """
    values = click.get_current_context().params
    arguments = ["qdqtool", "extract", "model.onnx"]
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
        for item in value if isinstance(value, tuple) else (value,):
            if item is not None:
                text = rename(item) if option in ("node", "inputs", "outputs") else str(item)
                arguments += [f"--{option.replace('_', '-')}", text]
    arguments += [f"--{flag}" for flag in ("minimize", "private") if values[flag]]
    for option in ("check", "says"):
        if values[option]:
            arguments += [f"--{option}", "..." if values["private"] else values[option]]
    return shlex.join([*arguments, "-o", "extract.onnx"])


def _render(result: Extraction, output: str, report: str | None, width: int) -> TextPage:
    from qdqtool.formats.output import Style, TextPage
    from qdqtool.proto.external_data import serialize
    from qdqtool.util.limits import format_bytes

    page = TextPage(width)
    data = serialize(result.proto)
    size_text = "over 2 GB" if data is None else format_bytes(len(data))
    page.fill(f"Wrote {output} ({size_text})", style=Style.BOLD)
    page.fill(f"{result.kept}.", 2, "  ")
    for note in result.notes:
        page.fill(f"note: {note}", style=Style.NOTE)
    if report:
        page.fill(f"Wrote the report {report}")
    repeated = options.repeat_options("target")
    page.add_command("Next:", f"qdqtool predict {shlex.quote(output)}{repeated}")
    return page
