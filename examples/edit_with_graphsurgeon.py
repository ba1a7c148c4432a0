"""Cut a network with onnx-graphsurgeon, quantize the rest, and predict it.

    python examples/edit_with_graphsurgeon.py yolov8n.onnx images/ --outputs /model.22/cv2.0/cv2.0.0/act/Mul_output_0

The example cuts the network at the tensors of `--outputs`, for example before the box decoding of a
detection head. It inserts Q/DQ pairs into the rest, edits the result as a graph, and prints the
prediction.
"""

import argparse
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs

import qdqtool


def cut(graph: gs.Graph, outputs: list[str]) -> None:
    """Make tensors the outputs of a graph, and remove the nodes that no output needs."""
    tensors = graph.tensors()
    graph.outputs = [tensors[name] for name in outputs]
    for tensor in graph.outputs:
        tensor.dtype = tensor.dtype or "float32"
    graph.cleanup().toposort()


def mark_quantized(graph: gs.Graph) -> int:
    """Prefix the names of all Q/DQ nodes, so that they are easy to see in a viewer.

    Returns:
        The number of Q/DQ nodes.
    """
    nodes = [n for n in graph.nodes if n.op in ("QuantizeLinear", "DequantizeLinear")]
    for node in nodes:
        node.name = f"qdq/{node.name}"
    return len(nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="float ONNX model")
    parser.add_argument("images", type=Path, help="folder of calibration images")
    parser.add_argument("--outputs", nargs="+", default=[], help="tensors that become the outputs")
    parser.add_argument("--target", default="trt10")
    parser.add_argument("-o", "--output", type=Path, default=Path("edited_qdq.onnx"))
    options = parser.parse_args()

    graph = gs.import_onnx(onnx.load(options.model))
    if options.outputs:
        cut(graph, options.outputs)
    result = qdqtool.insert(graph, options.images, target=options.target)

    edited = result.to_graphsurgeon()
    print(f"{mark_quantized(edited)} Q/DQ nodes inserted")
    prediction = qdqtool.predict(edited, target=options.target)
    counts = prediction.summary()
    print(f"{counts['int8']} of {counts['convolutions']} convolutions in INT8")
    onnx.save(gs.export_onnx(edited), options.output)


if __name__ == "__main__":
    main()
