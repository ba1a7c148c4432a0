"""Layouts: what each kernel reads and writes, on engines of a few layers; and the reformats of published engines."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqtool.model.graph import Model
from qdqtool.prediction import predict
from qdqtool.timing import twin, work
from qdqtool.timing.gpus import find, gpus
from qdqtool.timing.physics import NAMES, constants, factor_of, seconds
from qdqtool.timing.work import Layout, Work, reformats_of, region_nodes, work_in_region
from qdqtool.types import EngineLayer, Precision, TensorPrecision
from tests.slow import slow_after
from tests.timing.models import GPU, workload
from tests.trt import evidence
from tests.trt.builder import Graph

I8, HALF, FULL = Precision.INT8, Precision.FP16, Precision.FP32
SHAPE = (1, 64, 20, 20)


def layer(kind: str, reads: str, writes: str, name: str = "") -> EngineLayer:
    return EngineLayer(
        name or f"{kind} {writes}",
        kind,
        [TensorPrecision(t, Precision.FLOAT) for t in reads.split()],
        [TensorPrecision(writes, Precision.FLOAT)],
    )


def conv(low: Precision, high: Precision, channels: float = 64.0) -> Work:
    return Work(work.CONV, low, high, channels=channels)


def changes(
    *pairs: tuple[EngineLayer, Work], outputs: tuple[str, ...] = (), shape=SHAPE
) -> list[tuple[str, str, str]]:
    found = reformats_of(pairs, lambda _: shape, ["x"], outputs)
    return [(c.tensor, str(c.source), str(c.target)) for c in found]


Q = (layer("Conversion", "x", "q"), Work(work.CONVERSION, FULL, I8))
TO_HALF = (layer("Convolution", "q", "h"), conv(I8, HALF))
MAPS = Work(work.POINTWISE, HALF, HALF)


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
                (layer("Conversion", "h", "r"), Work(work.CONVERSION, HALF, I8)),
                (layer("Convolution", "r", "b"), conv(I8, I8)),
            ],
            (),
            [],
        ),  # a conversion reads and writes any layout
        ([Q, TO_HALF, (layer("PointWise", "h", "p"), MAPS)], (), [("h", "NC/32HW32", "NC/2HW2")]),
        (
            [Q, TO_HALF, (layer("Pooling", "h", "p"), Work(work.POOL, HALF, HALF))],
            (),
            [("h", "NC/32HW32", "NC/2HW2")],
        ),
        (
            [Q, TO_HALF, (layer("Convolution", "h", "b"), conv(HALF, HALF))],
            (),
            [("h", "NC/32HW32", "NHWC8")],
        ),
        (
            [Q, TO_HALF, (layer("Softmax", "h", "p"), Work(work.SOFTMAX, HALF, HALF))],
            (),
            [("h", "NC/32HW32", "linear")],
        ),
        (
            [Q, TO_HALF, (layer("Resize", "h", "r"), Work(work.RESIZE, HALF, HALF))],
            (),
            [],
        ),  # as it comes
        ([Q, TO_HALF], ("h",), [("h", "NC/32HW32", "linear")]),
        (
            [Q, (layer("Convolution", "q", "f"), conv(I8, FULL))],
            ("f",),
            [],
        ),  # FP32 is written linear
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
                (layer("PointWise", "a", "b"), Work(work.POINTWISE, FULL, FULL)),
                (layer("Convolution", "b", "c"), conv(FULL, FULL)),
            ],
            (),
            [("b", "linear", "NHWC8")],
        ),  # FP32 by TF32: the first convolution is linear, the others are not
        (
            [
                (layer("Conversion", "x", "q"), Work(work.CONVERSION, FULL, I8)),
                (layer("Convolution", "q", "a"), conv(I8, I8, 3.0)),
            ],
            (),
            [],
        ),  # few channels: the conversion writes fours
    ],
)
def test_reformats_of_small_engines(engine, outputs, expected):
    assert changes(*engine, outputs=outputs) == expected


def test_residuals_and_older_architectures():
    engine = [
        Q,
        TO_HALF,
        (layer("PointWise", "h", "p"), MAPS),
        (layer("Convolution", "q p", "b"), conv(I8, HALF)),
    ]
    assert changes(*engine) == [("h", "NC/32HW32", "NC/2HW2"), ("p", "NC/2HW2", "NC/32HW32")]
    known = {"7.5": 0.9, "8.0": 1.1, "8.9": 1.2}
    factors = {"8.0": 1.1, "12.0": 1.2, "9.0": 1.2, "6.1": 1.0}
    assert {cc: factor_of(cc, known) for cc in factors} == factors and factor_of("8.6", {}) == 1.0
    assert set(constants().values) == set(NAMES)
    assert all(v > 0 for v in constants().values.values())
    assert {"layer", "total", "total_unknown", "total_calibrated"} <= set(constants().spreads)
    assert 1 < constants().spreads["total"] <= constants().spreads["total_unknown"] < 2
    assert {str(x) for x in Layout} == {"linear", "NC/2HW2", "NC/4HW4", "NC/32HW32", "NHWC8"}


@pytest.mark.parametrize("shape", [None, (1, 64), (1, 64, 1, 1), (1, 64, 400)])
def test_what_has_no_positions_has_no_layout(shape):
    assert changes(Q, TO_HALF, (layer("PointWise", "h", "p"), MAPS), shape=shape) == []


# Reformats of origin REFORMAT in the published listings (conversions have origin QDQ); the engine's own count.
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
def test_published_engines_have_about_as_many(case, built):
    found = workload(evidence.graph(case), "trt8.6")
    assert abs(sum(e.reformat is not None for e in found.extras) - built) <= 2


def silu_network() -> Model:
    g = Graph()
    x = g.input(1, 32, 16, 16)
    a = g.silu(g.conv(g.pair(x, "xq"), "a", 32), "sa")
    return Model(g.model(g.op("Softmax", [g.silu(g.conv(g.pair(a, "aq"), "b", 32), "sb")], "s")))


@pytest.mark.parametrize("target", ["trt8.6", "trt10"])
def test_silu_behind_an_int8_convolution_that_writes_a_float_is_apart(target):
    apart = [e.name for e in workload(silu_network(), target).extras if e.behind]
    assert (
        len(apart) == 1 and "sb.m" in apart[0]
    )  # behind `b`, which writes a float, and not behind `a`


def test_blackwell_joins_conversions_with_their_neighbours_and_changes_no_layout(g):
    a = g.conv(g.pair(g.input(1, 32, 16, 16), "xq"), "a", 32)
    b = g.conv(
        g.pair(g.silu(a, "s"), "bq"), "b", 32
    )  # Q of another tensor behind a sum: stays on older GPUs
    model = Model(g.model(g.conv(g.pair(g.op("Add", [b, g.silu(b, "t")], "sum"), "cq"), "c", 32)))
    counts = {}
    for name in ("RTX 4090", "RTX 5090"):
        load_ = workload(model, "trt10", gpu=find(name))
        counts[name] = (
            sum(w.kind == work.CONVERSION for w in load_.layers),
            sum(e.reformat is not None for e in load_.extras),
        )
    assert counts["RTX 5090"][1] == 0 < counts["RTX 4090"][1]
    assert 0 < counts["RTX 5090"][0] < counts["RTX 4090"][0]  # the input's Q stays


def test_attention_and_older_gpus(g):
    assert {"ln1", "q", "scores", "softmax", "mixed", "proj", "skip", "ln2"} <= region_nodes(
        block()
    )
    assert not region_nodes(Model(g.model(g.relu(g.conv(g.input(1, 8, 8, 8), "c"), "r"))))
    model = twin.float_twin(evidence.graph("resnet18-a100-qat"))
    for name, count in (
        ("A100 80GB PCIe", 1),
        ("RTX 2060", 0),
    ):  # as built on an A100: one behind the pooling
        found = workload(model, "trt8.6", plain=FULL, gpu=find(name)).extras
        assert sum(e.reformat is not None for e in found) == count
    found = workload(model, "trt8.6").extras
    first, last = [e.work for e in found if e.work.kind == work.CONVERSION]
    assert (first.read, first.written, first.channels) == (
        32 * 3 * 224 * 224 * 4,
        32 * 3 * 224 * 224 * 2,
        3.0,
    )
    assert last.written_as == FULL and not any(e.reformat for e in found)  # as built on an A100


def test_shapes_and_conversions_are_no_layouts(g):
    x = g.input(1, 32, 16, 16)
    one, two, none, first = (
        g.const(n, np.array(v)) for n, v in (("i", 1), ("j", 2), ("k", [0]), ("l", [1]))
    )
    half = g.op("Div", [g.op("Gather", [g.op("Shape", [x], "shape"), one], "count"), two], "half")
    ends = g.op("Mul", [g.op("Add", [half, half], "twice"), one], "ends")
    cut = g.op("Slice", [x, none, g.op("Unsqueeze", [ends, none], "end"), first], "cut")
    found = workload(g.model(g.conv(g.pair(cut, "q"), "a", 32)), "trt10")
    assert not [e.name for e in found.extras if e.work.kind == work.POINTWISE]
    model = evidence.graph("resnet18-a100-qat")
    made = [
        (e.work, e.reformat.elements)
        for e in workload(model, "trt8.6").extras
        if e.reformat is not None
    ]
    assert made and all(w.kind == work.REFORMAT and w.precision == w.written_as for w, _ in made)
    assert all(
        w.read == w.written == elements * {I8: 1, HALF: 2}[w.precision] for w, elements in made
    )


# Regions of Myelin: what lies between one attention or normalization and the next, and which nodes are kernels.

WIDE = 64


def block(quantized: bool = True) -> Model:
    """LayerNormalization, a linear layer, attention on its result, another linear layer, a skip, LayerNormalization."""
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

    normed = g.op("LayerNormalization", [x, ones, zeros], "ln1")
    q = linear(normed, "q")
    scores = g.op(
        "Softmax",
        [g.op("MatMul", [q, g.op("Transpose", [q], "t", perm=[0, 2, 1])], "scores")],
        "softmax",
    )
    mixed = linear(g.op("MatMul", [scores, q], "mixed"), "proj")
    return Model(g.model(g.op("LayerNormalization", [g.add(mixed, x, "skip"), ones, zeros], "ln2")))


def test_kernels_of_attention():
    model = block()

    def one(name: str):
        return work_in_region(model, model.node(name), model.shape, Precision.FP16)

    assert one("ln1").kind == work.POOL and one("ln1").read == 2 * 16 * WIDE
    scores, mixed = one("scores"), one("mixed")
    assert scores.macs == mixed.macs == 16 * 16 * WIDE
    assert scores.written == 0 and mixed.read == 2 * 16 * WIDE  # the scores stay inside
    assert scores.steps + mixed.steps == 1  # one kernel
    assert {one(n).kind for n in ("softmax", "t")} == {work.NOTHING}
    assert one("skip").steps == 0 and one("skip").moved > 0  # read by its neighbour, at no launch
    # With Q/DQ on both linear layers the block has as many kernels as without
    kernels = []
    for quantized in (True, False):
        model = block(quantized)
        found = workload(model, "trt10")
        kernels.append(
            sum(w.steps for w in found.all if w.kind not in (work.NOTHING, work.CONVERSION))
        )
        inside = [
            w
            for layer, w in zip(
                predict(model, "trt10", advice=False).layers, found.layers, strict=True
            )
            if layer.type == "Conversion"
        ]
        assert all(w.kind == work.NOTHING for w in inside)
    assert kernels[0] == kernels[1]


# The time model obeys the laws that it states; numbers are worked out by hand.


def conv_physics(rows=3136.0, columns=64.0, depth=576.0, channels=64.0, precision=Precision.INT8):
    size = work.width(precision)
    return Work(
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


def one(found, gpu=GPU):
    return float(seconds([found], gpu)[0])


def test_what_kernels_take_by_hand():
    """1 million rows, 256 columns, depth 2304, INT8 on an RTX 3060: the formula with pencil and paper."""
    c = constants().values
    found = conv_physics(1e6, 256.0, 2304.0, 256.0)
    rate = (
        1024 * c["int8"] * factor_of("8.6", constants().architectures) * 256 / (256 + c["narrow"])
    )
    clocks = 28 * 1777e6
    compute = 1e6 * 256 * 2304 / (clocks * rate)
    moved = 1e6 * 256 * 2 + 256 * 2304
    memory = max(
        moved * (1 - 3e6 * c["l2_share"] / moved) / (c["dram"] * 360e9),
        moved / (c["l2"] * clocks * 32),
    )
    p = 1 + c["overlap"]
    latency = c["step_clocks"] * 2304 / 64 / 1777e6
    floor = c["floor_us"] * 1e-6 + c["floor_clocks"] / 1777e6
    assert one(found) == pytest.approx(
        floor + latency + (compute**p + memory**p) ** (1 / p), rel=1e-9
    )
    found = Work(work.CONVERSION, HALF, I8, channels=64.0, read=2e8, written=1e8)
    expected = floor + 3e8 * (1 - 3e6 * c["l2_share"] / 3e8) / (c["copy"] * 360e9)
    assert one(found) == pytest.approx(expected, rel=1e-9)
    assert one(Work(work.NOTHING)) == 0
    for kind in (work.CONV, work.POOL, work.COPY, work.UNKNOWN, work.SOFTMAX, work.DEPTHWISE):
        assert 1e-6 < one(Work(kind)) < 2e-5, kind
    assert seconds([], GPU).shape == (0,)


works = st.builds(
    conv_physics,
    st.floats(1, 1e7),
    st.floats(1, 4096),
    st.floats(1, 20_000),
    st.floats(1, 4096),
    st.sampled_from([I8, HALF, FULL]),
)


@given(works, st.sampled_from(gpus()), st.floats(1.01, 8))
def test_more_work_never_takes_less_time(found, gpu, factor):
    base = one(found, gpu)
    assert np.isfinite(base) and base > 0
    for name in (
        "rows",
        "columns",
    ):  # what it writes grows with them: else it looks like one with a fused pooling
        more = replace(
            found, **{name: getattr(found, name) * factor}, written=found.written * factor
        )
        assert one(more, gpu) >= base * (1 - 1e-9)
    for name in ("depth", "read", "weights"):
        assert one(replace(found, **{name: getattr(found, name) * factor}), gpu) >= base * (
            1 - 1e-9
        )


@given(works, st.sampled_from(gpus()), st.floats(1.01, 4))
def test_a_faster_gpu_never_takes_longer(found, gpu, factor):
    base = one(found, gpu)
    for name in ("clock", "bandwidth", "l2"):
        assert one(found, replace(gpu, **{name: getattr(gpu, name) * factor})) <= base * (1 + 1e-9)


def test_channels_and_tensor_cores():
    """Heads of 2 channels take as long as 64 would, but for what they write (measured: CenterPoint)."""
    narrow, tile = conv_physics(32400, 2, 576), conv_physics(32400, 64, 576)
    same = replace(narrow, written=tile.written, weights=tile.weights)
    assert one(same) == pytest.approx(one(tile), rel=1e-9)
    plain = conv_physics(400_000, 64, 147, 3)
    pooled = replace(plain, written=plain.written / 4)
    assert one(plain) > 1.5 * one(pooled)
    integer, half = (conv_physics(1e6, 256, 2304, 256, precision) for precision in (I8, HALF))
    assert one(integer, find("V100")) > one(half, find("V100")) and one(integer) < one(half)
