"""What fixes gain and cost, on the models that they are tried on."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

from qdqtool.fixing import sandbox, weights
from qdqtool.fixing.api import add_fixes, fix
from qdqtool.fixing.gains import NO_GAIN, find_culprits, find_objection
from qdqtool.fixing.sandbox import RunError, RunTimeoutError, Sandbox
from qdqtool.fixing.site import FixCriteria
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import load
from qdqtool.ir.qdq import read_params
from qdqtool.patterns.view import View
from qdqtool.prediction import predict
from qdqtool.timing.estimate import estimate
from qdqtool.timing.gpus import find_gpu
from qdqtool.trt.refusals import ResidualFloat
from qdqtool.trt.targets import target_named
from qdqtool.util import limits
from qdqtool.util.records import replaced
from tests.fixing.steps import sites
from tests.insertion.nets import run
from tests.trt import evidence
from tests.trt.builder import Graph
from tools.growth.families import Net, convolutions

AIM = FixCriteria((ResidualFloat,), noise_factor=1.0)

# Which of several changes is at fault; and that the number of tries does not follow that of places.


def removed(count: int, places: list[int]) -> tuple[Model, Model, list[set[int]]]:
    """A chain of quantized convolutions, and the same without the pairs in front of some of them."""
    model = Model(convolutions(6 * count))
    editor = Editor(model.copy())
    touched = []
    for place in places:
        conv = [n for n in model.nodes if n.op == "Conv"][place]
        dq = model.producer(conv.input(0))
        editor.edited = set()
        editor.remove_pairs(model.producer(dq.input(0)), [dq])
        touched.append(editor.edited)
    return model, editor.finish(), touched


@pytest.mark.parametrize(("places", "other"), [([2], 6), ([1, 6], 4), ([0, 3, 7], 5)])
def test_each_lost_convolution_is_laid_to_the_change_beside_it(
    places: list[int], other: int
) -> None:
    model, candidate, touched = removed(9, places)
    harmless = [n for n in model.nodes if n.op == "Conv"][other]
    before, after = predict(model, "trt8.5"), predict(candidate, "trt8.5")
    assert after.summary()["int8"] == before.summary()["int8"] - len(places)
    found = find_culprits(model, candidate, [*touched, {harmless.index}], before, after, AIM)
    assert set(found) == set(range(len(places)))


def test_what_is_no_gain() -> None:
    model, candidate, touched = removed(9, [4])
    before, after = predict(model, "trt8.5"), predict(candidate, "trt8.5")
    assert set(find_culprits(model, candidate, [*touched, touched[0]], before, after, AIM)) == {
        0,
        1,
    }
    prediction = predict(convolutions(12), "trt8.5")
    assert find_objection(prediction, prediction, AIM) == NO_GAIN


def joined(count: int, apart: set[int]):
    """Concats of two scales; where these lie far apart, one scale would cost the smaller part its resolution."""
    net = Net()
    for name, value in (("w", np.eye(8)), ("w16", np.concatenate([np.eye(8), np.eye(8)], 1) / 2)):
        net.weights[name] = numpy_helper.from_array(
            value.astype(np.float32)[:, :, None, None], name
        )
    last = "x"
    ends = []
    for place in range(count):
        parts = [
            net.pair(net.conv(last, 0.01), 0.01),
            net.pair(net.conv(last, 0.01), 2.0 if place in apart else 0.011),
        ]
        ends.append(
            net.add(
                "Conv", net.pair(net.add("Concat", *parts, axis=1), 0.01), net.pair("w16", 0.25)
            )
        )
    return net.done(*ends)


@pytest.mark.parametrize("apart", [set(), {4}, set(range(0, 6, 2))])
def test_tries_grow_with_what_is_at_fault_not_with_the_places(apart: set[int], monkeypatch) -> None:
    predictions = []

    def count(model, target):
        predictions.append(model)
        return predict(model, target)

    monkeypatch.setattr("qdqtool.fixing.session.predict", count)
    fixed = fix(joined(6, apart), "trt8.5", ["CONCAT-SCALE"])
    assert len(fixed.applied) + len(fixed.refused) == 6
    assert len(fixed.refused) == len(apart)
    assert len(predictions) <= 2 + 5 * len(apart)  # the first is of the model without fixes


# What the automatic fixes save: the simulated figure is the difference of two whole estimates.

TARGET = target_named("trt8.5")


def test_figures_of_fixes() -> None:
    model = evidence.model("resnet18-a100-qat")
    gpu = find_gpu("RTX 3060")
    prediction = predict(model, TARGET)
    time = estimate(model, prediction, gpu, TARGET, compare=False)
    add_fixes(model, prediction, time, TARGET)
    (skips,) = time.fixes
    assert set(skips.codes) <= {"SKIP-FLOAT", "POOL-MIXED"} and len(skips.nodes) == 5
    assert 0.2 * time.total_ms < skips.saves_ms < 0.6 * time.total_ms
    assert time.as_json()["fixes"] == [skips.as_json()]
    stem = max(
        (f for f in prediction.findings if f.code == "POOL-MIXED"), key=lambda f: f.saves_ms or 0
    )
    assert (
        stem.saves_ms is not None and stem.saves_ms > 0.5 * skips.saves_ms
    )  # the pooling behind the stem goes too
    fixed = fix(evidence.model("resnet18-qat-rtx2000-trt8510"), "trt8.5")
    model = evidence.model("resnet18-qat-rtx2000-trt8510")
    time = estimate(model, fixed.before, gpu, TARGET, compare=False)
    add_fixes(model, fixed.before, time, TARGET)
    after = estimate(load(fixed.proto), fixed.after, gpu, TARGET, compare=False)
    if fixed.applied:
        assert time.fixes and time.total_ms - sum(f.saves_ms for f in time.fixes) == pytest.approx(
            after.total_ms, rel=0.05
        )
    else:
        assert after.total_ms == pytest.approx(time.total_ms)


def test_gpus_without_int8_and_per_tensor_weights() -> None:
    assert sites(weights.find_transposed_weights, network(None)) == []
    assert [s.code for s in sites(weights.find_transposed_weights, network(0))] == ["CT-AXIS"]
    proven = replaced(TRT85, transposed_per_channel=True)
    assert sites(weights.find_transposed_weights, network(1), proven) == []
    assert [s.code for s in sites(weights.find_transposed_weights, network(0), proven)] == [
        "CT-AXIS"
    ]
    for case, gpu in (
        ("resnet18-a100-qat-residual-qgap", "RTX 3060"),
        ("resnet18-a100-qat", "P100"),
    ):
        model = evidence.model(case)
        prediction = predict(model, TARGET)
        time = estimate(model, prediction, find_gpu(gpu), TARGET, compare=False)
        add_fixes(model, prediction, time, TARGET)
        assert time.fixes == []


# ConvTranspose weights get one scale where no target is proven to take one for each output channel.

TRT85 = target_named("trt8.5")


def network(axis: int | None, form: str = "qdq", half: bool = False) -> Model:
    g = Graph(opset=19 if half else 13, half=half)
    data = g.pair(g.relu(g.input(1, 8, 6, 6), "r"), "in", 0.05)
    kind = form if axis is not None else "tensor"
    stored = g.weights("up", (8, 8, 2, 2), kind, axis or 0)
    out = g.op("ConvTranspose", [data, stored], "up", kernel_shape=[2, 2], strides=[2, 2])
    return Model(g.model(g.op("Neg", g.pair(out, "q", 0.05), "end")))


def fixed(model: Model) -> Model:
    (site,) = sites(weights.find_transposed_weights, model)
    assert (site.code, site.node) == ("CT-AXIS", "up")
    editor = Editor(model.copy())
    site.apply(editor)
    return editor.finish()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("form", ["qdq", "int8"])
@pytest.mark.parametrize("half", [False, True])
def test_one_scale_from_the_largest_weight(axis: int, form: str, half: bool) -> None:
    model = network(axis, form, half)
    view = View(model)
    old = view.weights(model.node("up"))
    value = model.constant(old.source)
    assert value is not None and old.dq is not None
    real = value.astype(np.float64)
    if form == "int8":
        scales = read_params(model, old.dq).scale
        assert scales is not None
        real = real * scales.reshape([-1 if i == axis else 1 for i in range(4)])
    result = fixed(model)
    new = View(result).weights(result.node("up"))
    assert new.dq is not None
    params = read_params(result, new.dq)
    assert params.scale is not None and params.axis is None and params.scale_shape == ()
    assert params.scale[0] == pytest.approx(np.abs(real).max() / 127, rel=1e-3)
    x = np.random.default_rng(0).random((1, 8, 6, 6)).astype(np.float16 if half else np.float32)
    (before,), (after,) = run(model.proto, {"x": x}), run(result.proto, {"x": x})
    assert (
        np.abs(before.astype(np.float64) - after).max() <= 0.05 * 4
    )  # a few steps of the output's quantizer
    assert not np.array_equal(before, np.zeros_like(before))


# The process that runs models: what its limit of time counts, and what becomes of one that ends.

REAL = sandbox.WORKER.read_text("utf-8")
X = np.ones((1, 4, 8, 8), np.float32)


def relu() -> bytes:
    g = Graph()
    return bytes(g.model(g.relu(g.input(1, 4, 8, 8), "r")).SerializeToString())


def slow_to_start(folder: Path, seconds: float) -> Path:
    worker = folder / "worker.py"
    begin = 'if __name__ == "__main__":\n'
    worker.write_text(
        REAL.replace(begin, f"{begin}    import time\n\n    time.sleep({seconds})\n"), "utf-8"
    )
    return worker


def test_starting_it_is_none_of_a_models_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "WORKER", slow_to_start(tmp_path, 3.0))
    box = Sandbox()
    found = box.run(relu(), {"x": X}, 2.5, 2**31)
    box.close()
    assert np.array_equal(found["r:0"], X)


def test_memory_that_earlier_runs_left_in_pieces_decides_nothing(tmp_path, monkeypatch) -> None:
    asked = "        try:\n            arrays = _read_arrays("
    assert asked in REAL
    full = "        runs = globals()['runs'] = globals().get('runs', -1) + 1\n        try:\n"
    full += (
        "            if runs: raise RuntimeError('bfc_arena.cc:359 Failed to allocate memory')\n"
    )
    full += "            arrays = _read_arrays("
    worker = tmp_path / "worker.py"
    worker.write_text(REAL.replace(asked, full), "utf-8")
    monkeypatch.setattr(sandbox, "WORKER", worker)
    box = Sandbox()
    for _ in range(3):
        assert np.array_equal(box.run(relu(), {"x": X}, 60, 2**31)["r:0"], X)
    box.close()


def test_one_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "WORKER", tmp_path / "missing.py")
    with pytest.raises(RunError) as caught:
        Sandbox().run(relu(), {"x": X}, 60, 2**31)
    assert caught.value.code == "worker-not-started"
    monkeypatch.setattr(sandbox, "WORKER", slow_to_start(tmp_path, 60))
    monkeypatch.setattr(limits, "SESSION_STUCK", 0.2)
    with pytest.raises(RunError) as caught:
        Sandbox().run(relu(), {"x": X}, 60, 2**31)
    assert caught.value.code == "worker-not-started"


def test_only_the_time_of_the_processor_ends_a_run(g: Graph) -> None:
    """One that is stopped for longer than it may compute gives the same; one that computes for longer is ended, and the
    next run starts another."""
    x = g.input(1, 64, 160, 160)
    for i in range(40):
        x = g.conv(x, f"c{i}", 64, weights="float", scale=None)
    long, given = g.model(x).SerializeToString(), {"x": np.ones((1, 64, 160, 160), np.float32)}
    box = Sandbox()
    process = box.start()
    seconds = 0.3
    process.send_signal(signal.SIGSTOP)
    timer = threading.Timer(2 * seconds, process.send_signal, [signal.SIGCONT])
    timer.start()
    assert np.array_equal(box.run(relu(), {"x": X}, seconds, 2**31)["r:0"], X)
    assert box.start() is process
    with pytest.raises(RunTimeoutError) as caught:
        box.run(long, given, 0.05, 2**31)
    assert (caught.value.code, caught.value.parameter) == ("cpu-time-limit", "effort")
    assert process.returncode == -signal.SIGPROF
    assert np.array_equal(box.run(relu(), {"x": X}, 60, 2**31)["r:0"], X)
    box.close()


def test_one_that_neither_computes_nor_ends_is_ended_by_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SESSION_STUCK", 0.2)
    command = [sys.executable, "-ISc", "import time; time.sleep(60)"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    box = Sandbox()
    monkeypatch.setattr(box, "start", lambda: process)
    with pytest.raises(RunTimeoutError) as caught:
        box.run(relu(), {"x": X}, 0.01, 2**31)
    assert caught.value.code == "wall-clock-limit"
    for stream in (process.stdin, process.stdout):
        stream.close()
