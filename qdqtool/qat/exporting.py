"""``qat.export`` and ``qat.check``: write a trained network as a Q/DQ model and check it."""

import itertools
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.insertion.fp8_conversion import convert_pairs_to_fp8
from qdqtool.insertion.fp16 import convert_to_fp16
from qdqtool.insertion.number_formats import FORMATS, FP8, LEVELS
from qdqtool.insertion.rules import restrict_to_fp8
from qdqtool.insertion.sample_runs import measure_fp16_maxima
from qdqtool.insertion.scales import weight_scale
from qdqtool.ir import qdq
from qdqtool.ir.graph import Model
from qdqtool.ir.graphsurgeon import to_graphsurgeon
from qdqtool.ir.modelfile import load, load_full, save
from qdqtool.patterns.half import WIDE
from qdqtool.prediction import predict
from qdqtool.qat import checking
from qdqtool.qat.batch_norms import fold_batch_norms
from qdqtool.qat.calls import NetworkCall, as_call, evaluation_mode
from qdqtool.qat.checking import END_TO_END_TOLERANCE, NOISE_FACTOR, Check
from qdqtool.qat.graph_cleanup import clean_up_export
from qdqtool.qat.modules import (
    TINY,
    ExportQuantizer,
    QuantizerReference,
    compute_scale,
    find_quantizers,
    find_uncalibrated,
    following_norm_factor,
    read_amax,
)
from qdqtool.qat.networks import (
    copy_network,
    is_ultralytics_model,
    switch_heads_to_export,
    unwrap_network,
)
from qdqtool.qat.planning import Plan, choose_sample
from qdqtool.qat.preparation import PLAN_ATTRIBUTE, read_plan
from qdqtool.qat.trace import export_without_marks, mark_tensor
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import Target, target_named
from qdqtool.util.checks import check_choice
from qdqtool.util.json_text import Json

if TYPE_CHECKING:
    import onnx_graphsurgeon

UNCHECKED_TOLERANCE = 1.0  # with this tolerance or more, failed checks are only warnings


@dataclass
class Export:
    """Result of an export.

    Attributes:
        path: File of the Q/DQ model.
        prediction: Predicted layers of the TensorRT engine.
        check: Differences between the Q/DQ model in onnxruntime and the network.
        plan: Plan of the prepared network.
        fp8_difference: Difference between the outputs of the FP8 model and of the network, in the
            units of :attr:`Check.difference`; None for INT8.
    """

    path: str
    prediction: Prediction
    check: Check
    plan: Plan
    fp8_difference: float | None = None

    @property
    def summary(self) -> Json:
        """Counts of the prediction, such as the number of INT8 convolutions."""
        return self.prediction.summary()

    @property
    def difference(self) -> float:
        """Largest error of an output, see :attr:`Check.difference`."""
        return self.check.difference

    @property
    def noise(self) -> float:
        """Largest change of the network's outputs due to rounding, see :attr:`Check.noise`."""
        return self.check.noise

    def to_graphsurgeon(self) -> "onnx_graphsurgeon.Graph":
        """Return the Q/DQ model as an onnx-graphsurgeon graph, read from :attr:`path`."""
        return to_graphsurgeon(load_full(self.path).proto)


def export(
    model: nn.Module | Any,
    path: str | os.PathLike[str],
    sample: Any = None,
    opset: int = 17,
    *,
    target: str | Target | None = None,
    precision: str = "int8",
    high_precision: str | None = None,
    dynamic_batch: bool = False,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    tolerance: float = END_TO_END_TOLERANCE,
) -> Export:
    """Write a calibrated network as a Q/DQ model, check the model, and predict its engine.

    A BatchNormalization after a convolution is folded into the weights of the convolution before
    the weights are quantized. The quantized integers are those of the training, because the weights
    and the scale of a channel are multiplied by the same factor. Scales are constants, and nodes
    have the names of torch's export. A detection head is exported in its export mode. `model` is
    not changed.

    Args:
        model: The network or its wrapper (DistributedDataParallel, torch.compile, Ultralytics'
            ``YOLO`` or EMA). A copy is exported on the CPU in evaluation mode.
        path: File to write.
        sample: Arguments of the network: a tensor, a tuple of arguments or a dict of keyword
            arguments. For the check, random values from 0 to 1 replace constant tensors. None is
            allowed for Ultralytics' wrapper: the sample is then an image of the training size.
        opset: ONNX opset, 13 or newer.
        target: TensorRT version of the prediction. Default: the version given to
            :func:`qdqtool.qat.prepare`.
        precision: ``int8`` or ``fp8``. For ``fp8``, the model is first checked in INT8, the format
            of the training. Then its pairs are converted to FP8 pairs with the same ranges. The
            pairs of nodes that cannot be FP8 (:mod:`qdqtool.insertion.placement`) are removed. The
            opset is at least 19.
        high_precision: Type of the layers without Q/DQ, ``fp16`` or ``fp32``; only for FP8.
            Default: ``fp16``, because a strongly typed network computes in the types of the file.
            The inputs and outputs of the network remain FP32, and so do tensors with values near
            the largest FP16 number.
        dynamic_batch: Whether the first axis of every input and output is dynamic.
        input_names: Names for the inputs.
        output_names: Names for the outputs.
        tolerance: Permitted error of an output (see :attr:`Check.difference`), in addition to 5
            times :attr:`Check.noise`. With a tolerance of 1 or more, failed checks are only
            warnings, except NaN or infinities in FP8.

    Returns:
        The path of the model, its prediction, and the result of the check.

    Raises:
        QdqtoolError: The network was not prepared or not calibrated, or the file cannot be written.
        ModelError: torch cannot export the network, or the model and the network compute different
            results. No file is written.
    """
    _check_tolerance(tolerance)
    check_choice("precision", precision, FORMATS)
    _check_high_precision(high_precision, precision)
    call, network = _prepare_call(model, sample), unwrap_network(model)
    plan = read_plan(network)
    target = target_named(target or plan.target)
    if precision == FP8.name:
        target, opset = restrict_to_fp8(target), max(opset, FP8.opset)
    if opset < 13:
        raise QdqtoolError(
            f"opset={opset} is too old for per-channel Q/DQ; give 13 or newer",
            code="opset-too-old",
            parameter="opset",
        )
    metadata: dict[str, str] = {}
    if is_ultralytics_model(model):
        from qdqtool.qat import ultralytics

        input_names = ["images"] if input_names is None else input_names
        if output_names is None:
            output_names = ultralytics.find_output_names(network)
        metadata = ultralytics.make_metadata(network, call.tensors[0], dynamic_batch)
    network_copy = _NetworkCopy(network, call)
    count = len(network_copy.reference.outputs)
    proto = network_copy.export(
        opset, _export_options(input_names, output_names, call, count, dynamic_batch)
    )
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        reason = f"the exported model is not valid: {str(error).splitlines()[0]}"
        raise ModelError(reason, os.fspath(path), code="invalid-model") from error
    try:
        result = network_copy.compare(proto, tolerance)
    except ModelError as error:
        if tolerance < UNCHECKED_TOLERANCE:
            reason = f"{error}. Nothing was written; with `tolerance=1`, this is only a warning"
            raise _with_path(error, reason, path) from error
        message = f"{os.fspath(path)}: {error}; `tolerance` is 1 or more, so the file was written"
        warnings.warn(message, UserWarning, stacklevel=2)
        result = Check(float("inf"), float("nan"), 0, float("inf"), "")
    difference = None
    if precision == FP8.name:
        half = high_precision != "fp32"
        proto, difference = network_copy.convert_to_fp8(proto, os.fspath(path), half)
        result = replace(result, fp8_difference=difference)
    if metadata:
        onnx.helper.set_model_props(proto, metadata)
    save(proto, path)
    return Export(os.fspath(path), predict(path, target), result, plan, difference)


def check(
    model: nn.Module | Any,
    path: str | os.PathLike[str],
    sample: Any = None,
    *,
    tolerance: float = END_TO_END_TOLERANCE,
) -> Check:
    """Check that a Q/DQ model computes the same results as the prepared network.

    Use this function after another program has edited the exported model.

    Args:
        model: Network from which the Q/DQ model was exported.
        path: File of the Q/DQ model. Nodes must have the names that :func:`export` gave them.
        sample: As for :func:`export`.
        tolerance: As for :func:`export`.

    Returns:
        The measured differences.

    Raises:
        QdqtoolError: The network was not prepared or not calibrated, or the file cannot be read.
        ModelError: The results differ. The message names the piece or output.
    """
    _check_tolerance(tolerance)
    call = _prepare_call(model, sample)
    file = load(path)
    network_copy = _NetworkCopy(unwrap_network(model), call)
    network_copy.export(file.opset or 17, {})
    try:
        return network_copy.compare(file.proto, tolerance)
    except ModelError as error:
        raise _with_path(error, f"{error}; export the network again", path) from error


def _check_tolerance(tolerance: float) -> None:
    if not tolerance >= 0.0:
        raise QdqtoolError(
            f"`tolerance={tolerance:g}`: give 0 or more", code="out-of-range", parameter="tolerance"
        )


def _check_high_precision(high_precision: str | None, precision: str) -> None:
    if high_precision is None:
        return
    check_choice("high_precision", high_precision, ("fp16", "fp32"))
    if precision != FP8.name:
        raise QdqtoolError(
            "`high_precision` needs `precision='fp8'`, because INT8 models are exported in FP32; "
            "leave `high_precision` out",
            code="option-conflict",
            parameter="high_precision",
        )


def _prepare_call(model: nn.Module, sample: Any) -> NetworkCall:
    call = as_call(choose_sample(model, sample), read_plan(unwrap_network(model)).sample)
    return call.to_device("cpu").map_arguments(
        lambda v: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v
    )


def _with_path(error: ModelError, reason: str, path: str | os.PathLike[str]) -> ModelError:
    return ModelError(
        reason, os.fspath(path), code=error.code, parameter=error.parameter, node=error.node
    )


class _NetworkCopy:
    """Copy of a prepared network on the CPU, for the export and the comparison with a model.

    Attributes:
        reference: Outputs and quantizer calls of a run of the network.

    Raises:
        QdqtoolError: An activation quantizer has no range.
    """

    def __init__(self, model: nn.Module, call: NetworkCall) -> None:
        self._plan = read_plan(model)
        self._network = copy_network(model).cpu().float()
        for name in find_uncalibrated(self._network):
            raise QdqtoolError(
                f"quantizer '{name}' has no range; call qdqtool.qat.calibrate before the export",
                code="not-calibrated",
                node=name,
            )
        self._sample = call
        self._call = checking.randomize_constants(call)
        with switch_heads_to_export(self._network):
            self.reference = checking.record_reference(self._network, self._call)
        self._numbers: dict[str, list[int]] = {}

    def export(self, opset: int, options: dict[str, Any]) -> onnx.ModelProto:
        counter = itertools.count()
        copy = copy_network(self._network)
        with switch_heads_to_export(copy), evaluation_mode(copy):
            _fold_norms_and_freeze(copy, self._plan, lambda x: mark_tensor(x, next(counter)))
            raw, numbers = export_without_marks(copy, self._sample, opset, **options)
        names = [n.name for n in raw.graph.node if n.op_type == qdq.Q]
        calls = {name: numbers[name, 0] for name in names if (name, 0) in numbers}
        proto, self._numbers = clean_up_export(raw, calls)
        return proto

    def convert_to_fp8(
        self, proto: onnx.ModelProto, path: str, is_half: bool
    ) -> tuple[onnx.ModelProto, float]:
        """Convert an INT8 model to FP8, and return it with its largest output error.

        Args:
            proto: The INT8 model.
            path: File that will be written.
            is_half: Whether to convert the layers without Q/DQ to FP16.

        Raises:
            ModelError: The outputs are not finite.
        """
        model = Model(proto)
        convert_pairs_to_fp8(model)
        if is_half:
            sample = checking.model_inputs(proto, self._call)
            largest = measure_fp16_maxima(model, [sample], samples=1)
            convert_to_fp16(model, [t for t, value in largest.items() if value > WIDE])
        difference = checking.compare_outputs(model.proto, self._call, self.reference.outputs)
        if not np.isfinite(difference):
            raise ModelError(
                "the outputs in FP8 are NaN or infinite, so nothing was written. Export in INT8",
                path,
                code="different-results",
            )
        return model.proto, difference

    def compare(self, proto: onnx.ModelProto, tolerance: float) -> Check:
        """Check that a model computes the same results as the network.

        Call this method only once, because it replaces the quantizers of the copy.

        Args:
            proto: Model whose nodes have the names of the last :meth:`export`.
            tolerance: See :func:`export`.

        Raises:
            ModelError: A piece or an output of the model differs from the network.
        """
        reference = self.reference
        result, noise = checking.check_pieces(proto, self._call, reference, self._numbers)
        with switch_heads_to_export(self._network), evaluation_mode(self._network):
            _fold_norms_and_freeze(self._network, replace(self._plan, norms={}), noise)
            level = checking.measure_noise(self._network, self._call, reference.outputs, noise)
        result = replace(result, noise=level)
        allowed = tolerance + NOISE_FACTOR * result.noise
        if not result.difference <= allowed:
            raise ModelError(
                "the outputs in onnxruntime differ from those of the network by "
                f"{result.difference:.3f} of their standard deviation, more than {allowed:.3f} "
                f"(`tolerance` {tolerance:g} plus {NOISE_FACTOR:g} times {result.noise:.3f}, the "
                "change of the network's outputs by rounding errors)",
                code="different-results",
            )
        return result


def _name_inputs(call: NetworkCall) -> list[str]:
    count = sum(isinstance(argument, Tensor) for argument in call.args)
    keywords = [name for name, value in call.kwargs.items() if isinstance(value, Tensor)]
    return [*(f"input{i or ''}" for i in range(count)), *keywords]


def _export_options(
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    call: NetworkCall,
    output_count: int,
    dynamic_batch: bool,
) -> dict[str, Any]:
    if inputs is None:
        inputs = _name_inputs(call)
    if outputs is None:
        outputs = [f"output{i or ''}" for i in range(output_count)]
    options: dict[str, Any] = {"input_names": list(inputs), "output_names": list(outputs)}
    if dynamic_batch:
        options["dynamic_axes"] = {n: {0: "batch"} for n in (*inputs, *outputs)}
    return options


def _fold_norms_and_freeze(network: nn.Module, plan: Plan, mark_input: Any) -> None:
    """Fold BatchNormalizations, and replace all quantizers by quantizers with constant scales.

    Args:
        network: Copy of a prepared network, changed in place.
        plan: Plan of the network.
        mark_input: Function that is applied to the input of each activation quantizer.
    """
    axes = {w.module: w.axis for w in plan.weights if w.call is None}
    quantizers = list(find_quantizers(network))
    factors = fold_batch_norms(network, plan.norms)
    for q in quantizers:
        axis: int | None = q.quantizer.qdq_axis
        scale: Tensor | None
        if not q.is_weight:
            scale = compute_scale(q.quantizer, torch.empty(0))
        elif q.attribute != q.module.qdq_weight:  # weights of a projection in an attention
            amax = read_amax(q.quantizer)
            scale = None if amax is None else compute_scale(q.quantizer, amax)
        else:
            axis = axes[q.owner]
            scale = _weight_scale(q, axis, factors.get(q.owner))
        frozen = ExportQuantizer(scale, axis, None if q.is_weight else mark_input)
        q.module._modules[q.attribute] = frozen
    network.__dict__.pop(PLAN_ATTRIBUTE, None)


def _weight_scale(q: QuantizerReference, axis: int | None, factor: Tensor | None) -> Tensor:
    """Return the scale of a module's weights after the BatchNormalization is folded.

    If the weights have a trained range, the scale is that of the range, multiplied by the factors
    of the channels. Otherwise it is computed from the largest magnitudes of the folded weights.
    """
    weights: Tensor = q.module._parameters["weight"].detach()
    common_factor = following_norm_factor(q.module)
    if common_factor is not None:
        weights = weights * common_factor.to(weights)
    scale = torch.from_numpy(np.array(weight_scale(weights.numpy(), axis)))
    amax = read_amax(q.quantizer)
    if amax is None:
        return scale
    trained = amax.double().reshape(scale.shape) / LEVELS
    if axis is not None and factor is not None:
        trained = trained * factor.double().abs()
    return torch.where(trained > TINY, trained.float(), scale)
