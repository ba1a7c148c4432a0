"""Checks and passes record reasons.

The class of a reason declares the code of its finding.
"""

import ast
import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.evidence import Evidence
from qdqtool.findings import codes, compiler
from qdqtool.findings.api import MODEL_FAULTS
from qdqtool.findings.lint import operators, quantizers, weights
from qdqtool.findings.rules import finding_codes, reason_classes
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from qdqtool.reasons import fp8
from qdqtool.reasons.compiler import IntegersLost
from qdqtool.reasons.conversions import ConcatReadAsFloat, ManyConsumers, OperatorNotCommuting
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.fusions import ActivationBeforeAdd
from qdqtool.reasons.inputs import InputNotDequantized, OperandTypesDiffer
from qdqtool.reasons.outputs import UnfusableOutputScale
from qdqtool.reasons.quantizers import UncoveredOperandType
from qdqtool.reasons.weights import WeightsAxis, WeightsNotDequantized
from qdqtool.trt import fault_checks, neighbors
from qdqtool.trt.passes import quantize_double_input_nodes
from qdqtool.trt.pipeline import cases
from qdqtool.trt.rtx import compiler_faults, fp8_kernels, operands
from tests.findings.graphs import GRAPHS as OF_REASONS, computed
from tests.slow import slow_after
from tests.sources import nodes_of, walked
from tests.trt.builder import Graph
from tests.trt.test_cases import GRAPHS as OF_CASES, model_of

PACKAGE = Path(qdqtool.__file__).parent
CODES = frozenset(codes.CODES)
REPORTED = set(reason_classes())
CALL = re.compile(r"(eport\.add|Diagnosis|Finding|finding_code)\(")


def last_name(node: ast.AST | None) -> str:
    name: str = getattr(node, "attr", getattr(node, "id", ""))
    return name


def test_no_call_gives_a_finding_its_code() -> None:
    """The class of a reason declares the possible codes, and its values choose one.

    Code that finds a fault only reports the reason.
    """
    texts = {
        p.relative_to(PACKAGE).as_posix(): p.read_text(encoding="utf-8")
        for p in PACKAGE.rglob("*.py")
    }
    sources = {path: text for path, text in texts.items() if CALL.search(text)}
    assert len(texts) > 200 and 10 < len(sources) < 100
    callers = set()
    for path, text in sources.items():
        calls = [
            (ast.unparse(n.func), n)
            for n in walked(ast.parse(text))
            if isinstance(n, ast.Call)
            and last_name(n.func).endswith(("add", "Diagnosis", "Finding", "finding_code"))
        ]
        assert CODES.isdisjoint(
            [
                a.value
                for name, call in calls
                if name.endswith(("report.add", "Report.add", "Diagnosis", "Finding"))
                for a in ast.walk(call)
                if isinstance(a, ast.Constant)
            ]
        ), path
        callers |= {path for name, _ in calls if name in ("finding_code", "Finding")}
    assert callers <= {f"findings/{name}.py" for name in ("rules", "report", "compiler")}


# Reasons that several modules make by unrelated tests.
IN_SEVERAL_MODULES = {
    InputNotDequantized: "TensorRT's optimizer moves DQs, TensorRT-RTX's follows integers",
    WeightsNotDequantized: "like the input",
    ActivationBeforeAdd: "two passes: one joins both to a kernel, one would fuse the Add",
}


def test_reason_is_made_in_one_module() -> None:
    """Checks, passes, TensorRT-RTX and placements call one function.

    A second function could find other faults.
    """
    places = defaultdict(set)
    names = re.compile(rf"\b(?:{'|'.join(kind.__name__ for kind in REPORTED)})\b")
    for path in (p for p in PACKAGE.rglob("*.py") if names.search(p.read_text(encoding="utf-8"))):
        tree = nodes_of(path)
        imports = [a for n in tree if isinstance(n, ast.ImportFrom) for a in n.names if a.asname]
        original = {a.asname: a.name for a in imports}
        for name in (last_name(called) for node in tree for called in callables(node)):
            places[original.get(name, name)].add(path.relative_to(PACKAGE).as_posix())
    several = {kind: places[kind.__name__] for kind in REPORTED if len(places[kind.__name__]) != 1}
    assert several.keys() == IN_SEVERAL_MODULES.keys(), several


def callables(node: ast.AST) -> Iterator[ast.expr]:
    values: list[ast.expr | None] = []
    if isinstance(node, ast.Call):
        yield node.func
        values += node.args[:1] if last_name(node.func) in ("partial", "map", "starmap") else []
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.Return):
        values.append(node.value)
    elif isinstance(node, ast.arguments):
        values += [*node.defaults, *node.kw_defaults]
    for value in filter(None, values):
        yield from (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)


CALLED = [
    "alias = conversions.RemainingConversion",
    "alias = conversions.RemainingConversion if x else None",
    "partial(RemainingConversion, x)",
    "map(RemainingConversion, x)",
    "RemainingConversion(x)",
    "def f(make=conversions.RemainingConversion): ...",
    "(make := conversions.RemainingConversion)(x)",
    "def f(): return RemainingConversion",
]


@pytest.mark.parametrize(
    "source",
    [
        *CALLED,
        *[
            "isinstance(x, conversions.RemainingConversion)",
            "KINDS = (conversions.RemainingConversion, conversions.ResidualFloat)",
            "x: conversions.RemainingConversion",
            "reasons[conversions.RemainingConversion]",
        ],
    ],
)
def test_callables_are_those_of_the_source(source: str) -> None:
    names = {last_name(c) for n in walked(ast.parse(source)) for c in callables(n)}
    assert ("RemainingConversion" in names) is (source in CALLED)


# Reasons that neither a finding nor a placement reports.
NOT_REPORTED = {
    OperandTypesDiffer: "the fault of a quantizer (MODEL_FAULTS), which the checks report by its type",
    UncoveredOperandType: "like OperandTypesDiffer",
    OperatorNotCommuting: "why a Q stays; part of the conversion (RemainingConversion) or of the float result after it",
    ManyConsumers: "like OperatorNotCommuting",
    ConcatReadAsFloat: "like OperatorNotCommuting",
}


def test_reasons_are_reported_except_some() -> None:
    kinds = {kind for kind in every(Reason) if kind.__module__.startswith("qdqtool.")}
    placed = {kind for kind in kinds if kind.skip_reason is not Reason.skip_reason}
    assert kinds - REPORTED - placed == NOT_REPORTED.keys()
    assert not any(kind.rules for kind in NOT_REPORTED)
    without_code = {kind for kind in MODEL_FAULTS if not finding_codes(kind)}
    assert without_code == {OperandTypesDiffer, UncoveredOperandType}


def made_in(module: ModuleType, start: str = "") -> set[type[Reason]]:
    """Return the classes of reasons that a module makes, directly or through `fault_checks`.

    Args:
        start: Function to start at; only the functions that it calls count. Empty for all of the module.
    """
    body = ast.parse(inspect.getsource(module)).body
    functions = {f.name: f for f in body if isinstance(f, ast.FunctionDef)}
    todo: list[ast.stmt] = [functions[start]] if start else list(body)
    kinds = set()
    for statement in todo:
        for name in [last_name(n.func) for n in walked(statement) if isinstance(n, ast.Call)]:
            function = getattr(fault_checks, name, None)
            annotation = str(getattr(function, "__annotations__", {}).get("return", name))
            names = set(re.findall(r"\w+", annotation))
            kinds |= {kind for kind in every(Reason) if kind.__name__ in names}
            if start and name in functions and functions[name] not in todo:
                todo.append(functions[name])
    return kinds


def test_reasons_of_a_layer_are_reported_or_faults_of_the_model() -> None:
    of_layers = made_in(neighbors, "find_int8_obstacle") | made_in(quantize_double_input_nodes)
    reported = {
        UnfusableOutputScale,
        InputNotDequantized,
        WeightsNotDequantized,
        fp8.FloatFp8Deconvolution,
        fp8.EarlyFp8Convolution,
        fp8.LargeFp8Kernel,
        fp8.MixedOperands,
        fp8.OutputTypeDiffers,
    }
    assert of_layers == {*reported, *MODEL_FAULTS}
    of_checks = made_in(operators) | made_in(quantizers) | made_in(weights)
    assert {kind for kind in MODEL_FAULTS if finding_codes(kind)} <= of_checks
    codes = {code for kind in of_checks for code in finding_codes(kind)}
    assert codes.issuperset(code for others in MODEL_FAULTS.values() for code in others)


def test_reasons_of_tensorrt_rtx_are_left_to_its_simulation() -> None:
    made = made_in(compiler_faults) | made_in(operands) | made_in(fp8_kernels)
    assert made == set(compiler.REASONS)


def test_codes_have_refusals() -> None:
    assert {entry.code for kind in REPORTED for entry in kind.rules} == CODES
    assert set(every(Reason)) >= REPORTED


def test_last_code_of_a_refusal_has_no_condition() -> None:
    for kind in REPORTED:
        assert [rule.when for rule in kind.rules].index(None) == len(kind.rules) - 1


def test_codes_of_the_compiler_apply_to_tensorrt_rtx() -> None:
    on_rtx = {c.code for c in codes.CODES.values() if c.scope_on("rtx1.7") is not None}
    assert {"BUILD-FAILS", "IN-BLOCKED", "SCALE-SHAPE1"} <= compiler.CODES <= on_rtx


def every(kind: type[Reason]) -> Iterator[type[Reason]]:
    for below in kind.__subclasses__():
        yield below
        yield from every(below)


@pytest.mark.parametrize("readers", ["Conv", "Softmax", "Softmax Conv", "Conv Softmax Conv"])
def test_scale_of_shape_1_is_reported_and_fixed_at_convolutions(readers: str) -> None:
    ops = readers.split()
    model = of_shape_1(*ops)
    findings = [f for f in qdqtool.predict(model, "rtx1.7").findings if f.code == "SCALE-SHAPE1"]
    convolutions = {f.node: f.convolutions for f in findings}
    assert convolutions == {f"p{i}.Q": [f"c{i}"] for i, op in enumerate(ops) if op == "Conv"}
    fixed = qdqtool.fix(model, "rtx1.7", ["SCALE-SHAPE1"])
    assert [c.node for c in fixed.applied] == list(convolutions)
    assert not qdqtool.fix(fixed.proto, "rtx1.7", ["SCALE-SHAPE1"]).applied
    assert fixed.after.summary()["int8"] == ops.count("Conv")


def of_int32(g: Graph, x: str) -> str:
    return g.pair(x, "p", integer=np.int32)


# The compiler of TensorRT-RTX folds constants and reads INT8.
ON_RTX = {computed: "BUILD-CRASHES", of_int32: ""}


@pytest.mark.parametrize("pooled", [False, True], ids=["", "pooled"])
@pytest.mark.parametrize("target", ["trt8.5", "rtx1.7"])
@pytest.mark.parametrize(
    ("pair", "code"),
    [
        (lambda g, x: g.pair(x, "p", zero=3), "ZP-NONZERO"),
        (computed, "SCALE-DYNAMIC"),
        (lambda g, x: g.pair(x, "p", integer=np.int16), "QTYPE"),
        (of_int32, "QTYPE"),
        (lambda g, x: g.pair(x, "p", np.full(16, 0.1), axis=1), "ACT-PER-CHANNEL"),
    ],
)
def test_fault_of_a_quantizer_is_reported_once(
    pair: Callable[[Graph, str], str], code: str, target: str, pooled: bool
) -> None:
    """The DQ may move past a pooling to the convolution."""
    g = Graph(opset=21)
    x = pair(g, g.input(1, 16, 8, 8))
    x = g.pool(x, "pool") if pooled and code != "ACT-PER-CHANNEL" else x
    g.channels[x] = 16
    prediction = qdqtool.predict(g.model(g.conv(x, "c", 16, scale=None)), target)
    convolution = prediction.convolution("c")
    expected = ON_RTX.get(pair, code) if target == "rtx1.7" else code
    if not expected:
        assert convolution.is_int8 and not convolution.findings
        return
    (finding,) = (f for f in prediction.findings if f.code == expected)
    assert (finding.node, finding.convolutions) == ("p.Q", ["c"])
    assert finding.id in convolution.findings
    kinds = {type(r) for r in prediction.refusals if r.node == "c"}
    assert kinds <= ({IntegersLost} if target == "rtx1.7" else MODEL_FAULTS.keys())


def on_a_wrong_axis(code: str) -> onnx.ModelProto:
    """Return weights quantized along axis 1, with another fault that checks find first."""
    g, stored = Graph(opset=12 if code == "OPSET-AXIS" else 21), code == "WEIGHT-INDIRECT"
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
def test_conversion_names_the_fault_of_its_convolution(code: str) -> None:
    prediction = qdqtool.predict(on_a_wrong_axis(code), "trt8.5")
    assert [type(r) for r in prediction.refusals if r.node == "c"] == [WeightsAxis]
    assert {"W-AXIS", code}.intersection(f.code for f in prediction.findings) == {code}
    (stays,) = (f for f in prediction.findings if f.code == "CONVERSION" and f.node == "p.DQ")
    assert [other for other, _ in stays.causes[0].see] == [code]


@functools.cache
def models() -> list[onnx.ModelProto]:
    """Return the graphs of all reasons and cases. Callers do not change them."""
    return [*(make() for make in OF_REASONS.values()), *map(model_of, OF_CASES)]


@functools.cache
def views() -> list[View]:
    return [View(Model(proto)) for proto in models()]


@functools.cache
def prediction(place: int, target: str) -> qdqtool.Prediction:
    return qdqtool.predict(models()[place], target)


def predictions(target: str) -> list[qdqtool.Prediction]:
    return [prediction(place, target) for place in range(len(models()))]


@pytest.mark.parametrize("target", slow_after(1, ["trt8.5", "trt11", "trt10"]))
def test_checks_find_each_fault_that_keeps_a_layer_from_int8(target: str) -> None:
    kinds = set()
    for prediction in predictions(target):
        convolutions = {c.name: c for c in prediction.convolutions if not c.is_int8}
        for reason in prediction.refusals:
            kind, convolution = type(reason), convolutions.get(reason.node)
            if convolution is None or kind not in MODEL_FAULTS:
                continue
            kinds.add(kind)
            codes = {f.code for f in prediction.findings if f.id in convolution.findings}
            assert codes.intersection((*finding_codes(kind), *MODEL_FAULTS[kind])), reason
    assert len(kinds) >= len(MODEL_FAULTS) - 1  # types of floats differ from TensorRT 10 on


@pytest.mark.parametrize(
    ("case", "node", "others"),
    [
        ("VanillaSwapWithPreceedingDQ/several-readers", "a.DQ", {"a.Q"}),
        ("Pad/q-past-copying-pad", "p.Q", {"p.DQ"}),
    ],
)
def test_evidence_of_a_conversion_is_that_of_its_case(
    case: str, node: str, others: set[str]
) -> None:
    assert cases()[case].evidence == Evidence.ASSUMED
    findings = qdqtool.predict(model_of(case), "trt8.5").findings
    evidence = {f.node: f.evidence for f in findings if f.code == "CONVERSION"}
    assert evidence == {node: Evidence.ASSUMED, **dict.fromkeys(others, Evidence.SEEN)}


def test_finding_about_a_layer_has_the_evidence_of_the_layer(g: Graph) -> None:
    # No build of TensorRT 10 shows a Relu after a convolution; several show float layers.
    x = g.relu(g.conv(g.input(1, 16, 8, 8), "a", 16), "r")
    prediction = qdqtool.predict(g.model(g.conv(x, "b", 16, scale=None, weights="float")), "trt10")
    evidence = {c.name: c.evidence for c in prediction.convolutions}
    assert evidence == {"a": Evidence.ASSUMED, "b": Evidence.SEEN}
    assert evidence == {
        f.node: f.evidence for f in prediction.findings if f.code in ("OUT-FLOAT", "NOT-QUANTIZED")
    }


# TensorRT-RTX ---------------------------------------------------------------------------------------------------------


def of_shape_1(*readers: str) -> onnx.ModelProto:
    g = Graph()
    x, outputs = g.input(1, 16, 8, 8), []
    for i, op in enumerate(readers):
        y = g.pair(x, f"p{i}", np.full(1, 0.1 + i))
        outputs.append(g.conv(y, f"c{i}", 16, scale=None) if op == "Conv" else g.op(op, y, f"s{i}"))
    return g.model(*outputs)
