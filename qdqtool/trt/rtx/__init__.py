"""Rules of TensorRT-RTX 1.7: the convolutions that its compiler (Myelin) computes in INT8 or FP8.

The rules were found by experiment (``tools/rtx/experiments*.py``, with the answers in
``tests/data/rtx/answers.json``). The rules of classic TensorRT are in ``qdqtool.trt.passes``.
"""
