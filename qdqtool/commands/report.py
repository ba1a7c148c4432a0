"""``qdqtool report``: an HTML page on a model."""

import shlex
from time import perf_counter
from typing import Any

import click

from qdqtool.commands import options
from qdqtool.commands.usage import UsageError
from qdqtool.ir.file_types import is_model_name, model_stem
from qdqtool.util.files import reserve_output


@click.command("report", cls=options.HelpCommand)
@click.argument("model", type=click.Path())
@click.argument("files", nargs=-1, metavar="[OTHER.onnx] [BUILD...]", type=click.Path())
@click.option(
    "--float",
    "before",
    type=click.Path(),
    metavar="MODEL",
    help="The model without Q/DQ, to show before and after.",
)
@click.option(
    "--calib-cache",
    type=click.Path(),
    metavar="FILE",
    help="Cache of insert --calib-cache, to show histograms.",
)
@click.option(
    "--tuning",
    type=click.Path(),
    metavar="FILE",
    help="JSON of qdqtool tune, to show its Pareto front.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    metavar="HTML",
    help="The page. [default: MODEL_report.html in the current folder]",
)
@options.build_target_option
@options.gpu_option()
@options.clock_option
@options.power_option
@options.size_option
@options.assume_option
@options.output_format_option
def command(
    model: str,
    files: tuple[str, ...],
    before: str | None,
    output: str | None,
    answer: options.AnswerWriter,
    **settings: Any,
) -> int:
    """Write one HTML page about MODEL: the verdict, graphs, tables and plots.

    A second model (--float or OTHER.onnx) is shown next to MODEL, as the state before. With a BUILD
    of MODEL (log, layer JSON or profile), the page compares the prediction with the build and shows
    measured times. The page is a single file and loads nothing from the internet.

    Exit codes: 0 done, 2 bad input.
    """
    started = perf_counter()
    from qdqtool.formats.output import Style, TextPage
    from qdqtool.reporting.api import report
    from qdqtool.reporting.page import require_packages
    from qdqtool.util.limits import format_bytes

    require_packages()
    others = [f for f in files if is_model_name(f)]
    builds = [f for f in files if f not in others]
    if len(others) + (before is not None) > 1:
        raise UsageError(
            "too many models: give MODEL and at most one model to compare with (--float or "
            "OTHER.onnx)",
            code="option-conflict",
            parameter="before",
        )
    path = output or f"{model_stem(model) or 'model'}_report.html"
    reserve_output(path, "-o")
    result = report(model, *builds, before=before or (others[0] if others else None), **settings)
    result.save(path)
    fields = result.as_json()
    model_page = result.page.model
    size = f"{format_bytes(fields['bytes'])}, {perf_counter() - started:.1f} s"

    def render_text(width: int) -> TextPage:
        page = TextPage(width)
        page.fill(model_page.headline, style=Style[model_page.tone.upper()])
        if not model_page.rejected and model_page.headline != f"{model_page.verdict}.":
            page.fill(model_page.verdict)
        page.add_gap()
        page.fill(f"Wrote {path} ({size}): open it in a browser", style=Style.BOLD)
        # verify knows the engine's size and fusions from the build.
        names = ("gpu", "clock") if builds else ("assume", *options.time_parameters())
        words = ["qdqtool", "verify" if builds else "predict", model, *builds]
        repeated = options.repeat_options("target", *names)
        page.add_command("Next:", f"{shlex.join(words)}{repeated}")
        return page

    answer.write(lambda: fields, render_text)
    return 0
