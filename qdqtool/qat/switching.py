"""Quantizers switched off and on, for comparisons and to find the layers that cost most."""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from qdqtool.errors import DataError, QdqtoolError
from qdqtool.qat.batches import (
    as_batches,
    check_max_batches,
    convert_batch,
    run_batch,
)
from qdqtool.qat.calls import device_of, evaluation_mode
from qdqtool.qat.checking import flatten_tensors, largest_difference
from qdqtool.qat.modules import QuantizedModule, find_quantizers
from qdqtool.qat.networks import override_attributes, unwrap
from qdqtool.qat.preparation import read_plan
from qdqtool.util.checks import compile_pattern
from qdqtool.util.progress import track


def disable(model: nn.Module | Any, patterns: str | Sequence[str] = ()) -> list[str]:
    """Lets values pass quantizers unchanged, in training, evaluation and the export (which then writes no Q/DQ there).

    Args:
        model: A prepared network, or its wrapper.
        patterns: Regular expressions (``re.search``) on ``<module>.<quantizer>``; none means every quantizer.

    Returns:
        The names of the quantizers that are off now.

    Raises:
        QdqtoolError: The network was not prepared, or a pattern matches nothing.
    """
    return _switch(model, patterns, off=True)


def enable(model: nn.Module | Any, patterns: str | Sequence[str] = ()) -> list[str]:
    """Switches quantizers on again; see :func:`disable`.

    Returns:
        The names of the quantizers that are still off.

    Raises:
        QdqtoolError: The network was not prepared, or a pattern matches nothing.
    """
    return _switch(model, patterns, off=False)


@contextmanager
def disabled(model: nn.Module | Any, patterns: str | Sequence[str] = ()) -> Iterator[None]:
    """:func:`disable` for a while: ``with qat.disabled(model): ...`` is the float network.

    Raises:
        QdqtoolError: The network was not prepared, or a pattern matches nothing.
    """
    model = unwrap(model)
    before = [(m, m.qdq_off) for m in model.modules() if isinstance(m, QuantizedModule)]
    disable(model, patterns)
    try:
        yield
    finally:
        for module, off in before:
            module.qdq_off = off


def _switch(model: nn.Module, patterns: str | Sequence[str], off: bool) -> list[str]:
    model = unwrap(model)
    read_plan(model)
    found = list(find_quantizers(model))
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    chosen = [] if listed else found
    for pattern in listed:
        compiled = compile_pattern(pattern, f"'{pattern}'")
        hits = [q for q in found if compiled.search(q.name)]
        if not hits:
            raise QdqtoolError(
                f"'{pattern}': matches no quantizer; names look like '{found[0].name}'",
                code="no-match",
                parameter="patterns",
            )
        chosen += hits
    for q in chosen:
        q.module.qdq_off = (
            q.module.qdq_off | {q.attribute} if off else q.module.qdq_off - {q.attribute}
        )
    return [q.name for q in found if q.attribute in q.module.qdq_off]


@dataclass(frozen=True)
class Sensitivity:
    """What quantizing one layer alone costs.

    Attributes:
        module: The layer.
        loss: What ``metric`` lost by it; without a metric the root mean square of what changes in the outputs, divided
            by their standard deviation (the largest over all outputs).
    """

    module: str
    loss: float


def sensitivity(
    model: nn.Module | Any,
    data: Any,
    *,
    fn: Callable[[Any], Any] | None = None,
    metric: Callable[[nn.Module], float] | None = None,
    max_batches: int | None = 4,
) -> list[Sensitivity]:
    """Quantizes one layer at a time, everything else float, and says how much it costs; the worst first.

    Leave the worst out with ``exclude=`` in :func:`qdqtool.qat.prepare`, or :func:`disable` them.

    Args:
        model: A calibrated network, or its wrapper.
        data: Batches, as for :func:`qdqtool.qat.calibrate`; kept in memory, so a list of a few.
        fn: As for :func:`qdqtool.qat.calibrate`.
        metric: Called with the network; higher is better, as mAP. It costs one evaluation for each layer.
        max_batches: How many batches are compared without a metric.

    Raises:
        QdqtoolError: The network was not prepared, or ``max_batches`` is below 1.
        DataError: There is no data, or the network cannot be called with it.
    """
    model = unwrap(model)
    plan = read_plan(model)
    layers = plan.convolutions
    owned = {name: module for name, module in model.named_modules() if name in set(layers)}
    check_max_batches(max_batches)
    most = None if max_batches is None else min(max_batches, sys.maxsize)
    given = () if metric else itertools.islice(as_batches(data, plan), most)
    calls = [convert_batch(batch, plan, model, fn) for batch in given]
    if not metric and not calls:
        raise DataError("no data: the iterable gave no batch", code="no-batches", parameter="data")
    device = device_of(model)

    def outputs() -> list[Tensor]:
        with evaluation_mode(model):
            return [
                t
                for n, call in enumerate(calls)
                for t in flatten_tensors(run_batch(model, call, device, n))
            ]

    with disabled(model):
        reference = outputs()
        best = metric(model) if metric else 0.0
        result = []
        for name in track(layers, "Sensitivity"):
            with override_attributes(owned[name], qdq_off=frozenset()):
                loss = best - metric(model) if metric else largest_difference(outputs(), reference)
            result.append(Sensitivity(name, loss))
    return sorted(result, key=lambda s: -s.loss)
