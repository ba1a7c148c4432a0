"""Evidence of rules: the builds or documents that show the behavior of TensorRT."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Evidence(StrEnum):
    """Evidence of a rule: seen in a build, documented (or reported by a user), or assumed."""

    SEEN = "seen"
    DOCUMENTED = "documented"
    ASSUMED = "assumed"

    def choose_weaker(self, other: Evidence) -> Evidence:
        """Return the weaker of two kinds of evidence: the evidence of a conclusion from both."""
        return max(self, other, key=_EVIDENCE.index)


_EVIDENCE = tuple(Evidence)


@dataclass(frozen=True, eq=False, repr=False)
class Case:
    """Behavior of TensorRT, with the builds or documents that show it.

    Attributes:
        name: Short name, unique within its pass or operator, such as ``stem-pool``.
        evidence: Seen in a build, documented (or reported by a user), or assumed.
        says: The behavior in one sentence.
        builds: Builds that show the behavior: ``<build>:<line>`` for a line of a log, or
            ``<build>`` for a listing of layers. ``qdqtool/trt/builds.tsv`` describes the builds.
        source: Document that states the behavior. For an assumed case: the reason for the
            assumption, and the log that would refute it.
        about: ONNX operators, and kinds of log lines as in ``trt.trace``. The explanation of a log
            line begins with the cases that have most of its words. Words that all cases of a pass
            share can be left out.
    """

    name: str
    evidence: Evidence
    says: str
    builds: tuple[str, ...] = ()
    source: str = ""
    about: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Case {self.name}>"

    def build_names(self) -> tuple[str, ...]:
        """Return the names of the builds that show the case, without duplicates."""
        return tuple(dict.fromkeys(b.partition(":")[0] for b in self.builds))


def seen(name: str, says: str, *builds: str, source: str = "", about: tuple[str, ...] = ()) -> Case:
    """Return a case that real builds show.

    Args:
        name: Short name, unique within its pass or operator.
        says: The behavior of TensorRT in one sentence.
        builds: Builds that show the behavior, ``<build>:<line>`` or ``<build>``.
        source: Document that states the behavior too; empty if there is none.
        about: ONNX operators and kinds of log lines; see :class:`Case`.

    Raises:
        ValueError: ``builds`` is empty.
    """
    if not builds:
        raise ValueError(f"case '{name}' is marked as seen but names no build; add a build")
    return Case(name, Evidence.SEEN, says, builds, source, about)


def documented(name: str, says: str, source: str, about: tuple[str, ...] = ()) -> Case:
    """Return a case that NVIDIA documents, or that a user reports without a log."""
    return Case(name, Evidence.DOCUMENTED, says, (), source, about)


def assumed(name: str, says: str, source: str, about: tuple[str, ...] = ()) -> Case:
    """Return a case that is assumed, because it was neither seen in a build nor documented.

    Args:
        name: Short name, unique within its pass or operator.
        says: The behavior of TensorRT in one sentence.
        source: The reason for the assumption, and the log that would refute it.
        about: ONNX operators and kinds of log lines; see :class:`Case`.
    """
    return Case(name, Evidence.ASSUMED, says, (), source, about)
