"""Output formats of results: text, Markdown and SARIF."""
