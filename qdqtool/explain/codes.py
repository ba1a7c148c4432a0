"""The table of finding codes; its entries are kept by subject in ``codes_*``."""

from __future__ import annotations

from qdqtool.explain.codes_build import BUILD
from qdqtool.explain.codes_float import FLOAT
from qdqtool.explain.codes_fusion import FUSION
from qdqtool.explain.codes_gpu import GPU
from qdqtool.explain.codes_speed import SPEED
from qdqtool.explain.codes_weights import WEIGHTS
from qdqtool.explain.knowledge import Code

CODES: dict[str, Code] = {c.code: c for c in (*BUILD, *WEIGHTS, *FUSION, *FLOAT, *SPEED, *GPU)}


def get(code: str) -> Code:
    """The entry of a code.

    Raises:
        KeyError: There is no such code.
    """
    return CODES[code]


def find(text: str) -> Code | None:
    """The entry of a code however it is typed (``skip_float``, ``Skip-Float``); None when there is none."""
    return CODES.get(text.strip().upper().replace("_", "-").replace(" ", "-"))


def similar(text: str, count: int = 3) -> list[str]:
    """The codes spelled most like ``text``, the nearest first."""
    wanted = text.strip().upper().replace("_", "-")
    import difflib

    close = difflib.get_close_matches(wanted, CODES, n=count, cutoff=0.5)
    part = [c for c in CODES if wanted and (wanted in c or set(wanted.split("-")) & set(c.split("-")))]
    return list(dict.fromkeys([*close, *part]))[:count]
