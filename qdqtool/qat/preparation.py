"""``qat.prepare``, ``checkpoint``, ``restore``: insert, save and restore quantizers."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from torch import nn

from qdqtool.errors import QdqtoolError
from qdqtool.insertion.options import HeadChoice, ResidualChoice
from qdqtool.qat.modules import (
    Int8Mixin,
    QuantizedModule,
    convert_to_quantized_module,
    find_quantizers,
    set_amax,
)
from qdqtool.qat.networks import check_not_wrapped, merge_branches, unwrap_network
from qdqtool.qat.options import QatOptions
from qdqtool.qat.planning import (
    ActivationQuantizer,
    Plan,
    WeightQuantizer,
    choose_sample,
    make_plan,
)
from qdqtool.qat.sites import LINEAR, QuantizerSite
from qdqtool.qat.ultralytics_guard import guard_ultralytics
from qdqtool.trt.targets import DEFAULT_TARGET, Target

PLAN_ATTRIBUTE = "qdqtool_plan"
CHECKPOINT_FORMAT = "qdqtool/qat/1"
# Names of the attributes that hold quantizers. Both backends use the same names, so a checkpoint
# can be loaded with either backend. The names begin with an underscore, because other tools take
# the same names without an underscore as a sign of ModelOpt.
INPUT_QUANTIZER = "_input_quantizer"
RESIDUAL_QUANTIZER = "_residual_quantizer"
WEIGHT_QUANTIZER = "_weight_quantizer"
# Function that creates a quantizer of a backend. Its argument is the channel axis, or None for one
# range for all channels.
QuantizerFactory = Callable[[int | None], nn.Module]


def prepare(
    model: nn.Module | Any,
    sample: Any = None,
    *,
    report: Callable[[str], object] | None = print,
    target: str | Target = DEFAULT_TARGET,
    backend: str = "pytorch-quantization",
    head: HeadChoice = "box",
    residual: ResidualChoice = "auto",
    unify: bool = True,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    merge: bool = True,
) -> Plan:
    """Insert quantizers into a float network, in place, where TensorRT uses them.

    The function quantizes the inputs and weights of convolutions, transposed convolutions and
    linear layers, the skip branch of residual Adds, and the inputs of average pools. Tensors
    between a convolution, its BatchNormalization and its activation remain float. The box outputs
    and the DFL of a YOLOv8-style head remain float too. Names of classes and keys of the state dict
    do not change, but quantizers add keys. A float checkpoint can be loaded with ``strict=False``,
    a checkpoint of a prepared network with ``strict=True``.

    Args:
        model: The network, on any device, in training or evaluation mode; or Ultralytics' wrapper.
        sample: Arguments of the network: a tensor, a tuple of arguments or a dict of keyword
            arguments. None is allowed for Ultralytics' wrapper, and gives an image of the training
            size.
        report: Function that receives the plan as text before the network is changed. None: no
            report.
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
            this (RepVGG, RepConv of YOLOv7 and v9). The network's own method merges them. Training
            continues with the merged convolution.

    Returns:
        The plan. Activations have no range until :func:`qdqtool.qat.calibrate` is called. Weights
        need no calibration, because their range is always the current largest magnitude of each
        output channel.

    Raises:
        QdqtoolError: An option is invalid, a pattern matches no name, the backend is missing, or
            the network is already prepared.
        ModelError: torch cannot export the network, or no part of it can be quantized.
    """
    options = QatOptions(target, backend, head, residual, unify, exclude, include, merge)
    return insert_quantizers(model, sample, options, report)


def insert_quantizers(
    model: nn.Module | Any,
    sample: Any,
    options: QatOptions,
    report: Callable[[str], object] | None = None,
) -> Plan:
    """Insert quantizers into a float network, in place; see :func:`prepare`."""
    check_not_wrapped(model)
    sample = choose_sample(model, sample)
    model = unwrap_network(model)
    if is_prepared(model):
        raise QdqtoolError(
            f"{type(model).__name__} already has quantizers; prepare the float network",
            code="already-prepared",
            parameter="model",
        )
    plan = make_plan(model, sample, options)
    load_backend(options.backend)
    if report is not None:
        report(plan.text())
    if plan.merged:
        merge_branches(model)
    apply_plan(model, plan)
    return plan


def is_prepared(model: nn.Module) -> bool:
    """Return whether a network has quantizers of this package."""
    return any(isinstance(m, QuantizedModule) for m in model.modules())


def read_plan(model: nn.Module) -> Plan:
    """Return the plan of a prepared network.

    Raises:
        QdqtoolError: The network was not prepared.
    """
    plan = getattr(model, PLAN_ATTRIBUTE, None)
    if not isinstance(plan, Plan):
        raise QdqtoolError(
            f"{type(model).__name__} has no quantizers; call qdqtool.qat.prepare first",
            code="not-prepared",
            parameter="model",
        )
    return plan


def apply_plan(model: nn.Module, plan: Plan) -> None:
    """Insert the quantizers of a plan into a network, in place, and store the plan in it.

    The parallel branches in `plan.merged` must be merged already.

    Raises:
        QdqtoolError: The backend is missing.
    """
    make_quantizer = load_backend(plan.backend)
    modules = dict(model.named_modules())
    _insert_activation_quantizers(modules, plan, make_quantizer)
    norms = {conv: norm for norm, conv in plan.norms.items()}
    for weight in plan.weights:
        module = convert_to_quantized_module(modules[weight.module])
        attribute = _attach_quantizer(module, WEIGHT_QUANTIZER, make_quantizer(weight.axis))
        if weight.call is not None:
            module.qdq_calls = {**module.qdq_calls, (LINEAR, weight.call, 1): attribute}
            continue
        module.qdq_weight = attribute
        if weight.axis is None and weight.module in norms:
            parent, _, name = norms[weight.module].rpartition(".")
            module.qdq_norm = (modules[parent], name)
    for layer in modules.values():
        # In evaluation mode, torch would run the whole layer as one fused function, without the
        # quantizers. The value 0 (neither ReLU nor GELU) prevents this.
        if isinstance(layer, nn.TransformerEncoderLayer) and is_prepared(layer):
            layer.activation_relu_or_gelu = 0
    guard_ultralytics()
    setattr(model, PLAN_ATTRIBUTE, plan)


def _insert_activation_quantizers(
    modules: Mapping[str, nn.Module], plan: Plan, make_quantizer: QuantizerFactory
) -> None:
    quantizers: dict[int, nn.Module] = {}
    for activation in plan.activations:
        site = activation.site
        if activation.group not in quantizers:
            quantizers[activation.group] = make_quantizer(None)
        quantizer = quantizers[activation.group]
        module = convert_to_quantized_module(modules[site.module])
        if site.kind == "input":
            module.qdq_input = _attach_quantizer(module, INPUT_QUANTIZER, quantizer)
            continue
        name = RESIDUAL_QUANTIZER if activation.role == "residual" else INPUT_QUANTIZER
        place = (site.kind, site.call, site.position)
        count = plan.calls[site.module, site.kind]
        module.qdq_calls = {**module.qdq_calls, place: _attach_quantizer(module, name, quantizer)}
        module.qdq_expected = {**module.qdq_expected, site.kind: count}


def _attach_quantizer(module: QuantizedModule, name: str, quantizer: nn.Module) -> str:
    """Add a quantizer to a module as a submodule, and return the name of the attribute.

    If the module already has the attribute `name`, a number is appended to the name.
    """
    assert isinstance(module, nn.Module)
    names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))
    attribute = next(n for n in names if not hasattr(module, n))
    module.add_module(attribute, quantizer)
    return attribute


def load_backend(name: str) -> QuantizerFactory:
    """Return the function of a backend that creates quantizers for symmetric INT8.

    Raises:
        QdqtoolError: The backend is not installed.
    """
    try:
        if name == "modelopt":
            from qdqtool.qat.quantizer_modelopt import make_quantizer as make_modelopt_quantizer

            return make_modelopt_quantizer
        from qdqtool.qat.quantizer_pytorch import make_quantizer as make_pytorch_quantizer

        return make_pytorch_quantizer
    except ImportError as error:
        raise QdqtoolError(
            f"backend='{name}' cannot be imported ({str(error).splitlines()[0]}); "
            "run pip install 'qdqtool[qat]'",
            code="missing-package",
            parameter="backend",
        ) from error


def checkpoint(model: nn.Module | Any) -> dict[str, Any]:
    """Return the weights, ranges and plan of a prepared network, for ``torch.save``.

        torch.save(qat.checkpoint(model), "qat.pt")
        qat.restore(float_model, torch.load("qat.pt", weights_only=True))

    Returns:
        A dict with ``format``, ``plan``, ``off`` (the disabled quantizers) and ``state`` (the state
        dict).

    Raises:
        QdqtoolError: The network was not prepared.
    """
    model = unwrap_network(model)
    plan = read_plan(model)
    quantizers = find_quantizers(model)
    off = [[q.owner, q.attribute] for q in quantizers if q.attribute in q.module.qdq_off]
    return {
        "format": CHECKPOINT_FORMAT,
        "plan": plan_to_dict(plan),
        "off": off,
        "state": model.state_dict(),
    }


def restore(model: nn.Module | Any, saved: Mapping[str, Any]) -> Plan:
    """Restore the quantizers, ranges and weights of a checkpoint, in place.

    Args:
        model: The network from which the checkpoint was saved, float or prepared with the same
            plan.
        saved: Result of :func:`checkpoint`. If `model` is prepared, the state dict of a prepared
            network is also allowed.

    Returns:
        The plan of the checkpoint; for a state dict, the plan of `model`.

    Raises:
        QdqtoolError: The checkpoint is damaged, or is from another network or plan (the message
            names a difference); or it has no plan, and `model` is not prepared.
    """
    model = unwrap_network(model)
    if saved.get("format") != CHECKPOINT_FORMAT:
        if not is_prepared(model):
            raise QdqtoolError(
                "a plain state dict does not contain the positions of the quantizers; call "
                "qdqtool.qat.prepare first, or save qdqtool.qat.checkpoint(model)",
                code="checkpoint-without-plan",
            )
        _load_state(model, saved)
        return read_plan(model)
    plan = plan_from_dict(saved["plan"])
    if is_prepared(model):
        _check_same_quantizers(read_plan(model), plan)
    else:
        _merge_and_check_modules(model, plan)
        apply_plan(model, plan)
    _load_state(model, saved["state"])
    off: dict[str, set[str]] = {}
    for name, attribute in saved["off"]:
        off.setdefault(name, set()).add(attribute)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            module.qdq_off = frozenset(off.pop(name, ()))
    if off:
        name = next(iter(off))
        raise _other_network_error(f"this network has no quantizers in module '{name}'", name)
    return plan


def _merge_and_check_modules(model: nn.Module, plan: Plan) -> None:
    """Merge the branches of a plan, in place, and check that the modules of the plan exist.

    Raises:
        QdqtoolError: The network does not have a module of the plan, or merges other branches.
    """
    merged = merge_branches(model) if plan.merged else []
    modules = dict(model.named_modules())
    names = [*plan.merged, *(w.module for w in plan.weights)]
    missing = next((name for name in names if name not in modules), None)
    if missing is not None:
        raise _other_network_error(f"this network has no module '{missing}'", missing)
    different = sorted(set(merged).symmetric_difference(plan.merged))
    if different:
        raise _other_network_error(
            f"only one of the networks has parallel branches to merge in module '{different[0]}'",
            different[0],
        )


def _check_same_quantizers(plan: Plan, saved: Plan) -> None:
    ours, theirs = plan_to_dict(plan), plan_to_dict(saved)
    for key in ("activations", "weights"):
        if ours[key] != theirs[key]:
            raise QdqtoolError(
                f"the checkpoint has other quantizers of {key} than the network "
                f"({len(theirs[key])} in the checkpoint, {len(ours[key])} in the network); restore "
                "the checkpoint into the float network",
                code="different-plans",
            )


def _other_network_error(difference: str, module: str) -> QdqtoolError:
    return QdqtoolError(
        f"the checkpoint is of another network: {difference}; restore the checkpoint into the "
        "network that it was saved from",
        code="different-models",
        node=module,
    )


def _load_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state dict, in place, with the ranges of quantizers that have none yet.

    Raises:
        QdqtoolError: The state dict is from another network or plan.
    """
    tensors = {k: v for k, v in state.items() if hasattr(v, "shape")}
    quantizers = _quantizers_by_key(model)
    current = model.state_dict()
    required = {k: v.shape for k, v in tensors.items() if k not in quantizers}
    _reject_keys("has the unknown key", [k for k in required if k not in current])
    _reject_keys("lacks the key", [k for k in current if k not in tensors])
    reshaped = [k for k, shape in required.items() if current[k].shape != shape]
    _reject_keys("has another shape for", reshaped)
    for key in tensors.keys() - current.keys():
        set_amax(quantizers[key], tensors[key])
    model.load_state_dict(tensors, strict=True)


def _quantizers_by_key(model: nn.Module) -> dict[str, nn.Module]:
    """Return quantizers by the keys of their ranges in a state dict.

    A quantizer that several modules share has several keys.
    """
    modules = model.named_modules(remove_duplicate=False)
    return {f"{name}._amax": m for name, m in modules if isinstance(m, Int8Mixin)}


def _reject_keys(problem: str, keys: list[str]) -> None:
    if keys:
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        raise QdqtoolError(
            f"the checkpoint {problem} '{keys[0]}'{more}; restore the checkpoint into the network "
            "that it was saved from, float or prepared with the same options",
            code="different-models",
            node=keys[0],
        )


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Convert a plan to dicts, lists, strings and numbers."""
    data: dict[str, Any] = asdict(plan)
    data["skipped"] = [list(s) for s in plan.skipped]
    data["calls"] = [[m, k, n] for (m, k), n in plan.calls.items()]
    data["keywords"] = list(plan.keywords)
    data["sample"] = [list(s) for s in plan.sample]
    return data


def plan_from_dict(data: Mapping[str, Any]) -> Plan:
    """Convert the result of :func:`plan_to_dict` back to a plan.

    Raises:
        QdqtoolError: The data is not a valid plan.
    """
    try:
        values = {f.name: data[f.name] for f in fields(Plan) if f.name in data}
        values["activations"] = [
            ActivationQuantizer(QuantizerSite(**a["site"]), a["tensor"], a["group"], a["role"])
            for a in data["activations"]
        ]
        values["weights"] = [
            WeightQuantizer(w["module"], w["axis"], w.get("call")) for w in data["weights"]
        ]
        values["skipped"] = [(s[0], s[1]) for s in data["skipped"]]
        values["calls"] = {(m, k): n for m, k, n in data["calls"]}
        values["keywords"] = tuple(data["keywords"])
        values["sample"] = [(p, kind, list(shape)) for p, kind, shape in data.get("sample", ())]
        return Plan(**values)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise QdqtoolError(
            f"the checkpoint's plan of quantizers is damaged ({error}); save the checkpoint again",
            code="wrong-format",
        ) from error
