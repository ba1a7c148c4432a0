"""Result of an extraction, and the text of a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import onnx

from qdqtool.buildlog.agreement import MismatchKind
from qdqtool.errors import DataError
from qdqtool.extraction.invariants import Invariants
from qdqtool.extraction.private import PrivateNames
from qdqtool.ir.graphsurgeon import to_graphsurgeon
from qdqtool.ir.modelfile import save
from qdqtool.ir.precision import Precision
from qdqtool.reasons.finding import list_as_json
from qdqtool.trt.result import ConvOutcome, Prediction
from qdqtool.util import limits
from qdqtool.util.files import InputFiles, forbid_overwrite, read_input
from qdqtool.util.json_text import Json, parse_json
from qdqtool.util.notes import Note
from qdqtool.util.text import as_line, as_text
from qdqtool.verification.result import VERIFICATION_SCHEMA
from qdqtool.version import TOOL_VERSION

if TYPE_CHECKING:
    import onnx_graphsurgeon

SCHEMA = "qdqtool/extraction/1"


@dataclass(slots=True, repr=False)
class Extraction:
    """A small model that reproduces findings or predictions of a large model.

    Attributes:
        proto: The small model.
        prediction: Prediction of the small model.
        whole: Prediction of the whole model.
        shown: Findings and convolutions that both models have. If the small model is private, they
            contain the new names.
        nodes: Numbers of nodes of the small model and of the whole model.
        kept: One line that describes which part of the whole model was kept.
        notes: Further notes for the user.
        checked: Outcome of the builder or command, which is the same for both models; empty without
            a check.
        private: The new names, if the small model is private, else None.
        interrupted: Whether Ctrl-C ended the shrinking.
        source: Path of the whole model; empty for a model in memory.
        read: Files that were read; :meth:`save` does not overwrite them.
    """

    proto: onnx.ModelProto
    prediction: Prediction
    whole: Prediction
    shown: Invariants
    nodes: tuple[int, int]
    kept: str
    notes: list[Note] = field(default_factory=list)
    checked: Note | str = ""
    private: PrivateNames | None = None
    interrupted: bool = False
    source: str = ""
    read: InputFiles | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        source = self.source or "a model in memory"
        return f"<Extraction: {self.nodes[0]} of the {self.nodes[1]} nodes of {source}>"

    @property
    def ok(self) -> bool:
        """Whether the extraction was not interrupted, and reproduces a finding or a convolution."""
        return not self.interrupted and bool(self.shown.findings or self.shown.convolutions)

    @property
    def model(self) -> onnx.ModelProto:
        """The small model (:attr:`proto`). Other results use the name `model` too."""
        return self.proto

    def summary(self) -> Json:
        """Return the numbers of nodes of the small model and of the whole model."""
        return {"nodes": self.nodes[0], "of": self.nodes[1]}

    def to_graphsurgeon(self) -> onnx_graphsurgeon.Graph:
        """Return a copy of the small model as an onnx-graphsurgeon graph."""
        return to_graphsurgeon(self.proto)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the small model atomically.

        Raises:
            QdqtoolError: `path` is a file that was read, the folder of `path` is missing, or the
                file cannot be written.
        """
        with forbid_overwrite(self.read):
            save(self.proto, path, source=self.source)

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "schema": SCHEMA,
            "tool": TOOL_VERSION,
            "target": self.whole.target,
            "compute_capabilities": list(self.whole.compute_capabilities),
            "nodes": self.nodes[0],
            "nodes_of_whole": self.nodes[1],
            "inputs": [v.name for v in self.proto.graph.input],
            "outputs": [v.name for v in self.proto.graph.output],
            "findings": list_as_json(self.shown.findings),
            "convolutions": [c.as_json() for c in self.shown.convolutions],
            "kept": self.kept,
            "checked": self.checked,
            "notes": list(self.notes),
            "interrupted": self.interrupted,
        }


# Text of a bug report, in Markdown ----------------------------------------------------------------


_PACKAGES = ("onnx", "onnx-graphsurgeon", "onnxruntime", "numpy", "tensorrt-rtx-cu12", "tensorrt")
_TYPES = frozenset(map(str, Precision))
_MAX_ROWS = 20


def read_verification(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file with the output of ``qdqtool verify --format json``.

    Raises:
        DataError: The file cannot be read, or has another format.
    """
    try:
        verification = parse_json(read_input(path, limits.VERIFICATION_FILE, error=DataError))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"cannot be read as JSON: {error}; give the output of 'qdqtool verify --format json'",
            os.fspath(path),
            code="wrong-format",
        ) from None
    if not isinstance(verification, dict) or verification.get("schema") != VERIFICATION_SCHEMA:
        raise DataError(
            f"is not a verification ({VERIFICATION_SCHEMA}); give the output of 'qdqtool verify "
            "--format json'",
            os.fspath(path),
            code="wrong-format",
        )
    if not isinstance(verification.get("mismatches", []), list):
        raise DataError(
            "the field 'mismatches' is not a list; run qdqtool verify again",
            os.fspath(path),
            code="file-damaged",
        )
    return verification


def format_issue(
    extraction: Extraction, command: str, model: str, verification: dict[str, Any] | None = None
) -> str:
    """Return the text of a bug report: command, prediction, mismatches and versions.

    Args:
        extraction: Result of the extraction.
        command: Command line of the extraction.
        model: File name of the small model.
        verification: JSON object of a verification of the whole model; None without a build.
    """
    shown = extraction.shown
    subject = _format_code(shown.convolutions[0].name) if shown.convolutions else "A build"
    title = ", ".join(dict.fromkeys(str(f.code) for f in shown.findings)) or subject
    lines = [
        f"# {title} on {extraction.whole.target}",
        "",
        f"{extraction.kept}.",
        "",
        f"* Model: {_format_code(model)} ({extraction.nodes[0]} of {extraction.nodes[1]} nodes)",
    ]
    if extraction.private is not None:
        same = "Names, weights and scales were replaced. This does not change the prediction"
        cut = (
            " of the part. At its first and last nodes, types can differ from those in the whole "
            "model, because the nodes before and after them were cut off"
        )
        lines += [f"* {same}{cut if extraction.nodes[0] < extraction.nodes[1] else ''}."]
    lines += [f"* {note}" for note in extraction.notes]
    lines += ["", "## Command", "", "```", _escape_fence(command), "```", "", "## Predicted", ""]
    if extraction.checked:
        lines += [f"The whole model: {extraction.checked}.", ""]
    lines += _list_findings(extraction)
    lines += _format_table(_select_outcomes(extraction)[:_MAX_ROWS])
    if verification is not None:
        lines += ["", "## Expected and seen", "", *_list_mismatches(extraction, verification)]
    build_versions = verification if extraction.private is None else None
    return as_text([*lines, "", "## Versions", "", *_list_versions(build_versions)])


def _list_findings(extraction: Extraction) -> list[str]:
    # The fixes of the whole model are printed, because a fix can depend on nodes that were cut off.
    # A private report has those of the part: their texts contain no original names.
    lines = [
        f"* **{f.code}** ({f.severity}, {f.evidence}) at {_format_code(f.node or '-')}: "
        f"{_escape_cell(f.message)} Fix: {_escape_cell(f.fix)}"
        for f in extraction.shown.findings
    ]
    return [*lines, ""] if lines else []


def _select_outcomes(extraction: Extraction) -> list[ConvOutcome]:
    names = {c.name for c in extraction.shown.convolutions}
    convolutions = extraction.prediction.convolutions
    return [c for c in convolutions if c.name in names] or convolutions


def _format_table(rows: list[ConvOutcome]) -> list[str]:
    if not rows:
        return ["No convolution."]
    return ["| convolution | computes in | reads | writes |", "|---|---|---|---|"] + [
        f"| {_format_code(c.name)} ({c.op}) | {c.precision} | {', '.join(c.inputs)} | {c.output} |"
        for c in rows
    ]


def _list_mismatches(extraction: Extraction, verification: dict[str, Any]) -> list[str]:
    """Return the lines of a table of the mismatches at nodes of the small model.

    Without such mismatches, the table has those of the whole model, unless the small model is
    private. Without any mismatch, the only line says so.
    """
    private = extraction.private
    nodes = {n.name for n in extraction.proto.graph.node}
    mismatches = [m for m in verification.get("mismatches", ()) if isinstance(m, dict)]

    def rename(mismatch: dict[str, Any]) -> str:
        name = str(mismatch.get("name", ""))
        return private.names.get(name, "") if private is not None else name

    in_extract = [m for m in mismatches if rename(m) in nodes]
    if in_extract or private is not None:
        mismatches = in_extract
    if not mismatches:
        return ["The build shows no mismatch at the nodes of the extract."]
    lines = ["| difference | where | expected | seen |", "|---|---|---|---|"]
    for mismatch in mismatches[:_MAX_ROWS]:
        lines.append(_format_mismatch(mismatch, rename(mismatch), private is not None))
    if len(mismatches) > _MAX_ROWS:
        lines += ["", f"and {len(mismatches) - _MAX_ROWS} more"]
    return lines


def _format_mismatch(mismatch: dict[str, Any], name: str, types_only: bool) -> str:
    kind = str(mismatch.get("kind", ""))
    sides = [_describe_side(mismatch.get(side), types_only) for side in ("predicted", "built")]
    cells = [kind if kind in set(MismatchKind) else "", _format_code(name), *sides]
    return f"| {' | '.join(cells)} |"


def _describe_side(fields: Any, types_only: bool) -> str:
    if not isinstance(fields, dict):
        return ""
    items = []
    for key, value in fields.items():
        values = [str(v) for v in (value if isinstance(value, list) else [value])]
        is_type = key in ("precision", "inputs", "output") and _TYPES.issuperset(values)
        if is_type or not types_only:
            items.append(f"{_escape_cell(str(key))} {_escape_cell(', '.join(values))}")
    return "; ".join(items)


def _list_versions(verification: dict[str, Any] | None) -> list[str]:
    lines = [
        f"* qdqtool {TOOL_VERSION}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}"
    ]
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    lines.append(f"* {', '.join(versions)}")
    build = verification.get("build") if verification is not None else None
    if isinstance(build, dict):
        version, device = (
            _escape_cell(str(build.get("tensorrt"))),
            _escape_cell(str(build.get("device"))),
        )
        lines.append(f"* build: TensorRT {version} on {device}")
    return lines


def _escape_cell(text: str) -> str:
    return as_line(text).replace("|", "\\|")


def _format_code(text: str) -> str:
    return f"`{_escape_cell(text).replace('`', chr(39))}`"


def _escape_fence(text: str) -> str:
    return as_line(text).replace("```", "'''")
