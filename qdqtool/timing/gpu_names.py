"""How people write the names of GPUs: one spelling for all, and the names that come nearest to an unknown one."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping

_SPLIT = re.compile(r"[\s_/()\-]+")
_MAKERS = (
    "nvidia", "geforce", "quadro", "tesla", "jetson", "gpu", "graphics", "module", "developer", "dev", "kit",
    "corporation", "tegra", "nvgpu",
)  # fmt: skip
_NUMBER = re.compile(r"\d{3,4}( (ti|super|laptop|d))*")  # a name without its series: 3060, 4070 ti super
_SERIES = ("rtx {}", "gtx {}")
_FAR = math.log(2.0)  # numbers further apart name GPUs that are not alike
_ALIKE = 0.8
_LISTED = 5


def plain(name: str) -> str:
    """A name without the maker's words."""
    return " ".join(w for w in name.lower().split() if w not in _MAKERS)


def words(name: str) -> str:
    """A name in one spelling: ``NVIDIA GeForce RTX3080Ti`` and ``rtx-3080 ti`` are both ``rtx 3080 ti``."""
    text = _SPLIT.sub(" ", name.lower())
    text = re.sub(r"\b(rtx|gtx|titan)(?=\w)", r"\1 ", text)
    text = re.sub(r"(?<=\d)(ti|super|laptop|gb)\b", r" \1", text)
    text = re.sub(r"\b(mobile|max q|notebook)\b|\blaptop gpu\b", "laptop", text)
    text = re.sub(r"(?<=\d) gb\b", "gb", text)
    text = re.sub(r"\b(pci ?e)\b", "pcie", text)
    text = re.sub(rf"\b({'|'.join(_MAKERS)})\b", " ", text)
    text = re.sub(r"\bada generation\b", "ada", text)
    return " ".join(text.split())


def spellings(wanted: str) -> list[str]:
    """What a name in :func:`words` may stand for: without memory sizes and form factors, with its series."""
    tries = [wanted, re.sub(r"\b\d+gb\b", "", wanted), re.sub(r"\b\d+gb\b|\b(pcie|sxm\d?|super|hbm\w*)\b", "", wanted)]
    found = [" ".join(t.split()) for t in tries if "super" not in wanted or "super" in t]
    found += [series.format(text) for text in found if _NUMBER.fullmatch(text) for series in _SERIES]
    return list(dict.fromkeys(found))


def shared(name: str, boards: list[str]) -> str:
    """What to say of a name that several GPUs share."""
    return f"'{name}' is the name of {len(boards)} GPUs: {', '.join(boards)}; give one of these"


def variants(name: str, taken: str, names: list[str]) -> list[str]:
    """Other GPUs that a name without memory size or form factor could have meant: ``A100`` is three."""
    parts = set(words(name).split())
    if parts >= set(words(taken).split()):
        return []
    spelled = {other: set(words(other).split()) for other in names if other != taken}
    return [other for other, own in spelled.items() if parts < own and "laptop" not in own - parts]


def nearest(wanted: str, names: Mapping[str, str]) -> list[str]:
    """Names that come nearest: of the same number, of the same series with a near number, or spelled alike.

    Args:
        wanted: The unknown name, in :func:`words`.
        names: Known names in :func:`words`, and what to call them.
    """
    ranked = []
    series, number = _model(wanted)
    for key, name in names.items():
        other, value = _model(key)
        far = abs(math.log(number / value)) if number and value else math.inf
        alike = difflib.SequenceMatcher(None, wanted, key).ratio()
        if far == 0:
            ranked.append((0 if other == series else 1, -alike, name))
        elif other == series and far <= _FAR:
            ranked.append((2, far, name))
        elif alike >= _ALIKE and not (number and value and series):
            ranked.append((3, -alike, name))
    return list(dict.fromkeys(name for *_, name in sorted(ranked)))[:_LISTED]


def _model(name: str) -> tuple[str, int]:
    """Series and number of a name: ``rtx 3060 ti`` is ``("rtx", 3060)``, ``t1000`` is ``("t", 1000)``."""
    before = ""
    for word in name.split():
        match = re.fullmatch(r"([a-z]*)(\d+)[a-z]*", word)
        if match and not word.endswith("gb"):
            return match[1] or before, int(match[2])
        before = word
    return name, 0
