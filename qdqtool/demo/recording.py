"""A recording of what TensorRT-RTX made of the demo model, for machines without a compiler.

The table holds names and data types of convolutions and nothing of the compiler's own output;
``python -m tests.tools.record_demo`` makes it anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from qdqtool.agreement import BuildFacts, BuildSource
from qdqtool.graph import Model
from qdqtool.modelfile import load
from qdqtool.prediction import predict
from qdqtool.trt.targets import TARGETS
from qdqtool.types import Precision
from qdqtool.verification.pairs import Pair
from qdqtool.verification.products import BuiltNode
from qdqtool.verification.rtx import of_pairs
from qdqtool.verified import Verification

RECORDING = Path(__file__).with_name("recorded_build.json")


def structure(model: Model) -> str:
    """SHA-256 over nodes, connections and the shapes of initializers: equal for models that differ in values alone."""
    rows: list[Any] = [[n.op, n.name, n.inputs, n.outputs] for n in model.nodes]
    rows += sorted([t.name, *t.dims] for t in model.initializers.values())
    rows += [[v.name, *(d.dim_value for d in v.type.tensor_type.shape.dim)] for v in model.proto.graph.input]
    return hashlib.sha256(json.dumps(rows, default=list).encode()).hexdigest()


def verify_recorded(source: str | os.PathLike[str]) -> Verification | None:
    """Holds the prediction for a quantized demo model against the recorded build.

    Args:
        source: Path of the model.

    Returns:
        The verification; None when the recording is of another model than this one.

    Raises:
        ModelError: The model cannot be read.
    """
    model = load(source)
    recorded = json.loads(RECORDING.read_text())
    if recorded["structure"] != structure(model):
        return None
    built = {row["name"]: row for row in recorded["convolutions"]}
    prediction = predict(model, TARGETS["rtx1.7"])
    pairs = []
    for conv in prediction.convolutions:
        row = built.get(conv.name)
        node = None if row is None else BuiltNode(
            conv.index, conv.name, conv.op, Precision(row["precision"]), output=Precision(row["output"])
        )  # fmt: skip
        pairs.append(Pair(conv, node))
    result = of_pairs(prediction, pairs, BuildFacts(
        BuildSource.RECORDING, (RECORDING.name,), recorded["tensorrt"], complete=True,
    ))  # fmt: skip
    result.notes.append("the build was made when this demo was written, not on this machine")
    return result
