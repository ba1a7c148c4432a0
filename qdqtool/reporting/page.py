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
import math
import zlib
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any

from qdqtool.buildlog import layout
from qdqtool.buildlog.names import NameSet, parse_layer_name
from qdqtool.errors import QdqtoolError
from qdqtool.formats.predict_text import ms as _ms
from qdqtool.reporting import data
from qdqtool.util.json_text import json_text
from qdqtool.util.text import as_line, escape_hidden, format_count

SCRIPTS = (
    "dom.js",
    "tables.js",
    "scene.js",
    "graph.js",
    "search.js",
    "details.js",
    "plots.js",
    "plots_time.js",
    "main.js",
)


def lacking() -> str:
    """What the report needs that is not installed, as a sentence; an empty string where all is there."""
    missing = [
        n
        for n, there in (
            ("jinja2", importlib.util.find_spec("jinja2") is not None),
            ("fast-sugiyama", layout.is_layout_available()),
        )
        if not there
    ]
    return (
        f"the report needs {' and '.join(missing)}: pip install 'qdqtool[report]'"
        if missing
        else ""
    )


def require() -> None:
    """Looks whether what the report needs is there.

    Raises:
        QdqtoolError: jinja2 or fast-sugiyama is not installed.
    """
    missing = lacking()
    if missing:
        raise QdqtoolError(missing, code="missing-package")


def render(page: data.Page) -> str:
    """The page.

    Raises:
        QdqtoolError: jinja2 is not installed.
    """
    require()
    style = _asset("style.css")
    script = (
        "(async () => {\n'use strict';\n"
        + "\n".join(_asset(name) for name in SCRIPTS)
        + "\n})();\n"
    )
    html = _template().render(
        page=page,
        style=_markup(style),
        script=_markup(script),
        data=_markup(embedded(page)),
        style_hash=_hash(style),
        script_hash=_hash(script),
    )
    return escape_hidden(html)


@functools.cache
def _template() -> Any:
    """The template; compiling it takes as long as all the rest of a small page."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    return environment.get_template("page.html")


def _markup(text: str) -> Any:
    """Text of ours, or text that cannot end its element: not escaped."""
    from markupsafe import Markup

    return Markup(text)


def embedded(page: data.Page) -> str:
    """The page's data for a ``<script>`` that is no script: JSON, deflated, in base64, which cannot end the element."""
    text = json_text(_plain(page), compact=True)
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _plain(value: Any) -> Any:
    """As ``dataclasses.asdict`` has it, in a quarter of the time: what it does not know stays the same."""
    kind: type[Any] = value.__class__
    if kind in _LEAVES:
        return value
    if kind is list or kind is tuple:
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(kind):
        return {name: _plain(getattr(value, name)) for name in kind.__dataclass_fields__}
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


_LEAVES = frozenset({str, int, float, bool, type(None)})


def _asset(name: str) -> str:
    return resources.files("qdqtool.reporting").joinpath("assets", name).read_text("utf-8")


def _hash(text: str) -> str:
    """As a content security policy names what may be in the page."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# How names and numbers are written ----------------------------------------------------------------------------------

LONGEST = 400  # characters of a name; of a longer one both ends, which distinguish it from others
LONGEST_TEXT = 4_000


def shown(name: str, longest: int = LONGEST) -> str:
    """A name for the page; of a long one the beginning, the end and how much is left out."""
    if len(name) > longest:
        half = longest // 2 - 20
        name = f"{name[:half]} …{len(name) - 2 * half} characters… {name[-half:]}"
    return as_line(name)


def message(text: str) -> str:
    """A message or a fix for the page."""
    return shown(text, LONGEST_TEXT)


def short(name: str, width: int) -> str:
    """The end of a name, which distinguishes nodes, in at most ``width`` characters."""
    name = shown(name)
    return name if len(name) <= width else f"…{name[-(width - 1) :]}"


def plain(name: str, op: str) -> str:
    """A node's name without its operator at the end and the slash in front: ``model.2/cv1/conv``."""
    head, slash, last = name.rpartition("/")
    return (head if slash and last.startswith(op) and head else name).removeprefix("/")


class Spoken:
    """Which nodes the names of TensorRT's log lines refer to."""

    def __init__(self, names: Iterable[str]) -> None:
        # Only those that hold a joint can be split wrongly.
        self._joined = NameSet(
            n for n in names if any(j in n for j in (" + ", " || ", ", ", "PWN("))
        )

    def of(self, name: str) -> list[str]:
        """The ONNX names in a layer's or a tensor's name."""
        return parse_layer_name(name, self._joined).bases if name else []


# Numbers, and the filters of the template ---------------------------------------------------------------------------

NONE = "–"


def _known(write: Callable[[float], str]) -> Callable[[float | None], str]:
    """Writes numbers; a dash for what is not known."""
    return functools.wraps(write)(
        lambda value: NONE if value is None or not math.isfinite(value) else write(value)
    )


@_known
def ms(value: float) -> str:
    """``0.681``: milliseconds with three digits that count."""
    return _ms(value, unit=False)


@_known
def amount(value: float) -> str:
    """``1.23 M``: decimal multiples."""
    for unit, sign in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{sign}"
    return f"{value:.3g}"


@_known
def number(value: float) -> str:
    """At most four digits that count."""
    return f"{value:.4g}"


def rounded(value: Any, digits: int) -> float:
    """A number with so many digits that count, for the data in the page."""
    return float(f"{float(value):.{digits}g}")


def sort_key(value: float | None) -> str:
    """What a table sorts by: the number in full, nothing where it is not known."""
    return "" if value is None or not math.isfinite(value) else repr(float(value))


FILTERS: dict[str, Callable[..., Any]] = {
    "ms": ms,
    "amount": amount,
    "number": number,
    "sort_key": sort_key,
    "plural": format_count,
}
