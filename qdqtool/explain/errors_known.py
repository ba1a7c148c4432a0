"""Every known text, the telling ones before those that are consequences of others."""

from __future__ import annotations

from qdqtool.explain.errors_assertions import ASSERTIONS
from qdqtool.explain.errors_builder import BUILDER
from qdqtool.explain.errors_entry import ERROR, HARMLESS, WARNING, KnownError
from qdqtool.explain.errors_importer import IMPORTER
from qdqtool.explain.errors_notes import NOTES
from qdqtool.explain.errors_ranges import RANGES

__all__ = ["ERROR", "HARMLESS", "KNOWN", "WARNING", "KnownError"]

KNOWN: tuple[KnownError, ...] = (*IMPORTER, *BUILDER, *RANGES, *ASSERTIONS, *NOTES)
