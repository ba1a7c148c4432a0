"""The published builds that the simulator answers to: graphs and truth tables of tests/data/evidence."""

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from qdqtool.model.slim import without_large_weights
from qdqtool.prediction import predict
from qdqtool.trt import pipeline, trace
from qdqtool.trt.network import Network
from qdqtool.trt.pipeline import Run
from qdqtool.trt.targets import Target
from qdqtool.types import Event, Prediction

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
"""The large ones last, and one of two builds of the same network."""
WITH_TRACE = sorted(p.parent.name for p in HOME.glob("*/trace.json.gz"))


def truth(case: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((HOME / case / "truth.json").read_text())
    return loaded


def built_trace(case: str) -> list[Event]:
    with gzip.open(HOME / case / "trace.json.gz", "rt") as file:
        return [Event(*row) for row in json.load(file)]


@functools.lru_cache(3)
def model(case: str) -> Model:
    """The graph that was built; nobody changes it."""
    return load(HOME / case / "model.onnx.gz")


@functools.cache
def graph(case: str) -> Model:
    """The same without the megabytes of zeros that its weights are, of which the simulation reads none."""
    return Model(without_large_weights(model(case).proto, 1 << 16))


#: Ids of the cases that a simulation rests on; the passes with the kinds of those of their lines that do not name them.
Rests = tuple[set[str], set[tuple[str, str]]]


def rests(network: Network, run: Run) -> Rests:
    """Cases of its lines and those of its layers."""
    ids = {event.case for event in run.trace}
    unnamed = {
        (event.pass_name or event.case.partition("/")[0], event.kind)
        for event in run.trace
        if trace.FORMATS[event.kind].scope != "printed"
    }
    return ids | {
        pipeline.id_of(case) for layer in network.layers.values() for case in layer.cases
    }, unnamed


@functools.cache
def simulated(case: str) -> tuple[Prediction, Rests]:
    """Both of one simulation."""
    found: list[Rests] = []
    real = pipeline.run

    def run(network: Network, target: Target) -> Run:
        done = real(network, target)
        found.append(rests(network, done))
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "run", run)
        predicted = predict(graph(case), target=truth(case)["target"], advice=False)
    return predicted, found[0]


@functools.cache
def advised(case: str, target: str) -> Prediction:
    """With findings; nobody changes it."""
    return predict(model(case), target)


def prediction(case: str) -> Prediction:
    return simulated(case)[0]
