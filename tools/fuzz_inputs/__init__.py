"""Mutated models, arrays, images, caches, tables, lists and JSON against every command."""
