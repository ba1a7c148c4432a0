"""``qat.export``: a trained network with quantizers becomes a Q/DQ model that is predicted and checked."""

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.insertion.scales import LEVELS, weight_scale
from qdqtool.ir import qdq
from qdqtool.ir.modelfile import load, save
from qdqtool.prediction import predict
from qdqtool.qat import checking
from qdqtool.qat.batch_norms import fold_batch_norms
from qdqtool.qat.calls import NetworkCall, as_call, evaluation_mode
from qdqtool.qat.checking import END_TO_END_TOLERANCE, NOISE_FACTOR, Check
from qdqtool.qat.graph_cleanup import clean_up_export
from qdqtool.qat.modules import (
    TINY,
    ExportQuantizer,
    compute_scale,
    export_norm_factor,
    find_quantizers,
    find_uncalibrated,
    read_amax,
)
from qdqtool.qat.networks import copy_network, is_ultralytics_model, switch_heads_to_export, unwrap
from qdqtool.qat.planning import Plan, choose_sample
from qdqtool.qat.preparation import PLAN_ATTRIBUTE, read_plan
from qdqtool.qat.trace import export_marked, mark
from qdqtool.trt.targets import Target
from qdqtool.types import Json, Prediction
from qdqtool.util.said import said

UNCHECKED_TOLERANCE = 1.0  # a tolerance as large as the outputs themselves


@dataclass
class Export:
    """A Q/DQ model that was written.

    Attributes:
        path: Where.
        prediction: What TensorRT will make of it.
        check: How far onnxruntime's results are from the network's.
        plan: The plan that the network was prepared by.
    """

    path: str
    prediction: Prediction
    check: Check
    plan: Plan

    @property
    def summary(self) -> Json:
        """The prediction's summary: convolutions, those in INT8, conversions."""
        return self.prediction.summary()

    @property
    def difference(self) -> float:
        """End to end, see :attr:`Check.difference`."""
        return self.check.difference

    @property
    def noise(self) -> float:
        """The network's own, see :attr:`Check.noise`."""
        return self.check.noise


def export(
    model: nn.Module | Any,
    path: str | os.PathLike[str],
    sample: Any = None,
    opset: int = 17,
    *,
    target: str | Target | None = None,
    dynamic_batch: bool = False,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    tolerance: float = END_TO_END_TOLERANCE,
) -> Export:
    """Writes a prepared, calibrated network as a Q/DQ model and predicts it.

    BatchNormalization behind a convolution is folded into its weights before these are quantized; the integers stay
    those of training, because weights and scales of a channel are multiplied by the same factor. Scales are constants,
    node names are those of torch's export. The network is not changed; its head is exported in its export mode.

    Args:
        model: The network, its wrapper (DistributedDataParallel, torch.compile, Ultralytics' ``YOLO`` or EMA) as well;
            it is exported in evaluation mode, from the CPU.
        path: Where to write.
        sample: A tensor, a tuple of arguments or a dict of keyword arguments; where a tensor holds one value only, the
            check takes random values from 0 to 1 instead. None for Ultralytics' wrapper takes an image of its size.
        opset: 13 or newer.
        target: What to predict for; by default what the network was prepared for.
        dynamic_batch: Whether the first axis of every input and output is left open.
        input_names: Names for the inputs.
        output_names: Names for the outputs.
        tolerance: How far, beyond the network's own noise, onnxruntime's results may be from the network's end to end,
            see :attr:`Check.difference`. The check of the single pieces is not loosened by it, unless it is 1 or more:
            then everything is written, and what would have been refused is a warning.

    Returns:
        The prediction, and how far onnxruntime's results are from the network's.

    Raises:
        QdqtoolError: The network was not prepared or not calibrated, or the file cannot be written.
        ModelError: torch cannot export it, or it does not compute what the network computes; nothing is written.
    """
    _check_tolerance(tolerance)
    wrapper, call = model, _prepare_call(model, sample)
    model = unwrap(model)
    plan = read_plan(model)
    if opset < 13:
        raise QdqtoolError(
            f"opset={opset}: per-channel Q/DQ need 13 or newer",
            code="opset-too-old",
            parameter="opset",
        )
    if is_ultralytics_model(wrapper):
        from qdqtool.qat import ultralytics

        input_names = ["images"] if input_names is None else input_names
        output_names = ultralytics.output_names(model) if output_names is None else output_names
    with _exported(
        model,
        call,
        opset,
        lambda outputs: _names(input_names, output_names, call, outputs, dynamic_batch),
    ) as (proto, compared):
        try:
            onnx.checker.check_model(proto)
        except onnx.checker.ValidationError as error:
            raise ModelError(
                f"the exported model is not valid: {_first_line(error)}",
                os.fspath(path),
                code="invalid-model",
            ) from error
        try:
            found = compared(proto, tolerance)
        except ModelError as error:
            if tolerance < UNCHECKED_TOLERANCE:
                raise ModelError(
                    f"{_first_line(error)}; nothing was written",
                    os.fspath(path),
                    code=error.code,
                    parameter=error.parameter,
                    node=error.node,
                ) from error
            warnings.warn(
                f"{os.fspath(path)}: {_first_line(error)}; written all the same",
                UserWarning,
                stacklevel=3,
            )
            found = Check(float("inf"), float("nan"), 0, float("inf"), "")
    if is_ultralytics_model(wrapper):
        onnx.helper.set_model_props(
            proto, ultralytics.metadata(model, call.tensors[0], dynamic_batch)
        )
    save(proto, path)
    return Export(os.fspath(path), predict(path, target or plan.target), found, plan)


def check(
    model: nn.Module | Any,
    path: str | os.PathLike[str],
    sample: Any = None,
    *,
    tolerance: float = END_TO_END_TOLERANCE,
) -> Check:
    """Whether a Q/DQ model (edited since, or from elsewhere) still computes what the prepared network computes.

    Args:
        model: The network that :func:`export` wrote it from.
        path: The model; its nodes have the names that :func:`export` gave them.
        sample: As for :func:`export`.
        tolerance: As for :func:`export`.

    Raises:
        QdqtoolError: The network was not prepared or not calibrated, or the file cannot be read.
        ModelError: They do not compute the same, saying where.
    """
    _check_tolerance(tolerance)
    call = _prepare_call(model, sample)
    file = load(path)
    with _exported(unwrap(model), call, file.opset or 17, lambda outputs: {}) as (_, compared):
        try:
            return compared(file.proto, tolerance)
        except ModelError as error:
            raise ModelError(
                str(error),
                os.fspath(path),
                code=error.code,
                parameter=error.parameter,
                node=error.node,
            ) from error


def _check_tolerance(tolerance: float) -> None:
    if not tolerance >= 0.0:
        raise QdqtoolError(
            said("{`tolerance`:{tolerance:g}}: give 0 or more", tolerance=tolerance),
            code="out-of-range",
            parameter="tolerance",
        )


def _prepare_call(model: nn.Module, sample: Any) -> NetworkCall:
    """What to call a prepared network with, on the CPU, floats in FP32 as its twin there is."""
    call = as_call(choose_sample(model, sample), read_plan(unwrap(model)).sample)
    return call.to_device("cpu").map(
        lambda v: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v
    )


@contextmanager
def _exported(
    model: nn.Module,
    call: NetworkCall,
    opset: int,
    options: Callable[[Sequence[Tensor]], dict[str, Any]],
) -> Iterator[tuple[onnx.ModelProto, Callable[[onnx.ModelProto, float], Check]]]:
    """The Q/DQ model of a network, and what compares that or another one with the network, to a tolerance.

    ``options`` makes those of torch's export from the network's results.
    """
    plan = read_plan(model)
    twin = copy_network(model).cpu().float()
    with switch_heads_to_export(twin):
        for name in find_uncalibrated(twin):
            raise QdqtoolError(
                f"quantizer '{name}' has no range; call qdqtool.qat.calibrate before the export",
                code="not-calibrated",
                node=name,
            )
        shown = checking.randomize_constants(call)
        wanted = checking.record_reference(twin, shown)
        raw, calls = _marked_proto(copy_network(twin), plan, call, opset, options(wanted.outputs))
        proto, numbers = clean_up_export(raw, calls)

        def compared(other: onnx.ModelProto, tolerance: float) -> Check:
            """What the pieces of the graph make of the network's values, beside the noise of the network itself."""
            found, noise = checking.check_pieces(other, shown, wanted, numbers)
            with evaluation_mode(twin):
                _freeze(twin, replace(plan, norms={}), noise)
            found = replace(found, noise=checking.measure_noise(twin, shown, wanted.outputs, noise))
            allowed = tolerance + NOISE_FACTOR * found.noise
            if not found.difference <= allowed:
                raise ModelError(
                    f"onnxruntime's results are {found.difference:.3f} of their standard deviation away from the "
                    f"network's, more than {allowed:.3f} ({tolerance:g} and {NOISE_FACTOR:g} times the network's own noise "
                    f"of {found.noise:.3f})",
                    code="different-results",
                )
            return found

        yield proto, compared


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _marked_proto(
    twin: nn.Module, plan: Plan, call: NetworkCall, opset: int, options: dict[str, Any]
) -> tuple[onnx.ModelProto, dict[str, int]]:
    """The exported graph, and from each QuantizeLinear of an activation to the number of the quantizer call it is."""
    numbered = itertools.count()
    with evaluation_mode(twin):
        _freeze(twin, plan, lambda x: mark(x, next(numbered)))
        proto, numbers = export_marked(twin, call, opset, **options)
    places = ((n.name, 0) for n in proto.graph.node if n.op_type == qdq.Q)
    return proto, {place[0]: numbers[place] for place in places if place in numbers}


def _names(
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    call: NetworkCall,
    results: Sequence[Tensor],
    dynamic_batch: bool,
) -> dict[str, Any]:
    plain = [f"input{i or ''}" for i in range(sum(isinstance(a, Tensor) for a in call.args))]
    plain += [k for k, v in call.kwargs.items() if isinstance(v, Tensor)]
    input_names = list(inputs) if inputs is not None else plain
    output_names = (
        list(outputs) if outputs is not None else [f"output{i or ''}" for i in range(len(results))]
    )
    options: dict[str, Any] = {"input_names": input_names, "output_names": output_names}
    if dynamic_batch:
        options["dynamic_axes"] = {n: {0: "batch"} for n in (*input_names, *output_names)}
    return options


def _freeze(twin: nn.Module, plan: Plan, marked: Any) -> None:
    """Folds BatchNormalization and replaces every quantizer by one with a constant scale."""
    axes = {w.module: w.axis for w in plan.weights if w.call is None}
    found = list(find_quantizers(twin))
    factors = fold_batch_norms(twin, plan.norms)
    for q in found:
        amax, axis = read_amax(q.quantizer), q.quantizer.qdq_axis
        if not q.is_weight:
            scale = compute_scale(q.quantizer, torch.empty(0))
        elif (
            q.attribute != q.module.qdq_weight
        ):  # an attention's, of weights that are part of others
            scale = None if amax is None else compute_scale(q.quantizer, amax)
        else:
            axis, later = axes[q.owner], export_norm_factor(q.module)
            value: Tensor = q.module._parameters["weight"].detach()
            value = value if later is None else value * later.to(value)
            scale = torch.from_numpy(np.array(weight_scale(value.numpy(), axis)))
            if (
                amax is not None
            ):  # the range of training, times what folding multiplied the channels by
                trained = amax.double().reshape(scale.shape) / LEVELS
                factor = None if axis is None else factors.get(q.owner)
                trained = trained if factor is None else trained * factor.double().abs()
                scale = torch.where(trained > TINY, trained.float(), scale)
        q.module._modules[q.attribute] = ExportQuantizer(
            scale, axis, None if q.is_weight else marked
        )
    twin.__dict__.pop(PLAN_ATTRIBUTE, None)
