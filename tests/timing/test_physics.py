"""The time model obeys the laws that it states; numbers are worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqtool.timing import work
from qdqtool.timing.gpus import find, gpus
from qdqtool.timing.physics import NAMES, constants, factor_of, seconds
from qdqtool.timing.work import Work
from qdqtool.types import Precision

GPU = find("RTX 3060")


def conv(rows=3136.0, columns=64.0, depth=576.0, channels=64.0, precision=Precision.INT8):
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


def test_every_constant_is_there():
    assert set(constants().values) == set(NAMES)
    assert all(v > 0 for v in constants().values.values())
    assert {"layer", "total", "total_unknown", "total_calibrated"} <= set(constants().spreads)
    assert 1 < constants().spreads["total"] <= constants().spreads["total_unknown"] < 2


def test_a_large_convolution_by_hand():
    """1 million rows, 256 columns, depth 2304, INT8 on an RTX 3060: the formula with pencil and paper."""
    c = constants().values
    found = conv(1e6, 256.0, 2304.0, 256.0)
    rate = 1024 * c["int8"] * factor_of("8.6", constants().architectures) * 256 / (256 + c["narrow"])
    clocks = 28 * 1777e6
    compute = 1e6 * 256 * 2304 / (clocks * rate)
    moved = 1e6 * 256 * 2 + 256 * 2304
    memory = max(moved * (1 - 3e6 * c["l2_share"] / moved) / (c["dram"] * 360e9), moved / (c["l2"] * clocks * 32))
    p = 1 + c["overlap"]
    latency = c["step_clocks"] * 2304 / 64 / 1777e6
    floor = c["floor_us"] * 1e-6 + c["floor_clocks"] / 1777e6
    assert one(found) == pytest.approx(floor + latency + (compute**p + memory**p) ** (1 / p), rel=1e-9)


def test_a_conversion_is_bandwidth_and_a_floor():
    c = constants().values
    found = Work(work.CONVERSION, Precision.FP16, Precision.INT8, channels=64.0, read=2e8, written=1e8)
    floor = c["floor_us"] * 1e-6 + c["floor_clocks"] / 1777e6
    expected = floor + 3e8 * (1 - 3e6 * c["l2_share"] / 3e8) / (c["copy"] * 360e9)
    assert one(found) == pytest.approx(expected, rel=1e-9)


def test_nothing_takes_no_time_and_everything_else_at_least_a_microsecond():
    assert one(Work(work.NOTHING)) == 0
    for kind in (work.CONV, work.POOL, work.COPY, work.UNKNOWN, work.SOFTMAX, work.DEPTHWISE):
        assert 1e-6 < one(Work(kind)) < 2e-5, kind
    assert seconds([], GPU).shape == (0,)


works = st.builds(
    conv,
    st.floats(1, 1e7),
    st.floats(1, 4096),
    st.floats(1, 20_000),
    st.floats(1, 4096),
    st.sampled_from([Precision.INT8, Precision.FP16, Precision.FP32]),
)


@given(works, st.sampled_from(gpus()), st.floats(1.01, 8))
def test_more_work_never_takes_less_time(found, gpu, factor):
    base = one(found, gpu)
    assert np.isfinite(base) and base > 0
    for name in ("rows", "columns"):  # what it writes grows with them: else it looks like one with a fused pooling
        more = replace(found, **{name: getattr(found, name) * factor}, written=found.written * factor)
        assert one(more, gpu) >= base * (1 - 1e-9)
    for name in ("depth", "read", "weights"):
        assert one(replace(found, **{name: getattr(found, name) * factor}), gpu) >= base * (1 - 1e-9)


@given(works, st.sampled_from(gpus()), st.floats(1.01, 4))
def test_a_faster_gpu_never_takes_longer(found, gpu, factor):
    base = one(found, gpu)
    assert one(found, replace(gpu, clock=gpu.clock * factor)) <= base * (1 + 1e-9)
    assert one(found, replace(gpu, bandwidth=gpu.bandwidth * factor)) <= base * (1 + 1e-9)
    assert one(found, replace(gpu, l2=gpu.l2 * factor)) <= base * (1 + 1e-9)


def test_few_output_channels_cost_as_many_as_a_tile():
    """Heads of 2 channels take as long as 64 would, but for what they write (measured: CenterPoint)."""
    narrow, tile = conv(32400, 2, 576), conv(32400, 64, 576)
    same = replace(narrow, written=tile.written, weights=tile.weights)
    assert one(same) == pytest.approx(one(tile), rel=1e-9)


def test_int8_of_few_channels_runs_by_dp4a_unless_pooled():
    plain = conv(400_000, 64, 147, 3)
    pooled = replace(plain, written=plain.written / 4)
    assert one(plain) > 1.5 * one(pooled)


def test_int8_without_tensor_cores_is_slower_than_fp16_with_them():
    v100 = find("V100")
    assert one(conv(1e6, 256, 2304, 256), v100) > one(conv(1e6, 256, 2304, 256, Precision.FP16), v100)
    assert one(conv(1e6, 256, 2304, 256)) < one(conv(1e6, 256, 2304, 256, Precision.FP16))


def test_architectures_that_were_not_measured_take_the_nearest():
    known = {"7.5": 0.9, "8.0": 1.1, "8.9": 1.2}
    assert factor_of("8.0", known) == 1.1
    assert factor_of("12.0", known) == 1.2
    assert factor_of("9.0", known) == 1.2
    assert factor_of("6.1", known) == 1.0
    assert factor_of("8.6", {}) == 1.0
