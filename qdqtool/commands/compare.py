"""``qdqtool compare``: what differs between two models, two builds, or a model and its build."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from qdqtool.base.options import as_in, concern
from qdqtool.commands import inputs
from qdqtool.commands.usage import UsageError
from qdqtool.options import Gpu, OnBuilds

if TYPE_CHECKING:
    from qdqtool.verification.comparing.result import Comparison

_SLOWER = 1.02


def _count(*names: str) -> Callable[[Comparison], bool]:
    def some(result: Comparison) -> bool:
        summary = result.summary()
        return any(summary[name] for name in names)

    return some


_CHECKS: dict[str, tuple[Callable[[Comparison], bool], str]] = {
    "lost-int8": (_count("lost_int8"), "convolutions lost INT8"),
    "lost-int8-output": (_count("lost_int8_output"), "INT8 convolutions write float now"),
    "conversions": (
        lambda result: (result.more_conversions or 0) > 0,
        "there are more conversions",
    ),
    "scales": (_count("scales", "weights_scales"), "scales differ"),
    "unmatched": (_count("only_in_a", "only_in_b"), "convolutions are on one side only"),
    "slower": (lambda result: (result.times_as_long or 0.0) > _SLOWER, "B takes longer"),
    "any": (lambda result: bool(result.changed or result.more_conversions), "something differs"),
}


@concern
class _Gates(inputs.Gates):
    fail_on: tuple[str, ...] = as_in(
        inputs.Gates,
        "fail_on",
        brief="Exit 1 where B is so against A.",
        choices=tuple(_CHECKS),
        metavar="",
    )


@click.command("compare", cls=inputs.Command)
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@inputs.made_of("further", inputs.Further, "more_a", "more_b")
@inputs.made_of("on", OnBuilds)
@inputs.made_of("machine", Gpu, gpu="Estimate the times of two models on a GPU (see qdqtool gpus).")
@inputs.made_of("shown", inputs.Shown, "everything", everything="List every node and layer.")
@inputs.made_of("gates", _Gates, "fail_on")
@inputs.made_of("files", inputs.Files, "page")
@inputs.made_of("answer", inputs.Written)
def command(
    a: str,
    b: str,
    further: inputs.Further,
    on: OnBuilds,
    machine: Gpu,
    shown: inputs.Shown,
    gates: _Gates,
    files: inputs.Files,
    answer: inputs.Written,
) -> int:
    """Show what B lost and gained against A.

    A and B are two ONNX models (float and Q/DQ, two placements, before and after an exporter), two builds (log, layer
    JSON, profile), or a model and its build: what was asked for, and what the engine realized. verify asks whether the
    prediction was right; compare asks what changed.

    Exit codes: 0 done, whether or not they differ; 1 a --fail-on was met; 2 bad input, or a --fail-on that these files
    cannot answer.
    """
    from qdqtool.base.files import reserve_output
    from qdqtool.render.build_text import render_comparison
    from qdqtool.verification.comparing.api import compare
    from qdqtool.verification.comparing.result import is_model

    page = files.page
    reserve_output(answer.output, "-o")
    reserve_output(page, "--report")
    models = [is_model(path) for path in (a, b)]
    if (further.more_a and models[0]) or (further.more_b and models[1]):
        raise UsageError(
            "--with-a and --with-b add files to a build, not to a model",
            code="option-conflict",
            parameter="more_a" if models[0] and further.more_a else "more_b",
        )
    if page is not None and not all(models):
        raise UsageError(
            "--report is for two models; 'qdqtool report MODEL BUILD' shows a model and its build",
            code="option-conflict",
            parameter="page",
        )
    result = compare([a, *further.more_a], [b, *further.more_b], target=on.target, gpu=machine.gpu)
    if page is not None:
        from qdqtool.render.reporting.api import report
        from qdqtool.render.reporting.page import require

        require()
        report(b, before=a, target=on.target, gpu=machine.gpu).save(page)
    answer.give(
        result.as_json, lambda width: render_comparison(result, width, everything=shown.everything)
    )
    asked = dict.fromkeys(gates.fail_on)
    met = [f"{name}: {_CHECKS[name][1]}" for name in asked if _CHECKS[name][0](result)]
    open_ = [
        f"{name} could not be checked: {why}"
        for name in asked
        if not met and (why := _untold(name, result))
    ]
    for line in met or open_:
        print(f"qdqtool: --fail-on {line}", file=sys.stderr)
    return 1 if met else 2 if open_ else 0


def _untold(name: str, result: Comparison) -> str:
    """Why a check that found nothing does not mean that there is nothing; an empty string where it does."""
    kinds = {result.a.kind, result.b.kind}
    if name == "slower":
        return (
            ""
            if result.times_as_long is not None
            else (
                "no times of both sides; give --gpu for two models, and for two builds their profiles (--with-a, --with-b)"
            )
        )
    if name == "scales":
        return "a build does not show scales" if "build" in kinds else ""
    if result.partial:
        return result.partial
    if name == "conversions" or (name == "any" and len(kinds) == 2):
        if result.more_conversions is None:
            return "the number of conversions is not known on both sides"
    if name in ("lost-int8-output", "any") and len(kinds) == 2 and (open_ := result.open_outputs):
        return f"the types that {open_} INT8 convolutions write are not known on both sides"
    return ""
