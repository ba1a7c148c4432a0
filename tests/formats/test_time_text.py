import re
from dataclasses import replace

import pytest

from qdqtool.formats.output import TextPage
from qdqtool.formats.time_text import (
    add_speed_verdict,
    describe_fastest,
    describe_repeated_placement,
    describe_times,
)
from qdqtool.ir.precision import Precision
from qdqtool.timing.gpus import choose_gpu
from qdqtool.timing.results import BestTime, FloatTime, TimeEstimate
from qdqtool.util.notes import Note
from qdqtool.util.text import format_ms

GPU = choose_gpu("RTX 4090")


def best_time(ms: float, float_ms: float) -> BestTime:
    return BestTime(ms, float_ms / ms, int8=1, fp8=0, convolutions=1, conversions=1)


@pytest.mark.parametrize(
    ("written", "int8", "fp8", "pattern"),
    [
        pytest.param(5, 5, 9, "INT8 is the fastest", id="default"),
        pytest.param(5, 9.5, 10, "INT8 is the fastest", id="faster than the default"),
        pytest.param(20, 20, 20, "FP16 is the fastest", id="both formats are slower"),
        pytest.param(9.5, 9.8, 10, "^$", id="unsure"),
        pytest.param(5, 5, 4, "FP8 would be the fastest .* 2.5x faster", id="FP8 is faster"),
        pytest.param(5, 5, 4.8, "FP8 would be the fastest .* 2.1x faster", id="FP8 is better"),
        pytest.param(5, 8, 4.95, "INT8 and FP8 .* equally fast", id="FP8 is as fast"),
        pytest.param(10, 5, 9, "^INT8 by qdqtool insert .* 2.0x", id="default faster"),
        pytest.param(20, 5, 9, "INT8 by qdqtool insert .* 2.0x faster", id="slower than FP16"),
    ],
)
def test_fastest_type_rates_the_written_model(
    written: float, int8: float, fp8: float, pattern: str
) -> None:
    """Milliseconds of the written INT8 model, and of both formats by default; FP16 takes 10 ms."""
    base = FloatTime(Precision.FP16, 10.0)
    formats = TimeEstimate(
        GPU,
        10.0,
        float_time=base,
        best=best_time(int8, 10.0),
        best_fp8=best_time(fp8, 10.0),
        is_float=True,
    )
    text = describe_fastest(formats, TimeEstimate(GPU, written, float_time=base))
    assert re.search(pattern, text) and "not certain" not in text


def test_range_of_each_engine_ends_at_the_same_clock() -> None:
    """The model has the time of insert's Q/DQ, and both are listed."""
    base = FloatTime(Precision.FP16, 12.0, clock_share=0.8)
    time = TimeEstimate(
        choose_gpu("L4"),
        10.0,
        low_ms=8.0,
        high_ms=15.0,
        float_time=base,
        best=replace(best_time(10.0, 12.0), clock_share=0.9),
        clock_share=0.9,
    )
    assert f"{0.9 * time.gpu.clock:.0f} MHz (estimated; " in describe_times(time)
    page = TextPage()
    add_speed_verdict(page, [time])
    ends = re.findall(r"- +([\d.]+) ms", "\n".join(page.lines))
    assert [float(end) for end in ends] == pytest.approx(
        [15.0, 12.0 * 1.5 * 0.8 / 0.9, 15.0], rel=0.01
    )


def test_time_of_insert_is_not_repeated_for_its_own_placement() -> None:
    best = replace(best_time(10.0, 9.8), is_repeated=True)
    time = TimeEstimate(GPU, 10.0, float_time=FloatTime(Precision.FP16, 9.8), best=best)
    page = TextPage()
    add_speed_verdict(page, [time])
    add_speed_verdict(page, [time, time])
    assert "insert" not in "\n".join(page.lines)
    assert "placed as by qdqtool insert (defaults)" in describe_repeated_placement([time])


def test_uncertain_gain_reads_alike_for_one_and_for_several_gpus() -> None:
    base = FloatTime(Precision.FP16, 9.8)
    time = TimeEstimate(GPU, 10.0, float_time=base, launch_ms=6.0, quantized=Precision.FP8)
    page = TextPage(500)
    add_speed_verdict(page, [time])
    add_speed_verdict(page, [time, replace(time, notes=["a note", f"slower on {GPU.name}"])])
    text = "\n".join(page.lines)
    assert f"  note ({GPU.name}): a note" in text and f"  note: slower on {GPU.name}" in text
    assert "  About as fast as FP16 (" in text and text.count("  about as fast (") == 2
    assert text.count("gains more from FP8") == 2  # once for both GPUs


def test_remark_on_several_gpus_is_printed_once() -> None:
    remarks = {
        "L4": ["slower on L4. Wait", "the same"],
        "Tesla T4": ["slower on Tesla T4. Wait", "only here"],
        "A100 80GB SXM": ["the same"],
    }
    times = [
        TimeEstimate(choose_gpu(name), total_ms=1.0, notes=list(map(Note, texts)))
        for name, texts in remarks.items()
    ]
    page = TextPage(200)
    add_speed_verdict(page, times)
    assert re.findall("note.*", str(page)) == [
        "note: slower on L4, Tesla T4. Wait",
        "note (L4, A100 80GB SXM): the same",
        "note (Tesla T4): only here",
    ]


@pytest.mark.parametrize(
    ("is_float", "quantized", "heads", "column"),
    [
        (False, Precision.INT8, "time in ms FP16 INT8 INT8 speed", 2),
        (False, Precision.FP8, "time in ms FP16 INT8 FP8 speed", 1),
        (True, Precision.INT8, "time in ms FP16 INT8 speed", 1),
    ],
)
def test_columns_for_several_gpus_have_one_order(
    is_float: bool, quantized: Precision, heads: str, column: int
) -> None:
    base, best = FloatTime(Precision.FP16, 9.8), best_time(5.0, 9.8)
    time = TimeEstimate(
        GPU, 10.0, float_time=base, best=best, is_float=is_float, quantized=quantized
    )
    page = TextPage(200)
    add_speed_verdict(page, [time, time])
    assert " ".join(page.lines[0].split()).startswith(heads)
    ends = [match.end() for match in re.finditer(r"FP16|INT8|FP8", page.lines[0])]
    assert page.lines[1].index("insert  ") + len("insert") == ends[column]
    assert page.lines[0].index("speed") == page.lines[1].index("(80 % range)")


@pytest.mark.parametrize(
    ("bests", "types", "note"),
    [
        ((5.0, 10.0), ("FP16", "FP16"), ""),
        ((10.0, 10.0), ("FP16", "FP16"), ""),
        ((10.0, None), ("FP16", "FP16"), "a type that the GPU lacks"),
        ((5.0, None), ("FP16", "FP16"), "a type that the GPU lacks"),
        ((5.0, 5.0), ("FP16", "FP32"), "the slower of FP16 and FP32"),
        ((5.0, None), ("FP32", "FP16"), "a type that the GPU lacks, and .* FP16 and FP32"),
    ],
)
def test_table_of_gpus_explains_missing_times(
    bests: tuple[float | None, ...], types: tuple[Precision, ...], note: str
) -> None:
    """All GPUs have FP8."""
    times = [
        TimeEstimate(
            GPU,
            10.0,
            float_time=FloatTime(Precision(float_type), 9.8),
            best=None if best is None else best_time(best, 9.8),
            best_fp8=best_time(8.0, 9.8),
        )
        for best, float_type in zip(bests, types, strict=True)
    ]
    page = TextPage(200)
    add_speed_verdict(page, times)
    text = "\n".join(page.lines)
    (found,) = re.findall("'-' is for (.*)", text) or [""]
    assert re.fullmatch(note, found) and ("FP8 times" in text) == ("FP8" in page.lines[0])


@pytest.mark.parametrize(
    ("ms", "text"),
    [(1.505057, "1.51 ms"), (1.5046, "1.50 ms"), (0.99996, "1.00 ms"), (0.04567, "0.0457 ms")],
)
def test_time_is_rounded_once(ms: float, text: str) -> None:
    """Rounding to 4 digits first would give 1.505, and then 1.50."""
    assert format_ms(ms) == text
