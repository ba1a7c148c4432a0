"""What kind of node an error names, by the rules of TensorRT's and ONNX's names, and what to do for that kind."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from qdqtool.buildlog.names import parts
from qdqtool.explain.errors_entry import KnownError

_NO_IMPLEMENTATION = "Could not find any implementation for node"
_NUMBERS = re.compile(r"(?:_(?:clone_)?\d+){1,20}$")
_UNNAMED = re.compile(r"\(Unnamed Layer\* \d{1,9}\) \[(\w{1,40})\]")
_MAX_NAME = 4000


class NodeKind(StrEnum):
    """What a node does, as far as its name says."""

    REGION = "a region that Myelin compiles as a whole"
    CONVOLUTION = "a convolution"
    DECONVOLUTION = "a transposed convolution"
    PRODUCT = "a matrix product"
    SHAPE = "a computation of shapes or indices"
    NORMALIZATION = "a normalization or Softmax"
    POOLING = "a pooling"
    RESIZE = "a Resize"
    QUANTIZER = "a Q or DQ of its own"
    PLUGIN = "a plugin"
    POINTWISE = "an elementwise computation"
    MOVE = "a node that moves values"
    REDUCTION = "a reduction"
    OTHER = "a node of a kind that its name does not show"


# ONNX's operators (in the names that exporters give to nodes) and TensorRT's layer types, by what they do. Of several
# in one fused name the first kind of this table decides.
_KINDS: dict[NodeKind, frozenset[str]] = {
    kind: frozenset(words.lower().split())
    for kind, words in {
        NodeKind.DECONVOLUTION: "ConvTranspose Deconvolution Deconv",
        NodeKind.CONVOLUTION: "Conv Convolution Conv2d",
        NodeKind.PRODUCT: "Gemm MatMul MatrixMultiply FullyConnected Einsum Attention Linear",
        NodeKind.SHAPE: "Range Shape Size ConstantOfShape NonZero Where Expand Gather GatherElements GatherND "
                        "ScatterND "
                        "ScatterElements TopK ArgMax ArgMin OneHot CumSum Tile Loop If Scan Fill Select Equal Greater "
                        "Less And Or Not Trilu NonMaxSuppression Nms",
        NodeKind.NORMALIZATION: "LayerNormalization InstanceNormalization GroupNormalization BatchNormalization "
                                "Softmax "
                                "LogSoftmax LpNormalization Normalization RaggedSoftMax",
        NodeKind.POOLING: "MaxPool AveragePool GlobalAveragePool GlobalMaxPool Pooling",
        NodeKind.RESIZE: "Resize Upsample GridSample",
        NodeKind.REDUCTION: "ReduceMean ReduceMax ReduceSum ReduceMin ReduceL2 ReduceProd Reduce",
        NodeKind.POINTWISE: "Add Sub Mul Div Pow Sqrt Exp Log Erf Abs Neg Min Max Sum Relu LeakyRelu Sigmoid Tanh Clip "
                            "PRelu Elu Selu Gelu HardSigmoid HardSwish Softplus Mish Floor Ceil Sin Cos ElementWise "
                            "Activation Unary PointWise",
        NodeKind.MOVE: "Reshape Transpose Concat Concatenation Split Slice Pad Padding Flatten Squeeze Unsqueeze "
                       "Shuffle "
                       "Identity Cast DepthToSpace SpaceToDepth Constant",
        NodeKind.QUANTIZER: "QuantizeLinear DequantizeLinear Quantize Dequantize",
    }.items()
}  # fmt: skip
_BY_WORD = {word: kind for kind, words in _KINDS.items() for word in words}
_ORDER = list(_KINDS)


@dataclass(frozen=True, slots=True)
class NamedNode:
    """The node that an error names.

    Attributes:
        name: As printed.
        kind: What it does.
        quantized: Whether Q or DQ nodes are a part of it.
        activation: Whether an activation or another elementwise node is fused into it.
        ends: For a region, its first and last node.
    """

    name: str
    kind: NodeKind
    quantized: bool = False
    activation: bool = False
    ends: tuple[str, ...] = ()


def named_node(text: str) -> NamedNode | None:
    """The node behind ``Could not find any implementation for node``; None where the text names none."""
    start = text.find(_NO_IMPLEMENTATION)
    if start < 0:
        return None
    line = text[start + len(_NO_IMPLEMENTATION) :].split("\n", 1)[0][:_MAX_NAME]
    line = line.split(" due to ", 1)[0].strip().rstrip(")").rstrip(" ")
    if not line.strip(".:;,'\"{}[]() \t"):
        return None
    name = line.removesuffix(".").strip()
    if name.count("(") == name.count(")") + 1:
        name += ")"
    return node_of(name)


def node_of(name: str) -> NamedNode:
    """What a (fused) layer name says of its node."""
    fused = parts(name)
    if fused.kind == "foreign":
        return NamedNode(name, NodeKind.REGION, ends=tuple(fused.components))
    words = [operator_of(part) for part in fused.components] or [operator_of(name)]
    kinds = {kind for kind in map(kind_of, words) if kind is not None}
    quantized = NodeKind.QUANTIZER in kinds or "_quantizer/" in name
    kind = next((k for k in _ORDER if k in kinds), NodeKind.OTHER)
    if kind == NodeKind.OTHER and any(word.endswith(("_TRT", "Plugin")) for word in words):
        kind = NodeKind.PLUGIN
    return NamedNode(name, kind, quantized, NodeKind.POINTWISE in kinds and kind != NodeKind.POINTWISE)


def operator_of(component: str) -> str:
    """The operator in a node's name: ``/model.22/Range_2`` is a Range, ``Conv_224`` a Conv."""
    unnamed = _UNNAMED.search(component[:_MAX_NAME])
    if unnamed:
        return unnamed[1]
    last = component[-_MAX_NAME:].rsplit("/", 1)[-1].removesuffix("_quantize_scale_node")
    return _NUMBERS.sub("", last)


def kind_of(word: str) -> NodeKind | None:
    """The kind of an operator or of a word that people name layers with (``002_convolutional``, ``conv1``)."""
    lower = word.lower()
    found = _BY_WORD.get(lower)
    if found is not None:
        return found
    if lower.endswith(("weight", "bias", "_output_0")):
        return None
    if "quantizelinear" in lower:
        return NodeKind.QUANTIZER
    if "deconv" in lower or "convtranspose" in lower:
        return NodeKind.DECONVOLUTION
    return NodeKind.CONVOLUTION if "conv" in lower else None


_WORKSPACE = "raise the workspace (--memPoolSize=workspace:<MiB> from 8.4, --workspace=<MiB> before)"
_ADVICE: dict[NodeKind, tuple[str, str, str, str]] = {  # cause, fix, source, unknown
    NodeKind.REGION: (
        "{name} is a region from {ends} that Myelin compiles as a whole; the text does not say which node of it "
        "fails. Usual causes: too little workspace or memory, an operator or a shape that Myelin of this version "
        "cannot compile, and bugs of Myelin.",
        "Look above for 'Skipping tactic ... due to Myelin error' or 'insufficient memory': that is the cause. Then "
        + _WORKSPACE + ", fold constants and give static shapes, and try a newer TensorRT. A region with Q/DQ: leave "
        "them out inside the region. Marking a tensor inside as an output cuts the region, and shows which half "
        "fails.",
        "issues 1917 (fixed in 8.4 GA), 2734, 4736; onnx-tensorrt issues 758, 759",
        "Which node of the region fails; only the lines above can show it.",
    ),
    NodeKind.SHAPE: (
        "{name} is {kind}: integers, which no Q/DQ touches. Reported for YOLOv8 models with dynamic shapes that are "
        "built with --int8 and a calibrator, where the node gets no kernel.",
        "Export with static shapes (Ultralytics: without dynamic=True) and fold constants ('polygraphy surgeon "
        "sanitize "
        "--fold-constants', onnxsim), so that the node is gone. Removing Q/DQ pairs does not help. With dynamic "
        "shapes: a newer TensorRT.",
        "DeepStream-Yolo issue 545, deepstream-yolo-pose issue 10 (8.6, Orin)",
        "Why the builder finds no kernel for it: NVIDIA has not said.",
    ),
    NodeKind.DECONVOLUTION: (
        "{name} is {kind}. Quantized ones have few kernels: 8.4 and older refuse cases that 8.5 builds, per-channel "
        "scales must lie along the axis of that version, and grouped ones need at least 4 channels in each group in "
        "and out.",
        "Give its weights one scale (per tensor); build with TensorRT 8.5 or newer; or leave the Q/DQ of this node "
        "out.",
        "issues 2280 (fails on 8.4, passes on 8.5), 1934 (groups; resolved by 10.9), 1694",
        "",
    ),
    NodeKind.PRODUCT: (
        "{name} is {kind}, for which no kernel of this GPU and version runs the asked precision and shape.",
        "Make its inner dimensions multiples of 16 where they can be, " + _WORKSPACE + ", or leave the Q/DQ in front "
        "of it out; try a newer TensorRT.",
        "documentation, 'Q/DQ limitations'",
        "The exact condition; the text does not say it.",
    ),
    NodeKind.PLUGIN: (
        "{name} is {kind}, and none of the formats and types that its supportsFormatCombination allows could be used "
        "here.",
        "Allow FP32 (or FP16) in linear format for every input and output of the plugin, keep Q/DQ away from it, and "
        "check that the plugin's library fits this TensorRT.",
        "documentation, IPluginV2DynamicExt",
        "",
    ),
    NodeKind.QUANTIZER: (
        "{name} is {kind}: nothing took it in, and no kernel runs it alone. Reported where it has several scales, one "
        "for each channel of an activation (ModelOpt's SmoothQuant configuration used on convolutions); a kernel of "
        "its own takes one scale for the whole tensor.",
        "Give activations one scale: INT8_DEFAULT_CFG instead of INT8_SMOOTHQUANT_CFG in ModelOpt, no axis on "
        "activation quantizers elsewhere ('qdqtool predict' names them: ACT-PER-CHANNEL). Else leave the pair out.",
        "Model-Optimizer issue 10 (8.6.1); issue 4008 (the same configuration)",
        "Whether its scales are the cause; the text does not say it.",
    ),
    NodeKind.NORMALIZATION: (
        "{name} is {kind}, which has no INT8 kernel in general.",
        "Leave the Q/DQ directly in front of and behind it out: it runs in float. Else " + _WORKSPACE + ".",
        "documentation, 'Q/DQ limitations'",
        "The exact condition; the text does not say it.",
    ),
}
_PLAIN = (
    "{name} is {kind}, and no kernel of this GPU and version runs it in the precision and format that were left to "
    "choose.",
    "Where a Q or DQ is directly in front of or behind it, leave that out: it then runs in float. Else "
    + _WORKSPACE + ", and try a newer TensorRT.",
    "wording of the builder; no report of this kind of node is known",
    "The cause; the text does not say it, the lines above may.",
)
_FLOAT_CONVOLUTION = (
    "{name} is {kind} without Q/DQ in its name: the precision was not set by Q/DQ but by flags, a calibration table or "
    "the model's types.",
    _WORKSPACE[0].upper() + _WORKSPACE[1:] + " and free GPU memory; with a calibration table (--int8 without Q/DQ) "
    "allow --fp16 as well, so that a kernel is left where INT8 has none; try a newer TensorRT.",
    "Model-Optimizer issue 50, tensorrt_demos issue 603, issue 4555",
    "The exact condition; the text does not say it.",
)


def for_node(entry: KnownError, text: str) -> KnownError:
    """The entry about a missing kernel, made for the node that the text names."""
    node = named_node(text)
    if node is None:
        return entry
    if node.kind == NodeKind.CONVOLUTION and node.quantized:
        return replace(entry, cause=f"{short(node.name)} is a quantized convolution. {entry.cause}")
    if node.kind == NodeKind.OTHER and not node.quantized:
        return replace(entry, cause=f"{short(node.name)}: its name does not say what it is. {entry.cause}",
                       unknown="What kind of node it is; the advice is the one for convolutions.")
    cause, fix, source, unknown = (
        _FLOAT_CONVOLUTION if node.kind == NodeKind.CONVOLUTION else _ADVICE.get(node.kind, _PLAIN)
    )
    ends = " to ".join(map(short, node.ends)) or "its first to its last node"
    words = cause.format(name=short(node.name), kind=node.kind, ends=ends)
    return replace(entry, title=f"No kernel for {node.kind}", cause=words, fix=fix, source=source, codes=(),
                   unknown=unknown)


def short(name: str) -> str:
    """A name that fits into a sentence."""
    return name if len(name) <= 90 else f"{name[:40]}...{name[-40:]}"
