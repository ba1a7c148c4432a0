"""What `qdqtool demo` needs: a YOLOv8-style model and images, both generated, so that nothing has to be downloaded."""
