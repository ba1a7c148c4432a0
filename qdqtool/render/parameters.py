"""Texts of the library name parameters in backticks (`exclude`, `head='none'`, `unify=False`); here as options."""

from __future__ import annotations

import re
from typing import Any

_PARAMETER = re.compile(r"`([a-z][a-z_]*)(?:=([^`\s]*))?`")
_OPTIONS = {"data": "calib", "evaluation": "eval"}  # called otherwise on the command line


def as_options(text: str) -> str:
    """A text with each parameter in backticks as the option of that name: ``--exclude``, ``--head none``."""
    return _PARAMETER.sub(_option, text)


def _option(found: re.Match[str]) -> str:
    name, value = found[1], found[2]
    option = _OPTIONS.get(name, name).replace("_", "-")
    if value == "False":
        return f"--no-{option}"
    return f"--{option}" if value is None else f"--{option} {value.strip(chr(39))}"


def all_as_options(data: Any) -> Any:
    """The same for every text in lists and dicts."""
    if isinstance(data, str):
        return as_options(data)
    if isinstance(data, list):
        return [all_as_options(d) for d in data]
    return {k: all_as_options(v) for k, v in data.items()} if isinstance(data, dict) else data
