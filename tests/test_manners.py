"""Processes: closed streams, control characters, widths of terminals, little memory."""

import base64
import contextlib
import errno
import io
import json
import math
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from qdqtool.commands import COMMANDS, process, render_overview
from qdqtool.commands.cli import run
from qdqtool.errors import ModelError
from qdqtool.ir.graphsurgeon import quiet_graphsurgeon
from qdqtool.ir.modelfile import load
from qdqtool.util import text
from tests.slow import slow_after
from tools.fuzz.grammar import network
from tools.fuzz_inputs.seeds import write_seeds

TOOL = f"{sys.executable} -m qdqtool"
ODD = "\x1b]0;owned\x07 \x9b31m \x85 \x7f \u202e"
BREAK = "first\nSECOND\tthird\u202e\u200b\U000e0041"
SHOWN = "first\\nSECOND\\tthird\\u202e\\u200b\\udb40\\udc41"
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e]")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    path.write_bytes(network(11).SerializeToString())
    return path


def shell(command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False, **options
    )


@pytest.mark.parametrize(
    "command",
    slow_after(
        4,
        [
            "predict {m} >&- <&- 2>&-",
            "log - <&-",
            "> /dev/full",
            "explain SKIP-FLOAT > /dev/full",
            "predict {m} >&-",
            "predict {m} > /dev/full",
        ],
    ),
)
def test_closed_and_full_streams_end_with_2(model: Path, command: str) -> None:
    done = shell(f"{TOOL} {command.format(m=model)}")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 1
    assert (os.strerror(errno.ENOSPC) in done.stderr) == ("/dev/full" in command)


def test_closed_streams_and_output_file(model: Path, tmp_path: Path) -> None:
    done = shell(f"{TOOL} predict {model} -o {tmp_path / 'closed'} --format json <&- >&- 2>&-")
    assert done.returncode == 0 and json.loads((tmp_path / "closed").read_text())["schema"]


def test_warnings_as_errors_do_not_end_a_prediction(model: Path, tmp_path: Path) -> None:
    image = onnx.load(model).graph.input[0]
    shape = [d.dim_value for d in image.type.tensor_type.shape.dim]
    np.savez(tmp_path / "x.npz", **{image.name: np.ones(shape, np.float32)})
    words = f"predict {model} -o {tmp_path / 'out'} --format json --calib {tmp_path / 'x.npz'}"
    done = shell(f"PYTHONWARNINGS=error {TOOL} {words} <&- >&-")
    assert re.fullmatch(r"qdqtool: checked the scales .+\n", done.stderr)
    assert done.returncode == 0 and json.loads((tmp_path / "out").read_text())["schema"]


def test_end_of_file_is_not_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise EOFError("No data left in file")

    monkeypatch.setattr("qdqtool.findings.codes.find", fail)
    assert run(["explain", "SKIP-FLOAT"]) == 2  # an interruption exits with 130


def write_files_with_odd_names(folder: Path) -> None:
    write_seeds(folder)
    for name in ("qdq.onnx", "float.onnx"):
        proto = onnx.load(folder / name)
        for node in proto.graph.node:
            node.name += BREAK + ODD
        proto.graph.name = ODD
        (folder / name).write_bytes(proto.SerializeToString())
    (folder / "\x1b[31m.onnx").write_bytes(proto.SerializeToString())
    layers = (folder / "layers.json").read_text()
    broken = re.sub(
        '"Name"( *): *"([^"]*)', lambda m: f'"Name": "{m[2]}{json.dumps(BREAK + ODD)[1:-1]}', layers
    )
    assert broken != layers
    (folder / "layers.json").write_text(broken)


@pytest.mark.parametrize(
    ("args", "files"),
    [
        (["predict", "qdq.onnx", "--all", "--trace", "--layers"], []),
        (["predict", "qdq.onnx", "--all", "--layers", "-o", "out.txt"], ["out.txt"]),
        (["predict", "qdq.onnx", "--all", "--gpu", "T4"], []),
        (["predict", "qdq.onnx", "--format", "json"], []),
        (["predict", "qdq.onnx", "--target", "rtx1.7", "--all"], []),
        (["predict", "float.onnx", "--require", "."], []),
        (["predict", "\x1b[31m.onnx", "--require", "."], []),
        (["fix", "qdq.onnx", "-o", "fixed.onnx"], []),
        (["insert", "float.onnx", "--calib", "samples.npz", "--include", ".", "--all"], []),
        (
            [
                "insert",
                "float.onnx",
                "--calib",
                "samples.npz",
                "--include",
                "conv",
                "--losses",
                "1",
            ],
            [],
        ),
        (["engine", "layers.json", "--all"], []),
        (["engine", "layers.json", "--dot", "a.dot", "--svg", "a.svg"], ["a.dot", "a.svg"]),
        (["log", "layers.json", "--all"], []),
        (
            ["extract", "qdq.onnx", "--node", "FIRST", "-o", "part.onnx", "--report", "part.md"],
            ["part.md"],
        ),
    ],
)
def test_odd_names_are_escaped_and_stay_on_their_line(
    current_folder: Path,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    files: list[str],
) -> None:
    write_files_with_odd_names(current_folder)
    first = next(n.name for n in onnx.load("qdq.onnx").graph.node if n.op_type == "Conv")
    code = run([first if a == "FIRST" else a for a in args])
    out, err = capsys.readouterr()
    assert code in (0, 1), err
    texts = [out + err, *((current_folder / f).read_text() for f in files)]
    for answer in texts:
        assert not re.search("^ *SECOND|\tthird|\u200b|\U000e0041", answer, re.M), answer
        assert not HIDDEN.search(answer)
    if "--all" in args and args[0] == "predict":
        assert SHOWN in "".join(texts)
    if "json" in args:  # whose escapes mean the same
        assert any(ODD in c["name"] for c in json.loads(out)["convolutions"])


def test_escapes_keep_the_meaning_of_json() -> None:
    everything = "".join(
        map(chr, [*range(0x250), *range(0x2000, 0x2100), 0xFEFF, 0xFFFF, 0x1F600, 0xE0041])
    )
    assert json.loads(text.escape_hidden(json.dumps(everything, ensure_ascii=False))) == everything
    assert not HIDDEN.search(text.escape_hidden(everything))
    assert text.as_line(BREAK) == SHOWN and json.loads(f'"{text.as_line(BREAK)}"') == BREAK
    for encoding in ("ascii", "latin-1", "cp1252", "utf-16"):
        written = io.TextIOWrapper(io.BytesIO(), encoding)
        process.FilteredStream(written).write(json.dumps(everything, ensure_ascii=False))
        written.seek(0)
        assert json.loads(written.read()) == everything


def test_full_stderr_does_not_end_the_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", str(model), "--assume", "silu-add=fused"]
    assert run(command) == 0
    assert capsys.readouterr().err
    read, write = os.pipe()
    os.close(read)
    for name in ("/dev/full", write):
        with monkeypatch.context() as patch, open(name, "w", buffering=1) as stream:
            patch.setattr("sys.stderr", stream)
            assert run([*command, "-o", str(tmp_path / "answer")]) == 0
            (tmp_path / "answer").unlink()
            with contextlib.suppress(OSError):
                stream.close()


@pytest.mark.parametrize("value", slow_after(2, [math.nan, 3e38, math.inf, 0.0]))
@pytest.mark.parametrize(
    "command",
    [
        "predict",
        "predict --target rtx1.7",
        "predict --gpu T4",
        "verify own.log",
        "fix -o out",
        "extract --finding SKIP-FLOAT -o out",
        "report -o out",
    ],
)
def test_json_has_only_numbers(
    command: str,
    value: float,
    current_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """NaN and infinity are not JSON, and most parsers reject them."""
    write_seeds(current_folder)
    proto = onnx.load("own.onnx")
    scales = [t for t in proto.graph.initializer if t.name == "c1.in.Q.scale"]
    scales[0].CopyFrom(onnx.numpy_helper.from_array(np.float32(value), scales[0].name))
    onnx.save(proto, "own.onnx")
    verb, *options = command.split()
    assert run([verb, "own.onnx", *options, "--format", "json"]) in (0, 1)
    texts = [capsys.readouterr().out]
    if verb == "report":
        packed = re.findall(r'id="page-data">([^<]+)</script>', Path("out").read_text())
        texts += [zlib.decompress(base64.b64decode(p)).decode() for p in packed]
        assert len(texts) == 2
    for document in texts:
        json.loads(document, parse_constant=pytest.fail)


def test_model_with_a_name_that_is_not_utf8_is_refused() -> None:
    whole, name = network(11).SerializeToString(), network(11).graph.node[0].name.encode()
    damaged = whole.replace(name, name[:-1] + b"\xff")
    assert damaged != whole
    with pytest.raises(ModelError, match="UTF-8"):
        load(damaged)


@pytest.mark.parametrize(("calls", "refused"), [(64, False), (65, True)])
def test_constants_of_functions_count_for_each_call(calls: int, refused: bool) -> None:
    """Inlining copies the constants of a function for each call.

    A function with 16 MB and 500 calls would take more than a minute.
    """
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("f", 1)]
    value = onnx.helper.make_tensor("v", 1, [1 << 20], bytes(4 << 20), raw=True)
    body = [
        onnx.helper.make_node("Constant", [], ["k"], value=value),
        onnx.helper.make_node("Add", ["a", "k"], ["c"]),
    ]
    function = onnx.helper.make_function("f", "F", ["a"], ["c"], body, opsets)
    ends = [[onnx.helper.make_tensor_value_info(name, 1, [1])] for name in ("x0", f"x{calls}")]
    nodes = [onnx.helper.make_node("F", [f"x{i}"], [f"x{i + 1}"], domain="f") for i in range(calls)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "g", *ends), opset_imports=opsets, functions=[function]
    )
    if refused:
        with pytest.raises(ModelError, match="26"):  # 65 times 4 MB, in MB
            load(model)
    else:
        assert len(load(model).nodes) == 2 * calls


def test_onnxruntime_leaves_no_temporary_files(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    code = "from qdqtool.runtime.sessions import load_onnxruntime; load_onnxruntime()"
    subprocess.run(
        [sys.executable, "-c", code], env={**environment, "TMPDIR": str(tmp_path)}, check=True
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("columns", [20, 64, 80, 100, 300])
def test_overview_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(["--help"]) == 0 == run([])
    shown, text = capsys.readouterr().out, render_overview()
    assert shown == f"{text}\n" * 2
    assert max(map(len, text.splitlines())) <= max(50, min(98, columns - 2))
    assert all(
        " ".join((name, *line.split())) in " ".join(text.split()) for name, line in COMMANDS.items()
    )
    if columns in (64, 300):
        assert (
            subprocess.run([*TOOL.split(), "-h"], capture_output=True, text=True, check=True).stdout
            == f"{text}\n"
        )


@pytest.mark.parametrize(
    "columns", ["", "0", "00", "-5", "abc", "\u00b2", "\u0660", "1", "9" * 5000], ids=ascii
)
def test_odd_width_of_the_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for words in (["--help"], ["explain", "SKIP-FLOAT"]):
        assert run(words) == 0
        out, err = capsys.readouterr()
        assert out.strip() and not err


@pytest.mark.parametrize("columns", ["0", "9" * 5000], ids=["none", "too many"])
def test_odd_width_of_the_terminal_of_a_process(columns: str) -> None:
    """The width may be needed during the start of a process."""
    done = shell(f"{TOOL} explain SKIP-FLOAT", env={**os.environ, "COLUMNS": columns})
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip()


@pytest.mark.parametrize(
    "args",
    [
        ["predict", "a\0b"],
        ["gpus", "-o", "a\0b"],
        ["explain", "a\0b"],
        ["predict", "m.onnx", "--calib", "a\0b"],
    ],
)
def test_argument_with_nul_is_refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"qdqtool: {'a' + chr(0) + 'b'!r}: ")
    assert err.count("\n") == 1


def test_deleted_current_folder_is_one_line(tmp_path: Path) -> None:
    command = f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir {tmp_path}/gone; {TOOL}"
    done = shell(f"{command} gpus -o o.txt")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "folder" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.parametrize("command", ["predict {m}", "fix {m} -o {m}.out"])
def test_small_address_space_is_one_line(model: Path, command: str) -> None:
    # 127: the loader of shared libraries ends the process before Python can report it
    for kilobytes in (60_000, 155_000, 250_000):
        done = shell(f"ulimit -v {kilobytes}; {TOOL} {command.format(m=model)}")
        assert (done.returncode, len(done.stderr.splitlines())) in ((2, 1), (127, 1)), (
            kilobytes,
            done.returncode,
            done.stderr[-500:],
        )
    assert shell(f"ulimit -v 8000000; {TOOL} {command.format(m=model)}").returncode == 0


def test_log_of_graphsurgeon_stays_out_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    import onnx_graphsurgeon as gs

    graph = gs.Graph(
        nodes=[gs.Node("Relu", inputs=[gs.Variable("x")], outputs=[gs.Variable("y")])],
        outputs=[gs.Variable("y")],
    )  # no types: it complains
    with pytest.raises(ModelError, match="must include dtype"):
        load(graph)
    assert load(gs.import_onnx(network(11))).nodes
    with quiet_graphsurgeon():
        gs.logger.G_LOGGER.log("said", gs.logger.G_LOGGER.CRITICAL)
    assert capsys.readouterr() == ("", "")
