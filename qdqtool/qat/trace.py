"""Export of a torch network to ONNX, with the site of each node input.

A *site* is an input of a module or function call where a quantizer can be inserted (see
:mod:`qdqtool.qat.sites`). The network is exported with a mark (a custom operator) at every site. A
node input that reads a mark belongs to the site of the mark. The marks are then removed from the
graph. This works for every network that torch.onnx.export can trace, even if torch.fx cannot, and
does not depend on the names of nodes.
"""

import io
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from qdqtool.errors import ModelError
from qdqtool.proto.subgraphs import rename_tensors
from qdqtool.qat.calls import NetworkCall, as_call, evaluation_mode, find_device
from qdqtool.qat.sites import ADD, CONTAINERS, WEIGHTED_MODULES, CallWatcher, QuantizerSite
from qdqtool.util.text import format_reason

TRACE_OPSET = 17
_DOMAIN = "qdqtool.qat"
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_BATCH_NORM = "batch-norm"


@dataclass
class NetworkTrace:
    """Float ONNX graph of a network, with its sites and counts of module runs and calls.

    Attributes:
        proto: The graph, without marks.
        sites: Sites, by name of the node and position of the input.
        norms: By name of a BatchNormalization, the name of the convolution module before it. The
            BatchNormalization is the only consumer of the convolution.
        calls: By module and kind of call, the number of Adds, pools and projections that ran inside
            the module. If the number differs between runs of the module, the largest number.
        runs: Number of runs of each module.
        varied: By module and kind of call, the numbers of calls if they differ between runs of the
            module.
    """

    proto: onnx.ModelProto
    sites: dict[tuple[str, int], QuantizerSite] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)
    varied: dict[tuple[str, str], list[int]] = field(default_factory=dict)


def mark_tensor(value: Tensor, number: int) -> Any:
    """Return a copy of a tensor. An export to ONNX writes the copy as a mark with a number."""
    return _MarkOperator.apply(value, str(number))


class _MarkOperator(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: str) -> Tensor:
        return x.clone()

    @staticmethod
    def symbolic(g: Any, x: Any, key: str) -> Any:
        return g.op(f"{_DOMAIN}::Mark", x, key_s=key).setType(x.type())


def export_proto(
    model: nn.Module, call: NetworkCall, opset: int, **options: Any
) -> onnx.ModelProto:
    """Export a network to ONNX in memory, with torch's TorchScript exporter.

    Raises:
        ModelError: torch cannot export the network.
    """
    file = io.BytesIO()
    args = call.args
    # torch takes a dict at the end of `args` as the keyword arguments, even if it is the last
    # positional argument. An empty dict after it prevents this.
    if call.kwargs or (args and isinstance(args[-1], dict)):
        args = (*args, call.kwargs)
    try:
        with warnings.catch_warnings():
            # The warnings of torch's tracer are about the user's code, not about the quantizers.
            warnings.simplefilter("ignore")
            torch.onnx.export(model, args, file, opset_version=opset, dynamo=False, **options)
    except Exception as error:  # torch and the code of the network may raise any class of exception
        reason = format_reason(error, first_line=True)
        raise ModelError(
            f"{type(model).__name__}: torch cannot export this network to ONNX with the sample "
            f"({call}): {reason}",
            code="export-failed",
        ) from error
    proto: onnx.ModelProto = onnx.load_model_from_string(file.getvalue())
    return proto


def trace_network(model: nn.Module, sample: Any) -> NetworkTrace:
    """Export a float network in evaluation mode, and record its sites.

    Args:
        model: The network, which is not changed.
        sample: A tensor, a tuple of arguments or a dict of keyword arguments.

    Raises:
        ModelError: torch cannot export the network.
    """
    call = as_call(sample).to_device(find_device(model))
    recorder = _SiteRecorder(model)
    with evaluation_mode(model), recorder.record():
        proto, numbers = export_without_marks(
            model,
            call,
            TRACE_OPSET,
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
        )
    traced = NetworkTrace(proto, runs=recorder.runs)
    for (module, kind), counts in recorder.calls.items():
        traced.calls[module, kind] = max(counts)
        # A run without calls of this kind has no entry.
        different = {*counts, *([0] if len(counts) < recorder.runs[module] else [])}
        if len(different) > 1:
            traced.varied[module, kind] = sorted(different)
    _assign_sites(traced, {place: recorder.sites[number] for place, number in numbers.items()})
    return traced


class _SiteRecorder:
    """Inserts marks at the sites of a network while it runs, and counts runs and calls.

    Attributes:
        sites: Site of each mark, by the number of the mark.
        runs: Number of runs of each module.
        calls: By module and kind of call, the number of calls in each run of the module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.sites: list[QuantizerSite] = []
        self.runs: Counter[str] = Counter()
        self.calls: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._names = {id(m): name for name, m in model.named_modules()}
        self._running: list[tuple[nn.Module, Counter[str]]] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        with (
            module_hooks.register_module_forward_pre_hook(self._enter_module),
            module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
            CallWatcher(self._mark_call),
        ):
            yield

    def _mark_site(self, value: Tensor, site: QuantizerSite) -> Any:
        self.sites.append(site)
        return mark_tensor(value, len(self.sites) - 1)

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._running.append((module, Counter()))
        name = self._names.get(id(module))
        if name is None:
            return None
        self.runs[name] += 1
        is_norm = isinstance(module, _NORMS)
        if not is_norm and not isinstance(module, WEIGHTED_MODULES):
            return None
        if not args or not isinstance(args[0], Tensor):
            return None
        site = QuantizerSite(name, _BATCH_NORM if is_norm else "input")
        return (self._mark_site(args[0], site), *args[1:])

    def _leave_module(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._running or self._running[-1][0] is not module:
            return
        _, counts = self._running.pop()
        name = self._names.get(id(module))
        if name is not None:
            for kind, count in counts.items():
                self.calls[name, kind].append(count)

    def _mark_call(self, kind: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        owner, call = None, 0
        for module, counts in reversed(self._running):
            name = self._names.get(id(module))
            if owner is None and name is not None and not isinstance(module, CONTAINERS):
                owner, call = name, counts[kind]
            counts[kind] += 1
        if owner is None:
            return None
        count = 2 if kind == ADD else 1
        marked = (
            self._mark_site(args[i], QuantizerSite(owner, kind, call, i)) for i in range(count)
        )
        return (*marked, *args[count:])


def _assign_sites(traced: NetworkTrace, sites: dict[tuple[str, int], QuantizerSite]) -> None:
    graph = traced.proto.graph
    producers = {o: n for n in graph.node for o in n.output}
    uses = Counter(t for n in graph.node for t in n.input)
    uses.update(o.name for o in graph.output)
    inputs = {n.name: n.input for n in graph.node}
    modules: dict[str, str] = {}  # names of modules, by name of the node
    for (name, position), site in sites.items():
        if site.kind != _BATCH_NORM:
            traced.sites[name, position] = site
            if site.kind == "input":
                modules[name] = site.module
            continue
        tensor = inputs[name][position]
        producer = producers.get(tensor)
        if producer is not None and producer.name in modules and uses[tensor] == 1:
            traced.norms[site.module] = modules[producer.name]


def export_without_marks(
    model: nn.Module, call: NetworkCall, opset: int, **options: Any
) -> tuple[onnx.ModelProto, dict[tuple[str, int], int]]:
    """Export a network that inserts marks while it runs, and remove the marks.

    Returns:
        The graph without marks; and the numbers of the marks, by name of the node that reads the
        mark and position of the input.
    """
    proto = export_proto(model, call, opset, custom_opsets={_DOMAIN: 1}, **options)
    sources: dict[str, str] = {}
    numbers: dict[str, int] = {}
    for node in proto.graph.node:
        if node.domain == _DOMAIN:
            sources[node.output[0]] = sources.get(node.input[0], node.input[0])
            numbers[node.output[0]] = int(node.attribute[0].s)
    places = {
        (node.name, position): numbers[tensor]
        for node in proto.graph.node
        if node.domain != _DOMAIN
        for position, tensor in enumerate(node.input)
        if tensor in numbers
    }
    remove_marks(proto, sources)
    return proto, places


def remove_marks(proto: onnx.ModelProto, sources: dict[str, str]) -> None:
    """Remove all marks from a graph, in place. Consumers of a mark then read its input.

    Args:
        proto: Exported graph.
        sources: Inputs of marks, by the output of the mark.

    Raises:
        ModelError: The network returns one of its inputs as an output.
    """
    graph = proto.graph
    nodes = [n for n in graph.node if n.domain != _DOMAIN]
    rename_tensors(nodes, sources)
    for output in graph.output:
        if output.name in sources:
            raise ModelError(
                f"output '{output.name}' has no producer, because the network returns an input; "
                "return a new tensor instead",
                code="output-without-producer",
                node=output.name,
            )
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    del graph.value_info[:]  # lacks shapes after marks; a later shape inference adds all shapes
    for index in reversed(range(len(proto.opset_import))):
        if proto.opset_import[index].domain == _DOMAIN:
            del proto.opset_import[index]
