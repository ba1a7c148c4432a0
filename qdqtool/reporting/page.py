"""Render the page as one HTML file that loads no other file.

Libraries: jinja2 (0.13 MB with MarkupSafe, the template engine of Flask and Ansible, maintained
since 2008) escapes by default. fast-sugiyama (0.3 MB, compiled, MIT) lays out the graphs, as in
``qdqtool engine --svg``. Small scripts of this package draw plots and graphs, because the
alternatives are worse: plotly adds 4.8 MB of JavaScript to every page, bokeh 1 MB that needs
``unsafe-eval`` or inline styles. Images of matplotlib have no dark scheme and cannot be clicked.
Cytoscape or d3 would have to be copied into this repository.

Safety: names come from untrusted files. The template escapes every text. The data is encoded in
base64, which cannot contain an end tag. Scripts write text and never markup. A content security
policy allows only the page's own script and style, by their hashes.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import importlib.util
import math
import zlib
from collections.abc import Callable
from importlib import resources
from typing import Any

from qdqtool.buildlog import layout
from qdqtool.errors import QdqtoolError
from qdqtool.findings.report import group_findings
from qdqtool.reporting import data
from qdqtool.util import text
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
    """Return a message about missing packages of the report; empty if all are installed."""
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
    """Render the contents of a page as HTML.

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


@functools.cache  # compiling the template takes half of the time of a small page
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
    """Mark a text as safe, so that the template does not escape the text.

    Use this function only for texts of this package, or texts that cannot end their HTML element.
    """
    from markupsafe import Markup

    return Markup(text)


def encode_contents(contents: data.PageContents) -> str:
    """Encode the contents as deflated JSON in base64, for a data ``<script>`` element.

    Base64 cannot contain the end tag of the element.
    """
    text = json_text(_convert_dataclasses(contents), compact=True)
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _convert_dataclasses(value: Any) -> Any:
    """Convert dataclasses to dictionaries, also inside of containers.

    This is four times as fast as ``dataclasses.asdict``, because leaf values are not copied.
    """
    kind: type[Any] = value.__class__
    if kind in _LEAVES:
        return value
    if kind is list or kind is tuple:
        return [_convert_dataclasses(item) for item in value]
    if dataclasses.is_dataclass(kind):
        return {
            name: _convert_dataclasses(getattr(value, name)) for name in kind.__dataclass_fields__
        }
    if isinstance(value, dict):
        return {key: _convert_dataclasses(item) for key, item in value.items()}
    return value


_LEAVES = frozenset({str, int, float, bool, type(None)})


def _read_asset(name: str) -> str:
    return resources.files("qdqtool.reporting").joinpath("assets", name).read_text("utf-8")


def _hash_source(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# Names and numbers --------------------------------------------------------------------------------

MAX_NAME = 400  # maximum number of characters; the middle of longer names is cut
MAX_MESSAGE = 4_000


def display_name(name: str, limit: int = MAX_NAME) -> str:
    """Return a name on one line; shorten the middle of a long name."""
    if len(name) > limit:
        half = limit // 2 - 20
        name = f"{name[:half]} …{len(name) - 2 * half} characters… {name[-half:]}"
    return as_line(name)


def display_message(text: str) -> str:
    """Return the text of a finding on one line; replace the middle if the text is very long."""
    return display_name(text, MAX_MESSAGE)


def shorten_name(name: str, width: int) -> str:
    """Return at most ``width`` characters from the end of a name, where names differ most."""
    name = display_name(name)
    return name if len(name) <= width else f"…{name[-(width - 1) :]}"


def strip_operator(name: str, op: str) -> str:
    """Return a node's name without the leading slash and the operator at the end.

    For example, ``model.2/cv1/conv`` for ``/model.2/cv1/conv/Conv``.
    """
    head, slash, last = name.rpartition("/")
    return (head if slash and last.startswith(op) and head else name).removeprefix("/")


UNKNOWN = "–"


def _dash_if_unknown(write: Callable[[float], str]) -> Callable[[float | None], str]:
    @functools.wraps(write)
    def write_known(value: float | None) -> str:
        return UNKNOWN if value is None or not math.isfinite(value) else write(value)

    return write_known


@_dash_if_unknown
def format_ms(value: float) -> str:
    """Return milliseconds with three significant digits: ``0.681``."""
    return text.format_ms(value, unit=False)


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
    """Round a number to `digits` significant digits."""
    return float(f"{float(value):.{digits}g}")


def sort_key(value: float | None) -> str:
    """Return the sort key of a number for the page's tables; empty if unknown."""
    return "" if value is None or not math.isfinite(value) else repr(float(value))


FILTERS: dict[str, Callable[..., Any]] = {
    "ms": format_ms,
    "amount": format_amount,
    "number": format_number,
    "sort_key": sort_key,
    "plural": format_count,
    "grouped": group_findings,
    "unrepeated": drop_repeated_sentences,
}
