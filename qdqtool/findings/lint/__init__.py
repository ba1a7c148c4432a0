"""Checks of a model without simulation: build faults, scales, heads, unfavorable shapes."""
