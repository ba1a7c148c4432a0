"""What TensorRT's warnings and errors mean for a Q/DQ model: text, cause, fix.

The texts are in ``qdqtool/knowledge/errors.toml``: wording and causes from NVIDIA's issue threads, from the sources of
onnx-tensorrt and trtexec, and from TensorRT's documentation. A text is matched by a fragment that is the same in every
version; names and numbers in it may differ. An error that is not in the table is described by its form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from qdqtool.buildlog import log
from qdqtool.buildlog.names import parts
from qdqtool.knowledge import entry, table
from qdqtool.types import Json

__all__ = ["ERROR", "HARMLESS", "KNOWN", "WARNING", "KnownError", "annotate", "lookup"]


HARMLESS = "harmless"
WARNING = "warning"
ERROR = "error"


@dataclass(frozen=True, slots=True)
class KnownError:
    """A message that is known.

    Attributes:
        id: Stable short name.
        title: What it is, in a few words.
        pattern: Regular expression, searched without regard to case; short and free of nested repetition.
        severity: ``error``, ``warning`` or ``harmless``.
        cause: Why TensorRT says it, in one sentence or two.
        fix: What to do.
        source: Where cause and fix come from.
        versions: TensorRT versions that say it, where that is known.
        codes: Finding codes of ``qdqtool predict`` that report it before the build.
        fixed: For a bug: in which version NVIDIA says that it is fixed, and where it says so.
        unknown: What is not known of it.
    """

    id: str
    title: str
    pattern: str
    severity: str
    cause: str
    fix: str
    source: str
    codes: tuple[str, ...] = ()
    versions: str = ""
    fixed: str = ""
    unknown: str = ""


_PLACE = re.compile(r"\[([\w.-]{1,80}\.(?:cpp|h|cu|hpp|cuh))::?([\w:~<>]{1,200}?)::?(\d{1,6})\]")
_PATH = re.compile(r"([\w-]{1,80}\.(?:cpp|h|cu|hpp|cuh))(?: \((\d{1,6})\)|:(\d{1,6}))")
_FUNCTION = re.compile(r"In function (\w{1,80})|Assertion Error in (\w{1,80})|In node -?\d{1,9} \((\w{1,80})\)")
_CODE = re.compile(r"Error Code:? (\d{1,2})\b|Error\[(\d{1,2})\]")
_BARE_CODE = re.compile(r"(?:^|\] |ERROR: |INTERNAL_ERROR: )(\d{1,2}): (?=\[|Assertion|Could|Internal)")
_ASSERTION = re.compile(r"Assertion(?: failed:)? [`']?(.{1,300}?)'?(?: failed|$|\n|\. ?\))")
_CATEGORY = re.compile(r"Error Code:? \d{1,2}: ([A-Z][A-Za-z ]{2,40}?) (?:Error|Failure)")
_STATUS = re.compile(
    r"\b(INVALID_(?:NODE|GRAPH|VALUE)|UNSUPPORTED_(?:NODE|GRAPH|NODE_ATTR|NODE_INPUT|NODE_DATATYPE|NODE_DYNAMIC)"
    r"|MODEL_DESERIALIZE_FAILED): (.{1,300})"
)  # what the parser's functions return
_PROVIDER = re.compile(rb"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +(?:WARNING|ERROR)\]")  # onnxruntime's stamp, alone
_LINES = 50  # of an excerpt, in which a marked line is looked for
_OLD_ASSERTION = re.compile(r"Assertion Error in \w{1,80}: \d{1,9} \((.{1,300})\)")  # to TensorRT 7
_MAX_TEXT = 20_000

CODES = {
    1: "an error that fits no other class: mostly one of CUDA, cuDNN, Cask or Myelin",
    2: "an internal error: a condition in TensorRT's own code did not hold",
    3: "an argument that is wrong in itself: the API was used wrongly",
    4: "a network or a setting that contradicts itself",
    5: "memory could not be allocated",
    6: "a library that TensorRT needs could not be started",
    7: "a kernel failed while running (CUDA or DLA)",
    8: "a computation went wrong while running",
    9: "a call in a state that does not allow it; in TensorRT 10 also a kernel that was passed over",
    10: "something that TensorRT does not support, mostly a layer without a kernel",
}
"""Meaning of ``Error Code N`` (ErrorCode in TensorRT's API documentation)."""

# Which part of TensorRT a source file belongs to, by the beginning of its name.
_PARTS = (
    (("builtin_op_importers", "modelimporter", "onnx2trt", "onnxopimporters", "onnxopcheckers", "shapedweights",
      "weightscontext", "conditionalhelpers", "loophelpers", "rnnhelpers", "importerutils"), "the ONNX parser",
     "The model's file is the place to look: the node that the lines around name."),
    (("qdqgraphoptimizer",), "the Q/DQ optimizer", "Q/DQ pairs are where it cannot place or fuse them."),
    (("graphoptimizer", "shapemachine", "cgraph", "graph.", "layeraspects", "fusion"), "the graph optimizer",
     "A fusion or rewriting of layers failed."),
    (("pointwise",), "the fusion of elementwise layers", "Elementwise nodes around Q/DQ pairs were fused wrongly."),
    (("weightconvert", "weightsconvert", "quantiz", "calibrat"), "the conversion of weights and scales",
     "A scale or range is missing, zero or of the wrong number."),
    (("scalenode", "convnode", "deconvnode", "nodebase", "node"), "the checks of one kind of layer",
     "The layer's parameters do not fit each other."),
    (("cask", "cudnn", "convbase", "deconv", "gemm"), "the kernels of convolutions and matrix products",
     "The kernel refuses the layer's parameters, weights or scales."),
    (("cublas", "ltwrapper"), "cuBLAS", "The library is missing, of another version, or out of memory."),
    (("plugin",), "plugins", "A plugin failed or was given types or scales that it does not take."),
    (("optimizer", "tactic", "autotuner", "timing"), "the choice of kernels",
     "No kernel worked, or timing one failed; memory is the first suspect."),
    (("builder",), "the builder", "It reports what failed in the lines above."),
    (("myelin", "codegenerator", "type.cpp", "operation", "compiler", "kqv", "symbolic", "foreign"), "Myelin",
     "It compiles whole regions: transformer blocks, shape computations, what classic layers cannot do."),
    (("dla",), "DLA", "DLA supports few layers and no Q/DQ."),
    (("runtime", "rthelper", "engine", "serialization", "context", "coreread"), "the runtime",
     "The engine was built with another version or for another GPU, or is used wrongly."),
    (("cuda", "defaultallocator", "resources", "allocator", "memory"), "CUDA and memory",
     "Mostly too little GPU memory, or a driver that does not fit."),
    (("network", "layers.cpp", "api", "parametercheck"), "the network API",
     "A layer was described with parameters that do not fit."),
)
_PARSER = _PARTS[0][1]


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """An error text, taken apart; empty or None where it does not say.

    Attributes:
        file: Source file of TensorRT.
        function: Function in it.
        line: Line in it.
        code: ``Error Code N``.
        condition: The condition that did not hold.
        part: Which part of TensorRT the file belongs to.
        about: What errors of that part are about.
        status: What the parser says of the node, with the code in front.
    """

    file: str = ""
    function: str = ""
    line: int | None = None
    code: int | None = None
    condition: str = ""
    part: str = ""
    about: str = ""
    status: str = ""

    @property
    def is_error(self) -> bool:
        """Whether the text has the form of an error at all."""
        return bool(self.condition or self.code is not None or self.status or (self.file and self.function))


def parse_error(text: str) -> ErrorLine:
    """Takes an error text apart."""
    text = text[:_MAX_TEXT]
    file = function = ""
    line: int | None = None
    place = _PLACE.search(text)
    if place:
        file, function, line = place[1], place[2].rsplit("::", 1)[-1], int(place[3])
    else:
        path = _PATH.search(text)
        if path:
            file, line = path[1], int(path[2] or path[3])
        named = _FUNCTION.search(text)
        function = next((g for g in named.groups() if g), "") if named else ""
    code = _CODE.search(text) or _BARE_CODE.search(text)
    number = int(next(g for g in code.groups() if g)) if code else None
    assertion = _OLD_ASSERTION.search(text) or _ASSERTION.search(text)
    condition = assertion[1].strip().rstrip(".") if assertion else ""
    status = _STATUS.search(text)
    lower = file.lower()
    part, about = next(((p, a) for names, p, a in _PARTS if lower.startswith(names)), ("", ""))
    if not part and (status or function.startswith("import")):
        part, about = _PARTS[0][1:]
    said = f"{status[1]}: {status[2].strip().rstrip('.')}" if status else ""
    return ErrorLine(file, function, line, number, condition, part, about, said)


def from_shape(text: str) -> KnownError | None:
    """What the form of an error text says where its words are not known; None where it is no error of TensorRT."""
    found = parse_error(text)
    if not found.is_error:
        return _marked(text)
    parts: list[str] = []
    if found.status:
        parts.append(f"The parser says {found.status}.")
    if found.condition:
        parts.append(f"A condition in TensorRT's code did not hold: {found.condition}.")
    if found.code is not None:
        parts.append(f"Error code {found.code} is {CODES.get(found.code, 'none that the documentation names')}.")
    if found.file:
        inside = f", function {found.function}" if found.function else ""
        owner = f", belongs to {found.part}" if found.part else ""
        parts.append(f"{found.file}{inside}{owner}. {found.about}".rstrip())
    hint = _scales(found)
    if hint:
        parts.append(hint)
    first = (
        "Read the lines above: they name the node. "
        if found.part in ("", "the builder") else "The lines above name the node or layer. "
    )
    return KnownError(
        "unknown-error", f"An error of {found.part or 'TensorRT'} that is not in our table", "", ERROR,
        " ".join(parts), first + _steps(found),
        "the form of the text; error codes: TensorRT's API documentation",
        unknown="Its cause. Nothing about these words is in our table; search NVIDIA's issues for "
                f"'{(found.condition or found.status or found.function or found.file)[:80]}'.",
    )  # fmt: skip


def _marked(text: str) -> KnownError | None:
    """A line that only its prefix shows to be a warning or an error of TensorRT: nothing else is known of it."""
    for line in text.encode(errors="replace").split(b"\n", _LINES)[:_LINES]:
        cleaned = log.clean(line)
        level, _, message = log.split(cleaned)
        said = message.decode(errors="replace").strip()
        if level not in ("W", "E") or not said or not (log.is_marked(cleaned) or _PROVIDER.match(cleaned)):
            continue
        error = level == "E"
        name = "An error" if error else "A warning"
        return KnownError(
            f"unknown-{'error' if error else 'warning'}", f"{name} of TensorRT that is not in our table", "",
            ERROR if error else WARNING, f"TensorRT's logger marks this line as {name.lower()}; nothing more is known.",
            _steps(ErrorLine()) if error else
            "Compare the engine's layers with the prediction ('qdqtool verify'): a warning that changes nothing there "
            "can stay.",
            "the line's prefix", unknown=f"What it means. Search NVIDIA's issues for '{said[:80]}'.",
        )  # fmt: skip
    return None


def _scales(found: ErrorLine) -> str:
    words = f"{found.condition} {found.function}".lower()
    if "scale" in words:
        return "It is about scales: their number, or that there is one at all."
    if "axis" in words or "dims" in words or "shape" in words:
        return "It is about shapes or axes."
    if "memory" in words or "alloc" in words:
        return "It is about memory."
    return ""


def _steps(found: ErrorLine) -> str:
    if found.part == _PARSER:
        return (
            "Check the model (onnx.checker, onnxruntime), fold constants ('polygraphy surgeon sanitize "
            "--fold-constants') and see whether this operator and opset are in onnx-tensorrt's operators.md."
        )
    if found.code == 5 or "alloc" in found.function.lower():
        return "Free GPU memory, lower the workspace or the batch, and close other programs on this GPU."
    if found.part in ("the runtime", "CUDA and memory"):
        return "Check that engine, TensorRT, driver and GPU belong together; build the engine again on this machine."
    return (
        "Find out whether Q/DQ is the cause: build the model without Q/DQ (or without --int8). If that works, run "
        "'qdqtool predict' for what it knows before a build, then leave the Q/DQ of one block after another out. "
        "Try a newer TensorRT before anything longer: most texts of this form are bugs of one version."
    )


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


KNOWN = tuple(entry(KnownError, given, given.get("id", "error")) for given in table("errors")["error"])
"""Every known text, the ones that say most before those that are consequences of others."""

_COMPILED = [(re.compile(known.pattern, re.IGNORECASE | re.DOTALL), known) for known in KNOWN]
_MAX_MESSAGE = 4000


def lookup(text: str) -> KnownError | None:
    """The entry for a warning or error of TensorRT, made for the node that it names.

    Where the words are in no entry and the text has the form of an error of TensorRT: what the form says, and that the
    cause is not known. None for any other text.

    Args:
        text: The message or a part of it; only the first 4,000 characters are looked at.
    """
    head = text[:_MAX_MESSAGE]
    found = next((known for pattern, known in _COMPILED if pattern.search(head)), None)
    if found is None:
        return from_shape(head)
    return for_node(found, head) if found.id == "no-implementation" else found


def annotate(facts: Json) -> Json:
    """Adds what is known of each message to the facts of a build (:func:`qdqtool.buildlog.summary.summarize`)."""
    for message in facts["messages"]:
        known = lookup(message["text"])
        message |= {
            "known": known.id if known else None,
            "severity": known.severity if known else None,
            "cause": known.cause if known else None,
            "fix": known.fix if known else None,
        }
    return facts
