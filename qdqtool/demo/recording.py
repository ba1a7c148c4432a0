"""Comparison of the demo model with a recorded build, for machines without a compiler."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from qdqtool.buildlog.agreement import BuildFacts, BuildSource
from qdqtool.buildlog.types import BuiltLayer, BuiltTensor
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import load
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from qdqtool.trt.targets import RTX
from qdqtool.util.files import write_text
from qdqtool.util.notes import Note
from qdqtool.verification.convolutions import BuiltNode
from qdqtool.verification.local_build import ConvolutionPair, to_inspector_json
from qdqtool.verification.result import Verification, verification_from_pairs

RECORDING = Path(__file__).with_name("recorded_build.json")


def hash_structure(model: Model) -> str:
    """Return the SHA-256 of a model's nodes, connections and shapes. Weights do not count."""
    rows: list[Any] = [[n.op, n.name, n.inputs, n.outputs] for n in model.nodes]
    rows += sorted([t.name, *t.dims] for t in model.initializers.values())
    rows += [
        [v.name, *(d.dim_value for d in v.type.tensor_type.shape.dim)]
        for v in model.proto.graph.input
    ]
    return hashlib.sha256(json.dumps(rows, default=list).encode()).hexdigest()


def verify_recorded(source: str | os.PathLike[str]) -> Verification | None:
    """Compare the prediction of a quantized demo model with the recorded build.

    Returns:
        The comparison; None if the recorded build is that of another model.

    Raises:
        ModelError: The model cannot be read.
    """
    model = load(source)
    recorded = json.loads(RECORDING.read_text())
    if recorded["structure"] != hash_structure(model):
        return None
    built = {row["name"]: row for row in recorded["convolutions"]}
    prediction = predict(model, RTX)
    pairs = []
    for conv in prediction.convolutions:
        node = None
        if conv.name in built:
            precision, output = (
                Precision(built[conv.name][key]) for key in ("precision", "output")
            )
            node = BuiltNode(conv.index, conv.name, conv.op, precision, output=output)
        pairs.append(ConvolutionPair(conv, node))
    facts = BuildFacts(
        BuildSource.RECORDING, (RECORDING.name,), recorded["tensorrt"], complete=True
    )
    result = verification_from_pairs(prediction, pairs, facts)
    text = "the build was recorded on another machine when this demo was written"
    result.notes.append(Note(text, code="built-before"))
    return result


def write_recorded_layers(path: Path) -> None:
    """Write the recorded build as a layer table, so that users can try ``verify`` and ``log``.

    The table has the format of the ``layers.json`` that ``qdqtool build`` writes. It has one layer
    for each convolution, with the recorded data types. Shapes, other layers and times were not
    recorded.

    Raises:
        QdqtoolError: The file cannot be written.
    """
    recorded = json.loads(RECORDING.read_text())
    layers = [
        BuiltLayer(
            row["name"],
            "CaskConvolution",
            inputs=[BuiltTensor("", Precision(row["precision"]))],
            outputs=[BuiltTensor("", Precision(row["output"]))],
            onnx_names=[row["name"]],
        )
        for row in recorded["convolutions"]
    ]
    table = {
        "what": recorded["what"],
        "builder": "tensorrt-rtx",
        "version": recorded["tensorrt"],
        **to_inspector_json(layers, []),
    }
    write_text(path, json.dumps(table, indent=1) + "\n")
