"""Which quantizers a network gets, decided before it is touched."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qdqtool.errors import QdqtoolError
from qdqtool.findings.left_float import (
    PLACEMENT,
    Excluded,
    Hidden,
    SkippedNode,
    Unreachable,
    nothing_to_quantize,
)
from qdqtool.insertion import rules
from qdqtool.insertion.options import PlacementOptions
from qdqtool.insertion.placement import Placement, can_be_quantized
from qdqtool.insertion.prepare import prepare as prepare_network
from qdqtool.insertion.scales import UnionFind, find_scale_groups
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import WEIGHTED, LayerKind, operator_of, output_axis
from qdqtool.qat.calls import as_call
from qdqtool.qat.graph_cleanup import fold_constants
from qdqtool.qat.networks import (
    can_merge_branches,
    copy_network,
    is_ultralytics_model,
    merge_branches,
    switch_heads_to_export,
    unwrap,
)
from qdqtool.qat.options import QatOptions
from qdqtool.qat.sites import ADD, LINEAR, WEIGHTED_MODULES, QuantizerSite
from qdqtool.qat.trace import NetworkTrace, trace
from qdqtool.trt import fault_checks
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.types import Refusal
from qdqtool.util.checks import compile_pattern


@dataclass(frozen=True)
class ActivationQuantizer:
    """A quantizer on an activation.

    Attributes:
        site: Where it stands.
        tensor: The tensor's name in the traced graph.
        group: Quantizers of one group are one module, with one amax.
        role: ``input`` or ``residual``.
    """

    site: QuantizerSite
    tensor: str
    group: int
    role: str


@dataclass(frozen=True)
class WeightQuantizer:
    """A quantizer on a module's weights; ``axis`` is that of the output channels, None for one amax for all.

    ``call`` is which projection of an attention they are for; None for a module that has weights of its own.
    """

    module: str
    axis: int | None
    call: int | None = None


@dataclass
class Plan:
    """What :func:`prepare` does to a network.

    Attributes:
        target: Which TensorRT it is for.
        backend: Whose quantizers.
        activations: Quantizers on activations, in the order in which they run.
        weights: Quantizers on weights.
        skipped: What could have been quantized and stays float, and why: pairs of name and reason.
        norms: BatchNormalization modules that the export folds, and the convolutions in front of them.
        calls: How many calls of a kind run inside a module that has quantizers on some of them.
        counted: The modules in which calls of a kind run at all, by kind.
        merged: Modules whose parallel branches become one convolution first.
        unseen: Convolutions and linear layers that did not run with the sample in evaluation mode, and stay float.
        arguments: How many arguments the sample had.
        keywords: Its keyword arguments.
        dimensions: Dimensions of its first tensor.
        sample: Its tensors, as :attr:`qdqtool.qat.calls.NetworkCall.description` says them.
    """

    target: str
    backend: str
    activations: list[ActivationQuantizer] = field(default_factory=list)
    weights: list[WeightQuantizer] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    norms: dict[str, str] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    counted: dict[str, list[str]] = field(default_factory=dict)
    merged: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    arguments: int = 1
    keywords: tuple[str, ...] = ()
    dimensions: int = 4
    sample: list[tuple[str, str, list[int]]] = field(default_factory=list)

    @property
    def convolutions(self) -> list[str]:
        """Modules that will compute in INT8."""
        return list(dict.fromkeys(w.module for w in self.weights))

    @property
    def tied(self) -> list[list[str]]:
        """Places that share one amax although they read different tensors (tied by Concat, Split, MaxPool ...)."""
        groups: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for quantizer in self.activations:
            groups[quantizer.group][quantizer.tensor].append(_place(quantizer.site))
        return [[n for names in g.values() for n in names] for g in groups.values() if len(g) > 1]

    def text(self) -> str:
        """The plan in words, a line for each module."""
        residuals = [a for a in self.activations if a.site.kind == ADD]
        pools = [a for a in self.activations if a.site.kind == "pool"]
        lines = [
            f"{self.target}, {self.backend}: {len(self.weights)} convolutions and linear layers in INT8, "
            f"residual inputs: {len(residuals)}, averaging pools: {len(pools)}, left float: {len(self.skipped)}"
        ]
        lines.extend(
            f"  merged    {name}: its branches become one convolution" for name in self.merged
        )
        lines.extend(f"  residual  {_place(a.site)}" for a in residuals)
        lines.extend(f"  pool      {_place(a.site)}" for a in pools)
        lines.extend(f"  one amax  {', '.join(names)}" for names in self.tied)
        lines.extend(f"  float     {name}: {reason}" for name, reason in self.skipped)
        if self.unseen:
            shown = ", ".join(self.unseen[:4]) + (", ..." if len(self.unseen) > 4 else "")
            lines.append(
                f"  float     {len(self.unseen)} that did not run with this sample in evaluation mode ({shown}): "
                "branches for training only, or experts that it does not reach; those need a sample that does"
            )
        return "\n".join(lines)


def _place(site: QuantizerSite) -> str:
    name = site.module or "(network)"
    if site.kind == ADD:
        return f"{name} (input {site.position} of Add {site.call})"
    return f"{name} (projection {site.call})" if site.kind == LINEAR else name


def plan(
    model: nn.Module | Any,
    sample: Any = None,
    *,
    target: str | Target = DEFAULT_TARGET,
    backend: str = "pytorch-quantization",
    head: str = "box",
    residual: str = "auto",
    unify: bool = True,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    merge: bool = True,
) -> Plan:
    """Decide where quantizers go; the network is not changed.

    The float network, its head in export mode, is exported to ONNX in memory,
    :func:`qdqtool.insertion.placement.place` decides as for :func:`qdqtool.insert`, and each decision is carried
    back to the module or call it belongs to.

    Args:
        model: The float network, on any device.
        sample: A tensor, a tuple of arguments or a dict of keyword arguments to call it with; None for Ultralytics'
            wrapper takes an image of its size.
        target: TensorRT version such as ``8.5``, ``10.3`` or ``11``, or ``rtx1.7``; or a
            :class:`qdqtool.trt.targets.Target`.
        backend: ``pytorch-quantization`` or ``modelopt``: whose quantizer modules are used.
        head: What stays float in a detection head, as for :func:`qdqtool.insert`.
        residual: Which inputs of a residual Add are quantized, as for :func:`qdqtool.insert`.
        unify: Whether tensors that Concat, Split, Slice, MaxPool or Resize tie together share one
            quantizer.
        exclude: Regular expressions (``re.search``) on names of modules, or of nodes in the ONNX
            graph, that stay float; each has to match one. An Add belongs to the module in whose
            ``forward`` it is written.
        include: The same for modules to quantize although a rule leaves them float.
        merge: Whether parallel branches that deploy as one convolution (RepVGG, RepConv of YOLOv7
            and v9) are merged first, by the network's own method. Training then continues with
            the one convolution. A plan merges them on a copy.

    Raises:
        QdqtoolError: An option is wrong, or a pattern matches nothing.
        ModelError: torch cannot export the network, or nothing in it can be quantized.
    """
    options = QatOptions(target, backend, head, residual, unify, exclude, include, merge)
    return make_plan(model, sample, options)


def make_plan(model: nn.Module | Any, sample: Any, options: QatOptions) -> Plan:
    """Decide where quantizers go; see :func:`plan`."""
    chosen = target_named(options.target)
    sample = choose_sample(model, sample)
    model = unwrap(model)
    merged: list[str] = []
    if options.merge and can_merge_branches(model):
        merged = merge_branches(model := copy_network(model))
    with switch_heads_to_export(model):
        traced = trace(model, sample)
    work = fold_constants(Model(traced.proto))
    prepare_network(work)
    candidates = [n for n in work.nodes if can_be_quantized(work, n)]
    places = {
        n.name: traced.sites.get((n.name, 0)) or traced.sites.get((n.name, 1)) for n in candidates
    }
    names = {node: "" if site is None else site.module for node, site in places.items()}
    reasons = _match_nodes(names, options.exclude, "exclude")
    included = _match_nodes(
        {n.name: names[n.name] for n in candidates if n.op in WEIGHTED}, options.include, "include"
    )
    while True:
        placing = PlacementOptions(
            head=options.head,
            residual=options.residual,
            exclude=_exact_patterns(reasons),
            include=_exact_patterns(included),
            unify=options.unify,
        )
        _, placement = rules.choose_placement(work, placing, chosen)
        unreachable = _find_unreachable(traced, placement, dict(model.named_modules()))
        if not unreachable:
            break
        reasons.update(unreachable)
    if not placement.inputs:
        raise nothing_to_quantize(placement.skipped, type(model).__name__)
    decided = _build_plan(traced, work, placement, chosen, options, reasons, names)
    call = as_call(sample)
    _check_call_counts(decided, traced, model)
    decided.merged, decided.unseen = merged, _find_unreached(traced, model)
    decided.arguments, decided.keywords = len(call.args), tuple(call.kwargs)
    decided.dimensions, decided.sample = next((t.ndim for t in call.tensors), 0), call.description
    return decided


def _check_call_counts(decided: Plan, traced: NetworkTrace, model: nn.Module) -> None:
    """Quantizers inside a module are found by the number of the call: it has to be the same each time it runs."""
    for (module, kind), counts in traced.varied.items():
        if (module, kind) in decided.calls:
            found = model.get_submodule(module)
            why = (
                " (self-attention and cross-attention)"
                if isinstance(found, nn.MultiheadAttention)
                else ""
            )
            raise QdqtoolError(
                f"'{module or '(network)'}' ({type(found).__name__}) is called in several ways{why}: "
                f"{' or '.join(map(str, counts))} calls of kind '{kind}' run inside, and quantizers cannot tell them "
                f"apart. Give each way a module of its own, or leave this one float: exclude=['^{re.escape(module)}$']",
                code="calls-differ",
                node=module,
            )


def _find_unreached(traced: NetworkTrace, model: nn.Module) -> list[str]:
    # Attention hands the weights of its projections to a function.
    inside = [
        f"{n}."
        for n, m in model.named_modules()
        if isinstance(m, nn.MultiheadAttention) and n in traced.runs
    ]
    return [
        n
        for n, m in model.named_modules()
        if isinstance(m, WEIGHTED_MODULES)
        and n not in traced.runs
        and not n.startswith(tuple(inside))
    ]


def choose_sample(model: Any, sample: Any) -> Any:
    """The sample itself; for Ultralytics' wrapper, where none is given, an image of the size it was trained with.

    Raises:
        QdqtoolError: There is none.
    """
    if sample is not None:
        return sample
    if not is_ultralytics_model(model):
        raise QdqtoolError(
            "sample=None: give what the network is called with, for example torch.zeros(1, 3, 640, 640)",
            code="missing-argument",
            parameter="sample",
        )
    network = unwrap(model)
    size = (getattr(model, "overrides", None) or {}).get("imgsz") or 640
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    return torch.zeros(1, (getattr(network, "yaml", None) or {}).get("channels", 3), height, width)


def _exact_patterns(names: Iterable[str]) -> list[str]:
    return [f"^{re.escape(n)}$" for n in names]


def _match_nodes(names: dict[str, str], patterns: Sequence[str], option: str) -> dict[str, Refusal]:
    """Node names that a pattern matches, by their module's name or their own, with the reason."""
    found: dict[str, Refusal] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        compiled = compile_pattern(pattern, f"{option} '{pattern}'")
        hits = [
            node
            for node, module in names.items()
            if compiled.search(module) or compiled.search(node)
        ]
        if not hits:
            example = next((m for m in names.values() if m), "")
            raise QdqtoolError(
                f"{option} '{pattern}': matches no module that could be quantized; "
                f"names look like '{example}'",
                code="no-match",
                parameter=option,
            )
        for node in hits:
            found.setdefault(node, Excluded(PLACEMENT, node, option, pattern))
    return found


def _find_unreachable(
    traced: NetworkTrace, placement: Placement, modules: Mapping[str, nn.Module]
) -> dict[str, Refusal]:
    """Nodes that would be quantized where no module or call of the network can hold the quantizer, or its weights."""
    found: dict[str, Hidden] = {}
    computed: dict[
        str, Refusal
    ] = {}  # weights of a parametrization or of pruning: constant once they are exported
    placed: dict[QuantizerSite, set[str]] = defaultdict(set)
    for readers in placement.inputs.values():
        for reader in readers:
            site = traced.sites.get((reader.node.name, reader.position))
            if site is None:
                found[reader.node.name] = (
                    Hidden.WEIGHTED if reader.node.op in WEIGHTED else Hidden.CALL
                )
            else:
                placed[site].add(reader.node.name)
                constant = site.kind != "input" or "weight" in modules[site.module]._parameters
                name = reader.node.name
                if (
                    made := fault_checks.weights_not_constant(
                        PLACEMENT, name, reader.node.input(1), constant
                    )
                ) is not None:
                    computed[name] = made
    everywhere: dict[QuantizerSite, set[str]] = defaultdict(set)
    for (node, _), site in traced.sites.items():
        everywhere[site].add(node)
    for site, nodes in placed.items():
        if (
            nodes < everywhere[site]
        ):  # a module that runs several times has one quantizer for all of them
            found.update(dict.fromkeys(nodes, Hidden.OTHER_RUN))
    return {
        **computed,
        **{node: Unreachable(PLACEMENT, node, what) for node, what in found.items()},
    }


def _build_plan(
    traced: NetworkTrace,
    work: Model,
    placement: Placement,
    target: Target,
    options: QatOptions,
    reasons: dict[str, Refusal],
    names: dict[str, str],
) -> Plan:
    once = {m for m, count in traced.runs.items() if count == 1}
    norms = {norm: conv for norm, conv in traced.norms.items() if norm in once and conv in once}
    result = Plan(target.name, options.backend, norms=norms)
    for module, kind in traced.calls:
        result.counted.setdefault(kind, []).append(module)
    numbers = _number_groups(traced, work, placement, options.unify)
    order = {n.index: i for i, n in enumerate(work.ordered)}
    readers = [(t, r) for t, found in placement.inputs.items() for r in found]
    seen: set[QuantizerSite] = set()
    for tensor, reader in sorted(readers, key=lambda f: (order[f[1].node.index], f[1].position)):
        site = traced.sites[reader.node.name, reader.position]
        if site not in seen:
            seen.add(site)
            result.activations.append(
                ActivationQuantizer(site, tensor, numbers[tensor], reader.role)
            )
            if site.kind != "input":
                result.calls[site.module, site.kind] = traced.calls[site.module, site.kind]
    for weight in placement.weights:
        site = traced.sites[weight.node.name, 0]
        axis = None if weight.axis is None else _module_axis(weight.node)
        found = WeightQuantizer(site.module, axis, site.call if site.kind == LINEAR else None)
        if found not in result.weights:
            result.weights.append(found)
    for skipped in placement.skipped:
        why = SkippedNode(reasons.get(skipped.node, skipped.refusal))
        result.skipped.append((names.get(why.node) or why.node, why.reason))
    return result


def _module_axis(node: Node) -> int:
    """The axis of a torch module's weights along which its outputs lie; a Linear's are stored as [outputs, inputs]."""
    return 0 if operator_of(node).kind == LayerKind.MATRIX_MULTIPLY else output_axis(node, 4) or 0


def _number_groups(
    traced: NetworkTrace, work: Model, placement: Placement, unify: bool
) -> dict[str, int]:
    """Which group a tensor belongs to: tied by an operator, or read by one quantizer in several runs of a module."""
    ties, by_site = UnionFind(), dict[QuantizerSite, str]()
    for group in find_scale_groups(work, placement.inputs, unify):
        for tensor in group.quantized:
            ties.union(group.quantized[0], tensor)
    for tensor, readers in placement.inputs.items():
        for reader in readers:
            ties.union(
                by_site.setdefault(traced.sites[reader.node.name, reader.position], tensor), tensor
            )
    numbers = {g: i for i, g in enumerate(dict.fromkeys(map(ties.find, list(ties.parent))))}
    return {t: numbers[ties.find(t)] for t in ties.parent}
