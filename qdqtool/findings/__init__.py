"""Findings: their codes, messages and explanations, and the checks of a model."""
