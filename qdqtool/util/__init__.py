"""Code that all packages share: records, texts, files, limits."""
