"""``qat.calibrate``: ranges of the activations from data, one for each group of tensors."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from calibration.methods import DEFAULT_PERCENTILE
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.insertion.groups import ScaleGroup
from qdqtool.insertion.scales import LEVELS, GroupScale, MethodChoice, choose_scale
from qdqtool.progress import track
from qdqtool.qat.amax import amax_of, set_amax
from qdqtool.qat.batches import batches_of, call_for, length_of
from qdqtool.qat.modules import observing, quantizers_of
from qdqtool.qat.networks import unwrapped
from qdqtool.qat.observing import DeviceStatistics
from qdqtool.qat.planning import Plan, as_arguments
from qdqtool.qat.preparation import plan_of
from qdqtool.qat.processes import gathered, is_distributed, several
from qdqtool.qat.sites import resting
from qdqtool.qat.trace import device_of, evaluating

FEW = 16  # images; with fewer the largest values have hardly been seen


@dataclass
class Calibration:
    """What was found.

    Attributes:
        scales: For each group of quantizers its scale, method, and the range each member would have had alone; members
            are named ``<module>.<attribute>`` after their quantizer.
        batches: Batches that went through the network.
        images: Images in them.
        warnings: What looks wrong with the data.
    """

    scales: list[GroupScale]
    batches: int
    images: int = 0
    warnings: list[str] = field(default_factory=list)


def calibrate(
    model: nn.Module,
    data: Iterable[Any],
    method: str = "mse",
    *,
    fn: Callable[[Any], Any] | None = None,
    percentile: float = DEFAULT_PERCENTILE,
    method_for: Sequence[tuple[str, str]] = (),
    max_batches: int | None = None,
    total: int | None = None,
    together: bool | None = None,
) -> Calibration:
    """Sets the range (amax) of every activation quantizer from data.

    The network runs in evaluation mode with nothing quantized, on the device it is on; statistics are collected there.
    Quantizers that share a scale get the range that suits all their tensors (see
    :func:`qdqtool.insertion.scales.choose_scale`). The quantizers stay the backend's own: its calibrators can be used
    instead of this. A progress bar is drawn on a terminal.

    Args:
        model: A network that :func:`qdqtool.qat.prepare` was called on, or its wrapper.
        data: Batches as a loader gives them: tensors, tuples of images and labels, dicts, uint8; see
            :func:`qdqtool.qat.batches.call_for`.
        method: ``max``, ``percentile``, ``mse`` or ``entropy``, as in :func:`calibration.amax_of`.
        fn: From a batch to what the network is called with: a tensor, a tuple of arguments or a dict of keyword
            arguments.
        percentile: In percent of the magnitudes, for ``percentile``.
        method_for: Pairs of a regular expression on ``<module>.<quantizer>`` and the method for those.
        max_batches: Stop after so many.
        total: How many images will come, for the progress bar, where ``data`` has no length.
        together: Whether every process of ``torch.distributed`` calls this with data of its own and all get the ranges
            of all the data; None where ``model`` is wrapped in DistributedDataParallel. Of ranges found before
            wrapping, DistributedDataParallel takes those of the first process.

    Raises:
        QdqtoolError: The network was not prepared, a method is unknown, or a pattern matches nothing.
        DataError: There is no data, the network cannot be called with it, or a quantizer saw none of it, or NaN.
    """
    together = several() and (is_distributed(model) if together is None else together)
    model = unwrapped(model)
    plan = plan_of(model)
    names = {id(m): n for n, m in model.named_modules()}
    members = _members(model, plan, names)
    choice = MethodChoice(method, tuple(method_for), percentile)
    with _worded():
        choice.check([n for n, _ in members.values()])
    seen = _Seen(members)
    batches, images, failed = 0, 0, ""
    try:
        batches, images = _look(model, plan, data, fn, seen, max_batches, total)
    except DataError as error:
        if not together:
            raise
        failed = str(error)  # the other processes are waiting
    found = {name: s.result for name, s in seen.statistics.items()}
    if together:
        found, (batches, images) = gathered(found, (batches, images), failed)
    groups: dict[int, tuple[nn.Module, list[str]]] = {}
    for name, quantizer in members.values():
        if name not in found:
            raise DataError(
                f"quantizer '{name}' saw no data: its module was not called in evaluation mode (an expert or branch "
                "that these batches do not reach); exclude it, or give batches that reach it"
            )
        groups.setdefault(id(quantizer), (quantizer, []))[1].append(name)
    result = Calibration([], batches, images)
    device = device_of(model)
    for quantizer, tensors in groups.values():
        group = ScaleGroup(tuple(tensors), tuple(tensors), tuple(tensors))
        with _worded():
            scale, said = choose_scale(group, found, choice)
        set_amax(quantizer, torch.tensor(scale.scale * LEVELS, dtype=torch.float32, device=device))
        result.scales.append(scale)
        result.warnings.extend(said)
    if images < FEW:
        warnings.warn(
            f"calibrated with {images} image{'s' * (images != 1)}: ranges of so few say little about others; give a "
            "hundred or more that look like those in use",
            UserWarning, stacklevel=2,
        )  # fmt: skip
    return result


def uncalibrated(model: nn.Module) -> list[str]:
    """The quantizers of activations that have no range yet."""
    names = {id(m): n for n, m in model.named_modules()}
    return [
        f"{names[id(module)]}.{attribute}".lstrip(".")
        for module, attribute, weight in quantizers_of(model)
        if not weight and amax_of(getattr(module, attribute)) is None
    ]


class _Seen:
    """The statistics of each quantizer's tensor, fed by :func:`qdqtool.qat.modules.observing`.

    Attributes:
        images: How many the batch has that runs now.
    """

    def __init__(self, members: dict[tuple[int, str], tuple[str, nn.Module]]) -> None:
        self.statistics: dict[str, DeviceStatistics] = defaultdict(DeviceStatistics)
        self.images = 1
        self._members = members

    def __call__(self, module: nn.Module, attribute: str, value: Tensor) -> None:
        name = self._members.get((id(module), attribute))
        if name is not None:
            self.statistics[name[0]].add(value, max(self.images, 1))


def _look(
    model: nn.Module, plan: Plan, data: Any, fn: Callable[[Any], Any] | None, seen: _Seen,
    max_batches: int | None, total: int | None,
) -> tuple[int, int]:  # fmt: skip
    """Runs the network on the batches; how many there were, and how many images."""
    device = device_of(model)
    given = batches_of(data, plan)
    count = length_of(given)
    if count is not None and max_batches is not None:
        count = min(count, max_batches)
    batches = images = 0
    with evaluating(model), observing(seen), resting(model, plan.counted):
        for batch in track(given, "Calibrating", count or total):
            if max_batches is not None and batches >= max_batches:
                break
            call = call_for(batch, plan, model, fn)
            seen.images = int(call.tensors[0].shape[0]) if call.tensors[0].ndim else 1
            try:
                call.on(model, device)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise DataError(
                    f"batch {batches}: the network cannot be called with it ({reason}); say with fn= what of a batch "
                    "it is called with"
                ) from error
            batches += 1
            images += seen.images
    if not batches:
        raise DataError("no calibration data: the iterable gave no batch")
    return batches, images


@contextmanager
def _worded() -> Iterator[None]:
    """Errors of the shared rooms name options of the command line; here they are arguments."""
    try:
        yield
    except QdqtoolError as error:
        raise type(error)(as_arguments(str(error))) from error


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
