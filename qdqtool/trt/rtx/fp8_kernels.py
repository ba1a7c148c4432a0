"""Convolutions of FP8 data and weights that TensorRT-RTX computes in float.

There are two causes:

* The weights of a channel have more than 32 elements in height and width. Exception: depthwise 7x7
  on compute capability 12.x.
* The Conv is a column: 1x1, on data [1, C, H, 1] with at most four channels. The compiler generates
  the GPU kernel of a column. A kernel that also fuses the Q before the column reads floats.
  Columns whose weights have one scale are FP8, unless they have no bias and read a network input.
"""

import onnx

from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.reasons.compiler import COMPILER
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.fp8 import FloatFp8Column
from qdqtool.trt.fault_checks import check_fp8_kernel_size

_COLUMN_CHANNELS = 4
_COLUMNS_IN_A_ROW = 8  # maximum number of nodes that are followed upstream of a column
_ACTIVATIONS = ("Relu", "Sigmoid", "Clip", "LeakyRelu", "HardSwish", "Tanh")
_SM12 = 120  # the first compute capability of 12.x


def find_fp8_obstacle(
    model: Model, node: Node, dq: Node, has_one_scale: bool, capabilities: tuple[int, ...]
) -> Reason | None:
    """Return the reason why an FP8 Conv runs in float; None if the Conv runs in FP8.

    None also for other nodes. ``dq`` is the DQ of the Conv's data. ``has_one_scale`` states whether
    the weights have one scalar scale. ``capabilities`` are the compute capabilities to build for,
    such as 89 for SM89.
    """
    weights = _weight_shape(model, node)
    if not weights:
        return None
    is_simple = has_one_scale and (node.input(2) or not _reads_network_input(model, dq))
    is_generated = _is_column(model, node, weights) and not is_simple
    if is_generated and _joins_quantizer(model, node, dq):
        return FloatFp8Column(COMPILER, node.name, weights[1])
    if _has_depthwise_kernel(node, weights) and all(c >= _SM12 for c in capabilities):
        return None
    return check_fp8_kernel_size(COMPILER, node.name, weights[2:])


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
    is_pointwise = (
        weights[2:] == [1, 1] and _has_unit_steps(node) and not any(_read_integers(node, "pads"))
    )
    return is_pointwise and data[1] == weights[1] <= _COLUMN_CHANNELS


def _joins_quantizer(model: Model, node: Node, dq: Node, depth: int = _COLUMNS_IN_A_ROW) -> bool:
    """Return whether the compiler fuses the Q before a column's DQ into the column's kernel.

    False without such a Q, if the Q or DQ has several consumers or is a network output, if a
    reduction is between the DQ and the column, or if the kernel before the Q fuses the Q: the
    kernel of a reduction, of a matrix product, or of another column that has fused the Q before it.
    """
    q = model.producer(dq.input(0))
    if q is None or not qdq.is_q(q) or _is_reduced(model, node, dq):
        return False
    if any(len(model.consumers(t)) > 1 or model.is_output(t) for t in (q.output, dq.output)):
        return False
    producer = _find_producer(model, q)
    if producer is None:
        return True
    if producer.op in ("MatMul", "Einsum"):
        return False
    if _is_reduction(producer):
        return not _fuses_following_q(model, producer)
    return depth == 0 or not _is_float_column(model, producer, depth - 1)


def _find_producer(model: Model, q: Node) -> Node | None:
    """Return the producer of a Q's input, upstream of all Q/DQ pairs with the scale of the Q.

    None if the Q reads a network input.
    """
    producer = model.producer(q.input(0))
    while producer is not None and qdq.is_dq(producer):
        first = model.producer(producer.input(0))
        same = qdq.read_params(model, producer).same_as(qdq.read_params(model, q))
        if first is None or not qdq.is_q(first) or not same:
            break
        producer = model.producer(first.input(0))
    return producer


def _is_reduced(model: Model, node: Node, dq: Node) -> bool:
    """Return whether a reduction is between a DQ and a node.

    Only the 8 nearest nodes upstream of the node are searched.
    """
    before = model.producer(node.input(0))
    for _ in range(_COLUMNS_IN_A_ROW):
        if before is None or before is dq:
            return False
        if _is_reduction(before):
            return True
        before = model.producer(before.input(0))
    return False


def _is_reduction(node: Node) -> bool:
    return node.op.startswith(("Global", "Reduce"))


def _fuses_following_q(model: Model, reduction: Node) -> bool:
    """Return whether the kernel of a reduction contains the Q after it.

    This holds for a float32 reduction of a network input, and for a maximum or minimum of the
    output of a DQ.
    """
    source = reduction.input(0)
    if source in model.inputs:
        return model.elem_type(source) == onnx.TensorProto.FLOAT
    is_maximum = reduction.op in ("GlobalMaxPool", "ReduceMax", "ReduceMin")
    return is_maximum and qdq.is_dq(model.producer(source))


def _is_float_column(model: Model, node: Node, depth: int) -> bool:
    """Return whether a node is a column in float whose kernel also fuses the next Q.

    Activations may be between the column and the Q. Conditions: the column has a bias, the scale of
    the weights is not a scalar, and the kernel also fuses the Q before the column. A column after a
    reduction of a DQ's output must also have four channels.
    """
    column = _find_before_activation(model, node)
    weights = _weight_shape(model, column) if column is not None else None
    if column is None or not weights or not column.input(2):
        return False
    data, scaled = (model.producer(tensor) for tensor in column.inputs[:2])
    if data is None or scaled is None or not qdq.is_dq(data) or not qdq.is_dq(scaled):
        return False
    if not _is_column(model, column, weights) or not qdq.read_params(model, scaled).scale_shape:
        return False
    is_narrow = weights[1] < _COLUMN_CHANNELS
    if is_narrow and _follows_quantized_reduction(model, data):
        return False
    return _joins_quantizer(model, column, data, depth)


def _find_before_activation(model: Model, node: Node) -> Node | None:
    """Return the first node upstream of a node, itself included, that is not an activation.

    The search also ends at an activation whose input has other consumers. None if the activations
    read a network input.
    """
    current: Node | None = node
    while current is not None and current.op in _ACTIVATIONS:
        if len(model.consumers(current.input(0))) != 1:
            break
        current = model.producer(current.input(0))
    return current


def _follows_quantized_reduction(model: Model, dq: Node) -> bool:
    q = model.producer(dq.input(0))
    before = _find_producer(model, q) if q is not None and qdq.is_q(q) else None
    if before is None or not _is_reduction(before):
        return False
    return qdq.is_dq(model.producer(before.input(0)))


def _has_depthwise_kernel(node: Node, weights: list[int]) -> bool:
    is_depthwise = weights[0] == node.integer("group", 1) > 1 and weights[1] == 1
    return is_depthwise and weights[2:] == [7, 7] and _has_unit_steps(node)


def _has_unit_steps(node: Node) -> bool:
    return all(
        step == 1 for step in (*_read_integers(node, "strides"), *_read_integers(node, "dilations"))
    )


def _read_integers(node: Node, name: str) -> list[int]:
    values = node.attributes.get(name, [])
    return values if isinstance(values, list) else []
