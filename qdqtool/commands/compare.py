"""``qdqtool compare``: differences between two models, two builds, or a model and a build."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from qdqtool.commands import options
from qdqtool.commands.next_commands import OTHER_IMAGES
from qdqtool.commands.usage import UsageError
from qdqtool.util.text import format_count

if TYPE_CHECKING:
    from qdqtool.comparison.result import Comparison
    from qdqtool.formats.output import TextPage


def _has_any(result: Comparison, *names: str) -> bool:
    summary = result.summary()
    return any(summary[name] for name in names)


# Condition and message of each choice of --fail-on.
_CHECKS: dict[str, tuple[Callable[[Comparison], bool], str]] = {
    "lost-int8": (lambda result: _has_any(result, "lost_int8"), "convolutions lost INT8"),
    "lost-int8-output": (
        lambda result: _has_any(result, "lost_int8_output"),
        "INT8 convolutions write float in B",
    ),
    "conversions": (
        lambda result: (result.more_conversions or 0) > 0,
        "B has more conversions",
    ),
    "scales": (lambda result: _has_any(result, "scales", "weights_scales"), "scales differ"),
    "unmatched": (
        lambda result: _has_any(result, "only_in_a", "only_in_b"),
        "convolutions are on one side only",
    ),
    "slower": (lambda result: result.is_slower, "B takes longer"),
    "any": (
        lambda result: bool(result.changed or result.interface or result.more_conversions),
        "something differs",
    ),
}


@click.command("compare", cls=options.HelpCommand)
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option(
    "--with-a",
    "more_a",
    multiple=True,
    type=click.Path(),
    metavar="FILE",
    help="Another file of the build A, such as a profile.",
)
@click.option(
    "--with-b",
    "more_b",
    multiple=True,
    type=click.Path(),
    metavar="FILE",
    help="Another file of the build B.",
)
@options.calib_option(
    "Measure on these images how well model B agrees with model A: detections, classes or outputs."
)
@click.option(
    "--min-agreement",
    type=click.FloatRange(0.0, 1.0),
    metavar="0..1",
    help="Exit 1 if the agreement on the images of --calib is below this value.",
)
@options.max_images_option
@options.image_options
@options.build_target_option
@options.gpu_option(
    "Estimate the times of two models on a GPU (see qdqtool gpus). Repeat for several GPUs.",
    multiple=True,
)
@options.power_option
@options.all_option("List every node and layer.")
@click.option(
    "--fail-on",
    multiple=True,
    type=click.Choice(tuple(_CHECKS)),
    help="Exit 1 if B has this change compared with A. B is slower from 0.5 % on (builds with "
    "measured times: from 2 % on).",
)
@click.option(
    "--report",
    "page",
    type=click.Path(dir_okay=False),
    metavar="HTML",
    help="Also write an HTML report of two models, before and after.",
)
@options.output_options
def command(
    a: str,
    b: str,
    more_a: tuple[str, ...],
    more_b: tuple[str, ...],
    calib: str | None,
    min_agreement: float | None,
    max_images: int,
    images: options.ImageArguments,
    target: str | None,
    gpu: tuple[str, ...],
    power: str | None,
    everything: bool,
    fail_on: tuple[str, ...],
    page: str | None,
    answer: options.AnswerWriter,
) -> int:
    """Show the changes from A to B: what was lost and what was gained.

    A and B are two ONNX models (float and Q/DQ, two Q/DQ models, before and after an exporter), two
    builds (log, layer JSON, profile), or a model and its build (requested and actual types). To
    check a prediction against a build, use verify.

    With --calib, the agreement of model B with model A is measured as well.

    Exit codes: 0 done, with or without differences; 1 a condition of --fail-on is true, or the
    agreement is below --min-agreement; 2 bad input, or a condition cannot be checked.
    """
    started = perf_counter()
    from qdqtool.comparison.api import compare, is_model_file
    from qdqtool.formats.build_text import add_times_on_gpus, render_comparison
    from qdqtool.ir.modelfile import load
    from qdqtool.util.files import reserve_output

    if calib is None:
        options.refuse_without("images (--calib)", "max_images")
    reserve_output(page, "--report")
    models = [is_model_file(path) for path in (a, b)]
    for name, is_model, more in zip(("more_a", "more_b"), models, (more_a, more_b), strict=True):
        if is_model and more:
            raise UsageError(
                "--with-a and --with-b add files to a build, not to a model; leave the option out",
                code="option-conflict",
                parameter=name,
            )
    if page is not None and not all(models):
        raise UsageError(
            "--report is for two models; 'qdqtool report MODEL BUILD' shows a model and its build",
            code="option-conflict",
            parameter="page",
        )
    if min_agreement is not None and calib is None:
        raise UsageError(
            "--min-agreement needs images: give --calib",
            code="missing-argument",
            parameter="calib",
        )
    first, *others = dict.fromkeys(gpu or (None,))
    _require_single_gpu(power, others)
    sides: list[Any] = [[a, *more_a], [b, *more_b]]
    if others and all(models):
        sides = [load(path) for path in (a, b)]  # once for all GPUs
    result = compare(
        *sides,
        data=calib,
        progress=True,
        target=target,
        gpu=first,
        power=power,
        max_images=max_images,
        **images.as_keywords(),
    )
    results = [
        result,
        *(compare(*sides, target=target, gpu=name, size=images.size) for name in others),
    ]
    result.notes += [n for r in results[1:] for n in r.notes if n not in result.notes]
    if page is not None:
        from qdqtool.reporting.api import report
        from qdqtool.reporting.page import require_packages

        require_packages()
        report(b, before=a, target=target, gpu=first, power=power, size=images.size).save(page)

    def render_text(width: int) -> TextPage:
        text = render_comparison(result, width, everything=everything)
        if others and result.times_as_long is not None:
            add_times_on_gpus(text, results)
        _suggest_commands(text, [a, *more_a], [b, *more_b], models)
        text.add_lines(f"Took {perf_counter() - started:.1f} s.")
        return text

    answer.write(lambda: result.as_json() | _list_times(results), render_text)
    return max(_print_failures(results, fail_on), _check_agreement(result, min_agreement))


def _require_single_gpu(power: str | None, others: Sequence[str | None]) -> None:
    """Raise an error if other GPUs are given with a power mode, which is that of one GPU."""
    if power is not None and others:
        raise UsageError(
            "--power needs a single --gpu; run compare once for each GPU",
            code="option-conflict",
            parameter="gpu",
        )


def _list_times(results: list[Comparison]) -> dict[str, Any]:
    """Return the JSON field `times` if there are several GPUs."""
    if len(results) == 1:
        return {}
    times = [
        {"gpu": r.b.gpu, "ms": r.summary()["ms"], "times_as_long": r.times_as_long} for r in results
    ]
    return {"times": times}


def _suggest_commands(page: TextPage, a: list[str], b: list[str], are_models: list[bool]) -> None:
    """Add the next commands: those for model B, or ``verify`` for a model and its build."""
    page.add_gap()
    if all(are_models):
        repeated = options.repeat_options("target", *options.time_parameters())
        page.add_command("Next:", f"qdqtool predict {shlex.join(b)}{repeated}")
        if not options.repeat_options("calib"):
            command = shlex.join(["qdqtool", "compare", *a, *b])
            page.add_command("Measure:", f"{command} --calib {OTHER_IMAGES}{repeated}")
    elif any(are_models):
        model, build = (a, b) if are_models[0] else (b, a)
        repeated = options.repeat_options("target")
        page.add_command("Next:", f"qdqtool verify {shlex.join(model + build)}{repeated}")


def _check_agreement(result: Comparison, minimum: float | None) -> int:
    if minimum is None or result.agreement is None:
        return 0
    agreement, masks = result.agreement.lowest, result.agreement.masks
    of_masks = " of the masks" if masks is not None and masks.value == agreement else ""
    if agreement is None:
        text = "could not be checked: the agreement is unknown"
    elif agreement >= minimum:
        return 0
    else:
        text = f"{minimum:g} is not met: the agreement{of_masks} is {agreement:.3f}"
    print(f"qdqtool: --min-agreement {text}", file=sys.stderr)
    return 2 if agreement is None else 1


def _print_failures(results: list[Comparison], fail_on: tuple[str, ...]) -> int:
    """Print the conditions that are true for a GPU, or else those that cannot be checked."""
    names = dict.fromkeys(fail_on)
    failures = [f"{n}: {_CHECKS[n][1]}" for n in names if any(map(_CHECKS[n][0], results))]
    reasons = {name: _describe_undecided(name, results[0]) for name in names}
    undecided = [f"{name} could not be checked: {why}" for name, why in reasons.items() if why]
    for line in failures or undecided:
        print(f"qdqtool: --fail-on {line}", file=sys.stderr)
    return 1 if failures else 2 if undecided else 0


def _describe_missing_times(result: Comparison) -> str:
    sides = (("A", result.a), ("B", result.b))
    rejected = [f"{side.rejection} {name}" for name, side in sides if side.rejected]
    if rejected:
        return f"TensorRT {' and '.join(rejected)}, so there are no times to compare"
    if result.times_as_long is None:
        return (
            "times of A or B are missing; give --gpu for two models, or profiles for two builds "
            "(--with-a, --with-b)"
        )
    return ""


def _describe_undecided(name: str, result: Comparison) -> str:
    """Return why a check of --fail-on cannot be decided; empty if it can."""
    kinds = {result.a.kind, result.b.kind}
    if name == "slower":
        return _describe_missing_times(result)
    if name == "scales":
        return "the scales of a build are unknown" if "build" in kinds else ""
    if result.partial:
        return result.partial
    mixed = len(kinds) == 2
    if result.more_conversions is None and (name == "conversions" or (name == "any" and mixed)):
        return "the number of conversions of A or B is unknown"
    if mixed and result.open_outputs and name in ("lost-int8-output", "any"):
        convolutions = format_count(result.open_outputs, "INT8 convolution")
        return f"the output types of {convolutions} are unknown in A or B"
    return ""
