"""Preparation of float networks for Q/DQ pairs, with the choice of FP16 or FP32 layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.insertion import fp16
from qdqtool.insertion.batchnorm import fold_leading_batch_normalization
from qdqtool.insertion.number_formats import INT8, NumberFormat
from qdqtool.insertion.prepare import MIN_OPSET, note_changes, prepare_float_model
from qdqtool.ir.branches import find_subgraph_contents
from qdqtool.ir.graph import EDITED, Model
from qdqtool.ir.modelfile import ModelSource, load_full
from qdqtool.ir.qdq import find_bfloat16, is_quantized
from qdqtool.patterns.fake_quantizers import find_fake_quantizers, find_nested_quantizers
from qdqtool.patterns.half import HALF_OPSET
from qdqtool.trt.targets import Target
from qdqtool.util.notes import Note
from qdqtool.util.text import format_count


@dataclass
class PreparedNetwork:
    """A float network that is ready for Q/DQ pairs.

    Attributes:
        model: The network, which may be edited.
        fp16: Whether the layers without Q/DQ will be FP16.
        source: The `model` argument of the caller: a path, bytes or a model object.
        loaded: The loaded model. `model` is a copy of it if the caller passed a model object, else
            the same object.
        notes: Notes on changes that the preparation made.
        warnings: Warnings about options without effect, and about subgraphs that remain float.
    """

    model: Model
    fp16: bool
    source: ModelSource | Model
    loaded: Model
    notes: list[Note] = field(default_factory=list)
    warnings: list[Note] = field(default_factory=list)

    def load_float_model(self) -> Model:
        """Return the unchanged float model; read the file again if the loaded model was edited."""
        return load_full(self.source) if self.model is self.loaded else self.loaded


def prepare_network(
    model: ModelSource | Model,
    target: Target,
    weights: str,
    high_precision: str | None,
    loaded: Model | None = None,
    number_format: NumberFormat = INT8,
) -> PreparedNetwork:
    """Prepare a float model for Q/DQ pairs. A model object of the caller is not changed.

    Args:
        model: The float model.
        target: Target that will run the Q/DQ model.
        weights: Option `weights` of :func:`qdqtool.insert`; ``int8`` stores int8 weights.
        high_precision: Option `high_precision` of :func:`qdqtool.insert`. If None, the layers
            without Q/DQ become FP16 on a target that computes in the types of the file, unless the
            preparation for FP16 fails.
        loaded: The loaded model, if `model` was loaded already.
        number_format: Format of the Q/DQ pairs.

    Raises:
        ModelError: The model cannot be read, is quantized already, or cannot be prepared.
        QdqtoolError: `high_precision` is ``fp16``, and the target does not support FP16 scales.
    """
    loaded = load_full(model) if loaded is None else loaded
    _check_float_model(loaded)
    if high_precision == "fp16" and not target.float16_scales:
        raise QdqtoolError(
            f"`high_precision='fp16'`: {target.name} reads no FP16 scales and chooses FP16 "
            "itself; leave `high_precision` out, and build with INT8 and FP16 (--int8 --fp16)",
            code="option-conflict",
            parameter="high_precision",
        )
    wants_fp16 = high_precision == "fp16" or (high_precision is None and target.strongly_typed)
    try:
        network = _copy_network(model, loaded, wants_fp16)
        _prepare_in_place(network, target, weights, number_format)
    except ModelError as error:
        if not wants_fp16 or high_precision is not None:
            raise
        network = _copy_network(model, load_full(model), False)
        _prepare_in_place(network, target, weights, number_format)
        network.warnings.append(
            Note(
                f"the layers without Q/DQ stay FP32 and run in FP32 on {target.name}, because the "
                f"conversion of the model to FP16 failed: {error}",
                code="half-impossible",
                target=target.name,
                error=str(error),
            )
        )
    return network


def _copy_network(model: ModelSource | Model, loaded: Model, wants_fp16: bool) -> PreparedNetwork:
    is_callers = model is loaded or model is loaded.proto
    return PreparedNetwork(loaded.copy() if is_callers else loaded, wants_fp16, model, loaded)


def _check_float_model(model: Model) -> None:
    path = model.path or "model"
    if is_quantized(model):
        raise ModelError(
            "is quantized already (it has Q/DQ or integer operators); give the float model, or "
            "run 'qdqtool predict' on this model",
            path,
            code="already-quantized",
        )
    nested = next((c for c in find_subgraph_contents(model) if c.quantizers), None)
    if nested is not None:
        raise ModelError(
            f"is quantized already ({format_count(nested.quantizers, 'Q/DQ node')} in the "
            f"subgraphs of '{nested.node.name}' ({nested.node.op})); give the float model, or run "
            "'qdqtool predict' on this model",
            path,
            code="already-quantized",
            node=nested.node.name,
        )
    fakes = find_fake_quantizers(model) or find_nested_quantizers(model)
    if fakes:
        raise ModelError(
            f"has quantizers that are not Q/DQ nodes: {len(fakes)}, such as '{fakes[0].name}' "
            f"({fakes[0].form}). Q/DQ pairs would quantize these tensors twice. Run 'qdqtool fix' "
            "to rewrite them as Q/DQ, or give the float model",
            path,
            code="already-quantized",
            node=fakes[0].name,
        )
    _check_output_producers(model, path)


def _check_output_producers(model: Model, path: str) -> None:
    sparse = {s.values.name for s in model.proto.graph.sparse_initializer}
    produced = {*model.producers, *model.initializers, *model.inputs, *sparse}
    for output in model.outputs:
        if output not in produced:
            raise ModelError(
                f"no node computes the output '{output}'; export the model again",
                path,
                code="output-without-producer",
                node=output,
            )


def _warn_float_subgraphs(model: Model) -> list[Note]:
    warnings = []
    for content in find_subgraph_contents(model):
        count = content.convolutions + content.products
        if count:
            warnings.append(
                Note(
                    f"{content.node.name} ({content.node.op}): its subgraphs have "
                    f"{format_count(count, 'layer')} that remain float; export without control "
                    "flow to quantize them",
                    code="subgraph-float",
                    node=content.node.name,
                    count=count,
                )
            )
    return warnings


def _widen_floats(model: Model, target: Target) -> list[Note]:
    """Convert bfloat16 to float32 in place; float16 too if the target lacks FP16 scales."""
    notes = []
    if find_bfloat16(model):
        fp16.widen_bfloat16(model)
        notes.append(
            Note(
                "bfloat16 was widened to float32, also in the inputs and outputs: the values are "
                "the same; the builder may still compute in BF16 (--bf16) or FP16",
                code="bfloat16-widened",
            )
        )
    if fp16.has_fp16(model) and not target.float16_scales:
        fp16.widen_float16(model)
        notes.append(
            Note(
                f"float16 was widened to float32, because {target.name} reads no FP16 scales; "
                "build with --fp16 instead",
                code="widened",
                target=target.name,
            )
        )
    return notes


def _prepare_in_place(
    network: PreparedNetwork, target: Target, weights: str, number_format: NumberFormat
) -> None:
    model, notes = network.model, network.notes
    notes += _widen_floats(model, target)
    if weights == "int8" and not target.int8_weights:
        network.warnings.append(
            Note(
                f"{target.name} cannot read int8 weights; use `weights='float'`",
                code="int8-weights-unread",
                target=target.name,
            )
        )
    network.warnings += _warn_float_subgraphs(model)
    # The hash of the file identifies its calibration cache. Preparation gives the same tensors for
    # every opset. A widened or edited model has other tensors, so it gets no hash.
    sha256 = None if notes or network.loaded.sha256 == EDITED else network.loaded.sha256
    if network.loaded.inlined_functions:
        notes.append(Note("model-local functions were inlined", code="inlined"))
    # A widened model still has FP16 inputs and outputs, but no FP16 scales.
    has_fp16_scales = network.fp16 or (target.float16_scales and fp16.has_fp16(model))
    opset = HALF_OPSET if has_fp16_scales else MIN_OPSET
    notes.extend(prepare_float_model(model, opset=max(opset, number_format.opset)))
    count = fold_leading_batch_normalization(model)
    change = f"folded into the convolutions after {'it' if count == 1 else 'them'}"
    notes += note_changes("norms-folded-behind", count, "BatchNormalization node", change)
    model.sha256 = sha256
