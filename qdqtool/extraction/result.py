"""What an extraction comes to, and what an issue needs beside the small model."""

import importlib.metadata
import os
import platform
from dataclasses import dataclass, field
from typing import Any

import onnx

from qdqtool.buildlog.agreement import MismatchKind
from qdqtool.errors import DataError
from qdqtool.extraction.private import Private
from qdqtool.extraction.select import Shown
from qdqtool.ir.modelfile import save
from qdqtool.types import (
    TOOL_VERSION,
    VERIFICATION_SCHEMA,
    ConvOutcome,
    Json,
    Precision,
    Prediction,
)
from qdqtool.util import limits
from qdqtool.util.files import InputFiles, forbid_overwrite, read_input
from qdqtool.util.json_text import parse_json
from qdqtool.util.notes import Note
from qdqtool.util.text import as_line, as_text

SCHEMA = "qdqtool/extraction/1"


@dataclass(slots=True, repr=False)
class Extraction:
    """A small model and why it is what it is.

    Attributes:
        proto: The small model.
        prediction: Its prediction.
        whole: The prediction of the model that it was taken from.
        shown: What it shows as the whole does; of a private model, what its own prediction says of the same nodes.
        nodes: Number of its nodes, and of the whole's.
        kept: What was kept and why, one line.
        notes: What else the user should know.
        checked: What the builder or the command does with both, in words; empty where none was asked.
        private: The names that were replaced; None where nothing was.
        interrupted: Whether Ctrl-C ended the shrinking.
        source: Path of the model that it was taken from; empty for one in memory.
        read: The files that were read, none of which :meth:`save` overwrites.
    """

    proto: onnx.ModelProto
    prediction: Prediction
    whole: Prediction
    shown: Shown
    nodes: tuple[int, int]
    kept: str
    notes: list[Note] = field(default_factory=list)
    checked: str = ""
    private: Private | None = None
    interrupted: bool = False
    source: str = ""
    read: InputFiles | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"<Extraction: {self.nodes[0]} of {self.nodes[1]} nodes, {self.kept}>"

    @property
    def ok(self) -> bool:
        """Whether it shows what it was taken for, to the end."""
        return not self.interrupted and bool(self.shown.findings or self.shown.convolutions)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the small model, atomically.

        Raises:
            QdqtoolError: ``path`` is a file that was read, its folder is missing, or it cannot be written.
        """
        with forbid_overwrite(self.read):
            save(self.proto, path, source=self.source)

    def as_json(self) -> Json:
        return {
            "schema": SCHEMA,
            "tool": TOOL_VERSION,
            "target": self.whole.target,
            "compute_capabilities": list(self.whole.compute_capabilities),
            "nodes": self.nodes[0],
            "nodes_of_whole": self.nodes[1],
            "inputs": [v.name for v in self.proto.graph.input],
            "outputs": [v.name for v in self.proto.graph.output],
            "findings": [f.as_json() for f in self.shown.findings],
            "convolutions": [c.as_json() for c in self.shown.convolutions],
            "kept": self.kept,
            "checked": self.checked,
            "notes": list(self.notes),
            "interrupted": self.interrupted,
        }


# What an issue needs beside a small model, in Markdown ---------------------------------------------------------------


_PACKAGES = ("onnx", "onnx-graphsurgeon", "onnxruntime", "numpy", "tensorrt-rtx-cu12", "tensorrt")
_TYPES = frozenset(map(str, Precision))
_MOST = 20


def read_verification(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``qdqtool verify --format json`` wrote.

    Raises:
        DataError: It cannot be read, or is something else.
    """
    try:
        data = parse_json(read_input(path, limits.VERIFICATION_FILE, error=DataError))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"cannot be read as JSON: {error}", os.fspath(path), code="wrong-format"
        ) from None
    if not isinstance(data, dict) or data.get("schema") != VERIFICATION_SCHEMA:
        raise DataError(
            f"is not what 'qdqtool verify --format json' writes ({VERIFICATION_SCHEMA})",
            os.fspath(path),
            code="wrong-format",
        )
    if not isinstance(data.get("mismatches", []), list):
        raise DataError(
            "its mismatches are not a list; run qdqtool verify again",
            os.fspath(path),
            code="file-damaged",
        )
    return data


def report(
    result: Extraction, command: str, model: str, verification: dict[str, Any] | None = None
) -> str:
    """The text of an issue: what was predicted, what was seen, and with what.

    Args:
        result: The extract.
        command: The command line.
        model: Name of the extract's file.
        verification: The JSON of a verification of the whole model.
    """
    private = result.private
    shown = result.shown
    codes = list(dict.fromkeys(str(f.code) for f in shown.findings))
    title = ", ".join(codes) or (
        _code(shown.convolutions[0].name) if shown.convolutions else "A build"
    )
    lines = [f"# {title} on {result.whole.target}", "", result.kept + ".", ""]
    lines += [f"* Model: {_code(model)} ({result.nodes[0]} of {result.nodes[1]} nodes)"]
    if private is not None:
        lines += ["* Names, weights and scales were replaced; the prediction is the same."]
    lines += [f"* {note}" for note in result.notes]
    lines += ["", "## Command", "", "```", _fenced(command), "```", "", "## Predicted", ""]
    if result.checked:
        lines += [f"The whole model: {result.checked}.", ""]
    kept = [
        f
        for f in result.prediction.findings
        if any(f.code == s.code and f.node == s.node for s in shown.findings)
    ]
    for finding in kept:
        lines += [
            f"* **{finding.code}** ({finding.severity}, {finding.evidence}) at {_code(finding.node or '-')}: "
            f"{_plain(finding.message)} Fix: {_plain(finding.fix)}"
        ]
    names = {c.name for c in shown.convolutions}
    rows = [
        c for c in result.prediction.convolutions if c.name in names
    ] or result.prediction.convolutions
    lines += [*([""] if kept else []), *_table(rows[:_MOST])]
    if verification is not None:
        lines += ["", "## Expected and seen", "", *_seen(result, verification)]
    lines += ["", "## Versions", "", *_versions(verification if private is None else None)]
    return as_text(lines)


def _table(rows: list[ConvOutcome]) -> list[str]:
    if not rows:
        return ["No convolution."]
    return ["| convolution | computes in | reads | writes |", "|---|---|---|---|"] + [
        f"| {_code(c.name)} ({c.op}) | {c.precision} | {', '.join(c.inputs)} | {c.output} |"
        for c in rows
    ]


def _seen(result: Extraction, verification: dict[str, Any]) -> list[str]:
    """The mismatches of a verification about what is in the extract; all of them where none is."""
    private = result.private
    there = {n.name for n in result.proto.graph.node}
    all_of_it = [m for m in verification.get("mismatches", ()) if isinstance(m, dict)]

    def name(mismatch: dict[str, Any]) -> str:
        text = str(mismatch.get("name", ""))
        return private.names.get(text, "") if private is not None else text

    chosen = [m for m in all_of_it if name(m) in there]
    if not chosen and private is None:
        chosen = all_of_it
    if not chosen:
        return ["The build shows no mismatch at the nodes of the extract."]
    lines = ["| what | where | expected | seen |", "|---|---|---|---|"]
    for mismatch in chosen[:_MOST]:
        sides = [_side(mismatch.get(key), private is not None) for key in ("predicted", "built")]
        kind = str(mismatch.get("kind", ""))
        cells = [kind if kind in set(MismatchKind) else "", _code(name(mismatch)), *sides]
        lines.append(f"| {' | '.join(cells)} |")
    if len(chosen) > _MOST:
        lines += ["", f"and {len(chosen) - _MOST} more"]
    return lines


def _side(fields: Any, types_only: bool) -> str:
    if not isinstance(fields, dict):
        return ""
    items = []
    for key, value in fields.items():
        values = [str(v) for v in (value if isinstance(value, list) else [value])]
        if not types_only or (
            key in ("precision", "inputs", "output") and _TYPES.issuperset(values)
        ):
            items.append(f"{_plain(str(key))} {_plain(', '.join(values))}")
    return "; ".join(items)


def _versions(verification: dict[str, Any] | None) -> list[str]:
    lines = [
        f"* qdqtool {TOOL_VERSION}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    ]
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    lines.append(f"* {', '.join(found)}")
    build = verification.get("build") if verification is not None else None
    if isinstance(build, dict):
        lines.append(
            f"* build: TensorRT {_plain(str(build.get('tensorrt')))} on {_plain(str(build.get('device')))}"
        )
    return lines


def _plain(text: str) -> str:
    """One line that cannot end a table's row."""
    return as_line(text).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{_plain(text).replace('`', chr(39))}`"


def _fenced(text: str) -> str:
    return as_line(text).replace("```", "'''")
