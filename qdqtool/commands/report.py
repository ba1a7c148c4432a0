"""``qdqtool report``: one HTML page about a model."""

from __future__ import annotations

import click

from qdqtool.base.file_types import is_model_name, model_stem
from qdqtool.base.files import reserve_output
from qdqtool.base.records import replaced
from qdqtool.commands import inputs
from qdqtool.commands.usage import UsageError
from qdqtool.options import Assumed, Beside, Machine, OnBuilds


@click.command("report", cls=inputs.Command)
@click.argument("model", type=click.Path())
@click.argument("files", nargs=-1, metavar="[OTHER.onnx] [BUILD...]", type=click.Path())
@inputs.made_of("beside", Beside)
@inputs.made_of("page", inputs.Page)
@inputs.made_of("on", OnBuilds)
@inputs.made_of("machine", Machine)
@inputs.made_of("assumed", Assumed)
@inputs.made_of("answer", inputs.Answer)
def command(
    model: str,
    files: tuple[str, ...],
    beside: Beside,
    page: inputs.Page,
    on: OnBuilds,
    machine: Machine,
    assumed: Assumed,
    answer: inputs.Answer,
) -> int:
    """Write one HTML page about MODEL that opens anywhere: the verdict, the network as a graph, tables and plots.

    A second model (--float, or OTHER.onnx) is shown before it, side by side. BUILD is a log, a layer JSON or a profile
    of MODEL: the page then compares the prediction with it and shows measured times. The page is a single file without
    any link to the network.

    Exit codes: 0 done, 2 bad input.
    """
    from qdqtool.render.reporting.api import report
    from qdqtool.render.reporting.page import require

    require()
    others = [f for f in files if is_model_name(f)]
    builds = [f for f in files if f not in others]
    if len(others) + (beside.before is not None) > 1:
        raise UsageError(
            "two models at most: MODEL, and one before it (--float or OTHER.onnx)",
            code="option-conflict",
            parameter="before",
        )
    place = page.output or f"{model_stem(model) or 'model'}_report.html"  # in the current folder
    reserve_output(place, "-o")
    beside = replaced(beside, before=beside.before or (others[0] if others else None))
    made = report(model, *builds, **vars(beside), **vars(on), **vars(machine), **vars(assumed))
    made.save(place)
    told = made.as_json()
    answer.give(
        lambda: told,
        lambda _: (
            f"{made.page.model.verdict}\nwrote {place} ({told['bytes'] / 1e6:.1f} MB): open it in a browser"
        ),
    )
    return 0
