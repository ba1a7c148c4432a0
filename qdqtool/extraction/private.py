"""Makes a model fit to be sent to others: nothing of it stays but its structure.

Names become other names, consistently; doc strings, metadata and whatever else is text goes; weights become random
ones of the same ranges; scales become others, equal ones equal. What is predicted stays the same,
which is checked. Dimensions, integer constants that are shapes, and single numbers (a Clip's bounds) are structure.

Words of ONNX, TensorRT and the programs that write models are no secret.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import onnx
from google.protobuf.message import Message

from qdqtool.errors import ModelError
from qdqtool.explain.messages import worded
from qdqtool.extraction.masking import masked
from qdqtool.model import operators
from qdqtool.model.external import all_tensors, location_of
from qdqtool.model.graph import Model
from qdqtool.prediction import predict
from qdqtool.trt.targets import TARGETS
from qdqtool.types import ConvOutcome, Finding, FindingCode, Precision, Prediction

PUBLIC_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "ai.onnx.preview.training", "trt"})
# Attributes of known operators whose text is one of a few words of the standard, and these words.
_WORDS = frozenset({
    "auto_pad", "mode", "coordinate_transformation_mode", "nearest_mode", "padding_mode", "direction", "reduction",
    "activations", "activation", "equation", "approximate", "keep_aspect_ratio_policy", "norm", "round_mode",
})
_VALUES = frozenset({
    "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID", "constant", "reflect", "edge", "wrap", "nearest", "linear",
    "cubic", "bilinear", "bicubic", "DCR", "CRD", "avg", "max", "half_pixel", "half_pixel_symmetric",
    "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn", "tf_crop_and_resize",
    "output_half_pixel", "round_prefer_floor", "round_prefer_ceil", "floor", "ceil", "zeros", "border", "reflection",
    "forward", "reverse", "bidirectional", "LEFT", "RIGHT", "none", "add", "mul", "min", "mean", "sum", "tanh",
    "stretch", "not_larger", "not_smaller", "MAX", "L1", "L2", "up", "down",
})
_EQUATION = re.compile(r"[A-Za-z]{0,8}(?:(?:,|->|\.\.\.| )[A-Za-z]{0,8}){0,16}")
# Plugins that come with TensorRT, and the quantizers that its tools write.
_PLUGINS = frozenset({
    "EfficientNMS_TRT", "EfficientNMS_ONNX_TRT", "EfficientNMS_Explicit_TF_TRT", "EfficientNMS_Implicit_TF_TRT",
    "BatchedNMS_TRT", "BatchedNMSDynamic_TRT", "NMS_TRT", "NMSDynamic_TRT", "ROIAlign_TRT", "ResizeNearest_TRT",
    "InstanceNormalization_TRT", "PriorBox_TRT", "GridAnchor_TRT", "FlattenConcat_TRT", "DecodeBbox3DPlugin",
    "TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear", "TRT_FP4DynamicQuantize", "TRT_INT4QuantizeLinear",
    "TRT_INT4DequantizeLinear",
})
_PLUGIN_ATTRIBUTES = frozenset({
    "plugin_version", "plugin_namespace", "background_class", "max_output_boxes", "score_threshold", "iou_threshold",
    "score_activation", "class_agnostic", "box_coding", "shareLocation", "backgroundLabelId", "numClasses", "topK",
    "keepTopK", "scoreThreshold", "iouThreshold", "isNormalized", "clipBoxes", "scoreBits", "caffeSemantics",
    "saturate", "axis",
})
_PROGRAMS = frozenset({
    "pytorch", "onnx-graphsurgeon", "onnx.quantize", "onnxruntime", "onnx.compose", "tf2onnx", "keras2onnx", "skl2onnx",
    "paddle2onnx", "onnx", "qdqtool",
})


def is_public(text: str) -> bool:
    """Whether a text is a word of ONNX, TensorRT or this tool and no secret."""
    return text in _vocabulary()


@functools.cache
def _vocabulary() -> frozenset[str]:
    known = {*_PLUGINS, *_WORDS, *PUBLIC_DOMAINS, *_PROGRAMS}
    for schema in onnx.defs.get_all_schemas_with_history():
        known.update((schema.name, *schema.attributes))
        known.update(i.name for i in (*schema.inputs, *schema.outputs))
    return frozenset(known)


def public_attributes(node: onnx.NodeProto) -> frozenset[str] | None:
    """The attributes of a public operator, None for one that nobody knows."""
    op, domain = node.op_type, node.domain
    if domain == "com.microsoft":
        return _runtime_operators().get(op)
    if op in _PLUGINS:
        return _PLUGIN_ATTRIBUTES
    if domain in PUBLIC_DOMAINS and (op in _vocabulary() or op in operators.OPERATORS):
        return _vocabulary()
    return None


@functools.cache
def _runtime_operators() -> dict[str, frozenset[str]]:
    """The operators that onnxruntime adds, with their attributes."""
    from onnxruntime.capi import onnxruntime_pybind11_state as runtime

    return {s.name: frozenset(s.attributes) for s in runtime.get_all_operator_schema() if s.domain == "com.microsoft"}


def is_word(attribute: str, text: str) -> bool:
    if attribute == "equation":
        return _EQUATION.fullmatch(text) is not None
    return attribute in _WORDS and (text in _VALUES or is_public(text))


@dataclass(frozen=True)
class Shown:
    """Findings and convolutions that stay the same.

    Attributes:
        findings: Of the whole model.
        convolutions: Of the whole model.
    """

    findings: tuple[Finding, ...] = ()
    convolutions: tuple[ConvOutcome, ...] = ()

    def missing(self, prediction: Prediction) -> list[str]:
        """What a prediction does not show, in words; empty when it shows everything."""
        there = {key(f) for f in prediction.findings}
        lines = [f"{f.code} at {f.node or 'the network'}" for f in self.findings if key(f) not in there]
        by_name = {c.name: c for c in prediction.convolutions}
        for conv in self.convolutions:
            other = by_name.get(conv.name)
            if other is None or not same(conv, other):
                lines.append(f"the outcome of {conv.name}")
        return lines

    def holds(self, prediction: Prediction) -> bool:
        """Whether a prediction shows everything."""
        return not self.missing(prediction)


def key(finding: Finding) -> tuple[str, str, str, str, str]:
    """Equal for two findings that say the same; sizes of tensors apart, which a smaller model changes."""
    return str(finding.code), str(finding.severity), finding.node, *worded(finding, sizes=False)


def same(one: ConvOutcome, two: ConvOutcome) -> bool:
    """Whether two outcomes have the same data types; FLOAT agrees with any width of float."""
    return (
        one.op == two.op and one.weights == two.weights and one.precision.agrees(two.precision)
        and one.output.agrees(two.output) and len(one.inputs) == len(two.inputs)
        and all(a.agrees(b) for a, b in zip(one.inputs, two.inputs, strict=True))
    )


def of_findings(prediction: Prediction, findings: Sequence[Finding]) -> Shown:
    """Findings and the convolutions that they name."""
    named = {name for f in findings for name in (*f.convolutions, f.node)}
    return Shown(tuple(findings), tuple(c for c in prediction.convolutions if c.name in named))


def of_node(prediction: Prediction, name: str) -> Shown:
    """What is predicted of one node."""
    findings = tuple(f for f in prediction.findings if f.node == name or name in f.convolutions)
    return Shown(findings, tuple(c for c in prediction.convolutions if c.name == name))


def choose(prediction: Prediction, wanted: str, node: str | None) -> Finding:
    """The finding that ``CODE`` or ``CODE:n`` stands for; n counts from 1, in the order of ``predict``.

    Raises:
        ModelError: There is none.
    """
    code, colon, number = wanted.partition(":")
    code = code.strip().upper()
    found = [f for f in prediction.findings if f.code == code and (node is None or f.node == node or
                                                                   node in f.convolutions)]
    what = prediction.model.path or "model"
    place = f" at '{node}'" if node is not None else ""
    if not found:
        counts = prediction.findings_by_code()
        there = ", ".join(f"{c} ({n})" for c, n in counts.items()) or "none"
        raise ModelError(f"{what}: has no finding {code}{place} on {prediction.target}; its findings: {there}")
    if not colon:
        return found[0]
    if not number.isascii() or not number.isdigit() or not 1 <= int(number[:9]) <= len(found):
        count = f"there are {len(found)}" if len(found) > 1 else "there is 1"
        raise ModelError(f"{what}: `finding` {wanted}: {count} of {code}{place}, counted from 1")
    return found[int(number) - 1]


def listed(items: Sequence[str], most: int = 4) -> str:
    """A list in words."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


_LETTERS = "bcdfghjklmnpqrstvwxz"  # no vowels: no words, and no digits, which old exporters use as names
_PREFIXES = {
    "domain": "o", "op": "F", "attribute": "a", "node": "n", "tensor": "t", "size": "d", "text": "s", "graph": "g",
}  # fmt: skip
_SEEDS = 8
_SHORTEST = 3  # letters of a text that can be distinguished from chance
_LONG = 64  # letters; such a text is none of ours
_TRIES = 20_000  # spellings; that many taken ones are an attack
_CLEARED = frozenset({
    "metadata_props", "quantization_annotation", "training_info", "configuration", "device_configurations",
    "external_data", "doc_string", "denotation", "producer_name", "producer_version", "overload", "segment",
})
_WORD = re.compile(r"[^\s,()';\"`]+")
_JOINED = re.compile(r"( \+ | \|\| )")  # between the nodes of one layer
_ANYBODYS = re.compile(r"[A-Za-z]{1,12}|[\d.]+")  # in prose: plain words and numbers
# Words that a report says of every model.
_OWN_WORDS = frozenset({
    "model.onnx", "extract.onnx", *TARGETS, *(p.value for p in Precision),
    *get_args(FindingCode),
})


def _without_copies(name: str) -> int:
    """Where the ``_clone_<input>`` of copies in front of Concats begin at a name's end."""
    end = len(name)
    while (at := name.rfind("_clone_", 0, end)) >= 0 and name[at + len("_clone_") : end].isdigit():
        end = at
    return end


class Private:
    """The names that were replaced.

    Args:
        secrets: Texts of which none may be left.

    Attributes:
        names: Original to new.
        kept: Words of ONNX's own that were kept.
    """

    def __init__(self, secrets: set[str]) -> None:
        self.names: dict[str, str] = {}
        self.kept: set[str] = set()  # words of the standard
        self._secrets = {s for s in secrets if len(s) >= _SHORTEST}
        self._spellings = {kind: _spelled(prefix) for kind, prefix in _PREFIXES.items()}

    def name(self, original: str, kind: str = "tensor") -> str:
        """The new name of something; the same for the same.

        Raises:
            ModelError: Every name that could be given is in the original.
        """
        if not original:
            return ""
        if original not in self.names:
            spellings = itertools.islice(self._spellings[kind], _TRIES)
            new = next((n for n in spellings if self._within(n, _SHORTEST) is None), None)
            if new is None:
                raise ModelError("the model's names leave none free for a private one; rename its tensors first")
            self.names[original] = new
        return self.names[original]

    def _within(self, text: str, shortest: int) -> str | None:
        """An original text of at least so many letters that is in a text."""
        if len(text) > _LONG:
            return next((s for s in self._secrets if len(s) >= shortest and s in text), None)
        ends = range(len(text) + 1)
        return next((text[i:j] for i in ends for j in ends[i + shortest :] if text[i:j] in self._secrets), None)

    def place(self, name: str) -> str:
        """The new name of a node, of a copy that TensorRT makes of one, or of a layer that it makes of several."""
        if name not in self.names and (parts := _JOINED.split(name))[1:]:
            return "".join(part if i % 2 else self.place(part) for i, part in enumerate(parts))
        end = len(name) if name in self.names else _without_copies(name)
        return self.names.get(name[:end], name[:end]) + name[end:]

    def text(self, text: str) -> str:
        """A text with names replaced, the longest first; a known name is replaced wherever it is a whole word."""
        known = sorted((n for n in self.names if len(n) > 2 and n in text), key=len, reverse=True)
        if known:
            pattern = "|".join(re.escape(n) for n in known)
            text = re.sub(rf"(?<![\w/.]){'(' + pattern + ')'}(?=_clone_\d|[^\w/]|$)", lambda m: self.names[m[1]], text)
        return _WORD.sub(lambda m: self.names.get(m[0], m[0]), text)

    def shown(self, what: Shown, prediction: Prediction) -> Shown:
        """What the private model's own prediction says of the same nodes: its messages hold none of the old numbers."""
        places = {(str(f.code), self.place(f.node)) for f in what.findings}
        names = {self.place(c.name) for c in what.convolutions}
        return Shown(
            tuple(f for f in prediction.findings if (str(f.code), f.node) in places),
            tuple(c for c in prediction.convolutions if c.name in names),
        )

    def leaked(self, text: str) -> str | None:
        """An original text that a text of the new model holds, None where there is none."""
        if not text or text in self.kept or is_public(text):
            return None
        return text if text in self._secrets else self._within(text, _SHORTEST + 1)

    def leaked_prose(self, text: str) -> str | None:
        """The same for prose, in which every word of the language may be a name of the original by chance."""
        own = set(self.names.values()) | self.kept | _OWN_WORDS
        for word in {w.rstrip(".:,") for w in _WORD.findall(text)}:
            if word in self._secrets and word not in own and not is_public(word) and not _ANYBODYS.fullmatch(word):
                return str(word)
        long = (s for s in sorted(self._secrets - _OWN_WORDS) if len(s) > 7 and not _ANYBODYS.fullmatch(s))
        found: str | None = next((s for s in long if s in text and not is_public(s)), None)
        return found


def _spelled(prefix: str) -> Iterator[str]:
    for length in itertools.count(2):
        for letters in itertools.product(_LETTERS, repeat=length):
            yield f"{prefix}_{''.join(letters)}"


def made_private(whole: Model, proto: onnx.ModelProto, prediction: Prediction) -> tuple[onnx.ModelProto, Private]:
    """A model without anything of the original but its structure.

    Args:
        whole: The model that the user gave: none of its texts may be left.
        proto: The part of it to send; it is not changed.
        prediction: Of the part.

    Returns:
        The model and the names.

    Raises:
        ModelError: The prediction would change, or a text would be left.
    """
    what = whole.path or "model"
    secrets = set(texts(whole.proto)) | {location_of(t) for t in all_tensors(whole.proto.graph)}
    secrets |= {whole.path, whole.base_dir}
    secrets = {s for s in secrets if s and not is_public(s)}
    problem = ""
    for seed in range(_SEEDS):
        hidden = Private(secrets)
        result = onnx.ModelProto()
        result.CopyFrom(proto)
        result.DiscardUnknownFields()
        masked(result, np.random.default_rng(seed))
        _rename(result, hidden)
        for text in texts(result):
            leak = hidden.leaked(text)
            if leak is not None:
                raise ModelError(f"{what}: '{leak}' would be left in the private model; this is a defect of qdqtool")
        problem = _difference(prediction, predict(result, prediction.target), hidden)
        if not problem:
            return result, hidden
    raise ModelError(
        f"{what}: with other weights and scales the prediction would not stay the same ({problem}); extract a smaller "
        "part, or send it without `private`"
    )


def _difference(one: Prediction, two: Prediction, hidden: Private) -> str:
    """Where two predictions part, names apart; empty where they do not."""
    for a, b in itertools.zip_longest(one.convolutions, two.convolutions):
        if a is None or b is None or (a.index, a.op, a.weights, a.precision, a.inputs, a.output) != (
            b.index, b.op, b.weights, b.precision, b.inputs, b.output
        ):
            return "a convolution's outcome"

    def findings_of(prediction: Prediction, name: Callable[[str], str]) -> list[tuple[str, str, str, list[str]]]:
        return sorted(
            (str(f.code), str(f.severity), name(f.node), sorted(map(name, f.convolutions)))
            for f in prediction.findings
        )

    before, after = findings_of(one, hidden.place), findings_of(two, str)
    if before != after:
        apart = [f for f in (*before, *after) if before.count(f) != after.count(f)]
        return f"finding {apart[0][0]}"
    if one.conversions != two.conversions:
        return f"{two.conversions} conversions instead of {one.conversions}"
    return ""


# Texts -----------------------------------------------------------------------------------------------------------


def texts(message: Message) -> Iterator[str]:
    """Every text in a protobuf message, numbers' bytes apart."""
    for field, value in message.ListFields():
        values = value if _is_repeated(field) else [value]
        if field.type == field.TYPE_MESSAGE:
            for inner in values:
                yield from texts(inner)
        elif field.type == field.TYPE_STRING:
            yield from values
        elif field.type == field.TYPE_BYTES and field.name != "raw_data":
            yield from (v.decode("utf-8", "replace") for v in values)


def _is_repeated(field: Any) -> bool:
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


def _rename(message: Message, hidden: Private, attributes: frozenset[str] | None = frozenset()) -> None:
    """Replaces or clears every text of a message; what no rule covers is cleared.

    Args:
        attributes: Names of attributes that are public for the node that it is in; None for an unknown operator.
    """
    kind = message.DESCRIPTOR.name
    if isinstance(message, onnx.NodeProto):
        attributes = public_attributes(message)
    for field, value in list(message.ListFields()):
        if field.name in _CLEARED:
            message.ClearField(field.name)
            continue
        repeated = _is_repeated(field)
        if field.type == field.TYPE_MESSAGE:
            for inner in value if repeated else [value]:
                _rename(inner, hidden, attributes)
            continue
        if field.type not in (field.TYPE_STRING, field.TYPE_BYTES) or field.name == "raw_data":
            continue
        new = [_renamed(message, kind, field.name, v, hidden, attributes) for v in (value if repeated else [value])]
        if repeated:
            del value[:]
            value.extend(new)
        else:
            setattr(message, field.name, new[0])


def _renamed(
    message: Message, kind: str, field: str, value: Any, hidden: Private, attributes: frozenset[str] | None
) -> Any:
    known = attributes is not None
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
        if kind == "AttributeProto" and known and is_word(getattr(message, "name", ""), text):
            hidden.kept.add(text)
            return value
        return hidden.name(text, "text").encode()
    if field == "domain":
        if kind == "ModelProto":
            return ""
        return value if value in PUBLIC_DOMAINS else hidden.name(value, "domain")
    if field == "op_type":
        if known:
            hidden.kept.add(value)
            return value
        return hidden.name(value, "op")
    if isinstance(message, onnx.FunctionProto) and field == "name":
        called = onnx.NodeProto(op_type=value, domain=message.domain)
        return value if public_attributes(called) is not None else hidden.name(value, "op")
    if kind == "GraphProto":
        return hidden.name(value, "graph")
    if kind == "AttributeProto" and field == "name":
        if attributes is not None and value in attributes:
            hidden.kept.add(value)
            return value
        return hidden.name(value, "attribute")
    if kind == "NodeProto" and field == "name":
        return hidden.name(value, "node")
    return hidden.name(value, "size" if kind == "Dimension" else "tensor")
