"""Choice of the result of a search, and its evaluation on held-out samples."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from qdqtool.errors import QdqtoolError
from qdqtool.tuning.evaluator import OutOfTime
from qdqtool.tuning.planner import FLOAT, Configuration
from qdqtool.tuning.recipe import FLOAT_RECIPE, Recipe
from qdqtool.tuning.result import ChoiceBenefit, PlacementResult, count_metric_decimals
from qdqtool.tuning.search import EQUAL_COST, TIME_LIMIT, PlacementSearch
from qdqtool.tuning.sites import TuningSite
from qdqtool.tuning.time_plan import JUDGING_END
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count_were

_REPORTED_BENEFITS = 6  # maximum number of choices of the result whose benefit is measured
# Maximum number of placements outside the front, other than simple ones, that are tried on held-out
# samples. Each try is a chance to reach the goal by luck.
_DOMINATED_TRIES = 8


@dataclass
class ResultSelection:
    """Selection of the result among the measured placements of a search.

    Notes, and the time limit as the reason for an early end, are added to the search.

    Attributes:
        search: The search, after its run.
        judging_deadline: Value of ``time.monotonic()`` after which no further placement is
            evaluated on held-out samples; None without a time limit.
    """

    search: PlacementSearch
    judging_deadline: float | None = None

    @property
    def _held_out(self) -> tuple[int, ...]:
        return self.search.evaluator.sets.judged_on

    def find_front(self) -> list[PlacementResult]:
        """Return the Pareto front: placements more accurate than all placements of lower cost.

        The accuracy is measured on the samples of the search. The cheapest placement is first.
        """
        front: list[PlacementResult] = []
        for point in self.search.list_placements():
            if not front or point.chosen_on > front[-1].chosen_on:
                front.append(point)
        return front

    def choose_placement(self) -> tuple[PlacementResult, bool]:
        """Return the best placement, and whether it reaches the goal.

        With a budget, the best placement is the most accurate within the budget; if several have
        the same printed metric, the cheapest of them; if none fits, the cheapest of all. Without a
        budget, the best placement is the cheapest that reaches the goal on both the samples of the
        search and the held-out samples; if none does, the most accurate. After `judging_deadline`,
        only the first and the last of the front and placements with a measurement on the held-out
        samples are considered. A note reports cheaper placements that were not measured on the
        held-out samples.

        Raises:
            QdqtoolError: The pool is empty.
        """
        front = self.find_front()
        if not front:
            raise QdqtoolError(
                f"no convolution is predicted to run faster in {self.search.format_title}; deploy "
                "the float model, or see the reasons in the output of 'qdqtool insert' and "
                "'qdqtool predict'",
                code="no-candidates",
            )
        if self.search.budget is not None:
            fits = [p for p in front if p.cost.value <= self.search.budget]
            return (self._find_cheapest_equal(fits), True) if fits else (front[0], False)
        return self._choose_accurate_placement(front)

    def _find_cheapest_equal(self, points: Sequence[PlacementResult]) -> PlacementResult:
        """Return the first of some points of the front whose metric is printed as the last one's.

        A gain of accuracy that is not printed is not worth its time.
        """
        float_metric = self.search.float_value(self.search.evaluator.sets.chosen_on)
        decimals = count_metric_decimals(float_metric)
        best = round(points[-1].chosen_on, decimals)
        return next(point for point in points if round(point.chosen_on, decimals) == best)

    def _choose_accurate_placement(
        self, front: Sequence[PlacementResult]
    ) -> tuple[PlacementResult, bool]:
        """Return the cheapest placement that reaches the goal, else the most accurate one.

        The placements of the front are tried first, because they are the most accurate at their
        cost. A cheaper placement outside the front may reach the goal on the held-out samples, too.
        """
        level = self.search.goal_level(self.search.evaluator.sets.chosen_on)
        accurate = [point for point in self.search.list_placements() if point.chosen_on >= level]
        front_ids = {id(point) for point in front}
        on_front = [point for point in accurate if id(point) in front_ids]
        # The last one is the result if none reaches the goal, so it is measured in any case.
        chosen = self._find_first_reaching(on_front, always=[*on_front[:1], *on_front[-1:]])
        limit = math.inf if chosen is None else chosen.cost.value - EQUAL_COST
        dominated = [p for p in accurate if p.cost.value < limit and id(p) not in front_ids]
        found = self._find_first_reaching(self._limit_tries(dominated))
        if found is not None:
            chosen = found
            limit = found.cost.value - EQUAL_COST
        untried = [p for p in accurate if p.cost.value < limit and not self._is_judged(p)]
        self._note_untried(untried, "candidate" if chosen is None else "cheaper candidate")
        return (front[-1], False) if chosen is None else (chosen, True)

    def _find_first_reaching(
        self, points: Sequence[PlacementResult], always: Sequence[PlacementResult] = ()
    ) -> PlacementResult | None:
        """Return the first placement that reaches the goal on the held-out samples, if any.

        Args:
            points: Placements, cheapest first. After `judging_deadline`, those without a
                measurement on the held-out samples are skipped.
            always: Placements that are measured even after `judging_deadline`.
        """
        for point in points:
            if self._is_judging_late and point not in always and not self._is_judged(point):
                self.search.stopped = TIME_LIMIT
                continue
            self.judge_placements([point])
            if self.search.is_goal_reached(point.configuration, self._held_out):
                return point
        return None

    def _limit_tries(self, points: Sequence[PlacementResult]) -> list[PlacementResult]:
        """Return the placements to try on held-out samples: all simple ones, and some others."""
        if len(points) <= _DOMINATED_TRIES:
            return list(points)
        simple = [
            (self.search.start_name, self.search.start),
            *self.search.list_simple_placements(),
        ]
        if self.judging_deadline is not None:
            simple += self.search.list_worst_by_input_error()
        keys = {self.search.recipe(configuration).key for _, configuration in simple}
        others = [p for p in points if self.search.recipe(p.configuration).key not in keys]
        left_out = {id(point) for point in others[_DOMINATED_TRIES:]}
        return [point for point in points if id(point) not in left_out]

    def _note_untried(self, points: Sequence[PlacementResult], noun: str) -> None:
        if not points:
            return
        reason = f"at most {_DOMINATED_TRIES} combinations outside the Pareto front are tried there"
        if self._is_judging_late:
            reason = f"{JUDGING_END:.0%} of the time limit had passed; a longer one measures more"
        self.search.notes.append(
            Note(
                f"{format_count_were(len(points), noun)} not measured on the held-out images, "
                f"although the goal is reached on the selection images (the first: "
                f"{points[0].title}): {reason}",
                code="candidates-not-tried",
                count=len(points),
                name=points[0].name,
            )
        )

    @property
    def _is_judging_late(self) -> bool:
        return self.judging_deadline is not None and time.monotonic() > self.judging_deadline

    def judge_placements(self, points: Sequence[PlacementResult]) -> None:
        """Evaluate placements on the held-out samples: set `metric`, `low` and `high`."""
        samples = self._held_out
        self.search.measure_for_judging(p.configuration for p in points)
        for point in points:
            recipe = self.search.recipe(point.configuration)
            point.metric = self.search.evaluator.value(recipe, samples)
            point.low, point.high = self.search.evaluator.estimate_interval(recipe, samples)

    def _is_judged(self, point: PlacementResult) -> bool:
        recipe = self.search.recipe(point.configuration)
        return self.search.evaluator.is_measured(recipe, self._held_out)

    def judge_recipe(self, recipe: Recipe) -> float:
        """Return the metric of a recipe on the held-out samples."""
        samples = self._held_out
        self.search.evaluator.measure_metric([FLOAT_RECIPE, recipe], samples, "Judging")
        return self.search.evaluator.value(recipe, samples)

    def is_goal_reached_with(self, metric: float) -> bool:
        """Return whether a metric on held-out samples reaches the goal.

        Always True if the goal is a time budget.
        """
        return self.search.keep is None or metric >= self.search.goal_level(self._held_out)

    def find_cheapest_plausible(self, placement: PlacementResult) -> PlacementResult | None:
        """Return the cheapest evaluated placement whose 95 % interval reaches the goal.

        Placements that reach the goal on the samples of the search come first.

        Returns:
            None if the goal is a time budget, or if no such placement is cheaper than `placement`.
        """
        if self.search.keep is None:
            return None
        level = self.search.goal_level(self._held_out)
        plausible = [
            point
            for point in self.search.list_placements()
            if point.cost.value < placement.cost.value - EQUAL_COST
            and point.high is not None
            and point.high >= level
        ]
        selection_level = self.search.goal_level(self.search.evaluator.sets.chosen_on)
        accurate = [point for point in plausible if point.chosen_on >= selection_level]
        return next(iter([*accurate, *plausible]), None)

    def find_cheaper_alternative(self, placement: PlacementResult) -> PlacementResult | None:
        """Return a cheaper placement that may be as accurate as the result for a time budget.

        A placement may be as accurate if its 95 % interval on the held-out samples reaches the
        metric of `placement`. A placement whose metric is at least as high comes first, then the
        start configuration, which needs no search, then the most accurate placement.

        Returns:
            None if the goal is not a time budget, or if there is no such placement.
        """
        if self.search.budget is None or placement.metric is None:
            return None
        start = self.search.recipe(self.search.start).key
        best: tuple[tuple[bool, bool, float], PlacementResult] | None = None
        for key, point in self.search.pool.items():
            if point.cost.value >= placement.cost.value - EQUAL_COST:
                continue
            if point.metric is None or point.high is None or point.high < placement.metric:
                continue
            rank = point.metric >= placement.metric, key == start, point.metric
            if best is None or rank > best[0]:
                best = rank, point
        return None if best is None else best[1]

    def judge_and_measure_benefits(
        self, placement: PlacementResult, shown: Sequence[PlacementResult]
    ) -> list[ChoiceBenefit]:
        """Evaluate placements, and measure the benefits of one placement's choices.

        Args:
            placement: Placement whose choices are measured.
            shown: Placements to evaluate on the held-out samples, after the start configuration.
                With a time limit, placements that are measured already come first, because they
                take no time.

        Returns:
            The benefits. Empty if the time limit ended the search, or ends this evaluation, which a
            note then reports.
        """
        self.search.evaluator.deadline = self.judging_deadline
        # The start configuration, which needs no search, may be better than the chosen placement.
        start = self.search.pool.get(self.search.recipe(self.search.start).key)
        judged = list(shown) if start is None else [start, *shown]
        batches = [judged]
        if self.judging_deadline is not None:
            measured_first = sorted(judged, key=lambda point: not self._is_judged(point))
            batches = [[point] for point in measured_first]
        try:
            for batch in batches:
                self.judge_placements(batch)
            return [] if self.search.stopped else self._measure_benefits(placement)
        except OutOfTime:
            self.search.notes.append(
                Note(
                    f"{JUDGING_END:.0%} of the time limit had passed before all candidates and "
                    "the benefit of each float layer were measured (the rest is for the final "
                    "ranges and the files); give more time",
                    code="no-time-to-judge",
                )
            )
            return []
        finally:
            self.search.evaluator.deadline = None

    def _measure_benefits(self, point: PlacementResult) -> list[ChoiceBenefit]:
        """Measure the benefits of at most six choices, by undoing each choice alone.

        These choices reduce the error most when each is measured alone.
        """
        gains = {d.candidate.site: gain for d, gain in self.search.rank_floats()}
        sites = self.search.list_float_sites(point.configuration) if point.cost.int8 else []
        sites.sort(key=lambda site: -gains.get(site, 0.0))
        less = {
            s: self.search.remove_site(point.configuration, s) for s in sites[:_REPORTED_BENEFITS]
        }
        measured_on = self._measure_without_choices(less)
        samples = getattr(self.search.evaluator.sets, measured_on)
        whole = self.search.evaluator.value(self.search.recipe(point.configuration), samples)
        benefits = []
        for site, configuration in less.items():
            cost = self.search.planner.cost(configuration)
            metric = whole - self.search.evaluator.value(self.search.recipe(configuration), samples)
            ms = None if cost.ms is None or point.cost.ms is None else point.cost.ms - cost.ms
            int8 = point.cost.int8 - cost.int8
            conversions = point.cost.conversions - cost.conversions
            benefits.append(
                ChoiceBenefit(site.name, FLOAT, metric, int8, conversions, ms, measured_on)
            )
        return sorted(benefits, key=lambda benefit: -benefit.metric)

    def _measure_without_choices(self, less: dict[TuningSite, Configuration]) -> str:
        """Measure placements that lack one choice each, on the held-out samples.

        If the time limit ends this measurement, the measurements of the search on its own samples
        are used instead. Placements that the search has not measured are removed from `less`.

        Returns:
            Name of the set of samples: ``judged_on`` or ``chosen_on``.

        Raises:
            OutOfTime: The time limit ended, and the search has measured none of the placements.
        """
        sets = self.search.evaluator.sets
        recipes = {site: self.search.recipe(configuration) for site, configuration in less.items()}
        try:
            self.search.evaluator.measure_metric(
                recipes.values(), sets.judged_on, "Benefit of each choice"
            )
        except OutOfTime:
            for site, recipe in recipes.items():
                if not self.search.evaluator.is_measured(recipe, sets.chosen_on):
                    del less[site]
            if not less:
                raise
            return "chosen_on"
        return "judged_on"
