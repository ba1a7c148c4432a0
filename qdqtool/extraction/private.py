"""Makes a model fit to be sent to others: nothing of it stays but its structure.

Names become other names, consistently; doc strings, metadata and whatever else is text goes; weights become random
ones of the same ranges; scales become others, equal ones equal. What is predicted stays the same,
which is checked. Dimensions, integer constants that are shapes, and single numbers (a Clip's bounds) are structure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Message

from qdqtool import operators
from qdqtool.errors import ModelError
from qdqtool.external import all_tensors
from qdqtool.extraction.masking import masked
from qdqtool.extraction.shown import Shown
from qdqtool.graph import Model, external_location
from qdqtool.prediction import predict
from qdqtool.types import Prediction

_LETTERS = "bcdfghjklmnpqrstvwxz"  # no vowels: no words, and no digits, which old exporters use as names
_SEEDS = 8
_PUBLIC_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "ai.onnx.preview.training", "trt"})
# Attributes of ONNX's own operators whose text is one of a few words of the standard.
_WORDS = frozenset({
    "auto_pad", "mode", "coordinate_transformation_mode", "nearest_mode", "padding_mode", "direction", "reduction",
    "activations", "equation", "approximate", "keep_aspect_ratio_policy", "norm",
})
# Plugins that come with TensorRT, and the quantizers that its tools write.
_PLUGINS = frozenset({
    "EfficientNMS_TRT", "EfficientNMS_ONNX_TRT", "EfficientNMS_Explicit_TF_TRT", "EfficientNMS_Implicit_TF_TRT",
    "BatchedNMS_TRT", "BatchedNMSDynamic_TRT", "NMS_TRT", "NMSDynamic_TRT", "ROIAlign_TRT", "ResizeNearest_TRT",
    "InstanceNormalization_TRT", "PriorBox_TRT", "GridAnchor_TRT", "FlattenConcat_TRT", "DecodeBbox3DPlugin",
    "TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear", "TRT_FP4DynamicQuantize", "TRT_INT4QuantizeLinear",
    "TRT_INT4DequantizeLinear",
})
_CLEARED = frozenset({
    "metadata_props", "quantization_annotation", "training_info", "configuration", "device_configurations",
    "external_data", "doc_string", "denotation", "producer_name", "producer_version", "overload", "segment",
})
_WORD = re.compile(r"[^\s,()';\"`]+")
_COPY = re.compile(r"(.*?)((?:_clone_\d+)+)", re.DOTALL)
_ANYBODYS = re.compile(r"[A-Za-z]{1,12}|[\d.]+")  # in prose: plain words and numbers
_PROGRAMS = frozenset({
    "pytorch", "onnx-graphsurgeon", "onnx.quantize", "onnxruntime", "onnx.compose", "tf2onnx", "keras2onnx", "skl2onnx",
    "paddle2onnx", "onnx", "qdqtool",
})


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
        self._secrets = {s for s in secrets if len(s) > 2}
        self._counters = {k: _spellings() for k in ("n", "t", "d", "domain", "Op", "attr", "s")}

    def name(self, original: str, kind: str = "t") -> str:
        """The new name of something; the same for the same."""
        if not original:
            return ""
        if original not in self.names:
            for letters in self._counters[kind]:
                new = f"{kind}_{letters}" if kind != "Op" else f"Op{letters}"
                if not any(s in new for s in self._secrets):
                    self.names[original] = new
                    break
        return self.names[original]

    def place(self, name: str) -> str:
        """The new name of a node, or of a copy that TensorRT makes of one."""
        copy = _COPY.fullmatch(name)
        if name in self.names or copy is None:
            return self.names.get(name, name)
        return self.names.get(copy[1], copy[1]) + copy[2]

    def text(self, text: str) -> str:
        """A text with names replaced, the longest first; a known name is replaced wherever it stands as a word."""
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
        if text in self._secrets and text not in self.names.values():
            return text
        found: str | None = next((s for s in sorted(self._secrets) if len(s) > 3 and s in text), None)
        return found

    def leaked_prose(self, text: str) -> str | None:
        """The same for prose, in which every word of the language may be a name of the original by chance."""
        own = set(self.names.values()) | self.kept
        for word in {w.rstrip(".:,") for w in _WORD.findall(text)}:
            if word in self._secrets and word not in own and not is_public(word) and not _ANYBODYS.fullmatch(word):
                return str(word)
        long = (s for s in sorted(self._secrets) if len(s) > 7 and not is_public(s) and not _ANYBODYS.fullmatch(s))
        found: str | None = next((s for s in long if s in text), None)
        return found


def _spellings() -> Iterator[str]:
    for length in itertools.count(2):
        for letters in itertools.product(_LETTERS, repeat=length):
            yield "".join(letters)


def is_public(text: str) -> bool:
    """Whether a text is a word of ONNX, TensorRT or this tool and nobody's secret."""
    return text in _vocabulary()


_known: set[str] = set()


def _vocabulary() -> set[str]:
    if not _known:
        for schema in onnx.defs.get_all_schemas_with_history():
            _known.update((schema.name, *schema.attributes))
            _known.update(i.name for i in (*schema.inputs, *schema.outputs))
        _known.update(_PLUGINS | _WORDS | _PUBLIC_DOMAINS | _PROGRAMS)
    return _known


def _is_known(op: str, domain: str) -> bool:
    if op in _PLUGINS or domain in _PUBLIC_DOMAINS - {"", "ai.onnx", "trt"}:
        return True
    return domain in ("", "ai.onnx") and (op in _vocabulary() or op in operators.OPERATORS)


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
    secrets = set(texts(whole.proto)) | {external_location(t) for t in all_tensors(whole.proto.graph)}
    secrets |= {whole.path, whole.base_dir}
    secrets = {s for s in secrets if s and not is_public(s)}
    problem = ""
    for seed in range(_SEEDS):
        hidden = Private(secrets)
        result = onnx.ModelProto()
        result.CopyFrom(_inlined(proto))
        result.DiscardUnknownFields()
        masked(result, np.random.default_rng(seed))
        _rename(result, hidden, {})
        for text in texts(result):
            leak = hidden.leaked(text)
            if leak is not None:
                raise ModelError(f"{what}: '{leak}' would be left in the private model; this is a defect of qdqtool")
        problem = _difference(prediction, predict(result, prediction.target), hidden)
        if not problem:
            return result, hidden
    raise ModelError(
        f"{what}: with other weights and scales the prediction would not stay the same ({problem}); extract a smaller "
        "part, or send it without --private"
    )


def _inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    if not proto.functions:
        return proto
    inlined: onnx.ModelProto = onnx.inliner.inline_local_functions(proto)
    return inlined


def _difference(one: Prediction, two: Prediction, hidden: Private) -> str:
    """Where two predictions part, names apart; empty where they do not."""
    for a, b in itertools.zip_longest(one.convolutions, two.convolutions):
        if a is None or b is None or (a.index, a.op, a.weights, a.precision, a.inputs, a.output) != (
            b.index, b.op, b.weights, b.precision, b.inputs, b.output
        ):
            return "a convolution's outcome"

    def told(prediction: Prediction, name: Callable[[str], str]) -> list[tuple[str, str, str, list[str]]]:
        return sorted(
            (str(f.code), str(f.severity), name(f.node), sorted(map(name, f.convolutions)))
            for f in prediction.findings
        )

    before, after = told(one, hidden.place), told(two, str)
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


def _rename(message: Message, hidden: Private, context: dict[str, bool]) -> None:
    """Replaces or clears every text of a message; what no rule speaks of is cleared."""
    kind = message.DESCRIPTOR.name
    known = context.get("known", True)
    if isinstance(message, onnx.NodeProto):
        known = _is_known(message.op_type, message.domain)
    for field, value in list(message.ListFields()):
        if field.name in _CLEARED:
            message.ClearField(field.name)
            continue
        repeated = _is_repeated(field)
        if field.type == field.TYPE_MESSAGE:
            for inner in value if repeated else [value]:
                _rename(inner, hidden, {"known": known})
            continue
        if field.type not in (field.TYPE_STRING, field.TYPE_BYTES) or field.name == "raw_data":
            continue
        new = [_renamed(message, kind, field.name, v, hidden, known) for v in (value if repeated else [value])]
        if repeated:
            del value[:]
            value.extend(new)
        else:
            setattr(message, field.name, new[0])


def _renamed(message: Message, kind: str, field: str, value: Any, hidden: Private, known: bool) -> Any:
    if isinstance(value, bytes):
        if kind == "AttributeProto" and known and getattr(message, "name", "") in _WORDS:
            hidden.kept.add(value.decode("utf-8", "replace"))
            return value
        return hidden.name(value.decode("utf-8", "replace"), "s").encode()
    if field == "domain":
        if kind == "ModelProto":
            return ""
        return value if value in _PUBLIC_DOMAINS else hidden.name(value, "domain")
    if field == "op_type":
        return value if known else hidden.name(value, "Op")
    if kind == "GraphProto":
        return "graph"
    if kind == "AttributeProto":
        return value if known or field != "name" else hidden.name(value, "attr")
    return hidden.name(value, {"NodeProto": "n" if field == "name" else "t", "Dimension": "d"}.get(kind, "t"))
