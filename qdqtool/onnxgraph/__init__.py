"""A Q/DQ model as ONNX nodes: what several rooms ask of it, and the one editor that changes it."""
