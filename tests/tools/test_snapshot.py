import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tools import snapshot
from tools.snapshots import comparing, normalize, recording
from tools.snapshots.scenarios import ROOT, all_scenarios


@pytest.mark.parametrize(
    ("value", "data"),
    [
        pytest.param(
            {"message": "slow", "code": "X"}, {"message": "<text>", "code": "X"}, id="text key"
        ),
        pytest.param({"notes": ["a", "b"]}, {"notes": ["<text>", "<text>"]}, id="list of texts"),
        pytest.param({"kind": "three words here"}, {"kind": "<text>"}, id="three words in a row"),
        pytest.param({"kind": "conv1 + relu1 + x"}, {"kind": "conv1 + relu1 + x"}, id="names"),
        pytest.param(
            {"event": "Swap the layer type"}, {"event": "Swap the layer type"}, id="event"
        ),
        pytest.param({"why": 3, "ms": 0.25}, {"why": 3, "ms": 0.25}, id="numbers"),
        pytest.param(
            {"schema": "qdqtool/report/1", "bytes": 5, "rows": [{"bytes": 7}]},
            {"schema": "qdqtool/report/1", "bytes": "<text>", "rows": [{"bytes": 7}]},
            id="length of a page",
        ),
    ],
)
def test_snapshot_data_has_no_texts(value: Any, data: Any) -> None:
    assert normalize.to_data(value) == data


@pytest.mark.parametrize(
    ("printed", "normal"),
    [
        pytest.param("done in 2.4 s.", "done in <seconds>.", id="seconds"),
        pytest.param("<repo>/a.py:77: UserWarning", "<repo>/a.py: UserWarning", id="source line"),
        pytest.param("scale 0.05 is small", "scale 0.05 is small", id="number"),
    ],
)
def test_snapshot_ignores_circumstances_of_a_run(printed: str, normal: str) -> None:
    assert normalize.without_circumstances(printed) == normal


def test_snapshot_ignores_version_and_time_of_tuning() -> None:
    answer = {"tool": "0.2.0", "effort": {"seconds": 2.5, "runs": 3}, "log": {"seconds": 2.5}}
    assert normalize.without_run(answer) == {"effort": {"runs": 3}, "log": {"seconds": 2.5}}


def quantized_relu(scale: float = 0.5, prefix: str = "x_", after: str = "Relu") -> onnx.ModelProto:
    q, dq, s, zero = (prefix + name for name in ("Q", "DQ", "scale", "zero"))
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", s, zero], [q], name=q + "_node"),
        onnx.helper.make_node("DequantizeLinear", [q, s, zero], [dq], name=dq + "_node"),
        onnx.helper.make_node(after, [dq], ["y"], name="relu"),
    ]
    weights = [
        onnx.numpy_helper.from_array(np.float32(scale), s),
        onnx.numpy_helper.from_array(np.int8(0), zero),
    ]
    ends = [[onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [4])] for n in "xy"]
    return onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", *ends, weights))


@pytest.mark.parametrize(
    ("other", "same"),
    [
        pytest.param(quantized_relu(prefix="other_"), True, id="other names"),
        pytest.param(quantized_relu(scale=0.25), False, id="another scale"),
        pytest.param(quantized_relu(after="Tanh"), False, id="another operator"),
    ],
)
def test_snapshot_ignores_names_of_added_tensors_only(other: onnx.ModelProto, same: bool) -> None:
    forms = [normalize.describe_model(m, {"x", "y", "relu"}) for m in (quantized_relu(), other)]
    assert (forms[0] == forms[1]) is same
    full = [normalize.describe_model(m, None) for m in (quantized_relu(), other)]
    assert full[0] != full[1]


def test_snapshot_is_the_same_for_another_hash_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        records.append(recording.record(ROOT, ["growth/C2f"], True, 1, tmp_path / seed))
    assert records[0].entries == records[1].entries
    entries = records[0].entries
    assert set(entries) == {
        "growth/C2f|predict model.onnx --target 8.5",
        "growth/C2f|predict model.onnx --target 10 --gpu T4",
        "growth/C2f|fix model.onnx --target 8.5 -o fixed.onnx",
        "growth/C2f|fix model.onnx --target 8.5 -o fixed.onnx|fixed.onnx",
    }
    kept = json.loads((tmp_path / "1" / recording.kept_name(next(iter(entries)))).read_text())
    assert kept["full"]["exit"] == 0 and kept["full"]["answer"]["schema"] == "qdqtool/prediction/1"
    assert kept["full"]["answer"]["model"]["path"] == "model.onnx"


def record_of(entries: dict[str, list[str]], scope: str = "all") -> recording.Record:
    return recording.Record("abc", scope, {"python": "3"}, {}, entries)


@pytest.mark.parametrize(
    ("after", "line", "code"),
    [
        pytest.param({"a|p": ["1", "2"]}, "1 entries: 0 differ in data", 0, id="equal"),
        pytest.param({"a|p": ["1", "3"]}, "texts: a|p", 0, id="texts"),
        pytest.param({"a|p": ["9", "3"]}, "data: a|p", 1, id="data"),
        pytest.param({}, "only before: a|p", 1, id="missing"),
    ],
)
def test_snapshot_compare_exit_code(
    after: dict[str, list[str]],
    line: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    recording.write(record_of({"a|p": ["1", "2"]}), paths[0])
    recording.write(record_of(after), paths[1])
    assert snapshot.main(["compare", *map(str, paths)]) == code
    assert line in capsys.readouterr().out


def test_snapshot_compare_shows_kept_values(tmp_path: Path) -> None:
    for side, scale in (("before", 0.5), ("after", 0.25)):
        (tmp_path / side).mkdir()
        content = {"data": {"scales": [{"scale": scale}]}, "full": {}}
        (tmp_path / side / recording.kept_name("a|p")).write_text(json.dumps(content))
    text = comparing.compare(
        record_of({"a|p": ["1", "2"]}), record_of({"a|p": ["3", "4"]})
    ).describe(tmp_path / "before", tmp_path / "after")
    assert "    .scales[0].scale: 0.5 -> 0.25" in text.splitlines()


def test_snapshot_quick_set_is_part_of_the_full_set() -> None:
    scenarios = all_scenarios()
    quick = recording.select(scenarios, [], True)
    assert {"evidence", "growth", "fuzz", "insert", "tune", "demo", "misuse"} <= {
        s.group for s in quick.values()
    }
    for scenario in scenarios:
        if scenario.name in quick:
            steps = quick[scenario.name].steps
            assert steps == scenario.steps[: len(steps)] and len(steps) > 0
    with pytest.raises(recording.RecordingError, match="no scenario: nothing"):
        recording.select(scenarios, ["nothing"], False)
