"""Hook of mkdocs: roles of docstrings as code."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Remove the role before a name (``:class:`X```)."""
    return re.sub(r":(?:mod|class|func|meth|attr|data):(?=<code>)", "", html)
