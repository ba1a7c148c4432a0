"""One HTML page about a model: TensorRT's outcome as graph, tables and plots.

Data flows one way. Results of other packages become dataclasses (:mod:`qdqtool.reporting.data`),
which one module for each part of the page creates. The template and assets
(:mod:`qdqtool.reporting.page`) show them. This package computes no results of its own.
"""
