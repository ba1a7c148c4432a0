"""Protobuf messages of ONNX models: subgraphs, functions, weights, shape inference."""
