"""Node names that a build log can carry: nodes without one, with a doubled one or with signs that the log's own
format uses get another name in a temporary copy, and are mapped back."""

from __future__ import annotations

import re
from pathlib import Path

import onnx

from qdqtool import modelfile
from qdqtool.graph import Model

_SAFE = re.compile(r"[A-Za-z0-9_./:@#$%&*=|~^-]{1,200}")


def log_names(model: Model) -> dict[int, str]:
    """Node index to the name that it gets for the build; the node's own wherever the log can carry that."""
    taken: set[str] = set()
    result: dict[int, str] = {}
    for node in model.nodes:
        if node.proto.name == node.name and _SAFE.fullmatch(node.name):
            result[node.index] = node.name
            taken.add(node.name)
    for node in model.nodes:
        if node.index in result:
            continue
        name = node.name if _SAFE.fullmatch(node.name) else f"node_{node.index}"
        while name in taken:
            name = f"{name}.{node.index}"
        result[node.index] = name
        taken.add(name)
    return result


def with_log_names(model: Model, names: dict[int, str], folder: Path) -> Path:
    """The path to build from: the model's own file, or a copy in ``folder`` where a node needs another name.

    Raises:
        ModelError: An external weight file is missing.
    """
    same = all(names[n.index] == n.proto.name for n in model.nodes)
    if same and model.path and not model.path.endswith(".gz"):
        modelfile.require_weights(model)  # the compiler would say no more than "Failed to import initializer"
        return Path(model.path)
    full = modelfile.load_full(model)
    copy = onnx.ModelProto()
    copy.CopyFrom(full.proto)
    for node in model.nodes:
        copy.graph.node[node.index].name = names[node.index]
    path = folder / "model.onnx"
    modelfile.write_model(copy, path, at_once=True)  # the compiler reads it
    return path
