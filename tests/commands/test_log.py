import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.buildlog import samples
from tests.buildlog.evidence import build_file
from tests.commands.conftest import Cli
from tests.tables import rows


@pytest.fixture
def log(current_folder: Path) -> str:
    (current_folder / "build.log").write_text(samples.trtexec_log())
    return "build.log"


def test_log_json_of_a_small_build(log: str, cli: Cli) -> None:
    facts = cli.json("log", log)
    expected: dict[str, Any] = {
        "schema": "qdqtool/log/1",
        "build": {
            "source": "trtexec-log",
            "files": ["build.log"],
            "tensorrt": "8.5.2",
            "device": "Orin",
            "complete": True,
            "missing": [],
        },
        "passed": True,
        "float_remainder_fp32": True,
        "model": {"file": "net_qdq.onnx", "opset": None, "producer": None, "nodes": 6},
        "seconds": {
            "Graph construction and optimization": 0.25,
            "Formats and tactics selection": 4.5,
            "Engine generation": 5.5,
        },
    }
    assert {key: facts[key] for key in expected} == expected
    assert [(m["what"].split()[-1], m["layers"]) for m in facts["milestones"]] == [
        ("Original", 9),
        ("removal", 9),
        ("merging", 3),
        ("fusions", 2),
        ("layers", 3),
    ]
    assert facts["engine"]["signatures"] == {"INT8 -> FP32": 1}
    assert facts["lines"]["unexplained"] == 0


def test_log_text_of_one_profile_iteration(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "build.log"
    path.write_text(samples.trtexec_log().replace("781 iterations", "1 iterations"))
    assert " ms in 2 layers, 1 iteration; the slowest:" in cli("log", path)


def test_log_placement_on_dla(tmp_path: Path, cli: Cli) -> None:
    (path := tmp_path / "dla.log").write_text(
        "[I] [TRT] [DlaLayer] {ForeignNode[a...b]}\n"
        "[I] [TRT] [GpuLayer] COPY: c\n[I] [TRT] [GpuLayer] d\n"
    )
    assert cli.json("log", path)["placement"] == {"DLA": 1, "GPU": 2}


def test_log_pass_lists_its_lines(log: str, cli: Cli) -> None:
    lines = Path(log).read_text().splitlines()
    shown = [
        row.strip().split(": ", 1)
        for row in cli("log", log, "--pass", "quantizedouble").splitlines()
    ]
    assert len(shown) == 4 and all(lines[int(number) - 1].endswith(text) for number, text in shown)
    assert [row["text"] for row in cli.json("log", log, "--pass", "QDQToCopy")] == [
        "Running: QDQToCopy on q0",
        "Swap the layer type of q0 from QUANTIZE to kQDQ",
    ]


@pytest.mark.parametrize(
    ("version", "expected", "unexpected"),
    [
        (
            None,
            ["trtexec --onnx=model.onnx --int8 --fp16 --verbose", "TensorRT 11"],
            ["--saveEngine"],
        ),
        (
            "8003",
            ["trtexec --onnx=m.onnx --best --verbose --nvtxMode=verbose --dumpProfile > build.log"],
            ["--profilingVerbosity", "names.json", "--saveEngine"],
        ),
        (
            "8502",
            [
                "trtexec --onnx=m.onnx --best --verbose --profilingVerbosity=detailed",
                "--exportLayerInfo=layers.json",
            ],
            ["TensorRT 11", "names.json", "--saveEngine"],
        ),
        ("110000", ["trtexec --onnx=m.onnx --best"], ["--separateProfileRun"]),
    ],
)
def test_log_of_names_shows_the_command_that_builds_again(
    version: str | None, expected: list[str], unexpected: list[str], tmp_path: Path, cli: Cli
) -> None:
    files = [tmp_path / "layers.json"]
    files[0].write_text(
        json.dumps({"Layers": ["conv1 + relu1", "pool"], "Bindings": ["in", "out"]})
    )
    if version:
        files.append(tmp_path / "build.log")
        files[-1].write_text(
            f"&&&& RUNNING TensorRT.trtexec [TensorRT v{version}] # trtexec --onnx=m.onnx --best "
            "--saveEngine=m.plan --exportLayerInfo=names.json\n"
        )
    assert cli.json("log", *files)["names_only"]
    text = re.sub(r" \\\n +", " ", cli("log", *files))  # wrapped commands
    start = min(text.index(part) for part in expected)
    assert all(part in text for part in expected)
    assert not [part for part in unexpected if part in text[start:]]


@pytest.mark.usefixtures("current_folder")
def test_log_shows_every_number_of_a_recorded_build(cli: Cli) -> None:
    """Expected numbers were read from the log with grep and from its printed tables."""
    words = set(cli("log", build_file("centerpoint-a100-trt823-fp16")).replace(",", "").split())
    for (part,) in rows("logs/centerpoint-page.txt"):
        numbers = [w for w in part.replace(",", "").split() if re.search(r"\d", w)]
        assert all(any(w.startswith(n) for w in words) for n in numbers), part  # names are cut


def test_log_all_lists_each_reformat(cli: Cli) -> None:
    assert cli("log", build_file("centerpoint-a100-trt823-fp16"), "--all").count("FP16  1x") == 38
