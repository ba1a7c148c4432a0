"""ACT-SCALE: scales of activations against images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import qdqtool
from qdqtool.cli import run
from qdqtool.lint.activation_scales import one_factor
from qdqtool.prediction import check_activations
from qdqtool.trt.faults import ActivationFit, ActivationScales, OutlierScales
from tests.trt.builder import Graph

RNG = np.random.default_rng(0)
DATA = [{"x": RNG.normal(0, 1, (1, 8, 16, 16)).astype(np.float32)} for _ in range(4)]


def float_network() -> onnx.ModelProto:
    g = Graph()
    x = g.input(1, 8, 16, 16)
    for i in range(3):
        x = g.relu(g.conv(x, f"c{i}", scale=None, weights="float"), f"r{i}")
    return g.model(x)


def scaled(proto: onnx.ModelProto, name: str, factor: float) -> onnx.ModelProto:
    """A copy in which the scale of one quantizer pair is another."""
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    node = next(n for n in copy.graph.node if n.name == name)
    for tensor in copy.graph.initializer:
        if tensor.name == node.input[1]:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), tensor.name))
    return copy


def reported(proto: onnx.ModelProto) -> ActivationScales | None:
    prediction = qdqtool.predict(proto)
    check_activations(proto, prediction, DATA)
    found = [c.refusal for f in prediction.findings if f.code == "ACT-SCALE" for c in f.causes]
    assert all(f.id == i for i, f in enumerate(prediction.findings))
    return found[0] if found else None  # type: ignore[return-value]


@pytest.mark.parametrize("method", ["focus", "mse", "percentile", "entropy", "max"])
def test_what_insert_calibrates_fits(method: str) -> None:
    model = qdqtool.insert(float_network(), DATA, method=method, predict=False).model
    assert reported(model) is None


def test_a_scale_too_small_clips_and_one_too_large_wastes() -> None:
    model = qdqtool.insert(float_network(), DATA, method="max", predict=False).model
    name = next(n.name for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "x")
    small, large = reported(scaled(model, name, 0.25)), reported(scaled(model, name, 8.0))
    assert small is not None and small.worst[0].quantizer == name
    scale = small.worst[0].scale
    values = np.abs(np.concatenate([d["x"].ravel() for d in DATA]))
    assert small.worst[0].clipped == pytest.approx(float(np.mean(values > 127.5 * scale)), abs=2e-3)
    assert large is not None and large.worst[0].used == pytest.approx(1 / 8, rel=1e-3)


@pytest.mark.parametrize(("used", "factor"), [
    ([2.0, 1.9, 2.2, 2.0, 9.0], 2.0), ([0.25, 0.24, 0.26], 0.25),
    ([1.0, 1.1, 0.9, 1.0], 0.0), ([2.0, 0.5, 1.0, 4.0], 0.0), ([2.0, 2.0], 0.0),
])
def test_all_scales_off_by_one_factor(used: list[float], factor: float) -> None:
    assert one_factor([ActivationFit("q", 0.1, 0.0, 0.0, share) for share in used]) == factor


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = qdqtool.insert(float_network(), DATA, method="max", predict=False).model
    name = next(n.name for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "x")
    onnx.save(scaled(model, name, 0.2), tmp_path / "bad.onnx")
    np.savez(tmp_path / "data.npz", x=np.concatenate([d["x"] for d in DATA]))
    arguments = ["predict", str(tmp_path / "bad.onnx"), "--calib", str(tmp_path / "data.npz")]
    assert run([*arguments, "--fail-on", "ACT-SCALE"]) == 1
    assert f"{name} (scale" in capsys.readouterr().out.replace("\n     ", "")


def outlying(share: float, factor: float) -> list[dict[str, np.ndarray]]:
    """Normal values, a share of them many times as large."""
    rng = np.random.default_rng(5)
    found = []
    for _ in range(4):
        x = rng.normal(0, 1, (1, 8, 16, 16)).astype(np.float32)
        found.append({"x": np.where(rng.random(x.shape) < share, x * np.float32(factor), x)})
    return found


@pytest.mark.parametrize(("share", "factor", "named"), [(0.005, 300.0, True), (0.005, 10.0, False), (0.0, 1.0, False)])
def test_outliers_that_a_scale_covers(share: float, factor: float, named: bool) -> None:
    """At insert and at predict alike; the ratio is that of the values, the largest hundredth aside."""
    data = outlying(share, factor)
    inserted = qdqtool.insert(float_network(), data, method="max", predict=False)
    assert any(w.startswith("ACT-OUTLIER") for w in inserted.warnings) is named
    prediction = qdqtool.predict(inserted.model)
    check_activations(inserted.model, prediction, data)
    refusals = [c.refusal for f in prediction.findings if f.code == "ACT-OUTLIER" for c in f.causes]
    assert bool(refusals) is named
    if named:
        (found,) = refusals
        assert isinstance(found, OutlierScales) and not found.linear
        assert not any("--smooth" in text for text in (*inserted.warnings, *(f.fix for f in prediction.findings)))
        ratios = {q: ratio for q, _, ratio in found.worst}
        q = next(n.name for n in inserted.model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "x")
        values = np.sort(np.abs(np.concatenate([d["x"].ravel() for d in data])))
        typical = values[: int(len(values) * 0.99)].mean()
        assert ratios[q] == pytest.approx(values[-1] / typical, rel=0.02)


def test_smoothing_is_advised_where_a_matrix_product_reads_outliers() -> None:
    g = Graph()
    weights = g.const("w", RNG.normal(0, 1, (32, 16)), np.float32)
    model = g.model(g.op("MatMul", [g.input(1, 64, 32), weights], "fc"))
    data = [{"x": d["x"].reshape(1, 64, 32)} for d in outlying(0.005, 300.0)]
    inserted = qdqtool.insert(model, data, method="max", predict=False)
    assert any(w.startswith("ACT-OUTLIER") and "--smooth" in w for w in inserted.warnings)


def test_a_scale_that_clips_the_outliers_covers_none() -> None:
    data = outlying(0.005, 300.0)
    inserted = qdqtool.insert(float_network(), data, method="percentile", percentile=99.0, predict=False)
    assert not any(w.startswith("ACT-OUTLIER") for w in inserted.warnings)
def test_what_shares_a_scale_on_purpose_may_use_it_together() -> None:
    g = Graph()
    x = g.input(1, 8, 16, 16)
    parts = [g.conv(x, f"c{i}", scale=None, weights="float") for i in range(2)]
    joined = g.op("Concat", [parts[0], g.op("Mul", [parts[1], g.const("tenth", np.float32(0.1))], "small")], "cat",
                  axis=1)
    g.channels[joined] = 16
    model = qdqtool.insert(g.model(g.conv(joined, "last", scale=None, weights="float")), DATA, method="max",
                           predict=False).model
    assert reported(model) is None


def test_clipping_in_front_says_nothing_of_what_is_behind() -> None:
    model = qdqtool.insert(float_network(), DATA, method="max", predict=False).model
    name = next(n.name for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "x")
    found = reported(scaled(model, name, 1 / 16))
    assert found is not None and [f.quantizer for f in found.worst] == [name]
