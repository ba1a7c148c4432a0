import contextlib
import runpy
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import qdqtool
from qdqtool.demo.images import write_images
from qdqtool.demo.network import yolov8n
from qdqtool.ir.modelfile import save
from tests.calibration.nets import write_pictures
from tests.insertion.nets import detector

OUTPUT = "/model.3/act/Mul_output_0"
EXAMPLES = Path(__file__).parents[1] / "examples"
PAGES = Path(__file__).parents[1] / "docs" / "python"


def test_edit_with_graphsurgeon_cuts_and_quantizes(tmp_path: Path) -> None:
    onnx.save(detector(), tmp_path / "float.onnx")
    write_pictures(tmp_path / "images", 4, 64, 64)
    arguments = ["float.onnx", "images", "--outputs", OUTPUT, "-o", "out.onnx"]
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "edit_with_graphsurgeon.py"), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "3 of 3 convolutions in INT8" in run.stdout
    model = onnx.load(tmp_path / "out.onnx")
    assert [output.name for output in model.graph.output] == [OUTPUT]
    quantizers = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert quantizers and all(node.name.startswith("qdq/") for node in quantizers)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    onnx.save(detector(), folder / "yolov8n.onnx")
    for name in ("images", "other-images"):
        (folder / name).mkdir()
        write_images(folder / name, 4, 64)
    qdqtool.insert(folder / "yolov8n.onnx", folder / "images", predict=False).save(
        folder / "yolov8n_qdq.onnx"
    )
    return folder


@pytest.mark.slow
def test_python_page_of_tune_has_example_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(yolov8n(64), tmp_path / "yolov8n.onnx")  # a network that detects something
    (tmp_path / "images").mkdir()
    write_images(tmp_path / "images", 4, 64)
    with contextlib.chdir(tmp_path):
        runpy.run_path(str(PAGES / "tune.py"), run_name="__main__")
    assert "convolutions in INT8" in capsys.readouterr().out


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, id=path.stem)
        for path in sorted(PAGES.glob("*.py"))
        if path.stem != "tune"
    ],
)
def test_python_page_has_example_that_runs(
    example: Path, demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if example.stem == "report":
        pytest.importorskip("fast_sugiyama")
    with contextlib.chdir(demo):
        runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


def test_every_function_has_a_python_page() -> None:
    functions = {name for name in qdqtool.__all__ if callable(getattr(qdqtool, name))}
    assert {path.stem for path in PAGES.glob("*.py")} == {n for n in functions if n.islower()}
