"""``qdqtool tune``: find the fastest choice of INT8 layers that keeps the accuracy."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from qdqtool.commands import options
from qdqtool.commands.next_commands import suggest_build, suggest_compare, suggest_uint8_input
from qdqtool.commands.usage import UsageError

if TYPE_CHECKING:
    from qdqtool.tuning.result import Tuning


@click.command("tune", cls=options.HelpCommand)
@click.argument("model", type=click.Path())
@options.calib_option(required=True)
@click.option(
    "--eval",
    "evaluation",
    type=click.Path(),
    metavar="IMAGES",
    help="Images to choose the layers (about half) and to measure the result. [default: half of "
    "--calib]",
)
@click.option(
    "--keep",
    type=click.FLOAT,
    metavar="PART",
    help="Part of the float accuracy to keep. [default: 0.97]",
)
@click.option(
    "--budget-ms",
    type=click.FLOAT,
    metavar="MS",
    help="Find the most accurate choice within this time.",
)
@click.option(
    "--metric",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="A function (reference, outputs, image) -> float. [default: agreement mAP for "
    "YOLO, else 1 minus the output error]",
)
@options.gpu_option("Estimate milliseconds on one GPU (see qdqtool gpus).")
@options.clock_option
@options.power_option
@options.model_output_option("The Q/DQ model. [default: MODEL_tuned.onnx]")
@click.option(
    "--result",
    type=click.Path(),
    metavar="FILE",
    help="Also write the JSON to a file, for qdqtool report.",
)
@click.option(
    "--state",
    type=click.Path(),
    metavar="FILE",
    help="File of the measurements, which later runs reuse. [default: OUTPUT.tuning]",
)
@click.option(
    "--time-limit",
    type=options.ParsedText(options.parse_seconds),
    metavar="TIME",
    help="Write the best choice found within this time (600, 10m, 1.5h); 70% of it is for the "
    "search. Before the first choice is measured, only --state is written.",
)
@options.check_timeout_option("Time limit for one call of --metric. [default: 600]")
@click.option(
    "--front",
    "whole_front",
    is_flag=True,
    help="Measure the full speed/accuracy curve.",
)
@click.option(
    "--chosen-on",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    metavar="N",
    help="Maximum number of images (or fixed batches) to choose the layers on.",
)
@click.option(
    "--judged-on",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    metavar="N",
    help="Maximum number of held-out images.",
)
@click.option(
    "--swept-on",
    type=click.IntRange(1),
    metavar="N",
    help="Maximum number of images for the sensitivity of each layer. [default: 4]",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Number of threads.",
)
@click.option("--no-state", is_flag=True, help="Do not keep measurements.")
@options.cluster_options
@options.target_option
@options.precision_option("int8", "fp8")
@options.range_options
@options.image_options
@options.placement_options
@options.network_options
@options.all_option("List every layer.")
@options.output_format_option
def command(
    model: str,
    calib: str,
    budget_ms: float | None,
    gpu: str | None,
    clock: float | None,
    power: str | None,
    output: str | None,
    result: str | None,
    state: str | None,
    no_state: bool,
    cluster: str | None,
    mixed_cpus: bool,
    target: str | None,
    images: options.ImageArguments,
    everything: bool,
    answer: options.AnswerWriter,
    **settings: Any,
) -> int:
    """Find the fastest INT8 layers that keep the accuracy of the float MODEL.

    Accuracy is measured with onnxruntime, that of the result on held-out images. Types and times
    are predicted: no GPU and no TensorRT is needed.

    Exit codes: 0 goal reached (also by the float model, if no faster choice reaches it), 1 goal
    not reached (the best choice is written), 2 bad input, or a --time-limit that ends before the
    first choice is measured.
    """
    started = perf_counter()
    if state is not None and no_state:
        raise UsageError(
            "--state and --no-state exclude each other; give one of them",
            code="option-conflict",
            parameter="state",
        )
    options.check_cluster(cluster, mixed_cpus)
    if gpu is None and (clock is not None or power is not None or budget_ms is not None):
        raise UsageError(
            "--budget-ms, --clock and --power require --gpu",
            code="option-without-effect",
            parameter="gpu",
        )
    path = options.choose_output_path(model, output, "tuned")
    chosen_target = options.choose_target(target)
    from qdqtool.util.files import is_stream, output_verb, reserve_output

    if state is None and not no_state and not is_stream(Path(path)):
        state = f"{path}.tuning"

    for output_path, option in ((path, "-o"), (result, "--result"), (state, "--state")):
        reserve_output(output_path, option)
    from qdqtool.formats.output import Style, TextPage, use_option_names
    from qdqtool.formats.tuning_text import render_tuning
    from qdqtool.insertion.rules import restrict_to_fp8
    from qdqtool.tuning.api import tune

    with contextlib.redirect_stdout(sys.stderr), _explain_interrupt(state):
        # Redirect stdout, because the user's metric may print.
        tuning = tune(
            model,
            calib,
            budget_ms=budget_ms,
            gpu=gpu,
            clock=clock,
            power=power,
            target=chosen_target,
            **images.as_keywords(),
            cluster=cluster,
            mixed_cpus=mixed_cpus,
            state=state,
            **settings,
            progress=True,
            say=_print_line,
        )
    tuning.save(path)
    seconds = perf_counter() - started
    if result is not None:
        tuning.save_result(result)
    _warn_float_result(tuning, path)

    def render_text(width: int) -> TextPage:
        page = render_tuning(tuning, width, everything=everything)
        page.add_gap()
        if state is not None:
            page.fill(
                f"Measurements saved in {state} and {state}.ranges: a rerun with another --keep "
                "measures only new candidates. Delete the files when done."
            )
        written = f"{output_verb(path)} {path}"
        if not tuning.chosen.cost.int8:
            kind = "unchanged" if tuning.unchanged else f"in {tuning.float_type.upper()}"
            written = f"Wrote the float model {kind} to {path}: no layer is quantized"
        page.fill(f"{written} ({seconds:.1f} s)", style=Style.BOLD)
        if not tuning.unchanged:
            repeated = options.repeat_options("target", *options.time_parameters())
            page.add_command("Next:", f"qdqtool predict {shlex.quote(path)}{repeated}")
            suggest_compare(page, model, path)
            is_fp8 = settings["precision"] == "fp8"
            built = restrict_to_fp8(chosen_target) if is_fp8 else chosen_target
            suggest_build(page, path, built, tuning.model, gpu)
            suggest_uint8_input(page, model, calib, path, chosen_target, tuning)
        return page

    answer.write(lambda: use_option_names(tuning.as_json()), render_text)
    return 0 if tuning.reached else 1


def _print_line(line: str) -> None:
    from qdqtool.formats.output import as_options
    from qdqtool.util.text import as_line

    print(f"qdqtool: {as_line(as_options(line))}", file=sys.stderr)


def _warn_float_result(tuning: Tuning, path: str) -> None:
    from qdqtool.formats.tuning_text import describe_float_result

    if warning := describe_float_result(tuning, path):
        _print_line(f"warning: {warning}")


@contextlib.contextmanager
def _explain_interrupt(state: str | None) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        if state is not None and Path(state).exists():
            stop.add_note(
                f"Run the same command again to continue from {state}; with --time-limit, the best "
                "choice so far is written."
            )
        raise
