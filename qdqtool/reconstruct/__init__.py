"""ONNX graphs rebuilt from what a build log says."""
