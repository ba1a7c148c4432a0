"""Layouts: what each kernel reads and writes, on engines of a few layers; and the reformats of published engines."""

from __future__ import annotations

import numpy as np
import pytest

from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from qdqtool.prediction import predict
from qdqtool.timing import twin, work
from qdqtool.timing.gpus import find
from qdqtool.timing.layouts import Layout, reformats_of
from qdqtool.timing.predicted import workload_of
from qdqtool.timing.work import Work
from qdqtool.types import EngineLayer, Precision, TensorPrecision
from tests.trt import evidence
from tests.trt.builder import Graph

I8, HALF, FULL = Precision.INT8, Precision.FP16, Precision.FP32
SHAPE = (1, 64, 20, 20)


def layer(kind: str, reads: str, writes: str, name: str = "") -> EngineLayer:
    return EngineLayer(name or f"{kind} {writes}", kind, [TensorPrecision(t, Precision.FLOAT) for t in reads.split()],
                       [TensorPrecision(writes, Precision.FLOAT)])  # fmt: skip


def conv(low: Precision, high: Precision, channels: float = 64.0) -> Work:
    return Work(work.CONV, low, high, channels=channels)


def changes(*pairs: tuple[EngineLayer, Work], outputs: tuple[str, ...] = (), shape=SHAPE) -> list[tuple[str, str, str]]:
    layers, works = zip(*pairs, strict=True)
    found = reformats_of(layers, works, lambda _: shape, ["x"], outputs)
    return [(c.tensor, str(c.source), str(c.target)) for c in found]


Q = (layer("Conversion", "x", "q"), Work(work.CONVERSION, FULL, I8))
TO_HALF = (layer("Convolution", "q", "h"), conv(I8, HALF))
MAPS = Work(work.POINTWISE, HALF, HALF)


@pytest.mark.parametrize(("engine", "outputs", "expected"), [
    ([Q, (layer("Convolution", "q", "a"), conv(I8, I8)), (layer("Convolution", "a", "b"), conv(I8, I8))], (), []),
    ([Q, TO_HALF, (layer("Conversion", "h", "r"), Work(work.CONVERSION, HALF, I8)),
      (layer("Convolution", "r", "b"), conv(I8, I8))], (), []),  # a conversion reads and writes any layout
    ([Q, TO_HALF, (layer("PointWise", "h", "p"), MAPS)], (), [("h", "NC/32HW32", "NC/2HW2")]),
    ([Q, TO_HALF, (layer("Pooling", "h", "p"), Work(work.POOL, HALF, HALF))], (), [("h", "NC/32HW32", "NC/2HW2")]),
    ([Q, TO_HALF, (layer("Convolution", "h", "b"), conv(HALF, HALF))], (), [("h", "NC/32HW32", "NHWC8")]),
    ([Q, TO_HALF, (layer("Softmax", "h", "p"), Work(work.SOFTMAX, HALF, HALF))], (), [("h", "NC/32HW32", "linear")]),
    ([Q, TO_HALF], ("h",), [("h", "NC/32HW32", "linear")]),
    ([Q, (layer("Convolution", "q", "f"), conv(I8, FULL))], ("f",), []),  # FP32 is written linear
    ([(layer("Convolution", "x", "a"), conv(HALF, HALF)), (layer("Convolution", "a", "b"), conv(HALF, HALF))], (),
     [("x", "linear", "NHWC8")]),
    ([(layer("Convolution", "x", "a"), conv(FULL, FULL, 3.0)), (layer("PointWise", "a", "b"),
      Work(work.POINTWISE, FULL, FULL)), (layer("Convolution", "b", "c"), conv(FULL, FULL))], (),
     [("b", "linear", "NHWC8")]),  # FP32 by TF32: the first convolution is linear, the others are not
    ([(layer("Conversion", "x", "q"), Work(work.CONVERSION, FULL, I8)), (layer("Convolution", "q", "a"),
      conv(I8, I8, 3.0))], (), []),  # few channels: the conversion writes fours
])  # fmt: skip
def test_reformats_of_small_engines(engine, outputs, expected):
    assert changes(*engine, outputs=outputs) == expected


def test_a_residual_comes_in_the_layout_that_its_convolution_writes():
    engine = [Q, TO_HALF, (layer("PointWise", "h", "p"), MAPS),
              (layer("Convolution", "q p", "b"), conv(I8, HALF))]  # fmt: skip
    assert changes(*engine) == [("h", "NC/32HW32", "NC/2HW2"), ("p", "NC/2HW2", "NC/32HW32")]


@pytest.mark.parametrize("shape", [None, (1, 64), (1, 64, 1, 1), (1, 64, 400)])
def test_what_has_no_positions_has_no_layout(shape):
    assert changes(Q, TO_HALF, (layer("PointWise", "h", "p"), MAPS), shape=shape) == []


def test_every_layout_has_tensorrts_name():
    assert {str(x) for x in Layout} == {"linear", "NC/2HW2", "NC/4HW4", "NC/32HW32", "NHWC8"}


# Reformats of origin REFORMAT in the published listings (conversions have origin QDQ); the engine's own count.
@pytest.mark.parametrize(("case", "built"), [
    ("resnet18-a100-qat-residual", 0), ("resnet18-a100-qat", 2), ("mobilenetv2-titanrtx-qat-residual", 1),
    ("bevfusion-camera-rtx3080ti-trt8600", 2),
])  # fmt: skip
def test_published_engines_have_about_as_many(case, built):
    model = load(evidence.HOME / case / "model.onnx.gz")
    found = workload_of(model, predict(model, "trt8.6", advice=False))
    assert abs(sum(e.reformat is not None for e in found.extras) - built) <= 2


def silu_network() -> Model:
    g = Graph()
    x = g.input(1, 32, 16, 16)
    a = g.silu(g.conv(g.pair(x, "xq"), "a", 32), "sa")
    return Model(g.model(g.op("Softmax", [g.silu(g.conv(g.pair(a, "aq"), "b", 32), "sb")], "s")))


@pytest.mark.parametrize("target", ["trt8.6", "trt10"])
def test_silu_behind_an_int8_convolution_that_writes_a_float_is_apart(target):
    model = silu_network()
    found = workload_of(model, predict(model, target, advice=False)).extras
    apart = [e.name for e in found if e.name.startswith("PWN behind")]
    assert len(apart) == 1 and "sb.m" in apart[0]  # behind `b`, which writes a float, and not behind `a`


def test_blackwell_joins_conversions_with_their_neighbours_and_changes_no_layout():
    g = Graph()
    a = g.conv(g.pair(g.input(1, 32, 16, 16), "xq"), "a", 32)
    b = g.conv(g.pair(g.silu(a, "s"), "bq"), "b", 32)  # Q of another tensor behind a sum: stays on older GPUs
    model = Model(g.model(g.conv(g.pair(g.op("Add", [b, g.silu(b, "t")], "sum"), "cq"), "c", 32)))
    prediction = predict(model, "trt10", advice=False)
    counts = {}
    for name in ("RTX 4090", "RTX 5090"):
        load_ = workload_of(model, prediction, gpu=find(name))
        counts[name] = (sum(w.kind == work.CONVERSION for w in load_.layers),
                        sum(e.reformat is not None for e in load_.extras))  # fmt: skip
    assert counts["RTX 5090"][1] == 0 < counts["RTX 4090"][1]
    assert 0 < counts["RTX 5090"][0] < counts["RTX 4090"][0]  # the input's Q stays


def float_resnet() -> Model:
    return twin.float_twin(load(evidence.HOME / "resnet18-a100-qat" / "model.onnx.gz"))


def test_fp32_is_linear_on_a_gpu_without_tf32():
    model = float_resnet()
    prediction = predict(model, "trt8.6", advice=False)
    changed = {name: sum(e.reformat is not None for e in workload_of(
        model, prediction, FULL, gpu=find(name)).extras) for name in ("A100 80GB PCIe", "RTX 2060")}  # fmt: skip
    assert changed == {"A100 80GB PCIe": 1, "RTX 2060": 0}  # as built on an A100: one behind the pooling


def test_the_edge_of_an_fp16_network_is_one_kernel_with_its_change_of_layout():
    model = float_resnet()
    found = workload_of(model, predict(model, "trt8.6", advice=False)).extras
    first, last = [e.work for e in found if e.work.kind == work.CONVERSION]
    assert (first.read, first.written, first.channels) == (32 * 3 * 224 * 224 * 4, 32 * 3 * 224 * 224 * 2, 3.0)
    assert last.written_as == FULL and not any(e.reformat for e in found)  # as built on an A100


def test_arithmetic_on_shapes_is_no_kernel():
    g = Graph()
    x = g.input(1, 32, 16, 16)
    one, two, none, first = (g.const(n, np.array(v)) for n, v in (("i", 1), ("j", 2), ("k", [0]), ("l", [1])))
    half = g.op("Div", [g.op("Gather", [g.op("Shape", [x], "shape"), one], "count"), two], "half")
    ends = g.op("Mul", [g.op("Add", [half, half], "twice"), one], "ends")
    cut = g.op("Slice", [x, none, g.op("Unsqueeze", [ends, none], "end"), first], "cut")
    model = Model(g.model(g.conv(g.pair(cut, "q"), "a", 32)))
    assert not [e.name for e in workload_of(model, predict(model, "trt10", advice=False)).extras
                if e.work.kind == work.POINTWISE]  # fmt: skip


def test_layouts_never_count_as_conversions():
    model = load(evidence.HOME / "resnet18-a100-qat" / "model.onnx.gz")
    prediction = predict(model, "trt8.6", advice=False)
    found = workload_of(model, prediction)
    assert all(e.work.kind == work.REFORMAT and e.work.precision == e.work.written_as
               for e in found.extras if e.reformat is not None)  # fmt: skip
    plain = twin.float_twin(model)
    assert not any(e.work.kind == work.CONVERSION and e.reformat for e in workload_of(
        plain, predict(plain, "trt8.6", advice=False)).extras)  # fmt: skip
