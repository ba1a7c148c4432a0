"""Predictions for TensorRT-RTX in FP8 against recorded builds for SM89 and SM120."""

import functools
import json
from typing import Any

import onnx
import pytest

from qdqtool.prediction import predict
from qdqtool.trt.targets import RTX
from tests.slow import slow_after
from tests.trt.rtx.record import FP8_TABLE, build_fp8_models, fp8_networks
from tests.trt.rtx.test_experiments import FP8_CODES, check


@functools.cache
def fp8_table() -> dict[str, Any]:
    return dict(json.loads(FP8_TABLE.read_text()))


@functools.cache
def fp8_models() -> dict[str, onnx.ModelProto]:
    return {**build_fp8_models(), **fp8_networks()}


def check_fp8(question: str, build: dict[str, Any]) -> None:
    for capability in ("8.9", "12.0"):
        prediction = predict(fp8_models()[question], RTX.with_capability(capability))
        check(prediction, build.get("SM120", build) if capability == "12.0" else build)


@pytest.mark.parametrize("question", sorted(fp8_table()["experiments"]))
def test_fp8_experiment_matches_build(question: str) -> None:
    check_fp8(question, fp8_table()["experiments"][question])


@pytest.mark.parametrize(
    "question", slow_after(28, sorted(fp8_table()["networks"], key=lambda name: name[::-1]))
)
def test_fp8_network_matches_build(question: str) -> None:
    check_fp8(question, fp8_table()["networks"][question])


def test_fp8_record_has_every_experiment_and_network() -> None:
    recorded = {**fp8_table()["experiments"], **fp8_table()["networks"]}
    assert recorded.keys() == fp8_models().keys()


def test_codes_of_fp8_are_shown_by_experiments() -> None:
    shown: set[str] = set()
    for question in fp8_table()["experiments"]:
        if question.startswith("FP8 "):
            shown.update(predict(fp8_models()[question], "rtx1.7").findings_by_code())
    assert shown >= FP8_CODES
