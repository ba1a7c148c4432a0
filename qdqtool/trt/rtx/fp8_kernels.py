"""Convolutions of FP8 data and weights that TensorRT-RTX computes in float.

There are two causes:

* The weights of a channel have more than 32 elements in height and width. Exception: depthwise 7x7
  on compute capability 12.x.
* The Conv is a column: 1x1, on data [1, C, H, 1] with at most four channels. The compiler generates
  the GPU kernel of a column. If it fuses the Q before the column too, the kernel reads floats.
  Columns whose weights have one scale are FP8, unless they have no bias and read a network input.
"""

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.reasons.compiler import COMPILER
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.fp8 import FloatFp8Column
from qdqtool.trt.fault_checks import large_fp8_kernel

_COLUMN_CHANNELS = 4
_OPERATORS_THAT_FUSE_Q = ("MatMul", "Einsum", "Global", "Reduce")  # first letters of operators
_SM12 = 120  # the first compute capability of 12.x


def find_fp8_obstacle(
    model: Model, node: Node, dq: Node, has_one_scale: bool, capabilities: tuple[int, ...]
) -> Reason | None:
    """Return the reason why an FP8 Conv runs in float; None if it runs in FP8.

    Args:
        model: The model.
        node: A Conv or another multiplication, which has no obstacle.
        dq: DQ of the node's data.
        has_one_scale: Whether the weights have one scalar scale.
        capabilities: Compute capabilities to build for, 89 for SM89.
    """
    weights = _weight_shape(model, node)
    if not weights:
        return None
    is_simple = has_one_scale and (node.input(2) or not _reads_network_input(model, dq))
    is_generated = _is_column(model, node, weights) and not is_simple
    if is_generated and _fuses_preceding_q(model, dq):
        return FloatFp8Column(COMPILER, node.name, weights[1])
    if _has_depthwise_kernel(node, weights) and all(c >= _SM12 for c in capabilities):
        return None
    return large_fp8_kernel(COMPILER, node.name, weights[2:])


def _reads_network_input(model: Model, dq: Node) -> bool:
    q = model.producer(dq.input(0))
    return q is not None and q.input(0) in model.inputs


def _weight_shape(model: Model, node: Node) -> list[int]:
    """Return the shape of a Conv's weights; empty if unknown, and for other nodes."""
    shape = model.shape(node.input(1)) if node.op == "Conv" else None
    return [] if shape is None or None in shape else [d or 0 for d in shape]


def _is_column(model: Model, node: Node, weights: list[int]) -> bool:
    """Return whether a Conv is 1x1 on data [1, C, H, 1] with at most four channels."""
    data = model.shape(node.input(0))
    if data is None or len(data) != 4 or (data[0], data[3]) != (1, 1):
        return False
    is_pointwise = weights[2:] == [1, 1] and _has_unit_steps(node) and not any(_ints(node, "pads"))
    return is_pointwise and data[1] == weights[1] <= _COLUMN_CHANNELS


def _fuses_preceding_q(model: Model, dq: Node) -> bool:
    """Return whether the kernel of a column contains the Q before the column's DQ.

    False if the Q or DQ has several consumers, or if the Q is after a reduction or a matrix
    product. The exceptions among reductions and rows of columns are not modeled.
    """
    q = model.producer(dq.input(0))
    if q is None or not qdq.is_q(q):
        return False
    if any(len(model.consumers(t)) > 1 or model.is_output(t) for t in (q.output, dq.output)):
        return False
    producer = model.producer(q.input(0))
    return producer is None or not producer.op.startswith(_OPERATORS_THAT_FUSE_Q)


def _has_depthwise_kernel(node: Node, weights: list[int]) -> bool:
    is_depthwise = weights[0] == node.integer("group", 1) > 1 and weights[1] == 1
    return is_depthwise and weights[2:] == [7, 7] and _has_unit_steps(node)


def _has_unit_steps(node: Node) -> bool:
    return all(step == 1 for step in (*_ints(node, "strides"), *_ints(node, "dilations")))


def _ints(node: Node, name: str) -> list[int]:
    values = node.attributes.get(name, [])
    return values if isinstance(values, list) else []
