"""The entries of :mod:`qdqtool.explain.errors`."""

from __future__ import annotations

from dataclasses import dataclass

HARMLESS = "harmless"
WARNING = "warning"
ERROR = "error"


@dataclass(frozen=True, slots=True)
class KnownError:
    """A message that is known.

    Attributes:
        id: Stable short name.
        title: What it is, in a few words.
        pattern: Regular expression, searched without regard to case; short and free of nested repetition.
        severity: ``error``, ``warning`` or ``harmless``.
        cause: Why TensorRT says it, in one sentence or two.
        fix: What to do.
        source: Where cause and fix come from.
        versions: TensorRT versions that say it, where that is known.
        codes: Finding codes of ``qdqtool predict`` that report it before the build.
        fixed: For a bug: in which version NVIDIA says that it is fixed, and where it says so.
        unknown: What is not known of it.
    """

    id: str
    title: str
    pattern: str
    severity: str
    cause: str
    fix: str
    source: str
    codes: tuple[str, ...] = ()
    versions: str = ""
    fixed: str = ""
    unknown: str = ""
