"""Graph of an ONNX model: nodes, constants, Q/DQ, operators, and reading and writing of files."""
