"""Options of fixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdqtool.errors import QdqtoolError
from qdqtool.util import limits
from qdqtool.util.checks import check_not_text


@dataclass(frozen=True)
class FixOptions:
    """Findings to fix, and limits of comparing outputs.

    Attributes:
        only: Finding codes to fix. Empty: all except codes that have to be requested.
        inputs: Arrays by input name to run the model with. None: random arrays.
        effort: Factor on the limits of comparing outputs.
    """

    only: Sequence[str] = ()
    inputs: Mapping[str, Any] | None = None
    effort: float = 1.0

    def __post_init__(self) -> None:
        check_not_text("only", self.only)
        if not 0 < self.effort <= limits.EFFORT:
            raise QdqtoolError(
                f"`effort={self.effort!r}` is out of range; give a number above 0, at most "
                f"{limits.EFFORT:g}",
                code="value-out-of-range",
                parameter="effort",
            )
        object.__setattr__(self, "effort", float(self.effort))
