"""TensorRT-RTX 1.7: convolutions that its compiler (Myelin) computes in INT8.

The rules were found by experiment (``tests/trt/rtx/experiments*.py``, with the answers in
``tests/data/rtx/answers.json``). Those of classic TensorRT are in ``qdqtool.trt.passes``.
"""
