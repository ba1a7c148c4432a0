"""``qdqtool insert``: a calibrated Q/DQ model from a float model and a folder of images."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from qdqtool.base.options import Images, Kept, Ranges, Workers
from qdqtool.commands import inputs
from qdqtool.commands.usage import UsageError
from qdqtool.options import Checking, Gpu, Measuring, Output, Placing, Request

if TYPE_CHECKING:
    import onnx

    from qdqtool.trt.targets import Target


@click.command("insert", cls=inputs.Command)
@click.argument("model", type=click.Path())
@inputs.made_of("given", inputs.Data)
@inputs.made_of("to", inputs.Made)
@inputs.made_of("on", inputs.Typed)
@inputs.made_of("ranges", Ranges)
@inputs.images
@inputs.made_of("kept", Kept)
@inputs.made_of("where", Workers)
@inputs.made_of("measuring", Measuring)
@inputs.made_of("files", inputs.Files, "write_table")
@inputs.made_of("placing", Placing)
@inputs.made_of("made", Output)
@inputs.made_of(
    "machine",
    Gpu,
    gpu="Say whether the result is expected to be faster than FP16 on a GPU (see qdqtool gpus).",
)
@inputs.made_of("checking", Checking)
@inputs.made_of("shown", inputs.Shown, "everything", everything="List every node, group and scale.")
@inputs.made_of("answer", inputs.Answer)
def command(
    model: str,
    given: inputs.Data,
    to: inputs.Made,
    on: inputs.Typed,
    ranges: Ranges,
    images: Images,
    kept: Kept,
    where: Workers,
    measuring: Measuring,
    files: inputs.Files,
    placing: Placing,
    made: Output,
    machine: Gpu,
    checking: Checking,
    shown: inputs.Shown,
    answer: inputs.Answer,
) -> int:
    """Insert calibrated Q/DQ pairs into the float MODEL where TensorRT will use them.

    Needs onnxruntime and images; no GPU and no TensorRT. Exit codes: 0 done, 2 bad input.
    """
    calib, write_table = given.calib, files.write_table
    if calib is None and measuring.calib_table is None:
        raise UsageError(
            "give calibration images with --calib FOLDER (or ranges with --calib-table FILE)",
            code="missing-argument",
            parameter="calib",
        )
    if calib is not None and measuring.calib_table is not None:
        raise UsageError(
            "--calib and --calib-table exclude each other: ranges come from images or from a table",
            code="option-conflict",
            parameter="calib_table",
        )
    inputs.check_workers(where)
    if where.cluster is not None and calib is None:
        raise UsageError(
            "--cluster calibrates on images, and --calib-table needs none",
            code="option-without-effect",
            parameter="cluster",
        )
    path, wanted = to.beside(model), on.chosen()
    if machine.gpu is not None:
        from qdqtool.timing import gpus

        named = gpus.chosen(machine.gpu)
        wanted = wanted.with_capability(
            named.cc, named.name
        )  # before the work: an unknown GPU is refused, and one of others
    from qdqtool.base.files import reserve_output

    for written, option in (
        (path, "-o"),
        (write_table, "--write-table"),
        (kept.calib_cache, "--calib-cache"),
    ):
        reserve_output(written, option)
    from qdqtool.insertion.api import insert
    from qdqtool.insertion.inputs import write_table as save_table
    from qdqtool.render.insertion_text import render
    from qdqtool.render.output import terminal_width, worded

    result = insert(
        model,
        calib,
        ranges=ranges,
        images=images,
        kept=kept,
        placing=placing,
        made=made,
        where=where,
        measuring=measuring,
        target=wanted,
        checking=checking,
        progress=True,
    )
    result.save(path)
    if write_table is not None:
        save_table(result, write_table)
    paying, time = (
        _paying(result.model, machine, wanted, terminal_width()) if machine.gpu else ([], None)
    )
    answer.give(
        lambda: worded(result.as_json()) | ({"time": time} if time else {}),
        lambda width: "\n".join(
            [
                render(result, width, everything=shown.everything),
                *paying,
                f"wrote {path}",
                *_next(wanted, path, machine, width),
            ]
        ),
    )
    return 0


def _next(target: Target, path: str, machine: Gpu, width: int) -> list[str]:
    from qdqtool.render.predict_text import to_build

    gpu = "" if machine.gpu is None else f" --gpu {shlex.quote(machine.gpu)}"
    again = f"next: qdqtool predict {shlex.quote(path)} --target {target.display_name}{gpu}"
    return [again] if target.is_rtx else [again, to_build(target, path, width)]


def _paying(
    model: onnx.ModelProto, machine: Gpu, target: Target, width: int
) -> tuple[list[str], dict[str, Any]]:
    """Whether the new model is expected to be faster than in float, in lines and as JSON."""
    from qdqtool.render.predict_text import whether_it_pays
    from qdqtool.timing.estimate import predict_on

    prediction, time = predict_on(model, target, Request(gpu=machine.gpu))
    assert time is not None
    return ["", *whether_it_pays(time, prediction, width)], time.as_json()
