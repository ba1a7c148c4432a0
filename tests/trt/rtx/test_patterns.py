"""The 163 small Q/DQ patterns of the shared facts, with the answers of TensorRT-RTX 1.7.1.116.

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


def outcomes() -> dict[str, Any]:
    try:
        return dict(json.loads((FOLDER / "outcomes.json").read_text())["patterns"])
    except FileNotFoundError:
        return {}


@pytest.mark.parametrize("name", sorted(outcomes()))
def test_pattern_matches_build(name: str) -> None:
    answer = outcomes()[name]
    prediction = predict_rtx(load(patterns()[name]), RTX.with_capability("8.6"))
    assert build_status(prediction) == {"ok": "built"}.get(answer["status"], answer["status"])
    if answer["status"] != "ok":
        return
    built = answer["nodes"]
    assert len(prediction.convolutions) == len(built)
    by_name = {c.name: c for c in prediction.convolutions}
    for (name, node), conv in zip(built.items(), prediction.convolutions, strict=True):
        outcome = by_name.get(name, conv)  # nodes without a unique name are in the same order
        assert outcome.op == node["op"]
        assert str(outcome.precision) == node["precision"].split()[0], name
        assert str(outcome.output) == {"Float": "FP32", "Half": "FP16"}[node["output"]], name


def test_all_163_patterns_are_read() -> None:
    assert len(outcomes()) == 163
    assert set(outcomes()) == set(patterns())


FP8_FOLDER = SHARED / "rtx8"


@functools.cache
def fp8_outcomes() -> dict[str, Any]:
    try:
        return dict(json.loads((FP8_FOLDER / "outcomes.json").read_text())["patterns"])
    except FileNotFoundError:
        return {}


@pytest.mark.parametrize("capability", ["8.9", "12.0"])
@pytest.mark.parametrize("name", sorted(fp8_outcomes()))
def test_pattern_in_fp8_matches_build(name: str, capability: str) -> None:
    answer = fp8_outcomes()[name]["fp8"]["SM" + capability.replace(".", "")]
    model = convert_to_fp8(onnx.load_from_string(patterns()[name]))
    prediction = predict_rtx(load(model), RTX.with_capability(capability))
    assert build_status(prediction) == {"ok": "built"}.get(answer["status"], answer["status"])
    if answer["status"] != "ok":
        return
    by_name = {c.name: c for c in prediction.convolutions}
    for index, (node_name, node) in enumerate(answer["nodes"].items()):
        outcome = by_name.get(node_name, prediction.convolutions[index])
        assert str(outcome.precision) == node["precision"].split()[0], node_name
        assert str(outcome.output) == {"Float": "FP32", "Half": "FP16"}[node["output"]], node_name


@pytest.mark.skipif(not fp8_outcomes(), reason="the shared outcomes in FP8 are not here")
def test_all_163_patterns_are_read_in_fp8() -> None:
    assert set(fp8_outcomes()) == set(patterns())
