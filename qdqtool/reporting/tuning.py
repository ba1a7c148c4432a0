"""The Pareto front of ``qdqtool tune``, read from its JSON; what is in it is data of unknown origin."""

from __future__ import annotations

import math
import os
from typing import Any

from qdqtool import budgets
from qdqtool.errors import DataError
from qdqtool.files import read_input
from qdqtool.graph import Model
from qdqtool.jsontext import parse_json
from qdqtool.reporting import data
from qdqtool.reporting.names import shown, told
from qdqtool.tuning.result import SCHEMA

_GIVE = "give what 'qdqtool tune --format json' wrote"
MOST_POINTS, MOST_SITES = 2_000, 5_000


def tuning_of(path: str | os.PathLike[str], model: Model) -> data.Tuning:
    """Reads what ``qdqtool tune --format json`` or ``--result`` wrote about a model.

    Raises:
        DataError: The file is missing, is something else, is about another network (fewer than half of the nodes that
            it names are in ``model``), or a field that a plot needs is damaged.
    """
    name = os.fspath(path)
    try:
        found = parse_json(read_input(path, budgets.JSON_FILE, error=DataError))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: is no JSON ({str(error)[:80]}); {_GIVE}") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise DataError(f"{name}: its schema is not {SCHEMA}; {_GIVE}")
    try:
        named = {str(n) for s in _list(found.get("sites")) for n in _list(_object(s).get("nodes"))}
        known = sum(node.name in named for node in model.nodes)
        if 2 * known < len(named):
            raise DataError(f"{name}: {known} of the {len(named)} nodes that it names are in "
                            f"{model.path or 'the model'}; it is the tuning of another network")
        return _read(found)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{name}: the tuning result is damaged ({str(error)[:80]}); run qdqtool tune again") from None


def _read(found: dict[str, Any]) -> data.Tuning:
    metric, goal, cost = (_object(found.get(k)) for k in ("metric", "goal", "cost"))
    front = [_object(p) for p in _list(found["front"])][:MOST_POINTS]
    if not front:
        raise ValueError("its front is empty")
    others = [_object(p) for p in _list(found.get("others"))][:MOST_POINTS]
    # What was tried but not judged has no metric to draw it at.
    unjudged = sum(p.get("metric") is None for p in others)
    others = [p for p in others if p.get("metric") is not None]
    chosen = _object(found.get("chosen"))
    timed = all(_optional(p.get("ms")) is not None for p in front)
    with_cost = all(_optional(p.get("cost")) is not None for p in front)
    if timed:
        axis = "estimated milliseconds" + (f" on {shown(str(found['gpu']), 60)}" if found.get("gpu") else "")
    else:
        axis = told(str(cost.get("sentence") or "convolutions left float, and conversions"))
    points = []
    for on_front, listed in ((True, front), (False, others)):
        for number, p in enumerate(listed):
            x = _number(p["ms"] if timed and p.get("ms") is not None else p["cost"] if with_cost else _float_count(p))
            is_chosen = on_front and chosen.get("index", -1) == p.get("index", number)
            points.append(data.Point(
                shown(str(p.get("name") or f"{p.get('int8', '?')} INT8"), 120), x, _number(p["metric"]),
                _optional(p.get("low")), _optional(p.get("high")), _count(p.get("int8")), _count(p.get("conversions")),
                _optional(p.get("ms")), is_chosen, on_front,
            ))  # fmt: skip
    if chosen and not any(p.chosen for p in points):
        match = [p for p in points if (p.int8, p.conversions, p.metric) == (
            _count(chosen.get("int8")), _count(chosen.get("conversions")), _optional(chosen.get("metric")))]
        for point in match[:1]:
            point.chosen = True
    float_metric = _optional(metric.get("float"))
    keep = _optional(goal.get("keep"))
    return data.Tuning(
        shown(str(metric.get("name") or "metric"), 80), told(str(metric.get("sentence") or "")), axis, points,
        float_metric, keep * float_metric if keep is not None and float_metric is not None else None,
        _optional(goal.get("budget_ms")), goal.get("reached") if isinstance(goal.get("reached"), bool) else None,
        [_site(_object(s)) for s in _list(found.get("sites"))[:MOST_SITES]],
        [*([f"{unjudged} more were tried and not judged; they are not drawn"] if unjudged else []),
         *(told(str(n)) for n in [*_list(found.get("notes")), *_list(found.get("warnings"))][:50])],
    )  # fmt: skip


def _site(site: dict[str, Any]) -> list[str]:
    loss, ms = _optional(site.get("loss")), _optional(site.get("ms"))
    return [
        *(shown(str(site.get(key, "")), 200) for key in ("site", "kind", "choice")),
        "" if loss is None else f"{loss:.4g}", "" if ms is None else f"{ms:.4g}", told(str(site.get("why", ""))),
    ]


def _float_count(point: dict[str, Any]) -> float:
    """Where no cost is told: conversions, and INT8 convolutions against the others."""
    return _number(point.get("conversions", 0)) - _number(point.get("int8", 0))


def _object(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError("an object is something else")
    return value


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise TypeError("a list is something else")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:30]!r} is no number")
    return float(value)


def _optional(value: Any) -> float | None:
    return None if value is None else _number(value)


def _count(value: Any) -> int | None:
    return None if value is None else int(_number(value))
