"""Text, SARIF and annotations made from results."""
