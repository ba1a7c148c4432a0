"""Layouts: what each kernel reads and writes, on engines of a few layers; and the reformats of published engines."""

from __future__ import annotations

import pytest

from qdqtool.graph import Model
from qdqtool.modelfile import load
from qdqtool.prediction import predict
from qdqtool.timing import twin, work
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
    ([(layer("Convolution", "x", "a"), conv(FULL, FULL)), (layer("PointWise", "a", "b"),
      Work(work.POINTWISE, FULL, FULL))], ("b",), []),
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


def test_silu_behind_an_int8_convolution_that_writes_a_float_is_apart_on_tensorrt_10():
    model = silu_network()
    kernels = {t: [e.name for e in workload_of(model, predict(model, t, advice=False)).extras if "PWN" in e.name]
               for t in ("trt8.6", "trt10")}  # fmt: skip
    floats = [c for c in predict(model, "trt10").convolutions if str(c.output) in ("FLOAT", "FP16")]
    assert not kernels["trt8.6"] and len(kernels["trt10"]) <= len(floats)


def test_layouts_never_count_as_conversions():
    model = load(evidence.HOME / "resnet18-a100-qat" / "model.onnx.gz")
    prediction = predict(model, "trt8.6", advice=False)
    found = workload_of(model, prediction)
    assert all(e.work.kind == work.REFORMAT and e.work.precision == e.work.written_as
               for e in found.extras if e.reformat is not None)  # fmt: skip
    plain = twin.float_twin(model)
    assert not any(e.work.kind == work.CONVERSION and e.reformat for e in workload_of(
        plain, predict(plain, "trt8.6", advice=False)).extras)  # fmt: skip
