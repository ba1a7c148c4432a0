"""Findings: codes, messages and explanations, and the checks of a model."""
