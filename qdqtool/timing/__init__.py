"""Time estimates: table of GPUs, work of each layer, time model, calibration.

The package imports neither the command line nor the output formats.
"""
