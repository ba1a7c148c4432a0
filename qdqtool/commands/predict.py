"""``qdqtool predict``: what TensorRT will do with each convolution of a Q/DQ model, and why."""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from qdqtool.commands import options
from qdqtool.commands.usage import UsageError
from qdqtool.errors import QdqtoolError
from qdqtool.types import Prediction
from qdqtool.util.text import as_line

if TYPE_CHECKING:
    from qdqtool.ir.graph import Model
    from qdqtool.timing.estimate import TimeEstimate
    from qdqtool.trt.targets import Target

_SEVERITIES = ("error", "warning")


#: A model's path, its prediction, its time where one was asked for, and what of the requirements is not met.
_Answer: TypeAlias = "tuple[str, Prediction, TimeEstimate | None, list[str]]"


@click.command("predict", cls=options.HelpCommand)
@click.argument("model", type=click.Path(), nargs=-1, required=True)
@options.target_options
@options.all_option("Show every convolution and every finding in full.")
@click.option("--trace", is_flag=True, help="Print the lines that TensorRT's optimizer would log.")
@click.option("--layers", is_flag=True, help="List the engine's layers.")
@options.gpu_option()
@options.clock_option
@options.power_option
@click.option(
    "--sm",
    metavar="CC",
    help="Only report what a compute capability, such as 7.5, cannot do.",
)
@click.option("--batch", type=click.IntRange(1, 65536), help="Estimate the time for this batch.")
@click.option(
    "--no-fp16",
    is_flag=True,
    help="Estimate for a builder without --fp16: floats are FP32.",
)
@click.option(
    "--calibrate",
    metavar="TIME|FILE",
    help="A measured time (5.3ms), a trtexec profile of this model, or a file of "
    "--save-calibration.",
)
@click.option(
    "--save-calibration",
    type=click.Path(),
    metavar="FILE",
    help="Keep the correction for later calls.",
)
@options.assume_option
@options.way_option(
    "How the engine is built (trtexec, python, deepstream, ...). Findings then name that tool's "
    "flags. An unknown value lists the choices."
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
    help="These convolutions must be INT8.",
)
@click.option(
    "--fail-on",
    multiple=True,
    metavar="CODE|error|warning",
    help="Exit 1 if there is such a finding.",
)
@options.calib_option("Run the model on images too: what the scales of activations clip and waste.")
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
    images: options.ImageArguments,
    answer: options.Answer,
    **timing: Any,
) -> int:
    """Say which convolutions of each Q/DQ MODEL TensorRT will run in INT8, which not, why, and what to change.

    No TensorRT and no GPU are needed; weights in external files may be missing.

    Exit codes: 0 done, 1 a --require, --require-gain or --fail-on was not met, 2 bad input (of several models, the
    others are predicted).
    """
    model = tuple(dict.fromkeys(model))  # a run of SARIF for each, none twice
    patterns = [_pattern(text) for text in required]
    codes = [_code(text) for text in fail_on]
    from qdqtool.findings.ways import find_build_method
    from qdqtool.formats.output import as_options, emit, terminal_width, to_json
    from qdqtool.prediction import predict
    from qdqtool.timing.options import TimingOptions
    from qdqtool.util.files import record_input, reserve_output

    chosen = options.choose_target(target, strongly_typed)
    request = TimingOptions(**timing)
    gpu = request.gpu
    if gpu is None and request != TimingOptions(sm=request.sm, no_fp16=request.no_fp16):
        raise UsageError(
            "--clock, --power, --batch, --calibrate and --save-calibration need --gpu",
            code="option-without-effect",
            parameter="gpu",
        )
    if require_gain is not None and not math.isfinite(require_gain):
        raise click.BadParameter("it is no number", param_hint="--require-gain")
    if gpu is None and require_gain is not None:
        raise UsageError(
            "--require-gain needs --gpu", code="option-without-effect", parameter="require_gain"
        )
    if len(model) > 1 and (answer.form == "json" or request.save_calibration is not None):
        raise UsageError(
            "--format json and --save-calibration take one model; call predict once for each",
            code="option-conflict",
            parameter="model",
        )
    reserve_output(answer.output, "-o")
    reserve_output(request.save_calibration, "--save-calibration")
    if request.calibrate is not None:
        record_input(request.calibrate)
    building = find_build_method(way) if way is not None else None
    timed = gpu is not None or request.sm is not None
    if timed:
        from qdqtool.timing.estimate import predict_on_gpu
        from qdqtool.timing.gpu_checks import gpu_from_capability

        if request.sm is not None:
            named = gpu_from_capability(request.sm)
            chosen.with_capability(named.cc)  # refused before anything is noted of it
            if named.notes:
                print(f"qdqtool: --sm: {as_line('; '.join(named.notes))}", file=sys.stderr)
    answers: list[_Answer] = []
    damaged: dict[str, str] = {}

    def answered(path: str) -> _Answer:
        time = None
        if not timed:
            prediction = predict(path, chosen, assume=assume, way=way)
        else:
            prediction, time = predict_on_gpu(
                path,
                chosen,
                request,
                assume=assume,
                way=way,
                extend=_add_fixes,
            )
        if calib is not None:
            from qdqtool.prediction import check_activations

            check_activations(path, prediction, calib, progress=True, **images.as_keywords())
        unmet = [*_unmet_patterns(prediction, patterns), *_unmet_findings(prediction, codes)]
        return path, prediction, time, unmet + _unmet_gain(time, require_gain)

    for path in model:
        try:
            answers.append(answered(path))
        except QdqtoolError as error:
            if len(model) == 1:
                raise
            damaged[path] = as_options(str(error))
    if not damaged:
        _matched(patterns, [one[1] for one in answers])
    if assume and answers and not any(prediction.assumptions for _, prediction, _, _ in answers):
        print(
            f"qdqtool: --assume: nothing in this model depends on {', '.join(assume)}",
            file=sys.stderr,
        )
    if answer.form == "json":
        fields = answers[0][1].as_json()
        if building is not None:
            fields["for"] = building.as_json(chosen.name)
        emit(to_json(fields), answer.output)
    elif answer.form in ("sarif", "markdown"):
        from qdqtool.formats import annotations

        checked = {
            path: annotations.ModelCheck(path, chosen.name, None, [damaged[path]])
            for path in damaged
        }
        for path, one, time, unmet in answers:
            checked[path] = annotations.ModelCheck(path, chosen.name, one, unmet, time)
        rows = [checked[path] for path in model]
        text = (
            to_json(annotations.to_sarif(rows))
            if answer.form == "sarif"
            else annotations.to_markdown(rows)
        )
        emit(text, answer.output)
    else:
        from qdqtool.formats.predict_text import format_build_command, has_int8, render

        width = 100 if answer.output else terminal_width()
        texts = []
        for path, prediction, time, _ in answers:
            text = render(
                prediction,
                width,
                everything=everything,
                layers=layers,
                trace=trace,
                time=time,
                way=building,
            )
            if building is None and not chosen.is_rtx and has_int8(prediction):
                command = format_build_command(chosen, path, width, half=not request.no_fp16)
                text = f"{text.rstrip()}\n\n{command}"
            texts.append(text if len(model) == 1 else f"{as_line(path)}\n{text.rstrip()}\n")
        if texts:
            emit("\n".join(texts), answer.output)
    lines = [
        line if len(model) == 1 else f"{path}: {line}"
        for path, _, _, unmet in answers
        for line in unmet
    ]
    for line in (*lines, *dict.fromkeys(damaged.values())):
        print(f"qdqtool: {as_line(line)}", file=sys.stderr)
    return 2 if damaged else int(bool(lines))


def _unmet_gain(time: TimeEstimate | None, least: float | None) -> list[str]:
    """One line where the low end of the gain is below what is required, or the gain is not known."""
    gain = time.gain_range if time is not None else None
    if least is None or time is None or (gain is not None and gain.low >= least):
        return []
    return [
        f"--require-gain {least:g}: "
        + (
            "the model has no Q/DQ, or its gain is not known"
            if gain is None
            else f"{gain.low:.2f} to {gain.high:.2f} times as fast as {gain.precision}"
        )
    ]


def _add_fixes(model: Model, prediction: Prediction, time: TimeEstimate, target: Target) -> None:
    """What automatic fixes save; nothing is loaded for a prediction that has none."""
    if any(f.automatic for f in prediction.findings):
        from qdqtool.fixing.api import add_fixes

        add_fixes(model, prediction, time, target)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise click.BadParameter(
            f"'{text}' is not a regular expression: {error}", param_hint="--require"
        ) from None


def _code(text: str) -> str:
    if text.lower() in _SEVERITIES:
        return text.lower()
    from qdqtool.findings import codes

    found = codes.find(text)
    if found is None:
        raise click.BadParameter(
            f"no finding has the code '{text}'; {codes.suggest_code(text)}", param_hint="--fail-on"
        )
    return found.code


def _unmet_patterns(prediction: Prediction, patterns: list[re.Pattern[str]]) -> list[str]:
    """One line for each pattern that matches a convolution which is not INT8."""
    found = (
        (p.pattern, [c for c in prediction.convolutions if p.search(c.name)]) for p in patterns
    )
    return [
        f"--require '{pattern}' is not met: {len(missed)} of {len(matching)} convolutions are not INT8 "
        f"({_some(missed)})"
        for pattern, matching in found
        if (missed := [c.name for c in matching if not c.is_int8])
    ]


def _matched(patterns: list[re.Pattern[str]], predictions: list[Prediction]) -> None:
    """Raises QdqtoolError for a pattern that matches nothing: a typing mistake, or the networks have changed."""
    for pattern in patterns:
        if not any(
            pattern.search(c.name) for prediction in predictions for c in prediction.convolutions
        ):
            raise QdqtoolError(
                f"--require '{pattern.pattern}' matches none of the convolutions; see predict --all",
                code="no-match",
                parameter="required",
            )


def _unmet_findings(prediction: Prediction, wanted: list[str]) -> list[str]:
    lines = []
    for text in dict.fromkeys(wanted):
        hits = [
            f
            for f in prediction.findings
            if text in (f.code, str(f.severity)) or (text == "warning" and f.severity == "error")
        ]
        if hits:
            found = _some([f"{f.code} at {f.node}" if f.node else f.code for f in hits])
            lines.append(
                f"--fail-on {text}: {len(hits)} finding{'s' if len(hits) > 1 else ''} ({found})"
            )
    return lines


def _some(items: list[str]) -> str:
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")
