"""Published builds for comparison with the simulator.

Their graphs and truth tables are in tests/data/evidence.
"""

import functools
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import load
from qdqtool.prediction import predict
from qdqtool.proto.slim import strip_large_weights
from qdqtool.trt import importer, pipeline
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import target_named
from qdqtool.trt.trace import FORMATS, Event

HOME = Path(__file__).parents[1] / "data" / "evidence"
CASES = sorted(p.parent.name for p in HOME.glob("*/truth.json"))
LARGE = {
    "bevfusion-camera-rtx3080ti-trt8600",
    "bevfusion-camera-orin-trt8502",
    "centernet-resnet34-qat-trt80",
}
DIFFERENT = [
    c for c in sorted(CASES, key=LARGE.__contains__) if c != "bevfusion-camera-orin-trt8502"
]
"""Large networks come last. Of two builds of one network only one is here."""
WITH_TRACE = sorted(p.parent.name for p in HOME.glob("*/trace.json.gz"))


def truth(case: str) -> dict[str, Any]:
    return dict(json.loads((HOME / case / "truth.json").read_text()))


def built_trace(case: str) -> list[Event]:
    with gzip.open(HOME / case / "trace.json.gz", "rt") as file:
        return [Event(*row) for row in json.load(file)]


@functools.lru_cache(3)
def model(case: str) -> Model:
    """Return the graph that was built. Callers must not change it."""
    return load(HOME / case / "model.onnx.gz")


@functools.cache
def graph(case: str) -> Model:
    return Model(strip_large_weights(model(case).proto, 1 << 16))


@dataclass(frozen=True)
class Basis:
    """Cases that a simulation rests on.

    Attributes:
        cases: Ids of the cases of its lines and its layers.
        unnamed_lines: (pass, kind) of the lines that do not name their pass.
    """

    cases: frozenset[str]
    unnamed_lines: frozenset[tuple[str, str]]


def simulate(model: Model, target: str) -> Basis:
    network = importer.build(model)
    events = pipeline.run(network, target_named(target)).trace
    cases = {event.case for event in events}
    cases |= {pipeline.case_id(case) for layer in network.layers.values() for case in layer.cases}
    unnamed_lines = {
        (event.pass_name or event.case.partition("/")[0], event.kind)
        for event in events
        if FORMATS[event.kind].scope != "printed"
    }
    return Basis(frozenset(cases), frozenset(unnamed_lines))


@functools.cache
def simulated(case: str) -> Basis:
    return simulate(graph(case), truth(case)["target"])


@functools.cache
def prediction(case: str) -> Prediction:
    return predict(graph(case), target=truth(case)["target"], advice=False)


@functools.cache
def advised(case: str, target: str) -> Prediction:
    """Return a prediction with findings. Callers must not change it."""
    return predict(model(case), target)
