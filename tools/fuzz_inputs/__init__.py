"""Damaged models, arrays, images, caches, tables, lists and JSON for every command."""
