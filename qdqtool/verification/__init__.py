"""Comparison of a prediction with a real build."""
