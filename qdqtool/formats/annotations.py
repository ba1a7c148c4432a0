"""Predictions for a code review: SARIF 2.1.0 for annotations, Markdown for job summaries."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from qdqtool.findings import codes
from qdqtool.findings.report import group_findings, list_shown_findings
from qdqtool.formats.float_names import can_use_fp16, find_float_type, name_floats
from qdqtool.formats.output import as_options
from qdqtool.formats.time_text import (
    describe_slower_fix,
    describe_times,
    list_choice_notes,
    list_time_notes,
)
from qdqtool.formats.verdicts import is_analyzed, remarks, speed_verdict, verdict
from qdqtool.ir.precision import Precision
from qdqtool.reasons.finding import Finding
from qdqtool.trt.result import ConvOutcome, Prediction
from qdqtool.util.json_text import Json
from qdqtool.util.text import one_line
from qdqtool.version import TOOL_VERSION

if TYPE_CHECKING:
    from qdqtool.timing.results import TimeEstimate

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
# SARIF rule for requirements that are not met (--require, --require-gain, --fail-on).
_REQUIREMENT = "REQUIREMENT"
_UNUSABLE = "UNUSABLE"  # SARIF rule for models that cannot be predicted
_CELL = 300  # maximum number of characters of a message in a table
_ROWS = 50  # maximum number of lines of a Markdown list; a job summary has at most 1 MiB


class ModelReview(NamedTuple):
    """Result for one model.

    Attributes:
        path: Path that the user gave. Code hosts expect a path relative to the repository.
        target: The target's name.
        prediction: The prediction; None if the model cannot be predicted.
        unmet: Requirements that are not met. Without a prediction, the errors that prevent it.
        times: Estimated time on each GPU.
        half: Whether the builder may use FP16.
    """

    path: str
    target: str
    prediction: Prediction | None
    unmet: list[str]
    times: Sequence[TimeEstimate] = ()
    half: bool = True


def to_sarif(reviews: Iterable[ModelReview]) -> Json:
    """Return a SARIF log with one run for each model.

    Code hosts require a category for each run (``automationDetails``), and a line number for each
    location, although an ONNX file has no lines.

    Source: OASIS, Static Analysis Results Interchange Format 2.1.0.
    """
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [_sarif_run(review) for review in reviews],
    }


def _sarif_run(review: ModelReview) -> Json:
    findings = review.prediction.findings if review.prediction else []
    float_type = _find_float_type(review)
    rules = [
        _sarif_rule(name, review.target) for name in dict.fromkeys(str(f.code) for f in findings)
    ]
    code, title = _REQUIREMENT, "A condition of --require, --require-gain or --fail-on is not met"
    if review.prediction is None:
        code, title = _UNUSABLE, "The model cannot be predicted"
    if review.unmet:
        level = {"level": "error"}
        description = {"text": title}
        rules.append({"id": code, "shortDescription": description, "defaultConfiguration": level})
    positions = {rule["id"]: position for position, rule in enumerate(rules)}
    results = [
        _sarif_result(
            review.path,
            positions,
            str(f.code),
            f.severity.word,
            one_line(" ".join(_describe_finding(f, review, float_type))),
            f.node,
        )
        for f in findings
    ]
    results += [
        _sarif_result(review.path, positions, code, "error", one_line(line), "")
        for line in review.unmet
    ]
    return {
        "tool": {"driver": {"name": "qdqtool", "version": TOOL_VERSION, "rules": rules}},
        "automationDetails": {"id": f"qdqtool/{review.target}/{review.path}/"},
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": {
            "target": review.target,
            "summary": review.prediction.summary() if review.prediction else None,
        },
    }


def _find_float_type(review: ModelReview) -> Precision | None:
    """Return the type of layers that are not quantized; None if there are several."""
    if review.prediction is None:
        return None
    half = review.half and can_use_fp16(review.times)
    return find_float_type(review.prediction, half=half, times=review.times)


def _describe_finding(
    finding: Finding, review: ModelReview, float_type: Precision | None
) -> tuple[str, str]:
    """Return the message and the fix of a finding, as options of the command."""
    message, fix = (
        as_options(name_floats(text, finding.code, float_type))
        for text in (finding.message, finding.fix)
    )
    return message, f"{fix} {describe_slower_fix(finding, review.times)}".strip()


def _sarif_rule(code: str, target: str) -> Json:
    entry = codes.get(code)
    parts = [("Cause", entry.cause), ("Effect in TensorRT", entry.tensorrt)]
    if entry.fix:
        parts.append(("Fix", entry.fix))
    return {
        "id": code,
        "shortDescription": {"text": entry.title},
        "fullDescription": {"text": entry.cause},
        "help": {
            "text": "\n".join(f"{name}: {text}" for name, text in parts),
            "markdown": "\n\n".join(
                f"**{name}.** {_escape_markdown(text)}" for name, text in parts
            ),
        },
        "defaultConfiguration": {"level": entry.severity_on(target).word},
        "properties": {"tags": ["TensorRT", "INT8"]},
    }


def _sarif_result(
    path: str, rules: dict[str, int], rule: str, level: str, message: str, node: str
) -> Json:
    # SARIF requires a relative reference, or a file URI for an absolute path.
    file_path = PurePath(path)
    uri = ("file://" if file_path.is_absolute() else "") + quote(
        file_path.as_posix().encode(errors="surrogateescape")
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


def to_markdown(reviews: Iterable[ModelReview]) -> str:
    """Return Markdown with a section for each model: verdict, unmet requirements, findings."""
    return "\n".join(line for review in reviews for line in _markdown_section(review))


def _markdown_section(review: ModelReview) -> list[str]:
    title = f"### {_escape_markdown(review.path)}"
    if review.prediction is None:
        problems = [f"❌ **Not predicted:** {_escape_markdown(line)}" for line in review.unmet]
        return [title, "", *problems, ""]
    lines = [f"{title} on {review.prediction.target_title}", ""]
    if not review.prediction.rejected:
        lines += _markdown_times(review.prediction, review.times)
    half = review.half and can_use_fp16(review.times)
    result = verdict(review.prediction, half=half, times=review.times)
    lines += [f"**{_escape_markdown(result)}**", ""]
    for line in review.unmet:
        lines += [f"❌ **Not met:** {_escape_markdown(one_line(line))}", ""]
    # Types and confidence of a rejected model are hypothetical.
    is_rejected = review.prediction.rejected
    for remark in () if is_rejected else remarks(review.prediction):
        lines += [_escape_markdown(remark), ""]
    findings = list_shown_findings(review.prediction)
    if not findings:
        return [*lines, "No findings.", ""]
    lines += _finding_table(findings, review)
    if not is_rejected:
        lines += _list_float_layers(review.prediction.convolutions)
    return [*lines, ""]


def _markdown_times(prediction: Prediction, times: Sequence[TimeEstimate]) -> list[str]:
    """Return paragraphs with the times on each GPU, and the notes on them."""
    lines = []
    for time in times:
        if not time.is_supported:
            lines += [f"{time.gpu.name}: no engine can be built ({time.obstacle}).", ""]
            continue
        gain, details = speed_verdict(time).text, describe_times(time)
        lines += [f"**{_escape_markdown(gain)}** {_escape_markdown(details)}.", ""]
    if not times or not is_analyzed(prediction):
        return lines
    for note in (*list_time_notes(times, prediction), *list_choice_notes(times, prediction)):
        label = f"{note.label[0].upper()}{note.label[1:]}"
        lines += [_escape_markdown(f"{label}: {note.text}"), ""]
    return lines


def _list_float_layers(convolutions: Sequence[ConvOutcome]) -> list[str]:
    names = [c.name for c in convolutions if not c.is_quantized]
    if not names:
        return []
    rows = [f"* {_table_cell(name)}" for name in names[:_ROWS]]
    if len(names) > _ROWS:
        rows.append(f"* and {len(names) - _ROWS} more")
    types = "INT8 or FP8" if any(c.is_fp8 for c in convolutions) else "INT8"
    summary = f"<details><summary>Not {types} ({len(names)})</summary>"
    return ["", summary, "", *rows, "", "</details>"]


def _finding_table(findings: list[Finding], review: ModelReview) -> list[str]:
    """Return a table with a row for each code. The first place is one that ``fix`` repairs."""
    lines = ["| | code | places | first place | fix |", "|---|---|---|---|---|"]
    float_type = _find_float_type(review)
    for same in group_findings(findings)[:_ROWS]:
        first = min(same, key=lambda f: not f.automatic)
        texts = _describe_finding(first, review, float_type)
        cells = (first.severity.word, first.code, str(len(same)), *texts)
        lines.append(f"| {' | '.join(map(_table_cell, cells))} |")
    return lines


def _table_cell(text: str) -> str:
    text = one_line(text)
    return _escape_markdown(text if len(text) <= _CELL else f"{text[: _CELL - 3]}...")


def _escape_markdown(text: str) -> str:
    return (
        re.sub(r"([\\`*_{}\[\]<>#|~!@&])", r"\\\1", one_line(text))
        .replace("\\@", "&#64;")
        .replace("://", "&#58;//")
    )
