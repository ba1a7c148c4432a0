"""Replacement of names, weights, scales and texts, so that a model can be sent to others.

Each name is replaced by one new name everywhere. Doc strings, metadata and other texts are removed.
The structure remains: dimensions, integer constants with shapes, and single numbers such as the
bounds of a Clip. Words of ONNX, TensorRT and programs that write models remain too. A check ensures
that the prediction does not change.

Random numbers replace weights and scales, but properties that matter to TensorRT remain. Equal
scales remain equal. Single scales keep their order, because a Concat uses the largest. The weights
of each output channel fill the same fraction of the quantizer's range. New scales are drawn from a
range of numbers. They are not old scales times a random factor, because this would reveal the
ratios of the old scales. Only if such scales change the prediction or the kind of a fix (scales
that meet at a Concat may differ too much for a common scale), they are drawn closer to the old
scales times one random factor.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import Message
from onnx import numpy_helper

from qdqtool.errors import ModelError
from qdqtool.extraction.invariants import Invariants
from qdqtool.extraction.reductions import are_positions
from qdqtool.findings.codes import CODES
from qdqtool.ir import operators, qdq
from qdqtool.ir.graph import Model
from qdqtool.ir.metadata import (
    is_marked_part,
    mark_part,
    read_refused_fixes,
    read_tuned_head,
    record_refused_fixes,
    record_tuned_head,
)
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from qdqtool.proto.external_data import all_tensors, read_location, to_array
from qdqtool.proto.subgraphs import RUN_DOMAINS, STANDARD, message_fields, nested_graphs
from qdqtool.reasons.finding import Finding
from qdqtool.runtime.sessions import load_onnxruntime
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import TARGETS
from qdqtool.util.tables import make_entry, read_sections

Array = npt.NDArray[Any]

# Random numbers in place of weights and scales ----------------------------------------------------

# Operators whose inputs after the first are not weights, but belong to the structure.
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
# New scales lie between (smallest old scale / _WIDEN) and (largest old scale * _WIDEN), times one
# random factor between exp(-_SHIFT) and exp(_SHIFT).
_WIDEN = 1.5
_SHIFT = 1.0
# The range of each channel is kept if channels have at least this number of values on average. A
# 3x3 kernel has 9 values.
_FEW = 9
_LARGE = 64  # integer constants with more elements are tables of numbers, not shapes
_WEIGHT_TYPES = frozenset(
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
_ScalePairs = dict[str, tuple[Array, Array]]  # old and new scales by tensor name


def mask_numbers(
    proto: onnx.ModelProto, random: np.random.Generator, similarity: float = 0.0
) -> None:
    """Replace weights, scales and other numbers of a model by random numbers, in place.

    Args:
        proto: The model.
        random: Random generator.
        similarity: How much the ratios of single scales resemble the old ones, from 0 (random) to 1
            (the same ratios).
    """
    model = Model(proto)
    quantizers = list(qdq.quantizers(model))
    scales = _draw_scales(model, {n.input(1) for n in quantizers}, random, similarity)
    structure = {n.input(2) for n in quantizers}
    structure.update(t for n in model.nodes if n.op in _STRUCTURE for t in n.inputs[1:])
    # Inputs that are not set have an empty name. Tensors in attributes have an empty name too, but
    # they are not part of the structure.
    structure.discard("")
    for name, tensor in _iterate_constants(proto):
        if name in scales:
            tensor.CopyFrom(_make_tensor(scales[name][1], tensor.name))
        elif name not in structure:
            _mask_tensor(tensor, functools.partial(_scale_ratio, model, name, scales), random)
    for _, node in _iterate_nodes(proto):
        _mask_attribute_lists(node, random)


def _mask_tensor(
    tensor: onnx.TensorProto, ratio: Callable[[Array], Array | float], random: np.random.Generator
) -> None:
    if tensor.data_type in _WEIGHT_TYPES and tensor.dims:
        value = to_array(tensor)
        tensor.CopyFrom(_make_tensor(_draw_like(value, ratio(value), random), tensor.name))
    elif np.prod(tensor.dims) > _LARGE and tensor.data_type != onnx.TensorProto.STRING:
        value = to_array(tensor)
        if value.dtype.kind in "iuf":
            tensor.CopyFrom(_make_tensor(_draw_like(value, 1.0, random), tensor.name))


def _mask_attribute_lists(node: onnx.NodeProto, random: np.random.Generator) -> None:
    if node.domain in STANDARD and node.op_type != "Constant":
        return
    for attribute in node.attribute:
        for values, few in ((attribute.floats, 1), (attribute.ints, _LARGE)):
            if len(values) > few:
                values[:] = _draw_like(np.asarray(values), 1.0, random).tolist()


def _iterate_graphs(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """Yield the graph and every subgraph, each with a prefix for its names ("" and "/")."""
    yield "", proto.graph
    yield from (("/", graph) for graph in nested_graphs(proto.graph.node))


def _iterate_nodes(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.NodeProto]]:
    for prefix, graph in _iterate_graphs(proto):
        yield from ((prefix, n) for n in graph.node)


def _iterate_constants(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Yield the name and data of every stored tensor.

    The name is empty for a tensor in an attribute, except the tensor of a Constant node.
    """
    for prefix, graph in _iterate_graphs(proto):
        yield from ((prefix + t.name, t) for t in graph.initializer)
        yield from ((prefix + s.values.name, s.values) for s in graph.sparse_initializer)
    for prefix, node in _iterate_nodes(proto):
        is_constant = node.op_type == "Constant"
        for attribute in node.attribute:
            name = prefix + node.output[0] if is_constant and attribute.HasField("t") else ""
            yield from ((name, t) for t in _attribute_tensors(attribute))


def _attribute_tensors(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    if attribute.HasField("sparse_tensor"):
        yield attribute.sparse_tensor.values
    yield from (s.values for s in attribute.sparse_tensors)


def _make_tensor(value: Array, name: str) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, order="C"), name)


def _draw_scales(
    model: Model, names: set[str], random: np.random.Generator, similarity: float
) -> _ScalePairs:
    old = {}
    single, vectors = set[float](), set[float]()
    for name in sorted(names):
        value = model.constant(name) if model.is_constant(name) else None
        if value is not None:
            old[name] = value
            numbers = map(float, value.reshape(-1))
            (single if value.size == 1 else vectors).update(numbers)
    shift = random.uniform(-_SHIFT, _SHIFT)
    new = _draw_numbers(sorted(vectors), random, shift)
    new |= _draw_numbers(sorted(single), random, shift, similarity)
    pairs = {}
    for name, value in old.items():
        replaced = np.array([new.get(float(x), float(x)) for x in value.reshape(-1)], np.float64)
        pairs[name] = (value, replaced.astype(value.dtype).reshape(value.shape))
    return pairs


def _draw_numbers(
    values: list[float],
    random: np.random.Generator,
    shift: float,
    similarity: float | None = None,
) -> dict[float, float]:
    """Draw a new number for each old number, except for zeros, NaN and infinities.

    Args:
        values: Old numbers.
        random: Random generator.
        shift: Natural logarithm of the factor by which the range of new numbers is shifted.
        similarity: How much the ratios of the new numbers resemble those of the old ones, from 0 to
            1. The magnitudes of the new numbers then have the same order. None: any order.
    """
    usable = [v for v in values if v != 0 and np.isfinite(v)]
    if not usable:
        return {}
    sizes = sorted({abs(v) for v in usable})
    low, high = np.log(sizes[0] / _WIDEN) + shift, np.log(sizes[-1] * _WIDEN) + shift
    new = random.uniform(low, high, len(sizes))
    if similarity is not None:
        new = (1 - similarity) * np.sort(new) + similarity * (np.log(sizes) + shift)
    by_size = dict(zip(sizes, (float(x) for x in np.exp(new)), strict=True))
    return {v: float(np.copysign(by_size[abs(v)], v)) for v in usable}


def _scale_ratio(model: Model, name: str, scales: _ScalePairs, value: Array) -> Array | float:
    """Return the new scale of a constant's QuantizeLinear divided by the old scale.

    Returns:
        Ratios that broadcast to the constant; 1 if no QuantizeLinear in `scales` quantizes it.
    """
    if value.dtype.kind != "f":
        return 1.0
    for node in model.consumers(name):
        if not qdq.is_q(node) or node.input(0) != name or node.input(1) not in scales:
            continue
        ratio = _divide_scales(*scales[node.input(1)])
        if ratio.size == 1:
            return float(ratio[0])
        axis = qdq.read_params(model, node).axis or 0
        if -value.ndim <= axis < value.ndim and value.shape[axis] == ratio.size:
            shape = [1] * value.ndim
            shape[axis] = ratio.size
            return ratio.reshape(shape)
    return 1.0


def _divide_scales(old: Array, new: Array) -> Array:
    """Return new scales divided by old scales; 1 for an old scale of 0 or not finite."""
    before, after = (s.astype(np.float64).reshape(-1) for s in (old, new))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((before != 0) & np.isfinite(before), after / before, 1.0)


def _draw_like(value: Array, ratio: Array | float, random: np.random.Generator) -> Array:
    """Return random numbers with the minimum and maximum of ``value * ratio``.

    Minimum and maximum are those of each channel (first axis). If the channels have few numbers and
    the scale is unchanged, they are those of the whole constant. NaN and infinities stay the same,
    and so do a constant of consecutive integers that start at 0, and a constant with a channel that
    has no finite numbers.
    """
    if not value.size:
        return value
    if are_positions(value):
        return value
    scaled = value.astype(np.float64) * ratio
    # If a channel has few numbers and its scale is unchanged, its range would reveal the numbers.
    is_scaled = not isinstance(ratio, float) or ratio != 1.0
    by_channel = scaled.ndim > 1 and (is_scaled or scaled.size >= _FEW * scaled.shape[0])
    rows = scaled.reshape(scaled.shape[0] if by_channel else 1, -1)
    finite = np.isfinite(rows)  # others are kept: they may cause the fault that the user reports
    if not finite.any(axis=1).all():
        return value
    low = np.where(finite, rows, np.inf).min(axis=1, keepdims=True)
    high = np.where(finite, rows, -np.inf).max(axis=1, keepdims=True)
    new = random.uniform(low, np.where(high > low, high, low + 1), rows.shape)
    new = np.where(high > low, new, low)
    order = np.argsort(random.random(rows.shape), axis=1)
    indices = np.arange(len(rows))
    new[indices, order[:, 0]] = high[:, 0]
    new[indices, order[:, -1]] = low[:, 0]
    new = np.where(finite, new, rows)
    if value.dtype.kind in "iu":
        new = np.rint(new)
    return new.reshape(value.shape).astype(value.dtype)


# Public words (no secrets) ------------------------------------------------------------------------

PUBLIC_DOMAINS = frozenset({*RUN_DOMAINS, "ai.onnx.preview.training", "trt"})
_EQUATION = re.compile(r"[A-Za-z]{0,8}(?:(?:,|->|\.\.\.| )[A-Za-z]{0,8}){0,16}")


@dataclass(frozen=True)
class PublicWords:
    """Words of ONNX, TensorRT and known programs, by purpose. They are not private."""

    attributes: tuple[str, ...]
    values: tuple[str, ...]
    plugins: tuple[str, ...]
    plugin_attributes: tuple[str, ...]
    programs: tuple[str, ...]


@functools.cache
def read_public_words() -> PublicWords:
    """Read the public words from ``public.toml``. The result is cached."""
    return make_entry(PublicWords, read_sections(Path(__file__).with_name("public.toml")), "public")


def is_public(text: str) -> bool:
    """Return whether a text is a word of ONNX, TensorRT or a known program."""
    return text in _load_vocabulary()


@functools.cache
def _load_vocabulary() -> frozenset[str]:
    words = read_public_words()
    vocabulary = {*words.plugins, *words.attributes, *PUBLIC_DOMAINS, *words.programs}
    for schema in onnx.defs.get_all_schemas_with_history():
        vocabulary.update(
            (schema.name, *schema.attributes), (i.name for i in (*schema.inputs, *schema.outputs))
        )
    return frozenset(vocabulary)


def public_attributes(node: onnx.NodeProto) -> frozenset[str] | None:
    """Return the public attribute names of a node's operator; None for a custom operator."""
    op, domain = node.op_type, node.domain
    if domain == "com.microsoft":
        return _runtime_operators().get(op)
    if op in read_public_words().plugins:
        return frozenset(read_public_words().plugin_attributes)
    if domain in PUBLIC_DOMAINS and (op in _load_vocabulary() or op in operators.OPERATORS):
        return _load_vocabulary()
    return None


@functools.cache
def _runtime_operators() -> dict[str, frozenset[str]]:
    runtime = load_onnxruntime().capi.onnxruntime_pybind11_state
    return {
        s.name: frozenset(s.attributes)
        for s in runtime.get_all_operator_schema()
        if s.domain == "com.microsoft"
    }


def is_public_value(attribute: str, text: str) -> bool:
    """Return whether the text in an attribute is a known value, a public word or an equation."""
    if attribute == "equation":
        return _EQUATION.fullmatch(text) is not None
    words = read_public_words()
    return attribute in words.attributes and (text in words.values or is_public(text))


# Names --------------------------------------------------------------------------------------------

# Generated names have no vowels, because they must not form words, and no digits, because old
# exporters use numbers as names.
_LETTERS = "bcdfghjklmnpqrstvwxz"
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
# Similarities of the ratios of scales that are tried in turn to keep the prediction and the fixes.
_SIMILARITIES = (0.0, 0.0, 0.0, 0.0, 0.5, 0.75, 0.85, 0.9)
_SHORTEST = 3  # shorter texts do not count as leaks, because they may occur by chance
# If a text has more characters than this, it is searched for each secret. Otherwise, each substring
# of the text is looked up among the secrets.
_LONG = 64
_MAX_SPELLINGS = 20_000  # number of tried names; only a malicious model contains all of them
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
_UNNAMED_PREFIX = "node_of_"  # TensorRT's names of unnamed nodes: this prefix and the output
_COPY_SUFFIX = "_clone_"  # TensorRT's copies of nodes before Concats end with this and a number
_LAYER_SEPARATOR = re.compile(r"( \+ | \|\| )")  # separates the nodes in a layer's name
_COMMON_WORD = re.compile(r"[A-Za-z]{1,12}|[\d.]+")  # words and numbers that may occur in any text
# Words that the text of the bug report contains for every model.
_REPORT_WORDS = frozenset(
    {
        "model.onnx",
        "extract.onnx",
        *TARGETS,
        *(p.value for p in Precision),
        *CODES,
    }
)


def _without_copy_suffixes(name: str) -> str:
    end = len(name)
    while (start := name.rfind(_COPY_SUFFIX, 0, end)) >= 0:
        if not name[start + len(_COPY_SUFFIX) : end].isdigit():
            break
        end = start
    return name[:end]


class PrivateNames:
    """New names for the nodes, tensors and other objects of a model.

    Args:
        secrets: Texts of the original model that must not occur in the new model.

    Attributes:
        names: New names by original name.
        kept: Public words that the new model contains.
    """

    def __init__(self, secrets: set[str]) -> None:
        self.names: dict[str, str] = {}
        self.kept: set[str] = set()
        self._secrets = {s for s in secrets if len(s) >= _SHORTEST}
        self._spellings = {kind: _spell_names(prefix) for kind, prefix in _PREFIXES.items()}

    def rename(self, original: str, kind: str = "tensor") -> str:
        """Return the new name for an original name.

        Args:
            original: Original name; an empty name remains empty.
            kind: Kind of object, which determines the first letter of the new name.

        Raises:
            ModelError: The original model contains all new names that were tried.
        """
        if not original:
            return ""
        if original not in self.names:
            spellings = itertools.islice(self._spellings[kind], _MAX_SPELLINGS)
            new = next(
                (n for n in spellings if self._find_secret_within(n, _SHORTEST) is None), None
            )
            if new is None:
                raise ModelError(
                    "cannot create private names, because the model already contains them; rename "
                    "the objects of the model first",
                    code="no-name-left",
                )
            self.names[original] = new
        return self.names[original]

    def keep_word(self, word: str) -> str:
        """Return a public word unchanged, and record the word in `kept`."""
        self.kept.add(word)
        return word

    def rename_layer(self, name: str) -> str:
        """Return the new name of a node, of TensorRT's copy of a node, or of a fused layer."""
        parts = _LAYER_SEPARATOR.split(name)
        if name not in self.names and len(parts) > 1:
            return "".join(p if i % 2 else self.rename_layer(p) for i, p in enumerate(parts))
        if name not in self.names and name.startswith(_UNNAMED_PREFIX):
            return _UNNAMED_PREFIX + self.rename_layer(name.removeprefix(_UNNAMED_PREFIX))
        original = name if name in self.names else _without_copy_suffixes(name)
        return self.names.get(original, original) + name[len(original) :]

    def replace_names(self, text: str) -> str:
        """Replace original names in a compiler's message by new names, if they are whole words."""
        names = sorted((n for n in self.names if len(n) > 2 and n in text), key=len, reverse=True)
        if names:
            pattern = "|".join(map(re.escape, names))
            text = re.sub(
                rf"(?<![\w/.])({_UNNAMED_PREFIX})?({pattern})(?=_clone_\d|[^\w/]|$)",
                lambda match: (match[1] or "") + self.names[match[2]],
                text,
            )
        return _WORD.sub(lambda match: self.names.get(match[0], match[0]), text)

    def select_invariants(self, invariants: Invariants, prediction: Prediction) -> Invariants:
        """Return the invariants of the private model that correspond to the original invariants.

        Args:
            invariants: Findings and convolutions of the original model.
            prediction: Prediction of the private model. Its messages do not contain original
                numbers.
        """
        places = {(str(f.code), self.rename_layer(f.node)) for f in invariants.findings}
        names = {self.rename_layer(c.name) for c in invariants.convolutions}
        return Invariants(
            tuple(f for f in prediction.findings if (str(f.code), f.node) in places),
            tuple(c for c in prediction.convolutions if c.name in names),
        )

    def find_leak(self, text: str) -> str | None:
        """Return a secret that a text of the new model contains; None if it contains none."""
        if not text or text in self.kept or is_public(text):
            return None
        return text if text in self._secrets else self._find_secret_within(text, _SHORTEST + 1)

    def find_leak_in_prose(self, text: str) -> str | None:
        """Return a secret that an English text contains; None if it contains none.

        Common words and numbers do not count, even if the model uses them as names.
        """
        harmless = {*self.names.values(), *self.kept, *_REPORT_WORDS}
        for word in {w.rstrip(".:,") for w in _WORD.findall(text)} - harmless:
            if word in self._secrets and _is_revealing(word):
                return str(word)
        for secret in sorted(self._secrets - _REPORT_WORDS):
            if len(secret) > 7 and secret in text and _is_revealing(secret):
                return secret
        return None

    def _find_secret_within(self, text: str, shortest: int) -> str | None:
        if len(text) > _LONG:
            return next((s for s in self._secrets if len(s) >= shortest and s in text), None)
        for start in range(len(text) + 1):
            for end in range(start + shortest, len(text) + 1):
                if text[start:end] in self._secrets:
                    return text[start:end]
        return None


def _is_revealing(word: str) -> bool:
    return not is_public(word) and not _COMMON_WORD.fullmatch(word)


def _spell_names(prefix: str) -> Iterator[str]:
    for length in itertools.count(2):
        for letters in itertools.product(_LETTERS, repeat=length):
            yield f"{prefix}_{''.join(letters)}"


# Models -------------------------------------------------------------------------------------------


def make_private(
    whole: Model, proto: onnx.ModelProto, prediction: Prediction
) -> tuple[onnx.ModelProto, PrivateNames]:
    """Return a private copy of a part, and its new names.

    Args:
        whole: The user's model. None of its texts may occur in the copy, except public words.
        proto: The part to make private. It is not changed.
        prediction: Prediction of the part. The prediction of the copy must be the same. The kinds
            of its fixes are kept if possible (:func:`find_changed_fixes`).

    Raises:
        ModelError: The prediction of the copy would differ, or a secret text would remain.
    """
    path = whole.path or "model"
    secrets = {*_iterate_texts(whole.proto), whole.path, whole.base_dir}
    secrets.update(read_location(t) for t in all_tensors(whole.proto.graph))
    secrets = {s for s in secrets if s and not is_public(s)}
    problem = ""
    copies: list[tuple[onnx.ModelProto, PrivateNames]] = []
    for seed, similarity in enumerate(_SIMILARITIES):
        names = PrivateNames(secrets)
        private = deepcopy(proto)
        private.DiscardUnknownFields()
        mask_numbers(private, np.random.default_rng(seed), similarity)
        _replace_texts(private, names)
        leak = next(filter(None, map(names.find_leak, _iterate_texts(private))), None)
        if leak is not None:
            raise ModelError(
                f"the private model would contain the name '{leak}'; this is a defect of qdqtool, "
                "please report it",
                path,
                code="internal",
            )
        _copy_marks(Model(proto), private, names)
        private_prediction = predict(private, prediction.target)
        difference = _describe_difference(prediction, private_prediction, names)
        if not difference:
            copies.append((private, names))
            if not find_changed_fixes(prediction, private_prediction, names):
                return copies[-1]
        problem = difference or problem
    if copies:
        return copies[0]
    raise ModelError(
        f"replacing the weights and scales would change the prediction ({problem}); extract a "
        "smaller part, or leave `private` out",
        path,
        code="prediction-changes",
        parameter="private",
    )


def _copy_marks(part: Model, private: onnx.ModelProto, names: PrivateNames) -> None:
    """Copy the metadata that change findings, with the new names."""
    if is_marked_part(part):
        mark_part(private)
    new_names = names.names
    record_tuned_head(private, (new_names[n] for n in read_tuned_head(part) & new_names.keys()))
    refused = read_refused_fixes(part)
    record_refused_fixes(private, ((c, new_names[n]) for c, n in refused if n in new_names))


def _list_outcomes(prediction: Prediction) -> list[tuple[object, ...]]:
    """Return the outcome of each convolution, without its names."""
    return [
        (c.index, c.op, c.weights, c.precision, c.inputs, c.output) for c in prediction.convolutions
    ]


def _describe_difference(before: Prediction, after: Prediction, names: PrivateNames) -> str:
    if _list_outcomes(before) != _list_outcomes(after):
        return "a convolution's outcome"
    old, new = _list_findings(before, names.rename_layer), _list_findings(after, str)
    if old != new:
        different = [f for f in (*old, *new) if old.count(f) != new.count(f)]
        return f"finding {different[0][0]}"
    if before.conversions != after.conversions:
        return f"{after.conversions} conversions instead of {before.conversions}"
    return ""


def _list_findings(
    prediction: Prediction, rename: Callable[[str], str]
) -> list[tuple[str, str, str, list[str]]]:
    return sorted(
        (str(f.code), str(f.severity), rename(f.node), sorted(map(rename, f.convolutions)))
        for f in prediction.findings
    )


def find_changed_fixes(before: Prediction, after: Prediction, names: PrivateNames) -> list[Finding]:
    """Return the findings of a part for which the private part has a fix of another kind.

    The kind is whether ``fix`` can make the change, and the verb with which the advice begins. The
    rest of the advice contains names and numbers, which differ.

    Args:
        before: Prediction of the part.
        after: Prediction of the private part.
        names: Names of the private part.
    """

    def find_verb(finding: Finding) -> str:
        return next(iter(finding.fix.split(maxsplit=1)), "")

    def describe(finding: Finding, node: str, verb: str) -> tuple[object, ...]:
        return finding.code, finding.severity, node, finding.automatic, verb

    kinds = {describe(f, f.node, find_verb(f)) for f in after.findings}
    # The first word of an advice can be a name. Many findings have the same word.
    verbs = {verb: names.replace_names(verb) for verb in set(map(find_verb, before.findings))}
    return [
        f
        for f in before.findings
        if describe(f, names.rename_layer(f.node), verbs[find_verb(f)]) not in kinds
    ]


def _iterate_texts(message: Message) -> Iterator[str]:
    """Yield every text in a protobuf message. Bytes count as texts, except raw tensor data."""
    for field, values in message_fields(message):
        if field.type == field.TYPE_MESSAGE:
            for inner in values:
                yield from _iterate_texts(inner)
        elif field.type == field.TYPE_STRING:
            yield from values
        elif field.type == field.TYPE_BYTES and field.name != "raw_data":
            yield from (v.decode("utf-8", "replace") for v in values)


def _replace_texts(
    message: Message, names: PrivateNames, attributes: frozenset[str] | None = frozenset()
) -> None:
    """Replace or clear every text in a protobuf message, in place.

    Args:
        message: Model or part of a model.
        names: New names.
        attributes: Public attribute names of the node that contains the message; None for a custom
            operator.
    """
    if isinstance(message, onnx.NodeProto):
        attributes = public_attributes(message)
    for field, values in list(message_fields(message)):
        if field.name in _CLEARED:
            message.ClearField(field.name)
        elif field.type == field.TYPE_MESSAGE:
            for inner in values:
                _replace_texts(inner, names, attributes)
        elif field.type in (field.TYPE_STRING, field.TYPE_BYTES) and field.name != "raw_data":
            new = [_replace_text(message, field.name, v, names, attributes) for v in values]
            if isinstance(values, list):
                setattr(message, field.name, new[0])
            else:
                values[:] = new


def _replace_text(
    message: Message,
    field: str,
    value: Any,
    names: PrivateNames,
    attributes: frozenset[str] | None,
) -> Any:
    if isinstance(value, bytes):
        return _replace_bytes(message, value, names, attributes)
    if field == "domain":
        return _replace_domain(message, value, names)
    if field == "op_type":
        return names.rename(value, "op") if attributes is None else names.keep_word(value)
    if isinstance(message, onnx.FunctionProto) and field == "name":
        call = onnx.NodeProto(op_type=value, domain=message.domain)
        return names.rename(value, "op") if public_attributes(call) is None else value
    if isinstance(message, onnx.AttributeProto) and field == "name":
        return _replace_attribute_name(value, names, attributes)
    return names.rename(value, _KINDS.get((message.DESCRIPTOR.name, field), "tensor"))


def _replace_bytes(
    message: Message, value: bytes, names: PrivateNames, attributes: frozenset[str] | None
) -> bytes:
    text = value.decode("utf-8", "replace")
    if isinstance(message, onnx.AttributeProto) and attributes is not None:
        if is_public_value(message.name, text):
            names.keep_word(text)
            return value
    return names.rename(text, "text").encode()


def _replace_attribute_name(
    name: str, names: PrivateNames, attributes: frozenset[str] | None
) -> str:
    is_public = attributes is not None and name in attributes
    return names.keep_word(name) if is_public else names.rename(name, "attribute")


def _replace_domain(message: Message, value: str, names: PrivateNames) -> str:
    if isinstance(message, onnx.ModelProto):
        return ""
    return value if value in PUBLIC_DOMAINS else names.rename(value, "domain")


_KINDS = {
    ("GraphProto", "name"): "graph",
    ("NodeProto", "name"): "node",
    ("Dimension", "dim_param"): "size",
}
