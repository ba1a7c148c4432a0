"""What an extraction comes to."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx

from qdqtool.extraction.private import Private
from qdqtool.extraction.shown import Shown
from qdqtool.types import TOOL_VERSION, Json, Prediction

SCHEMA = "qdqtool/extraction/1"


@dataclass(slots=True)
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
