"""Comparison of a Q/DQ model with the network that it was exported from.

Tiny float differences, such as those of another summation order, change single rounded integers in
a quantized network, and later layers amplify that. The outputs of a YOLOv8n in single and in double
precision already differ by a tenth of their standard deviation. So there are two checks:

* Piece by piece, so that errors cannot add up: every part of the graph between two quantizers gets
  the outputs of the network's quantizers, and has to compute the same as the network except for
  float rounding. Every Q/DQ pair has to have the quantizer's scale.
* End to end, relative to the network's own noise: the difference between single and double
  precision, or with random changes of all quantizers' inputs as large as the pieces' rounding
  errors.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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

# Permitted root mean square error of a piece, relative to the standard deviation. Correct pieces
# differ by float rounding (1e-6) and by single weights that the folding of BatchNormalization moves
# to the next integer; a missing Q/DQ pair causes 0.01 or more.
PIECE_TOLERANCE = 2e-3
END_TO_END_TOLERANCE = 0.05
NOISE_FACTOR = 5.0  # permitted difference end to end, in multiples of the network's own noise
# Noise changes only a few rounded values, but each may change the outputs. So there are several
# runs, and their noise is larger than the measured rounding error.
_NOISE_RUNS = 3
_NOISE_MARGIN = 4.0
_ROUNDING = 1e-6
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Check:
    """Difference between a Q/DQ model and its network, on the sample.

    Attributes:
        difference: Difference end to end: root mean square of onnxruntime's outputs minus the
            network's, divided by their standard deviation; the largest over all outputs.
        noise: Largest such difference between the network and the same network in double
            precision, or with random rounding errors of the size measured in the pieces.
        pieces: Number of pieces (parts of the graph between quantizers) that were compared.
        worst: Largest difference of a piece.
        worst_at: Quantizer or output at the end of the piece with the largest difference.
    """

    difference: float
    noise: float
    pieces: int
    worst: float
    worst_at: str

    def text(self) -> str:
        """Return the result in one line."""
        line = (
            f"{self.pieces} pieces agree to {self.worst:.1e}; the outputs differ by "
            f"{self.difference:.1e} of their standard deviation, and the network's own noise is "
            f"{self.noise:.1e}"
        )
        if self.end_to_end_shows:
            return line
        return (
            f"{line}; this noise hides errors of the whole network, so only the comparison of "
            "single layers is meaningful"
        )

    @property
    def end_to_end_shows(self) -> bool:
        """Whether the check end to end can detect a wrong model.

        It cannot if the permitted difference is as large as the outputs themselves.
        """
        return NOISE_FACTOR * self.noise < 1.0


class QuantizerCall(NamedTuple):
    """One run of a quantizer of activations, with the values before and after it."""

    name: str
    scale: float
    before: Tensor
    after: Tensor


@dataclass
class ReferenceRun:
    """Results of the network.

    Attributes:
        outputs: Outputs, in the order in which torch exports them.
        calls: Calls of quantizers of activations, in the order in which they ran.
    """

    outputs: list[Tensor]
    calls: list[QuantizerCall]


def randomize_constants(call: NetworkCall) -> NetworkCall:
    """Replace constant float tensors of a call by random values from 0 to 1.

    With zeros, wrong scales would not change the outputs.
    """
    generator = torch.Generator().manual_seed(0)

    def randomize(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() < 2:
            return value
        if not bool((value == value.reshape(-1)[0]).all()):
            return value
        return torch.rand(value.shape, generator=generator, dtype=torch.float32).to(value)

    return call.map(randomize)


def record_reference(twin: nn.Module, call: NetworkCall) -> ReferenceRun:
    """Run a prepared network on the CPU; return its outputs and the quantizers' calls."""
    names = {id(m): n for n, m in twin.named_modules()}
    calls: list[QuantizerCall] = []

    def record(module: nn.Module, attribute: str, before: Tensor, after: Tensor) -> None:
        name = f"{names[id(module)]}.{attribute}".lstrip(".")
        scale = float(compute_scale(getattr(module, attribute), before))
        calls.append(QuantizerCall(name, scale, before.detach(), after.detach()))

    try:
        with evaluation_mode(twin), observe_quantizers(record):
            return ReferenceRun(flatten_tensors(call.run(twin, "cpu")), calls)
    except QdqtoolError:
        raise
    except Exception as error:  # of the network's own code, or of torch
        reason = reason_of(error, first_line=True)
        raise ModelError(
            f"{type(twin).__name__}: cannot be called with the sample ({call}): {reason}; give a "
            "sample like that of the preparation",
            code="wrong-call",
            parameter="sample",
        ) from error


class NoiseInjector:
    """Adds random noise to the inputs of quantizers, with a size for each call.

    Attributes:
        sizes: Standard deviation of the noise in each call, relative to the values' own.
        random: Generator of the noise; None for no noise.
    """

    def __init__(self, sizes: Sequence[float]) -> None:
        self.sizes = sizes
        self.random: torch.Generator | None = None
        self._call = 0

    def start(self, seed: int | None) -> None:
        """Start again at the first call, with a new seed; None switches the noise off."""
        self.random = None if seed is None else torch.Generator().manual_seed(seed)
        self._call = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the input values of the next quantizer call with noise added."""
        size = self.sizes[self._call] if self._call < len(self.sizes) else _ROUNDING
        self._call += 1
        if self.random is None:
            return x
        change = torch.randn(x.shape, generator=self.random, dtype=torch.float32).to(x)
        return x + change * (size * float(x.std(unbiased=False)))


def measure_noise(
    twin: nn.Module, call: NetworkCall, outputs: Sequence[Tensor], noise: NoiseInjector
) -> float:
    """Return the largest difference of a network's outputs with noise or in double precision.

    Args:
        twin: Network whose quantizers pass their inputs through ``noise``.
        call: Arguments of the network.
        outputs: The network's outputs in single precision, without noise.
        noise: Noise to switch on and off.
    """

    def measure(dtype: torch.dtype | None = None) -> float:
        return largest_difference(outputs, flatten_tensors(call.run(twin, "cpu", dtype)))

    differences = []
    with evaluation_mode(twin):
        for seed in range(_NOISE_RUNS):
            noise.start(seed)
            differences.append(measure())
        noise.start(None)
        # Networks whose code fixes a dtype fail in double precision; only noise counts then.
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            twin.double()
            differences.append(measure(torch.float64))
    return max(differences)


def flatten_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a network's result, in the order in which torch exports them."""
    if isinstance(value, Tensor):
        return [value.detach()]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [t for v in value for t in flatten_tensors(v)]
    return []


def check_pieces(
    proto: onnx.ModelProto,
    call: NetworkCall,
    reference: ReferenceRun,
    numbers: dict[str, list[int]],
) -> tuple[Check, NoiseInjector]:
    """Compare a Q/DQ model with the network, piece by piece and end to end.

    Args:
        proto: The Q/DQ model.
        call: Arguments of the reference run.
        reference: Results of the network.
        numbers: By name of a QuantizeLinear, the numbers of the quantizer calls that it replaces.

    Returns:
        The check, without the noise, and the rounding errors for :func:`measure_noise`.

    Raises:
        ModelError: A piece of the model computes something else; the message names the piece.
    """
    model = Model(proto)
    pairs = _match_pairs(model, reference, numbers)
    pieces = _run_pieces(model, call, reference, pairs)
    is_sorting = any(n.op in ("TopK", "NonMaxSuppression") for n in model.nodes)
    expected = [(reference.calls[n].name, reference.calls[n].before) for _, n in pairs]
    expected.extend(
        (f"output '{output.name}'", tensor)
        for output, tensor in zip(proto.graph.output, reference.outputs, strict=False)
    )
    worst, worst_at = 0.0, ""
    sizes = [_ROUNDING] * len(reference.calls)
    for index, ((name, tensor), piece) in enumerate(zip(expected, pieces, strict=True)):
        values = tensor.numpy()
        difference = _relative_difference(piece, values)
        if difference > PIECE_TOLERANCE and is_sorting:  # equal scores come in any order
            difference = _relative_difference(np.sort(piece, axis=None), np.sort(values, axis=None))
        if difference > worst:
            worst, worst_at = difference, name
        if index < len(pairs):
            for number in numbers[pairs[index][0].name]:
                sizes[number] = max(_ROUNDING, _NOISE_MARGIN * difference)
    if worst > PIECE_TOLERANCE:
        raise ModelError(
            f"the values at {worst_at} differ from those of the network by {worst:.1e} of their "
            f"standard deviation, more than {PIECE_TOLERANCE:g}: before this node, a Q/DQ pair, a "
            "scale, an axis or weights differ from the network. Export the network again",
            code="different-results",
            node=worst_at,
        )
    difference = compare_outputs(proto, call, reference.outputs)
    return Check(difference, 0.0, len(pieces), worst, worst_at), NoiseInjector(sizes)


def _match_pairs(
    model: Model, reference: ReferenceRun, numbers: dict[str, list[int]]
) -> list[tuple[Node, int]]:
    """Return the Q of each activation, with the number of a quantizer call that it replaces.

    Raises:
        ModelError: A pair is missing or unknown, or its parameters differ from the quantizer's.
    """
    pairs: list[tuple[Node, int]] = []
    missing = set(range(len(reference.calls)))
    for q in model.ordered:
        if q.op != qdq.Q or model.is_constant(q.input(0)):
            continue
        calls = numbers.get(q.name)
        if not calls:
            raise ModelError(
                f"'{q.name}' belongs to no quantizer of the network; export the network again",
                code="unknown-quantizer",
                node=q.name,
            )
        _check_parameters(model, q, reference.calls[calls[0]])
        for dq in model.consumers(q.output):
            if dq.op not in (qdq.Q, qdq.DQ):
                raise ModelError(
                    f"'{q.name}' has the consumer '{dq.name}', which is not a DequantizeLinear; "
                    "export the network again",
                    code="no-dequantizer",
                    node=q.name,
                )
            _check_parameters(model, dq, reference.calls[calls[0]])
        pairs.append((q, calls[0]))
        missing -= set(calls)
    if missing:
        name = reference.calls[min(missing)].name
        raise ModelError(
            f"the Q/DQ pair of quantizer '{name}' is missing; export the network again",
            code="missing-pair",
            node=name,
        )
    return pairs


def _check_parameters(model: Model, node: Node, call: QuantizerCall) -> None:
    params = qdq.read_params(model, node)
    is_scalar = params.scale is not None and params.scale.size == 1
    scale = float(params.scale[0]) if params.scale is not None and is_scalar else float("nan")
    if not np.isclose(scale, call.scale, rtol=1e-5, atol=0):
        actual = f"scale {scale:.6g}" if is_scalar else "no constant scale"
        raise ModelError(
            f"'{node.name}': {actual} in the file, but {call.scale:.6g} in quantizer "
            f"'{call.name}' of the network",
            code="different-scale",
            node=node.name,
        )
    if str(params.precision) != "INT8" or np.any(params.zero_point):
        raise ModelError(
            f"'{node.name}' is not symmetric INT8, but quantizer '{call.name}' is; export the "
            "network again",
            code="not-symmetric-int8",
            node=node.name,
        )


def _run_pieces(
    model: Model, call: NetworkCall, reference: ReferenceRun, pairs: Sequence[tuple[Node, int]]
) -> list[Array]:
    """Run the graph with the outputs of the network's quantizers in place of each Q/DQ pair.

    Returns:
        The input of each pair's Q, then the outputs of the graph.
    """
    feeds = model_inputs(model.proto, call)
    inputs = []
    for q, number in pairs:
        after = reference.calls[number].after
        for dq in model.consumers(q.output):
            shape = list(after.shape)
            info = onnx.helper.make_tensor_value_info(dq.output, onnx.TensorProto.FLOAT, shape)
            inputs.append(info)
            feeds[dq.output] = after.float().numpy()
    tensors = [*(q.input(0) for q, _ in pairs), *(o.name for o in model.proto.graph.output)]
    computed = [t for t in dict.fromkeys(tensors) if t not in feeds]
    values = _run_model(partial_model(model, computed, inputs), computed, feeds)
    results = {**feeds, **dict(zip(computed, values, strict=True))}
    return [results[t] for t in tensors]


def compare_outputs(proto: onnx.ModelProto, call: NetworkCall, expected: Sequence[Tensor]) -> float:
    """Return the largest difference of a model's outputs, over their standard deviation."""
    worst = 0.0
    results = _run_model(proto, None, model_inputs(proto, call))
    for result, tensor in zip(results, expected, strict=False):
        shape = tuple(tensor.shape)
        if result.shape != shape:
            raise ModelError(
                f"an output has shape {result.shape} in onnxruntime and {shape} in the network",
                code="wrong-shape",
            )
        worst = max(worst, _relative_difference(result, tensor.numpy()))
    return worst


def model_inputs(proto: onnx.ModelProto, call: NetworkCall) -> dict[str, Array]:
    """Return the tensors of a call by the names of the model's inputs."""
    constants = {t.name for t in proto.graph.initializer}
    names = [i.name for i in proto.graph.input if i.name not in constants]
    return {n: t.numpy() for n, t in zip(names, call.tensors, strict=False)}


def _run_model(
    proto: onnx.ModelProto, names: list[str] | None, feeds: dict[str, Array]
) -> list[Array]:
    try:
        # No graph optimization: Q and DQ have to run as written, as in training.
        session = open_session(proto.SerializeToString(), 0, optimize="none")
        used = {i.name: feeds[i.name] for i in session.get_inputs() if i.name in feeds}
        return [np.asarray(r) for r in session.run(names, used)]
    except Exception as error:  # onnxruntime has its own exceptions for each of many reasons
        raise ModelError(
            f"onnxruntime cannot run the exported model: {str(error).splitlines()[0]}",
            code="onnxruntime-failed",
        ) from error


def largest_difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of a result, relative to its expected standard deviation."""
    differences = [
        _relative_difference(a.cpu().double().numpy(), b.cpu().double().numpy())
        for a, b in zip(results, expected, strict=False)
    ]
    return max(differences, default=0.0)


def _relative_difference(result: Array, expected: Array) -> float:
    """Return the root mean square error over the standard deviation; infinity for NaN."""
    if result.shape != expected.shape:
        return float("inf")
    if not expected.size:
        return 0.0
    values = expected.astype(np.float64)
    error = float(np.sqrt(np.mean((result.astype(np.float64) - values) ** 2)))
    if not np.isfinite(error):
        same = np.array_equal(result, expected, equal_nan=True)
        return 0.0 if same else float("inf")
    spread = float(values.std())
    largest = float(np.abs(values).max(initial=0.0))
    return error / max(spread, largest * 1e-3, 1e-30) if error else 0.0
