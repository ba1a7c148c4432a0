"""What has to stay, and which nodes it depends on: a part is grown from the nodes that a finding names until it shows.

The part is then trimmed while it does, and made smaller by leaving nodes out.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from qdqtool.errors import BuilderError, ModelError
from qdqtool.extraction.cut import Cutter, Part
from qdqtool.extraction.moves import ALL, LARGE, OF_DATA, Move, copied, may_hold_sizes, pruned
from qdqtool.extraction.options import PREDICTED_MODELS
from qdqtool.findings.alike import key, readers_in
from qdqtool.ir.graph import Node
from qdqtool.proto.external_data import has_data, stored_bytes
from qdqtool.proto.shapes import infer_shapes
from qdqtool.proto.slim import tensor_bytes, without_data
from qdqtool.types import ConvOutcome, Finding, Prediction
from qdqtool.util import limits
from qdqtool.util.said import Said, said


@dataclass(frozen=True)
class Shown:
    """Findings and convolutions that stay the same.

    Attributes:
        findings: Of the whole model.
        convolutions: Of the whole model.
    """

    findings: tuple[Finding, ...] = ()
    convolutions: tuple[ConvOutcome, ...] = ()

    def needed(self) -> set[str]:
        """Nodes without which nothing shows the same: those that the findings list as readers."""
        return {name for f in self.findings for name in readers_in(key(f))}

    def missing(self, prediction: Prediction) -> list[Finding | ConvOutcome]:
        """What a prediction does not show; empty when it shows everything."""
        wanted = {(f.code, f.node) for f in self.findings}  # words of others are not looked at
        there = {key(f) for f in prediction.findings if (f.code, f.node) in wanted}
        by_name = {c.name: c for c in prediction.convolutions}
        return [
            *(f for f in self.findings if key(f) not in there),
            *(
                c
                for c in self.convolutions
                if c.name not in by_name or not same(c, by_name[c.name])
            ),
        ]

    def holds(self, prediction: Prediction) -> bool:
        """Whether a prediction shows everything."""
        return not self.missing(prediction)


def lacking(missing: Sequence[Finding | ConvOutcome]) -> list[Said]:
    """What is missing, in words."""
    return [
        said("{code} at {node}", code=m.code, node=m.node or "the network")
        if isinstance(m, Finding)
        else said("the outcome of {name}", name=m.name)
        for m in missing
    ]


def same(one: ConvOutcome, two: ConvOutcome) -> bool:
    """Whether two outcomes have the same data types; FLOAT agrees with any width of float."""
    return (
        one.op == two.op
        and one.weights == two.weights
        and one.precision.agrees(two.precision)
        and one.output.agrees(two.output)
        and len(one.inputs) == len(two.inputs)
        and all(a.agrees(b) for a, b in zip(one.inputs, two.inputs, strict=True))
    )


def of_findings(prediction: Prediction, findings: Sequence[Finding]) -> Shown:
    """Findings and the convolutions that they name."""
    named = {name for f in findings for name in (*f.convolutions, f.node)}
    return Shown(tuple(findings), tuple(c for c in prediction.convolutions if c.name in named))


def of_node(prediction: Prediction, name: str) -> Shown:
    """What is predicted of one node."""
    findings = tuple(f for f in prediction.findings if f.node == name or name in f.convolutions)
    return Shown(findings, tuple(c for c in prediction.convolutions if c.name == name))


def choose(prediction: Prediction, wanted: str, node: str | None) -> Finding:
    """The finding that ``CODE`` or ``CODE:n`` stands for; n counts from 1, in the order of ``predict``.

    Raises:
        ModelError: There is none.
    """
    code, colon, number = wanted.partition(":")
    code = code.strip().upper()
    found = [
        f
        for f in prediction.findings
        if f.code == code and (node is None or f.node == node or node in f.convolutions)
    ]
    what = prediction.model.path or "model"
    place = said(" at '{node}'", node=node) if node is not None else ""
    if not found:
        counts = prediction.findings_by_code()
        there = ", ".join(f"{c} ({n})" for c, n in counts.items()) or "none"
        raise ModelError(
            f"has no finding {code}{place} on {prediction.target}; its findings: {there}",
            what,
            code="unknown-choice",
            parameter="finding",
            node=node or "",
        )
    if not colon:
        return found[0]
    if not number.isascii() or not number.isdigit() or not 1 <= int(number[:9]) <= len(found):
        count = said("there are {count}", count=len(found)) if len(found) > 1 else "there is 1"
        raise ModelError(
            said(
                "{`finding`} {wanted}: {count} of {code}{place}, counted from 1",
                wanted=wanted,
                count=count,
                code=code,
                place=place,
            ),
            what,
            code="out-of-range",
            parameter="finding",
            node=node or "",
        )
    return found[int(number) - 1]


# Parts ---------------------------------------------------------------------------------------------------------------


Holds = Callable[[Part], bool]
_WIDE = 50  # times as many nodes as the farthest is away: of YOLOv8 they are 4, of Inception's blocks less
_GROUPS = 8  # of branches
_FINDING = 8  # times as long as finding what is left of a part does predicting it take

_RADII = (0, 1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 22, 30, 40, 60, 90, 140, 220, 400, 1000)


def grow(
    cutter: Cutter, anchors: Sequence[Node], holds: Holds, needed: frozenset[int] = frozenset()
) -> Iterator[Part | None]:
    """Parts around the anchors, wider and wider; yields None for each that does not hold and ends with one that does.

    The whole model is tried last and is taken as it is: what it shows is what was asked for. What lacks one of the
    ``needed`` nodes is not tried.
    """
    tried: set[Part] = set()
    total = len(cutter.model.nodes)
    for hops in _RADII:
        around = cutter.around(anchors, hops)
        for every in (False, True):
            part = cutter.part(around, every)
            if len(part.nodes) == total:
                yield cutter.whole()
                return
            if part in tried or not part.outputs or not needed <= part.nodes:
                continue
            tried.add(part)
            if holds(part):
                yield part
                return
            yield None
    yield cutter.whole()


class Effort:
    """How many nodes trimming may still predict: where each node of a wide part counts, its tries go with the square.

    A part with more findings than nodes, where copies of Qs stay, counts as many.

    Attributes:
        left: Nodes; below zero trimming has been broken off.
    """

    def __init__(self) -> None:
        self.left = limits.TRIMMED_NODES


def trim(
    cutter: Cutter,
    part: Part,
    anchors: Sequence[Node],
    holds: Holds,
    effort: Effort | None = None,
    needed: frozenset[int] = frozenset(),
) -> Iterator[Part | None]:
    """Smaller and smaller parts of one; yields None for each one that does not hold.

    Nodes far from the anchors go first, in groups, then one by one; what no longer hangs together with the anchors
    goes with them. It ends early where the effort is spent. Anchors and ``needed`` nodes stay, and no part without
    them is predicted.
    """
    effort = effort or Effort()
    for found in _one_group(cutter, part, anchors, holds, effort, needed):
        part = found or part
        yield found
    fixed = needed.union(n.index for n in anchors)
    size = max(1, len(part.nodes) // 2)
    while True:
        order = [i for i in _Spread(cutter, part, anchors).order if i not in fixed]
        shrunk = False
        start = 0
        while start < len(order):
            gone = set(order[start : start + size])
            start += size
            effort.left -= len(part.nodes) // _FINDING
            smaller = _without(cutter, part, gone, anchors, needed)
            if smaller is None and effort.left >= 0:
                continue
            if smaller is None:
                return
            effort.left -= len(smaller.nodes)
            if effort.left < 0:
                return
            if holds(smaller):
                part, shrunk = smaller, True
                yield part
                order = order[:start] + [i for i in order[start:] if i in part.nodes]
            else:
                yield None
        if size > 1:
            size = max(1, min(size // 2, len(part.nodes) // 2))
        elif not shrunk:
            return


def _one_group(
    cutter: Cutter,
    part: Part,
    anchors: Sequence[Node],
    holds: Holds,
    effort: Effort,
    needed: frozenset[int],
) -> Iterator[Part | None]:
    """A group of the branches of a wide part, and of these, as long as one shows it; None for each that does not.

    Eight of an eighth cost as much as one try without one of them.
    """
    while (spread := _Spread(cutter, part, anchors)).wide:
        for kept in spread.groups():
            smaller = _without(cutter, part, set(spread.order) - kept, anchors, needed)
            if smaller is None:
                continue
            effort.left -= len(smaller.nodes)
            if effort.left < 0:
                return
            if holds(smaller):
                part = smaller
                yield part
                break
            yield None
        else:
            return


def _without(
    cutter: Cutter, part: Part, gone: set[int], anchors: Sequence[Node], needed: frozenset[int]
) -> Part | None:
    """The part without some nodes; None where it would be no smaller, or lack one that is needed."""
    left = part.nodes - gone - cutter.constant
    joined = _joined(cutter, left, anchors)
    if not needed <= joined:
        return None
    for every in (False, True):
        smaller = cutter.part(joined, every)
        if smaller.outputs and len(smaller.nodes) < len(part.nodes) and smaller.nodes < part.nodes:
            return smaller
    return None


def _joined(cutter: Cutter, nodes: frozenset[int], anchors: Sequence[Node]) -> set[int]:
    found = {n.index for n in anchors}
    work = list(anchors)
    while work:
        for other in cutter.neighbours(work.pop()):
            if other.index in nodes and other.index not in found:
                found.add(other.index)
                work.append(other)
    return found


class _Spread:
    """The nodes of a part around the anchors, constant ones apart.

    Attributes:
        order: Their indices, the farthest from the anchors first.
        wide: Whether there are many beside each other.
    """

    def __init__(self, cutter: Cutter, part: Part, anchors: Sequence[Node]) -> None:
        self._distance = distance = {n.index: 0 for n in anchors}
        self._before: dict[int, int] = {}
        queue = list(anchors)
        for node in queue:
            for other in cutter.neighbours(node):
                if other.index in part.nodes and other.index not in distance:
                    distance[other.index] = distance[node.index] + 1
                    self._before[other.index] = node.index
                    queue.append(other)
        inner = part.nodes - cutter.constant
        self.order = sorted(inner, key=lambda i: (-distance.get(i, len(part.nodes)), i))
        self.wide = len(distance) > _WIDE * max(1, *distance.values())

    def groups(self) -> Iterator[set[int]]:
        """Branches that begin beside each other, an eighth of all at a time, each with the nodes near the anchors."""
        near = {i for i, far in self._distance.items() if not far}
        branches: dict[int, list[int]] = {}
        for index in self._before:  # the nearest first
            branches.setdefault(self._before[index], []).append(index)
        order, begun = [], sorted(near, reverse=True)
        while begun:  # each branch as a whole
            order.append(begun.pop())
            begun += branches.get(order[-1], ())[::-1]
        size = -(-len(order) // _GROUPS)
        rings = [
            list(ring) for _, ring in itertools.groupby(self._before, self._distance.__getitem__)
        ]
        for ring in rings:
            if len(near) + len(ring) > size:
                break
            near.update(ring)
        for start in range(0, len(order), size):
            kept = set(near)
            for index in order[start : start + size]:
                while index not in kept:
                    kept.add(index)
                    index = self._before[index]
            yield kept


ModelHolds = Callable[[onnx.ModelProto], bool]


class Shrinker:
    """Makes a model smaller, step by step.

    Large constants are kept apart from the models that are made: only one that is tried gets its own back.

    Args:
        proto: The model; it is not changed.
        holds: Whether a smaller one still shows what it should; one that raises does not.
        moves: How to make it smaller; see :mod:`qdqtool.extraction.moves`.
        limit: The most models to try.
        bounded: Whether nodes and bytes of those that are tried are limited too, see :mod:`qdqtool.util.limits`.

    Attributes:
        tried: Models tried.
        exhausted: Whether a limit ended the search.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        holds: ModelHolds,
        moves: Sequence[Move] = ALL,
        limit: int = PREDICTED_MODELS,
        bounded: bool = False,
    ) -> None:
        self._left = (limits.MINIMIZED_NODES, limits.MINIMIZED_BYTES) if bounded else None
        self._strict = True
        self._apart: dict[str, onnx.TensorProto] = {}
        light = put_apart(proto, self._apart)
        try:
            self._light = self._typed(light)
        except Exception:
            # onnx refuses some models as a whole (plugins, odd types); then it cannot judge parts of them either.
            self._strict = False
            try:
                self._light = self._typed(light)
            except Exception as error:  # dimensions or data that it stumbles over
                raise ModelError(
                    said(
                        "onnx cannot infer the model's shapes, so that nothing smaller can be looked "
                        "for ({reason}); leave out {`minimize`}",
                        reason=" ".join(str(error).split())[:200],
                    ),
                    code="shapes-unknown",
                    parameter="minimize",
                ) from error
        self._holds = holds
        self._moves = moves
        self._limit = limit
        self._seen: set[bytes] = {self._digest(self._light)}
        self.tried = 0
        self.exhausted = False

    @property
    def proto(self) -> onnx.ModelProto:
        """The smallest model found so far that holds."""
        return put_back(self._light, self._apart)

    def steps(self) -> Iterator[bool]:
        """Goes on until nothing smaller holds; yields whether each model that was tried does."""
        progress = True
        while progress:
            progress = False
            for move in self._moves:
                found = True
                while found:
                    found = False
                    of_data = move in OF_DATA
                    candidates = move(self._light, self._whole) if of_data else move(self._light)
                    while (candidate := next(candidates, None)) is not None:
                        if self.tried >= self._limit:
                            self.exhausted = True
                            return
                        answer = self._try(candidate, _data(candidate) if of_data else 0)
                        del (
                            candidate
                        )  # each may be as large as the model: the next is made in its place
                        if self.exhausted:
                            return
                        if answer is None:
                            continue
                        yield answer
                        if answer:
                            found = progress = True
                            break

    def run(self) -> onnx.ModelProto:
        """Takes all steps and returns the smallest model."""
        for _ in self.steps():
            pass
        return self.proto

    def _affords(self, nodes: int, size: int = 0) -> bool:
        """Whether there is enough left of what is limited; where there is, it is taken."""
        if self._left is not None:
            self._left = (self._left[0] - nodes, self._left[1] - size)
            self.exhausted = min(self._left) < 0
        return not self.exhausted

    def _whole(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        return self._apart.get(tensor.doc_string, tensor)

    def _try(self, candidate: onnx.ModelProto, made: int = 0) -> bool | None:
        """Whether a candidate holds (it is then the new model); None when it is not tried.

        That is one that is no model, that was tried before, or for which too little is left. ``made`` are the bytes
        that were copied to make it.
        """
        if not self._affords(len(candidate.graph.node) // _FINDING, made):
            return None
        apart = dict(self._apart)
        try:
            typed = self._typed(put_apart(candidate, apart))
        except Exception:
            # Cutting makes models that onnx refuses; they are no candidates.
            return None
        digest = self._digest(typed)
        if digest in self._seen:
            return None
        self._seen.add(digest)
        whole = put_back(typed, apart)
        if not self._affords(len(whole.graph.node), _data(whole)):
            return None
        self.tried += 1
        try:
            holds = self._holds(whole)
        except BuilderError:
            raise  # the compiler is gone: nothing that comes after would mean anything
        except Exception:
            return False
        if holds:
            self._light = typed
            marks = (t.doc_string for t in typed.graph.initializer)
            # A tensor of a candidate keeps all of it in memory: what is new is copied.
            self._apart = {m: self._apart.get(m) or copied(apart[m]) for m in marks if m in apart}
        return holds

    def _typed(self, clean: onnx.ModelProto) -> onnx.ModelProto:
        return infer_shapes(clean, check_type=self._strict, strict_mode=self._strict)

    @staticmethod
    def _digest(proto: onnx.ModelProto) -> bytes:
        return hashlib.sha256(proto.SerializeToString(deterministic=True)).digest()


def _data(proto: onnx.ModelProto) -> int:
    """Bytes of the initializers that have their data, as their dimensions say it: protobuf would write all of them."""
    return sum(stored_bytes(t) for t in proto.graph.initializer if has_data(t))


def put_apart(proto: onnx.ModelProto, apart: dict[str, onnx.TensorProto]) -> onnx.ModelProto:
    """What the outputs of a model need, large constants without data: these are added by a mark of what they hold."""

    def light(tensor: onnx.TensorProto) -> onnx.TensorProto:
        if tensor_bytes(tensor) <= LARGE or may_hold_sizes(tensor):
            return tensor
        mark = hashlib.sha256(tensor.SerializeToString(deterministic=True)).hexdigest()
        apart.setdefault(mark, tensor)
        stub = without_data(tensor)
        stub.doc_string = mark
        return stub

    return pruned(proto, light)


def put_back(proto: onnx.ModelProto, apart: Mapping[str, onnx.TensorProto]) -> onnx.ModelProto:
    """A copy of a model with the constants that were put apart."""
    result = copied(proto)
    for tensor in result.graph.initializer:
        whole = apart.get(tensor.doc_string)
        if whole is not None:
            name = tensor.name
            tensor.CopyFrom(whole)
            tensor.name = name
    return result
