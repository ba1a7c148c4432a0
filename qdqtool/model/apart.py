"""onnx's shape inference, in a process of its own where it could end this one.

It is C++ that trusts models: a Slice of a negative dimension, which a kernel larger than what it reads makes, fails an
assertion and with it the process; GatherND and others read memory that is not theirs. So only operators of networks
are inferred here, and only where none of them cuts what may be negative; what onnx crashes on is not inferred.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from qdqtool.base.process import marked
from qdqtool.model.subgraphs import STANDARD, inner_graphs, nodes_of

if TYPE_CHECKING:
    import subprocess

_WORKER = Path(__file__).parent / "apart_worker.py"
_DOUBLINGS = 32  # of a dimension, by all nodes together; more may leave the numbers that there are
_LARGE = 1 << 30
_CONSTANT = 64  # entries of one that is looked at
_PAIR = 2
_PAIRS = ("DequantizeLinear", "QuantizeLinear")

CUTTING = ("GatherND", "Slice")  # which crash on negative dimensions
#: Operators that crash on nothing, and make no negative dimension where they read none, by trial:
#: tests/model/test_apart.py
PLAIN = frozenset((
    "Abs", "Add", "And", "ArgMax", "ArgMin", "BatchNormalization", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Concat",
    "Constant", "ConstantOfShape", "Cos", "CumSum", "DequantizeLinear", "Div", "Dropout", "Einsum", "Elu", "Equal",
    "Erf", "Exp", "Flatten", "Floor", "Gather", "GatherElements", "Gelu", "Gemm", "GlobalAveragePool", "GlobalMaxPool",
    "Greater", "GreaterOrEqual", "GridSample", "GroupNormalization", "HardSigmoid", "HardSwish", "Hardmax", "Identity",
    "If", "InstanceNormalization", "IsInf", "IsNaN", "LRN", "LayerNormalization", "LeakyRelu", "Less", "LessOrEqual",
    "Log", "LogSoftmax", "Loop", "LpNormalization", "MatMul", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg",
    "NonMaxSuppression", "NonZero", "Not", "OneHot", "Or", "PRelu", "Pow", "QuantizeLinear", "RMSNormalization",
    "Range", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
    "ReduceSumSquare", "Relu", "Reshape", "Round", "ScatterElements", "ScatterND", "Selu", "Shape", "Sigmoid", "Sign",
    "Sin", "Size", "Softmax", "Softplus", "Softsign", "Sqrt", "Squeeze", "Sub", "Sum", "Swish", "Tanh", "Transpose",
    "Trilu", "Unsqueeze", "Where", "Xor",
))


def infer_shapes(
    proto: onnx.ModelProto, check_type: bool = False, strict_mode: bool = False, data_prop: bool = False
) -> onnx.ModelProto:
    """A copy of a model with the types that onnx infers.

    Raises:
        Exception: onnx cannot infer them, or crashes on it.
    """
    if _Look(proto).harmless:
        return onnx.shape_inference.infer_shapes(proto, check_type=check_type, strict_mode=strict_mode,
                                                 data_prop=data_prop)
    return _CHILD.ask(proto, 0, check_type, strict_mode, data_prop)


def convert_version(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """A model in another version of ONNX's operator set, made by onnx's converter, which infers shapes as well.

    Raises:
        Exception: onnx cannot convert it, or crashes on it.
    """
    if _Look(proto).harmless:
        from onnx import version_converter

        converted: onnx.ModelProto = version_converter.convert_version(proto, opset)
        return converted
    return _CHILD.ask(proto, opset)


class _Look:
    """What a model's nodes could make of onnx."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._proto = proto
        self._stored: dict[str, onnx.TensorProto] | None = None
        self._quantized: dict[str, str] = {}
        self._doubled = 0.0
        nodes = list(nodes_of(proto))
        own = {(f.domain, f.name) for f in proto.functions}
        self.harmless = all(n.op_type in PLAIN or n.op_type in CUTTING or n.op_type in _CHECKS or (n.domain, n.op_type)
                            in own if n.domain in STANDARD else not n.domain.startswith("ai.onnx") for n in nodes)
        if self.harmless and any(n.op_type in CUTTING and n.domain in STANDARD for n in nodes):
            self.harmless = not self._states_negative() and all(
                check is None or check(self, n) for n in nodes
                if (check := _CHECKS.get(n.op_type)) is not None or n.op_type == "GatherND")

    def _states_negative(self) -> bool:
        """Whether a type that is stated has a dimension that is negative, or so large that sums of some could be."""
        graphs = (self._proto.graph, *inner_graphs(list(nodes_of(self._proto))))
        return any(not 0 <= d.dim_value < _LARGE for g in graphs for v in (*g.input, *g.output, *g.value_info)
                   for d in v.type.tensor_type.shape.dim)

    def doubles(self, factor: float) -> bool:
        """Counts a factor of dimensions; whether all of them together are still few."""
        self._doubled += math.log2(max(factor, 1.0))
        return self._doubled <= _DOUBLINGS

    def values(self, tensor: str) -> list[float] | None:
        """The values of a small constant; None for others."""
        if self._stored is None:
            graph = self._proto.graph
            self._stored = {n.output[0]: a.t for n in graph.node if n.op_type == "Constant" and n.output
                            for a in n.attribute if a.name == "value"}
            self._quantized = {n.output[0]: n.input[0] for n in graph.node
                               if n.op_type in _PAIRS and n.input and n.output}
            self._stored.update((t.name, t) for t in graph.initializer)
        stored = self._stored.get(tensor)
        if stored is None or stored.external_data or math.prod(stored.dims) > _CONSTANT:
            return None
        try:
            return [float(v) for v in onnx.numpy_helper.to_array(stored).flat]
        except Exception:  # it is damaged
            return None

    def dims(self, tensor: str) -> list[int] | None:
        """Dimensions of a constant, or of one that is quantized."""
        self.values("")
        for _ in range(_PAIR):
            tensor = self._quantized.get(tensor, tensor)
        stored = (self._stored or {}).get(tensor)
        return None if stored is None else list(stored.dims)


def _attributes(node: onnx.NodeProto) -> dict[str, Any] | None:
    if any(a.ref_attr_name for a in node.attribute):
        return None
    try:
        return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    except ValueError:
        return None


def _all(values: Any, low: float = 0) -> bool:
    return isinstance(values, list) and all(low <= v < _LARGE for v in values)


def _window(look: _Look, node: onnx.NodeProto) -> bool:
    """Whether a kernel is larger than its padding by less than two strides: then no dimension is negative."""
    stated = _attributes(node)
    if stated is None:
        return False
    if stated.get("auto_pad") in (b"SAME_UPPER", b"SAME_LOWER"):
        return True
    kernel = stated.get("kernel_shape") or (look.dims("".join(node.input[1:2])) or [])[2:]
    if not kernel or not _all(kernel, 1):
        return False
    strides, dilations = stated.get("strides", [1] * len(kernel)), stated.get("dilations", [1] * len(kernel))
    pads = stated.get("pads", [0, 0] * len(kernel))
    if not (_all(strides, 1) and _all(dilations, 1) and _all(pads)) or not (
            len(strides) == len(dilations) == len(kernel) == len(pads) / 2):
        return False
    sums = [a + b for a, b in zip(pads, pads[len(kernel):], strict=False)]
    sizes = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    if node.op_type == "ConvTranspose":
        added = stated.get("output_padding", [0] * len(kernel))
        return "output_shape" not in stated and _all(added) and len(added) == len(kernel) and look.doubles(
            max(strides)) and all(a + k - p >= s for a, k, p, s in zip(added, sizes, sums, strides, strict=True))
    return all(k - p < 2 * s for k, p, s in zip(sizes, sums, strides, strict=True))


def _by_input(place: int, *attributes: str, factor: bool = False) -> Callable[[_Look, onnx.NodeProto], bool]:
    """A constant, or an attribute, of numbers that are not negative."""

    def check(look: _Look, node: onnx.NodeProto) -> bool:
        stated = _attributes(node)
        if stated is None:
            return False
        found = [stated[name] for name in attributes if name in stated]
        if len(node.input) > place and node.input[place]:
            found.append(look.values(node.input[place]))
        return all(_all(values) and (not factor or look.doubles(max(values, default=1))) for values in found)

    return check


def _block(look: _Look, node: onnx.NodeProto) -> bool:
    size = (_attributes(node) or {}).get("blocksize")
    return isinstance(size, int) and size > 0 and look.doubles(size * size)


_CHECKS: dict[str, Callable[[_Look, onnx.NodeProto], bool]] = {
    **dict.fromkeys(("AveragePool", "Conv", "ConvTranspose", "MaxPool"), _window),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _block),
    "Expand": _by_input(1),
    "Pad": _by_input(1, "pads", "paddings"),
    "Resize": _by_input(2, factor=True),
    "Split": _by_input(1, "split"),
    "Tile": _by_input(1, factor=True),
    "TopK": _by_input(1),
    "Upsample": _by_input(1, "scales", factor=True),
}


class _Child:
    """The process that infers; started when first asked, and again after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
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
                process.stdin.write(" ".join(f"{n:d}" for n in (len(source), *numbers)).encode() + b"\n" + source)
                process.stdin.flush()
                done, size = map(int, process.stdout.readline().split())
                answer = process.stdout.read(size)
                if len(answer) != size:
                    raise ValueError
            except (OSError, ValueError):
                self._close()
                raise RuntimeError("onnx crashes on it") from None
            except BaseException:
                self._close()
                raise
        if not done:
            raise RuntimeError(answer.decode())
        made: onnx.ModelProto = onnx.ModelProto.FromString(answer)
        return made

    def _started(self) -> subprocess.Popen[bytes]:
        import subprocess

        if self._process is None or self._process.poll() is not None:
            self._close()
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, env=marked(os.environ))
            atexit.register(self._close)
        return self._process

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        atexit.unregister(self._close)
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


_CHILD = _Child()
