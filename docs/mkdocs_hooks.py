"""What mkdocs and griffe do besides: roles of docstrings as code, docstrings that a decorator completes."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

import qdqtool


def on_page_content(html: str, **_: Any) -> str:
    """Drops the role in front of a name (``:class:`X```)."""
    return re.sub(r":(?:mod|class|func|meth|attr|data):(?=<code>)", "", html)


class CompletedDocstrings(griffe.Extension):
    """Options that are stated once are in a docstring and a signature only when the module runs; a stub has no text."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.module.path == "qdqtool":
            func.docstring = griffe.Docstring(
                inspect.getdoc(getattr(qdqtool, func.name)) or "", parent=func
            )
        elif func.docstring is not None and "{options}" in func.docstring.value:
            try:
                real = getattr(importlib.import_module(func.module.path), func.name)
            except ImportError:  # training needs torch, which reading about it does not
                text = func.docstring.value.replace("    {options}\n", "")
                where = "``help()`` lists its options where torch is installed."
                func.docstring.value = text.replace("Args:", f"{where}\n\nArgs:")
                return
            func.docstring.value = inspect.getdoc(real) or ""
            func.parameters = griffe.Parameters(
                *map(_parameter, inspect.signature(real).parameters.values())
            )


def _parameter(given: inspect.Parameter) -> griffe.Parameter:
    absent = inspect.Parameter.empty
    return griffe.Parameter(
        given.name,
        kind=griffe.ParameterKind(given.kind.description),
        annotation=None
        if given.annotation is absent
        else inspect.formatannotation(given.annotation).strip("'"),
        default=None if given.default is absent else repr(given.default),
    )
