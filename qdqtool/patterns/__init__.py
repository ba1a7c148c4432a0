"""Structures in a graph that TensorRT or a quantizer treats as one: heads, attention, normalizations."""
