"""Checkpoints of prepared networks that ``torch.load(..., weights_only=True)`` reads.

    torch.save(qat.checkpoint(model), "qat.pt")
    qat.restore(float_model, torch.load("qat.pt", weights_only=True))

A checkpoint holds the state dict and the plan as plain data; restoring neither traces nor calibrates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from torch import nn

from qdqtool.errors import QdqtoolError
from qdqtool.qat.amax import Int8, set_amax
from qdqtool.qat.modules import Quantizing, quantizers_of
from qdqtool.qat.networks import merge_branches, unwrapped
from qdqtool.qat.planning import ActivationQuantizer, Plan, WeightQuantizer
from qdqtool.qat.preparation import insert, is_prepared, plan_of
from qdqtool.qat.sites import Site

FORMAT = "qdqtool/qat/1"


def checkpoint(model: nn.Module) -> dict[str, Any]:
    """A prepared network as plain data: ``format``, ``plan``, ``off`` (quantizers that are disabled), ``state``.

    Raises:
        QdqtoolError: The network was not prepared.
    """
    model = unwrapped(model)
    plan = plan_of(model)
    names = {id(m): n for n, m in model.named_modules()}
    off = [[names[id(m)], a] for m, a, _ in quantizers_of(model) if isinstance(m, Quantizing) and a in m.qdq_off]
    return {"format": FORMAT, "plan": plan_data(plan), "off": off, "state": model.state_dict()}


def restore(model: nn.Module, saved: Mapping[str, Any]) -> Plan:
    """Puts the quantizers, ranges and weights of a checkpoint into a network, in place.

    Args:
        model: The same network, float or prepared by the same plan.
        saved: What :func:`checkpoint` returned; or a plain state dict of a prepared network, into one that is prepared.

    Raises:
        QdqtoolError: It is a checkpoint of something else, saying what differs.
    """
    model = unwrapped(model)
    if saved.get("format") != FORMAT:
        if not is_prepared(model):
            raise QdqtoolError("a plain state dict says nothing of the plan; call qdqtool.qat.prepare first, or save "
                               "qdqtool.qat.checkpoint(model)")  # fmt: skip
        _load(model, saved)
        return plan_of(model)
    plan = plan_from(saved["plan"])
    if is_prepared(model):
        mine, theirs = plan_data(plan_of(model)), plan_data(plan)
        different = [k for k in ("activations", "weights") if mine[k] != theirs[k]]
        if different:
            raise QdqtoolError(
                f"the checkpoint's plan has other quantizers ({different[0]}: {len(theirs[different[0]])}, "
                f"here {len(mine[different[0]])}); restore it into the float network"
            )
    else:
        missing = [w.module for w in plan.weights if w.module not in dict(model.named_modules())]
        merged = set(merge_branches(model)) if plan.merged else set()
        if merged != set(plan.merged) or (missing and not plan.merged):
            absent = [*missing, *plan.merged][0]
            raise QdqtoolError(f"the checkpoint is of another network: '{absent}' is not in this one")
        insert(model, plan)
    _load(model, saved["state"])
    by_name = dict(model.named_modules())
    for module in model.modules():
        if isinstance(module, Quantizing):
            module.qdq_off = frozenset()
    for name, attribute in saved["off"]:
        owner: Any = by_name[name]
        owner.qdq_off = owner.qdq_off | {attribute}
    return plan


def _load(model: nn.Module, state: Mapping[str, Any]) -> None:
    here = model.state_dict()
    loaded = {k: v for k, v in state.items() if hasattr(v, "shape")}
    modules = dict(model.named_modules(remove_duplicate=False))  # tied places share one quantizer
    ranges = {k for k in loaded if k.endswith("._amax") and isinstance(modules.get(k.rpartition(".")[0]), Int8)}
    unknown = [k for k in loaded if k not in here and k not in ranges]
    missing = [k for k in here if k not in loaded]
    shapes = [k for k in loaded if k in here and here[k].shape != loaded[k].shape and k not in ranges]
    for found, what in ((unknown, "has"), (missing, "lacks"), (shapes, "has in another shape")):
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise QdqtoolError(f"the checkpoint {what} '{found[0]}'{more}: it is of another network or plan")
    for key in ranges.difference(here):
        set_amax(modules[key.rpartition(".")[0]], loaded[key])
    model.load_state_dict(loaded, strict=True)


def plan_data(plan: Plan) -> dict[str, Any]:
    """The plan as dicts, lists, strings and numbers."""
    data: dict[str, Any] = asdict(plan)
    data["skipped"] = [list(s) for s in plan.skipped]
    data["calls"] = [[m, k, n] for (m, k), n in plan.calls.items()]
    data["keywords"] = list(plan.keywords)
    return data


def plan_from(data: Mapping[str, Any]) -> Plan:
    """The plan of :func:`plan_data`.

    Raises:
        QdqtoolError: It is none.
    """
    try:
        known = {f.name: data[f.name] for f in fields(Plan) if f.name in data}
        known["activations"] = [
            ActivationQuantizer(Site(**a["site"]), a["tensor"], a["group"], a["role"]) for a in data["activations"]
        ]
        known["weights"] = [WeightQuantizer(w["module"], w["axis"], w.get("call")) for w in data["weights"]]
        known["skipped"] = [(s[0], s[1]) for s in data["skipped"]]
        known["calls"] = {(m, k): n for m, k, n in data["calls"]}
        known["keywords"] = tuple(data["keywords"])
        return Plan(**known)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise QdqtoolError(f"the checkpoint's plan cannot be read ({error})") from error
