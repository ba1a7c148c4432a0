"""An estimate of time as text; the table of GPUs."""

from __future__ import annotations

from qdqtool.engine.graph import short
from qdqtool.render.output import as_options, wrap
from qdqtool.text import as_text
from qdqtool.timing.estimate import TimeEstimate
from qdqtool.timing.gpus import Gpu
from qdqtool.types import Finding, Prediction

_SLOWEST = 10
_FIXES = 6
_MATTERS = 1.3  # gain below which what conversions and layouts cost is said first
PAYS = 1.02  # gain below which INT8 is not worth building
_WORTH = 0.002  # share of the total below which a fix is not listed


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def decision(time: TimeEstimate) -> list[str]:
    """Whether INT8 pays, in sentences: the times of the placements, then the gain, its range, and what costs."""
    base = time.float_time
    if base is None:
        return []
    best, gain = time.best, time.best_range if time.is_float else time.gain_range
    parts = [] if time.is_float else [f"INT8 as placed: {ms(time.total_ms)}"]
    parts.append(f"{base.precision}: {ms(base.total_ms)}")
    parts += [] if base.fp32_ms is None else [f"FP32, as it is built: {ms(base.fp32_ms)}"]
    parts += [f"placed by qdqtool: {ms(best.total_ms)}"] if best is not None else []
    sentences = [f"{'; '.join(parts)} (estimated)."]
    if not time.gpu.has_int8:
        return [*sentences, f"{time.gpu.name} has no INT8 kernels: nothing to gain."]
    if gain is None:
        return [*sentences, "What INT8 could gain is not known."]
    what = "INT8 placed by qdqtool" if time.is_float else "this model"
    if abs(gain.value - 1) < PAYS - 1:
        verdict = f"{what[0].upper()}{what[1:]} is about as fast as {gain.precision}"
    elif gain.value > 1:
        verdict = f"INT8 is {gain.value:.2f} times as fast as {gain.precision}"
    else:
        verdict = f"{gain.precision} is faster than {what}, which is {gain.value:.2f} times as fast"
    verdict += f" ({gain.low:.2f} to {gain.high:.2f}{'' if gain.is_sure else ', so that either may be faster'})"
    if not time.is_float and gain.value < _MATTERS and (costs := moving(time)):
        verdict += f": {costs}"
    return [*sentences, f"{verdict}."]


def moving(time: TimeEstimate) -> str:
    """What the conversions and changes of layout cost together; empty where there are none."""
    costs = [_counted(time.conversions, "conversion")] if time.conversions else []
    costs += [_counted(time.layouts, "layout change")] if time.layouts else []
    return f"{' and '.join(costs)} cost {ms(time.conversions_ms + time.layouts_ms)}" if costs else ""


def decision_lines(time: TimeEstimate, width: int) -> list[str]:
    """:func:`decision`, wrapped."""
    return [line for sentence in decision(time) for line in wrap(sentence, 2, width, first="")]


def paying_lines(time: TimeEstimate, prediction: Prediction, width: int) -> list[str]:
    """What ``insert`` says of its own result: the decision, and what makes it slow where it does not pay."""
    lines, gain = decision_lines(time, width), time.gain_range
    if not time.gpu.has_int8:
        return [*lines, *wrap(f"warning: {time.gpu.name} builds no network with Q/DQ: deploy the float model there", 2,
                              width, first="")]  # fmt: skip
    if gain is None:
        return lines or ["no gain to say: the shapes of most layers are not known; export the model with fixed shapes"]
    if gain.value < PAYS:
        lines += wrap(f"warning: not expected to be at least {PAYS:g} times as fast as {gain.precision} on "
                      f"{time.gpu.name}: {_slow(time, prediction, width)}", 2, width, first="")  # fmt: skip
    return lines


def _slow(time: TimeEstimate, prediction: Prediction, width: int) -> str:
    """What makes a placement slow: conversions and layouts, or kernels so small that starting them is most of it."""
    if 2 * time.waiting_ms > time.total_ms:
        return (f"{ms(time.waiting_ms)} of {ms(time.total_ms)} is what its {len(time.kernels)} kernels take at least, "
                "whatever their type; a larger batch or image would gain")  # fmt: skip
    slowest = max((layer for layer in prediction.layers if layer.type == "Conversion"), key=lambda x: x.ms or 0.0,
                  default=None)  # fmt: skip
    why = moving(time) or "no kernel gains enough by INT8"
    return f"{why}; the slowest is {short(slowest.name, width)}" if slowest is not None and time.conversions else why


def summary(time: TimeEstimate) -> str:
    """The time, where it is, and its range."""
    batch = "" if time.batch == 1 else f", batch x{time.batch:g}"
    return (f"{ms(time.total_ms)} on {time.gpu.name} ({time.gpu.clock:.0f} MHz{batch}), estimated; 80 % of measured "
            f"engines lie within {ms(time.low_ms, unit=False)} to {ms(time.high_ms)}")


def summary_lines(time: TimeEstimate, width: int) -> list[str]:
    """The time end to end, against the float network; what to know about the figures."""
    lines = wrap(summary(time), 2, width)
    if time.is_float and time.best is not None:
        lines += wrap(f"with INT8 wherever insert would put it: {time.best.int8} of {time.best.convolutions} "
                      "convolutions", 2, width)  # fmt: skip
    moved = [f"conversions {ms(time.conversions_ms)}"] if time.conversions_ms else []
    moved += [f"{time.layouts} changes of memory layout {ms(time.layouts_ms)}"] if time.layouts else []
    if moved:
        lines += wrap(f"of which {', '.join(moved)}", 2, width)
    if time.calibration:
        text = f"corrected by {time.calibration.source}: x{time.calibration.factor:.2f}"
        if time.calibration.kernel_us:
            text += f", {time.calibration.kernel_us:+.1f} us a kernel"
        if time.calibration.overhead_us:
            text += f"; the profile added {time.calibration.overhead_us:.1f} us to each layer"
        lines += wrap(text, 2, width)
    for note in time.notes:
        lines += wrap(f"note: {as_options(note)}", 4, width, "  ")
    return lines


def detail_lines(time: TimeEstimate, prediction: Prediction, width: int, *, everything: bool = False) -> list[str]:
    """What each fix saves, and the slowest layers."""
    lines: list[str] = []
    least = 0.0 if everything else _WORTH * time.total_ms
    together = [f for f in time.fixes if f.saves_ms > least]
    if together:
        lines += ["", "What qdqtool fix saves, by simulating the fixed network"]
    for fix in together:
        places = f"{len(fix.nodes)} places" if len(fix.nodes) > 1 else fix.nodes[0]
        lines += wrap(f"{', '.join(fix.codes)}  {places}", 16, width, f"  {ms(fix.saves_ms):>10}  ")
    simulated = {(code, node) for fix in time.fixes for code in fix.codes for node in fix.nodes}
    fixes = saving([f for f in prediction.findings if (f.code, f.node) not in simulated], least)
    if fixes:
        lines += ["", "What each fix saves at most, neighbours quantized (savings do not add up)"]
        shown = fixes if everything else fixes[:_FIXES]
        for finding in shown:
            lines += wrap(f"{finding.code}  {finding.node}", 16, width, f"  {ms(finding.saves_ms or 0.0):>10}  ")
        if len(fixes) > len(shown):
            rest = sum(f.saves_ms or 0.0 for f in fixes[len(shown) :])
            lines.append(f"  and {len(fixes) - len(shown)} more, {ms(rest)} together (--all)")
    shown_kernels = time.kernels if everything else time.kernels[:_SLOWEST]
    if shown_kernels:
        lines += ["", *wrap("Slowest layers, as in a profile (profiling adds a few us per layer)", 2, width, "")]
        for kernel in shown_kernels:
            name = kernel.name if everything else short(kernel.title, width - 27)
            lines += wrap(f"{kernel.kind:<11} {name}", 26, width, f"  {ms(kernel.ms):>10}  ")
    return lines


def saving(findings: list[Finding], least: float) -> list[Finding]:
    """The findings whose fix saves time, the most first; one of a node and amount."""
    found = sorted((f for f in findings if (f.saves_ms or 0.0) > least), key=lambda f: -(f.saves_ms or 0.0))
    return list({(f.node, f.saves_ms): f for f in reversed(found)}.values())[::-1]


def ms(value: float, *, unit: bool = True) -> str:
    """``0.681 ms``: three digits that count."""
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 1 else 3 if value >= 0.1 else 4
    return f"{value:.{digits}f}" + (" ms" if unit else "")


def gpus_text(gpus: list[Gpu], width: int, *, sources: bool = False) -> str:
    """The table of known GPUs."""
    lines = [f"{'GPU':<27}{'CC':>5}{'SMs':>5}{'MHz':>6}{'GB/s':>7}{'L2 MB':>7}{'INT8':>7}{'FP16':>7}  INT8 by"]
    for gpu in gpus:
        data = gpu.as_json()
        tops = data["tops"]
        lines.append(
            f"{gpu.name:<27}{gpu.cc:>5}{gpu.sms:>5}{gpu.clock:>6.0f}{gpu.bandwidth:>7g}{gpu.l2:>7g}"
            f"{tops['int8']:>7.0f}{tops['fp16']:>7.0f}  {gpu.rates.int8_path}"
        )
        if sources:
            lines += wrap(f"{gpu.evidence}: {gpu.source}; {gpu.rates.evidence}: {gpu.rates.source}", 4, width)
    lines += [
        "",
        *wrap(
            "INT8 and FP16 in dense tera-operations a second at the boost clock. Give --clock for another; "
            "--sources shows where each figure comes from.",
            0,
            width,
        ),
    ]
    return as_text(lines)
