"""``qdqtool log``: the page, its numbers, its JSON, its exits."""

import json
from pathlib import Path

import pytest

from tests.buildlog import samples
from tests.buildlog.evidence import build_file
from tests.commands.conftest import Cli
from tests.tables import rows


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "build.log"
    path.write_text(samples.trtexec_log())
    return path


def test_pages(log: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = cli("log", log)
    assert cli.err == ""
    for part in (
        "TensorRT 8.5.2 on Orin (4 SMs), PASSED",
        "FP32, INT8; what is not INT8 runs in FP32: add --fp16",
        "net_qdq.onnx, 6 nodes",
        "9 (original) -> 3 (tensor merging) -> 2 (vertical",
        "3 layers, of them 1 convolution:",
        "1 x INT8 -> FP32",
        "Conversions at run time: 1\n  FP32 -> INT8  1x3x8x8  q0",
        "Reformats (layout only): 1",
        "3 tactics timed for 1 layer,",
        "1 s      2 tactics  w + wq + conv",
        "slowest reformat tried: 0.125 ms  <in> -> y",
        "4,096 bytes",
        "424.281 qps",
        "0.0625 ms in 2 layers, 781 iterations",
        "0.0500 ms  80.0%  w + wq + conv + relu",
        "Calibrator won't be used",
        "Nothing to do.",
    ):
        assert part in text, part
    assert "QuantizeDoubleInputNodes 1 fusing 1, Removing 2" in " ".join(text.split())
    wide = [line for line in text.splitlines() if len(line) > 80]
    assert [line for line in wide if str(log) not in line and "CopyNode" not in line] == []
    path = tmp_path / "dla.log"
    path.write_text(
        "[I] [TRT] [DlaLayer] {ForeignNode[a...b]}\n[I] [TRT] [GpuLayer] COPY: c\n[I] [TRT] [GpuLayer] d\n"
    )
    assert "1 on DLA, 2 on GPU" in cli("log", path)
    (tmp_path / "n.json").write_text('["a", "b"]')
    (tmp_path / "b.log").write_text(
        "&&&& RUNNING TensorRT.trtexec [TensorRT v8003] # trtexec --onnx=m.onnx --int8\n"
    )
    text = cli("log", tmp_path / "n.json", tmp_path / "b.log")
    assert (
        "trtexec --onnx=m.onnx --int8 --verbose --nvtxMode=verbose --dumpProfile > build.log 2>&1"
        in text
    )
    assert "--profilingVerbosity" not in text
    output = log.with_name("page.txt")
    assert cli("log", log, "-o", output) == ""
    assert "TensorRT 8.5.2" in output.read_text()


def test_passes_and_numbers(log: Path, cli: Cli) -> None:
    lines = log.read_text().splitlines()
    text = cli("log", log, "--pass", "quantizedouble")
    for row in text.splitlines():
        number, _, said = row.strip().partition(": ")
        assert lines[int(number) - 1].endswith(said)
    assert len(text.splitlines()) == 4
    listed = cli.json("log", log, "--pass", "QDQToCopy")
    assert [row["text"] for row in listed] == [
        "Running: QDQToCopy on q0",
        "Swap the layer type of q0 from QUANTIZE to kQDQ",
    ]
    error = cli.refused("log", log, "--pass", "NoSuchPass")
    assert "no such pass" in error and "QDQToCopy" in error
    assert "more than one" in cli.refused("log", log, "--pass", "Const")
    facts = cli.json("log", log)
    assert facts["schema"] == "qdqtool/log/1"
    assert facts["build"] == {
        "source": "trtexec-log",
        "files": [str(log)],
        "tensorrt": "8.5.2",
        "device": "Orin",
        "complete": True,
        "missing": [],
    }
    assert facts["engine"]["signatures"] == {"INT8 -> FP32": 1}
    assert facts["messages"][0]["known"] == "calibrator-unused"
    assert facts["lines"]["unexplained"] == 0


@pytest.mark.parametrize(
    ("version", "wanted", "unwanted"),
    [
        (
            None,
            [
                "TensorRT 8.2 to 10:\n  trtexec --onnx=model.onnx --int8 --fp16 --verbose",
                "TensorRT 11:",
            ],
            [],
        ),
        (
            "8502",
            [
                "trtexec --onnx=m.onnx --best --verbose --profilingVerbosity=detailed",
                "--exportLayerInfo=layers.json",
            ],
            ["8.2 to 10", "names.json", "--saveEngine"],
        ),
        ("110000", ["trtexec --onnx=m.onnx --best"], ["--separateProfileRun"]),
    ],
)
def test_a_listing_of_names_is_answered_with_the_command_to_run(
    version: str | None, wanted: list[str], unwanted: list[str], tmp_path: Path, cli: Cli
) -> None:
    names = tmp_path / "layers.json"
    names.write_text(json.dumps({"Layers": ["conv1 + relu1", "pool"], "Bindings": ["in", "out"]}))
    files = [names]
    if version:
        log = tmp_path / "build.log"
        log.write_text(
            f"&&&& RUNNING TensorRT.trtexec [TensorRT v{version}] # trtexec --onnx=m.onnx --best "
            "--saveEngine=m.plan --exportLayerInfo=names.json\n"
        )
        files.append(log)
    text = cli("log", *files)
    assert "names and no precisions" in text
    for part in wanted:
        assert part in text
    for part in unwanted:
        assert part not in text.split("Build again")[1]


def test_every_number_of_a_recorded_build(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts were read off the recorded log by hand (grep, and the printed tables)."""
    monkeypatch.setenv("COLUMNS", "80")
    flat = " ".join(cli("log", build_file("centerpoint-a100-trt823-fp16")).split())
    for (part,) in rows("logs/centerpoint-page.txt"):
        assert part in flat, part
    everything = cli("log", build_file("centerpoint-a100-trt823-fp16"), "--all")
    assert everything.count("FP16  1x") == 38
