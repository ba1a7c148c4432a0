"""``qat.plan``: decide where quantizers are inserted into a torch network."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qdqtool.errors import QdqtoolError
from qdqtool.insertion import rules
from qdqtool.insertion.options import HeadChoice, PlacementOptions, ResidualChoice
from qdqtool.insertion.placement import Placement, can_be_quantized
from qdqtool.insertion.prepare import prepare_float_model as prepare_network
from qdqtool.insertion.scales import UnionFind, find_scale_groups
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.operators import WEIGHTED, LayerKind, operator_of, output_axis
from qdqtool.qat.calls import TensorDescription, as_call
from qdqtool.qat.graph_cleanup import fold_constants
from qdqtool.qat.networks import (
    can_merge_branches,
    copy_network,
    is_ultralytics_model,
    merge_branches,
    switch_heads_to_export,
    unwrap_network,
)
from qdqtool.qat.options import QatOptions
from qdqtool.qat.sites import ADD, LINEAR, POOL, WEIGHTED_MODULES, QuantizerSite
from qdqtool.qat.trace import NetworkTrace, trace_network
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.placement import (
    PLACEMENT,
    ExcludedNode,
    FloatNode,
    SkipCause,
    SkippedNode,
    create_nothing_to_quantize_error,
)
from qdqtool.trt import fault_checks
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.util.checks import compile_pattern
from qdqtool.util.text import format_count


@dataclass(frozen=True)
class ActivationQuantizer:
    """Position of a quantizer of an activation.

    Attributes:
        site: Module input or function call whose input is quantized.
        tensor: Name of the quantized tensor in the traced graph.
        group: Number of the group. All sites of a group share one quantizer module, and therefore
            one range.
        role: ``residual`` for an input of a residual Add, else ``input``.
    """

    site: QuantizerSite
    tensor: str
    group: int
    role: str


@dataclass(frozen=True)
class WeightQuantizer:
    """Position of a quantizer of weights.

    Attributes:
        module: Name of the module with the weights.
        axis: Axis of the output channels; None for one range for all channels.
        call: For ``nn.MultiheadAttention``, the number of the projection that uses the weights.
            None for other modules.
    """

    module: str
    axis: int | None
    call: int | None = None


@dataclass
class Plan:
    """Changes that :func:`qdqtool.qat.prepare` makes to a network.

    Attributes:
        target: Name of the TensorRT version.
        backend: Name of the package that provides the quantizer modules.
        activations: Quantizers of activations, in the order in which they run.
        weights: Quantizers of weights.
        skipped: Name and reason of each layer that could be quantized but remains float.
        norms: By name of a BatchNormalization, the name of the convolution into which it is folded.
        calls: By module and kind of call (Adds, pools, projections), the number of these calls
            inside the module; only if some of them have quantizers.
        counted: By kind of call, the names of the modules in which such calls run.
        merged: Modules whose parallel branches are merged into one convolution before quantizers
            are inserted.
        unseen: Convolutions and linear layers that did not run with the sample in evaluation mode.
            They remain float.
        arguments: Number of positional arguments of the sample.
        keywords: Names of the sample's keyword arguments.
        dimensions: Number of dimensions of the sample's first tensor.
        sample: Description of the tensors in the sample, see
            :attr:`qdqtool.qat.calls.NetworkCall.description`.
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
    sample: list[TensorDescription] = field(default_factory=list)

    @property
    def convolutions(self) -> list[str]:
        """Names of the convolutions and linear layers with quantized weights."""
        return list(dict.fromkeys(w.module for w in self.weights))

    @property
    def tied(self) -> list[list[str]]:
        """Groups of quantized inputs that read different tensors but share one range.

        For example, Concat, Split, MaxPool or similar operators connect the tensors. A group is a
        list of descriptions of module inputs and calls.
        """
        groups: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for quantizer in self.activations:
            groups[quantizer.group][quantizer.tensor].append(_describe_site(quantizer.site))
        shared = (sites.values() for sites in groups.values() if len(sites) > 1)
        return [list(itertools.chain(*sites)) for sites in shared]

    def _list_sites(self, kind: str) -> list[QuantizerSite]:
        return [a.site for a in self.activations if a.site.kind == kind]

    def text(self) -> str:
        """Return the plan as text: counts, then merged modules, Adds, pools and float layers."""
        residuals, pools = self._list_sites(ADD), self._list_sites(POOL)
        lines = [
            f"{self.target}, {self.backend}: convolutions and linear layers in INT8: "
            f"{len(self.weights)}, residual inputs: {len(residuals)}, average pools: {len(pools)}, "
            f"left float: {len(self.skipped)}",
            *(f"  merged    {n}: its branches become one convolution" for n in self.merged),
            *(f"  residual  {_describe_site(site)}" for site in residuals),
            *(f"  pool      {_describe_site(site)}" for site in pools),
            *(f"  one amax  {', '.join(names)}" for names in self.tied),
            *(f"  float     {name}: {reason}" for name, reason in self.skipped),
        ]
        if self.unseen:
            lines.append(_describe_unseen(self.unseen))
        return "\n".join(lines)


def _describe_site(site: QuantizerSite) -> str:
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
    head: HeadChoice = "box",
    residual: ResidualChoice = "auto",
    unify: bool = True,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    merge: bool = True,
) -> Plan:
    """Decide where quantizers are inserted. The network is not changed.

    The float network is exported to ONNX in memory, with its detection head in export mode. The
    rules of :func:`qdqtool.insert` then choose the quantized inputs of ONNX nodes, and each input
    is mapped back to the module or function call that it comes from.

    Args:
        model: The float network, on any device.
        sample: Arguments of the network: a tensor, a tuple of arguments or a dict of keyword
            arguments. None is allowed for Ultralytics' wrapper, and gives an image of the training
            size.
        target: TensorRT version such as ``8.5``, ``10.3`` or ``11``, or ``rtx1.7``; or a
            :class:`qdqtool.trt.targets.Target`.
        backend: Package that provides the quantizer modules, ``pytorch-quantization`` or
            ``modelopt``.
        head: Part of a detection head that remains float, as for :func:`qdqtool.insert`.
        residual: Inputs of a residual Add that are quantized, as for :func:`qdqtool.insert`.
        unify: Whether tensors share one quantizer if Concat, Split, Slice, MaxPool or Resize
            connect them.
        exclude: Regular expressions (``re.search``) on the names of modules, or of nodes in the
            ONNX graph, that remain float. Each expression must match at least one name. An Add
            belongs to the module whose ``forward`` contains it.
        include: Regular expressions on names of modules or nodes to quantize even if `head` leaves
            them float.
        merge: Whether to merge parallel branches into one convolution first, if they are made for
            this (RepVGG, RepConv of YOLOv7 and v9). The network's own method merges them, on a copy
            of the network.

    Raises:
        QdqtoolError: An option is invalid, or a pattern matches no name.
        ModelError: torch cannot export the network, or no part of it can be quantized.
    """
    options = QatOptions(target, backend, head, residual, unify, exclude, include, merge)
    return make_plan(model, sample, options)


def _describe_unseen(names: Sequence[str]) -> str:
    listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return (
        f"  float     {format_count(len(names), 'layer')} that did not run with this sample in "
        f"evaluation mode ({listed}): branches for training only, or experts that the sample does "
        "not reach; to quantize an expert, give a sample that reaches it"
    )


def make_plan(model: nn.Module | Any, sample: Any, options: QatOptions) -> Plan:
    """Make the plan for options; see :func:`plan`."""
    target = target_named(options.target)
    sample = choose_sample(model, sample)
    network = unwrap_network(model)
    merged: list[str] = []
    if options.merge and can_merge_branches(network):
        network = copy_network(network)
        merged = merge_branches(network)
    with switch_heads_to_export(network):
        traced = trace_network(network, sample)
    model = fold_constants(Model(traced.proto))
    prepare_network(model)
    names = _name_modules(model, traced)
    placement, reasons = _choose_placement(model, traced, network, names, target, options)
    left_float = [SkippedNode(reasons.get(s.node, s.record)) for s in placement.skipped]
    if not placement.inputs:
        raise create_nothing_to_quantize_error(left_float, type(network).__name__)
    call = as_call(sample)
    plan = Plan(
        target.name,
        options.backend,
        merged=merged,
        unseen=_find_modules_not_run(traced, network),
        arguments=len(call.args),
        keywords=tuple(call.kwargs),
        dimensions=next((t.ndim for t in call.tensors), 0),
        sample=call.description,
    )
    once = {module for module, count in traced.runs.items() if count == 1}
    plan.norms = {norm: conv for norm, conv in traced.norms.items() if {norm, conv} <= once}
    for module, kind in traced.calls:
        plan.counted.setdefault(kind, []).append(module)
    groups = _number_groups(traced, model, placement, options.unify)
    _add_activations(plan, traced, model, placement, groups)
    _add_weights(plan, traced, placement)
    plan.skipped = [(names.get(s.node) or s.node, s.reason) for s in left_float]
    _check_call_counts(plan, traced, network)
    return plan


def _name_modules(model: Model, traced: NetworkTrace) -> dict[str, str]:
    """Return the name of the module, by node name, for each node that can be quantized.

    The name of the module is empty if the node does not belong to a known module.
    """
    names = {}
    for node in model.nodes:
        if can_be_quantized(model, node):
            site = traced.sites.get((node.name, 0)) or traced.sites.get((node.name, 1))
            names[node.name] = "" if site is None else site.module
    return names


def _choose_placement(
    model: Model,
    traced: NetworkTrace,
    network: nn.Module,
    names: dict[str, str],
    target: Target,
    options: QatOptions,
) -> tuple[Placement, dict[str, Reason]]:
    """Choose the quantized inputs.

    Returns:
        The placement; and by node name, the reasons for nodes that remain float because of the
        options, or because no quantizer can be inserted into the torch network for them.
    """
    reasons = _match_nodes(names, options.exclude, "exclude")
    nodes = [n for n in model.nodes if n.op in WEIGHTED and n.name in names]
    weighted = {n.name: names[n.name] for n in nodes}
    included = list(_match_nodes(weighted, options.include, "include"))
    # `include` cannot help nodes without a quantizer site: their reason is the missing site.
    included += [
        n.name for n in nodes if model.is_constant(n.input(1)) and (n.name, 0) not in traced.sites
    ]
    modules = dict(network.named_modules())
    while True:
        placement_options = PlacementOptions(
            head=options.head,
            residual=options.residual,
            exclude=_exact_patterns(reasons),
            include=_exact_patterns(included),
            unify=options.unify,
        )
        _, placement = rules.choose_placement(model, placement_options, target)
        unreachable = _find_nodes_without_site(traced, placement, modules)
        if not unreachable:
            return placement, reasons
        reasons.update(unreachable)


def _check_call_counts(plan: Plan, traced: NetworkTrace, network: nn.Module) -> None:
    """Check that a module with quantized calls makes the same number of calls in each run.

    Quantizers are assigned to calls by the number of the call.

    Raises:
        QdqtoolError: The number of calls of a module differs between its runs.
    """
    for (module, kind), counts in traced.varied.items():
        if (module, kind) not in plan.calls:
            continue
        owner = network.get_submodule(module)
        explanation = ""
        if isinstance(owner, nn.MultiheadAttention):
            explanation = " (self-attention and cross-attention)"
        raise QdqtoolError(
            f"'{module or '(network)'}' ({type(owner).__name__}) runs several times with different "
            f"numbers of operations{explanation}: {' or '.join(map(str, counts))} operations of "
            f"kind '{kind}', so quantizers cannot be assigned to operations. Use a separate module "
            f"for each use, or leave this module in float: exclude=['^{re.escape(module)}$']",
            code="calls-differ",
            node=module,
        )


def _find_modules_not_run(traced: NetworkTrace, network: nn.Module) -> list[str]:
    modules = dict(network.named_modules())
    # nn.MultiheadAttention passes the weights of its projections to a function. The submodules that
    # hold these weights therefore do not run.
    attention_prefixes = tuple(
        f"{name}."
        for name, module in modules.items()
        if isinstance(module, nn.MultiheadAttention) and name in traced.runs
    )
    return [
        name
        for name, module in modules.items()
        if isinstance(module, WEIGHTED_MODULES)
        and name not in traced.runs
        and not name.startswith(attention_prefixes)
    ]


def choose_sample(model: Any, sample: Any) -> Any:
    """Return the sample, or a black image if the sample is None.

    The image has the size of the training images, or 640 x 640 pixels if that size is unknown.

    Raises:
        QdqtoolError: The sample is None, and the model is not Ultralytics' wrapper.
    """
    if sample is not None:
        return sample
    if not is_ultralytics_model(model):
        raise QdqtoolError(
            "`sample` is missing; give the network's arguments, for example "
            "torch.zeros(1, 3, 640, 640)",
            code="missing-argument",
            parameter="sample",
        )
    network = unwrap_network(model)
    size = (getattr(model, "overrides", None) or {}).get("imgsz") or 640
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    return torch.zeros(1, (getattr(network, "yaml", None) or {}).get("channels", 3), height, width)


def _exact_patterns(names: Iterable[str]) -> list[str]:
    return [f"^{re.escape(n)}$" for n in names]


def _match_nodes(names: dict[str, str], patterns: Sequence[str], option: str) -> dict[str, Reason]:
    """Return a reason for each node whose name or module name matches a pattern, by node name.

    Args:
        names: Module names, by node name.
        patterns: Regular expressions of the user.
        option: Name of the option with the patterns.

    Raises:
        QdqtoolError: A pattern is invalid, or matches no name.
    """
    reasons: dict[str, Reason] = {}
    for pattern in patterns:
        search = compile_pattern(pattern, f"{option} '{pattern}'").search
        nodes = [node for node, module in names.items() if search(module) or search(node)]
        if not nodes:
            example = next((m for m in names.values() if m), "")
            raise QdqtoolError(
                f"{option} '{pattern}' matches no module that can be quantized; use names such as "
                f"'{example}'",
                code="no-match",
                parameter=option,
            )
        for node in nodes:
            reasons.setdefault(node, ExcludedNode(PLACEMENT, node, option, pattern))
    return reasons


def _find_nodes_without_site(
    traced: NetworkTrace, placement: Placement, modules: Mapping[str, nn.Module]
) -> dict[str, Reason]:
    reasons: dict[str, Reason] = {}
    hidden: dict[str, SkipCause] = {}
    placed: dict[QuantizerSite, set[str]] = defaultdict(set)
    for consumer in itertools.chain(*placement.inputs.values()):
        node = consumer.node
        site = traced.sites.get((node.name, consumer.position))
        if site is None:
            hidden[node.name] = (
                SkipCause.UNTRACED_WEIGHTS if node.op in WEIGHTED else SkipCause.UNTRACED_CALL
            )
            continue
        placed[site].add(node.name)
        # With a parametrization or pruning, each forward computes the weights. They are constant in
        # the exported graph, but not in training.
        is_constant = site.kind != "input" or "weight" in modules[site.module]._parameters
        reason = fault_checks.check_weights_constant(
            PLACEMENT, node.name, node.input(1), is_constant
        )
        if reason is not None:
            reasons[node.name] = reason
    nodes_by_site: dict[QuantizerSite, set[str]] = defaultdict(set)
    for (name, _), site in traced.sites.items():
        nodes_by_site[site].add(name)
    for site, nodes in placed.items():
        if nodes < nodes_by_site[site]:  # all runs of a module use the same quantizer
            hidden.update(dict.fromkeys(nodes, SkipCause.OTHER_RUN_IS_FLOAT))
    return reasons | {n: FloatNode(PLACEMENT, n, reason) for n, reason in hidden.items()}


def _add_activations(
    plan: Plan, traced: NetworkTrace, model: Model, placement: Placement, groups: dict[str, int]
) -> None:
    inputs = sorted(
        ((t, consumer) for t, consumers in placement.inputs.items() for consumer in consumers),
        key=lambda pair: (model.positions[pair[1].node.index], pair[1].position),
    )
    quantizers: dict[QuantizerSite, ActivationQuantizer] = {}
    for tensor, consumer in inputs:
        site = traced.sites[consumer.node.name, consumer.position]
        quantizer = ActivationQuantizer(site, tensor, groups[tensor], consumer.role)
        quantizers.setdefault(site, quantizer)
        if site.kind != "input":
            plan.calls[site.module, site.kind] = traced.calls[site.module, site.kind]
    plan.activations = list(quantizers.values())


def _add_weights(plan: Plan, traced: NetworkTrace, placement: Placement) -> None:
    for weight in placement.weights:
        site = traced.sites[weight.node.name, 0]
        axis = None if weight.axis is None else _module_axis(weight.node)
        call = site.call if site.kind == LINEAR else None
        quantizer = WeightQuantizer(site.module, axis, call)
        if quantizer not in plan.weights:
            plan.weights.append(quantizer)


def _module_axis(node: Node) -> int:
    """Return the axis of the output channels in the weights of the node's torch module.

    The axis of a Linear is 0, because torch stores its weights as [outputs, inputs].
    """
    return 0 if operator_of(node).kind == LayerKind.MATRIX_MULTIPLY else output_axis(node, 4) or 0


def _number_groups(
    traced: NetworkTrace, model: Model, placement: Placement, unify: bool
) -> dict[str, int]:
    """Return a group number for each quantized tensor. A group shares one quantizer.

    Tensors are in one group if an operator such as Concat requires equal scales, or if they are
    inputs of different runs of one module.
    """
    groups: UnionFind[str] = UnionFind()
    for group in find_scale_groups(model, placement.inputs, unify):
        for tensor in group.quantized:
            groups.union(group.quantized[0], tensor)
    first_tensors: dict[QuantizerSite, str] = {}
    for tensor, consumers in placement.inputs.items():
        for consumer in consumers:
            site = traced.sites[consumer.node.name, consumer.position]
            groups.union(first_tensors.setdefault(site, tensor), tensor)
    numbers: dict[str, int] = {}
    for tensor in list(groups.parent):
        numbers.setdefault(groups.find(tensor), len(numbers))
    return {tensor: numbers[groups.find(tensor)] for tensor in groups.parent}
