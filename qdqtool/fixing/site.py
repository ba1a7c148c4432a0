"""One place where a fix can be applied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from qdqtool.errors import ModelError
from qdqtool.model.editor import Editor
from qdqtool.model.graph import Node
from qdqtool.model.view import View
from qdqtool.trt.targets import Target
from qdqtool.types import FindingCode, Prediction, Refusal


@dataclass(frozen=True)
class Site:
    """A fix at one place.

    Attributes:
        code: The finding code that it removes.
        node: Where.
        what: What is done, in a few words, for the user.
        apply: Does it.
    """

    code: str
    node: str
    what: str
    apply: Callable[[Editor], None]


def named(reported: Sequence[Refusal]) -> set[str]:
    """Every name in the refusals."""
    return {n for r in reported for n in r.names()}


def nodes_of(view: View, reported: Sequence[Refusal]) -> list[Node]:
    """The nodes that were refused, each once, in graph order."""
    places = {r.node for r in reported}
    return [n for n in view.model.nodes if n.name in places]


@dataclass(frozen=True)
class Step:
    """Fixes that are tried together.

    Attributes:
        causes: The classes of refusals behind the findings that it can remove.
        codes: Their codes, for ``--only``.
        find: Lists the places, given the model, the target and the refusals that were reported.
        noise: By how much the noise of the network's outputs against the float network may grow.
        default: Whether it is done without being asked for by ``--only``.
    """

    causes: tuple[type[Refusal], ...]
    codes: tuple[FindingCode, ...]
    find: Callable[[View, Target, Sequence[Refusal]], list[Site]]
    noise: float
    default: bool = True

    def sites(self, view: View, target: Target, prediction: Prediction, wanted: Collection[str]) -> list[Site]:
        """The places in a predicted model, of the codes that are wanted."""
        found = (r for f in prediction.findings for c in f.causes for r in (c.refusal, *c.also))
        refused = [r for r in dict.fromkeys((*prediction.refusals, *found)) if isinstance(r, self.causes)]
        sites = self.find(view, target, refused) if refused else []
        # An Add that reads its residual in INT8 is the same change, seen from a pooling that both read.
        return [s if s.code in wanted else replace(s, code="POOL-MIXED") for s in sites
                if s.code in wanted or (s.code == "SKIP-FLOAT" and "POOL-MIXED" in wanted)]


def along(values: npt.NDArray[Any], shape: tuple[int, ...], axis: int | None, name: str) -> npt.NDArray[Any]:
    """Values of one channel each, or one for all, shaped to multiply a tensor of that shape along the axis.

    Args:
        values: Scales or zero points.
        shape: The tensor's.
        axis: Of the channels; None where there is one value for all.
        name: The quantizer's, for the message.

    Raises:
        ModelError: The tensor has another number of channels.
    """
    if values.size == 1:
        return values.reshape(())
    where = 0 if axis is None else axis
    if not -len(shape) <= where < len(shape) or shape[where] != values.size:
        dims = "x".join(map(str, shape)) or "scalar"
        raise ModelError(f"{name} has {values.size} scales or zero points along axis {where} of a {dims} tensor")
    spread = [1] * len(shape)
    spread[where] = -1
    return values.reshape(spread)
