"""Each finding code is made in one place: by the checks of the model, or of what the simulation refused."""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.explain import compiler
from qdqtool.explain.inputs import FAULTS
from qdqtool.prediction import predict
from qdqtool.types import FindingCode
from tests.explain.graphs import GRAPHS as OF_REFUSALS
from tests.trt.builder import Graph
from tests.trt.test_cases import GRAPHS as OF_CASES
from tests.trt.test_cases import model_of

PACKAGE = Path(qdqtool.__file__).parent
CODES = frozenset(get_args(FindingCode))
MAKES = ("report.add", "Diagnosis", "Finding")  # calls of which findings come


def codes_made(path: Path) -> set[str]:
    """The codes that a module makes findings of: all that it names, but for those that it compares or looks for."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    if not any(isinstance(n, ast.Call) and ast.unparse(n.func).endswith(MAKES) for n in nodes):
        return set()
    other = [n for n in nodes if isinstance(n, ast.Compare)
             or (isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "FAULTS")]
    skipped = {id(part) for n in other for part in ast.walk(n)}
    return {n.value for n in nodes if isinstance(n, ast.Constant) and n.value in CODES and id(n) not in skipped}


def test_each_code_has_one_producer() -> None:
    """TensorRT-RTX, which no other target shares anything with, has a simulation and a producer of its own."""
    of_rtx = Path(str(compiler.__file__))
    collector = PACKAGE / "explain" / "report.py"
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if path not in (of_rtx, collector):
            for code in codes_made(path):
                found[code].append(path.relative_to(PACKAGE).as_posix())
    assert {code: paths for code, paths in found.items() if len(paths) > 1} == {}
    assert set(found) | codes_made(of_rtx) == CODES
    assert found["W-AXIS"] == ["lint/weights.py"] and found["W-NO-DQ"] == ["explain/inputs.py"]


def computed(g: Graph, x: str) -> str:
    scale = g.op("ReduceMax", g.op("Abs", x, "abs"), "max", keepdims=0)
    g.const("zero", np.int8(0))
    return g.op("DequantizeLinear", [g.op("QuantizeLinear", [x, scale, "zero"], "p.Q"), scale, "zero"], "p.DQ")


def by_hand(g: Graph, x: str) -> str:
    """A scale and a zero point that a node makes of constants, which the simulation does not compute."""
    names = [g.op("Identity", g.const(f"{part}0", value), part) for part, value in
             (("scale", np.float32(0.1)), ("zero", np.int8(0)))]
    return g.op("DequantizeLinear", [g.op("QuantizeLinear", [x, *names], "p.Q"), *names], "p.DQ")


PAIRS: list[tuple[Callable[[Graph, str], str], str]] = [
    (lambda g, x: g.pair(x, "p", zero=3), "ZP-NONZERO"), (computed, "SCALE-DYNAMIC"), (by_hand, "SCALE-DYNAMIC"),
    (lambda g, x: g.pair(x, "p", integer=np.int16), "QTYPE"), (lambda g, x: g.pair(x, "p", integer=np.int32), "QTYPE"),
    (lambda g, x: g.pair(x, "p", np.full(16, 0.1), axis=1), "ACT-PER-CHANNEL"),
]


@pytest.mark.parametrize(("pair", "code"), PAIRS)
def test_a_fault_of_a_quantizer_is_told_once(pair: Callable[[Graph, str], str], code: str) -> None:
    """Also where its DQ moves down to the convolution, past a pooling."""
    for pooled in (False, True):
        g = Graph(opset=21)
        x = pair(g, g.input(1, 16, 8, 8))
        x = g.pool(x, "pool") if pooled and code != "ACT-PER-CHANNEL" else x
        g.channels[x] = 16
        prediction = predict(g.model(g.conv(x, "c", 16, scale=None)), "trt8.5")
        (told,) = (f for f in prediction.findings if f.code == code)
        assert told.node == "p.Q" and told.convolutions == ["c"]
        assert told.id in prediction.convolution("c").findings
        assert {type(r) for r in prediction.refusals if r.node == "c"} <= FAULTS.keys()


def models() -> Iterator[onnx.ModelProto]:
    yield from (make() for make in OF_REFUSALS.values())
    yield from map(model_of, OF_CASES)


@pytest.mark.parametrize("target", ["trt8.5", "trt10", "trt11"])
def test_the_checks_find_each_fault_that_keeps_a_layer_from_int8(target: str) -> None:
    seen = set()
    for model in models():
        prediction = predict(model, target)
        for conv in prediction.convolutions:
            told = {f.code for f in prediction.findings if f.id in conv.findings}
            for refusal in prediction.refusals:
                if refusal.node == conv.name and not conv.is_int8 and type(refusal) in FAULTS:
                    seen.add(type(refusal))
                    assert told.intersection(FAULTS[type(refusal)]), (conv.name, refusal)
    assert len(seen) >= len(FAULTS) - 1  # types of floats differ from 10 on alone
