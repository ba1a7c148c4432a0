"""TensorRT's network, which the optimizer passes read and edit.

Each layer records the cases (known behaviors of TensorRT) that apply to it. The module also rates
how well these cases are proven for a target.
"""

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from qdqtool.evidence import Case, Evidence
from qdqtool.ir.operators import LayerKind
from qdqtool.trt.layers import WEIGHTED, Layer, Tensor
from qdqtool.trt.result import MyelinRegion
from qdqtool.trt.targets import BUILDS, Target

_RANK = operator.attrgetter("rank")
_RANK_AND_ID = operator.attrgetter("rank", "id")
_SCALE = LayerKind.SCALE  # looking up an enumeration member is slow


class Network:
    """Layers and tensors, with the edits that optimizer passes make.

    Attributes:
        layers: Layers by id, in creation order.
        inputs: Network input tensors.
        outputs: Network output tensors.
        was_relisted: Whether Myelin has removed layers. TensorRT then lists the layers in a new
            order.
        counts: Number of layers after a stage, by name of the stage, for the stages after which
            TensorRT logs this number (``Original``, ``After ...``).
        adds_after_activation: ONNX nodes of the Adds whose fusion the target's
            ``residual_through_activation`` decided.
        regions: Regions of Myelin, on targets whose regions affect Q and DQ.
        focus: Tensors that the previous round of a loop of passes edited. The current round visits
            only layers at these and newly edited tensors. None to visit all layers.
        reports_reasons: Whether passes report reasons. In a loop, only the last round reports
            reasons, and visits all layers.
        edited_tensors: Tensors whose producer or consumers were edited in this round.
        q_copies: Number of copies of Qs before Concats so far, which SplitQAcrossPrecedingFanIn
            limits.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.was_relisted = False
        self.q_copies = 0
        self.counts: dict[str, int] = {}
        self.adds_after_activation: dict[str, None] = {}
        self.regions: list[MyelinRegion] = []
        self.focus: dict[Tensor, None] | None = None
        self.reports_reasons = True
        self.edited_tensors: dict[Tensor, None] = {}
        self._by_kind: defaultdict[LayerKind, dict[int, Layer]] = defaultdict(dict)
        self._ids = itertools.count()

    # Building ---------------------------------------------------------------------------------

    def add(self, layer: Layer, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> Layer:
        """Add a layer, and connect it to its input and output tensors."""
        layer.id = next(self._ids)
        layer.inputs, layer.outputs = list(inputs), list(outputs)
        for tensor in layer.inputs:
            tensor.add_consumer(layer)
        for tensor in layer.outputs:
            tensor.producer = layer
        self.layers[layer.id] = layer
        self._by_kind[layer.kind][layer.id] = layer
        return layer

    def remove_dead(self) -> None:
        """Remove the layers that no network output depends on."""
        unused = [layer for layer in self.layers.values() if not layer.is_used]
        for layer in unused:
            producers = dict.fromkeys(layer.producers)
            self.remove(layer)
            unused += (producer for producer in producers if not producer.is_used)

    def rank_layers(self) -> None:
        """Rank the layers in the order in which the optimizer visits them.

        The order is breadth first, and each layer comes after the producers of its inputs. All
        complete logs have this order; in bevfusion-camera-orin-trt8502, ConvReluFusion visits
        both input branches in turn. Exception: QuantizeDoubleInputNodes visits some convolutions
        last. The order affects only names and the order of log lines, no outcome.
        """
        for place, layer in enumerate(self.breadth_first()):
            layer.rank = place, 0, 0

    # Reading ----------------------------------------------------------------------------------

    def depth_first(self) -> list[Layer]:
        """Return the layers in the order in which parallel convolutions are merged.

        The search goes depth first from the first to the last network output. Each layer comes
        after the producers of its inputs. Among these, the producer of the last input comes first.
        yolov8-orin-trt8412-excerpts names merged layers in this order. Only names depend on the
        order.
        """
        layers: list[Layer] = []
        started: set[int] = set()
        stack = [(t.producer, False) for t in reversed(self.outputs) if t.producer is not None]
        while stack:
            layer, inputs_are_done = stack.pop()
            if inputs_are_done:
                layers.append(layer)
            elif layer.id not in started:
                started.add(layer.id)
                stack.append((layer, True))
                stack.extend((producer, False) for producer in layer.producers)
        return layers

    def breadth_first(self) -> list[Layer]:
        """Return all layers, each after the producers of its inputs.

        The search is breadth first. It starts at layers without inputs, in creation order.
        """
        open_inputs = [0] * (max(self.layers, default=-1) + 1)  # by layer id
        ready = []
        for layer in self.layers.values():
            count = 0
            for tensor in layer.inputs:  # faster than `layer.producers`
                if tensor.producer is not None:
                    count += 1
            if count:
                open_inputs[layer.id] = count
            else:
                ready.append(layer)
        for layer in ready:
            for tensor in layer.outputs:
                for consumer, count in tensor.consumers.items():
                    open_inputs[consumer.id] -= count
                    if not open_inputs[consumer.id]:
                        ready.append(consumer)
        return ready

    def layers_of_kind(self, *kinds: LayerKind) -> list[Layer]:
        """Return the layers of some kinds, in the order in which the optimizer visits them."""
        return sorted(
            (layer for kind in kinds for layer in self._by_kind[kind].values()), key=_RANK
        )

    def single_consumer_pairs(
        self, *kinds: LayerKind, consumer_kind: LayerKind | None = None
    ) -> Iterator[tuple[Layer, Layer]]:
        """Yield each layer of some kinds whose output has a single consumer, with the consumer.

        The caller may fuse the consumer into the layer; removed layers are skipped. The consumer
        has any kind if ``consumer_kind`` is None.
        """
        consumer_kinds = () if consumer_kind is None else (consumer_kind,)
        if consumer_kind is not None and not self._by_kind[consumer_kind]:
            return
        for layer in self.layers_of_kind(*kinds):
            if layer.id not in self.layers:
                continue
            consumer = layer.out.single_consumer(*consumer_kinds)
            if consumer is not None:
                yield layer, consumer

    def layers_to_visit(self, kind: LayerKind) -> list[Layer]:
        """Return the layers of a kind that the current round of a loop of passes visits.

        The first and last rounds visit all layers of the kind. Other rounds visit only layers that
        read or write a tensor that this or the previous round edited.
        """
        if self.focus is None:
            return self.layers_of_kind(kind)
        edited = {*self.focus, *self.edited_tensors}
        candidates = self._by_kind[kind]
        if len(candidates) < len(edited):  # whichever takes fewer steps
            layers = [layer for layer in candidates.values() if layer.touches(edited)]
        else:
            layers = _find_layers_at(edited, kind)
        return sorted(layers, key=_RANK_AND_ID)

    # Editing ----------------------------------------------------------------------------------

    def set_kind(self, layer: Layer, kind: LayerKind) -> None:
        """Change the kind of a layer."""
        if layer.kind != kind:
            del self._by_kind[layer.kind][layer.id]
            layer.kind = kind
            self._by_kind[kind][layer.id] = layer

    def set_input(self, layer: Layer, position: int, tensor: Tensor) -> None:
        """Connect one input of a layer to another tensor."""
        old = layer.inputs[position]
        old.drop_consumer(layer)
        layer.inputs[position] = tensor
        tensor.add_consumer(layer)
        self.edited_tensors[old] = None
        self.edited_tensors[tensor] = None

    def add_input(self, layer: Layer, tensor: Tensor) -> None:
        """Append an input to a layer."""
        layer.inputs.append(tensor)
        tensor.add_consumer(layer)
        self.edited_tensors[tensor] = None

    def drop_input(self, layer: Layer, position: int) -> None:
        """Remove an input of a layer."""
        tensor = layer.inputs.pop(position)
        tensor.drop_consumer(layer)
        self.edited_tensors[tensor] = None

    def set_output(self, layer: Layer, tensor: Tensor, position: int = 0) -> None:
        """Replace one output of a layer. The old output loses its producer."""
        for old in layer.outputs[position : position + 1]:
            if old.producer is layer:
                old.producer = None
        layer.outputs[position : position + 1] = [tensor]
        tensor.producer = layer
        self.edited_tensors[tensor] = None

    def redirect_consumers(self, old: Tensor, new: Tensor, *more: Tensor) -> None:
        """Connect every consumer of ``old`` and ``more`` to ``new``.

        If one of these tensors is a network output, ``new`` becomes the network output instead.
        """
        replaced = dict.fromkeys((old, *more))
        consumers = dict.fromkeys(itertools.chain(*(tensor.consumers for tensor in replaced)))
        for consumer in consumers:
            consumer.inputs = [new if t in replaced else t for t in consumer.inputs]
        for tensor in replaced:
            for consumer, count in tensor.consumers.items():
                new.add_consumer(consumer, count)
            tensor.consumers = {}
            if tensor.is_output:
                tensor.is_output = False
                new.is_output = True
                self.outputs = [new if t is tensor else t for t in self.outputs]
        self.edited_tensors[new] = None

    def remove(self, layer: Layer) -> None:
        """Remove a layer. Its outputs lose their producer."""
        for tensor in layer.inputs:
            tensor.drop_consumer(layer)
            self.edited_tensors[tensor] = None
        for tensor in layer.outputs:
            if tensor.producer is layer:
                tensor.producer = None
        layer.inputs = []
        del self.layers[layer.id]
        del self._by_kind[layer.kind][layer.id]

    def remove_if_unused(self, layer: Layer) -> bool:
        """Remove a layer if its output is unused. Return whether the layer was removed."""
        out = layer.out
        if out.consumers or out.is_output:
            return False
        self.remove(layer)
        return True

    def absorb_consumer(self, layer: Layer, consumer: Layer, name: str) -> None:
        """Fuse the single consumer of a layer's output into the layer.

        The layer receives the outputs, ONNX nodes and cases of the consumer, its other inputs, and
        the new name. The consumer is removed.
        """
        between = layer.out
        is_scale = consumer.kind is _SCALE
        if layer.kind in WEIGHTED and not is_scale and not layer.fusion.tensor_before_activation:
            layer.fusion.tensor_before_activation = between.source
        other_inputs = [t for t in consumer.inputs if t is not between]
        outputs = consumer.outputs
        consumer.outputs = []
        self.remove(consumer)
        for tensor in other_inputs:
            self.add_input(layer, tensor)
        between.producer = None
        layer.outputs = outputs
        for tensor in outputs:
            tensor.producer = layer
        layer.nodes.extend(consumer.nodes)
        layer.cases.update(consumer.cases)
        layer.name = name

    def absorb_q(self, layer: Layer, q: Layer) -> None:
        """Fuse the Q after a layer into the layer, so that the layer writes INT8 (or FP8)."""
        out = q.out
        layer.nodes.extend(q.nodes)
        layer.cases.update(q.cases)
        self.remove(q)
        self.set_output(layer, out)
        layer.int8_out = True

    def absorb_weights(self, layer: Layer, constant: Layer) -> None:
        """Fuse constant weights into their single consumer."""
        self.drop_input(layer, layer.inputs.index(constant.out))
        self.remove(constant)
        layer.name = f"{constant.name} + {layer.name}"
        layer.fusion.has_weights = True

    def bypass_dq(self, dq: Layer, consumer: Layer) -> bool:
        """Connect a consumer of a DQ to the DQ's input. Return whether the DQ was removed."""
        out, data = dq.out, dq.data
        for position, tensor in enumerate(consumer.inputs):
            if tensor is out:
                self.set_input(consumer, position, data)
        consumer.cases.update(dq.cases)
        return self.remove_if_unused(dq)

    def insert_before(self, layer: Layer, position: int, new: Layer, out: Tensor) -> None:
        """Insert the layer ``new``, with ``out`` as its output, before one input of a layer."""
        self.add(new, [layer.inputs[position]], [out])
        self.set_input(layer, position, out)

    def exchange(self, first: Layer, second: Layer) -> None:
        """Exchange a layer and its consumer.

        The tensors keep their names and positions. The caller corrects their shapes.
        """
        source, middle, out = first.data, first.out, second.out
        self.set_input(second, 0, source)
        self.set_input(first, 0, middle)
        self.set_output(second, middle)
        self.set_output(first, out)

    def swap(self, op: Layer, q: Layer) -> None:
        """Move a Q before the layer whose single consumer it is, and correct the output shapes."""
        self.exchange(op, q)
        q.out.shape, op.out.shape = q.data.shape, q.out.shape


# Names of rules (cases) that are not counted, because they only fold constants.
_CASES_WITHOUT_OUTCOME = frozenset({"constant", "identity"})


@functools.cache
def is_seen_on(case: Case, target: Target) -> bool:
    """Return whether a build of the target's major TensorRT version shows a case."""
    builds = [BUILDS[name] for name in case.build_names() if name in BUILDS]
    versions = [version for build in builds for version in build.tensorrt.split()]
    return any(version.partition(".")[0] == str(target.major_version) for version in versions)


def _find_layers_at(tensors: Iterable[Tensor], kind: LayerKind) -> list[Layer]:
    """Return the layers of a kind that read or write one of the tensors, each once."""
    layers: dict[Layer, None] = {}
    for tensor in tensors:
        for consumer in tensor.consumers:
            if consumer.kind is kind:
                layers[consumer] = None
        if tensor.producer is not None and tensor.producer.kind is kind:
            layers[tensor.producer] = None
    return list(layers)


def weakest_evidence(cases: Collection[Case], target: Target) -> Evidence:
    """Return the weakest evidence of some cases on a target; SEEN without cases.

    An outcome that depends on all these cases has this evidence. If all builds that show a case are
    of TensorRT 8.x, the case counts as assumed on later versions.
    """
    kinds = set()
    for case in cases:
        if case.name in _CASES_WITHOUT_OUTCOME:
            continue
        is_proven = (
            case.evidence != Evidence.SEEN
            or not target.assumes_8x_cases
            or is_seen_on(case, target)
        )
        kinds.add(case.evidence if is_proven else Evidence.ASSUMED)
    return functools.reduce(Evidence.choose_weaker, kinds, Evidence.SEEN)


def describe_rules(cases: Iterable[Case], target: Target) -> str:
    """Describe how many of the rules (cases) that a network used were seen on the target.

    Empty if no rule applied to the network.
    """
    rules = [c for c in dict.fromkeys(cases) if c.name not in _CASES_WITHOUT_OUTCOME]
    if not rules:
        return ""
    seen_on_target = sum(is_seen_on(c, target) for c in rules)
    seen = sum(c.evidence == Evidence.SEEN for c in rules)
    parts = [f"{seen_on_target} seen on {target.major_version}.x"]
    if seen > seen_on_target:
        parts.append(f"{seen - seen_on_target} seen on other versions only")
    if len(rules) > seen:
        parts.append(f"{len(rules) - seen} documented or assumed")
    return f"of the {len(rules)} optimizer rules that apply to this network, {', '.join(parts)}"
