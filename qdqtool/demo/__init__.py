"""Demo: insert, predict and verify on a generated YOLOv8n network and generated images."""
