"""``qat.calibrate``: ranges of the activations from data, one for each group of tensors."""

import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, distributed, nn

from calibration import TensorStatistics
from calibration.statistics import OCTAVES, merge_all, top_exponent
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.insertion.scales import LEVELS, GroupScale, MethodChoice, ScaleGroup, choose_scale
from qdqtool.qat.calls import NetworkCall, device_of, evaluation_mode
from qdqtool.qat.modules import QuantizerReference, find_quantizers, observe_activations, set_amax
from qdqtool.qat.networks import unwrap
from qdqtool.qat.planning import Plan
from qdqtool.qat.preparation import read_plan
from qdqtool.qat.sites import QuantizerSite, pause_idle_watchers
from qdqtool.util.notes import Note
from qdqtool.util.progress import track
from qdqtool.util.said import said
from qdqtool.util.text import reason_of

FEW_IMAGES = 16  # images; with fewer the largest values have hardly been seen


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
    warnings: list[Note] = field(default_factory=list)


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
    """Sets the range (amax) of every activation quantizer from data.

    The network runs in evaluation mode with nothing quantized, on the device it is on; statistics are collected there.
    Quantizers that share a scale get the range that suits all their tensors (see
    :func:`qdqtool.insertion.scales.choose_scale`). The quantizers stay the backend's own: its calibrators can be used
    instead of this. A progress bar is drawn on a terminal.

    Args:
        model: A network that :func:`qdqtool.qat.prepare` was called on, or its wrapper.
        data: Batches as a loader gives them: tensors, tuples of images and labels, dicts, uint8; see
            :func:`qdqtool.qat.ranges.convert_batch`.
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
        QdqtoolError: The network was not prepared, a method is unknown, a pattern matches nothing, or ``max_batches``
            is below 1.
        DataError: There is no data, the network cannot be called with it, or a quantizer saw none of it, or NaN.
    """
    if together is None:
        together = isinstance(
            getattr(model, "_orig_mod", model), nn.parallel.DistributedDataParallel
        )
    together &= (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
    model = unwrap(model)
    plan = read_plan(model)
    members = _select_quantizers(model, plan)
    choice = MethodChoice(method, tuple(method_for), percentile)
    choice.check([q.name for q in members.values()])
    check_max_batches(max_batches)
    found, batches, images, failed = dict[str, TensorStatistics](), 0, 0, None
    try:
        found, batches, images = _collect_statistics(
            model, plan, data, fn, members, max_batches, total
        )
    except Exception as error:  # also of the user's
        if not together:
            raise
        failed = error  # the other processes are waiting
    if together:
        found, (batches, images) = gather_statistics(found, (batches, images), failed)
    groups: dict[int, tuple[nn.Module, list[str]]] = {}
    for q in members.values():
        if q.name not in found:
            raise DataError(
                f"quantizer '{q.name}' saw no data: its module was not called in evaluation mode (an expert or branch "
                "that these batches do not reach); exclude it, or give batches that reach it",
                code="quantizer-without-data",
                node=q.name,
            )
        groups.setdefault(id(q.quantizer), (q.quantizer, []))[1].append(q.name)
    result = Calibration([], batches, images)
    device = device_of(model)
    for quantizer, tensors in groups.values():
        group = ScaleGroup(tuple(tensors), tuple(tensors), tuple(tensors))
        scale, warned = choose_scale(group, found, choice)
        set_amax(quantizer, torch.tensor(scale.scale * LEVELS, dtype=torch.float32, device=device))
        result.scales.append(scale)
        result.warnings.extend(warned)
    if images < FEW_IMAGES:
        warnings.warn(
            f"calibrated with {images} image{'s' * (images != 1)}: ranges of so few say little about others; give a "
            "hundred or more that look like those in use",
            UserWarning,
            stacklevel=3,
        )
    return result


def _collect_statistics(
    model: nn.Module,
    plan: Plan,
    data: Any,
    fn: Callable[[Any], Any] | None,
    members: dict[tuple[int, str], QuantizerReference],
    max_batches: int | None,
    total: int | None,
) -> tuple[dict[str, TensorStatistics], int, int]:
    """Runs the network on the batches: statistics by the quantizer's name, how many batches there were and images."""
    device = device_of(model)
    given = as_batches(data, plan)
    count = count_batches(given)
    if count is not None and max_batches is not None:
        count = min(count, max_batches)
    batches = images = now = 0
    statistics: dict[str, DeviceStatistics] = defaultdict(DeviceStatistics)

    def seen(module: nn.Module, attribute: str, value: Tensor) -> None:
        member = members.get((id(module), attribute))
        if member is not None:
            statistics[member.name].add(value, max(now, 1))

    with (
        evaluation_mode(model),
        observe_activations(seen),
        pause_idle_watchers(model, plan.counted),
    ):
        for batch in track(iter(given), "Calibrating", count or total):
            if max_batches is not None and batches >= max_batches:
                break
            call = convert_batch(batch, plan, model, fn)
            if not all(t.numel() for t in call.tensors):
                raise DataError(
                    f"batch {batches}: {call} hold no value; leave empty batches out",
                    code="empty",
                    parameter="data",
                )
            now = int(call.tensors[0].shape[0]) if call.tensors[0].ndim else 1
            run_batch(model, call, device, batches)
            batches += 1
            images += now
    if not batches:
        raise DataError(
            "no calibration data: the iterable gave no batch", code="no-batches", parameter="data"
        )
    return {name: s.result for name, s in statistics.items()}, batches, images


def run_batch(model: nn.Module, call: NetworkCall, device: torch.device, number: int) -> Any:
    """What the network makes of a batch.

    Raises:
        DataError: It cannot be called with it.
    """
    try:
        return call.run(model, device)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = reason_of(error, first_line=True)
        raise DataError(
            f"batch {number}: the network cannot be called with it ({reason}); say with fn= what of a "
            "batch it is called with",
            code="wrong-call",
            parameter="data",
        ) from error


def _select_quantizers(model: nn.Module, plan: Plan) -> dict[tuple[int, str], QuantizerReference]:
    """From module and attribute to the quantizer; one for each tensor, so that none counts twice."""
    tensors = {a.site: a.tensor for a in plan.activations}
    members: dict[tuple[int, str], QuantizerReference] = {}  # by quantizer and tensor
    for q in find_quantizers(model):
        call = next((c for c, a in q.module.qdq_calls.items() if a == q.attribute), ("input", 0, 0))
        if not q.is_weight:
            members.setdefault(
                (id(q.quantizer), tensors.get(QuantizerSite(q.owner, *call), q.name)), q
            )
    return {(id(q.module), q.attribute): q for q in members.values()}


# Batches as people's loaders give them, turned into calls of the network --------------------------------------------

_IMAGE_KEYS = ("img", "image", "images", "pixel_values", "inputs", "input", "x")
_HELP = "say with fn=lambda batch: ... what of a batch the network is called with"


def as_batches(data: Any, plan: Plan) -> Iterable[Any]:
    """The batches; one tensor of a batch's shape is one batch.

    Raises:
        DataError: It is nothing that gives batches.
    """
    if isinstance(data, Tensor | np.ndarray):
        if data.ndim == plan.dimensions:
            return [data]
        if data.ndim == plan.dimensions + 1:
            return list(data)
        raise DataError(
            f"the data is a tensor of shape {tuple(data.shape)}; give batches like the sample",
            code="wrong-shape",
            parameter="data",
        )
    if isinstance(data, dict | str | bytes) or not isinstance(data, Iterable):
        raise DataError(
            f"the data is a {type(data).__name__}; give something that yields batches, like a loader",
            code="wrong-type",
            parameter="data",
        )
    return data


def _to_tensor(array: npt.NDArray[Any]) -> Tensor:
    """Of an array in any order of bytes and of elements, copied where torch has no such order, as of ``[::-1]``.

    Raises:
        DataError: It holds no numbers.
    """
    if not array.dtype.isnative or any(
        step < 0 or step % array.itemsize for step in array.strides if array.itemsize
    ):
        array = np.asarray(array, array.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise DataError(
            f"the data is an array that torch does not take: {reason_of(error)}",
            code="unsupported-array",
            parameter="data",
        ) from error


def check_max_batches(max_batches: int | None) -> None:
    """Refuses a number of batches that leaves none.

    Raises:
        QdqtoolError: It is below 1.
    """
    if max_batches is not None and max_batches < 1:
        raise QdqtoolError(
            said("{`max_batches`:{count}}: is below 1", count=max_batches),
            code="out-of-range",
            parameter="max_batches",
        )


def count_batches(data: Any) -> int | None:
    """How many batches there are, where that is known."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except Exception:  # a loader over an iterable dataset has a length that raises
        return None


def convert_batch(
    batch: Any, plan: Plan, model: nn.Module, fn: Callable[[Any], Any] | None
) -> NetworkCall:
    """What the network is called with.

    Without ``fn`` a tensor is the argument; of a tuple or list the first elements are taken, as many as the sample had
    (images, not labels); of a dict those that the sample or the network's ``forward`` names, else its images
    (``img``, ``image`` ...). uint8 images become floats from 0 to 1.

    Raises:
        DataError: None of that fits.
    """
    if fn is not None:
        batch = fn(batch)
    if isinstance(batch, np.ndarray):
        batch = _to_tensor(batch)
    if isinstance(batch, Tensor):
        call = NetworkCall((batch,))
    elif isinstance(batch, list | tuple):
        if fn is None and len(batch) > max(1, plan.arguments):
            batch = batch[: max(1, plan.arguments)]
        call = NetworkCall(tuple(batch))
    elif isinstance(batch, dict):
        call = _convert_dict(batch, plan, model)
    else:
        raise DataError(
            f"a batch is a {type(batch).__name__}; {_HELP}", code="wrong-type", parameter="data"
        )
    if not call.tensors:
        raise DataError(
            f"a batch has no tensor for the network; {_HELP}",
            code="batch-without-tensor",
            parameter="data",
        )
    return call.map(_to_float)


def _convert_dict(batch: dict[str, Any], plan: Plan, model: nn.Module) -> NetworkCall:
    if plan.keywords and set(plan.keywords) <= set(batch):
        return NetworkCall((), {k: batch[k] for k in plan.keywords})
    # Ultralytics' networks compute a loss when they are called with a dict; here they are called with its images.
    key = next((k for k in _IMAGE_KEYS if isinstance(batch.get(k), Tensor)), None)
    parameters = inspect.signature(model.forward).parameters
    if set(batch) <= set(parameters):
        return NetworkCall((), dict(batch))
    if key is not None:
        return NetworkCall((batch[key],))
    raise DataError(
        f"a batch is a dict with {', '.join(map(str, list(batch)[:6]))}; {_HELP}",
        code="unknown-keys",
        parameter="data",
    )


def _to_float(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = _to_tensor(value)
    if not isinstance(value, Tensor) or value.dtype is not torch.uint8:
        return value
    warnings.warn(
        "uint8 batches are divided by 255, as Ultralytics does; where the network wants something else, use fn=",
        UserWarning,
        stacklevel=2,
    )
    return value.float() / 255


# Statistics of activations, collected on the device that they are on ------------------------------------------------

# Of a tensor with more values than this to an image, runs of values are counted, evenly spread, half as many or more
# altogether; the smallest and largest are always exact.
SAMPLED_PER_IMAGE = 1 << 13
# No layout repeats with the length of a run: widths and channels are products of small primes.
RUN_LENGTH = 61
# So much further on in the period each call starts: however many there are, their starts are spread evenly.
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
# Resolution of the histograms: no bin is wider than 0.4 % of the largest magnitude, finer than ranges are searched.
HISTOGRAM_BINS = 512
# Values that are kept until they are counted together: counting takes a dozen kernels and waits for the device, so
# that it happens once in several calls. They are copied to 512 kB for each tensor that are there from the first call to
# the last: small copies among the activations would keep the memory of these from being used again.
BUFFER_SIZE = 1 << 17


class DeviceStatistics:
    """Collects what :class:`calibration.TensorStatistics` holds, without bringing the values to the CPU.

    Only counts (at most 5121 integers) and the ends of each call leave the device, once in several calls.
    """

    def __init__(self) -> None:
        self._result = TensorStatistics(HISTOGRAM_BINS)
        self._calls = 0
        self._buffer: Tensor | None = None
        self._ends: list[Tensor] = []
        self._size = 0

    @property
    def result(self) -> TensorStatistics:
        """What was seen so far. Of large tensors that held NaN or infinities, the sampled ones are counted."""
        self._count()
        return self._result

    def add(self, values: Tensor, images: int = 1) -> None:
        """Takes in an activation of any shape, floating type and device, of so many images."""
        size = values.numel()
        if not size:
            return
        # No call of torch more than needed: for one small image they cost as much as the layer itself.
        if values.requires_grad:
            values = values.detach()
        if values.dtype is not torch.float32:
            values = values.float()
        if not values.is_contiguous():
            values = _to_memory_order(values)
        ends = torch.aminmax(values)
        sampled = self._sample(values, size, math.ceil(size / (SAMPLED_PER_IMAGE * images)))
        size = sampled.numel()
        if self._buffer is None or self._size + size > len(self._buffer):
            self._count()
            if self._buffer is None or size > len(self._buffer):
                self._buffer = torch.empty(
                    max(size, BUFFER_SIZE), dtype=torch.float32, device=values.device
                )
        self._buffer[self._size : self._size + size].view(sampled.shape).copy_(sampled)
        self._size += size
        self._ends.extend(ends)

    def _sample(self, values: Tensor, size: int, step: int) -> Tensor:
        """All values, or every n-th run of them, from another run on each time."""
        first = int(self._calls * GOLDEN_RATIO % 1.0 * step)
        self._calls += 1
        if step == 1:
            return values
        runs = (size // RUN_LENGTH - first + step - 1) // step
        return values.as_strided(
            (runs, RUN_LENGTH), (step * RUN_LENGTH, 1), values.storage_offset() + first * RUN_LENGTH
        )

    def _count(self) -> None:
        if self._buffer is None or not self._ends:
            return
        sampled, ends = self._buffer[: self._size], torch.stack(self._ends).cpu()
        self._ends, self._size = [], 0
        stats = self._result
        if not bool(torch.isfinite(ends).all()):
            finite = torch.isfinite(sampled)
            stats.nonfinite += max(1, int((~finite).sum()))
            sampled = sampled[finite]
            ends = ends[torch.isfinite(ends)]
            if sampled.numel():
                ends = torch.cat([ends, torch.stack(torch.aminmax(sampled)).cpu()])
        if not ends.numel():
            return
        low, high = (float(v) for v in torch.aminmax(ends))
        stats.minimum, stats.maximum = min(stats.minimum, low), max(stats.maximum, high)
        stats.count += sampled.numel()
        counter = stats.counter
        counter.raise_top(top_exponent(max(-low, high)))
        lowest = ((counter.top - OCTAVES + 127) << counter.bits) - 1  # see calibration.statistics
        bins = (
            sampled.view(torch.int32)
            .bitwise_and_(0x7FFFFFFF)
            .bitwise_right_shift_(23 - counter.bits)
        )
        counts = torch.bincount(
            bins, minlength=lowest + 1
        )  # bins of all float32; below the window they are one
        counts[lowest] = counts[: lowest + 1].sum()
        found = counts[lowest:].cpu().numpy()
        counter.counts[: len(found)] += found


def _to_memory_order(values: Tensor) -> Tensor:
    """The values in the order in which they lie in memory, contiguous, without a copy where that is possible."""
    order = sorted(range(values.ndim), key=lambda d: -values.stride(d))
    return values.permute(order).contiguous()


# One set of statistics from the data of all processes of torch.distributed ------------------------------------------


def gather_statistics(
    statistics: dict[str, TensorStatistics], counts: tuple[int, int], failed: Exception | None
) -> tuple[dict[str, TensorStatistics], tuple[int, int]]:
    """Everybody's statistics merged and counts added, the same in every process; each of them has to call this.

    It gives its own statistics by name, its counts, and what went wrong there.

    Raises:
        DataError: Something went wrong in one of the processes; what is no error of ours is raised as it is in its own.
    """
    ours = failed is None or isinstance(failed, QdqtoolError)
    wrong = "" if failed is None else str(failed) if ours else f"{type(failed).__name__}: {failed}"
    everybody: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everybody, (statistics, counts, wrong))
    if failed is not None and not ours:
        raise failed
    for rank, (_, _, wrong) in enumerate(everybody):
        if wrong:
            raise DataError(f"process {rank}: {wrong}", code="failed-elsewhere")
    names = list(dict.fromkeys(name for found, _, _ in everybody for name in found))
    merged = {n: merge_all([found[n] for found, _, _ in everybody if n in found]) for n in names}
    return merged, (sum(c[0] for _, c, _ in everybody), sum(c[1] for _, c, _ in everybody))
