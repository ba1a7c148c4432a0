"""The graph of one ONNX model: its nodes and constants, its Q/DQ, its operators, its file."""
