"""Chain of placements: measure few of its steps to find the first sufficient one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qdqtool.tuning.planner import Configuration
from qdqtool.util.text import format_count

NamedConfigurations = Sequence[tuple[str, Configuration]]

_MEASURED_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # lengths at which a chain is measured


@dataclass
class MeasuredChain:
    """Chain of placements, in which each step has one more float choice than the step before.

    A step is sufficient if more float choices are useless, because the step reaches the goal or
    exceeds the budget. Steps are measured at growing distances, then by bisection.

    Attributes:
        measure: Function that measures configurations with names.
        is_sufficient: Function that returns whether a measured step is sufficient.
        steps: Name and configuration of each step.
        waiting: Positions of steps to measure that are not measured yet.
        last_measured: Position of the last measured step of `_MEASURED_STEPS`; -1 without one.
        first_sufficient: Position of the first step that is known to be sufficient; None if
            unknown.
        last_insufficient: Position of the last step before `first_sufficient` that is known to be
            insufficient; -1 if unknown.
    """

    measure: Callable[[NamedConfigurations], None]
    is_sufficient: Callable[[Configuration], bool]
    steps: list[tuple[str, Configuration]] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    last_measured: int = -1
    first_sufficient: int | None = None
    last_insufficient: int = -1

    @property
    def is_beyond_first_sufficient(self) -> bool:
        """Whether a step well after the first sufficient step is measured."""
        first = self.first_sufficient
        return first is not None and self.last_measured > first + first // 2

    def add(self, configuration: Configuration, may_measure: bool = True) -> None:
        """Add a step. If its position is one of `_MEASURED_STEPS`, measure it or let it wait.

        Args:
            configuration: Configuration of the step.
            may_measure: Whether to measure now, together with the steps that wait.
        """
        self.steps.append((format_count(len(self.steps) + 1, "choice"), configuration))
        if len(self.steps) in _MEASURED_STEPS:
            self.waiting.append(len(self.steps) - 1)
            if may_measure:
                self.measure_waiting()

    def measure_waiting(self) -> None:
        """Measure the steps that wait."""
        if self.waiting:
            self.last_measured = self.waiting[-1]
        self._measure_steps(self.waiting)
        self.waiting = []

    def find_first_sufficient(self) -> bool:
        """Measure steps until the step before the first sufficient step is measured.

        If no sufficient step is known, the last step of the chain is measured.

        Returns:
            Whether a step is sufficient.
        """
        if self.first_sufficient is None and self.steps:
            self._measure_steps([len(self.steps) - 1])
        if self.first_sufficient is None:
            return False
        while self.first_sufficient - self.last_insufficient > 1:
            middle = (self.first_sufficient + self.last_insufficient) // 2
            self.measure([self.steps[middle]])
            if self.is_sufficient(self.steps[middle][1]):
                self.first_sufficient = middle
            else:
                self.last_insufficient = middle
        return True

    def _measure_steps(self, positions: Sequence[int]) -> None:
        self.measure([self.steps[position] for position in positions])
        for position in positions:
            if self.first_sufficient is not None:
                return
            if self.is_sufficient(self.steps[position][1]):
                self.first_sufficient = position
            else:
                self.last_insufficient = position
