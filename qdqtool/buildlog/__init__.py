"""Readers of TensorRT build logs, layer listings and profiles."""
