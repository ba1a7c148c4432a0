"""Time estimates: GPUs as data, work of each layer, a physical model, calibration.

Imports only packages below it; it does not know the command line or formats.
"""
