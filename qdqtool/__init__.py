"""qdqtool: insert Q/DQ pairs for TensorRT, predict what TensorRT does with them, verify it against real builds.

    import qdqtool
    insertion = qdqtool.insert("model.onnx", "images/")
    prediction = qdqtool.predict("model_qdq.onnx", target="trt8.5")
    verification = qdqtool.verify("model_qdq.onnx", "build.log")
    comparison = qdqtool.compare("model_qdq.onnx", "other_qdq.onnx")

Every result has ``ok``, a short ``repr`` and ``as_json()``; those that make a file have ``save(path)``: a model
(``insert``, ``extract``, ``fix``, ``tune``), a page (``report``) or JSON (``compare``,
``verify``). Nothing that was read is overwritten.

What is wrong with an argument is told by a ``QdqtoolError`` that names the parameter, and so is what an iterable, a
mapping or calibration data of yours raises while it is read; your own exception is its ``__cause__``. What a function
of yours raises (``say``) comes as it is.

Packages are named after what they make (``insertion``, ``verification``), so that the verbs stay functions.
Each name is imported when it is first used, so that ``import qdqtool`` costs next to nothing. Type checkers and editors
read ``__init__.pyi``, which ``python -m tests.tools.make_stub`` writes.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "compare": "qdqtool.verification.comparing.api",
    "Comparison": "qdqtool.verification.comparing.result",
    "extract": "qdqtool.extraction.job",
    "Extraction": "qdqtool.extraction.result",
    "fix": "qdqtool.fixing.api",
    "Fixed": "qdqtool.fixing.api",
    "insert": "qdqtool.insertion.api",
    "Insertion": "qdqtool.insertion.result",
    "predict": "qdqtool.prediction",
    "report": "qdqtool.render.reporting.api",
    "Report": "qdqtool.render.reporting.api",
    "tune": "qdqtool.tuning.api",
    "Tuning": "qdqtool.tuning.result",
    "verify": "qdqtool.verification.api",
    "ConvOutcome": "qdqtool.types",
    "Finding": "qdqtool.types",
    "Precision": "qdqtool.types",
    "Prediction": "qdqtool.types",
    "Verification": "qdqtool.verification.lines",
    "__version__": "qdqtool.types",
}

__all__ = [
    "Comparison",
    "ConvOutcome",
    "Extraction",
    "Finding",
    "Fixed",
    "Insertion",
    "Precision",
    "Prediction",
    "Report",
    "Tuning",
    "Verification",
    "__version__",
    "compare",
    "extract",
    "fix",
    "insert",
    "predict",
    "report",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'qdqtool' has no attribute '{name}'")
    value = getattr(
        importlib.import_module(home), "TOOL_VERSION" if name == "__version__" else name
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
