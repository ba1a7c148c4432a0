"""Quantization-aware training with quantizers where TensorRT uses them.

    from qdqtool import qat
    plan = qat.prepare(model, sample, target="trt8.5", backend="pytorch-quantization")
    qat.calibrate(model, batches, method="mse")
    ...                                   # fine-tune as before
    done = qat.export(model, "model_qdq.onnx", sample)
    print(done.prediction.summary())

The placement is that of :func:`qdqtool.insert`: the float network is traced, the same rules decide, and the decision is
carried back to the modules. Needs the extra ``qdqtool[qat]``; importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qdqtool.errors import QdqtoolError

if TYPE_CHECKING:
    from qdqtool.qat.calibrate import Calibration, calibrate
    from qdqtool.qat.export import Export, export
    from qdqtool.qat.plan import Plan, plan
    from qdqtool.qat.prepare import prepare

_HOMES = {
    "prepare": "qdqtool.qat.prepare",
    "plan": "qdqtool.qat.plan",
    "Plan": "qdqtool.qat.plan",
    "calibrate": "qdqtool.qat.calibrate",
    "Calibration": "qdqtool.qat.calibrate",
    "export": "qdqtool.qat.export",
    "Export": "qdqtool.qat.export",
}

__all__ = ["Calibration", "Export", "Plan", "calibrate", "export", "plan", "prepare"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'qdqtool.qat' has no attribute '{name}'")
    try:
        module = importlib.import_module(home)
    except ImportError as error:
        raise QdqtoolError(f"training needs torch ({error}); pip install 'qdqtool[qat]'") from error
    # Modules and functions share names (prepare.prepare): the function is what the name stands for.
    globals().update({n: getattr(module, n) for n, h in _HOMES.items() if h == home})
    return globals()[name]
