"""One ONNX model in memory: its file, its graph, its Q/DQ, its operators."""
