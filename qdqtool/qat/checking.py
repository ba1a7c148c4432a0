"""Whether a Q/DQ model computes what the network it was exported from computes.

A network with quantizers is not continuous: sums in another order flip single integer steps, and later layers pass
them on. Between single and double precision of one and the same network the outputs of a YOLOv8n already differ by a
tenth of their standard deviation. So two things are asked:

* piece by piece, where nothing can add up: every part of the graph between two quantizers gets from the network what
  its quantizers let through, and has to make of it what the network makes of it, to float precision; and every Q/DQ
  pair has the quantizer's scale;
* end to end, relative to the network's own noise: single against double precision, and what comes out when everything
  that arrives at a quantizer is changed at random by as much as the pieces were found to differ by rounding.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from torch import Tensor, nn

from calibration.session import partial_model
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.ir import qdq
from qdqtool.ir.graph import Model, Node
from qdqtool.qat.calls import NetworkCall, evaluation_mode
from qdqtool.qat.modules import compute_scale, observe_quantizers
from qdqtool.runtime.sessions import open_session
from qdqtool.util.text import reason_of

# Root mean square errors relative to standard deviations. A piece differs by float rounding (1e-6), and by single
# weights that folding BatchNormalization moves over the edge of an integer; a lost Q/DQ pair by a hundredth and more.
PIECE_TOLERANCE = 2e-3
END_TO_END_TOLERANCE = 0.05
NOISE_FACTOR = 5.0  # end to end may differ by so many times the network's own noise
# Integer steps that flip are few and far between, and each may matter: several draws, of more than was found.
_NOISE_RUNS = 3
_NOISE_MARGIN = 4.0
_ROUNDING = 1e-6
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Check:
    """How far a Q/DQ model is from its network, on the sample.

    Attributes:
        difference: End to end: root mean square of onnxruntime's outputs minus the network's, divided by their
            standard deviation; the largest over all outputs.
        noise: The same between the network and itself: in double precision, and with rounding errors at random of the
            size that the parts were found to have; the largest.
        pieces: How many parts of the graph were compared one by one.
        worst: The largest difference of one part.
        worst_at: Which, by its quantizer or output.
    """

    difference: float
    noise: float
    pieces: int
    worst: float
    worst_at: str

    def text(self) -> str:
        """One line."""
        said = (
            f"{self.pieces} pieces agree to {self.worst:.1e}; end to end {self.difference:.1e} of the outputs' "
            f"standard deviation, the network's own noise is {self.noise:.1e}"
        )
        return (
            said
            if self.end_to_end_shows
            else f"{said}; end to end shows nothing: the pieces alone protect"
        )

    @property
    def end_to_end_shows(self) -> bool:
        """Whether a wrong model would stand out end to end: the noise that is allowed is less than the outputs."""
        return NOISE_FACTOR * self.noise < 1.0


@dataclass
class ReferenceRun:
    """What the network computes.

    Attributes:
        outputs: Its results, in the order in which torch exports them.
        calls: Of each quantizer of activations that ran, in order: its name, scale, values before, values after.
    """

    outputs: list[Tensor]
    calls: list[tuple[str, float, Tensor, Tensor]]


def randomize_constants(call: NetworkCall) -> NetworkCall:
    """The sample, with random values from 0 to 1 for tensors of one value: on zeros every wrong scale looks right."""
    generator = torch.Generator().manual_seed(0)

    def filled(value: Any) -> Any:
        flat = isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1
        if flat and bool((value == value.reshape(-1)[0]).all()):
            return torch.rand(value.shape, generator=generator, dtype=torch.float32).to(value)
        return value

    return call.map(filled)


def record_reference(twin: nn.Module, call: NetworkCall) -> ReferenceRun:
    """Runs a prepared network (on the CPU, in evaluation mode) and remembers what its quantizers saw."""
    names = {id(m): n for n, m in twin.named_modules()}
    calls: list[tuple[str, float, Tensor, Tensor]] = []

    def seen(module: nn.Module, attribute: str, before: Tensor, after: Tensor) -> None:
        scale = float(compute_scale(getattr(module, attribute), before))
        calls.append(
            (f"{names[id(module)]}.{attribute}".lstrip("."), scale, before.detach(), after.detach())
        )

    try:
        with evaluation_mode(twin), observe_quantizers(seen):
            return ReferenceRun(flatten_tensors(call.run(twin, "cpu")), calls)
    except QdqtoolError:
        raise
    except Exception as error:  # of the network's own code, or of torch
        reason = reason_of(error, first_line=True)
        raise ModelError(
            f"{type(twin).__name__}: cannot be called with the sample ({call}): {reason}; give what the "
            "network was prepared with",
            code="wrong-call",
            parameter="sample",
        ) from error


class NoiseInjector:
    """Changes what arrives at quantizers at random, the n-th call by its own size.

    Attributes:
        sizes: For each call the standard deviation of the change, relative to that of the values.
        random: Where the changes come from; None for none.
    """

    def __init__(self, sizes: Sequence[float]) -> None:
        self.sizes = sizes
        self.random: torch.Generator | None = None
        self._call = 0

    def start(self, seed: int | None) -> None:
        """From the first call on; None for no change."""
        self.random = None if seed is None else torch.Generator().manual_seed(seed)
        self._call = 0

    def __call__(self, x: Tensor) -> Tensor:
        size = self.sizes[self._call] if self._call < len(self.sizes) else _ROUNDING
        self._call += 1
        if self.random is None:
            return x
        change = torch.randn(x.shape, generator=self.random, dtype=torch.float32).to(x)
        return x + change * (size * float(x.std(unbiased=False)))


def measure_noise(
    twin: nn.Module, call: NetworkCall, outputs: Sequence[Tensor], noise: NoiseInjector
) -> float:
    """How far the outputs are from the same network's in double precision, or shaken; the largest.

    The network's quantizers let their values pass ``shaking`` first; its ``outputs`` are those in single precision.
    """
    worst = 0.0
    with evaluation_mode(twin):
        for seed in range(_NOISE_RUNS):
            noise.start(seed)
            worst = max(worst, largest_difference(outputs, flatten_tensors(call.run(twin, "cpu"))))
        noise.start(None)
        # A network with a type written into its code does not run in double precision.
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            worst = max(
                worst,
                largest_difference(
                    outputs, flatten_tensors(call.run(twin.double(), "cpu", torch.float64))
                ),
            )
    return worst


def flatten_tensors(value: Any) -> list[Tensor]:
    """The tensors in a network's result, in the order in which torch exports them."""
    if isinstance(value, Tensor):
        return [value.detach()]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [t for v in value for t in flatten_tensors(v)]
    return []


def check_pieces(
    proto: onnx.ModelProto, call: NetworkCall, wanted: ReferenceRun, numbers: dict[str, list[int]]
) -> tuple[Check, NoiseInjector]:
    """Compares the Q/DQ model with what the network computed, piece by piece, and end to end.

    ``numbers`` are those of the quantizer calls that a QuantizeLinear node stands for, by its name.

    Returns:
        The check, with a noise of 0, and the rounding errors that :func:`noise_of` tries.

    Raises:
        ModelError: They do not compute the same, saying where.
    """
    model = Model(proto)
    pairs = _match_pairs(model, wanted, numbers)
    results = _run_pieces(model, call, wanted, pairs)
    sorts = any(n.op in ("TopK", "NonMaxSuppression") for n in model.nodes)
    worst, worst_at = 0.0, ""
    sizes = [_ROUNDING] * len(wanted.calls)
    expected = [(wanted.calls[n][0], wanted.calls[n][2]) for _, n in pairs]
    expected += [
        (f"output '{o.name}'", t) for o, t in zip(proto.graph.output, wanted.outputs, strict=False)
    ]
    for place, ((name, tensor), result) in enumerate(zip(expected, results, strict=True)):
        apart = _relative_difference(result, tensor.numpy())
        if apart > PIECE_TOLERANCE and sorts:  # equal scores come in any order
            apart = _relative_difference(
                np.sort(result, axis=None), np.sort(tensor.numpy(), axis=None)
            )
        if not apart <= worst:
            worst, worst_at = apart, name
        if place < len(pairs):
            for number in numbers[pairs[place][0].name]:
                sizes[number] = max(_ROUNDING, _NOISE_MARGIN * apart)
    if not worst <= PIECE_TOLERANCE:
        raise ModelError(
            f"what arrives at {worst_at} is {worst:.1e} of its standard deviation away from what the network computes "
            f"there, more than {PIECE_TOLERANCE:g}: a Q/DQ pair, a scale, an axis or weights in front of it are not the network's",
            code="different-results",
            node=worst_at,
        )
    difference = _end_to_end(proto, call, wanted.outputs)
    return Check(difference, 0.0, len(results), worst, worst_at), NoiseInjector(sizes)


def _match_pairs(
    model: Model, wanted: ReferenceRun, numbers: dict[str, list[int]]
) -> list[tuple[Node, int]]:
    """Each activation's Q with the number of a call it stands for; scale, type and zero point are the quantizer's."""
    pairs: list[tuple[Node, int]] = []
    missing = set(range(len(wanted.calls)))
    for q in model.ordered:
        if q.op != qdq.Q or model.is_constant(q.input(0)):
            continue
        found = numbers.get(q.name)
        if not found:
            raise ModelError(
                f"'{q.name}' stands for no quantizer of the network",
                code="unknown-quantizer",
                node=q.name,
            )
        name, scale, _, _ = wanted.calls[found[0]]
        for node in (q, *model.consumers(q.output)):
            if node.op not in (qdq.Q, qdq.DQ):
                raise ModelError(
                    f"'{q.name}' is read by '{node.name}', which is not a DequantizeLinear",
                    code="no-dequantizer",
                    node=q.name,
                )
            params = qdq.read_params(model, node)
            found_scale = (
                float("nan")
                if params.scale is None or params.scale.size != 1
                else float(params.scale[0])
            )
            if not np.isclose(found_scale, scale, rtol=1e-5, atol=0):
                has = (
                    "no constant scale" if np.isnan(found_scale) else f"the scale {found_scale:.6g}"
                )
                raise ModelError(
                    f"'{node.name}' has {has}, quantizer '{name}' {scale:.6g}",
                    code="different-scale",
                    node=node.name,
                )
            if str(params.precision) != "INT8" or np.any(params.zero_point):
                raise ModelError(
                    f"'{node.name}' is not symmetric INT8, as quantizer '{name}' is",
                    code="not-symmetric-int8",
                    node=node.name,
                )
        pairs.append((q, found[0]))
        missing -= set(found)
    if missing:
        raise ModelError(
            f"the Q/DQ pair of quantizer '{wanted.calls[min(missing)][0]}' is missing",
            code="missing-pair",
            node=wanted.calls[min(missing)][0],
        )
    return pairs


def _run_pieces(
    model: Model, call: NetworkCall, wanted: ReferenceRun, pairs: Sequence[tuple[Node, int]]
) -> list[Array]:
    """Runs the graph with every activation's Q/DQ pair cut out: what the network's quantizers let through goes in."""
    feeds = _feeds(model.proto, call)
    asked = [*(q.input(0) for q, _ in pairs), *(o.name for o in model.proto.graph.output)]
    given = []
    for q, number in pairs:
        after = wanted.calls[number][3]
        for dq in model.consumers(q.output):
            given.append(
                onnx.helper.make_tensor_value_info(
                    dq.output, onnx.TensorProto.FLOAT, list(after.shape)
                )
            )
            feeds[dq.output] = after.float().numpy()
    made = [t for t in dict.fromkeys(asked) if t not in feeds]
    run = dict(zip(made, _run(partial_model(model, made, given), made, feeds), strict=True))
    return [run[t] if t in run else feeds[t] for t in asked]


def _end_to_end(proto: onnx.ModelProto, call: NetworkCall, wanted: Sequence[Tensor]) -> float:
    worst = 0.0
    for result, tensor in zip(_run(proto, None, _feeds(proto, call)), wanted, strict=False):
        if result.shape != tuple(tensor.shape):
            shape = tuple(tensor.shape)
            raise ModelError(
                f"an output has shape {result.shape} in onnxruntime and {shape} in the network",
                code="wrong-shape",
            )
        worst = max(worst, _relative_difference(result, tensor.numpy()))
    return worst


def _feeds(proto: onnx.ModelProto, call: NetworkCall) -> dict[str, Array]:
    constants = {t.name for t in proto.graph.initializer}
    names = [i.name for i in proto.graph.input if i.name not in constants]
    return {n: t.numpy() for n, t in zip(names, call.tensors, strict=False)}


def _run(proto: onnx.ModelProto, names: list[str] | None, feeds: dict[str, Array]) -> list[Array]:
    try:
        # Without rewriting: Q and DQ are computed as they are there, which is what the network was trained with.
        session = open_session(proto.SerializeToString(), 0, optimize="none")
        wanted = {i.name for i in session.get_inputs()}
        return [
            np.asarray(r)
            for r in session.run(names, {n: a for n, a in feeds.items() if n in wanted})
        ]
    except Exception as error:  # onnxruntime has its own exceptions for each of many reasons
        raise ModelError(
            f"onnxruntime cannot run the exported model: {str(error).splitlines()[0]}",
            code="onnxruntime-failed",
        ) from error


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Root mean square of the difference over the standard deviation of what is expected; the largest of all pairs."""
    pairs = zip(found, expected, strict=False)
    return max(
        (
            _relative_difference(a.cpu().double().numpy(), b.cpu().double().numpy())
            for a, b in pairs
        ),
        default=0.0,
    )


def _relative_difference(result: Array, expected: Array) -> float:
    """Root mean square of the difference over the standard deviation of what is expected; infinite for NaN."""
    if result.shape != expected.shape:
        return float("inf")
    if not expected.size:
        return 0.0
    wanted = expected.astype(np.float64)
    difference = result.astype(np.float64) - wanted
    error = float(np.sqrt(np.mean(difference**2)))
    if not np.isfinite(error):
        same = np.array_equal(result, expected, equal_nan=True)
        return 0.0 if same else float("inf")
    spread = float(wanted.std())
    largest = float(np.abs(wanted).max(initial=0.0))
    return error / max(spread, largest * 1e-3, 1e-30) if error else 0.0
