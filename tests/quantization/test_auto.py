from typing import Any

import onnx
import pytest

import qdqtool
from qdqtool.errors import QdqtoolError
from qdqtool.formats.insertion_text import render
from tests.errors import has
from tests.insertion.nets import Net, check, wide_samples


def deep_net(gain: float = 1.0) -> onnx.ModelProto:
    net, tensor = Net(32), "x"
    for i in range(4):
        weight = net.rng.standard_normal((32, 32, 3, 3)) / 17
        weight[0] *= gain  # an output channel with large values
        weight[:, 0] /= gain  # the next convolution scales the channel back
        name = net.const(f"w{i}", weight)
        tensor = net.op("Relu", f"r{i}", net.conv(f"c{i}", tensor, 32, 32, weight=name))
    return net.output(tensor).model(19, ir=9)


def insert_auto(model: onnx.ModelProto, **options: Any) -> qdqtool.Insertion:
    return qdqtool.insert(
        model,
        wide_samples(8),
        head="none",
        **{"precision": "auto", "high_precision": "fp32", **options},
    )


def test_ordinary_network_gets_int8() -> None:
    result = insert_auto(deep_net())
    assert result.choice is not None and result.choice.samples == 8
    assert (result.precision, result.choice.precision) == ("int8", "int8")
    assert result.choice.errors["int8"] < result.choice.errors["fp8"]
    check(result.model)


def test_network_with_outlier_channels_gets_fp8() -> None:
    result = insert_auto(deep_net(gain=60.0), method="max")
    assert (result.precision, result.target) == ("fp8", "trt10-strongly-typed")
    assert result.choice.errors["fp8"] < result.choice.errors["int8"] / 2
    better = sum(fit.fp8_db > fit.int8_db for fit in result.fits)
    text = f"for {better} of {len(result.fits)} activations (higher ratio of signal to noise)"
    assert better >= 3 and text in str(render(result, 200))


def test_one_calibration_serves_both() -> None:
    """INT8 and FP8 have the same scales as in separate insertions."""
    model = deep_net(gain=60.0)
    auto, alone = (insert_auto(model, method="max", precision=p) for p in ("auto", "fp8"))
    assert [q.scale for q in auto.quantized] == [q.scale for q in alone.quantized]


@pytest.mark.parametrize(
    ("options", "obstacle"),
    [({"target": "8.6"}, "trt8.6 has no FP8"), ({"gpu": "RTX 3060"}, "RTX 3060 has no FP8")],
)
def test_int8_alone_is_measured_if_fp8_is_impossible(options: Any, obstacle: str) -> None:
    choice = insert_auto(deep_net(), **options).choice
    assert (choice.errors.keys(), choice.samples) == ({"int8"}, 8)
    assert choice.reason.startswith(obstacle) and choice.precision in ("int8", "fp16")


def test_times_of_the_gpu_count() -> None:
    """The choice uses the estimate that the prediction of the chosen model reports."""
    result = insert_auto(deep_net(), gpu="L4", target="rtx1.7", high_precision=None)
    assert result.choice is not None and result.choice.gpu == "L4"
    assert result.choice.ms.keys() == {"int8", "fp8", "fp16"}


def test_choice_and_formats_are_in_the_json() -> None:
    data = insert_auto(deep_net()).as_json()
    assert data["choice"].keys() == {"precision", "reason", "errors", "samples", "ms", "gpu"}
    assert {f["tensor"] for f in data["formats"]} == {"x", "r0.out", "r1.out", "r2.out"}
    assert (data["precision"], data["unchanged"]) == ("int8", False)


@pytest.mark.parametrize("target", ["10", "11"])
def test_float_model_is_the_result_if_both_lose_too_much(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qdqtool.insertion.format_choice.LARGE_ERROR", 0.001)
    model = deep_net()
    result = insert_auto(model, target=target, high_precision=None)
    assert result.choice is not None and result.choice.is_float
    assert (result.precision, result.quantized) == ("fp16", [])
    is_typed = target == "11"
    assert (result.unchanged, result.float_type) == (not is_typed, "fp16" if is_typed else "fp32")
    assert (result.model == model) == (not is_typed)
    data = result.as_json()
    assert (data["precision"], data["unchanged"]) == ("fp16", not is_typed)
    assert data["choice"]["precision"] == "fp16"
    check(result.model)


def test_table_cannot_decide(tmp_path: Any) -> None:
    with pytest.raises(QdqtoolError, check=has("option-conflict", parameter="precision")):
        insert_auto(deep_net(), calib_table=tmp_path / "table")
