"""Simulation of TensorRT's optimizer on Q/DQ networks."""
