"""``qat.calibrate``: set the ranges of activation quantizers from data."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn

from calibration import TensorStatistics
from calibration.statistics import merge_all
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.insertion.number_formats import LEVELS
from qdqtool.insertion.scales import GroupScale, MethodChoice, ScaleGroup, choose_scale
from qdqtool.qat.batches import (
    as_batches,
    convert_batch,
    count_batches,
    limit_batches,
    run_batch,
)
from qdqtool.qat.calls import NetworkCall, evaluation_mode, find_device
from qdqtool.qat.device_statistics import DeviceStatistics
from qdqtool.qat.modules import QuantizerReference, find_quantizers, observe_activations, set_amax
from qdqtool.qat.networks import unwrap_network
from qdqtool.qat.planning import Plan
from qdqtool.qat.preparation import read_plan
from qdqtool.qat.sites import QuantizerSite
from qdqtool.util.notes import Note
from qdqtool.util.progress import track_progress
from qdqtool.util.text import format_count

FEW_IMAGES = 16  # fewer images cause a warning, because they rarely show the largest values


@dataclass
class Calibration:
    """Result of a calibration: the new scales of the quantizers.

    Attributes:
        scales: Scale of each group of quantizers that share a range, with its method, and with the
            range that each quantizer of the group would have alone. The name of a quantizer is
            ``<module>.<attribute>``.
        batches: Number of batches that the network processed.
        images: Number of images in the batches.
        warnings: Warnings about the data.
    """

    scales: list[GroupScale]
    batches: int
    images: int = 0
    warnings: list[Note] = field(default_factory=list)


@dataclass
class DataStatistics:
    """Statistics of activations by name of the quantizer, and numbers of batches and images."""

    tensors: dict[str, TensorStatistics] = field(default_factory=dict)
    batches: int = 0
    images: int = 0


def calibrate(
    model: nn.Module | Any,
    data: Iterable[Any],
    method: str = "mse",
    *,
    fn: Callable[[Any], Any] | None = None,
    percentile: float = 99.99,
    method_for: Sequence[tuple[str, str]] = (),
    max_batches: int | None = None,
    total: int | None = None,
    together: bool | None = None,
) -> Calibration:
    """Set the range (amax) of every activation quantizer from calibration data.

    The network runs in evaluation mode with all quantizers disabled. Activations are sampled on the
    device of the network, and their histograms are computed on the CPU. Quantizers that share a
    range get one range for all their tensors (see
    :func:`qdqtool.insertion.scales.choose_scale`). The calibrators of the backend can be used
    instead of this function. A progress bar is drawn if stderr is a terminal.

    Args:
        model: A prepared network (:func:`qdqtool.qat.prepare`), or its wrapper.
        data: Batches of a data loader: tensors, tuples of images and labels, or dicts. Images may
            be uint8. See :func:`qdqtool.qat.batches.convert_batch`.
        method: ``max``, ``percentile``, ``mse`` or ``entropy``, as in :func:`calibration.amax_of`.
        fn: Function that returns the arguments of the network for a batch: a tensor, a tuple of
            arguments or a dict of keyword arguments.
        percentile: Percentage of the magnitudes that the method ``percentile`` does not clip.
        method_for: Pairs of a regular expression on ``<module>.<quantizer>`` and a method. The
            method applies to the quantizers that match.
        max_batches: Maximum number of batches; None for all.
        total: Number of batches for the progress bar, if ``data`` has no length.
        together: Whether all processes of ``torch.distributed`` call this function with different
            data. The ranges are then computed from the data of all processes. None: True if
            ``model`` is wrapped in DistributedDataParallel. If the network is wrapped later,
            DistributedDataParallel copies the ranges of the first process.

    Raises:
        QdqtoolError: The network was not prepared, a method is unknown, a pattern matches no
            quantizer, or ``max_batches`` is below 1.
        DataError: The data is empty, the network cannot be called with the data, or a quantizer
            received no values, NaN or infinities.
    """
    if together is None:
        wrapped = getattr(model, "_orig_mod", model)
        together = isinstance(wrapped, nn.parallel.DistributedDataParallel)
    network = unwrap_network(model)
    plan = read_plan(network)
    members = _select_quantizers(network, plan)
    choice = MethodChoice(method, tuple(method_for), percentile)
    choice.check([q.name for q in members.values()])

    def collect() -> DataStatistics:
        batches = as_batches(data, plan)
        count = count_batches(batches)
        if count is not None and max_batches is not None:
            count = min(count, max_batches)
        tracked = track_progress(limit_batches(batches, max_batches), "Calibrating", count or total)
        calls = (convert_batch(batch, plan, network, fn) for batch in tracked)
        return _collect_statistics(network, plan, calls, members)

    statistics = _collect_in_all_processes(collect) if together and _is_distributed() else collect()
    for q in members.values():
        if q.name not in statistics.tensors:
            raise DataError(
                f"quantizer '{q.name}' received no data: its module does not run in evaluation "
                "mode with these batches. It may be an expert that they do not select, or a branch "
                "for training. Exclude the module, or give batches for which it runs",
                code="quantizer-without-data",
                node=q.name,
            )
    result = Calibration([], statistics.batches, statistics.images)
    device = find_device(network)
    groups: dict[nn.Module, tuple[str, ...]] = defaultdict(tuple)
    for q in members.values():
        groups[q.quantizer] += (q.name,)
    for quantizer, names in groups.items():
        scale, notes = choose_scale(ScaleGroup(names, names, names), statistics.tensors, choice)
        amax = torch.tensor(scale.scale * LEVELS, dtype=torch.float32, device=device)
        set_amax(quantizer, amax)
        result.scales.append(scale)
        result.warnings.extend(notes)
    if result.images < FEW_IMAGES:
        warnings.warn(
            f"calibrated with {format_count(result.images, 'image')}, too few for reliable ranges; "
            "give a hundred or more images like those of the deployment",
            UserWarning,
            stacklevel=2,
        )
    return result


def _collect_statistics(
    model: nn.Module,
    plan: Plan,
    calls: Iterable[NetworkCall],
    members: dict[tuple[int, str], QuantizerReference],
) -> DataStatistics:
    """Run a network with disabled quantizers, and collect statistics of their inputs.

    Args:
        model: Prepared network.
        plan: Plan of the network.
        calls: For each batch, the arguments of the network.
        members: Quantizers to observe, by id of the module and attribute.

    Raises:
        DataError: `calls` or a batch is empty, or the network fails.
    """
    device = find_device(model)
    collectors: dict[str, DeviceStatistics] = defaultdict(DeviceStatistics)
    result = DataStatistics()
    images = 0

    def add(module: nn.Module, attribute: str, value: Tensor) -> None:
        member = members.get((id(module), attribute))
        if member is not None:
            collectors[member.name].add(value, max(images, 1))

    with evaluation_mode(model), observe_activations(add):
        for number, call in enumerate(calls):
            if not all(t.numel() for t in call.tensors):
                raise DataError(
                    f"batch {number} ({call}): a tensor is empty; leave empty batches out",
                    code="empty",
                    parameter="data",
                )
            images = int(call.tensors[0].shape[0]) if call.tensors[0].ndim else 1
            run_batch(model, call, device, number)
            result.batches += 1
            result.images += images
    if not result.batches:
        raise DataError(
            "no calibration data: the iterable is empty; give batches",
            code="no-batches",
            parameter="data",
        )
    result.tensors = {name: collector.result for name, collector in collectors.items()}
    return result


def _select_quantizers(model: nn.Module, plan: Plan) -> dict[tuple[int, str], QuantizerReference]:
    """Return the activation quantizers to observe, by id of the module and attribute.

    If several attributes hold the same quantizer for the same tensor, only the first is returned.
    The tensor is then counted once.
    """
    tensors = {a.site: a.tensor for a in plan.activations}
    members: dict[tuple[int, str], QuantizerReference] = {}  # by quantizer and tensor
    for q in find_quantizers(model):
        if q.is_weight:
            continue
        calls = (call for call, a in q.module.qdq_calls.items() if a == q.attribute)
        site = QuantizerSite(q.owner, *next(calls, ("input", 0, 0)))
        members.setdefault((id(q.quantizer), tensors.get(site, q.name)), q)
    return {(id(q.module), q.attribute): q for q in members.values()}


def _is_distributed() -> bool:
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and bool(distributed.get_world_size() > 1)
    )


def _collect_in_all_processes(collect: Callable[[], DataStatistics]) -> DataStatistics:
    """Collect statistics in every process of torch.distributed, and merge them.

    Raises:
        DataError: A process failed. If the user's code failed with another exception in this
            process, that exception is raised unchanged instead.
    """
    own, failure, message = DataStatistics(), None, ""
    try:
        own = collect()
    except QdqtoolError as error:
        message = str(error)
    except Exception as error:  # from the user's code; raised later, so that no process waits
        failure, message = error, f"{type(error).__name__}: {error}"
    everywhere: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everywhere, (own, message))
    if failure is not None:
        raise failure
    for rank, (_, message) in enumerate(everywhere):
        if message:
            raise DataError(f"process {rank}: {message}", code="failed-elsewhere")
    return _merge_statistics([statistics for statistics, _ in everywhere])


def _merge_statistics(everywhere: Sequence[DataStatistics]) -> DataStatistics:
    parts: dict[str, list[TensorStatistics]] = defaultdict(list)
    for statistics in everywhere:
        for name, tensor in statistics.tensors.items():
            parts[name].append(tensor)
    return DataStatistics(
        {name: merge_all(tensors) for name, tensors in parts.items()},
        sum(statistics.batches for statistics in everywhere),
        sum(statistics.images for statistics in everywhere),
    )
