"""``qdqtool demo``: insert, verify and report with a generated YOLOv8n and images."""
