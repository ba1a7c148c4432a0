"""What an engine does: the work of its layers, and the kernels that no layer names."""

from __future__ import annotations

from dataclasses import dataclass, field

from qdqtool.timing.layouts import Reformat
from qdqtool.timing.work import Work


@dataclass(slots=True)
class Extra:
    """A kernel that the simulation does not list: a change of layout, a reformat at the edge, a Myelin region.

    ``reformat`` is the change of layout that it is, if it is one.
    """

    name: str
    work: Work
    reformat: Reformat | None = None


@dataclass
class Workload:
    """What an engine does.

    Attributes:
        layers: The work of each predicted layer, in the prediction's order.
        extras: Kernels beside them.
        unknown: Names of layers whose shapes are not known: they count as nothing but a kernel's floor.
    """

    layers: list[Work] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def all(self) -> list[Work]:
        return [*self.layers, *(e.work for e in self.extras)]
