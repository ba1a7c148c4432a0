"""Texts on estimated times: the verdict on the speed, times with their ranges, savings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from qdqtool.formats.output import Style, TextPage, as_options
from qdqtool.formats.verdicts import (
    EVEN,
    describe_range,
    describe_ratio,
    format_ratio,
    ratio_style,
    speed_verdict,
)
from qdqtool.insertion.number_formats import is_worthwhile
from qdqtool.util.text import format_count, format_ms, keep_end

if TYPE_CHECKING:
    from qdqtool.ir.precision import Precision
    from qdqtool.reasons.finding import Finding
    from qdqtool.timing.results import BestTime, SpeedGain, TimeEstimate
    from qdqtool.trt.result import Prediction

_MAX_LAYERS = 10
_MAX_TYPES = 4  # maximum number of columns of times in a table of GPUs
_CELL = 8  # width of such a column
_FLOAT_TYPES = frozenset(("FP16", "FP32"))  # only the faster one of a GPU is estimated
_MIN_SAVING = 0.002  # minimum saving that is printed, as a fraction of the total time
_WARNING_NOTES = ("batch-scaled",)  # codes of notes that are printed as warnings
_MIN_LAYOUTS = 0.02  # minimum printed time of layout changes, as a fraction of the total


def add_speed_verdict(
    page: TextPage, times: Sequence[TimeEstimate], prediction: Prediction | None = None
) -> None:
    """Add the verdict on the speed, a table with a row for each type or for each GPU, and notes.

    The arguments are those of :func:`list_time_notes`.
    """
    if len(times) > 1:
        _add_gpu_table(page, times, _list_columns(times))
    else:
        result = speed_verdict(times[0])
        page.fill(result.text, 4, "  ", result.style)
        _add_time_table(page, times[0])
    add_time_notes(page, list_time_notes(times, prediction, everything=page.everything))


def add_time_notes(page: TextPage, notes: Iterable[TimeNote]) -> None:
    """Add notes on estimated times."""
    for note in notes:
        style = Style.UNCLEAR if note.is_warning else Style.PLAIN
        page.fill(f"{note.label}: {note.text}", 4, "  ", style)


class TimeNote(NamedTuple):
    """Note or warning on estimated times.

    Attributes:
        label: ``note`` or ``warning``, with the GPUs if the note is not on all GPUs.
        text: The text.
        is_warning: Whether the note is a warning.
    """

    label: str
    text: str
    is_warning: bool = False


def list_time_notes(
    times: Sequence[TimeEstimate],
    prediction: Prediction | None = None,
    *,
    everything: bool = False,
) -> list[TimeNote]:
    """Return the notes on estimated times.

    Args:
        times: Estimated time on each GPU.
        prediction: If given, a note explains why ``insert`` is slower than the model.
        everything: Whether to name small costs of layout changes too.
    """
    supported = [time for time in times if time.is_supported]
    has_several = len(times) > 1
    notes = _list_remarks(supported if has_several else times, has_several, everything)
    labels = _list_columns(times) if has_several else list(list_times(times[0]))
    if supported and any(label.startswith("FP8") for label in labels):
        notes.append(TimeNote("note", _describe_fp8_basis(supported)))
    if prediction is not None and (reason := _explain_slower_insert(prediction, supported)):
        notes.append(TimeNote("note", f"INT8 by qdqtool insert is slower because {reason}."))
    return notes


def list_choice_notes(times: Sequence[TimeEstimate], prediction: Prediction) -> list[TimeNote]:
    """Return the notes on the choice of the GPU's name and of the placement."""
    from qdqtool.timing.gpus import find_super_variant

    texts = []
    if prediction.named_target.has_super_mode:
        others = filter(None, (find_super_variant(time.gpu) for time in times))
        names = {other.name for other in others} - {time.gpu.name for time in times}
        texts += [f"for Super mode (JetPack 6.2), give --gpu '{name}'" for name in sorted(names)]
    texts += filter(None, [describe_repeated_placement(times)])
    return [TimeNote("note", text) for text in texts]


def _list_remarks(
    times: Sequence[TimeEstimate], name_gpus: bool, everything: bool
) -> list[TimeNote]:
    """Return the remarks on each GPU; a remark on several GPUs is returned once.

    Args:
        times: Estimated time on each GPU.
        name_gpus: Whether to name the GPUs of each remark that is not on all GPUs.
        everything: Whether to name small costs of layout changes too.
    """
    gpus: dict[str, dict[str, str]] = {}  # remark of each GPU, by the remark without the GPU
    for time in times:
        for remark in _list_gpu_remarks(time, everything):
            general = remark.replace(f" on {time.gpu.name}", " on {}")
            gpus.setdefault(general, {})[time.gpu.name] = remark
    notes = []
    for general, remarks in gpus.items():
        names, remark = ", ".join(remarks), next(iter(remarks.values()))
        is_on_all = 1 < len(remarks) == len(times)
        is_named = is_on_all or next(iter(remarks)) in remark
        name = f" ({names})" if name_gpus and not is_named else ""
        is_warning = getattr(remark, "code", "") in _WARNING_NOTES
        word = "warning" if is_warning else "note"
        text = as_options(general.replace(" on {}", f" on {names}"))
        notes.append(TimeNote(f"{word}{name}", text, is_warning))
    return notes


def _describe_fp8_basis(times: Sequence[TimeEstimate]) -> str:
    text = "FP8 times are computed from rates of the GPU; no FP8 build was measured."
    if any(time.is_float for time in times):
        text += " Accuracy decides as well: qdqtool insert --precision auto measures it."
    return text


class ListedTime(NamedTuple):
    """Time of an engine, in milliseconds, and its share of the GPU's boost clock."""

    ms: float
    clock_share: float


def list_times(time: TimeEstimate, *, repeated: bool = False) -> dict[str, ListedTime]:
    """Return times by label: model, float network, and results of ``insert``.

    If the model has the placement and the time of ``insert``, this time of ``insert`` is only
    included if `repeated` is set.
    """
    float_time, times = time.float_time, {}
    model_time = ListedTime(time.total_ms, time.clock_share)
    if not time.is_float:
        times[str(time.quantized)] = model_time
    if float_time is not None:
        share = float_time.clock_share
        times[str(float_time.precision)] = ListedTime(float_time.total_ms, share)
        if float_time.fp32_ms is not None:
            times["FP32"] = ListedTime(float_time.fp32_ms, float_time.fp32_clock_share)
    elif time.is_float:
        times[str(time.float_type)] = model_time
    for label, best in _list_bests(time).items():
        if repeated or not best.is_repeated:
            times[label] = ListedTime(best.total_ms, best.clock_share)
    return times


def _list_bests(time: TimeEstimate) -> dict[str, BestTime]:
    """Return the times of ``insert`` by label, such as ``INT8 by qdqtool insert (defaults)``."""
    bests = {"INT8": (time.best, "(defaults)"), "FP8": (time.best_fp8, "--precision fp8")}
    return {
        f"{precision} by qdqtool insert {options}": best
        for precision, (best, options) in bests.items()
        if best is not None
    }


def describe_repeated_placement(times: Sequence[TimeEstimate]) -> str:
    """Name the command that places the Q/DQ pairs as in the model; empty if none is known."""
    repeated = [
        label.partition(" by ")[2]
        for time in times
        if time.is_supported
        for label, best in _list_bests(time).items()
        if best.is_repeated
    ]
    return f"The Q/DQ pairs are placed as by {repeated[0]}." if repeated else ""


def _explain_slower_insert(prediction: Prediction, times: Sequence[TimeEstimate]) -> str:
    """Return why the result of ``insert`` is slower than the model; empty if it is not slower."""
    slower = [
        time.best
        for time in times
        if time.best is not None and time.best.total_ms > (1 + _MIN_SAVING) * time.total_ms
    ]
    codes = {finding.code for finding in prediction.findings}
    int8 = prediction.summary()["int8"]
    if "HEAD-QUANT" in codes and any(best.int8 < int8 for best in slower):
        return "insert keeps the end of the head in float for accuracy (HEAD-QUANT)"
    if "FLOAT-FP32" in codes and slower:
        return (
            "insert writes float layers in FP16, and INT8 layers need a change of memory layout to "
            "write FP16, but not to write FP32 (FLOAT-FP32). insert --high-precision fp32 keeps "
            "FP32"
        )
    return ""


def describe_clock(time: TimeEstimate) -> str:
    """Return the clock for which the time is, such as ``1777 MHz``."""
    return f"{'about ' if time.clock_share < 1 else ''}{time.clock:.0f} MHz"


def describe_times(time: TimeEstimate) -> str:
    """Return the times as one line, such as ``INT8 0.807 ms, FP16 1.06 ms on L4 ...``."""
    texts = [f"{label} {format_ms(listed.ms)}" for label, listed in list_times(time).items()]
    method = "estimated" if time.calibration is None else "estimated, corrected by a measurement"
    return (
        f"{', '.join(texts)} on {time.gpu.name} at {describe_clock(time)} ({method}; 80 % of "
        f"engines within {format_ms(time.low_ms, unit=False)} to {format_ms(time.high_ms)})"
    )


def describe_fastest(formats: TimeEstimate, time: TimeEstimate) -> str:
    """Describe the fastest type: that of the written model, its float type, or another format.

    The text is empty if it is uncertain whether the float type is faster, and no other format is:
    the verdict on the speed of the written model states this.

    Args:
        formats: Times of the float model, and of the INT8 and FP8 models that ``insert`` makes of
            it with its defaults.
        time: Time of the written model.
    """
    gain, rival = time.gain_range, formats.faster_range
    if gain is None or rival is None:
        return "The fastest type is unknown."
    written, float_type = gain.quantized, gain.precision
    lead = rival.value / max(gain.value, 1)
    if is_worthwhile(lead):
        return _describe_rival(rival, written)
    if not gain.is_sure:
        return ""
    if gain.value > 1 and lead > 1 and rival.quantized != written:
        return f"{written} and {rival.quantized} are about equally fast (estimated)."
    return f"{written if gain.value > 1 else float_type} is the fastest type (estimated)."


def _describe_rival(rival: SpeedGain, written: Precision) -> str:
    default = ""
    if rival.quantized == written:
        options = "with its defaults" if written == "INT8" else "--precision fp8"
        default = f" by qdqtool insert {options}"
    fastest = "the fastest type (estimated), " if rival.is_sure else ""
    return f"{rival.quantized}{default} would be {fastest}{describe_ratio(rival)}."


def _add_time_table(page: TextPage, time: TimeEstimate) -> None:
    times = list_times(time)
    first = next(iter(times), "")  # the model itself
    column = max(12, *(len(label) + 2 for label in times))
    page.add_lines(f"  {'':<{column}}{'time':>11}{'80 % range':>21}")
    for label, listed in times.items():
        bounds = ""
        if time.calibration is None or label == first:
            low, high = (listed.ms * end / time.total_ms for end in (time.low_ms, time.high_ms))
            high *= listed.clock_share / time.clock_share  # the upper end is for one low clock
            bounds = f"{format_ms(low, unit=False)} - {format_ms(high)}"
        page.add_lines(f"  {label:<{column}}{format_ms(listed.ms):>11}{bounds:>21}".rstrip())


def _add_gpu_table(page: TextPage, times: Sequence[TimeEstimate], labels: Sequence[str]) -> None:
    column = max(10, *(len(time.gpu.name) + 2 for time in times))
    heads = "".join(f"{label.split()[0]:>{_CELL}}" for label in labels)
    origins = "".join(f"{_name_origin(label):>{_CELL}}" for label in labels)
    page.add_lines(
        f"  {'time in ms':<{column}}{heads}  speed", f"  {'':<{column}}{origins}  (80 % range)"
    )
    for time in times:
        ratio, style = _format_speed(time)
        row = f"  {time.gpu.name:<{column}}{_format_cells(time, labels)}  "
        page.fill(ratio, len(row), row, style)
    missing = {
        label for time in times if time.is_supported for label in _list_missing(time, labels)
    }
    if missing:
        page.fill(f"note: '-' is for {_explain_missing(missing)}", 4, "  ")


def _list_columns(times: Sequence[TimeEstimate]) -> list[str]:
    """Return the labels of the columns: float, INT8 (the model, then ``insert``), FP8."""
    built = [time for time in times if time.is_supported] or times
    labels = dict.fromkeys(label for time in built for label in list_times(time))
    float_types = ("FP16", "BF16") if labels.keys() & {"FP16", "BF16"} else ("FP32",)
    order = [*float_types, "INT8", "FP8", "FP32"]
    return sorted(labels, key=lambda label: (order.index(label.split()[0]), label))[:_MAX_TYPES]


def _name_origin(label: str) -> str:
    """Return ``insert`` for the time of a model that ``insert`` would write."""
    return "insert" if " " in label else ""


def _list_missing(time: TimeEstimate, labels: Sequence[str]) -> list[str]:
    return [label for label in labels if label not in list_times(time, repeated=True)]


def _explain_missing(labels: Collection[str]) -> str:
    """Explain why the times of these columns are missing for some GPUs."""
    causes = [] if _FLOAT_TYPES.issuperset(labels) else ["a type that the GPU lacks"]
    if not _FLOAT_TYPES.isdisjoint(labels):
        causes.append("the slower of FP16 and FP32")
    return ", and for ".join(causes)


def _format_cells(time: TimeEstimate, labels: Sequence[str]) -> str:
    listed = list_times(time, repeated=True) if time.is_supported else {}
    cells = (
        format_ms(listed[label].ms, unit=False) if label in listed else "-" for label in labels
    )
    return "".join(f"{cell:>{_CELL}}" for cell in cells)


def _format_speed(time: TimeEstimate) -> tuple[str, Style]:
    if not time.is_supported:
        return f"no engine: {time.obstacle}", Style.PLAIN
    if not time.gpu.has_int8:
        return "no INT8", Style.PLAIN
    gain = time.faster_range if time.is_float else time.gain_range
    if gain is None:
        return "unknown", Style.PLAIN
    ratio = format_ratio(gain)
    unsure = "" if gain.is_sure or ratio == EVEN else ", not certain"
    text = f"{ratio}{unsure} ({describe_range(gain)})"
    return f"{gain.quantized} {text}" if time.is_float else text, ratio_style(gain)


def _list_gpu_remarks(time: TimeEstimate, everything: bool) -> list[str]:
    texts = []
    if time.layouts and (everything or time.layouts_ms > _MIN_LAYOUTS * time.total_ms):
        changes = format_count(time.layouts, "change")
        verb = "costs" if time.layouts == 1 else "cost"
        texts.append(f"{changes} of memory layout {verb} {format_ms(time.layouts_ms)}.")
    gain = time.gain_range
    if gain is not None and not gain.is_sure and 2 * time.launch_ms > time.total_ms:
        texts.append(
            f"The {len(time.kernels)} kernels take at least {format_ms(time.launch_ms)} in any "
            f"type, so a larger batch or image gains more from {gain.quantized}."
        )
    calibration = time.calibration
    if calibration:
        text = f"Corrected by {calibration.source}: x{calibration.factor:.2f}"
        if calibration.kernel_us:
            text += f", {calibration.kernel_us:+.1f} us a kernel"
        if calibration.overhead_us:
            text += f"; the profile added {calibration.overhead_us:.1f} us to each layer"
        texts.append(f"{text}.")
    return [*texts, *time.notes]


_UNLISTED_LAYERS = (
    "The list includes layers that are not among the engine layers, such as activations after "
    "convolutions, layout changes, and reformats of inputs and outputs."
)


def add_slowest_layers(page: TextPage, times: Sequence[TimeEstimate]) -> None:
    """Add the slowest layers on the first GPU for which the engine can be built."""
    time, _ = _find_basis(times)
    if time is None or not time.kernels:
        return
    name = f" on {time.gpu.name}" if len(times) > 1 else ""
    page.add_heading(f"Slowest layers{name}, as in a profile (profiling adds a few us per layer)")
    if page.everything:
        page.fill(_UNLISTED_LAYERS, 2, "  ")
    for kernel in page.first_rows(time.kernels, _MAX_LAYERS):
        name = kernel.name if page.everything else keep_end(kernel.title, page.width - 27)
        page.fill(f"{kernel.kind:<11} {name}", 26, f"  {format_ms(kernel.ms):>10}  ")


def describe_saving(
    findings: Sequence[Finding],
    times: Sequence[TimeEstimate],
) -> str:
    """Describe the time that the fixes of findings with one code save.

    The time is that on the first GPU for which the engine can be built. The savings in the findings
    are for this GPU too. The text is empty without such a GPU, or if no fix was estimated and the
    time is negligible.

    Args:
        findings: Findings with one code.
        times: Estimated time on each GPU.
    """
    time, basis = _find_basis(times)
    if time is None:
        return ""
    code, minimum = findings[0].code, _MIN_SAVING * time.total_ms
    simulated = max(
        (fix for fix in time.fixes if code in fix.codes), key=lambda fix: fix.saves_ms, default=None
    )
    if simulated is not None and simulated.saves_ms > minimum:
        partners = ", ".join(partner for partner in simulated.codes if partner != code)
        together = f" together with {partners}" if partners else ""
        return f"{format_ms(simulated.saves_ms)} by qdqtool fix{together} ({basis})"
    if simulated is not None:
        return f"less than {100 * _MIN_SAVING:g} % of the time by qdqtool fix ({basis})"
    further = max((fix.saves_ms for fix in time.further_fixes if code in fix.codes), default=0.0)
    if further > minimum:
        return f"{format_ms(further)} by qdqtool fix after the other fixes ({basis})"
    largest = max(findings, key=lambda finding: finding.saves_ms or 0.0)
    if (largest.saves_ms or 0.0) <= minimum:
        return ""
    if code == "NO-QDQ":
        return f"{format_ms(largest.saves_ms or 0.0)} by qdqtool insert ({basis})"
    included = [finding for finding in findings if finding.saving_included_in is not None]
    if included:
        others = [f for f in findings if f.saving_included_in is None]
        separate = [f for f in others if (f.saves_ms or 0.0) > minimum]
        if not separate:
            places = f"{len(included)} of {len(findings)} places"
            text = describe_included_saving(included[0])
            return text + (f" ({places})" if len(included) < len(findings) else "")
        largest = max(separate, key=lambda finding: finding.saves_ms or 0.0)
    return f"at most {_describe_bound(findings, largest)} ({basis})"


def describe_included_saving(finding: Finding) -> str:
    """Return a text on the finding whose saving includes that of this one; empty if none does."""
    code = finding.saving_included_in
    return "" if code is None else f"included in the saving of {code}"


def describe_slower_fix(finding: Finding, times: Sequence[TimeEstimate]) -> str:
    """Return a sentence if the fix of a finding would make the model slower; else empty.

    The sentence names the node, because pages omit sentences that other findings have too.
    """
    slower = [
        time.gpu.name
        for time in times
        for note in time.notes
        if note.code == "fixes-slower"
        and finding.code in note.values["codes"]
        and finding.node in note.values["nodes"]
    ]
    if not slower:
        return ""
    return f"At {finding.node}, this would make the model slower on {', '.join(slower)}."


def describe_fixed_time(times: Sequence[TimeEstimate]) -> str:
    """Describe the time after all fixes, such as ``1.07 ms instead of 1.47 ms, estimated``.

    The text is empty if the time is unknown, or if the fixes save a negligible time.
    """
    time, basis = _find_basis(times)
    if time is None or time.fixed_ms is None:
        return ""
    if time.total_ms - time.fixed_ms <= _MIN_SAVING * time.total_ms:
        return ""
    return f"{format_ms(time.fixed_ms)} instead of {format_ms(time.total_ms)}, {basis}"


def describe_request_cost(
    codes: Collection[str], times: Sequence[TimeEstimate], *, after_others: bool = False
) -> str:
    """Describe what the fixes on request of these codes cost and gain, as a relative clause.

    The cost is unknown without a GPU, or if fixes of other purposes are among them.

    Args:
        codes: Codes of the findings that the fixes remove.
        times: Estimated time on each GPU.
        after_others: Whether the fixes follow those that need no request.
    """
    time, basis = _find_basis(times)
    conditions = ["after the command above"] if after_others else []
    clause = "which may cost speed"
    if time is not None and set(codes) == {c for fix in time.accuracy_fixes for c in fix.codes}:
        cost_ms = -sum(fix.saves_ms for fix in time.accuracy_fixes)
        cost = format_ms(cost_ms) if cost_ms > _MIN_SAVING * time.total_ms else "no time"
        clause = f"which costs {cost} and can gain accuracy"
        conditions = [basis, *conditions]
    return clause + (f" ({', '.join(conditions)})" if conditions else "")


def name_fix_gpu(times: Sequence[TimeEstimate]) -> str:
    """Return the GPU for which the savings of fixes are estimated; empty without such a GPU."""
    time, _ = _find_basis(times)
    return time.gpu.name if time is not None and time.gpu.has_int8 else ""


def _find_basis(times: Sequence[TimeEstimate]) -> tuple[TimeEstimate | None, str]:
    """Return the first time of an engine that can be built, and how to name it as an estimate."""
    time = next((time for time in times if time.is_supported), None)
    if time is None or len(times) == 1:
        return time, "estimated"
    return time, f"estimated for {time.gpu.name}"


def _describe_bound(findings: Sequence[Finding], largest: Finding) -> str:
    """Describe the largest saving of findings with one code, and for which places it is."""
    saved = format_ms(largest.saves_ms or 0.0)
    if len(findings) == 1:
        return saved
    if largest.code == "NOT-QUANTIZED":  # one finding for each layer
        total = sum(finding.saves_ms or 0.0 for finding in findings)
        return f"{format_ms(total)} for all {len(findings)} places"
    is_shared = all(finding.saves_ms == largest.saves_ms for finding in findings)
    return f"{saved} for all {len(findings)} places" if is_shared else f"{saved} at {largest.node}"
