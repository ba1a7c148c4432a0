from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from qdqtool.ir.graph import Model
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from qdqtool.timing import model_variants, work
from qdqtool.timing.gpus import Gpu, all_gpus, find_gpu
from qdqtool.timing.physics import NAMES, architecture_factor, estimate_seconds, load_constants
from qdqtool.timing.regions import RegionNodes, find_region_nodes
from qdqtool.timing.work import (
    LayerWork,
    find_layout_changes,
)
from qdqtool.trt.result import EngineLayer, TensorPrecision
from tests.slow import slow_after
from tests.timing.models import GPU, model_workload
from tests.trt import evidence
from tests.trt.builder import Graph
from tests.trt.passes.test_myelin_regions import fp8_attention

I8, HALF, FULL = Precision.INT8, Precision.FP16, Precision.FP32


def layer(kind: str, reads: str, writes: str, name: str = "") -> EngineLayer:
    return EngineLayer(
        name or f"{kind} {writes}",
        kind,
        [TensorPrecision(t, Precision.FLOAT) for t in reads.split()],
        [TensorPrecision(writes, Precision.FLOAT)],
    )


def conv(low: Precision, high: Precision, channels: float = 64.0) -> LayerWork:
    return LayerWork(work.CONV, low, high, channels=channels)


def layout_changes(
    *pairs: tuple[EngineLayer, LayerWork],
    outputs: tuple[str, ...] = (),
    shape: tuple[int, ...] | None = (1, 64, 20, 20),
) -> list[tuple[str, str, str]]:
    reformats = find_layout_changes(pairs, lambda _: shape, ["x"], outputs)
    return [(r.tensor, str(r.source), str(r.target)) for r in reformats]


Q = (layer("Conversion", "x", "q"), LayerWork(work.CONVERSION, FULL, I8))
TO_HALF = (layer("Convolution", "q", "h"), conv(I8, HALF))
MAPS = LayerWork(work.POINTWISE, HALF, HALF)


@pytest.mark.parametrize(
    ("engine", "outputs", "expected"),
    [
        (
            [
                Q,
                (layer("Convolution", "q", "a"), conv(I8, I8)),
                (layer("Convolution", "a", "b"), conv(I8, I8)),
            ],
            (),
            [],
        ),
        (
            [
                Q,
                TO_HALF,
                (layer("Conversion", "h", "r"), LayerWork(work.CONVERSION, HALF, I8)),
                (layer("Convolution", "r", "b"), conv(I8, I8)),
            ],
            (),
            [],
        ),  # a conversion reads and writes any layout
        ([Q, TO_HALF, (layer("PointWise", "h", "p"), MAPS)], (), [("h", "NC/32HW32", "NC/2HW2")]),
        (
            [Q, TO_HALF, (layer("Pooling", "h", "p"), LayerWork(work.POOL, HALF, HALF))],
            (),
            [("h", "NC/32HW32", "NC/2HW2")],
        ),
        (
            [Q, TO_HALF, (layer("Convolution", "h", "b"), conv(HALF, HALF))],
            (),
            [("h", "NC/32HW32", "NHWC8")],
        ),
        (
            [Q, TO_HALF, (layer("Softmax", "h", "p"), LayerWork(work.SOFTMAX, HALF, HALF))],
            (),
            [("h", "NC/32HW32", "linear")],
        ),
        (
            [Q, TO_HALF, (layer("Resize", "h", "r"), LayerWork(work.RESIZE, HALF, HALF))],
            (),
            [],
        ),  # keeps the layout
        ([Q, TO_HALF], ("h",), [("h", "NC/32HW32", "linear")]),
        (
            [
                Q,
                TO_HALF,
                (layer("PointWise", "h", "p"), MAPS),
                (layer("Convolution", "q p", "b"), conv(I8, HALF)),
            ],
            (),
            [("h", "NC/32HW32", "NC/2HW2"), ("p", "NC/2HW2", "NC/32HW32")],
        ),  # a residual
        (
            [Q, (layer("Convolution", "q", "f"), conv(I8, FULL))],
            ("f",),
            [],
        ),  # FP32 outputs are linear
        (
            [
                (layer("Convolution", "x", "a"), conv(HALF, HALF)),
                (layer("Convolution", "a", "b"), conv(HALF, HALF)),
            ],
            (),
            [("x", "linear", "NHWC8")],
        ),
        (
            [
                (layer("Convolution", "x", "a"), conv(FULL, FULL, 3.0)),
                (layer("PointWise", "a", "b"), LayerWork(work.POINTWISE, FULL, FULL)),
                (layer("Convolution", "b", "c"), conv(FULL, FULL)),
            ],
            (),
            [("b", "linear", "NHWC8")],
        ),  # FP32 with TF32: the first convolution is linear, the others are not
        (
            [
                (layer("Conversion", "x", "q"), LayerWork(work.CONVERSION, FULL, I8)),
                (layer("Convolution", "q", "a"), conv(I8, I8, 3.0)),
            ],
            (),
            [],
        ),  # few channels: the conversion writes NC/4HW4
    ],
)
def test_reformats_of_small_engines(
    engine: list[tuple[EngineLayer, LayerWork]],
    outputs: tuple[str, ...],
    expected: list[tuple[str, str, str]],
) -> None:
    assert layout_changes(*engine, outputs=outputs) == expected


@pytest.mark.parametrize(
    ("capability", "factors", "expected"),
    [
        *(
            (capability, {"7.5": 0.9, "8.0": 1.1, "8.9": 1.2}, factor)
            for capability, factor in (("8.0", 1.1), ("12.0", 1.2), ("9.0", 1.2), ("6.1", 1.0))
        ),
        ("8.6", {}, 1.0),
    ],
)
def test_architecture_factor(capability: str, factors: dict[str, float], expected: float) -> None:
    assert architecture_factor(capability, factors) == expected


def test_constants_are_complete() -> None:
    values, spreads = load_constants().values, load_constants().spreads
    assert set(values) == set(NAMES) and min(values.values()) > 0
    assert {"layer", "total", "total_unknown", "total_calibrated"} <= set(spreads)
    assert 1 < spreads["total"] <= spreads["total_unknown"] < 2


@pytest.mark.parametrize("shape", [None, (1, 64), (1, 64, 1, 1), (1, 64, 400)])
def test_tensors_without_positions_have_no_reformats(shape: tuple[int, ...] | None) -> None:
    assert layout_changes(Q, TO_HALF, (layer("PointWise", "h", "p"), MAPS), shape=shape) == []


# Reformats of origin REFORMAT in the published listings; conversions have origin QDQ.
@pytest.mark.parametrize(
    ("case", "built"),
    slow_after(
        3,
        [
            ("resnet18-a100-qat-residual", 0),
            ("resnet18-a100-qat", 2),
            ("mobilenetv2-titanrtx-qat-residual", 1),
            ("bevfusion-camera-rtx3080ti-trt8600", 2),
        ],
    ),
)
def test_number_of_reformats_is_near_that_of_published_engines(case: str, built: int) -> None:
    extras = model_workload(evidence.graph(case), "trt8.6").extras
    assert abs(sum(e.layout_change is not None for e in extras) - built) <= 2


@pytest.mark.parametrize("target", ["trt8.6", "trt10"])
def test_silu_after_an_int8_convolution_with_float_output_is_a_kernel(
    g: Graph, target: str
) -> None:
    a = g.silu(g.conv(g.pair(g.input(1, 32, 16, 16), "xq"), "a", 32), "sa")
    b = g.silu(g.conv(g.pair(a, "aq"), "b", 32), "sb")
    extras = model_workload(g.model(g.op("Softmax", b, "s")), target).extras
    (name,) = (e.name for e in extras if e.activation_of)
    assert "sb.m" in name


def test_blackwell_fuses_conversions_and_has_no_reformats(g: Graph) -> None:
    """On older GPUs, a Q after a sum remains. The Q of the input remains on every GPU."""
    a = g.conv(g.pair(g.input(1, 32, 16, 16), "xq"), "a", 32)
    b = g.conv(g.pair(g.silu(a, "s"), "bq"), "b", 32)
    model = Model(g.model(g.conv(g.pair(g.op("Add", [b, g.silu(b, "t")], "sum"), "cq"), "c", 32)))
    older, blackwell = (
        model_workload(model, "trt10", gpu=find_gpu(name)) for name in ("RTX 4090", "RTX 5090")
    )
    reformats = [sum(e.layout_change is not None for e in w.extras) for w in (blackwell, older)]
    conversions = [sum(x.kind == work.CONVERSION for x in w.layers) for w in (blackwell, older)]
    assert reformats[0] == 0 < reformats[1] and 0 < conversions[0] < conversions[1]


@pytest.mark.parametrize(("gpu", "count"), [("A100 80GB PCIe", 1), ("RTX 2060", 0)])
def test_reformats_of_a_float_network_in_fp32(gpu: str, count: int) -> None:
    """The build on an A100 has one after the pooling."""
    model = model_variants.float_variant(evidence.graph("resnet18-a100-qat"))
    extras = model_workload(model, "trt8.6", float_type=FULL, gpu=find_gpu(gpu)).extras
    assert sum(e.layout_change is not None for e in extras) == count


def test_conversions_of_a_float_network_in_fp16() -> None:
    """The build on an A100 has these two and no reformat."""
    model = model_variants.float_variant(evidence.graph("resnet18-a100-qat"))
    extras = model_workload(model, "trt8.6").extras
    first, last = (e.work for e in extras if e.work.kind == work.CONVERSION)
    elements = 32 * 3 * 224 * 224
    assert (first.read, first.written, first.channels) == (elements * 4, elements * 2, 3.0)
    assert last.written_as == FULL and not any(e.layout_change for e in extras)


def test_computations_of_shapes_are_not_kernels(g: Graph) -> None:
    x = g.input(1, 32, 16, 16)
    one, two, zeros, ones = (
        g.const(n, np.array(v)) for n, v in (("i", 1), ("j", 2), ("k", [0]), ("l", [1]))
    )
    half = g.op("Div", [g.op("Gather", [g.op("Shape", [x], "shape"), one], "count"), two], "half")
    ends = g.op("Mul", [g.op("Add", [half, half], "twice"), one], "ends")
    part = g.op("Slice", [x, zeros, g.op("Unsqueeze", [ends, zeros], "end"), ones], "part")
    engine = model_workload(g.model(g.conv(g.pair(part, "q"), "a", 32)), "trt10")
    assert not [e.name for e in engine.extras if e.work.kind == work.POINTWISE]


def test_bytes_of_reformats() -> None:
    extras = model_workload(evidence.graph("resnet18-a100-qat"), "trt8.6").extras
    reformats = [(e.work, e.layout_change.elements) for e in extras if e.layout_change is not None]
    assert reformats
    for reformat, elements in reformats:
        assert (reformat.kind, reformat.written_as) == (work.REFORMAT, reformat.precision)
        assert reformat.read == reformat.written == elements * {I8: 1, HALF: 2}[reformat.precision]


# Regions of Myelin lie between attentions and normalizations. Some of their nodes are kernels.

WIDE = 64


def block(quantized: bool = True) -> Model:
    g = Graph(opset=17)
    x = g.input(1, 16, WIDE)
    ones, zeros = (
        g.const("ones", np.ones(WIDE, np.float32)),
        g.const("zeros", np.zeros(WIDE, np.float32)),
    )

    def linear(t: str, name: str) -> str:
        w = g.const(f"{name}.w", np.full((WIDE, WIDE), 0.1, np.float32))
        if quantized:
            t, w = g.pair(t, f"{name}.in"), g.pair(w, f"{name}.wq")
        return g.op("MatMul", [t, w], name)

    q = linear(g.op("LayerNormalization", [x, ones, zeros], "ln1"), "q")
    scores = g.op(
        "Softmax",
        [g.op("MatMul", [q, g.op("Transpose", [q], "t", perm=[0, 2, 1])], "scores")],
        "softmax",
    )
    mixed = linear(g.op("MatMul", [scores, q], "mixed"), "proj")
    return Model(g.model(g.op("LayerNormalization", [g.add(mixed, x, "skip"), ones, zeros], "ln2")))


def test_region_of_a_transformer_block() -> None:
    names = {"ln1", "q", "scores", "softmax", "mixed", "proj", "skip", "ln2"}
    assert names <= find_region_nodes(block())


def test_convolutions_are_not_in_a_region(g: Graph) -> None:
    assert not find_region_nodes(Model(g.model(g.relu(g.conv(g.input(1, 8, 8, 8), "c"), "r"))))


def test_kernels_of_attention() -> None:
    model = block()
    normalization, scores, softmax, transpose, mixed, skip = (
        RegionNodes(model, model.shape, Precision.FP16).node_work(model.node(name))
        for name in ("ln1", "scores", "softmax", "t", "mixed", "skip")
    )
    assert (normalization.kind, normalization.read) == (work.POOL, 2 * 16 * WIDE)
    assert scores.macs == mixed.macs == 16 * 16 * WIDE
    assert (scores.written, mixed.read) == (0, 2 * 16 * WIDE)  # the scores are not in memory
    assert scores.steps + mixed.steps == 1  # one kernel
    assert softmax.kind == transpose.kind == work.NOTHING
    assert skip.steps == 0 and skip.bytes_moved > 0  # part of the next kernel


def test_kernel_of_fused_fp8_attention(g: Graph) -> None:
    """Two heads of 16 queries, 32 keys and 64 values each; bytes of FP8."""
    model = Model(g.model(fp8_attention(g, 64, 32)))
    engine, prediction = model_workload(model, "trt10"), predict(model, "trt10")
    attention = {x.name: w for x, w in zip(prediction.layers, engine.layers, strict=True)}["scores"]
    assert attention.macs == 2 * (2 * 16 * 32 * 64)
    assert (attention.precision, attention.written_as) == (Precision.FP8, Precision.FP8)
    assert (attention.read, attention.written, attention.steps) == (
        2 * (16 + 32 + 32) * 64,
        2 * 16 * 64,
        1,
    )
    unfused, fused = model_workload(model, "10.5").all_work, engine.all_work
    # Both products, the scale and the Softmax are separate kernels on 10.5.
    assert sum(w.steps for w in unfused) - sum(w.steps for w in fused) == 3
    assert sum(w.macs for w in unfused) == sum(w.macs for w in fused)


def test_qdq_in_a_region_adds_no_kernels() -> None:
    kernels = []
    for model in (block(quantized=True), block(quantized=False)):
        engine, layers = (
            model_workload(model, "trt10"),
            predict(model, "trt10", advice=False).layers,
        )
        works = [w for w in engine.all_work if w.kind not in (work.NOTHING, work.CONVERSION)]
        kernels.append(sum(w.steps for w in works))
        assert all(
            w.kind == work.NOTHING
            for x, w in zip(layers, engine.layers, strict=True)
            if x.type == "Conversion"
        )
    assert kernels[0] == kernels[1]


# The time of kernels. Expected numbers are calculated by hand.


def conv_physics(
    rows: float = 3136.0,
    columns: float = 64.0,
    depth: float = 576.0,
    channels: float = 64.0,
    precision: Precision = Precision.INT8,
) -> LayerWork:
    size = work.bytes_per_element(precision)
    return LayerWork(
        work.CONV,
        precision,
        precision,
        rows,
        columns,
        depth,
        channels,
        1.0,
        rows * channels * size,
        columns * depth * size,
        rows * columns * size,
    )


def time_of(kernel: LayerWork, gpu: Gpu = GPU) -> float:
    return float(estimate_seconds([kernel], gpu)[0])


def test_time_of_kernels() -> None:
    """1 million rows, 256 columns and depth 2304 in INT8, and a conversion, on an RTX 3060."""
    c = load_constants().values
    rate = (
        1024
        * c["int8"]
        * architecture_factor("8.6", load_constants().architectures)
        * 256
        / (256 + c["narrow"])
    )
    clocks = 28 * 1777e6
    compute, moved = 1e6 * 256 * 2304 / (clocks * rate), 1e6 * 256 * 2 + 256 * 2304
    memory = max(
        moved * (1 - 3e6 * c["l2_share"] / (2 * moved)) / (c["dram"] * 360e9),
        moved / (c["l2"] * clocks * 32),
    )
    p = 1 + c["overlap"]
    latency = c["step_clocks"] * 2304 / 64 / 1777e6
    floor = c["floor_us"] * 1e-6 + c["floor_clocks"] / 1777e6
    expected = floor + latency + (compute**p + memory**p) ** (1 / p)
    assert time_of(conv_physics(1e6, 256.0, 2304.0, 256.0)) == pytest.approx(expected, rel=1e-9)
    conversion = LayerWork(work.CONVERSION, HALF, I8, channels=64.0, read=2e8, written=1e8)
    expected = floor + 3e8 * (1 - 3e6 * c["l2_share"] / 4e8) / (c["copy"] * 360e9)
    assert time_of(conversion) == pytest.approx(expected, rel=1e-9)


# Milliseconds of profiled kernels that convert images of three channels.
@pytest.mark.parametrize(
    ("name", "source", "target", "elements", "measured"),
    [
        ("Orin Nano Super", FULL, I8, 512 * 1024, 0.135),
        ("AGX Orin 64GB", HALF, I8, 6 * 256 * 704, 0.065),
        ("RTX 3080 Ti", HALF, I8, 4 * 256 * 704, 0.0113),
        ("A100 80GB PCIe", FULL, HALF, 32 * 224 * 224, 0.075),
    ],
)
def test_time_of_the_conversion_of_an_image(
    name: str, source: Precision, target: Precision, elements: int, measured: float
) -> None:
    read, written = (3.0 * elements * work.bytes_per_element(p) for p in (source, target))
    assert 1e3 * time_of(
        LayerWork(work.CONVERSION, source, target, channels=3.0, read=read, written=written),
        find_gpu(name),
    ) == pytest.approx(measured, rel=0.4)


def test_time_of_empty_kernels() -> None:
    assert time_of(LayerWork(work.NOTHING)) == 0
    for kind in (work.CONV, work.POOL, work.COPY, work.UNKNOWN, work.SOFTMAX, work.DEPTHWISE):
        assert 1e-6 < time_of(LayerWork(kind)) < 2e-5, kind
    assert estimate_seconds([], GPU).shape == (0,)


works = st.builds(
    conv_physics,
    st.floats(1, 1e7),
    st.floats(1, 4096),
    st.floats(1, 20_000),
    st.floats(1, 4096),
    st.sampled_from([I8, HALF, FULL]),
)


@given(works, st.sampled_from(all_gpus()), st.floats(1.01, 8))
def test_more_work_never_takes_less_time(kernel: LayerWork, gpu: Gpu, factor: float) -> None:
    base = time_of(kernel, gpu)
    assert np.isfinite(base) and base > 0
    # Fewer bytes written than rows and columns would mean that a pooling is fused.
    for names in (("rows", "written"), ("columns", "written"), ("depth",), ("read",), ("weights",)):
        more = replace(kernel, **{name: getattr(kernel, name) * factor for name in names})
        assert time_of(more, gpu) >= base * (1 - 1e-9)


@given(works, st.sampled_from(all_gpus()), st.floats(1.01, 4))
def test_faster_gpu_never_takes_longer(kernel: LayerWork, gpu: Gpu, factor: float) -> None:
    base = time_of(kernel, gpu)
    for name in ("clock", "bandwidth", "l2"):
        faster = replace(gpu, **{name: getattr(gpu, name) * factor})
        assert time_of(kernel, faster) <= base * (1 + 1e-9)


def test_two_channels_take_as_long_as_a_tile_of_64() -> None:
    """Measured for the heads of CenterPoint, except for the bytes that are written."""
    narrow, tile = conv_physics(32400, 2, 576), conv_physics(32400, 64, 576)
    same = replace(narrow, written=tile.written, weights=tile.weights)
    assert time_of(same) == pytest.approx(time_of(tile), rel=1e-9)


def test_fused_pooling_saves_time() -> None:
    plain = conv_physics(400_000, 64, 147, 3)
    assert time_of(plain) > 1.5 * time_of(replace(plain, written=plain.written / 4))


def test_int8_is_slower_than_fp16_without_int8_tensor_cores() -> None:
    integer, half = (conv_physics(1e6, 256, 2304, 256, precision) for precision in (I8, HALF))
    assert time_of(integer, find_gpu("V100")) > time_of(half, find_gpu("V100"))
    assert time_of(integer) < time_of(half)


# FP8 ------------------------------------------------------------------------------------------


def fp8_time_over_int8(gpu: Gpu, *, is_product: bool) -> float:
    size = dict.fromkeys(("rows", "columns", "depth", "channels"), 4096.0)
    layers = (
        LayerWork(work.CONV, precision, precision, **size, is_matrix_product=is_product)
        for precision in (Precision.INT8, Precision.FP8)
    )
    int8, fp8 = (time_of(layer, gpu) for layer in layers)
    return fp8 / int8


@pytest.mark.parametrize(
    "gpu",
    [gpu for gpu in all_gpus() if gpu.cc in ("8.9", "12.0", "12.1")],
    ids=lambda gpu: gpu.name,
)
def test_convolution_is_slower_in_fp8_than_in_int8(gpu: Gpu) -> None:
    """FAR3D on an RTX 6000 Ada: 24.6 ms in INT8, 31.5 ms in FP8, at equal rates."""
    loss = fp8_time_over_int8(gpu, is_product=False)
    assert loss > 31.5 / 24.6 * 0.97
    if gpu.cc == "8.9" and not gpu.is_geforce:
        assert loss == pytest.approx(31.5 / 24.6, rel=0.03)


@pytest.mark.parametrize("name", ["L4", "L40S", "H100 SXM", "B200", "RTX PRO 6000 Blackwell"])
def test_matrix_product_in_fp8_is_as_fast_as_in_int8(name: str) -> None:
    assert fp8_time_over_int8(find_gpu(name), is_product=True) <= 1.001


@pytest.mark.parametrize("name", ["H100 SXM", "B200"])
def test_convolution_in_fp8_has_no_published_loss(name: str) -> None:
    assert fp8_time_over_int8(find_gpu(name), is_product=False) == pytest.approx(1, rel=1e-3)


def test_stem_in_fp8_does_not_use_integer_units(g: Graph) -> None:
    """``dp4a`` multiplies integers only, and an FP8 convolution is slower than one in INT8."""
    stem = LayerWork(
        work.CONV,
        Precision.INT8,
        Precision.INT8,
        rows=320.0 * 320.0,
        columns=32.0,
        depth=27.0,
        channels=3.0,
        written=320.0 * 320.0 * 32.0,
    )
    in_fp16 = replace(
        stem, precision=Precision.FP16, written_as=Precision.FP16, written=2 * stem.written
    )
    in_fp8 = replace(stem, precision=Precision.FP8, written_as=Precision.FP8)
    gpu = find_gpu("L4")
    int8, fp16, fp8 = (float(estimate_seconds([w], gpu)[0]) for w in (stem, in_fp16, in_fp8))
    assert int8 < fp8 < 1.5 * fp16
