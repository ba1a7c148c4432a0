import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from calibration import METHODS, TensorStatistics, amax_of, squared_error
from qdqtool import qat
from qdqtool.errors import QdqtoolError
from qdqtool.qat.device_statistics import (
    HISTOGRAM_BINS,
    SAMPLED_PER_IMAGE,
    DeviceStatistics,
)
from qdqtool.qat.modules import read_amax
from tests.errors import has
from tests.qat import nets
from tests.qat.backends import BACKENDS


def statistics_of(values: torch.Tensor) -> tuple[TensorStatistics, TensorStatistics]:
    device = DeviceStatistics()
    for part in values:
        device.add(part)
    return device.result, TensorStatistics.of(values.numpy(), HISTOGRAM_BINS)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_device_counts_equal_cpu_counts(scale: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 4, 8, 9) * torch.tensor([0.1, 5.0, 1.0]).reshape(3, 1, 1, 1) * scale
    device, cpu = statistics_of(values)
    assert (device.count, device.minimum, device.maximum) == (cpu.count, cpu.minimum, cpu.maximum)
    assert_same_counts(device, cpu)
    np.testing.assert_array_equal(device.histogram.edges, cpu.histogram.edges)


def assert_same_counts(device: TensorStatistics, cpu: TensorStatistics) -> None:
    np.testing.assert_array_equal(device.histogram.counts, cpu.histogram.counts)


def test_values_that_are_not_finite_are_counted_apart() -> None:
    values = torch.randn(2, 4, 8, 9)
    values[0, 0, 0, :3] = torch.tensor([np.nan, np.inf, -np.inf])
    device, cpu = statistics_of(values)
    assert (device.nonfinite, device.count) == (cpu.nonfinite, cpu.count) == (3, values.numel() - 3)


def test_memory_format_does_not_change_counts() -> None:
    values, strided = torch.randn(2, 4, 8, 9), DeviceStatistics()
    strided.add(values.to(memory_format=torch.channels_last))
    assert_same_counts(strided.result, TensorStatistics.of(values.numpy(), HISTOGRAM_BINS))


def test_large_tensors_are_sampled() -> None:
    torch.manual_seed(1)
    values = torch.randn(8, 16, 128, 128)
    device, cpu = statistics_of(values)
    assert 8 * SAMPLED_PER_IMAGE // 2 < device.count < cpu.count == values.numel()
    assert (device.absmax, device.minimum) == (cpu.absmax, cpu.minimum)
    assert amax_of(device, "max") == amax_of(cpu, "max")
    assert amax_of(device, "percentile") == pytest.approx(amax_of(cpu, "percentile"), rel=0.1)
    # The error is flat around its minimum, so the test compares errors instead of ranges.
    chosen, best = (squared_error(cpu, amax_of(s, "mse")) for s in (device, cpu))
    assert chosen < 1.05 * best


def test_extremes_outside_of_the_sample_are_recorded() -> None:
    values = torch.zeros(1, 64, 64, 64)
    values[0, 9, 9, 9], values[0, 8, 8, 8] = 7.0, -5.0
    device = statistics_of(values.half())[0]
    assert (device.minimum, device.maximum, device.nonfinite) == (-5.0, 7.0, 0)
    values[0, 9, 9, 9] = math.nan
    assert statistics_of(values)[0].nonfinite > 0


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_default_dtype_does_not_change_counts(default: torch.dtype) -> None:
    values = torch.randn(3, 4, 8, 9)
    torch.set_default_dtype(default)
    try:
        device, cpu = statistics_of(values)
    finally:
        torch.set_default_dtype(torch.float32)
    assert device.count == cpu.count == values.numel()
    assert_same_counts(device, cpu)


@pytest.mark.parametrize(
    "shape", [(4, 48, 40, 40), (1, 64, 80, 80), (1, 96, 112, 112), (2, 96, 61, 32), (8, 49, 768)]
)
@pytest.mark.parametrize("last", [False, True])
def test_sample_covers_every_channel_and_position(shape: tuple[int, ...], last: bool) -> None:
    """Values differ along one axis, so that the counts show which positions were sampled."""
    for axis in range(1, len(shape)):
        length = shape[axis]
        along = [-1 if i == axis else 1 for i in range(len(shape))]
        values = (
            (2.0 ** -torch.arange(length).remainder(16).float())
            .reshape(along)
            .expand(shape)
            .contiguous()
        )
        if last and len(shape) == 4:
            values = values.to(memory_format=torch.channels_last)
        device = DeviceStatistics()
        for _ in range(64 // shape[0]):
            device.add(values, shape[0])
        histogram = device.result.histogram
        present = np.bincount(np.arange(length) % 16, minlength=16) / length
        low, high = histogram.edges[:-1], histogram.edges[1:]
        magnitudes = 2.0 ** -np.arange(16)
        counts = np.array([histogram.counts[(low <= v) & (high > v)].sum() for v in magnitudes])
        np.testing.assert_allclose(counts / counts.sum(), present, rtol=0.1)


GENERATOR = torch.Generator().manual_seed(3)
BATCHES = [torch.randn(2, 16, 16, 16, generator=GENERATOR) * scale for scale in (1.0, 3.0, 0.5)]
LARGEST = max(float(b.abs().max()) for b in BATCHES)


def prepared(backend: str = "pytorch-quantization") -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(nets.conv(), torch.nn.ReLU(), nets.conv())
    return nets.prepared(model, BATCHES[0], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_calibrated_ranges_equal_those_of_all_values(backend: str, method: str) -> None:
    model = prepared(backend)
    calibration = qat.calibrate(model, BATCHES, method)
    assert calibration.batches == 3 and not calibration.warnings
    with qat.disabled(model):
        hidden = [nets.evaluate(model[:2], batch) for batch in BATCHES]
    for name, batches in (("0._input_quantizer", BATCHES), ("2._input_quantizer", hidden)):
        expected = amax_of(TensorStatistics.of(torch.cat(batches).numpy()), method)
        tolerance = 1e-5 if method == "max" else 1e-3
        assert nets.range_of(model, name) == pytest.approx(expected, rel=tolerance)


def test_tied_quantizers_have_the_largest_range() -> None:
    model = nets.prepared(nets.UpAndDown(), BATCHES[0])
    group = next(s for s in qat.calibrate(model, BATCHES, "max").scales if len(s.members) == 2)
    own = {m.tensor: m.amax for m in group.members}
    assert own.keys() == {"down._input_quantizer", "last._input_quantizer"}
    assert own["down._input_quantizer"] == pytest.approx(LARGEST, rel=1e-6)
    shared = nets.range_of(model, "down._input_quantizer")
    assert shared == pytest.approx(max(own.values()), rel=1e-6)


def test_calibrate_keeps_mode_and_quantizes_nothing() -> None:
    model, distinct = prepared().train(), []
    model[2].register_forward_hook(lambda m, args, out: distinct.append(args[0].unique().numel()))
    qat.calibrate(model, BATCHES[:1])
    assert distinct[0] > 256  # quantized values would be at most 256 different ones
    assert model.training and model[0].training


def test_method_for_chooses_quantizers() -> None:
    batches = [(BATCHES[0],), {"input": BATCHES[1]}]
    calibration = qat.calibrate(prepared(), batches, "max", method_for=[("^2", "percentile")])
    assert [s.method for s in calibration.scales] == ["max", "percentile"]


def test_max_batches_limits_iterator() -> None:
    assert qat.calibrate(prepared(), iter(BATCHES), max_batches=2).batches == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_calibrate_again_replaces_ranges(backend: str) -> None:
    model = prepared(backend)
    first = qat.calibrate(model, BATCHES[:1], "max").scales[0].scale
    second = qat.calibrate(model, BATCHES[1:2], "max").scales[0].scale
    assert second == pytest.approx(3 * first, rel=0.5) and not math.isclose(first, second)


@pytest.mark.parametrize(
    ("network", "data", "options", "code", "attributes"),
    [
        (
            prepared,
            [torch.full((1, 16, 8, 8), torch.nan)],
            {},
            "not-finite",
            {"node": "0._input_quantizer"},
        ),
        (prepared, BATCHES, {"method": "best"}, "unknown-choice", {"parameter": "method"}),
        (
            prepared,
            BATCHES,
            {"method_for": [("^7", "max")]},
            "no-match",
            {"parameter": "method_for"},
        ),
        (nets.conv, BATCHES, {}, "not-prepared", {"parameter": "model"}),
    ],
    ids=["not finite", "unknown method", "no match", "no quantizers"],
)
def test_calibrate_is_refused(
    network: Callable[[], nn.Module],
    data: list[torch.Tensor],
    options: dict[str, Any],
    code: str,
    attributes: dict[str, str],
) -> None:
    with pytest.raises(QdqtoolError, check=has(code, **attributes)):
        qat.calibrate(network(), data, **options)


FUNCTIONS = pytest.mark.parametrize("function", [qat.calibrate, qat.sensitivity])


@FUNCTIONS
@pytest.mark.parametrize("limit", [0, -1])
def test_max_batches_below_1_is_refused(function: Callable[..., object], limit: int) -> None:
    refused = has("out-of-range", parameter="max_batches")
    with pytest.raises(QdqtoolError, check=refused, match=f"max_batches={limit}"):
        function(prepared(), BATCHES, max_batches=limit)


class Loader:
    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield BATCHES[0]
        raise OSError("b.jpg is cut off")


@FUNCTIONS
def test_error_of_loader_is_passed_on(function: Callable[..., object]) -> None:
    with pytest.raises(OSError, match=r"b\.jpg is cut off"):
        function(prepared(), Loader())


def test_calibrators_of_pytorch_quantization() -> None:
    model = prepared()
    nets.max_calibrate(model, *BATCHES)
    assert nets.range_of(model, "0._input_quantizer") == pytest.approx(LARGEST, rel=1e-6)
    weights = read_amax(model.get_submodule("0._weight_quantizer"))
    assert weights is not None and tuple(weights.shape) == (16, 1, 1, 1)


def test_calibrators_of_modelopt() -> None:
    quantization = pytest.importorskip(
        "modelopt.torch.quantization", reason="nvidia-modelopt is not installed"
    )
    model = prepared("modelopt")
    quantization.calibrate(model, "max", lambda network: [network(batch) for batch in BATCHES])
    assert nets.range_of(model, "0._input_quantizer") == pytest.approx(LARGEST, rel=1e-6)
