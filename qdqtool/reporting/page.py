"""The page as HTML: a template, styles and scripts in one file that loads nothing.

Libraries: jinja2 (0.13 MB with MarkupSafe, the template engine of Flask and Ansible, maintained
since 2008) escapes by default. fast-sugiyama (0.3 MB, compiled, MIT) lays out the graphs, as in
``qdqtool engine --svg``. Small scripts of this package draw plots and graphs: plotly adds 4.8 MB of
JavaScript to every page, bokeh 1 MB that needs ``unsafe-eval`` or inline styles. Images of
matplotlib have no dark scheme and cannot be clicked. Cytoscape or d3 would have to be copied into
this repository.

Safety: names come from untrusted files. The template escapes everything. The data is encoded so
that it cannot end its element. Scripts write text and never markup. A content security policy
allows only the page's own script and style, by their hashes.
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
from qdqtool.formats import time_text
from qdqtool.reporting import data
from qdqtool.util.json_text import json_text
from qdqtool.util.text import as_line, drop_repeated_sentences, escape_hidden, format_count

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


def describe_missing_packages() -> str:
    """Return a sentence about packages that the report needs and that are missing, or ``""``."""
    missing = []
    if importlib.util.find_spec("jinja2") is None:
        missing.append("jinja2")
    if not layout.is_layout_available():
        missing.append("fast-sugiyama")
    if not missing:
        return ""
    return f"the report needs {' and '.join(missing)}: pip install 'qdqtool[report]'"


def require_packages() -> None:
    """Check that the packages of the report are installed.

    Raises:
        QdqtoolError: jinja2 or fast-sugiyama is not installed.
    """
    missing = describe_missing_packages()
    if missing:
        raise QdqtoolError(missing, code="missing-package")


def render_page(contents: data.PageContents) -> str:
    """Return the page as HTML.

    Raises:
        QdqtoolError: jinja2 or fast-sugiyama is not installed.
    """
    require_packages()
    style = _read_asset("style.css")
    scripts = "\n".join(_read_asset(name) for name in SCRIPTS)
    script = f"(async () => {{\n'use strict';\n{scripts}\n}})();\n"
    html = _load_template().render(
        page=contents,
        style=_mark_safe(style),
        script=_mark_safe(script),
        data=_mark_safe(encode_contents(contents)),
        style_hash=_hash_source(style),
        script_hash=_hash_source(script),
    )
    return escape_hidden(html)


@functools.cache  # compiling it takes as long as all the rest of a small page
def _load_template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    return environment.get_template("page.html")


def _mark_safe(text: str) -> Any:
    """Return text of this package, or text that cannot end its element, as unescaped markup."""
    from markupsafe import Markup

    return Markup(text)


def encode_contents(contents: data.PageContents) -> str:
    """Return the contents for a ``<script>`` element of data: JSON, deflated, in base64.

    No base64 text can end the element.
    """
    text = json_text(_to_plain(contents), compact=True)
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _to_plain(value: Any) -> Any:
    """Convert like ``dataclasses.asdict``, in a quarter of the time; leaves are not copied."""
    kind: type[Any] = value.__class__
    if kind in _LEAVES:
        return value
    if kind is list or kind is tuple:
        return [_to_plain(item) for item in value]
    if dataclasses.is_dataclass(kind):
        return {name: _to_plain(getattr(value, name)) for name in kind.__dataclass_fields__}
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    return value


_LEAVES = frozenset({str, int, float, bool, type(None)})


def _read_asset(name: str) -> str:
    return resources.files("qdqtool.reporting").joinpath("assets", name).read_text("utf-8")


def _hash_source(text: str) -> str:
    """Return the hash of a script or a style for a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# Names and numbers --------------------------------------------------------------------------------

MAX_NAME = 400  # characters; of a longer name both ends remain, which distinguish it from others
MAX_MESSAGE = 4_000


def display_name(name: str, limit: int = MAX_NAME) -> str:
    """Return a name as one line; the middle of a long one is replaced by its length."""
    if len(name) > limit:
        half = limit // 2 - 20
        name = f"{name[:half]} …{len(name) - 2 * half} characters… {name[-half:]}"
    return as_line(name)


def display_message(text: str) -> str:
    """Return a message or a fix as one line."""
    return display_name(text, MAX_MESSAGE)


def shorten_name(name: str, width: int) -> str:
    """Return the end of a name, which distinguishes nodes, in at most ``width`` characters."""
    name = display_name(name)
    return name if len(name) <= width else f"…{name[-(width - 1) :]}"


def strip_operator(name: str, op: str) -> str:
    """Return a node's name without leading slash and final operator: ``model.2/cv1/conv``."""
    head, slash, last = name.rpartition("/")
    return (head if slash and last.startswith(op) and head else name).removeprefix("/")


class LogNameParser:
    """Finds the nodes that the names of TensorRT's log lines refer to."""

    def __init__(self, names: Iterable[str]) -> None:
        # Only names that contain a separator can be split wrongly.
        separators = (" + ", " || ", ", ", "PWN(")
        self._joined = NameSet(n for n in names if any(s in n for s in separators))

    def parse(self, name: str) -> list[str]:
        """Return the ONNX names in the name of a layer or a tensor."""
        return parse_layer_name(name, self._joined).bases if name else []


UNKNOWN = "–"


def _dash_if_unknown(write: Callable[[float], str]) -> Callable[[float | None], str]:
    @functools.wraps(write)
    def write_known(value: float | None) -> str:
        return UNKNOWN if value is None or not math.isfinite(value) else write(value)

    return write_known


@_dash_if_unknown
def format_ms(value: float) -> str:
    """Return milliseconds with three significant digits: ``0.681``."""
    return time_text.format_ms(value, unit=False)


@_dash_if_unknown
def format_amount(value: float) -> str:
    """Return a number with a decimal prefix: ``1.23 M``."""
    for unit, sign in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{sign}"
    return f"{value:.3g}"


@_dash_if_unknown
def format_number(value: float) -> str:
    """Return a number with at most four significant digits."""
    return f"{value:.4g}"


def round_digits(value: Any, digits: int) -> float:
    """Round to a number of significant digits."""
    return float(f"{float(value):.{digits}g}")


def sort_key(value: float | None) -> str:
    """Return the text by which a table sorts a number, ``""`` if it is not known."""
    return "" if value is None or not math.isfinite(value) else repr(float(value))


FILTERS: dict[str, Callable[..., Any]] = {
    "ms": format_ms,
    "amount": format_amount,
    "number": format_number,
    "sort_key": sort_key,
    "plural": format_count,
    "unrepeated": drop_repeated_sentences,
}
