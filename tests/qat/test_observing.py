import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from calibration import METHODS, TensorStatistics, amax_of, squared_error
from qdqtool import qat
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.qat.modules import amax_of as amax_buffer
from qdqtool.qat.ranges import BINS, COUNTED, HELD, DeviceStatistics
from tests.qat import nets
from tests.qat.backends import BACKENDS
from tests.raising import raises


def _both(values: torch.Tensor) -> tuple[TensorStatistics, TensorStatistics]:
    mine = DeviceStatistics()
    for part in values:
        mine.add(part)
    return mine.result, TensorStatistics.of(values.numpy(), BINS)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_counts_are_those_of_the_cpu(scale: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 4, 8, 9) * torch.tensor([0.1, 5.0, 1.0]).reshape(3, 1, 1, 1) * scale
    mine, other = _both(values)
    assert (mine.count, mine.minimum, mine.maximum) == (other.count, other.minimum, other.maximum)
    np.testing.assert_array_equal(mine.histogram.counts, other.histogram.counts)
    np.testing.assert_array_equal(mine.histogram.edges, other.histogram.edges)


def test_counts_of_odd_tensors() -> None:
    values = torch.randn(2, 4, 8, 9)
    values[0, 0, 0, :3] = torch.tensor([np.nan, np.inf, -np.inf])
    mine, other = _both(values)
    assert (mine.nonfinite, mine.count) == (other.nonfinite, other.count) == (3, values.numel() - 3)
    strided, half = DeviceStatistics(), DeviceStatistics()
    strided.add(values.to(memory_format=torch.channels_last))
    half.add(torch.ones(4, dtype=torch.float16))
    np.testing.assert_array_equal(strided.result.histogram.counts, other.histogram.counts)
    assert half.result.maximum == 1.0
    torch.manual_seed(1)
    values = torch.randn(8, 16, 128, 128)
    mine, other = _both(values)
    assert mine.count < other.count == values.numel() and mine.count > 8 * COUNTED // 2
    assert mine.absmax == other.absmax and mine.minimum == other.minimum
    assert amax_of(mine, "max") == amax_of(other, "max")
    assert amax_of(mine, "percentile") == pytest.approx(amax_of(other, "percentile"), rel=0.1)
    # The error over a range is flat round its least: what counts is the error of all values, not the range itself.
    chosen, best = (squared_error(other, amax_of(s, "mse")) for s in (mine, other))
    assert chosen < 1.05 * best
    size = 3 * HELD // 8
    good, bad = torch.randn(size), torch.randn(size)
    bad[5] = math.nan
    statistics = DeviceStatistics()
    for values in (good, good, bad, good, good):
        statistics.add(values, images=size // COUNTED + 1)
    found = statistics.result
    assert found.nonfinite == 1 and found.count == 5 * size - 1
    assert found.absmax == max(float(good.abs().max()), float(bad.nan_to_num().abs().max()))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_torchs_default_type_changes_no_count(default: torch.dtype) -> None:
    values = torch.randn(3, 4, 8, 9)
    torch.set_default_dtype(default)
    try:
        mine, other = _both(values)
    finally:
        torch.set_default_dtype(torch.float32)
    assert mine.count == other.count == values.numel()
    np.testing.assert_array_equal(mine.histogram.counts, other.histogram.counts)


@pytest.mark.parametrize(
    "shape", [(4, 48, 40, 40), (1, 64, 80, 80), (1, 96, 112, 112), (2, 96, 61, 32), (8, 49, 768)]
)
@pytest.mark.parametrize("last", [False, True])
def test_every_channel_and_position_has_its_share_of_a_sample(
    shape: tuple[int, ...], last: bool
) -> None:
    """Each value is one of as many magnitudes as an axis is long, so that the counts say what was taken."""
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
        mine = DeviceStatistics()
        for _ in range(64 // shape[0]):
            mine.add(values, shape[0])
        histogram = mine.result.histogram
        present = np.bincount(np.arange(length) % 16, minlength=16) / length
        edges = histogram.edges[:-1], histogram.edges[1:]
        taken = np.array(
            [
                histogram.counts[(edges[0] <= v) & (edges[1] > v)].sum()
                for v in 2.0 ** -np.arange(16)
            ]
        )
        np.testing.assert_allclose(taken / taken.sum(), present, rtol=0.1)


GENERATOR = torch.Generator().manual_seed(3)
BATCHES = [torch.randn(2, 16, 16, 16, generator=GENERATOR) * scale for scale in (1.0, 3.0, 0.5)]


def _prepared(backend: str = "pytorch-quantization", model: nn.Module | None = None) -> nn.Module:
    return nets.prepared(
        model or nn.Sequential(nets.conv(), nn.ReLU(), nets.conv()), BATCHES[0], backend=backend
    )


def _amax(quantizer: nn.Module) -> float:
    amax = amax_buffer(quantizer)
    assert amax is not None
    return float(amax)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_ranges_are_those_of_the_values(backend: str, method: str) -> None:
    torch.manual_seed(0)
    model = _prepared(backend)
    done = qat.calibrate(model, BATCHES, method)
    assert done.batches == 3 and not done.warnings
    inputs = np.concatenate([b.numpy() for b in BATCHES])
    with torch.no_grad():
        hidden = np.concatenate(
            [torch.relu(nn.Conv2d.forward(_plain(model[0]), b)).numpy() for b in BATCHES]
        )
    for index, values in ((0, inputs), (2, hidden)):
        found = _amax(model[index]._input_quantizer)
        if method == "max":
            assert found == pytest.approx(np.abs(values).max(), rel=1e-5)
        else:
            assert found == pytest.approx(amax_of(TensorStatistics.of(values), method), rel=1e-3)


def _plain(quantizing: nn.Module) -> nn.Conv2d:
    conv = nets.conv()
    conv.load_state_dict({k: v for k, v in quantizing.state_dict().items() if "quantizer" not in k})
    return conv


def test_groups_and_modes() -> None:
    model = _prepared(model=nets.UpAndDown())
    done = qat.calibrate(model, BATCHES, "max")
    group = next(s for s in done.scales if len(s.members) == 2)
    assert {m.tensor for m in group.members} == {"down._input_quantizer", "last._input_quantizer"}
    own = {m.tensor: m.amax for m in group.members}
    assert _amax(model.down._input_quantizer) == pytest.approx(max(own.values()), rel=1e-6)
    assert own["down._input_quantizer"] == pytest.approx(
        max(float(b.abs().max()) for b in BATCHES), rel=1e-6
    )
    model = _prepared()
    model.train()
    seen = []
    model[2].register_forward_hook(lambda m, args, out: seen.append(args[0].unique().numel()))
    qat.calibrate(model, BATCHES[:1])
    assert seen[0] > 256  # quantized values would be at most 256 different ones
    assert model.training and model[0].training
    model = _prepared()
    done = qat.calibrate(
        model, [(BATCHES[0],), {"input": BATCHES[1]}], "max", method_for=[("^2", "percentile")]
    )
    assert [s.method for s in done.scales] == ["max", "percentile"]
    assert qat.calibrate(model, iter(BATCHES), max_batches=2).batches == 2
    with raises(QdqtoolError, "MethodChoice.check quantized"):
        qat.calibrate(model, BATCHES, method_for=[("^7", "max")])


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_can_be_done_again_with_other_data(backend: str) -> None:
    model = _prepared(backend)
    first = qat.calibrate(model, BATCHES[:1], "max").scales[0].scale
    second = qat.calibrate(model, BATCHES[1:2], "max").scales[0].scale
    assert second == pytest.approx(3 * first, rel=0.5) and not math.isclose(first, second)


def test_bad_data_is_told() -> None:
    model = _prepared()
    with pytest.raises(DataError, match=r"0\._input_quantizer.*NaN"):
        qat.calibrate(model, [torch.full((1, 16, 8, 8), torch.nan)])
    with raises(QdqtoolError, "MethodChoice.check best"):
        qat.calibrate(model, BATCHES, "best")

    for function in (qat.calibrate, qat.sensitivity):
        with raises(DataError, "answer batch 0:"):
            function(model, [torch.zeros(1)])  # type: ignore[operator]
        with raises(DataError, "batches_of 1"):
            function(model, np.array([None]))  # type: ignore[operator]
    with raises(QdqtoolError, "check_limit max_batches=0"):
        qat.calibrate(model, BATCHES, max_batches=0)
    with raises(QdqtoolError, "check_limit max_batches=-1"):
        qat.sensitivity(model, BATCHES, max_batches=-1)

    class Loader:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[torch.Tensor]:
            yield BATCHES[0]
            raise OSError("b.jpg is cut off")

    for function in (qat.calibrate, qat.sensitivity):
        with raises(QdqtoolError, "read `data= OSError b.jpg is cut off") as caught:
            function(model, Loader())  # type: ignore[operator]
        assert isinstance(caught.value.__cause__, OSError)
    with raises(QdqtoolError, "plan_of"):
        qat.calibrate(nets.conv(), BATCHES)


def test_calibrators_of_the_backends() -> None:
    model = _prepared()
    nets.max_calibrate(model, *BATCHES)
    wanted = max(float(b.abs().max()) for b in BATCHES)
    assert _amax(model[0]._input_quantizer) == pytest.approx(wanted, rel=1e-6)
    assert tuple(model[0]._weight_quantizer._amax.shape) == (16, 1, 1, 1)
    quantization = pytest.importorskip(
        "modelopt.torch.quantization", reason="nvidia-modelopt is not installed"
    )
    model = _prepared("modelopt")

    def loop(network: nn.Module) -> None:
        for batch in BATCHES:
            network(batch)

    quantization.calibrate(model, "max", loop)
    wanted = max(float(b.abs().max()) for b in BATCHES)
    assert _amax(model[0]._input_quantizer) == pytest.approx(wanted, rel=1e-6)
