import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from PIL import Image

from qdqtool.cli import run
from qdqtool.commands.demo_run import write_images, yolov8n
from tests.insertion.nets import Net, check
from tests.tables import cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YOLOv8n m.onnx, two convolutions small.onnx, and a folder of images."""
    path = tmp_path_factory.mktemp("insert")
    onnx.save(yolov8n(64, classes=3), path / "m.onnx")
    net = Net(3, 64)
    net.output(net.op("Softmax", "end", net.conv("b", net.op("Relu", "r", net.conv("a", "x", 3)))))
    onnx.save(net.model(), path / "small.onnx")
    (path / "images").mkdir()
    write_images(path / "images", 6, 64)
    return path


def line(capsys: pytest.CaptureFixture[str]) -> str:
    """The error that was printed: one line, no traceback."""
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [row for row in captured.err.splitlines() if row]  # click ends the ^C of a terminal with an empty line
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("qdqtool: ")
    return lines[0]


def test_text_and_everything(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["insert", str(folder / "m.onnx"), "--calib", str(folder / "images")]) == 0
    check(onnx.load(folder / "m_qdq.onnx"))
    captured = capsys.readouterr()
    assert captured.err == ""
    text = captured.out
    assert "quantized 61 activations (focus 61) and the weights of 60 nodes" in text
    assert "Left float (4 nodes)" in text
    assert "/model.22/dfl/conv/Conv" in text
    assert "only 6 calibration images" in text
    assert "64 convolutions: 60 INT8 (54 to INT8, 6 to float), 4" in text
    assert "conversion at /model.0/conv/_input_quantizer/QuantizeLinear" in text
    assert f"qdqtool predict {folder / 'm_qdq.onnx'} --target trt10" in text
    wide = [row for row in text.splitlines() if len(row) > 80 and str(folder) not in row]
    assert not wide
    args = ["insert", str(folder / "m.onnx"), "--calib", str(folder / "images"), "-o", str(tmp_path / "q.onnx")]
    assert run([*args, "--method", "max", "--all", "--target", "trt10"]) == 0
    text = capsys.readouterr().out
    scales = text.split("Activation scales\n")[1].split("\n\n")[0].splitlines()
    assert len(scales) == 61
    assert all(float(row.split()[0]) > 0 and row.split()[1] == "max" for row in scales)
    assert sum(row.startswith("  - scale ") for row in text.splitlines()) == 10
    assert "Predicted for trt10" in text


@pytest.mark.parametrize("target", ["10.7", "10.14.1", "trt11"])
def test_the_next_command_names_the_target_as_it_was_given(
    folder: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    assert run(["insert", str(folder / "small.onnx"), "--calib", str(folder / "images"), "--target", target, "--losses",
                "0", "--no-predict", "--method", "max", "--max-images", "1"]) == 0
    assert capsys.readouterr().out.split("next: ")[1].splitlines()[0].endswith(f"--target {target}")


def test_options_reach_the_library(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, table = tmp_path / "q.onnx", tmp_path / "t.table"
    args = ["insert", str(folder / "m.onnx"), "--calib", str(folder / "images"), "-o", str(out), "--format", "json"]
    more = [
        "--method-for", "^images$=max", "--exclude", r"/model\.0/", "--head", "none", "--residual", "none",
        "--weights", "int8", "--target", "trt10", "--high-precision", "fp16", "--write-table", str(table), "--bgr",
        "--mean", "0.1,0.2,0.3", "--std", "0.5", "--max-images", "4", "--resize", "stretch", "--no-predict",
    ]  # fmt: skip
    assert run([*args, *more]) == 2  # the first convolution was excluded, so that 'images' is not quantized
    assert "--method-for ^images$=max: matches no quantized tensor" in line(capsys)
    assert not out.exists()
    more[3] = r"/model\.1/"
    assert run([*args, *more]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["calibration"]["images"] == 4
    assert data["prediction"] is None
    assert data["target"] == "trt10"
    assert {q["tensor"]: q["method"] for q in data["quantized"]}["images"] == "max"
    assert data["skipped"][0]["reason"].startswith("excluded by --exclude")
    assert table.read_text().startswith("TRT-")
    types = {t.data_type for t in onnx.load(out).graph.initializer}
    assert onnx.TensorProto.INT8 in types
    assert onnx.TensorProto.FLOAT16 in types
    assert run(["insert", str(folder / "m.onnx"), "--calib", str(folder / "images"), "--gpu", "Orin"]) == 2
    assert "is the name of 8 GPUs" in line(capsys)


@pytest.mark.parametrize(*cases("commands/insert-errors-are-one-line-and"))
def test_errors_are_one_line_and_leave_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"not a png")
    (tmp_path / "text.onnx").write_bytes(b"hello, this is not a model at all")
    places = {
        "MODEL": str(folder / "m.onnx"), "IMAGES": str(folder / "images"), "EMPTY": str(tmp_path / "empty"),
        "BROKEN": str(tmp_path / "broken"), "TEXT": str(tmp_path / "text.onnx"),
    }  # fmt: skip
    before = (folder / "m.onnx").read_bytes()
    full = [places.get(a, a) for a in args]
    if "-o" not in full and "m.onnx" in full[0]:
        full += ["-o", str(tmp_path / "q.onnx")]
    assert run(["insert", *full]) == 2
    assert words in line(capsys)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken", "empty", "text.onnx"]
    assert (folder / "m.onnx").read_bytes() == before


def test_broken_images_and_readers(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(3):
        Image.new("RGB", (64, 48), (i * 40, 90, 200)).save(tmp_path / f"{i}.png")
    (tmp_path / "bad.png").write_bytes(b"not a png")
    args = ["insert", str(folder / "small.onnx"), "--calib", str(tmp_path), "-o", str(tmp_path / "q.onnx")]
    assert run([*args, "--method", "max", "--no-predict"]) == 0
    assert "1 of 4 images could not be read and were skipped" in " ".join(capsys.readouterr().out.split())
    args = ["insert", str(folder / "m.onnx"), "--calib", str(folder / "images"), "-o", str(tmp_path / "r.onnx")]
    for option in ("--write-table", "--calib-cache"):
        assert run([*args, option, str(tmp_path / "." / "r.onnx")]) == 2
        assert f"{option} {tmp_path / 'r.onnx'}: is what -o names" in line(capsys)
    assert run([*args, "--calib-cache", str(folder / "m.onnx")]) == 2
    assert "is one of the files read" in line(capsys)
    assert not (tmp_path / "r.onnx").exists()


def test_an_interrupt_ends_with_130_and_leaves_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qdqtool.base.files.os.replace", interrupted)
    args = ["insert", str(folder / "small.onnx"), "--calib", str(folder / "images"), "-o", str(tmp_path / "q.onnx")]
    assert run([*args, "--method", "max"]) == 130
    assert "interrupted" in line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_stops_is_no_answer(folder: Path, tmp_path: Path) -> None:
    args = ["insert", str(folder / "small.onnx"), "--calib", str(folder / "images"), "-o", str(tmp_path / "q.onnx")]
    started = subprocess.Popen([sys.executable, "-m", "qdqtool", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert started.stdout is not None and started.stderr is not None
    started.stdout.close()
    error = started.stderr.read()
    started.stderr.close()
    assert started.wait(60) == 0
    assert error == b""


def test_a_gpu_says_whether_the_result_pays(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A small picture on a large GPU gains less than 1.02 where the estimate says so, and then names what costs."""
    common = ["insert", str(folder / "small.onnx"), "--calib", str(folder / "images"), "-o", str(tmp_path / "q.onnx")]
    assert run([*common, "--gpu", "RTX 4090", "--losses", "0"]) == 0
    text = capsys.readouterr().out
    assert "INT8 as placed: " in text
    assert run([*common, "--gpu", "RTX 4090", "--losses", "0", "--format", "json"]) == 0
    gain = json.loads(capsys.readouterr().out)["time"]["gain"]["value"]
    assert ("not expected to be at least 1.02 times as fast" in " ".join(text.split())) is (gain < 1.02)


@pytest.mark.parametrize(("options", "said"), [
    (["--gpu", "Jetson Nano"], "has no INT8 kernels"),
    (["--gpu", "T4", "--target", "10", "--strongly-typed"], "FP16: "),
])  # fmt: skip
def test_what_a_gpu_makes_of_a_small_network(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], said: str
) -> None:
    common = ["insert", str(folder / "small.onnx"), "--calib", str(folder / "images"), "-o", str(tmp_path / "q.onnx")]
    assert run([*common, *options, "--losses", "0"]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
