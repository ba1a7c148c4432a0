"""Comparison of an exported Q/DQ model with the torch network.

In a quantized network, tiny float differences (for example by another order of summation) change
single rounded integers, and later layers amplify these changes. Even the outputs of one YOLOv8n in
single and in double precision differ by a tenth of their standard deviation. There are therefore
two checks:

* Pieces: a piece is the part of the graph between two quantizers. The inputs of each piece are the
  outputs of the network's quantizers, so errors do not accumulate. The piece must compute the same
  values as the network, except for float rounding. Every Q/DQ pair must have the scale of its
  quantizer.
* Outputs: the difference between the outputs of the model and of the network must be small compared
  to the noise of the network. To measure the noise, the network runs in double precision, and with
  random changes of the inputs of all quantizers. These changes are as large as the rounding errors
  of the pieces. The noise is the largest change of the outputs.
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
from qdqtool.util.text import format_reason

# Permitted root mean square error of a piece, relative to the standard deviation of its values. The
# values of correct pieces differ by float rounding (1e-6), and by single weights that are rounded
# to the next integer after BatchNormalization is folded. A missing Q/DQ pair causes an error of
# 0.01 or more.
PIECE_TOLERANCE = 2e-3
END_TO_END_TOLERANCE = 0.05
NOISE_FACTOR = 5.0  # permitted difference of the outputs, in multiples of the noise
# Random changes affect only a few rounded values, but each of these may change the outputs. The
# noise is therefore measured in several runs, with changes larger than the measured rounding
# errors.
_NOISE_RUNS = 3
_NOISE_MARGIN = 4.0
_ROUNDING = 1e-6
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Check:
    """Differences between a Q/DQ model and the torch network, measured with the sample.

    Attributes:
        difference: Largest error of an output: root mean square of the difference between the
            model's output in onnxruntime and the network's output, divided by the standard
            deviation of the latter.
        noise: Largest change of the network's outputs due to double precision or random rounding
            errors, in the units of `difference`.
        pieces: Number of compared pieces. A piece is the part of the graph between quantizers.
        worst: Largest difference of a piece, in the units of `difference`.
        worst_at: Quantizer or output at the end of the piece with the largest difference.
        fp8_difference: For an FP8 export, the largest error of an output of the FP8 model, in the
            units of `difference`; None for INT8. The other values are those of the INT8 model from
            which the FP8 model was made.
    """

    difference: float
    noise: float
    pieces: int
    worst: float
    worst_at: str
    fp8_difference: float | None = None

    def text(self) -> str:
        """Return the result as one line of text."""
        text = self._describe_comparison()
        if self.fp8_difference is None:
            return text
        return (
            f"before the conversion to FP8: {text}; in the FP8 file, the outputs differ by "
            f"{self.fp8_difference:.1e} of their standard deviation (its pieces are not compared)"
        )

    def _describe_comparison(self) -> str:
        line = (
            f"{self.pieces} pieces agree within {self.worst:.1e}; the outputs differ by "
            f"{self.difference:.1e} of their standard deviation, and rounding errors alone change "
            f"the outputs by {self.noise:.1e}"
        )
        if self.end_to_end_shows:
            return line
        return (
            f"{line}, which hides other errors, so only the comparison of pieces (the parts "
            "between quantizers) is meaningful"
        )

    @property
    def end_to_end_shows(self) -> bool:
        """Whether the comparison of the outputs can detect a wrong model.

        False if the permitted difference is as large as the standard deviation of the outputs.
        """
        return NOISE_FACTOR * self.noise < 1.0


class QuantizerCall(NamedTuple):
    """Call of an activation quantizer, with the values before and after quantization."""

    name: str
    scale: float
    before: Tensor
    after: Tensor


@dataclass
class ReferenceRun:
    """Results of one run of the network.

    Attributes:
        outputs: Outputs, in the order in which torch exports them.
        calls: Calls of activation quantizers, in the order in which they ran.
    """

    outputs: list[Tensor]
    calls: list[QuantizerCall]


def randomize_constants(call: NetworkCall) -> NetworkCall:
    """Return a call in which random values from 0 to 1 replace float tensors of equal values.

    If an input were all zeros, wrong scales would not change the outputs. A tensor with a single
    value is kept.
    """
    generator = torch.Generator().manual_seed(0)

    def randomize(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() < 2:
            return value
        if not bool((value == value.reshape(-1)[0]).all()):
            return value
        return torch.rand(value.shape, generator=generator, dtype=torch.float32).to(value)

    return call.map_arguments(randomize)


def record_reference(network: nn.Module, call: NetworkCall) -> ReferenceRun:
    """Run a prepared network on the CPU, and return its outputs and quantizer calls.

    Raises:
        ModelError: The network cannot be called with these arguments.
    """
    names = {id(m): n for n, m in network.named_modules()}
    calls: list[QuantizerCall] = []

    def record(module: nn.Module, attribute: str, before: Tensor, after: Tensor) -> None:
        name = f"{names[id(module)]}.{attribute}".lstrip(".")
        scale = float(compute_scale(getattr(module, attribute), before))
        calls.append(QuantizerCall(name, scale, before.detach(), after.detach()))

    try:
        with evaluation_mode(network), observe_quantizers(record):
            return ReferenceRun(flatten_tensors(call.run(network, "cpu")), calls)
    except QdqtoolError:
        raise
    except Exception as error:  # the network's own code may raise any class
        reason = format_reason(error, first_line=True)
        raise ModelError(
            f"{type(network).__name__} cannot be called with the sample ({call}): {reason}; give a "
            "sample like that of the preparation",
            code="wrong-call",
            parameter="sample",
        ) from error


class NoiseInjector:
    """Adds noise to the inputs of quantizers. The size of the noise depends on the call.

    Attributes:
        sizes: For each call, the standard deviation of the noise divided by that of the values.
        random: Generator of the noise; None if no noise is added.
    """

    def __init__(self, sizes: Sequence[float]) -> None:
        self.sizes = sizes
        self.random: torch.Generator | None = None
        self._call = 0

    def start(self, seed: int | None) -> None:
        """Prepare a run of the network.

        Args:
            seed: Seed of the noise; None for a run without noise.
        """
        self.random = None if seed is None else torch.Generator().manual_seed(seed)
        self._call = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the values `x` of the next quantizer call, with noise added."""
        size = self.sizes[self._call] if self._call < len(self.sizes) else _ROUNDING
        self._call += 1
        if self.random is None:
            return x
        change = torch.randn(x.shape, generator=self.random, dtype=torch.float32).to(x)
        return x + change * (size * float(x.std(unbiased=False)))


def measure_noise(
    network: nn.Module, call: NetworkCall, outputs: Sequence[Tensor], noise: NoiseInjector
) -> float:
    """Return the largest change of the outputs due to noise or double precision.

    Args:
        network: Network whose quantizers call ``noise`` on their inputs.
        call: Arguments of the network.
        outputs: Outputs of the network in single precision, without noise.
        noise: Injector that adds the noise to the inputs of the quantizers.
    """

    def measure(dtype: torch.dtype | None = None) -> float:
        return largest_difference(outputs, flatten_tensors(call.run(network, "cpu", dtype)))

    differences = []
    with evaluation_mode(network):
        for seed in range(_NOISE_RUNS):
            noise.start(seed)
            differences.append(measure())
        noise.start(None)
        # A network whose code requires single precision raises an exception here. The result is
        # then only that of the runs with noise.
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            network.double()
            differences.append(measure(torch.float64))
    return max(differences)


def flatten_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a network's result, in the order of the exported outputs."""
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
    """Compare the pieces and the outputs of a Q/DQ model with the network.

    Args:
        proto: The Q/DQ model.
        call: Arguments of the reference run.
        reference: Results of the network.
        numbers: By name of a QuantizeLinear, the numbers of the quantizer calls that it replaces.

    Returns:
        The differences, with 0 as noise; and for :func:`measure_noise`, an injector of noise that
        is larger than the rounding errors of the pieces.

    Raises:
        ModelError: A piece of the model computes other values than the network. The message names
            the piece.
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
        # TopK and NonMaxSuppression return equal scores in any order.
        if difference > PIECE_TOLERANCE and is_sorting:
            difference = _relative_difference(np.sort(piece, axis=None), np.sort(values, axis=None))
        if difference > worst:
            worst, worst_at = difference, name
        if index < len(pairs):
            for number in numbers[pairs[index][0].name]:
                sizes[number] = max(_ROUNDING, _NOISE_MARGIN * difference)
    if worst > PIECE_TOLERANCE:
        raise ModelError(
            f"the values at {worst_at} differ from those of the network by {worst:.1e} of their "
            f"standard deviation, more than {PIECE_TOLERANCE:g}: a Q/DQ pair, a scale, an axis or "
            "the weights before this place are different in the network",
            code="different-results",
            node=worst_at,
        )
    difference = compare_outputs(proto, call, reference.outputs)
    return Check(difference, 0.0, len(pieces), worst, worst_at), NoiseInjector(sizes)


def _match_pairs(
    model: Model, reference: ReferenceRun, numbers: dict[str, list[int]]
) -> list[tuple[Node, int]]:
    """Return the Q of each activation, and the number of the first call that the Q replaces.

    Raises:
        ModelError: A Q/DQ pair is missing or unknown, or its parameters differ from those of the
            quantizer.
    """
    pairs: list[tuple[Node, int]] = []
    missing = set(range(len(reference.calls)))
    for q in model.ordered:
        if q.op != qdq.Q or model.is_constant(q.input(0)):
            continue
        calls = numbers.get(q.name)
        if not calls:
            raise ModelError(
                f"'{q.name}' does not belong to a quantizer of the network",
                code="unknown-quantizer",
                node=q.name,
            )
        _check_parameters(model, q, reference.calls[calls[0]])
        for dq in model.consumers(q.output):
            if dq.op != qdq.DQ:
                raise ModelError(
                    f"'{q.name}' has the consumer '{dq.name}', which is not a DequantizeLinear",
                    code="no-dequantizer",
                    node=q.name,
                )
            _check_parameters(model, dq, reference.calls[calls[0]])
        pairs.append((q, calls[0]))
        missing -= set(calls)
    if missing:
        name = reference.calls[min(missing)].name
        raise ModelError(
            f"the Q/DQ pair of quantizer '{name}' is missing",
            code="missing-pair",
            node=name,
        )
    return pairs


def _check_parameters(model: Model, node: Node, call: QuantizerCall) -> None:
    params = qdq.read_params(model, node)
    scale = params.single_scale
    if scale is None or not np.isclose(scale, call.scale, rtol=1e-5, atol=0):
        actual = "no constant scale" if scale is None else f"scale {scale:.6g}"
        raise ModelError(
            f"'{node.name}' has {actual} in the file, but quantizer '{call.name}' of the network "
            f"has {call.scale:.6g}",
            code="different-scale",
            node=node.name,
        )
    if str(params.precision) != "INT8" or np.any(params.zero_point):
        raise ModelError(
            f"'{node.name}' is not symmetric INT8, but quantizer '{call.name}' is",
            code="not-symmetric-int8",
            node=node.name,
        )


def _run_pieces(
    model: Model, call: NetworkCall, reference: ReferenceRun, pairs: Sequence[tuple[Node, int]]
) -> list[Array]:
    """Run all pieces, with the outputs of the network's quantizers as inputs.

    Returns:
        The results of the pieces: the input of each QuantizeLinear in `pairs`, then the outputs of
        the graph.
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
    """Return the largest error of an output, see :attr:`Check.difference`.

    Raises:
        ModelError: onnxruntime fails, or the shape of an output differs from the expected shape.
    """
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
    """Return the tensors of a call as arrays, by name of the model's input."""
    constants = {t.name for t in proto.graph.initializer}
    names = [i.name for i in proto.graph.input if i.name not in constants]
    return {n: t.numpy() for n, t in zip(names, call.tensors, strict=False)}


def _run_model(
    proto: onnx.ModelProto, names: list[str] | None, feeds: dict[str, Array]
) -> list[Array]:
    try:
        # Without graph optimization, onnxruntime runs Q and DQ unchanged, like the quantizers in
        # training.
        session = open_session(proto.SerializeToString(), 0, optimize="none")
        used = {i.name: feeds[i.name] for i in session.get_inputs() if i.name in feeds}
        return [np.asarray(r) for r in session.run(names, used)]
    except Exception as error:  # onnxruntime's exceptions share no narrower base class
        raise ModelError(
            f"onnxruntime cannot run the exported model ({str(error).splitlines()[0]})",
            code="onnxruntime-failed",
        ) from error


def largest_difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest error of a tensor, in the units of :attr:`Check.difference`."""
    differences = [
        _relative_difference(a.cpu().double().numpy(), b.cpu().double().numpy())
        for a, b in zip(results, expected, strict=False)
    ]
    return max(differences, default=0.0)


def _relative_difference(result: Array, expected: Array) -> float:
    """Return the root mean square error divided by the standard deviation of `expected`.

    The divisor is at least a thousandth of the largest magnitude of `expected`. The result is
    infinite if the shapes differ. If an array contains NaN or infinities, the result is 0 for equal
    arrays, and infinite otherwise.
    """
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
