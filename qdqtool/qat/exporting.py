"""``qat.export``: a trained network with quantizers becomes a Q/DQ model that is predicted and checked."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.insertion.scales import LEVELS, weight_scale
from qdqtool.modelfile import save
from qdqtool.prediction import predict
from qdqtool.qat.backends import amax_of
from qdqtool.qat.cleanup import fold_constants, merge_pairs, transpose_weights
from qdqtool.qat.folding import fold_norms
from qdqtool.qat.modules import ExportQuantizer, quantizers_of
from qdqtool.qat.planning import Plan
from qdqtool.qat.preparation import PLAN, plan_of
from qdqtool.qat.trace import as_arguments, evaluating, export_proto
from qdqtool.trt.targets import Target
from qdqtool.types import Json, Prediction

# Float sums in another order flip single integer steps, which later layers pass on; a wrong scale or a Q/DQ pair at
# another place changes all values. Relative to the outputs' standard deviation.
TOLERANCE = 0.05


@dataclass
class Export:
    """A Q/DQ model that was written.

    Attributes:
        path: Where.
        prediction: What TensorRT will make of it.
        difference: Root mean square of onnxruntime's outputs minus the fake-quantized network's, divided by the
            standard deviation of these, on the sample; the largest over all outputs.
        plan: The plan that the network was prepared by.
    """

    path: str
    prediction: Prediction
    difference: float
    plan: Plan

    @property
    def summary(self) -> Json:
        """The prediction's summary: convolutions, those in INT8, conversions."""
        return self.prediction.summary()


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    sample: Any,
    opset: int = 17,
    *,
    target: str | Target | None = None,
    dynamic_batch: bool = False,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    tolerance: float = TOLERANCE,
) -> Export:
    """Writes a prepared, calibrated network as a Q/DQ model and predicts it.

    BatchNormalization behind a convolution is folded into its weights before these are quantized; the integers stay
    those of training, because weights and scales of a channel are multiplied by the same factor. Scales are constants,
    node names are those of torch's export. The network is not changed.

    Args:
        model: The network; it is exported in evaluation mode, from the CPU.
        path: Where to write.
        sample: A tensor or a tuple of arguments.
        opset: 13 or newer.
        target: What to predict for; by default what the network was prepared for.
        dynamic_batch: Whether the first axis of every input and output is left open.
        input_names: Names for the inputs.
        output_names: Names for the outputs.
        tolerance: How far onnxruntime's results may be from the network's, see :attr:`Export.difference`.

    Returns:
        The prediction, and how far onnxruntime's results are from the network's.

    Raises:
        QdqtoolError: The network was not prepared or not calibrated, or the file cannot be written.
        ModelError: torch cannot export it, or onnxruntime's results are not the network's.
    """
    plan = plan_of(model)
    if opset < 13:
        raise QdqtoolError(f"opset={opset}: per-channel Q/DQ need 13 or newer")
    args = tuple(a.detach().cpu() if isinstance(a, Tensor) else a for a in as_arguments(sample))
    twin = copy.deepcopy(model).cpu()
    with evaluating(twin):
        wanted = _tensors(twin(*args))
        _freeze(twin, plan)
        proto = export_proto(twin, args, opset, **_names(input_names, output_names, args, wanted, dynamic_batch))
    for tidy in (fold_constants, transpose_weights, merge_pairs):
        proto = tidy(proto)
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        raise ModelError(f"{path}: the exported model is not valid: {str(error).splitlines()[0]}") from error
    difference = _difference(proto, args, wanted)
    if not difference <= tolerance:
        raise ModelError(
            f"{path}: onnxruntime's results are {difference:.3f} of their standard deviation away from the network's, "
            f"more than {tolerance:g}; nothing was written"
        )
    save(proto, path)
    return Export(os.fspath(path), predict(path, target or plan.target), difference, plan)


def _names(
    inputs: Sequence[str] | None, outputs: Sequence[str] | None, args: tuple[Any, ...], results: Sequence[Tensor],
    dynamic_batch: bool,
) -> dict[str, Any]:  # fmt: skip
    tensors = [a for a in args if isinstance(a, Tensor)]
    input_names = list(inputs) if inputs is not None else [f"input{i or ''}" for i in range(len(tensors))]
    output_names = list(outputs) if outputs is not None else [f"output{i or ''}" for i in range(len(results))]
    options: dict[str, Any] = {"input_names": input_names, "output_names": output_names}
    if dynamic_batch:
        options["dynamic_axes"] = {n: {0: "batch"} for n in (*input_names, *output_names)}
    return options


def _freeze(twin: nn.Module, plan: Plan) -> None:
    """Folds BatchNormalization and replaces every quantizer by one with a constant scale."""
    names = {id(m): n for n, m in twin.named_modules()}
    axes = {w.module: w.axis for w in plan.weights}
    found = list(quantizers_of(twin))
    for module, attribute, weight in found:
        if not weight and amax_of(getattr(module, attribute)) is None:
            where = f"{names[id(module)]}.{attribute}".lstrip(".")
            raise QdqtoolError(f"quantizer '{where}' has no range; call qdqtool.qat.calibrate before the export")
    # One scale for all channels does not survive factors that differ between them: such a convolution stays unfolded.
    norms = {norm: conv for norm, conv in plan.norms.items() if axes.get(conv, 0) is not None}
    factors = fold_norms(twin, norms)
    for module, attribute, weight in found:
        amax = amax_of(getattr(module, attribute))
        if not weight:
            assert amax is not None
            scale: Tensor = (amax.double().reshape(()) / LEVELS).float().clamp_min(torch.finfo(torch.float32).tiny)
            module._modules[attribute] = ExportQuantizer(scale, None)
            continue
        axis = axes[names[id(module)]]
        value = module._parameters["weight"]
        assert value is not None
        scale = torch.from_numpy(np.array(weight_scale(value.detach().numpy(), axis)))
        if amax is not None:  # the range of training, times what folding multiplied the channels by
            trained = amax.double().reshape(scale.shape) / LEVELS
            factor = factors.get(names[id(module)])
            trained = trained if factor is None else trained * factor.double().abs()
            scale = torch.where(trained > torch.finfo(torch.float32).tiny, trained.float(), scale)
        module._modules[attribute] = ExportQuantizer(scale, axis)
    twin.__dict__.pop(PLAN, None)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a network's result, in the order in which torch exports them."""
    if isinstance(value, Tensor):
        return [value.detach()]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    return []


def _difference(proto: onnx.ModelProto, args: tuple[Any, ...], wanted: Sequence[Tensor]) -> float:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Without rewriting: Q and DQ are computed as they stand there, which is what the network was trained with.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    given = [a.numpy() for a in args if isinstance(a, Tensor)]
    feeds = {i.name: a for i, a in zip(session.get_inputs(), given, strict=False)}
    results = session.run(None, feeds)
    worst = 0.0
    for result, reference in zip(results, wanted, strict=False):
        expected = reference.double().numpy()
        if result.shape != expected.shape:
            raise ModelError(f"an output has shape {result.shape} in onnxruntime and {expected.shape} in the network")
        if not np.isfinite(result).all():
            return float("inf")
        error = float(np.sqrt(np.mean((result.astype(np.float64) - expected) ** 2))) if expected.size else 0.0
        spread = float(expected.std()) or float(np.abs(expected).max(initial=0.0)) or 1.0
        worst = max(worst, error / spread)
    return worst
