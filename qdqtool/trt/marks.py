"""On which TensorRT the rules that a network used were seen."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable

from qdqtool.knowledge.evidence import Case
from qdqtool.trt.builds import BUILDS
from qdqtool.trt.targets import Target
from qdqtool.types import Evidence

# They name and fold constants: no outcome rests on them.
_OF_NO_OUTCOME = frozenset({"constant", "identity"})


def seen_on(case: Case, target: Target) -> bool:
    """Whether a build of the target's major version shows a case; later ones than 10 count as their own."""
    return _seen_on(case, target.version[0])


@functools.cache
def _seen_on(case: Case, major: int) -> bool:
    return case.evidence == Evidence.SEEN and any(
        _is_of(BUILDS[name].tensorrt, major) for name in case.build_names() if name in BUILDS)


def _is_of(versions: str, major: int) -> bool:
    return any(v.partition(".")[0] == str(major) for v in versions.replace(",", " ").split())


def weakest(cases: Collection[Case], target: Target) -> Evidence:
    """How well an outcome is proven on the target: as its cases are, what only 8.x shows assumed on later ones."""
    found = set()
    for case in cases:
        shown = case.evidence != Evidence.SEEN or not target.has_marks or seen_on(case, target)
        found.add(case.evidence if shown else Evidence.ASSUMED)
    return functools.reduce(Evidence.weaker, found, Evidence.SEEN)


def sentence(cases: Iterable[Case], target: Target) -> str:
    """Of the rules that a network used, how many were seen on the target's TensorRT; empty where it used none."""
    used = [c for c in dict.fromkeys(cases) if c.name not in _OF_NO_OUTCOME]
    if not used:
        return ""
    own = sum(seen_on(c, target) for c in used)
    seen = sum(c.evidence == Evidence.SEEN for c in used)
    rest = len(used) - seen
    parts = [f"{own} seen on {target.version[0]}.x"]
    if seen > own:
        parts.append(f"{seen - own} seen on other versions only")
    if rest:
        parts.append(f"{rest} documented or assumed")
    return f"of the {len(used)} rules that this network used, {', '.join(parts)}"
