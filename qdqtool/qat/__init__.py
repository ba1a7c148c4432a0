"""Quantization-aware training with quantizers where TensorRT uses them.

    from qdqtool import qat
    plan = qat.prepare(model, sample, target="trt8.5", backend="pytorch-quantization")
    qat.calibrate(model, batches, method="mse")
    ...                                   # fine-tune as before
    result = qat.export(model, "model_qdq.onnx", sample)
    print(result.prediction.summary())

Quantizers are inserted at the inputs where :func:`qdqtool.insert` inserts Q/DQ pairs. The float
network is exported to an ONNX graph, the rules of `insert` choose the quantized inputs, and each
input is mapped back to a torch module. The package needs the extra ``qdqtool[qat]``. Importing the
package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qdqtool.errors import QdqtoolError

if TYPE_CHECKING:
    from qdqtool.qat.checking import Check
    from qdqtool.qat.exporting import Export, check, export
    from qdqtool.qat.planning import Plan, plan
    from qdqtool.qat.preparation import checkpoint, prepare, restore
    from qdqtool.qat.ranges import Calibration, calibrate
    from qdqtool.qat.switching import Sensitivity, disable, disabled, enable, sensitivity

_MODULES = {
    "Calibration": "ranges",
    "Check": "checking",
    "Export": "exporting",
    "Plan": "planning",
    "Sensitivity": "switching",
    "calibrate": "ranges",
    "check": "exporting",
    "checkpoint": "preparation",
    "disable": "switching",
    "disabled": "switching",
    "enable": "switching",
    "export": "exporting",
    "plan": "planning",
    "prepare": "preparation",
    "restore": "preparation",
    "sensitivity": "switching",
}

__all__ = [
    "Calibration",
    "Check",
    "Export",
    "Plan",
    "Sensitivity",
    "calibrate",
    "check",
    "checkpoint",
    "disable",
    "disabled",
    "enable",
    "export",
    "plan",
    "prepare",
    "restore",
    "sensitivity",
]


def __getattr__(name: str) -> Any:
    """Return the public object with a name. Its module is imported on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'qdqtool.qat' has no attribute '{name}'")
    try:
        return getattr(importlib.import_module(f"qdqtool.qat.{_MODULES[name]}"), name)
    except ImportError as error:
        raise QdqtoolError(
            f"training needs torch ({error}); run pip install 'qdqtool[qat]'",
            code="missing-package",
        ) from error
