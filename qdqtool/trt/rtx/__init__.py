"""Rules by which TensorRT-RTX 1.7 (its compiler Myelin) uses INT8 or FP8 kernels.

The rules were found by experiment (``tools/rtx/experiments*.py``, with the answers in
``tests/data/rtx/answers.json``). The rules of classic TensorRT are in ``qdqtool.trt.passes``.
"""
