"""Layout of answers: examples, width, color, progress, completion."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from qdqtool.commands import cli
from qdqtool.commands.help_sections import SECTIONS
from qdqtool.evidence import Evidence
from qdqtool.findings.report import describe_finding as worded_finding
from qdqtool.formats.output import (
    Style,
    TextPage,
    as_options,
    supports_color,
    use_option_names,
    wrap,
    wrap_command,
)
from qdqtool.formats.predict_text import render
from qdqtool.ir.modelfile import save
from qdqtool.prediction import predict
from qdqtool.reasons.compiler import CompilerFault, FaultKind, UnsupportedForm
from qdqtool.reasons.finding import Cause, Finding, Severity
from qdqtool.util import process, progress
from qdqtool.util.tables import read_sections
from tests.findings.test_causes import residual
from tests.insertion.nets import detector
from tools.fuzz_inputs.seeds import write_seeds

EXAMPLES = read_sections(Path(cli.__file__).with_name("examples.toml"))


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeds")
    write_seeds(folder)
    return folder


def test_each_command_has_examples() -> None:
    assert EXAMPLES.keys() == cli.COMMANDS.keys()
    for command, examples in EXAMPLES.items():
        assert examples and all(e.keys() <= {"says", "run", "needs"} for e in examples)
        assert all(shlex.split(e["run"])[:2] == ["qdqtool", command] for e in examples)


@pytest.mark.parametrize(("form", "has_color"), [("text", True), ("json", False), ("sarif", False)])
def test_only_text_has_color(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, has_color: bool
) -> None:
    onnx.save(residual("float"), tmp_path / "m.onnx")
    monkeypatch.setattr("qdqtool.formats.output.supports_color", lambda _: True)
    arguments = ["predict", str(tmp_path / "m.onnx"), "--format", form]
    with process.pause_gc():  # which a command of its own process does not start again
        assert ("\x1b[" in CliRunner().invoke(cli.cli, arguments, color=True).stdout) == has_color


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_options_of_examples_exist(command: str) -> None:
    options = {
        s for p in cli.cli.get_command(click.Context(cli.cli), command).params for s in p.opts
    }
    for example in EXAMPLES[command]:
        assert {w for w in shlex.split(example["run"]) if w.startswith("-")} <= options, example


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_fits_80_columns(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert all(e["run"] in re.sub(r"\\\n +", "", text) for e in EXAMPLES.get(command, []))


def test_help_of_many_options_has_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["insert", "--help"]) == 0
    sections = re.findall(r"^([A-Z].*):$", capsys.readouterr().out, re.MULTILINE)
    assert sections[0] == "Options" and sections[-2:] == ["Rarely needed", "Examples"]
    assert len(sections) > 5 and len(set(sections)) == len(sections)


def test_sections_of_help_name_options_that_exist() -> None:
    commands = [cli.cli.get_command(click.Context(cli.cli), name) for name in cli.COMMANDS]
    names = {p.name for command in commands if command is not None for p in command.params}
    listed = [name for section in SECTIONS.values() for name in section]
    assert set(listed) <= names and len(set(listed)) == len(listed)


# Commands to paste, and names that are longer than a line, are not broken.
UNBROKEN = re.compile(r"trtexec |^\s{0,4}\S+$|qdqtool: ")


@pytest.mark.parametrize(
    "command",
    [
        "predict qdq.onnx",
        "predict qdq.onnx --all",
        "predict qdq.onnx --gpu T4",
        "predict float.onnx --target 8.6",
        "insert float.onnx --calib samples.npz --include conv -o new.onnx --all",
        "verify own.onnx own.log --allow-partial",
        "compare float.onnx inserted.onnx",
        "fix qdq.onnx -o fixed.onnx",
        "extract qdq.onnx --finding OUT-FLOAT -o part.onnx",
        "explain SKIP-FLOAT",
        "explain --list",
        "explain 'Missing scale and zero-point for tensor x'",
        "explain 'ConstShuffleFusion: Fusing a with b'",
        "explain --for deepstream",
        "log own.log",
        "log own.log --all",
        "engine layers.json",
        "gpus",
        "gpus T4",
        "gpus --sources",
        "demo -o a-folder-whose-name-is-not-short --size 64 --images 2",
    ],
)
def test_answers_fit_80_columns(
    command: str, seeds: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(seeds)
    assert cli.run(shlex.split(command)) in (0, 1), capsys.readouterr().err
    lines = [line for line in capsys.readouterr().out.splitlines() if not UNBROKEN.search(line)]
    assert lines and [line for line in lines if len(line) > 80] == []


def run_in_terminal(
    arguments: str, columns: int, folder: Path, stdout: int | None = None, **variables: str
) -> str:
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "qdqtool", *shlex.split(arguments)],
        stdout=terminal if stdout is None else stdout,
        stderr=terminal,
        cwd=folder,
        env={**environment, "TERM": "xterm", "PYTHONPATH": str(Path.cwd()), **variables},
    )
    os.close(terminal)
    output = b""
    with contextlib.suppress(OSError):  # Linux: the terminal was closed
        while chunk := os.read(master, 1 << 16):
            output += chunk
    os.close(master)
    process.wait()
    return output.decode().replace("\r\n", "\n")


PROGRESS = re.compile(r"\x1b\[(\?25|2K|1A)")  # control codes of bars


@pytest.mark.parametrize(
    ("arguments", "columns"),
    [
        ("predict qdq.onnx --gpu 'Orin Nano 8GB'", 80),
        ("predict qdq.onnx --gpu 'Orin Nano 8GB'", 120),
        ("predict qdq.onnx float.onnx --gpu T4 --gpu L4", 80),
        ("insert float.onnx --calib samples.npz --include conv -o new.onnx", 120),
        ("verify own.onnx own.log --allow-partial", 80),
        ("compare qdq.onnx", 120),  # an error
        ("compare own.onnx own.log --fail-on slower", 80),  # an answer and an error
    ],
)
def test_terminal_lines_are_wrapped_and_colored(arguments: str, columns: int, seeds: Path) -> None:
    """A color ends on its line, so that wrapped lines and pagers show it correctly."""
    text = run_in_terminal(arguments, columns, seeds)
    lines = [x for x in text.splitlines() if not PROGRESS.search(x)]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert max(map(len, plain)) <= columns
    assert all(line.count("\x1b[0m") == line.count("\x1b[") / 2 for line in lines)
    assert any("\x1b[" in line for line in lines) or "qdqtool: " in plain[0]


@pytest.mark.parametrize("columns", [60, 120])
def test_errors_fit_their_terminal_if_the_output_is_redirected(columns: int, seeds: Path) -> None:
    text = run_in_terminal("predict qdq.onnx --gpu 'RTX 3600'", columns, seeds, subprocess.DEVNULL)
    assert 0.75 * columns < max(map(len, text.splitlines())) <= columns and text.count("\n") > 1


@pytest.mark.parametrize(
    ("variables", "has_color"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"TERM": "dumb"}, False),
    ],
)
def test_color_depends_on_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], has_color: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terminal: Any = SimpleNamespace(isatty=lambda: True)
    assert supports_color(terminal) == has_color and not supports_color(io.StringIO())


def test_each_line_of_a_wrapped_paragraph_has_its_style() -> None:
    page = TextPage(20)
    page.fill("about 1.2x faster, but not certain", 4, "  ", Style.UNCLEAR)
    page.add_heading("A heading of two lines")
    page.add_lines("plain \x1b[1m")
    assert page.colored().splitlines() == [
        "  \x1b[1;33mabout 1.2x faster,\x1b[0m",
        "    \x1b[1;33mbut not certain\x1b[0m",
        "",
        "\x1b[1mA heading of two\x1b[0m",
        "  \x1b[1mlines\x1b[0m",
        "plain \\u001b[1m",
    ]
    assert "\x1b" not in str(page)


@pytest.mark.parametrize("length", [24, 26, 28, 30])
def test_names_that_fit_the_width_fit_with_any_indent(length: int) -> None:
    page, name = TextPage(30), "n" * length
    page.fill(f"{name} and {name}", 9, "  place: ")
    page.fill(name, 8, "      - ")
    page.add_lines(f"  INT8 -> INT8  {name}")
    page.add_command("Try:", f"qdqtool a --exclude {name}")
    assert sum(name in line for line in page.lines) == 5
    assert max(map(len, page.lines)) <= (30 if length < 30 else 32)  # the backslash of the command


@pytest.mark.parametrize("width", [40, 57])
@pytest.mark.parametrize("value", ["'a model'", "/1:fp16" + 9 * ",/m/2:int8", f"'a b{60 * ',c'}'"])
def test_wrapped_command_is_the_same_command(width: int, value: str) -> None:
    command = f"trtexec --fp16 --onnx={value} --verbose > build.log 2>&1"
    lines = wrap_command(command, width, "Build:   ", 11)
    assert len(lines) > 1 and max(map(len, lines)) <= width
    assert not any(line.endswith("> \\") for line in lines)
    pasted = "\n".join(lines).removeprefix("Build:").replace("\\\n", "")
    assert shlex.split(pasted) == shlex.split(command)


def test_parameters_in_answers_become_options() -> None:
    option, other = "`exclude`", "`unify=False`"
    assert use_option_names(
        {
            "notes": [option, 1, None],
            "refused": [{"c": other, "node": "`exclude`"}],
            "findings": [{"fix": option, "convolutions": [option]}],
            "model": option,
        }
    ) == {
        "notes": ["--exclude", 1, None],
        "refused": [{"c": "--no-unify", "node": "`exclude`"}],
        "findings": [{"fix": "--exclude", "convolutions": [option]}],
        "model": "`exclude`",
    }
    assert wrap("leave it out with `exclude`", 2, 16, "- ") == [
        "- leave it out",
        "  with --exclude",
    ]


def test_progress_is_one_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 10_000, 25))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    assert list(progress.track_progress(iter(range(8)), "Calibrating", 8)) == list(range(8))
    assert [re.findall(r"\d+", line) for line in capsys.readouterr().err.splitlines()] == [
        ["2", "8", "25", "75"],
        ["5", "8", "62", "150"],
    ]
    assert (
        list(progress.track_progress([1, 2], "Short")) == [1, 2] and capsys.readouterr().err == ""
    )


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("qdqtool pre", {"predict"}),
        ("qdqtool predict --fa", {"--fail-on"}),
        ("qdqtool predict --format s", {"sarif"}),
        ("qdqtool predict --gpu jetson-orin-na", {"jetson-orin-nano-8gb"}),
        ("qdqtool predict --gpu Or", {"orin-nano-8gb", "jetson-agx-orin-64gb"}),
        ("qdqtool report --gpu 3060-t", {"3060-ti"}),
        ("qdqtool insert --target rt", {"rtx1"}),
        ("qdqtool insert --preprocess image", {"imagenet", "imagenet-stretch"}),
        ("qdqtool fix --only zp", {"ZP-NONZERO"}),
        ("qdqtool predict --fail-on er", {"error"}),
        ("qdqtool explain skip", {"SKIP-FLOAT"}),
        ("qdqtool predict --for tr", {"trtexec"}),
    ],
)
def test_completion(
    words: str,
    completions: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    for shell in ("bash", "zsh", "fish"):
        monkeypatch.setenv("_QDQTOOL_COMPLETE", f"{shell}_complete")
        if shell == "fish":
            monkeypatch.setenv("COMP_CWORD", words.split()[-1])
        assert cli.run([]) == 0
        assert set(re.findall(r"[\w-]+", capsys.readouterr().out)) >= completions
        monkeypatch.setenv("_QDQTOOL_COMPLETE", f"{shell}_source")
        cli.run([])
        assert "_QDQTOOL_COMPLETE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        *(
            ({"_QDQTOOL_COMPLETE": f"{shell}_source"}, "COMP_WORDS")
            for shell in ("bash", "zsh", "fish")
        ),
        (
            {"_QDQTOOL_COMPLETE": "bash_complete", "COMP_WORDS": "qdqtool ins", "COMP_CWORD": "1"},
            "insert",
        ),
        ({}, "Usage: "),
    ],
)
def test_completion_of_the_script(variables: dict[str, str], text: str) -> None:
    """The script prints the overview without an import of click, unless it completes."""
    done = subprocess.run(
        [sys.executable, "-m", "qdqtool"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        done.returncode == 0
        and text in done.stdout
        and ("Usage: " in done.stdout) == (not variables)
    )


@pytest.fixture
def insert_detector(current_folder: Path) -> list[str]:
    save(detector(), "m.onnx")
    np.savez("x.npz", images=np.random.default_rng(0).random((2, 3, 64, 64), np.float32))
    return "insert m.onnx --calib x.npz --method max -o q.onnx".split()


def test_answers_for_a_detector_are_short(
    insert_detector: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(insert_detector) == 0
    short = capsys.readouterr().out
    assert "warning" in short or len(short.splitlines()) <= 25
    texts = []
    for more in ([], ["--layers"], ["--all"]):
        assert cli.run(["predict", "q.onnx", "--gpu", "RTX 3060", *more]) == 0
        texts.append(capsys.readouterr().out)
    lengths = [len(text.splitlines()) for text in texts]
    assert lengths[0] <= 25 < lengths[1] < lengths[2]
    assert cli.run(["predict", "q.onnx", "--gpu", "RTX 3060", "--format", "json"]) == 0
    codes = {f["code"] for f in json.loads(capsys.readouterr().out)["findings"]}
    assert "INPUT-CONVERSION" in codes and all(code in texts[0] for code in codes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("leave it float with `exclude`", "leave it float with --exclude"),
        ("(`head='none'` quantizes it)", "(--head none quantizes it)"),
        ("use one method, or `unify=False`", "use one method, or --no-unify"),
        ("`exclude_op` Conv: no such", "--exclude-op Conv: no such"),
        ("give images (`data`)", "give images (--calib)"),
        ("`thing='a head'` stays", "`thing='a head'` stays"),
        ("run `pip install qdqtool`", "run `pip install qdqtool`"),
        ("`Model` is a class", "`Model` is a class"),
        ("nothing to say", "nothing to say"),
    ],
)
def test_parameters_become_options(text: str, expected: str) -> None:
    assert as_options(text) == expected


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--exclude", "."], ["--exclude ."]),
        (["--smooth", ".5"], ["--smooth 0.5", "(--head none"]),
        (["--smooth", ".5", "--format", "json"], ["--smooth 0.5", "(--head none"]),
    ],
)
def test_parameters_in_notes_and_errors_become_options(
    insert_detector: list[str],
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    shown: list[str],
) -> None:
    assert cli.run([*insert_detector, "--losses", "0", *options]) == (
        2 if "--exclude" in options else 0
    )
    text = " ".join("".join(capsys.readouterr()).split())
    assert all(option in text for option in shown) and "`" not in text


def test_names_and_words_of_compilers_stay_as_they_are() -> None:
    """Quoted words of compilers may look like parameters."""
    prediction = predict(residual(), "rtx1.7")
    for fault, values, quoted in (
        (
            FaultKind.OPERATOR,
            (UnsupportedForm.ASPECT, "Resize"),
            "currently as `keep_aspect_ratio_policy`.",
        ),
        (FaultKind.ZERO_POINT, ("z",), "has `zero_point` which is not an initializer"),
        (
            FaultKind.FLOAT_TYPES,
            ("Conv", "Half", "Float"),
            "`input` and `kernel` must be of same type",
        ),
    ):
        prediction.findings[:] = [
            Finding(
                "BUILD-FAILS",
                Severity.ERROR,
                "",
                (Cause(CompilerFault("", "at `excluded`", fault, values)),),
                Evidence.SEEN,
                worded_finding,
                target="rtx1.7",
            )
        ]
        text = " ".join(str(render(prediction)).split())
        assert quoted in text and "at `excluded`" in text
