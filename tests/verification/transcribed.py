"""Reads the tables of a build that somebody transcribed: layers.tsv and outcomes.json of a recorded build."""

import csv
import json
from pathlib import Path
from typing import Any

from qdqtool.buildlog.layers import precision_of
from qdqtool.buildlog.types import BuiltLayer, BuiltTensor


def layers_of(path: Path) -> list[BuiltLayer]:
    """The engine's layers: name, type, types and tensors of inputs and outputs."""
    layers = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            kind, _, origin = row["type"].partition("/")
            layers.append(
                BuiltLayer(
                    row["layer"],
                    kind,
                    _tensors(row["input tensors"], row["in"], row["layer"]),
                    _tensors(row["output tensor"], row["out"], row["layer"]),
                    origin=origin,
                )
            )
    return layers


def _tensors(names: str, types: str, layer: str) -> list[BuiltTensor]:
    """``Reformatted Input Tensor 0`` was transcribed without the `` to <layer>`` that TensorRT prints behind it."""
    of = layer.rpartition(" Tensor 0 to ")[2]
    listed = [t.strip() for t in types.split(",")]
    found = [f"{n} to {of}" if n.startswith("Reformatted") else n for n in names.split(",")]
    return [
        BuiltTensor(n, precision_of(listed[min(i, len(listed) - 1)])) for i, n in enumerate(found)
    ]


def outcomes(path: Path) -> dict[str, Any]:
    """Convolution to ``inputs`` (data, residual), ``output``, ``add`` and ``pool``."""
    table: dict[str, Any] = next(iter(json.loads(path.read_text()).values()))
    return table
