"""Plan placements: scales and predicted cost of a configuration."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from qdqtool import prediction
from qdqtool.insertion import fp16
from qdqtool.insertion.placement import (
    Placement,
    PlacementRules,
    can_be_quantized,
    compute_placement,
    find_head_float_nodes,
)
from qdqtool.insertion.rewrite import QuantizedTensor
from qdqtool.insertion.scales import (
    GroupScale,
    MethodChoice,
    ScaleGroup,
    choose_scale,
    find_scale_groups,
    group_separately,
)
from qdqtool.ir.graph import EDITED, Model
from qdqtool.ir.operators import WEIGHTED
from qdqtool.ir.qdq import QUANTIZABLE
from qdqtool.timing.estimate import estimate_time
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.model_variants import strip_large_constants
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import Target
from qdqtool.tuning.recipe import Recipe
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note

if TYPE_CHECKING:
    from calibration.statistics import TensorStatistics
    from qdqtool.timing.results import TimeEstimate

FLOAT = "float"


@dataclass(frozen=True)
class Configuration:
    """Differences between a placement and the placement with every layer in INT8.

    Attributes:
        floats: Names of nodes that are float.
        quantized: Names of nodes that are INT8 although the head preset leaves them float.
        methods: Pairs of a quantized tensor and the calibration method for the tensor's scale
            group.
        own_scales: Quantized tensors with a separate scale instead of the scale of their group.
    """

    floats: frozenset[str] = frozenset()
    quantized: frozenset[str] = frozenset()
    methods: frozenset[tuple[str, str]] = frozenset()
    own_scales: frozenset[str] = frozenset()

    def merge(self, other: Configuration) -> Configuration:
        """Return the union of both configurations.

        If both have a calibration method for a tensor, the method of `other` counts. A node that is
        float in one configuration is float in the union.
        """
        replaced = {tensor for tensor, _ in other.methods}
        floats = self.floats | other.floats
        return Configuration(
            floats,
            (self.quantized | other.quantized) - floats,
            frozenset(m for m in self.methods if m[0] not in replaced) | other.methods,
            self.own_scales | other.own_scales,
        )

    def as_json(self) -> Json:
        """Return the configuration as JSON, for the file of the measurements."""
        return {
            "floats": sorted(self.floats),
            "quantized": sorted(self.quantized),
            "methods": sorted(map(list, self.methods)),
            "own_scales": sorted(self.own_scales),
        }

    @staticmethod
    def from_json(fields: Json) -> Configuration:
        """Return the configuration that `as_json` has converted to `fields`.

        Raises:
            KeyError, TypeError, ValueError: The JSON has another structure.
        """
        names = {name: fields[name] for name in ("floats", "quantized", "own_scales")}
        methods = frozenset((tensor, method) for tensor, method in fields["methods"])
        texts = [*itertools.chain(*names.values()), *itertools.chain(*methods)]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(fields)
        return Configuration(
            frozenset(names["floats"]),
            frozenset(names["quantized"]),
            methods,
            frozenset(names["own_scales"]),
        )


@dataclass(frozen=True)
class PlacementCost:
    """Predicted cost of a placement.

    Attributes:
        convolutions: Number of convolutions and matrix products.
        int8: Number of convolutions and matrix products that run in INT8 or FP8.
        conversions: Number of remaining conversions; 0 if the prediction has no number.
        ms: Predicted milliseconds; None without a GPU.
    """

    convolutions: int
    int8: int
    conversions: int
    ms: float | None = None

    @staticmethod
    def from_prediction(predicted: Prediction, ms: float | None) -> PlacementCost:
        """Return the cost of a predicted model.

        Args:
            predicted: Prediction of the model.
            ms: Predicted milliseconds; None without a GPU.
        """
        summary = predicted.summary()
        return PlacementCost(
            summary["convolutions"],
            summary["int8"] + summary.get("fp8", 0),
            summary["conversions"] or 0,
            ms,
        )

    @property
    def value(self) -> float:
        """Milliseconds; without a GPU, the number of float convolutions plus conversions."""
        if self.ms is not None:
            return self.ms
        return float(self.convolutions - self.int8 + self.conversions)


@dataclass
class PlacementPlan:
    """Placement of a configuration, with scales, Q/DQ pairs (recipe) and warnings."""

    placement: Placement
    scales: list[GroupScale]
    recipe: Recipe
    warnings: list[Note] = field(default_factory=list)


@dataclass(eq=False)
class Planner:
    """Plans placements of one network and predicts their costs; results are cached.

    Attributes:
        model: The prepared float network.
        rules: Placement rules of the user.
        target: TensorRT version to predict for.
        methods: Calibration methods of the user.
        unify: Whether tensors share one scale if Concat or a similar operator connects them.
        gpu: GPU to predict times for. Without a GPU, the cost counts float convolutions and
            conversions.
        fp16: Whether layers that are not quantized will be FP16.
        fp32_tensors: Tensors too large for FP16, with their largest values. Must be set before the
            first cost is predicted.
        statistics: Statistics of the network's tensors. Must be set before the first plan.
        costs_by_recipe: Predicted costs by key of a recipe without its true scales. It may contain
            the costs of an earlier run.
    """

    model: Model
    rules: PlacementRules
    target: Target
    methods: MethodChoice
    unify: bool = True
    gpu: Gpu | None = None
    fp16: bool = False
    fp32_tensors: Mapping[str, float] = field(default_factory=dict)
    statistics: Mapping[str, TensorStatistics] = field(default_factory=dict)
    costs_by_recipe: dict[str, PlacementCost] = field(default_factory=dict)
    _scales: dict[tuple[tuple[str, ...], tuple[str, ...], str], tuple[GroupScale, list[Note]]] = (
        field(default_factory=dict)
    )
    _placements: dict[tuple[frozenset[str], frozenset[str]], Placement] = field(
        default_factory=dict
    )
    _plans: dict[Configuration, PlacementPlan] = field(default_factory=dict)
    _costs: dict[Configuration, PlacementCost] = field(default_factory=dict)

    def with_statistics(self, statistics: Mapping[str, TensorStatistics]) -> Planner:
        """Return a planner with other statistics, which shares the cached costs."""
        return replace(self, statistics=statistics, _scales={}, _plans={})

    def placement(self, configuration: Configuration) -> Placement:
        """Return the placement of a configuration, a cached object that callers must not change."""
        key = configuration.floats, configuration.quantized
        if key not in self._placements:
            rules = replace(
                self.rules, floats=configuration.floats, quantized=configuration.quantized
            )
            self._placements[key] = compute_placement(self.model, rules)
        return self._placements[key]

    def groups(self, placement: Placement, own_scales: Iterable[str] = ()) -> list[ScaleGroup]:
        """Return the scale groups of a placement. A tensor in `own_scales` is a group by itself."""
        separate = set(own_scales)
        groups: list[ScaleGroup] = []
        for group in find_scale_groups(self.model, placement.inputs, self.unify):
            rest = tuple(t for t in group.quantized if t not in separate)
            if len(rest) == len(group.quantized):
                groups.append(group)
                continue
            if rest:
                groups.append(replace(group, quantized=rest))
            groups += group_separately(t for t in group.quantized if t in separate)
        return groups

    def possible_groups(self) -> list[ScaleGroup]:
        """Return the scale groups of all tensors that any placement may quantize.

        These are more tensors than the placement with every layer in INT8 quantizes: if a node is
        float, the Q of a residual Add may move to the other input.
        """
        model = self.model
        preset = frozenset(
            model.nodes[i].name for i in find_head_float_nodes(model, self.rules.head)
        )
        largest = Placement(dict(self.placement(Configuration(quantized=preset)).inputs))
        tensors = list(self.placement(Configuration()).inputs)
        for node in model.ordered:
            if can_be_quantized(model, node):
                tensors += [t for t in node.inputs if t and self._can_be_quantized(t)]
        for tensor in tensors:
            largest.inputs.setdefault(tensor, [])
        return [*self.groups(largest), *self.groups(largest, largest.inputs)]

    def _can_be_quantized(self, tensor: str) -> bool:
        return not self.model.is_constant(tensor) and self.model.elem_type(tensor) in (
            *QUANTIZABLE,
            0,
        )

    def choose_scale(self, group: ScaleGroup, method: str) -> tuple[GroupScale, list[Note]]:
        """Return the scale that a calibration method chooses for a group, and its warnings."""
        key = (group.quantized, group.sources, method)
        if key not in self._scales:
            choice = replace(self.methods, default=method, overrides=())
            self._scales[key] = choose_scale(group, self.statistics, choice)
        return self._scales[key]

    def plan(self, configuration: Configuration) -> PlacementPlan:
        """Return the placement, scales and recipe of a configuration."""
        if configuration not in self._plans:
            placement = self.placement(configuration)
            scales: list[GroupScale] = []
            warnings: list[Note] = []
            methods = dict(configuration.methods)
            for group in self.groups(placement, configuration.own_scales):
                method = next((methods[t] for t in group.quantized if t in methods), None)
                scale, notes = self.choose_scale(group, method or self.methods.method_for(group))
                scales.append(scale)
                warnings += notes
            recipe = Recipe.from_placement(placement, scales)
            self._plans[configuration] = PlacementPlan(placement, scales, recipe, warnings)
        return self._plans[configuration]

    def build(self, plan: PlacementPlan, weights: str) -> tuple[Model, list[QuantizedTensor]]:
        """Build the Q/DQ model of a plan; return it with its quantized tensors.

        Args:
            plan: Plan of a configuration.
            weights: Form of the weights, as for :func:`qdqtool.insertion.rewrite.insert_pairs`.
        """
        return self._build_recipe(plan.recipe, self.model, weights)

    def _build_recipe(
        self, recipe: Recipe, model: Model, weights: str
    ) -> tuple[Model, list[QuantizedTensor]]:
        if recipe.pairs:
            built, quantized = recipe.build(model, weights)
        else:
            built, quantized = model.copy(), []
        if self.fp16:
            fp16.convert_to_fp16(built, self.fp32_tensors)
        return built, quantized

    def cost(self, configuration: Configuration) -> PlacementCost:
        """Return the predicted cost of a configuration; the cost is cached.

        The cost depends on the groups of tensors with a common scale, not on the scales themselves.
        """
        if configuration not in self._costs:
            placement = self.placement(configuration)
            groups = self.groups(placement, configuration.own_scales)
            scales = [GroupScale(g, 0.01 * (n + 1), "", ()) for n, g in enumerate(groups)]
            recipe = Recipe.from_placement(placement, scales)
            if recipe.key not in self.costs_by_recipe:
                self.costs_by_recipe[recipe.key] = self.predict_cost(recipe)
            self._costs[configuration] = self.costs_by_recipe[recipe.key]
        return self._costs[configuration]

    def predict_cost(self, recipe: Recipe) -> PlacementCost:
        """Predict the cost of a recipe, without a cache."""
        model, _ = self._build_recipe(recipe, self.light_model, "sketch")
        predicted = prediction.predict(model, self.target, advice=False)
        times = self.estimate_times(model, predicted)
        return PlacementCost.from_prediction(predicted, times[0].total_ms if times else None)

    def estimate_times(self, model: Model, predicted: Prediction) -> list[TimeEstimate]:
        """Return the estimated time of a predicted model on the GPU; empty without a GPU."""
        gpu = self.gpu
        if gpu is None:
            return []
        return [
            estimate_time(
                model, predicted, gpu, self.target, float_type=gpu.float_type, compare=False
            )
        ]

    @functools.cached_property
    def light_model(self) -> Model:
        """The network without large weights. Small constants are kept for shape inference."""
        weights = {n.input(1) for n in self.model.nodes if n.op in WEIGHTED}
        return Model(
            strip_large_constants(self.model, weights), self.model.path, EDITED, types=self.model
        )
