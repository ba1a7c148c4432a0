import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import qdqtool
from qdqtool.commands.cli import cli
from qdqtool.evidence import Evidence
from qdqtool.extraction.private import read_public_words
from qdqtool.findings.build_methods import BUILD_METHODS
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
    scopes = [(code.code, holds) for code in CODES.values() if code.passes for holds in code.holds]
    for code, holds in scopes:
        limits = {holds.evidence.choose_weaker(TARGETS[t].evidence) for t in holds.targets}
        assert limits == {holds.evidence}, code
    evidence = [CODES["SKIP-FLOAT"].scope_on(target).evidence for target in ("trt8.6", "trt10")]
    assert evidence == [Evidence.SEEN, Evidence.ASSUMED]


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
    # The schema makes these entries.
    entries = [*CODES.values(), *KNOWN_ERRORS, *NODE_KINDS.values(), *BUILD_METHODS.values()]
    assert len(entries) > 150
    fields = [getattr(e, name) for e in entries for name in e.__match_args__ if name != "pattern"]
    texts = [*(f for f in fields if isinstance(f, str)), *MEANINGS.values(), *HEADINGS.values()]
    assert [text for text in texts if text != " ".join(text.split())] == []


def test_builds_have_every_field() -> None:
    for row in read_rows(HOME / "trt" / "builds.tsv"):
        assert {row["graph"], row["is_rule_source"]} <= {"yes", "no"}, row["name"]
        fields = {name: value for name, value in row.items() if value or name != "gpu"}
        fields |= {"graph": row["graph"] == "yes", "is_rule_source": True}
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


@pytest.mark.parametrize("name", ["codes", "build_methods", "meanings", "errors"])
def test_table_sections_equal_the_whole_file(name: str) -> None:
    whole = tomllib.loads((HOME / "findings" / name).with_suffix(".toml").read_text("utf-8"))
    assert dict(read_sections((HOME / "findings" / name).with_suffix(".toml"))) == whole
