"""The prediction against recorded answers of the compiler, and the record against the compiler, where there is one."""

import functools
import json
from typing import Any

import onnx
import pytest

from qdqtool.builders.child import is_installed
from qdqtool.prediction import predict
from qdqtool.trt.rtx.operands import CompilerFault, Fault
from qdqtool.trt.rtx.predict import status_of
from qdqtool.types import Severity
from tests.fuzz.driver import Lab
from tests.fuzz.grammar import network
from tests.slow import slow_after
from tests.trt.rtx.record import SEEDS, TABLE, answer, models


@functools.cache
def table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text())
    return found


@functools.cache
def all_models() -> dict[str, onnx.ModelProto]:
    return models()


def check(model: onnx.ModelProto, was: dict[str, Any]) -> None:
    prediction = predict(model, "rtx1.7")
    assert status_of(prediction) == was["status"], prediction.refusals
    if was["status"] != "built":
        return
    types = was.get("types", {})
    predicted = {c.name: str(c.precision) for c in prediction.convolutions}
    assert {n: predicted.get(n, p) for n, p in types.items()} == types
    # A MatMul of two floats that no quantizer touches is not listed.
    assert set(types) - set(predicted) <= {n for n, p in types.items() if p not in ("INT8", "FP8")}
    for conv in prediction.convolutions:
        told = [prediction.findings[i] for i in conv.findings]
        assert conv.is_int8 or told, f"{conv.name} is float without a reason"
        assert all(f.message and f.fix for f in told)


@pytest.mark.parametrize("question", sorted(table()["experiments"]))
def test_experiment(question: str) -> None:
    check(all_models()[question], table()["experiments"][question])


def test_the_record_is_whole_and_says_what_the_compiler_says() -> None:
    assert set(table()["experiments"]) == set(all_models())
    assert set(table()["networks"]) == {str(s) for s in SEEDS}
    for question, was in table()["experiments"].items():
        if was["status"] != "built":
            errors = [f for f in predict(all_models()[question], "rtx1.7").findings if f.severity == Severity.ERROR]
            assert errors and all(f.node and f.fix for f in errors), question


@pytest.mark.parametrize("seed", slow_after(150, SEEDS))
def test_network(seed: int) -> None:
    check(network(seed), table()["networks"][str(seed)])


def test_records_hold_names_and_numbers_alone() -> None:
    """Their words are made last."""
    faults = [r for m in all_models().values() for r in predict(m, "rtx1.7", advice=False).refusals
              if isinstance(r, CompilerFault)]
    assert any(r.fault == Fault.OPERATOR for r in faults)
    assert not [r for r in faults if any(" " in str(v) for v in r.values)]


@pytest.mark.skipif(not is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed")
def test_the_record_is_what_the_compiler_says() -> None:
    with Lab() as lab:
        for question in sorted(all_models())[::40]:
            assert answer(lab, all_models()[question]) == table()["experiments"][question], question
