import shlex
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from PIL import Image

from qdqtool.commands.demo_run import write_images
from tests.commands.conftest import Cli
from tests.insertion.nets import Net, check, detector


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector m.onnx, two convolutions small.onnx, and a folder of images."""
    path = tmp_path_factory.mktemp("insert")
    onnx.save(detector(), path / "m.onnx")
    net = Net(3, 64)
    net.output(net.op("Softmax", "end", net.conv("b", net.op("Relu", "r", net.conv("a", "x", 3)))))
    onnx.save(net.model(), path / "small.onnx")
    (path / "images").mkdir()
    write_images(path / "images", 6, 64)
    return path


def test_text_and_everything(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = cli("insert", folder / "m.onnx", "--calib", folder / "images")
    check(onnx.load(folder / "m_qdq.onnx"))
    assert cli.err == ""
    for part in (
        "quantized 24 activations (focus 24) and the weights of 27 nodes",
        "Left float (4 nodes)",
        "/model.22/dfl/conv/Conv",
        "only 6 calibration images",
        "31 convolutions: 27 INT8 (21 to INT8, 6 to float), 4",
        "conversion at /model.0/conv/_input_quantizer/QuantizeLinear",
        f"qdqtool predict {folder / 'm_qdq.onnx'} --target trt10",
    ):
        assert part in text, part
    assert not [row for row in text.splitlines() if len(row) > 80 and str(folder) not in row]
    text = cli(
        "insert",
        folder / "m.onnx",
        "--calib",
        folder / "images",
        "-o",
        tmp_path / "q.onnx",
        "--method",
        "max",
        "--all",
        "--target",
        "trt10",
    )
    scales = text.split("Activation scales\n")[1].split("\n\n")[0].splitlines()
    assert len(scales) == 24
    assert all(float(row.split()[0]) > 0 and row.split()[1] == "max" for row in scales)
    assert sum(row.startswith("  - scale ") for row in text.splitlines()) == 2
    assert "Predicted for trt10" in text


@pytest.mark.parametrize("target", ["10.7", "10.14.1", "trt11"])
def test_the_next_command_names_the_target_as_it_was_given(
    folder: Path, cli: Cli, target: str
) -> None:
    text = cli(
        "insert",
        folder / "small.onnx",
        "--calib",
        folder / "images",
        "--target",
        target,
        "--losses",
        "0",
        "--no-predict",
        "--method",
        "max",
        "--max-images",
        "1",
    )
    assert text.split("next: ")[1].splitlines()[0].endswith(f"--target {target}")


def test_the_next_command_asks_of_the_same_gpu(folder: Path, cli: Cli) -> None:
    args = [
        "--losses",
        "0",
        "--no-predict",
        "--method",
        "max",
        "--max-images",
        "1",
        "--target",
        "rtx1.7",
    ]
    text = cli(
        "insert", folder / "small.onnx", "--calib", folder / "images", "--gpu", "Tesla T4", *args
    )
    command = shlex.split(text.split("next: qdqtool ")[1].splitlines()[0])
    assert command[2:] == ["--target", "rtx1.7", "--gpu", "Tesla T4"]
    assert cli.json(*command)["compute_capabilities"] == ["7.5"]


def test_options_reach_the_library(folder: Path, cli: Cli, tmp_path: Path) -> None:
    out, table = tmp_path / "q.onnx", tmp_path / "t.table"
    args = ["insert", folder / "m.onnx", "--calib", folder / "images", "-o", out]
    more = [
        "--method-for",
        "^images$=max",
        "--exclude",
        r"/model\.0/",
        "--head",
        "none",
        "--residual",
        "none",
        "--weights",
        "int8",
        "--target",
        "trt10",
        "--high-precision",
        "fp16",
        "--write-table",
        str(table),
        "--bgr",
        "--mean",
        "0.1,0.2,0.3",
        "--std",
        "0.5",
        "--max-images",
        "4",
        "--resize",
        "stretch",
        "--no-predict",
    ]
    # The first convolution was excluded, so that 'images' is not quantized
    assert "--method-for ^images$=max: matches no quantized tensor" in cli.refused(*args, *more)
    assert not out.exists()
    more[3] = r"/model\.1/"
    data = cli.json(*args, *more)
    assert data["calibration"]["images"] == 4
    assert data["prediction"] is None
    assert data["target"] == "trt10"
    assert {q["tensor"]: q["method"] for q in data["quantized"]}["images"] == "max"
    assert "`" not in data["skipped"][0]["reason"]  # the option as the command line has it
    assert table.read_text().startswith("TRT-")
    assert {onnx.TensorProto.INT8, onnx.TensorProto.FLOAT16} <= {
        t.data_type for t in onnx.load(out).graph.initializer
    }
    assert "is the name of 8 GPUs" in cli.refused(
        "insert", folder / "m.onnx", "--calib", folder / "images", "--gpu", "Orin"
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["MODEL"], "give calibration images with --calib FOLDER"),
        (["MODEL", "--calib", "nowhere"], "nowhere: no such file or folder"),
        (["MODEL", "--calib", "EMPTY"], "no images"),
        (["MODEL", "--calib", "BROKEN"], "none of the 1 images could be read"),
        (["MODEL", "--calib", "IMAGES", "-o", "no/where/q.onnx"], "does not exist"),
        (["MODEL", "--calib", "IMAGES", "-o", "EMPTY"], "is a folder"),
        (["MODEL", "--calib", "IMAGES", "--method-for", "max"], "is not REGEX=METHOD"),
        (["MODEL", "--calib", "IMAGES", "--size", "big"], "neither a number nor HEIGHTxWIDTH"),
        (["MODEL", "--calib", "IMAGES", "--mean", "1,2"], "neither a number nor three"),
        (["MODEL", "--calib", "IMAGES", "--std", "0"], "std"),
        (["MODEL", "--calib", "IMAGES", "--percentile", "0.99"], "outside 50 to 100"),
        (["MODEL", "--calib", "IMAGES", "--max-images", "0"], "--max-images"),
        (["MODEL", "--calib", "IMAGES", "--calib-table", "T"], "exclude each other"),
        (["MODEL", "--calib-table", "MODEL"], "TensorRT calibration table"),
        (["TEXT", "--calib", "IMAGES"], "not an ONNX model"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    folder: Path,
    tmp_path: Path,
    cli: Cli,
    args: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"not a png")
    (tmp_path / "text.onnx").write_bytes(b"hello, this is not a model at all")
    places = {
        "MODEL": str(folder / "small.onnx"),
        "IMAGES": str(folder / "images"),
        "EMPTY": str(tmp_path / "empty"),
        "BROKEN": str(tmp_path / "broken"),
        "TEXT": str(tmp_path / "text.onnx"),
    }
    before = (folder / "small.onnx").read_bytes()
    full = [places.get(a, a) for a in args]
    if "-o" not in full and "small.onnx" in full[0]:
        full += ["-o", str(tmp_path / "q.onnx")]
    assert words in cli.refused("insert", *full)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken", "empty", "text.onnx"]
    assert (folder / "small.onnx").read_bytes() == before


def test_broken_images_and_readers(folder: Path, tmp_path: Path, cli: Cli) -> None:
    for i in range(3):
        Image.new("RGB", (64, 48), (i * 40, 90, 200)).save(tmp_path / f"{i}.png")
    (tmp_path / "bad.png").write_bytes(b"not a png")
    text = cli(
        "insert",
        folder / "small.onnx",
        "--calib",
        tmp_path,
        "-o",
        tmp_path / "q.onnx",
        "--method",
        "max",
        "--no-predict",
    )
    assert "1 of 4 images could not be read and were skipped" in " ".join(text.split())
    args = ["insert", folder / "m.onnx", "--calib", folder / "images", "-o", tmp_path / "r.onnx"]
    for option in ("--write-table", "--calib-cache"):
        assert f"{option} {tmp_path / 'r.onnx'}: is the output of -o as well" in cli.refused(
            *args, option, tmp_path / "r.onnx"
        )
    assert "is one of the files read" in cli.refused(*args, "--calib-cache", folder / "m.onnx")
    assert not (tmp_path / "r.onnx").exists()


def test_an_interrupt_ends_with_130_and_leaves_nothing(
    folder: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qdqtool.base.files.os.replace", interrupted)
    args = [
        "insert",
        folder / "small.onnx",
        "--calib",
        folder / "images",
        "-o",
        tmp_path / "q.onnx",
    ]
    assert "interrupted" in cli.refused(*args, "--method", "max", code=130)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_stops_is_no_answer(folder: Path) -> None:
    args = ["predict", str(folder / "small.onnx")]
    started = subprocess.Popen(
        [sys.executable, "-m", "qdqtool", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert started.stdout is not None and started.stderr is not None
    started.stdout.close()
    error = started.stderr.read()
    started.stderr.close()
    assert started.wait(60) == 0
    assert error == b""


def test_a_gpu_says_whether_the_result_pays(folder: Path, cli: Cli, tmp_path: Path) -> None:
    """A small picture on a large GPU gains less than 1.02 where the estimate says so, and then names what costs."""
    common = [
        "insert",
        folder / "small.onnx",
        "--calib",
        folder / "images",
        "-o",
        tmp_path / "q.onnx",
        "--gpu",
        "RTX 4090",
        "--losses",
        "0",
    ]
    text = cli(*common)
    assert "INT8 as placed: " in text
    gain = cli.json(*common)["time"]["gain"]["value"]
    assert ("not expected to be at least 1.02 times as fast" in " ".join(text.split())) is (
        gain < 1.02
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "Jetson Nano"], "No INT8 on"),
        (["--gpu", "T4", "--target", "rtx1.7"], " 0 INT8"),
        (["--gpu", "T4", "--target", "10", "--strongly-typed"], "FP16: "),
    ],
)
def test_what_a_gpu_makes_of_a_small_network(
    folder: Path, cli: Cli, tmp_path: Path, options: list[str], said: str
) -> None:
    text = cli(
        "insert",
        folder / "small.onnx",
        "--calib",
        folder / "images",
        "-o",
        tmp_path / "q.onnx",
        *options,
        "--losses",
        "0",
    )
    assert said in " ".join(text.split())
