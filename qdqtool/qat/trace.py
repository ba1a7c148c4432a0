"""From a torch network to its float ONNX graph, knowing which node input belongs to which place in the network.

The network is exported with a mark (an operator of a domain of our own) at every place where a quantizer could be;
the marks are then taken out of the graph, and the nodes that read them are noted. Names of nodes play no part.
Whatever torch.onnx.export can trace is understood, networks that torch.fx cannot trace included.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.ir import qdq
from qdqtool.ir.constants import ConstantEvaluator
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import needs_own_dq
from qdqtool.patterns.rewrites import unshare_weights
from qdqtool.proto.subgraphs import rename_tensors
from qdqtool.qat.networks import override_attributes
from qdqtool.qat.sites import ADD, CONTAINERS, WEIGHTED_MODULES, CallWatcher, QuantizerSite
from qdqtool.util.text import reason_of

TRACE_OPSET = 17
_DOMAIN = "qdqtool.qat"
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_BATCH_NORM = "batch-norm"


@dataclass
class NetworkTrace:
    """The float graph.

    Attributes:
        proto: Without any mark.
        sites: From a node's name and an input position to the place in the network.
        norms: From a BatchNormalization's place to the convolution module that alone feeds it, where there is one.
        calls: How many Adds and pools ran inside each module that makes some, by module and kind.
        runs: How often each module with a site ran.
        varied: Those of ``calls`` that are not the same each time their module runs, with their numbers.
    """

    proto: onnx.ModelProto
    sites: dict[tuple[str, int], QuantizerSite] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)
    varied: dict[tuple[str, str], list[int]] = field(default_factory=dict)


def mark(value: Tensor, number: int) -> Any:
    """An identity that leaves a node with its number in the exported graph."""
    return _MarkOperator.apply(value, str(number))


class _MarkOperator(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: str) -> Tensor:
        return x.clone()

    @staticmethod
    def symbolic(g: Any, x: Any, key: str) -> Any:
        return g.op(f"{_DOMAIN}::Mark", x, key_s=key).setType(x.type())


@dataclass(frozen=True)
class NetworkCall:
    """What a network is called with."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, in the order of the exported model's inputs."""
        return [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor)]

    @property
    def description(self) -> list[tuple[str, str, list[int]]]:
        """Of each tensor how the sample holds it, ``floats``, ``integers``, ``booleans`` ..., and its dimensions."""
        places = [
            *((f"argument {i + 1}", v) for i, v in enumerate(self.args)),
            *((f"'{k}'", v) for k, v in self.kwargs.items()),
        ]
        return [(p, _kind(v), list(v.shape)) for p, v in places if isinstance(v, Tensor)]

    def __str__(self) -> str:
        return ", ".join(describe_tensor(*d[1:]) for d in self.description) or "no tensor"

    def map(self, change: Callable[[Any], Any]) -> NetworkCall:
        """The same with every argument changed."""
        return NetworkCall(
            tuple(map(change, self.args)), {k: change(v) for k, v in self.kwargs.items()}
        )

    def to_device(self, device: torch.device | str) -> NetworkCall:
        """The same with detached tensors on that device."""
        return self.map(lambda v: v.detach().to(device) if isinstance(v, Tensor) else v)

    def run(
        self, module: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None
    ) -> Any:
        """Calls ``module`` with the tensors moved to a device, those of floats also to another type."""

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype) if value.is_floating_point() else value.to(device)

        given = self.map(moved)
        return module(*given.args, **given.kwargs)


def describe_tensor(kind: str, shape: Sequence[int]) -> str:
    """Kind and dimensions of a tensor, in words."""
    return f"{'x'.join(map(str, shape))} {kind}" if shape else f"a number of {kind}"


def _kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex numbers"
    return (
        "floats"
        if tensor.is_floating_point()
        else "booleans"
        if tensor.dtype == torch.bool
        else "integers"
    )


def as_call(sample: Any, wanted: Sequence[tuple[str, str, list[int]]] = ()) -> NetworkCall:
    """What a network is called with, from a tensor, a tuple of arguments or a dict of keyword arguments.

    Args:
        sample: Any of these.
        wanted: What :attr:`Call.description` said of the sample that the network was prepared with.

    Raises:
        QdqtoolError: It is none of these, or a tensor has no values, other than plain ones, or not the wanted ones.
    """
    if isinstance(sample, Tensor):
        call = NetworkCall((sample,))
    elif isinstance(sample, list | tuple):
        call = NetworkCall(tuple(sample))
    elif isinstance(sample, dict):
        call = NetworkCall((), dict(sample))
    else:
        raise QdqtoolError(
            f"sample: give a tensor, a tuple of the network's arguments or a dict of its keyword arguments, "
            f"not {type(sample).__name__}",
            code="wrong-type",
            parameter="sample",
        )
    known = {place: (kind, shape) for place, kind, shape in wanted}
    for (place, kind, shape), tensor in zip(call.description, call.tensors, strict=True):
        told = f"sample, {place}: {describe_tensor(kind, shape)}"
        if (
            tensor.is_meta
            or tensor.is_quantized
            or tensor.is_complex()
            or tensor.layout != torch.strided
        ):
            raise QdqtoolError(
                f"{told} ({tensor.dtype}, {tensor.layout}, {tensor.device}): give a plain tensor, dense "
                "and of real numbers, on the CPU or a GPU",
                code="unsupported-tensor",
                parameter="sample",
            )
        if not tensor.numel():
            raise QdqtoolError(
                f"{told} hold no value: give at least one of each dimension, also in the batch",
                code="empty",
                parameter="sample",
            )
        if bool(torch.isnan(tensor).any()):
            raise QdqtoolError(
                f"{told} are not all numbers: give values as the network gets them",
                code="not-finite",
                parameter="sample",
            )
        if place in known and (kind, len(shape)) != (known[place][0], len(known[place][1])):
            raise QdqtoolError(
                f"{told}: the network was prepared with {describe_tensor(*known[place])}; give such a tensor",
                code="wrong-shape",
                parameter="sample",
            )
    return call


def device_of(model: nn.Module) -> torch.device:
    """The device of a network's first parameter or buffer; the CPU where it has none."""
    first = next((t for t in (*model.parameters(), *model.buffers())), None)
    return torch.device("cpu") if first is None else first.device


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switches every module to evaluation and back to what it was.

    Attention runs as in training: torch's fused path for evaluation has no ONNX form and passes every quantizer by.
    """
    before = [(m, m.training) for m in model.modules()]
    fused = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, training in before:
            module.training = training


def export_proto(
    model: nn.Module, call: NetworkCall, opset: int, **options: Any
) -> onnx.ModelProto:
    """torch's TorchScript-based ONNX export, in memory.

    Raises:
        ModelError: torch cannot export the network.
    """
    file = io.BytesIO()
    # torch takes a dict at the end for keyword arguments, and one that is itself the last argument for these as well.
    args = (
        (*call.args, call.kwargs)
        if call.kwargs or (call.args and isinstance(call.args[-1], dict))
        else call.args
    )
    try:
        with warnings.catch_warnings(), _silence_exporter():
            warnings.simplefilter(
                "ignore"
            )  # tracer warnings: the same that the user's own export shows
            torch.onnx.export(model, args, file, opset_version=opset, dynamo=False, **options)
    except Exception as error:  # torch raises what its passes and the network's own code raise
        reason = reason_of(error, first_line=True)
        raise ModelError(
            f"{type(model).__name__}: torch cannot export it to ONNX with the sample ({call}): {reason}",
            code="export-failed",
        ) from error
    proto: onnx.ModelProto = onnx.load_model_from_string(file.getvalue())
    return proto


def _silence_exporter() -> AbstractContextManager[None]:
    """Where one of its passes fails, torch's exporter prints the whole graph to standard output."""
    known = hasattr(torch._C, "_jit_onnx_log")
    return (
        override_attributes(torch._C, _jit_onnx_log=lambda *words: None) if known else nullcontext()
    )


def trace(model: nn.Module, sample: Any) -> NetworkTrace:
    """Traces a float network, called with a sample (see :func:`as_call`) in evaluation mode; it is left as it was.

    Raises:
        ModelError: torch cannot export the network.
    """
    call = as_call(sample).to_device(device_of(model))
    recorder = _SiteRecorder(model)
    with evaluation_mode(model), recorder.recording():
        proto, numbers = export_marked(
            model,
            call,
            TRACE_OPSET,
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
        )
    traced = NetworkTrace(
        proto, runs=recorder.runs, calls={k: max(c) for k, c in recorder.calls.items()}
    )
    for (module, kind), counts in recorder.calls.items():
        each = {*counts, *([0] if len(counts) < recorder.runs[module] else [])}
        if len(each) > 1:
            traced.varied[module, kind] = sorted(each)
    _place(traced, {place: recorder.keys[number] for place, number in numbers.items()})
    return traced


class _SiteRecorder:
    """Marks places while the network runs."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(m): name for name, m in model.named_modules()}
        self.stack: list[tuple[nn.Module, Counter[str]]] = []
        self.keys: list[QuantizerSite] = []
        self.runs: Counter[str] = Counter()
        self.calls: dict[tuple[str, str], list[int]] = defaultdict(list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        with (
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
            CallWatcher(self._seen),
        ):
            yield

    def _mark(self, value: Tensor, site: QuantizerSite) -> Any:
        self.keys.append(site)
        return mark(value, len(self.keys) - 1)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self.stack.append((module, Counter()))
        name = self.names.get(id(module))
        if name is None:
            return None
        self.runs[name] += 1
        if (
            isinstance(module, (*WEIGHTED_MODULES, *_NORMS))
            and args
            and isinstance(args[0], Tensor)
        ):
            kind = _BATCH_NORM if isinstance(module, _NORMS) else "input"
            return (self._mark(args[0], QuantizerSite(name, kind)), *args[1:])
        return None

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.stack or self.stack[-1][0] is not module:
            return
        _, counts = self.stack.pop()
        name = self.names.get(id(module))
        if name is not None:
            for kind, count in counts.items():
                self.calls[name, kind].append(count)

    def _seen(self, kind: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        named = (
            e
            for e in reversed(self.stack)
            if id(e[0]) in self.names and not isinstance(e[0], CONTAINERS)
        )
        owner, own = next(named, (None, Counter[str]()))
        call = own[kind]
        for _, counts in self.stack:
            counts[kind] += 1
        if owner is None:
            return None
        name = self.names[id(owner)]
        marked = 2 if kind == ADD else 1
        return (
            *(self._mark(args[i], QuantizerSite(name, kind, call, i)) for i in range(marked)),
            *args[marked:],
        )


def _place(traced: NetworkTrace, sites: dict[tuple[str, int], QuantizerSite]) -> None:
    graph = traced.proto.graph
    producers = {o: n for n in graph.node for o in n.output}
    readers = Counter(t for n in graph.node for t in n.input)
    readers.update(o.name for o in graph.output)
    module_of: dict[str, str] = {}
    for node in graph.node:
        for position, tensor in enumerate(node.input):
            site = sites.get((node.name, position))
            if site is None:
                continue
            if site.kind == _BATCH_NORM:
                feeding = producers.get(tensor)
                if feeding is not None and readers[tensor] == 1 and feeding.name in module_of:
                    traced.norms[site.module] = module_of[feeding.name]
            else:
                traced.sites[node.name, position] = site
                if site.kind == "input":
                    module_of[node.name] = site.module


def export_marked(
    model: nn.Module, call: NetworkCall, opset: int, **options: Any
) -> tuple[onnx.ModelProto, dict[tuple[str, int], int]]:
    """What :func:`export_proto` makes of a network with marks, without these; their numbers by node and position."""
    proto = export_proto(model, call, opset, custom_opsets={_DOMAIN: 1}, **options)
    source: dict[str, str] = {}
    number: dict[str, int] = {}
    for node in proto.graph.node:
        if node.domain == _DOMAIN:
            source[node.output[0]] = source.get(node.input[0], node.input[0])
            number[node.output[0]] = int(node.attribute[0].s)
    read = (
        (n, i, t) for n in proto.graph.node if n.domain != _DOMAIN for i, t in enumerate(n.input)
    )
    numbers = {(n.name, i): number[t] for n, i, t in read if t in number}
    remove_marks(proto, source)
    return proto, numbers


def remove_marks(proto: onnx.ModelProto, source: dict[str, str]) -> None:
    """Takes every mark out; its readers read ``source`` instead.

    Raises:
        ModelError: An output of the network is one of its inputs.
    """
    graph = proto.graph
    kept = [n for n in graph.node if n.domain != _DOMAIN]
    rename_tensors(kept, source)
    for output in graph.output:
        if output.name in source:
            raise ModelError(
                f"output '{output.name}' is made by nothing; return a new tensor instead of an input",
                code="output-without-producer",
                node=output.name,
            )
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in kept]
    del graph.node[:]
    graph.node.extend(copies)
    del graph.value_info[:]  # shapes behind a mark were not known; they are inferred when asked for
    for index in reversed(range(len(proto.opset_import))):
        if proto.opset_import[index].domain == _DOMAIN:
            del proto.opset_import[index]


# What the export leaves to be tidied: constants that other nodes make, and pairs that say the same twice -------------

_FOLDED = ("Constant", "Identity", "Cast", "Transpose", "Unsqueeze", "Slice")


def fold_constants(model: Model) -> Model:
    """Constant nodes become initializers, and what moves or cuts constants (packed weights too) their value."""
    editor, constants = Editor(model), ConstantEvaluator(model, sys.maxsize)
    values: dict[str, np.ndarray] = {}
    for node in model.ordered:
        if node.op not in _FOLDED or node.domain != "" or model.is_output(node.output):
            continue
        value = model.constant(node.output)
        known = {t: v for t in node.inputs if (v := values.get(t, model.constant(t))) is not None}
        if known and len(known) == len(set(node.inputs)):
            value = (constants.evaluate_node(node, known, sys.maxsize) or {}).get(node.output)
        if value is not None:
            values[node.output] = value
    for tensor, value in values.items():
        editor.redirect(tensor, editor.constant(f"{tensor}_value", value))
        if not editor.is_captured(tensor):
            editor.remove(model.producers[tensor])
    return editor.finish()


def clean_up_export(
    raw: onnx.ModelProto, calls: dict[str, int]
) -> tuple[onnx.ModelProto, dict[str, list[int]]]:
    """Without superfluous nodes; each QuantizeLinear stands for all calls whose pair it took over."""
    model = transpose_weights(unshare_weights(fold_constants(Model(raw))))
    same: dict[str, list[int]] = defaultdict(list)
    tensors = {n.name: n.input(0) for n in model.nodes if n.op == qdq.Q}
    for name, number in calls.items():
        same[tensors.get(name, name)].append(number)
    # The call that the pair itself stands for comes first.
    numbers = {
        n: [own, *(c for c in same[tensors.get(n, n)] if c != own)] for n, own in calls.items()
    }
    return merge_pairs(model).proto, numbers


def transpose_weights(model: Model) -> Model:
    """A Transpose between a weight's DQ and a MatMul goes into the weights, so that the DQ is beside the product."""
    editor = Editor(model)
    for node in (n for n in model.nodes if n.op == "Transpose" and not model.is_output(n.output)):
        dq, q = qdq.find_pair(model, node.input(0)) or (None, None)
        value = model.constant(q.input(0)) if q is not None else None
        if (
            dq is None
            or q is None
            or value is None
            or editor.is_captured(dq.output)
            or editor.is_captured(node.output)
        ):
            continue
        if len(model.consumers(q.output)) != 1 or len(model.consumers(dq.output)) != 1:
            continue
        perm = list(node.attributes.get("perm", range(value.ndim)[::-1]))
        editor.set_input(
            q, 0, editor.constant(f"{q.input(0)}_transposed", np.transpose(value, perm))
        )
        for pair in (q, dq):
            for attribute in editor.edit_proto(pair).attribute:
                if attribute.name == "axis":
                    attribute.i = perm.index(attribute.i % value.ndim)
        editor.redirect(node.output, dq.output)
        editor.remove(node)
    return editor.finish()


def merge_pairs(model: Model) -> Model:
    """Readers of one tensor that quantize it with the same scale share one Q, as TensorRT would merge them.

    They share the DQ as well, but for operators that need one of their own, see
    :func:`qdqtool.ir.operators.needs_own_dq`.
    """
    editor = Editor(model)
    kept: dict[tuple[str, float, str], Node] = {}
    shared: dict[str, Node] = {}
    for q in model.ordered:
        if q.op != qdq.Q or model.is_constant(q.input(0)):
            continue
        params = qdq.read_params(model, q)
        dqs = model.consumers(q.output)
        if params.scale is None or params.scale.size != 1 or len(dqs) != 1 or dqs[0].op != qdq.DQ:
            continue
        dq = dqs[0]
        if model.is_output(dq.output) or editor.is_captured(dq.output):
            continue
        first = kept.setdefault((q.input(0), float(params.scale[0]), str(params.precision)), q)
        if first is not q:
            editor.set_input(dq, 0, first.output)
            editor.remove(q)
        if not any(needs_own_dq(r) for r in model.consumers(dq.output)):
            common = shared.setdefault(first.output, dq)
            if common is not dq:
                editor.redirect(dq.output, common.output)
                editor.remove(dq)
    return editor.finish()
