"""What a prediction assumes where TensorRT chooses by timing, and what each other choice would give.

Nothing here imports anything of qdqtool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SILU_ADD = "silu-add"


class SiluAdd(StrEnum):
    """What becomes of Conv + activation + residual Add with a quantized residual: one layer, or the Add apart."""

    FUSED = "fused"
    APART = "apart"


CHOICES: Mapping[str, tuple[str, ...]] = {SILU_ADD: tuple(SiluAdd)}
"""Every assumption that can be chosen, with its values."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of a prediction that depend on an assumption.

    Attributes:
        int8: Convolutions that compute in INT8.
        int8_to_int8: Those that write INT8 as well.
        conversions: Q and DQ that stay as layers.
    """

    int8: int
    int8_to_int8: int
    conversions: int | None

    def as_json(self) -> dict[str, int | None]:
        return {"int8": self.int8, "int8_to_int8": self.int8_to_int8, "conversions": self.conversions}


@dataclass(frozen=True, slots=True)
class Assumption:
    """A choice on which the outcome rests.

    Attributes:
        name: ``silu-add``.
        value: What the prediction counts.
        alternatives: What it would count for each other value.
        places: ONNX nodes (the Adds) where the choice is made.
        given: Whether the user chose the value, or a build showed it.
        why: Why the value is the target's default.
    """

    name: str
    value: str
    alternatives: Mapping[str, Counts]
    places: tuple[str, ...] = ()
    given: bool = False
    why: str = field(default="", compare=False)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "value": str(self.value),
            "alternatives": {str(name): counts.as_json() for name, counts in self.alternatives.items()},
            "places": list(self.places), "given": self.given, "why": self.why,
        }
