"""Quantize a float model: `insert` returns the Q/DQ model, and the reason for each node that remains float."""

import qdqtool

insertion = qdqtool.insert("yolov8n.onnx", "images/", target="10.3", exclude=[r"^/model\.0/"])
insertion.save("excluded_qdq.onnx")
print(insertion)
print(len(insertion.activations), "activations and", len(insertion.weights), "weights quantized")
for skipped in insertion.skipped:
    print(f"{skipped.node}: {skipped.reason}")
