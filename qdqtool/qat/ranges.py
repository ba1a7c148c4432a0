"""``qat.calibrate``: ranges of the activations from data, one for each group of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from calibration import TensorStatistics
from calibration.methods import DEFAULT_PERCENTILE
from qdqtool.errors import DataError
from qdqtool.insertion.groups import ScaleGroup
from qdqtool.insertion.scales import LEVELS, GroupScale, MethodChoice, choose_scale
from qdqtool.qat.amax import set_amax
from qdqtool.qat.modules import observing, quantizers_of
from qdqtool.qat.planning import Plan
from qdqtool.qat.preparation import plan_of
from qdqtool.qat.trace import evaluating


@dataclass
class Calibration:
    """What was found.

    Attributes:
        scales: For each group of quantizers its scale, method, and the range each member would have had alone; members
            are named ``<module>.<attribute>`` after their quantizer.
        batches: Batches that went through the network.
        warnings: What looks wrong with the data.
    """

    scales: list[GroupScale]
    batches: int
    warnings: list[str] = field(default_factory=list)


def calibrate(
    model: nn.Module,
    data: Iterable[Any],
    method: str = "mse",
    *,
    percentile: float = DEFAULT_PERCENTILE,
    method_for: Sequence[tuple[str, str]] = (),
    max_batches: int | None = None,
) -> Calibration:
    """Sets the range (amax) of every activation quantizer from data.

    The network runs in evaluation mode with nothing quantized, on the device it is on. Quantizers that share a scale
    get the range that suits all their tensors (see :func:`qdqtool.insertion.scales.choose_scale`). The quantizers stay
    the backend's own: its calibrators can be used instead of this.

    Args:
        model: A network that :func:`qdqtool.qat.prepare` was called on.
        data: Batches to call the network with: a tensor, a tuple of arguments, or a dict of keyword arguments each. For
            a loader of images and labels give ``(images for images, _ in loader)``.
        method: ``max``, ``percentile``, ``mse`` or ``entropy``, as in :func:`calibration.amax_of`.
        percentile: In percent of the magnitudes, for ``percentile``.
        method_for: Pairs of a regular expression on ``<module>.<quantizer>`` and the method for those.
        max_batches: Stop after so many.

    Raises:
        QdqtoolError: The network was not prepared, a method is unknown, or a pattern matches nothing.
        DataError: There is no data, or a quantizer saw none of it, or NaN.
    """
    plan = plan_of(model)
    names = {id(m): n for n, m in model.named_modules()}
    members = _members(model, plan, names)
    choice = MethodChoice(method, tuple(method_for), percentile)
    choice.check([n for n, _ in members.values()])
    statistics: dict[str, TensorStatistics] = defaultdict(TensorStatistics)

    def observe(module: nn.Module, attribute: str, value: Tensor) -> None:
        name = members.get((id(module), attribute))
        if name is not None:
            statistics[name[0]].add(value.detach().float().cpu().numpy())

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batches = 0
    with evaluating(model), observing(observe):
        for batch in data:
            if max_batches is not None and batches >= max_batches:
                break
            _run(model, batch, device)
            batches += 1
    if not batches:
        raise DataError("no calibration data: the iterable gave no batch")
    groups: dict[int, tuple[nn.Module, list[str]]] = {}
    for name, quantizer in members.values():
        if name not in statistics:
            raise DataError(
                f"quantizer '{name}' saw no data: its module was not called in evaluation mode (a branch, or a "
                "fused path of torch such as that of nn.TransformerEncoderLayer); exclude it"
            )
        groups.setdefault(id(quantizer), (quantizer, []))[1].append(name)
    result = Calibration([], batches)
    for quantizer, found in groups.values():
        tensors = tuple(found)
        scale, warnings = choose_scale(ScaleGroup(tensors, tensors, tensors), statistics, choice)
        set_amax(quantizer, torch.tensor(scale.scale * LEVELS, dtype=torch.float32, device=device))
        result.scales.append(scale)
        result.warnings.extend(warnings)
    return result


def _members(
    model: nn.Module, plan: Plan, names: dict[int, str]
) -> dict[tuple[int, str], tuple[str, nn.Module]]:
    """From module and attribute to the quantizer and its name; one for each tensor, so that none counts twice."""
    tensors = {(a.site.module, a.site.kind, a.site.call, a.site.position): a.tensor for a in plan.activations}
    seen: set[tuple[int, str]] = set()
    members: dict[tuple[int, str], tuple[str, nn.Module]] = {}
    for module, attribute, weight in quantizers_of(model):
        if weight:
            continue
        quantizer = getattr(module, attribute)
        name = names[id(module)]
        calls = [(name, *call) for call, a in module.qdq_calls.items() if a == attribute]
        tensor = tensors.get(calls[0] if calls else (name, "input", 0, 0), f"{name}.{attribute}")
        if (id(quantizer), tensor) not in seen:
            seen.add((id(quantizer), tensor))
            members[id(module), attribute] = (f"{name}.{attribute}".lstrip("."), quantizer)
    return members


def _run(model: nn.Module, batch: Any, device: torch.device) -> None:
    if isinstance(batch, dict):
        model(**{k: _moved(v, device) for k, v in batch.items()})
    elif isinstance(batch, list | tuple):
        model(*(_moved(v, device) for v in batch))
    elif isinstance(batch, Tensor):
        model(_moved(batch, device))
    else:
        raise DataError(f"a batch is a {type(batch).__name__}; give a tensor, a tuple of arguments or a dict")


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
