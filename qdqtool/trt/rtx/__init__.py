"""TensorRT-RTX 1.7: which convolutions its compiler (Myelin) computes in INT8, from rules found by experiment.

Classic TensorRT decides elsewhere (``qdqtool.trt.passes``); nothing here says anything about it. The experiments are
``tests/trt/rtx/experiments*.py``, their answers ``tests/data/rtx/answers.json``.
"""
