"""Insertion of calibrated Q/DQ pairs into float networks."""
