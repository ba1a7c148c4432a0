"""SplitQAcrossPrecedingFanIn."""

from __future__ import annotations

from collections import deque

from qdqtool import budgets
from qdqtool.trt import network as net
from qdqtool.trt.network import Layer, Network, Tensor
from qdqtool.trt.passes._infra import Pass, node_name, only_q, reader_names

MAX_NAME = 4000  # characters; bounds what a hostile nest of concatenations can take


class SplitQAcrossPrecedingFanIn(Pass):
    """Moves the Q behind a Concat to each of the Concat's inputs.

    Cases:
        * CONCATENATION -> Q, the Q its only reader: one ``<Q>_clone_<i>`` for each input i; the Concat runs in INT8
          and its output is called ``<Q>_output_0`` (yolo-resnet18-orin-trt8502, yolov8-orin-trt8412-excerpts). Logged
          with one line, no second.
        * Concat behind Concat nests the suffix, ``_clone_1_clone_2`` (NVIDIA/TensorRT issue 2131).
        * Any other reader of the Concat: refused.
        * More copies in the whole network than :data:`qdqtool.budgets.Q_COPIES`: refused. A Concat of a tensor with
          itself doubles them, and so does each one in front of it; no network in use has a hundredth.
    """

    def apply(self, network: Network) -> None:
        todo = deque(network.near(net.CONCATENATION))
        while todo:
            concat = todo.popleft()
            q = only_q(concat.out)
            if q is None:
                if any(r.kind == net.QUANTIZE for r in concat.out.consumers):
                    self.refuse(concat, "output-not-only-quantized", consumers=tuple(reader_names(concat.out)))
                continue
            if q.attrs.get("computed_scale") or (q.quant is not None and q.quant.per_channel):
                continue
            if network.q_copies + len(concat.inputs) > budgets.Q_COPIES:
                self.refuse(concat, "too-many-copies", limit=budgets.Q_COPIES)
                continue
            network.q_copies += len(concat.inputs)
            self.running(concat)
            for position in range(len(concat.inputs)):
                self._clone(network, concat, q, position)
            out = q.out
            network.remove(q)
            network.set_output(concat, out)
            concat.attrs["split_from"] = node_name(q)
            clones = [t.producer for t in concat.inputs if t.producer is not None]
            inner = dict.fromkeys(c.data.producer for c in clones)
            todo.extend(c for c in inner if c is not None and c.kind == net.CONCATENATION and only_q(c.out))

    @staticmethod
    def _clone(network: Network, concat: Layer, q: Layer, position: int) -> None:
        source = concat.inputs[position]
        clone = Layer(net.QUANTIZE, f"{q.name[:MAX_NAME]}_clone_{position}", q.op)
        clone.quant = q.quant
        clone.nodes = list(q.nodes)
        clone.rank = (concat.rank[0] - 0.5, position)
        clone.attrs = dict(q.attrs, clone=True)
        out = Tensor(f"{concat.name}_{source.name}_clone_{position}", source.source, source.elem_type)
        out.shape = source.shape
        network.insert_before(concat, position, clone, out)

