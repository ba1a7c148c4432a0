"""The protobuf of an ONNX model, below the graph: subgraphs, external data, shapes."""
