"""The words of each kind of record; ``python -m tests.explain.wording`` writes those of today into tests/data.

Wording is held here and nowhere else; all other tests look at codes and data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

from qdqtool.prediction import predict
from tests.explain.graphs import GRAPHS
from tests.explain.test_refusals import TARGETS
from tests.lint import test_api as lint
from tests.lint.test_operators import conv3d
from tests.trt.builder import Graph

DATA = Path(__file__).parents[1] / "data" / "wording.json"


def float_network() -> onnx.ModelProto:
    g = Graph()
    return g.model(g.conv(g.input(1, 16, 8, 8), "c", 16, scale=None, weights="float"))


def one(op: str, **attributes: object) -> onnx.ModelProto:
    """An operator behind a quantized convolution and a pair."""
    g = Graph()
    return g.model(g.op(op, g.pair(g.conv(g.input(1, 32, 8, 8), "c", 32), "p"), "n", **attributes))


def conv(channels: int, op: str = "", **options: int) -> onnx.ModelProto:
    g = Graph()
    x = g.relu(g.input(1, 32, 8, 8), "r")
    y = g.conv(x, "c", channels, **options)
    return g.model(g.silu(y, "s") if op == "SiLU" else g.add(y, x, "sum") if op == "Add" else y)


def networks() -> Iterator[tuple[onnx.ModelProto, str]]:
    """Networks and the target that they are predicted for."""
    for reason, make in GRAPHS.items():
        yield make(), TARGETS.get(reason, "trt8.5")
    plain = [
        lint.simple(zero=3), lint.simple(zero=None), lint.simple(zero=0, integer=np.uint8), lint.simple(scale=0.0),
        lint.weights_model("float"), lint.weights_model(op="ConvTranspose", axis=1), lint.shared_model(),
        lint.stored("int8"), lint.head(), lint.head(join=True), float_network(), conv(24), conv(8),
        conv(32, groups=4), conv(32, "SiLU", groups=32), one("Softmax"), one("Special", domain="trt"),
    ]
    yield from ((proto, "trt8.5") for proto in plain)
    yield lint.simple(), "trt11"
    yield lint.stored("int8", "Identity"), "trt10"
    yield lint.simple(scale=[0.05], zero=0), "rtx1.7"
    yield conv(32, "Add", groups=32), "trt8.6"
    yield conv3d(), "trt8.0"


def wording() -> dict[str, list[str]]:
    """Kind of record to the code, the message and the advice of the first finding that rests on one."""
    found: dict[str, list[str]] = {}
    for proto, target in networks():
        for finding in predict(proto, target).findings:
            kind = type(finding.causes[0].refusal).__name__
            found.setdefault(kind, [finding.code, finding.message, finding.fix])
    return found


if __name__ == "__main__":
    DATA.write_text(json.dumps(wording(), indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
