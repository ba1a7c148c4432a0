"""Predictions for a code review: SARIF 2.1.0 for annotations, Markdown for the summary of a job."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING
from urllib.parse import quote

from qdqtool.findings import codes
from qdqtool.formats.predict_text import decision, remarks, summary, verdict
from qdqtool.types import TOOL_VERSION, Finding, Json, Prediction
from qdqtool.util.text import one_line

if TYPE_CHECKING:
    from qdqtool.timing.estimate import TimeEstimate

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_REQUIREMENT = "REQUIREMENT"  # the rule of what --require, --require-gain and --fail-on ask for
_UNUSABLE = "UNUSABLE"  # the rule of models that cannot be predicted
_CELL = 300  # characters of a message in a table
_ROWS = 50  # lines of a list in Markdown; a job's summary holds one MiB


@dataclass(frozen=True, slots=True)
class Checked:
    """A model that was predicted, or could not be.

    Attributes:
        path: As it was given: in a repository, relative to its root.
        target: The target's name.
        prediction: What TensorRT will do; None where the model cannot be used.
        unmet: One line for each requirement that is not met, or why the model cannot be used.
        time: How long it takes on a GPU; None where nobody asked.
    """

    path: str
    target: str
    prediction: Prediction | None
    unmet: list[str]
    time: TimeEstimate | None = None


def sarif(checked: Iterable[Checked]) -> Json:
    """One run for each model, with a category of its own (``automationDetails``), as code hosts ask for.

    Source: OASIS, Static Analysis Results Interchange Format 2.1.0; a location has a line, which an ONNX file does not
    have, because code hosts show no result without one.
    """
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [_run(one) for one in checked]}


def _run(one: Checked) -> Json:
    findings = one.prediction.findings if one.prediction else []
    rules = [_rule(code, one.target) for code in dict.fromkeys(str(f.code) for f in findings)]
    own, title = (
        (_UNUSABLE, "The model cannot be predicted")
        if one.prediction is None
        else (_REQUIREMENT, "What --require, --require-gain or --fail-on asks for is not met")
    )
    if one.unmet:
        rules.append(
            {
                "id": own,
                "shortDescription": {"text": title},
                "defaultConfiguration": {"level": "error"},
            }
        )
    place = {rule["id"]: index for index, rule in enumerate(rules)}
    results = [
        _result(
            one.path, place, str(f.code), f.severity.word, one_line(f"{f.message} {f.fix}"), f.node
        )
        for f in findings
    ]
    results += [_result(one.path, place, own, "error", one_line(line), "") for line in one.unmet]
    return {
        "tool": {"driver": {"name": "qdqtool", "version": TOOL_VERSION, "rules": rules}},
        "automationDetails": {"id": f"qdqtool/{one.target}/{one.path}/"},
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": {
            "target": one.target,
            "summary": one.prediction.summary() if one.prediction else None,
        },
    }


def _rule(code: str, target: str) -> Json:
    entry = codes.get(code)
    parts = (("Cause", entry.cause), ("What TensorRT does", entry.tensorrt), ("Fix", entry.fix))
    return {
        "id": code,
        "shortDescription": {"text": entry.title},
        "fullDescription": {"text": entry.cause},
        "help": {
            "text": "\n".join(f"{name}: {text}" for name, text in parts),
            "markdown": "\n\n".join(f"**{name}.** {_escaped(text)}" for name, text in parts),
        },
        "defaultConfiguration": {"level": entry.severity_on(target).word},
        "properties": {"tags": ["TensorRT", "INT8"]},
    }


def _result(
    path: str, rules: dict[str, int], rule: str, level: str, message: str, node: str
) -> Json:
    pure = PurePath(path)  # a relative reference, or a file URI of an absolute path
    uri = ("file://" if pure.is_absolute() else "") + quote(
        pure.as_posix().encode(errors="surrogateescape")
    )
    location: Json = {
        "physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": 1}}
    }
    if node:
        location["logicalLocations"] = [{"fullyQualifiedName": node, "kind": "element"}]
    identity = hashlib.sha256(
        f"{rule}\0{node or message}".encode(errors="surrogatepass")
    ).hexdigest()
    return {
        "ruleId": rule,
        "ruleIndex": rules[rule],
        "level": level,
        "message": {"text": message},
        "locations": [location],
        "partialFingerprints": {"qdqtoolPlace/v1": identity},
    }


def markdown(checked: Iterable[Checked]) -> str:
    """For each model the verdict, what is not met, and a table of its findings, one row a code."""
    return "\n".join(line for one in checked for line in _section(one))


def _section(one: Checked) -> list[str]:
    if one.prediction is None:
        return [
            f"### {_escaped(one.path)}",
            "",
            *(f"❌ **Not predicted:** {_escaped(line)}" for line in one.unmet),
            "",
        ]
    lines = [f"### {_escaped(one.path)} on {one.target}", ""]
    if one.time is not None:
        where = summary(one.time)
        lines += [
            f"**{_escaped(' '.join(decision(one.time)))}** {_escaped(where[0].upper() + where[1:])}.",
            "",
        ]
    lines += [f"**{_escaped(verdict(one.prediction))}**", ""]
    for line in one.unmet:
        lines += [f"❌ **Not met:** {_escaped(one_line(line))}", ""]
    lines += [text for remark in remarks(one.prediction) for text in (_escaped(remark), "")]
    findings = one.prediction.findings
    if not findings:
        return [*lines, "No findings.", ""]
    same: dict[str, list[Finding]] = {}
    for finding in findings:
        same.setdefault(finding.code, []).append(finding)
    lines += ["| | code | places | first of them | what to change |", "|---|---|---|---|---|"]
    for code, (first, *more) in list(same.items())[:_ROWS]:
        cells = (first.severity.word, code, str(1 + len(more)), first.message, first.fix)
        lines.append(f"| {' | '.join(_cell(text) for text in cells)} |")
    floats = [c.name for c in one.prediction.convolutions if not c.is_int8]
    if floats:
        names = [
            *map(_cell, floats[:_ROWS]),
            *([f"and {len(floats) - _ROWS} more"] if len(floats) > _ROWS else []),
        ]
        lines += [
            "",
            f"<details><summary>Not INT8 ({len(floats)})</summary>",
            "",
            *(f"* {name}" for name in names),
            "",
            "</details>",
        ]
    return [*lines, ""]


def _cell(text: str) -> str:
    text = one_line(text)
    return _escaped(text if len(text) <= _CELL else f"{text[: _CELL - 3]}...")


def _escaped(text: str) -> str:
    """Names are other people's: nothing in them is markup, a link, a mention or the end of a cell."""
    return (
        re.sub(r"([\\`*_{}\[\]<>#|~!@&])", r"\\\1", one_line(text))
        .replace("\\@", "&#64;")
        .replace("://", "&#58;//")
    )
