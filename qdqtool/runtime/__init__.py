"""Models in onnxruntime: sessions, and the cost of running a model."""
