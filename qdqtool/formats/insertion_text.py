"""Text of ``insert``."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from calibration.presets import note_preprocess
from qdqtool.findings.report import title_of
from qdqtool.formats.float_names import find_float_type, name_floats
from qdqtool.formats.output import (
    ROW_COLUMN,
    SEVERITY_STYLES,
    Style,
    TextPage,
    as_options,
    wrap_command,
)
from qdqtool.formats.verdicts import RAW_ERROR_REMARK, name_float_type, verdict
from qdqtool.insertion.losses import MIN_GAIN, ActivationLosses, TensorLoss
from qdqtool.insertion.number_formats import find_number_format
from qdqtool.insertion.output_errors import SMALL_ERROR, round_error
from qdqtool.ir.precision import Precision
from qdqtool.reasons.finding import Severity
from qdqtool.reasons.heads import QuantizedHead
from qdqtool.reasons.scales import OutlierScales
from qdqtool.reasons.text import format_lost_bits
from qdqtool.trt.targets import Target
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count, format_list, format_ms

if TYPE_CHECKING:
    from qdqtool.insertion.calibration_cache import CacheReport
    from qdqtool.insertion.result import Insertion
    from qdqtool.insertion.scales import GroupScale
    from qdqtool.timing.results import TimeEstimate
    from qdqtool.trt.result import Prediction

# Maximum lengths of lists if --all is not given.
_MAX_NAMES, _MAX_GROUPS = 3, 3
_MIN_BITS_LOST = 1.5  # a group that loses fewer bits is not listed
# Rating of an output error below each limit, by its measured effect on detections
# (docs/accuracy.md).
_ERROR_RATINGS = (
    (SMALL_ERROR, "small"),
    (0.2, "larger than usual"),
    (math.inf, "large"),
)


def render(
    insertion: Insertion,
    width: int = 80,
    *,
    times: Sequence[TimeEstimate] = (),
    everything: bool = False,
) -> TextPage:
    """Return the text of ``insert``.

    Args:
        insertion: The insertion.
        width: Columns.
        times: Estimated time of the Q/DQ model on each GPU, for the type of float layers.
        everything: Whether all nodes, groups, activation scales and Q/DQ layers are listed.
    """
    page = TextPage(width, everything)
    float_type = Precision.FP16
    if insertion.prediction is not None and insertion.float_type != "fp16":
        float_type = name_float_type(insertion.prediction)
    if insertion.choice is not None and insertion.choice.is_float:
        return _render_float_choice(page, insertion)
    _add_quantization_counts(page, insertion)
    _add_skipped(page, insertion, float_type)
    _add_groups(page, insertion.groups)
    if insertion.choice is not None or everything:
        _add_formats(page, insertion)
    _add_losses(page, insertion, float_type)
    # If errors were measured for the choice of the format, the choice already reports the error.
    if insertion.choice is None or not insertion.choice.errors:
        _add_agreement(page, insertion, f"{_format_title(insertion)} and FP16 together")
    if insertion.prediction is not None:
        _add_prediction(page, insertion.prediction, insertion.requested_target, times)
    _add_remarks(page, insertion.notes, _list_warnings(insertion), float_type)
    if everything:
        _add_activation_scales(page, insertion)
    return page


def _add_prediction(
    page: TextPage,
    prediction: Prediction,
    target: Target | None,
    times: Sequence[TimeEstimate],
) -> None:
    page.add_row("In TensorRT", verdict(prediction, times=times))
    _add_findings(page, prediction)
    nodes = prediction.conversion_nodes
    if nodes and page.everything:
        page.add_row("Q/DQ layers", format_list(nodes, len(nodes)))
    if target is not None and target.borrows_rules:
        page.add_row("Rules", target.borrowed_rules)


def _add_activation_scales(page: TextPage, insertion: Insertion) -> None:
    page.add_heading("Activation scales")
    for row in insertion.activations:
        group = "" if row.group is None else f"  group {row.group}"
        numbers = f"  {row.scale:<12.6g} {row.method:<10}"
        if len(numbers) + 1 + len(row.tensor) + len(group) <= page.width:
            page.add_lines(f"{numbers} {row.tensor}{group}")
        else:
            page.add_lines(f"{numbers}{group}", f"      {row.tensor}")


def _add_findings(page: TextPage, prediction: Prediction) -> None:
    """Add the errors and warnings that `predict` will report on the written model."""
    float_type = find_float_type(prediction)
    serious = [f for f in prediction.findings if f.severity != Severity.INFO]
    counts = Counter(finding.code for finding in serious)
    severities = {finding.code: finding.severity for finding in reversed(serious)}
    label = "Findings"
    for code, count in counts.items():
        places = f" ({format_count(count, 'place')})" if count > 1 else ""
        title = name_floats(title_of(code), code, float_type)
        page.add_row(label, f"{severities[code].word} {code}: {title}{places}")
        label = ""


def _render_float_choice(page: TextPage, insertion: Insertion) -> TextPage:
    assert insertion.choice is not None
    page.fill("Nothing was quantized: the float model was chosen", style=Style.BOLD)
    page.add_gap()
    reason = as_options(insertion.choice.reason)
    page.add_row("Chosen", f"FP16: {reason}")
    _add_images(page, insertion)
    _add_format_fits(page, insertion)
    _add_agreement(page, insertion, "FP16")
    _add_remarks(page, insertion.notes, insertion.warnings)
    return page


def _add_agreement(page: TextPage, insertion: Insertion, origin: str) -> None:
    agreement = insertion.agreement
    if agreement is None:
        return
    change = "the outputs become NaN or infinite"
    if math.isfinite(agreement.error):
        change = f"{agreement.error:.1%} of the outputs' standard deviation"
    samples = format_count(agreement.samples, "image")
    page.add_row("Total error", f"of {origin}{_name_positions(insertion)}: {change} on {samples}")


def _name_positions(insertion: Insertion) -> str:
    """Name the positions of the total error if it or the output error is that at objects."""
    if insertion.agreement is not None and insertion.agreement.at_objects:
        return ", before decoding and at objects"
    is_other = insertion.losses is not None and insertion.losses.at_objects
    return " at all positions (not comparable with the output error)" if is_other else ""


def _format_title(insertion: Insertion) -> str:
    return find_number_format(insertion.precision).title


def _add_quantization_counts(page: TextPage, insertion: Insertion) -> None:
    weights = insertion.weights
    products = 0  # products of two activations, as in attention, have no weights
    if insertion.prediction is not None:
        outcomes = insertion.prediction.convolutions
        products = sum(c.weights == "computed" and c.is_quantized for c in outcomes)
    layers = format_count(len(weights) + products, "layer")
    target = insertion.named_target.title
    page.fill(f"Quantized {layers} to {_format_title(insertion)} for {target}", style=Style.BOLD)
    page.add_gap()
    channels = sum(isinstance(q.scale, list) for q in weights)
    if channels < len(weights) or page.everything:
        detail = f"a scale for each output channel in {format_count(channels, 'layer')}"
        detail += f", one scale in {len(weights) - channels}" if channels < len(weights) else ""
        page.add_row("Weights", detail)
    page.add_row("Activations", _describe_activations(insertion))
    _add_images(page, insertion)


def _describe_activations(insertion: Insertion) -> str:
    """Return ``60 scales, calibrated with 300 images (method entropy)``."""
    methods = Counter(q.method for q in insertion.activations).most_common()
    named = ", ".join(method if len(methods) == 1 else f"{method} {n}" for method, n in methods)
    origin = f"the table {insertion.calibration.get('table', '')}"
    if images := insertion.calibration.get("images", 0):
        origin = format_count(images, "image")
    scales = format_count(len(insertion.activations), "scale")
    method = f" (method {named})" if named else ""
    return f"{scales}, calibrated with {origin}{method}"


def _add_images(page: TextPage, insertion: Insertion) -> None:
    if used := insertion.calibration.get("preprocess"):
        page.add_row("Images", note_preprocess(used).removeprefix("images "))


def _add_skipped(page: TextPage, insertion: Insertion, float_type: Precision) -> None:
    """Add the nodes that remain float, by type and reason.

    The type is named if the file decides on it, and not if the builder chooses it.
    """
    prediction = insertion.prediction
    outcomes = [] if prediction is None else prediction.convolutions
    is_chosen = prediction is None or Precision.FLOAT in prediction.float_types()
    types = {c.name: c.precision for c in outcomes if c.precision == Precision.FP32}
    by_reason: dict[tuple[Precision, str], list[str]] = {}
    for node in insertion.skipped:
        key = types.get(node.node, float_type), node.reason
        by_reason.setdefault(key, []).append(node.node)
    previous = ""
    for (node_type, reason), names in sorted(by_reason.items(), key=lambda item: item[0][0]):
        listed = ", ".join(page.first_rows(names, 1))
        if len(names) > 1 and not page.everything:
            listed = f"{len(names)} nodes, such as {listed}"
        label = "Not quantized" if is_chosen else f"Kept in {node_type}"
        text = f"{name_floats(as_options(reason), '', node_type)}: {listed}"
        page.add_row("" if label == previous else label, text)
        previous = label


def _add_groups(page: TextPage, groups: list[GroupScale]) -> None:
    if not groups:
        return
    if _max_loss(groups) < _MIN_BITS_LOST and not page.everything:
        return
    ranked = sorted(groups, key=lambda group: -_max_loss([group]))
    page.add_row(
        "Shared scales",
        f"{format_count(len(groups), 'group')} of tensors (at Concat, Split, MaxPool, Resize, "
        f"...); {format_lost_bits(_max_loss(groups), 'at most ')} of precision lost",
    )
    listed = ranked
    if not page.everything:
        listed = [g for g in ranked[:_MAX_GROUPS] if _max_loss([g]) >= _MIN_BITS_LOST]
    for group in listed:
        # A range smaller than the tensor's own clips values, but does not make the steps larger.
        members = ", ".join(f"{m.tensor} {max(0.0, m.bits_lost):.1f}" for m in group.members)
        page.add_row_item(f"scale {group.scale:.4g}, bits lost: {members}")


def _max_loss(groups: Iterable[GroupScale]) -> float:
    return max((m.bits_lost for group in groups for m in group.members), default=0.0)


def _add_formats(page: TextPage, insertion: Insertion) -> None:
    if insertion.choice is not None:
        page.add_row("Chosen", f"{_format_title(insertion)}: {as_options(insertion.choice.reason)}")
    _add_format_fits(page, insertion)


def _add_format_fits(page: TextPage, insertion: Insertion) -> None:
    fits = insertion.fits
    if not fits:
        return
    wide = [fit for fit in fits if fit.is_fp8_better]
    total = format_count(len(fits), "activation")
    text = f"INT8 is more precise than FP8 for {'all ' if len(fits) > 1 else ''}{total}"
    if wide:
        text = (
            f"FP8 is more precise than INT8 for {len(wide)} of {total} (higher ratio of signal to "
            "noise)"
        )
    page.add_row("Formats", text)
    for fit in sorted(fits, key=lambda fit: -fit.spread) if page.everything else ():
        page.add_row_item(
            f"{fit.tensor}: largest over typical value {fit.spread:.1f}, signal to noise "
            f"{fit.int8_db:.1f} dB in INT8, {fit.fp8_db:.1f} dB in FP8"
        )


def _add_losses(page: TextPage, insertion: Insertion, float_type: Precision) -> None:
    losses = insertion.losses
    if losses is None:
        return
    _add_output_error(page, insertion, losses)
    if losses.tried:
        _add_activation_losses(page, insertion, losses, float_type)
    elif page.everything:
        text = (
            f"the effect of single activations was not measured (--losses {losses.samples} "
            "measures it)"
        )
        page.add_row("", text)


def _has_error_of_format(insertion: Insertion) -> bool:
    """Return whether the error of the whole model was measured for the choice of the format."""
    return insertion.choice is not None and insertion.choice.precision in insertion.choice.errors


def _name_error(insertion: Insertion) -> str:
    """Return the name of the error by which single activations are compared."""
    return "error of the activations alone" if _has_error_of_format(insertion) else "output error"


def _has_quantized_dfl(insertion: Insertion) -> bool:
    findings = [] if insertion.prediction is None else insertion.prediction.findings
    reasons = (cause.reason for finding in findings for cause in finding.causes)
    return any(isinstance(r, QuantizedHead) and r.branch == "dfl" for r in reasons)


def _add_output_error(page: TextPage, insertion: Insertion, losses: ActivationLosses) -> None:
    error, samples = losses.error, losses.samples
    choice = insertion.choice
    is_measured = _has_error_of_format(insertion)
    if choice is not None and is_measured:
        # This error was measured with the written model, whose weights are quantized too.
        error, samples = choice.errors[choice.precision], choice.samples
    error = round_error(error)
    rating = next((text for limit, text in _ERROR_RATINGS if error < limit), "large")
    part = "whole model"
    if not is_measured:
        part = f"{_format_title(insertion)} activations (weights in FP32)"
    if losses.at_objects:
        part += ", before decoding and at objects"
    uncovered = ""
    if losses.uncovered:
        shown = (
            *losses.uncovered[:_MAX_NAMES],
            *(["..."] if losses.uncovered[_MAX_NAMES:] else []),
        )
        uncovered = (
            f" Not included: {format_count(len(losses.uncovered), 'output')} ({', '.join(shown)})."
        )
    if losses.at_objects and _has_quantized_dfl(insertion):
        uncovered += " Not included: the DFL, which follows the measured outputs."
    page.add_row(
        "Output error",
        f"of the {part}: {error:.1%} of the outputs' standard deviation on "
        f"{format_count(samples, 'image')} ({rating}). {RAW_ERROR_REMARK}{uncovered}",
    )
    if page.everything and is_measured:
        page.add_row("", f"({losses.error:.1%} by quantized activations alone, for all outputs)")


def _add_activation_losses(
    page: TextPage, insertion: Insertion, losses: ActivationLosses, float_type: Precision
) -> None:
    """Add the layers whose inputs cause most of the error."""
    title = _format_title(insertion)
    error = _name_error(insertion)
    proposed = losses.proposed
    if not proposed:
        page.add_row("", _describe_unconfirmed(losses, len(insertion.activations), float_type))
    for loss in losses.tensors if page.everything else proposed:
        page.add_row_item(
            f"{', '.join(loss.readers)} in {float_type}: {error} {_describe_gain(loss, losses)}"
            f"{_describe_cost(loss, title)}"
        )
    for loss in proposed[:1]:
        first = f"{'':{ROW_COLUMN}}Try: "
        command = f"--exclude {shlex.quote(loss.exclude_pattern)}"
        page.add_verbatim(*wrap_command(command, page.width, first, ROW_COLUMN))
        if loss.unused_options:
            unused = shlex.join(
                word
                for name, value in loss.unused_options
                for word in (f"--{name.replace('_', '-')}", value)
            )
            page.add_row("", f"without {unused}, which would have no effect")


def _describe_unconfirmed(losses: ActivationLosses, activations: int, float_type: Precision) -> str:
    """Describe the test of single activations if it found none to leave float.

    Args:
        losses: Results of the test.
        activations: Number of quantized activations, tested or not.
        float_type: Type of an activation that is left float.
    """
    samples = format_count(losses.trial_samples, "image")
    count = format_count(losses.tried, "activation")
    one_at_a_time = ", one at a time," if losses.tried > 1 else ""
    how = f"in {float_type}{one_at_a_time} on {samples}"
    others = ""
    if losses.tried < activations:
        tested = f"Tested the {count} with the largest quantization errors {how}"
        others = " Others may help: qdqtool tune measures them."
    else:
        tested = f"Tested {'all' if losses.tried > 1 else 'the'} {count} {how}"
    seen = [loss for loss in losses.tensors if loss.gain >= MIN_GAIN]
    if not seen or any(loss.confirmed_on for loss in seen):
        return f"{tested}: none reliably lowers the error by {MIN_GAIN:.0%}.{others}"
    return f"{tested}: too few to find the worst activation (--losses 16 uses more)."


def _describe_gain(loss: TensorLoss, losses: ActivationLosses) -> str:
    """Return the output error before and after an activation is left float.

    An error that was not measured with the excluded layers has no decimal, because their weights
    become float too.
    """
    error = losses.error
    if loss.excluded_error is not None:
        samples = format_count(losses.samples, "image")
        return f"{error:.1%} -> {loss.excluded_error:.1%} (measured on {samples})"
    gain, remark = loss.gain, "not confirmed"
    if gain < MIN_GAIN:
        remark = f"lowered by less than {MIN_GAIN:.0%}, so not confirmed"
    if loss.confirmed_gain is not None:
        gain = loss.confirmed_gain
        chance = "" if loss.confirmed else "; may be chance"
        remark = f"gain measured on {format_count(loss.confirmed_on, 'image')}{chance}"
    return f"{error:.1%} -> about {error * (1 - gain):.0%} ({remark})"


def _describe_cost(loss: TensorLoss, title: str) -> str:
    """Describe the effect of a float input of a layer, such as ``; 1 fewer INT8 layer``."""
    if loss.convolutions is None:
        return ""
    changes = [format_count(loss.convolutions, f"fewer {title} layer")]
    if loss.conversions:
        word = "more" if loss.conversions > 0 else "fewer"
        changes.append(format_count(abs(loss.conversions), f"{word} Q/DQ layer"))
    if loss.ms is not None:
        changes.append(f"{format_ms(abs(loss.ms))} {'less' if loss.ms < 0 else 'more'}")
    return f"; {', '.join(changes)}"


def _list_warnings(insertion: Insertion) -> list[Note]:
    """Return the warnings, with the measured gain of an exclusion that one of them advises."""
    return [
        Note(f"{w}{_describe_advised_gain(insertion, w)}", code=w.code, **w.values)
        for w in insertion.warnings
    ]


def _describe_advised_gain(insertion: Insertion, warning: Note) -> str:
    """Return the measured gain of the exclusion that ACT-OUTLIER advises; empty if unknown."""
    finding = warning.values.get("finding")
    reason = None if finding is None else finding.causes[0].reason
    losses = insertion.losses
    if losses is None or not isinstance(reason, OutlierScales):
        return ""
    for loss in losses.tensors:
        if set(loss.readers) == set(reason.consumers):
            cost = _describe_cost(loss, _format_title(insertion))
            error = _name_error(insertion)
            return f" With this `exclude`: {error} {_describe_gain(loss, losses)}{cost}."
    return ""


def _add_remarks(
    page: TextPage,
    notes: Iterable[str],
    warnings: Iterable[str],
    float_type: Precision | None = None,
) -> None:
    for severity, texts in ((Severity.INFO, notes), (Severity.WARNING, warnings)):
        for text in texts:
            if getattr(text, "code", "") == "of-finding":
                text = name_floats(text, text.partition(":")[0], float_type)
            style = SEVERITY_STYLES[severity]
            page.fill(f"{severity.word}: {as_options(text)}", style=style)


def add_calibration_cache(page: TextPage, cache: CacheReport, *, build: bool = True) -> None:
    """Add the report on a calibration cache, and the command that builds with it on a DLA."""
    for line in cache.lines():
        indent = " " * (len(line) - len(line.lstrip()))
        page.fill(as_options(line), len(indent) + 2, indent)
    if build:
        page.add_lines("Build for DLA:")
        page.add_command("", cache.command)
