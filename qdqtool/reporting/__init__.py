"""Create one HTML page about a model: TensorRT's outcome as graph, tables and plots.

Results of other packages are converted to dataclasses (:mod:`qdqtool.reporting.data`), by one
module for each part of the page. The template and assets (:mod:`qdqtool.reporting.page`) show the
dataclasses. This package computes no results itself.
"""
