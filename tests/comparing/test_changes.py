"""What differs between two sides of one node, by a table; and which files are models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qdqtool.comparing.result import Change, Lost, NodeSide, Scales, compare_sides, differ, factor, is_model
from qdqtool.comparing.words import why
from qdqtool.errors import QdqtoolError
from qdqtool.types import Precision

INT8, FP16, FP32, UNKNOWN = Precision.INT8, Precision.FP16, Precision.FP32, Precision.UNKNOWN
LOST, GAINED = Change.LOST_INT8, Change.GAINED_INT8


def scales(*values: float, **fields: Any) -> Scales:
    return Scales(np.array(values), **fields)


def side(precision: Precision | None = INT8, output: Precision | None = INT8, **fields: Any) -> NodeSide:
    return NodeSide("c", "Conv", precision, output=output, **{"data": True, "weights": True, **fields})


@pytest.mark.parametrize(("a", "b", "changes", "lost"), [
    (side(), side(), (), None),
    (side(), side(FP16, data=False), (LOST,), Lost.DATA),
    (side(), side(FP16, weights=False), (LOST,), Lost.WEIGHTS),
    (side(), side(FP16, data=False, weights=False), (LOST,), Lost.PAIRS),
    (side(), side(FP16, data=False, weights=None), (LOST,), Lost.PAIRS),
    (side(), side(FP16), (LOST,), Lost.UNKNOWN),
    (side(data=None), side(FP16, data=False), (LOST,), Lost.UNKNOWN),
    (side(FP32), side(), (GAINED,), None), (side(Precision.UINT8), side(), (), None), (side(None), side(), (), None),
    (side(), side(output=FP16), (Change.LOST_INT8_OUTPUT,), None),
    (side(output=FP32), side(), (Change.GAINED_INT8_OUTPUT,), None),
    (side(output=FP32), side(output=FP16), (), None), (side(), side(output=UNKNOWN), (), None),
    (side(output=None), side(), (), None), (side(FP16, FP16), side(FP16, INT8), (), None),
    (side(inputs=[INT8, INT8]), side(inputs=[INT8, FP16]), (Change.RESIDUAL,), None),
    (side(inputs=[INT8, INT8]), side(inputs=[INT8]), (), None),
    (side(FP16), side(FP16, weights=False), (Change.LOST_QDQ,), None),
    (side(FP16, data=False), side(FP16), (Change.GAINED_QDQ,), None),
    (side(FP16, data=None), side(FP16, data=False), (), None),
    (side(scale=scales(0.1)), side(scale=scales(0.2)), (Change.SCALE,), None),
    (side(scale=scales(0.1)), side(scale=scales(0.1000005)), (), None),
    (side(other_scales={1: scales(0.1)}), side(other_scales={1: scales(0.3)}), (Change.SCALE,), None),
    (side(weights_scale=scales(0.1, 0.2)), side(weights_scale=scales(0.1, 0.3)), (Change.WEIGHTS_SCALE,), None),
    (side(weights_scale=scales(0.1, 0.2)), side(weights_scale=scales(0.2)), (Change.WEIGHTS_SCALE,), None),
    (side(layer="x", fused=["Relu", "Add"]), side(layer="y", fused=["Add"]), (Change.FUSION,), None),
    (side(layer="x", fused=["Relu", "Add"]), side(layer="y", fused=["Add", "Relu"]), (), None),
    (side(layer="x", fused=["Relu"]), side(fused=[]), (), None),
])  # fmt: skip
def test_changes(a: NodeSide, b: NodeSide, changes: tuple[Change, ...], lost: Lost | None) -> None:
    found = compare_sides(a, b)
    assert (found.changes, found.lost) == (changes, lost)
    unscaled = compare_sides(a, b, scales=False).changes
    file_alone = {Change.LOST_QDQ, Change.GAINED_QDQ, Change.SCALE, Change.WEIGHTS_SCALE}
    assert unscaled == tuple(c for c in changes if c not in file_alone)


@pytest.mark.parametrize(("a", "b", "expected"), [
    (scales(0.5), scales(1.0), 2.0), (scales(0.5, 1.0), scales(0.125, 2.0), 0.25),
    (scales(0.5, 1.0), scales(4.0), 4.0), (None, scales(1.0), None),
    (scales(1.0), None, None), (scales(0.0, 1.0), scales(1.0, 1.0), None),
    (scales(1.0, 1.0), scales(0.0, 1.0), None), (scales(-1.0, 0.0), scales(1.0, 1.0), None),
])  # fmt: skip
def test_factor(a: Scales | None, b: Scales | None, expected: float | None) -> None:
    assert factor(a, b) == expected


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(("a", "b", "expected"), [
    (scales(0.1, 0.2), scales(0.1, 0.2), False), (scales(0.1, 0.2), scales(0.2, 0.1), True),  # another channel's
    (scales(0.1, 0.2, 0.3), scales(0.1, 0.3, 0.2), True), (scales(0.1, 0.2, 0.3), scales(0.1, 0.25, 0.3), True),
    *((scales(0.1, 0.2), scales(0.1, bad), True) for bad in (0.0, -0.2, NAN, INF)),
    *((scales(bad), scales(bad), False) for bad in (0.0, -0.2, NAN, INF)),
    (scales(0.0, 0.1), scales(0.1, 0.0), True), (scales(NAN), scales(0.0), True), (scales(0.1), None, True),
    (None, None, False), (scales(0.1, 0.2, axis=0), scales(0.1, 0.2, axis=1), True),
    (scales(0.1), scales(0.1, zero=(3,)), True), (scales(0.1), scales(0.1, type=Precision.UINT8), True),
])  # fmt: skip
def test_whatever_differs_between_scales_is_a_difference(a: Scales | None, b: Scales | None, expected: bool) -> None:
    assert (differ(a, b), differ(b, a)) == (expected, expected)
    found = compare_sides(side(scale=a, weights_scale=a), side(scale=b, weights_scale=b))
    assert found.changes == ((Change.SCALE, Change.WEIGHTS_SCALE) if expected else ())
    found.why = why(found)
    assert ("scale" in found.why) == expected
    json.dumps(found.as_json(), allow_nan=False)


def test_which_files_are_models(tmp_path: Path) -> None:
    for name, head, model in (("a.bin", b"\x08\x09", True), ("b.log", b"[V] text", False), ("c.json", b"{}", False),
                              ("d.txt", b"", False), ("e.ONNX", b"", True)):  # fmt: skip
        (tmp_path / name).write_bytes(head)
        assert is_model(tmp_path / name) is model, name
    assert is_model("-") is False and is_model("nowhere.onnx.gz") is True
    (tmp_path / "best.pt").write_bytes(b"PK\x03\x04archive")
    with pytest.raises(QdqtoolError, match=r"best\.pt"):
        is_model(tmp_path / "best.pt")
