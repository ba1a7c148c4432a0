"""Each finding code is made in one place: by a check of the model, or of what the simulation refused."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest

from qdqtool.explain.report import Report
from qdqtool.model.modelfile import load
from qdqtool.prediction import predict
from qdqtool.trt.faults import CHECK
from qdqtool.types import Cause, FindingCode, Refusal
from tests.explain.graphs import GRAPHS as OF_REFUSALS
from tests.trt.builder import Graph
from tests.trt.evidence import HOME, QUICK_FIRST
from tests.trt.test_cases import GRAPHS as OF_CASES
from tests.trt.test_cases import model_of


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[FindingCode, set[bool]]:
    """Code to whether checks of the model made findings of it, and whether the simulation's refusals did."""
    found: dict[FindingCode, set[bool]] = defaultdict(set)
    add = Report.add

    def noted(self: Report, code: FindingCode, cause: Cause | Refusal, *values: Any, **named: Any) -> bool:
        refusal = cause.refusal if isinstance(cause, Cause) else cause
        held = add(self, code, cause, *values, **named)
        if held:
            found[code].add(refusal.pass_name == CHECK)
        return held

    monkeypatch.setattr(Report, "add", noted)
    return found


def networks() -> Iterator[onnx.ModelProto]:
    yield from (load(HOME / case / "model.onnx.gz").proto for case in QUICK_FIRST[:3])
    yield from (make() for make in OF_REFUSALS.values())
    yield from map(model_of, OF_CASES)


@pytest.mark.parametrize("target", ["trt8.5", "trt10", "trt11"])
def test_each_code_has_one_producer(made: dict[FindingCode, set[bool]], target: str) -> None:
    for model in networks():
        predict(model, target)
    assert {code for code, checked in made.items() if len(checked) > 1} == set()
    assert made["W-NO-DQ"] == {False} and made["ZP-NONZERO"] == {True}


def computed(g: Graph, x: str) -> str:
    scale = g.op("ReduceMax", g.op("Abs", x, "abs"), "max", keepdims=0)
    g.const("zero", np.int8(0))
    return g.op("DequantizeLinear", [g.op("QuantizeLinear", [x, scale, "zero"], "p.Q"), scale, "zero"], "p.DQ")


@pytest.mark.parametrize(("pair", "code"), [
    (lambda g, x: g.pair(x, "p", zero=3), "ZP-NONZERO"), (computed, "SCALE-DYNAMIC"),
    (lambda g, x: g.pair(x, "p", integer=np.int16), "QTYPE"),
])
def test_a_fault_of_a_quantizer_is_told_once(pair: Callable[[Graph, str], str], code: str) -> None:
    """Also where its DQ moves down to the convolution, past a pooling."""
    for pooled in (False, True):
        g = Graph(opset=21)
        x = pair(g, g.input(1, 16, 8, 8))
        x = g.pool(x, "pool") if pooled else x
        g.channels[x] = 16
        prediction = predict(g.model(g.conv(x, "c", 16, scale=None)), "trt8.5")
        (told,) = (f for f in prediction.findings if f.code == code)
        assert told.node == "p.Q" and told.convolutions == ["c"]
        assert told.id in prediction.convolution("c").findings
