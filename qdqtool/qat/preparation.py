"""``qat.prepare``: puts the quantizers of a plan into a network."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from torch import nn

from qdqtool.errors import QdqtoolError
from qdqtool.qat.modules import (
    Int8Mixin,
    QuantizedModule,
    find_quantizers,
    make_quantized,
    set_amax,
)
from qdqtool.qat.networks import check_not_wrapped, merge_branches, unwrap
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


def prepare(
    model: nn.Module | Any,
    sample: Any = None,
    *,
    report: Callable[[str], object] | None = print,
    target: str | Target = DEFAULT_TARGET,
    backend: str = "pytorch-quantization",
    head: str = "box",
    residual: str = "auto",
    unify: bool = True,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    merge: bool = True,
) -> Plan:
    """Insert quantizers into a float network, in place, where TensorRT uses them.

    Quantized are the inputs and weights of convolutions, transposed convolutions and linear layers, the skip branch of
    residual Adds, and averaging pools; nothing between a convolution, its BatchNormalization and its activation; the
    box outputs and the DFL of a YOLOv8-style head stay float. Class names and state-dict keys stay as they are, the
    quantizers' own keys come on top, so that a float checkpoint loads with ``strict=False`` and one of a prepared
    network with ``strict=True``.

    Args:
        model: The network; it may be on any device, in training or evaluation. Ultralytics' wrapper is taken as well.
        sample: A tensor, a tuple of arguments or a dict of keyword arguments to call it with; None for Ultralytics'
            wrapper takes an image of its size.
        report: Called with the plan as text before the network changes; None for silence.
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

    Returns:
        The plan. Activations have no range yet: call :func:`qdqtool.qat.calibrate` next. Weights are quantized by their
        largest magnitude in each output channel, as it is at the time.

    Raises:
        QdqtoolError: An option is wrong, a pattern matches nothing, the backend is missing, or it is prepared already.
        ModelError: torch cannot export the network, or nothing in it can be quantized.
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
    model = unwrap(model)
    if is_prepared(model):
        raise QdqtoolError(
            f"{type(model).__name__}: is prepared already; prepare the float network",
            code="already-prepared",
            parameter="model",
        )
    decided = make_plan(model, sample, options)
    load_backend(options.backend)
    if report is not None:
        report(decided.text())
    if decided.merged:
        merge_branches(model)
    apply_plan(model, decided)
    return decided


def is_prepared(model: nn.Module) -> bool:
    """Whether a network has quantizers of ours."""
    return any(isinstance(m, QuantizedModule) for m in model.modules())


def read_plan(model: nn.Module) -> Plan:
    """The plan that a network was prepared by.

    Raises:
        QdqtoolError: It was not prepared.
    """
    found = getattr(model, PLAN_ATTRIBUTE, None)
    if not isinstance(found, Plan):
        raise QdqtoolError(
            f"{type(model).__name__}: has no quantizers; call qdqtool.qat.prepare on it first",
            code="not-prepared",
            parameter="model",
        )
    return found


def apply_plan(model: nn.Module, decided: Plan) -> None:
    """Puts the quantizers of a plan into a network, whose branches are merged already where the plan says so.

    Raises:
        QdqtoolError: The backend is missing.
    """
    make = load_backend(decided.backend)
    modules = dict(model.named_modules())
    shared: dict[int, nn.Module] = {}
    for activation in decided.activations:
        site = activation.site
        if activation.group not in shared:
            shared[activation.group] = make(None)
        module = make_quantized(modules[site.module])
        wanted = (
            RESIDUAL_QUANTIZER
            if activation.role == "residual" and site.kind != "input"
            else INPUT_QUANTIZER
        )
        attribute = _attach(module, wanted, shared[activation.group])
        if site.kind == "input":
            module.qdq_input = attribute
        else:
            module.qdq_calls = {
                **module.qdq_calls,
                (site.kind, site.call, site.position): attribute,
            }
            module.qdq_expected = {
                **module.qdq_expected,
                site.kind: decided.calls[site.module, site.kind],
            }
    norm_behind = {conv: norm for norm, conv in decided.norms.items()}
    for weight in decided.weights:
        module = make_quantized(modules[weight.module])
        attribute = _attach(module, WEIGHT_QUANTIZER, make(weight.axis))
        if weight.call is not None:
            module.qdq_calls = {**module.qdq_calls, (LINEAR, weight.call, 1): attribute}
            continue
        module.qdq_weight = attribute
        if weight.axis is None and weight.module in norm_behind:
            parent, _, name = norm_behind[weight.module].rpartition(".")
            module.qdq_norm = (modules[parent], name)
    for layer in modules.values():
        # In evaluation these would run as one function of torch's, past every quantizer inside.
        if isinstance(layer, nn.TransformerEncoderLayer) and is_prepared(layer):
            layer.activation_relu_or_gelu = 0
    guard_ultralytics()
    setattr(model, PLAN_ATTRIBUTE, decided)


def _attach(module: QuantizedModule, wanted: str, quantizer: nn.Module) -> str:
    assert isinstance(module, nn.Module)
    name, number = wanted, 1
    while hasattr(module, name):
        name, number = f"{wanted}_{number}", number + 1
    module.add_module(name, quantizer)
    return name


# Whose quantizers are used ------------------------------------------------------------------------------------------

# The attributes that hold quantizers, for both backends, so that a checkpoint loads with either. ModelOpt's own names
# (without the underscore) would be taken by others for a network that ModelOpt converted.
INPUT_QUANTIZER = "_input_quantizer"
RESIDUAL_QUANTIZER = "_residual_quantizer"
WEIGHT_QUANTIZER = "_weight_quantizer"


def load_backend(name: str) -> Callable[[int | None], nn.Module]:
    """What makes a backend's quantizers for symmetric INT8, of a channel axis, or None for one amax.

    Raises:
        QdqtoolError: It is not installed.
    """
    try:
        room = importlib.import_module(
            f"qdqtool.qat.quantizer_{'modelopt' if name == 'modelopt' else 'pytorch'}"
        )
        make: Callable[[int | None], nn.Module] = room.make_quantizer
        return make
    except ImportError as error:
        raise QdqtoolError(
            f"backend='{name}' cannot be imported ({str(error).splitlines()[0]}); pip install 'qdqtool[qat]'",
            code="missing-package",
            parameter="backend",
        ) from error


# Checkpoints --------------------------------------------------------------------------------------------------------

CHECKPOINT_FORMAT = "qdqtool/qat/1"


def checkpoint(model: nn.Module | Any) -> dict[str, Any]:
    """A prepared network as plain data: ``format``, ``plan``, ``off`` (quantizers that are disabled), ``state``.

        torch.save(qat.checkpoint(model), "qat.pt")
        qat.restore(float_model, torch.load("qat.pt", weights_only=True))

    Raises:
        QdqtoolError: The network was not prepared.
    """
    model = unwrap(model)
    plan = read_plan(model)
    off = [
        [q.owner, q.attribute] for q in find_quantizers(model) if q.attribute in q.module.qdq_off
    ]
    return {
        "format": CHECKPOINT_FORMAT,
        "plan": plan_to_dict(plan),
        "off": off,
        "state": model.state_dict(),
    }


def restore(model: nn.Module | Any, saved: Mapping[str, Any]) -> Plan:
    """Puts the quantizers, ranges and weights of a checkpoint into a network, in place; nothing is traced.

    Args:
        model: The same network, float or prepared by the same plan.
        saved: What :func:`checkpoint` returned; or a plain state dict of a prepared network, into one that is prepared.

    Raises:
        QdqtoolError: It is a checkpoint of something else, saying what differs.
    """
    model = unwrap(model)
    if saved.get("format") != CHECKPOINT_FORMAT:
        if not is_prepared(model):
            raise QdqtoolError(
                "a plain state dict says nothing of the plan; call qdqtool.qat.prepare first, or save "
                "qdqtool.qat.checkpoint(model)",
                code="checkpoint-without-plan",
            )
        _load(model, saved)
        return read_plan(model)
    plan = plan_from_dict(saved["plan"])
    if is_prepared(model):
        mine, theirs = plan_to_dict(read_plan(model)), plan_to_dict(plan)
        different = [k for k in ("activations", "weights") if mine[k] != theirs[k]]
        if different:
            raise QdqtoolError(
                f"the checkpoint's plan has other quantizers ({different[0]}: {len(theirs[different[0]])}, "
                f"here {len(mine[different[0]])}); restore it into the float network",
                code="different-plans",
            )
    else:
        missing = [w.module for w in plan.weights if w.module not in dict(model.named_modules())]
        merged = set(merge_branches(model)) if plan.merged else set()
        if merged != set(plan.merged) or (missing and not plan.merged):
            absent = [*missing, *plan.merged][0]
            raise QdqtoolError(
                f"the checkpoint is of another network: '{absent}' is not in this one",
                code="different-models",
                node=absent,
            )
        apply_plan(model, plan)
    _load(model, saved["state"])
    off: dict[str, set[str]] = {}
    for name, attribute in saved["off"]:
        off.setdefault(name, set()).add(attribute)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            module.qdq_off = frozenset(off.pop(name, ()))
    if off:
        raise QdqtoolError(
            f"the checkpoint is of another network: '{next(iter(off))}' is not in this one",
            code="different-models",
            node=next(iter(off)),
        )
    return plan


def _load(model: nn.Module, state: Mapping[str, Any]) -> None:
    here = model.state_dict()
    loaded = {k: v for k, v in state.items() if hasattr(v, "shape")}
    modules = dict(model.named_modules(remove_duplicate=False))  # tied places share one quantizer
    ranges = {
        k
        for k in loaded
        if k.endswith("._amax") and isinstance(modules.get(k.rpartition(".")[0]), Int8Mixin)
    }
    unknown = [k for k in loaded if k not in here and k not in ranges]
    missing = [k for k in here if k not in loaded]
    shapes = [
        k for k in loaded if k in here and here[k].shape != loaded[k].shape and k not in ranges
    ]
    for found, what in ((unknown, "has"), (missing, "lacks"), (shapes, "has in another shape")):
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise QdqtoolError(
                f"the checkpoint {what} '{found[0]}'{more}: it is of another network or plan",
                code="different-models",
                node=found[0],
            )
    for key in ranges.difference(here):
        set_amax(modules[key.rpartition(".")[0]], loaded[key])
    model.load_state_dict(loaded, strict=True)


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as dicts, lists, strings and numbers."""
    data: dict[str, Any] = asdict(plan)
    data["skipped"] = [list(s) for s in plan.skipped]
    data["calls"] = [[m, k, n] for (m, k), n in plan.calls.items()]
    data["keywords"] = list(plan.keywords)
    data["sample"] = [list(s) for s in plan.sample]
    return data


def plan_from_dict(data: Mapping[str, Any]) -> Plan:
    """The plan of :func:`plan_data`.

    Raises:
        QdqtoolError: It is none.
    """
    try:
        known = {f.name: data[f.name] for f in fields(Plan) if f.name in data}
        known["activations"] = [
            ActivationQuantizer(QuantizerSite(**a["site"]), a["tensor"], a["group"], a["role"])
            for a in data["activations"]
        ]
        known["weights"] = [
            WeightQuantizer(w["module"], w["axis"], w.get("call")) for w in data["weights"]
        ]
        known["skipped"] = [(s[0], s[1]) for s in data["skipped"]]
        known["calls"] = {(m, k): n for m, k, n in data["calls"]}
        known["keywords"] = tuple(data["keywords"])
        known["sample"] = [
            (place, kind, list(shape)) for place, kind, shape in data.get("sample", ())
        ]
        return Plan(**known)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise QdqtoolError(
            f"the checkpoint's plan cannot be read ({error})", code="wrong-format"
        ) from error
