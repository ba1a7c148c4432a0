"""The tables of knowledge have the fields of their dataclasses, and name what exists."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from qdqtool import knowledge
from qdqtool.explain.codes import CODES, Holds, _code
from qdqtool.explain.errors import ERROR, HARMLESS, KNOWN, WARNING, KnownError
from qdqtool.explain.lines import HEADINGS, MEANINGS
from qdqtool.explain.ways import WAYS
from qdqtool.knowledge import entry, table
from qdqtool.trt.rules import passes
from qdqtool.trt.targets import TARGETS
from qdqtool.types import Evidence, FindingCode

HOLDS = {"targets": ["trt8.5"], "evidence": "seen", "source": "a log"}


def test_codes_are_those_of_the_type():
    assert set(CODES) == set(get_args(FindingCode))


def test_every_entry_is_whole_and_its_texts_are_paragraphs():
    entries = [*CODES.values(), *KNOWN, *WAYS.values()]  # made by the schema
    assert len(entries) > 150
    texts = [getattr(e, f.name) for e in entries for f in dataclasses.fields(e) if f.name != "pattern"]
    for text in (*(t for t in texts if isinstance(t, str)), *MEANINGS.values(), *HEADINGS.values()):
        assert text == " ".join(text.split())


def test_evidence_is_no_better_than_the_targets():
    """The complete 8.6 log counts; nothing that the passes show is more than assumed where no log was seen."""
    for code in (c for c in CODES.values() if c.passes):
        for holds in code.holds:
            for target in holds.targets:
                assert holds.evidence.weaker(TARGETS[target].evidence) == holds.evidence, (code.code, target)
    assert CODES["SKIP-FLOAT"].on("trt8.6").evidence == Evidence.SEEN
    assert CODES["SKIP-FLOAT"].on("trt10").evidence == Evidence.ASSUMED


def test_known_errors():
    assert len({k.id for k in KNOWN}) == len(KNOWN)
    for known in KNOWN:
        assert known.severity in (ERROR, WARNING, HARMLESS), known.id
        assert len(known.pattern) <= 300 and re.compile(known.pattern), known.id
        assert not re.search(r"[+*}]\)[+*{]", known.pattern), f"{known.id}: a repetition of a repetition"
        assert set(known.codes) <= set(CODES), known.id


def test_meanings_name_passes():
    assert set(MEANINGS) >= {kind.__name__ for kind in passes()}
    assert HEADINGS and WAYS["trtexec"].also == ()


@pytest.mark.parametrize(("given", "wrong"), [
    ({k: v for k, v in HOLDS.items() if k != "source"}, "no source"),
    ({**HOLDS, "sauce": "x"}, "unknown sauce"),
    ({**HOLDS, "source": 3}, "3 is not a str"),
    ({**HOLDS, "source": ""}, "is not a str"),
    ({**HOLDS, "targets": [8]}, "not a list of str"),
    ({**HOLDS, "evidence": "heard"}, "heard"),
])
def test_an_entry_that_does_not_fit_is_refused(given, wrong):
    with pytest.raises(ValueError, match=wrong):
        entry(Holds, given, "X.holds")


def test_a_code_and_an_error_are_read():
    given = dict.fromkeys(("title", "cause", "tensorrt", "log", "fix"), "text")
    code = _code("X", {**given, "severity": "error", "passes": True, "holds": [{**HOLDS, "targets": list(TARGETS)}]})
    assert [str(h.evidence) for h in code.holds] == ["seen", "assumed"] and code.on("trt8.6").evidence == "seen"
    fields = {"id": "x", "title": "t", "pattern": "two  spaces", "severity": "error", "cause": "c", "fix": "f",
              "source": "s", "codes": ["ZP-NONZERO"]}
    known = entry(KnownError, fields, "x")
    assert known.pattern == "two  spaces" and known.codes == ("ZP-NONZERO",)


@pytest.mark.parametrize("name", ["codes", "ways", "meanings", "errors"])
def test_sections_read_one_by_one_are_what_the_whole_file_says(name: str) -> None:
    whole = tomllib.loads(Path(knowledge.__file__).with_name(f"{name}.toml").read_text("utf-8"))
    assert dict(table(name)) == whole
