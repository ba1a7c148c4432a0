"""A Q/DQ model whose activations can be switched between quantized and float."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from qdqtool.errors import ModelError
from qdqtool.insertion.rewrite import QuantizedTensor
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.qdq import is_dq
from qdqtool.proto.slim import strip_large_weights
from qdqtool.proto.subgraphs import copy_node
from qdqtool.runtime.sessions import describe_failure, open_proto

Feeds = dict[str, npt.NDArray[Any]]


class SwitchableNetwork:
    """A Q/DQ model in which each activation can be left float, without a new session.

    The model gets a boolean input for each activation, which switches its Q/DQ pair. Weights are
    always quantized. Several threads may run the network.
    """

    def __init__(
        self,
        model: Model,
        activations: Sequence[QuantizedTensor],
        outputs: Sequence[str],
        threads: int,
    ) -> None:
        """Open the session.

        Args:
            model: The Q/DQ model; it is not changed.
            activations: Activations that get a switch.
            outputs: Tensors that a run returns.
            threads: Number of threads that onnxruntime uses for one operator.

        Raises:
            ModelError: onnxruntime does not accept the model.
        """
        from calibration.session import TensorFetcher, partial_model

        self._switches, network = _add_switches(model, activations)
        switches = [
            helper.make_tensor_value_info(name, TensorProto.BOOL, [])
            for name in self._switches.values()
        ]
        part = partial_model(network, list(dict.fromkeys(outputs)), switches)
        self._fetcher = TensorFetcher(_open_session(part, model, threads))

    def run(self, sample: Feeds, floats: Collection[str] = ()) -> Feeds:
        """Run the network with the named activations float, and return its outputs.

        Raises:
            ModelError: onnxruntime fails.
        """
        switches = {name: np.asarray(t not in floats) for t, name in self._switches.items()}
        return self._fetcher.run({**sample, **switches})


def _add_switches(
    model: Model, activations: Sequence[QuantizedTensor]
) -> tuple[dict[str, str], Model]:
    """Return the switch inputs by tensor, and a copy of the model with these inputs.

    The copy has no large weights.
    """
    editor = Editor(Model(strip_large_weights(model.proto)))
    tensors = {activation.node: activation.tensor for activation in activations}
    quantizers = {n.output: n for n in editor.model.nodes if n.name in tensors}
    switches: dict[str, str] = {}
    for node in editor.model.nodes:
        quantizer = quantizers.get(node.input(0)) if is_dq(node) else None
        if quantizer is not None:
            name = switches.setdefault(tensors[quantizer.name], f"{quantizer.name}/switch")
            editor.rewrite(node, "If", [name], _build_branches(quantizer, node))
    return switches, editor.finish()


def _build_branches(quantizer: Node, dequantizer: Node) -> dict[str, onnx.GraphProto]:
    """Return the branches of an If that replaces a DQ: the Q/DQ pair, and the Q's float input.

    An If computes only one branch; a Where would always compute both.
    """
    integers, quantized = f"{dequantizer.output}/code", f"{dequantizer.output}/quantized"
    pair = [
        copy_node(quantizer.proto, quantizer.inputs, [integers]),
        copy_node(dequantizer.proto, [integers, *dequantizer.inputs[1:]], [quantized]),
    ]
    source = helper.make_node("Identity", [quantizer.input(0)], [f"{dequantizer.output}/float"])
    return {"then_branch": _build_branch(pair), "else_branch": _build_branch([source])}


def _build_branch(nodes: list[onnx.NodeProto]) -> onnx.GraphProto:
    output = onnx.ValueInfoProto(name=nodes[-1].output[0])
    return helper.make_graph(nodes, "switched", [], [output])


def _open_session(part: onnx.ModelProto, model: Model, threads: int) -> Any:
    try:
        return open_proto(part, threads, weights=model.initializers, fold_qdq=False, one_arena=True)
    except Exception as error:  # onnxruntime's exceptions share no narrower base class
        raise ModelError(
            f"onnxruntime cannot run the quantized model: {describe_failure(error)}",
            code="onnxruntime-failed",
        ) from error
