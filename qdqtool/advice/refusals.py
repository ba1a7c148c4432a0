"""What the simulated passes said when they did not fire, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from qdqtool.types import Refusal

# The later passes decide; what an earlier one refused may have been undone since.
_DECIDING = (
    "QuantizeConvWithResidualAdd", "QuantizeDoubleInputNodes", "QuantizeSingleInputNodes", "QConvScaleFusion",
    "GenericConvActFusion", "ConstWeightsFusion",
)


def _detail(refusal: Refusal, key: str, default: Any = None) -> Any:
    found = getattr(refusal, key, default)
    if key in ("consumers", "quantizers") and found is default:
        return tuple(r.node for r in getattr(refusal, "readers", ()))
    return found


def _listed(value: Any) -> str:
    """Names out of a refusal's detail: a name, or a sequence of names or (name, operator) pairs."""
    if isinstance(value, str):
        return value
    if isinstance(value, Iterable):
        items = [str(v[0]) if isinstance(v, tuple) and v else str(v) for v in value]
        return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")
    return str(value)


_WORDS: dict[str, Callable[[Refusal], str]] = {
    "input-not-dequantized": lambda r: f"its input comes from {_listed(_detail(r, 'producer', 'no DequantizeLinear'))}",
    "weights-not-dequantized": lambda r: "its weights do not come from a DequantizeLinear",
    "weights-not-constant": lambda r: "its weights are not a constant",
    "activation-per-channel": lambda r: "its input has one scale per channel",
    "weights-axis": lambda r: f"its weights are quantized along axis {_detail(r, 'axis')}",
    "types": lambda r: "its inputs are quantized to types that cannot be multiplied",
    "zero-point": lambda r: "a zero point is not 0",
    "scale-computed": lambda r: "a scale is computed at run time",
    "output-not-quantized": lambda r: f"its result is read by {_listed(_detail(r, 'consumers', ()))}, not by a Q alone",
    "output-many-consumers": lambda r: f"its result has several readers: {_listed(_detail(r, 'consumers', ()))}",
    "output-different-scales": lambda r: f"its result has Qs with other scales: {_listed(_detail(r, 'quantizers', ()))}",
    "residual-float": lambda r: f"the residual of {_listed(_detail(r, 'add', 'the Add'))} is float",
    "residual-both-quantized": lambda r: f"both inputs of {_listed(_detail(r, 'add', 'the Add'))} are quantized",
    "add-output-not-quantized": lambda r: f"the result of {_listed(_detail(r, 'add', 'the Add'))} is not quantized",
    "activation-before-add": lambda r: (
        f"{_listed(_detail(r, 'activation', 'an activation'))} stands in front of the Add"
    ),
    "batchnorm-not-constant": lambda r: f"{_listed(_detail(r, 'batchnorm', 'its BatchNormalization'))} is not constant",
    "convtranspose-batchnorm": lambda r: f"{_listed(_detail(r, 'batchnorm', 'its BatchNormalization'))} is not folded",
    "weights-shared": lambda r: f"its weights are shared with {_listed(_detail(r, 'convolutions', ()))}",
    "many-consumers": lambda r: f"its result has several readers: {_listed(_detail(r, 'consumers', ()))}",
    "not-commuting": lambda r: f"a Q cannot move up past {_detail(r, 'op', 'it')}",
    "output-not-only-quantized": lambda r: f"its result is read by {_listed(_detail(r, 'consumers', ()))} as well",
}


def reason(refusals: Iterable[Refusal], node: str) -> str:
    """``QuantizeDoubleInputNodes: its result is ...`` for a node that a deciding pass refused; empty when none did."""
    found = [r for r in refusals if r.node == node and r.reason in _WORDS]
    for name in _DECIDING:
        for refusal in found:
            if refusal.pass_name == name:
                return f"{name}: {_WORDS[refusal.reason](refusal)}"
    return f"{found[-1].pass_name}: {_WORDS[found[-1].reason](found[-1])}" if found else ""
