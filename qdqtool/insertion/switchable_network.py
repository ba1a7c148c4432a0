"""A Q/DQ model in which each activation can be left float, without a new session.

Every Q/DQ pair of an activation gets a switch input, so that the same sessions can run with any
activation float. The network is cut before each activation that will be the only float one. A run
with this activation float starts at the cut, with the tensors of the fully quantized run. Weights
are always quantized.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from qdqtool.errors import ModelError
from qdqtool.insertion.rewrite import QuantizedTensor
from qdqtool.ir.cuts import NetworkCuts
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.qdq import is_dq
from qdqtool.proto.slim import strip_large_weights
from qdqtool.proto.subgraphs import copy_node
from qdqtool.runtime.sessions import describe_failure, open_proto

if TYPE_CHECKING:
    from calibration.session import TensorFetcher

Feeds = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class NetworkSegment:
    """Part of the network between two cuts.

    Attributes:
        fetcher: onnxruntime session of the part.
        outputs: Tensors that cross the cut after the part, or outputs of the network.
    """

    fetcher: TensorFetcher
    outputs: frozenset[str]

    def run(self, values: Feeds) -> Feeds:
        """Return the tensors after the part, from those before it."""
        results = {**values, **self.fetcher.run(values)}
        return {t: v for t, v in results.items() if t in self.outputs}


class SwitchableNetwork:
    """A Q/DQ model whose activations can be left float; any number of threads may run it.

    Attributes:
        segments: The network's parts, in order.
    """

    def __init__(
        self,
        model: Model,
        activations: Sequence[QuantizedTensor],
        alone: Iterable[QuantizedTensor],
        outputs: Sequence[str],
        threads: int,
    ) -> None:
        """Open the sessions.

        Args:
            model: The Q/DQ model; it is not changed.
            activations: Activations that get a switch.
            alone: Activations among these that will be left float one at a time.
            outputs: Tensors that a run returns.
            threads: Number of threads that onnxruntime uses for one operator.

        Raises:
            ModelError: onnxruntime does not accept the model.
        """
        self._switches, network = _add_switches(model, activations)
        cuts = NetworkCuts(network, outputs)
        first_uses = self._find_first_uses(network)
        starts = {a.tensor: first_uses.get(self._switches.get(a.tensor, ""), 0) for a in alone}
        feeds = _choose_feeds(model, cuts, sorted(set(starts.values())), outputs)
        positions = [position for position, _ in feeds]
        self._first_segments = {
            tensor: max(n for n, position in enumerate(positions) if position <= start)
            for tensor, start in starts.items()
        }
        self.segments = self._open_segments(network, model, feeds, outputs, threads)

    def _find_first_uses(self, network: Model) -> dict[str, int]:
        """Return by switch the position of the first node that reads the switch."""
        switches = set(self._switches.values())
        positions: dict[str, int] = {}
        for position, node in enumerate(network.ordered):
            if node.input(0) in switches:
                positions.setdefault(node.input(0), position)
        return positions

    def _open_segments(
        self,
        network: Model,
        model: Model,
        feeds: Sequence[tuple[int, tuple[str, ...]]],
        outputs: Sequence[str],
        threads: int,
    ) -> list[NetworkSegment]:
        from calibration.session import TensorFetcher, partial_model

        switches = [
            helper.make_tensor_value_info(name, TensorProto.BOOL, [])
            for name in self._switches.values()
        ]
        boundaries = [tensors for _, tensors in feeds] + [tuple(dict.fromkeys(outputs))]
        segments = []
        for before, after in itertools.pairwise(boundaries):
            results = [t for t in after if t not in before]
            inputs = [helper.make_tensor_value_info(t, model.elem_type(t), None) for t in before]
            part = partial_model(network, results, [*inputs, *switches])
            segments.append(
                NetworkSegment(TensorFetcher(_open_session(part, model, threads)), frozenset(after))
            )
        return segments

    def run(self, sample: Feeds, floats: Collection[str]) -> Feeds:
        """Return the outputs with the named activations float.

        Raises:
            ModelError: onnxruntime fails.
        """
        return self._run(sample, floats, 0, {})

    def run_each(
        self, sample: Feeds, left_out: Sequence[str | None]
    ) -> Iterator[tuple[str | None, Feeds]]:
        """Yield, in network order, each activation and the outputs with only this one float.

        The entry None stands for a run with all activations quantized.

        Raises:
            ModelError: onnxruntime fails.
        """
        end = len(self.segments)
        starts = {t: end if t is None else self._first_segments.get(t, 0) for t in left_out}
        values: Feeds = {}
        inputs = self._set_switches(sample, ())
        last = max(starts.values(), default=-1)
        for number in range(last + 1):
            for tensor, start in starts.items():
                if start == number:
                    floats = () if tensor is None else (tensor,)
                    yield tensor, self._run(sample, floats, number, values)
            if number < last:
                values = self.segments[number].run({**inputs, **values})

    def _run(self, sample: Feeds, floats: Collection[str], number: int, values: Feeds) -> Feeds:
        inputs = self._set_switches(sample, floats)
        for segment in self.segments[number:]:
            values = segment.run({**inputs, **values})
        return values

    def _set_switches(self, sample: Feeds, floats: Collection[str]) -> Feeds:
        switches = {name: np.asarray(t not in floats) for t, name in self._switches.items()}
        return {**sample, **switches}


def _choose_feeds(
    model: Model, cuts: NetworkCuts, positions: Iterable[int], outputs: Sequence[str]
) -> list[tuple[int, tuple[str, ...]]]:
    """Return the positions at which a run can start, and the tensors to feed there."""
    feeds: list[tuple[int, tuple[str, ...]]] = [(0, ())]
    for position in positions:
        crossing = tuple(t for t in cuts.crossing_tensors(position) if cuts.positions[t] >= 0)
        is_new = not set(feeds[-1][1]).issuperset(crossing)
        computes_more = not set(crossing).issuperset(outputs)
        if is_new and computes_more and all(map(model.elem_type, crossing)):
            feeds.append((position, crossing))
    return feeds


def _add_switches(
    model: Model, activations: Sequence[QuantizedTensor]
) -> tuple[dict[str, str], Model]:
    """Return the names of the switches by tensor, and a model with them.

    The model has no large weights.
    """
    editor = Editor(Model(strip_large_weights(model.proto)))
    tensors = {entry.node: entry.tensor for entry in activations}
    quantizers = {n.output: n for n in editor.model.nodes if n.name in tensors}
    switches: dict[str, str] = {}
    for node in editor.model.nodes:
        quantizer = quantizers.get(node.input(0)) if is_dq(node) else None
        if quantizer is not None:
            name = switches.setdefault(tensors[quantizer.name], f"{quantizer.name}/switch")
            editor.rewrite(node, "If", [name], _build_branches(quantizer, node))
    return switches, editor.finish()


def _build_branches(quantizer: Node, dequantizer: Node) -> dict[str, onnx.GraphProto]:
    """Return the branches of an If that replaces a DQ: the pair, or the Q's float input.

    An If computes only one branch; a Where would always compute both.
    """
    integers, quantized = f"{dequantizer.output}/code", f"{dequantizer.output}/quantized"
    pair = [
        copy_node(quantizer.proto, quantizer.inputs, [integers]),
        copy_node(dequantizer.proto, [integers, *dequantizer.inputs[1:]], [quantized]),
    ]
    source = helper.make_node("Identity", [quantizer.input(0)], [f"{dequantizer.output}/float"])
    return {"then_branch": _build_body(pair), "else_branch": _build_body([source])}


def _build_body(nodes: list[onnx.NodeProto]) -> onnx.GraphProto:
    output = onnx.ValueInfoProto(name=nodes[-1].output[0])
    return helper.make_graph(nodes, "switched", [], [output])


def _open_session(part: onnx.ModelProto, model: Model, threads: int) -> Any:
    try:
        return open_proto(part, threads, weights=model.initializers, fold_qdq=False, one_arena=True)
    except Exception as error:  # onnxruntime's exceptions share no other base class
        raise ModelError(
            f"onnxruntime cannot run the quantized model: {describe_failure(error)}",
            code="onnxruntime-failed",
        ) from error
