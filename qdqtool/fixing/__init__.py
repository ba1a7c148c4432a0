"""Automatic fixes of a Q/DQ model, which need no calibration."""
