"""What findings, log lines and error texts mean, and what to do."""
