"""Steps that use the public Python API. worker.py runs the steps in the recorded checkout."""

from typing import Any

import numpy as np

Json = Any


def ranges(model: str, data: str, tensors: list[str], focus: bool = False) -> Json:
    import calibration

    statistics = calibration.collect(model, data, tensors, progress=False)
    described: dict[str, Json] = {"images": statistics.images, "warnings": statistics.warnings}
    for name in tensors:
        tensor = statistics[name]
        chosen = {m: calibration.amax_of(tensor, m) for m in calibration.METHODS}
        amax = float(chosen["max"])
        described[name] = {
            "amax": chosen,
            "percentile 99": calibration.amax_of(tensor, "percentile", 99.0),
            "count": tensor.count,
            "minimum": tensor.minimum,
            "maximum": tensor.maximum,
            "clipped": calibration.clipped_fraction(tensor, amax / 2),
            "error": float(calibration.squared_error(tensor, amax / 2)),
        }
    return described


def insertion(model: str, data: str, **options: Any) -> Json:
    import qdqtool

    with np.load(data) as arrays:
        samples = [{name: arrays[name][i : i + 1] for name in arrays} for i in range(4)]
    inserted = qdqtool.insert(model, samples, **options)
    inserted.save("inserted.onnx")
    return {"ok": inserted.ok, "json": inserted.as_json()}


def results(quantized: str, other: str) -> Json:
    import qdqtool
    from qdqtool.testing import assert_int8

    predicted = qdqtool.predict(quantized, target="trt8.5")
    comparison = qdqtool.compare(other, quantized, target="trt8.5")
    fixed = qdqtool.fix(quantized, target="trt8.5")
    try:
        assert_int8(quantized, "trt8.5", max_conversions=0)
        asserted = "passed"
    except AssertionError as error:
        asserted = str(error)
    return {
        "summary": predicted.summary(),
        "findings": [[f.code, str(f.severity), f.node] for f in predicted.findings],
        "ok": [bool(r.ok) for r in (predicted, comparison, fixed)],
        "comparison": comparison.as_json(),
        "fixed": fixed.as_json(),
        "message": asserted,
    }
