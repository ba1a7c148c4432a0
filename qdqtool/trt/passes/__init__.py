"""The passes of TensorRT's optimizer, one module for each."""
