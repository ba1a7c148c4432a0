"""Reading what `tune` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from qdqtool.cli import run
from qdqtool.errors import DataError
from qdqtool.graph import Model
from qdqtool.modelfile import load
from qdqtool.reporting import data
from qdqtool.reporting.tuning import tuning_of as read_tuning
from tests.reporting.conftest import Made

POINT = {"name": "p", "convolutions": 4, "conversions": 1, "low": 0.9, "high": 0.99, "chosen_on": 0.95}


def result(**changes: Any) -> dict[str, Any]:
    found = {
        "schema": "qdqtool/tuning/1", "gpu": "RTX 3060", "goal": {"keep": 0.97, "budget_ms": 5.0, "reached": True},
        "metric": {"name": "agreement-map", "sentence": "AP with the float model.", "float": 1.0},
        "cost": {"unit": "ms", "sentence": "predicted milliseconds"},
        "sites": [{"site": "/a", "kind": "convolution", "choice": "float", "why": "it costs", "loss": 0.1, "ms": None}],
        "front": [{**POINT, "index": i, "int8": 4 - i, "ms": 2.0 + i, "cost": 2.0 + i, "metric": 0.9 + 0.03 * i}
                  for i in range(3)],
        "others": [{**POINT, "index": 9, "int8": 0, "ms": 6.0, "cost": 6.0, "metric": 0.95}],
        "chosen": {**POINT, "index": 1, "int8": 3, "ms": 3.0, "cost": 3.0, "metric": 0.93},
        "notes": ["a note"], "warnings": [],
    }  # fmt: skip
    return {**found, **changes}


def tuning_of(path: Path) -> data.Tuning:
    """Read for a model of two nodes."""
    nodes = [onnx.helper.make_node("Relu", [a], [b], name=b) for a, b in (("x", "/a"), ("/a", "/b"))]
    x, y = (onnx.helper.make_tensor_value_info(n, 1, [1]) for n in ("x", "/b"))
    return read_tuning(path, Model(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [y]))))


@pytest.mark.parametrize(("nodes", "fits"), [(["/a"], True), (["/a", "/c"], True), (["/c"], False),
                                             (["/a", "/c", "/d"], False), ([], True)])
def test_of_another_network_it_is_refused(tmp_path: Path, nodes: list[str], fits: bool) -> None:
    path = write(tmp_path, result(sites=[{"site": "s", "kind": "convolution", "choice": "float", "nodes": nodes}]))
    if fits:
        assert tuning_of(path).points
    else:
        with pytest.raises(DataError, match=r"tuning\.json: .*another network"):
            tuning_of(path)


def write(folder: Path, value: Any) -> Path:
    path = folder / "tuning.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_the_front_is_read(tmp_path: Path) -> None:
    found = tuning_of(write(tmp_path, result()))
    assert [(p.x, p.metric, p.on_front, p.chosen) for p in found.points] == [
        (2.0, 0.9, True, False), (3.0, pytest.approx(0.93), True, True), (4.0, pytest.approx(0.96), True, False),
        (6.0, 0.95, False, False),
    ]  # fmt: skip
    assert found.axis == "estimated milliseconds on RTX 3060" and found.keep == pytest.approx(0.97)
    assert (found.budget, found.reached, found.notes) == (5.0, True, ["a note"])
    assert found.sites == [["/a", "convolution", "float", "0.1", "", "it costs"]]


def test_without_times_the_cost_is_the_axis(tmp_path: Path) -> None:
    front = [{**p, "ms": None} for p in result()["front"]]
    found = tuning_of(write(tmp_path, result(front=front, others=[], gpu=None, goal={})))
    assert [p.x for p in found.points] == [2.0, 3.0, 4.0] and found.axis == "predicted milliseconds"
    assert found.keep is None and found.budget is None


@pytest.mark.parametrize("broken", [
    "", "[]", "{", "[" * 100_000, {"schema": "qdqtool/tuning/2"}, result(front=None), result(front=[1]),
    result(front=[{**POINT, "index": 0, "ms": 1.0, "cost": 1.0, "int8": 1}]),
    result(front=[{**POINT, "index": 0, "ms": "fast", "cost": 1.0, "int8": 1, "metric": 0.5}]),
    result(front=[{**POINT, "index": 0, "ms": 1.0, "cost": 1.0, "int8": 1, "metric": float("nan")}]),
    result(sites=[3]), result(metric=[]), result(goal={"keep": [1]}),
])  # fmt: skip
def test_damage_is_one_sentence(tmp_path: Path, broken: Any) -> None:
    path = write(tmp_path, broken)
    with pytest.raises(DataError, match=r"tuning\.json: .*(tune --format json|run qdqtool tune again)"):
        tuning_of(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        tuning_of(tmp_path / "none.json")


def test_what_was_not_judged_is_left_out_and_told(tmp_path: Path) -> None:
    unjudged = {**POINT, "int8": 1, "ms": 4.0, "cost": 4.0, "metric": None, "low": None, "high": None}
    found = tuning_of(write(tmp_path, result(others=[*result()["others"], unjudged])))
    assert [p.metric for p in found.points if not p.on_front] == [0.95]
    assert found.notes[0].startswith("1 more were tried and not judged")


def test_what_tune_itself_writes(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "tuned.json"
    code = run(["tune", str(made.float), "--calib", str(made.folder / "data.npz"), "--gpu", "T4", "--keep", "0.999",
                "--front", "--no-state", "-o", str(tmp_path / "tuned.onnx"), "--result", str(out)])
    assert code in (0, 1)
    written = json.loads(out.read_text())
    found = read_tuning(out, load(made.model))
    assert [p.metric for p in found.points if p.on_front] == [p["metric"] for p in written["front"]]
    assert [p.x for p in found.points if p.on_front] == [p["ms"] for p in written["front"]]
    assert [p.int8 for p in found.points if p.chosen] == [written["chosen"]["int8"]]
    assert len(found.sites) == len(written["sites"]) and found.axis == "estimated milliseconds on Tesla T4"
