"""Create an HTML page about a model: graphs, tables and plots.

This package computes no results itself. Its modules convert results of other packages to
dataclasses (:mod:`qdqtool.reporting.data`), and the template and scripts
(:mod:`qdqtool.reporting.page`) show the dataclasses.
"""
