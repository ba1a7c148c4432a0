"""Q/DQ models for TensorRT: insert, predict, and verify against real builds.

    import qdqtool
    insertion = qdqtool.insert("model.onnx", "images/")
    prediction = qdqtool.predict("model_qdq.onnx", target="trt8.5", gpu="RTX 3060")
    verification = qdqtool.verify("model_qdq.onnx", "build.log")
    comparison = qdqtool.compare("model_qdq.onnx", "other_qdq.onnx")

A model is a path, bytes, a ``ModelProto`` or an onnx-graphsurgeon graph. Results that hold a model
have ``to_graphsurgeon()``.

Every result has ``ok``, ``summary()``, a short ``repr`` and ``as_json()``. Stored values are
attributes. Methods compute values when they are called. ``save(path)`` writes a model (``insert``,
``extract``, ``fix``, ``tune``), a page (``report``) or JSON (``predict``, ``compare``, ``verify``).
Input files are never overwritten.

Invalid arguments and unusable calibration data raise ``qdqtool.errors.QdqtoolError``, which names
the parameter. If your own code (such as a generator of data) raises an exception, this exception is
the ``__cause__``. Arguments of a wrong Python type cause Python's own errors. Exceptions of your
callbacks (``say``) are not caught.

The names of packages are nouns (``insertion``, ``verification``), because the verbs are functions.
A name is imported on first use, which makes ``import qdqtool`` fast.

Most options of the command line are parameters of the same name: ``--max-images`` is
``max_images``. The exceptions are:

    --calib           data (predict: qdqtool.prediction.check_activations)
    --eval            evaluation
    --front           whole_front
    --float           before
    --for             way
    --engine          keep_engine
    --no-unify        unify=False
    --no-predict      predict=False
    --no-state        state=None, the default
    --strongly-typed  target="trt10-strongly-typed"
    --resize, --bgr, --scale, --mean, --std
                      preprocess=calibration.Preprocess(bgr=True, ...)
    --preprocess      predict: preprocess of qdqtool.prediction.check_activations
    --with-a, --with-b
                      a and b, which may be lists
    --builder, --sm   verify: qdqtool.verification.api.verify_with_builder
    --result          save_result(path) of the result
    --write-table     qdqtool.insertion.ranges.write_table(result, path)
    --output          save(path) of the result
    --layers, --trace
                      layers and trace of the result

Options for checks and texts exist only on the command line: ``--require``, ``--require-gain``,
``--fail-on``, ``--min-agreement``, ``--allow-partial``, ``--require-shapes``, ``--all`` and
``--format``. So do ``--from-log``, ``--dla-cache``, ``--report`` and ``--verification``.

``insert`` measures the output error only with ``losses``: the default is 0, but 8 images on the
command line (``losses=None``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qdqtool.version import TOOL_VERSION as __version__

if TYPE_CHECKING:
    from qdqtool.comparison.api import compare
    from qdqtool.comparison.result import Comparison
    from qdqtool.extraction.api import extract
    from qdqtool.extraction.result import Extraction
    from qdqtool.fixing.api import Fixed, fix
    from qdqtool.gpu_prediction import predict
    from qdqtool.insertion.result import Insertion
    from qdqtool.ir.precision import Precision
    from qdqtool.quantization.api import insert
    from qdqtool.reasons.finding import Finding
    from qdqtool.reporting.api import Report, report
    from qdqtool.trt.result import ConvOutcome, Prediction
    from qdqtool.tuning.api import tune
    from qdqtool.tuning.result import Tuning
    from qdqtool.verification.api import verify
    from qdqtool.verification.result import Verification

_MODULES = {
    "compare": "qdqtool.comparison.api",
    "Comparison": "qdqtool.comparison.result",
    "extract": "qdqtool.extraction.api",
    "Extraction": "qdqtool.extraction.result",
    "fix": "qdqtool.fixing.api",
    "Fixed": "qdqtool.fixing.api",
    "insert": "qdqtool.quantization.api",
    "Insertion": "qdqtool.insertion.result",
    "predict": "qdqtool.gpu_prediction",
    "report": "qdqtool.reporting.api",
    "Report": "qdqtool.reporting.api",
    "tune": "qdqtool.tuning.api",
    "Tuning": "qdqtool.tuning.result",
    "verify": "qdqtool.verification.api",
    "ConvOutcome": "qdqtool.trt.result",
    "Finding": "qdqtool.reasons.finding",
    "Precision": "qdqtool.ir.precision",
    "Prediction": "qdqtool.trt.result",
    "Verification": "qdqtool.verification.result",
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
    if name not in _MODULES:
        raise AttributeError(f"module 'qdqtool' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
