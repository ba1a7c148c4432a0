"""Checks of a model without simulation: faults of the build, scales, heads, slow shapes."""
