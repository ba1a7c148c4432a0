"""A verification as text."""

from __future__ import annotations

from qdqtool.agreement import Mismatch, MismatchKind, TraceCounts
from qdqtool.render.output import as_options, wrap
from qdqtool.text import as_text, layers_counted
from qdqtool.trt.targets import target_named
from qdqtool.verified import Verification

_KINDS = {
    MismatchKind.CONVOLUTION: "Convolutions",
    MismatchKind.CONVERSION: "Conversions",
    MismatchKind.LAYER: "Engine layers",
    MismatchKind.TRACE: "Pass lines",
    MismatchKind.COPY: "Slices, concatenations and copies",
    MismatchKind.BUILD: "Build",
}
_SHOWN = 10


def verdict(result: Verification) -> str:
    """Agreement in one line."""
    conv, trace, conversions = result.convolutions, result.trace, result.conversions
    listed = result.prediction.convolutions if result.prediction is not None else []
    products = sum(c.is_product for c in listed) if len(listed) == conv.total else 0
    parts = [f"{conv.agree} of {layers_counted(conv.total - products, products)} agree"]
    if conv.unknown:
        parts[0] += f", {conv.unknown} unknown"
    if conversions.built is not None and conversions.predicted is not None:
        parts.append(f"{conversions.predicted} conversions predicted, {conversions.built} built")
    if trace.built:
        parts.append(f"{trace.agree} of {trace.built} pass lines agree ({trace.predicted} predicted)")
    return "; ".join([*parts, *_outside(result)])


def _outside(result: Verification) -> list[str]:
    """That the measured time lies outside the estimated range, where it does."""
    times = result.times
    if times is None or times["within"]:
        return []
    return [f"{times['built_ms']:.3f} ms measured, outside the estimated {times['low_ms']:.3f} to "
            f"{times['high_ms']:.3f}"]  # fmt: skip


def _lines(what: str, counts: TraceCounts) -> str:
    """How many lines agree, and how many of them in the log's order; empty where the build has none."""
    if not counts.built:
        return ""
    order = "" if counts.in_order is None else f", {counts.in_order} of them in the log's order"
    return f"{what}: {counts.agree} of {counts.built} agree ({counts.predicted} predicted){order}."


def render_verification(result: Verification, width: int = 80) -> str:
    """The whole answer: verdict, what was compared, then each mismatch."""
    lines = wrap(verdict(result), 2, width, first="")
    build = result.build
    target = result.prediction.target if result.prediction else ""
    product = "TensorRT-RTX" if target and target_named(target).is_rtx else "TensorRT"
    version = f"{product} {build.tensorrt}" if build.tensorrt else f"{product}, version not stated"
    device = f" on {build.device}" if build.device else ""
    lines += wrap(f"Build: {version}{device} ({build.source}); predicted for {target}.", 2, width, first="")
    if result.prediction is not None:
        lines += wrap(f"Evidence: {result.prediction.target_evidence}.", 2, width, first="")
    if not result.complete or build.missing:
        missing = ", ".join(build.missing or ["not stated"])
        word = "Incomplete build" if not result.complete else "Not in the files given"
        lines += wrap(f"{word}: {missing}.", 2, width, first="")
    layers = result.layers
    if layers.total:
        text = f"Engine layers: {layers.agree} of {layers.total} have the predicted name and types."
        lines += wrap(text, 2, width, first="")
    for text in (_lines("Pass lines", result.trace), _lines("Slice, concatenation and copy lines", result.copies)):
        lines += wrap(text, 2, width, first="") if text else []
    lines += _times(result, width)
    for note in result.notes:
        lines += wrap(f"Note: {as_options(note)}.", 2, width, first="")
    for kind, title in _KINDS.items():
        found = [m for m in result.mismatches if m.kind == kind]
        if found:
            lines += ["", f"{title}: {len(found)} mismatch{'es' if len(found) > 1 else ''}"]
            for mismatch in found[:_SHOWN]:
                lines += _mismatch(mismatch, width)
            if len(found) > _SHOWN:
                lines.append(f"  ... and {len(found) - _SHOWN} more (all in --format json)")
    unknown = result.convolutions.unknown_names
    if unknown:
        lines += ["", "Not stated by the build:"]
        lines += [f"  {name}" for name in unknown[:_SHOWN]]
        if len(unknown) > _SHOWN:
            lines.append(f"  ... and {len(unknown) - _SHOWN} more")
    for text in _outside(result):
        lines += ["", *wrap(f"Time: {text} ms, the range of four in five measured times; far outside means another "
                            "GPU, clock or load.", 2, width, first="")]  # fmt: skip
    return as_text(lines)


def _times(result: Verification, width: int) -> list[str]:
    """Estimated against measured time, and the layers that were much slower."""
    times = result.times
    if times is None:
        return []
    held = "within the range" if times["within"] else "outside the range, as one in five measured times is"
    lines = wrap(
        f"Time on {times['gpu']}: {times['predicted_ms']:.3f} ms estimated ({times['low_ms']:.3f} to "
        f"{times['high_ms']:.3f}), {times['built_ms']:.3f} ms measured "
        f"({times['built_from']}): {held}.", 2, width, first="",
    )
    layers = times["layers"]
    if layers["compared"]:
        lines += wrap(
            f"{layers['compared']} layers timed: half of them within {layers['median_error']:.0%} of the estimate.", 2,
            width,
        )
    for note in times["notes"]:
        lines += wrap(f"note: {as_options(note)}", 4, width, "  ")
    for slow in times["slow"]:
        lines += wrap(f"slow: {slow['built_ms']:.4f} ms for {slow['predicted_ms']:.4f} estimated: "
                      f"{slow['name']}", 4, width, "  ")
    return lines


def _mismatch(mismatch: Mismatch, width: int) -> list[str]:
    place = f"line {mismatch.line}: " if mismatch.line else ""
    return [*wrap(mismatch.name, 4, width, first="  "), *wrap(f"{place}{mismatch.why}", 4, width)]
