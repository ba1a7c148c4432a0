"""Comparison of two models, two builds, or a model and its build."""
