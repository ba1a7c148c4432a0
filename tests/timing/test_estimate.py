import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st

import qdqtool
from benchmarks.timing_data import NETWORKS, network_work, read
from calibration.options import Preprocess
from qdqtool import Precision, Prediction
from qdqtool.errors import QdqtoolError
from qdqtool.formats.output import TextPage
from qdqtool.formats.time_text import add_speed_verdict
from qdqtool.formats.verdicts import speed_verdict
from qdqtool.insertion.fp16 import convert_to_fp16
from qdqtool.insertion.input_types import convert_inputs_to_integers
from qdqtool.insertion.number_formats import MIN_GAIN
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import load
from qdqtool.prediction import predict
from qdqtool.proto.slim import strip_large_weights
from qdqtool.timing import model_variants, work
from qdqtool.timing.estimate import estimate_time
from qdqtool.timing.gpus import Gpu, all_gpus, choose_gpu, find_gpu
from qdqtool.timing.model_variants import TensorShapes
from qdqtool.timing.on_gpu import predict_on_gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.timing.physics import estimate_seconds, load_constants
from qdqtool.trt.targets import TARGETS, Target, strongly_typed, target_named
from tests.insertion.nets import copy_model, detector, store_as_half
from tests.notes import note_codes
from tests.slow import slow_after
from tests.timing.models import TARGET, convolution_chain, estimate_model, model_workload
from tests.trt import evidence
from tests.trt.builder import Graph
from tools.growth.families import convolutions

CASES = ("resnet18-a100-qat", "mobilenetv2-titanrtx-qat-residual")


def test_work_of_a_convolution_chain() -> None:
    engine = model_workload(convolution_chain())
    convs = [w for w in engine.layers if w.kind == work.CONV]
    assert [(w.macs, w.read, w.weights) for w in convs] == [
        (56 * 56 * 64 * 64 * 9, 56 * 56 * 64, 64 * 64 * 9)
    ] * 3
    assert [w.written for w in convs] == [56 * 56 * 64, 56 * 56 * 64, 2 * 56 * 56 * 64]
    first = next(w for w in engine.layers if w.kind == work.CONVERSION)
    assert (first.read, first.written) == (4 * 56 * 56 * 64, 56 * 56 * 64) and not engine.unknown


def test_copy_of_a_constant_into_a_concat_has_a_known_shape(g: Graph) -> None:
    inputs = [g.const("k", np.ones((1, 8, 8, 8), np.float32)), g.conv(g.input(1, 16, 8, 8), "a")]
    assert not model_workload(g.model(g.concat(inputs, "cat"))).unknown


def test_total_time_is_the_sum_of_kernels_and_gaps() -> None:
    """There is a gap between kernels unless a CUDA graph is used."""
    (_, time), (_, graph) = (
        estimate_model(convolution_chain()),
        estimate_model(convolution_chain(), cuda_graph=True),
    )
    overhead, gap = load_constants().overhead_us * 1e-3, load_constants().gap_us * 1e-3
    assert time.total_ms == pytest.approx(
        sum(k.ms - overhead + gap for k in time.kernels), rel=1e-6
    )
    assert (
        graph.total_ms == pytest.approx(time.total_ms - gap * len(time.kernels), rel=1e-6)
        and time.low_ms < time.total_ms < time.high_ms
    )
    assert (
        time.high_ms / time.total_ms == pytest.approx(load_constants().spreads["total"])
        and 0 < time.conversions_ms < time.total_ms
    )


def test_float_variant_has_no_qdq() -> None:
    model = load(convolution_chain())
    float_model = model_variants.float_variant(model)
    assert (model_variants.has_qdq(float_model), model_variants.has_qdq(model)) == (False, True)
    assert [n.op for n in float_model.nodes] == [
        n.op for n in load(convolution_chain(quantized=False)).nodes
    ]


def test_float_time_does_not_depend_on_the_type_of_the_input() -> None:
    float_input, int8_input = convolution_chain(batch=32), convolution_chain(batch=32)
    model = load(int8_input)
    convert_inputs_to_integers(model, "int8", Preprocess())
    assert model.proto.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.INT8
    (_, expected), (_, time) = estimate_model(float_input), estimate_model(model.proto)
    assert (
        time.float_time.total_ms == pytest.approx(expected.float_time.total_ms, rel=1e-6)
        and time.total_ms < expected.total_ms
    )


def test_times_of_quantized_and_float_model_agree() -> None:
    quantized, plain = (
        estimate_model(convolution_chain(batch=32))[1],
        estimate_model(convolution_chain(batch=32, quantized=False))[1],
    )
    assert quantized.float_time.total_ms == pytest.approx(plain.total_ms, rel=1e-6)
    assert quantized.gain > 1.2 and plain.best.int8 == 3 and plain.gain is None
    assert plain.best.gain == pytest.approx(plain.total_ms / plain.best.total_ms)
    assert plain.best.total_ms == pytest.approx(quantized.total_ms, rel=0.05)


def test_nodes_without_effect_do_not_change_times() -> None:
    """ModelOpt writes Casts of FP32 to FP32, and PyTorch writes Identities of constants."""
    plain, proto = convolution_chain(batch=32), convolution_chain(batch=32)
    added = []
    for q in [node for node in proto.graph.node if node.op_type == "QuantizeLinear"]:
        op, to = ("Identity", {}) if q.input[0].startswith("w") else ("Cast", {"to": 1})
        added.append(onnx.helper.make_node(op, [q.input[0]], [f"{q.name}_{op}"], **to))
        q.input[0] = added[-1].output[0]
    proto.graph.node.extend(added)
    assert {node.op_type for node in added} == {"Identity", "Cast"}
    (expected, of_plain), (prediction, time) = estimate_model(plain), estimate_model(proto)
    assert prediction.summary() == expected.summary()
    for name in ("total_ms", "float_time", "best"):
        assert getattr(time, name) == getattr(of_plain, name), name


GPUS = ("RTX 2060", "Jetson Nano", "RTX 5090", "GTX 1080 Ti")
TARGETS_TYPED = [
    (name, typed)
    for name in TARGETS
    for typed in (False, True)
    if not typed or TARGETS[name].strongly_typed or TARGETS[name].version >= (10, 0)
]


# Each target with one GPU, which has INT8 or not in turn. The slow cases have another GPU.
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
def test_allowed_fp16_is_never_slower(name: str, typed: bool, gpu: str) -> None:
    """A strongly typed network has the types of its file in any case."""
    target = strongly_typed(TARGETS[name]) if typed else TARGETS[name]
    if target.is_rtx and float(find_gpu(gpu).cc) < 7.5:  # TensorRT-RTX cannot build for it
        gpu = "T4"
    for quantized in (True, False):
        model = load(convolution_chain(size=14, quantized=quantized))
        half, single = (
            predict_on_gpu(model, target, TimingOptions(gpu=gpu, no_fp16=no_fp16))[1]
            for no_fp16 in (False, True)
        )
        assert half.total_ms <= single.total_ms
        assert half.float_time.total_ms <= single.float_time.total_ms
        assert not target.strongly_typed or half.as_json() == single.as_json()
        base = half.float_time
        assert base.precision == half.gpu.float_type or target.strongly_typed
        is_fp16_file = target.strongly_typed and base.precision == Precision.FP16
        assert (base.fp32_ms is not None) is is_fp16_file
        assert base.fp32_ms is None or base.total_ms <= base.fp32_ms
        if half.gain_range is not None:
            assert half.gain_range.precision == base.precision
        assert (half.best is None) is not half.gpu.has_int8


def test_waiting_time_of_small_and_large_networks() -> None:
    small, large = (
        estimate_model(convolution_chain(size=7))[1],
        estimate_model(convolution_chain(size=112, batch=32))[1],
    )
    assert 2 * small.launch_ms > small.total_ms and 10 * large.launch_ms < large.total_ms


def test_int8_gains_little_in_a_network_of_small_kernels() -> None:
    _, time = estimate_model(convolution_chain(8, channels=16, size=20), find_gpu("RTX 4090"))
    assert time.gain < MIN_GAIN
    page = TextPage(200)
    add_speed_verdict(page, [time])
    assert f"{len(time.kernels)} kernels" in str(page)


def test_batch_option_is_the_batch_of_the_model() -> None:
    _, expected = estimate_model(convolution_chain(batch=32))
    _, scaled = estimate_model(convolution_chain(batch=1), batch=32)
    assert scaled.total_ms == pytest.approx(expected.total_ms, rel=1e-6)
    _, dynamic = estimate_model(convolution_chain(dynamic=True), batch=32)
    assert dynamic.total_ms == pytest.approx(expected.total_ms, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "imgsz", "text"),
    [
        ({}, "", "the shape 1x3x640x640 was assumed"),
        ({"batch": 2}, "", "the size 640x640 was assumed"),
        ({"size": (320, 640)}, "", "the batch size 1 was assumed"),
        ({"size": (320, 640), "batch": 2}, "[64, 64]", ""),
        ({"batch": 2}, "[64, 32]", "the size 64x32 is from the model's metadata (imgsz)"),
        (
            {},
            "64",
            "the batch size 1 was assumed, the size 64x64 is from the model's metadata (imgsz)",
        ),
    ],
)
def test_dimensions_of_the_user_are_not_assumed(
    g: Graph, options: dict[str, Any], imgsz: str, text: str
) -> None:
    proto = g.model(g.conv(g.input("n", 3, "h", "w"), "c", 16))
    proto.metadata_props.add(key="imgsz", value=imgsz)
    _, time = predict_on_gpu(proto, "trt10", TimingOptions("L4", **options))
    notes = [note for note in time.notes if note.code == "input-taken"]
    assert notes == ([f"input 'x': {text}"] if text else [])


def test_placements_are_ordered_as_measured() -> None:
    """Three placements of one network take 0.882, 0.546 and 0.500 ms on an A100."""
    (prediction, first), (_, second), (_, third) = map(
        on_a100, ("qat", "qat-residual", "qat-residual-qgap")
    )
    totals = [time.total_ms for time in (first, second, third)]
    saved_ms = sum(f.saves_ms or 0 for f in prediction.findings if f.code == "SKIP-FLOAT")
    assert totals[0] > 1.3 * totals[1] > 1.3 * totals[2] and 0.05 < saved_ms < totals[0] - totals[1]


@functools.cache
def on_a100(case: str) -> tuple[Prediction, Any]:
    """Return prediction and time. Only that of ``qat``, which needs the weights, has findings."""
    model = (evidence.model if case == "qat" else evidence.graph)(f"resnet18-a100-{case}")
    return estimate_model(model, find_gpu("A100 80GB PCIe"), advice=case == "qat")


# Milliseconds of GPU compute time, measured without profiler and published with the builds.
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
def test_range_contains_the_measured_time(case: str, gpu: str, measured: float) -> None:
    _, time = estimate_model(
        evidence.graph(case), find_gpu(gpu), advice=False, cuda_graph=True, compare=False
    )
    assert time.low_ms <= measured <= time.high_ms
    assert time.total_ms == pytest.approx(measured, rel=0.35)


def test_gpu_without_int8() -> None:
    (_, quantized), (_, plain) = (
        estimate_model(convolution_chain(quantized=q), find_gpu("P100")) for q in (True, False)
    )
    assert quantized.total_ms == pytest.approx(plain.total_ms)
    assert (quantized.gain, plain.gain, plain.best) == (None, None, None)
    assert [
        [note_codes(time.notes).count(r) for r in ("without-qdq", "no-int8")]
        for time in (quantized, plain)
    ] == [[1, 0], [0, 1]]


def test_best_time_of_a_dynamic_model() -> None:
    """Large weights count, although shapes are inferred without them."""
    dynamic = convolution_chain(quantized=False, dynamic=True)
    (_, one), (_, eight), (_, static) = (
        estimate_model(dynamic),
        estimate_model(dynamic, batch=8),
        estimate_model(convolution_chain(quantized=False)),
    )
    assert (one.best.total_ms, one.gain) == (pytest.approx(static.best.total_ms), None)
    assert eight.best.total_ms > one.best.total_ms


@pytest.mark.parametrize("key", ["imgsz", "qdqtool.size"])
def test_best_time_is_that_of_the_image_size_in_the_metadata(key: str) -> None:
    network = convolution_chain(quantized=False, size=64)
    for dim, name in zip(network.graph.input[0].type.tensor_type.shape.dim[2:], "hw", strict=True):
        dim.dim_param = name
    network.metadata_props.add(key=key, value="[64, 64]")
    (_, opened), (_, fixed) = (
        estimate_model(network),
        estimate_model(convolution_chain(quantized=False, size=64)),
    )
    assert opened.best.total_ms == pytest.approx(fixed.best.total_ms)


@pytest.mark.parametrize(
    ("case", "measured"), [("qat", 0.98), ("qat-residual", 1.58), ("qat-residual-qgap", 1.73)]
)
def test_gain_is_near_the_measured_gain(case: str, measured: float) -> None:
    """ResNet-18 on an A100, relative to FP16 (0.863 ms). INT8 with float skips gains nothing."""
    _, time = on_a100(case)
    assert time.gain == pytest.approx(measured, rel=0.15)
    assert (time.gain > 1.02) == (measured > 1.02)


def test_model_without_shapes_has_minimal_kernels_and_no_float_time() -> None:
    proto = convolution_chain(quantized=False)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    _, time = estimate_model(proto)
    assert (time.float_time, time.best) == (None, None)
    assert "most-shapes-unknown" in note_codes(time.notes)
    engine = model_workload(proto, "rtx1.7")
    assert [w.kind for w in engine.all_work] == [work.UNKNOWN] * len(engine.unknown) != []


@pytest.mark.parametrize(
    ("gpu", "low_factor", "high_factor", "notes"),
    [
        (find_gpu("RTX 3060"), 1.0, 1.0, []),
        (find_gpu("H100"), 1.1, 1.1, ["not-measured"]),
        (find_gpu("T4"), 1.0, 1.3, ["slowed"]),
        (choose_gpu("T4", clock=1100.0), 1.0, 1.0, []),
        (choose_gpu("Orin Nano"), 1.1, 1.1, ["of-gpu"]),
        (choose_gpu("Orin NX 16GB", power="25W"), 1.0, 1.0, ["of-gpu"]),
        (choose_gpu("Orin Nano Super", power="7W"), 1.1, 1.1, ["of-gpu"]),
        (choose_gpu("Thor", power="70W"), 1.1, 2.25, ["in-myelin"]),
    ],
    ids=[
        "measured",
        "not measured",
        "power limit",
        "clock",
        "several boards",
        "power mode",
        "assumed power mode",
        "unknown power mode",
    ],
)
def test_range_is_wider_for_gpus_that_are_less_known(
    gpu: Gpu, low_factor: float, high_factor: float, notes: list[str]
) -> None:
    _, time = estimate_model(convolution_chain(), gpu)
    usual = load_constants().spreads["total"]
    low, high = time.total_ms / time.low_ms, time.high_ms / time.total_ms
    assert low > low_factor * usual if low_factor > 1 else low == pytest.approx(usual)
    assert high > high_factor * usual if high_factor > 1 else high == pytest.approx(usual)
    assert low_factor != high_factor or low == pytest.approx(high)
    assert [c for c in note_codes(time.notes) if c != "fp32-layers"][:1] == notes
    assert ("is wider" in "".join(time.notes)) == (low_factor > 1)


@functools.cache
def chain_of(channels: int) -> tuple[Model, Prediction]:
    model = load(convolution_chain(channels=channels, batch=4))
    return model, predict(model, TARGET)


@given(
    # On 12.x INT8 reaches half of its rate, so that it may be slower than FP16.
    st.sampled_from(
        [
            g
            for g in all_gpus()
            if g.rates.int8_path == "tensor" and g.int8_rate_over_fp16 > 1 and float(g.cc) < 12
        ]
    ),
    st.floats(1.1, 3.0),
)
def test_time_of_networks_is_monotonic(gpu: Gpu, factor: float) -> None:
    """A higher clock or a smaller batch is never slower, nor is INT8 in large convolutions."""
    narrow, wide = (chain_of(channels) for channels in (64, 256))
    base, faster, larger = (
        estimate_time(*narrow, board, TARGET, compare=False, batch=batch)
        for board, batch in ((gpu, None), (replace(gpu, clock=gpu.clock * factor), None), (gpu, 8))
    )
    assert (
        faster.total_ms <= base.total_ms <= larger.total_ms
        and estimate_time(*wide, gpu, TARGET).gain >= 1
    )


@functools.cache
def published(case: str, gpu: str) -> tuple[Prediction, Any]:
    return estimate_model(evidence.graph(case), find_gpu(gpu), advice=False, compare=False)


@settings(max_examples=settings().max_examples // 3)
@given(
    st.sampled_from(CASES),
    st.integers(0, 10**6),
    st.sampled_from(["A100", "3060", "agx orin", "T4", "RTX 4090"]),
)
def test_additional_conversion_is_never_faster(case: str, seed: int, gpu: str) -> None:
    """A second Q/DQ pair with another scale adds one conversion and changes nothing else."""
    proto = copy_model(evidence.graph(case).proto)
    graph = proto.graph
    weights = {t.name for t in graph.initializer}
    quantized = {
        n.output[0]
        for n in graph.node
        if n.op_type == "QuantizeLinear" and n.input[0] not in weights
    }
    dqs = [n for n in graph.node if n.op_type == "DequantizeLinear" and n.input[0] in quantized]
    dq, extra = dqs[seed % len(dqs)], Graph()
    output = extra.pair(dq.output[0], "extra", 0.777)
    for node in graph.node:
        node.input[:] = [output if name == dq.output[0] else name for name in node.input]
    index = list(graph.node).index(dq) + 1
    graph.initializer.extend(extra.initializers)
    for node in reversed(extra.nodes):
        graph.node.insert(index, node)
    prediction, time = estimate_model(proto, find_gpu(gpu), advice=False, compare=False)
    before, time_before = published(case, gpu)
    if prediction.summary()["conversions"] > before.summary()["conversions"]:
        assert time.total_ms >= time_before.total_ms


@pytest.mark.parametrize(("kernel", "read"), [(1, 64 * 16 * 16), (3, 64 * 32 * 32)])
def test_input_bytes_of_a_strided_convolution(kernel: int, read: int, g: Graph) -> None:
    """A 1x1 convolution of stride 2 reads a quarter of its input, a 3x3 convolution all of it."""
    x = g.relu(g.conv(g.input(1, 64, 32, 32), "a", 64), "ra")
    layers = model_workload(g.model(g.conv(x, "b", 64, kernel, stride=2))).layers
    assert [w.read for w in layers if w.kind == work.CONV and w.rows == 16 * 16] == [read]


@pytest.mark.parametrize("is_shared", [False, True])
def test_input_bytes_of_a_bias_and_of_a_residual(g: Graph, is_shared: bool) -> None:
    """torch copies a bias that two convolutions share with an Identity. Both read it."""
    x = g.relu(g.input(1, 64, 32, 32), "start")
    bias = g.op("Identity", g.const("b", np.zeros(64, np.float32)), "shared")
    weights = [g.const(f"w{i}", np.full((64, 64, 1, 1), 0.1, np.float32)) for i in range(2)]
    first = g.relu(g.op("Conv", [x, weights[0], bias], "first"), "r")
    second = g.op("Conv", [first, weights[1], *([bias] if is_shared else [])], "second")
    layers = model_workload(g.model(g.relu(g.op("Add", [second, x], "sum"), "last"))).layers
    elements, reads = 64 * 32 * 32, [w.read for w in layers if w.kind == work.CONV]
    assert reads == [2 * (elements + 64), 2 * (2 * elements + 64 * is_shared)]


def test_stem_of_a_recorded_build_writes_fp32() -> None:
    """Convolution and pooling of resnet18-a100-qat write FP32.

    A reformat converts that to FP16.
    """
    engine = model_workload(evidence.graph("resnet18-a100-qat"))
    stem, pool = (next(w for w in engine.layers if w.kind == k) for k in (work.CONV, work.POOL))
    assert (stem.channels, stem.precision, stem.written_as) == (3, Precision.INT8, Precision.FP32)
    assert (
        stem.written == pool.read == 4 * 32 * 64 * 112 * 112
        and pool.written == 4 * 32 * 64 * 56 * 56
    )
    to_half = (Precision.FP32, Precision.FP16)
    casts = [e.work for e in engine.extras if (e.work.precision, e.work.written_as) == to_half]
    assert [(w.read, w.written) for w in casts] == [(pool.written, pool.written / 2)]
    second = [w for w in engine.layers if w.kind == work.CONVERSION][1]
    assert (second.precision, second.written_as) == (Precision.FP16, Precision.INT8)
    assert second.read == pool.written / 2


@pytest.mark.parametrize("case", ["resnet18-a100-qat-residual", "resnet18-qat-rtx2000-trt8510"])
def test_stem_of_a_recorded_build_with_fused_pooling_writes_int8(case: str) -> None:
    stem = next(w for w in model_workload(evidence.graph(case)).layers if w.kind == work.CONV)
    assert stem.written_as == Precision.INT8


def test_shapes_are_inferred_without_large_weights(g: Graph) -> None:
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
    for version in (proto, strip_large_weights(proto)):
        assert TensorShapes(Model(version)).get(y) == (1, 64, 16, 32)


@pytest.mark.parametrize("channels", [-3, 1 << 45])
def test_weights_of_an_impossible_shape_have_no_estimate_or_are_an_error(
    g: Graph, channels: int
) -> None:
    proto = g.model(g.conv(g.input(1, 8, 16, 16), "c", 8, scale=None, weights="float"))
    next(t for t in proto.graph.initializer if t.name == "c.weight").dims[0] = channels
    with contextlib.suppress(QdqtoolError):
        prediction, time = predict_on_gpu(proto, "trt10", TimingOptions(gpu="T4"))
        assert time.best is None and prediction.convolutions


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_input_that_is_an_output_of_another_rank(rank: int) -> None:
    proto = convolutions(6)
    proto.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    output = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None] * rank)
    proto.graph.output.append(output)
    resolved = model_variants.resolve_inputs(Model(proto))
    assert len(resolved.proto.graph.input[0].type.tensor_type.shape.dim) == rank


MOST_GAIN = 2.3  # ratio of the rates of INT8 and FP16, with bytes that INT8 saves


# The smallest networks, some of them with groups and branches, come first.
@pytest.mark.parametrize(
    "name",
    slow_after(
        4,
        [
            *("zfnet512", "squeezenet", "shufflenet", "inception_v1"),
            *("bvlc_alexnet", "vgg19", "inception_v2", "resnet50", "densenet121"),
        ],
    ),
)
def test_gain_of_light_models_is_at_most_the_ratio_of_rates(name: str) -> None:
    _, time = predict_on_gpu(
        Path(onnx.__file__).parent / "backend/test/data/light" / f"light_{name}.onnx",
        "trt10",
        TimingOptions("L4"),
    )
    assert 1 / MOST_GAIN < time.best.gain < MOST_GAIN


@pytest.mark.parametrize("case", slow_after(3, evidence.DIFFERENT))
def test_gain_of_published_builds_is_at_most_the_ratio_of_rates(case: str) -> None:
    model = evidence.graph(case)
    prediction = predict(model, "trt10", advice=False)
    for gpu in ("Orin Nano", "RTX 3060", "L4"):
        gain = estimate_time(model, prediction, find_gpu(gpu), TARGETS["trt10"]).gain
        assert gain is not None and gain < MOST_GAIN, gpu


@functools.cache
def stored_networks() -> dict[str, dict[str, list[dict[str, str]]]]:
    networks: dict[str, dict[str, list[dict[str, str]]]] = {}
    for row in read(NETWORKS):
        networks.setdefault(row["network"], {}).setdefault(row["variant"], []).append(row)
    return {name: variants for name, variants in networks.items() if len(variants) > 1}


# The L2 of an L4, RTX 4090 and RTX 5000 Ada holds the INT8 tensors of many layers, but not the FP16 tensors.
@pytest.mark.parametrize(
    "name", slow_after(2, ["L4", "A100 40GB", "RTX 4090", "RTX 5000 Ada", "RTX 3060"])
)
def test_gain_of_fitted_networks_is_at_most_the_ratio_of_rates_or_bytes(name: str) -> None:
    gpu, faults = find_gpu(name), {}
    for network, variants in stored_networks().items():
        plain, quantized = (
            network_work(variants[variant], Precision.FP16, 32, gpu) for variant in ("float", "qdq")
        )
        gain = estimate_seconds(plain, gpu).sum() / estimate_seconds(quantized, gpu).sum()
        ratio = sum(w.bytes_moved for w in plain) / sum(w.bytes_moved for w in quantized)
        if gain > max(MOST_GAIN, ratio):
            faults[network] = gain
    assert not faults and len(stored_networks()) > 60


@pytest.mark.parametrize(
    ("name", "effect", "has_fp8"),
    [
        ("Thor", "saves only memory traffic", True),
        ("B300", "slower than FP16", True),
        ("V100", "slower than FP16", False),
        ("B200", "", False),
        ("L4", "", False),
    ],
)
def test_note_about_a_gpu_whose_int8_is_no_faster(name: str, effect: str, has_fp8: bool) -> None:
    """INT8 saves memory traffic only at FP16's rate; the note names FP8 if that is faster."""
    gpu = find_gpu(name)
    _, time = estimate_model(convolution_chain(), gpu)
    text = "".join(note for note in time.notes if note.code == "int8-not-faster")
    assert bool(text) == (gpu.int8_rate_over_fp16 <= 1) == bool(effect)
    assert ("no faster than" in speed_verdict(time).text) == bool(effect)
    effects = [e for e in ("saves only memory traffic", "slower than FP16") if e in text]
    assert (effects, "--precision fp8" in text) == ([effect] if effect else [], has_fp8)


@pytest.mark.parametrize(
    "name", ["RTX 4060", "RTX 4090", "L4", "L40S", "RTX 5060", "RTX 5090", "GB10"]
)
def test_float_cnn_is_not_recommended_in_fp8(name: str) -> None:
    """FP8 halves its rate on GeForce, and its convolutions are slower than INT8's on Ada."""
    proto = convolution_chain(channels=128, size=80, quantized=False)
    _, time = predict_on_gpu(proto, "trt10", TimingOptions(gpu=name))
    assert time.best.total_ms < time.best_fp8.total_ms and time.fastest != Precision.FP8


def half_detector() -> onnx.ModelProto:
    network = detector()
    scales = [node.input[2] for node in network.graph.node if node.op_type == "Resize"]
    return store_as_half(network, scales)


def network_with_computed_number() -> onnx.ModelProto:
    """Return a dynamic float network that adds a number computed from a shape."""
    g = Graph(opset=17)
    x = g.input("N", 64, 28, 28)
    for i in range(3):
        weight = g.const(f"w{i}", np.full((64, 64, 3, 3), 0.03, np.float32))
        x = g.relu(g.op("Conv", [x, weight], f"conv{i}", pads=[1] * 4), f"relu{i}")
    batch = g.op("Gather", [g.op("Shape", x, "size"), g.const("first", [0])], "batch")
    number = g.op("Cast", batch, "number", to=onnx.TensorProto.FLOAT)
    scaled = g.op("Mul", [x, g.const("two", np.full((1, 64, 1, 1), 2.0))], "scaled")
    moved = g.op("Add", [scaled, number], "moved")
    return g.model(g.op("Mul", [moved, g.const("three", np.full((1, 64, 1, 1), 3.0))], "last"))


small_chain = functools.partial(convolution_chain, size=28, quantized=False)


@pytest.mark.parametrize(
    ("make", "target", "precision", "gpu"),
    [
        *(
            (make, target, precision, "RTX 4090")
            for make, target in (
                (detector, "trt10.13"),
                (detector, "trt10.13-strongly-typed"),
                (detector, "trt11"),
                (half_detector, "trt10.13"),
                (half_detector, "trt10.13-strongly-typed"),
                (half_detector, "trt11"),
                (network_with_computed_number, "trt10.13"),
            )
            for precision in ("int8", "fp8")
        ),
        *slow_after(
            7,
            [
                (
                    small_chain,
                    strongly_typed(TARGETS[name]) if typed else TARGETS[name],
                    "int8",
                    # TensorRT-RTX has no INT8 on an RTX 2060; a small network is faster in FP16
                    # than in TF32.
                    "sm=8.6,sms=8,clock=765,bandwidth=102" if TARGETS[name].is_rtx else "RTX 2060",
                )
                for name, typed in TARGETS_TYPED[::-1]
            ],
        ),
    ],
)
def test_times_of_float_and_written_file_agree(
    make: Callable[[], onnx.ModelProto], target: str | Target, precision: str, gpu: str
) -> None:
    """An export in FP16 keeps its Casts; the FP16 and the Casts of `insert` are undone."""
    network = make()
    kind = network.graph.input[0].type.tensor_type
    shape = [d.dim_value or 1 for d in kind.shape.dim]
    sample = np.ones(shape, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    written = qdqtool.insert(
        load(network),
        [{network.graph.input[0].name: sample}],
        target=target,
        precision=precision,
        method="max",
        losses=0,
        predict=False,
    ).model
    of_float, of_written = (
        predict_on_gpu(m, target, TimingOptions(gpu=gpu))[1] for m in (network, written)
    )
    assert not of_written.is_float
    is_typed_for_fp8 = precision == "fp8" and target == "trt10.13"
    assert ("other-types-weakly-typed" in note_codes(of_written.notes)) == is_typed_for_fp8
    best = {"int8": "best", "fp8": "best_fp8"}
    names = ("float_time", *(n for n in best.values() if getattr(of_float, n) is not None))
    pairs = [(getattr(of_float, name), getattr(of_written, name)) for name in names]
    pairs.append((getattr(of_float, best[precision]), of_written))
    for expected, time in pairs:
        assert time.total_ms == pytest.approx(expected.total_ms, rel=1e-9)
    assert getattr(of_written, best[precision]).is_repeated
    assert of_written.gain == pytest.approx(pairs[-1][0].gain, rel=0.02)
    base, written_base = of_float.float_time.precision, of_written.float_time.precision
    assert written_base == base and (make is not small_chain or base == Precision.FP16)


@pytest.mark.parametrize(("input_type", "noted"), [("uint8", 1), ("int8", 1), ("float", 0)])
def test_fp8_time_of_file_with_integer_input_is_for_a_float_input(
    input_type: str, noted: int
) -> None:
    """`insert` has no uint8 or int8 inputs for FP8."""
    settings = {"input_type": input_type, "method": "max", "losses": 0, "predict": False}
    written = qdqtool.insert(detector(), np.ones((1, 3, 64, 64), np.float32), **settings).model
    options = TimingOptions(gpu="RTX 4090")
    of_float, of_integer = (predict_on_gpu(m, "trt10", options)[1] for m in (detector(), written))
    assert of_integer.best_fp8.total_ms == pytest.approx(of_float.best_fp8.total_ms, rel=1e-9)
    assert note_codes(of_integer.notes).count("other-inputs-float") == noted


def test_int8_model_of_a_half_export_is_compared_with_times_of_the_export() -> None:
    """The Casts of the export cost time in both files."""
    export = load(detector()).copy()
    assert convert_to_fp16(export)
    written = model_variants.quantized_variant(export, strongly_typed(target_named("trt10")))
    options = TimingOptions(gpu="Jetson Orin NX 16GB")
    of_float, of_int8 = (predict_on_gpu(m, "trt10", options)[1] for m in (export, written))
    assert of_int8.float_time.total_ms == pytest.approx(of_float.total_ms, rel=1e-9)
    assert of_int8.best.total_ms == pytest.approx(of_float.best.total_ms, rel=1e-9)


def test_float_model_of_fp8_file_has_no_node_for_the_cast_of_the_output() -> None:
    """Otherwise, the time of a ViT had a reformat of the output."""
    proto = convolution_chain(quantized=False)
    del proto.graph.node[-2:]  # the last Relu and the Sigmoid, which are not converted to FP16
    proto.graph.output[0].name = proto.graph.node[-1].output[0]
    float_model, typed = load(proto), strongly_typed(target_named("trt10.13"))
    written = model_variants.quantized_variant(float_model, typed, "fp8")
    assert written.producer(written.outputs[0]).op == "Cast"
    variant = model_variants.fill_missing_weights(model_variants.float_variant(written))
    recovered = model_variants.fp32_variant(variant)
    assert [node.op for node in recovered.nodes] == [node.op for node in float_model.nodes]
    assert recovered.outputs == float_model.outputs


@pytest.mark.parametrize("quantized", [True, False])
def test_rtx_time_states_the_remaining_layers_of_the_engine_it_comes_from(quantized: bool) -> None:
    proto = convolution_chain(quantized=quantized)
    _, time = predict_on_gpu(proto, "rtx1.7", TimingOptions(gpu="RTX 4090"))
    (note,) = (n for n in time.notes if n.code == "no-layers-named")
    remaining = predict(proto, "trt10-strongly-typed").summary()["conversions"]
    assert (
        note.values["conversions"] == remaining == (1 if quantized else 0)
        and ("inside its kernels" in note) == quantized
    )
