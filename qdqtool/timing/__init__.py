"""Time estimates: table of GPUs, work of each layer, time model, calibration.

The package does not import the command line or the formats.
"""
