import shlex
from pathlib import Path

import onnx
import pytest

from qdqtool.demo.images import write_images
from tests.commands.conftest import Cli
from tests.insertion.nets import check
from tests.optional import without_package


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


def test_demo_writes_all_files_again(folder: Path, cli: Cli) -> None:
    names = ("yolov8n-demo.onnx", "yolov8n-demo_qdq.onnx", "yolov8n-demo_report.html")
    for name in names:
        (folder / name).write_text("of an earlier run")
    images = folder / "images"
    images.mkdir()
    write_images(images, 5, 64)
    (images / "demo-000.png").rename(images / "demo-mine.png")
    with without_package("tensorrt_rtx"):
        text = cli("demo", "-o", folder, "--size", "32", "--images", "2")
    assert sorted(p.name for p in images.iterdir()) == [
        "demo-000.png",
        "demo-001.png",
        "demo-mine.png",
    ]
    for name in names:
        assert str(folder / name) in text and (folder / name).read_bytes() != b"of an earlier run"
    command = shlex.split(text.rpartition("demo model:")[2].replace("\\\n", ""))
    assert command[-5:-3] == ["predict", str(folder / "yolov8n-demo_qdq.onnx")]
    summary = cli.json(*command[-5:-1])["summary"]
    assert (summary["int8"], summary["int8_to_int8"]) == (60, 54)


def test_demo_model_is_valid_and_report_has_histograms_and_times(folder: Path) -> None:
    model = onnx.load(folder / "yolov8n-demo_qdq.onnx")
    check(model)
    assert sum(n.op_type == "DequantizeLinear" for n in model.graph.node) == 121
    page = (folder / "yolov8n-demo_report.html").read_text()
    assert '<section id="histograms">' in page and "RTX 3060" in page


@pytest.mark.slow
def test_demo_default_is_verified_without_a_compiler(tmp_path: Path, cli: Cli) -> None:
    with without_package("tensorrt_rtx"):
        text = cli("demo", "-o", tmp_path, "--images", "1")
    assert '<section id="histograms">' in (tmp_path / "yolov8n-demo_report.html").read_text()
    assert "64 of 64" in text
    files = [tmp_path / f"yolov8n-demo_{name}" for name in ("qdq.onnx", "recorded-layers.json")]
    assert "64 of 64" in cli("verify", *files)
