"""``qdqtool demo``: insert, verify and report for a generated YOLOv8n and images."""
