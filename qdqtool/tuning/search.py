"""Search for the best placement: measure single choices, then combinations of choices."""

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from qdqtool.patterns.heads import find_head
from qdqtool.tuning.chain import MeasuredChain, NamedConfigurations
from qdqtool.tuning.evaluator import CandidateEvaluator, OutOfTime
from qdqtool.tuning.planner import FLOAT, Configuration, PlacementCost, Planner
from qdqtool.tuning.prediction_progress import PredictionProgress
from qdqtool.tuning.recipe import FLOAT_RECIPE, Recipe
from qdqtool.tuning.result import PlacementResult
from qdqtool.tuning.sensitivity import SensitivitySweep
from qdqtool.tuning.simple_placements import (
    list_head_floats,
    list_worst_floats,
    rank_floats_by_input_error,
)
from qdqtool.tuning.sites import (
    CONVOLUTION,
    INT8,
    OWN_SCALE,
    Candidate,
    CandidateDecision,
    ChoiceGain,
    TuningSite,
    chain_choices,
    find_neighbors,
    find_sites,
    list_candidates,
    list_scale_candidates,
    select_candidates,
)
from qdqtool.util.notes import Note

_RANGE_SITES = 8  # number of worst sites for which other ranges are tried
_REMOVED_CHOICES = 12  # maximum number of float choices that are undone one by one at the end
_POINTS_OVER_BUDGET = 4  # maximum number of placements above the budget that are made to fit
_STEPS_IN_BUDGET = 3  # number of measured steps of a chain: the last ones within the budget
# Smallest assumed gain of a choice, as a fraction of the squared error of the start configuration.
_LEAST_GAIN = 1e-9
EQUAL_COST = 1e-9  # largest difference of costs that count as equal
_SWEPT_TOGETHER = 8  # number of choices that are measured together if there is a time limit
TIME_LIMIT = "time limit"
_UNREADABLE = "none of the images could be read"
_STANDARD_ERRORS = 2.0  # minimum gain of other ranges, in standard errors of the gain


@dataclass
class PlacementSearch:
    """Search for the best placement of one network.

    Attributes:
        planner: Plans configurations.
        evaluator: Measures configurations.
        keep: Fraction of the float model's metric to keep; None if the goal is a time budget.
        budget: Maximum predicted milliseconds; None without a budget.
        whole_front: Whether to measure the Pareto front even if the model with every layer in INT8
            is accurate enough.
        report: Function that receives each line about results and next steps.
        sites: Sites of the network.
        decisions: All choices of the sites, and the reason to skip a choice.
        scale_candidates: Other ranges (methods and separate scales) that were tried.
        start: Start configuration, in which sites are float if that costs no time.
        pool: Measured placements by the key of their recipe.
        stopped: Reason why the search ended early, else empty.
        unmeasured_why: Reason why single choices were not measured, if there are any.
        notes: Notes for the result.
        predictions: Progress of the predictions in `select_choices`.
    """

    planner: Planner
    evaluator: CandidateEvaluator
    keep: float | None
    budget: float | None
    whole_front: bool
    report: Callable[[str], None]
    sites: list[TuningSite] = field(default_factory=list)
    decisions: list[CandidateDecision] = field(default_factory=list)
    scale_candidates: list[Candidate] = field(default_factory=list)
    start: Configuration = field(default_factory=Configuration)
    pool: dict[str, PlacementResult] = field(default_factory=dict)
    stopped: str = ""
    unmeasured_why: str = "the time limit left no time; a longer `time_limit` measures more choices"
    notes: list[Note] = field(default_factory=list)
    predictions: PredictionProgress = field(default_factory=PredictionProgress)

    @property
    def format_title(self) -> str:
        """Display name of the format of the Q/DQ pairs: INT8 or FP8."""
        return self.planner.methods.number_format.title

    @property
    def start_name(self) -> str:
        """Name of the start configuration: the layers of `insert` that save time are INT8."""
        return f"{self.format_title} by default"

    # Before the first measurement -----------------------------------------------------

    def select_choices(self) -> None:
        """Find the sites, predict the cost of every choice, and select the choices to measure."""
        self.sites = find_sites(self.planner)
        candidates = list_candidates(self.sites)
        self.predictions = PredictionProgress(len(candidates))
        self.start, self.decisions = select_candidates(candidates, self._predict_cost)

    def end_early(self) -> bool:
        """End the search before the start configuration is measured; use results of earlier runs.

        Returns:
            Whether the store has the start configuration, so that there is a result.
        """
        sets, earlier = self.evaluator.sets, self.evaluator.store.samples
        if all(earlier):
            sets.chosen_on, sets.judged_on = earlier
        self._restore_placements()
        self.stopped = TIME_LIMIT
        return bool(self.decisions) and self.recipe(self.start).key in self.pool

    def _restore_placements(self) -> None:
        """Add to the pool the placements that earlier runs measured on the same samples.

        A run with a shorter time limit then cannot give a worse result than the earlier run.
        """
        samples = self.evaluator.sets.chosen_on
        for name, configuration in list(self.evaluator.store.placements.values()):
            is_measured = self.evaluator.is_measured(self.recipe(configuration), samples)
            if is_measured and self.planner.cost(configuration).int8:
                self._add_to_pool(name, configuration)
        if self.pool and self.evaluator.is_measured(FLOAT_RECIPE, samples):
            self._add_float_model()

    @functools.cached_property
    def sensitivity(self) -> SensitivitySweep:
        """Measurement of single choices; available after `select_choices`."""
        return SensitivitySweep(self.planner, self.evaluator, self.start)

    @functools.cached_property
    def float_configuration(self) -> Configuration:
        """Configuration that leaves the whole network float."""
        placement = self.planner.placement(self.start)
        nodes = {i.node.name for inputs in placement.inputs.values() for i in inputs}
        return Configuration(floats=frozenset(nodes) | self.start.floats)

    def _predict_cost(self, configuration: Configuration) -> PlacementCost:
        """Return the predicted cost of a configuration.

        Raises:
            OutOfTime: The deadline has passed.
        """
        if self.evaluator.is_late:
            raise OutOfTime
        known, started = len(self.planner.costs_by_recipe), time.monotonic()
        cost = self.planner.cost(configuration)
        self.predictions.values.append(cost.value)
        self.predictions.new += len(self.planner.costs_by_recipe) - known
        self.predictions.seconds += time.monotonic() - started
        return cost

    def list_measured_decisions(self) -> list[CandidateDecision]:
        """Return the choices without a reason to skip them."""
        return [d for d in self.decisions if not d.skip_reason]

    def recipe(self, configuration: Configuration) -> Recipe:
        """Return the recipe of a configuration."""
        return self.planner.plan(configuration).recipe

    # The search -----------------------------------------------------------------------

    def run(self) -> None:
        """Search, and add all measured placements to the pool.

        If the time limit ends the search, `stopped` is set.
        """
        is_limited = self.evaluator.deadline is not None
        try:
            self._run_steps()
        except OutOfTime:
            self.stopped = TIME_LIMIT
        if is_limited:
            self._restore_placements()
        self.evaluator.store.save()

    def _run_steps(self) -> None:
        self._measure_everything_int8()
        self._report_everything_int8()
        self._add_float_model()
        if self._is_int8_enough() and not self.whole_front:
            self.unmeasured_why = (
                f"{self.start_name} reaches the goal (`whole_front` measures every choice)"
            )
            return
        if self.evaluator.deadline is not None:
            heads = list_head_floats(self.start, self.sites)
            self.measure([*heads, *self.list_worst_by_input_error()])
        complete = self._sweep_choices()
        is_sufficient = self._combine_choices(self._choose_ranges() if complete else self.start)
        if not complete and self._combine_further_choices():
            is_sufficient = True
        if not is_sufficient:
            self.notes.append(
                Note(
                    f"none of the tried combinations with {self.format_title} layers reaches "
                    "the goal; lower `keep`",
                    code="goal-not-reached",
                )
            )

    def _measure_everything_int8(self) -> None:
        """Measure the start configuration, and placements with more INT8 layers.

        The latter may reach the goal although the start configuration does not: with few images,
        their metrics hardly differ.
        """
        more = []
        for decision in self.list_measured_decisions():
            site = decision.candidate.site
            if decision.candidate.choice == INT8:
                name = f"{site.name} in {self.format_title}"
                if len(site.nodes) > 1:
                    exception = " except DFL" if find_head(self.planner.model).dfl else ""
                    name = f"head in {self.format_title}{exception}"
                more.append((name, self.sensitivity.apply_choice(decision.candidate)))
        self.measure([(self.start_name, self.start)])
        self.measure(more)

    def _report_everything_int8(self) -> None:
        value = self.evaluator.value(self.recipe(self.start), self.evaluator.sets.chosen_on)
        if not self.pool:
            return
        line = f"{self.start_name}: {value:.4g} on the selection images"
        if self.evaluator.store.path is not None and self.evaluator.deadline is None:
            line += (
                ". After Ctrl-C, the same command continues; with `time_limit`, the best "
                "measured candidate is used"
            )
        self.report(line)

    def _add_float_model(self) -> None:
        """Add the float network, which may be the fastest, to a pool with placements.

        Without a predicted time, it is not added.
        """
        cost = self.planner.cost(self.float_configuration)
        if self.pool and cost.ms is not None and not cost.int8:
            value = self.float_value(self.evaluator.sets.chosen_on)
            placement = PlacementResult(
                "the float model", self.float_configuration, [], {}, cost, value
            )
            self.pool.setdefault(self.recipe(self.float_configuration).key, placement)

    def _is_int8_enough(self) -> bool:
        if self.keep is None:
            return False
        recipes, judged_on = [FLOAT_RECIPE, self.recipe(self.start)], self.evaluator.sets.judged_on
        is_measured = all(self.evaluator.is_measured(recipe, judged_on) for recipe in recipes)
        if self.evaluator.is_late and not is_measured:
            return False
        if not self._is_accurate_enough(self.start):
            return False
        self.measure_for_judging([self.start])
        return self.is_goal_reached(self.start, self.evaluator.sets.judged_on)

    def _sweep_choices(self) -> bool:
        """Measure each choice alone; with a time limit, for at most half of the remaining time.

        With a time limit, choices whose inputs have the largest quantization error come first. In
        the order of the network, a sweep that ends early would never reach the last layers.

        Returns:
            Whether all choices were measured.
        """
        candidates = [d.candidate for d in self.list_measured_decisions()]
        until = self._find_sweep_end()
        if until is None:
            self.unmeasured_why = _UNREADABLE
            return self.sensitivity.measure(candidates, "Sensitivity", None)
        rank = {
            name: k for k, site in enumerate(self._floats_by_input_error) for name in site.floats
        }
        candidates.sort(key=lambda c: min(rank.get(name, len(rank)) for name in c.site.nodes))
        for start in range(0, len(candidates), _SWEPT_TOGETHER):
            batch = candidates[start : start + _SWEPT_TOGETHER]
            if not self.sensitivity.measure(batch, "Sensitivity", until):
                return False
        self.unmeasured_why = _UNREADABLE
        return True

    def _find_sweep_end(self) -> float | None:
        """Return the ``time.monotonic()`` after half of the remaining time; None without a limit.

        The other half is for combinations.
        """
        deadline = self.evaluator.deadline
        return None if deadline is None else (time.monotonic() + deadline) / 2

    def _choose_ranges(self) -> Configuration:
        """Return the start configuration, with other ranges for the worst sites if they help.

        Other ranges help if they improve the metric on the samples of the search.
        """
        floats = [d.candidate for d, _ in self.rank_floats()]
        worst = [c.site for c in floats if c.site.tensors]
        price = self.planner.cost(self.start).value
        self.scale_candidates = [
            c
            for c in list_scale_candidates(self.planner, worst[:_RANGE_SITES])
            if not c.configuration.own_scales
            or self.planner.cost(self.sensitivity.apply_choice(c)).value <= price
        ]
        self.sensitivity.measure(self.scale_candidates, "Other ranges", self._find_sweep_end())
        ranges = self._join_better_ranges()
        if ranges == self.start:
            return self.start
        self.measure([("other ranges", ranges)])
        samples = self.evaluator.sets.chosen_on
        with_ranges, without = (
            self.evaluator.resample(self.recipe(c), samples) for c in (ranges, self.start)
        )
        if float(np.nanmean(with_ranges - without)) > 0.0:
            return ranges
        self.notes.append(
            Note(
                "other ranges lower the output error but do not improve the metric, so they were "
                "not used",
                code="ranges-not-taken",
            )
        )
        return self.start

    def _join_better_ranges(self) -> Configuration:
        better: list[tuple[float, Candidate]] = []
        for candidate in self.scale_candidates:
            gains = self.sensitivity.gains(candidate)
            if len(gains) < 4:
                continue
            standard_error = gains.std(ddof=1) / math.sqrt(len(gains))
            if gains.mean() > _STANDARD_ERRORS * standard_error:
                better.append((float(gains.mean()), candidate))
        ranges = self.start
        changed: set[str] = set()
        for _, candidate in sorted(better, key=lambda entry: -entry[0]):
            configuration = candidate.configuration
            tensors = {t for t, _ in configuration.methods} | configuration.own_scales
            if not tensors & changed:
                changed |= tensors
                ranges = ranges.merge(configuration)
        return ranges

    # Combinations ---------------------------------------------------------------------

    def _combine_choices(self, ranges: Configuration) -> bool:
        """Measure combinations of the choices that were measured alone.

        Returns:
            False if the goal is an accuracy that none of the combinations reaches.
        """
        self.report("combining choices")
        self.measure(self.list_simple_placements())
        neighbors = find_neighbors(self.planner.model)
        chain = chain_choices(ranges, self._list_gains(), self._predict_cost, neighbors)
        is_sufficient = self._follow_chain(chain)
        self._undo_choices()
        self._fit_budget()
        return is_sufficient

    def _combine_further_choices(self) -> bool:
        """Measure further choices in the time that the combinations left, and combine again.

        The search is complete without these combinations, so the end of the time does not count as
        an early end of the search.

        Returns:
            Whether the goal is reached; False if the time ends before this is known.
        """
        self.report("measuring further choices in the time that is left")
        try:
            complete = self._sweep_choices()
            return self._combine_choices(self._choose_ranges() if complete else self.start)
        except OutOfTime:
            return False

    def _follow_chain(self, configurations: Iterator[Configuration]) -> bool:
        """Measure some steps of a chain, and find the first sufficient step by bisection.

        Returns:
            False if the goal is an accuracy that no step reaches.
        """
        chain = self._measure_chain(configurations)
        if self.budget is not None:
            # A later step may be faster, because a conversion between two float layers is removed.
            fits = [s for s in chain.steps if self.planner.cost(s[1]).value <= self.budget]
            self.measure(fits[-_STEPS_IN_BUDGET:])
        if self.whole_front:
            self._measure_equal_costs(chain.steps)
        return chain.find_first_sufficient() or not chain.steps or self.keep is None

    def _measure_chain(self, configurations: Iterator[Configuration]) -> MeasuredChain:
        """Measure steps of a chain until clearly after the first sufficient step.

        With `whole_front`, continue at least to the cost of the most expensive placement in the
        pool. With a budget, continue to the end of the chain.
        """
        most_expensive = -math.inf
        if self.whole_front:
            most_expensive = max((p.cost.value for p in self.pool.values()), default=-math.inf)
        chain = MeasuredChain(self.measure, self._is_sufficient)
        for configuration in configurations:
            cost = self.planner.cost(configuration)
            if not cost.int8:
                break
            # Cheaper steps are measured later with the next steps, to share runs of parts.
            chain.add(configuration, may_measure=cost.value > most_expensive)
            if self.budget is None and chain.is_beyond_first_sufficient:
                return chain
        chain.measure_waiting()
        return chain

    def _measure_equal_costs(self, steps: NamedConfigurations) -> None:
        """Measure, for each placement in the pool, the last step that does not cost more.

        The steps are those of a chain (:class:`MeasuredChain`).
        """
        last_steps = []
        for placement in self.list_placements():
            limit = placement.cost.value + EQUAL_COST
            last_steps += [s for s in steps if self.planner.cost(s[1]).value <= limit][-1:]
        self.measure(last_steps)

    def _list_gains(self) -> list[ChoiceGain]:
        """Return the gain and cost of each measured float choice, highest gain first.

        A choice that does not reduce the error has a tiny gain, so that a chain adds it last.
        """
        least = _LEAST_GAIN * self.sensitivity.start_error() ** 2
        price = self.planner.cost(self.start).value
        return [
            ChoiceGain(d.candidate.configuration, max(gain, least), d.cost.value - price)
            for d, gain in self.rank_floats()
        ]

    def rank_floats(self) -> list[tuple[CandidateDecision, float]]:
        """Return measured float choices and the squared error that each removes, highest first."""
        floats = [d for d in self.list_measured_decisions() if d.candidate.choice == FLOAT]
        gains = [(d, self.sensitivity.mean_gain(d.candidate)) for d in floats]
        measured = [entry for entry in gains if not math.isnan(entry[1])]
        return sorted(measured, key=lambda entry: -entry[1])

    def list_simple_placements(self) -> list[tuple[str, Configuration]]:
        """Return names and configurations of simple rules: a float head, the worst sites float."""
        ranked = [
            d.candidate.configuration
            for d, _ in self.rank_floats()
            if d.candidate.site.kind == CONVOLUTION
        ]
        worst = list_worst_floats(self.start, ranked, "worst by sensitivity")
        return [*list_head_floats(self.start, self.sites), *worst]

    def list_worst_by_input_error(self) -> list[tuple[str, Configuration]]:
        """Return placements with the sites of the largest input errors float, by name."""
        return list_worst_floats(self.start, self._floats_by_input_error, "worst by input error")

    @functools.cached_property
    def _floats_by_input_error(self) -> list[Configuration]:
        return rank_floats_by_input_error(self.planner, self.start, self.sites)

    def _undo_choices(self) -> None:
        """Undo float choices of the cheapest accurate placement as long as it reaches the goal.

        The most expensive choices are tried first. Each removal is measured alone. Then the
        removals that still reach the goal are combined.
        """
        if self.keep is None:
            return
        level = self.goal_level(self.evaluator.sets.chosen_on)
        good = [p.configuration for p in self.list_placements() if p.chosen_on >= level]
        if not good:
            return
        current = good[0]
        expensive = self._list_expensive_sites(current)
        fewer = {site: self.remove_site(current, site) for site in expensive}
        self.measure([("fewer choices", configuration) for configuration in fewer.values()])
        for site in [site for site in expensive if self._is_accurate_enough(fewer[site])]:
            less = self.remove_site(current, site)
            if self.planner.cost(less).value < self.planner.cost(current).value:
                self.measure([("fewer choices", less)])
                if self._is_accurate_enough(less):
                    current = less

    def _list_expensive_sites(self, configuration: Configuration) -> list[TuningSite]:
        """Return the (at most 12) float sites that would save the most time in INT8."""
        price = self.planner.cost(configuration).value
        sites = self.list_float_sites(configuration)
        reduced = {s: self.planner.cost(self.remove_site(configuration, s)).value for s in sites}
        ranked = sorted(reduced, key=reduced.__getitem__)
        return [site for site in ranked[:_REMOVED_CHOICES] if reduced[site] < price]

    def _fit_budget(self) -> None:
        """Undo float choices of placements above the budget until the placements fit.

        Only placements that are more accurate than all placements within the budget are reduced. A
        chain does not contain the reduced placements: a float convolution between INT8 convolutions
        needs conversions, so more float choices are not always more expensive.
        """
        budget = self.budget
        if budget is None:
            return
        points = self.list_placements()
        best = max((p.chosen_on for p in points if p.cost.value <= budget), default=-math.inf)
        over = [p for p in points if p.cost.value > budget and p.chosen_on > best]
        for point in over[:_POINTS_OVER_BUDGET]:
            self._reduce_to_budget(point.configuration, point.cost.value, budget)

    def _reduce_to_budget(self, current: Configuration, cost: float, budget: float) -> None:
        while cost > budget:
            less = {}
            for site in self.list_float_sites(current):
                configuration = self.remove_site(current, site)
                if configuration != current:
                    less[self.planner.cost(configuration).value] = configuration
            fits = sorted(value for value in less if value <= budget)
            self.measure([("fewer choices", less[value]) for value in fits[-_REMOVED_CHOICES:]])
            if not less or min(less) >= cost:
                return
            cost = min(less)
            current = less[cost]

    # Parts of a configuration ---------------------------------------------------------

    def list_float_sites(self, configuration: Configuration) -> list[TuningSite]:
        """Return the sites that are float in a configuration but not in the start configuration.

        Sites with most nodes come first, and each node belongs to at most one of the sites.
        """
        rest = set(configuration.floats - self.start.floats)
        int8_sites = [site for site in self.sites if site.default == INT8]
        selected = []
        for site in sorted(int8_sites, key=lambda s: (-len(s.nodes), s.name)):
            if set(site.nodes) <= rest:
                rest -= set(site.nodes)
                selected.append(site)
        return selected

    def remove_site(self, configuration: Configuration, site: TuningSite) -> Configuration:
        """Return a configuration without the choice to leave a site float."""
        nodes = frozenset(site.nodes) - self.start.floats
        return replace(configuration, floats=configuration.floats - nodes)

    # Measurements ---------------------------------------------------------------------

    def measure(self, named: NamedConfigurations) -> None:
        """Measure the metric of configurations on the samples of the search; fill the pool.

        Configurations without INT8, and configurations that are in the pool already, are skipped.
        """
        new = []
        for name, configuration in named:
            is_known = self.recipe(configuration).key in self.pool
            if not is_known and self.planner.cost(configuration).int8:
                new.append((name, configuration))
        # With a deadline, configurations are measured one by one, so that the pool contains all
        # configurations that were finished in time.
        batches = [new] if self.evaluator.deadline is None else [[entry] for entry in new]
        for batch in batches:
            recipes = [self.recipe(configuration) for _, configuration in batch]
            samples = self.evaluator.sets.chosen_on
            self.evaluator.measure_metric(recipes, samples, "Combinations")
            for name, configuration in batch:
                self._add_to_pool(name, configuration)

    def _add_to_pool(self, name: str, configuration: Configuration) -> None:
        recipe = self.recipe(configuration)
        changed = {
            **dict(sorted(configuration.methods)),
            **dict.fromkeys(sorted(configuration.own_scales), OWN_SCALE),
            **dict.fromkeys(sorted(configuration.quantized), INT8),
        }
        placement = PlacementResult(
            name,
            configuration,
            [site.name for site in self.list_float_sites(configuration)],
            changed,
            self.planner.cost(configuration),
            self.evaluator.value(recipe, self.evaluator.sets.chosen_on),
        )
        self.pool.setdefault(recipe.key, placement)
        self.evaluator.store.add_placement(recipe.key, name, configuration)

    def measure_for_judging(self, configurations: Iterable[Configuration]) -> None:
        """Measure configurations and the float model on the held-out samples."""
        recipes = [self.recipe(c) for c in configurations]
        samples = self.evaluator.sets.judged_on
        self.evaluator.measure_metric([FLOAT_RECIPE, *recipes], samples, "Judging")

    def float_value(self, samples: Sequence[int]) -> float:
        """Return the metric of the float model on samples; measure it if necessary."""
        self.evaluator.measure_metric([FLOAT_RECIPE], samples, "Float")
        return self.evaluator.value(FLOAT_RECIPE, samples)

    def is_goal_reached(self, configuration: Configuration, samples: Sequence[int]) -> bool:
        """Return whether a configuration reaches the goal on samples on which it was measured."""
        value = self.evaluator.value(self.recipe(configuration), samples)
        return value >= self.goal_level(samples)

    def goal_level(self, samples: Sequence[int]) -> float:
        """Return the smallest metric on samples that reaches the goal; `keep` must be set."""
        assert self.keep is not None
        return self.keep * self.float_value(samples)

    def _is_accurate_enough(self, configuration: Configuration) -> bool:
        return self.is_goal_reached(configuration, self.evaluator.sets.chosen_on)

    def _is_sufficient(self, configuration: Configuration) -> bool:
        """Return whether a step of a chain is sufficient; see :class:`MeasuredChain`."""
        if self.budget is not None:
            return self.planner.cost(configuration).value > self.budget
        return self._is_accurate_enough(configuration)

    # The pool -------------------------------------------------------------------------

    def list_placements(self) -> list[PlacementResult]:
        """Return the placements of the pool, cheapest first; at equal cost, most accurate first."""
        return sorted(self.pool.values(), key=lambda p: (p.cost.value, -p.chosen_on, p.name))
