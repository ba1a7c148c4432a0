"""Time estimates: table of GPUs, work of each layer, time model, calibration.

Imports only packages below it; it does not know the command line or formats.
"""
