"""Whole engines: what is counted, what the range says, what fixes save."""

import contextlib
import functools
from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdqtool.base.notes import Remark, remarks
from qdqtool.errors import QdqtoolError
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from qdqtool.model.slim import without_large_weights
from qdqtool.options import Request
from qdqtool.prediction import predict
from qdqtool.render.predict_text import whether_it_pays
from qdqtool.timing import twin, work
from qdqtool.timing.estimate import estimate, predict_on
from qdqtool.timing.gpus import chosen, find, gpus
from qdqtool.timing.parts import PAYS
from qdqtool.timing.physics import constants
from qdqtool.timing.twin import Shapes
from qdqtool.trt.targets import TARGETS, strongly_typed
from qdqtool.types import Precision
from tests.slow import slow_after
from tests.timing.models import TARGET, chain, timed, workload
from tests.trt import evidence
from tests.trt.builder import Graph
from tools.growth.families import convolutions

CASES = ("resnet18-a100-qat", "mobilenetv2-titanrtx-qat-residual")


def test_work_and_totals_of_a_chain():
    """Three 3x3 convolutions of 64 channels at 56x56: MACs, bytes and types of each."""
    found = workload(chain())
    convs = [w for w in found.layers if w.kind == work.CONV]
    assert [w.macs for w in convs] == [56 * 56 * 64 * 64 * 9] * 3
    assert [(w.read, w.weights) for w in convs] == [(56 * 56 * 64, 64 * 64 * 9)] * 3
    assert [w.written for w in convs] == [56 * 56 * 64, 56 * 56 * 64, 2 * 56 * 56 * 64]
    first = next(w for w in found.layers if w.kind == work.CONVERSION)
    assert (first.read, first.written) == (4 * 56 * 56 * 64, 56 * 56 * 64)
    assert not found.unknown
    (_, time), (_, graph) = timed(chain()), timed(chain(), graph=True)
    overhead = constants().overhead_us * 1e-3
    gap = constants().gap_us * 1e-3  # between kernels, where no CUDA graph is used
    assert sum(k.ms - overhead + gap for k in time.kernels) == pytest.approx(
        time.total_ms, rel=1e-6
    )
    assert graph.total_ms == pytest.approx(time.total_ms - gap * len(time.kernels), rel=1e-6)
    assert time.low_ms < time.total_ms < time.high_ms
    assert time.high_ms / time.total_ms == pytest.approx(constants().spreads["total"])
    assert 0 < time.conversions_ms < time.total_ms


def test_float_models_and_twins():
    model = load(chain())
    found = twin.float_twin(model)
    assert not twin.has_qdq(found)
    assert [n.op for n in found.nodes] == [n.op for n in load(chain(quantized=False)).nodes]
    assert twin.has_qdq(model), "the model itself is not changed"
    quantized, plain = timed(chain(batch=32))[1], timed(chain(batch=32, quantized=False))[1]
    assert quantized.float_time.total_ms == pytest.approx(plain.total_ms, rel=1e-6)
    assert quantized.gain > 1.2
    assert plain.best is not None and plain.best.int8 == 3 and plain.gain is None
    assert plain.best.gain == pytest.approx(plain.total_ms / plain.best.total_ms)
    assert plain.best.total_ms == pytest.approx(quantized.total_ms, rel=0.05)


GPUS = ("RTX 2060", "Jetson Nano", "RTX 5090", "GTX 1080 Ti")
TARGETS_TYPED = [
    (name, typed)
    for name in TARGETS
    for typed in (False, True)
    if not typed or TARGETS[name].strongly_typed or TARGETS[name].version >= (10, 0)
]


# Each target with one GPU, with INT8 and without in turn; with another one in the slow ones.
@pytest.mark.parametrize(
    ("name", "typed", "gpu"),
    slow_after(
        len(TARGETS_TYPED),
        [
            (*target, GPUS[(i + k) % len(GPUS)])
            for k in (0, 1)
            for i, target in enumerate(TARGETS_TYPED)
        ],
    ),
)
def test_every_target_and_gpu(name, typed, gpu):
    """FP16 allowed never costs time; a strongly typed network has the types of its file whatever is allowed."""
    target = strongly_typed(TARGETS[name]) if typed else TARGETS[name]
    gpu = "T4" if target.is_rtx and float(find(gpu).cc) < 7.5 else gpu  # one that it builds for
    for quantized in (True, False):
        found = [
            predict_on(
                load(chain(size=14, quantized=quantized)), target, Request(gpu=gpu, no_fp16=single)
            )
            for single in (False, True)
        ]
        half, single = (time for _, time in found)
        assert (
            half.total_ms <= single.total_ms
            and half.float_time.total_ms <= single.float_time.total_ms
        )
        assert not target.strongly_typed or half.as_json() == single.as_json()
        base = half.float_time
        assert (
            base.precision == half.gpu.plain or target.strongly_typed
        )  # casts of a small FP16 file
        assert (base.fp32_ms is not None) is (
            target.strongly_typed and base.precision == Precision.FP16
        )
        assert base.fp32_ms is None or base.total_ms <= base.fp32_ms
        if half.gain_range is not None:
            assert half.gain_range.precision == base.precision
        assert (half.best is None) is not half.gpu.has_int8


@pytest.mark.parametrize(("name", "typed"), slow_after(7, TARGETS_TYPED[::-1]))
def test_equal_networks_have_equal_times(name, typed):
    """What is said of the placement by ``insert`` is what is said of the file that it writes."""
    from qdqtool.insertion.api import insert

    target = strongly_typed(TARGETS[name]) if typed else TARGETS[name]
    network = chain(size=28, quantized=False)
    data = [{"x": np.ones((1, 64, 28, 28), "float32")}]
    made = insert(load(network), data, target=target, method="max", losses=0, predict=False).model
    # TensorRT-RTX has no INT8 on an RTX 2060; a small one is faster in FP16 than in TF32.
    gpu = "sm=8.6,sms=8,clock=765,bandwidth=102" if target.is_rtx else "RTX 2060"
    before, after = (predict_on(load(m), target, Request(gpu=gpu))[1] for m in (network, made))
    assert before.best.total_ms == pytest.approx(after.total_ms, rel=1e-9)
    assert after.best.total_ms == pytest.approx(after.total_ms, rel=1e-9)
    assert before.best.gain == pytest.approx(after.gain, rel=0.02)
    assert before.float_time.precision == after.float_time.precision == Precision.FP16


def test_small_networks_and_batches():
    small, large = timed(chain(size=7))[1], timed(chain(size=112, batch=32))[1]
    assert 2 * small.waiting_ms > small.total_ms and 10 * large.waiting_ms < large.total_ms
    prediction, slow = timed(chain(8, channels=16, size=20), find("RTX 4090"))
    assert slow.gain < PAYS and "kernels take at least" in " ".join(
        whether_it_pays(slow, prediction, 200)
    )
    _, one = timed(chain(batch=1), batch=32)
    _, own = timed(chain(batch=32))
    assert one.total_ms == pytest.approx(own.total_ms, rel=1e-6)
    _, dynamic = timed(chain(dynamic=True), batch=32)
    assert dynamic.total_ms == pytest.approx(own.total_ms, rel=1e-6)
    assert [n.values["shape"] for n in dynamic.notes if n.remark is Remark.INPUT_TAKEN] == [
        ["32", "64", "56", "56"]
    ]


def test_fixes_save_what_there_is():
    for prediction, time in (
        on_a100("qat"),
        timed(evidence.model(CASES[1]), find("A100"), compare=False),
    ):
        assert any(f.saves_ms for f in prediction.findings)
        for finding in prediction.findings:
            assert finding.saves_ms is None or 0 < finding.saves_ms < time.total_ms, finding
    # The measured order of three placements of one network on an A100 (0.882, 0.546, 0.500 ms)
    found = [on_a100(case) for case in ("qat", "qat-residual", "qat-residual-qgap")]
    totals = [time.total_ms for _, time in found]
    saved_ms = sum(f.saves_ms or 0 for f in found[0][0].findings if f.code == "SKIP-FLOAT")
    assert totals[0] > 1.3 * totals[1] > 1.3 * totals[2]
    assert 0.05 < saved_ms < totals[0] - totals[1]


@functools.cache
def on_a100(case):
    """Of the first its findings as well, for which its weights are looked at."""
    model = (evidence.model if case == "qat" else evidence.graph)(f"resnet18-a100-{case}")
    return timed(model, find("A100 80GB PCIe"), advice=case == "qat")


# Measured milliseconds (GPU compute time without a profiler), published with the builds.
@pytest.mark.parametrize(
    ("case", "gpu", "measured"),
    [
        ("resnet18-a100-qat", "A100 80GB PCIe", 0.882),
        ("resnet18-a100-qat-residual", "A100 80GB PCIe", 0.546),
        ("resnet18-a100-qat-residual-qgap", "A100 80GB PCIe", 0.5),
        ("mobilenetv2-titanrtx-qat-residual", "TITAN RTX", 0.264),
        ("resnet18-qat-rtx2000-trt8510", "RTX 2000 Ada Laptop", 0.134),
    ],
)
def test_measured_engines_lie_in_the_range(case, gpu, measured):
    _, time = timed(evidence.graph(case), find(gpu), advice=False, graph=True, compare=False)
    assert time.low_ms <= measured <= time.high_ms
    assert time.total_ms == pytest.approx(measured, rel=0.3)


def test_what_int8_gains():
    """It builds no Q/DQ model: the estimate is that of the network without them, and claims no gain."""
    (_, time), (_, plain) = (
        timed(chain(quantized=quantized), find("P100")) for quantized in (True, False)
    )
    assert time.total_ms == pytest.approx(plain.total_ms)
    assert time.gain is None and plain.gain is None and plain.best is None
    assert (
        remarks(time.notes).count(Remark.WITHOUT_QDQ)
        == remarks(plain.notes).count(Remark.NO_INT8)
        == 1
    )
    assert Remark.NO_INT8 not in remarks(time.notes) and Remark.WITHOUT_QDQ not in remarks(
        plain.notes
    )
    # Its weights are large, so that settling the shapes leaves them out: they still count as weights
    _, one = timed(chain(quantized=False, dynamic=True))
    _, fixed = timed(chain(quantized=False))
    assert one.best is not None and fixed.best is not None
    assert (one.best.total_ms, one.gain) == (pytest.approx(fixed.best.total_ms), None)
    _, eight = timed(chain(quantized=False, dynamic=True), batch=8)
    assert eight.best is not None and eight.best.total_ms > one.best.total_ms
    # ResNet-18 on an A100: 0.98, 1.58 and 1.73 times FP16 (0.863 ms); INT8 with float skips is no gain
    for case, measured in (("qat", 0.98), ("qat-residual", 1.58), ("qat-residual-qgap", 1.73)):
        _, time = on_a100(case)
        assert time.gain == pytest.approx(measured, rel=0.15)
        assert (time.gain > 1.02) == (measured > 1.02)


def test_shapes_that_are_unknown_or_computed():
    proto = chain(quantized=False)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    _, time = timed(proto)
    assert time.float_time is None and time.best is None
    assert Remark.MOST_SHAPES_UNKNOWN in remarks(time.notes)

    def width_of(gpu):
        _, time = timed(chain(), gpu)
        return time.high_ms / time.total_ms, time.total_ms / time.low_ms, time.notes

    known, unknown, few_watts, told = (
        width_of(g)
        for g in (find("RTX 3060"), find("H100"), find("T4"), chosen("T4", clock=1100.0))
    )
    assert known[0] == pytest.approx(known[1]) and known[2] == []
    assert unknown[0] == pytest.approx(unknown[1]) and unknown[0] > 1.1 * known[0]
    assert unknown[2][0].remark is Remark.NOT_MEASURED
    assert few_watts[1] == pytest.approx(known[1]) and few_watts[0] > 1.3 * known[0]
    assert few_watts[2][0].remark is Remark.SLOWED
    assert told[0] == pytest.approx(known[0]) and told[2] == []


@functools.cache
def chain_of(channels):
    """Four images of it, and the prediction."""
    model = load(chain(channels=channels, batch=4))
    return model, predict(model, TARGET)


@given(st.sampled_from([g for g in gpus() if g.rates.int8_path == "tensor"]), st.floats(1.1, 3.0))
def test_order_of_whole_networks(gpu, factor):
    """More clock or a smaller batch is never slower; INT8 is never slower than FP16 in large convolutions."""
    narrow, wide = (chain_of(channels) for channels in (64, 256))
    base, faster, larger = (
        estimate(*narrow, one, TARGET, compare=False, batch=batch)
        for one, batch in ((gpu, None), (replace(gpu, clock=gpu.clock * factor), None), (gpu, 8))
    )
    assert faster.total_ms <= base.total_ms <= larger.total_ms
    gain = estimate(*wide, gpu, TARGET).gain
    assert gain is not None and gain >= 1


@functools.cache
def published(case, gpu):
    return timed(evidence.graph(case), find(gpu), advice=False, compare=False)


@settings(max_examples=settings().max_examples // 3)
@given(
    st.sampled_from(CASES),
    st.integers(0, 10**6),
    st.sampled_from(["A100", "3060", "agx orin", "T4", "RTX 4090"]),
)
def test_a_conversion_more_is_never_faster(case, seed, gpu):
    """A Q/DQ pair of another scale behind one that is there: one conversion more, everything else as it was."""
    proto = onnx.ModelProto()
    proto.CopyFrom(evidence.graph(case).proto)
    graph = proto.graph
    stored = {t.name for t in graph.initializer}
    of_data = {
        n.output[0]
        for n in graph.node
        if n.op_type == "QuantizeLinear" and n.input[0] not in stored
    }
    pairs = [n for n in graph.node if n.op_type == "DequantizeLinear" and n.input[0] in of_data]
    dq = pairs[seed % len(pairs)]
    extra = Graph()
    after = dq.output[0]
    behind = extra.pair(after, "extra", 0.777)
    for node in graph.node:
        node.input[:] = [behind if name == after else name for name in node.input]
    at = list(graph.node).index(dq) + 1
    graph.initializer.extend(extra.initializers)
    for node in reversed(extra.nodes):
        graph.node.insert(at, node)
    prediction, time = timed(proto, find(gpu), advice=False, compare=False)
    before, old = published(case, gpu)
    if prediction.summary()["conversions"] > before.summary()["conversions"]:
        assert time.total_ms >= old.total_ms


def test_what_kernels_read_and_write():
    """A 1x1 convolution of stride 2 needs a quarter of its input, a 3x3 one all of it."""
    read = {}
    for kernel in (1, 3):
        g = Graph()
        x = g.relu(g.conv(g.input(1, 64, 32, 32), "a", 64), "ra")
        works = workload(g.model(g.conv(x, "b", 64, kernel, stride=2))).layers
        read[kernel] = next(w for w in works if w.kind == work.CONV and w.rows == 16 * 16).read
    assert read == {1: 64 * 16 * 16, 3: 64 * 32 * 32}
    # The engine of resnet18-a100-qat: convolution and pooling write FP32, one reformat makes FP16 for the rest
    found = workload(evidence.graph("resnet18-a100-qat"))
    stem, pool = (next(w for w in found.layers if w.kind == k) for k in (work.CONV, work.POOL))
    assert (stem.channels, stem.precision, stem.written_as) == (3, Precision.INT8, Precision.FP32)
    assert stem.written == pool.read == 4 * 32 * 64 * 112 * 112
    assert pool.written == 4 * 32 * 64 * 56 * 56
    made = [
        e.work
        for e in found.extras
        if (e.work.precision, e.work.written_as) == (Precision.FP32, Precision.FP16)
    ]
    assert [(w.read, w.written) for w in made] == [(pool.written, pool.written / 2)]
    after = [w for w in found.layers if w.kind == work.CONVERSION][1]
    assert (after.precision, after.written_as, after.read) == (
        Precision.FP16,
        Precision.INT8,
        pool.written / 2,
    )
    for other in (
        "resnet18-a100-qat-residual",
        "resnet18-qat-rtx2000-trt8510",
    ):  # the pooling is fused, INT8 out
        stem = next(w for w in workload(evidence.graph(other)).layers if w.kind == work.CONV)
        assert stem.written_as == Precision.INT8


def test_computed_shapes_need_no_weights(g):
    """A copy without large weights, as the best placement is tried on, behind a Slice whose bounds are computed."""
    x = g.input(1, 64, 32, 32)
    two, zero, axis = (
        g.const("two", np.int64(2)),
        g.const("zero", np.array([0])),
        g.const("axis", np.array([2])),
    )
    half = g.op("Div", [g.op("Gather", [g.op("Shape", [x], "shape"), two], "height"), two], "half")
    part = g.op("Slice", [x, zero, g.op("Unsqueeze", [half, zero], "end"), axis], "part")
    y = g.conv(part, "conv", 64, 1, scale=None, weights="float")
    proto = g.model(y)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    for version in (proto, without_large_weights(proto)):
        assert Shapes(Model(version)).get(y) == (1, 64, 16, 32)


@pytest.mark.parametrize("channels", [-3, 1 << 45])
def test_weights_of_an_impossible_shape_end_in_a_note_or_one_line(g, channels):
    proto = g.model(g.conv(g.input(1, 8, 16, 16), "c", 8, scale=None, weights="float"))
    next(t for t in proto.graph.initializer if t.name == "c.weight").dims[0] = channels
    with contextlib.suppress(QdqtoolError):
        prediction, time = predict_on(proto, "trt10", Request(gpu="T4"))
        assert time is not None and time.best is None and prediction.convolutions


def test_an_input_that_is_declared_as_an_output_of_another_rank() -> None:
    proto = convolutions(6)
    proto.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    for rank in (1, 3, 6):
        output = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None] * rank)
        del proto.graph.output[1:]
        proto.graph.output.append(output)
        resolved, _ = twin.resolved(Model(proto))
        assert len(resolved.proto.graph.input[0].type.tensor_type.shape.dim) == rank
