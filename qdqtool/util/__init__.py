"""Utilities of all packages: records, texts, files, limits, processes."""
