"""The page as HTML: a template, styles and scripts in one file that loads nothing.

Why these libraries: jinja2 (0.13 MB with MarkupSafe, the template engine of Flask and Ansible, kept since 2008) escapes
by default; fast-sugiyama (0.3 MB, compiled, MIT) lays the graphs out and draws ``qdqtool engine --svg`` already. Plots
and the viewer are drawn by small scripts of our own: plotly brings 4.8 MB of JavaScript to every page and bokeh 1 MB
that needs ``unsafe-eval`` or inline styles, matplotlib's pictures know neither a dark scheme nor a click, and a viewer
(Cytoscape, d3) would have to be copied into this repository.

Safety: names come from other people's files. The template escapes everything, the data is packed in a block that
cannot end early, scripts write text and never markup, and a content security policy allows nothing but the page's own
script and style, by their hashes.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import importlib.util
import zlib
from importlib import resources
from typing import Any

from qdqtool.engine import drawing
from qdqtool.errors import QdqtoolError
from qdqtool.jsontext import json_text
from qdqtool.reporting import data
from qdqtool.reporting.names import FILTERS
from qdqtool.text import visible

SCRIPTS = ("dom.js", "tables.js", "scene.js", "graph.js", "search.js", "details.js", "plots.js", "plots_time.js",
           "main.js")


def lacking() -> str:
    """What the report needs that is not installed, as a sentence; an empty string where all is there."""
    missing = [n for n, there in (("jinja2", importlib.util.find_spec("jinja2") is not None),
                                  ("fast-sugiyama", drawing.installed())) if not there]
    return f"the report needs {' and '.join(missing)}: pip install 'qdqtool[report]'" if missing else ""


def require() -> None:
    """Looks whether what the report needs is there.

    Raises:
        QdqtoolError: jinja2 or fast-sugiyama is not installed.
    """
    missing = lacking()
    if missing:
        raise QdqtoolError(missing)


def render(page: data.Page) -> str:
    """The page.

    Raises:
        QdqtoolError: jinja2 is not installed.
    """
    require()
    style = _asset("style.css")
    script = "(async () => {\n'use strict';\n" + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();\n"
    html = _template().render(
        page=page, style=_markup(style), script=_markup(script), data=_markup(embedded(page)),
        style_hash=_hash(style), script_hash=_hash(script),
    )
    return visible(html)


@functools.cache
def _template() -> Any:
    """The template; compiling it takes as long as all the rest of a small page."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(FILTERS)
    return environment.get_template("page.html")


def _markup(text: str) -> Any:
    """Text of ours, or text that cannot end its element: not escaped."""
    from markupsafe import Markup

    return Markup(text)


def embedded(page: data.Page) -> str:
    """The page's data for a ``<script>`` that is no script: JSON, deflated, in base64, which cannot end the element."""
    text = json_text(dataclasses.asdict(page), compact=True)
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _asset(name: str) -> str:
    return resources.files("qdqtool.reporting").joinpath("assets", name).read_text("utf-8")


def _hash(text: str) -> str:
    """As a content security policy names what may be in the page."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
