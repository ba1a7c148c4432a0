"""The prediction against recorded answers of the compiler, and the record against the compiler, where there is one."""

import functools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

from qdqtool.builders.child import is_installed
from qdqtool.explain import codes
from qdqtool.prediction import predict
from qdqtool.trt.rtx.operands import CompilerFault, Fault
from qdqtool.trt.rtx.predict import status_of
from qdqtool.types import Evidence, Prediction, Severity
from tests.explain.test_producers import models as of_refusals_and_cases
from tests.explain.test_producers import of_shape_1, predictions
from tests.trt.builder import Graph
from tests.trt.rtx.record import SEEDS, TABLE, answer, models
from tools.fuzz.driver import Lab
from tools.fuzz.grammar import network


@functools.cache
def table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text())
    return found


@functools.cache
def all_models() -> dict[str, onnx.ModelProto]:
    return models()


@functools.cache
def predicted(question: str) -> Prediction:
    return predict(all_models()[question], "rtx1.7")


def check(prediction: Prediction, was: dict[str, Any]) -> None:
    assert status_of(prediction) == was["status"], prediction.refusals
    if was["status"] != "built":
        return
    types = was.get("types", {})
    answers = {c.name: str(c.precision) for c in prediction.convolutions}
    assert {n: answers.get(n, p) for n, p in types.items()} == types
    # A MatMul of two floats that no quantizer touches is not listed.
    assert set(types) - set(answers) <= {n for n, p in types.items() if p not in ("INT8", "FP8")}
    for conv in prediction.convolutions:
        told = [prediction.findings[i] for i in conv.findings]
        assert conv.is_int8 or told, f"{conv.name} is float without a reason"
        assert all(f.message and f.fix for f in told)


@pytest.mark.parametrize("question", sorted(table()["experiments"]))
def test_experiment(question: str) -> None:
    check(predicted(question), table()["experiments"][question])


def test_the_record_is_whole_and_says_what_the_compiler_says() -> None:
    assert set(table()["experiments"]) == set(all_models())
    assert set(table()["networks"]) == {str(s) for s in SEEDS}
    for question, was in table()["experiments"].items():
        if was["status"] != "built":
            errors = [f for f in predicted(question).findings if f.severity == Severity.ERROR]
            assert errors and all(f.node and f.fix for f in errors), question


# Seen in builds that are no experiment: for 7.5 and another GPU (tests/builders/test_tensorrt.py builds such).
SEEN_APART = {"FLOAT-SM75"}


def test_what_is_seen_there_kept_a_build_or_a_convolution_from_int8() -> None:
    """Each code whose entry says ``seen`` is told of an experiment that was refused, crashed or has it in float."""
    shown: set[str] = set()
    for question, was in table()["experiments"].items():
        for found in predicted(question).findings:
            types = [was.get("types", {}).get(name) for name in found.convolutions]
            if was["status"] != "built" or any(kind not in (None, "INT8") for kind in types):
                shown.add(found.code)
    held = ((code, entry.on("rtx1.7")) for code, entry in codes.CODES.items())
    seen = {
        code
        for code, held_there in held
        if held_there is not None and held_there.evidence == Evidence.SEEN
    }
    assert seen - shown == SEEN_APART


def check_network(seed: int) -> None:
    check(predict(network(seed), "rtx1.7"), table()["networks"][str(seed)])


@pytest.mark.parametrize("seed", SEEDS[:40])
def test_network(seed: int) -> None:
    check_network(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS[40:])
def test_further_networks(seed: int) -> None:
    check_network(seed)


def test_records_hold_names_and_numbers_alone() -> None:
    """Their words are made last."""
    faults = [
        r for m in all_models() for r in predicted(m).refusals if isinstance(r, CompilerFault)
    ]
    assert any(r.fault == Fault.OPERATOR for r in faults)
    assert not [r for r in faults if any(" " in str(v) for v in r.values)]


def integers() -> onnx.ModelProto:
    g = Graph()
    g.const("zero", np.uint8(0))
    return g.model(
        g.op("DequantizeLinear", g.ops("DynamicQuantizeLinear", [g.input(1, 8)], "d", 3), "dq")
    )


def test_integer_operators_of_onnxruntime_end_the_build_there_too() -> None:
    """Those of its own domain are looked for as plugins."""
    scale, zero = ["s", "z"], onnx.numpy_helper.from_array(np.int8(0), "z")
    for op, inputs in (
        ("QLinearAdd", ["q", *scale, "q", *scale]),
        ("QLinearSigmoid", ["q", *scale]),
        ("QGemm", ["q", *scale, "w", *scale, "b"]),
    ):
        made = [
            onnx.helper.make_node("QuantizeLinear", ["x", *scale], ["q"], "first"),
            onnx.helper.make_node(op, [*inputs, *scale], ["r"], "own", domain="com.microsoft"),
            onnx.helper.make_node("DequantizeLinear", ["r", *scale], ["y"], "last"),
        ]
        ends = [
            [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 8])]
            for name in "xy"
        ]
        constants = [
            onnx.numpy_helper.from_array(np.float32(0.1), "s"),
            zero,
            onnx.numpy_helper.from_array(np.ones((8, 8), np.int8), "w"),
            onnx.numpy_helper.from_array(np.zeros(8, np.int32), "b"),
        ]
        opsets = [onnx.helper.make_opsetid(*of) for of in (("", 13), ("com.microsoft", 1))]
        graph = onnx.helper.make_graph(made, "g", *ends, constants)
        model = onnx.helper.make_model(graph, ir_version=8, opset_imports=opsets)
        prediction = predict(model, "rtx1.7")
        assert [(f.code, f.node) for f in prediction.findings] == [("QOPERATOR", "own")]
        assert status_of(prediction) == "refused"
        if is_installed("tensorrt_rtx"):
            with Lab() as lab:
                assert answer(lab, model)["status"] == "refused"


def on_rtx() -> Iterator[tuple[onnx.ModelProto, Prediction]]:
    yield from ((model, predicted(question)) for question, model in all_models().items())
    yield from zip(of_refusals_and_cases(), predictions("rtx1.7"), strict=True)
    yield from (
        (model, predict(model, "rtx1.7")) for model in (integers(), of_shape_1("Conv", "Softmax"))
    )


def test_what_holds_on_rtx_is_told_and_once_for_a_pair() -> None:
    told: set[str] = set()
    for model, prediction in on_rtx():
        made = {n.output[0]: n for n in model.graph.node if n.op_type == "QuantizeLinear"}
        q_of = {
            n.name: made[n.input[0]].name
            for n in model.graph.node
            if n.op_type == "DequantizeLinear" and n.input[0] in made
        }
        places = [(f.code, q_of.get(f.node, f.node)) for f in prediction.findings]
        assert len(places) == len(set(places)), places
        told |= {f.code for f in prediction.findings if f.severity == Severity.ERROR}
    assert told == {
        c.code
        for c in codes.CODES.values()
        if c.on("rtx1.7") and c.severity_on("rtx1.7") == "error"
    }


@pytest.mark.skipif(not is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed")
def test_the_record_is_what_the_compiler_says() -> None:
    with Lab() as lab:
        for question in sorted(all_models())[::40]:
            assert answer(lab, all_models()[question]) == table()["experiments"][question], question
