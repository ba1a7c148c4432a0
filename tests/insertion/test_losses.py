import re
import shlex
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from calibration import Focus, TensorStatistics
from qdqtool.formats.insertion_text import render
from qdqtool.insertion.exclusion_costs import add_times
from qdqtool.insertion.format_choice import FormatChoice
from qdqtool.insertion.losses import (
    ActivationLosses,
    TensorLoss,
    measure_losses,
    rank_activations,
)
from qdqtool.insertion.output_errors import (
    SMALL_ERROR,
    ReferenceOutputs,
)
from qdqtool.insertion.result import Insertion
from qdqtool.insertion.rewrite import QuantizedTensor
from qdqtool.insertion.switchable_network import SwitchableNetwork
from qdqtool.ir.graph import Model
from qdqtool.timing.alternatives import estimate_variant
from qdqtool.timing.on_gpu import predict_on_gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.trt.targets import target_named
from qdqtool.util.text import format_ms
from tests.findings.graphs import GRAPHS
from tests.insertion.nets import (
    Net,
    add_output,
    chain,
    check,
    detector,
    images,
    one_layer,
    relative_error,
    remove_pairs,
    require_prediction,
    run,
    set_value,
)
from tests.notes import note_codes


def mean_error(
    model: onnx.ModelProto, other: onnx.ModelProto, data: list[dict[str, np.ndarray]]
) -> float:
    return float(np.mean([relative_error(run(model, x)[0], run(other, x)[0]) for x in data]))


def test_losses_equal_error_of_models_without_pairs() -> None:
    data = images(2)
    result = qdqtool.insert(chain(), data, losses=2, predict=False)
    assert result.losses.samples == 2
    floats = remove_pairs(result.model, *result.activations)
    total = mean_error(floats, result.model, data)
    assert result.losses.error == pytest.approx(total, rel=2e-3)
    by_tensor = {entry.tensor: entry for entry in result.activations}
    for loss in result.losses.tensors:
        error = mean_error(floats, remove_pairs(result.model, by_tensor[loss.tensor]), data)
        assert loss.gain == pytest.approx(1 - error / total, abs=5e-3)
    gains = [loss.gain for loss in result.losses.tensors]
    assert gains == sorted(gains, reverse=True) and min(gains) > 0


@pytest.mark.parametrize(
    ("error", "printed", "rating"),
    [(0.0996, "10.0%", "larger than usual"), (0.0994, "9.9%", "small"), (0.1996, "20.0%", "large")],
)
def test_rating_and_test_of_activations_fit_the_printed_error(
    error: float, printed: str, rating: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceOutputs, "error", lambda *_: error)
    result = qdqtool.insert(chain(), images(1), predict=False, losses=None)
    text = " ".join(str(render(result)).split())
    assert f": {printed} of the outputs' standard deviation on 1 image ({rating})" in text
    outcome = "Tested all 4 activations in FP16, one at a time, on 1 image: none reliably lowers"
    assert (outcome in text) == (rating != "small")


def test_activations_that_were_not_tested_may_help() -> None:
    result = qdqtool.insert(chain(), images(1), predict=False, losses=1)
    result.losses = replace(result.losses, tried=3, tensors=[])
    tested = str(render(result)).split("Tested the 3 activations with the largest quantization")
    assert "Others may help: qdqtool tune" in tested[1]


@pytest.mark.parametrize(
    ("gain", "remark", "name", "choice"),
    [
        (0.3, "not confirmed", "output error", None),
        (0.06, "lowered by less than 10%, so not confirmed", "output error", None),
        # The output error on the screen is then that of the whole model.
        (
            0.3,
            "not confirmed",
            "error of the activations alone",
            FormatChoice("int8", "", {"int8": 0.7}, 8, {}, ""),
        ),
    ],
)
def test_advice_of_act_outlier_has_the_measured_gain(
    gain: float, remark: str, name: str, choice: FormatChoice | None
) -> None:
    data = images(2)
    for sample in data:
        sample["x"].flat[0] = 500.0  # the input of convolution a
    result = qdqtool.insert(chain(), data, losses=2, method="max")
    result.losses = replace(
        result.losses,
        tensors=[replace(t, gain=gain) for t in result.losses.tensors if t.readers == ("a",)],
    )
    result.choice, error = choice, result.losses.error
    measured = f"{name} {error:.1%} -> about {error * (1 - gain):.0%} ({remark})"
    assert f"With this --exclude: {measured}" in " ".join(str(render(result)).split())


@pytest.mark.parametrize(("opset", "ir"), [(11, 6), (13, 3), (17, 8), (21, 10)])
def test_measure_switches_two_dequantizers_of_quantizer_together(
    opset: int, ir: int, net: Net
) -> None:
    data, tensor = images(2), net.op("Relu", "r", net.conv("a", "x"))
    joined = net.op("Add", "sum", net.conv("d", tensor), net.conv("e", tensor))
    result = qdqtool.insert(
        net.output(net.conv("f", joined)).model(opset), data, predict=False, method="max"
    )
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
    losses = measure_losses(
        Model(model), result.activations, data, activations=result.activations, samples=2
    )
    total = mean_error(remove_pairs(model, *result.activations), model, data)
    assert losses.error == pytest.approx(total, rel=2e-3) and type(losses.error) is float


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """First value of the sample of each run of the network.

    The network runs on two threads; the first two runs wait for each other.
    """
    runs: list[float] = []
    both, run_network = threading.Barrier(2, timeout=60), SwitchableNetwork.run

    def record_run(
        network: SwitchableNetwork, sample: dict[str, np.ndarray], floats: Collection[str] = ()
    ) -> dict[str, np.ndarray]:
        runs.append(float(sample["x"].flat[0]))
        if len(runs) <= 2:
            both.wait()
        return run_network(network, sample, floats)

    monkeypatch.setattr(SwitchableNetwork, "run", record_run)
    monkeypatch.setattr("qdqtool.insertion.losses.core_count", lambda: 2)
    return runs


@pytest.fixture(scope="module")
def chain_insertion() -> Insertion:
    return qdqtool.insert(chain(), images(3), predict=False)


def measure_all(result: Insertion, data: object, **options: Any) -> ActivationLosses:
    return measure_losses(
        Model(result.model), result.activations, data, activations=result.activations, **options
    )


def test_measure_gives_same_losses_on_one_and_two_threads(
    chain_insertion: Insertion, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    for cores in (1, 2):
        monkeypatch.setattr("qdqtool.insertion.losses.core_count", lambda cores=cores: cores)
        losses.append(measure_all(chain_insertion, images(3), samples=3))
    assert losses[0] == losses[1]


def test_measure_runs_samples_at_once(chain_insertion: Insertion, runs: list[float]) -> None:
    assert measure_all(chain_insertion, images(3), samples=2)
    # Each sample runs with all activations float, with all quantized, and with each of four float.
    assert len(set(runs[:2])) == 2 and len(runs) == 2 * (1 + 1 + 4)


@pytest.mark.parametrize(
    ("percentile", "tried", "count"),
    [(99.5, 0, 3 * (1 + 1)), (98.0, 4, 3 * (1 + 1) + 2 * 4)],
    ids=["small error", "large error"],
)
def test_measure_tries_activations_only_for_large_error(
    percentile: float, tried: int, count: int, runs: list[float]
) -> None:
    """Three samples run with all activations float and quantized, two of them with each float."""
    result = qdqtool.insert(
        chain(), images(3), predict=False, method="percentile", percentile=percentile
    )
    losses = result.losses = measure_all(result, images(3), samples=None)
    assert (losses.error > SMALL_ERROR) == bool(tried)
    assert (losses.samples, losses.tried, len(runs)) == (3, tried, count)
    assert ("--losses 3 measures it" in str(render(result, 400, everything=True))) == (not tried)


@pytest.fixture(scope="module")
def clipping() -> Insertion:
    return qdqtool.insert(
        chain(), images(8), predict=False, method_for=[("b/relu", "percentile")], percentile=60.0
    )


def test_measure_confirms_gain_on_other_images(clipping: Insertion) -> None:
    """Gains are 1 minus the ratio of the summed errors: of two images, and of the other six."""
    data = images(8)
    losses = measure_all(clipping, data, samples=None)
    assert (losses.samples, losses.trial_samples) == (8, 2)
    worst = losses.tensors[0]
    assert (worst.tensor, worst.readers) == ("b/relu.out", ("c",))
    assert (worst.confirmed, worst.confirmed_on) == (True, 6)
    entry = next(a for a in clipping.activations if a.tensor == worst.tensor)
    floats = remove_pairs(clipping.model, *clipping.activations)
    other = remove_pairs(clipping.model, entry)
    trial, rest = [data[0], data[7]], data[1:7]
    for gain, part in ((worst.gain, trial), (worst.confirmed_gain, rest)):
        ratio = mean_error(floats, other, part) / mean_error(floats, clipping.model, part)
        assert gain == pytest.approx(1 - ratio, abs=5e-3)


@pytest.mark.parametrize(
    ("count", "samples", "trial", "confirmed_on"),
    [(3, None, 2, 0), (5, None, 2, 0), (6, None, 2, 4), (8, 5, 5, 5)],
)
def test_measure_confirms_on_four_other_images_or_on_the_requested_number(
    clipping: Insertion, count: int, samples: int | None, trial: int, confirmed_on: int
) -> None:
    losses = measure_all(clipping, images(count), samples=samples)
    worst = losses.tensors[0]
    assert (losses.trial_samples, worst.confirmed_on) == (trial, confirmed_on)
    assert worst.confirmed == bool(confirmed_on)
    assert samples is None or worst.confirmed_gain == pytest.approx(worst.gain)


@pytest.mark.parametrize(
    ("pattern", "percentile", "node", "unused"),
    [
        ("relu", 80.0, "b", ""),
        ("b/relu", 60.0, "c", " without --method-for b/relu=percentile --percentile 60"),
    ],
)
def test_text_states_the_error_of_the_proposed_exclusion(
    pattern: str, percentile: float, node: str, unused: str
) -> None:
    """The weights of the excluded layer become float too, so the error differs from the gain's.

    If no other tensor has the method, the options of the method would be errors.
    """
    methods = {"method_for": [(pattern, "percentile")], "percentile": percentile}
    result, pasted = (
        qdqtool.insert(chain(), images(8), losses=None, predict=False, **options)
        for options in (methods, {"exclude": [f"^{node}$"], **({} if unused else methods)})
    )
    before, after, worst = result.losses.error, pasted.losses.error, result.losses.tensors[0]
    assert before * (1 - worst.confirmed_gain) != pytest.approx(after, rel=1e-3)
    change = f"output error {before:.1%} -> {after:.1%} (measured on 8 images)"
    text = " ".join(str(render(result, 200)).split())
    assert f"{node} in FP16: {change}" in text and f"Try: --exclude '^{node}$'{unused}" in text
    choice = FormatChoice("int8", "", {"int8": 0.7}, 8, {}, "")  # error of the whole model
    text = " ".join(str(render(replace(result, choice=choice), 200)).split())
    assert f"error of the activations alone {change.removeprefix('output error ')}" in text
    others = [replace(worst, excluded_error=0.91 * before), replace(worst, excludable=False)]
    assert "Try" not in str(
        render(replace(result, losses=replace(result.losses, tensors=others)), 200)
    )


def test_measure_does_not_confirm_gain_of_single_images() -> None:
    """Only the first and the last image exceed the input's range, and these select it."""
    data = images(8)
    result = qdqtool.insert(chain(), data, predict=False, method="max")
    quantizer = next(n for n in result.model.graph.node if n.input[0] == "x")
    set_value(result.model, quantizer.input[1], np.float32(0.2 / 127))
    data[1:7] = [{"x": sample["x"] * np.float32(0.2)} for sample in data[1:7]]
    worst = measure_all(result, data, samples=None).tensors[0]
    assert (worst.tensor, worst.confirmed_on, worst.confirmed) == ("x", 6, False)
    assert worst.confirmed_gain < 0.1 < worst.gain


def test_measure_returns_none_if_no_image_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no image")
    result = qdqtool.insert(one_layer(3), images(2, 3), predict=False, include=["."])
    tensors = result.activations
    assert measure_losses(Model(result.model), tensors, str(tmp_path), activations=tensors) is None


@pytest.mark.parametrize(("count", "expected"), [(None, 8), (3, 3)])
def test_samples_of_a_fixed_batch_are_counted_as_images(count: int | None, expected: int) -> None:
    """The last batch of three images repeats an image, which does not count."""
    result = qdqtool.insert(
        one_layer(batch=4),
        images(12),
        losses=count,
        high_precision="fp16",
        predict=False,
        include=["."],
    )
    assert result.losses.samples == result.agreement.samples == expected
    assert f"standard deviation on {expected} images" in " ".join(str(render(result)).split())


def test_losses_leave_out_activation_without_error() -> None:
    # The scale 1/127 represents the inputs without error.
    data = [{"x": np.rint(d["x"])} for d in images(4)]
    result = qdqtool.insert(chain(), data, predict=False, method="max")
    exact = result.activations[0]
    assert (exact.tensor, exact.scale) == ("x", float(np.float32(1 / 127)))
    losses = measure_all(result, data, samples=2)
    assert (losses.samples, losses.tried) == (2, 4)
    assert "x" not in [loss.tensor for loss in losses.tensors] and len(losses.tensors) == 3
    assert measure_losses(Model(result.model), [exact], data, activations=[exact]) is None


def test_candidates_are_sorted_by_error() -> None:
    """The error is the mean squared error over the mean square, of each tensor's worst source."""
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
        quantized = np.clip(np.rint(x / scale), -127, 127) * scale
        return float(((quantized - x) ** 2).mean() / (x**2).mean())

    worst = {
        t: max((error(s, scales[t]) for s in ss if s != "zero"), default=0.0)
        for t, ss in sources.items()
    }
    statistics = {t: TensorStatistics.of(v.astype(np.float32)) for t, v in values.items()}
    entries = [QuantizedTensor(t, scales[t], "max", None, f"{t}/Q") for t in values]
    with np.errstate(all="raise"):
        ranked = rank_activations(entries, statistics, sources)
    assert [e.tensor for e in ranked] == sorted(worst, key=lambda t: -worst[t])
    assert rank_activations(entries, statistics, sources, 2) == ranked[:2]


def test_candidates_of_equal_error_keep_graph_order() -> None:
    zeros = [QuantizedTensor("zero", 1.0, "max", None, f"{i}") for i in range(12)]
    statistics = {"zero": TensorStatistics.of(np.zeros(10, np.float32))}
    assert rank_activations(zeros, statistics, {"zero": ["zero"]}) == zeros[:8]


def test_candidates_with_values_below_normal_float32() -> None:
    entries = [QuantizedTensor(t, 1e-43, "max", None, t) for t in "ab"]
    statistics = {
        "a": TensorStatistics.of(np.full(9, 1e-41, np.float32)),
        "b": TensorStatistics.of(np.ones(9)),
    }
    with np.errstate(all="raise"):
        ranked = rank_activations(entries, statistics, {"a": ["a"], "b": ["b"]})
    assert [e.tensor for e in ranked] == ["b", "a"]


def test_losses_of_heat_map_count_positions_of_peaks(net: Net) -> None:
    weight = net.const("w", net.rng.standard_normal((2, 16, 3, 3)) * 0.2)
    heat = net.op(
        "Conv",
        "heat",
        net.op("Relu", "r", net.conv("c", "x")),
        weight,
        net.const("low", [-3.0, -4.0]),
    )
    model = net.output(net.op("Sigmoid", "s", heat)).model()
    (sample,) = data = images(1)
    result = qdqtool.insert(model, data, losses=1, predict=False, head="none", method="max")
    before, after = (
        run(add_output(m, "heat.out"), sample, ["heat.out"])[0]
        for m in (remove_pairs(result.model, *result.activations), result.model)
    )
    focus = Focus(("heat.out",)).find({"heat.out": before})
    assert not focus.masks[0].all()
    at = np.broadcast_to(focus.masks[0], before.shape)
    assert result.losses.error == pytest.approx(relative_error(before[at], after[at]), rel=2e-3)
    assert result.losses.error != pytest.approx(relative_error(before, after), rel=2e-2)


YOLOV8_DATA = images(2, 3, 64, "images", seed=0)
YOLOV8_OPTIONS = {"method": "max", "residual": "both"}


@pytest.fixture(scope="module")
def yolov8() -> Insertion:
    return qdqtool.insert(detector(), YOLOV8_DATA, losses=1, **YOLOV8_OPTIONS)


def exclude_readers(loss: TensorLoss) -> onnx.ModelProto:
    names = f"^({'|'.join(map(re.escape, loss.readers))})$"
    return qdqtool.insert(
        detector(), YOLOV8_DATA, exclude=[names], predict=False, **YOLOV8_OPTIONS
    ).model


def test_losses_of_yolov8_in_predictions(yolov8: Insertion) -> None:
    assert 0 < len(yolov8.losses.tensors) <= 5 and yolov8.losses.tried == 8
    assert yolov8.losses.at_objects
    before = require_prediction(yolov8).summary()
    for loss in yolov8.losses.tensors:
        after = qdqtool.predict(exclude_readers(loss), advice=False).summary()
        assert loss.convolutions == before["int8"] - after["int8"]
        assert loss.conversions == after["conversions"] - before["conversions"]
    assert yolov8.as_json()["losses"]["tensors"][0]["tensor"] == yolov8.losses.tensors[0].tensor


def test_text_names_the_warnings_of_the_prediction(yolov8: Insertion) -> None:
    prediction = qdqtool.predict(GRAPHS["residual-float"]())
    serious = {f.code for f in prediction.findings if f.severity != "info"}
    assert "SKIP-FLOAT" in serious
    text = str(render(replace(yolov8, prediction=prediction), 200))
    listed = [line.strip().removeprefix("Findings").strip() for line in text.splitlines()]
    assert all(any(line.startswith(f"warning {code}: ") for line in listed) for code in serious)
    notes = {f.code for f in prediction.findings} - serious
    assert notes and not any(code in text for code in notes)


def test_losses_name_outputs_that_the_error_does_not_include(net: Net) -> None:
    """The Relu after the last convolution of one branch, as for prototypes, is not part of a head."""
    ends = net.conv("a", "x"), net.op("Relu", "protos", net.conv("b", "x"))
    result = qdqtool.insert(net.output(*ends).model(), images(2), losses=1, head="none")
    assert result.losses is not None and result.losses.uncovered == ("protos.out",)
    assert "Not included: 1 output (protos.out)" in str(render(result, 200))


@pytest.mark.parametrize(("confirmed", "width"), [(False, 80), (True, 80), (True, 40)])
def test_text_suggests_exclusion_for_confirmed_gain(
    yolov8: Insertion, confirmed: bool, width: int
) -> None:
    worst = replace(
        yolov8.losses.tensors[0],
        gain=0.4,
        confirmed_gain=0.4 if confirmed else 0.05,
        confirmed_on=6,
        confirmed=confirmed,
    )
    losses = replace(yolov8.losses, tensors=[worst, *yolov8.losses.tensors[1:]])
    text = str(render(replace(yolov8, losses=losses), width))
    lines = [line for line in text.splitlines() if "--exclude" in line]
    assert len(lines) == int(confirmed)
    for line in lines:
        other = qdqtool.insert(
            detector(),
            YOLOV8_DATA,
            exclude=shlex.split(line.partition("--exclude ")[2]),
            predict=False,
            **YOLOV8_OPTIONS,
        )
        assert worst.tensor not in [a.tensor for a in other.activations]


def test_confirmed_losses_state_their_cost_in_time(yolov8: Insertion) -> None:
    """The cost equals the difference between the times of the two written models."""
    first, *others = yolov8.losses.tensors
    confirmed = replace(first, confirmed_gain=0.4, confirmed_on=6, confirmed=True)
    losses, target = replace(yolov8.losses, tensors=[confirmed, *others]), target_named("trt10")
    _, time = predict_on_gpu(yolov8.model, target, TimingOptions(gpu="Orin Nano 8GB"))
    timed = add_times(
        losses,
        Model(yolov8.model),
        yolov8.activations,
        time.total_ms,
        lambda changed: estimate_variant(time, changed, target),
    )
    before, after = (
        qdqtool.predict(model, gpu="Orin Nano 8GB").time["total_ms"]
        for model in (yolov8.model, exclude_readers(first))
    )
    assert timed.tensors[0].ms == pytest.approx(after - before, abs=2e-3)
    assert all(loss.ms is None for loss in timed.tensors[1:])
    word = "less" if timed.tensors[0].ms < 0 else "more"
    assert f", {format_ms(abs(timed.tensors[0].ms))} {word}" in " ".join(
        str(render(replace(yolov8, losses=timed), 80)).split()
    )


def test_insert_warns_if_onnxruntime_lacks_operator(net: Net) -> None:
    """The operator is TensorRT's own and stands after the last convolution."""
    last = net.op("Relu", "s", net.conv("b", net.op("Relu", "r", net.conv("a", "x"))))
    model = net.output(net.op("MyPool", "p", last, domain="example")).open_model()
    result = qdqtool.insert(model, images(2), losses=1, predict=False)
    assert result.losses is None and result.activations
    assert "losses-not-measured" in note_codes(result.warnings)


def test_insert_warns_if_outputs_are_not_finite() -> None:
    broken = chain()
    set_value(broken, "d.bias", np.full(16, np.nan, np.float32))
    result = qdqtool.insert(broken, images(2), losses=1, predict=False)
    assert result.losses is None and "losses-not-measured" in note_codes(result.warnings)
