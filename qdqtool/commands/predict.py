"""``qdqtool predict``: the type of each convolution of a Q/DQ model in TensorRT, and why."""

from __future__ import annotations

import gc
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from qdqtool.commands import completion, options
from qdqtool.commands.usage import UsageError
from qdqtool.errors import QdqtoolError
from qdqtool.trt.result import Prediction
from qdqtool.util.text import as_line, format_count, format_list

if TYPE_CHECKING:
    from qdqtool.findings.build_methods import BuildMethod
    from qdqtool.formats.annotations import ModelReview
    from qdqtool.formats.output import TextPage
    from qdqtool.timing.options import TimingOptions
    from qdqtool.timing.results import TimeEstimate
    from qdqtool.trt.targets import Target

_SEVERITIES = ("error", "warning")


@click.command("predict", cls=options.HelpCommand)
@click.argument("model", type=click.Path(), nargs=-1, required=True)
@options.target_options
@options.all_option("Show every convolution and every finding in full.")
@click.option("--trace", is_flag=True, help="Print the lines that TensorRT's optimizer would log.")
@click.option("--layers", is_flag=True, help="List the engine's layers.")
@options.gpu_option(
    "Estimate the time on a GPU, such as 'RTX 3060' (see qdqtool gpus). Repeat for several GPUs.",
    multiple=True,
)
@options.clock_option
@options.power_option
@click.option(
    "--sm",
    metavar="CC",
    help="Report what GPUs of a compute capability, such as 7.5, do not support, without times.",
)
@click.option("--batch", type=click.IntRange(1, 65536), help="Estimate the time for this batch.")
@click.option(
    "--no-fp16",
    is_flag=True,
    help="Estimate for a build without --fp16, with float layers in FP32.",
)
@click.option(
    "--calibrate",
    metavar="TIME|FILE",
    help="Correct the estimate by a measured time (5.3ms), a trtexec profile of this model, or a "
    "file of --save-calibration.",
)
@click.option(
    "--save-calibration",
    type=click.Path(),
    metavar="FILE",
    help="Write the correction to a file that a later --calibrate reads.",
)
@options.assume_option
@options.way_option(
    "Build method (trtexec, python, deepstream, ...) whose flags the findings name. For an "
    "unknown value, the error lists the choices."
)
@click.option(
    "--require-gain",
    type=click.FloatRange(0.01, 100),
    metavar="X",
    help="Exit 1 unless INT8 is at least X times as fast as float, by the low end of the range "
    "(with --gpu).",
)
@click.option(
    "--require",
    "required",
    multiple=True,
    metavar="REGEX",
    help="Exit 1 unless the convolutions whose names match are INT8 or FP8, or if TensorRT will "
    "reject the model.",
)
@click.option(
    "--fail-on",
    shell_complete=completion.complete_fail_codes,
    multiple=True,
    metavar="CODE|error|warning",
    help="Exit 1 if the model has a finding of this code or severity (warning includes errors).",
)
@options.calib_option(
    "Run the model on images too, and report activation scales that clip values or leave most "
    "steps unused."
)
@options.image_options
@options.make_output_options("text", "json", "sarif", "markdown")
def command(
    model: tuple[str, ...],
    target: str | None,
    strongly_typed: bool,
    everything: bool,
    trace: bool,
    layers: bool,
    assume: dict[str, str] | None,
    way: str | None,
    require_gain: float | None,
    required: tuple[str, ...],
    fail_on: tuple[str, ...],
    calib: str | None,
    gpu: tuple[str, ...],
    images: options.ImageArguments,
    answer: options.AnswerWriter,
    **timing: Any,
) -> int:
    """Predict in which type TensorRT runs each convolution of each Q/DQ MODEL.

    The findings state what prevents INT8, and what to change. No TensorRT and no GPU are needed;
    weights in external files may be missing.

    Exit codes: 0 done, 1 a condition of --require, --require-gain or --fail-on is not met, 2 bad
    input (other models are still predicted).
    """
    started = perf_counter()
    paths = list(dict.fromkeys(model))
    patterns = list(map(_compile_pattern, required))
    codes = list(map(_find_code, fail_on))
    from qdqtool.findings.build_methods import find_build_method
    from qdqtool.formats.output import emit, to_json, use_option_names
    from qdqtool.timing.options import TimingOptions

    chosen_target = options.choose_target(target, strongly_typed)
    requests = [
        TimingOptions(gpu=name, size=images.size, **timing)
        for name in dict.fromkeys(gpu or (None,))
    ]
    request = requests[0]
    _check_options(requests, require_gain, answer.form, len(paths))
    if len(paths) == len(requests) == 1:
        # The prediction is needed until the process ends. For a network of 100,000 nodes, searching
        # its objects for garbage would take a tenth of the command's time.
        gc.disable()
    build_method = find_build_method(way) if way is not None else None
    _prepare_request(request, chosen_target)
    from qdqtool.formats import annotations

    def review(path: str) -> ModelReview:
        prediction, times = _predict(path, chosen_target, requests, assume=assume, way=way)
        if calib is not None:
            _check_activations(path, prediction, calib, images)
        unmet = _list_unmet_patterns(prediction, patterns) + _list_unmet_findings(prediction, codes)
        if require_gain is not None and prediction.time is None:
            reason = f"TensorRT {prediction.rejection} the model"
            unmet.append(f"--require-gain {require_gain:g} is not met: {reason}")
        else:
            unmet += [line for time in times for line in _describe_unmet_gain(time, require_gain)]
        half = not request.no_fp16
        return annotations.ModelReview(path, chosen_target.name, prediction, unmet, times, half)

    results = _review_models(paths, review, chosen_target)
    predictions = [result.prediction for result in results if result.prediction is not None]
    if len(predictions) == len(results):
        _require_pattern_matches(patterns, predictions)
    _note_unused_assumptions(assume, predictions)
    if answer.form == "sarif":
        emit(to_json(annotations.to_sarif(results)), answer.output)
    elif answer.form == "markdown":
        emit(annotations.to_markdown(results), answer.output)
    elif predictions:
        method = {} if build_method is None else {"for": build_method.as_json(chosen_target.name)}
        shown = _TextOptions(
            everything, layers, trace, build_method, not request.no_fp16, request.batch
        )

        def render_text(width: int) -> TextPage:
            page = _render_text(results, chosen_target, width, shown)
            page.add_lines(f"Took {perf_counter() - started:.1f} s.")
            return page

        answer.write(lambda: use_option_names(predictions[0].as_json()) | method, render_text)
    return _print_failures(results)


def _review_models(
    paths: list[str], review: Callable[[str], ModelReview], target: Target
) -> list[ModelReview]:
    """Return a result for each model.

    If there are several models, the error of a model becomes its result. If there is one model, its
    error is raised.
    """
    if len(paths) == 1:
        return [review(paths[0])]
    from qdqtool.formats.annotations import ModelReview
    from qdqtool.formats.output import as_options

    results = []
    for path in paths:
        try:
            results.append(review(path))
        except QdqtoolError as error:
            results.append(ModelReview(path, target.name, None, [as_options(str(error))]))
    return results


def _prepare_request(request: TimingOptions, target: Target) -> None:
    from qdqtool.util.files import record_input, reserve_output

    reserve_output(request.save_calibration, "--save-calibration")
    if request.calibrate is not None:
        record_input(request.calibrate)
    if request.sm is not None:
        _check_capability(request.sm, target)


def _check_activations(
    path: str, prediction: Prediction, calib: str, images: options.ImageArguments
) -> None:
    from qdqtool.formats.output import as_options
    from qdqtool.prediction import check_activations

    count = len(prediction.notes)
    check_activations(path, prediction, calib, progress=True, **images.as_keywords())
    for note in prediction.notes[count:]:
        _print_note(as_options(note))


def _print_note(text: str) -> None:
    print(f"qdqtool: {as_line(text)}", file=sys.stderr)


def _has_any_value(options: Iterable[object]) -> bool:
    return any(option is not None for option in options)


def _check_options(
    requests: list[TimingOptions], require_gain: float | None, form: str, models: int
) -> None:
    """Check the options that need a GPU, a single GPU or a single model.

    Raises:
        UsageError: An option has no effect, or needs a single GPU or model.
        click.BadParameter: The gain is not a finite number.
    """
    request = requests[0]
    needing_gpu = (
        request.clock,
        request.power,
        request.batch,
        request.calibrate,
        request.save_calibration,
    )
    if request.gpu is None and _has_any_value(needing_gpu):
        raise UsageError(
            "--clock, --power, --batch, --calibrate and --save-calibration need --gpu",
            code="option-without-effect",
            parameter="gpu",
        )
    if require_gain is not None and not math.isfinite(require_gain):
        raise click.BadParameter("must be a finite number", param_hint="--require-gain")
    if request.gpu is None and require_gain is not None:
        raise UsageError(
            "--require-gain needs --gpu", code="option-without-effect", parameter="require_gain"
        )
    for_one_gpu = (request.clock, request.power, request.calibrate, request.save_calibration)
    if len(requests) > 1 and _has_any_value(for_one_gpu):
        raise UsageError(
            "--clock, --power, --calibrate and --save-calibration need a single --gpu; run predict "
            "once for each GPU",
            code="option-conflict",
            parameter="gpu",
        )
    if models > 1 and (form == "json" or request.save_calibration is not None):
        raise UsageError(
            "--format json and --save-calibration need a single model; run predict once for each "
            "model",
            code="option-conflict",
            parameter="model",
        )


def _check_capability(sm: str, target: Target) -> None:
    """Check that a target builds for a compute capability, and print the notes on it.

    Raises:
        QdqtoolError: The compute capability is unknown, or the target does not build for it.
    """
    from qdqtool.timing.gpu_checks import gpu_from_capability

    gpu = gpu_from_capability(sm)
    target.with_capability(gpu.cc)
    if gpu.notes:
        _print_note(f"--sm: {'; '.join(gpu.notes)}")


def _predict(
    path: str,
    target: Target,
    requests: list[TimingOptions],
    *,
    assume: dict[str, str] | None,
    way: str | None,
) -> tuple[Prediction, list[TimeEstimate]]:
    from qdqtool.gpu_prediction import predict_on_gpus, predict_with_time, predict_without_gpu

    if requests[0].gpu is None and requests[0].sm is None:
        return predict_without_gpu(path, target, assume=assume, way=way), []
    if len(requests) > 1:
        return predict_on_gpus(path, target, requests, assume=assume, way=way)
    prediction, time = predict_with_time(path, target, requests[0], assume=assume, way=way)
    return prediction, [] if time is None else [time]


class _TextOptions(NamedTuple):
    """Options that decide what the text shows.

    Attributes:
        everything: Whether to print all convolutions and the full findings.
        layers: Whether to list the layers of the engine.
        trace: Whether to print the predicted lines of TensorRT's log.
        way: Build method to describe; None to suggest commands of trtexec.
        half: Whether the builder may use FP16.
        batch: Batch size of the suggested commands; None for 1.
    """

    everything: bool
    layers: bool
    trace: bool
    way: BuildMethod | None
    half: bool
    batch: int | None


def _render_text(
    results: list[ModelReview], target: Target, width: int, shown: _TextOptions
) -> TextPage:
    from qdqtool.formats.output import TextPage
    from qdqtool.formats.predict_text import (
        NextOptions,
        build_commands,
        is_built_quantized,
        render,
    )

    page = TextPage(width)
    repeated = NextOptions(
        options.repeat_options("target", "strongly_typed"),
        options.repeat_options("gpu", "power") if len(results[0].times) == 1 else "",
        options.repeat_options("calib", *options.IMAGE_PARAMETERS)
        if options.repeat_options("calib")
        else "",
        options.repeat_options("size"),
    )
    for result in results:
        prediction = result.prediction
        if prediction is None:
            continue
        built = prediction.choose_typing(target)
        page.add_gap()
        text = render(
            prediction,
            width,
            everything=shown.everything,
            layers=shown.layers,
            trace=shown.trace,
            times=result.times,
            way=shown.way,
            half=shown.half,
            target=built,
            options=repeated,
        )
        page.add_page(text)
        if shown.way is None and not target.is_rtx and is_built_quantized(prediction):
            page.add_gap()
            page.add_page(
                build_commands(
                    built,
                    result.path,
                    width,
                    prediction.model,
                    half=shown.half,
                    batch=shown.batch,
                    on_jetson=any(t.gpu.is_jetson for t in result.times) if result.times else None,
                )
            )
            if not result.times:
                command = f"qdqtool predict {shlex.quote(result.path)}{repeated.target} --gpu NAME"
                page.add_command("Times:", command)
                page.add_lines("         (qdqtool gpus lists the names)")
    return page


def _print_failures(results: list[ModelReview]) -> int:
    failures = [
        line if len(results) == 1 else f"{result.path}: {line}"
        for result in results
        if result.prediction is not None
        for line in result.unmet
    ]
    errors = [line for result in results if result.prediction is None for line in result.unmet]
    for line in (*failures, *dict.fromkeys(errors)):
        _print_note(line)
    return 2 if errors else int(bool(failures))


# Requirements: --require, --fail-on, --require-gain


def _compile_pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise click.BadParameter(
            f"'{text}' is not a regular expression: {error}", param_hint="--require"
        ) from None


def _find_code(text: str) -> str:
    if text.lower() in _SEVERITIES:
        return text.lower()
    from qdqtool.findings import codes

    entry = codes.find(text)
    if entry is None:
        advice = codes.suggest_code(text)
        if text.lower() == "slower":  # a condition of compare
            advice = "'qdqtool compare A B --gpu NAME --fail-on slower' compares times"
        raise click.BadParameter(
            f"no finding has the code '{text}'; {advice}", param_hint="--fail-on"
        )
    return entry.code


def _list_unmet_patterns(prediction: Prediction, patterns: list[re.Pattern[str]]) -> list[str]:
    """Return a message for each pattern that matches convolutions in neither INT8 nor FP8.

    If TensorRT rejects the model, no pattern that matches convolutions is met.
    """
    from qdqtool.formats.verdicts import describe_rejection

    lines = []
    for pattern in patterns:
        matches = [c for c in prediction.convolutions if pattern.search(c.name)]
        missed = [c.name for c in matches if not c.is_quantized]
        if matches and prediction.rejected:
            reason = describe_rejection(prediction)
            lines.append(f"--require '{pattern.pattern}' is not met: {reason}")
        elif missed:
            verb = "is" if len(missed) == 1 else "are"
            lines.append(
                f"--require '{pattern.pattern}' is not met: {len(missed)} of {len(matches)} "
                f"matching convolutions {verb} neither INT8 nor FP8 ({format_list(missed, 3)})"
            )
    return lines


def _note_unused_assumptions(assume: dict[str, str] | None, predictions: list[Prediction]) -> None:
    if assume and predictions and not any(prediction.assumptions for prediction in predictions):
        _print_note(f"--assume: no prediction depends on {', '.join(assume)}")


def _require_pattern_matches(
    patterns: list[re.Pattern[str]], predictions: list[Prediction]
) -> None:
    """Check that each pattern matches a convolution in at least one network.

    Raises:
        QdqtoolError: A pattern matches no convolution.
    """
    names = [c.name for prediction in predictions for c in prediction.convolutions]
    for pattern in patterns:
        if not any(map(pattern.search, names)):
            raise QdqtoolError(
                f"--require '{pattern.pattern}' matches none of the convolutions; list their "
                "names with predict --all",
                code="no-match",
                parameter="required",
            )


def _list_unmet_findings(prediction: Prediction, codes: list[str]) -> list[str]:
    lines = []
    for code in dict.fromkeys(codes):
        severities = _SEVERITIES if code == "warning" else (code,)
        places = [
            f"{f.code} at {f.node}" if f.node else f.code
            for f in prediction.findings
            if f.code == code or f.severity in severities
        ]
        if places:
            count = format_count(len(places), "finding")
            lines.append(f"--fail-on {code}: {count} ({format_list(places, 3)})")
    return lines


def _describe_unmet_gain(time: TimeEstimate, required: float | None) -> list[str]:
    if required is None:
        return []
    if not time.is_supported:
        return [
            f"--require-gain {required:g} is not met: no engine can be built for {time.gpu.name} "
            f"({time.obstacle})"
        ]
    gain = time.gain_range
    if gain is None:
        return [
            (
                f"--require-gain {required:g} is not met: the model has no Q/DQ, or its gain is "
                "unknown"
            )
        ]
    if gain.low >= required:
        return []
    return [
        f"--require-gain {required:g} is not met: the model is {gain.low:.2f} to {gain.high:.2f} "
        f"times as fast as in {gain.precision}"
    ]
