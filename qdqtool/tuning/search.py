"""The search: which choices together, each combination measured as a whole."""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from calibration.dataset import spread_indices
from qdqtool.errors import QdqtoolError
from qdqtool.insertion import losses, sample_runs
from qdqtool.tuning import sites as choices
from qdqtool.tuning.configuration import (
    FLOAT,
    Configuration,
    Cost,
    Planner,
    Recipe,
    apart,
    first_change,
    share_behind,
)
from qdqtool.tuning.measurements import SWEEP, Measurements, OutOfTime
from qdqtool.tuning.result import Bought, Point
from qdqtool.tuning.sites import CONVOLUTION, HEAD, INT8, Candidate, Gain, Judged, Site
from qdqtool.util.notes import Note, Remark
from qdqtool.util.said import said
from qdqtool.util.text import counted

_LOOKED_AT = 8  # sites whose scales are looked at, the worst
_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # of the chain that are measured
_REMOVED = 12  # choices that are taken back one by one in the end
_BOUGHT = 6  # choices of the chosen placement, the largest, that are measured without each
_OVER = 4  # placements just over a budget that are looked at for one choice less
_LEAST = 1e-9  # of the squared error: what a choice counts as that made none of it go
_EQUAL = 1e-9  # by which the cost of equal placements may differ
_FITTING = 3  # last steps of the chain within a budget, which are measured
FIRST_SAMPLES = 2  # on which all choices are measured alone,
BETTER = 1 / 4  # and this part of them on twice as many
_SURE = 2.0  # standard errors by which another scale has to be better
FLOAT_RECIPE = Recipe((), ())


@dataclass
class Search:
    """One search."""

    planner: Planner  # works configurations out
    bench: Measurements  # measures them
    keep: float | None  # the part of the float model's value that is to be kept; None with a budget
    budget: float | None  # milliseconds that it may take; None without
    whole_front: bool  # whether to measure the front even where everything INT8 is enough
    say: Callable[[str], None]  # gets what comes next
    limit: float = 0.0  # seconds that all of it may take, where the bench has a deadline
    ends: float | None = None  # when all of that is measured has to be; None without a limit
    last_judged: float | None = None  # when only one placement more can be judged
    each: float = 0.0  # seconds that a run on one sample takes, where the bench has a deadline
    moved_on: int = (
        sample_runs.FP16_SAMPLES
    )  # samples on which FP16 is compared with FP32 in the end
    sites: list[Site] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    scales: list[Candidate] = field(default_factory=list)
    start: Configuration = field(default_factory=Configuration)
    pool: dict[str, Point] = field(default_factory=dict)
    stopped: str = ""
    notes: list[Note] = field(default_factory=list)
    _alone: dict[Candidate, tuple[Recipe, Recipe]] = field(default_factory=dict)
    _raced_on: dict[Candidate, list[int]] = field(
        default_factory=dict
    )  # samples; others may know a recipe on more

    # Before anything is measured --------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Finds the sites and predicts every choice."""
        self.sites = choices.find_sites(self.planner)
        self.start, self.judged = choices.judge(choices.candidates(self.sites), self._cost)

    @functools.cached_property
    def everything_float(self) -> Configuration:
        """The float network, which is a placement like others."""
        placement = self.planner.placement(self.start)
        nodes = {r.node.name for readers in placement.inputs.values() for r in readers}
        return Configuration(floats=frozenset(nodes) | self.start.floats)

    def _float_model(self) -> None:
        """Puts the float network beside the others where its time is known: it may be the fastest."""
        cost = self.planner.cost(self.everything_float)
        if self.pool and cost.ms is not None and not cost.int8:
            self.pool.setdefault(
                self.recipe(self.everything_float).key,
                Point(
                    "the float model",
                    self.everything_float,
                    [],
                    {},
                    cost,
                    self.float_value(self.bench.sets.chosen_on),
                ),
            )

    def _cost(self, configuration: Configuration) -> Cost:
        """A prediction, one of very many."""
        self.bench.require_time()
        return self.planner.cost(configuration)

    def swept(self) -> list[Judged]:
        """The candidates that a sweep measures."""
        return [j for j in self.judged if not j.why_not]

    def recipe(self, configuration: Configuration) -> Recipe:
        return self.planner.plan(configuration).recipe

    # The search -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Fills the pool; a time limit ends it early."""
        try:
            self._everything_int8()
            value = self.bench.value(self.recipe(self.start), self.bench.sets.chosen_on)
            if self.pool:  # else there is nothing to take
                kept = self.bench.store.path is not None and self.bench.deadline is None
                self.say(
                    said(
                        "everything INT8: {value:.4g} on the images to choose on"
                        + kept
                        * "; after Ctrl-C the "
                        "same command with a {`time_limit`} takes the best that was measured",
                        value=value,
                    )
                )
            self._float_model()
            if self._is_enough() and not self.whole_front:
                return
            if self.bench.deadline is not None:
                self.measure(
                    [*self._heads(), *self._worst(self._by_own_error, "by their own error")]
                )
            before = -1
            while (
                self.bench.runs > before
            ):  # combinations may leave time for choices that there was none for
                before = self.bench.runs
                all_swept = self._sweep()
                self._combinations(self._ranges() if all_swept else self.start)
                if all_swept:
                    break
        except OutOfTime:
            self.stopped = "time limit"

    def _everything_int8(self) -> None:
        self.measure([("everything INT8", self.start)])
        more = [
            (
                f"INT8 too: {j.candidate.site.name}"
                if len(j.candidate.site.nodes) == 1
                else "INT8 too: the whole head",
                self.start.joined(j.candidate.configuration),
            )
            for j in self.judged
            if j.candidate.choice == INT8 and not j.why_not
        ]
        if self.budget is not None or self._is_enough():
            self.measure(more)

    def _is_enough(self) -> bool:
        """Whether everything INT8 reaches the goal."""
        if self.keep is None or self.bench.is_late or not self._is_good(self.start):
            return False
        self._judge([self.start])
        return self._reaches(self.start, self.bench.sets.judged_on)

    def _sweep(self) -> bool:
        """What each choice alone takes away from the error; where time is limited, of those that it is enough for.

        Returns:
            False where the time for it was over before all were measured.
        """
        images = next(self.ever_more())
        tried = self.swept() if self.sweep_end is None else self._promising(self.sweep_end, images)
        measured = self._raced([j.candidate for j in tried], "Sensitivity", -math.inf)
        return measured and len(tried) == len(self.swept())

    @property
    def sweep_end(self) -> float | None:
        """When single choices have to be measured where time is limited: a third of it is left for combinations, or
        two of what is left."""
        end = self.bench.deadline
        return None if end is None else end - min(self.limit / 3, 2 / 3 * (end - time.monotonic()))

    def _raced(self, tried: Sequence[Candidate], what: str, least: float) -> bool:
        """Measures each choice alone on a few samples; the best of them, as far as they gain more than ``least``, then
        on twice as many, and so on to all.

        Returns:
            False where the time for it was over first.
        """
        until = self.sweep_end
        for images in self.ever_more():
            self._raced_on |= {
                c: images for c in tried if len(images) > len(self._raced_on.get(c, ()))
            }
            recipes = [r for c in tried for r in self.alone(c) if not r.is_float]
            if not self.bench.sweep(recipes, what, until, images):
                return False
            gains = {c: self._gain(c, images) for c in tried}
            if not all(map(math.isnan, gains.values())):  # else none of these images can be read
                better = sorted((c for c in tried if gains[c] > least), key=lambda c: -gains[c])
                tried = better[: math.ceil(BETTER * len(tried))]
        return True

    def alone(self, candidate: Candidate) -> tuple[Recipe, Recipe]:
        """The float network with those nodes alone quantized that a choice changes, as they are without it and with it.

        What the choice takes away from the output's error shows there. Beside everything else in INT8 it does not: any
        change turns roundings of all that follows round, which moves the error by more than most choices do.
        """
        if candidate not in self._alone:
            self._alone[candidate] = apart(
                self.recipe(self.start), self.recipe(self.with_choice(candidate))
            )
        return self._alone[candidate]

    def ever_more(self) -> Iterator[list[int]]:
        """The samples for single sites: a few, those and as many again, and so on to all."""
        images = self.bench.sets.swept_on
        count, taken = FIRST_SAMPLES, dict[int, None]()
        while len(taken) < len(images):
            left = [n for n in images if n not in taken]
            taken |= dict.fromkeys(
                left[i] for i in spread_indices(len(left), min(count - len(taken), len(left)))
            )
            yield list(taken)
            count *= 2

    def _promising(self, until: float, images: Sequence[int]) -> list[Judged]:
        """The choices that these images can be run with until then, the largest error inside what they read first.

        A sweep goes through the network from its front: one that ends early would know nothing of what lies behind.
        """
        rank = {n: k for k, c in enumerate(self._by_own_error) for n in c.floats}
        ranked = sorted(
            self.swept(),
            key=lambda j: min(
                (rank[n] for n in j.candidate.site.nodes if n in rank), default=len(rank)
            ),
        )
        left = until - time.monotonic()
        needed = itertools.accumulate(
            self.each * self.share(j) * self._unknown(j, images) for j in ranked
        )
        return [j for j, seconds in zip(ranked, needed, strict=True) if seconds <= left]

    def _unknown(self, judged: Judged, images: Sequence[int]) -> int:
        """How many runs on these images a choice still needs."""
        known = [
            self.bench.store.known(SWEEP, r.key)
            for r in self.alone(judged.candidate)
            if not r.is_float
        ]
        return sum(n not in rows for rows in known for n in images)

    def share(self, judged: Judged) -> float:
        """The part of a run's multiplications that a sweep has to do again for a choice."""
        return self._behind[first_change(self.planner.model, *self.alone(judged.candidate))]

    @functools.cached_property
    def _behind(self) -> list[float]:
        return share_behind(self.planner.model)

    def with_choice(self, candidate: Candidate) -> Configuration:
        return self.start.joined(candidate.configuration)

    def error(self, images: Sequence[int] | None = None) -> float | None:
        """Root of the mean squared output error of everything INT8, on these samples; None where it was not measured."""
        errors = self.bench.errors(self.recipe(self.start), images)
        return None if np.isnan(errors).all() else float(np.sqrt(np.nanmean(errors**2)))

    def errors_with(self, candidate: Candidate) -> tuple[float, float] | None:
        """This error on the samples that a choice was measured on, and without what it alone takes away from the square
        there; None where that was not measured."""
        gain = self._gain(candidate)
        before = None if math.isnan(gain) else self.error(self._raced_on[candidate])
        return None if before is None else (before, math.sqrt(max(0.0, before**2 - gain)))

    def _ranges(self) -> Configuration:
        """Other methods for the worst sites, those that are better beyond doubt; they cost no time."""
        worst = [
            j.candidate.site
            for j, _ in self._gained()
            if j.candidate.choice == FLOAT and j.candidate.site.tensors
        ]
        price = self.planner.cost(self.start).value
        self.scales = [
            c
            for c in choices.other_scales(self.planner, worst[:_LOOKED_AT])
            if not c.configuration.apart or self.planner.cost(self.with_choice(c)).value <= price
        ]
        self._raced(self.scales, "Other ranges", 0.0)
        better: list[tuple[float, Candidate]] = []
        for candidate in self.scales:
            gain = self._gains(candidate)
            if len(gain) >= 4 and gain.mean() > _SURE * gain.std(ddof=1) / math.sqrt(len(gain)):
                better.append((float(gain.mean()), candidate))
        ranges = self.start
        taken: set[str] = set()
        for _, candidate in sorted(better, key=lambda b: -b[0]):
            tensors = {
                t for t, _ in candidate.configuration.methods
            } | candidate.configuration.apart
            if not tensors & taken:
                taken |= tensors
                ranges = ranges.joined(candidate.configuration)
        if ranges != self.start:
            self.measure([("other ranges", ranges)])
            one, other = (
                self.bench.resampled(self.recipe(c), self.bench.sets.chosen_on)
                for c in (ranges, self.start)
            )
            if float(np.nanmean(one - other)) <= 0.0:
                self.notes.append(Remark.RANGES_NOT_TAKEN())
                return self.start
        return ranges

    def _combinations(self, ranges: Configuration) -> None:
        self.say("putting choices together")
        self.measure(self.obvious())
        near = choices.neighbours(self.planner.model)
        self._along(choices.chain(ranges, self.gains(), self._cost, near))
        self._take_back()
        self._fit_in()

    def _along(self, steps: Iterator[Configuration]) -> None:
        """Measures steps of the chain, ever farther apart, past the first good one, and closes in on that.

        For the whole front it goes on until it costs what the dearest placement does that one would try without a
        search, and measures what it has to set against each of them.
        """
        dearest = max(
            (p.cost.value for p in self.pool.values() if self.whole_front), default=-math.inf
        )
        named: list[tuple[str, Configuration]] = []
        waiting: list[int] = []
        good: int | None = None
        bad = -1
        for configuration in steps:
            cost = self.planner.cost(configuration)
            if not cost.int8:
                break
            named.append((counted(len(named) + 1, "choice"), configuration))
            if len(named) not in _STEPS:
                continue
            waiting.append(len(named) - 1)
            if cost.value <= dearest:
                continue  # those behind it are measured whatever it does: together they share more
            good, bad = self._next_good(named, waiting, good, bad)
            if self.budget is None and good is not None and waiting[-1] > good + good // 2:
                break
            waiting = []
        good, bad = self._next_good(named, waiting, good, bad)
        if (
            self.budget is not None
        ):  # the time of a chain may fall again: neighbours of a float cost less
            fits = [n for n in named if self.planner.cost(n[1]).value <= self.budget]
            self.measure(fits[-_FITTING:])
        if self.whole_front:
            costs = [self.planner.cost(c).value for _, c in named]
            last = (
                max(
                    (i for i, cost in enumerate(costs) if cost <= p.cost.value + _EQUAL),
                    default=None,
                )
                for p in self.points()
            )  # the last step that costs no more than a placement
            self.measure([named[i] for i in last if i is not None])
        if good is None and named:
            self.measure([named[-1]])
            good = len(named) - 1 if self._is_good(named[-1][1]) else None
            if good is None and self.keep is not None:
                self.notes.append(Remark.GOAL_NOT_REACHED())
        while good is not None and good - bad > 1:
            middle = (good + bad) // 2
            self.measure([named[middle]])
            good, bad = (middle, bad) if self._is_good(named[middle][1]) else (good, middle)

    def _next_good(
        self,
        named: Sequence[tuple[str, Configuration]],
        steps: Sequence[int],
        good: int | None,
        bad: int,
    ) -> tuple[int | None, int]:
        """Measures steps of the chain; the first good one, and the last one in front of that."""
        self.measure([named[i] for i in steps])
        for i in steps:
            if good is None and self._is_good(named[i][1]):
                good = i
            elif good is None:
                bad = i
        return good, bad

    def gains(self) -> list[Gain]:
        """Measured floats; those that do not make the output error smaller come last."""
        least = _LEAST * (self.error() or 0.0) ** 2
        price = self.planner.cost(self.start).value
        return [
            Gain(j.candidate.configuration, max(gain, least), j.cost.value - price)
            for j, gain in self._gained()
            if j.candidate.choice == FLOAT
        ]

    def _gained(self) -> list[tuple[Judged, float]]:
        """By how much each choice made the squared error smaller, on the samples that it was measured on; most first."""
        gains = [(judged, self._gain(judged.candidate)) for judged in self.swept()]
        return sorted((g for g in gains if not math.isnan(g[1])), key=lambda x: -x[1])

    def _gain(self, candidate: Candidate, images: Sequence[int] | None = None) -> float:
        """By how much a choice alone makes the squared error smaller, on the samples that it was measured on, or on
        those of ``images``; NaN for none."""
        gains = self._gains(candidate, images)
        return float(gains.mean()) if len(gains) else math.nan

    def _gains(
        self, candidate: Candidate, images: Sequence[int] | None = None
    ) -> npt.NDArray[np.float64]:
        """The same for each of these samples."""
        images = self._raced_on.get(candidate, ()) if images is None else images
        if not images:
            return np.empty(0)
        before, after = (
            0.0 if r.is_float else self.bench.swept(r, images) ** 2 for r in self.alone(candidate)
        )
        gains: npt.NDArray[np.float64] = np.atleast_1d(before - after)
        return gains[~np.isnan(gains)]

    def obvious(self) -> list[tuple[str, Configuration]]:
        """What one would try without a search: the head float, and the worst convolutions."""
        ranked = [
            j.candidate.configuration
            for j, _ in self._gained()
            if j.candidate.site.kind == CONVOLUTION and j.candidate.choice == FLOAT
        ]
        return [*self._heads(), *self._worst(ranked, "worst by sensitivity")]

    def _heads(self) -> list[tuple[str, Configuration]]:
        found = []
        heads = [s for s in self.sites if s.kind == HEAD and s.default == INT8]
        last = next((s for s in heads if s.name == "last convolutions"), None)
        if last is not None:
            found.append(("last convolutions float", self.start.joined(last.as_float())))
        branches = frozenset(n for s in heads for n in s.nodes)
        if branches and (last is None or branches != frozenset(last.nodes)):
            found.append(("whole head float", self.start.joined(Configuration(floats=branches))))
        return found

    def _worst(self, ranked: Sequence[Configuration], why: str) -> list[tuple[str, Configuration]]:
        """The first few of single convolutions together, ever more of them."""
        return [
            (
                f"{k} {why}",
                self.start.joined(
                    Configuration(floats=frozenset(n for c in ranked[:k] for n in c.floats))
                ),
            )
            for k in (1, 2, 4, 8, 16)
            if k <= len(ranked)
        ]

    @functools.cached_property
    def _by_own_error(self) -> list[Configuration]:
        """Single convolutions, the largest error inside what they read first: known without a run."""
        plan = self.planner.plan(self.start)
        sources = {t: s.group.sources for s in plan.scales for t in s.group.quantized}
        quantized = [q for q in plan.recipe.build(self.planner.model)[1] if q.tensor in sources]
        single = {
            s.nodes[0]: s.as_float()
            for s in self.sites
            if s.kind == CONVOLUTION and s.default == INT8
        }
        worst = losses.rank_activations(quantized, self.planner.statistics, sources, len(quantized))
        names = (r.node.name for q in worst for r in plan.placement.inputs[q.tensor])
        return [
            single[n]
            for n in dict.fromkeys(names)
            if n in single and not single[n].floats <= self.start.floats
        ]

    def _take_back(self) -> None:
        """Takes choices of the cheapest good placement back, the dearest first, as long as it stays good.

        Each is taken back alone first, all of these in one go: they share what lies in front of them. What cannot go
        alone is not tried with others.
        """
        if self.keep is None:
            return
        level = self._level(self.bench.sets.chosen_on)
        here = next((p.configuration for p in self.points() if p.chosen_on >= level), None)
        if here is None:
            return
        parts = self.parts(here)
        price = self.planner.cost(here).value
        saved = [(price - self.planner.cost(self.without(here, s)).value, s) for s in parts]
        dear = [s for saving, s in sorted(saved, key=lambda x: -x[0])[:_REMOVED] if saving > 0.0]
        self.measure([("fewer choices", self.without(here, s)) for s in dear])
        for site in [s for s in dear if self._is_good(self.without(here, s))]:
            less = self.without(here, site)
            if self.planner.cost(less).value < self.planner.cost(here).value:
                self.measure([("fewer choices", less)])
                if self._is_good(less):
                    here = less

    def _fit_in(self) -> None:
        """Takes choices back from placements that are better than all that fit the budget, until they fit.

        A float convolution between INT8 ones costs conversions, so that more choices are not always dearer.
        """
        budget = self.budget
        if budget is None:
            return
        points = self.points()
        best = max((p.chosen_on for p in points if p.cost.value <= budget), default=-math.inf)
        for point in [p for p in points if p.cost.value > budget and p.chosen_on > best][:_OVER]:
            here, cost = point.configuration, point.cost.value
            while cost > budget:
                less = {
                    self.planner.cost(c).value: c
                    for s in self.parts(here)
                    if (c := self.without(here, s)) != here
                }
                fits = sorted(value for value in less if value <= budget)
                self.measure([("fewer choices", less[value]) for value in fits[-_REMOVED:]])
                if not less or min(less) >= cost:
                    break
                cost = min(less)
                here = less[cost]

    # Parts of a configuration -----------------------------------------------------------------------------------

    def parts(self, configuration: Configuration) -> list[Site]:
        """The sites that are float in it, the largest first, no node twice; those float from the start left out."""
        left = set(configuration.floats - self.start.floats)
        found = []
        for site in sorted(
            (s for s in self.sites if s.default == INT8), key=lambda s: (-len(s.nodes), s.name)
        ):
            if set(site.nodes) <= left:
                left -= set(site.nodes)
                found.append(site)
        return found

    def without(self, configuration: Configuration, site: Site) -> Configuration:
        nodes = frozenset(site.nodes) - self.start.floats
        return replace(configuration, floats=configuration.floats - nodes)

    # Measuring --------------------------------------------------------------------------------------------------

    def measure(self, named: Sequence[tuple[str, Configuration]]) -> None:
        """Measures combinations as a whole, on the samples to choose on; the float network is none."""
        new = [
            (n, c)
            for n, c in named
            if self.recipe(c).key not in self.pool and self.planner.cost(c).int8
        ]
        if self.bench.deadline is None:
            self.bench.whole(
                [self.recipe(c) for _, c in new], self.bench.sets.chosen_on, "Combinations"
            )
        for name, configuration in new:
            if (
                self.bench.deadline is not None
            ):  # one by one: what was measured when time is over is in the pool
                self.bench.whole(
                    [self.recipe(configuration)], self.bench.sets.chosen_on, "Combinations"
                )
            recipe = self.recipe(configuration)
            changed = {
                **dict(sorted(configuration.methods)),
                **dict.fromkeys(sorted(configuration.apart), choices.OWN),
                **dict.fromkeys(sorted(configuration.quantized), INT8),
            }
            self.pool.setdefault(
                recipe.key,
                Point(
                    name,
                    configuration,
                    [s.name for s in self.parts(configuration)],
                    changed,
                    self.planner.cost(configuration),
                    self.bench.value(recipe, self.bench.sets.chosen_on),
                ),
            )

    def _judge(self, configurations: Iterable[Configuration]) -> None:
        recipes = [self.recipe(c) for c in configurations]
        self.bench.whole([FLOAT_RECIPE, *recipes], self.bench.sets.judged_on, "Judging")

    def float_value(self, samples: Sequence[int]) -> float:
        """What the metric gives for the float model itself."""
        self.bench.whole([FLOAT_RECIPE], samples, "Float")
        return self.bench.value(FLOAT_RECIPE, samples)

    def _reaches(self, configuration: Configuration, samples: Sequence[int]) -> bool:
        return self.bench.value(self.recipe(configuration), samples) >= self._level(samples)

    def _level(self, samples: Sequence[int]) -> float:
        assert self.keep is not None
        return self.keep * self.float_value(samples)

    def _is_good(self, configuration: Configuration) -> bool:
        if self.keep is not None:
            return self._reaches(configuration, self.bench.sets.chosen_on)
        assert self.budget is not None
        return self.planner.cost(configuration).value > self.budget

    # The end ----------------------------------------------------------------------------------------------------

    def points(self) -> list[Point]:
        """The pool, cheapest first, the better first among equals."""
        return sorted(self.pool.values(), key=lambda p: (p.cost.value, -p.chosen_on, p.name))

    def front(self) -> list[Point]:
        """Points of which no other one is as cheap and as good, on the samples to choose on."""
        found: list[Point] = []
        for point in self.points():
            if not found or point.chosen_on > found[-1].chosen_on:
                found.append(point)
        return found

    def choose(self) -> tuple[Point, bool]:
        """The placement to take, and whether the goal is reached on the samples that nothing was chosen by.

        Raises:
            QdqtoolError: There is none.
        """
        front = self.front()
        if not front:
            raise QdqtoolError(
                "nothing to choose from: no convolution can run in INT8 and is predicted to gain by it; "
                "deploy the float model, or see what insert and predict say of each",
                code="no-candidates",
            )
        if self.budget is not None:
            fits = [p for p in front if p.cost.value <= self.budget]
            return (fits[-1], True) if fits else (front[0], False)
        level = self._level(self.bench.sets.chosen_on)
        for point in front:
            if point.chosen_on >= level:
                self._judge([point.configuration])
                if self._reaches(point.configuration, self.bench.sets.judged_on):
                    return point, True
                if self.last_judged is not None and time.monotonic() > self.last_judged:
                    break
        return front[-1], False

    def judge_points(self, points: Sequence[Point]) -> None:
        """Fills in what the points are worth on the samples to judge on, with intervals."""
        samples = self.bench.sets.judged_on
        self._judge(p.configuration for p in points)
        for point in points:
            recipe = self.recipe(point.configuration)
            point.metric = self.bench.value(recipe, samples)
            values = self.bench.resampled(recipe, samples)
            point.low, point.high = (float(v) for v in np.nanpercentile(values, [2.5, 97.5]))

    def more_of(self, point: Point, shown: Sequence[Point]) -> list[Bought]:
        """Judges the rest of the front, and measures what each choice bought, as far as there is time."""
        self.bench.deadline = self.ends
        try:
            for others in [shown] if self.ends is None else [[p] for p in shown]:
                self.judge_points(others)
            return self.bought(point)
        except OutOfTime:
            self.notes.append(Remark.NO_TIME_TO_JUDGE())
            return []
        finally:
            self.bench.deadline = None

    def bought(self, point: Point) -> list[Bought]:
        """What those choices of a placement bought that gained most alone: measured again without each."""
        gained = {
            j.candidate.site: gain for j, gain in self._gained() if j.candidate.choice == FLOAT
        }
        parts = sorted(
            self.parts(point.configuration) if point.cost.int8 else [],
            key=lambda s: -gained.get(s, 0.0),
        )[:_BOUGHT]
        less = [self.without(point.configuration, s) for s in parts]
        self.bench.whole(
            [self.recipe(c) for c in less], self.bench.sets.chosen_on, "What each choice bought"
        )
        found = []
        for site, configuration in zip(parts, less, strict=True):
            cost = self.planner.cost(configuration)
            value = self.bench.value(self.recipe(configuration), self.bench.sets.chosen_on)
            ms = None if cost.ms is None or point.cost.ms is None else point.cost.ms - cost.ms
            found.append(
                Bought(
                    site.name,
                    FLOAT,
                    point.chosen_on - value,
                    point.cost.int8 - cost.int8,
                    point.cost.conversions - cost.conversions,
                    ms,
                )
            )
        return sorted(found, key=lambda b: -(b.metric or 0.0))
