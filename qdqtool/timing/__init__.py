"""How long an engine takes: GPUs as data, what each layer computes and moves, a physical model, calibration, estimates.

Imports downward only: ``qdqtool.ir.graph``, ``qdqtool.types`` and ``qdqtool.buildlog``; nothing of it knows of the
command line or of rendering.
"""
