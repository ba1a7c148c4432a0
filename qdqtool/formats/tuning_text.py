"""Text of ``tune``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdqtool.formats.float_names import find_float_type, name_floats
from qdqtool.formats.output import Style, TextPage, as_options
from qdqtool.formats.verdicts import count_conversions, name_float_type, verdict
from qdqtool.insertion.number_formats import find_number_format
from qdqtool.tuning.result import MAX_METRIC_DECIMALS, METRIC_DECIMALS, count_metric_decimals
from qdqtool.tuning.sites import HEAD
from qdqtool.tuning.time_plan import JUDGING_END, SEARCH_END
from qdqtool.util.text import cut_middle, format_count, format_list, format_ms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qdqtool.tuning.result import PlacementResult, SiteResult, Tuning

# Maximum lengths of lists if --all is not given.
_MAX_SITES, _MAX_CONVERSIONS = 8, 8
_MAX_ROW_SITES = 3  # float sites of a row of the trade-off


def render_tuning(tuning: Tuning, width: int = 80, *, everything: bool = False) -> TextPage:
    """Return the text of ``tune``: the chosen placement, its cost, and the trade-off.

    If `everything` is set, all sites are listed. A site is a group of nodes that are quantized or
    float together.
    """
    page = TextPage(width, everything)
    _add_tuning_result(page, tuning)
    for warning in tuning.warnings:
        page.fill(f"warning: {as_options(warning)}", style=Style.UNCLEAR)
    _add_choices(page, tuning)
    _add_trade_off(page, tuning)
    _add_sites(page, tuning)
    if tuning.notes:
        page.add_gap()
    for note in tuning.notes:
        page.fill(f"note: {as_options(note)}", style=Style.NOTE)
    prediction = tuning.prediction
    text = verdict(prediction, times=tuning.times)
    page.add_heading(f"Predicted for {prediction.target_title}: {text}")
    nodes = prediction.conversion_nodes
    for name in page.iterate_rows(nodes, _MAX_CONVERSIONS, "    "):
        page.add_lines(f"  - Q/DQ layer at {name}")
    return page


def describe_float_result(tuning: Tuning, path: str) -> str:
    """Return a warning if only the float model reaches the goal; empty for other results.

    Args:
        tuning: The result.
        path: Path of the written model.
    """
    if tuning.chosen.cost.int8 or tuning.budget_ms is not None:
        return ""
    return f"{_describe_slow_placements(tuning)} reaches the goal; {path} is the float model"


def _add_tuning_result(page: TextPage, tuning: Tuning) -> None:
    is_good = tuning.reached and _is_goal_certain(tuning) and not _ended_with_float_model(tuning)
    page.fill(_describe_goal(tuning), style=Style.GOOD if is_good else Style.UNCLEAR)
    page.fill(f"Chosen: {_describe_placement(tuning.chosen, tuning)}", 4, "  ")
    fastest = _find_fastest(tuning)
    if fastest is not None:
        page.fill(f"Fastest: {_describe_placement(fastest, tuning)}", 4, "  ")
    cheaper = tuning.cheapest_plausible
    if cheaper is not None:
        _add_cheaper(page, tuning, cheaper, _compare_with_goal(cheaper, tuning))
    if tuning.cheaper_alternative is not None:
        comparison = _compare_with_chosen(tuning.cheaper_alternative, tuning)
        _add_cheaper(page, tuning, tuning.cheaper_alternative, comparison)
    if text := _compare_with_default(tuning):
        page.fill(text, 4, "  ")
    for fact in _list_result_facts(tuning):
        page.fill(fact, 4, "  ")


def _find_fastest(tuning: Tuning) -> PlacementResult | None:
    """Return the fastest quantized placement if the float model is the result for a metric.

    None if another line of the result has this placement.
    """
    fastest = tuning.front[0]
    is_float_result = tuning.budget_ms is None and not tuning.chosen.cost.int8
    is_named = fastest is tuning.cheapest_plausible
    return fastest if is_float_result and fastest.cost.int8 and not is_named else None


def _compare_with_default(tuning: Tuning) -> str:
    """Describe the start of the search if the more expensive result may be no more accurate.

    Empty if the accuracy differs, or if the start is the result or the cheaper candidate above.
    """
    chosen = tuning.chosen
    listed = tuning.cheapest_plausible, tuning.cheaper_alternative
    points = [*tuning.front, *tuning.others]
    start = next((p for p in points if p.is_start), chosen)
    is_cheaper = start.cost.value < chosen.cost.value and chosen.cost.int8
    if not is_cheaper or any(start is point for point in listed) or not _overlap(start, chosen):
        return ""
    time = "" if start.cost.ms is None else f"{format_ms(start.cost.ms)}, "
    return (
        f"Not distinguishable from {start.name} by the 95 % intervals: {time}"
        f"{_format_metric(start, tuning)} on {_count_held_out(tuning)}"
    )


def _overlap(first: PlacementResult, second: PlacementResult) -> bool:
    """Return whether the 95 % intervals overlap; False if one of them was not measured."""
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return False
    return first.low <= second.high and second.low <= first.high


def _add_cheaper(page: TextPage, tuning: Tuning, cheaper: PlacementResult, comparison: str) -> None:
    text = f"Cheaper: {_describe_placement(cheaper, tuning)}. {comparison}. More images (--eval) "
    page.fill(f"{text}can decide", 4, "  ")


def _compare_with_goal(cheaper: PlacementResult, tuning: Tuning) -> str:
    position = "includes the goal"
    if cheaper.low is not None and cheaper.low >= _goal_level(tuning):
        selection = format_count(tuning.images["chosen_on"], "selection image")
        metric = _format_number(cheaper.chosen_on, tuning)
        position = f"is above the goal, but on {selection} it has {metric}"
    return f"This may be accurate enough: on {_count_held_out(tuning)}, its interval {position}"


def _compare_with_chosen(cheaper: PlacementResult, tuning: Tuning) -> str:
    """Compare a cheaper placement with the chosen placement, which has the same ranges."""
    chosen, images = tuning.chosen, _count_held_out(tuning)
    if cheaper.metric is None or chosen.metric is None or cheaper.metric < chosen.metric:
        return (
            f"The {images} show no difference: its interval includes the metric of the chosen "
            "candidate"
        )
    selection = format_count(tuning.images["chosen_on"], "selection image")
    metrics = [_format_number(point.chosen_on, tuning) for point in (cheaper, chosen)]
    return (
        f"It is at least as accurate as the chosen candidate on {images}, but not on {selection} "
        f"({metrics[0]} instead of {metrics[1]})"
    )


def _describe_goal(tuning: Tuning) -> str:
    if not tuning.chosen.cost.int8:
        return _describe_float_model(tuning)
    images = _describe_accuracy(tuning)
    if tuning.budget_ms is not None:
        if tuning.reached:
            return f"goal met: within {tuning.budget_ms:g} ms, {images}"
        return f"{_describe_missed_budget(tuning)} The fastest candidate has {images}"
    if tuning.reached:
        certainty = "" if _is_goal_certain(tuning) else ", but not certainly"
        return f"goal met{certainty}: {images}, goal {_format_goal(tuning)}"
    # The goal is for both sets of images. One of them may reach it.
    chosen_on = _format_number(tuning.chosen.chosen_on, tuning)
    selection = format_count(tuning.images["chosen_on"], "selection image")
    return (
        f"goal NOT met: the best candidate has {images} and {chosen_on} on {selection}"
        f"{_describe_goals(tuning)}"
    )


def _describe_missed_budget(tuning: Tuning) -> str:
    candidates = (
        "no candidate measured in this time" if tuning.effort["stopped"] else "no candidate"
    )
    return f"goal NOT met: {candidates} is within {tuning.budget_ms:g} ms."


def _is_goal_certain(tuning: Tuning) -> bool:
    """Return whether the 95 % interval of the chosen placement is above the goal."""
    low = tuning.chosen.low
    return tuning.keep is None or low is None or low >= _goal_level(tuning)


def _describe_accuracy(tuning: Tuning) -> str:
    """Describe the metric of the written model on the held-out images."""
    metric = _format_metric(tuning.chosen, tuning)
    if tuning.written_metric is not None and _differs_from_search(tuning):
        metric = _format_number(tuning.written_metric, tuning)
    return f"{metric} on {_count_held_out(tuning)}"


def _differs_from_search(tuning: Tuning) -> bool:
    """Return whether the metric of the written model is printed differently from the search's."""
    metrics = tuning.written_metric, tuning.chosen.metric
    written, searched = (None if m is None else _format_number(m, tuning) for m in metrics)
    return written is not None and written != searched


def _count_held_out(tuning: Tuning) -> str:
    """Return the number of held-out images, with the float model's detections on them."""
    images = format_count(tuning.images["judged_on"], "held-out image")
    detections = tuning.images["judged_detections"]
    return (
        images if detections is None else f"{images} with {format_count(detections, 'detection')}"
    )


def _format_title(tuning: Tuning) -> str:
    return find_number_format(tuning.precision).title


def _float_type(tuning: Tuning) -> str:
    """Return the type of layers that are not quantized; ``float`` if there are several types."""
    return find_float_type(tuning.prediction, times=tuning.times, outputs=False) or "float"


def _ended_with_float_model(tuning: Tuning) -> bool:
    """Return whether the time limit ended the search before it found a quantized result."""
    has_ended = bool(tuning.effort["stopped"]) or not tuning.reached
    return not tuning.chosen.cost.int8 and tuning.budget_ms is None and has_ended


def _describe_float_model(tuning: Tuning) -> str:
    written = "The float model was written unchanged."
    if not tuning.unchanged:
        written = f"The float model was written in {tuning.float_type.upper()}."
    if tuning.budget_ms is not None:
        limit = f"within {tuning.budget_ms:g} ms"
        if tuning.reached:
            return f"goal met by the float model. The float model is {limit}. {written}"
        missed = _describe_missed_budget(tuning)
        return f"{missed} The fastest candidate is the float model. {written}"
    placement = _describe_slow_placements(tuning)
    placement = placement[0].upper() + placement[1:]
    goal = f"{_format_goal(tuning)} on both the selection and the held-out images"
    if _ended_with_float_model(tuning):
        has_few = any(note.code == "few-images-to-judge" for note in tuning.notes)
        more = "more images, " if has_few else ""
        return (
            f"{placement} reached {goal} in the time limit. {written} Give {more}a longer "
            "--time-limit or a lower --keep"
        )
    return f"{placement} reached {goal}. {written}"


def _describe_slow_placements(tuning: Tuning) -> str:
    title, float_type = _format_title(tuning), name_float_type(tuning.prediction)
    return f"no measured {title} placement faster than {float_type}"


def _goal_level(tuning: Tuning, images: str = "float") -> float:
    """Return the metric to reach.

    Args:
        tuning: The result, with `keep`.
        images: ``float`` for the held-out images, ``float_chosen_on`` for the selection images.
    """
    assert tuning.keep is not None
    return tuning.keep * float(tuning.metric[images])


def _format_goal(tuning: Tuning, images: str = "float") -> str:
    """Return the goal, with more decimals than the metrics if these make it exact."""
    goal, decimals = _goal_level(tuning, images), _count_decimals(tuning)
    candidates = range(decimals, MAX_METRIC_DECIMALS + 1)
    decimals = next((d for d in candidates if abs(goal - round(goal, d)) < 1e-9), decimals)
    return f"{goal:.{decimals}f}"


def _format_number(metric: float, tuning: Tuning) -> str:
    return f"{metric:.{_count_decimals(tuning)}f}"


def _count_decimals(tuning: Tuning) -> int:
    """Return the number of decimals, at least 3, that distinguish the goal from all metrics below.

    A metric that misses the goal is then not printed as the goal. With a budget, the decimals are
    those that decide between two placements.
    """
    if tuning.keep is None:
        return count_metric_decimals(float(tuning.metric["float_chosen_on"]))
    points = [*tuning.front, tuning.chosen, tuning.cheapest_plausible or tuning.chosen]
    metrics = [(_goal_level(tuning, "float_chosen_on"), point.chosen_on) for point in points]
    held_out = [tuning.written_metric, *(point.metric for point in points)]
    metrics += [(_goal_level(tuning), metric) for metric in held_out if metric is not None]
    decimals = METRIC_DECIMALS
    while decimals < MAX_METRIC_DECIMALS and any(
        metric < goal and round(metric, decimals) >= round(goal, decimals)
        for goal, metric in metrics
    ):
        decimals += 1
    return decimals


def _describe_placement(point: PlacementResult, tuning: Tuning) -> str:
    cost = point.cost
    if not cost.int8:
        time = "" if cost.ms is None else f", {format_ms(cost.ms)} predicted on {tuning.gpu}"
        return f"the float model{time}"
    counts = (
        f"{cost.int8} of {cost.convolutions} {_name_layers(tuning)} in {_format_title(tuning)}"
        f"{_describe_conversions(point, tuning)}"
    )
    time = "" if cost.ms is None else f"{format_ms(cost.ms)} predicted on {tuning.gpu}, "
    if point is tuning.chosen:
        return f"{time}{counts}"
    metric = _format_metric(point, tuning)
    if point.metric is None:
        metric = "not measured on the held-out images"
    float_type = f" in {_float_type(tuning)}" if len(point.sites) == 1 else ""
    return f"{point.title}{float_type}, {time}{counts}, {metric}"


def _describe_conversions(point: PlacementResult, tuning: Tuning) -> str:
    """Return a text with the number of remaining Q/DQ layers of a placement.

    For the chosen placement, it is worded as in the text of `predict`.
    """
    if tuning.prediction.conversions is None:
        return ""  # the target quantizes inside its kernels
    if point is not tuning.chosen:
        return f", {format_count(point.cost.conversions, 'Q/DQ layer')} left"
    number, dependence = count_conversions(tuning.prediction)
    return f", {number} Q/DQ {'layer' if number == 1 else 'layers'} left{dependence}"


def _name_layers(tuning: Tuning) -> str:
    has_products = any(c.is_product for c in tuning.prediction.convolutions)
    return "convolutions and matrix products" if has_products else "convolutions"


def _format_metric(point: PlacementResult, tuning: Tuning) -> str:
    if point.metric is None:
        return "not measured"
    return f"{_format_number(point.metric, tuning)} ({point.low:.3f} to {point.high:.3f})"


def _list_result_facts(tuning: Tuning) -> list[str]:
    facts = [tuning.metric["sentence"]]
    if _differs_from_search(tuning):
        metric = _format_metric(tuning.chosen, tuning)
        facts.append(f"with the ranges of the search, it was {metric}")
    if tuning.metric["float"] != 1.0:
        facts.append(f"the float model has {tuning.metric['float']:.4f}")
    images = tuning.images
    ranges = format_count(images["calibration"], "image")
    if images["search_calibration"] != images["calibration"]:
        ranges += f" ({images['search_calibration']} during the search)"
    facts.append(
        f"ranges from {ranges}, candidates compared on {images['chosen_on']} selection images, the "
        f"result measured on {images['judged_on']} held-out images"
    )
    stopped = tuning.effort["stopped"]
    if stopped:
        facts.append(
            f"stopped by the {stopped}, of which {SEARCH_END:.0%} are for the search, "
            f"{JUDGING_END - SEARCH_END:.0%} for the held-out images, and the rest for the final "
            "ranges and the files: with more time, the result may be better"
        )
    return facts


def _add_choices(page: TextPage, tuning: Tuning) -> None:
    point = tuning.chosen
    if not point.sites and not point.changed:
        if point.cost.int8:
            choice = f"Every layer is {_format_title(tuning)}"
            if tuning.reached:
                choice = f"No layer has to be {_float_type(tuning)}"
            page.add_heading(f"{choice}, except those that --head keeps in {_float_type(tuning)}")
        return
    if tuning.bought:
        _add_benefits(page, tuning)
    elif point.sites:
        page.add_heading(f"Kept in {_float_type(tuning)} for accuracy: {', '.join(point.sites)}")
    if tuning.bought or point.sites:
        _add_head_nodes(page, tuning)
        _add_further_float_layers(page, tuning)
    _add_changes(page, tuning)


def _add_benefits(page: TextPage, tuning: Tuning) -> None:
    """Add the float layers, with the effect of each one that was measured."""
    head = f"{'accuracy':>8} {_format_title(tuning):>5} {'Q/DQ':>6}"
    if tuning.gpu is not None:
        head += f" {'ms':>8}"
    column = max(20, page.width - len(head) - 3)
    images = "held-out" if tuning.bought[0].measured_on == "judged_on" else "selection"
    page.add_heading(
        f"Kept in {_float_type(tuning)}, and the effect of each layer while the others stay "
        f"{_float_type(tuning)} (accuracy on the {images} images, {_name_layers(tuning)} in "
        f"{_format_title(tuning)}, Q/DQ layers)"
    )
    page.add_lines(f"  {'':<{column}} {head}")
    for benefit in tuning.bought:
        row = f"{benefit.metric:>+8.4f} {benefit.int8:>+5d} {benefit.conversions:>+6d}"
        if tuning.gpu is not None:
            row += f" {'-' if benefit.ms is None else f'{benefit.ms:+.3f}':>8}"
        page.add_lines(f"  {cut_middle(benefit.site, column):<{column}} {row}")
    listed = {benefit.site for benefit in tuning.bought}
    rest = [site for site in tuning.chosen.sites if site not in listed]
    if rest:
        page.fill(f"also: {', '.join(rest)}", 4, "  ")


def _add_head_nodes(page: TextPage, tuning: Tuning) -> None:
    """Add the nodes of chosen parts of the head, whose names do not have all nodes."""
    for site in tuning.sites:
        if site.kind == HEAD and site.site in tuning.chosen.sites and site.nodes[1:]:
            most = len(site.nodes) if page.everything else _MAX_SITES
            page.fill(f"{site.site}: {format_list(site.nodes, most)}", 4, "  ")


def _add_further_float_layers(page: TextPage, tuning: Tuning) -> None:
    """Add the number of float convolutions that are float by default.

    The search may have measured them in INT8.
    """
    chosen = {n for s in tuning.sites if s.site in tuning.chosen.sites for n in s.nodes}
    convolutions = tuning.prediction.convolutions
    further = [c for c in convolutions if c.precision.is_float and c.name not in chosen]
    if further:
        page.fill(
            f"and {len(further)} that are {_float_type(tuning)} by default (such as by --head, or "
            f"without gain in {_format_title(tuning)}): {', '.join(c.name for c in further)}",
            4,
            "  ",
        )


def _add_changes(page: TextPage, tuning: Tuning) -> None:
    changed = tuning.chosen.changed
    if changed:
        page.add_heading("Differs from the defaults of insert")
    for name, choice in changed.items():
        page.fill(f"{name}: {choice}", 4, "  ")
    if "int8" in changed.values() and "HEAD-QUANT" in tuning.prediction.findings_by_code():
        page.fill(
            "predict has a note on these layers (HEAD-QUANT). The accuracy above was measured with "
            f"them in {_format_title(tuning)}",
            4,
            "  ",
        )


def _add_trade_off(page: TextPage, tuning: Tuning) -> None:
    unit = "ms" if tuning.gpu is not None else "cost"
    better = _list_better_on_selection(tuning)
    mark = ", and the chosen candidate (*)" if better else "; * marks the chosen candidate"
    page.add_heading(
        "Trade-off (Pareto front): the most accurate candidates at their cost, by the selection "
        f"images ({as_options(tuning.cost['sentence'])}){mark}{_describe_goals(tuning)}"
    )
    chosen_on, metric = _trade_off_columns(tuning)
    page.add_lines(
        f"  {unit:>8} {_format_title(tuning):>5} {'Q/DQ':>6} {'select.':>{chosen_on}}  "
        f"{'held-out (95 %)':<{metric}} kept in {_float_type(tuning)}, or choice"
    )
    for point in tuning.front:
        _add_trade_off_row(page, tuning, point)
    if better:
        page.fill(_explain_chosen(better), 4, "  ")


def _trade_off_columns(tuning: Tuning) -> tuple[int, int]:
    """Return the widths of the columns with the two metrics."""
    decimals = _count_decimals(tuning)
    return max(7, decimals + 2), 20 + decimals


def _add_trade_off_row(page: TextPage, tuning: Tuning, point: PlacementResult) -> None:
    chosen_on, metric = _trade_off_columns(tuning)
    mark = "*" if point is tuning.chosen else " "
    cost = point.cost
    price = f"{cost.value:g}" if cost.ms is None else format_ms(cost.ms, unit=False)
    row = (
        f"{mark} {price:>8} {cost.int8:>5d} {cost.conversions:>6d} "
        f"{_format_number(point.chosen_on, tuning):>{chosen_on}}  "
        f"{_format_metric(point, tuning):<{metric}} "
    )
    # A long title is on the next line, because a cut name does not identify a layer.
    is_long = len(point.title) > page.width - len(row)
    number = format_count(max(1, len(point.sites)), "choice")
    page.add_lines(row + (number if is_long else point.title))
    if is_long and len(point.sites) != 1:
        page.fill(point.title, 17, " " * 11)
    text = _describe_float_sites(tuning, point, everything=page.everything, has_title=not is_long)
    if text:
        page.fill(f"{_float_type(tuning)}: {text}", 17, " " * 11)


def _list_better_on_selection(tuning: Tuning) -> list[PlacementResult]:
    """Return the placements that beat the chosen one by cost and metric on the selection images.

    A placement beats the chosen one if it is better in one of the two, and not worse in the other.
    """
    rank = tuning.chosen.cost.value, -tuning.chosen.chosen_on
    ranks = [((p.cost.value, -p.chosen_on), p) for p in (*tuning.front, *tuning.others)]
    return [p for r, p in ranks if r[0] <= rank[0] and r[1] <= rank[1] and r != rank]


def _explain_chosen(better: Sequence[PlacementResult]) -> str:
    """Explain why placements that seem better than the chosen one were not chosen."""
    is_measured = all(point.metric is not None for point in better)
    unmeasured = "" if is_measured else " or were not measured there"
    return (
        "The chosen candidate (*) is the cheapest measured one that reaches the goal on both sets "
        "of images. Candidates that are cheaper and at least as accurate on the selection images "
        f"miss the goal on the held-out images{unmeasured}"
    )


def _describe_float_sites(
    tuning: Tuning, point: PlacementResult, *, everything: bool, has_title: bool
) -> str:
    """Describe the float parts of a placement.

    Args:
        tuning: The result.
        point: The placement.
        everything: Whether to list all parts.
        has_title: Whether the row of the placement has its title.

    Returns:
        The description; empty if the row has it.
    """
    if len(point.sites) == 1:
        return "" if has_title else point.title
    if point is tuning.chosen and point.sites:
        return "as listed above"
    if point.is_start and point.cost.int8 < point.cost.convolutions:
        return f"only layers that insert leaves float, or without gain in {_format_title(tuning)}"
    if not point.sites:
        return ""
    most = len(point.sites) if everything else _MAX_ROW_SITES
    hint = " (--all)" if len(point.sites) > most else ""
    return f"{format_list(point.sites, most)}{hint}"


def _describe_goals(tuning: Tuning) -> str:
    """Return the goals of the two sets of images as the end of a sentence; empty for a budget."""
    if tuning.keep is None:
        return ""
    held_out = _format_goal(tuning)
    selection = _format_goal(tuning, "float_chosen_on")
    if selection == held_out:
        return f"; goal {held_out} on both sets of images"
    return f"; goal {selection} on the selection images and {held_out} on the held-out images"


def _add_sites(page: TextPage, tuning: Tuning) -> None:
    measured = [site for site in tuning.sites if site.error_alone is not None]
    measured.sort(key=lambda site: -(site.error_alone or 0.0))
    unmeasured = [site for site in tuning.sites if site.error_alone is None]
    left_out = [site for site in unmeasured if site.choices[0].left_out]
    skipped = [site for site in unmeasured if not site.choices[0].left_out]
    if measured:
        page.add_heading(
            f"Most sensitive layers ({_count_measured(tuning, measured)}): output error if only "
            f"this layer is {_format_title(tuning)} "
            "(fraction of the outputs' standard deviation), and change of cost if the layer is "
            f"{_float_type(tuning)}"
        )
    else:
        reason = f": {_explain_gap(skipped[0], tuning)}" if skipped else ""
        page.add_heading(f"No single layer was measured{reason}")
    for site in page.iterate_rows(measured, _MAX_SITES, "    "):
        text = f"{site.error_alone:.2%}; {_format_price(tuning, site)}"
        _add_site(page, tuning, site, text)
    if page.everything:
        for site in unmeasured:
            _add_site(page, tuning, site, f"not measured: {_explain_gap(site, tuning)}")
    elif measured:
        if left_out:
            reason = "left out: no benefit possible (--all gives the reasons)"
            page.fill(f"{format_count(len(left_out), 'choice')} {reason}", 4, "    ")
        if skipped:
            reason = f"not measured: {_explain_gap(skipped[0], tuning)}"
            page.fill(f"{format_count(len(skipped), 'choice')} {reason}", 4, "    ")


def _add_site(page: TextPage, tuning: Tuning, site: SiteResult, text: str) -> None:
    if tuning.chosen.cost.int8:  # otherwise, all layers are float
        text += f"; chosen: {_format_choice(tuning, site.choice)}"
    page.fill(f"{site.site} ({_format_kind(site)}): {text}", 4, "  - ")


def _explain_gap(site: SiteResult, tuning: Tuning) -> str:
    """Return the reason why a site was not measured."""
    text, times = as_options(site.choices[0].why), tuning.times
    return name_floats(text, "", find_float_type(tuning.prediction, times=times))


def _format_price(tuning: Tuning, site: SiteResult) -> str:
    """Return the change of cost if a layer is float, such as ``-1 INT8, +2 Q/DQ layers``."""
    change = site.as_json(tuning.base)
    # The cost of a site that is float by default is that of INT8.
    sign = -1 if site.choices[0].choice == "int8" else 1
    int8, conversions = sign * change["int8"], sign * change["conversions"]
    plural = "" if abs(conversions) == 1 else "s"
    price = f"{int8:+d} {_format_title(tuning)}, {conversions:+d} Q/DQ layer{plural}"
    return price if change["ms"] is None else f"{price}, {sign * change['ms']:+.3f} ms"


def _count_measured(tuning: Tuning, measured: Sequence[SiteResult]) -> str:
    counts = [site.swept_on for site in measured]
    most, planned = max(counts, default=0), tuning.images["swept_on"]
    images = format_count(planned, "image")
    if most < planned:
        images = f"{most} of {images}"
    if len(set(counts)) > 1:
        images = f"{min(counts)} to {images}"
    number = f"{len(measured)} of " if len(measured) < len(tuning.sites) else ""
    return f"{number}{format_count(len(tuning.sites), 'choice')} measured on {images}"


def _format_choice(tuning: Tuning, choice: str) -> str:
    """Return the type of a choice as in the other texts; other choices are names of methods."""
    types = {"float": _float_type(tuning), "int8": _format_title(tuning)}
    return types.get(choice, choice)


def _format_kind(site: SiteResult) -> str:
    return site.kind if len(site.nodes) == 1 else f"{site.kind} of {len(site.nodes)} nodes"
