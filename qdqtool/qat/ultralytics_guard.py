"""Errors for calls of Ultralytics that would drop quantizers without a warning."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from qdqtool.errors import QdqtoolError

_MARK = "_qdqtool_guarded"


def guard_ultralytics() -> None:
    """Make methods of Ultralytics raise an error if they would drop quantizers.

    ``yolo.train()`` builds a new network and copies only the float weights. Exports to formats
    other than ONNX ignore quantizers. If Ultralytics is not imported, this function does nothing.
    Networks without quantizers are not affected.
    """
    tasks = sys.modules.get("ultralytics.nn.tasks")
    if tasks is not None:
        _wrap_method(tasks.BaseModel, "load", _check_load)
    exporter = sys.modules.get("ultralytics.engine.exporter")
    if exporter is not None:
        _wrap_method(exporter.Exporter, "__call__", _check_export)


def count_quantizers(network: Any) -> int:
    """Return the number of quantizers of a network; 0 for objects that are not networks."""
    if not isinstance(network, nn.Module):
        return 0
    modules: list[Any] = [m for m in network.modules() if hasattr(m, "qdq_calls")]
    return sum(
        len(m.qdq_calls) + (m.qdq_input is not None) + (m.qdq_weight is not None) for m in modules
    )


def _wrap_method(owner: type, name: str, check: Callable[..., None]) -> None:
    original = owner.__dict__.get(name)
    if original is None or getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def call_checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(call_checked, _MARK, True)
    setattr(owner, name, call_checked)


def _check_load(network: Any, weights: Any = None, *args: Any, **kwargs: Any) -> None:
    source = (weights.get("ema") or weights.get("model")) if isinstance(weights, dict) else weights
    lost = count_quantizers(source)
    if lost and not count_quantizers(network):
        raise QdqtoolError(
            f"Ultralytics builds a new network here, without the {lost} quantizers; train with "
            "yolo.train(trainer=qdqtool.qat.ultralytics.Trainer, ...), which keeps them",
            code="quantizers-lost",
            parameter="weights",
        )


def _check_export(exporter: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
    kind = str(getattr(exporter.args, "format", "")).lower()
    if kind != "onnx" and count_quantizers(model):
        raise QdqtoolError(
            f"format='{kind}' loses or ignores the quantizers; write a Q/DQ model with "
            "qdqtool.qat.export(yolo, 'model_qdq.onnx') and build an engine from the model; "
            "'qdqtool predict model_qdq.onnx' prints the trtexec command",
            code="quantizers-lost",
            parameter="format",
        )
