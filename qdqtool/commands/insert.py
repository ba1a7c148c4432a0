"""``qdqtool insert``: a calibrated Q/DQ model from a float model and a folder of images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from qdqtool.commands import inputs

if TYPE_CHECKING:
    import onnx


@click.command("insert")
@click.argument("model", type=click.Path())
@click.option("--calib", type=click.Path(), default=None, metavar="IMAGES",
              help="Folder of images, text file of paths, npz or npy.")
@click.option("-o", "--output", type=click.Path(), default=None, help="The Q/DQ model. [default: MODEL_qdq.onnx]")
@click.option("--target", default=None, help=f"{inputs.TARGETS}. [default: trt8.5]")
@inputs.method
@inputs.preprocessing
@click.option("--calib-cache", type=click.Path(), default=None, metavar="FILE",
              help="Keep statistics there; resume and reuse them.")
@click.option("--overwrite-cache", is_flag=True, help="Replace a cache of another model or of other images.")
@click.option("--cluster", default=None, metavar="ADDRESS",
              help="Calibrate on the workers of this Dask scheduler; local:N starts N processes here.")
@click.option("--mixed-cpus", is_flag=True, help="Permit workers whose processors compute other last bits.")
@click.option("--calib-table", type=click.Path(), default=None, metavar="FILE",
              help="Take ranges from a TensorRT calibration table.")
@click.option("--write-table", type=click.Path(), default=None, metavar="FILE",
              help="Write a TensorRT calibration table as well.")
@inputs.placement
@click.option("--high-precision", type=click.Choice(["fp32", "fp16"]), default="fp32", show_default=True,
              help="Type of what stays float.")
@click.option("--input-type", type=click.Choice(["float", "int8", "uint8"]), default="float", show_default=True,
              help="Type of the network's input: int8 takes the first Q's result, uint8 takes pixels.")
@click.option("--losses", type=click.IntRange(0), default=2, show_default=True, metavar="SAMPLES",
              help="Measure on so many samples which activations cost most; 0 does not.")
@click.option("--gpu", metavar="NAME", default=None,
              help="Say whether the result is expected to be faster than FP16 on a GPU (see qdqtool gpus).")
@click.option("--no-predict", is_flag=True, help="Do not predict what TensorRT makes of it.")
@click.option("--all", "everything", is_flag=True, help="Name every node, group and scale.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    model: str, calib: str | None, output: str | None, target: str | None, method: str, method_for: tuple[str, ...],
    percentile: float, max_images: int, resize: str, size: str | None, bgr: bool, scale: float | None,
    mean: str | None, std: str | None, calib_cache: str | None, overwrite_cache: bool, cluster: str | None,
    mixed_cpus: bool, calib_table: str | None, write_table: str | None, head: str, residual: str, no_unify: bool,
    exclude: tuple[str, ...], include: tuple[str, ...], exclude_op: tuple[str, ...], weights: str,
    high_precision: str, input_type: str, losses: int, gpu: str | None, no_predict: bool, everything: bool,
    form: str,
) -> int:
    """Insert calibrated Q/DQ pairs into the float MODEL where TensorRT will use them.

    Needs onnxruntime and images; no GPU and no TensorRT. Exit codes: 0 done, 2 bad input.
    """
    if calib is None and calib_table is None:
        raise click.UsageError("give calibration images with --calib FOLDER (or ranges with --calib-table FILE)")
    if calib is not None and calib_table is not None:
        raise click.UsageError("--calib and --calib-table exclude each other: ranges come from images or from a table")
    if mixed_cpus and cluster is None:
        raise click.UsageError("--mixed-cpus is about the workers of --cluster, which is not given")
    if cluster is not None and calib is None:
        raise click.UsageError("--cluster calibrates on images, and --calib-table needs none")
    path = output or inputs.default_output(model)
    if gpu is not None:
        from qdqtool.timing.gpus import chosen

        chosen(gpu)  # an unknown one is refused before the work
    from qdqtool.files import claim

    for written, option in ((path, "-o"), (write_table, "--write-table"), (calib_cache, "--calib-cache")):
        claim(written, option)
    methods = [inputs.method_of(text) for text in method_for]
    sizes = inputs.size_of(size)
    preprocess = inputs.preprocess_of(resize, bgr, scale, mean, std)
    from qdqtool.insertion.api import insert
    from qdqtool.insertion.calibrate import write_table as save_table
    from qdqtool.render.insertion_text import render
    from qdqtool.render.output import emit, terminal_width, to_json
    from qdqtool.trt.targets import DEFAULT_TARGET

    result = insert(
        model,
        calib,
        method=method,
        method_for=methods,
        percentile=percentile,
        max_images=max_images,
        preprocess=preprocess,
        size=sizes,
        calib_cache=calib_cache,
        overwrite_cache=overwrite_cache,
        calib_table=calib_table,
        target=target or DEFAULT_TARGET,
        head=head,
        residual=residual,
        unify=not no_unify,
        exclude=exclude,
        include=include,
        exclude_op=exclude_op,
        weights=weights,
        high_precision=high_precision,
        input_type=input_type,
        losses=losses,
        predict=not no_predict,
        progress=True,
        cluster=cluster,
        mixed_cpus=mixed_cpus,
    )
    result.save(path)
    if write_table is not None:
        save_table(result, write_table)
    paying, time = _paying(result.model, gpu, result.target, terminal_width()) if gpu is not None else ([], None)
    if form == "json":
        emit(to_json(_worded(result.as_json()) | ({"time": time} if time else {})), None)
        return 0
    text = "\n".join([render(result, terminal_width(), everything=everything), *paying])
    emit(f"{text}\nwrote {path}\nnext: qdqtool predict {path} --target {result.target}", None)
    return 0


def _paying(model: onnx.ModelProto, gpu: str, target: str, width: int) -> tuple[list[str], dict[str, Any]]:
    """Whether the new model is expected to be faster than in float, in lines and as JSON."""
    from qdqtool.render.time_text import paying_lines
    from qdqtool.timing.ask import Request, predict_on

    prediction, time = predict_on(model, target, Request(gpu=gpu))
    assert time is not None
    return ["", *paying_lines(time, prediction, width)], time.as_json()


def _worded(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer with reasons, notes and warnings in the words of the command line."""
    from qdqtool.render.parameters import all_as_options

    return {**answer, **{k: all_as_options(answer[k]) for k in ("skipped", "notes", "warnings")}}
