"""Rewrites of a Q/DQ model that need no new data, each tried, predicted and run before it is kept."""
