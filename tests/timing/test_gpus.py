"""GPUs are found by any usual name, and their figures agree with what NVIDIA publishes."""

import math

import pytest

from qdqtool.errors import QdqtoolError
from qdqtool.timing import gpus
from qdqtool.types import Evidence, Precision


@pytest.mark.parametrize(("typed", "name"), [
    ("RTX 3080 Ti", "RTX 3080 Ti"), ("NVIDIA GeForce RTX 3080 Ti", "RTX 3080 Ti"), ("rtx3080ti", "RTX 3080 Ti"),
    ("Jetson Orin Nano", "Jetson Orin Nano 8GB"), ("orin-nx", "Jetson Orin NX 16GB"),
    ("AGX Orin", "Jetson AGX Orin 64GB"),
    ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"), ("A100-SXM4-40GB", "A100 40GB"), ("T4", "Tesla T4"),
    ("V100-SXM2-16GB", "Tesla V100"), ("RTX 3060 (12GB)", "RTX 3060"), ("RTX 4070 SUPER", "RTX 4070 Super"),
    ("NVIDIA RTX 2000 Ada Generation Laptop GPU", "RTX 2000 Ada Laptop"), ("NVIDIA H100 80GB HBM3", "H100 SXM"),
    ("rtx 4070 ti super", "RTX 4070 Ti Super"), ("3060", "RTX 3060"), ("1660 super", "GTX 1660 Super"),
    ("4070 ti super", "RTX 4070 Ti Super"), ("T1000", "T1000"), ("NVIDIA T1000 8GB", "T1000"), ("MX450", "MX450"),
    ("RTX 3050 6GB", "RTX 3050 6GB"), ("RTX 4060 Ti 16GB", "RTX 4060 Ti"), ("DGX Spark", "GB10"),
    ("gtx_1660_ti", "GTX 1660 Ti"), ("2080ti", "RTX 2080 Ti"),
])  # fmt: skip
def test_names(typed, name):
    assert gpus.find(typed).name == name


def test_every_name_and_alias_finds_its_own_line():
    for gpu in gpus.gpus():
        assert gpus.find(gpu.name) is gpu
        assert gpus.find(gpu.name.upper()) is gpu
        for alias in gpu.aliases:
            shared = [g for g in gpus.gpus() if alias in g.aliases]
            assert gpus.answering(alias) == shared, alias
            assert len(shared) > 1 or gpus.find(alias) is gpu, alias


@pytest.mark.parametrize(("typed", "boards"), [("Orin", 8), ("NVIDIA Tegra Orin (nvgpu)", 8), ("xavier", 2)])
def test_a_name_that_boards_share_is_refused_with_their_names(typed, boards):
    with pytest.raises(QdqtoolError, match=f"is the name of {boards} GPUs: Jetson") as told:
        gpus.chosen(typed)
    named = str(told.value).split(": ", 1)[1].split("; ")[0].split(", ")
    assert len({gpus.find(name).name for name in named}) == boards


@pytest.mark.parametrize(("typed", "taken", "others"), [
    ("A100", "A100 40GB", {"A100 80GB PCIe", "A100 80GB SXM"}), ("Orin NX", "Jetson Orin NX 16GB",
    {"Jetson Orin NX 8GB", "Jetson Orin NX 16GB Super"}), ("RTX 3060", "RTX 3060", set()), ("T4", "Tesla T4", set()),
    ("RTX 4050", "RTX 4050 Laptop", set()), ("Jetson AGX Orin 64GB", "Jetson AGX Orin 64GB", set()),
])  # fmt: skip
def test_what_a_short_name_could_mean_besides_is_said(typed, taken, others):
    gpu = gpus.chosen(typed)
    assert gpu.name == taken
    assert set(gpu.note.split("could be ")[-1].split(", ")) - {""} == others


# Dense INT8 TOPS and FP16 TFLOPS as NVIDIA's data sheets and whitepapers print them (half of the sparse figure).
@pytest.mark.parametrize(("name", "int8", "fp16"), [
    ("A100 40GB", 624, 312), ("T4", 130, 65), ("RTX 3080", 238, 119), ("RTX 4090", 660.6, 330.3), ("A30", 330, 165),
    ("AGX Orin", 85, 42.5), ("Orin NX 16GB", 30, 15), ("H100 SXM", 1979, 989), ("RTX 2080 Ti", 215.2, 107.6),
    ("AGX Xavier", 22, 11), ("L4", 242, 121), ("Tesla P4", 22, None), ("V100", 62.7, 125),
])  # fmt: skip
def test_rates_agree_with_published_ones(name, int8, fp16):
    gpu = gpus.find(name)
    assert math.isclose(2e-12 * gpu.mac_rate(Precision.INT8), int8, rel_tol=0.1)
    if fp16:
        assert math.isclose(2e-12 * gpu.mac_rate(Precision.FP16), fp16, rel_tol=0.1)


def test_figures_are_sane_and_sourced():
    assert len({g.name for g in gpus.gpus()}) == len(gpus.gpus()) > 90
    for gpu in gpus.gpus():
        assert gpu.source and gpu.rates.source, gpu.name
        assert 1 <= gpu.sms <= 200 and 500 <= gpu.clock <= 3000 and 0.1 <= gpu.l2 <= 130, gpu.name
        assert 20 <= gpu.bandwidth <= 9000 and 5 <= gpu.power <= 1000, gpu.name
    assert {g.cc for g in gpus.gpus()} <= set(gpus.rates())


def test_int8_paths():
    paths = {name: gpus.find(name).rates.int8_path for name in ("P100", "GTX 1080", "V100", "GTX 1660", "T4", "TX2")}
    assert paths == {
        "P100": "none",
        "GTX 1080": "dp4a",
        "V100": "dp4a",
        "GTX 1660": "dp4a",
        "T4": "tensor",
        "TX2": "none",
    }


@pytest.mark.parametrize("typed", ["rtx 9999", "", "jetson", "x" * 1000, "banana"])
def test_unknown_names_are_refused_with_a_way_out(typed):
    with pytest.raises(QdqtoolError, match="qdqtool gpus"):
        gpus.find(typed)


@pytest.mark.parametrize(("typed", "first", "never"), [
    ("T1200", "T1000", "Thor"), ("RTX 3060 Super", "RTX 3060", "Super"), ("MX250", "MX350", "RTX"), ("jetson", "Jetson",
    "RTX"), ("GB200", "B200", "RTX"), ("RX 7900", "", "RTX"), ("K80", "", "nearest"),
])  # fmt: skip
def test_the_nearest_names_are_of_the_same_series_or_number(typed, first, never):
    with pytest.raises(QdqtoolError) as told:
        gpus.find(typed)
    named = str(told.value).split("; see")[0].split("not in the table")[1]
    assert named.startswith(f"; nearest: {first}" if first else "") and never not in named


def test_boards_of_few_watts_may_not_keep_their_clock():
    """T4, L4 and A10 have less than half the watts per SM and clock of their kind; nothing else in the table has."""
    low = {g.name for g in gpus.gpus() if g.sustained < 1}
    assert {"Tesla T4", "L4", "A10"} <= low <= {"Tesla T4", "L4", "A10", "MX450", "MX550"}
    t4 = gpus.find("T4")
    assert 0.6 < t4.sustained < 0.75  # YOLOv7 at batch 16 on a T4 takes 1.54 times the estimate at the boost clock
    assert gpus.chosen("T4", clock=1590).sustained == 1


def test_an_unknown_laptop_is_the_desktop_part_and_says_so():
    gpu = gpus.chosen("NVIDIA GeForce RTX 2070 Super with Max-Q Design")
    assert gpu.sms == gpus.find("RTX 2070 Super").sms and gpu.clock < gpus.find("RTX 2070 Super").clock
    assert "laptop" in gpu.note and "`clock`" in gpu.note


def test_a_described_gpu():
    gpu = gpus.chosen("sm=8.6,sms=28,clock=1777,bandwidth=360,l2=3")
    known = gpus.find("RTX 3060")
    assert (gpu.per_second, gpu.bandwidth, gpu.rates) == (known.per_second, known.bandwidth, known.rates)
    assert gpu.evidence == Evidence.ASSUMED
    assert "taken as 9.0" in gpus.chosen("sm=9.9,sms=10,clock=1000,bandwidth=100").note


@pytest.mark.parametrize(
    "text",
    [
        "sm=8.6",
        "sm=8.6,sms=0,clock=1,bandwidth=1",
        "sm=x,sms=1,clock=1000,bandwidth=10",
        "foo=1",
        "sm=4.0,sms=1,clock=1000,bandwidth=10",
        "sm=8.6,sms=nan,clock=1000,bandwidth=10",
        "sm=8.6,sms=1,clock=1000,bandwidth=inf",
    ],
)
def test_bad_descriptions(text):
    with pytest.raises(QdqtoolError):
        gpus.chosen(text)


def test_clock_and_power():
    assert gpus.chosen("orin nx", clock=600).clock == 600
    low = gpus.chosen("orin nx", power="10W")
    assert low.clock < 918 and "guessed" in low.note
    assert gpus.chosen("orin nx", power="MAXN").clock == 918
    for bad in (0.0, 99999.0, float("nan")):
        with pytest.raises(QdqtoolError):
            gpus.chosen("orin nx", clock=bad)
    with pytest.raises(QdqtoolError):
        gpus.chosen("orin nx", power="lots")
