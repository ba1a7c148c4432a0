"""What an extraction comes to."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import onnx

from qdqtool.base.parameters import typed
from qdqtool.extraction.private import Private, Shown
from qdqtool.io.files import Guard, not_over
from qdqtool.model.modelfile import save
from qdqtool.types import TOOL_VERSION, Json, Prediction

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
    notes: list[str] = field(default_factory=list)
    checked: str = ""
    private: Private | None = None
    interrupted: bool = False
    source: str = ""
    read: Guard | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"<Extraction: {self.nodes[0]} of {self.nodes[1]} nodes, {self.kept}>"

    @property
    def ok(self) -> bool:
        """Whether it shows what it was taken for, to the end."""
        return not self.interrupted and bool(self.shown.findings or self.shown.convolutions)

    @typed
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the small model, atomically.

        Raises:
            QdqtoolError: ``path`` is a file that was read, its folder is missing, or it cannot be written.
        """
        with not_over(self.read):
            save(self.proto, path, source=self.source)

    def as_json(self) -> Json:
        return {
            "schema": SCHEMA, "tool": TOOL_VERSION, "target": self.whole.target,
            "nodes": self.nodes[0], "nodes_of_whole": self.nodes[1],
            "inputs": [v.name for v in self.proto.graph.input], "outputs": [v.name for v in self.proto.graph.output],
            "findings": [f.as_json() for f in self.shown.findings],
            "convolutions": [c.as_json() for c in self.shown.convolutions],
            "kept": self.kept, "checked": self.checked, "notes": list(self.notes),
            "interrupted": self.interrupted,
        }
