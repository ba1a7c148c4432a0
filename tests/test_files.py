"""Input and output files of commands.

Outputs are complete or absent, inputs are never overwritten, and other kinds of files are refused.
"""

import ast
import os
import pickle
import re
import shutil
import signal
import socket
import stat
from pathlib import Path

import click
import onnx
import pytest

import qdqtool
from qdqtool.commands import COMMANDS as NAMES
from qdqtool.commands.cli import cli, run
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.util import files, limits
from qdqtool.util.files import atomic_write, write_text
from tests.comparison.networks import network
from tests.errors import has
from tests.slow import slow_after
from tests.sources import nodes_like
from tools.fuzz_inputs.seeds import COMMANDS, write_seeds


def test_atomic_write_error_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")

    def fail() -> None:
        with atomic_write(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(
    "words", ["predict m.onnx -o", "build m.onnx -o", "demo -o", "gpus -o", "log b.log --to-onnx"]
)
def test_dash_is_refused_as_output(
    words: str, current_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words.split(), "-"]) == 2
    assert f"{words.split()[-1]} -: " in capsys.readouterr().err and os.listdir() == []


def test_descriptor_is_written_at_its_position(tmp_path: Path) -> None:
    """The names of descriptors are links in /dev, which no file may replace."""
    with (tmp_path / "file").open("wb") as file:
        file.write(b"before ")
        file.flush()
        for name in (f"/dev/fd/{file.fileno()}", f"/proc/self/fd/{file.fileno()}"):
            write_text(name, "whole ")
    assert (tmp_path / "file").read_text() == "before whole whole "


def test_descriptor_of_a_pipe_is_written_to() -> None:
    read, write = os.pipe()
    write_text(f"/dev/fd/{write}", "whole")
    assert os.read(read, 100) == b"whole"
    os.close(read)
    os.close(write)
    with pytest.raises(QdqtoolError, match=f"/dev/fd/{write}"):  # it is closed
        write_text(f"/dev/fd/{write}", "whole")


def test_null_device_is_written_to() -> None:
    write_text(os.devnull, "whole")
    assert Path(os.devnull).is_char_device()


def test_descriptor_of_an_input_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "read"
    path.write_text("kept")
    with path.open("ab") as file, files.record_inputs():
        files.record_input(path)
        for write in (write_text, files.reserve_output):
            with pytest.raises(QdqtoolError, match=f"/dev/fd/{file.fileno()}"):
                write(f"/dev/fd/{file.fileno()}", "-o")
    assert path.read_text() == "kept"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has no /dev/full")
def test_full_device_is_an_error() -> None:
    with open("/dev/full", "wb") as full, pytest.raises(QdqtoolError, match="/dev/fd/"):
        write_text(f"/dev/fd/{full.fileno()}", "text")


def test_surrogates_are_written_as_escapes(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "name \udcff")
    assert (tmp_path / "a.txt").read_text("utf-8") == "name \\udcff"


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        qdqtool.predict(path)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("best.engine", b"ftrt\x00\x00\x00", "TensorRT engine"),
        ("best.trt", b"abc", "TensorRT engine"),
        ("best.pt", b"PK\x03\x04abc", "PyTorch"),
        ("weights", pickle.dumps([1], protocol=2), "PyTorch"),
        ("array", b"\x93NUMPY\x01\x00v\x00{'descr': '<f8'}", "numpy"),
        ("best.tflite", b"\x1c\x00\x00\x00TFL3", "TensorFlow Lite"),
        ("best.xml", b'<?xml version="1.0"?>\n<net name="a">', "OpenVINO"),
        ("model.onnx", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("model.onnx", b"<!DOCTYPE html><html>", "model.onnx"),
        ("model.onnx", b"", "model.onnx"),
        ("model.onnx", b"\x89PNG\r\n", "model.onnx"),
        ("model.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00{}", "safetensors"),
        ("layers.json", b'{"Layers": []}', "JSON"),
        ("noise.bin", b"\x91\x07\xee\x12", "ONNX"),
        ("model.onnx", b"not a model", "ONNX"),
    ],
)
def test_other_file_is_refused_by_its_kind(
    tmp_path: Path, name: str, data: bytes, expected: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    message = refusal(path)
    assert expected in message and str(path) in message and "\n" not in message


def nested(levels: int) -> bytes:
    """Return an If inside an If, and so on, as bytes: protobuf does not copy graphs that deep."""

    def as_field(field: int, data: bytes) -> bytes:
        size, length = len(data), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([field << 3 | 2]) + length + bytes([size]) + data

    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [], []
    ).SerializeToString()
    for _ in range(levels):
        branch = onnx.AttributeProto(
            name="then_branch", type=onnx.AttributeProto.GRAPH
        ).SerializeToString()
        graph = as_field(
            1,
            onnx.NodeProto(op_type="If").SerializeToString()
            + as_field(5, branch + as_field(6, graph)),
        )
    opsets = onnx.ModelProto(ir_version=8, opset_import=[onnx.helper.make_opsetid("", 17)])
    return opsets.SerializeToString() + as_field(7, graph)


def test_model_nested_deeper_than_protobuf_reads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(nested(30))
    assert len(onnx.load(path).graph.node) == 1
    for levels in (40, 500):
        path.write_bytes(nested(levels))
        assert "damaged" in refusal(path)
    path.write_bytes(nested(30)[:-5])
    assert "damaged" in refusal(path)


def recurse(*_: object) -> None:
    recurse()


def test_recursion_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdqtool.ir.modelfile.check_function_sizes", recurse)
    (tmp_path / "model.onnx").write_bytes(network().SerializeToString())
    with pytest.raises(QdqtoolError, match=f"^{re.escape(str(tmp_path / 'model.onnx'))}: "):
        qdqtool.predict(str(tmp_path / "model.onnx"))
    with pytest.raises(QdqtoolError, match="nested"):
        qdqtool.predict(network())


@pytest.mark.parametrize(
    ("size", "limit", "numbers"),
    [
        (1000, 999, ["1000 bytes", "999 bytes"]),
        (1 << 30, 999, ["1 GB", "999 bytes"]),
        ((512 << 20) + 128, 512 << 20, ["536871040 bytes", "536870912 bytes"]),
    ],
)
def test_size_just_above_a_limit_has_all_digits(size: int, limit: int, numbers: list[str]) -> None:
    with pytest.raises(QdqtoolError, check=has(None, *numbers)):
        limits.check_size(size, limit, "a:")


def test_long_path_is_shortened_in_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "a" * 5000 + "/b.onnx"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("qdqtool: aaa") and "aaa...aaa" in line and "/b.onnx" in line
    assert len(line) < 400


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeds")
    write_seeds(folder)
    (folder / "images").mkdir()
    shutil.copy(folder / "picture.png", folder / "images" / "a.png")
    shutil.copy(folder / "picture.jpg", folder / "images" / "b.jpg")
    return folder


def state(*folders: Path) -> dict[str, tuple[int, ...]]:
    """Return values that change if a file is created, written or replaced, without reading it."""
    paths = (
        os.path.join(home, name)
        for folder in folders
        for home, _, names in os.walk(folder)
        for name in names
    )
    stats = ((path, os.lstat(path)) for path in paths)
    return {
        path: (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        for path, s in stats
        if stat.S_ISREG(s.st_mode)
    }


INSERT = ["insert", "float.onnx", "--include", "conv"]


@pytest.mark.parametrize(
    ("args", "victim"),
    [
        (["predict", "external.onnx", "-o"], "w.bin"),
        (["predict", "qdq.onnx", "-o"], "qdq.onnx"),
        (["fix", "qdq.onnx", "-o"], "qdq.onnx"),
        (["fix", "qdq.onnx", "--inputs", "inputs.npz", "-o"], "inputs.npz"),
        (["insert", "external.onnx", "--include", "conv", "--calib", "samples.npz", "-o"], "w.bin"),
        ([*INSERT, "--calib", "images", "-o"], "images/b.jpg"),
        ([*INSERT, "--calib", "list.txt", "-o"], "list.txt"),
        ([*INSERT, "--calib", "list.txt", "-o"], "picture.png"),
        ([*INSERT, "--calib", "samples.npz", "-o"], "samples.npz"),
        ([*INSERT, "--calib-table", "table.cache", "-o"], "table.cache"),
        (["verify", "--from-log", "build.log", "-o"], "build.log"),
        (["verify", "qdq.onnx", "layers.json", "-o"], "layers.json"),
        (["log", "build.log", "-o"], "build.log"),
        (["engine", "layers.json", "--profile", "profile.json", "-o"], "profile.json"),
        ([*INSERT, "--calib", "images", "-o", "out", "--write-table"], "images/a.png"),
        ([*INSERT, "--calib", "images", "-o", "out", "--calib-cache"], "images/a.png"),
    ],
)
@pytest.mark.parametrize("how", ["itself", "link", "hard link", "other spelling"])
def test_output_onto_an_input_is_refused(
    seeds: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    victim: str,
    how: str,
) -> None:
    monkeypatch.chdir(seeds)  # where nothing changes, else this fails
    output = victim
    if how == "link":
        os.symlink(seeds / victim, tmp_path / "out")
        output = str(tmp_path / "out")
    elif how == "hard link":
        os.link(seeds / victim, tmp_path / "out")
        output = str(tmp_path / "out")
    elif how == "other spelling":
        output = str(seeds / "images" / ".." / victim)
    before = state(seeds, tmp_path)
    assert run([*args, output]) == 2
    error = capsys.readouterr().err
    assert f"{args[-1]} {output}" in error and len(error.splitlines()) == 1
    assert state(seeds, tmp_path) == before


# Commands take the names of their help option from the group, and keep them.
GROUP = click.Context(cli, **cli.context_settings)


def command_named(name: str) -> click.Command:
    return cli.get_command(GROUP, name)


def lines_with_paths() -> list[tuple[str, list[str], int]]:
    lines = [
        *(words for some in COMMANDS.values() for words in some),
        ("build", "qdq.onnx", "--builder", "trtexec", "-o", "OUT"),
        ("demo", "-o", "OUT", "--images", "1"),
    ]
    places: dict[str, tuple[str, list[str], int]] = {}
    for words in lines:
        command = command_named(words[0])
        context = command.make_context(
            words[0], list(words[1:]), parent=GROUP, resilient_parsing=True
        )
        for parameter in command.params:
            value = context.params[str(parameter.name)]
            for path in value if isinstance(value, tuple) else (value,):
                if isinstance(parameter.type, click.Path) and path in words:
                    option = f"{words[0]} {parameter.opts[-1]}"
                    places.setdefault(option, (option, list(words), words.index(path)))
    return list(places.values())


LINES = lines_with_paths()


def test_each_option_with_a_path_has_a_command_line() -> None:
    assert {
        f"{name} {p.opts[-1]}"
        for name in NAMES
        for p in command_named(name).params
        if isinstance(p.type, click.Path)
    } == {option for option, _, _ in LINES}
    assert not {
        str(p.metavar)
        for name in NAMES
        for p in command_named(name).params
        if not isinstance(p.type, click.Path)
    } & {"FILE", "DIR", "MODEL", "IMAGES", "HTML"}  # these are paths


ODD = (
    "pipe",
    "link to a pipe",
    "socket",
    "folder",
    "loop",
    "dangling",
    "/dev/zero",
    "/dev/stdin",
    "long",
    "behind a file",
)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("rest", slow_after(1, [False, True]), ids=["some", "rest"])
def test_only_regular_files_are_read_and_written(
    tmp_path: Path,
    seeds: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rest: bool,
) -> None:
    """Other kinds of files are refused at once and in one line.

    Each option gets a pipe and a third of the other kinds, the next option the next third.
    """
    odd = tmp_path / "odd"
    odd.mkdir()
    names = {name: str(odd / f"{name}.txt") for name in ODD if name[0] != "/"}
    os.mkfifo(names["pipe"])
    os.symlink(names["pipe"], names["link to a pipe"])
    os.mkdir(names["folder"])
    os.symlink("loop.txt", names["loop"])
    os.symlink("nothing", names["dangling"])
    names["long"] += "x" * 5000
    (odd / "file").touch()
    names["behind a file"] = str(odd / "file" / "x.txt")
    read, write = os.pipe()
    stdin = os.dup(0)
    os.dup2(read, 0)  # nobody writes to it
    signal.signal(signal.SIGALRM, fail_after_timeout)
    monkeypatch.chdir(odd)
    before = state(seeds, tmp_path)  # stays as it is, else this fails
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("socket.txt")
            for number, (option, words, place) in enumerate(LINES):
                some, args = ("pipe", *ODD[1 + number % 3 :: 3]), with_paths(words, seeds)
                for kind in [k for k in ODD if (k in some) is not rest]:
                    if kind == "folder" and option in FOLDERS:
                        continue
                    args[place] = names.get(kind, kind)
                    signal.alarm(120)
                    code = run(args)
                    signal.alarm(0)
                    out, err = capsys.readouterr()
                    case = f"{option}, {kind}: {' '.join(args)[:500]}: {code}: {err[:1000]} {out[:200]}"
                    assert code == 2 and len(err.splitlines()) == 1, case
                    shown = "x" * 45 if kind == "long" else args[place]
                    assert shown in err or (
                        kind in ("long", "behind a file") and option in FOLDERS
                    ), case
                    assert state(seeds, tmp_path) == before, case
    finally:
        signal.alarm(0)
        os.dup2(stdin, 0)
        for descriptor in (read, write, stdin):
            os.close(descriptor)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc/self/mem")
def test_model_that_fails_while_it_is_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.onnx"
    path.symlink_to("/proc/self/mem")
    assert run(["predict", str(path)]) == 2
    assert re.fullmatch(r"qdqtool: \S*odd\.onnx: cannot be read: .*\n", capsys.readouterr().err)


def with_paths(words: list[str], seeds: Path) -> list[str]:
    kind = next((k for k, lines in COMMANDS.items() if tuple(words) in lines), "")
    names = {"OUT": "out", "MORE": "more", "FILE": kind}
    args = [
        str(seeds / names.get(w, w)) if w in names or (seeds / w).is_file() else w for w in words
    ]
    return [(seeds / kind).read_text() if w == "TEXT" else w for w in args]


FOLDERS = (
    "build --output",
    "demo --output",
    *(
        f"{name} {option}"
        for name in ("insert", "fix", "tune", "predict")
        for option in ("--calib", "--eval")
    ),
)


def fail_after_timeout(*_: object) -> None:
    raise AssertionError("the command waits")


def test_every_file_is_read_through_the_guard() -> None:
    # Modules that read for the guard, and that read data installed with them.
    own = {"files.py", "gpus.py", "physics.py", "recording.py", "facts.py", "page.py", "tables.py"}
    own |= {"process.py", "session_memory.py", "images.py"}  # which read /proc and /sys
    children = {"worker.py", "run.py"}  # which read what builders wrote into temporary folders
    for package in ("qdqtool", "calibration"):
        for path in (Path(__file__).parents[1] / package).rglob("*.py"):
            for node in nodes_like(path, ast.Call, text=r"read_text|read_bytes|\bopen\("):
                function = node.func
                name = (
                    function.attr
                    if isinstance(function, ast.Attribute)
                    else getattr(function, "id", "")
                )
                reads = name in ("read_text", "read_bytes") or (
                    isinstance(function, ast.Name) and name == "open"
                )
                assert not reads or path.name in own | children, f"{path.name}:{node.lineno}"


def test_save_onto_an_input_of_a_library_call_is_refused(seeds: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    shutil.copytree(seeds, folder, symlinks=True, ignore=shutil.ignore_patterns("pipe"))
    insertion = qdqtool.insert(folder / "external.onnx", folder / "images", include=["conv"])
    for victim in ("w.bin", "images/a.png", "external.onnx"):
        with pytest.raises(QdqtoolError, match=re.escape(victim)):
            insertion.save(folder / victim)
    with pytest.raises(QdqtoolError, match=r"a\\x00b"):
        insertion.save(folder / "a\0b")
    insertion.save(folder / "out.onnx")


def test_two_outputs_to_one_file_are_refused(seeds: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "o")
    assert (
        run(["engine", str(seeds / "layers.json"), "--dot", out, "-o", str(tmp_path / "." / "o")])
        == 2
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "args",
    [
        ["predict", "qdq.onnx"],
        ["fix", "qdq.onnx"],
        ["log", "build.log"],
        ["extract", "qdq.onnx", "--node", "any"],
        [*INSERT, "--calib", "samples.npz"],
    ],
)
def test_output_into_a_read_only_folder_is_refused_before_the_work(
    seeds: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
) -> None:
    monkeypatch.chdir(seeds)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write anywhere
    assert run([*args, "-o", "out"]) == 2
    assert "-o out" in capsys.readouterr().err
    assert not Path("out").exists()
    with files.atomic_write("/dev/null") as file:
        file.write(b"a device is not a file of its folder")
