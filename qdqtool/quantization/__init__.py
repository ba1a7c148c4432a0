"""Quantization of a float model: ``insert`` in INT8, in FP8, or in the better of the two."""
