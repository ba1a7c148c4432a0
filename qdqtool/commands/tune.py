"""``qdqtool tune``: the fastest placement that is accurate enough."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from qdqtool.base.options import Images
from qdqtool.base.records import replaced
from qdqtool.commands import inputs
from qdqtool.options import Aim, Effort, On, Placing, Powered, Ranges, Remainder, Workers


@click.command("tune", cls=inputs.Command)
@click.argument("model", type=click.Path())
@inputs.calib(needed=True)
@inputs.made_of("aim", Aim)
@inputs.made_of("machine", Powered, gpu="Where it will run (see qdqtool gpus); counts milliseconds.")
@click.option("-o", "--output", type=click.Path(), default=None, help="The Q/DQ model. [default: MODEL_qdq.onnx]")
@click.option("--result", "result_file", type=click.Path(), default=None, metavar="FILE",
              help="Write the JSON as well, for qdqtool report.")
@inputs.made_of("effort", Effort)
@click.option("--no-state", is_flag=True, help="Keep nothing.")
@inputs.made_of("where", Workers)
@inputs.made_of("on", On)
@inputs.made_of("ranges", Ranges)
@inputs.images
@inputs.made_of("placing", Placing)
@inputs.made_of("remainder", Remainder)
@click.option("--all", "everything", is_flag=True, help="Show every site, also those that were never measured.")
@inputs.made_of("answer", inputs.Answer)
def command(
    model: str, calib: str, aim: Aim, machine: Powered, output: str | None, result_file: str | None, effort: Effort,
    no_state: bool, where: Workers, on: On, ranges: Ranges, images: Images, placing: Placing, remainder: Remainder,
    everything: bool, answer: inputs.Answer,
) -> int:
    """Find the placement of Q/DQ in the float MODEL with the least time that keeps its accuracy.

    Accuracy is measured with onnxruntime, types, conversions and times are predicted: no GPU and no TensorRT is
    needed. What the result is worth is measured on held-out images.

    Exit codes: 0 done, 1 the goal cannot be reached (the best that was found is written), 2 bad input.
    """
    if effort.state is not None and no_state:
        raise click.UsageError("--state and --no-state exclude each other")
    inputs.check_workers(where)
    if machine.gpu is None and (machine.clock is not None or machine.power is not None or aim.budget_ms is not None):
        raise click.UsageError("--budget-ms, --clock and --power need --gpu")
    path = output or inputs.default_output(model)
    from qdqtool.base.files import claim, is_stream

    kept = None if no_state else effort.state or (None if is_stream(Path(path)) else f"{path}.tuning")

    for written, option in ((path, "-o"), (result_file, "--result"), (kept, "--state")):
        claim(written, option)
    from qdqtool.base.text import as_line
    from qdqtool.render.insertion_text import render_tuning
    from qdqtool.render.output import as_options, worded
    from qdqtool.tuning.api import tune

    with contextlib.redirect_stdout(sys.stderr):  # a metric of the user's may print, and stdout is the answer's
        result = tune(
            model, calib, aim=aim, machine=machine, on=on, ranges=ranges, images=images, placing=placing,
            remainder=remainder, where=where, effort=replaced(effort, state=kept), progress=True,
            say=lambda line: print(f"qdqtool: {as_line(as_options(line))}", file=sys.stderr),
        )  # fmt: skip
    result.save(path)
    if result_file is not None:
        result.save_result(result_file)
    notes = [f"wrote {path}"]
    if kept is not None:
        notes.append(f"kept {kept}: what was measured, for another --keep; remove it when you are done")
    answer.give(lambda: worded(result.as_json()),
                lambda width: "\n".join([render_tuning(result, width, everything=everything), *notes]))
    return 0 if result.reached else 1

