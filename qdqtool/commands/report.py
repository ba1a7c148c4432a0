"""``qdqtool report``: one HTML page about a model."""

from __future__ import annotations

from pathlib import Path

import click

from qdqtool.commands import inputs

_MODELS = (".onnx", ".onnx.gz")


@click.command("report", cls=inputs.Command)
@click.argument("model", type=click.Path())
@click.argument("files", nargs=-1, metavar="[OTHER.onnx] [BUILD...]", type=click.Path())
@click.option("--float", "before", type=click.Path(), metavar="MODEL", help="The model without Q/DQ: before and after.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), default=None, metavar="HTML",
              help="The page.  [default: <MODEL>_report.html, here]")
@click.option("--target", default=None, help="TensorRT to predict for: trt10 (or the build's own), 10.3, trt11 ...")
@click.option("--gpu", metavar="NAME", help="Estimate times on a GPU, such as 'RTX 3060' (see qdqtool gpus).")
@click.option("--clock", type=float, metavar="MHZ", help="SM clock under load, where it is not the boost clock.")
@click.option("--calib-cache", type=click.Path(), metavar="FILE", help="Cache of insert --calib-cache: histograms.")
@click.option("--tuning", type=click.Path(), metavar="FILE", help="JSON of qdqtool tune: its Pareto front.")
@click.option("--assume", "assume", multiple=True, metavar="silu-add=fused|apart",
              help="Settle what TensorRT decides by timing.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True,
              help="Format of the answer on stdout.")
def command(
    model: str, files: tuple[str, ...], before: str | None, output: str | None, target: str | None, gpu: str | None,
    clock: float | None, calib_cache: str | None, tuning: str | None, assume: tuple[str, ...], form: str,
) -> int:
    """Write one HTML page about MODEL that opens anywhere: the verdict, the network as a graph, tables and plots.

    A second model (--float, or OTHER.onnx) is shown before it, side by side. BUILD is a log, a layer JSON or a profile
    of MODEL: the page then compares the prediction with it and shows measured times. The page is a single file without
    any link to the network.

    Exit codes: 0 done, 2 bad input.
    """
    from qdqtool.commands.predict import assumptions_of
    from qdqtool.io.files import claim
    from qdqtool.render.output import emit, to_json
    from qdqtool.reporting.api import report
    from qdqtool.reporting.page import require

    require()
    others = [f for f in files if f.lower().endswith(_MODELS)]
    builds = [f for f in files if f not in others]
    if len(others) + (before is not None) > 1:
        raise click.UsageError("two models at most: MODEL, and one before it (--float or OTHER.onnx)")
    place = output or _default(model)
    claim(place, "-o")
    made = report(
        model, *builds, before=before or (others[0] if others else None), target=target, gpu=gpu, clock=clock,
        calib_cache=calib_cache, tuning=tuning, assume=assumptions_of(assume),
    )
    made.save(place)
    if form == "json":
        emit(to_json(made.as_json()), None)
    else:
        size = made.as_json()["bytes"]
        emit(f"{made.page.model.verdict}\nwrote {place} ({size / 1e6:.1f} MB): open it in a browser", None)
    return 0


def _default(model: str) -> str:
    """In the current folder, named after the model."""
    name = Path(model).name
    for ending in _MODELS[::-1]:
        if name.lower().endswith(ending):
            name = name[: -len(ending)]
            break
    return f"{name or 'model'}_report.html"
