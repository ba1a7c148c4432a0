"""Formats of results: text, Markdown and SARIF."""
