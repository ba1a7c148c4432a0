"""SmoothQuant: move outlier channels from activations into weights (Xiao et al., 2022).

In the activations of a transformer, a few channels have values many times as large as the others.
One scale has to cover all of them. Let X [..., channels] be a tensor that Linears with weights W
[channels, outputs] consume. Then

    X W = (X / s) (s W),    s = max|X|^alpha / max|W|^(1 - alpha)  for each channel

in float, except for rounding. The constants of X's producer are divided by ``s``: scale and bias of
a LayerNormalization (or a decomposed LayerNorm), weights and bias of a Linear, or the constant of a
Mul or Div (as in a decomposed GELU). The weights of the Linears are multiplied by ``s``. X is
changed only if this is possible for all its consumers, and if the operators between the producer
and the Linears keep the channels separate.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qdqtool.errors import QdqtoolError
from qdqtool.insertion.channel_places import NetworkShapes, Places, has_axes_of_places
from qdqtool.insertion.options import ImageOptions
from qdqtool.insertion.placement import Placement
from qdqtool.insertion.sample_runs import DEFAULT_IMAGES, measure_channel_maxima
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.metadata import SMOOTHED, set_metadata
from qdqtool.ir.operators import LayerKind, operator_of, rearranges, reduction_axes
from qdqtool.ir.qdq import QUANTIZABLE
from qdqtool.ir.sizes import is_linear
from qdqtool.patterns.layernorm import skip_identities
from qdqtool.proto.subgraphs import DOMAINS
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count

if TYPE_CHECKING:
    from calibration.arrays import CalibrationSource

SAMPLES = 32  # number of samples on which the largest value of each channel is measured
_SMALLEST = 1e-5  # minimum of a channel's largest value, as a fraction of the tensor's
_Array = npt.NDArray[Any]
_Constants = dict[tuple[int, int], _Array]
"""New constants, by node and input."""


@dataclass(frozen=True)
class ScaleMigration:
    """Channel scales that were moved from connected tensors into weights.

    Attributes:
        tensors: The tensors that quantized Linears consume.
        makers: Nodes whose constants were divided by the channel scales.
        linears: Linears whose weights were multiplied by the channel scales.
        before: Largest magnitude in any channel, divided by the median of the largest magnitudes of
            all channels, before the change.
        after: The same ratio after the change.
    """

    tensors: tuple[str, ...]
    makers: tuple[str, ...]
    linears: tuple[str, ...]
    before: float
    after: float

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "tensors": list(self.tensors),
            "makers": list(self.makers),
            "linears": list(self.linears),
            "before": round(self.before, 3),
            "after": round(self.after, 3),
        }


def smooth_activations(
    model: Model,
    placement: Placement,
    alpha: float,
    data: CalibrationSource | None,
    images: ImageOptions = DEFAULT_IMAGES,
) -> tuple[list[ScaleMigration], Note]:
    """Move channel scales of activations into weights, in place.

    The names of the smoothed tensors are written to the model's metadata, where ``predict`` reads
    them (:func:`qdqtool.ir.metadata.read_smoothed_tensors`). The caller must compute the placement
    again, because the model is edited.

    Args:
        model: The prepared float model.
        placement: Tensors and weights to quantize.
        alpha: Fraction of the differences between channels that moves into the weights: from 0 to
            1, usually 0.5.
        data: The calibration data. It is read twice: here and for the calibration.
        images: How images become inputs.

    Returns:
        The changes, which may be empty, and a note about them.

    Raises:
        QdqtoolError: `alpha` is out of range, or the data is missing, empty, or can be read only
            once.
        ModelError: onnxruntime cannot run the model.
    """
    _check_arguments(alpha, data)
    assert data is not None
    shapes = NetworkShapes(model, data, images)
    regions = list(_find_regions(shapes, placement))
    usable = [region for region in regions if not region.skip_reason]
    if not regions:
        return [], Note(
            f"`smooth={alpha:g}` has no effect: no Linear is quantized",
            code="no-linear",
            alpha=alpha,
        )
    reasons = _describe_skipped(regions, shapes)
    if not usable:
        return [], Note(
            f"`smooth={alpha:g}` has no effect: no input of a quantized Linear can be smoothed "
            f"({reasons})",
            code="none-smoothed",
            alpha=alpha,
            tensors=len(regions),
        )
    quantized = {site.node.index for site in placement.weights}
    linears = [region.select_linears(quantized) for region in usable]
    channels = {
        node.input(0): _count_channels(model, node)
        for node in itertools.chain.from_iterable(linears)
    }
    maxima = measure_channel_maxima(model, channels, data, images=images, samples=SAMPLES)
    migrations = _smooth_regions(usable, linears, maxima, alpha)
    if not migrations:
        return [], Note(
            f"`smooth={alpha:g}` has no effect: activations or weights are NaN, infinite or all 0, "
            "or smoothed constants are too large for their type. Check the images and the weights",
            code="too-large-to-smooth",
            alpha=alpha,
        )
    names = itertools.chain.from_iterable(migration.tensors for migration in migrations)
    set_metadata(model.proto, SMOOTHED, "\n".join(names))
    return migrations, _describe_migrations(migrations, alpha, reasons)


def _describe_migrations(migrations: Sequence[ScaleMigration], alpha: float, reasons: str) -> Note:
    """Return the note on smoothed tensors; `reasons` describe those that cannot be smoothed."""
    linears, places = sum(len(migration.linears) for migration in migrations), len(migrations)
    text = (
        f"`smooth={alpha:g}`: outlier channels in the inputs of {format_count(linears, 'Linear')} "
        f"were moved into the weights, at {format_count(places, 'place')}"
    )
    code = "smoothed"
    if reasons:
        text += f"; not possible for these inputs: {reasons}"
        code = "smoothed-in-part"
    return Note(text, code=code, alpha=alpha, linears=linears, places=places)


def _check_arguments(alpha: float, data: CalibrationSource | None) -> None:
    if not 0.0 <= alpha <= 1.0:
        raise QdqtoolError(
            f"`smooth={alpha:g}` is out of range. Give a number from 0 (outliers remain in the "
            "activations) to 1 (outliers move into the weights), usually 0.5",
            code="out-of-range",
            parameter="smooth",
        )
    if data is None:
        raise QdqtoolError(
            "`smooth` needs calibration images, because the ranges of a table are those of the "
            "network before smoothing; give images, or leave `smooth` out",
            code="option-conflict",
            parameter="smooth",
        )
    if isinstance(data, Iterator):
        raise QdqtoolError(
            "`smooth` reads the data twice; give a folder or a list instead of an iterator",
            code="read-once",
            parameter="data",
        )


def _describe_skipped(regions: Sequence[_ScaleRegion], shapes: NetworkShapes) -> str:
    """Return how many regions cannot be smoothed for each reason; empty if all can."""
    counts = Counter(region.skip_reason for region in regions if region.skip_reason)
    first = {region.skip_reason: region.blocking_node for region in reversed(regions)}
    texts = []
    for reason, count in counts.most_common():
        text = f"{count} {reason}"
        if first[reason]:
            text += f" ({first[reason]})" if count == 1 else f" (such as {first[reason]})"
        texts.append(text)
    if texts and shapes.has_dynamic_inputs:
        texts[-1] += " (export with fixed input sizes: more may then be possible)"
    return ", ".join(texts)


def _smooth_regions(
    regions: Sequence[_ScaleRegion],
    linears: Sequence[Sequence[Node]],
    maxima: Mapping[str, _Array],
    alpha: float,
) -> list[ScaleMigration]:
    """Change the constants of regions, and return the changes.

    Args:
        regions: The regions.
        linears: Quantized Linears of each region.
        maxima: Largest magnitude in each channel of the Linears' inputs.
        alpha: Fraction of the differences between channels that moves into the weights.
    """
    constants: _Constants = {}
    migrations = []
    for region, nodes in zip(regions, linears, strict=True):
        activations, weights = region.combine_maxima(nodes, maxima)
        factors = _compute_factors(activations, weights, alpha)
        if factors is not None and region.add_scaled_constants(factors, constants):
            migration = ScaleMigration(
                tuple(dict.fromkeys(n.input(0) for n in nodes)),
                tuple(n.name for n in region.producers),
                tuple(n.name for n in nodes),
                _channel_spread(activations),
                _channel_spread(activations / factors),
            )
            migrations.append(migration)
    if migrations:
        _write_constants(regions[0].model, constants)
    return migrations


def _channel_spread(maxima: _Array) -> float:
    median = float(np.median(maxima))
    return float(maxima.max()) / median if median > 0.0 else float(maxima.max() > 0.0)


def _compute_factors(
    activations: _Array, weights: _Array, alpha: float
) -> npt.NDArray[np.float64] | None:
    """Return the scales of the channels; None if a maximum is not finite or all are 0."""
    for maxima in (activations, weights):
        if not np.isfinite(maxima).all() or maxima.max() <= 0.0:
            return None
    high = np.maximum(activations.astype(np.float64), _SMALLEST * float(activations.max()))
    low = np.maximum(weights.astype(np.float64), _SMALLEST * float(weights.max()))
    factors: npt.NDArray[np.float64] = high**alpha / low ** (1.0 - alpha)
    return factors


def _weight_maxima(model: Model, linear: Node) -> _Array:
    value = model.constant(linear.input(1))
    assert value is not None
    output_axis = 1 - _input_channel_axis(linear)
    maxima: _Array = np.abs(value.astype(np.float64)).max(axis=output_axis, initial=0.0)
    return maxima


def _input_channel_axis(linear: Node) -> int:
    """Return the axis of the input channels in a Linear's weights: 0, or 1 with transB."""
    return int(linear.op == "Gemm" and bool(linear.integer("transB", 0)))


def _count_channels(model: Model, linear: Node) -> int:
    shape = model.constant_shape(linear.input(1)) or (0, 0)
    return shape[_input_channel_axis(linear)]


def _find_regions(shapes: NetworkShapes, placement: Placement) -> Iterator[_ScaleRegion]:
    visited: set[str] = set()
    for consumer in itertools.chain.from_iterable(placement.inputs.values()):
        linear = consumer.node
        tensor = linear.input(0)
        if tensor in visited or not is_linear(shapes.model, linear):
            continue
        channels = _count_channels(shapes.model, linear)
        region = _ScaleRegion(shapes, tensor, channels, whole=True)
        if region.skip_reason:  # perhaps only a part can be divided, such as the queries
            part = _ScaleRegion(shapes, tensor, channels, whole=False)
            region = region if part.skip_reason else part
        visited.update(region.tensors)
        yield region


class _ScaleRegion:
    """Connected tensors that are divided by the same factors s, and the nodes that compensate.

    Methods ``_try_divide_...`` divide an input or output of a node by s. They change constants of
    the node, or add its other tensors to the region. They return False if neither is possible.

    Attributes:
        model: The network.
        channels: Length of s.
        tensors: For each tensor, the index in s for each entry.
        linears: Linears that consume one of the tensors as their data.
        producers: Nodes whose constants are divided by s.
        skip_reason: Why the tensors cannot be divided, in words that follow the number of such
            regions; empty if the tensors can be divided.
        blocking_node: Name of the node that prevents the division; empty if no node prevents it.
    """

    def __init__(self, shapes: NetworkShapes, tensor: str, channels: int, *, whole: bool) -> None:
        """Extend the region from a first tensor to all connected tensors.

        Args:
            shapes: Shapes of the network's tensors.
            tensor: First tensor, with s along its last axis.
            channels: Length of s.
            whole: Whether all parts of a split or concatenated tensor are divided together.
        """
        self.model = shapes.model
        self.channels = channels
        self.tensors: dict[str, Places] = {tensor: np.arange(channels)}
        self.linears: list[Node] = []
        self.producers: list[Node] = []
        self.skip_reason = ""
        self.blocking_node = ""
        self._shapes = shapes
        self._whole = whole
        # Factors of constants, by node index and input position of the constant. Each factor is a
        # pair: the index in s for each entry of the constant, and the power of s.
        self._folds: dict[tuple[int, int], list[tuple[Places, int]]] = {}
        visited = 0
        while visited < len(self.tensors) and not self.skip_reason:
            self._visit_tensor(list(self.tensors)[visited])
            visited += 1

    def select_linears(self, quantized: set[int]) -> list[Node]:
        """Return the region's Linears that are quantized; the indices of such nodes are given."""
        return [node for node in self.linears if node.index in quantized]

    def combine_maxima(
        self, linears: Iterable[Node], maxima: Mapping[str, _Array]
    ) -> tuple[_Array, _Array]:
        """Return the largest magnitude for each entry of s, in the inputs and weights of Linears.

        Args:
            linears: Linears of the region.
            maxima: Largest magnitude in each channel of the Linears' inputs.
        """
        activations, weights = np.zeros(self.channels, np.float32), np.zeros(self.channels)
        for node in linears:
            places = self.tensors[node.input(0)]
            is_channel = places >= 0
            channel = places[is_channel]
            np.maximum.at(activations, channel, maxima[node.input(0)][is_channel])
            np.maximum.at(weights, channel, _weight_maxima(self.model, node)[is_channel])
        return activations, weights

    def add_scaled_constants(self, factors: npt.NDArray[np.float64], constants: _Constants) -> bool:
        """Add the new constants of the region to `constants`, and return whether they were added.

        Nothing is added if a constant is unknown, or if a new constant is not finite.
        """
        changes: _Constants = {}
        for (index, position), powers in self._folds.items():
            name = skip_identities(self.model, self.model.nodes[index].input(position))
            before = constants.get((index, position), self.model.constant(name))
            if before is None:
                return False
            product = before.astype(np.float64)
            for places, power in powers:
                product = product * np.where(places < 0, 1.0, factors[places] ** power)
            with np.errstate(over="ignore"):
                changes[index, position] = product.astype(before.dtype)
        if not all(np.isfinite(value).all() for value in changes.values()):
            return False
        constants.update(changes)
        return True

    def _visit_tensor(self, tensor: str) -> None:
        """Extend the region across a tensor's producer and consumers, or set `skip_reason`."""
        model, places = self.model, self.tensors[tensor]
        producer = model.producer(tensor)
        if model.is_output(tensor):
            self.skip_reason = "among the network's outputs"
        elif producer is None:
            self.skip_reason = "among the network's inputs or constants"
        elif not self._try_divide_output(producer, tensor, places):
            self.skip_reason = f"computed by {producer.op}"
            self.blocking_node = producer.name
        else:
            for consumer in dict.fromkeys(model.consumers(tensor)):
                if consumer.op != "Shape" and not self._try_divide_input(consumer, tensor, places):
                    self.skip_reason = f"with {consumer.op} as another consumer"
                    self.blocking_node = consumer.name
                    break

    def _try_divide_output(self, node: Node, tensor: str, places: Places) -> bool:
        if is_linear(self.model, node):
            return self._try_divide_linear(node, places)
        if node.domain not in DOMAINS:
            return False
        if node.op == "LayerNormalization":
            return tensor == node.output and self._try_divide_layer_norm(node, places)
        factor = _find_factor(self.model, node)
        if factor is not None:
            power = 1 if node.op == "Div" else -1
            return self._can_fold(node, [factor], places) and self._record_producer_folds(
                node, [factor], places, power
            )
        if _is_sum(node):
            return self._try_divide_summands(node, places)
        if node.op == "MatMul":
            return self._try_divide_product_operand(node, places)
        return self._try_divide_before_move(node, node.outputs.index(tensor), places)

    def _try_divide_linear(self, node: Node, places: Places) -> bool:
        bias = [2] if node.input(2) else []
        if places.ndim > 1 or not self._can_fold(node, bias, places):
            return False
        is_transposed = _input_channel_axis(node) == 1
        self._record_producer_folds(node, [1], places[:, None] if is_transposed else places, -1)
        return self._record_producer_folds(node, bias, places, -1)

    def _try_divide_layer_norm(self, node: Node, places: Places) -> bool:
        parameters = [p for p in (1, 2) if node.input(p)]
        names = [skip_identities(self.model, node.input(p)) for p in parameters]
        shapes = {self.model.constant_shape(name) for name in names}
        return (
            places.ndim == 1
            and shapes == {places.shape}
            and self._record_producer_folds(node, parameters, places, -1)
        )

    def _try_divide_before_move(self, node: Node, position: int, places: Places) -> bool:
        moved = None
        if self._has_same_channels(node, places):
            moved = [places] * (len(node.inputs) if operator_of(node).joins else 1)
        if moved is None or not self._whole:
            moved = self._shapes.map_upstream(node, position, places) or moved
        return self._add_tensors(node.inputs, moved)

    def _try_divide_input(self, node: Node, tensor: str, places: Places) -> bool:
        positions = [p for p, t in enumerate(node.inputs) if t == tensor]
        if is_linear(self.model, node):
            return self._try_divide_linear_input(node, positions, places)
        if node.domain not in DOMAINS:
            return False
        factor = _find_factor(self.model, node)
        if factor is not None:
            return self._try_divide_factor(node, factor, places)
        if _is_sum(node):
            return self._try_divide_summands(node, places) and self._add_tensor(node.output, places)
        if node.op == "MatMul":
            return self._try_divide_product_input(node, positions[0], places)
        return all(self._try_divide_after_move(node, position, places) for position in positions)

    def _try_divide_linear_input(self, node: Node, positions: list[int], places: Places) -> bool:
        if positions != [0] or places.ndim > 1:
            return False
        self.linears.append(node)
        self._record_fold(node, 1, places if _input_channel_axis(node) else places[:, None], 1)
        return True

    def _try_divide_factor(self, node: Node, position: int, places: Places) -> bool:
        self._record_fold(node, position, places, 1 if node.op == "Mul" else -1)
        return self._can_fold(node, [position], places)

    def _try_divide_product_input(self, node: Node, position: int, places: Places) -> bool:
        return (
            node.input(1 - position) not in self.tensors
            and _is_outside_summed_axis(places, position)
            and self._add_tensor(node.output, places)
        )

    def _try_divide_after_move(self, node: Node, position: int, places: Places) -> bool:
        moved = None
        if self._has_same_channels(node, places) and (operator_of(node).joins or position == 0):
            moved = [places] * len(node.outputs)
        if moved is None or not self._whole:
            moved = self._shapes.map_downstream(node, position, places) or moved
        return self._add_tensors(node.outputs, moved)

    def _try_divide_summands(self, node: Node, places: Places) -> bool:
        constant = _find_constant_operands(self.model, node)
        if len(node.inputs) != 2 or not self._can_fold(node, constant, places):
            return False
        if constant and (node.index, constant[0]) not in self._folds:
            self._record_fold(node, constant[0], places, -1)
        tensors = [t for p, t in enumerate(node.inputs) if p not in constant]
        return all(self._has_axes(t, places) and self._add_tensor(t, places) for t in tensors)

    def _try_divide_product_operand(self, node: Node, places: Places) -> bool:
        for position in [p for p in (1, 0) if node.input(p) in self.tensors] or [1, 0]:
            tensor = node.input(position)
            if _is_outside_summed_axis(places, position) and self._has_axes(tensor, places):
                if self._add_tensor(tensor, places):
                    return True
        return False

    def _can_fold(self, node: Node, positions: Iterable[int], places: Places) -> bool:
        for position in positions:
            tensor = node.input(position)
            shape = self.model.constant_shape(skip_identities(self.model, tensor))
            if shape is None or self.model.elem_type(tensor) not in QUANTIZABLE:
                return False
            if any(size != 1 for size in shape) and not has_axes_of_places(shape, places):
                return False
        return True

    def _has_axes(self, tensor: str, places: Places) -> bool:
        return has_axes_of_places(self._shapes.shape(tensor) or (), places)

    def _record_fold(self, node: Node, position: int, places: Places, power: int) -> None:
        self._folds.setdefault((node.index, position), []).append((places, power))

    def _record_producer_folds(
        self, node: Node, positions: Iterable[int], places: Places, power: int
    ) -> bool:
        for position in positions:
            self._record_fold(node, position, places, power)
        if node not in self.producers:
            self.producers.append(node)
        return True

    def _add_tensors(self, tensors: Iterable[str], places: Sequence[Places] | None) -> bool:
        return places is not None and all(
            self._add_tensor(t, p) for t, p in zip(tensors, places, strict=False) if t
        )

    def _add_tensor(self, tensor: str, places: Places) -> bool:
        """Add a tensor to the region, unless none of its entries is divided.

        Args:
            tensor: Name of the tensor.
            places: Index in s for each entry; -1 for an entry that is not divided.

        Returns:
            False if the region already contains the tensor with other indices.
        """
        if (places < 0).all():
            return True
        return np.array_equal(self.tensors.setdefault(tensor, places), places)

    def _has_same_channels(self, node: Node, places: Places) -> bool:
        """Return whether a node commutes with the division and does not move channels."""
        model, operator = self.model, operator_of(node)
        if node.op == "Cast":
            target = node.integer("to", 0)
            return target in QUANTIZABLE and model.elem_type(node.input(0)) in QUANTIZABLE
        if node.op == "Pad":
            amounts = self._shapes.value(node.input(1))
            return amounts is not None and not amounts.any()
        if operator.averages and node.op != "ReduceMean":  # average pooling over height and width
            rank = self._shapes.rank(node.input(0))
            return places.shape[1:] == (1, 1) and rank == places.ndim + 1
        if node.op == "Relu" or operator.kind == LayerKind.IDENTITY:
            return not any(node.outputs[1:])
        return places.ndim == 1 and self._has_same_last_axis(node, len(places))

    def _has_same_last_axis(self, node: Node, channels: int) -> bool:
        """Return whether a node that moves values keeps their positions along the last axis."""
        operator = operator_of(node)
        if node.op == "Transpose":
            perm = node.attributes.get("perm")
            return isinstance(perm, list) and bool(perm) and perm[-1] == len(perm) - 1
        if node.op in ("Slice", "ReduceMean", "Gather") or operator.cuts or operator.joins:
            return self._is_last_axis_excluded(node, self._find_changed_axes(node))
        # A Reshape does not change the last axis if the size of this axis is the same before and
        # after.
        sizes = [(self._shapes.shape(t) or (None,))[-1] for t in (node.input(0), node.output)]
        return rearranges(node) and not operator.moves and sizes == [channels, channels]

    def _find_changed_axes(self, node: Node) -> Sequence[int]:
        """Return the axes that a node cuts, joins or reduces; empty if they are unknown."""
        if node.op == "Slice":
            value = self._shapes.value(node.input(3)) if node.input(3) else None
            return [] if value is None else value.reshape(-1).tolist()
        if node.op == "ReduceMean":
            return reduction_axes(self.model, node) or []
        return [node.integer("axis", 0)]

    def _is_last_axis_excluded(self, node: Node, axes: Sequence[int]) -> bool:
        rank = self._shapes.rank(node.input(0))
        return bool(axes) and rank > 0 and all(axis % rank != rank - 1 for axis in axes)


def _is_outside_summed_axis(places: Places, position: int) -> bool:
    """Return whether the channels of a MatMul operand are not along the summed axis."""
    axis = 2 if position else 1
    return places.ndim < axis or places.shape[-axis] == 1


def _find_constant_operands(model: Model, node: Node) -> list[int]:
    """Return a list with the position of the constant input, if one of two inputs is constant.

    The list is empty if none or both are constant, or if the node does not have two inputs.
    """
    if len(node.inputs) != 2:
        return []
    is_constant = [model.is_constant(skip_identities(model, t)) for t in node.inputs]
    return [is_constant.index(True)] if sum(is_constant) == 1 else []


def _find_factor(model: Model, node: Node) -> int | None:
    """Return the input position of the constant factor of a Mul or divisor of a Div, if any."""
    constant = _find_constant_operands(model, node)
    if constant and (node.op == "Mul" or (node.op == "Div" and constant == [1])):
        return constant[0]
    return None


def _is_sum(node: Node) -> bool:
    return operator_of(node).operation in ("SUM", "SUB")


def _write_constants(model: Model, constants: _Constants) -> None:
    """Set new constants of nodes. Other consumers of these constants keep the old values."""
    editor = Editor(model)
    for (index, position), value in constants.items():
        node = model.nodes[index]
        name = node.input(position)
        is_shared = len(model.consumers(name)) != 1 or model.is_output(name)
        if name in model.initializers and not is_shared:
            editor.set_constant(name, value)
        else:
            editor.set_input(node, position, editor.add_constant(f"{name}_smoothed", value))
    editor.finish()
