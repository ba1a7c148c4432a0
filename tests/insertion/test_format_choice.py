import numpy as np
import numpy.typing as npt
import pytest

from calibration.methods import fp8_error
from qdqtool.insertion.format_choice import FormatFit, choose_number_format, compare_precision
from qdqtool.insertion.scales import GroupScale, ScaleGroup
from tests.insertion.test_fp8 import round_fp8
from tests.insertion.test_scales import statistics

Floats = npt.NDArray[np.float64]


def measure_db(values: Floats, rounded: Floats) -> float:
    return float(10 * np.log10((values**2).sum() / ((values - rounded) ** 2).sum()))


def compare_formats(values: Floats) -> FormatFit:
    scale = float(np.abs(values).max()) / 127
    group = GroupScale(ScaleGroup(("a",), ("a",), ("a",)), scale, "max", ())
    return compare_precision([group], statistics(a=values))[0]


RNG = np.random.default_rng(0)
UNIFORM = RNG.uniform(-1, 1, 200_000)
GAUSS = RNG.standard_normal(200_000)
HEAVY = RNG.standard_t(3, 200_000)


@pytest.mark.parametrize("values", [UNIFORM, GAUSS, HEAVY], ids=["uniform", "gauss", "heavy"])
def test_precision_from_statistics_is_that_of_rounded_values(values: Floats) -> None:
    amax, fit = float(np.abs(values).max()), compare_formats(values)
    int8 = np.rint(values / amax * 127) * amax / 127
    assert fit.int8_db == pytest.approx(measure_db(values, int8), abs=0.2)
    assert fit.fp8_db == pytest.approx(measure_db(values, round_fp8(values, amax / 448)), abs=0.4)
    assert fit.spread == pytest.approx(amax / values.std(), rel=0.02)


def test_heavy_tails_suit_fp8_and_bounded_values_int8() -> None:
    fits = [compare_formats(values) for values in (UNIFORM, GAUSS, HEAVY)]
    assert [fit.is_fp8_better for fit in fits] == [False, False, True]
    assert [fit.spread > 12 for fit in fits] == [False, False, True]


def test_fp8_error_counts_clipped_values() -> None:
    amax = float(np.abs(GAUSS).max())
    clipped = np.clip(GAUSS, -amax / 4, amax / 4)
    expected = float(np.mean((GAUSS - round_fp8(clipped, amax / 4 / 448)) ** 2))
    assert fp8_error(statistics(a=GAUSS)["a"], amax / 4) == pytest.approx(expected, rel=0.05)


def errors(int8: float, fp8: float, noise: float = 0.05) -> Floats:
    return np.array([int8, fp8]) * np.exp(noise * np.random.default_rng(1).standard_normal((8, 2)))


INT8_FASTER = {"int8": 1.0, "fp8": 1.2, "fp16": 1.3}
FP8_FASTER = {"int8": 1.3, "fp8": 1.0, "fp16": 1.5}


@pytest.mark.parametrize(
    ("measured", "ms", "precision", "is_assumed"),
    [
        pytest.param(errors(0.14, 0.08), {}, "fp8", True, id="fp8 is more accurate"),
        pytest.param(
            errors(0.14, 0.08), INT8_FASTER, "fp8", False, id="and INT8's error is not small"
        ),
        pytest.param(errors(0.09, 0.04), INT8_FASTER, "int8", False, id="both errors are small"),
        pytest.param(errors(0.09, 0.14), {}, "int8", True, id="int8 is more accurate"),
        pytest.param(
            errors(0.11, 0.14), FP8_FASTER, "int8", False, id="and FP8's error is not small"
        ),
        pytest.param(errors(0.14, 0.13), {}, "int8", True, id="alike, without a GPU"),
        pytest.param(errors(0.14, 0.13), FP8_FASTER, "fp8", False, id="alike, FP8 is faster"),
        pytest.param(errors(0.03, 0.02, noise=2.0), {}, "int8", True, id="too noisy to tell"),
        # Formats that are inaccurate or slow are not chosen.
        pytest.param(errors(0.2, 0.08), {}, "fp8", False, id="INT8 loses too much"),
        pytest.param(errors(0.14, 0.2), {}, "int8", False, id="FP8 loses too much"),
        pytest.param(
            errors(0.14, 0.2), FP8_FASTER, "int8", False, id="FP8 is faster, but loses too much"
        ),
        pytest.param(errors(0.2, 0.19), {}, "fp16", False, id="both lose too much"),
        pytest.param(
            errors(0.2, 0.19), FP8_FASTER, "fp16", False, id="both are faster, but lose too much"
        ),
        pytest.param(np.array([[np.nan, 0.13]] * 8), {}, "fp8", False, id="INT8 is not finite"),
        pytest.param(np.array([[np.nan, 0.3]] * 8), {}, "fp16", False, id="and FP8 loses too much"),
        pytest.param(
            errors(0.01, 0.02),
            {"int8": 1.4, "fp8": 1.3, "fp16": 1.3},
            "fp16",
            False,
            id="neither is faster than FP16",
        ),
        pytest.param(
            errors(0.2, 0.08), {**INT8_FASTER, "fp8": 1.3}, "fp16", False, id="each has an obstacle"
        ),
    ],
)
def test_choice_of_format(
    measured: Floats, ms: dict[str, float], precision: str, is_assumed: bool
) -> None:
    choice = choose_number_format(measured, ms, "a GPU")
    assert (choice.precision, choice.samples) == (precision, 8)
    assert choice.is_float == (precision == "fp16")
    # Without times, the reason names the assumption that INT8 is as fast as FP8.
    assert ("assumed" in choice.reason) == is_assumed


@pytest.mark.parametrize(
    ("ms", "obstacle"),
    [(1.29, "not more than 2 % faster than FP16"), (1.31, "slower than FP16")],
)
def test_choice_of_fp16_names_the_required_gain(ms: float, obstacle: str) -> None:
    choice = choose_number_format(errors(0.2, 0.08), {"int8": 1.0, "fp8": ms, "fp16": 1.3}, "a GPU")
    assert choice.precision == "fp16" and f"FP8 is {obstacle}" in choice.reason
    assert f"{ms:.2f} ms in FP8 and 1.30 ms in FP16" in choice.reason


@pytest.mark.parametrize(
    ("error", "speedup", "is_suitable"),
    [
        (0.159, 2.0, True),
        (0.161, 2.0, False),
        (0.159, 1.03, True),
        (0.101, 1.09, True),
        (0.099, 1.03, True),
        (0.099, 1.01, False),
        (0.001, 0.99, False),
    ],
)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_format_needs_a_small_error_and_a_speedup_over_fp16(
    name: str, error: float, speedup: float, is_suitable: bool
) -> None:
    formats = ["int8", "fp8"]
    measured = np.array([[error if n == name else 0.9 for n in formats]] * 8)
    ms = {n: 1.0 / speedup if n == name else 0.1 for n in formats} | {"fp16": 1.0}
    choice = choose_number_format(measured, ms, "a GPU")
    assert choice.precision == (name if is_suitable else "fp16")
    assert choice.errors == pytest.approx(dict(zip(formats, measured[0], strict=True)))
