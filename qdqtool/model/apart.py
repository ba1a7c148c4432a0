"""onnx's shape inference, in a process of its own where it could end this one.

It is C++ that trusts models: a Slice of a negative dimension, which a kernel larger than what it reads makes, fails an
assertion and with it the process; GatherND and others read memory that is not theirs. So only operators of networks
are inferred here, and only where none of them cuts what may be negative; what onnx crashes on is not inferred.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from qdqtool.base import budgets, workers
from qdqtool.model.stored import Stored
from qdqtool.model.subgraphs import STANDARD, nodes_of

if TYPE_CHECKING:
    import subprocess

_WORKER = Path(__file__).parent / "apart_worker.py"
_DOUBLINGS = 32  # of a dimension, by all nodes together; more may leave the numbers that there are
_LARGE = 1 << 30
_PAIR = 2
_PAIRS = ("DequantizeLinear", "QuantizeLinear")

CUTTING = ("GatherND", "Slice")  # which crash on negative dimensions
#: Operators that crash on nothing, and make no negative dimension where they read none, by trial:
#: tests/model/test_apart.py
PLAIN = frozenset(
    (
        "Abs",
        "Add",
        "And",
        "ArgMax",
        "ArgMin",
        "BatchNormalization",
        "Cast",
        "CastLike",
        "Ceil",
        "Celu",
        "Clip",
        "Concat",
        "Constant",
        "ConstantOfShape",
        "Cos",
        "CumSum",
        "DequantizeLinear",
        "Div",
        "Dropout",
        "Einsum",
        "Elu",
        "Equal",
        "Erf",
        "Exp",
        "Flatten",
        "Floor",
        "Gather",
        "GatherElements",
        "Gelu",
        "Gemm",
        "GlobalAveragePool",
        "GlobalMaxPool",
        "Greater",
        "GreaterOrEqual",
        "GridSample",
        "GroupNormalization",
        "HardSigmoid",
        "HardSwish",
        "Hardmax",
        "Identity",
        "If",
        "InstanceNormalization",
        "IsInf",
        "IsNaN",
        "LRN",
        "LayerNormalization",
        "LeakyRelu",
        "Less",
        "LessOrEqual",
        "Log",
        "LogSoftmax",
        "Loop",
        "LpNormalization",
        "MatMul",
        "Max",
        "Mean",
        "Min",
        "Mish",
        "Mod",
        "Mul",
        "Neg",
        "NonMaxSuppression",
        "NonZero",
        "Not",
        "OneHot",
        "Or",
        "PRelu",
        "Pow",
        "QuantizeLinear",
        "RMSNormalization",
        "Range",
        "Reciprocal",
        "ReduceL1",
        "ReduceL2",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceProd",
        "ReduceSum",
        "ReduceSumSquare",
        "Relu",
        "Reshape",
        "Round",
        "ScatterElements",
        "ScatterND",
        "Selu",
        "Shape",
        "Sigmoid",
        "Sign",
        "Sin",
        "Size",
        "Softmax",
        "Softplus",
        "Softsign",
        "Sqrt",
        "Squeeze",
        "Sub",
        "Sum",
        "Swish",
        "Tanh",
        "Transpose",
        "Trilu",
        "Unsqueeze",
        "Where",
        "Xor",
    )
)


def infer_shapes(
    proto: onnx.ModelProto,
    check_type: bool = False,
    strict_mode: bool = False,
    data_prop: bool = False,
) -> onnx.ModelProto:
    """A copy of a model with the types that onnx infers.

    Raises:
        Exception: onnx cannot infer them, or crashes on it.
    """
    if is_harmless(proto):
        return onnx.shape_inference.infer_shapes(
            proto, check_type=check_type, strict_mode=strict_mode, data_prop=data_prop
        )
    return _CHILD.ask(proto, 0, check_type, strict_mode, data_prop)


def convert_version(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """A model in another version of ONNX's operator set, made by onnx's converter, which infers shapes as well.

    It takes attributes and inputs for what they should be, and crashes on others: so it always works apart.

    Raises:
        Exception: onnx cannot convert it, or crashes on it.
    """
    return _CHILD.ask(proto, opset)


def is_harmless(proto: onnx.ModelProto) -> bool:
    """Whether onnx's inference crashes on nothing in a model."""
    return _Look(proto).harmless


class _Look:
    """What a model's nodes could make of onnx."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._proto = proto
        self._quantized: dict[str, str] = {}
        self._stated: dict[str, set[tuple[int, ...]]] = {}
        self._doubled = 0.0
        nodes = list(nodes_of(proto))
        # A function of the model that has the name of an operator does not stand for it in onnx.
        self.harmless = all(
            n.op_type in PLAIN or n.op_type in CUTTING or n.op_type in _CHECKS
            if n.domain in STANDARD
            else not n.domain.startswith("ai.onnx")
            for n in nodes
        )
        if self.harmless and any(n.op_type in CUTTING and n.domain in STANDARD for n in nodes):
            self.harmless = self._states_sizes(nodes) and all(
                check(self, n) for n in nodes if (check := _CHECKS.get(n.op_type)) is not None
            )

    def _states_sizes(self, nodes: list[onnx.NodeProto]) -> bool:
        """Collects constants, and types that are stated; whether none has a dimension that is negative, or so large
        that sums of some could be."""
        stored = self.stored = Stored(self._proto, nodes)
        for value in (v for g in stored.graphs for v in (*g.input, *g.output, *g.value_info)):
            dims = tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
            if not all(0 <= d < _LARGE for d in dims):
                return False
            self._stated.setdefault(value.name, set()).add(dims)
        sparse = (
            *(t for g in stored.graphs for t in g.sparse_initializer),
            *(a.sparse_tensor for _, a in stored.constants),
        )
        self._quantized = {
            n.output[0]: n.input[0]
            for n in nodes
            if n.op_type in _PAIRS and n.input and n.output and n.output[0] not in stored.several
        }
        return all(d >= 0 for t in (*(t for _, t in stored.all), *sparse) for d in t.dims)

    def doubles(self, factor: float) -> bool:
        """Counts a factor of dimensions; whether all of them together are still few."""
        self._doubled += math.log2(max(factor, 1.0))
        return self._doubled <= _DOUBLINGS

    def dims(self, tensor: str) -> list[int] | None:
        """Dimensions of a constant, or of one that is quantized; None where a type says otherwise."""
        stated = set(self._stated.get(tensor, ()))
        for _ in range(_PAIR):
            tensor = self._quantized.get(tensor, tensor)
            stated |= self._stated.get(tensor, set())
        stored = self.stored.get(tensor)
        return None if stored is None or stated - {tuple(stored.dims)} else list(stored.dims)


def _attributes(node: onnx.NodeProto) -> dict[str, Any] | None:
    # onnx reads an attribute's numbers whatever type it has.
    if any((a.ints and a.type != a.INTS) or (a.i and a.type != a.INT) for a in node.attribute):
        return None
    try:
        return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    except ValueError:  # of a type that there is not, or a function's attribute
        return None


def _all(values: Any, low: float = 0) -> bool:
    return isinstance(values, list) and all(
        isinstance(v, int | float) and low <= v < _LARGE for v in values
    )


def _window(look: _Look, node: onnx.NodeProto) -> bool:
    """Whether a kernel is larger than its padding by less than two strides: then no dimension is negative."""
    stated = _attributes(node)
    if stated is None:
        return False
    if stated.get("auto_pad") in (b"SAME_UPPER", b"SAME_LOWER") and "pads" not in stated:
        return True
    kernel = stated.get("kernel_shape") or (look.dims("".join(node.input[1:2])) or [])[2:]
    if not kernel or not _all(kernel, 1):
        return False
    strides, dilations = (
        stated.get("strides", [1] * len(kernel)),
        stated.get("dilations", [1] * len(kernel)),
    )
    pads = stated.get("pads", [0, 0] * len(kernel))
    if not (_all(strides, 1) and _all(dilations, 1) and _all(pads)) or not (
        len(strides) == len(dilations) == len(kernel) == len(pads) / 2
    ):
        return False
    sums = [a + b for a, b in zip(pads, pads[len(kernel) :], strict=False)]
    sizes = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    if node.op_type == "ConvTranspose":
        added = stated.get("output_padding", [0] * len(kernel))
        return (
            "output_shape" not in stated
            and _all(added)
            and len(added) == len(kernel)
            and look.doubles(max(strides))
            and all(a + k - p >= s for a, k, p, s in zip(added, sizes, sums, strides, strict=True))
        )
    return all(k - p < 2 * s for k, p, s in zip(sizes, sums, strides, strict=True))


def _by_input(
    place: int, *attributes: str, factor: bool = False
) -> Callable[[_Look, onnx.NodeProto], bool]:
    """A constant, or an attribute, of numbers that are not negative."""

    def check(look: _Look, node: onnx.NodeProto) -> bool:
        stated = _attributes(node)
        if stated is None:
            return False
        found = [stated[name] for name in attributes if name in stated]
        if len(node.input) > place and node.input[place]:
            found.append(look.stored.values(node.input[place]))
        return all(
            _all(values) and (not factor or look.doubles(max(values, default=1)))
            for values in found
        )

    return check


def _resize(look: _Look, node: onnx.NodeProto) -> bool:
    return _by_input(min(2, len(node.input) - 1), factor=True)(
        look, node
    )  # the second input before opset 11


def _split(look: _Look, node: onnx.NodeProto) -> bool:
    """What is split in more than two equal parts may have too little for the last."""
    count = (_attributes(node) or {}).get("num_outputs", len(node.output))
    return (
        count == len(node.output)
        and _by_input(1, "split")(look, node)
        and (count <= _PAIR or not any(a.name == "num_outputs" for a in node.attribute))
    )


def _gather(look: _Look, node: onnx.NodeProto) -> bool:
    stated = _attributes(node)
    return stated is not None and _all([stated.get("batch_dims", 0)])


def _block(look: _Look, node: onnx.NodeProto) -> bool:
    size = (_attributes(node) or {}).get("blocksize")
    return isinstance(size, int) and size > 0 and look.doubles(size * size)


_CHECKS: dict[str, Callable[[_Look, onnx.NodeProto], bool]] = {
    **dict.fromkeys(("AveragePool", "Conv", "ConvTranspose", "MaxPool"), _window),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _block),
    "Expand": _by_input(1),
    "GatherND": _gather,
    "Pad": _by_input(1, "pads", "paddings"),
    "Resize": _resize,
    "Split": _split,
    "Tile": _by_input(1, factor=True),
    "TopK": _by_input(1),
    "Upsample": _by_input(1, "scales", factor=True),
}


class _Child:
    """The process that infers; started when first asked, and again after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """A fork has a process of its own: requests of two would mix."""
        self._process = None
        self._lock = threading.Lock()

    def ask(self, proto: onnx.ModelProto, *numbers: int) -> onnx.ModelProto:
        """What onnx makes of a model; the numbers are those that the worker takes.

        Raises:
            Exception: onnx refuses it or crashes on it.
        """
        source = proto.SerializeToString()
        with self._lock:
            try:
                process = self._started()
                assert process.stdin is not None and process.stdout is not None
                memory = budgets.ONNX_BYTES + budgets.ONNX_BYTES_BYTE * len(source)
                asked = (len(source), memory, budgets.ONNX_SECONDS, *numbers)
                process.stdin.write(" ".join(f"{n:d}" for n in asked).encode() + b"\n" + source)
                process.stdin.flush()
                done, size = map(int, process.stdout.readline().split())
                answer = process.stdout.read(size)
                if len(answer) != size:
                    raise ValueError
            except (OSError, ValueError):
                late = self._close() == -getattr(signal, "SIGXCPU", 0)
                raise RuntimeError(
                    f"onnx takes more than {budgets.ONNX_SECONDS} s of the processor for that"
                    if late
                    else "onnx crashes on it"
                ) from None
            except BaseException:
                self._close()
                raise
        if not done:
            raise RuntimeError(answer.decode())
        made: onnx.ModelProto = onnx.ModelProto.FromString(answer)
        return made

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._close()
            self._process = workers.start(_WORKER)
            atexit.register(self._close)
        return self._process

    def _close(self) -> int:
        """Ends it, if it runs; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        atexit.unregister(self._close)
        return workers.end(process)


_CHILD = _Child()
