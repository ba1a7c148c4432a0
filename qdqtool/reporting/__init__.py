"""One HTML page about a model: what TensorRT makes of it, as a picture, tables and plots.

Data flows one way: results of the other rooms (:mod:`qdqtool.reporting.nodes`) -> plain dataclasses
(:mod:`qdqtool.reporting.data`), made by one module for each part of the page -> template and assets
(:mod:`qdqtool.reporting.page`). Nothing is worked out here that another room has worked out.
"""
