import csv
from pathlib import Path

from qdqtool.buildlog.layers import find_precision
from qdqtool.buildlog.types import BuiltLayer, BuiltTensor


def layers_of(path: Path) -> list[BuiltLayer]:
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
    """Return tensors.

    The transcription lacks the suffix `` to <layer>`` of ``Reformatted Input Tensor 0``.
    """
    target = layer.rpartition(" Tensor 0 to ")[2]
    precisions = [find_precision(t.strip()) for t in types.split(",")]
    tensors = [f"{n} to {target}" if n.startswith("Reformatted") else n for n in names.split(",")]
    return [BuiltTensor(n, precisions[min(i, len(precisions) - 1)]) for i, n in enumerate(tensors)]
