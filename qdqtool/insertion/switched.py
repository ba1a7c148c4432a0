"""A Q/DQ model in which each activation can be left float, run again only from where that makes a difference.

Every Q/DQ pair on an activation gets a switch, so that the same sessions can leave any of them out. The network is cut
in front of the activations that are to be left out alone: such a run begins at their cut, with what the run with all
quantized has made there. The weights are INT8 throughout.
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
from qdqtool.ir.cuts import NetworkCuts
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.qdq import is_dq
from qdqtool.proto.slim import without_large_weights
from qdqtool.proto.subgraphs import copy_node
from qdqtool.runtime.sessions import describe_failure, open_proto
from qdqtool.types import QuantizedTensor

if TYPE_CHECKING:
    from calibration.session import TensorFetcher

Feeds = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Segment:
    """Part of the network between two cuts."""

    fetcher: TensorFetcher
    behind: frozenset[str]  # what crosses the cut behind it, or is wanted

    def run(self, values: Feeds) -> Feeds:
        return {
            t: v
            for t, v in (*values.items(), *self.fetcher.run(values).items())
            if t in self.behind
        }


class SwitchedNetwork:
    """A Q/DQ model whose activations can be left float; any number of threads may run it."""

    def __init__(
        self,
        model: Model,
        activations: Sequence[QuantizedTensor],
        alone: Iterable[QuantizedTensor],
        wanted: Sequence[str],
        threads: int,
    ) -> None:
        """Opens the sessions.

        Args:
            model: It is not changed.
            activations: What gets a switch.
            alone: Those of them that will be left out alone.
            wanted: Tensors that a run gives.
            threads: For one operator.

        Raises:
            ModelError: onnxruntime does not take the model.
        """
        from calibration.session import TensorFetcher, partial_model

        self._names, network = _switched(model, activations)
        cuts = NetworkCuts(network, wanted)
        switches = set(self._names.values())
        place: dict[str, int] = {}  # of the node that reads a switch first
        for position, node in enumerate(network.ordered):
            if node.input(0) in switches:
                place.setdefault(node.input(0), position)
        begins = {entry.tensor: place.get(self._names.get(entry.tensor, ""), 0) for entry in alone}
        fed: list[tuple[int, tuple[str, ...]]] = [
            (0, ())
        ]  # cuts that a run can begin at, and what is fed there
        for position in sorted(set(begins.values())):
            crossing = tuple(t for t in cuts.crossing_tensors(position) if cuts.positions[t] >= 0)
            new = not set(fed[-1][1]).issuperset(crossing) and not set(crossing).issuperset(wanted)
            if new and all(map(model.elem_type, crossing)):
                fed.append((position, crossing))
        self._first = {
            t: max(n for n, (at, _) in enumerate(fed) if at <= begin) for t, begin in begins.items()
        }
        given = [helper.make_tensor_value_info(s, TensorProto.BOOL, []) for s in switches]
        self.segments = []
        for (_, front), (_, behind) in itertools.pairwise(
            [*fed, (-1, tuple(dict.fromkeys(wanted)))]
        ):
            made = [t for t in behind if t not in front]
            known = [helper.make_tensor_value_info(t, model.elem_type(t), None) for t in front]
            session = _session(partial_model(network, made, [*known, *given]), model, threads)
            self.segments.append(Segment(TensorFetcher(session), frozenset(behind)))

    def run(self, sample: Feeds, floats: Collection[str]) -> Feeds:
        """What is wanted with the named activations float.

        Raises:
            ModelError: onnxruntime fails.
        """
        return self._run(sample, floats, 0, {})

    def runs(
        self, sample: Feeds, left_out: Sequence[str | None]
    ) -> Iterator[tuple[str | None, Feeds]]:
        """What is wanted with each of some activations float alone, as they come in the network; None is none of them.

        Raises:
            ModelError: onnxruntime fails.
        """
        end = len(self.segments)
        begins = {t: end if t is None else self._first.get(t, 0) for t in left_out}
        values: Feeds = {}
        given = self._given(sample, ())
        last = max(begins.values(), default=-1)
        for number in range(last + 1):
            for tensor, begin in begins.items():
                if begin == number:
                    floats = () if tensor is None else (tensor,)
                    yield tensor, self._run(sample, floats, number, values)
            if number < last:
                values = self.segments[number].run({**given, **values})

    def _run(self, sample: Feeds, floats: Collection[str], number: int, values: Feeds) -> Feeds:
        given = self._given(sample, floats)
        for segment in self.segments[number:]:
            values = segment.run({**given, **values})
        return values

    def _given(self, sample: Feeds, floats: Collection[str]) -> Feeds:
        return {**sample, **{name: np.asarray(t not in floats) for t, name in self._names.items()}}


def _switched(model: Model, activations: Sequence[QuantizedTensor]) -> tuple[dict[str, str], Model]:
    """Names of the switches by tensor, and the model with them, without large weights."""
    editor = Editor(Model(without_large_weights(model.proto)))
    by_node = {entry.node: entry.tensor for entry in activations}
    codes = {n.output: n for n in editor.model.nodes if n.name in by_node}
    switches: dict[str, str] = {}
    for node in editor.model.nodes:
        quantizer = codes.get(node.input(0)) if is_dq(node) else None
        if quantizer is not None:
            name = switches.setdefault(by_node[quantizer.name], f"{quantizer.name}/switch")
            editor.rewrite(node, "If", [name], _branches(quantizer, node))
    return switches, editor.finish()


def _branches(quantizer: Node, dequantizer: Node) -> dict[str, onnx.GraphProto]:
    """What an If in the place of a DQ gives: the same, or what its Q gets. Where would read both, each time."""
    code, quantized = f"{dequantizer.output}/code", f"{dequantizer.output}/quantized"
    pair = [
        copy_node(quantizer.proto, quantizer.inputs, [code]),
        copy_node(dequantizer.proto, [code, *dequantizer.inputs[1:]], [quantized]),
    ]
    unquantized = helper.make_node(
        "Identity", [quantizer.input(0)], [f"{dequantizer.output}/float"]
    )
    return {
        branch: helper.make_graph(
            body, "switched", [], [onnx.ValueInfoProto(name=body[-1].output[0])]
        )
        for branch, body in (("then_branch", pair), ("else_branch", [unquantized]))
    }


def _session(part: onnx.ModelProto, model: Model, threads: int) -> Any:
    try:
        return open_proto(part, threads, weights=model.initializers, fold_qdq=False, one_arena=True)
    except Exception as error:  # onnxruntime's exceptions have no common base but this
        raise ModelError(
            f"onnxruntime cannot run the quantized model: {describe_failure(error)}",
            code="onnxruntime-failed",
        ) from error
