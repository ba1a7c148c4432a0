from __future__ import annotations

import numpy as np
import pytest

from calibration.cache import Statistics
from calibration.methods import range_of
from calibration.statistics import TensorStatistics
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.insertion import scales
from qdqtool.insertion.groups import ScaleGroup
from qdqtool.insertion.scales import METHODS, MethodChoice, choose_scale, positive, weight_scale

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
    assert found.power == 2.0


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
    assert found.scale == np.float32(1 / 127) and found.power is None
    both, said = choose_scale(group("a", "b"), statistics(a=np.zeros(100), b=NARROW), MethodChoice(method))
    assert [(m.tensor, m.bits_lost) for m in both.members] == [("a", 0.0), ("b", 0.0)]
    assert both.members[0].amax == 0.0 and both.members[1].amax / 127 == pytest.approx(both.scale, rel=1e-6)
    alone, _ = choose_scale(group("b"), statistics(b=NARROW), MethodChoice(method))
    assert both.scale == alone.scale
    assert len(said) == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_alone_is_searched_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scale is that of its own range; nothing is merged or searched again for one tensor, nor for none."""
    monkeypatch.setattr(scales, "_least_error", None)
    monkeypatch.setattr("calibration.statistics.merge_all", None)
    stats = statistics(a=WIDE, z=np.zeros(9))
    for sources in (("a",), ("a", "z"), ("z", "a")):
        found, _ = choose_scale(group(*sources), stats, MethodChoice(method))
        assert found.scale == pytest.approx(range_of(stats["a"], method).amax / 127, rel=1e-6)
        assert found.power == range_of(stats["a"], method).power
    assert choose_scale(group("z"), stats, MethodChoice(method))[0].scale == np.float32(1 / 127)


def test_nan_in_the_activations_is_an_error_that_names_the_tensor() -> None:
    with pytest.raises(DataError) as caught:
        choose_scale(group("a"), statistics(a=[1.0, np.nan, 2.0]), MethodChoice())
    assert str(caught.value) == (
        "tensor 'a': 1 of 3 values are NaN or infinite on the calibration data; check the model and the preprocessing, "
        "or leave its readers float with `exclude`"
    )


def test_overrides_and_their_errors() -> None:
    choice = MethodChoice("mse", (("^a", "max"), ("b", "percentile")))
    assert choice.of(group("abc")) == "max"  # the first pattern that matches
    assert choice.of(group("cb")) == "percentile"
    assert choice.of(group("z")) == "mse"
    with pytest.raises(QdqtoolError, match="'a1' asks for max and 'b1' for percentile"):
        choice.of(group("a1", "b1"))
    assert choice.of(group("a1", "z", "a2")) == choice.of(group("z", "a1")) == "max"  # what matches none follows
    for tensors, example in ((["z", "y", "x"], "; names look like 'z'"), ([], "")):
        with pytest.raises(QdqtoolError) as caught:
            choice.check(tensors)
        assert str(caught.value) == f"`method_for` ^a=max: matches no quantized tensor{example}"
    choice.check(["a", "b"])
    with pytest.raises(QdqtoolError, match="not a regular expression"):
        MethodChoice("mse", (("(", "max"),)).check(["z"])
    with pytest.raises(QdqtoolError, match="method 'kl' is unknown"):
        MethodChoice("kl").check([])
    with pytest.raises(QdqtoolError, match="method 'kl' is unknown"):
        MethodChoice("max", (("z", "kl"),)).check(["z"])


@pytest.mark.parametrize(("percentile", "right"), [
    (0.9999, False), (49.99, False), (50.0, True), (99.99, True), (100.0, True), (100.01, False),
])  # fmt: skip
def test_percentiles_go_from_50_to_100(percentile: float, right: bool) -> None:
    assert MethodChoice().percentile == 99.99
    choice = MethodChoice("percentile", percentile=percentile)
    if right:
        choice.check([])
        return
    with pytest.raises(QdqtoolError, match=f"percentile {percentile:g} is outside 50 to 100"):
        choice.check([])


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
    assert single == pytest.approx(np.abs(weight).max() / 127, rel=1e-6)
    small = weight_scale(np.float32([[0.25, -0.5]]), None)
    assert small == np.float32(0.5 / 127) and weight_scale(np.float32([[0.25, -0.5]]), 0) == [small]
    assert weight_scale(np.zeros((2, 2), np.float32), 0).tolist() == [1.0, 1.0]
    assert weight_scale(np.zeros((2, 0), np.float32), 0).tolist() == [1.0, 1.0]
    assert weight_scale(np.zeros((2, 0), np.float32), None).tolist() == 1.0


def test_weight_scales_start_at_the_smallest_normal_number() -> None:
    tiny = float(np.finfo(np.float32).tiny)
    weight = np.array([[127.0 * tiny], [126.0 * tiny], [127.0]])
    assert weight_scale(weight, 0).tolist() == [tiny, 1.0, 1.0]


def test_scales_are_positive_normal_float32() -> None:
    assert positive(0.0) == float(np.finfo(np.float32).tiny)
    assert positive(1e-45) > 0
    assert positive(0.1) == float(np.float32(0.1))
