"""Shape inference of models that we did not write, in bounded memory.

onnx's inference follows values that may be shapes ("data propagation"): it makes a dimension for each entry of a
vector, whatever its declared length, so that a Concat of an input of 2^40 entries, in a file of 62 bytes, takes all
memory. An Expand does so even without it, and ranks double where a Gather reads a tensor at the places that it holds
itself. Here ranks and lengths are bounded first, node by node, by plain arithmetic; nodes that are not shown to stay
small are hidden from onnx.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import onnx

from qdqtool.base import budgets
from qdqtool.model import apart
from qdqtool.model.stored import Stored
from qdqtool.model.subgraphs import STANDARD, held, nodes_of

_MANY = 1 << 62  # a bound that is none
_INTEGERS = 1 << 31  # what onnx reads of an attribute


class Extent(NamedTuple):
    """Bounds of a tensor.

    Attributes:
        low: Least rank.
        high: Greatest rank.
        least: Least number of entries, of a vector; 0 of another.
        most: Greatest number of entries of a vector, or of the value that is followed; 0 where there is neither.
    """

    low: int
    high: int
    least: int
    most: int

    @property
    def valueless(self) -> bool:
        """Whether it is no vector, and no value is followed."""
        return self.low > 1 and not self.most


UNTYPED = Extent(2, 2, 0, 0)  # onnx knows nothing of it, and so follows nothing
ANY = Extent(0, _MANY, 0, _MANY)
_SCALAR = Extent(0, 0, 1, 1)
_COUNT = Extent(1, 1, 0, _MANY)


def ranked(kind: onnx.TypeProto | None) -> bool:
    return kind is not None and kind.tensor_type.HasField("shape")


def of_type(kind: onnx.TypeProto) -> Extent:
    if not kind.tensor_type.HasField("shape"):
        return ANY
    dims = kind.tensor_type.shape.dim
    if len(dims) == 1 and not dims[0].HasField("dim_value"):
        return _COUNT
    return of_dims([d.dim_value for d in dims])


def of_dims(dims: Sequence[int]) -> Extent:
    if len(dims) == 1:
        return Extent(1, 1, max(dims[0], 0), max(dims[0], 0))
    return Extent(len(dims), len(dims), 0, 0) if dims else _SCALAR


def as_known(output: Extent, kind: onnx.TypeProto | None, followed: bool) -> Extent:
    """An output's extent by its node and by its type, where one is known."""
    if kind is None or not ranked(kind):
        return output
    known = of_type(kind)
    if known.most == _MANY:
        return known._replace(most=output.most)
    return known._replace(most=max(known.most, output.most)) if followed else known


# What a node of a kind makes of the extents of its inputs, as far as shapes of networks depend on it. -----------------


def _same(inputs: list[Extent]) -> Extent:
    return inputs[0] if inputs else ANY


def _ranks(inputs: list[Extent]) -> Extent:
    """The rank of the first input, with other dimensions."""
    found = _same(inputs)
    return found._replace(least=0, most=0 if found.low > 1 else _MANY)


def _broadcast(inputs: list[Extent]) -> Extent:
    if not inputs:
        return ANY
    low = max(e.low for e in inputs)
    high = max(e.high for e in inputs)
    most = 0 if any(e.valueless for e in inputs) else max(e.most for e in inputs)
    return Extent(low, high, max(e.least for e in inputs) if high == 1 else 0, most)


def _concat(inputs: list[Extent]) -> Extent:
    if not inputs:
        return ANY
    low, high = max(e.low for e in inputs), min(e.high for e in inputs)
    most = 0 if any(e.valueless for e in inputs) else min(sum(e.most for e in inputs), _MANY)
    return Extent(low, max(low, high), sum(e.least for e in inputs) if high == 1 else 0, most)


def _of_shape(shape: Extent) -> Extent:
    """A tensor whose dimensions another one states."""
    if shape.high > 1:
        return ANY
    return Extent(shape.least, shape.most, 0, 0 if shape.least > 1 else _MANY)


def _product(inputs: list[Extent]) -> Extent:
    if len(inputs) < 2 or min(e.low for e in inputs[:2]) < 2:
        return ANY._replace(high=max((e.high for e in inputs), default=_MANY))
    return Extent(max(e.low for e in inputs[:2]), max(e.high for e in inputs[:2]), 0, 0)


def _gather(inputs: list[Extent]) -> Extent:
    if len(inputs) < 2:
        return ANY
    data, places = inputs[:2]
    low, high = max(data.low - 1 + places.low, 0), min(max(data.high - 1, 0) + places.high, _MANY)
    # A value that is followed is read at places, of which there are as many as it gets.
    most = (
        0
        if data.valueless and low > 1
        else max(places.most, 1)
        if data.high <= 1
        else _MANY
        if low < 2
        else 0
    )
    if data.low > 1 and data.most:
        most = max(most, data.most, places.most)
    return Extent(
        low, high, places.least if data.high == places.high == places.low == 1 else 0, most
    )


def _unsqueeze(inputs: list[Extent]) -> Extent:
    found = _same(inputs)
    added = inputs[1].most if len(inputs) > 1 else budgets.RANK
    least = inputs[1].least if len(inputs) > 1 else 1
    low = found.low + least
    most = max(
        found.most, 1 if low < 2 else 0
    )  # of a scalar one entry, and the value of a vector is followed
    return Extent(low, min(found.high + added, _MANY), 1 if found.high == 0 else 0, most)


def _squeeze(inputs: list[Extent]) -> Extent:
    found = _same(inputs)
    removed = inputs[1].most if len(inputs) > 1 else _MANY
    low = max(found.low - removed, 0)
    high = max(
        found.high - (len(inputs) > 1 and inputs[1].least > 0), low
    )  # axes may name one dimension twice
    return Extent(
        low, high, 0, found.most if found.high <= 1 else max(found.most, _MANY if low < 2 else 0)
    )


def _reduce(inputs: list[Extent]) -> Extent:
    found = _same(inputs)
    return found._replace(low=0, least=0, most=found.most if found.high <= 1 else _MANY)


_SAME = (
    "Abs",
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "BatchNormalization",
    "Bernoulli",
    "BitwiseNot",
    "Cast",
    "CastLike",
    "Ceil",
    "Celu",
    "Clip",
    "Cos",
    "Cosh",
    "CumSum",
    "DequantizeLinear",
    "Dropout",
    "Elu",
    "Erf",
    "Exp",
    "Floor",
    "Gelu",
    "GroupNormalization",
    "HardSigmoid",
    "HardSwish",
    "Hardmax",
    "Identity",
    "InstanceNormalization",
    "IsInf",
    "IsNaN",
    "LRN",
    "LayerNormalization",
    "LeakyRelu",
    "Log",
    "LogSoftmax",
    "LpNormalization",
    "MeanVarianceNormalization",
    "Mish",
    "Neg",
    "Not",
    "QuantizeLinear",
    "RMSNormalization",
    "Reciprocal",
    "Relu",
    "ReverseSequence",
    "Round",
    "ScatterElements",
    "ScatterND",
    "Selu",
    "Shrink",
    "Sigmoid",
    "Sign",
    "Sin",
    "Sinh",
    "Slice",
    "Softmax",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Swish",
    "Tan",
    "Tanh",
    "ThresholdedRelu",
    "Transpose",
    "Trilu",
)
_OF_RANK = (
    "AveragePool",
    "Conv",
    "ConvInteger",
    "ConvTranspose",
    "DeformConv",
    "DepthToSpace",
    "GlobalAveragePool",
    "GlobalLpPool",
    "GlobalMaxPool",
    "GridSample",
    "LpPool",
    "MaxPool",
    "MaxRoiPool",
    "MaxUnpool",
    "Pad",
    "QLinearConv",
    "Resize",
    "SpaceToDepth",
    "Split",
    "Tile",
    "TopK",
    "Upsample",
)
_BROADCASTS = (
    "Add",
    "And",
    "BitShift",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "Div",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "Max",
    "Mean",
    "Min",
    "Mod",
    "Mul",
    "Or",
    "PRelu",
    "Pow",
    "Sub",
    "Sum",
    "Where",
    "Xor",
)
_EXTENTS: dict[str, Callable[[list[Extent]], Extent]] = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_OF_RANK, _ranks),
    **dict.fromkeys(_BROADCASTS, _broadcast),
    "Concat": _concat,
    "MatMul": _product,
    "Gather": _gather,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": lambda inputs: _of_shape(inputs[1]) if len(inputs) > 1 else ANY,
    "Expand": lambda inputs: (
        _broadcast([inputs[0], _of_shape(inputs[1])]) if len(inputs) > 1 else ANY
    ),
    "ConstantOfShape": lambda inputs: _of_shape(inputs[0]) if inputs else ANY,
    "Shape": lambda inputs: Extent(1, 1, _same(inputs).low, _same(inputs).high),
    "Size": lambda _: _SCALAR,
    "Range": lambda _: _COUNT,
    "Flatten": lambda _: Extent(2, 2, 0, 0),
    "Gemm": lambda _: Extent(2, 2, 0, 0),
    "NonZero": lambda _: Extent(2, 2, 0, 0),
    "NonMaxSuppression": lambda _: Extent(2, 2, 0, 0),
}
# Operators of which onnx follows values, by trial of all: tests/model/test_inference.py
FOLLOWED = frozenset(
    (
        "Add",
        "Cast",
        "Concat",
        "Gather",
        "MeanVarianceNormalization",
        "Mul",
        "Size",
        "Slice",
        "Squeeze",
        "Sub",
        "Unsqueeze",
    )
)

_BY_AXES = ("Squeeze", "Unsqueeze")


def output_of(node: onnx.NodeProto, inputs: list[Extent]) -> Extent:
    work = _EXTENTS.get(node.op_type)
    if work is not None:
        if node.op_type in _BY_AXES and inputs and (node.attribute or len(inputs) == 1):
            inputs = [inputs[0], _axes(node, inputs[1:])]
        return work(inputs)
    if node.op_type == "Constant":
        return _constant(node)
    if node.op_type.startswith("Reduce"):
        kept = all(a.i for a in node.attribute if a.name == "keepdims")
        return _same(inputs) if kept else _reduce(inputs)
    if _refers(node):
        return ANY
    # Of the others no rank is more than one above those of the inputs together, but where dimensions are attributes.
    high = sum(e.high for e in inputs) + 1 + sum(len(a.ints) for a in node.attribute)
    if node.op_type == "Einsum":  # its result has a dimension for each letter behind the arrow
        high += sum(len(a.s.rpartition(b"->")[2]) for a in node.attribute)
    return ANY._replace(high=min(high, _MANY))


def _axes(node: onnx.NodeProto, told: list[Extent]) -> Extent:
    """How many axes there are: those of an attribute count before opset 13, those of an input from then on.

    Of the attribute's, onnx ignores in a Squeeze those that its input does not have.
    """
    stated = next((len(a.ints) for a in node.attribute if a.name == "axes"), 0)
    adds = node.op_type == "Unsqueeze"
    few, many = stated if adds else 0, stated if stated or (adds and not _refers(node)) else _MANY
    if told:
        few, many = min(few, told[0].least), max(many, told[0].most)
    return Extent(1, 1, few, many)


def _refers(node: onnx.NodeProto) -> bool:
    """Whether an attribute is that of the function around it, which each call states."""
    return any(a.ref_attr_name for a in node.attribute)


def _constant(node: onnx.NodeProto) -> Extent:
    if _refers(node):
        return ANY
    for attribute in node.attribute:
        if attribute.name == "value":
            return of_dims(attribute.t.dims)
        if attribute.name in ("value_ints", "value_floats", "value_strings"):
            return of_dims([len(attribute.ints) + len(attribute.floats) + len(attribute.strings)])
        if attribute.name == "sparse_value":
            return of_dims(attribute.sparse_tensor.dims)
    return _SCALAR


_HIDDEN = "qdqtool.hidden"
_ROUNDS = 4
_TABLES = 100_000  # entries of the tables that onnx copies for calls: 0.02 seconds
SCOPE_ENTRIES = (
    20_000_000  # entries of the tables of tensors that it copies for subgraphs: a second
)
_STEP = 1 << 30  # below which a Slice's is no risk
_NAME = 60  # characters kept of the name of a dimension while onnx infers

Types = dict[str, onnx.TypeProto]


def infer(proto: onnx.ModelProto) -> Types | None:
    """The types of the tensors of a model's main graph, as onnx infers them.

    Args:
        proto: The model, best without large weights; it is as before at the end.

    Returns:
        Types by tensor; None where inference fails. Dimensions stay unknown behind a rank above
        :data:`qdqtool.base.budgets.RANK`, and where a vector of more than
        :data:`qdqtool.base.budgets.SHAPE_ENTRIES` entries, or of unknown length, takes part in the
        computation of a shape.
    """
    whole = _with_few_functions(proto)
    return None if whole is None else _Inference(whole).types(follow=True)


def grows(proto: onnx.ModelProto) -> bool:
    """Whether onnx's inference, without data propagation, could need much more memory than the file is large."""
    whole = _with_few_functions(proto)
    if whole is None:
        return True
    inference = _Inference(whole)
    inference.types(follow=False)
    return bool(inference.hidden)


def _with_few_functions(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """A model that calls few functions of its own, or the same one with their nodes in the places of the calls: at each
    call onnx's inference copies the table of all of them. None where that cannot be made."""
    if not proto.functions:
        return proto
    own = {(f.domain, f.name) for f in proto.functions}
    if len(own) * sum((n.domain, n.op_type) in own for n in nodes_of(proto)) < _TABLES:
        return proto
    from onnx import inliner

    try:
        inlined: onnx.ModelProto = inliner.inline_local_functions(proto)
    except Exception:  # it raises whatever its parts raise
        return None
    return inlined


def stays_small(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto], version: int) -> bool:
    """Whether onnx's inference of one node of an operator set's version, by its inputs' types, needs little memory, and
    ends in no crash."""
    proto = onnx.ModelProto(opset_import=[onnx.helper.make_opsetid("", version)])
    proto.graph.node.append(node)
    proto.graph.value_info.extend(
        onnx.ValueInfoProto(name=name, type=kind) for name, kind in types.items()
    )
    cuts = node.op_type in apart.CUTTING or any(True for a in node.attribute for _ in held(a))
    return not _Inference(proto).hidden and not (cuts and not apart.is_harmless(proto))


# What these make has a type that follows from the types of what they read, whatever the values.
TYPED_BY_INPUTS = frozenset(
    (
        "Add",
        "AveragePool",
        "BatchNormalization",
        "Clip",
        "Concat",
        "Conv",
        "ConvTranspose",
        "Div",
        "Flatten",
        "Gemm",
        "GlobalAveragePool",
        "HardSigmoid",
        "HardSwish",
        "LeakyRelu",
        "MatMul",
        "MaxPool",
        "Mul",
        "Relu",
        "Sigmoid",
        "Softmax",
        "Split",
        "Sub",
        "Tanh",
        "Transpose",
    )
)
Known = tuple[
    int, tuple[int | None, ...] | None
]  # element type, 0 where it is not known, and dimensions


class Alike:
    """Types of what nodes make: onnx is asked once for all that are alike in operator, attributes and inputs' types.

    So it says what its inference of the whole model says, which takes far longer for many nodes. Only of operators
    whose results' types follow from those of their inputs, where these are wholly known.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._opset = next((o.version for o in proto.opset_import if o.domain in STANDARD), 0)
        self._operators = TYPED_BY_INPUTS - {
            f.name for f in proto.functions if f.domain in STANDARD
        }
        self._asked: dict[tuple[object, ...], list[Known] | None] = {}

    def outputs(self, node: onnx.NodeProto, op: str, inputs: Sequence[Known]) -> list[Known] | None:
        """The types of a node's results; None where they are not to be had so.

        Args:
            node: The node.
            op: Its operator.
            inputs: The types of what it reads, one for each input.
        """
        if op not in self._operators or node.domain not in STANDARD:
            return None
        attributes = node.attribute
        key = (
            op,
            len(node.output),
            *inputs,
            *([a.SerializeToString() for a in attributes] if attributes else ()),
        )
        if key not in self._asked:
            self._asked[key] = self._ask(node, inputs)
        return self._asked[key]

    def _ask(self, node: onnx.NodeProto, inputs: Sequence[Known]) -> list[Known] | None:
        if (
            not onnx.defs.has(node.op_type, self._opset)
            or is_odd(node, None)
            or not all(
                kind and dims is not None and None not in dims and len(dims) <= budgets.RANK
                for kind, dims in inputs
            )
        ):
            return None
        schema = onnx.defs.get_schema(node.op_type, self._opset, "")
        types = {
            t: onnx.helper.make_tensor_type_proto(*kind)
            for t, kind in zip(node.input, inputs, strict=True)
        }
        try:
            made = onnx.shape_inference.infer_node_outputs(schema, node, types)
        except Exception:  # a damaged node
            return None
        found = [made[t].tensor_type for t in node.output if t in made]
        if len(found) < len(node.output) or not all(
            f.HasField("shape") and all(d.HasField("dim_value") for d in f.shape.dim) for f in found
        ):
            return None
        return [(f.elem_type, tuple(d.dim_value for d in f.shape.dim)) for f in found]


def shorten_names(proto: onnx.ModelProto) -> None:
    """Cuts long symbolic names of dimensions for good: onnx gives every tensor behind a copy of them."""
    _shorten(list(_long_names(proto, nodes_of(proto))))


def _shorten(dims: Sequence[Any]) -> list[tuple[Any, str]]:
    """Cuts the names of dimensions, equal ones alike; returns what they were."""
    names: dict[str, int] = {}
    before = [(d, d.dim_param) for d in dims]
    for dim, name in before:
        dim.dim_param = f"{name[:_NAME]}~{names.setdefault(name, len(names))}"
    return before


def _long_names(proto: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> Iterator[Any]:
    """Dimensions with long symbolic names, those of types in attributes (Optional) among them."""
    attributes = [a for n in nodes for a in n.attribute]
    kinds = [
        kind for a in attributes for kind in (*([a.tp] if a.HasField("tp") else []), *a.type_protos)
    ]
    for graph in (proto.graph, *(g for a in attributes for g in held(a))):
        kinds += [v.type for v in (*graph.input, *graph.output, *graph.value_info)]
    for kind in kinds:
        which = kind.WhichOneof("value")
        if which in ("sequence_type", "optional_type"):
            kinds.append(getattr(kind, which).elem_type)
        elif which == "map_type":
            kinds.append(kind.map_type.value_type)
        elif which in ("tensor_type", "sparse_tensor_type"):
            yield from (d for d in getattr(kind, which).shape.dim if len(d.dim_param) > _NAME)


class _Inference:
    """Inference of a model, with the nodes hidden that are not shown to stay small.

    Attributes:
        hidden: Nodes that are always hidden, by identity: also those with subgraphs behind many such.
        unfollowed: Nodes that are hidden where values are followed.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        graph = proto.graph
        self._proto = proto
        self._nodes = list(
            nodes_of(proto)
        )  # protobuf's objects keep their identity as long as they are held
        self._stored = Stored(proto, self._nodes)
        self._functions = {(f.domain, f.name): f for f in proto.functions}
        self._known: Types = {
            v.name: v.type for v in (*graph.value_info, *graph.input, *graph.output)
        }
        self._stated = frozenset(self._known)
        attributed = [n for n in self._nodes if n.attribute]
        self._attributed = frozenset(map(id, attributed))
        self._long = list(_long_names(proto, attributed))
        self._amounts: dict[str, int] = {}  # how much is known of each
        #: Of an operator and the extents of its inputs: that of its output, all entries together, the highest rank.
        self._made: dict[tuple[object, ...], tuple[Extent, int, int]] = {}
        self._limit()

    def types(self, follow: bool) -> Types | None:
        """What onnx infers; ``follow``: with data propagation."""
        if not self.hidden and not (follow and self.unfollowed):
            return self._run(follow)
        for _ in range(_ROUNDS):  # what was learned of types shows more nodes to stay small
            before = len(self.hidden) + len(self.unfollowed)
            for kind in (False, True) if follow else (False,):
                self._learn(self._run(kind))
            self._limit()
            if len(self.hidden) + len(self.unfollowed) in (0, before):
                break
        if follow and not self.hidden and not self.unfollowed:
            return self._run(True)
        self._learn(self._run(False))
        return self._known

    def _learn(self, found: Types | None) -> None:
        for name, kind in (found or {}).items():
            known = self._amounts.get(name)
            if known is None:
                known = self._amounts[name] = _knowledge(self._known.get(name))
            amount = _knowledge(kind)
            if amount > known:
                self._known[name], self._amounts[name] = kind, amount

    def _run(self, follow: bool) -> Types | None:
        graph = self._proto.graph
        places = [
            n for n in self._nodes if id(n) in self.hidden or (follow and id(n) in self.unfollowed)
        ]
        domains = [n.domain if n.HasField("domain") else None for n in places]
        count = len(graph.value_info)
        graph.value_info.extend(
            onnx.ValueInfoProto(name=name, type=kind)
            for name, kind in self._known.items()
            if name not in self._stated
        )
        for node in places:
            node.domain = _HIDDEN
        opsets = [o.opset_import for o in (self._proto, *self._proto.functions)] if places else []
        for imported in opsets:
            imported.add(domain=_HIDDEN, version=1)
        long = _shorten(self._long)
        try:
            inferred = apart.infer_shapes(self._proto, data_prop=follow).graph
        except Exception:
            # Shapes are a convenience: a model that onnx cannot infer (custom operators, odd types) is still used.
            return None
        finally:
            for node, domain in zip(places, domains, strict=True):
                if domain is None:
                    node.ClearField("domain")
                else:
                    node.domain = domain
            for dim, name in long:
                dim.dim_param = name
            del graph.value_info[count:]
            for imported in opsets:
                del imported[-1]
        return {v.name: v.type for v in (*inferred.value_info, *inferred.output)}

    # Bounds ---------------------------------------------------------------------------------------------------

    def _limit(self) -> None:
        """Decides which nodes are hidden, by what is known of types."""
        self.hidden: set[int] = set()
        self.unfollowed: set[int] = set()
        self._entries = self._copied = 0
        self._graph(self._proto.graph, None, self._known)

    def _graph(
        self, graph: onnx.GraphProto, outer: _Scope | None, known: Types, unlike: int = _MANY
    ) -> None:
        """Judges a graph's nodes; of its inputs from ``unlike`` on onnx knows no shape that the graph does not state."""
        extents = _Scope()
        extents.outer = outer
        extents.tensors = (
            len(graph.node) + len(graph.initializer) + (outer.tensors if outer is not None else 0)
        )
        for value in (*graph.value_info, *graph.input):
            extents[value.name] = of_type(known.get(value.name, value.type))
        listed = {v.name for v in graph.value_info} if unlike < len(graph.input) else ()
        extents.update(
            (v.name, UNTYPED)
            for v in graph.input[unlike:]
            if v.name not in listed and not ranked(v.type)
        )
        for tensor in graph.initializer:
            extents[tensor.name] = of_dims(tuple(tensor.dims))
        for sparse in graph.sparse_initializer:
            extents[sparse.values.name] = of_dims(tuple(sparse.dims))
        self._walk(graph.node, extents, known)

    def _walk(self, nodes: Iterable[onnx.NodeProto], extents: _Scope, known: Types) -> None:
        functions = self._functions
        for node in nodes:
            inputs = [extents[t] if t else UNTYPED for t in node.input]
            op, domain = node.op_type, node.domain
            function = functions.get((domain, op)) if functions else None
            outputs: list[Extent] = []  # where they are known one by one
            if function is not None:
                if is_odd(node, function):
                    self.hidden.add(id(node))
                # Types inside a function are nowhere stated, and what they are found to be is not kept.
                inner = _Scope(zip(function.input, inputs, strict=False))
                self._walk(function.node, inner, {})
                if (
                    node.overload == function.overload
                ):  # by which one of several of a name is called
                    outputs = [inner[t] for t in function.output]
            if id(node) in self._attributed:
                if function is None and is_odd(node, None):
                    self.hidden.add(id(node))
                for attribute in node.attribute:
                    for graph in held(attribute):
                        self._copied += extents.tensors
                        if self._copied > SCOPE_ENTRIES:
                            self.hidden.add(id(node))
                        stated = {
                            v.name: v.type for v in (*graph.value_info, *graph.input, *graph.output)
                        }
                        # What a Loop hands on from turn to turn may have another shape each time.
                        loops = op == "Loop" and domain in STANDARD and function is None
                        self._graph(graph, extents, stated, 2 if loops else _MANY)
                        outputs = [UNTYPED] * (len(graph.input) - 2) if loops else outputs
            if function is not None:
                output = ANY
            elif domain in STANDARD:
                made = self._made.get((op, *inputs))
                if made is None:
                    output = output_of(node, inputs)
                    made = (
                        output,
                        sum(e.most for e in inputs) + output.most,
                        max(e.high for e in (*inputs, output)),
                    )
                    if op in _EXTENTS and op not in _BY_AXES:
                        self._made[op, *inputs] = made
                output = made[0]
                if op in FOLLOWED or made[2] > budgets.RANK:
                    self._judge(node, op, made[1], made[2])
            else:
                output = ANY if onnx.defs.has(op, domain) else UNTYPED
            for tensor in node.output:
                kind = known.get(tensor)
                extents[tensor] = output if kind is None else as_known(output, kind, op in FOLLOWED)
            for tensor, output in zip(node.output, outputs, strict=False):
                extents[tensor] = as_known(output, known.get(tensor), True)

    def _judge(self, node: onnx.NodeProto, op: str, work: int, ranks: int) -> None:
        if ranks > budgets.RANK:
            self.hidden.add(id(node))
        elif op in FOLLOWED:
            if (
                work > budgets.SHAPE_ENTRIES
                or self._entries + work > budgets.SHAPE_ENTRIES_ALL
                or (op == "Slice" and not self._steps_short(node))
            ):
                self.unfollowed.add(id(node))
            else:
                self._entries += work

    def _steps_short(self, node: onnx.NodeProto) -> bool:
        """Whether onnx gets to the end of what it follows: it counts in 32 bits, in which a step of 2^32 is none."""
        steps = "".join(node.input[4:5])
        found = self._stored.values(steps) if steps else []
        return found is not None and all(abs(step) < _STEP for step in found)


def is_odd(node: onnx.NodeProto, function: onnx.FunctionProto | None) -> bool:
    """Whether onnx could fail on attributes: it cuts them to 32 bits, and counts to the outputs that a Split states."""
    attributes = (
        node.attribute if function is None else (*node.attribute, *function.attribute_proto)
    )
    if node.op_type != "Constant" and any(not -_INTEGERS <= a.i < _INTEGERS for a in attributes):
        return True
    return node.op_type == "Split" and any(
        a.name == "num_outputs" and (a.i != len(node.output) or a.ref_attr_name) for a in attributes
    )


class _Scope(dict[str, Extent]):
    """Extents of a graph's tensors; asked for others, those of the graph around it."""

    outer: _Scope | None = None
    tensors = 0  # of the whole graph and those around it

    def __missing__(self, tensor: str) -> Extent:
        return UNTYPED if self.outer is None else self.outer[tensor]


def _knowledge(kind: onnx.TypeProto | None) -> int:
    """How much a type says: more with each dimension that it gives."""
    if kind is None or not ranked(kind):
        return 0 if kind is None else 1
    known: int = sum(
        2 * d.HasField("dim_value") + d.HasField("dim_param") for d in kind.tensor_type.shape.dim
    )
    return 2 + known
