"""Readers of a tensor, by what they are."""

from __future__ import annotations

from collections.abc import Sequence

from qdqtool.trt.refusals import Reader, ReaderKind


def floats_of(readers: Sequence[Reader]) -> list[Reader]:
    """Those that are no Q."""
    return [r for r in readers if r.kind != ReaderKind.Q]


def quantizers_of(readers: Sequence[Reader]) -> list[Reader]:
    return [r for r in readers if r.kind == ReaderKind.Q]


def known_scale(quantizers: Sequence[Reader]) -> Reader | None:
    """A Q right behind a tensor, whose pair another reader can share."""
    return next((q for q in quantizers if not q.path and isinstance(q.scale, float)), None)
