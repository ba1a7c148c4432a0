"""Protobuf messages of ONNX models: subgraphs, functions, external weights, shape inference."""
