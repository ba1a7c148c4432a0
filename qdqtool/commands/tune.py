"""``qdqtool tune``: the fastest placement that is accurate enough."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from qdqtool.commands import inputs
from qdqtool.insertion.options import Placing, Ranges, Remainder, Workers


@click.command("tune", cls=inputs.Command)
@click.argument("model", type=click.Path())
@click.option("--calib", type=click.Path(), required=True, metavar="IMAGES",
              help="Folder of images, text file of paths, npz or npy.")
@click.option("--eval", "evaluation", type=click.Path(), default=None, metavar="IMAGES",
              help="Images like those of the deployment: one half to choose on, the other to judge on. "
                   "[default: two quarters of --calib]")
@click.option("--keep", type=float, default=None, metavar="PART",
              help="Part of the float model's metric to keep. [default: 0.97]")
@click.option("--budget-ms", type=float, default=None, metavar="MS",
              help="The other way round: the most accurate placement that takes no longer on --gpu.")
@click.option("--metric", default=None, metavar="PACKAGE.MODULE:FUNCTION",
              help="A function (reference, outputs, image) -> float, higher is better. [default: agreement mAP for "
                   "YOLOv8-style outputs, else a relative output error]")
@click.option("--gpu", default=None, metavar="NAME", help="Where it will run (see qdqtool gpus); counts milliseconds.")
@click.option("--clock", type=float, default=None, metavar="MHZ", help="SM clock under load.")
@click.option("--power", default=None, metavar="W|MAXN", help="Power mode of a Jetson.")
@click.option("-o", "--output", type=click.Path(), default=None, help="The Q/DQ model. [default: MODEL_qdq.onnx]")
@click.option("--result", "result_file", type=click.Path(), default=None, metavar="FILE",
              help="Write the JSON as well, for qdqtool report.")
@click.option("--state", type=click.Path(), default=None, metavar="FILE",
              help="Keep what is measured there and go on from it. [default: OUTPUT.tuning]")
@click.option("--no-state", is_flag=True, help="Keep nothing.")
@click.option("--time-limit", default=None, metavar="TIME",
              help="Take the best that was found after so long: 600, 10m, 1.5h.")
@click.option("--check-timeout", type=float, default=None, metavar="SECONDS",
              help="What one call of --metric may take. [default: 600]")
@click.option("--front", "whole_front", is_flag=True,
              help="Measure the whole front even where everything INT8 is accurate enough.")
@click.option("--chosen-on", type=click.IntRange(1), default=32, show_default=True, metavar="N",
              help="At most so many images to choose on.")
@click.option("--judged-on", type=click.IntRange(1), default=64, show_default=True, metavar="N",
              help="At most so many images to judge on.")
@click.option("--swept-on", type=click.IntRange(1), default=None, metavar="N",
              help="At most so many of those to choose on for the sensitivity of single sites. [default: all]")
@click.option("--workers", type=click.IntRange(1, 64), default=None, help="Threads; the result is the same.")
@click.option("--cluster", default=None, metavar="ADDRESS",
              help="Calibrate and measure on the workers of this Dask scheduler; local:N starts N processes here.")
@inputs.made_of(Workers)
@click.option("--target", default=None, help=f"{inputs.TARGETS}. [default: trt10]")
@inputs.made_of(Ranges)
@inputs.preprocessing
@inputs.made_of(Placing)
@inputs.made_of(Remainder)
@click.option("--all", "everything", is_flag=True, help="Show every site, also those that were never measured.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    model: str, calib: str, evaluation: str | None, keep: float | None, budget_ms: float | None, metric: str | None,
    gpu: str | None, clock: float | None, power: str | None, output: str | None, result_file: str | None,
    state: str | None, no_state: bool, time_limit: str | None,
    check_timeout: float | None, whole_front: bool, chosen_on: int, judged_on: int,
    swept_on: int | None, workers: int | None, target: str | None, everything: bool, form: str, **given: Any,
) -> int:
    """Find the placement of Q/DQ in the float MODEL with the least time that keeps its accuracy.

    Accuracy is measured with onnxruntime, types, conversions and times are predicted: no GPU and no TensorRT is
    needed. What the result is worth is measured on held-out images.

    Exit codes: 0 done, 1 the goal cannot be reached (the best that was found is written), 2 bad input.
    """
    if state is not None and no_state:
        raise click.UsageError("--state and --no-state exclude each other")
    if given["mixed_cpus"] and given["cluster"] is None:
        raise click.UsageError("--mixed-cpus is about the workers of --cluster, which is not given")
    if gpu is None and (clock is not None or power is not None or budget_ms is not None):
        raise click.UsageError("--budget-ms, --clock and --power need --gpu")
    path = output or inputs.default_output(model)
    from qdqtool.io.files import claim, is_device

    kept = None if no_state else state or (None if is_device(Path(path)) else f"{path}.tuning")

    for written, option in ((path, "-o"), (result_file, "--result"), (kept, "--state")):
        claim(written, option)
    seconds, options = _seconds(time_limit), inputs.images_of(given)
    for group in (Ranges, Placing, Remainder, Workers):
        options.update(inputs.given_to(group, given))
    from qdqtool.base.text import as_line
    from qdqtool.render.insertion_text import render_tuning
    from qdqtool.render.output import all_as_options, emit, terminal_width, to_json
    from qdqtool.trt.targets import DEFAULT_TARGET
    from qdqtool.tuning.api import tune

    with contextlib.redirect_stdout(sys.stderr):  # a metric of the user's may print, and stdout is the answer's
        result = tune(
            model, calib, evaluation=evaluation, keep=keep, budget_ms=budget_ms, metric=metric, gpu=gpu, clock=clock,
            power=power, target=target or DEFAULT_TARGET, chosen_on=chosen_on, judged_on=judged_on, swept_on=swept_on,
            whole_front=whole_front, time_limit=seconds, check_timeout=check_timeout, state=kept,
            workers=workers, progress=True, **options,
            say=lambda line: print(f"qdqtool: {as_line(line)}", file=sys.stderr),
        )  # fmt: skip
    result.save(path)
    if result_file is not None:
        result.save_result(result_file)
    if form == "json":
        answer = result.as_json()
        emit(to_json({**answer, **{k: all_as_options(answer[k]) for k in ("notes", "warnings")}}), None)
    else:
        notes = [f"wrote {path}"]
        if kept is not None:
            notes.append(f"kept {kept}: what was measured, for another --keep; remove it when you are done")
        emit(render_tuning(result, terminal_width(), everything=everything) + "\n" + "\n".join(notes), None)
    return 0 if result.reached else 1


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:].lower())
    try:
        value = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e9:
        raise click.BadParameter(f"'{text}' is no time above 0, such as 600, 10m or 1.5h", param_hint="--time-limit")
    return value
