"""Whether the prediction of a changed model is better: as a whole, and around each of the changes made together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from qdqtool.buildlog.names import base_name
from qdqtool.fixing.site import Aim
from qdqtool.ir.graph import Model, Node
from qdqtool.types import Prediction, Severity
from qdqtool.util.notes import Note, Remark


@dataclass(frozen=True, slots=True)
class Against:
    """What speaks against a change, and whether anything gets worse."""

    why: Note
    worse: bool = True


NO_GAIN = Against(Remark.NO_BETTER(), worse=False)


@dataclass(slots=True)
class Tally:
    """What is counted of a prediction, or of a part of one.

    Attributes:
        int8: INT8 convolutions.
        int8_to_int8: Of them those that write INT8.
        conversions: Q and DQ that stay.
        left: Findings of the codes that are being fixed.
        errors: Findings that end the build, by code.
    """

    int8: int = 0
    int8_to_int8: int = 0
    conversions: int = 0
    left: int = 0
    errors: Counter[str] = field(default_factory=Counter)


def no_better(before: Prediction, after: Prediction, aim: Aim) -> Against | None:
    """Why a prediction is not better than the one before; None where it is.

    Args:
        before: Of the model as it was.
        after: Of the changed one.
        aim: What the changes are for.
    """
    return _no_better(_total(before, aim), _total(after, aim), aim)


def blamed(
    model: Model,
    candidate: Model,
    touched: Sequence[Collection[int]],
    before: Prediction,
    after: Prediction,
    aim: Aim,
) -> dict[int, str]:
    """Which of several changes made together are at fault, judged each by what lies nearer to it than to any other.

    Args:
        model: The model as it was.
        candidate: With all changes.
        touched: For each change the indices of the nodes that it edits; changes that share one are judged together.
        before: Prediction of the model.
        after: Of the candidate.
        aim: What the changes are for.

    Returns:
        Number of each change around which the prediction gets worse, with the reason.
    """
    groups = _joined(touched)
    nearest = _nearest(model, candidate, touched, groups)
    tallies = [_by_group(p, aim, nearest) for p in (before, after)]
    found = {}
    for group in set(groups):
        against = _no_better(tallies[0][group], tallies[1][group], aim)
        if against is not None and against.worse:
            found[group] = against.why
    return {i: found[group] for i, group in enumerate(groups) if group in found}


def _no_better(before: Tally, after: Tally, aim: Aim) -> Against | None:
    if after.errors.total() > before.errors.total():
        return Against(Remark.BRINGS_ERRORS(codes=list(after.errors - before.errors)))
    if after.errors.total() < before.errors.total():
        return None
    for one, two, remark in (
        (before.int8, after.int8, Remark.FEWER_INT8),
        (before.int8_to_int8, after.int8_to_int8, Remark.FEWER_INT8_TO_INT8),
    ):
        if two < one and not aim.costs:
            return Against(remark(after=two, before=one))
    if after.conversions > before.conversions and not aim.retypes and not aim.costs:
        return Against(Remark.MORE_CONVERSIONS(after=after.conversions, before=before.conversions))
    gained = (
        after.int8 > before.int8
        or after.int8_to_int8 > before.int8_to_int8
        or after.conversions < before.conversions
        or after.left < before.left
    )
    return None if gained else NO_GAIN


def _total(prediction: Prediction, aim: Aim) -> Tally:
    summary = prediction.summary()
    return Tally(
        summary["int8"],
        summary["int8_to_int8"],
        summary["conversions"] or 0,
        sum(f.code in aim.codes for f in prediction.findings),
        Counter(f.code for f in prediction.findings if f.severity == Severity.ERROR),
    )


def _by_group(prediction: Prediction, aim: Aim, nearest: dict[str, int]) -> defaultdict[int, Tally]:
    found: defaultdict[int, Tally] = defaultdict(Tally)
    for conv in prediction.convolutions:
        tally = found[nearest.get(conv.name, -1)]
        tally.int8 += conv.is_int8
        tally.int8_to_int8 += conv.int8_in_int8_out
    for name in prediction.conversion_nodes:
        found[nearest.get(name if name in nearest else base_name(name), -1)].conversions += 1
    for finding in prediction.findings:
        tally = found[nearest.get(finding.node, -1)]
        tally.left += finding.code in aim.codes
        if finding.severity == Severity.ERROR:
            tally.errors[finding.code] += 1
    return found


def _joined(touched: Sequence[Collection[int]]) -> list[int]:
    """For each change the first one with which it shares a node, through others as well."""
    groups = list(range(len(touched)))

    def first(number: int) -> int:
        while groups[number] != number:
            groups[number] = groups[groups[number]]
            number = groups[number]
        return number

    owner: dict[int, int] = {}
    for number, nodes in enumerate(touched):
        for index in nodes:
            other = first(owner.setdefault(index, number))
            mine = first(number)
            groups[max(mine, other)] = min(mine, other)
    return [first(number) for number in range(len(touched))]


def _nearest(
    model: Model, candidate: Model, touched: Sequence[Collection[int]], groups: Sequence[int]
) -> dict[str, int]:
    """Node to the group of changes that is nearest to it, over both models."""
    found: dict[int, int] = {}
    for nodes, group in zip(touched, groups, strict=True):
        found.update(dict.fromkeys(nodes, group))
    queue = list(found)
    for index in queue:
        for other in _around(model, model.nodes[index]):
            if other.index not in found:
                found[other.index] = found[index]
                queue.append(other.index)
    named = {model.nodes[index].name: group for index, group in found.items()}
    for node in candidate.ordered:
        if node.name not in named:
            near = (named[other.name] for other in _around(candidate, node) if other.name in named)
            named[node.name] = next(near, -1)
    return named


def _around(model: Model, node: Node) -> Iterator[Node]:
    """The nodes before and behind one; constants, which nodes of the whole network may share, join nothing."""
    for tensor in (*node.inputs, *node.captured):
        maker = model.producer(tensor)
        if maker is not None and maker.op != "Constant":
            yield maker
    for tensor in node.outputs:
        yield from model.consumers(tensor)
