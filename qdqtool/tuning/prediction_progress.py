"""Progress of predicting the costs of the choices of a search."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PredictionProgress:
    """Progress of predicting the costs of all choices.

    Attributes:
        choices: Number of choices.
        values: Predicted costs so far: of the model with every layer in INT8, of each choice, and
            of choices that cost no time, together with those before.
        new: Number of costs that were not known from an earlier run.
        seconds: Seconds for these costs.
    """

    choices: int = 0
    values: list[float] = field(default_factory=list)
    new: int = 0
    seconds: float = 0.0

    @property
    def remaining_seconds(self) -> float:
        """Estimated seconds for the other costs, from the costs so far."""
        base, *singles = self.values[: 1 + self.choices] or [0.0]
        free = sum(value <= base for value in singles) / max(len(singles), 1)
        # Joining a choice that costs no time takes two costs, of which one is known.
        joined = max(len(self.values) - 1 - self.choices, 0) / 2
        remaining = self.choices - len(singles) + max(free * self.choices - joined, 0)
        return remaining * self.seconds / max(self.new, 1)
