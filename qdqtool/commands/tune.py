"""``qdqtool tune``: the fastest placement that is accurate enough."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from qdqtool.base.options import Images, Ranges, Workers
from qdqtool.base.records import replaced
from qdqtool.commands import inputs
from qdqtool.commands.usage import UsageError
from qdqtool.options import Aim, Effort, On, Placing, Powered, Remainder


@click.command("tune", cls=inputs.Command)
@click.argument("model", type=click.Path())
@inputs.made_of("data", inputs.Needed)
@inputs.made_of("aim", Aim)
@inputs.made_of(
    "machine", Powered, gpu="Where it will run (see qdqtool gpus); counts milliseconds."
)
@inputs.made_of("made", inputs.Made)
@inputs.made_of("files", inputs.Files, "result")
@inputs.made_of("effort", Effort)
@inputs.made_of("state", inputs.Files, "no_state")
@inputs.made_of("where", Workers)
@inputs.made_of("on", On)
@inputs.made_of("ranges", Ranges)
@inputs.images
@inputs.made_of("placing", Placing)
@inputs.made_of("remainder", Remainder)
@inputs.made_of(
    "shown",
    inputs.Shown,
    "everything",
    everything="Show every site, also those that were never measured.",
)
@inputs.made_of("answer", inputs.Answer)
def command(
    model: str,
    data: inputs.Needed,
    aim: Aim,
    machine: Powered,
    made: inputs.Made,
    files: inputs.Files,
    effort: Effort,
    state: inputs.Files,
    where: Workers,
    on: On,
    ranges: Ranges,
    images: Images,
    placing: Placing,
    remainder: Remainder,
    shown: inputs.Shown,
    answer: inputs.Answer,
) -> int:
    """Find the placement of Q/DQ in the float MODEL with the least time that keeps its accuracy.

    Accuracy is measured with onnxruntime, types, conversions and times are predicted: no GPU and no TensorRT is
    needed. What the result is worth is measured on held-out images.

    Exit codes: 0 done, 1 the goal cannot be reached (the best that was found is written), 2 bad input.
    """
    if effort.state is not None and state.no_state:
        raise UsageError(
            "--state and --no-state exclude each other", code="option-conflict", parameter="state"
        )
    inputs.check_workers(where)
    if machine.gpu is None and (
        machine.clock is not None or machine.power is not None or aim.budget_ms is not None
    ):
        raise UsageError(
            "--budget-ms, --clock and --power need --gpu",
            code="option-without-effect",
            parameter="gpu",
        )
    path = made.beside(model)
    from qdqtool.base.files import is_stream, reserve_output

    kept = (
        None
        if state.no_state
        else effort.state or (None if is_stream(Path(path)) else f"{path}.tuning")
    )

    for written, option in ((path, "-o"), (files.result, "--result"), (kept, "--state")):
        reserve_output(written, option)
    from qdqtool.base.text import as_line
    from qdqtool.render.insertion_text import render_tuning
    from qdqtool.render.output import as_options, worded
    from qdqtool.tuning.api import tune

    with contextlib.redirect_stdout(
        sys.stderr
    ):  # a metric of the user's may print, and stdout is the answer's
        result = tune(
            model,
            data.calib,
            **vars(aim),
            **vars(machine),
            **vars(on),
            **vars(ranges),
            **vars(images),
            **vars(placing),
            **vars(remainder),
            **vars(where),
            **vars(replaced(effort, state=kept)),
            progress=True,
            say=lambda line: print(f"qdqtool: {as_line(as_options(line))}", file=sys.stderr),
        )
    result.save(path)
    if files.result is not None:
        result.save_result(files.result)
    notes = [f"wrote {path}"]
    if kept is not None:
        notes.append(
            f"kept {kept}: what was measured, for another --keep; remove it when you are done"
        )
    answer.give(
        lambda: worded(result.as_json()),
        lambda width: "\n".join(
            [render_tuning(result, width, everything=shown.everything), *notes]
        ),
    )
    return 0 if result.reached else 1
