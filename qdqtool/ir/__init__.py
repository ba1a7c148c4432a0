"""Graph of an ONNX model: nodes, constants, Q/DQ, operators, files."""
