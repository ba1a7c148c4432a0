"""Each finding code is made in one place: by the checks of the model, or of what the simulation refused."""

import ast
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.explain import codes, compiler
from qdqtool.explain.api import FAULTS
from qdqtool.fixing.api import fix
from qdqtool.prediction import predict
from qdqtool.trt.pipeline import cases
from qdqtool.trt.rtx.operands import IntegersLost
from qdqtool.trt.targets import TARGETS
from qdqtool.types import Evidence, FindingCode, Severity
from tests.explain.graphs import GRAPHS as OF_REFUSALS
from tests.trt.builder import Graph
from tests.trt.rtx.record import models as experiments
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


@functools.cache
def producers() -> dict[str, set[str]]:
    """The codes that each module makes; one that only collects findings has none of its own."""
    paths = {p.relative_to(PACKAGE).as_posix(): p for p in PACKAGE.rglob("*.py")}
    found = {name: codes_made(path) for name, path in paths.items() if name != "explain/report.py"}
    return {name: made for name, made in found.items() if made}


OF_SIMULATION = {True: {"explain/compiler.py"}, False: {"explain/outputs.py"}}  # TensorRT-RTX's


@pytest.mark.parametrize("target", TARGETS)
def test_each_code_has_one_producer(target: str) -> None:
    """And what is made for a target is what the table of codes says holds there."""
    is_rtx = TARGETS[target].is_rtx
    found: dict[str, list[str]] = defaultdict(list)
    for name, made in producers().items():
        if name in OF_SIMULATION[not is_rtx]:
            continue
        left_out = compiler.CODES if is_rtx and name.startswith("explain/lint/") else frozenset()
        for code in made - left_out:
            if codes.get(code).on(target) is not None:
                found[code].append(name)
    assert {code: names for code, names in found.items() if len(names) > 1} == {}
    assert set(found) == {c.code for c in codes.CODES.values() if c.on(target) is not None}
    assert found["W-AXIS"] == ["explain/compiler.py" if is_rtx else "explain/lint/weights.py"]


def test_every_code_is_made_and_no_place_hides_another() -> None:
    made = producers()
    assert set().union(*made.values()) == CODES
    assert made["explain/compiler.py"] == compiler.CODES
    # Only what reads a scale of shape [1] as a convolution pays for it, however many do, and one step mends all
    for readers in (("Conv",), ("Softmax",), ("Softmax", "Conv"), ("Conv", "Softmax", "Conv")):
        model = of_shape_1(*readers)
        found = {f.node: f.convolutions for f in predict(model, "rtx1.7").findings if f.code == "SCALE-SHAPE1"}
        assert found == {f"p{i}.Q": [f"c{i}"] for i, op in enumerate(readers) if op == "Conv"}
        fixed = fix(model, "rtx1.7", ["SCALE-SHAPE1"])
        assert [c.node for c in fixed.applied] == list(found)
        assert not fix(fixed.proto, "rtx1.7", ["SCALE-SHAPE1"]).applied
        assert fixed.after.summary()["int8"] == readers.count("Conv")


def computed(g: Graph, x: str) -> str:
    scale = g.op("ReduceMax", g.op("Abs", x, "abs"), "max", keepdims=0)
    g.const("zero", np.int8(0))
    return g.op("DequantizeLinear", [g.op("QuantizeLinear", [x, scale, "zero"], "p.Q"), scale, "zero"], "p.DQ")


def by_hand(g: Graph, x: str) -> str:
    """A scale and a zero point that a node makes of constants, which the simulation does not compute."""
    names = [g.op("Identity", g.const(f"{part}0", value), part) for part, value in
             (("scale", np.float32(0.1)), ("zero", np.int8(0)))]
    return g.op("DequantizeLinear", [g.op("QuantizeLinear", [x, *names], "p.Q"), *names], "p.DQ")


def of_int32(g: Graph, x: str) -> str:
    return g.pair(x, "p", integer=np.int32)


PAIRS: list[tuple[Callable[[Graph, str], str], str]] = [
    (lambda g, x: g.pair(x, "p", zero=3), "ZP-NONZERO"), (computed, "SCALE-DYNAMIC"), (by_hand, "SCALE-DYNAMIC"),
    (lambda g, x: g.pair(x, "p", integer=np.int16), "QTYPE"), (of_int32, "QTYPE"),
    (lambda g, x: g.pair(x, "p", np.full(16, 0.1), axis=1), "ACT-PER-CHANNEL"),
]


ON_RTX = {computed: "BUILD-CRASHES", by_hand: "", of_int32: ""}  # whose compiler folds constants and reads int8


@pytest.mark.parametrize("target", ["trt8.5", "rtx1.7"])
@pytest.mark.parametrize(("pair", "code"), PAIRS)
def test_a_fault_of_a_quantizer_is_told_once(pair: Callable[[Graph, str], str], code: str, target: str) -> None:
    """Also where its DQ moves down to the convolution, past a pooling."""
    for pooled in (False, True):
        g = Graph(opset=21)
        x = pair(g, g.input(1, 16, 8, 8))
        x = g.pool(x, "pool") if pooled and code != "ACT-PER-CHANNEL" else x
        g.channels[x] = 16
        prediction = predict(g.model(g.conv(x, "c", 16, scale=None)), target)
        expected = ON_RTX.get(pair, code) if target == "rtx1.7" else code
        if not expected:
            assert prediction.convolution("c").is_int8 and not prediction.convolution("c").findings
            continue
        (told,) = (f for f in prediction.findings if f.code == expected)
        assert told.node == "p.Q" and told.convolutions == ["c"]
        assert told.id in prediction.convolution("c").findings
        kinds = {type(r) for r in prediction.refusals if r.node == "c"}
        assert kinds <= ({IntegersLost} if target == "rtx1.7" else FAULTS.keys())


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


@pytest.mark.parametrize(("case", "place", "others"), [
    ("VanillaSwapWithPreceedingDQ/several-readers", "a.DQ", {"a.Q"}), ("Pad/q-past-copying-pad", "p.Q", {"p.DQ"}),
])
def test_a_conversion_is_proven_as_well_as_the_cases_behind_it(case: str, place: str, others: set[str]) -> None:
    assert cases()[case].evidence == Evidence.ASSUMED
    found = {f.node: f.evidence for f in predict(model_of(case), "trt8.5").findings if f.code == "CONVERSION"}
    assert found == {place: Evidence.ASSUMED, **dict.fromkeys(others, Evidence.SEEN)}


# TensorRT-RTX ---------------------------------------------------------------------------------------------------------


def integers() -> onnx.ModelProto:
    g = Graph()
    g.const("zero", np.uint8(0))
    return g.model(g.op("DequantizeLinear", g.ops("DynamicQuantizeLinear", [g.input(1, 8)], "d", 3), "dq"))


def of_shape_1(*readers: str) -> onnx.ModelProto:
    """A pair with a scale of shape [1] for each reader: a convolution or a Softmax."""
    g = Graph()
    x = g.input(1, 16, 8, 8)
    outputs = []
    for i, op in enumerate(readers):
        y = g.pair(x, f"p{i}", np.full(1, 0.1 + i))
        outputs.append(g.conv(y, f"c{i}", 16, scale=None) if op == "Conv" else g.op(op, y, f"s{i}"))
    return g.model(*outputs)


def on_rtx() -> Iterator[onnx.ModelProto]:
    yield from (*experiments().values(), integers(), of_shape_1("Conv", "Softmax"))
    yield from (make() for make in OF_REFUSALS.values())
    yield from map(model_of, OF_CASES)


def test_what_holds_on_rtx_is_told_and_once_for_a_pair() -> None:
    told: set[str] = set()
    for model in on_rtx():
        prediction = predict(model, "rtx1.7")
        made = {n.output[0]: n for n in model.graph.node if n.op_type == "QuantizeLinear"}
        q_of = {n.name: made[n.input[0]].name for n in model.graph.node
                if n.op_type == "DequantizeLinear" and n.input[0] in made}
        places = [(f.code, q_of.get(f.node, f.node)) for f in prediction.findings]
        assert len(places) == len(set(places)), places
        told |= {f.code for f in prediction.findings if f.severity == Severity.ERROR}
    assert told == {c.code for c in codes.CODES.values() if c.on("rtx1.7") and c.severity_on("rtx1.7") == "error"}
