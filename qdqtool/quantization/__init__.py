"""Quantization of a float model: ``insert`` in one precision, or in the better one."""
