"""Reads the tables that are a part of the package."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def table(name: str) -> dict[str, Any]:
    """The contents of ``<name>.toml``, its texts as written.

    Raises:
        FileNotFoundError: There is no such table.
    """
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))
