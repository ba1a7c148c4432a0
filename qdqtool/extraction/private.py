"""Makes a model fit to be sent to others: nothing of it stays but its structure.

Names become other names, consistently; doc strings, metadata and whatever else is text goes; weights become random
ones of the same ranges; scales become others, equal ones equal. What is predicted stays the same,
which is checked. Dimensions, integer constants that are shapes, and single numbers (a Clip's bounds) are structure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import onnx
from google.protobuf.message import Message

from qdqtool.errors import ModelError
from qdqtool.extraction.masking import masked
from qdqtool.extraction.shown import Shown
from qdqtool.extraction.vocabulary import PUBLIC_DOMAINS, is_public, is_word, public_attributes
from qdqtool.model.external import all_tensors, location_of
from qdqtool.model.graph import Model
from qdqtool.prediction import predict
from qdqtool.trt.targets import TARGETS
from qdqtool.types import FindingCode, Precision, Prediction

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
