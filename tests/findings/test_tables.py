"""The tables of `qdqtool.findings` have valid fields, and name existing codes and targets."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import qdqtool
from qdqtool.commands.cli import cli
from qdqtool.evidence import Evidence
from qdqtool.extraction.private import read_public_words
from qdqtool.findings.codes import CODES, CodeScope, read_code
from qdqtool.findings.errors import (
    ERROR,
    HARMLESS,
    KNOWN_ERRORS,
    NODE_KINDS,
    WARNING,
    KnownError,
    lookup,
)
from qdqtool.findings.lines import HEADINGS, MEANINGS
from qdqtool.findings.ways import BUILD_METHODS
from qdqtool.ir.operators import OPERATORS
from qdqtool.trt.pipeline import passes
from qdqtool.trt.targets import TARGETS, PublishedBuild
from qdqtool.util.records import field_values
from qdqtool.util.tables import join_lines, make_entry, read_rows, read_sections

HOME = Path(qdqtool.__file__).parent
HOLDS = {"targets": ["trt8.5"], "evidence": "seen", "source": "a log"}

# Codes that `explain` does not find from their error text: the text has many causes, or no log shows it.
TEXTS_OF_SEVERAL_CAUSES = {
    ("KERNEL-LARGE", "trt8.6"),
    ("DW-SILU", "trt8"),
    ("DW-ADD", "trt8"),
    ("GROUP-KERNELS", "trt10 trt11"),
    ("STEM-POOL", "trt10 trt11"),
    ("QTYPE", ""),
    ("QOPERATOR", ""),
}


def test_codes_error_text_leads_back_to_the_code() -> None:
    texts = {(c.code, targets): lookup(text) for c in CODES.values() for targets, text in c.error}
    others = {key for key, error in texts.items() if error is None or key[0] not in error.codes}
    assert others == TEXTS_OF_SEVERAL_CAUSES


def test_codes_evidence_is_at_most_that_of_the_target() -> None:
    for code in (c for c in CODES.values() if c.passes):
        for holds in code.holds:
            for target in holds.targets:
                limited = holds.evidence.weaker(TARGETS[target].evidence)
                assert limited == holds.evidence, (code.code, target)
    assert CODES["SKIP-FLOAT"].scope_on("trt8.6").evidence == Evidence.SEEN
    assert CODES["SKIP-FLOAT"].scope_on("trt10").evidence == Evidence.ASSUMED


def test_known_errors_have_bounded_patterns_and_codes() -> None:
    assert len({error.id for error in KNOWN_ERRORS}) == len(KNOWN_ERRORS)
    for error in KNOWN_ERRORS:
        assert error.severity in (ERROR, WARNING, HARMLESS), error.id
        assert len(error.pattern) <= 300 and re.compile(error.pattern), error.id
        assert not re.search(r"[+*}]\)[+*{]", error.pattern), f"{error.id}: nested repetition"
        assert set(error.codes) <= set(CODES), error.id


def test_error_kinds_share_no_operator_and_are_complete() -> None:
    operators = [word for kind in NODE_KINDS.values() for word in kind.operators.lower().split()]
    assert len(operators) == len(set(operators)) > 100
    missing = [name for name in OPERATORS if name.lower() not in operators]
    assert not missing, "add the operators to a [[node]] of error_forms.toml"
    for kind in NODE_KINDS.values():
        assert bool(kind.cause) == bool(kind.fix) == bool(kind.source), kind.id
        assert kind.cause.format(name="", kind="", ends="") or not kind.cause
    assert [kind.id for kind in NODE_KINDS.values()].count("other") == 1


def test_error_form_codes_are_sorted_and_unique() -> None:
    numbers = [
        code["number"] for code in read_sections(HOME / "findings" / "error_forms.toml")["code"]
    ]
    assert numbers == sorted(set(numbers))


def test_meanings_exist_for_every_pass() -> None:
    assert set(MEANINGS) >= {kind.__name__ for kind in passes()}
    assert HEADINGS and BUILD_METHODS["trtexec"].also == ()


def test_entries_are_single_lines() -> None:
    entries = [
        *CODES.values(),
        *KNOWN_ERRORS,
        *NODE_KINDS.values(),
        *BUILD_METHODS.values(),
    ]  # made by the schema
    assert len(entries) > 150
    fields = [getattr(e, name) for e in entries for name in e.__match_args__ if name != "pattern"]
    texts = [field for field in fields if isinstance(field, str)]
    for text in (*texts, *MEANINGS.values(), *HEADINGS.values()):
        assert text == " ".join(text.split())


def test_builds_have_every_field() -> None:
    for row in read_rows(HOME / "trt" / "builds.tsv"):
        assert {row["graph"], row["made_rules"]} <= {"yes", "no"}, row["name"]
        fields = {name: value for name, value in row.items() if value or name != "gpu"}
        fields |= {"graph": row["graph"] == "yes", "made_rules": True}
        make_entry(PublishedBuild, {"gpu": "not stated", **fields}, row["name"])


def test_examples_name_their_command() -> None:
    for command, examples in read_sections(HOME / "commands" / "examples.toml").items():
        assert cli.get_command(click.Context(cli), command) is not None
        for example in examples:
            assert {"says", "run"} <= example.keys() <= {"says", "run", "needs"}, command
            assert all(example.values()), command
            assert example["run"].partition("qdqtool ")[2].startswith(command), example["run"]


def test_public_words_are_unique() -> None:
    for words in field_values(read_public_words()):
        assert words and len(set(words)) == len(words), words


def test_tables_repeat_no_sentence() -> None:
    """Error texts of TensorRT are an exception: several codes can have one text."""
    places: dict[str, list[str]] = {}
    for path in (HOME / "findings").glob("*.toml"):
        for place, text in texts(tomllib.loads(path.read_text("utf-8")), path.stem):
            for sentence in re.split(r"(?<=[.;:])\s+", join_lines(text)):
                if len(sentence) >= 60:
                    places.setdefault(sentence, []).append(place)
    for sentence, repeated in places.items():
        assert len(repeated) == 1 or all(".error." in p for p in repeated), (sentence, repeated)


def texts(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Yield each text of a table and its place."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from texts(part, f"{place}.{name}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"targets": [], "evidence": "seen"}, "'source'", id="field-missing"),
        pytest.param({**HOLDS, "sauce": "x"}, "'sauce'", id="field-unknown"),
        pytest.param({**HOLDS, "source": ""}, "X.holds.source: the text is empty", id="text-empty"),
        pytest.param({**HOLDS, "evidence": "heard"}, "'heard'", id="choice-unknown"),
    ],
)
def test_entry_refuses_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_entry(CodeScope, fields, "X.holds")


def test_code_evidence_depends_on_target() -> None:
    texts = dict.fromkeys(("title", "cause", "tensorrt", "log", "fix"), "text")
    holds = [{**HOLDS, "targets": list(TARGETS)}]
    code = read_code("X", {**texts, "severity": "error", "passes": True, "holds": holds})
    assert [str(h.evidence) for h in code.holds] == ["seen", "assumed"]
    assert code.scope_on("trt8.6").evidence == "seen"


def test_error_pattern_keeps_its_spaces() -> None:
    fields = dict.fromkeys(("id", "title", "severity", "cause", "fix", "source"), "text")
    error = make_entry(
        KnownError, {**fields, "pattern": "two  spaces", "codes": ["ZP-NONZERO"]}, "x"
    )
    assert error.pattern == "two  spaces" and error.codes == ("ZP-NONZERO",)


@pytest.mark.parametrize("name", ["codes", "ways", "meanings", "errors"])
def test_table_sections_equal_the_whole_file(name: str) -> None:
    whole = tomllib.loads((HOME / "findings" / name).with_suffix(".toml").read_text("utf-8"))
    assert dict(read_sections((HOME / "findings" / name).with_suffix(".toml"))) == whole


# The examples of docs/contributing.md, applied to a copy of the package.

PAGE = HOME.parent / "docs" / "contributing.md"
DATA = str(HOME.parent / "tests")
EXAMPLE = re.compile(r"```(?:toml|python|tsv)\n# (\S+)\n(.*?)```", re.DOTALL)

# Text after which an example is inserted. Examples of other files are whole files or go to the end.
AFTER = {
    "qdqtool/util/notes.py": "    # Images and ranges\n",
    "qdqtool/trt/targets.py": "    for t in sorted(\n        (\n",
    "qdqtool/ir/operators.py": "_TABLE: tuple[Operator, ...] = (\n",
    "qdqtool/trt/passes/slice_removal.py": "class SliceRemoval",
    "qdqtool/findings/lint/operators.py": "    for node in view.model.nodes:\n",
    "tests/wording.py": '    """Yield a small network for each wording that no other network shows."""\n',
}
# Indentation of the examples that are statements. The others are entries of a list.
INDENTED = {
    "qdqtool/util/notes.py": 4,
    "qdqtool/findings/lint/operators.py": 8,
    "tests/wording.py": 4,
}

# Tests that check every entry.
RUN_TESTS = """
import pytest
selection = "not contributing_page"
assert pytest.main([*TESTS, "-n", "0", "-p", "no:hypothesispytest", "-k", selection]) == 0
from qdqtool import predict
from qdqtool.reasons.operators import ExampleReason
from tests import wording
(prediction,) = (predict(model, target) for label, model, target in wording.single_wordings() if label == "example")
assert ExampleReason in {type(cause.reason) for finding in prediction.findings for cause in finding.causes}
"""
TESTS = [
    "tests/trt/test_cases.py",
    "tests/trt/passes/test_slice_removal.py",
    "tests/trt/test_targets.py",
    "tests/findings/test_codes.py",
    "tests/findings",
    "tests/findings/test_producers.py",
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
from qdqtool.findings.ways import find_build_method
assert find_build_method("example").name == "example-runtime" and find_build_method("example").flags("trt8.5").startswith("example")
""",
    "gpu": """
from qdqtool.timing.gpus import find_gpu
assert find_gpu("example nine thousand").name == "Example 9000" and find_gpu("Example 9000").has_int8
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
prediction = predict(g.model(g.resize(g.input(1, 8, 8, 8), "up")))
assert [(e.pass_name, e.case) for e in prediction.trace if e.subject == "up"] == [("ExamplePass", "ExamplePass/lonely")]
assert explain_line("Running: ExamplePass on up").rules[0].means.startswith("The meaning of its lines")
""",
    "case": """
from qdqtool.trt.pipeline import cases
from qdqtool.ir.modelfile import load
from tests.trt.evidence import simulate
from tests.trt.test_cases import model_of
for case in ("SliceRemoval/strided", "ExamplePass/lonely", "ExampleMove/q-past-example-move"):
    assert case in cases() and case in simulate(load(model_of(case)), "trt8.5").cases, case
""",
}


def copy_with_examples(root: Path) -> Path:
    """Copy the package and its tests, and apply every example."""
    for name in ("qdqtool", "calibration", "tests"):  # with compiled files, which saves time
        shutil.copytree(
            HOME.parent / name,
            root / name,
            ignore=lambda folder, _: ["data"] if folder == DATA else [],
        )
    (root / "tests" / "data").symlink_to(Path(DATA) / "data")
    shutil.copy(HOME.parent / "pyproject.toml", root)
    for name, text in EXAMPLE.findall(PAGE.read_text("utf-8")):
        path = root / name
        if not path.exists():
            path.write_text(text, "utf-8")
            continue
        old = path.read_text("utf-8")
        if name in AFTER:
            before, mark, rest = old.partition(AFTER[name])
            assert mark, name
            if name.endswith("removal.py"):  # before the class, and where the page says
                new = f"{before}{text}\n\n{mark}{rest}".replace("COPY)", "COPY, STRIDED)").replace(
                    "LayerKind.SLICE):",
                    "LayerKind.SLICE):\n            layer.add_cases(*[STRIDED] * layer.has_steps)",
                )
            elif name in INDENTED:
                new = f"{before}{mark}{textwrap.indent(text, ' ' * INDENTED[name])}{rest}"
            else:
                new = f"{before}{mark}{text.rstrip().rstrip(',')},\n{rest}"
        elif name.endswith("meanings.toml"):
            new = old.replace("[passes]\n", text, 1)
        elif name.endswith("errors.toml"):
            new = old.replace("[[error]]", f"{text}\n[[error]]", 1)  # the first match decides
        else:
            new = f"{old.rstrip()}\n{text}"
        if name == "qdqtool/findings/lint/operators.py":  # the page leaves the import out
            mark = "from qdqtool.reasons.operators import (\n"
            assert mark in new
            new = new.replace(mark, f"{mark}    ExampleReason,\n")
        path.write_text(new, "utf-8")
    pipeline = root / "qdqtool" / "trt" / "pipeline.py"
    mark = "from qdqtool.trt.passes._infra"
    text = pipeline.read_text("utf-8")
    text = re.sub(r"(MERGING = \([^)]*?),?\s*\)", r"\1, ExamplePass)", text, count=1)
    text = text.replace(mark, f"from qdqtool.trt.passes.example_pass import ExamplePass\n{mark}", 1)
    pipeline.write_text(text, "utf-8")
    return root


def test_contributing_page_has_the_files_that_it_counts() -> None:
    """The builds of a case and the place of a pass are described in words."""
    _, *sections = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    missing = {
        title[1]: int(title[2]) - len(EXAMPLE.findall(section))
        for section in sections
        if (title := re.match(r"(.*) \((\d+) files?\b", section))
    }
    in_words = {"A case of a pass", "A pass"}
    assert missing == {title: title in in_words for title in missing}
    topics = "text code reason method GPU target operator pass"
    assert {title.split()[-1] for title in missing} == set(topics.split())
    assert len(missing) == len(CHECKS)


def test_contributing_page_examples_work(tmp_path: Path) -> None:
    run_python(copy_with_examples(tmp_path), "".join(CHECKS.values()))


@pytest.mark.slow
def test_contributing_page_examples_pass_the_tests_of_entries(tmp_path: Path) -> None:
    run_python(copy_with_examples(tmp_path), f"TESTS = {TESTS}{RUN_TESTS}")


def run_python(folder: Path, code: str) -> None:
    paths = os.pathsep.join([str(folder), str(HOME.parent)])
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert result.returncode == 0, f"{result.stdout[-2000:]}{result.stderr[-2000:]}"


def test_ids_of_errors_are_unique() -> None:
    """If two entries had one id, the second entry would replace the first."""
    text = (HOME / "findings" / "errors.toml").read_text(encoding="utf-8")
    ids = [entry["id"] for entry in tomllib.loads(text)["error"]]
    assert not [name for name, count in Counter(ids).items() if count > 1]
