"""Comparison of predictions before and after changes, for the model and near each change."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from qdqtool.buildlog.names import base_name
from qdqtool.fixing.site import FixCriteria
from qdqtool.insertion.scales import UnionFind
from qdqtool.ir.graph import Model, Node
from qdqtool.reasons.finding import Severity
from qdqtool.trt.result import Prediction
from qdqtool.util.notes import Note

NO_GAIN = Note("the prediction would not improve", code="no-better")
"""Objection to a change that makes the prediction neither better nor worse."""
_NO_NODE = -2  # group of the changes that edit no node
_FAR = -1  # group of the nodes that are not connected to any change


@dataclass(slots=True)
class PredictionCounts:
    """Numbers of convolutions, conversions and findings in a prediction or a part of it.

    Attributes:
        quantized: Number of INT8 and FP8 convolutions.
        quantized_output: Number of these convolutions that write INT8 or FP8.
        conversions: Number of remaining Q and DQ.
        places: Nodes of the findings with the codes to fix, without findings that cost nothing.
        errors: Number of findings that are errors, by code.
    """

    quantized: int = 0
    quantized_output: int = 0
    conversions: int = 0
    places: list[tuple[str, ...]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


def find_objection(before: Prediction, after: Prediction, criteria: FixCriteria) -> Note | None:
    """Return why the changes do not improve the prediction; None if they do.

    Args:
        before: Prediction of the model without the changes.
        after: Prediction of the changed model.
        criteria: Purpose of the changes.
    """
    return _compare_counts(_count_all(before, criteria), _count_all(after, criteria), criteria)


def find_worsening_changes(
    model: Model,
    candidate: Model,
    edited: Sequence[Collection[int]],
    before: Prediction,
    after: Prediction,
    criteria: FixCriteria,
) -> dict[int, Note]:
    """Return the changes near which the prediction gets worse, with the reasons.

    The outcome of each node is attributed to the change that is nearest to the node.

    Args:
        model: Model without the changes.
        candidate: Model with all changes.
        edited: Indices of the nodes that each change edits. Changes that share a node count as one
            change.
        before: Prediction of the model.
        after: Prediction of the candidate.
        criteria: Purpose of the changes.

    Returns:
        The reasons by the position of the change in `edited`.
    """
    groups = _group_changes(edited)
    nearest = _find_nearest_groups(model, candidate, edited, groups)
    counts_before = _count_by_group(before, criteria, nearest)
    counts_after = _count_by_group(after, criteria, nearest)
    reasons = {}
    for group in set(groups):
        objection = _compare_counts(counts_before[group], counts_after[group], criteria)
        if objection is not None and objection != NO_GAIN:
            reasons[group] = Note(f"near this place, {objection}", code=objection.code)
    return {i: reasons[group] for i, group in enumerate(groups) if group in reasons}


def _compare_counts(
    before: PredictionCounts, after: PredictionCounts, criteria: FixCriteria
) -> Note | None:
    if after.errors.total() > before.errors.total():
        codes = ", ".join(after.errors - before.errors)
        return Note(f"the fix would cause errors ({codes})", code="brings-errors")
    if after.errors.total() < before.errors.total():
        return None
    regression = _describe_regression(before, after, criteria)
    if regression is not None:
        return regression
    is_better = (
        after.quantized > before.quantized
        or after.quantized_output > before.quantized_output
        or after.conversions < before.conversions
        or (len(after.places) < len(before.places) and not criteria.shares_scales)
        or (criteria.requantizes_weights and _is_moved(before.places, after.places))
    )
    return None if is_better else NO_GAIN


def _is_moved(before: Sequence[Iterable[str]], after: Sequence[Iterable[str]]) -> bool:
    """Return whether nodes have no finding any more, although the number of findings is equal.

    A check of all weights reports only its worst fault. If this fault was removed, the check may
    report a smaller one at another layer.
    """
    nodes = set(chain.from_iterable(before)) - set(chain.from_iterable(after))
    return bool(nodes) and len(after) == len(before)


def _describe_regression(
    before: PredictionCounts, after: PredictionCounts, criteria: FixCriteria
) -> Note | None:
    if criteria.costs_speed:
        return None
    if after.quantized < before.quantized:
        return Note(
            "the number of INT8 or FP8 convolutions would fall from "
            f"{before.quantized} to {after.quantized}",
            code="fewer-int8",
        )
    if after.quantized_output < before.quantized_output:
        return Note(
            "the number of convolutions with INT8 or FP8 input and output would fall from "
            f"{before.quantized_output} to {after.quantized_output}",
            code="fewer-int8-to-int8",
        )
    if after.conversions > before.conversions and not criteria.changes_types:
        return Note(
            f"the number of Q/DQ layers would rise from {before.conversions} to "
            f"{after.conversions}",
            code="more-conversions",
        )
    return None


def _count_all(prediction: Prediction, criteria: FixCriteria) -> PredictionCounts:
    summary = prediction.summary()
    return PredictionCounts(
        summary["int8"] + summary["fp8"],
        summary["int8_to_int8"] + summary["fp8_to_fp8"],
        summary["conversions"] or 0,
        [
            (f.node, *f.convolutions)
            for f in prediction.findings
            if f.code in criteria.codes and f.gains
        ],
        Counter(f.code for f in prediction.findings if f.severity == Severity.ERROR),
    )


def _count_by_group(
    prediction: Prediction, criteria: FixCriteria, nearest: dict[str, int]
) -> defaultdict[int, PredictionCounts]:
    counts: defaultdict[int, PredictionCounts] = defaultdict(PredictionCounts)
    for conv in prediction.convolutions:
        group = counts[nearest.get(conv.name, _FAR)]
        group.quantized += conv.is_quantized
        group.quantized_output += conv.quantized_in_quantized_out
    for name in prediction.conversion_nodes:
        counts[nearest.get(name if name in nearest else base_name(name), _FAR)].conversions += 1
    for finding in prediction.findings:
        group = counts[nearest.get(finding.node, _FAR)]
        if finding.code in criteria.codes and finding.gains:
            group.places.append((finding.node, *finding.convolutions))
        if finding.severity == Severity.ERROR:
            group.errors[finding.code] += 1
    return counts


def _group_changes(edited: Sequence[Collection[int]]) -> list[int]:
    """Return the group of each change, as a number. Changes that share nodes are one group."""
    groups: UnionFind[int] = UnionFind()
    for nodes in edited:
        for index, other in pairwise(nodes):
            groups.union(index, other)
    return [groups.find(min(nodes, default=_NO_NODE)) for nodes in edited]


def _find_nearest_groups(
    model: Model, candidate: Model, edited: Sequence[Collection[int]], groups: Sequence[int]
) -> dict[str, int]:
    """Return the group of the nearest change, by node name, for the nodes of both models.

    A new node belongs to the change that edited one of its neighbors, if there is one.
    """
    by_index: dict[int, int] = {}
    for nodes, group in zip(edited, groups, strict=True):
        by_index.update(dict.fromkeys(nodes, group))
    edited_by_name = {model.nodes[index].name: group for index, group in by_index.items()}
    queue = list(by_index)
    for index in queue:
        for other in _neighbors(model, model.nodes[index]):
            if other.index not in by_index:
                by_index[other.index] = by_index[index]
                queue.append(other.index)
    by_name = {model.nodes[index].name: group for index, group in by_index.items()}
    for node in candidate.ordered:
        if node.name not in by_name:
            names = [other.name for other in _neighbors(candidate, node)]
            found = (d[n] for d in (edited_by_name, by_name) for n in names if n in d)
            by_name[node.name] = next(found, _FAR)
    return by_name


def _neighbors(model: Model, node: Node) -> Iterator[Node]:
    """Yield the producers and consumers of a node, except Constant nodes.

    A Constant node may connect nodes that are far apart.
    """
    for tensor in node.consumed_tensors:
        producer = model.producer(tensor)
        if producer is not None and producer.op != "Constant":
            yield producer
    for tensor in node.outputs:
        yield from model.consumers(tensor)
