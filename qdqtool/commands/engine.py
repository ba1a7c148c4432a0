"""``qdqtool engine``: layer costs of a built engine; comparison and drawing of engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from qdqtool.commands import options
from qdqtool.errors import BuildLogError
from qdqtool.util.text import format_count

if TYPE_CHECKING:
    from qdqtool.buildlog.costs import EngineReport


@click.command("engine", cls=options.HelpCommand)
@click.argument("files", nargs=-1, required=True, type=click.Path())
@click.option(
    "--profile", type=click.Path(), help="Profile JSON (--exportProfile) of the same engine."
)
@click.option(
    "--sort",
    type=click.Choice(("order", "ms", "macs", "bytes", "intensity", "name", "type")),
    help="Order of the layers. [default: ms if timed, else order]",
)
@options.all_option("List every layer, names in full.")
@click.option(
    "--compare",
    "other",
    multiple=True,
    type=click.Path(),
    metavar="FILE",
    help=(
        "File of a second engine to compare with, as in 'qdqtool compare'. Repeat the option for "
        "the profile of this engine."
    ),
)
@options.gpu_option(
    "GPU of the build, if the log does not name the GPU. Adds the expected time of each layer."
)
@options.clock_option
@click.option("--dot", type=click.Path(), help="Write the engine as a Graphviz file.")
@click.option("--svg", type=click.Path(), help="Write the engine as an SVG (needs qdqtool[draw]).")
@options.output_options
def command(
    files: tuple[str, ...],
    profile: str | None,
    sort: str | None,
    everything: bool,
    other: tuple[str, ...],
    gpu: str | None,
    clock: float | None,
    dot: str | None,
    svg: str | None,
    answer: options.AnswerWriter,
) -> int:
    """Show precision, memory, MACs and time of each layer of a built engine.

    FILES are a layer JSON or a build log of the engine.

    Exit codes: 0 done, 2 bad input.
    """
    from qdqtool.util.files import reserve_output

    for path, option in ((dot, "--dot"), (svg, "--svg")):
        reserve_output(path, option)
    report = _analyze_engine([*files, *((profile,) if profile else ())], gpu, clock)
    if dot or svg:
        _draw_engine(report, dot, svg)
        if not other and answer.form == "text" and not answer.output:
            names = ", ".join(filter(None, (dot, svg)))
            click.echo(f"{format_count(len(report.rows), 'layer')} drawn: {names}")
            return 0
    if other:
        _compare_engines(report, _analyze_engine(list(other), gpu, clock), everything, answer)
    else:
        _describe_engine(report, sort, everything, answer)
    return 0


def _compare_engines(
    report: EngineReport, other: EngineReport, everything: bool, answer: options.AnswerWriter
) -> None:
    from qdqtool.comparison.api import compare
    from qdqtool.formats.build_text import render_comparison

    comparison = compare(report, other)
    assert comparison.engines is not None
    answer.write(
        comparison.engines.as_json,
        lambda width: render_comparison(comparison, width, everything=everything),
    )


def _describe_engine(
    report: EngineReport, sort: str | None, everything: bool, answer: options.AnswerWriter
) -> None:
    from qdqtool.formats.build_text import render

    key = sort or ("ms" if report.has_times else "order")
    answer.write(
        lambda: {
            **report.as_json(),
            "layers": [row.as_json() for row in report.sorted_rows(sort or "order")],
        },
        lambda width: render(report, key, width, everything=everything),
    )


def _analyze_engine(paths: list[str], gpu: str | None, clock: float | None) -> EngineReport:
    from qdqtool.buildlog.costs import analyze
    from qdqtool.buildlog.read import read_build
    from qdqtool.buildlog.summary import rerun_commands
    from qdqtool.timing.built_engine import add_expected_times, find_build_gpu

    build = read_build(*paths)
    if build.names_only:
        again = next(iter(rerun_commands(build).values()))
        raise BuildLogError(
            f"has layer names without precisions; build again with: {again}",
            ", ".join(paths),
            code="names-only",
        )
    if not build.layers:
        raise BuildLogError(
            "has no layers of an engine; give a layer JSON or a verbose build log",
            ", ".join(paths),
            code="no-engine-listing",
        )
    report = analyze(build)
    build_gpu = find_build_gpu(build, gpu, clock)
    if build_gpu is not None:
        add_expected_times(report, build_gpu)
    return report


def _draw_engine(report: EngineReport, dot: str | None, svg: str | None) -> None:
    from qdqtool.buildlog import drawing
    from qdqtool.util.files import write_text
    from qdqtool.util.text import escape_hidden

    graph = drawing.draw_engine(report)
    if dot:
        write_text(dot, escape_hidden(drawing.format_dot(graph)))
    if svg:
        write_text(svg, escape_hidden(drawing.format_svg(graph)))
