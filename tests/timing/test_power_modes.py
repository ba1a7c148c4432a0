"""Power modes of Jetsons: their limits, errors, and estimates for a Jetson without known modes."""

import re

import pytest

import qdqtool
from qdqtool.errors import QdqtoolError
from qdqtool.timing import gpus
from tests.insertion.nets import chain
from tests.notes import note_codes

JETSONS = [gpu for gpu in gpus.all_gpus() if gpu.is_jetson]


# Bytes per clock of the memory: it transfers 128 or 256 bits twice per clock.
NARROW, WIDE = 32 / 1000, 64 / 1000


@pytest.mark.parametrize(
    ("gpu", "power", "limits"),
    [
        ("Orin NX 16GB", "25W", (8, 408, 3200 * NARROW)),
        ("Orin NX 16GB", "15", (4, 612, 3200 * NARROW)),
        ("Orin NX 16GB", "10W", (4, 612, 2133 * NARROW)),
        ("Orin NX 16GB Super", "25w", (8, 408, 3200 * NARROW)),
        ("Orin NX 8GB Super", "20W", (8, 408, 3200 * NARROW)),
        ("Orin NX 8GB Super", "10W", (4, 612, 2133 * NARROW)),
        ("Orin Nano 4GB Super", "10W", (4, 612, 2133 * NARROW / 2)),
        ("Orin Nano 8GB Super", "25W", (8, 918, 3199 * NARROW)),
        ("Orin Nano 8GB Super", "15W", (8, 612, 2133 * NARROW)),
        ("AGX Orin 64GB", "MODE_30W", (8, 612, 3200 * WIDE)),
        ("AGX Orin 64GB", "15W", (6, 408, 2133 * WIDE)),
        ("AGX Xavier", "MODE_30W_2CORE", (8, 900, 1600 * WIDE)),
        ("AGX Xavier", "10W", (4, 520, 1065.6 * WIDE)),
        ("Xavier NX", "20W", (6, 1109, 1866 * NARROW)),
        ("Jetson TX2", "MAXQ", (2, 850, 1331.2 * NARROW)),
    ],
)
def test_power_mode_limits(gpu: str, power: str, limits: tuple[float, ...]) -> None:
    limited = gpus.choose_gpu(gpu, power=power)
    assert (limited.sms, limited.clock, limited.bandwidth) == pytest.approx(limits, rel=4e-3)
    assert note_codes(limited.notes) == ["power-mode"]


def test_bandwidth_of_a_mode_has_a_note_if_it_does_not_change_the_time() -> None:
    times = [qdqtool.predict(chain(), gpu="Orin NX 16GB", power=w).time for w in ("15W", "10W")]
    codes = [note_codes(time["notes"]) for time in times]
    assert times[0]["total_ms"] == times[1]["total_ms"]
    assert ["bandwidth-unused" in notes for notes in codes] == [False, True]


@pytest.mark.parametrize(
    ("gpu", "power"),
    [
        ("Orin Nano 8GB", "15W"),
        ("Orin NX 16GB Super", "40W"),
        ("Orin NX 16GB Super", "MAXN_SUPER"),
        ("Orin NX 16GB Super", "maxn"),
        ("Orin NX 8GB Super", "40W"),
        ("Orin Nano 4GB Super", "25W"),
        ("Thor", "MAXN"),
    ],
)
def test_power_mode_without_limits(gpu: str, power: str) -> None:
    assert gpus.choose_gpu(gpu, power=power) == gpus.find_gpu(gpu)


@pytest.mark.parametrize("gpu", JETSONS, ids=lambda gpu: gpu.name)
def test_table_of_power_modes(gpu: gpus.Gpu) -> None:
    names = [name for mode in gpu.power_modes for name in (mode.name, *mode.other_names)]
    assert len(set(names)) == len(names) and bool(names) == (gpu.name != "Jetson AGX Thor")
    for mode in gpu.power_modes:
        assert 1 <= mode.sms <= gpu.sms and 300 <= mode.clock <= 1.01 * gpu.clock and mode.source


@pytest.mark.parametrize(
    ("gpu", "power", "modes", "modules"),
    [
        ("Orin Nano", "25W", "15W, 7W", ["Jetson Orin Nano 8GB Super"]),
        ("Orin Nano", "MAXN_SUPER", "15W, 7W", ["Jetson Orin Nano 8GB Super"]),
        ("Orin NX 8GB", "40W", "MAXN, 20W, 15W, 10W", ["Jetson Orin NX 8GB Super"]),
        ("Orin NX", "MAXN_FOO", "MAXN, 25W, 15W, 10W", []),
        (
            "Orin NX 8GB",
            "25W",
            "MAXN, 20W, 15W, 10W",
            ["Jetson Orin NX 16GB", "Jetson Orin NX 16GB Super"],
        ),
        ("Jetson Nano", "15W", "MAXN, 5W", []),  # Orin Nano is another series
    ],
)
def test_unknown_power_mode_error_names_modes_and_modules(
    gpu: str, power: str, modes: str, modules: list[str]
) -> None:
    with pytest.raises(QdqtoolError, match=f"has the modes {modes} .*nvpmodel -q") as error:
        gpus.choose_gpu(gpu, power=power)
    assert re.findall("'(.*?)'", str(error.value)) == modules


def test_stated_error_of_an_estimated_clock_covers_the_known_modes() -> None:
    ratios = [
        gpu.clocks_per_second
        * max(0.3, min(1.0, float(watts[1]) / gpu.power) ** 0.6)
        / (mode.sms * mode.clock * 1e6)
        for gpu in JETSONS
        for mode in gpu.power_modes
        if (watts := re.match(r"(\d+)W", mode.name))
    ]
    thor = gpus.choose_gpu("Thor", power="65W")
    assert thor.clock == pytest.approx(gpus.find_gpu("Thor").clock * 0.5**0.6)
    (stated,) = re.findall(r"at most ([\d.]+) times slower", thor.notes[0])
    assert (
        sum(ratio <= float(stated) for ratio in ratios) / len(ratios) >= 0.8 and min(ratios) > 0.94
    )
