"""The code of a finding is that of the refusal that it reports, whoever found it: a check of the model or a pass."""

import ast
import functools
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.base.records import nearest
from qdqtool.explain import coded, codes, compiler, left_float, messages
from qdqtool.explain.api import FAULTS
from qdqtool.explain.lint import operators, quantizers, weights
from qdqtool.fixing.api import fix
from qdqtool.model.graph import Model
from qdqtool.model.view import View
from qdqtool.prediction import predict
from qdqtool.trt import detect, surroundings
from qdqtool.trt import refusals as trt
from qdqtool.trt.passes import quantize_double_input_nodes
from qdqtool.trt.pipeline import cases
from qdqtool.trt.rtx import operands
from qdqtool.trt.rtx import predict as rtx_predict
from qdqtool.trt.rtx.operands import IntegersLost
from qdqtool.types import Evidence, FindingCode, Prediction, Refusal
from tests.explain.graphs import GRAPHS as OF_REFUSALS
from tests.slow import slow_after
from tests.sources import nodes_of, walked
from tests.trt.builder import Graph
from tests.trt.test_cases import GRAPHS as OF_CASES
from tests.trt.test_cases import model_of

PACKAGE = Path(qdqtool.__file__).parent
CODES = frozenset(get_args(FindingCode))
MAKES = ("report.add", "Report.add", "Diagnosis", "Finding")  # calls of which findings come
LAST = ("add", "Diagnosis", "Finding", "code_of")
CALLED = re.compile(r"(eport\.add|Diagnosis|Finding|code_of)\(")


def test_no_place_gives_a_finding_its_code_but_one() -> None:
    """What is reported is a refusal: its class and values decide, in ``explain/coded.py`` alone."""
    texts = {
        p.relative_to(PACKAGE).as_posix(): p.read_text(encoding="utf-8")
        for p in PACKAGE.rglob("*.py")
    }
    sources = {path: text for path, text in texts.items() if CALLED.search(text)}
    assert len(texts) > 200 and 10 < len(sources) < 100
    makers = set()
    for path, text in sources.items():
        calls = [
            (ast.unparse(n.func), n)
            for n in walked(ast.parse(text))
            if isinstance(n, ast.Call)
            and getattr(n.func, "attr", getattr(n.func, "id", "")).endswith(LAST)
        ]
        given = [
            a.value
            for name, call in calls
            if name.endswith(MAKES)
            for a in ast.walk(call)
            if isinstance(a, ast.Constant) and a.value in CODES
        ]
        assert given == [], path
        makers |= {path for name, _ in calls if name in ("code_of", "Finding")}
    assert makers <= {f"explain/{name}.py" for name in ("coded", "report", "compiler")}


# What is looked for in several places, in ways that have nothing in common.
LOOKED_FOR_APART = {
    trt.InputNotDequantized: "by TensorRT's optimizer, whose DQs move, and by TensorRT-RTX's, which follows integers",
    trt.WeightsNotDequantized: "by the same two",
    trt.ActivationBeforeAdd: "by the pass that joins them to one kernel, and by the one that would take the Add in",
}


def test_what_a_finding_reports_is_looked_for_in_one_place() -> None:
    """Checks, passes, TensorRT-RTX and placements ask the same function: a second one would find other faults."""
    places = defaultdict(set)
    named_there = re.compile(rf"\b(?:{'|'.join(kind.__name__ for kind in coded.MADE)})\b")
    for path in (
        p for p in PACKAGE.rglob("*.py") if named_there.search(p.read_text(encoding="utf-8"))
    ):
        tree = nodes_of(path)
        named = {
            a.asname: a.name
            for n in tree
            if isinstance(n, ast.ImportFrom)
            for a in n.names
            if a.asname
        }
        for called in (c for node in tree for c in callables(node)):
            name = getattr(called, "attr", getattr(called, "id", ""))
            places[named.get(name, name)].add(path.relative_to(PACKAGE).as_posix())
    several = {kind for kind in coded.MADE if len(places[kind.__name__]) != 1}
    assert several == LOOKED_FOR_APART.keys(), [
        (k.__name__, sorted(places[k.__name__])) for k in several
    ]


def callables(node: ast.AST) -> Iterator[ast.expr]:
    """What is called, or gets another name by which it may be: a variable, a default, in ``partial`` or ``map``."""
    given: list[ast.expr | None] = []
    if isinstance(node, ast.Call):
        yield node.func
        handed = getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "partial",
            "map",
            "starmap",
        )
        given += node.args[:1] if handed else []
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.Return):
        given.append(node.value)
    elif isinstance(node, ast.arguments):
        given += [*node.defaults, *node.kw_defaults]
    for value in given:
        yield from (
            (value.body, value.orelse) if isinstance(value, ast.IfExp) else filter(None, [value])
        )


def test_what_may_be_called() -> None:
    made = [
        "made = trt.Stays",
        "made = trt.Stays if x else None",
        "partial(Stays, x)",
        "map(Stays, x)",
        "Stays(x)",
        "def f(made=trt.Stays): ...",
        "(made := trt.Stays)(x)",
        "def f(): return Stays",
    ]
    kept = [
        "isinstance(x, trt.Stays)",
        "KINDS = (trt.Stays, trt.ResidualFloat)",
        "x: trt.Stays",
        "found[trt.Stays]",
    ]
    for source in (*made, *kept):
        called = [c for n in walked(ast.parse(source)) for c in callables(n)]
        assert ("Stays" in {getattr(c, "attr", getattr(c, "id", "")) for c in called}) is (
            source in made
        ), source


# What no finding reports of itself, and no placement: what it explains, or who reports it.
NOT_REPORTED = {
    trt.TypesDiffer: "the fault of a quantizer (FAULTS), which the checks report by its type",
    trt.OutsideRules: "as well",
    trt.NotCommuting: "why a Q stays where it is, told with the conversion (Stays) or the float result behind it",
    trt.ManyConsumers: "as well",
    trt.ConcatReadElsewhere: "as well",
}


def test_each_refusal_is_reported_or_said_why_not() -> None:
    kinds = {kind for kind in every(Refusal) if kind.__module__.startswith("qdqtool.")}
    assert kinds - coded.MADE.keys() - left_float.WORDS.keys() == NOT_REPORTED.keys()
    assert all(nearest(coded.MADE, kind) is None for kind in NOT_REPORTED)
    assert {trt.TypesDiffer, trt.OutsideRules} == {
        kind for kind in FAULTS if not coded.codes_of(kind)
    }


def made_in(module: ModuleType, *names: str) -> set[type[Refusal]]:
    """The classes of refusals that functions of a module make, or ask of ``detect``; of all where none is named."""
    body = ast.parse(inspect.getsource(module)).body
    found = set()
    for node in (
        n for f in body if not names or getattr(f, "name", "") in names for n in walked(f)
    ):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            asked = getattr(detect, name, None)
            if inspect.isfunction(asked) and asked.__module__ == detect.__name__:
                text = ast.unparse(ast.parse(inspect.getsource(asked)).body[0].returns)
                name = re.search(r"(\w+)(?: \| None|\])?$", text)[1]
            found |= {kind for kind in every(Refusal) if kind.__name__ == name}
    return found


@pytest.mark.parametrize("room", sorted({*messages._ROOMS.values()} - {messages.__name__}))
def test_each_room_words_the_classes_it_is_asked_for(
    room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first finding of a process loads that room alone."""
    module = importlib.import_module(room)
    monkeypatch.setattr(messages, "_WORDINGS", {})
    importlib.reload(module)
    asked = {kind for kind in coded.MADE if messages._ROOMS[kind.__module__] == room}
    assert asked - messages._WORDINGS.keys() <= {
        trt.ScalesDiffer
    }  # which is reported as what it keeps apart


def test_what_keeps_a_layer_from_int8_is_reported_or_a_fault_that_the_checks_report() -> None:
    made = made_in(surroundings, "refusal_of", "_of_quantizers") | made_in(
        quantize_double_input_nodes
    )
    assert made == {trt.OutputScale, trt.InputNotDequantized, trt.WeightsNotDequantized, *FAULTS}
    asked = made_in(operators) | made_in(quantizers) | made_in(weights)
    assert {kind for kind in FAULTS if coded.codes_of(kind)} <= asked
    of_checks = {code for kind in asked for code in coded.codes_of(kind)}
    assert of_checks.issuperset(code for others in FAULTS.values() for code in others)


def test_the_checks_leave_out_what_tensorrt_rtx_looks_for() -> None:
    assert made_in(rtx_predict) | made_in(operands) == set(compiler.REFUSALS)


def test_each_code_has_a_refusal_and_each_refusal_words() -> None:
    assert {made.code for kinds in coded.MADE.values() for made in kinds} == CODES
    kinds = set(every(Refusal))
    for kind, made in coded.MADE.items():
        assert kind in kinds
        assert [m.when is None for m in made] == [False] * (len(made) - 1) + [
            True
        ]  # the last holds always
    of_compiler = {c.code for c in codes.CODES.values() if c.on("rtx1.7") is not None}
    assert {"BUILD-FAILS", "IN-BLOCKED", "SCALE-SHAPE1"} <= compiler.CODES <= of_compiler


def every(kind: type[Refusal]) -> Iterator[type[Refusal]]:
    for below in kind.__subclasses__():
        yield below
        yield from every(below)


def test_a_scale_of_shape_1_is_told_where_a_convolution_pays_for_it() -> None:
    """However many do, and one step mends all."""
    for readers in (("Conv",), ("Softmax",), ("Softmax", "Conv"), ("Conv", "Softmax", "Conv")):
        model = of_shape_1(*readers)
        found = {
            f.node: f.convolutions
            for f in predict(model, "rtx1.7").findings
            if f.code == "SCALE-SHAPE1"
        }
        assert found == {f"p{i}.Q": [f"c{i}"] for i, op in enumerate(readers) if op == "Conv"}
        fixed = fix(model, "rtx1.7", ["SCALE-SHAPE1"])
        assert [c.node for c in fixed.applied] == list(found)
        assert not fix(fixed.proto, "rtx1.7", ["SCALE-SHAPE1"]).applied
        assert fixed.after.summary()["int8"] == readers.count("Conv")


def computed(g: Graph, x: str) -> str:
    scale = g.op("ReduceMax", g.op("Abs", x, "abs"), "max", keepdims=0)
    g.const("zero", np.int8(0))
    return g.op(
        "DequantizeLinear",
        [g.op("QuantizeLinear", [x, scale, "zero"], "p.Q"), scale, "zero"],
        "p.DQ",
    )


def by_hand(g: Graph, x: str) -> str:
    """A scale and a zero point that a node makes of constants, which the simulation does not compute."""
    names = [
        g.op("Identity", g.const(f"{part}0", value), part)
        for part, value in (("scale", np.float32(0.1)), ("zero", np.int8(0)))
    ]
    return g.op("DequantizeLinear", [g.op("QuantizeLinear", [x, *names], "p.Q"), *names], "p.DQ")


def of_int32(g: Graph, x: str) -> str:
    return g.pair(x, "p", integer=np.int32)


PAIRS: list[tuple[Callable[[Graph, str], str], str]] = [
    (lambda g, x: g.pair(x, "p", zero=3), "ZP-NONZERO"),
    (computed, "SCALE-DYNAMIC"),
    (by_hand, "SCALE-DYNAMIC"),
    (lambda g, x: g.pair(x, "p", integer=np.int16), "QTYPE"),
    (of_int32, "QTYPE"),
    (lambda g, x: g.pair(x, "p", np.full(16, 0.1), axis=1), "ACT-PER-CHANNEL"),
]


ON_RTX = {
    computed: "BUILD-CRASHES",
    by_hand: "",
    of_int32: "",
}  # whose compiler folds constants and reads int8


@pytest.mark.parametrize("target", ["trt8.5", "rtx1.7"])
@pytest.mark.parametrize(("pair", "code"), PAIRS)
def test_a_fault_of_a_quantizer_is_told_once(
    pair: Callable[[Graph, str], str], code: str, target: str
) -> None:
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


def on_a_wrong_axis(code: str) -> onnx.ModelProto:
    """Weights [8, 16, 3, 3] quantized along their inputs, and another fault that the checks come to first."""
    g = Graph(opset=12 if code == "OPSET-AXIS" else 21)
    stored = code == "WEIGHT-INDIRECT"
    w = g.const("w0", np.ones((8, 16, 3, 3), np.int8 if stored else np.float64))
    w = g.op("Transpose", w, "moved", perm=[0, 1, 2, 3]) if stored else w
    w = g.op("Abs", w, "computed") if code == "W-NONCONST" else w
    scale = np.full(
        {"SCALE-COUNT": (7,), "SCALE-RANK": (7, 1), "OPSET-AXIS": (8,)}.get(code, (16,)), 0.01
    )
    axis = None if code == "OPSET-AXIS" else 1
    w = g.dq(w, "w.DQ", scale, axis) if stored else g.pair(w, "w", scale, axis)
    return g.model(g.op("Conv", [g.pair(g.input(1, 16, 8, 8), "p"), w], "c", pads=[1] * 4))


@pytest.mark.parametrize(
    "code", ["W-AXIS", "OPSET-AXIS", "SCALE-COUNT", "SCALE-RANK", "W-NONCONST", "WEIGHT-INDIRECT"]
)
def test_a_conversion_names_the_fault_that_keeps_its_convolution_float(code: str) -> None:
    prediction = predict(on_a_wrong_axis(code), "trt8.5")
    assert [type(r) for r in prediction.refusals if r.node == "c"] == [trt.WeightsAxis]
    assert {"W-AXIS", code}.intersection(f.code for f in prediction.findings) == {code}
    (stays,) = (f for f in prediction.findings if f.code == "CONVERSION" and f.node == "p.DQ")
    assert [told for told, _ in stays.causes[0].see] == [code]


@functools.cache
def models() -> list[onnx.ModelProto]:
    """The graphs of all refusals and cases; nobody changes them."""
    return [*(make() for make in OF_REFUSALS.values()), *map(model_of, OF_CASES)]


@functools.cache
def views() -> list[View]:
    """The same as steps of ``fix`` read them."""
    return [View(Model(proto)) for proto in models()]


@functools.cache
def prediction(place: int, target: str) -> Prediction:
    """Of one of them."""
    return predict(models()[place], target)


def predictions(target: str) -> list[Prediction]:
    return [prediction(place, target) for place in range(len(models()))]


@pytest.mark.parametrize("target", slow_after(1, ["trt8.5", "trt11", "trt10"]))
def test_the_checks_find_each_fault_that_keeps_a_layer_from_int8(target: str) -> None:
    seen = set()
    for found in predictions(target):
        for conv in found.convolutions:
            told = {f.code for f in found.findings if f.id in conv.findings}
            for refusal in found.refusals:
                if refusal.node == conv.name and not conv.is_int8 and type(refusal) in FAULTS:
                    seen.add(type(refusal))
                    codes = (*coded.codes_of(type(refusal)), *FAULTS[type(refusal)])
                    assert told.intersection(codes), (conv.name, refusal)
    assert len(seen) >= len(FAULTS) - 1  # types of floats differ from 10 on alone


@pytest.mark.parametrize(
    ("case", "place", "others"),
    [
        ("VanillaSwapWithPreceedingDQ/several-readers", "a.DQ", {"a.Q"}),
        ("Pad/q-past-copying-pad", "p.Q", {"p.DQ"}),
    ],
)
def test_a_conversion_is_proven_as_well_as_the_cases_behind_it(
    case: str, place: str, others: set[str]
) -> None:
    assert cases()[case].evidence == Evidence.ASSUMED
    found = {
        f.node: f.evidence
        for f in predict(model_of(case), "trt8.5").findings
        if f.code == "CONVERSION"
    }
    assert found == {place: Evidence.ASSUMED, **dict.fromkeys(others, Evidence.SEEN)}


# TensorRT-RTX ---------------------------------------------------------------------------------------------------------


def of_shape_1(*readers: str) -> onnx.ModelProto:
    """A pair with a scale of shape [1] for each reader: a convolution or a Softmax."""
    g = Graph()
    x = g.input(1, 16, 8, 8)
    outputs = []
    for i, op in enumerate(readers):
        y = g.pair(x, f"p{i}", np.full(1, 0.1 + i))
        outputs.append(g.conv(y, f"c{i}", 16, scale=None) if op == "Conv" else g.op(op, y, f"s{i}"))
    return g.model(*outputs)
