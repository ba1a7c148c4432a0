"""Predictions for 163 small Q/DQ patterns, compared with builds of TensorRT-RTX 1.7.1.116.

The patterns are in INT8 for SM86, and are converted to FP8 for SM89 and SM120.
"""

import functools
import io
import json
import lzma
import os
import tarfile
from pathlib import Path
from typing import Any

import onnx
import pytest

from qdqtool.ir.modelfile import load
from qdqtool.trt.rtx.predict import build_status, predict_rtx
from qdqtool.trt.targets import RTX
from tools.fuzz.fp8 import convert_to_fp8

SHARED = Path(os.environ.get("QDQTOOL_SHARED", Path(__file__).parents[4] / "shared"))
FOLDER = SHARED / "rtx"
pytestmark = pytest.mark.skipif(
    not (FOLDER / "outcomes.json").exists(), reason="the shared patterns are not here"
)


@functools.cache
def patterns() -> dict[str, bytes]:
    data = lzma.decompress((FOLDER / "patterns.tar.xz").read_bytes())
    models: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None and member.name.endswith(".onnx"):
                models[Path(member.name).stem] = file.read()
    return models


def read_outcomes(folder: str) -> dict[str, Any]:
    try:
        return dict(json.loads((SHARED / folder / "outcomes.json").read_text())["patterns"])
    except FileNotFoundError:
        return {}


OUTCOMES, FP8_OUTCOMES = (read_outcomes(folder) for folder in ("rtx", "rtx8"))


def check(model: onnx.ModelProto | bytes, capability: str, answer: dict[str, Any]) -> int:
    prediction = predict_rtx(load(model), RTX.with_capability(capability))
    assert build_status(prediction) == {"ok": "built"}.get(answer["status"], answer["status"])
    by_name = {c.name: c for c in prediction.convolutions}
    for index, (name, node) in enumerate(answer.get("nodes", {}).items()):
        # Nodes without a unique name are in the same order.
        outcome = by_name.get(name, prediction.convolutions[index])
        assert outcome.op == node["op"]
        assert str(outcome.precision) == node["precision"].split()[0], name
        assert str(outcome.output) == {"Float": "FP32", "Half": "FP16"}[node["output"]], name
    return len(prediction.convolutions)


@pytest.mark.parametrize("name", sorted(OUTCOMES))
def test_pattern_matches_build(name: str) -> None:
    answer = OUTCOMES[name]
    count = check(patterns()[name], "8.6", answer)
    assert answer["status"] != "ok" or count == len(answer["nodes"])


@pytest.mark.parametrize("capability", ["8.9", "12.0"])
@pytest.mark.parametrize("name", sorted(FP8_OUTCOMES))
def test_pattern_in_fp8_matches_build(name: str, capability: str) -> None:
    model = convert_to_fp8(onnx.load_from_string(patterns()[name]))
    check(model, capability, FP8_OUTCOMES[name]["fp8"]["SM" + capability.replace(".", "")])


def test_all_163_patterns_are_read() -> None:
    assert len(OUTCOMES) == 163 and set(OUTCOMES) == set(patterns())
    assert not FP8_OUTCOMES or set(FP8_OUTCOMES) == set(patterns())
