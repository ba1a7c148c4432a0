"""Common scales of quantizers, and their cost over several changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model
from qdqtool.ir.metadata import COMMON_SCALES, set_metadata
from qdqtool.reasons.text import (
    count_lost_bits,
    differ_by_over_two_bits,
    format_lost_bits,
    format_number,
    list_names,
)
from qdqtool.util import limits
from qdqtool.util.json_text import Json, json_text, parse_json
from qdqtool.util.notes import Note

TOO_COARSE = "scale-too-coarse"
"""Code of the note on a common scale that would cost too much precision."""
_SCALES_SHOWN = 12
_NAMES_SHOWN = 4  # maximum number of quantizers that a description names


class ReplacedScale(NamedTuple):
    """Scale of a Q that a common scale replaces.

    Attributes:
        quantizer: Name of the Q.
        tensor: Tensor that the Q quantizes.
        scale: The scale.
    """

    quantizer: str
    tensor: str
    scale: float


@dataclass(frozen=True)
class CommonScale:
    """One scale for several quantizers.

    Attributes:
        scale: The common scale.
        replaced: Scales that it replaces.
    """

    scale: float
    replaced: tuple[ReplacedScale, ...]

    def describe(self) -> str:
        """Return the scales before and after, the quantizers, and the largest loss in bits."""
        smallest = min(r.scale for r in self.replaced)
        lost = count_lost_bits(smallest, self.scale)
        bits = f", {format_lost_bits(lost, 'at most ')} lost" if smallest > 0 else ""
        before = list_names((format_number(r.scale) for r in self.replaced), _SCALES_SHOWN)
        names = list_names((r.quantizer for r in self.replaced), _NAMES_SHOWN)
        return (
            f"one scale {format_number(self.scale)} instead of {before} for "
            f"{len(self.replaced)} quantizers ({names}){bits}"
        )

    def find_obstacle(self) -> Note:
        """Return a note if a tensor would lose more than two bits, else an empty note."""
        coarsest = min(self.replaced, key=lambda r: r.scale)
        if not differ_by_over_two_bits(coarsest.scale, self.scale):
            return Note()
        lost = count_lost_bits(coarsest.scale, self.scale)
        return Note(
            f"one common scale would cost '{coarsest.tensor}' {lost:.1f} bits of precision, but a "
            "fix may cost at most 2: keep the scales separate, or leave one of the tensors in "
            "float",
            code=TOO_COARSE,
            bits=lost,
        )


class ScaleHistory:
    """First and last scale of each quantizer that got a common scale.

    The metadata of a fixed model holds both, so that the loss is counted over several calls.
    """

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}

    @classmethod
    def from_model(cls, model: Model) -> ScaleHistory:
        """Return the history in the metadata of a model, which may be of any origin.

        Entries are ignored if they have another form, or if the quantizer has another scale now.
        """
        history = cls()
        scales = {
            node.name: qdq.read_params(model, node).single_scale
            for node in model.nodes
            if qdq.is_q(node)
        }
        for name, entry in _parse_entries(model.metadata.get(COMMON_SCALES, "")).items():
            match entry:
                case [int() | float() as first, int() | float() as last] if 0 < first <= last:
                    if math.isclose(scales.get(name) or 0.0, last, rel_tol=1e-6):
                        history._first[name], history._last[name] = first, last
        return history

    def write_to(self, model: Model) -> None:
        """Write the history to the metadata of a model, in place."""
        names = {node.name for node in model.nodes}
        entries = {n: [s, self._last[n]] for n, s in self._first.items() if n in names}
        set_metadata(model.proto, COMMON_SCALES, json_text(entries))

    def add_earlier(self, common: CommonScale) -> CommonScale:
        """Return a common scale that replaces the first scales of its quantizers."""
        replaced = (
            r._replace(scale=self._first.get(r.quantizer, r.scale)) for r in common.replaced
        )
        return replace(common, replaced=tuple(replaced))

    def add_later(self, common: CommonScale) -> CommonScale:
        """Return a common scale with the value that its quantizers have now."""
        last = (self._last.get(r.quantizer, common.scale) for r in common.replaced)
        return replace(common, scale=max(last))

    def record(self, common: CommonScale) -> None:
        """Record a common scale that was kept."""
        for replaced in common.replaced:
            self._first.setdefault(replaced.quantizer, replaced.scale)
            self._last[replaced.quantizer] = common.scale


def _parse_entries(text: str) -> Json:
    if len(text) > limits.VERIFICATION_FILE:
        return {}
    try:
        entries = parse_json(text)
    except (ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}
