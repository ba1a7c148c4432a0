"""``qdqtool demo``: the loop, its model and images, and the recorded build."""

import json
import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from qdqtool.builders import child
from qdqtool.commands import demo_run as recording
from qdqtool.commands.demo_run import RECORDING, make_image, verify_recorded, write_images, yolov8n
from qdqtool.errors import DataError, ModelError
from qdqtool.insertion.result import Insertion
from qdqtool.trt.targets import target_named
from qdqtool.verification.api import exit_code
from qdqtool.verification.build_model import build_model
from tests.commands.conftest import Cli
from tests.insertion.nets import check, run
from tools.record_demo import quantized_demo


def test_demo_writes_a_model_says_what_to_do_next_and_does_it_again(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(child, "is_installed", lambda _package: False)  # what is built is below
    folder = tmp_path / "demo"
    inserted: list[Insertion] = []
    insert = recording.insert
    monkeypatch.setattr(
        recording, "insert", lambda *a, **k: inserted.append(insert(*a, **k)) or inserted[-1]
    )
    asked: list[Any] = []
    page = SimpleNamespace(
        save=lambda path: Path(path).write_text("page")
    )  # takes longer than all else: is slow
    monkeypatch.setattr(
        "qdqtool.render.reporting.api.report", lambda *a, **k: asked.append((*a, k)) or page
    )
    text = cli("demo", "-o", folder, "--size", "64", "--images", "5")
    assert sorted(p.name for p in (folder / "images").iterdir()) == [
        f"demo-{i:03d}.png" for i in range(5)
    ]
    model = onnx.load(folder / "yolov8n-demo_qdq.onnx")
    check(model)
    assert sum(n.op_type == "DequantizeLinear" for n in model.graph.node) == 121
    assert "60 INT8 (54 to INT8, 6 to float)" in text
    assert f"qdqtool predict {folder / 'yolov8n-demo_qdq.onnx'}" in text
    assert "qdqtool insert yolov8n.onnx --calib images/" in text
    assert f"wrote {folder / 'yolov8n-demo_report.html'}: open it in a browser" in text
    assert "of the default demo" in text and "recording of an earlier build" not in text
    assert (
        "pip install qdqtool[rtx]" in text
        and max(map(len, text.splitlines())) <= 80 + len(str(tmp_path)) * 2
    )
    steps = re.split(r"^\d\. ", text, flags=re.M)
    assert len(steps[2].splitlines()) <= 25
    command = shlex.split(text.splitlines()[-1])
    assert cli(*command[-5:]) and len(cli(*command[-5:-1]).splitlines()) <= 25
    assert (folder / "yolov8n-demo_report.html").read_text() == "page" and asked == [
        (
            folder / "yolov8n-demo_qdq.onnx",
            {
                "before": folder / "yolov8n-demo.onnx",
                "target": target_named("trt10"),
                "gpu": "RTX 3060",
                "calib_cache": folder / "calibration.npz",
            },
        )
    ]
    # A second run replaces the first, and no picture of another name.
    (folder / "images" / "demo-000.png").rename(folder / "images" / "demo-mine.png")
    monkeypatch.setattr(recording, "_difference", lambda *_: (0.0, 1.0))
    kept: list[dict[str, Any]] = []
    made = replace(inserted[0], read=None)  # read since by the other commands
    monkeypatch.setattr(recording, "insert", lambda *_, **options: kept.append(options) or made)
    cli("demo", "-o", folder, "--size", "32", "--images", "2")
    assert len(list((folder / "images").iterdir())) == 3 and kept[0]["overwrite_cache"]
    assert kept[0]["calib_cache"].exists() and onnx.load(folder / "yolov8n-demo_qdq.onnx") == model


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--size", "100"], "not a positive multiple of 32"),
        (["--target", "trt1"], "unknown target"),
        (["--images", str(2**63)], "100000"),
        (["--size", "992"], "--size 992: the limit of the demo is 960"),
    ],
)
def test_errors(tmp_path: Path, cli: Cli, args: list[str], words: str) -> None:
    assert words in cli.refused("demo", "-o", tmp_path / "d", *args)
    assert not (tmp_path / "d").exists()


# The model and its images


def test_architecture_is_yolov8n() -> None:
    """Counts of a simplified Ultralytics export of yolov8n, and 3,151,904 parameters as its fused summary says."""
    model = yolov8n(64)
    check(model)
    ops = Counter(n.op_type for n in model.graph.node)
    assert {op: ops[op] for op in ("Conv", "Concat", "Split", "MaxPool", "Resize", "Softmax")} == {
        "Conv": 64,
        "Concat": 19,
        "Split": 9,
        "MaxPool": 3,
        "Resize": 2,
        "Softmax": 1,
    }
    weights = [t for t in model.graph.initializer if t.name.startswith("model.")]
    assert sum(int(np.prod(t.dims)) for t in weights) == 3_151_904
    assert {p.key for p in model.metadata_props} >= {"names", "stride", "imgsz"}
    assert (
        yolov8n(64).SerializeToString()
        == model.SerializeToString()
        != yolov8n(64, seed=1).SerializeToString()
    )


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_activations_keep_their_size_from_layer_to_layer(activation: str) -> None:
    model = yolov8n(160, activation=activation)
    outputs = [n.output[0] for n in model.graph.node if n.op_type == "Conv" and "dfl" not in n.name]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(t) for t in outputs)
    feeds = {"images": np.asarray(make_image(160, 0), np.float32).transpose(2, 0, 1)[None] / 255}
    spreads = [float(v.std()) for v in run(model, feeds, outputs)]
    assert min(spreads) > 0.3
    assert max(spreads) < 4.0


def test_outputs_and_images(tmp_path: object) -> None:
    model = yolov8n(64, classes=7)
    feeds = {"images": np.asarray(make_image(64, 3), np.float32).transpose(2, 0, 1)[None] / 255}
    (output,) = run(model, feeds)
    assert output.shape == (1, 11, 84)
    assert [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim] == [1, 11, 84]
    assert ((output[:, 4:] > 0) & (output[:, 4:] < 1)).all()
    centres = output[0, :2]
    assert (centres > -300).all() and (centres < 364).all()
    one, again, other = (np.asarray(make_image(48, i)) for i in (1, 1, 2))
    assert one.shape == (48, 48, 3)
    assert (one == again).all()
    assert (one != other).any()
    with pytest.raises(DataError, match="cannot be written"):
        write_images("/no/such/folder", 1, 32)


@pytest.mark.parametrize(
    "wrong", [{"size": 100}, {"size": 0}, {"classes": 0}, {"activation": "mish"}]
)
def test_wrong_arguments(wrong: dict[str, int]) -> None:
    with pytest.raises(ModelError, match="demo model"):
        yolov8n(**wrong)  # type: ignore[arg-type]


# The recorded build: of the default model, which says so when it is not, and a wrong entry shows


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording was made with 100 images and another method: scales do not count."""
    return quantized_demo(tmp_path_factory.mktemp("demo"), 1, method="max", losses=0, predict=False)


def test_the_default_model_is_the_recorded_one(quantized: Path) -> None:
    result = verify_recorded(quantized)
    assert result is not None, (
        "the demo's model or placement has changed: run python -m tools.record_demo"
    )
    assert result.convolutions.agree == result.convolutions.total == 64
    assert (exit_code(result), result.build.tensorrt) == (0, "1.7.1.116")
    table = json.loads(RECORDING.read_text())
    assert set(table) == {"what", "tensorrt", "structure", "convolutions"}
    assert all(set(row) == {"name", "precision", "output"} for row in table["convolutions"])


def test_a_recording_that_says_otherwise_is_a_mismatch(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = json.loads(RECORDING.read_text())
    changed, lost = table["convolutions"][5], table["convolutions"].pop(7)
    changed["precision"] = "FP32" if changed["precision"] == "INT8" else "INT8"
    (tmp_path / "other.json").write_text(json.dumps(table))
    monkeypatch.setattr(recording, "RECORDING", tmp_path / "other.json")
    result = verify_recorded(quantized)
    assert result is not None
    assert [m.name for m in result.mismatches] == [changed["name"]]
    assert result.convolutions.unknown_names == (lost["name"],)
    assert exit_code(result) == 1


@pytest.mark.skipif(not child.is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed")
def test_the_recording_is_what_the_compiler_says(quantized: Path) -> None:
    built = {n.name: (str(n.precision), str(n.output)) for n in build_model(quantized).nodes}
    table = json.loads(RECORDING.read_text())
    assert {
        row["name"]: (row["precision"], row["output"]) for row in table["convolutions"]
    } == built


@pytest.mark.slow
def test_the_default_demo_verifies_without_a_compiler(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "is_installed", lambda _package: False)
    monkeypatch.setattr(recording, "_difference", lambda *_: (0.0, 1.0))
    text = cli("demo", "-o", tmp_path, "--images", "1")
    assert '<section id="histograms">' in (tmp_path / "yolov8n-demo_report.html").read_text()
    assert "64 of 64 convolutions agree" in text and "recording of an earlier build" in text
