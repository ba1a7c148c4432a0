"""The 163 small Q/DQ patterns of the shared facts, with the answers of TensorRT-RTX 1.7.1.116 on SM86."""

import functools
import io
import json
import lzma
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from qdqtool.ir.modelfile import load
from qdqtool.trt.rtx.predict import build_status, predict_rtx

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
    prediction = predict_rtx(load(patterns()[name]))
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
