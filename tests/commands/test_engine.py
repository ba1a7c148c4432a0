"""``qdqtool engine``: tables, JSON, comparison, exits."""

import json
from pathlib import Path

import pytest

from tests.buildlog import samples
from tests.buildlog.test_engine import CONV, FP16, FP32, INT8, layer, tensor
from tests.commands.conftest import Cli


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "layers.json"
    q = layer(
        "q0",
        "Reformat",
        [tensor("i", [2, 64, 56, 56], FP32)],
        [tensor("x", [2, 64, 56, 56], INT8)],
        Origin="QDQ",
    )
    path.write_text(json.dumps({"Layers": [q, CONV], "Bindings": ["i", "y"]}))
    (tmp_path / "profile.json").write_text(
        json.dumps(
            [
                {"count": 10},
                {
                    "name": "q0",
                    "timeMs": 5.0,
                    "averageMs": 0.5,
                    "medianMs": 0.5,
                    "percentage": 25.0,
                },
                {
                    "name": "conv",
                    "timeMs": 15.0,
                    "averageMs": 1.5,
                    "medianMs": 1.5,
                    "percentage": 75.0,
                },
                {
                    "name": "other",
                    "timeMs": 0.0,
                    "averageMs": 0.0,
                    "medianMs": 0.0,
                    "percentage": 0.0,
                },
            ]
        )
    )
    return path


def test_tables_and_json(engine: Path, cli: Cli, tmp_path: Path) -> None:
    text = cli("engine", engine, "--profile", engine.with_name("profile.json"))
    rows = [line for line in text.splitlines() if line.endswith(("  conv", "  q0"))]
    assert rows[0].split() == ["1", "1.5000", "75.0%", "115.6", "1,278.0", "90.5", "conv"]
    assert rows[1].split()[:3] == ["0", "0.5000", "25.0%"]
    assert "2x64x56x56 INT8:32, 2x128x28x28 FP16 -> 2x128x28x28 FP16" in " ".join(text.split())
    assert "in the profile and not in the listing: other" in text
    assert "2 layers, 2.0000 ms" in text
    data = cli.json("engine", engine, "--sort", "bytes")
    assert data["schema"] == "qdqtool/engine/1"
    assert [row["name"] for row in data["layers"]] == ["q0", "conv"]
    assert data["layers"][0]["bytes"] == 2 * 64 * 56 * 56 * 5
    assert data["totals"]["kind"]["conversion"]["layers"] == 1
    assert data["total_ms"] is None
    log = tmp_path / "build.log"
    log.write_text(samples.trtexec_log())
    assert "TensorRT 8.5.2 on Orin: 3 layers, 0.0625 ms" in cli("engine", log)
    output = engine.with_name("engine.dot")
    assert "2 layers drawn" in cli("engine", engine, "--dot", output)
    assert output.read_text().startswith("digraph engine")


def test_compare(engine: Path, tmp_path: Path, cli: Cli) -> None:
    other = tmp_path / "fp16.json"
    fields = {**CONV, "Inputs": [tensor("i", [2, 64, 56, 56], FP16), *CONV["Inputs"][1:]]}
    other.write_text(json.dumps({"Layers": [fields], "Bindings": []}))
    times = tmp_path / "times.json"
    times.write_text(
        json.dumps(
            [{"count": 1}, {"name": "conv", "timeMs": 3.0, "averageMs": 3.0, "percentage": 100.0}]
        )
    )
    profile = engine.with_name("profile.json")
    arguments = ["engine", other, "--profile", times, "--compare", engine, "--compare", profile]
    text = cli(*arguments)
    assert "B is 1.0000 ms (33.3%) faster" in text
    assert "3.0000    1.5000   -1.5000  A FP16, FP16 -> FP16" in text
    assert "-    0.5000   +0.5000  B FP32 -> INT8" in text
    data = cli.json(*arguments)
    assert [pair["change_ms"] for pair in data["pairs"]] == [-1.5, 0.5]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"Layers": ["a", "b"]}', "names without precisions; build again with: trtexec"),
        ('[{"count": 1}]', "no engine listing"),
        ('{"x": 1}', "without 'Layers'"),
        ("[" * 100_000, "nested too deeply"),
        ('{"Layers": [' + '{"Name": "a", "x": ' * 50_000, "nested too deeply"),
        ('{"Layers": [{"Name": "a", "Inputs": [' + "[" * 50_000, "nested too deeply"),
    ],
)
def test_bad_input(content: str, words: str, tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    assert words in cli.refused("engine", path)
