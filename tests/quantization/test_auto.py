"""``insert(precision="auto")``: INT8 or FP8."""

from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.errors import QdqtoolError
from qdqtool.insertion.result import Insertion
from tests.errors import has
from tests.insertion.nets import Array, Net, check
from tests.notes import note_codes


def deep_net(gain: float = 1.0) -> onnx.ModelProto:
    """Return four convolutions of 32 channels; `gain` enlarges one input channel of each."""
    net, tensor = Net(32), "x"
    for i in range(4):
        weight = net.rng.standard_normal((32, 32, 3, 3)) / 17
        weight[0] *= gain  # an output channel with large values
        weight[:, 0] /= gain  # that counts as little as the others
        name = net.const(f"w{i}", weight)
        tensor = net.op("Relu", f"r{i}", net.conv(f"c{i}", tensor, 32, 32, weight=name))
    return net.output(tensor).model()


def samples(count: int = 8) -> Array:
    rng = np.random.default_rng(3)
    return rng.standard_normal((count, 32, 8, 8)).astype(np.float32)


def insert_auto(model: onnx.ModelProto, **options: Any) -> Insertion:
    return qdqtool.insert(
        model, samples(), precision="auto", head="none", **{"high_precision": "fp32", **options}
    )


def test_ordinary_network_gets_int8() -> None:
    result = insert_auto(deep_net())
    assert result.choice is not None and result.choice.samples == 8
    assert (result.precision, result.choice.precision) == ("int8", "int8")
    assert result.choice.errors["int8"] < result.choice.errors["fp8"]
    check(result.model)


def test_network_with_outlier_channels_gets_fp8() -> None:
    result = insert_auto(deep_net(gain=60.0), method="max")
    assert result.choice is not None
    assert (result.precision, result.target) == ("fp8", "trt10-strongly-typed")
    assert result.choice.errors["fp8"] < result.choice.errors["int8"] / 2
    assert sum(fit.suits_fp8 for fit in result.fits) >= 3


def test_one_calibration_serves_both() -> None:
    """The scales of both are those of separate insertions."""
    model = deep_net(gain=60.0)
    auto = insert_auto(model, method="max")
    alone = qdqtool.insert(
        model, samples(), precision="fp8", head="none", high_precision="fp32", method="max"
    )
    assert [q.scale for q in auto.quantized] == [q.scale for q in alone.quantized]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"target": "8.6"}, "trt8.6 has no FP8"), ({"gpu": "RTX 3060"}, "RTX 3060 has no FP8")],
)
def test_int8_without_a_measurement_if_fp8_is_impossible(options: Any, reason: str) -> None:
    choice = insert_auto(deep_net(), **options).choice
    assert choice is not None
    assert (choice.precision, choice.reason, choice.samples) == ("int8", reason, 0)


def test_times_of_the_gpu_count() -> None:
    result = insert_auto(deep_net(), gpu="L4", high_precision=None)
    assert result.choice is not None
    assert result.choice.ms.keys() == {"int8", "fp8", "fp16"}
    assert result.choice.gpu == "L4"
    assert ("no-gain" in note_codes(result.warnings)) == (result.choice.is_faster is False)


def test_choice_and_formats_are_in_the_json() -> None:
    data = insert_auto(deep_net()).as_json()
    assert data["choice"].keys() == {"precision", "reason", "errors", "samples", "ms", "gpu"}
    assert {f["tensor"] for f in data["formats"]} == {"x", "r0.out", "r1.out", "r2.out"}


def test_table_cannot_decide(tmp_path: Any) -> None:
    with pytest.raises(QdqtoolError, check=has("option-conflict", parameter="precision")):
        insert_auto(deep_net(), calib_table=tmp_path / "table")
