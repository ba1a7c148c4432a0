"""Predict how TensorRT runs a Q/DQ model: the types of each convolution, and a finding for each fault."""

from collections import Counter

import qdqtool

prediction = qdqtool.predict("yolov8n_qdq.onnx", target="trt10", gpu="RTX 3060")
print(prediction)
print(
    f"{prediction.time['total_ms']} ms on {prediction.time['gpu']}, {prediction.time['float']['total_ms']} ms in FP16"
)
print(Counter(str(conv.precision) for conv in prediction.convolutions))
stem = prediction.convolution("/model.0/conv/Conv")
print(stem.name, stem.inputs, "->", stem.output, f"({stem.evidence})")
for finding in prediction.findings[:3]:
    print(finding.severity, finding.code, "at", finding.node)
