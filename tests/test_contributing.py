import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import FrameType

import pytest

from qdqtool.commands.cli import run

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "contributing.md"
DATA = str(ROOT / "tests")
EXAMPLE = re.compile(r"```(?:toml|python|tsv)\n# (\S+)\n(.*?)```", re.DOTALL)

# Text after which an example is inserted. Examples of other files are whole files or go to the end.
AFTER = {
    "qdqtool/util/notes.py": "    # Images and ranges\n",
    "qdqtool/trt/targets.py": "    for t in sorted(\n        (\n",
    "qdqtool/ir/operators.py": "_TABLE: tuple[Operator, ...] = (\n",
    "qdqtool/trt/passes/slice_removal.py": "class SliceRemoval",
    "qdqtool/findings/lint/operators.py": "    for node in view.model.nodes:\n",
    "qdqtool/findings/error_forms.toml": "what = 'a node that moves values'\noperators = '''\n",
    "tests/wording.py": '    """Yield a small network for each wording that no other network shows."""\n',
}
# Indentation of the examples that are statements or lines. The others are entries of a list.
INDENTED = {
    "qdqtool/util/notes.py": 4,
    "qdqtool/findings/lint/operators.py": 8,
    "qdqtool/findings/error_forms.toml": 0,
    "tests/wording.py": 4,
}

# Tests that check every entry.
RUN_TESTS = """
import pytest
assert pytest.main([*TESTS, "-n", "0", "-p", "no:hypothesispytest"]) == 0
from qdqtool import predict
from qdqtool.reasons.operators import ExampleReason
from tests import wording
(prediction,) = (predict(model, target) for label, model, target in wording.single_wordings() if label == "example")
assert ExampleReason in {type(cause.reason) for finding in prediction.findings for cause in finding.causes}
"""
TESTS = [
    "tests/trt/test_cases.py",
    "tests/trt/passes/test_slice_removal.py",
    "tests/trt/passes/test_example_pass.py",
    "tests/trt/test_targets.py",
    "tests/findings",
]

CHECKS = {
    "error": """
from qdqtool.findings.errors import lookup
error = lookup("[E] tensor images was lost by the example")
assert error is not None and error.id == "example-lost-tensor" and error.codes == ("ZP-NONZERO",)
""",
    "code": """
from qdqtool.findings.codes import find
code = find("example_code")
assert code is not None and code.scope_on("trt8.6").evidence == "documented" and code.scope_on("trt10") is None
""",
    "reason": """
from qdqtool import predict
from tests.trt.builder import Graph
g = Graph()
model = g.model(g.op("Celu", g.input(1, 8), "n"))
(finding,) = (f for f in predict(model, "trt8.6").findings if f.code == "EXAMPLE-CODE")
assert (finding.node, finding.message, finding.fix) == ("n", "n is an example of 2.", "The change to make.")
assert type(finding.causes[0].reason).__name__ == "ExampleReason" and finding.causes[0].reason.size == 2
assert "EXAMPLE-CODE" not in predict(model, "trt10").findings_by_code()
""",
    "method": """
from qdqtool.findings.build_methods import find_build_method
assert find_build_method("example").name == "example-runtime" and find_build_method("example").flags("trt8.5").startswith("example")
""",
    "gpu": """
from qdqtool.timing.gpus import find_gpu
assert find_gpu("example nine thousand").name == "Example 9000" and find_gpu("Example 9000").has_int8
assert find_gpu("Example 9000").int8_rate_over_fp16 == 2
""",
    "target": """
from qdqtool import predict
from tests.trt.builder import Graph
g = Graph()
prediction = predict(g.model(g.conv(g.input(1, 16, 8, 8), "c", 16)), "trt9.9")
assert prediction.summary()["int8"] == 1 and str(prediction.convolutions[0].evidence) == "assumed"
for target, evidence in (("trt8.6", "documented"), ("trt9.9", "assumed")):
    g = Graph()
    faulty = g.model(g.conv(g.input(1, 16, 8, 8), "c", 16))
    zero = next(t for t in faulty.graph.initializer if t.name == "c.in.Q.zero")
    zero.raw_data = bytes([3])
    findings = predict(faulty, target).findings
    assert ("ZP-NONZERO", evidence) in [(f.code, str(f.evidence)) for f in findings], findings
""",
    "operator": """
import numpy as np
from qdqtool import predict
from tests.trt.builder import Graph
for op, int8 in (("ExampleMove", True), ("Unknown", False)):
    g = Graph()
    x = g.op(op, g.conv(g.input(1, 16, 8, 8), "a", 16), "move")
    prediction = predict(g.model(g.conv(x, "b", 16)))
    assert prediction.convolution("a").int8_in_int8_out is int8, op
""",
    "pass": """
from qdqtool import predict
from qdqtool.findings.lines import explain_line
from tests.trt.builder import Graph
g = Graph()
prediction = predict(g.model(g.resize(g.resize(g.input(1, 8, 8, 8), "up"), "up2")))
assert [(e.pass_name, e.case) for e in prediction.trace if e.subject == "up"] == [("ExamplePass", "ExamplePass/two-resizes")] * 2
assert "up + up2" in [layer.name for layer in prediction.layers]
assert explain_line("Running: ExamplePass on up").rules[0].means.startswith("The meaning of its lines")
""",
    "case": """
from qdqtool.trt.pipeline import cases
from qdqtool.ir.modelfile import load
from tests.trt.evidence import simulate
from tests.trt.test_cases import model_of
for case in ("SliceRemoval/strided", "ExamplePass/two-resizes", "ExampleMove/q-past-example-move"):
    assert case in cases() and case in simulate(load(model_of(case)), "trt8.5").cases, case
""",
}


def section(title: str) -> str:
    return PAGE.read_text("utf-8").partition(f"\n## {title}")[2].partition("\n## ")[0]


def copy_with_examples(root: Path, text: str) -> Path:
    for name in ("qdqtool", "calibration", "tests"):  # with compiled files, which saves time
        shutil.copytree(
            ROOT / name,
            root / name,
            ignore=lambda folder, _: ["data"] if folder == DATA else [],
        )
    (root / "tests" / "data").symlink_to(Path(DATA) / "data")
    shutil.copy(ROOT / "pyproject.toml", root)
    for name, example in EXAMPLE.findall(text):
        path = root / name
        if not path.exists():
            path.write_text(example, "utf-8")
            continue
        old = path.read_text("utf-8")
        if name in AFTER:
            before, mark, rest = old.partition(AFTER[name])
            assert mark, name
            if name.endswith("removal.py"):  # before the class, and where the page says
                new = f"{before}{example}\n\n{mark}{rest}".replace(
                    "COPY)", "COPY, STRIDED)"
                ).replace(
                    "LayerKind.SLICE):",
                    "LayerKind.SLICE):\n            layer.add_cases(*[STRIDED] * layer.has_steps)",
                )
            elif name in INDENTED:
                new = f"{before}{mark}{textwrap.indent(example, ' ' * INDENTED[name])}{rest}"
            else:
                new = f"{before}{mark}{example.rstrip().rstrip(',')},\n{rest}"
        elif name.endswith("meanings.toml"):
            new = old.replace("[passes]\n", example, 1)
        elif name.endswith("errors.toml"):
            new = old.replace("[[error]]", f"{example}\n[[error]]", 1)  # the first match decides
        else:
            new = f"{old.rstrip()}\n{example}"
        reason = re.search(r"report\.add\((\w+)", example)
        if reason is not None:  # the page leaves the import out
            mark = "from qdqtool.reasons.operators import (\n"
            assert mark in new
            new = new.replace(mark, f"{mark}    {reason[1]},\n")
        path.write_text(new, "utf-8")
    if not (root / "qdqtool" / "trt" / "passes" / "example_pass.py").exists():
        return root
    pipeline = root / "qdqtool" / "trt" / "pipeline.py"
    mark = "from qdqtool.trt.passes._infra"
    old = pipeline.read_text("utf-8")
    new = re.sub(r"(MERGING = \([^)]*?),?\s*\)", r"\1, ExamplePass)", old, count=1)
    new = new.replace(mark, f"from qdqtool.trt.passes.example_pass import ExamplePass\n{mark}", 1)
    pipeline.write_text(new, "utf-8")
    return root


def test_contributing_page_has_the_files_that_it_counts() -> None:
    """The builds of a case and the place of a pass are described in words."""
    _, *sections = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    missing = {
        title[1]: int(title[2]) - len(EXAMPLE.findall(section))
        for section in sections
        if (title := re.match(r"(.*) \((\d+) files?\b", section))
    }
    assert missing == {title: title in {"A case of a pass", "A pass"} for title in missing}
    topics = "text code reason method GPU target operator pass"
    assert {title.split()[-1] for title in missing} == set(topics.split())
    assert len(missing) == len(CHECKS)


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("".join(CHECKS.values()), id="checks of the page"),
        pytest.param(f"TESTS = {TESTS}{RUN_TESTS}", id="tests of entries", marks=pytest.mark.slow),
    ],
)
def test_contributing_page_examples_work(tmp_path: Path, code: str) -> None:
    run_python(copy_with_examples(tmp_path, PAGE.read_text("utf-8")), code)


def run_python(folder: Path, code: str) -> None:
    result = run_in(folder, "-c", code)
    assert result.returncode == 0, f"{result.stdout[-2000:]}{result.stderr[-2000:]}"


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=480,
    )


def test_contributing_page_names_are_in_their_files() -> None:
    """Names are written as `name` of `file`."""
    names = re.findall(r"`(\w+)`(?: in| of)\s+`([\w/]+\.\w+)`", PAGE.read_text("utf-8"))
    assert len(names) > 10
    for name, path in names:
        defined = rf"^ *(?:def|class) {name}\b|^{name}\b.* =|^\[{name}\]"
        assert re.search(defined, (ROOT / path).read_text("utf-8"), re.MULTILINE), (name, path)


# Your first change ------------------------------------------------------------------------------

FIRST = section("Your first change")
# Commands that the test does not run: they need a network, a repository or minutes.
NOT_RUN = ("git ", "make ", "rm ", ".venv/bin/ruff ", ".venv/bin/pytest -q tests/findings ")


def console_calls(text: str) -> list[tuple[str, str]]:
    calls = "".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL)).split("$ ")[1:]
    return [(command, output) for command, _, output in (call.partition("\n") for call in calls)]


def to_pattern(output: str) -> str:
    return "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r" *\n"
        for line in output.splitlines()
    )


def to_arguments(command: str) -> list[str]:
    program, *arguments = shlex.split(command)
    name = program.removeprefix(".venv/bin/")
    assert name in ("python", "pytest", "qdqtool"), command
    return arguments if name == "python" else ["-m", name, *arguments]


# Run the commands in one process, because they compute the same findings.
SNAPSHOT_COMMANDS = """
import sys
from tests.snapshots.__main__ import main
for command in sys.argv[1:]:
    sys.argv = command.split()
    print("exit code", main())
"""


def test_first_change_has_the_output_of_its_commands(tmp_path: Path) -> None:
    folder = copy_with_examples(tmp_path, FIRST)
    calls = [call for call in console_calls(FIRST) if not call[0].startswith(NOT_RUN)]
    assert len(calls) == 5
    for command, output in calls[:3]:
        result = run_in(folder, *to_arguments(command))
        assert result.returncode == 0, (command, result.stderr[-2000:])
        assert re.fullmatch(to_pattern(output), result.stdout), (command, result.stdout)
    (show, differences), (update, renewed) = calls[3:]
    commands = [command.removeprefix(".venv/bin/python -m ") for command in (show, update)]
    result = run_in(folder, "-c", SNAPSHOT_COMMANDS, *commands)
    expected = f"{differences}exit code 1\n{renewed}exit code 0\n"
    assert re.fullmatch(to_pattern(expected), result.stdout), result.stdout + result.stderr[-2000:]


def test_first_change_names_make_targets_and_tests() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    commands = [command for command, _ in console_calls(FIRST)]
    for command in commands:
        words = shlex.split(command)
        assert words[0] != "make" or words[1] in targets, command
        for word in words:
            assert not word.startswith("tests/") or (ROOT / word).exists(), command
    assert [c.split()[0] for c in commands].count("make") == 2


@pytest.mark.slow
def test_first_change_passes_lint_and_tests(tmp_path: Path) -> None:
    folder = copy_with_examples(tmp_path, FIRST)
    names = {name for name, _ in EXAMPLE.findall(FIRST) if name.endswith(".py")}
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    # The test inserts the import at the first place, not in alphabetical order.
    for arguments in (["check", "--ignore", "I001"], ["format", "--check"]):
        result = subprocess.run(
            [ruff, *arguments, *sorted(names)],
            cwd=folder,
            check=False,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stdout
    for command in (
        ".venv/bin/python -m tests.snapshots --update explain findings",
        ".venv/bin/pytest -q tests/findings tests/snapshots",
    ):
        assert command in FIRST
        result = run_in(folder, *to_arguments(command), *["-n", "0"] * ("pytest" in command))
        assert result.returncode == 0, result.stdout[-2000:]


# One convolution ---------------------------------------------------------------------------------


def test_path_of_one_convolution_is_that_of_the_page(current_folder: Path) -> None:
    rows = re.findall(r"^\| `(\S+)` \| `(\w+)` \|", section("One convolution"), re.MULTILINE)
    assert len(rows) == 15
    exec(compile(dict(EXAMPLE.findall(FIRST))["write_small.py"], "write_small.py", "exec"), {})
    remaining = list(reversed(rows))

    def follow(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and remaining:
            name, function = remaining[-1]
            if frame.f_code.co_name == function and frame.f_code.co_filename == str(ROOT / name):
                remaining.pop()

    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        assert run(["predict", "small.onnx"]) == 0
    finally:
        sys.setprofile(before)
    assert not remaining, f"not called in this order: {remaining[-1]}"
