"""`qdqtool demo`: its steps, its model and images, and the recorded build."""

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from qdqtool.builders import compiler_process
from qdqtool.commands import demo_run
from qdqtool.commands.demo_run import RECORDING, make_image, verify_recorded, write_images, yolov8n
from qdqtool.errors import DataError, ModelError
from qdqtool.verification.api import exit_code
from qdqtool.verification.local_build import build_model
from tests.commands.conftest import Cli
from tests.errors import has
from tests.insertion.nets import check, run
from tests.optional import without_package
from tools.record_demo import quantized_demo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


def test_demo_writes_all_files_again(folder: Path, cli: Cli) -> None:
    with without_package("tensorrt_rtx"):
        cli("demo", "-o", folder, "--size", "64", "--images", "5")
        images = folder / "images"
        assert sorted(p.name for p in images.iterdir()) == [f"demo-00{i}.png" for i in range(5)]
        (images / "demo-000.png").rename(images / "demo-mine.png")
        text = cli("demo", "-o", folder, "--size", "32", "--images", "2")
    assert sorted(p.name for p in images.iterdir()) == [
        "demo-000.png",
        "demo-001.png",
        "demo-mine.png",
    ]
    for name in ("yolov8n-demo.onnx", "yolov8n-demo_qdq.onnx", "yolov8n-demo_report.html"):
        assert str(folder / name) in text and (folder / name).exists()
    command = shlex.split(text.splitlines()[-1])
    assert command[-5:-3] == ["predict", str(folder / "yolov8n-demo_qdq.onnx")]
    summary = cli.json(*command[-5:-1])["summary"]
    assert (summary["int8"], summary["int8_to_int8"]) == (60, 54)


def test_demo_model_is_valid(folder: Path) -> None:
    model = onnx.load(folder / "yolov8n-demo_qdq.onnx")
    check(model)
    assert sum(n.op_type == "DequantizeLinear" for n in model.graph.node) == 121


def test_demo_report_has_histograms_and_times(folder: Path) -> None:
    page = (folder / "yolov8n-demo_report.html").read_text()
    assert '<section id="histograms">' in page and "RTX 3060" in page


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--size", "100"], "out-of-range size"),
        (["--size", "992"], "out-of-range size"),
        (["--images", str(2**63)], "BadParameter images"),
    ],
)
def test_demo_wrong_option_is_refused(
    tmp_path: Path, cli: Cli, arguments: list[str], cause: str
) -> None:
    cli.refuse("demo", "-o", tmp_path / "d", *arguments)
    assert cli.cause == cause and not (tmp_path / "d").exists()


def test_demo_unknown_target_is_refused(tmp_path: Path, cli: Cli) -> None:
    assert "'trt1'" in cli.refuse("demo", "-o", tmp_path / "d", "--target", "trt1")
    assert not (tmp_path / "d").exists()


# The model and its images


def test_yolov8n_has_the_published_architecture() -> None:
    """The counts are those of a simplified Ultralytics export, 3,151,904 parameters those of its fused summary."""
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


def test_yolov8n_depends_on_its_seed_alone() -> None:
    first, again, other = (yolov8n(64, seed=i).SerializeToString() for i in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_yolov8n_activations_keep_their_size(activation: str) -> None:
    model = yolov8n(160, activation=activation)
    outputs = [n.output[0] for n in model.graph.node if n.op_type == "Conv" and "dfl" not in n.name]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(t) for t in outputs)
    feeds = {"images": np.asarray(make_image(160, 0), np.float32).transpose(2, 0, 1)[None] / 255}
    spreads = [float(v.std()) for v in run(model, feeds, outputs)]
    assert min(spreads) > 0.3
    assert max(spreads) < 4.0


def test_yolov8n_output_has_boxes_and_scores() -> None:
    model = yolov8n(64, classes=7)
    feeds = {"images": np.asarray(make_image(64, 3), np.float32).transpose(2, 0, 1)[None] / 255}
    (output,) = run(model, feeds)
    assert output.shape == (1, 11, 84)
    assert [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim] == [1, 11, 84]
    assert ((output[:, 4:] > 0) & (output[:, 4:] < 1)).all()
    centers = output[0, :2]
    assert (centers > -300).all() and (centers < 364).all()


def test_make_image_depends_on_its_index_alone() -> None:
    first, again, other = (np.asarray(make_image(48, i)) for i in (1, 1, 2))
    assert first.shape == (48, 48, 3)
    assert (first == again).all()
    assert (first != other).any()


def test_write_images_into_missing_folder() -> None:
    path = "/no/such/folder/demo-000.png"
    with pytest.raises(DataError, check=has("not-written", path=path)):
        write_images("/no/such/folder", 1, 32)


@pytest.mark.parametrize(
    ("parameter", "value", "code"),
    [
        ("size", 100, "out-of-range"),
        ("size", 0, "out-of-range"),
        ("classes", 0, "out-of-range"),
        ("activation", "mish", "unknown-choice"),
    ],
)
def test_yolov8n_wrong_argument(parameter: str, value: Any, code: str) -> None:
    with pytest.raises(ModelError, check=has(code, parameter=parameter)):
        yolov8n(**{parameter: value})


# The recorded build of the default model


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the default model with Q/DQ; scales do not count, so that one image is enough."""
    return quantized_demo(tmp_path_factory.mktemp("demo"), 1, method="max", losses=0, predict=False)


def test_recording_agrees_with_the_default_model(quantized: Path) -> None:
    result = verify_recorded(quantized)
    assert result is not None, (
        "the demo's model or placement has changed: run python -m tools.record_demo"
    )
    assert result.convolutions.agree == result.convolutions.total == 64
    assert (exit_code(result), result.build.tensorrt) == (0, "1.7.1.116")
    table = json.loads(RECORDING.read_text())
    assert set(table) == {"what", "tensorrt", "structure", "convolutions"}
    assert all(set(row) == {"name", "precision", "output"} for row in table["convolutions"])


def test_recording_with_wrong_entries_is_a_mismatch(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = json.loads(RECORDING.read_text())
    changed, lost = table["convolutions"][5], table["convolutions"].pop(7)
    changed["precision"] = "FP32" if changed["precision"] == "INT8" else "INT8"
    (tmp_path / "other.json").write_text(json.dumps(table))
    monkeypatch.setattr(demo_run, "RECORDING", tmp_path / "other.json")
    result = verify_recorded(quantized)
    assert result is not None
    assert [m.name for m in result.mismatches] == [changed["name"]]
    assert result.convolutions.unknown_names == (lost["name"],)
    assert exit_code(result) == 1


@pytest.mark.skipif(
    not compiler_process.is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed"
)
def test_recording_agrees_with_the_compiler(quantized: Path) -> None:
    built = {n.name: (str(n.precision), str(n.output)) for n in build_model(quantized).nodes}
    table = json.loads(RECORDING.read_text())
    assert {
        row["name"]: (row["precision"], row["output"]) for row in table["convolutions"]
    } == built


@pytest.mark.slow
def test_demo_default_is_verified_without_a_compiler(tmp_path: Path, cli: Cli) -> None:
    with without_package("tensorrt_rtx"):
        text = cli("demo", "-o", tmp_path, "--images", "1")
    assert '<section id="histograms">' in (tmp_path / "yolov8n-demo_report.html").read_text()
    assert "64 of 64" in text
