"""``qat.disable``, ``enable``, ``sensitivity``: switch quantizers, and measure the effect."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from qdqtool.errors import DataError, QdqtoolError
from qdqtool.qat.batches import (
    as_batches,
    convert_batch,
    limit_batches,
    run_batch,
)
from qdqtool.qat.calls import NetworkCall, evaluation_mode, find_device
from qdqtool.qat.checking import flatten_tensors, largest_difference
from qdqtool.qat.modules import QuantizedModule, QuantizerReference, find_quantizers
from qdqtool.qat.networks import override_attributes, unwrap_network
from qdqtool.qat.preparation import read_plan
from qdqtool.util.checks import compile_pattern
from qdqtool.util.progress import track_progress


def disable(model: nn.Module | Any, patterns: str | Sequence[str] = ()) -> list[str]:
    """Disable quantizers. A disabled quantizer passes values unchanged and is not exported.

    Args:
        model: A prepared network, or its wrapper.
        patterns: Regular expressions (``re.search``) on ``<module>.<quantizer>``. Empty: all
            quantizers.

    Returns:
        Names of all quantizers that are disabled after the call.

    Raises:
        QdqtoolError: The network was not prepared, or a pattern matches no quantizer.
    """
    return _switch_quantizers(model, patterns, off=True)


def enable(model: nn.Module | Any, patterns: str | Sequence[str] = ()) -> list[str]:
    """Enable disabled quantizers; see :func:`disable`.

    Returns:
        Names of the quantizers that are still disabled.

    Raises:
        QdqtoolError: The network was not prepared, or a pattern matches no quantizer.
    """
    return _switch_quantizers(model, patterns, off=False)


@contextmanager
def disabled(model: nn.Module | Any, patterns: str | Sequence[str] = ()) -> Iterator[None]:
    """Disable quantizers until the context ends; see :func:`disable`.

    Inside ``with qat.disabled(model): ...`` the whole network is float. The end of the context
    restores the state of each quantizer.

    Raises:
        QdqtoolError: The network was not prepared, or a pattern matches no quantizer.
    """
    model = unwrap_network(model)
    before = [(m, m.qdq_off) for m in model.modules() if isinstance(m, QuantizedModule)]
    disable(model, patterns)
    try:
        yield
    finally:
        for module, off in before:
            module.qdq_off = off


def _match_quantizers(
    quantizers: Sequence[QuantizerReference], pattern: str
) -> list[QuantizerReference]:
    search = compile_pattern(pattern, f"'{pattern}'").search
    matches = [q for q in quantizers if search(q.name)]
    if not matches:
        raise QdqtoolError(
            f"'{pattern}' matches no quantizer; use names such as '{quantizers[0].name}'",
            code="no-match",
            parameter="patterns",
        )
    return matches


def _switch_quantizers(model: nn.Module, patterns: str | Sequence[str], off: bool) -> list[str]:
    model = unwrap_network(model)
    read_plan(model)
    quantizers = list(find_quantizers(model))
    patterns = [patterns] if isinstance(patterns, str) else patterns
    selected = [] if patterns else quantizers
    for pattern in patterns:
        selected += _match_quantizers(quantizers, pattern)
    for q in selected:
        if off:
            q.module.qdq_off |= {q.attribute}
        else:
            q.module.qdq_off -= {q.attribute}
    return [q.name for q in quantizers if q.attribute in q.module.qdq_off]


@dataclass(frozen=True)
class Sensitivity:
    """Accuracy loss of a network in which a single layer is quantized.

    Attributes:
        module: Name of the layer.
        loss: Decrease of ``metric`` from that of the float network. Without a metric, the largest
            change of an output in a batch: the root mean square of the change, divided by the
            standard deviation of the output.
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
    """Measure the accuracy loss of each layer if only this layer is quantized.

    The list has the layers with the largest losses first. ``exclude`` of
    :func:`qdqtool.qat.prepare` leaves such layers float, and :func:`disable` disables their
    quantizers.

    Args:
        model: A calibrated network, or its wrapper.
        data: A few batches, as for :func:`qdqtool.qat.calibrate`. They are kept in memory. If
            `metric` is given, `data` is not used.
        fn: As for :func:`qdqtool.qat.calibrate`.
        metric: Function that evaluates the network and returns a number such as the mAP (higher is
            better). It is called once for each layer and once for the float network.
        max_batches: Maximum number of batches that are compared without a metric; None for
            all.

    Raises:
        QdqtoolError: The network was not prepared, or ``max_batches`` is below 1.
        DataError: The data is empty, or the network cannot be called with the data.
    """
    network = unwrap_network(model)
    plan = read_plan(network)
    modules = dict(network.named_modules())
    calls: list[NetworkCall] = []
    if not metric:
        batches = limit_batches(as_batches(data, plan), max_batches)
        calls = [convert_batch(batch, plan, network, fn) for batch in batches]
        if not calls:
            raise DataError(
                "no data: the iterable is empty; give batches", code="no-batches", parameter="data"
            )
    device = find_device(network)

    def run() -> list[Tensor]:
        with evaluation_mode(network):
            results = [run_batch(network, call, device, n) for n, call in enumerate(calls)]
            return flatten_tensors(results)

    with disabled(network):
        reference = run()
        best = metric(network) if metric else 0.0
        losses = []
        for name in track_progress(plan.convolutions, "Sensitivity"):
            with override_attributes(modules[name], qdq_off=frozenset()):
                loss = best - metric(network) if metric else largest_difference(run(), reference)
            losses.append(Sensitivity(name, loss))
    return sorted(losses, key=lambda s: -s.loss)
