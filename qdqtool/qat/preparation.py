"""``qat.prepare``: puts the quantizers of a plan into a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from qdqtool.errors import QdqtoolError
from qdqtool.qat.backends import INPUT, RESIDUAL, WEIGHT, backend_named
from qdqtool.qat.guards import protect
from qdqtool.qat.modules import Quantizing, make_quantizing
from qdqtool.qat.networks import merge_branches, refuse_wrapped, unwrapped
from qdqtool.qat.planning import Plan, plan, sample_for
from qdqtool.qat.sites import LINEAR
from qdqtool.trt.targets import DEFAULT_TARGET, Target

PLAN = "qdqtool_plan"


def prepare(
    model: nn.Module,
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
    report: Callable[[str], object] | None = print,
) -> Plan:
    """Inserts quantizers into a float network, in place, where TensorRT uses them.

    Quantized are the inputs and weights of convolutions, transposed convolutions and linear layers, the skip branch of
    residual Adds, and averaging pools; nothing between a convolution, its BatchNormalization and its activation; the
    box outputs and the DFL of a YOLOv8-style head stay float. Class names and state-dict keys stay as they are, the
    quantizers' own keys come on top, so that a float checkpoint loads with ``strict=False`` and one of a prepared
    network with ``strict=True``.

    Args:
        model: The network; it may be on any device, in training or evaluation. Ultralytics' wrapper is taken as well.
        sample: A tensor, a tuple of arguments or a dict of keyword arguments to call it with; None for Ultralytics'
            wrapper takes an image of its size.
        target: Which TensorRT, as for :func:`qdqtool.predict`.
        backend: ``pytorch-quantization`` or ``modelopt``: whose quantizer modules are used.
        head: As for :func:`qdqtool.insert`: ``box``, ``float`` or ``none``.
        residual: As for :func:`qdqtool.insert`: ``auto``, ``skip``, ``both`` or ``none``.
        unify: Whether tensors that Concat, Split, Slice, MaxPool or Resize tie together share one quantizer.
        exclude: Regular expressions (``re.search``) on names of modules that stay float; each has to match one.
        include: The same for modules to quantize although a rule leaves them float.
        merge: Whether parallel branches that deploy as one convolution (RepVGG, RepConv of YOLOv7 and v9) are merged
            first, by the network's own method; training then goes on with the one convolution.
        report: Gets the plan in words before anything is touched; None for silence.

    Returns:
        The plan. Activations have no range yet: call :func:`qdqtool.qat.calibrate` next. Weights are quantized by their
        largest magnitude in each output channel, as it is at the time.

    Raises:
        QdqtoolError: An option is wrong, a pattern matches nothing, the backend is missing, or it is prepared already.
        ModelError: torch cannot export the network, or nothing in it can be quantized.
    """
    refuse_wrapped(model)
    sample = sample_for(model, sample)
    model = unwrapped(model)
    if is_prepared(model):
        raise QdqtoolError(f"{type(model).__name__}: is prepared already; prepare the float network")
    decided = plan(
        model, sample, target=target, backend=backend, head=head, residual=residual, unify=unify, exclude=exclude,
        include=include, merge=merge,
    )  # fmt: skip
    backend_named(backend)
    if report is not None:
        report(decided.text())
    if decided.merged:
        merge_branches(model)
    insert(model, decided)
    return decided


def is_prepared(model: nn.Module) -> bool:
    """Whether a network has quantizers of ours."""
    return any(isinstance(m, Quantizing) for m in model.modules())


def plan_of(model: nn.Module) -> Plan:
    """The plan that a network was prepared by.

    Raises:
        QdqtoolError: It was not prepared.
    """
    found = getattr(model, PLAN, None)
    if not isinstance(found, Plan):
        raise QdqtoolError(f"{type(model).__name__}: has no quantizers; call qdqtool.qat.prepare on it first")
    return found


def insert(model: nn.Module, decided: Plan) -> None:
    """Puts the quantizers of a plan into a network, whose branches are merged already where the plan says so.

    Raises:
        QdqtoolError: The backend is missing.
    """
    backend = backend_named(decided.backend)
    modules = dict(model.named_modules())
    shared: dict[int, nn.Module] = {}
    for activation in decided.activations:
        quantizer = shared.get(activation.group)
        if quantizer is None:
            quantizer = shared[activation.group] = backend.make(None)
        module = make_quantizing(modules[activation.site.module])
        if activation.site.kind == "input":
            module.qdq_input = _attach(module, INPUT, quantizer)
            continue
        site = activation.site
        attribute = _attach(module, RESIDUAL if activation.role == "residual" else INPUT, quantizer)
        module.qdq_calls = {**module.qdq_calls, (site.kind, site.call, site.position): attribute}
        module.qdq_expected = {**module.qdq_expected, site.kind: decided.calls[site.module, site.kind]}
    norm_behind = {conv: norm for norm, conv in decided.norms.items()}
    for weight in decided.weights:
        module = make_quantizing(modules[weight.module])
        if weight.call is not None:
            attribute = _attach(module, WEIGHT, backend.make(weight.axis))
            module.qdq_calls = {**module.qdq_calls, (LINEAR, weight.call, 1): attribute}
            continue
        module.qdq_weight = _attach(module, WEIGHT, backend.make(weight.axis))
        if weight.axis is None and weight.module in norm_behind:
            parent, _, name = norm_behind[weight.module].rpartition(".")
            module.qdq_norm = (modules[parent], name)
    for layer in modules.values():
        # In evaluation these would run as one function of torch's, past every quantizer inside.
        if isinstance(layer, nn.TransformerEncoderLayer) and is_prepared(layer):
            layer.activation_relu_or_gelu = 0
    protect()
    setattr(model, PLAN, decided)


def _attach(module: Quantizing, wanted: str, quantizer: nn.Module) -> str:
    assert isinstance(module, nn.Module)
    name, number = wanted, 1
    while hasattr(module, name):
        name, number = f"{wanted}_{number}", number + 1
    module.add_module(name, quantizer)
    return name
