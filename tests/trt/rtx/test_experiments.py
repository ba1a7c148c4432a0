"""Predictions for TensorRT-RTX against recorded builds, and recorded against new builds.

INT8 was built for SM86, FP8 for SM89 and SM120.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

from qdqtool.builders.compiler_process import is_installed
from qdqtool.evidence import Evidence
from qdqtool.findings import codes
from qdqtool.prediction import predict
from qdqtool.reasons.compiler import CompilerFault, FaultKind
from qdqtool.reasons.finding import Severity
from qdqtool.trt.result import Prediction
from qdqtool.trt.rtx.predict import build_status
from qdqtool.trt.targets import RTX
from tests.builders.models import needs_compiler
from tests.findings.lint.test_operators import runtime_model
from tests.findings.test_producers import models as producer_models, of_shape_1, predictions
from tests.fixing.test_places import detector
from tests.patterns import test_fake_quantizers as fakes
from tests.slow import slow_after
from tests.trt.builder import Graph
from tools.fuzz.driver import Lab
from tools.fuzz.fp8 import convert_to_fp8
from tools.fuzz.grammar import network
from tools.fuzz.net import Net
from tools.rtx.record import (
    FP8_TABLE,
    SEEDS,
    TABLE,
    answer,
    build_fp8_models,
    build_models,
    fp8_networks,
)

ANSWERS = json.loads(TABLE.read_text())
FP8_ANSWERS = json.loads(FP8_TABLE.read_text())
models = functools.cache(build_models)


@functools.cache
def predicted(question: str) -> Prediction:
    return predict(models()[question], "rtx1.7")


def check(prediction: Prediction, build: dict[str, Any]) -> None:
    assert build_status(prediction) == build["status"], prediction.refusals
    if build["status"] != "built":
        return
    types = build.get("types", {})
    predicted = {c.name: str(c.precision) for c in prediction.convolutions}
    assert {name: predicted.get(name, kind) for name, kind in types.items()} == types
    # A MatMul of two floats without quantizers is not listed.
    assert not {types[name] for name in types.keys() - predicted.keys()} & {"INT8", "FP8"}
    for conv in prediction.convolutions:
        findings = [prediction.findings[i] for i in conv.findings]
        assert conv.is_quantized or findings, f"{conv.name} is float without a reason"
        assert all(f.message for f in findings)
        assert all(f.fix or f.severity == Severity.INFO for f in findings)


@pytest.mark.parametrize("question", sorted(ANSWERS["experiments"]))
def test_experiment_matches_build(question: str) -> None:
    check(predicted(question), ANSWERS["experiments"][question])


def test_errors_are_predicted_for_failed_builds() -> None:
    for question, build in ANSWERS["experiments"].items():
        if build["status"] != "built":
            errors = [f for f in predicted(question).findings if f.severity == Severity.ERROR]
            assert errors and all(f.node and f.fix for f in errors), question


# Seen in builds of FP8.
FP8_CODES = {"FP8-KERNEL", "FP8-ZERO-POINT", "FP8-COLUMN"}


def test_seen_codes_are_shown_by_experiments() -> None:
    # An experiment shows a code if its build failed or one of its convolutions is float.
    shown: set[str] = set()
    for question, build in ANSWERS["experiments"].items():
        for finding in predicted(question).findings:
            types = {build.get("types", {}).get(name) for name in finding.convolutions}
            if build["status"] != "built" or types - {None, "INT8"}:
                shown.add(finding.code)
    entries = {code: entry.scope_on("rtx1.7") for code, entry in codes.CODES.items()}
    seen = {code for code, entry in entries.items() if entry and entry.evidence == Evidence.SEEN}
    # The others are seen in builds for another GPU (tests/builders/test_tensorrt.py), and in builds of
    # operators that the experiments do not have.
    assert seen - shown == {"FLOAT-SM75", *FP8_CODES, "OP-FLOAT", "ORT-OPERATOR", "SUBGRAPH"}


@pytest.mark.parametrize("seed", slow_after(40, SEEDS))
def test_network_matches_build(seed: int) -> None:
    check(predict(network(seed), "rtx1.7"), ANSWERS["networks"][str(seed)])


@functools.cache
def fp8_models() -> dict[str, onnx.ModelProto]:
    return {**build_fp8_models(), **fp8_networks()}


FP8_NETWORKS = sorted(FP8_ANSWERS["networks"], key=lambda name: name[::-1])
FP8_BUILDS = {**FP8_ANSWERS["experiments"], **FP8_ANSWERS["networks"]}


def fp8_cases() -> list[Any]:
    """Return pairs of a question and a capability.

    Where the builds for SM89 and SM120 are equal, one of the two pairs is slow, in turn.
    """
    cases = []
    for index, (question, build) in enumerate(sorted(FP8_BUILDS.items())):
        for turn, capability in enumerate(("8.9", "12.0")):
            is_slow = question in FP8_NETWORKS[28:] or ("SM120" not in build and index % 2 != turn)
            cases.append(
                pytest.param(question, capability, marks=[pytest.mark.slow] if is_slow else [])
            )
    return cases


@pytest.mark.parametrize(("question", "capability"), fp8_cases())
def test_fp8_experiment_or_network_matches_build(question: str, capability: str) -> None:
    build = FP8_BUILDS[question]
    prediction = predict(fp8_models()[question], RTX.with_capability(capability))
    check(prediction, build.get("SM120", build) if capability == "12.0" else build)


def test_records_have_every_experiment_and_network() -> None:
    assert ANSWERS["experiments"].keys() == models().keys()
    assert ANSWERS["networks"].keys() == {str(seed) for seed in SEEDS}
    assert FP8_BUILDS.keys() == fp8_models().keys()


def test_codes_of_fp8_are_shown_by_experiments() -> None:
    graphs = [fp8_models()[q] for q in FP8_ANSWERS["experiments"] if q.startswith("FP8 ")]
    shown = {code for graph in graphs for code in predict(graph, "rtx1.7").findings_by_code()}
    assert shown >= FP8_CODES


def test_compiler_faults_hold_names_and_numbers_only() -> None:
    reasons = [r for question in models() for r in predicted(question).refusals]
    faults = [r for r in reasons if isinstance(r, CompilerFault)]
    assert any(r.fault == FaultKind.OPERATOR for r in faults)
    assert not [r for r in faults if any(" " in str(v) for v in r.values)]


def integers() -> onnx.ModelProto:
    g = Graph()
    g.const("zero", np.uint8(0))
    return g.model(
        g.op("DequantizeLinear", g.ops("DynamicQuantizeLinear", [g.input(1, 8)], "d", 3), "dq")
    )


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        ("QLinearAdd", ["q", "s", "z", "q", "s", "z"]),
        ("QLinearSigmoid", ["q", "s", "z"]),
        ("QGemm", ["q", "s", "z", "w", "s", "z", "b"]),
    ],
)
def test_integer_operators_of_onnxruntime_end_the_build(op: str, inputs: list[str]) -> None:
    # TensorRT-RTX takes operators of onnxruntime's domain for plugins.
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "first"),
        onnx.helper.make_node(op, [*inputs, "s", "z"], ["r"], "own", domain="com.microsoft"),
        onnx.helper.make_node("DequantizeLinear", ["r", "s", "z"], ["y"], "last"),
    ]
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1, 8]) for n in "xy")
    constants = {
        "s": np.float32(0.1),
        "z": np.int8(0),
        "w": np.ones((8, 8), np.int8),
        "b": np.zeros(8, np.int32),
    }
    tensors = [onnx.numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()]
    opsets = [onnx.helper.make_opsetid("", 13), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "g", [x], [y], tensors), ir_version=8, opset_imports=opsets
    )
    prediction = predict(model, "rtx1.7")
    assert [(f.code, f.node) for f in prediction.findings] == [("QOPERATOR", "own")]
    assert build_status(prediction) == "refused"
    if is_installed("tensorrt_rtx"):
        with Lab() as lab:
            assert answer(lab, model)["status"] == "refused"


def fp8_zero_point() -> onnx.ModelProto:
    net = Net(19)
    return convert_to_fp8(
        net.model(net.conv(net.dq(net.q(net.input((1, 8, 8, 8)), zero=3), zero=3), 8))
    )


def on_rtx() -> Iterator[tuple[onnx.ModelProto, Prediction]]:
    yield from ((model, predicted(question)) for question, model in models().items())
    yield from zip(producer_models(), predictions("rtx1.7"), strict=True)
    others = (
        integers(),
        of_shape_1("Conv", "Softmax"),
        detector(),
        fp8_zero_point(),
        runtime_model("FusedConv"),
        fakes.network(fakes.INEXACT["AIMET"]),
        fakes.fallback(),
    )
    yield from ((model, predict(model, "rtx1.7")) for model in others)


def test_errors_on_rtx_are_reported_once_for_a_pair() -> None:
    reported: set[str] = set()
    for model, prediction in on_rtx():
        nodes = model.graph.node
        qs = {n.output[0]: n.name for n in nodes if n.op_type == "QuantizeLinear"}
        q_of = {
            n.name: qs[n.input[0]]
            for n in nodes
            if n.op_type == "DequantizeLinear" and n.input[0] in qs
        }
        places = [(f.code, q_of.get(f.node, f.node)) for f in prediction.findings]
        assert len(places) == len(set(places)), places
        reported |= {f.code for f in prediction.findings if f.severity == Severity.ERROR}
    assert reported == {
        entry.code
        for entry in codes.CODES.values()
        if entry.scope_on("rtx1.7") and entry.severity_on("rtx1.7") == "error"
    }


@needs_compiler
def test_record_matches_installed_compiler() -> None:
    with Lab() as lab:
        for question in sorted(models())[::40]:
            assert answer(lab, models()[question]) == ANSWERS["experiments"][question], question
