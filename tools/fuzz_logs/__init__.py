"""Damaged logs, layer JSONs and profiles for the log reader."""
