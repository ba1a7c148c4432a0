"""Run models in onnxruntime: sessions, and estimates of memory and work."""
