"""TensorRT's network as the optimizer passes see it, and the edits that passes make.

Also on which TensorRT the rules that a network used were seen.
"""

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from qdqtool.knowledge.tables import Case
from qdqtool.model.operators import LayerKind
from qdqtool.trt.layers import WEIGHTED, Layer, Tensor
from qdqtool.trt.targets import BUILDS, Target
from qdqtool.types import Evidence, MyelinRegion

_RANK = operator.attrgetter("rank")
_SCALE = LayerKind.SCALE  # a member of an enumeration is slow to look up


class Network:
    """Layers and tensors, with the edits that optimizer passes make.

    Attributes:
        layers: Layer id to layer, in creation order.
        inputs: Network input tensors.
        outputs: Network output tensors.
        relisted: Whether Myelin took a part out, after which the layers are listed anew.
        counts: Number of layers behind the stages for which TensorRT logs it (``Original``, ``After ...``).
        residuals_behind_activation: Adds, as ONNX nodes, whose fusion the target's ``residual_through_activation``
            decided.
        regions: What Myelin takes, on targets where that decides about Q and DQ.
        focus: Tensors that a round of a loop looks at, those that the last one touched; None for all.
        refusing: Whether refusals are reported: in a loop only those of its last round, which looks at all.
        touched: Tensors whose producer or readers were edited in this round.
        q_copies: Quantizers that were copied to the inputs of a layer so far; bounded in SplitQAcrossPrecedingFanIn.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.relisted = False
        self.q_copies = 0
        self.counts: dict[str, int] = {}
        self.residuals_behind_activation: dict[str, None] = {}
        self.regions: list[MyelinRegion] = []
        self.focus: dict[Tensor, None] | None = None
        self.refusing = True
        self.touched: dict[Tensor, None] = {}
        self._by_kind: defaultdict[LayerKind, dict[int, Layer]] = defaultdict(dict)
        self._ids = itertools.count()

    # Building -------------------------------------------------------------------------------------------------

    def add(self, layer: Layer, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> Layer:
        """Adds a layer and connects it."""
        layer.id = next(self._ids)
        layer.inputs, layer.outputs = list(inputs), list(outputs)
        for tensor in layer.inputs:
            tensor.read_by(layer)
        for tensor in layer.outputs:
            tensor.producer = layer
        self.layers[layer.id] = layer
        self._by_kind[layer.kind][layer.id] = layer
        return layer

    def remove_dead(self) -> None:
        """Removes the layers that no network output depends on."""
        unread = [layer for layer in self.layers.values() if not layer.is_read]
        for layer in unread:
            above = dict.fromkeys(layer.above)
            self.remove(layer)
            unread += (maker for maker in above if not maker.is_read)

    def order(self) -> None:
        """Ranks the layers as the optimizer visits them: breadth first, a layer once all its inputs were visited.

        The lines of bevfusion-camera-orin-trt8502 (ConvReluFusion visits both input branches in turn) and of the other
        complete logs are in this order, but for some convolutions that QuantizeDoubleInputNodes visits last.
        Outcomes do not depend on it, only names and the order of lines do.
        """
        for place, layer in enumerate(self.in_order()):
            layer.rank = place, 0, 0

    def depth_first(self) -> list[Layer]:
        """The layers in the order in which convolutions are merged side by side.

        Depth first from the outputs, first to last, a layer after its inputs, of which the later-listed come first: so
        yolov8-orin-trt8412-excerpts names merged layers. Names rest on it alone.
        """
        found: list[Layer] = []
        started: set[int] = set()
        stack = [(t.producer, False) for t in reversed(self.outputs) if t.producer is not None]
        while stack:
            layer, behind = stack.pop()
            if behind:
                found.append(layer)
            elif layer.id not in started:
                started.add(layer.id)
                stack.append((layer, True))
                stack.extend((above, False) for above in layer.above)
        return found

    # Reading --------------------------------------------------------------------------------------------------

    def of_kind(self, *kinds: LayerKind) -> list[Layer]:
        """The layers of some kinds, in the order in which the optimizer visits them."""
        found = [layer for kind in kinds for layer in self._by_kind[kind].values()]
        found.sort(key=_RANK)
        return found

    def has(self, *kinds: LayerKind) -> bool:
        """Whether there are layers of some kinds."""
        return any(self._by_kind[kind] for kind in kinds)

    def pairs(
        self, *kinds: LayerKind, read_by: LayerKind | None = None
    ) -> Iterator[tuple[Layer, Layer]]:
        """The layers of some kinds whose output one other layer alone, of a kind where one is given, reads; with that."""
        if read_by is not None and not self.has(read_by):
            return
        for layer in self.of_kind(*kinds):
            reader = layer.out.only_reader()
            if reader is not None and (read_by is None or reader.kind is read_by):
                yield layer, reader

    def near(self, kind: LayerKind) -> list[Layer]:
        """The layers of a kind, of which a loop's later rounds see only those at tensors that were touched."""
        if self.focus is None:
            return self.of_kind(kind)
        focus, touched, layers = self.focus, self.touched, self._by_kind[kind]
        if len(layers) < len(focus) + len(touched):  # the less to walk through
            apart = {*focus, *touched}.isdisjoint
            close = [
                layer
                for layer in layers.values()
                if not (apart(layer.inputs) and apart(layer.outputs))
            ]
            close.sort(key=_RANK)
            return close
        found: dict[Layer, None] = {}
        for tensors in (focus, touched):
            for tensor in tensors:
                for reader in tensor.consumers:
                    if reader.kind is kind:
                        found[reader] = None
                if tensor.producer is not None and tensor.producer.kind is kind:
                    found[tensor.producer] = None
        return sorted(found, key=_RANK)

    def alive(self, layer: Layer) -> bool:
        """Whether the layer is still part of the network."""
        return layer.id in self.layers

    def in_order(self) -> list[Layer]:
        """Every layer, breadth first: those that read none in the order of creation, then each behind its inputs."""
        waiting = [0] * (next(reversed(self.layers), -1) + 1)  # by id, for how many inputs
        ready = []
        for layer in self.layers.values():
            count = 0
            for tensor in layer.inputs:  # often, and of all layers: without a list for each
                if tensor.producer is not None:
                    count += 1
            if count:
                waiting[layer.id] = count
            else:
                ready.append(layer)
        for layer in ready:
            for tensor in layer.outputs:
                for reader, count in tensor.consumers.items():
                    waiting[reader.id] -= count
                    if not waiting[reader.id]:
                        ready.append(reader)
        return ready

    # Editing --------------------------------------------------------------------------------------------------

    def set_kind(self, layer: Layer, kind: LayerKind) -> None:
        if layer.kind != kind:
            del self._by_kind[layer.kind][layer.id]
            layer.kind = kind
            self._by_kind[kind][layer.id] = layer

    def set_input(self, layer: Layer, position: int, tensor: Tensor) -> None:
        """Makes one input of a layer read another tensor."""
        old = layer.inputs[position]
        old.left_by(layer)
        layer.inputs[position] = tensor
        tensor.read_by(layer)
        self.touched[old] = self.touched[tensor] = None

    def add_input(self, layer: Layer, tensor: Tensor) -> None:
        layer.inputs.append(tensor)
        tensor.read_by(layer)
        self.touched[tensor] = None

    def drop_input(self, layer: Layer, position: int) -> None:
        tensor = layer.inputs.pop(position)
        tensor.left_by(layer)
        self.touched[tensor] = None

    def set_output(self, layer: Layer, tensor: Tensor, position: int = 0) -> None:
        """Makes one output of a layer another tensor, whose producer it becomes."""
        for old in layer.outputs[position : position + 1]:
            if old.producer is layer:
                old.producer = None
        layer.outputs[position : position + 1] = [tensor]
        tensor.producer = layer
        self.touched[tensor] = None

    def retarget(self, old: Tensor, new: Tensor, *more: Tensor) -> None:
        """Makes every reader of ``old`` (and of ``more``) read ``new``; a network output moves as well."""
        gone = dict.fromkeys((old, *more))
        for reader in {r: None for t in gone for r in t.consumers}:
            reader.inputs = [new if t in gone else t for t in reader.inputs]
        for tensor in gone:
            for reader, count in tensor.consumers.items():
                new.read_by(reader, count)
            tensor.consumers = {}
            if tensor.is_output:
                tensor.is_output = False
                new.is_output = True
                self.outputs = [new if t is tensor else t for t in self.outputs]
        self.touched[new] = None

    def remove(self, layer: Layer) -> None:
        """Takes a layer out; its outputs lose their producer."""
        for tensor in layer.inputs:
            tensor.left_by(layer)
            self.touched[tensor] = None
        for tensor in layer.outputs:
            if tensor.producer is layer:
                tensor.producer = None
        layer.inputs = []
        del self.layers[layer.id]
        del self._by_kind[layer.kind][layer.id]

    def absorb_reader(self, layer: Layer, reader: Layer, name: str) -> None:
        """Fuses the single reader of a layer's output into it: extra inputs, outputs and ONNX nodes move over.

        Args:
            layer: The layer that stays.
            reader: The layer that reads ``layer.out`` and is taken out.
            name: The new name of ``layer``.
        """
        middle = layer.out
        if layer.kind in WEIGHTED and reader.kind is not _SCALE and not layer.fusion.bare:
            layer.fusion.bare = middle.source
        extra = [t for t in reader.inputs if t is not middle]
        outputs = reader.outputs
        reader.outputs = []
        self.remove(reader)
        for tensor in extra:
            self.add_input(layer, tensor)
        middle.producer = None
        layer.outputs = outputs
        for tensor in outputs:
            tensor.producer = layer
        layer.nodes.extend(reader.nodes)
        layer.cases.update(reader.cases)
        layer.name = name

    def insert_before(self, layer: Layer, position: int, new: Layer, between: Tensor) -> None:
        """Puts a single-input layer in front of one input of another; ``between`` becomes its output."""
        source = layer.inputs[position]
        self.add(new, [source], [between])
        self.set_input(layer, position, between)

    def exchange(self, first: Layer, second: Layer) -> None:
        """Turns round two layers in a row; tensor names stay with their position, shapes are the caller's."""
        source, middle, out = first.data, first.out, second.out
        self.set_input(second, 0, source)
        self.set_input(first, 0, middle)
        self.set_output(second, middle)
        self.set_output(first, out)

    def swap(self, op: Layer, q: Layer) -> None:
        """Puts a Q in front of the operator that it is the only reader of."""
        self.exchange(op, q)
        q.out.shape, op.out.shape = q.data.shape, q.out.shape

    def drop_reader(self, dq: Layer, reader: Layer) -> bool:
        """Makes ``reader`` read the DQ's INT8 input; says whether the DQ was thereby removed."""
        out, data = dq.out, dq.data
        for position, tensor in enumerate(reader.inputs):
            if tensor is out:
                self.set_input(reader, position, data)
        reader.cases.update(dq.cases)
        return self.remove_unread(dq)

    def remove_unread(self, layer: Layer) -> bool:
        """Takes a layer out whose output nothing reads any more; says whether it did."""
        out = layer.out
        if out.consumers or out.is_output:
            return False
        self.remove(layer)
        return True

    def take_weights(self, layer: Layer, constant: Layer) -> None:
        """Puts the constant weights into the layer that alone reads them."""
        self.drop_input(layer, layer.inputs.index(constant.out))
        self.remove(constant)
        layer.name = f"{constant.name} + {layer.name}"
        layer.fusion.weights = True

    def absorb_q(self, layer: Layer, q: Layer) -> None:
        """Takes the Q behind a layer into it: the layer writes INT8."""
        out = q.out
        layer.nodes.extend(q.nodes)
        layer.cases.update(q.cases)
        self.remove(q)
        self.set_output(layer, out)
        layer.int8_out = True


# They name and fold constants: no outcome rests on them.
_OF_NO_OUTCOME = frozenset({"constant", "identity"})


def seen_on(case: Case, target: Target) -> bool:
    """Whether a build of the target's major version shows a case; later ones than 10 count as their own."""
    major = target.version[0]
    return major in _shown_by(case)


@functools.cache
def _shown_by(case: Case) -> frozenset[int]:
    """The major versions of the builds that show a case."""
    words = " ".join(BUILDS[name].tensorrt for name in case.build_names() if name in BUILDS).split()
    return frozenset(int(major) for word in words if (major := word.partition(".")[0]).isdigit())


def weakest(cases: Collection[Case], target: Target) -> Evidence:
    """How well an outcome is proven on the target: as its cases are, what only 8.x shows assumed on later ones."""
    found = set()
    for case in (c for c in cases if c.name not in _OF_NO_OUTCOME):
        shown = case.evidence != Evidence.SEEN or not target.has_marks or seen_on(case, target)
        found.add(case.evidence if shown else Evidence.ASSUMED)
    return functools.reduce(Evidence.weaker, found, Evidence.SEEN)


def sentence(cases: Iterable[Case], target: Target) -> str:
    """Of the rules that a network used, how many were seen on the target's TensorRT; empty where it used none."""
    used = [c for c in dict.fromkeys(cases) if c.name not in _OF_NO_OUTCOME]
    own = sum(seen_on(c, target) for c in used)
    seen = sum(c.evidence == Evidence.SEEN for c in used)
    parts = [f"{own} seen on {target.version[0]}.x"]
    parts += [f"{seen - own} seen on other versions only"] * (seen > own)
    parts += [f"{len(used) - seen} documented or assumed"] * (len(used) > seen)
    return f"of the {len(used)} rules that this network used, {', '.join(parts)}" if used else ""
