"""What calibration is asked for, and the ranges of a TensorRT calibration table."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

import qdqtool
from qdqtool.errors import DataError
from qdqtool.insertion.calibrate import collect_for, scales_from_table, write_table
from qdqtool.insertion.groups import ScaleGroup
from qdqtool.options import Kept
from qdqtool.types import QuantizedTensor
from tests.insertion.nets import Net, images


def table(folder: Path, **scales: float) -> Path:
    path = folder / "calib.table"
    rows = [f"{name}: {struct.pack('!f', scale).hex()}" for name, scale in scales.items()]
    path.write_text("\n".join(["TRT-8502-EntropyCalibration2", *rows]) + "\n")
    return path


GROUP = ScaleGroup(("joined",), ("joined", "a", "b"), ("a", "b"))


def test_a_group_takes_the_largest_scale_that_the_table_has(tmp_path: Path) -> None:
    path = table(tmp_path, a=0.25, b=0.5, joined=0.125, other=9.0)
    (found,) = scales_from_table(path, [GROUP])
    assert (found.scale, found.method, found.power) == (0.5, "table", None)
    assert [(m.tensor, m.amax, m.bits_lost) for m in found.members] == [("a", 0.25 * 127, 0.0), ("b", 0.5 * 127, 0.0)]
    (one,) = scales_from_table(table(tmp_path, a=0.25), [GROUP])
    assert one.scale == 0.25 and [m.tensor for m in one.members] == ["a"]


@pytest.mark.parametrize("scale", [0.0, None])
def test_what_the_table_has_no_range_for_is_named(scale: float | None, tmp_path: Path) -> None:
    path = table(tmp_path, other=1.0) if scale is None else table(tmp_path, a=scale, other=1.0)
    with pytest.raises(DataError) as caught:
        scales_from_table(path, [GROUP])
    assert str(caught.value) == f"{path}: has no scale for tensor 'joined'"
    small = scales_from_table(table(tmp_path, a=1e-45), [GROUP])[0].scale
    assert small == float(np.finfo(np.float32).tiny)  # as small as a scale can be


def test_only_scales_of_activations_go_into_a_table(tmp_path: Path) -> None:
    made = Net()
    made.output(made.conv("c", "x"))
    result = qdqtool.insert(made.model(), images(), predict=False, head="none", method="max")
    result.quantized.append(QuantizedTensor("by channel", [0.5, 0.25], "other", None, "q"))
    write_table(result, tmp_path / "out.table")
    rows = (tmp_path / "out.table").read_text().splitlines()[1:]
    largest = max(float(np.abs(i["x"]).max()) for i in images())
    assert rows == [f"x: {struct.pack('!f', largest / 127).hex()}"]


def test_what_is_reported_of_calibration(tmp_path: Path) -> None:
    made = Net()
    body = made.op("Relu", "r", made.conv("c", "x"))
    made.output(made.op("Sigmoid", "s", made.conv("heat", body, cout=3)))
    model = made.index()
    groups = [ScaleGroup(("x",), ("x",), ("x",)), ScaleGroup((body,), (body,), (body, "x"))]

    def report(data: object, cache: Path | None = None) -> dict[str, object]:
        _, told = collect_for(model, data, groups, max_images=3, kept=Kept(calib_cache=cache))
        return told

    told = report(images())
    assert (told["images"], told["tensors"], told["focus"]) == (3, 2, ["heat.out"])
    assert told["cache"] is None and told["data"] == ""
    assert told["skipped"] == told["notes"] == [] and told["fingerprint"]
    np.save(tmp_path / "x.npy", np.concatenate([i["x"] for i in images()]))
    told = report(tmp_path / "x.npy", tmp_path / "cache.npz")
    assert told["data"] == str(tmp_path / "x.npy") and told["cache"] == str(tmp_path / "cache.npz")
    with pytest.raises(DataError) as caught:
        report(None)
    assert str(caught.value) == (
        "no calibration data; give a folder of images (`data`) or a TensorRT table (`calib_table`)"
    )
