from __future__ import annotations

import numpy as np
import pytest

from calibration.cache import Statistics
from calibration.statistics import TensorStatistics
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.insertion.groups import ScaleGroup
from qdqtool.insertion.scales import MethodChoice, choose_scale, positive, weight_scale

RNG = np.random.default_rng(0)
WIDE = RNG.laplace(0.0, 4.0, 40_000).astype(np.float32)
NARROW = RNG.normal(0.0, 0.5, 40_000).astype(np.float32)


def statistics(**tensors: object) -> Statistics:
    return Statistics({k: TensorStatistics.of(np.asarray(v, np.float32)) for k, v in tensors.items()})


def group(*sources: str) -> ScaleGroup:
    return ScaleGroup((sources[0],), sources, sources)


def relative_error(values: np.ndarray, scale: float) -> float:
    """By hand: quantize with that scale, root of squared error over power."""
    wide = values.astype(np.float64)
    restored = np.clip(np.rint(wide / scale), -127, 127) * scale
    return float(np.sqrt(((wide - restored) ** 2).mean() / (wide**2).mean()))


def test_max_is_the_largest_magnitude_of_all_members() -> None:
    found, said = choose_scale(group("a", "b"), statistics(a=WIDE, b=NARROW), MethodChoice("max"))
    assert found.scale == pytest.approx(float(np.abs(WIDE).max()) / 127, rel=1e-6)
    assert [m.tensor for m in found.members] == ["a", "b"]
    ratio = np.abs(WIDE).max() / np.abs(NARROW).max()
    assert found.members[0].bits_lost == pytest.approx(0.0, abs=1e-6)
    assert found.members[1].bits_lost == pytest.approx(np.log2(ratio), abs=1e-4)
    assert said == []


def test_a_groups_range_has_the_least_total_relative_error() -> None:
    found, _ = choose_scale(group("a", "b"), statistics(a=WIDE, b=NARROW), MethodChoice("mse"))

    def total(scale: float) -> float:
        return relative_error(WIDE, scale) + relative_error(NARROW, scale)

    best = min(total(s) for s in np.geomspace(0.2, 2.0, 200) * found.scale)
    assert total(found.scale) <= best * 1.02
    assert total(found.scale) < total(float(np.abs(WIDE).max()) / 127) * 0.9


def test_the_power_of_a_group_is_told_and_its_range_has_the_least_error_to_it() -> None:
    silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731
    for spread, power in ((2.0, 3.0), (30.0, 2.0)):  # steps far below, and above, SiLU's negative side
        values = {n: silu(RNG.normal(0.0, spread * k, 40_000)).astype(np.float32) for n, k in (("a", 1.0), ("b", 0.6))}
        stats = statistics(**values)
        for name, array in values.items():
            stats[name].add_focus([array[:2000]])
        found, _ = choose_scale(group("a", "b"), stats, MethodChoice("focus"))
        assert found.power == power

        def total(scale: float) -> float:
            errors = []
            for array in values.values():  # noqa: B023
                restored = np.clip(np.rint(array / scale), -127, 127) * scale
                wrong, size = np.abs(array - restored) ** power, np.abs(array) ** power  # noqa: B023
                errors.append([0.1 * e.mean() + 0.9 * e[:2000].mean() for e in (wrong, size)])
            return float(sum((a / b) ** (1 / power) for a, b in errors))  # noqa: B023

        own = [m.amax / 127 for m in found.members]
        assert total(found.scale) <= min(total(s) for s in np.geomspace(min(own), max(own), 60)) * 1.02
    assert choose_scale(group("a", "b"), statistics(a=WIDE, b=NARROW), MethodChoice("max"))[0].power is None


def test_percentile_works_on_the_merged_values() -> None:
    found, _ = choose_scale(group("a", "b"), statistics(a=WIDE, b=NARROW), MethodChoice("percentile", percentile=99.0))
    expected = np.percentile(np.abs(np.concatenate([WIDE, NARROW])), 99.0) / 127
    assert found.scale == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("method", ["max", "mse", "percentile", "entropy"])
def test_an_always_zero_tensor_gets_a_positive_scale_and_a_warning(method: str) -> None:
    found, said = choose_scale(group("a"), statistics(a=np.zeros(100)), MethodChoice(method))
    assert found.scale > 0
    assert "always zero" in said[0]
    both, said = choose_scale(group("a", "b"), statistics(a=np.zeros(100), b=NARROW), MethodChoice(method))
    alone, _ = choose_scale(group("b"), statistics(b=NARROW), MethodChoice(method))
    assert both.scale == alone.scale
    assert len(said) == 1


def test_nan_in_the_activations_is_an_error_that_names_the_tensor() -> None:
    with pytest.raises(DataError, match="tensor 'a': 1 of 3 values are NaN or infinite"):
        choose_scale(group("a"), statistics(a=[1.0, np.nan, 2.0]), MethodChoice())


def test_overrides_and_their_errors() -> None:
    choice = MethodChoice("mse", (("^a", "max"), ("b", "percentile")))
    assert choice.of(group("abc")) == "max"  # the first pattern that matches
    assert choice.of(group("cb")) == "percentile"
    assert choice.of(group("z")) == "mse"
    with pytest.raises(QdqtoolError, match="'a1' asks for max and 'b1' for percentile"):
        choice.of(group("a1", "b1"))
    with pytest.raises(QdqtoolError, match="matches no quantized tensor; names look like 'z'"):
        choice.check(["z"])
    with pytest.raises(QdqtoolError, match="not a regular expression"):
        MethodChoice("mse", (("(", "max"),)).check(["z"])
    with pytest.raises(QdqtoolError, match="method 'kl' is unknown"):
        MethodChoice("kl").check([])
    with pytest.raises(QdqtoolError, match="outside 50 to 100"):
        MethodChoice("percentile", percentile=0.9999).check([])


def test_weight_scales_are_per_channel_and_positive() -> None:
    weight = RNG.normal(0, 1, (4, 3, 3, 3)).astype(np.float32)
    weight[2] = 0.0
    weight[3] *= 1e-40
    expected = np.abs(weight).reshape(4, -1).max(axis=1) / 127
    found = weight_scale(weight, 0)
    assert found.shape == (4,)
    assert found.dtype == np.float32
    assert found[:2] == pytest.approx(expected[:2], rel=1e-6)
    assert found[2] == found[3] == expected[:2].max().astype(np.float32)
    across = weight_scale(weight, 1)
    assert across == pytest.approx(np.abs(weight).max(axis=(0, 2, 3)) / 127, rel=1e-6)
    single = weight_scale(weight, None)
    assert single.shape == ()
    assert weight_scale(np.zeros((2, 2), np.float32), 0).tolist() == [1.0, 1.0]


def test_scales_are_positive_normal_float32() -> None:
    assert positive(0.0) == float(np.finfo(np.float32).tiny)
    assert positive(1e-45) > 0
    assert positive(0.1) == float(np.float32(0.1))
