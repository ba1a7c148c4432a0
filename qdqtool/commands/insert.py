"""``qdqtool insert``: make a calibrated Q/DQ model from a float model and images."""

from __future__ import annotations

import shlex
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from qdqtool.commands import options
from qdqtool.commands.next_commands import suggest_build, suggest_compare
from qdqtool.commands.usage import UsageError

if TYPE_CHECKING:
    import onnx

    from qdqtool.formats.output import TextPage
    from qdqtool.insertion.calibration_cache import CacheReport
    from qdqtool.insertion.result import Insertion
    from qdqtool.timing.options import TimingOptions
    from qdqtool.timing.results import TimeEstimate
    from qdqtool.trt.targets import Target


_CALIBRATION_PARAMETERS = (
    "method",
    "method_for",
    "percentile",
    "max_images",
    "calib_cache",
    "overwrite_cache",
    "losses",
    "cluster",
)


@click.command("insert", cls=options.HelpCommand)
@click.argument("model", type=click.Path())
@options.calib_option()
@options.model_output_option("The Q/DQ model. [default: MODEL_qdq.onnx]")
@options.target_options
@options.precision_option("int8", "fp8", "auto")
@options.range_options
@options.image_options
@options.cache_options
@options.cluster_options
@click.option(
    "--calib-table",
    type=click.Path(),
    metavar="FILE",
    help="Ranges from TensorRT's calibration table, AIMET, PPQ, onnxruntime or Paddle.",
)
@click.option(
    "--losses",
    type=click.IntRange(0),
    metavar="N",
    help="Images on which the accuracy loss of activations is measured. [default: 8; single "
    "activations only if outputs change by 10% or more]",
)
@click.option(
    "--write-table",
    type=click.Path(),
    metavar="FILE",
    help="Also write a calibration table for the float model, and print the build command for DLA.",
)
@options.placement_options
@click.option(
    "--tuned",
    multiple=True,
    metavar="REGEX",
    help="Like --include, for nodes that tune chose by the measured accuracy: predict does not "
    "warn of them.",
)
@options.network_options
@click.option(
    "--input-type",
    type=click.Choice(("float", "int8", "uint8")),
    default="float",
    show_default=True,
    help="Type of the network's input. uint8: pixels; int8: the result of the first Q.",
)
@options.gpu_option("Estimate the times of the result and of FP16 on one GPU (see qdqtool gpus).")
@options.power_option
@click.option(
    "--no-predict",
    "predict",
    is_flag=True,
    callback=options.invert_flag,
    help="Do not predict how TensorRT runs the result.",
)
@options.all_option("List every node, group and scale.")
@options.output_format_option
def command(
    model: str,
    calib: str | None,
    output: str | None,
    target: str | None,
    strongly_typed: bool,
    images: options.ImageArguments,
    calib_cache: str | None,
    calib_table: str | None,
    cluster: str | None,
    mixed_cpus: bool,
    write_table: str | None,
    gpu: str | None,
    power: str | None,
    everything: bool,
    answer: options.AnswerWriter,
    **settings: Any,
) -> int:
    """Insert calibrated Q/DQ pairs into the float MODEL where TensorRT uses them.

    Needs onnxruntime and images, or a table with ranges (--calib-table); no GPU and no TensorRT.
    Exit codes: 0 done, 2 bad input.
    """
    started = perf_counter()
    _check_range_source(calib, calib_table)
    options.check_cluster(cluster, mixed_cpus)
    if calib is None:
        options.refuse_without("images (--calib)", *_CALIBRATION_PARAMETERS)
    path = options.choose_output_path(model, output, "qdq")
    chosen_target = options.choose_target(target, strongly_typed)
    if gpu is not None:  # an unknown GPU is rejected before the long work
        chosen_target = _restrict_to_gpu(chosen_target, gpu, power)
    from qdqtool.util.files import output_verb, reserve_output

    for output_path, option in (
        (path, "-o"),
        (write_table, "--write-table"),
        (calib_cache, "--calib-cache"),
    ):
        reserve_output(output_path, option)
    from qdqtool.formats.insertion_text import add_calibration_cache, render
    from qdqtool.formats.output import Style, use_option_names
    from qdqtool.formats.time_text import add_speed_verdict, describe_fastest
    from qdqtool.insertion.format_choice import FLOAT
    from qdqtool.insertion.rules import restrict_to_fp8
    from qdqtool.quantization.api import insert
    from qdqtool.timing.options import TimingOptions

    result = insert(
        model,
        calib,
        target=chosen_target,
        **images.as_keywords(),
        calib_cache=calib_cache,
        calib_table=calib_table,
        cluster=cluster,
        mixed_cpus=mixed_cpus,
        progress=True,
        gpu=gpu,
        power=power,
        **settings,
    )
    result.save(path)
    cache = _write_table(result, write_table)
    lacks_dla = cache is not None and _warn_without_dla(result, gpu)
    built = restrict_to_fp8(chosen_target) if result.precision == "fp8" else chosen_target
    timing = TimingOptions(gpu=gpu, power=power, size=images.size)
    time, formats = _estimate_times(model, result, timing, chosen_target, built)
    seconds = perf_counter() - started

    def render_text(width: int) -> TextPage:
        times = [] if time is None else [time]
        page = render(result, width, times=times, everything=everything)
        if time is not None and result.precision != FLOAT:
            page.add_heading(f"Estimated on {time.gpu.name}")
            add_speed_verdict(page, [time], result.prediction)
            if formats is not None and (fastest := describe_fastest(formats, time)):
                page.fill(fastest, 4, "  ")
        page.add_gap()
        verb = "Wrote the float model unchanged to" if result.unchanged else output_verb(path)
        page.fill(f"{verb} {path} ({seconds:.1f} s)", style=Style.BOLD)
        if cache is not None:
            add_calibration_cache(page, cache, build=not lacks_dla)
        if result.precision == FLOAT:
            page.add_page(_suggest_tune(model, calib, width))
            return page
        _suggest_predict(page, path)
        if calib is not None:
            suggest_compare(page, model, path, settings["input_type"])
        suggest_build(page, path, built, result.model, gpu)
        return page

    answer.write(
        lambda: (
            use_option_names(result.as_json())
            | ({"time": time.as_json()} if time else {})
            | ({"formats_time": formats.as_json()} if formats else {})
            | ({"table": cache.as_json()} if cache else {})
        ),
        render_text,
    )
    return 0


def _restrict_to_gpu(target: Target, name: str, power: str | None) -> Target:
    from qdqtool.timing.gpus import choose_gpu
    from qdqtool.trt.gpu_support import require_gpu_support

    gpu = choose_gpu(name, power=power)
    target = target.with_capability(gpu.cc, gpu.name)
    require_gpu_support(target, gpu.cc, gpu.name)
    return target


def _check_range_source(calib: str | None, calib_table: str | None) -> None:
    if calib is None and calib_table is None:
        raise UsageError(
            "give calibration images with --calib FOLDER (or ranges with --calib-table FILE)",
            code="missing-argument",
            parameter="calib",
        )
    if calib is not None and calib_table is not None:
        raise UsageError(
            "--calib and --calib-table exclude each other, because ranges come from images or from "
            "a table; give one of them",
            code="option-conflict",
            parameter="calib_table",
        )


def _write_table(result: Insertion, path: str | None) -> CacheReport | None:
    """Write the calibration table if a path is given, and return the report.

    If ``--precision auto`` chose the float model, a warning is added instead, and None is returned.
    """
    from qdqtool.insertion.format_choice import FLOAT
    from qdqtool.insertion.ranges import write_table
    from qdqtool.util.notes import Note

    if path is None or result.precision != FLOAT:
        return None if path is None else write_table(result, path)
    text = f"{path} was not written, because the float model has no scales"
    result.warnings.append(Note(text, code="no-table", path=path))
    return None


def _warn_without_dla(result: Insertion, name: str | None) -> bool:
    """Return whether a GPU of the table has no DLA, and add a warning if so."""
    from qdqtool.timing.gpus import choose_gpu
    from qdqtool.util.notes import Note

    if name is None or "=" in name:  # whether a described GPU has a DLA is unknown
        return False
    gpu = choose_gpu(name)
    if not gpu.has_dla:
        text = (
            f"{gpu.name} has no DLA, so a build for DLA with the calibration table fails there. "
            "Build the Q/DQ model for its GPU"
        )
        result.warnings.append(Note(text, code="no-dla", gpu=gpu.name))
    return not gpu.has_dla


def _estimate_times(
    model: str, result: Insertion, options: TimingOptions, target: Target, built: Target
) -> tuple[TimeEstimate | None, TimeEstimate | None]:
    """Return the times of the Q/DQ model, and those of the float model and all formats.

    Args:
        model: Path of the float model.
        result: The insertion.
        options: GPU and image size. Without a GPU, each time is None.
        target: Target of the command.
        built: Target of the Q/DQ model, which is strongly typed for FP8.
    """
    if options.gpu is None:
        return None, None
    time = _estimate_time(result.model, options, built)
    formats = _estimate_formats(model, options, target, result)
    if time is not None:
        _use_compared_times(time, result, formats)
        _add_loss_times(result, time, built)
        _note_faster_fp32(result, time, built)
    return time, formats


def _add_loss_times(result: Insertion, time: TimeEstimate, target: Target) -> None:
    from qdqtool.insertion.exclusion_costs import add_times
    from qdqtool.ir.graph import Model
    from qdqtool.timing.alternatives import estimate_variant

    if result.losses is not None and result.prediction is not None:
        result.losses = add_times(
            result.losses,
            Model(result.model),
            result.activations,
            time.total_ms,
            lambda changed: estimate_variant(time, changed, target),
        )


def _note_faster_fp32(result: Insertion, time: TimeEstimate, target: Target) -> None:
    """Note the time in FP32 if ``insert`` chose FP16 for the float layers, and FP32 is faster."""
    from qdqtool.insertion.number_formats import is_worthwhile
    from qdqtool.ir.graph import Model
    from qdqtool.timing.alternatives import estimate_variant
    from qdqtool.timing.model_variants import fp32_variant
    from qdqtool.util.notes import Note
    from qdqtool.util.text import format_ms, round_significant

    if all(note.code != "half-by-default" for note in result.notes):
        return
    fp32_ms = estimate_variant(time, fp32_variant(Model(result.model)), target)
    if is_worthwhile(time.total_ms / fp32_ms):
        text = (
            f"on {time.gpu.name}, the model would be faster with `high_precision='fp32'`: "
            f"{format_ms(fp32_ms)} instead of {format_ms(time.total_ms)} (estimated)"
        )
        ms, fp32_ms = map(round_significant, (time.total_ms, fp32_ms))
        result.notes.append(Note(text, code="fp32-faster", ms=ms, fp32_ms=fp32_ms))


def _use_compared_times(
    time: TimeEstimate, result: Insertion, formats: TimeEstimate | None
) -> None:
    """Use one time per type in all outputs of the command; change the estimates in place.

    If there are two estimates of the float time, the lower one is used.
    """
    from qdqtool.insertion.format_choice import FLOAT

    float_time = time.float_time
    if float_time is None:
        return
    if result.choice is not None and result.choice.ms:
        float_time.total_ms = min(float_time.total_ms, result.choice.ms[FLOAT])
    elif formats is not None and formats.float_time is not None:
        float_time.total_ms = min(float_time.total_ms, formats.float_time.total_ms)
        formats.float_time.total_ms = float_time.total_ms
        if time.best is None or not time.best.is_repeated:
            time.best = formats.best
        if time.best_fp8 is None or not time.best_fp8.is_repeated:
            time.best_fp8 = formats.best_fp8
    for part in filter(None, (time.best, time.best_fp8)):
        part.gain = float_time.total_ms / part.total_ms


def _suggest_tune(model: str, calib: str | None, width: int) -> TextPage:
    from qdqtool.formats.output import TextPage

    page = TextPage(width)
    words = ["qdqtool", "tune", model, "--calib", calib or "images/"]
    repeated = options.repeat_options(
        "gpu", "power", *options.PLACEMENT_PARAMETERS, *options.IMAGE_PARAMETERS
    )
    command = f"{shlex.join(words)}{options.repeat_target_name()}{repeated}"
    page.add_command("Next:", command)
    page.fill("tune searches for layers that INT8 makes faster with enough accuracy.", 9, " " * 9)
    return page


def _estimate_formats(
    model: str, options: TimingOptions, target: Target, result: Insertion
) -> TimeEstimate | None:
    """Return the times of INT8, FP8 and the float type on the GPU.

    None without a GPU, if the GPU or the target has no FP8, or if ``--precision auto`` chose the
    format.
    """
    if result.choice is not None or not target.has_fp8:
        return None
    from qdqtool.timing.gpus import choose_gpu
    from qdqtool.trt.targets import without_fp8_typing

    if options.gpu is None or not choose_gpu(options.gpu).has_fp8:
        return None
    # As in predict of the FP8 model: FP8 makes no network of another type strongly typed.
    return _estimate_time(model, options, without_fp8_typing(target))


def _suggest_predict(page: TextPage, path: str) -> None:
    repeated = options.repeat_options("target", "strongly_typed", *options.time_parameters())
    page.add_command("Next:", f"qdqtool predict {shlex.quote(path)}{repeated}")


def _estimate_time(
    model: str | onnx.ModelProto, options: TimingOptions, target: Target
) -> TimeEstimate | None:
    from qdqtool.timing.on_gpu import predict_on_gpu

    return predict_on_gpu(model, target, options)[1]
