"""Mutated logs, layer JSONs and profiles against the build reader and everything made of it."""
