"""Cut a model down to a small one that still shows a finding, with other weights and names."""

import qdqtool

part = qdqtool.extract("yolov8n_naive.onnx", finding="SKIP-FLOAT", minimize=True, private=True)
part.save("small.onnx")
print(part)
print(len(part.proto.graph.node), "nodes")
