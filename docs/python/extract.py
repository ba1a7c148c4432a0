"""Extract a small model that still shows a finding, with other weights and names."""

import qdqtool

# A model with a finding: the residual inputs are not quantized.
broken = qdqtool.insert("yolov8n.onnx", "images/", residual="none", max_images=4)
part = qdqtool.extract(broken.model, finding="SKIP-FLOAT", minimize=True, private=True)
part.save("small.onnx")
print(part)
print(len(part.proto.graph.node), "nodes")
