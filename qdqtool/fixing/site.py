"""One place where a fix can be applied."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy.typing as npt

from qdqtool.errors import ModelError
from qdqtool.findings.coded import fixed, fixes_of
from qdqtool.fixing.compare import ATOL
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Node
from qdqtool.patterns.view import View
from qdqtool.trt.targets import Target
from qdqtool.types import Finding, FindingCode, Prediction, Refusal

R = TypeVar("R", bound=Refusal)


@dataclass(frozen=True)
class Site:
    """A fix at one place.

    Attributes:
        node: Where.
        what: What is done, in a few words, for the user.
        apply: Does it.
        names: The nodes and tensors that it is about, ``node`` among them.
        code: That of the finding which it removes; a step gives it.
        answers: All findings that it answers, by code and node.
        refusal: Why it is not tried; empty for a fix that is.
    """

    node: str
    what: str
    apply: Callable[[Editor], None]
    names: Collection[str] = ()
    code: str = ""
    answers: frozenset[tuple[str, str]] = frozenset()
    refusal: str = ""


def named(reported: Sequence[Refusal]) -> set[str]:
    """Every name in the refusals."""
    return {n for r in reported for n in r.names()}


def at(view: View, names: Iterable[str]) -> list[Node]:
    """The nodes of these names, each once, in graph order."""
    places = set(names)
    return [n for n in view.model.nodes if n.name in places]


def nodes_of(view: View, reported: Sequence[Refusal]) -> list[Node]:
    """The nodes that were refused, each once, in graph order."""
    return at(view, (r.node for r in reported))


def only(kind: type[R], reported: Sequence[Refusal]) -> list[R]:
    """The refusals of a class."""
    return [r for r in reported if isinstance(r, kind)]


@dataclass(frozen=True)
class Aim:
    """What changes that are judged together are for, and what they may cost.

    Attributes:
        kinds: The classes of the refusals that they answer.
        noise: By how much the noise of the network's outputs against the float network may grow.
        costs: Whether speed is given up for accuracy, which is done only where ``--only`` asks for it.
        retypes: Whether types are the gain; Casts may then split a conversion in two.
        rounding: Of the outputs, as a part of the largest one.
        weights: Whether weights are quantized anew, so that those of the float network are what both are held against.
    """

    kinds: tuple[type[Refusal], ...]
    noise: float
    costs: bool = False
    retypes: bool = False
    rounding: float = ATOL
    weights: bool = False

    @functools.cached_property
    def codes(self) -> tuple[FindingCode, ...]:
        """Those of the findings that they can remove."""
        return fixes_of(self.kinds)

    def answered(self, finding: Finding) -> tuple[Refusal, ...]:
        """The refusals behind a finding that are among them."""
        return (
            tuple(r for r in fixed(finding) if isinstance(r, self.kinds))
            if finding.code in self.codes
            else ()
        )


_SHARED = 100  # reports of one name; one that more of them name, as a weight of all, does not tell them apart


@dataclass(frozen=True)
class _Reported:
    """A finding, or a refusal without one; the least ``rank`` says best what a change is for: automatic ones first."""

    code: FindingCode
    node: str
    refusals: tuple[Refusal, ...]
    rank: int


@dataclass(frozen=True, kw_only=True)
class Step(Aim):
    """Fixes that are tried together; ``find`` lists the places, given the model, the target and what was reported."""

    find: Callable[[View, Target, Sequence[Refusal]], list[Site]]

    def sites(
        self, view: View, target: Target, prediction: Prediction, wanted: Collection[str]
    ) -> list[Site]:
        """The places in a predicted model, each with the code of the finding that it answers.

        What was refused without a finding, for something else costs more there, has the first code of its class.
        """
        found = [
            _Reported(f.code, f.node, refusals, not f.automatic)
            for f in prediction.findings
            if (refusals := self.answered(f))
        ]
        told = {r for f in found for r in f.refusals}
        for r in prediction.refusals:
            if isinstance(r, self.kinds) and r not in told:
                codes = [c for c in self.codes if c in fixes_of((type(r),))]
                found += [_Reported(code, r.node, (r,), 2) for code in codes[:1]]
        reported = list(dict.fromkeys(r for f in found for r in f.refusals))
        if not reported:
            return []
        naming: dict[str, list[int]] = defaultdict(list)
        for number, f in enumerate(found):
            for name in named(f.refusals) if f.code in wanted else ():
                naming[name].append(number)
        sites = (self._answering(s, found, naming) for s in self.find(view, target, reported))
        return [s for s in sites if s is not None]

    def _answering(
        self, site: Site, found: Sequence[_Reported], naming: Mapping[str, Sequence[int]]
    ) -> Site | None:
        """The site with the code of what was reported at it, or else of what names it; None where nothing does."""
        places = {site.node, *site.names}
        told = [naming.get(place, ()) for place in places]
        own = {n for numbers in told if len(numbers) <= _SHARED for n in numbers}
        answered = [
            found[number] for number in sorted(own or {n for numbers in told for n in numbers})
        ]
        if not answered:
            return None
        first = min(
            answered,
            key=lambda f: (
                f.rank,
                f.node not in places,
                self.codes.index(f.code),
                f.node != site.node,
            ),
        )
        node = first.node if first.node in places else site.node
        return replace(
            site, code=first.code, node=node, answers=frozenset((f.code, f.node) for f in answered)
        )


def along(
    values: npt.NDArray[Any], shape: tuple[int, ...], axis: int | None, name: str
) -> npt.NDArray[Any]:
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
        raise ModelError(
            f"{name} has {values.size} scales or zero points along axis {where} of a {dims} tensor",
            code="scale-count",
            node=name,
        )
    spread = [1] * len(shape)
    spread[where] = -1
    return values.reshape(spread)
