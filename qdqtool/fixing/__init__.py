"""Rewrites of a Q/DQ model that need no new data."""
