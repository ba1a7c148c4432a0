"""Evidence as data: what shows a rule, and where to read it.

A :class:`Case` is one way in which TensorRT behaves, with the builds (and lines of their logs) that show it. Operators
(:mod:`qdqtool.model.operators`) and passes (``qdqtool/trt/passes``) state their knowledge as cases; a line of a
simulated trace can only be emitted through one, and the outcome that a user sees carries it.
"""

from __future__ import annotations

from qdqtool.base.records import record
from qdqtool.types import Evidence


@record
class Case:
    """One thing that TensorRT does.

    Attributes:
        name: Short and unique within its pass or operator, for instance ``stem-pool``.
        evidence: Seen in a build, documented by NVIDIA, or assumed.
        says: What happens, in one sentence.
        builds: Where it was seen: ``<build>:<line>`` of the build's log, or ``<build>`` for an engine listing. The
            builds are described in :mod:`qdqtool.trt.targets`.
        source: What documents it, or why it is assumed and what would refute it.
    """

    name: str
    evidence: Evidence
    says: str
    builds: tuple[str, ...] = ()
    source: str = ""

    __eq__, __hash__ = object.__eq__, object.__hash__  # distinguished by identity, many times in a simulation

    def build_names(self) -> tuple[str, ...]:
        """The builds that show it, each once, without line numbers."""
        return tuple(dict.fromkeys(b.partition(":")[0] for b in self.builds))


def seen(name: str, says: str, *builds: str, source: str = "") -> Case:
    """A case that a real build shows; at least one build has to be named."""
    if not builds:
        raise ValueError(f"case '{name}' is said to be seen and names no build")
    return Case(name, Evidence.SEEN, says, builds, source)


def documented(name: str, says: str, source: str) -> Case:
    """A case that NVIDIA documents, or that a user's report shows without its log."""
    return Case(name, Evidence.DOCUMENTED, says, (), source)


def assumed(name: str, says: str, source: str) -> Case:
    """A case that no available build shows; ``source`` says why it is taken so and what would refute it."""
    return Case(name, Evidence.ASSUMED, says, (), source)
