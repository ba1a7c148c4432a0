import shlex
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import qdqtool
from calibration import Focus, FocusMap, TensorStatistics
from qdqtool.base.notes import Remark, remarks
from qdqtool.errors import ModelError
from qdqtool.insertion import losses, switched
from qdqtool.insertion.losses import (
    LITTLE,
    Compared,
    Losses,
    TensorLoss,
    candidates,
    compared_tensors,
    measure,
    with_predictions,
    without_pair,
)
from qdqtool.model.graph import Model
from qdqtool.render.insertion_text import render
from qdqtool.types import ConvOutcome, ModelInfo, Precision, Prediction, QuantizedTensor
from tests.insertion.nets import Net, check, copied, detector, images, run


def chain() -> Net:
    made = Net()
    tensor = "x"
    for name in "abc":
        tensor = made.op("Relu", f"{name}/relu", made.conv(name, tensor))
    made.output(made.conv("d", tensor))
    return made


def by_hand(wanted: np.ndarray, found: np.ndarray) -> float:
    return float(np.sqrt(((found - wanted) ** 2).mean() / wanted.var()))


def test_error_and_gain_are_those_of_the_models_run_by_hand() -> None:
    data = images(2)
    result = qdqtool.insert(chain().model(), data, losses=2, predict=False)
    assert result.losses is not None and result.losses.samples == 2
    activations = result.activations
    floats = result.model
    for entry in activations:
        floats = without_pair(Model(floats), entry).proto
    check(floats)
    wanted = [run(floats, x)[0] for x in data]
    total = np.mean(
        [by_hand(w, run(result.model, x)[0]) for w, x in zip(wanted, data, strict=True)]
    )
    assert result.losses.error == pytest.approx(total, rel=2e-3)
    for loss in result.losses.tensors:
        other = without_pair(
            Model(result.model), next(a for a in activations if a.tensor == loss.tensor)
        ).proto
        error = np.mean([by_hand(w, run(other, x)[0]) for w, x in zip(wanted, data, strict=True)])
        assert loss.gain == pytest.approx(1 - error / total, abs=5e-3)
    gains = [loss.gain for loss in result.losses.tensors]
    assert gains == sorted(gains, reverse=True) and min(gains) > 0


@pytest.mark.parametrize(("opset", "ir"), [(11, 6), (13, 3), (17, 8), (21, 10)])
def test_two_dequantizers_of_one_quantizer_are_switched_together(opset: int, ir: int) -> None:
    data = images(2)
    made = Net()
    tensor = made.op("Relu", "r", made.conv("a", "x"))
    made.output(
        made.conv("f", made.op("Add", "sum", made.conv("d", tensor), made.conv("e", tensor)))
    )
    result = qdqtool.insert(made.model(opset), data, predict=False, method="max")
    model = result.model
    model.ir_version = max(ir, model.ir_version)
    second = onnx.NodeProto()
    quantizer = next(
        n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "r.out"
    )
    first = next(n for n in model.graph.node if n.input and n.input[0] == quantizer.output[0])
    second.CopyFrom(first)
    second.name, second.output[0] = first.name + "/second", first.output[0] + "/second"
    next(n for n in model.graph.node if n.name == "e").input[0] = second.output[0]
    model.graph.node.insert(list(model.graph.node).index(first) + 1, second)
    check(model)
    floats = model
    for entry in result.activations:
        floats = without_pair(Model(floats), entry).proto
    found = measure(Model(model), result.activations, data, activations=result.activations)
    total = np.mean([by_hand(run(floats, x)[0], run(model, x)[0]) for x in data])
    assert (
        found is not None
        and found.error == pytest.approx(total, rel=2e-3)
        and type(found.error) is float
    )


def slowly(monkeypatch: pytest.MonkeyPatch, started: list[float], bad: float | None = None) -> None:
    """Runs of a stretch take a while and are noted by the first value of their sample; those of one fail."""
    run_stretch, both = switched._Stretch.run, threading.Barrier(2, timeout=30)

    def slow(stretch: switched._Stretch, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        first = float(values["x"].flat[0])
        started.append(first)
        if len(started) <= 2:
            both.wait()  # two samples have begun
        if first == bad:
            raise ModelError("broken sample")
        time.sleep(0.03)
        return run_stretch(stretch, values)

    monkeypatch.setattr(switched._Stretch, "run", slow)
    monkeypatch.setattr(losses, "cores", lambda: 2)


def test_samples_are_measured_at_once_and_as_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = images(3)
    made = qdqtool.insert(chain().model(), data, predict=False)
    found = []
    for cores in (1, 2):
        monkeypatch.setattr(losses, "cores", lambda cores=cores: cores)
        found.append(
            measure(
                Model(made.model), made.activations, data, activations=made.activations, samples=3
            )
        )
    assert found[0] is not None and found[0] == found[1]
    started: list[float] = []
    slowly(monkeypatch, started)
    assert measure(
        Model(made.model), made.activations, data, activations=made.activations, samples=2
    )
    # In front of the second to the fourth activation is a cut: four stretches with all float, four with all quantized,
    # and four, three, two, one with each of them left out.
    assert len(set(started[:2])) == 2 and len(started) == 2 * (4 + 4 + 4 + 3 + 2 + 1)


def test_runs_end_when_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = images(2)
    made = qdqtool.insert(chain().model(), data, predict=False)
    started: list[float] = []
    slowly(monkeypatch, started, float(data[0]["x"].flat[0]))
    with pytest.raises(ModelError, match="broken sample"):
        measure(Model(made.model), made.activations, data, activations=made.activations)
    assert len(started) <= 1 + 4, (
        "the other sample's run is ended, the runs that were to follow are not begun"
    )


@pytest.mark.parametrize("error", [0.09, 0.11])
def test_by_itself_it_looks_at_single_activations_only_where_the_outputs_move_much(
    error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once with float and once with all quantized activations on each of two samples; then each that is tried."""
    data = images(3)
    made = qdqtool.insert(chain().model(), data, predict=False)
    started: list[float] = []
    slowly(monkeypatch, started)
    monkeypatch.setattr(losses.Compared, "error", lambda self, found: error)
    tried = made.activations
    found = measure(Model(made.model), tried, data, activations=tried, samples=None)
    count = len(tried) if error > LITTLE else 0
    assert found is not None and (found.error, found.samples, found.tried) == (
        pytest.approx(error),
        2,
        count,
    )
    assert len(started) == 2 * (1 + 1) + (2 * (3 + 4 + 3 + 2 + 1) if count else 0)
    made.losses = found
    assert ("--losses 2 does" in render(made, 400)) == (not count)


def test_what_has_no_losses(tmp_path: Path) -> None:
    net = Net(channels=3)
    net.output(net.conv("b", net.op("Relu", "r", net.conv("a", "x", 3, 3)), 3, 3))
    made = qdqtool.insert(net.model(), images(2, 3), predict=False, include=["."])
    (tmp_path / "a.png").write_bytes(b"no picture")
    assert (
        measure(Model(made.model), made.activations, str(tmp_path), activations=made.activations)
        is None
    )
    # Inputs of 0 and 1 are whole steps of a scale of 1/127
    data = [{"x": np.rint(d["x"])} for d in images(4)]
    made = qdqtool.insert(chain().model(), data, predict=False, method="max")
    assert made.activations[0].tensor == "x" and made.activations[0].scale == float(
        np.float32(1 / 127)
    )
    found = measure(Model(made.model), made.activations, data, activations=made.activations)
    assert found is not None and found.samples == 2 and found.tried == 4
    assert "x" not in [loss.tensor for loss in found.tensors] and len(found.tensors) == 3
    fewer = measure(
        Model(made.model), made.activations, data, activations=made.activations, samples=3, named=2
    )
    assert fewer is not None and fewer.samples == 3 and len(fewer.tensors) == 2
    assert (
        measure(Model(made.model), made.activations[:1], data, activations=made.activations[:1])
        is None
    )
    data = images(2)
    made = qdqtool.insert(
        chain().model(), data, predict=False, method_for=[("b/relu", "percentile")], percentile=60.0
    )
    found = measure(Model(made.model), made.activations, data, activations=made.activations)
    assert (
        found is not None
        and found.tensors[0].tensor == "b/relu.out"
        and found.tensors[0].readers == ("c",)
    )


def test_what_is_tried_has_the_largest_error_of_its_own() -> None:
    """By hand: mean squared error of the quantized values over their mean square, the worst source of each tensor."""
    rng = np.random.default_rng(5)
    values = {
        "fine": rng.uniform(-1e-3, 1e-3, 5000),
        "coarse": rng.uniform(-2e-3, 2e-3, 5000),
        "zero": np.zeros(10),
        "clipped": rng.normal(0.0, 1.0, 5000),
        "wide": rng.uniform(-50.0, 50.0, 5000),
    }
    scales = {
        "fine": 1e-3 / 127,
        "coarse": 2e-3 / 20,
        "zero": 1.0,
        "clipped": 0.3 / 127,
        "wide": 50.0 / 127,
    }
    sources = {t: [t] for t in values} | {"fine": ["zero", "fine"], "wide": ["wide", "coarse"]}

    def error(name: str, scale: float) -> float:
        x = values[name].astype(np.float32).astype(np.float64)
        found = np.clip(np.rint(x / scale), -127, 127) * scale
        return float(((found - x) ** 2).mean() / (x**2).mean())

    worst = {
        t: max((error(s, scales[t]) for s in ss if s != "zero"), default=0.0)
        for t, ss in sources.items()
    }
    assert (
        len(set(worst.values())) == 5 and max(worst.values()) < 1.0 + 1e-6 and worst["zero"] == 0.0
    )
    statistics = {t: TensorStatistics.of(v.astype(np.float32)) for t, v in values.items()}
    entries = [QuantizedTensor(t, scales[t], "max", None, f"{t}/Q") for t in values]
    with np.errstate(all="raise"):
        found = candidates(entries, statistics, sources)
    assert [e.tensor for e in found] == sorted(worst, key=lambda t: -worst[t])
    assert candidates(entries, statistics, sources, 2) == found[:2]
    zeros = [QuantizedTensor("zero", 1.0, "max", None, f"{i}") for i in range(12)]
    assert (
        candidates(zeros, statistics, sources) == zeros[:8]
    )  # in graph order where they are alike


def test_what_loses_nothing() -> None:
    entries = [QuantizedTensor(t, 1e-43, "max", None, t) for t in "ab"]
    statistics = {
        "a": TensorStatistics.of(np.full(9, 1e-41, np.float32)),
        "b": TensorStatistics.of(np.ones(9)),
    }
    with np.errstate(all="raise"):
        found = candidates(entries, statistics, {"a": ["a"], "b": ["b"]})
    assert [e.tensor for e in found] == ["b", "a"]
    zero = np.zeros((1, 2, 2, 2), np.float32)
    assert Compared({"a": zero}, None).error({"a": zero}) == 0.0
    assert Compared({"a": zero}, None).error({"a": zero + 1.0}) == 0.0
    empty = zero[:0]
    assert Compared({"a": empty}, None).error({"a": empty}) == 0.0


def test_the_error_counts_where_the_network_looks_alone() -> None:
    rng = np.random.default_rng(0)
    wanted, found = rng.normal(size=(2, 3, 4, 4)), rng.normal(size=(2, 3, 4, 4))
    masks = rng.random((2, 4, 4)) < 0.4
    looked_at = FocusMap(list(masks))
    at = np.broadcast_to(masks[:, None], wanted.shape)
    compared = Compared({"map": wanted.astype(np.float32)}, looked_at)
    wanted, found = (
        wanted.astype(np.float32).astype(np.float64),
        found.astype(np.float32).astype(np.float64),
    )
    expected = np.sqrt(((found - wanted)[at] ** 2).mean() / wanted[at].var())
    assert compared.error({"map": found.astype(np.float32)}) == pytest.approx(expected, rel=1e-9)
    assert compared.nbytes == 8 * at.sum()
    row = {"row": rng.normal(size=(2, 5)).astype(np.float32)}  # no map, so that all of it counts
    assert Compared(row, looked_at).error({"row": 3.0 - row["row"]}) == pytest.approx(
        by_hand(row["row"].astype(np.float64), 3.0 - row["row"].astype(np.float64)), rel=1e-6
    )
    both = Compared({"map": wanted, **row}, None)
    assert both.error({"map": found, "row": row["row"]}) == pytest.approx(
        by_hand(wanted, found) / 2
    )


def test_outputs_and_maps_that_are_compared() -> None:
    model = Model(detector())
    assert (
        len(compared_tensors(model)) == 6
    )  # box and class outputs of three levels, in front of the DFL
    made = Net()
    flat = made.op("Flatten", "flat", made.op("Relu", "r", made.conv("c", "x")))
    made.output(
        made.op("Softmax", "s", made.op("Gemm", "fc", flat, made.const("w", np.ones((1024, 4)))))
    )
    assert compared_tensors(made.index()) == ["s.out"]
    # One map that is all of the outputs: its error by hand, at the positions of the float network's peaks
    made = Net()
    weight = made.const("w", made.rng.standard_normal((2, 16, 3, 3)) * 0.2)
    body = made.op("Relu", "r", made.conv("c", "x"))
    made.output(
        made.op(
            "Sigmoid", "s", made.op("Conv", "heat", body, weight, made.const("low", [-3.0, -4.0]))
        )
    )
    data = images(1)
    result = qdqtool.insert(made.model(), data, losses=1, predict=False, head="none", method="max")
    assert result.losses is not None
    floats = result.model
    for entry in result.activations:
        floats = without_pair(Model(floats), entry).proto
    ends = [with_output(m, "heat.out") for m in (floats, result.model)]
    wanted, found = (run(m, data[0], ["heat.out"])[0] for m in ends)
    looked_at = Focus(("heat.out",)).find({"heat.out": wanted})
    assert looked_at is not None and not looked_at.masks[0].all()
    at = np.broadcast_to(looked_at.masks[0], wanted.shape)
    assert result.losses.error == pytest.approx(by_hand(wanted[at], found[at]), rel=2e-3)
    assert result.losses.error != pytest.approx(by_hand(wanted, found), rel=2e-2)


def with_output(model: onnx.ModelProto, tensor: str) -> onnx.ModelProto:
    copy = copied(model)
    copy.graph.output.append(helper.make_empty_tensor_value_info(tensor))
    return copy


def predicted(int8: int, conversions: int | None) -> Prediction:
    convolutions = [
        ConvOutcome(i, f"c{i}", "Conv", "INT8", Precision.INT8, [], Precision.INT8)
        for i in range(int8)
    ]
    return Prediction(ModelInfo("", "", 17, 0), "trt8.5", convolutions, conversions=conversions)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ((5, 1), (4, 3), (1, 2)),
        ((5, 4), (5, 3), (0, -1)),
        ((5, None), (3, 3), (2, None)),
        ((5, 1), (3, None), (2, None)),
    ],
)
def test_the_price_is_the_difference_of_two_predictions(
    before: tuple[int, int | None], after: tuple[int, int | None], told: tuple[int, int | None]
) -> None:
    made = qdqtool.insert(chain().model(), images(1), predict=False, method="max")
    kept, gone = made.activations[:2]
    losses = Losses(0.1, [TensorLoss(t.tensor, (), 0.5) for t in (kept, gone)], 1, 2)
    # As for an input that is an integer now: there is nothing to leave out.
    model = without_pair(Model(made.model), gone)
    priced = with_predictions(
        losses, model, made.activations, predicted(*before), lambda _: predicted(*after)
    )
    assert [(t.convolutions, t.conversions) for t in priced.tensors] == [told, (None, None)]


def test_price_in_the_engine_and_text() -> None:
    rng = np.random.default_rng(0)
    data = [{"images": rng.random((1, 3, 64, 64), np.float32)} for _ in range(2)]
    made = qdqtool.insert(detector(), data, method="max", residual="both", losses=1)
    assert made.losses is not None and 0 < len(made.losses.tensors) <= 5 and made.losses.tried == 8
    assert made.prediction is not None
    before = made.prediction.summary()
    for loss in made.losses.tensors:
        entry = next(a for a in made.activations if a.tensor == loss.tensor)
        after = qdqtool.predict(without_pair(Model(made.model), entry), advice=False).summary()
        assert loss.convolutions == before["int8"] - after["int8"]
        assert loss.conversions == after["conversions"] - before["conversions"]
    text = render(made, 80)
    assert "What limits accuracy" in text and made.losses.tensors[0].tensor in render(
        made, 80, everything=True
    )
    assert all(len(line) <= 80 for line in text.splitlines())
    assert made.as_json()["losses"]["tensors"][0]["tensor"] == made.losses.tensors[0].tensor
    made.losses.tensors[0] = replace(made.losses.tensors[0], gain=0.01)
    assert "--exclude" not in render(made, 80), "it would take off a hundredth"
    made.losses.tensors[0] = replace(made.losses.tensors[0], gain=0.4)
    (line,) = [line for line in render(made, 80).splitlines() if "--exclude" in line]
    (pattern,) = shlex.split(line.partition("--exclude ")[2])
    again = qdqtool.insert(
        detector(), data, method="max", residual="both", losses=0, exclude=[pattern], predict=False
    )
    assert made.losses.tensors[0].tensor not in [a.tensor for a in again.activations]


def test_what_cannot_be_measured_is_a_warning_and_not_the_end() -> None:
    """An operator of TensorRT's own behind the last convolution; a NaN in a convolution that stays float."""
    made = Net()
    last = made.op("Relu", "s", made.conv("b", made.op("Relu", "r", made.conv("a", "x"))))
    made.output(made.op("MyPool", "p", last, domain="example"))
    result = qdqtool.insert(made.open_model(), images(2), losses=1, predict=False)
    assert result.losses is None and result.activations
    assert Remark.LOSSES_NOT_MEASURED in remarks(result.warnings)
    broken = chain().model()
    next(t for t in broken.graph.initializer if t.name == "d.bias").CopyFrom(
        onnx.numpy_helper.from_array(np.full(16, np.nan, np.float32), "d.bias")
    )
    result = qdqtool.insert(broken, images(2), losses=1, predict=False)
    assert result.losses is None and Remark.LOSSES_NOT_MEASURED in remarks(result.warnings)
