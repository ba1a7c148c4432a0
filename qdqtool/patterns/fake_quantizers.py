"""Simulated quantizers other than QuantizeLinear and DequantizeLinear.

Exporters write such quantizers if they decompose a fake quantizer into arithmetic (torch's dynamo
exporter), fall back to operators of ATen, or have special operators (QONNX, OpenVINO, AIMET,
MQBench). TensorRT computes the arithmetic in float. Its parser stops at operators of ATen and at
special operators.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.ir import qdq
from qdqtool.ir.bounds import find_bounds
from qdqtool.ir.branches import find_bodies
from qdqtool.ir.constants import ConstantEvaluator
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import WEIGHTED
from qdqtool.proto.subgraphs import DOMAINS, remove_unused_opsets

_FloatArray = npt.NDArray[np.float64]
ATEN = "org.pytorch.aten"
_MAX_STEPS = 8  # maximum number of nodes before and after a Round
# Maximum difference between 1 and the product of the factors before and after a Round, in float32.
_TOLERANCE = 1e-4
# Maximum of this difference if the nodes divide by the scale, not multiply by a rounded inverse.
_EXACT_TOLERANCE = 1e-12
# Tolerances in place of `_TOLERANCE` for other element types.
_TOLERANCES: dict[int, float] = {onnx.TensorProto.FLOAT16: 2e-3, onnx.TensorProto.BFLOAT16: 1.6e-2}
_BITS = 8
_QONNX_DOMAINS = ("qonnx.custom_op.general", "onnx.brevitas", "finn.custom_op.general")
_MQBENCH = re.compile(r"(?:FakeQuantize)?(?:Learnable|Fixed|DSQ)\w{0,20}Affine", re.IGNORECASE)
_QONNX_PROBLEMS = {  # why Q and DQ cannot express these operators of QONNX
    "BipolarQuant": "a BipolarQuant has no 8-bit integers",
    "FloatQuant": "a FloatQuant has no 8-bit integers",
    "Trunc": "a Trunc removes bits of integers",
    "MultiThreshold": "a MultiThreshold has thresholds instead of a scale",
}
_PT2E_QUANTIZE = re.compile(
    r"(?:[a-z]\w*[._:]+)?(?:quantized_decomposed_)?quantize_(?:per_\w+|affine).*"
)
_PT2E_DEQUANTIZE = re.compile(
    r"(?:[a-z]\w*[._:]+)?(?:quantized_decomposed_)?dequantize_(?:per_\w+|affine).*"
)
_ATEN = re.compile(r"_?fake_quantize_(?:per|learnable)_\w+|fused_moving_avg_obs_fake_quant\w*")
_MODELOPT = ("quantize_op", "dynamic_block_quantize_op")
_OTHER = re.compile(r"fake_?quant", re.IGNORECASE)
_BYTES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
_HALF = onnx.TensorProto.FLOAT16
_NUMPY_TYPES: dict[int, type[np.floating]] = {onnx.TensorProto.FLOAT: np.float32, _HALF: np.float16}
_RANGES = {  # quantized type by the bounds of a Clip
    (-128, 127): np.int8,
    (-127, 127): np.int8,
    (0, 255): np.uint8,
}


class QuantizerForm(StrEnum):
    """Form of simulated quantizers, by the tool or exporter that writes the form."""

    DECOMPOSED = "decomposed"
    QONNX = "QONNX"
    OPENVINO = "OpenVINO"
    AIMET = "AIMET"
    ATEN = "ATen"
    PT2E = "PT2E"
    MQBENCH = "MQBench"
    MODELOPT = "ModelOpt"
    QCDQ = "QCDQ"
    OTHER = "other"


@dataclass(frozen=True, eq=False, repr=False)
class FakeQuantizer:
    """Nodes with the effect of a Q/DQ pair, or of a DQ alone, in another form.

    Attributes:
        form: Tool or exporter that writes the nodes.
        nodes: Nodes of the quantizer. The last node produces its output.
        source: Tensor that is quantized or, if ``is_stored``, dequantized.
        scale: Flat scales; None if ``problem`` is set.
        zero_point: Zero points of the quantized type, as many as scales; None if ``problem`` is
            set.
        axis: Channel axis; None for one scale.
        problem: Reason why Q and DQ cannot express the quantizer; empty if they can.
        is_narrow: Whether the quantizer clips values at -127 steps, where Q would clip at -128.
        is_stored: Whether ``source`` contains integers, so that a DQ alone expresses the quantizer.
        is_inexact: Whether Q may round values halfway between two steps differently, because the
            quantizer does not divide by the scale in float32, or rounds after it adds the zero
            point.
        elem_types: Element types of the scales of Q and DQ: the float types of the quantizer's
            input and output.
    """

    form: QuantizerForm
    nodes: tuple[Node, ...]
    source: str
    scale: _FloatArray | None = None
    zero_point: npt.NDArray[np.integer] | None = None
    axis: int | None = None
    problem: str = ""
    is_narrow: bool = False
    is_stored: bool = False
    is_inexact: bool = False
    elem_types: tuple[int, int] = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT)

    @property
    def output(self) -> str:
        """Name of the tensor that the last node produces."""
        return self.nodes[-1].output

    @property
    def name(self) -> str:
        """Name of the first node."""
        return self.nodes[0].name


def _create_inexpressible(
    form: QuantizerForm, nodes: tuple[Node, ...], problem: str
) -> FakeQuantizer:
    return FakeQuantizer(form, nodes, nodes[0].input(0), problem=problem)


def find_fake_quantizers(model: Model) -> list[FakeQuantizer]:
    """Return the simulated quantizers of a model, cached until the model is edited."""
    cache: dict[str, list[FakeQuantizer]] = model.cache.setdefault("fake quantizers", {})
    if not cache:
        cache["all"] = list(_QuantizerFinder(model).find())
    return cache["all"]


def find_nested_quantizers(model: Model) -> list[FakeQuantizer]:
    """Return the simulated quantizers in subgraphs, all with a ``problem``.

    Quantizers in the branches of an If and the bodies of loops cannot be rewritten.
    """
    nested = []
    for owner in (node for node in model.nodes if node.subgraphs):
        for body in find_bodies(model, owner):
            problem = f"it is in a subgraph of {owner.name} ({owner.op})"
            nested += [replace(fake, problem=problem) for fake in find_fake_quantizers(body)]
    return nested


def find_aten_nodes(model: Model) -> list[Node]:
    """Return the nodes with ATen operators that do not belong to a simulated quantizer."""
    nodes = [node for node in model.nodes if node.domain == ATEN]
    quantizers = (
        {n.index for fake in find_fake_quantizers(model) for n in fake.nodes} if nodes else set()
    )
    return [node for node in nodes if node.index not in quantizers]


_DIVIDING_FORMS = (  # forms that divide by the scale, as Q does
    QuantizerForm.DECOMPOSED,  # see _RoundChain.read
    QuantizerForm.QONNX,
    QuantizerForm.QCDQ,
)


class _QuantizerFinder:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.constants = ConstantEvaluator(model)
        types = {model.elem_type(tensor) for tensor in model.inputs}
        self._has_half_inputs = _HALF in types and onnx.TensorProto.FLOAT not in types

    def find(self) -> Iterator[FakeQuantizer]:
        for node in self.model.nodes:
            if node.domain in DOMAINS and node.op in ("Round", "Floor"):
                fake = _RoundChain(self, node).read()
            elif node.domain in DOMAINS and node.op == "Cast":
                fake = _RoundChain(self, node).read_dequantizer()
            elif node.domain in DOMAINS and node.op == "Clip":
                fake = self._read_clip(node)
            elif node.domain in DOMAINS and onnx.defs.has(node.op):
                continue
            else:
                fake = self._read_operator(node)
            if fake is not None:
                yield fake

    def _read_operator(self, node: Node) -> FakeQuantizer | None:
        operator = str(node.attributes.get("operator", "")) if node.domain == ATEN else ""
        if node.domain in _QONNX_DOMAINS:
            return self._read_qonnx(node)
        if node.op == "FakeQuantize":
            return self._read_openvino(node)
        if node.op == "QcQuantizeOp" or node.domain.startswith("aimet"):
            return _create_inexpressible(
                QuantizerForm.AIMET,
                (node,),
                "the file does not contain its scales, which AIMET keeps in encodings",
            )
        if _ATEN.match(operator) or _ATEN.match(node.op.split(".")[0]):
            return self._read_affine(QuantizerForm.ATEN, node)
        if _MQBENCH.fullmatch(node.op):
            return self._read_affine(QuantizerForm.MQBENCH, node)
        if _PT2E_QUANTIZE.fullmatch(node.op):
            return self._read_pt2e(node)
        if node.op.startswith("choose_qparams"):
            return _create_inexpressible(
                QuantizerForm.PT2E, (node,), "it chooses scales at run time"
            )
        if node.op in _MODELOPT:
            return _create_inexpressible(
                QuantizerForm.MODELOPT,
                (node,),
                "it has a largest magnitude (amax) in place of a scale",
            )
        if _OTHER.search(node.op):
            return _create_inexpressible(
                QuantizerForm.OTHER, (node,), f"the meaning of the inputs of {node.op} is unknown"
            )
        return None

    def _read_clip(self, clip: Node) -> FakeQuantizer | None:
        """Return the quantizer of a Clip between a Q or stored integers and a DQ.

        None for any other Clip, or if a bound, scale or zero point is not constant.
        """
        source = clip.input(0)
        consumers, producer = self.model.consumers(clip.output), self.model.producer(source)
        if len(consumers) != 1 or not qdq.is_dq(consumers[0]):
            return None
        dq, form = consumers[0], QuantizerForm.QCDQ
        low, high = self.value(clip.input(1)), self.value(clip.input(2))
        scale, zero = self.read_dq(dq)
        if low is None or high is None or scale is None or zero is None:
            return None
        bounds = float(low.reshape(-1)[0]), float(high.reshape(-1)[0])
        if qdq.is_q(producer) and producer is not None:
            nodes = (producer, clip, dq)
            return self.build(form, nodes, producer.input(0), scale, zero, bounds)
        integers = self.model.constant(source)
        if integers is None:
            return None
        if integers.min(initial=0) < bounds[0] or integers.max(initial=0) > bounds[1]:
            return _create_inexpressible(
                form,
                (clip, dq),
                f"its Clip limits the stored integers to the range {bounds[0]:g} to {bounds[1]:g}",
            )
        return self.build_stored(form, (clip, dq), source, scale, zero)

    def read_dq(self, dq: Node) -> tuple[_FloatArray | None, _FloatArray | None]:
        """Return scales and zero points of a DQ; None for parameters that are not constant.

        The scales broadcast with the input of the DQ.
        """
        scale = self._broadcast_scales(dq.input(0), self.value(dq.input(1)), dq.integer("axis", 1))
        zero = self.value(dq.input(2)) if dq.input(2) else np.zeros((), np.float64)
        return scale, zero

    def build_stored(
        self,
        form: QuantizerForm,
        nodes: tuple[Node, ...],
        source: str,
        scale: _FloatArray,
        zero_point: _FloatArray,
    ) -> FakeQuantizer:
        """Return a dequantizer of the integers `source`; see :meth:`build` for the arguments."""
        is_signed = self.model.elem_type(source) == onnx.TensorProto.INT8
        bounds = (-128.0, 127.0) if is_signed else (0.0, 255.0)
        fake = self.build(form, nodes, source, scale, zero_point, bounds)
        return replace(fake, is_stored=True)

    def value(self, tensor: str) -> _FloatArray | None:
        """Return a numeric constant as float64; None for other tensors."""
        value = self.constants.evaluate(tensor) if tensor else None
        if value is None:
            return None
        dtype = np.asarray(value).dtype
        if not np.issubdtype(dtype, np.number) and dtype.name != "bfloat16":
            return None
        return np.asarray(value, np.float64)

    def build(
        self,
        form: QuantizerForm,
        nodes: tuple[Node, ...],
        source: str,
        scale: _FloatArray | None,
        zero_point: _FloatArray | None,
        bounds: tuple[float, float] | None,
    ) -> FakeQuantizer:
        """Return a quantizer, with a ``problem`` if Q and DQ cannot express the quantizer.

        Args:
            form: Tool or exporter that writes the nodes.
            nodes: Nodes of the quantizer.
            source: Tensor that is quantized.
            scale: Scales that broadcast with the tensor; None if they are not constant.
            zero_point: Zero points; None if they are not constant.
            bounds: Smallest and largest integer; None if they are unknown.
        """
        with_problem = functools.partial(FakeQuantizer, form, nodes, source)
        if scale is None or zero_point is None or bounds is None:
            return with_problem(problem="its scale or range is not constant")
        dtype = _RANGES.get((int(bounds[0]), int(bounds[1]))) if np.isfinite(bounds).all() else None
        if dtype is None:
            low, high = bounds
            return with_problem(
                problem=f"its integers are {low:g} to {high:g}, but Q and DQ have -128 to 127 or 0 "
                "to 255"
            )
        if not np.array_equal(zero_point, np.rint(zero_point)):
            return with_problem(problem="its zero point is not an integer")
        axis = self._find_axis(source, scale)
        if scale.size > 1 and axis is None:
            return with_problem(
                problem=f"its scale has shape {list(scale.shape)}, which is not one value for each "
                "channel"
            )
        zeros = np.broadcast_to(zero_point.reshape(-1), scale.size).astype(dtype)
        elem_types = self._find_elem_types(source, nodes[-1].output)
        if elem_types is None:
            return with_problem(problem="its input or output is neither float32 nor float16")
        is_narrow = bounds[0] == -127 and self._may_be_below(source, float(-127 * scale.min()))
        return FakeQuantizer(
            form,
            nodes,
            source,
            scale.reshape(-1),
            zeros,
            axis,
            is_narrow=is_narrow,
            is_inexact=form not in _DIVIDING_FORMS or _HALF in elem_types,
            elem_types=elem_types,
        )

    def _find_elem_types(self, source: str, output: str) -> tuple[int, int] | None:
        """Return the types of the scales of Q and DQ; None if they are not float32 or float16.

        Integers as input count as float32.
        """
        first, last = self.model.elem_type(source), self.model.elem_type(output)
        if not first and self._has_half_inputs:  # operators of other domains have unknown types
            first = _HALF
        if first not in (0, onnx.TensorProto.FLOAT, _HALF, *_BYTES):
            return None
        first = _HALF if first == _HALF else onnx.TensorProto.FLOAT
        last = last or first
        return (first, last) if last in (onnx.TensorProto.FLOAT, _HALF) else None

    def _may_be_below(self, tensor: str, limit: float) -> bool:
        value = self.value(tensor)
        if value is not None:
            return bool(value.size and value.min() < limit)
        bounds = find_bounds(self.model).get(tensor)
        return bounds is None or bounds.low < limit

    def _find_axis(self, source: str, scale: _FloatArray) -> int | None:
        """Return the axis of a tensor along which scales differ.

        None if there is not exactly one, or if the tensor's shape is unknown.
        """
        shape = self.model.shape(source)
        axes = [axis for axis, size in enumerate(scale.shape) if size > 1]
        if len(axes) != 1 or shape is None or scale.ndim > len(shape):
            return None
        return len(shape) - scale.ndim + axes[0]

    # Operators of other tools ------------------------------------------------------------------

    def _read_qonnx(self, node: Node) -> FakeQuantizer | None:
        if node.op not in ("Quant", "IntQuant", *_QONNX_PROBLEMS):
            return None
        form, nodes, source = QuantizerForm.QONNX, (node,), node.input(0)
        if node.op not in ("Quant", "IntQuant"):
            return _create_inexpressible(form, nodes, _QONNX_PROBLEMS[node.op])
        rounding = str(node.attributes.get("rounding_mode", "ROUND")).upper()
        if rounding not in ("ROUND", "HALF_EVEN"):
            return _create_inexpressible(
                form,
                nodes,
                f"it rounds by {rounding}, but QuantizeLinear rounds to the nearest even integer",
            )
        bits = self.value(node.input(3))
        scale, zero = self.value(node.input(1)), self.value(node.input(2))
        if bits is None or bits.size != 1 or float(bits.reshape(-1)[0]) != _BITS:
            return _create_inexpressible(form, nodes, f"it has {_format_bits(bits)} bits, not 8")
        low, high = (-128, 127) if node.integer("signed", 1) else (0, 255)
        narrow = node.integer("narrow", 0)
        low, high = (low + narrow, high) if low else (low, high - narrow)
        return self.build(form, nodes, source, scale, zero, (low, high))

    def _read_openvino(self, node: Node) -> FakeQuantizer:
        form, nodes, source = QuantizerForm.OPENVINO, (node,), node.input(0)
        low, high, out_low, out_high = (self.value(node.input(i)) for i in range(1, 5))
        if low is None or high is None or out_low is None or out_high is None:
            return self.build(form, nodes, source, None, None, None)
        if not (np.allclose(low, out_low) and np.allclose(high, out_high)):
            return _create_inexpressible(form, nodes, "its input and output ranges differ")
        levels = node.integer("levels", 256)
        scale = np.asarray((high - low) / max(levels - 1, 1), np.float64)
        with np.errstate(all="ignore"):
            first = np.rint(low / scale)  # integer of the smallest value if the zero point is 0
        is_signed = bool(np.any(first < 0))
        bounds = (-128.0 if levels == 256 else -127.0, 127.0) if is_signed else (0.0, 255.0)
        if levels not in (255, 256) or (levels == 255 and not is_signed):
            return self.build(form, nodes, source, scale, first, (0.0, levels - 1.0))
        return self.build(form, nodes, source, scale, np.asarray(bounds[0] - first), bounds)

    def _read_affine(self, form: QuantizerForm, node: Node) -> FakeQuantizer:
        """Return the quantizer of a node with the inputs data, scale, zero point, axis, bounds."""
        source = node.input(0)
        name = str(node.attributes.get("operator", node.op))
        if name.startswith("fused_"):
            return _create_inexpressible(
                form,
                (node,),
                "it measures its range while it runs; disable the observers and export again",
            )
        # The last input of learnable quantizers is a factor for gradients.
        inputs = node.inputs[1:-1] if "learnable" in name else node.inputs[1:]
        values = [self.value(tensor) for tensor in inputs]
        if "tensor_qparams" in name and len(values) > 2:
            del values[2]  # the flag that enables the quantizer
        scale, zero = (*values, None, None)[:2]
        rest = [value.item() for value in values[2:] if value is not None and value.size == 1]
        names = ("quant_min", "quant_max")
        if all(name in node.attributes for name in names):
            rest = [float(node.attributes[name]) for name in names]
        bounds = (rest[-2], rest[-1]) if len(rest) >= 2 else None
        axis = int(rest[0]) if len(rest) == 3 else node.integer("axis", 0)
        return self.build(
            form, (node,), source, self._broadcast_scales(source, scale, axis), zero, bounds
        )

    def _broadcast_scales(
        self, source: str, scale: _FloatArray | None, axis: int
    ) -> _FloatArray | None:
        """Return the scales along an axis in a shape that broadcasts with the tensor.

        Scales remain unchanged if the shape of the tensor is unknown or does not have the axis.
        """
        shape = self.model.shape(source)
        if scale is None or scale.size == 1 or shape is None or not 0 <= axis < len(shape):
            return scale if scale is None or scale.size > 1 else scale.reshape(())
        return scale.reshape([-1 if i == axis else 1 for i in range(len(shape))])

    def _read_pt2e(self, node: Node) -> FakeQuantizer:
        """Return the quantizer that a quantize node of PyTorch's PT2E forms with its consumer.

        The result has a `problem` if the node is an affine quantizer of torchao, or if its only
        consumer is not a dequantize node.
        """
        consumers = self.model.consumers(node.output)
        form, source = QuantizerForm.PT2E, node.input(0)
        if "affine" in node.op:
            dequantizers = [n for n in consumers if _PT2E_DEQUANTIZE.fullmatch(n.op)]
            return _create_inexpressible(
                form,
                (node, *dequantizers),
                "an affine quantizer of torchao has block sizes and its own integer types",
            )
        if len(consumers) != 1 or not _PT2E_DEQUANTIZE.fullmatch(consumers[0].op):
            return _create_inexpressible(
                form, (node,), "its integers have no dequantize node as their only consumer"
            )
        values = [self.value(tensor) for tensor in node.inputs[1:]]
        numbers = [v.item() for v in values[2:] if v is not None and v.size == 1]
        is_channel = "quantize_per_channel" in node.op
        axis = int(numbers.pop(0)) if is_channel and numbers else 0
        bounds = (numbers[0], numbers[1]) if len(numbers) >= 2 else None
        scale, zero = (*values, None, None)[:2]
        nodes = (node, consumers[0])
        return self.build(
            form, nodes, source, self._broadcast_scales(source, scale, axis), zero, bounds
        )


def _format_bits(bits: _FloatArray | None) -> str:
    return "unknown" if bits is None else ", ".join(f"{b:g}" for b in bits.reshape(-1)[:3])


class _RoundChain:
    """Arithmetic around a Round or Floor, or after a Cast that dequantizes.

    The chain consists of scaling, offset, bounds, inverse offset and inverse scaling.
    """

    def __init__(self, finder: _QuantizerFinder, node: Node) -> None:
        self._finder, self._model = finder, finder.model
        self.nodes = [node]
        self._offset_before = np.zeros((), np.float64)  # offset applied before the bounds
        self._offset_after = np.zeros((), np.float64)  # offset applied after the bounds
        self._low, self._high = -np.inf, np.inf
        self._is_shifted = False  # whether the zero point is added before the Round

    def read(self) -> FakeQuantizer | None:
        is_floor = self.nodes[0].op == "Floor"
        start, factor = self._walk_to_scaling(upward=True)
        end, scale = self._walk_to_scaling(upward=False)
        if start is None or end is None or factor is None or scale is None:
            return None
        with np.errstate(all="ignore"):
            product = np.asarray(factor * scale)
        if is_floor:
            # Floor(x + 0.5) rounds to the nearest integer, so 0.5 is not an offset.
            self._offset_before = self._offset_before - 0.5
        tolerance = _TOLERANCES.get(self._model.elem_type(start), _TOLERANCE)
        if not np.allclose(product, 1, rtol=tolerance) or not np.allclose(
            self._offset_before, -self._offset_after
        ):
            return None
        self._follow_straight_through(start)
        if is_floor:
            return FakeQuantizer(
                QuantizerForm.DECOMPOSED,
                tuple(self.nodes),
                start,
                problem="it rounds halves up, but QuantizeLinear rounds them to the nearest even "
                "integer",
            )
        bounds = (self._low, self._high)
        if not np.isfinite(bounds).any():
            consumers = self._model.consumers(self.nodes[-1].output)
            if not any(node.op in WEIGHTED for node in consumers):
                return None  # not a quantizer: for example, a Round of coordinates
            return FakeQuantizer(
                QuantizerForm.DECOMPOSED,
                tuple(self.nodes),
                start,
                problem="its integers have no bounds",
            )
        fake = self._finder.build(
            QuantizerForm.DECOMPOSED, tuple(self.nodes), start, scale, self._offset_before, bounds
        )
        # If the factors multiply to exactly 1, the nodes divide by the scale, or the scale is a
        # power of two. Otherwise they multiply by a rounded inverse.
        is_division = bool(np.allclose(product, 1, rtol=0, atol=_EXACT_TOLERANCE))
        is_inexact = fake.is_inexact or not is_division or self._is_shifted
        return replace(fake, is_inexact=is_inexact)

    def read_dequantizer(self) -> FakeQuantizer | None:
        """Return the dequantizer (Cast, Sub, Mul) of integers that are stored or come from a Q.

        None if the nodes are not a dequantizer.
        """
        (cast,) = self.nodes
        source, model = cast.input(0), self._model
        is_integer = model.elem_type(source) in _BYTES
        if not is_integer or not (model.is_constant(source) or qdq.is_q(model.producer(source))):
            return None
        _, scale = self._walk_to_scaling(upward=False)
        if scale is None or np.isfinite([self._low, self._high]).any():
            return None
        nodes, zero = tuple(self.nodes), -self._offset_before
        return self._finder.build_stored(QuantizerForm.DECOMPOSED, nodes, source, scale, zero)

    def _walk_to_scaling(self, *, upward: bool) -> tuple[str | None, _FloatArray | None]:
        """Extend the chain to the scaling before or after it, and record bounds and offsets.

        Returns:
            The tensor beyond the scaling, and the factor of the scaling. Both are None if there is
            no scaling by a constant; the factor alone is None for a DQ with computed parameters.
        """
        node = self.nodes[0] if upward else self.nodes[-1]
        for _ in range(_MAX_STEPS):
            following = self._previous_node(node) if upward else self._next_node(node)
            if following is None:
                return None, None
            node = following
            self.nodes.insert(0 if upward else len(self.nodes), node)
            if not upward and qdq.is_dq(node):
                scale, zero = self._finder.read_dq(node)
                self._offset_after = self._offset_after - (0 if zero is None else zero)
                return node.output, None if zero is None else scale
            if node.op in ("Mul", "Div"):
                data, factor = self._read_factor(node)
                if factor is None:
                    return None, None
                return (data if upward else node.output), factor
            if not self._read_step(node, upward=upward):
                return None, None
        return None, None

    def _read_factor(self, node: Node) -> tuple[str, _FloatArray | None]:
        """Return the data of a Mul or Div and its constant factor; None without a factor."""
        data, constant = self._split_operands(node)
        if constant is None or (node.op == "Div" and data != node.input(0)):
            return data, None
        with np.errstate(all="ignore"):
            return data, constant if node.op == "Mul" else 1 / constant

    def _follow_straight_through(self, source: str) -> None:
        """Add the nodes of ``x + (quantized - x)``, the straight-through form of training."""
        output = self.nodes[-1].output
        difference = self._single_consumer(output)
        if difference is None or difference.op != "Sub" or difference.inputs != (output, source):
            return
        total = self._single_consumer(difference.output)
        if total is not None and total.op == "Add" and source in total.inputs:
            self.nodes += [difference, total]

    def _single_consumer(self, tensor: str) -> Node | None:
        consumers = self._model.consumers(tensor)
        return consumers[0] if len(consumers) == 1 and not self._model.is_output(tensor) else None

    def _previous_node(self, node: Node) -> Node | None:
        data, _ = self._split_operands(node)
        producer = self._model.producer(data)
        if producer is None or len(self._model.consumers(data)) != 1 or self._model.is_output(data):
            return None
        return producer

    def _next_node(self, node: Node) -> Node | None:
        consumer = self._single_consumer(node.output)
        if consumer is None or self._split_operands(consumer)[0] != node.output:
            return None
        return consumer

    def _split_operands(self, node: Node) -> tuple[str, _FloatArray | None]:
        """Return the computed input of a node, and the constant operand.

        The constant is None if no operand is constant, or if the node is not an arithmetic
        operator with two operands.
        """
        if node.op not in ("Add", "Sub", "Mul", "Div", "Min", "Max") or len(node.inputs) != 2:
            return node.input(0), None
        first, second = node.inputs
        values = self._finder.value(first), self._finder.value(second)
        is_first = values[1] is None and values[0] is not None
        # If both operands are constant, the larger one is the weights.
        if values[0] is not None and values[1] is not None:
            is_first = values[0].size < values[1].size
        return (second, values[0]) if is_first else (first, values[1])

    def _read_step(self, node: Node, *, upward: bool) -> bool:
        """Record the bounds or offset of a node between the Round and a scaling.

        Returns:
            False if the node cannot be part of a quantizer.
        """
        if node.op in ("Identity", "Cast"):
            return True
        if node.op == "Clip":
            return self._read_clip(node)
        if node.op == "Relu":
            self._low = max(self._low, 0.0)
            return True
        data, constant = self._split_operands(node)
        if constant is None:
            return False
        if node.op in ("Min", "Max") and constant.size == 1:
            if node.op == "Min":
                self._high = min(self._high, float(constant.reshape(-1)[0]))
            else:
                self._low = max(self._low, float(constant.reshape(-1)[0]))
            return True
        if node.op not in ("Add", "Sub") or (node.op == "Sub" and data != node.input(0)):
            return False
        offset = constant if node.op == "Add" else -constant
        self._add_offset(offset, upward=upward)
        return True

    def _add_offset(self, offset: _FloatArray, *, upward: bool) -> None:
        self._is_shifted |= upward and bool(np.any(offset))
        is_before_bounds = upward or not np.isfinite([self._low, self._high]).any()
        if is_before_bounds:
            self._offset_before = self._offset_before + offset
        else:
            self._offset_after = self._offset_after + offset

    def _read_clip(self, node: Node) -> bool:
        for position, (name, is_low) in enumerate((("min", True), ("max", False)), 1):
            limit = self._finder.value(node.input(position))
            if limit is None and name in node.attributes:
                limit = np.asarray(node.attributes[name], np.float64)
            if limit is None:
                continue
            if limit.size != 1:
                return False
            if is_low:
                self._low = max(self._low, float(limit.reshape(-1)[0]))
            else:
                self._high = min(self._high, float(limit.reshape(-1)[0]))
        return True


def rewrite_fake_quantizers(model: Model) -> int:
    """Replace the simulated quantizers that Q and DQ can express by Q and DQ, in place.

    Returns:
        Number of rewritten quantizers.
    """
    fakes = [fake for fake in find_fake_quantizers(model) if not fake.problem]
    editor = Editor(model)
    for fake in fakes:
        _rewrite_quantizer(editor, fake)
    editor.finish()
    remove_unused_opsets(model.proto)
    return len(fakes)


def _rewrite_quantizer(editor: Editor, fake: FakeQuantizer) -> None:
    """Replace a fake quantizer by Q and DQ, or by a DQ alone if its integers are stored.

    The last node of the fake quantizer becomes the DQ.
    """
    assert fake.scale is not None and fake.zero_point is not None
    shape = () if fake.axis is None else fake.scale.shape
    scale = fake.scale.reshape(shape)
    scales = {
        kind: editor.add_constant(f"{fake.name}/scale", scale.astype(_NUMPY_TYPES[kind]))
        for kind in dict.fromkeys(fake.elem_types)
    }
    zero_point = editor.add_constant(f"{fake.name}/zero_point", fake.zero_point.reshape(shape))
    before, after = (scales[kind] for kind in fake.elem_types)
    attributes = {} if fake.axis is None else {"axis": fake.axis}
    last, integers = fake.nodes[-1], fake.source
    if not fake.is_stored:
        source = _insert_lower_limit(editor, fake) if fake.is_narrow else fake.source
        inputs = [source, before, zero_point]
        integers = editor.insert_node(last, qdq.Q, f"{fake.name}/{qdq.Q}", inputs, attributes)
    editor.rewrite(last, qdq.DQ, [integers, after, zero_point], attributes)
    proto = editor.edit_proto(last)
    proto.domain, proto.name = "", editor.unique_name(f"{fake.name}/{qdq.DQ}")


def _insert_lower_limit(editor: Editor, fake: FakeQuantizer) -> str:
    """Limit a quantizer's input to -127 steps or more, and return the limited tensor.

    A Q alone would clip values at -128 steps.
    """
    assert fake.scale is not None
    rank = 0 if fake.axis is None else len(editor.model.shape(fake.source) or ())
    scale = fake.scale.reshape([-1 if i == fake.axis else 1 for i in range(rank)])
    low = (-127 * scale).astype(_NUMPY_TYPES[fake.elem_types[0]])
    value = editor.model.constant(fake.source)
    if value is not None:
        clipped = np.maximum(value, low)
        return editor.add_constant(f"{fake.source}_clipped", clipped.astype(value.dtype))
    inputs = [fake.source, editor.add_constant(f"{fake.name}/low", low)]
    # A Clip has only scalar bounds.
    op = "Clip" if fake.axis is None else "Max"
    return editor.insert_node(fake.nodes[-1], op, f"{fake.name}/{op}", inputs)
