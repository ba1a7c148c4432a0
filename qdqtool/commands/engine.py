"""``qdqtool engine``: what each layer of a built engine costs, two engines compared, an engine drawn."""

from __future__ import annotations

import click

from qdqtool.commands import inputs
from qdqtool.errors import BuildLogError
from qdqtool.options import Machine


@click.command("engine", cls=inputs.Command)
@click.argument("files", nargs=-1, required=True, type=click.Path())
@inputs.made_of("first", inputs.Further, "profile")
@inputs.made_of(
    "shown", inputs.Shown, "sort", "everything", everything="List every layer, names in full."
)
@inputs.made_of("second", inputs.Further, "other")
@inputs.made_of(
    "machine",
    Machine,
    gpu="Where it ran, if the log does not say: adds what each layer usually takes.",
)
@inputs.made_of("drawn", inputs.Files, "dot", "svg")
@inputs.made_of("answer", inputs.Written)
def command(
    files: tuple[str, ...],
    first: inputs.Further,
    shown: inputs.Shown,
    second: inputs.Further,
    machine: Machine,
    drawn: inputs.Files,
    answer: inputs.Written,
) -> int:
    """Per-layer precision, memory, MACs and time of the engine in FILES: a layer JSON or a build log.

    Exit codes: 0 done, 2 bad input.
    """
    from qdqtool.base.files import reserve_output
    from qdqtool.base.outputs import write_visible
    from qdqtool.buildlog.costs import EngineReport, analyze
    from qdqtool.buildlog.read import read_build
    from qdqtool.timing.expected import add_expected, gpu_of

    dot, svg, sort, other = drawn.dot, drawn.svg, shown.sort, second.other
    for target, option in ((answer.output, "-o"), (dot, "--dot"), (svg, "--svg")):
        reserve_output(target, option)

    def report_of(paths: list[str]) -> EngineReport:
        build = read_build(*paths)
        if build.names_only:
            from qdqtool.buildlog.summary import rerun_commands

            again = next(iter(rerun_commands(build).values()))
            raise BuildLogError(
                f"layer names without precisions; build again with: {again}",
                ", ".join(paths),
                code="names-only",
            )
        if not build.layers:
            raise BuildLogError(
                "no engine listing; give a layer JSON or a verbose build log",
                ", ".join(paths),
                code="no-engine-listing",
            )
        costs = analyze(build)
        chosen = gpu_of(build, machine.gpu, machine.clock)
        if chosen is not None:
            add_expected(costs, chosen)
        return costs

    report = report_of([*files, *((first.profile,) if first.profile else ())])
    if dot or svg:
        from qdqtool.buildlog import drawing

        picture = drawing.drawing_of(report)
        if dot:
            write_visible(dot, drawing.dot(picture))
        if svg:
            write_visible(svg, drawing.svg(picture))
        if not other and answer.form == "text" and not answer.output:
            click.echo(
                f"{len(report.rows)} layers drawn: {', '.join(name for name in (dot, svg) if name)}"
            )
            return 0
    from qdqtool.render.build_text import render, render_comparison

    if other:
        from qdqtool.verification.comparing.api import compare

        comparison = compare(report, report_of(list(other)))
        assert comparison.engines is not None
        answer.give(
            comparison.engines.as_json,
            lambda width: render_comparison(comparison, width, everything=shown.everything),
        )
        return 0
    key = sort or ("ms" if report.timed else "order")
    answer.give(
        lambda: {
            **report.as_json(),
            "layers": [row.as_json() for row in report.sorted_rows(sort or "order")],
        },
        lambda width: render(report, key, width, everything=shown.everything),
    )
    return 0
