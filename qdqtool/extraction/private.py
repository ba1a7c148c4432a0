"""Makes a model fit to be sent to others: nothing of it stays but its structure.

Names become other names, consistently; doc strings, metadata and whatever else is text goes. What is predicted stays
the same, which is checked. Dimensions, integer constants that are shapes, and single numbers (a Clip's bounds) are
structure; words of ONNX, TensorRT and the programs that write models are no secret.

Weights and scales become random ones, which keep what TensorRT's decisions rest on. Scales: equal ones stay equal, and
single scales stay in order (a Concat takes the largest). Weights: each output channel fills the same part of its
quantizer's range as before. None of the new numbers is an old one times a random one: knowing the random numbers does
not give the old ones back.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import Message
from onnx import numpy_helper

from qdqtool.errors import ModelError
from qdqtool.extraction.select import Shown
from qdqtool.ir import operators, qdq
from qdqtool.ir.graph import Model
from qdqtool.prediction import predict
from qdqtool.proto.external_data import all_tensors, location_of, to_array
from qdqtool.proto.subgraphs import RUN_DOMAINS, STANDARD, nested_graphs
from qdqtool.runtime.sessions import load_onnxruntime
from qdqtool.trt.targets import TARGETS
from qdqtool.types import FindingCode, Precision, Prediction
from qdqtool.util.records import record
from qdqtool.util.said import said
from qdqtool.util.tables import make_entry, read_sections

Array = npt.NDArray[Any]

_STRUCTURE = (
    "Resize",
    "Upsample",
    "Clip",
    "Pad",
    "Range",
    "NonMaxSuppression",
    "Pow",
    "OneHot",
    "TopK",
)
_WIDEN = 1.5  # new scales lie between the smallest over this and the largest times this,
_SHIFT = 1.0  # all of them times one factor of at most e or at least 1/e
_FEW = 9  # numbers of a channel: a 3x3 kernel
_LARGE = 64  # elements; a table of integers this long is data and no shape
_WEIGHTS = frozenset(
    {
        *qdq.FLOATS,
        onnx.TensorProto.INT8,
        onnx.TensorProto.UINT8,
        onnx.TensorProto.INT4,
        onnx.TensorProto.UINT4,
        onnx.TensorProto.FLOAT8E4M3FN,
        onnx.TensorProto.FLOAT8E5M2,
    }
)


def masked(proto: onnx.ModelProto, random: np.random.Generator) -> None:
    """Replaces the numbers of a model, in place."""
    model = Model(proto)
    scales = {n.input(1) for n in qdq.quantizers(model) if model.is_constant(n.input(1))}
    zeros = {n.input(2) for n in qdq.quantizers(model) if n.input(2)}
    # An unset input has no name, as tensors in attributes, which are no structure.
    kept = zeros | {t for n in model.nodes if n.op in _STRUCTURE for t in n.inputs[1:] if t}
    before = {t: v for t in sorted(scales) if (v := model.constant(t)) is not None}
    after = _new_scales(before, random)
    for name, tensor in _constants(proto):
        if name in after:
            tensor.CopyFrom(_tensor(after[name], tensor))
        elif name not in kept and tensor.data_type in _WEIGHTS and tensor.dims:
            value = to_array(tensor)
            ratio = _ratio(model, name, value, before, after)
            tensor.CopyFrom(_tensor(_like(value, ratio, random), tensor))
        elif (
            name not in kept
            and np.prod(tensor.dims) > _LARGE
            and tensor.data_type != onnx.TensorProto.STRING
        ):
            value = to_array(tensor)
            if value.dtype.kind in "iuf":
                tensor.CopyFrom(_tensor(_like(value, 1.0, random), tensor))
    for _, node in _nodes(proto):
        _mask_lists(node, random)


def _mask_lists(node: onnx.NodeProto, random: np.random.Generator) -> None:
    """Numbers in attributes: lists of floats but those of Resize and recurrent layers, and long lists of integers."""
    if node.domain in STANDARD and node.op_type != "Constant":
        return
    for attribute in node.attribute:
        for values, few in ((attribute.floats, 1), (attribute.ints, _LARGE)):
            if len(values) > few:
                old = np.asarray(values)
                values[:] = _like(old, 1.0, random).tolist()


def _all_graphs(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """Every graph of a model; names of the inner ones are no names of the main one and get a prefix."""
    yield "", proto.graph
    for nodes in (proto.graph.node, *(f.node for f in proto.functions)):
        yield from (("/", g) for g in nested_graphs(nodes))


def _nodes(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.NodeProto]]:
    for at, graph in _all_graphs(proto):
        yield from ((at, n) for n in graph.node)
    for function in proto.functions:
        yield from (("/", n) for n in function.node)


def _constants(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Every tensor that a model stores, with the name that nodes of the main graph read it by."""
    for at, graph in _all_graphs(proto):
        yield from ((at + t.name, t) for t in graph.initializer)
        yield from ((at + s.values.name, s.values) for s in graph.sparse_initializer)
    for at, node in _nodes(proto):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield (at + node.output[0] if node.op_type == "Constant" else ""), attribute.t
            yield from (("", t) for t in attribute.tensors)
            sparse = (
                *((attribute.sparse_tensor,) if attribute.HasField("sparse_tensor") else ()),
                *attribute.sparse_tensors,
            )
            yield from (("", s.values) for s in sparse)


def _tensor(value: Array, like: onnx.TensorProto) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, order="C"), like.name)


def _new_scales(before: dict[str, Array], random: np.random.Generator) -> dict[str, Array]:
    shift = random.uniform(-_SHIFT, _SHIFT)
    single = sorted({float(v.reshape(-1)[0]) for v in before.values() if v.size == 1})
    vectors = sorted({float(x) for v in before.values() if v.size != 1 for x in v.reshape(-1)})
    drawn = _drawn(vectors, random, shift, ordered=False) | _drawn(
        single, random, shift, ordered=True
    )
    return {
        name: np.array([drawn.get(float(x), float(x)) for x in value.reshape(-1)], np.float64)
        .astype(value.dtype)
        .reshape(value.shape)
        for name, value in before.items()
    }


def _drawn(
    values: list[float], random: np.random.Generator, shift: float, ordered: bool
) -> dict[float, float]:
    """Old to new; zeros and what is no number stay, signs too."""
    usable = [v for v in values if v != 0 and np.isfinite(v)]
    if not usable:
        return {}
    sizes = sorted({abs(v) for v in usable})
    low, high = np.log(sizes[0] / _WIDEN) + shift, np.log(sizes[-1] * _WIDEN) + shift
    new = np.exp(random.uniform(low, high, len(sizes)))
    if ordered:
        new = np.sort(new)
    by_size = dict(zip(sizes, (float(x) for x in new), strict=True))
    return {v: float(np.copysign(by_size[abs(v)], v)) for v in usable}


def _ratio(
    model: Model, name: str, value: Array, before: dict[str, Array], after: dict[str, Array]
) -> Array | float:
    """New over old scale of what quantizes a constant, shaped to be multiplied with it; 1 where nothing does."""
    if value.dtype.kind != "f":
        return 1.0
    for node in model.consumers(name):
        scale = node.input(1)
        if qdq.is_q(node) and node.input(0) == name and scale in before:
            old, new = (
                before[scale].astype(np.float64).reshape(-1),
                after[scale].astype(np.float64).reshape(-1),
            )
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where((old != 0) & np.isfinite(old), new / old, 1.0)
            if ratio.size == 1:
                return float(ratio[0])
            axis = qdq.read_params(model, node).axis or 0
            if -value.ndim <= axis < value.ndim and value.shape[axis] == ratio.size:
                shape = [1] * value.ndim
                shape[axis] = ratio.size
                return ratio.reshape(shape)
    return 1.0


def _like(value: Array, ratio: Array | float, random: np.random.Generator) -> Array:
    """Random numbers between the smallest and largest of each channel, both of which occur."""
    if not value.size:
        return value
    if value.size > 1 and np.array_equal(value.reshape(-1), np.arange(value.size)):
        return value  # 0, 1, 2, ... is an index (the DFL's bins) and no weights
    wide = value.astype(np.float64) * ratio
    as_it_was = (
        isinstance(ratio, float) and ratio == 1.0
    )  # then a range of few numbers would reveal them all
    channels = wide.ndim > 1 and (wide.size >= _FEW * wide.shape[0] or not as_it_was)
    rows = wide.reshape(wide.shape[0] if channels else 1, -1)
    finite = np.isfinite(rows)  # infinities and NaN are a fault to show, and stay where they are
    if not finite.any(axis=1).all():
        return value
    low = np.where(finite, rows, np.inf).min(axis=1, keepdims=True)
    high = np.where(finite, rows, -np.inf).max(axis=1, keepdims=True)
    new = random.uniform(low, np.where(high > low, high, low + 1), rows.shape)
    new = np.where(high > low, new, low)
    order = np.argsort(random.random(rows.shape), axis=1)
    places = np.arange(len(rows))
    new[places, order[:, 0]] = high[:, 0]
    new[places, order[:, -1]] = low[:, 0]
    new = np.where(finite, new, rows)
    if value.dtype.kind in "iu":
        new = np.rint(new)
    return new.reshape(value.shape).astype(value.dtype)


# Random numbers in place of weights and scales -----------------------------------------------------------------------


PUBLIC_DOMAINS = frozenset({*RUN_DOMAINS, "ai.onnx.preview.training", "trt"})
_EQUATION = re.compile(r"[A-Za-z]{0,8}(?:(?:,|->|\.\.\.| )[A-Za-z]{0,8}){0,16}")


@record
class Public:
    """Words that are no secret, by what they are."""

    attributes: tuple[str, ...]
    values: tuple[str, ...]
    plugins: tuple[str, ...]
    plugin_attributes: tuple[str, ...]
    programs: tuple[str, ...]


@functools.cache
def public() -> Public:
    return make_entry(Public, read_sections(Path(__file__).with_name("public.toml")), "public")


def is_public(text: str) -> bool:
    """Whether a text is a word of ONNX, TensorRT or this tool and no secret."""
    return text in _vocabulary()


@functools.cache
def _vocabulary() -> frozenset[str]:
    known = {*public().plugins, *public().attributes, *PUBLIC_DOMAINS, *public().programs}
    for schema in onnx.defs.get_all_schemas_with_history():
        known.update((schema.name, *schema.attributes))
        known.update(i.name for i in (*schema.inputs, *schema.outputs))
    return frozenset(known)


def public_attributes(node: onnx.NodeProto) -> frozenset[str] | None:
    """The attributes of a public operator, None for one that nobody knows."""
    op, domain = node.op_type, node.domain
    if domain == "com.microsoft":
        return _runtime_operators().get(op)
    if op in public().plugins:
        return frozenset(public().plugin_attributes)
    if domain in PUBLIC_DOMAINS and (op in _vocabulary() or op in operators.OPERATORS):
        return _vocabulary()
    return None


@functools.cache
def _runtime_operators() -> dict[str, frozenset[str]]:
    """The operators that onnxruntime adds, with their attributes."""
    runtime = load_onnxruntime().capi.onnxruntime_pybind11_state
    return {
        s.name: frozenset(s.attributes)
        for s in runtime.get_all_operator_schema()
        if s.domain == "com.microsoft"
    }


def is_word(attribute: str, text: str) -> bool:
    if attribute == "equation":
        return _EQUATION.fullmatch(text) is not None
    return attribute in public().attributes and (text in public().values or is_public(text))


_LETTERS = (
    "bcdfghjklmnpqrstvwxz"  # no vowels: no words, and no digits, which old exporters use as names
)
_PREFIXES = {
    "domain": "o",
    "op": "F",
    "attribute": "a",
    "node": "n",
    "tensor": "t",
    "size": "d",
    "text": "s",
    "graph": "g",
}
_SEEDS = 8
_SHORTEST = 3  # letters of a text that can be distinguished from chance
_LONG = 64  # letters; such a text is none of ours
_TRIES = 20_000  # spellings; that many taken ones are an attack
_CLEARED = frozenset(
    {
        "metadata_props",
        "quantization_annotation",
        "training_info",
        "configuration",
        "device_configurations",
        "external_data",
        "doc_string",
        "denotation",
        "producer_name",
        "producer_version",
        "overload",
        "segment",
    }
)
_WORD = re.compile(r"[^\s,()';\"`]+")
_JOINED = re.compile(r"( \+ | \|\| )")  # between the nodes of one layer
_ANYBODYS = re.compile(r"[A-Za-z]{1,12}|[\d.]+")  # in prose: plain words and numbers
# Words that a report says of every model.
_OWN_WORDS = frozenset(
    {
        "model.onnx",
        "extract.onnx",
        *TARGETS,
        *(p.value for p in Precision),
        *get_args(FindingCode),
    }
)


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
                raise ModelError(
                    "the model's names leave none free for a private one; rename its tensors first",
                    code="no-name-left",
                )
            self.names[original] = new
        return self.names[original]

    def _within(self, text: str, shortest: int) -> str | None:
        """An original text of at least so many letters that is in a text."""
        if len(text) > _LONG:
            return next((s for s in self._secrets if len(s) >= shortest and s in text), None)
        ends = range(len(text) + 1)
        return next(
            (text[i:j] for i in ends for j in ends[i + shortest :] if text[i:j] in self._secrets),
            None,
        )

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
            text = re.sub(
                rf"(?<![\w/.]){'(' + pattern + ')'}(?=_clone_\d|[^\w/]|$)",
                lambda m: self.names[m[1]],
                text,
            )
        return _WORD.sub(lambda m: self.names.get(m[0], m[0]), text)

    def value(self, text: str) -> str:
        """A value of a sentence: a name, or those of one layer, as :meth:`place` has it; and in what is left, which may
        quote somebody else's words, what :meth:`text` finds."""
        return self.text(self.place(text))

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
            if (
                word in self._secrets
                and word not in own
                and not is_public(word)
                and not _ANYBODYS.fullmatch(word)
            ):
                return str(word)
        long = (
            s
            for s in sorted(self._secrets - _OWN_WORDS)
            if len(s) > 7 and not _ANYBODYS.fullmatch(s)
        )
        found: str | None = next((s for s in long if s in text and not is_public(s)), None)
        return found


def _spelled(prefix: str) -> Iterator[str]:
    for length in itertools.count(2):
        for letters in itertools.product(_LETTERS, repeat=length):
            yield f"{prefix}_{''.join(letters)}"


def made_private(
    whole: Model, proto: onnx.ModelProto, prediction: Prediction
) -> tuple[onnx.ModelProto, Private]:
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
                raise ModelError(
                    f"'{leak}' would be left in the private model; this is a defect of qdqtool",
                    what,
                    code="internal",
                )
        problem = _difference(prediction, predict(result, prediction.target), hidden)
        if not problem:
            return result, hidden
    raise ModelError(
        said(
            "with other weights and scales the prediction would not stay the same ({problem}); extract a "
            "smaller part, or send it without {`private`}",
            problem=problem,
        ),
        what,
        code="prediction-changes",
        parameter="private",
    )


def _difference(one: Prediction, two: Prediction, hidden: Private) -> str:
    """Where two predictions part, names apart; empty where they do not."""
    for a, b in itertools.zip_longest(one.convolutions, two.convolutions):
        if (
            a is None
            or b is None
            or (a.index, a.op, a.weights, a.precision, a.inputs, a.output)
            != (b.index, b.op, b.weights, b.precision, b.inputs, b.output)
        ):
            return "a convolution's outcome"

    def findings_of(
        prediction: Prediction, name: Callable[[str], str]
    ) -> list[tuple[str, str, str, list[str]]]:
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
    return (
        bool(field.is_repeated)
        if hasattr(field, "is_repeated")
        else field.label == field.LABEL_REPEATED
    )


def _rename(
    message: Message, hidden: Private, attributes: frozenset[str] | None = frozenset()
) -> None:
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
        new = [
            _renamed(message, kind, field.name, v, hidden, attributes)
            for v in (value if repeated else [value])
        ]
        if repeated:
            del value[:]
            value.extend(new)
        else:
            setattr(message, field.name, new[0])


def _renamed(
    message: Message,
    kind: str,
    field: str,
    value: Any,
    hidden: Private,
    attributes: frozenset[str] | None,
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
