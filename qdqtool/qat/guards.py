"""Where Ultralytics would drop quantizers without a word, it says so and what to do instead.

``yolo.train()`` builds a new network and copies the weights that it knows; exporters for other formats than ONNX do not
know quantizers. Both go through a method of theirs, which is wrapped once a network of theirs has quantizers; nothing
changes for networks without.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from qdqtool.errors import QdqtoolError

_MARK = "_qdqtool_guarded"


def protect() -> None:
    """Wraps the two methods, where Ultralytics is loaded and they are not wrapped yet."""
    tasks, exporter = sys.modules.get("ultralytics.nn.tasks"), sys.modules.get("ultralytics.engine.exporter")
    if tasks is not None:
        _wrap(tasks.BaseModel, "load", _check_load)
    if exporter is not None:
        _wrap(exporter.Exporter, "__call__", _check_export)


def count_quantizers(network: Any) -> int:
    """How many places of a network have a quantizer of ours; of pickles and copies as well."""
    if not isinstance(network, nn.Module):
        return 0
    quantizing: list[Any] = [m for m in network.modules() if hasattr(m, "qdq_calls")]
    return sum(len(m.qdq_calls) + (m.qdq_input is not None) + (m.qdq_weight is not None) for m in quantizing)


def _wrap(owner: type, name: str, check: Callable[..., None]) -> None:
    original = owner.__dict__.get(name)
    if original is None or getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(guarded, _MARK, True)
    setattr(owner, name, guarded)


def _check_load(network: Any, weights: Any = None, *args: Any, **kwargs: Any) -> None:
    source = (weights.get("ema") or weights.get("model")) if isinstance(weights, dict) else weights
    lost = count_quantizers(source)
    if lost and not count_quantizers(network):
        raise QdqtoolError(
            f"Ultralytics builds a new network here, without the {lost} quantizers; train with "
            "yolo.train(trainer=qdqtool.qat.ultralytics.Trainer, ...), which keeps them"
        )


def _check_export(exporter: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
    kind = str(getattr(exporter.args, "format", "")).lower()
    if kind != "onnx" and count_quantizers(model):
        raise QdqtoolError(
            f"format='{kind}' loses or ignores the quantizers; write the Q/DQ model with "
            "qdqtool.qat.export(yolo, 'model_qdq.onnx') and build that (trtexec --onnx=model_qdq.onnx --int8 --fp16)"
        )
