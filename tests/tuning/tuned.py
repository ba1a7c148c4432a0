import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx

import qdqtool
from qdqtool.tuning.measure import (
    MeasurementTask,
    PartitionedNetwork,
    TaskMapper,
    TaskResult,
    TuningJob,
    map_on_threads,
)
from qdqtool.tuning.result import PlacementResult, Tuning
from tests.insertion.nets import images, relative_error, run
from tests.tuning.nets import branchy

DATA = images(16, 16, 16)
# Of each four samples, two set the ranges, one is a selection image and one a held-out image.
CALIBRATION, CHOSEN, JUDGED = [d for i, d in enumerate(DATA) if i % 4 < 2], DATA[2::4], DATA[3::4]
KEEP = 0.984
ROWS = PartitionedNetwork.measure


def tune(data: Any = DATA, model: Any = None, **options: Any) -> Tuning:
    return qdqtool.tune(model or branchy(), data, **{"method": "mse", **options})


def insert(floats: Iterable[str], data: Any = CALIBRATION, **options: Any) -> qdqtool.Insertion:
    return qdqtool.insert(
        branchy(), data, method="mse", exclude=[f"^{name}$" for name in floats], **options
    )


def observed(observe: Callable[[TuningJob, TaskResult], None], workers: int = 1) -> TaskMapper:
    def run(job: TuningJob, tasks: Sequence[MeasurementTask]) -> Iterator[TaskResult]:
        for result in map_on_threads(workers)(job, tasks):
            observe(job, result)
            yield result

    return run


def without_effort(tuning: Tuning) -> dict[str, Any]:
    return {k: v for k, v in tuning.as_json().items() if k != "effort"}


def points_of(tuning: Tuning) -> dict[str, PlacementResult]:
    return {point.name: point for point in [*tuning.front, *tuning.others]}


def agreement(model: onnx.ModelProto, samples: Sequence[dict[str, Any]]) -> float:
    values = []
    for sample in samples:
        expected = float_output(sample["x"].tobytes())
        values.append(1.0 - relative_error(expected, run(model, sample)[0]))
    return float(np.mean(values))


@functools.cache
def float_output(image: bytes) -> np.ndarray:
    sample = {"x": np.frombuffer(image, np.float32).reshape(DATA[0]["x"].shape)}
    return run(branchy(), sample)[0].astype(np.float64)
