"""Structures in a graph: heads, attention, normalizations, rewrites."""
