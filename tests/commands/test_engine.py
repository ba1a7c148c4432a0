import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.buildlog.test_engine import CONV, FP16, FP32, INT8, layer, tensor
from tests.commands.conftest import Cli


def profile(*times: tuple[str, float]) -> str:
    rows = [
        {"name": name, "timeMs": ms, "averageMs": ms, "medianMs": ms, "percentage": 1.0}
        for name, ms in times
    ]
    return json.dumps([{"count": 1}, *rows])


@pytest.fixture
def engine(current_folder: Path) -> Path:
    quantizer = layer(
        "q0",
        "Reformat",
        [tensor("i", [2, 64, 56, 56], FP32)],
        [tensor("x", [2, 64, 56, 56], INT8)],
        Origin="QDQ",
    )
    (current_folder / "layers.json").write_text(
        json.dumps({"Layers": [quantizer, CONV], "Bindings": ["i", "y"]})
    )
    (current_folder / "profile.json").write_text(
        profile(("q0", 0.5), ("conv", 1.5), ("other", 0.0))
    )
    return current_folder


def rows(data: dict[str, Any], *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(row[key] for key in keys) for row in data["layers"]]


def test_engine_table_is_sorted_by_time(engine: Path, cli: Cli) -> None:
    text = cli("engine", "layers.json", "--profile", "profile.json")
    table = [line.split() for line in text.splitlines() if line.endswith(("  conv", "  q0"))]
    assert table[0] == ["1", "1.5000", "75.0%", "115.6", "1.22", "MB", "90.5", "conv"]
    assert table[1][:3] == ["0", "0.5000", "25.0%"]
    assert "2x64x56x56 INT8:32, 2x128x28x28 FP16 -> 2x128x28x28 FP16" in " ".join(text.split())


def test_engine_json_has_times_of_a_profile(engine: Path, cli: Cli) -> None:
    data, timed = (
        cli.json("engine", "layers.json", *words)
        for words in (["--sort", "bytes"], ["--profile", "profile.json"])
    )
    assert rows(timed, "name", "ms") == [("q0", 0.5), ("conv", 1.5)]
    assert (timed["total_ms"], timed["unmatched"]) == (2.0, ["other"])
    assert (data["schema"], data["total_ms"]) == ("qdqtool/engine/1", None)
    assert rows(data, "name", "ms") == [("q0", None), ("conv", None)]
    assert data["layers"][0]["bytes"] == 2 * 64 * 56 * 56 * 5
    assert data["totals"]["kind"]["conversion"]["layers"] == 1


def test_engine_compare(engine: Path, cli: Cli) -> None:
    fp16 = {
        "Layers": [{**CONV, "Inputs": [tensor("i", [2, 64, 56, 56], FP16), *CONV["Inputs"][1:]]}],
        "Bindings": [],
    }
    (engine / "fp16.json").write_text(json.dumps(fp16))
    (engine / "fp16-profile.json").write_text(profile(("conv", 3.0)))
    arguments = shlex.split(
        "engine fp16.json --profile fp16-profile.json --compare layers.json --compare profile.json"
    )
    text = cli(*arguments)
    for part in (
        "1.0000 ms (33.3%)",
        "3.0000    1.5000   -1.5000  A FP16, FP16 -> FP16",
        "-    0.5000   +0.5000  B FP32 -> INT8",
    ):
        assert part in text
    assert [pair["change_ms"] for pair in cli.json(*arguments)["pairs"]] == [-1.5, 0.5]
