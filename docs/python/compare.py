"""Compare two models: which layers lost or gained INT8, and how well the results agree on images."""

import qdqtool

result = qdqtool.compare("yolov8n.onnx", "yolov8n_qdq.onnx", data="other-images/", max_images=16)
print(result)
print(result.summary()["gained_int8"], "convolutions gained INT8")
agreement = result.agreement
print(f"{agreement.measure.metric}: {agreement.measure.value} on {agreement.images} images")
for note in result.notes:
    print(note)
