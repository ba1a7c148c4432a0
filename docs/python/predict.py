"""Predict what TensorRT makes of a Q/DQ model: the types of each convolution, and a finding for each fault."""

from collections import Counter

import qdqtool

prediction = qdqtool.predict("yolov8n_qdq.onnx", target="trt10")
print(prediction)
print(Counter(str(conv.precision) for conv in prediction.convolutions))
stem = prediction.convolution("/model.0/conv/Conv")
print(stem.name, stem.inputs, "->", stem.output, f"({stem.evidence})")
for finding in prediction.findings[:3]:
    print(finding.severity, finding.code, "at", finding.node)
