"""Ranges of time estimates, within which 80 % of measured times lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdqtool.timing.physics import load_constants
from qdqtool.timing.power_modes import ESTIMATE_OVER_MODE
from qdqtool.timing.results import UNKNOWN_SPREAD, UNMEASURED_SPREAD, TimeEstimate
from qdqtool.util.notes import Note

if TYPE_CHECKING:
    from qdqtool.timing.gpus import Gpu

_NOTE_SPREAD = 1.15  # factor that widens the range if the GPU has notes, such as assumed figures
_REPEATED_SPREAD = 1.05  # factor of the range if the network itself was measured: runs differ


def set_time_range(time: TimeEstimate, kernels: float) -> None:
    """Set the range that contains 80 % of measured times, and add notes about the range.

    Args:
        time: Estimate, which is changed.
        kernels: Number of kernels of the engine.
    """
    gpu, correction = time.gpu, time.calibration
    spread, slowdown = _REPEATED_SPREAD, 1.0
    if correction is None:
        spread, slowdown = _time_spread(time)
    elif not correction.direct:
        spread = load_constants().spreads["total_calibrated"]
    if gpu.notes:
        is_wider = correction is None and _has_doubtful_figures(gpu)
        text = "; ".join(gpu.notes)
        if is_wider:
            text += ". Therefore, the range in ms is wider"
            if any(note.code == "taken-as" for note in gpu.notes):
                text += ", but may exclude times of these GPUs: give the exact name"
            text += "."
        time.notes.append(Note(text, code="of-gpu"))
    unknown, layers = len(time.unknown), time.layer_count
    if unknown:
        spread *= 1 + UNKNOWN_SPREAD * unknown / layers
        text = (
            f"the shapes of {unknown} of {layers} layers are unknown; each such layer is counted "
            "as one minimal kernel"
        )
        if 2 * unknown <= layers:
            time.notes.append(Note(text, code="shapes-unknown"))
        else:
            text += ", so the time is unreliable: export the model with fixed shapes"
            time.notes.append(Note(text, code="most-shapes-unknown"))
    time.low_ms, time.high_ms = time.total_ms / spread, time.total_ms * spread * slowdown
    if correction is not None:  # part of the assumed profiling overhead may be kernel time
        time.high_ms += kernels * correction.overhead_us * 1e-3


def _time_spread(time: TimeEstimate) -> tuple[float, float]:
    """Return the factor of the range of an uncalibrated time, and the power limit's slowdown.

    The range is from the time divided by the factor to the time multiplied by the factor and the
    slowdown. The slowdown is the estimated clock divided by the clock of a GPU under full load, or
    in a power mode that may be slower than its estimate.
    Notes about both numbers are added to the estimate.
    """
    gpu, notes = time.gpu, time.notes
    constants, slowdown = load_constants(), 1.0
    spread = constants.spreads["total"]
    if not constants.is_measured(gpu.cc):
        spread = constants.spreads["total_unknown"] * UNMEASURED_SPREAD
        notes.append(
            Note(
                f"no {gpu.rates.architecture} GPU of compute capability {gpu.cc} was measured, so "
                "the range of the estimate is wider",
                code="not-measured",
            )
        )
    share = gpu.clock_share_under_load
    if share < 1:
        slowdown = time.clock_share / share
        limit = f"below {gpu.clock:.0f} MHz ({gpu.power:g} W limit)"
        throttles = f"may throttle {limit}: the"
        if time.clock_share < 1:
            clock = f"about {time.clock:.0f} MHz"
            throttles = f"throttles {limit}: the time of this model is for {clock}, and the"
        notes.append(
            Note(
                f"the GPU {throttles} upper end of the range is for {gpu.clock * share:.0f} MHz. "
                "Set `clock` if you know the GPU's clock.",
                code="slowed",
            )
        )
    if any(note.code == "clock-guessed" for note in gpu.notes):
        slowdown *= ESTIMATE_OVER_MODE
    return spread * (_NOTE_SPREAD if _has_doubtful_figures(gpu) else 1.0), slowdown


def _has_doubtful_figures(gpu: Gpu) -> bool:
    """Whether a note states a doubt. The note on a known power mode states none."""
    return any(note.code != "power-mode" for note in gpu.notes)
