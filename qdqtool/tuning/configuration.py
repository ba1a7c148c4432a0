"""From a choice of sites to a placement with scales, and to what TensorRT is predicted to make of it.

A placement with its scales is plain data (a *recipe*): what a worker needs to build the model, and no more.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from qdqtool import prediction
from qdqtool.insertion import fp16
from qdqtool.insertion.options import PlacementOptions
from qdqtool.insertion.placement import (
    Placement,
    PlacementRules,
    QuantizedInput,
    WeightSite,
    can_be_quantized,
    find_head_float_nodes,
    place,
)
from qdqtool.insertion.rewrite import ActivationScale, insert_pairs
from qdqtool.insertion.scales import (
    GroupScale,
    MethodChoice,
    ScaleGroup,
    choose_scale,
    find_scale_groups,
)
from qdqtool.ir.graph import EDITED, Model
from qdqtool.ir.operators import WEIGHTED
from qdqtool.ir.qdq import QUANTIZABLE
from qdqtool.timing.estimate import estimate
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.twin import Shapes, light
from qdqtool.timing.work import product_of
from qdqtool.trt.targets import Target
from qdqtool.types import Prediction, QuantizedTensor
from qdqtool.util.notes import Note

if TYPE_CHECKING:
    from calibration.statistics import TensorStatistics


@dataclass(frozen=True)
class Pair:
    """One quantized activation."""

    tensor: str  # its name
    # node index, input position and role of everything that reads it dequantized
    readers: tuple[tuple[int, int, str], ...]
    scale: float  # in units of the tensor per integer step
    method: str  # how the scale was chosen
    group: int | None = None  # number of its scale group; None for a scale of its own


@dataclass(frozen=True)
class Recipe:
    """All pairs of a Q/DQ model: those of activations, and node index, tensor and axis of quantized weights."""

    pairs: tuple[Pair, ...]
    weights: tuple[tuple[int, str, int | None], ...]

    @functools.cached_property
    def key(self) -> str:
        """Recipes of the same key make models that compute the same."""
        content = ([(p.tensor, p.readers, p.scale.hex()) for p in self.pairs], self.weights)
        return hashlib.sha256(repr(content).encode()).hexdigest()[:20]

    @functools.cached_property
    def reads(self) -> Mapping[int, tuple[object, ...]]:
        """For each node what it reads quantized: equal entries compute the same from the same inputs."""
        found: dict[int, list[object]] = defaultdict(list)
        for pair in self.pairs:
            for index, position, _ in pair.readers:
                found[index].append((position, pair.tensor, pair.scale))
        for index, tensor, axis in self.weights:
            found[index].append((tensor, axis))
        return {index: tuple(sorted(entries, key=repr)) for index, entries in found.items()}

    def only(self, nodes: Container[int]) -> Recipe:
        """The pairs that some nodes read, by their indices."""
        pairs = ((p, tuple(r for r in p.readers if r[0] in nodes)) for p in self.pairs)
        return Recipe(
            tuple(replace(p, readers=readers) for p, readers in pairs if readers),
            tuple(w for w in self.weights if w[0] in nodes),
        )

    @property
    def is_float(self) -> bool:
        """Whether it leaves the network float."""
        return not self.pairs and not self.weights

    def build(
        self, model: Model, weights: str = PlacementOptions.weights
    ) -> tuple[Model, list[QuantizedTensor]]:
        """The Q/DQ model, and what got a Q/DQ pair.

        ``model`` is the prepared float model that the recipe was made for, and is not changed; ``weights`` is as for
        :func:`qdqtool.insertion.rewrite.insert_pairs`.
        """
        copy = model.copy()
        placement = Placement(
            {
                p.tensor: [
                    QuantizedInput(copy.nodes[i], position, role) for i, position, role in p.readers
                ]
                for p in self.pairs
            },
            [WeightSite(copy.nodes[i], tensor, axis) for i, tensor, axis in self.weights],
        )
        scales = {p.tensor: ActivationScale(p.scale, p.method, p.group) for p in self.pairs}
        return copy, insert_pairs(copy, placement, scales, weights)


def first_change(model: Model, one: Recipe, other: Recipe) -> int:
    """Position in ``model.ordered`` of the first node that reads something else; the number of nodes if none does."""
    changed = (
        i for i, n in enumerate(model.ordered) if one.reads.get(n.index) != other.reads.get(n.index)
    )
    return next(changed, len(model.ordered))


def apart(one: Recipe, other: Recipe) -> tuple[Recipe, Recipe]:
    """Both with those nodes alone quantized that read something else in the other."""
    nodes = {n for n in {*one.reads, *other.reads} if one.reads.get(n) != other.reads.get(n)}
    return one.only(nodes), other.only(nodes)


def share_behind(model: Model) -> list[float]:
    """For each cut the part of all multiplications that lies behind it, from 1 at the inputs to 0 at the end."""
    shapes = Shapes(model)
    work = []
    for node in model.ordered:
        product = product_of(node, shapes.get) if node.op in WEIGHTED else None
        work.append(1.0 if product is None else product.macs)
    total = sum(work) or 1.0
    left = itertools.accumulate(work, operator.sub, initial=total)
    return [amount / total for amount in left][:-1] + [0.0]


# Configurations ------------------------------------------------------------------------------------------------------

FLOAT = "float"


@dataclass(frozen=True)
class Configuration:
    """What differs from everything INT8."""

    floats: frozenset[str] = frozenset()  # names of nodes that are float
    quantized: frozenset[str] = (
        frozenset()
    )  # names of nodes that are INT8 although the head preset leaves them float
    # calibration methods by quantized tensor; they go for its whole scale group
    methods: frozenset[tuple[str, str]] = frozenset()
    # quantized tensors that have a scale of their own although they are tied to others
    apart: frozenset[str] = frozenset()

    def joined(self, other: Configuration) -> Configuration:
        """Both; ``other``'s methods count where both name a tensor."""
        named = {t for t, _ in other.methods}
        return Configuration(
            self.floats | other.floats,
            (self.quantized | other.quantized) - self.floats - other.floats,
            frozenset(m for m in self.methods if m[0] not in named) | other.methods,
            self.apart | other.apart,
        )


@dataclass(frozen=True)
class Cost:
    """What a placement costs."""

    convolutions: int  # convolutions and products in all
    int8: int  # those of them that run in INT8
    conversions: int  # conversions; 0 where the target names none
    ms: float | None = None  # predicted milliseconds; None without a GPU

    @property
    def value(self) -> float:
        """What is made small: milliseconds, or float convolutions and conversions together."""
        return (
            self.ms
            if self.ms is not None
            else float(self.convolutions - self.int8 + self.conversions)
        )


@dataclass
class Plan:
    """A configuration worked out."""

    placement: Placement
    scales: list[GroupScale]
    recipe: Recipe
    warnings: list[Note] = field(default_factory=list)


@dataclass(eq=False)
class Planner:
    """Works configurations out for one network."""

    model: Model  # the prepared float network
    rules: PlacementRules  # the user's placement rules
    target: Target  # which TensorRT
    methods: MethodChoice  # the user's calibration methods
    unify: bool = True  # whether tied tensors share a scale
    gpu: Gpu | None = None  # where it will run; None counts float convolutions and conversions
    half: bool = False  # whether what is not quantized will be FP16
    # tensors that FP16 cannot hold; set before costs are asked for
    wide: Mapping[str, float] = field(default_factory=dict)
    # of the network's tensors; set before plans are asked for
    statistics: Mapping[str, TensorStatistics] = field(default_factory=dict)
    _scales: dict[tuple[tuple[str, ...], tuple[str, ...], str], tuple[GroupScale, list[Note]]] = (
        field(default_factory=dict)
    )
    _placements: dict[tuple[frozenset[str], frozenset[str]], Placement] = field(
        default_factory=dict
    )
    _plans: dict[Configuration, Plan] = field(default_factory=dict)
    _costs: dict[str, Cost] = field(default_factory=dict)  # by recipe
    _known: dict[Configuration, Cost] = field(default_factory=dict)

    def placement(self, configuration: Configuration) -> Placement:
        """What is quantized; not to be changed."""
        chosen = configuration.floats, configuration.quantized
        if chosen not in self._placements:
            self._placements[chosen] = place(
                self.model, replace(self.rules, floats=chosen[0], quantized=chosen[1])
            )
        return self._placements[chosen]

    def groups(self, placement: Placement, apart: Iterable[str] = ()) -> list[ScaleGroup]:
        """The scale groups, with those tensors apart that are to have a scale of their own."""
        own = set(apart)
        found: list[ScaleGroup] = []
        for group in find_scale_groups(self.model, placement.inputs, self.unify):
            rest = tuple(t for t in group.quantized if t not in own)
            if rest:
                found.append(
                    replace(group, quantized=rest) if len(rest) < len(group.quantized) else group
                )
            found.extend(ScaleGroup((t,), (t,), (t,)) for t in group.quantized if t in own)
        return found

    def possible_groups(self) -> list[ScaleGroup]:
        """Groups of everything that any placement quantizes: a float can move a Q to a residual's other input."""
        model = self.model
        preset = frozenset(
            model.nodes[i].name for i in find_head_float_nodes(model, self.rules.head)
        )
        wide = Placement(dict(self.placement(Configuration(quantized=preset)).inputs))
        for tensor in self.placement(Configuration()).inputs:
            wide.inputs.setdefault(tensor, [])
        for node in model.ordered:
            if can_be_quantized(model, node):
                for tensor in node.inputs:
                    if (
                        tensor
                        and not model.is_constant(tensor)
                        and model.elem_type(tensor) in (*QUANTIZABLE, 0)
                    ):
                        wide.inputs.setdefault(tensor, [])
        return [*self.groups(wide), *self.groups(wide, wide.inputs)]

    def scale(self, group: ScaleGroup, method: str) -> tuple[GroupScale, list[Note]]:
        key = (group.quantized, group.sources, method)
        if key not in self._scales:
            choice = MethodChoice(method, (), self.methods.percentile)
            self._scales[key] = choose_scale(group, self.statistics, choice)
        return self._scales[key]

    def plan(self, configuration: Configuration) -> Plan:
        """The placement with its scales; needs :attr:`statistics`."""
        if configuration not in self._plans:
            placement = self.placement(configuration)
            scales: list[GroupScale] = []
            warnings: list[Note] = []
            chosen = dict(configuration.methods)
            for group in self.groups(placement, configuration.apart):
                method = next((chosen[t] for t in group.quantized if t in chosen), None)
                scale, said = self.scale(group, method or self.methods.method_for(group))
                scales.append(scale)
                warnings += said
            self._plans[configuration] = Plan(
                placement, scales, _recipe(placement, scales), warnings
            )
        return self._plans[configuration]

    def build(self, plan: Plan, weights: str) -> tuple[Model, list[QuantizedTensor]]:
        """The finished Q/DQ model, and what got a pair; ``weights`` as in :meth:`Recipe.build`."""
        made, quantized = (
            plan.recipe.build(self.model, weights) if plan.recipe.pairs else (self.model.copy(), [])
        )
        if self.half:
            fp16.convert_to_fp16(made, self.wide)
        return made, quantized

    def cost(self, configuration: Configuration) -> Cost:
        """What TensorRT makes of it; methods do not matter, only who shares a scale."""
        if configuration not in self._known:
            placement = self.placement(configuration)
            groups = self.groups(placement, configuration.apart)
            recipe = _recipe(
                placement, [GroupScale(g, 0.01 * (n + 1), "", ()) for n, g in enumerate(groups)]
            )
            if recipe.key not in self._costs:
                self._costs[recipe.key] = self.predict_cost(recipe)
            self._known[configuration] = self._costs[recipe.key]
        return self._known[configuration]

    def predict_cost(self, recipe: Recipe) -> Cost:
        index = self.slim.copy() if not recipe.pairs else recipe.build(self.slim, "sketch")[0]
        if self.half:
            fp16.convert_to_fp16(index, self.wide)
        predicted = prediction.predict(index, self.target, advice=False)
        ms = None
        if self.gpu is not None:
            ms = estimate(
                index, predicted, self.gpu, self.target, plain=self.gpu.plain, compare=False
            ).total_ms
        return cost_of(predicted, ms)

    @functools.cached_property
    def slim(self) -> Model:
        """The network without its large weights; all other constants stay, shapes may depend on them."""
        weights = {n.input(1) for n in self.model.nodes if n.op in WEIGHTED}
        return Model(light(self.model, weights), self.model.path, EDITED, types=self.model)


def cost_of(predicted: Prediction, ms: float | None) -> Cost:
    """The cost of what was predicted."""
    summary = predicted.summary()
    return Cost(summary["convolutions"], summary["int8"], summary["conversions"] or 0, ms)


def _recipe(placement: Placement, scales: Iterable[GroupScale]) -> Recipe:
    numbers = itertools.count()  # of tied groups
    by_tensor: dict[str, tuple[float, str, int | None]] = {}
    for scale in scales:
        number = next(numbers) if scale.group.is_shared else None
        by_tensor.update(dict.fromkeys(scale.group.quantized, (scale.scale, scale.method, number)))
    return Recipe(
        tuple(
            Pair(t, tuple((r.node.index, r.position, r.role) for r in readers), *by_tensor[t])
            for t, readers in placement.inputs.items()
        ),
        tuple((w.node.index, w.tensor, w.axis) for w in placement.weights),
    )
