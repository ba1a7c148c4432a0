"""The tables of knowledge have the fields of their records, and name what exists."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest

import qdqtool
from qdqtool import knowledge
from qdqtool.base.records import contents
from qdqtool.commands.cli import cli
from qdqtool.explain.codes import CODES, Holds, _code
from qdqtool.explain.errors import ERROR, HARMLESS, KINDS, KNOWN, WARNING, KnownError, lookup
from qdqtool.explain.lines import HEADINGS, MEANINGS
from qdqtool.explain.ways import WAYS
from qdqtool.extraction.private import Public, public
from qdqtool.knowledge import entry, table
from qdqtool.knowledge.tables import paragraph, rows
from qdqtool.trt.pipeline import passes
from qdqtool.trt.targets import TARGETS, Build
from qdqtool.types import Evidence, FindingCode
from tests.raising import raises

HOME = Path(qdqtool.__file__).parent
HOLDS = {"targets": ["trt8.5"], "evidence": "seen", "source": "a log"}


def test_codes_errors_and_meanings():
    assert set(CODES) == set(get_args(FindingCode))
    assert len({k.id for k in KNOWN}) == len(KNOWN)
    for known in KNOWN:
        assert known.severity in (ERROR, WARNING, HARMLESS), known.id
        assert len(known.pattern) <= 300 and re.compile(known.pattern), known.id
        assert not re.search(r"[+*}]\)[+*{]", known.pattern), (
            f"{known.id}: a repetition of a repetition"
        )
        assert set(known.codes) <= set(CODES), known.id
    # TensorRT's own text of a code leads back to it, but for those that many causes have or that no log shows.
    explained = {
        (c.code, targets): lookup(text) for c in CODES.values() for targets, text in c.error
    }
    assert {c for c, known in explained.items() if known is None or c[0] not in known.codes} == {
        ("KERNEL-LARGE", "trt8.6"),
        ("DW-SILU", "trt8"),
        ("DW-ADD", "trt8"),
        ("QTYPE", ""),
        ("QOPERATOR", ""),
        ("QOPERATOR", "rtx"),
        ("SCALE-RANK", "trt11"),
        ("ZP-VOLUME", "trt8"),
        ("BIAS-DQ", ""),
    }
    operators = [word for kind in KINDS.values() for word in kind.operators.lower().split()]
    assert len(operators) == len(set(operators)) > 100
    for kind in KINDS.values():
        assert bool(kind.cause) == bool(kind.fix) == bool(kind.source), kind.id
        assert kind.cause.format(name="", kind="", ends="") or not kind.cause
    assert set(MEANINGS) >= {kind.__name__ for kind in passes()}
    assert HEADINGS and WAYS["trtexec"].also == ()


def test_entries_are_whole_and_no_better_than_their_targets():
    entries = [*CODES.values(), *KNOWN, *KINDS.values(), *WAYS.values()]  # made by the schema
    assert len(entries) > 150
    texts = [getattr(e, name) for e in entries for name in e._fields if name != "pattern"]
    for text in (*(t for t in texts if isinstance(t, str)), *MEANINGS.values(), *HEADINGS.values()):
        assert text == " ".join(text.split())
    # The complete 8.6 log counts; nothing that the passes show is more than assumed where no log was seen
    for code in (c for c in CODES.values() if c.passes):
        for holds in code.holds:
            for target in holds.targets:
                assert holds.evidence.weaker(TARGETS[target].evidence) == holds.evidence, (
                    code.code,
                    target,
                )
    assert CODES["SKIP-FLOAT"].on("trt8.6").evidence == Evidence.SEEN
    assert CODES["SKIP-FLOAT"].on("trt10").evidence == Evidence.ASSUMED


def test_rows_and_words() -> None:
    """Tables that code reads as they are: every field, none empty, and what they name exists."""
    for row in rows(HOME / "knowledge" / "builds.tsv"):
        assert {row["graph"], row["made_rules"]} <= {"yes", "no"}, row["name"]
        told = {name: value for name, value in row.items() if value or name != "gpu"}
        entry(
            Build,
            {"gpu": "not stated", **told, "graph": row["graph"] == "yes", "made_rules": True},
            row["name"],
        )
    for command, examples in table("examples").items():
        assert cli.get_command(click.Context(cli), command) is not None
        for example in examples:
            assert {"says", "run"} <= example.keys() <= {"says", "run", "needs"} and all(
                example.values()
            ), command
            assert example["run"].partition("qdqtool ")[2].startswith(command), example["run"]
    for name, words in zip(Public._fields, contents(public()), strict=True):  # type: ignore[attr-defined]
        assert words and len(set(words)) == len(words), name
    numbers = [code["number"] for code in table("error_forms")["code"]]
    assert (
        numbers == sorted(set(numbers)) and sum(kind.id == "other" for kind in KINDS.values()) == 1
    )


def test_nothing_is_said_twice() -> None:
    """No sentence of a table stands in it or another again; a text of TensorRT stands where its codes are told."""
    said: dict[str, list[str]] = {}
    for path in (HOME / "knowledge").glob("*.toml"):
        for where, text in texts(tomllib.loads(path.read_text("utf-8")), path.stem):
            for sentence in re.split(r"(?<=[.;:])\s+", paragraph(text)):
                if len(sentence) >= 60:
                    said.setdefault(sentence, []).append(where)
    again = {sentence: where for sentence, where in said.items() if len(where) > 1}
    assert not [s for s, where in again.items() if not all(".error." in w for w in where)], again


def texts(value: object, where: str) -> Iterator[tuple[str, str]]:
    """Each text of a table, and where it stands."""
    if isinstance(value, str):
        yield where, value
    for name, part in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from texts(part, f"{where}.{name}")


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({k: v for k, v in HOLDS.items() if k != "source"}, "entry source"),
        ({**HOLDS, "sauce": "x"}, "entry sauce"),
        ({**HOLDS, "source": 3}, "_value .source: 3 str"),
        ({**HOLDS, "source": ""}, "_value .source: '' str"),
        ({**HOLDS, "targets": [8]}, "_value .targets: [8] list str"),
        ({**HOLDS, "evidence": "heard"}, "_value 'heard'"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(given, wrong):
    with raises(ValueError, wrong):
        entry(Holds, given, "X.holds")


def test_a_code_and_an_error_are_read():
    given = dict.fromkeys(("title", "cause", "tensorrt", "log", "fix"), "text")
    code = _code(
        "X",
        {
            **given,
            "severity": "error",
            "passes": True,
            "holds": [{**HOLDS, "targets": list(TARGETS)}],
        },
    )
    assert [str(h.evidence) for h in code.holds] == ["seen", "assumed"] and code.on(
        "trt8.6"
    ).evidence == "seen"
    fields = {
        "id": "x",
        "title": "t",
        "pattern": "two  spaces",
        "severity": "error",
        "cause": "c",
        "fix": "f",
        "source": "s",
        "codes": ["ZP-NONZERO"],
    }
    known = entry(KnownError, fields, "x")
    assert known.pattern == "two  spaces" and known.codes == ("ZP-NONZERO",)


@pytest.mark.parametrize("name", ["codes", "ways", "meanings", "errors"])
def test_sections_read_one_by_one_are_what_the_whole_file_says(name: str) -> None:
    whole = tomllib.loads(Path(knowledge.__file__).with_name(f"{name}.toml").read_text("utf-8"))
    assert dict(table(name)) == whole


# The examples of docs/contributing.md, applied to a copy of the package: each works with the files that it names.

PAGE = HOME.parent / "docs" / "contributing.md"
DATA = str(HOME.parent / "tests")
EXAMPLE = re.compile(r"```(?:toml|python|tsv)\n# (\S+)\n(.*?)```", re.DOTALL)

# Where a line goes that is neither a whole file nor the end of one: behind this text.
BEHIND = {
    "qdqtool/base/notes.py": "    # Images and ranges\n",
    "qdqtool/trt/targets.py": "    for t in sorted(\n        (\n",
    "qdqtool/model/operators.py": "_TABLE: tuple[Operator, ...] = (\n",
    "qdqtool/trt/passes/slice_removal.py": "class SliceRemoval",
    "qdqtool/types.py": "FindingCode = Literal[\n",
    "qdqtool/explain/coded.py": "MADE: Mapping[type[Refusal], tuple[Made, ...]] = {\n",
    "qdqtool/explain/lint/operators.py": "    for node in view.model.nodes:\n",
    "tests/wording.py": '    """One small network for each kind that none of the others has."""\n',
}
# Statements, and how far they stand in; the others are entries of a list.
INDENTED = {
    "qdqtool/base/notes.py": 4,
    "qdqtool/explain/lint/operators.py": 8,
    "tests/wording.py": 4,
}

# The tests that hold something of every entry, on the fewest recorded builds that show all there is to state.
RUN = """
import pytest
from tests.trt import evidence
evidence.DIFFERENT = [case for case in evidence.DIFFERENT if case.startswith(("bevfusion-camera", "mobilenetv2"))]
networks = "everything_is_explained or engines_and or well_placed or every_case"  # which take their time
chosen = f"not (test_example or every_example or {networks})"
assert pytest.main([*HELD, "-n", "0", "-p", "no:hypothesispytest", "-k", chosen]) == 0  # which reads all sources
from qdqtool import predict
from qdqtool.trt.faults import ExampleFault
from tests import wording
(shown,) = (predict(model, target) for label, model, target in wording.further() if label == "example")
assert ExampleFault in {type(cause.refusal) for found in shown.findings for cause in found.causes}
"""
HELD = [
    "tests/trt/test_cases.py",
    "tests/trt/passes/test_slice_removal.py",
    "tests/trt/test_targets.py",
    "tests/explain/test_codes.py",
    "tests/knowledge",
    *(
        f"tests/explain/test_producers.py::{name}"
        for name in (
            "test_what_a_finding_reports_is_looked_for_in_one_place",
            "test_each_room_words_the_classes_it_is_asked_for",
            "test_each_code_has_a_refusal_and_each_refusal_words",
        )
    ),
]
CHECKS = {
    "error": """
from qdqtool.explain.errors import lookup
known = lookup("[E] tensor images was lost by the example")
assert known is not None and known.id == "example-lost-tensor" and known.codes == ("ZP-NONZERO",)
""",
    "code": """
from qdqtool.explain.codes import find
code = find("example_code")
assert code is not None and code.on("trt8.6").evidence == "documented" and code.on("trt10") is None
""",
    "refusal": """
from qdqtool import predict
from tests.trt.builder import Graph
g = Graph()
model = g.model(g.op("Celu", g.input(1, 8), "n"))
(found,) = (f for f in predict(model, "trt8.6").findings if f.code == "EXAMPLE-CODE")
assert (found.node, found.message, found.fix) == ("n", "n is an example of 2.", "What to change."), found
assert type(found.causes[0].refusal).__name__ == "ExampleFault" and found.causes[0].refusal.size == 2
assert "EXAMPLE-CODE" not in predict(model, "trt10").findings_by_code()
""",
    "note": """
from qdqtool.base.notes import Remark
assert Remark.EXAMPLE(count=2) == "2 tensors were renamed by the example"
""",
    "way": """
from qdqtool.explain.ways import way_named
assert way_named("example").name == "example-runtime" and way_named("example").flags("trt8.5").startswith("example")
""",
    "gpu": """
from qdqtool.timing.gpus import find
assert find("example nine thousand").name == "Example 9000" and find("Example 9000").has_int8
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
from qdqtool.explain.lines import explain_line
from tests.trt.builder import Graph
g = Graph()
prediction = predict(g.model(g.resize(g.input(1, 8, 8, 8), "up")))
assert [(e.pass_name, e.case) for e in prediction.trace if e.subject == "up"] == [("ExamplePass", "ExamplePass/lonely")]
assert explain_line("Running: ExamplePass on up").rules[0].means.startswith("What a line of it means")
""",
    "case": """
from qdqtool.trt.pipeline import cases
from qdqtool.model.modelfile import load
from tests.trt.test_cases import model_of, rested_on
for case in ("SliceRemoval/strided", "ExamplePass/lonely", "ExampleMove/q-past-example-move"):
    assert case in cases() and case in rested_on(load(model_of(case)), "trt8.5"), case
""",
}


def _changed(root: Path) -> Path:
    """A copy of the package and its tests with every example in it."""
    for name in ("qdqtool", "calibration", "tests"):  # and what is compiled of it
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
        if name in BEHIND:
            before, mark, after = old.partition(BEHIND[name])
            assert mark, name
            if name.endswith("removal.py"):  # in front of the class, and where the page says
                new = f"{before}{text}\n\n{mark}{after}".replace("COPY)", "COPY, STRIDED)").replace(
                    "LayerKind.SLICE):",
                    "LayerKind.SLICE):\n            layer.rest_on(*[STRIDED] * layer.strided)",
                )
            elif name in INDENTED:
                new = f"{before}{mark}{textwrap.indent(text, ' ' * INDENTED[name])}{after}"
            else:
                new = f"{before}{mark}{text.rstrip().rstrip(',')},\n{after}"
        elif name.endswith("meanings.toml"):
            new = old.replace("[passes]\n", text, 1)
        elif name.endswith("errors.toml"):
            new = old.replace(
                "[[error]]", f"{text}\n[[error]]", 1
            )  # the first that is found decides
        else:
            new = f"{old.rstrip()}\n{text}"
        path.write_text(new, "utf-8")
    pipeline = root / "qdqtool" / "trt" / "pipeline.py"
    mark = "from qdqtool.trt.passes.scale_activation_fusion"
    text = pipeline.read_text("utf-8").replace("ConcatRemoval)", "ConcatRemoval, ExamplePass)")
    text = text.replace(mark, f"from qdqtool.trt.passes.example_pass import ExamplePass\n{mark}", 1)
    pipeline.write_text(text, "utf-8")
    return root


def test_every_example_has_a_check() -> None:
    """And each file that a section counts one, but the builds of a case, and the place of a pass."""
    _, *sections = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    counted = {
        title[1]: (int(title[2]), len(EXAMPLE.findall(section)))
        for section in sections
        if (title := re.match(r"(.*) \((\d+) files?\b", section))
    }
    in_words = {"A case of a pass", "A pass"}
    assert {title: files - shown for title, (files, shown) in counted.items()} == {
        t: t in in_words for t in counted
    }
    assert {title.split()[-1] for title in counted} == {
        "text",
        "code",
        "refusal",
        "note",
        "build",
        "GPU",
        "target",
        "operator",
        "pass",
    }
    assert len(counted) == len(CHECKS)


def test_examples(tmp_path: Path) -> None:
    """All of them in one process."""
    succeeds(_changed(tmp_path), "".join(CHECKS.values()))


@pytest.mark.slow
def test_what_is_held_of_every_entry_is_held_of_the_examples(tmp_path: Path) -> None:
    """Of the words of each kind only that the network of the page shows that of the page."""
    succeeds(_changed(tmp_path), f"HELD = {HELD}{RUN}")


def succeeds(changed: Path, code: str) -> None:
    paths = os.pathsep.join([str(changed), str(HOME.parent)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=changed,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
