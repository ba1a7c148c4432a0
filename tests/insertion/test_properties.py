import math
from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import Phase, assume, given, settings, strategies as st

import qdqtool
from qdqtool.fixing.api import fix
from qdqtool.formats.insertion_text import render
from qdqtool.insertion.placement import PlacementRules, compute_placement
from qdqtool.insertion.rewrite import ActivationScale, insert_pairs
from qdqtool.insertion.scales import METHODS
from qdqtool.ir.graph import Model
from qdqtool.ir.qdq import is_q, read_params
from qdqtool.reasons.finding import Severity
from qdqtool.reasons.outputs import OutputDifferentScales
from qdqtool.reasons.placement import NothingToQuantize
from qdqtool.trt.outcome import simulate
from qdqtool.trt.targets import target_named
from tests.insertion.nets import (
    Net,
    check,
    detector,
    images,
    nodes_of,
    require_prediction,
    run,
    set_value,
)
from tests.notes import note_codes
from tests.slow import slow_after

Tensor = tuple[str, int, int]  # name, channels, side

# Nodes that keep channels and side.
SIMPLE = {
    "silu": lambda net, name, x: net.silu(name, x),
    "relu": lambda net, name, x: net.op("Relu", name, x),
    "pool": lambda net, name, x: net.op("MaxPool", name, x, kernel_shape=[3, 3], pads=[1] * 4),
    "hard_swish": lambda net, name, x: hard_swish(net, name, x),
    "identity": lambda net, name, x: net.op("Identity", name, x),
    "dropout": lambda net, name, x: net.op("Dropout", name, x),
    "cast": lambda net, name, x: net.op("Cast", name, x, to=1),
}
STEPS = [
    *("conv", "conv", *SIMPLE, "add", "concat", "split", "nearest", "norm"),
    *("gap", "slice", "pad", "linear"),
]


def add_step(
    draw: st.DrawFn, net: Net, step: str, label: str, tensors: list[Tensor]
) -> Tensor | None:
    name, channels, side = tensors[draw(st.integers(max(0, len(tensors) - 3), len(tensors) - 1))]
    others = [t for t, *shape in tensors if shape == [channels, side] and t != name]
    if step in SIMPLE:
        return SIMPLE[step](net, label, name), channels, side
    if step == "norm":
        return net.norm(label, name, channels), channels, side
    if step == "conv":
        kernel = draw(st.sampled_from([1, 3]))
        return net.conv(f"{label}/Conv", name, channels, 16, kernel), 16, side
    if step == "gap":
        pooled = net.op("GlobalAveragePool", label, name)
        return net.conv(f"{label}/Conv", pooled, channels, 16, 1), 16, 1
    if step in ("nearest", "linear") and side <= 8:
        scales = net.const(f"{label}.scales", [1, 1, 2, 2])
        return net.op("Resize", label, name, "", scales, mode=step), channels, 2 * side
    if step == "pad" and 2 < side <= 8:
        pads = net.const(f"{label}.pads", [0, 0, 1, 1, 0, 0, 1, 1], np.int64)
        mode = draw(st.sampled_from(["constant", "reflect", "edge"]))
        return net.op("Pad", label, name, pads, mode=mode), channels, side + 2
    if step == "split" and channels == 16:
        sizes = net.const(f"{label}.sizes", [8, 8], np.int64)
        return net.op("Split", label, name, sizes, outputs=2, axis=1)[1], 8, side
    if step == "slice" and channels == 16:
        bounds = {"from": 4, "to": 12, "axis": 1}
        inputs = [net.const(f"{label}.{k}", [v], np.int64) for k, v in bounds.items()]
        return net.op("Slice", label, name, *inputs), 8, side
    if step == "add" and others:
        return net.op("Add", label, name, draw(st.sampled_from(others))), channels, side
    if step == "concat" and others:
        joined = net.op("Concat", label, name, draw(st.sampled_from(others)), axis=1)
        return net.conv(f"{label}/Conv", joined, 2 * channels, 16, 1), 16, side
    return None


def hard_swish(net: Net, name: str, x: str) -> str:
    three, six = net.const(f"{name}.3", 3.0), net.const(f"{name}.6", 6.0)
    clipped = net.op("Clip", f"{name}/Clip", net.op("Add", f"{name}/Add", x, three), "", six)
    return str(net.op("Div", f"{name}/Div", net.op("Mul", f"{name}/Mul", x, clipped), six))


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    net = Net(seed=draw(st.integers(0, 99)))
    tensors: list[Tensor] = [("x", 16, 8)]
    for i in range(draw(st.integers(2, 12))):
        step = draw(st.sampled_from(STEPS)) if i else "conv"
        tensor = add_step(draw, net, step, f"/b.{i}/{step}", tensors)
        if tensor is not None:
            tensors.append(tensor)
    model = net.output(*dict.fromkeys(t[0] for t in tensors[-2:] if t[0] != "x")).model()
    assume(any(n.op_type == "Conv" for n in find_living_nodes(model)))  # the tests include "Conv"
    return model


def find_living_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the nodes that an output depends on, last first; insertion removes the others."""
    needed, nodes = {o.name for o in model.graph.output}, []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            nodes.append(node)
            needed.update(node.input)
    return nodes


@given(graphs(), st.sampled_from(["auto", "skip", "both", "none"]), st.booleans())
def test_inserted_model_is_valid_and_runs(
    model: onnx.ModelProto, residual: str, unify: bool
) -> None:
    result = qdqtool.insert(model, images(2), residual=residual, unify=unify, include=["Conv"])
    check(result.model)
    require_prediction(result)
    assert all(np.isfinite(o).all() for o in run(result.model, images(1)[0]))
    index = Model(result.model)
    for node in filter(is_q, index.nodes):
        params = read_params(index, node)
        assert (params.scale > 0).all() and not params.zero_point.any()
        assert params.is_per_channel == ("_weight_quantizer" in node.name)
    for group in result.groups if unify else ():
        scales = {q.scale for q in result.activations if q.tensor in group.group.quantized}
        assert scales == {group.scale}


@given(graphs(), st.sampled_from(METHODS), st.sampled_from(["auto", "skip", "both"]))
def test_insert_gives_each_convolution_one_output_scale(
    model: onnx.ModelProto, method: str, residual: str
) -> None:
    result = qdqtool.insert(
        model, images(2), method=method, residual=residual, include=["Conv"], predict=False
    )
    prediction = simulate(Model(result.model), target_named("trt8.5"))
    assert [r for r in prediction.refusals if isinstance(r, OutputDifferentScales)] == []


@given(graphs())
def test_rewrite_keeps_the_function(model: onnx.ModelProto) -> None:
    """With INT16 and steps 256 times as fine, a rounding error of a hundred-thousandth remains."""
    index = Model(onnx.ModelProto.FromString(model.SerializeToString()))
    placement = compute_placement(index, PlacementRules(residual="both", include=["Conv"]))
    insert_pairs(
        index, placement, {t: ActivationScale(2.0**-8, "max", None) for t in placement.inputs}
    )
    to_int16(index.proto)
    for feeds in images(2):
        for old, new in zip(run(model, feeds), run(index.proto, feeds), strict=True):
            assert np.abs(new - old).max() <= 2e-2 * max(1.0, float(np.abs(old).max()))


def to_int16(model: onnx.ModelProto) -> None:
    """Raise the opset to 21, which has INT16 Q/DQ. The other nodes do not change."""
    for entry in model.opset_import:
        entry.version = 21
    model.ir_version = 10
    weights = {
        n.input[1]
        for n in model.graph.node
        if n.op_type == "QuantizeLinear" and "_weight_" in n.name
    }
    for tensor in model.graph.initializer:
        value = onnx.numpy_helper.to_array(tensor)
        if value.dtype == np.int8:
            tensor.CopyFrom(onnx.numpy_helper.from_array(value.astype(np.int16), tensor.name))
        elif tensor.name in weights:
            tensor.CopyFrom(onnx.numpy_helper.from_array(value / np.float32(256), tensor.name))
    for value_info in model.graph.value_info:
        if value_info.type.tensor_type.elem_type == onnx.TensorProto.INT8:
            value_info.type.tensor_type.elem_type = onnx.TensorProto.INT16


# Prediction does not advise against insertion, and every automatic fix can be applied -------------

# Options that differ from the defaults, and the findings that they may have.
REQUESTED = {
    ("high_precision", "fp32"): {"FLOAT-FP32"},
    ("head", "none"): {"HEAD-QUANT"},
    ("unify", False): {"CONCAT-SCALE", "SPLIT-SCALE", "POOL-SCALE", "DOUBLE-QDQ"},
    ("residual", "none"): {"SKIP-FLOAT", "ADD-ACT", "POOL-MIXED", "ADD-OUT-FLOAT"},
    ("residual", "skip"): {"ADD-ACT", "ADD-OUT-FLOAT", "SKIP-FLOAT"},
    ("residual", "both"): {"ADD-BOTH", "ADD-OUT-FLOAT", "SKIP-FLOAT"},
    ("weights", "int8"): {"WEIGHT-PREQUANT"},
}
OPTIONS = {
    "high_precision": [None, "fp32"],
    "head": ["box", "float", "none"],
    "unify": [True, False],
    "residual": ["auto", "skip", "both", "none"],
    "weights": ["float", "int8"],
}


@settings(derandomize=True, phases=[Phase.generate])
@given(
    graphs(),
    st.sampled_from(["trt8.0", "trt8.5", "trt8.6", "trt10", "trt11", "rtx1.7"]),
    st.fixed_dictionaries({k: st.sampled_from(v) for k, v in OPTIONS.items()}),
)
def test_prediction_does_not_warn_of_insertion(
    model: onnx.ModelProto, target: str, options: dict[str, object]
) -> None:
    living = find_living_nodes(model)
    del model.graph.node[:]
    model.graph.node.extend(reversed(living))
    try:
        result = qdqtool.insert(model, images(2), method="max", target=target, **options)  # type: ignore[arg-type]
    except NothingToQuantize:
        return
    prediction = require_prediction(result)
    allowed = set().union(*(REQUESTED.get(item, set()) for item in options.items()))
    assert set(find_warning_codes(result)) <= allowed
    other = qdqtool.predict(rename_tensors(result.model), target)
    assert count_findings(other) == count_findings(prediction)
    fixes = {f.code for f in prediction.findings if f.automatic}
    fixes -= REQUESTED["unify", False]  # the cost of a shared scale needs a run
    if options["residual"] in ("none", "both"):  # fixes of residuals are tried, and need not help
        fixes -= REQUESTED["residual", "none"] | REQUESTED["residual", "both"]
    for code in sorted(fixes):
        fixed = fix(result.model, target, [code], images(1)[0])
        assert code in {c.code for c in fixed.applied}, fixed.refused


def attention(net: Net) -> str:
    qkv = net.conv("qkv", net.silu("act", net.conv("stem", "x")), 16, 48, 1)
    parts = net.op("Split", "split", qkv, net.const("sizes", [16] * 3, np.int64), outputs=3, axis=1)
    flat = net.const("flat", [1, 16, 64], np.int64)
    q, k, v = (net.op("Reshape", f"flat{i}", part, flat) for i, part in enumerate(parts))
    scores = net.op("MatMul", "qk", net.op("Transpose", "qt", q, perm=[0, 2, 1]), k)
    shares = net.op(
        "Softmax", "soft", net.op("Mul", "scaled", scores, net.const("factor", 0.25)), axis=-1
    )
    mixed = net.op("MatMul", "av", v, net.op("Transpose", "st", shares, perm=[0, 2, 1]))
    image = net.op("Reshape", "image", mixed, net.const("shape", [1, 16, 8, 8], np.int64))
    return net.op("Add", "sum", image, net.conv("pe", parts[2], group=16))


def gated_unit(net: Net) -> str:
    """Add a squeeze and excitation.

    Its product has a float input that the pooling consumes as well.
    """
    x = net.conv("stem", "x")
    gate = net.op(
        "Sigmoid", "gate", net.conv("squeeze", net.op("GlobalAveragePool", "gap", x), kernel=1)
    )
    return net.op("Mul", "gated", x, gate)


def upsampling(net: Net) -> str:
    weights = net.const("up.weight", net.rng.standard_normal((16, 16, 2, 2)) * 0.1)
    up = net.op(
        "ConvTranspose", "up", net.conv("stem", "x"), weights, strides=[2, 2], kernel_shape=[2, 2]
    )
    return net.op("Relu", "act", net.norm("bn", up))


NETWORKS = {
    "attention": attention,
    "gated": gated_unit,
    "upsampled": upsampling,
    "hard swish": lambda net: hard_swish(net, "hs", net.silu("act", net.conv("stem", "x"))),
    "depthwise": lambda net: net.silu("act", net.conv("dw", net.conv("stem", "x"), group=16)),
    "depthwise into an Add": lambda net: net.op(
        "Add", "sum", net.conv("dw", "x", group=16), net.conv("stem", "x")
    ),
    "grouped": lambda net: net.op("Relu", "act", net.conv("group", net.conv("stem", "x"), group=4)),
}


@pytest.mark.parametrize(
    "target", slow_after(2, ["trt8.5", "rtx1.7", "trt10", "trt8.0", "trt8.6", "trt11"])
)
@pytest.mark.parametrize("name", NETWORKS)
def test_prediction_does_not_warn_of_insertion_into_network_parts(
    net: Net, name: str, target: str
) -> None:
    net.output(net.conv("end", NETWORKS[name](net), kernel=1))
    model = net.model(17 if target.startswith("trt8") else 19, ir=9)
    result = qdqtool.insert(model, images(1), method="max", target=target, losses=0)
    assert find_warning_codes(result) == []
    if name == "depthwise":  # builds of 8.5 and 8.6 failed on it
        assert ("dw" in {s.node for s in result.skipped}) == target.startswith("trt8")


def find_warning_codes(result: qdqtool.Insertion) -> list[str]:
    return [f.code for f in require_prediction(result).findings if f.severity != Severity.INFO]


@st.composite
def chains(draw: st.DrawFn) -> onnx.ModelProto:
    net = Net(seed=draw(st.integers(0, 9)))
    stem = net.conv("stem", "x")
    inner = net.conv("b", net.op("Relu", "inner", net.conv("a", stem)))
    long = add_elementwise(draw, net, "long", inner)
    down = draw(st.booleans())
    short = add_elementwise(draw, net, "short", net.conv("down", stem)) if down else stem
    out = net.op("Add", "add", *draw(st.permutations([long, short])))
    last = net.op("Relu", "last", out) if draw(st.booleans()) else out
    return net.output(net.conv("end", last)).model()


def add_elementwise(draw: st.DrawFn, net: Net, side: str, tensor: str) -> str:
    ops = ["Mul", "Div", "Sub", "Add", "Neg", "Abs", "Sqrt", "Clip", "HardSwish", "Relu", "SiLU"]
    for i, op in enumerate(draw(st.lists(st.sampled_from(ops), max_size=3))):
        name = f"{side}{i}"
        if op in ("Mul", "Div", "Sub", "Add"):
            shape = draw(st.sampled_from([(), (1,), (1, 1, 1, 1), (1, 16, 1, 1)]))
            tensor = net.op(op, name, tensor, net.const(f"{name}.k", np.full(shape, 2.0)))
        elif op == "SiLU":
            tensor = net.silu(name, tensor)
        elif op == "Clip":
            tensor = net.op(
                op, name, tensor, net.const(f"{name}.low", 0.0), net.const(f"{name}.high", 6.0)
            )
        else:
            tensor = net.op("Abs", f"{name}.abs", tensor) if op == "Sqrt" else tensor
            tensor = net.op(op, name, tensor)
    return tensor


@given(chains(), st.sampled_from(["trt8.5", "trt10", "trt11"]))
def test_prediction_does_not_advise_against_pairs_of_residuals(
    model: onnx.ModelProto, target: str
) -> None:
    quantized = qdqtool.insert(model, images(1), method="max", target=target).model
    codes = {f.code for f in qdqtool.predict(quantized, target).findings}
    assert not codes & {"ADD-BOTH", "SKIP-FLOAT"}
    assert not [c.code for c in fix(quantized, target).applied if c.code.startswith("ADD")]


def test_residual_of_fused_multiplication_quantizes_skip(net: Net) -> None:
    """The simulator fuses the Mul, so that only the skip is quantized."""
    x = net.conv("a", "x")
    scaled = net.op("Mul", "mul", net.conv("b", x), net.const("k", 2.0))
    model = net.output(net.conv("d", net.op("Add", "add", scaled, x))).model()
    result = qdqtool.insert(model, images(1), method="max", target="trt10")
    outcome = require_prediction(result).convolution("b")
    assert outcome.fused == ["mul", "add"] and outcome.int8_in_int8_out
    assert "mul.out" not in [q.tensor for q in result.activations]


def test_excluded_convolution_next_to_int8_is_warned_of(net: Net) -> None:
    """If both convolutions ran in INT8, their shared input could be INT8."""
    x = net.conv("stem", "x")
    float_branch = net.conv("end2", net.op("Exp", "exp", net.conv("left", x)))
    model = net.output(net.conv("end", net.conv("a", x)), float_branch).model()
    result = qdqtool.insert(model, images(1), method="max", target="trt10", exclude=["left"])
    findings = require_prediction(result).findings
    warnings = [(f.code, f.node) for f in findings if f.severity == Severity.WARNING]
    assert warnings == [("OUT-MIXED", "left")]


def rename_tensors(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    del copy.metadata_props[:]
    copy.producer_name = copy.doc_string = ""
    names: dict[str, str] = {"": ""}
    graph = copy.graph
    for value in (*graph.initializer, *graph.input):
        value.name = names.setdefault(value.name, f"t{len(names)}")
    for number, node in enumerate(graph.node):
        node.name, node.doc_string = f"n{number}", ""
        for tensors in (node.input, node.output):
            tensors[:] = [names.setdefault(t, f"t{len(names)}") for t in tensors]
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    return copy


def count_findings(prediction: qdqtool.Prediction) -> Counter[tuple[str, str]]:
    return Counter((f.code, str(f.severity)) for f in prediction.findings)


@pytest.mark.parametrize("target", slow_after(1, ["trt11", "rtx1.7"]))
def test_detector_for_strongly_typed_target_is_fp16(target: str) -> None:
    options = {"target": target, "method": "max", "residual": "both", "losses": 1}
    result = qdqtool.insert(detector(), images(2, 3, 64, "images"), **options)
    assert result.float_type == "fp16" and not result.float32
    graph = result.model.graph
    types = {v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)}
    assert types == {onnx.TensorProto.FLOAT}
    index = Model(result.model)
    convolutions = {n.name: index.elem_type(n.output[0]) for n in nodes_of(result.model, "Conv")}
    float_outputs = [n for n, kind in convolutions.items() if kind == onnx.TensorProto.FLOAT]
    assert float_outputs == ["/model.22/dfl/conv/Conv"] and 0.0 < result.agreement.error < 0.2
    assert result.losses.at_objects and result.agreement.at_objects
    assert "INT8 and FP16 together, before decoding and at objects: " in str(render(result, 500))
    other = replace(result, agreement=replace(result.agreement, at_objects=False))
    assert "at all positions (not comparable with the output error): " in str(render(other, 500))
    codes = require_prediction(result).findings_by_code().keys()
    assert not codes & {"FLOAT-FP32", "ADD-BOTH", "HEAD-QUANT"}


@pytest.mark.parametrize(("largest", "kept"), [(60000.0, True), (33000.0, True), (20000.0, False)])
def test_values_too_large_for_half_stay_float32(net: Net, largest: float, kept: bool) -> None:
    """A decomposed LayerNorm squares its input, and no Q states the range of the square."""
    clipped = net.op("Clip", "clip", net.conv("a", "x", kernel=1), "", net.const("one", 1.0))
    wide = net.op("Mul", "wide", clipped, net.const("k", largest))
    cut = net.op("Clip", "cut", wide, "", net.const("low", largest))
    small = net.op("Mul", "small", cut, net.const("i", 1e-4))
    model = net.output(net.conv("b", small, kernel=1)).model(19, ir=9)
    set_value(model, "a.weight", np.ones((16, 16, 1, 1), np.float32))
    result = qdqtool.insert(model, images(2), target="trt11", method="max", losses=1)
    assert ("wide.out" in result.float32) == kept
    assert (Model(result.model).elem_type("wide.out") == onnx.TensorProto.FLOAT) == kept
    assert math.isfinite(result.agreement.error)
    assert "FLOAT-FP32" not in require_prediction(result).findings_by_code()


@pytest.mark.parametrize(("offset", "is_warned"), [(12000.0, True), (8.0, False)])
def test_error_of_fp16_is_a_warning(net: Net, offset: float, is_warned: bool) -> None:
    """FP16 has no value between 12000 and 12008, so the two constants become equal."""
    moved = net.op("Add", "away", net.conv("a", "x", kernel=1), net.const("o", offset + 3))
    back = net.op("Sub", "back", moved, net.const("p", offset - 3))
    model = net.output(net.conv("b", back, kernel=1)).model(19, ir=9)
    result = qdqtool.insert(model, images(2), target="rtx1.7", method="max", losses=1)
    assert result.losses.error < 0.1
    assert ("half-differs" in note_codes(result.warnings)) == is_warned


@pytest.mark.parametrize(("mode", "fails"), [("half_pixel_symmetric", True), ("half_pixel", False)])
def test_failing_build_is_a_warning(net: Net, mode: str, fails: bool) -> None:
    scales = net.const("s", np.asarray([1, 1, 2, 2]), np.float32)
    attributes = {"coordinate_transformation_mode": mode}
    net.output(net.op("Resize", "r", net.conv("a", "x"), "", scales, **attributes))
    result = qdqtool.insert(net.model(19, ir=9), images(2), target="rtx1.7", method="max")
    assert ("BUILD-FAILS" in require_prediction(result).findings_by_code()) is fails
    assert ("of-finding" in note_codes(result.warnings)) is fails


def test_large_scale_of_calibrated_activation_names_the_network(net: Net) -> None:
    """`insert` calibrated the quantizer, so the large values come from the float network."""
    scaled = net.op("Mul", "m", "x", net.const("c", np.full((1, 1, 1, 1), 1e8), np.float32))
    result = qdqtool.insert(
        net.output(net.conv("a", scaled)).model(), images(2), target="trt10", method="max"
    )
    (warning,) = (w for w in result.warnings if w.startswith("SCALE-EXTREME"))
    assert "untrained" in warning and "not calibrated" not in warning


def test_large_scale_keeps_convolution_and_pairs_float32(net: Net) -> None:
    big = net.op("Mul", "big", net.conv("a", "x"), net.const("k", 40000.0))
    model = net.output(net.conv("b", big), net.conv("c", "x")).model(19, ir=9)
    result = qdqtool.insert(model, images(2), target="trt11", method="max", head="none")
    index = Model(result.model)
    for name, kind in (("b", onnx.TensorProto.FLOAT), ("c", onnx.TensorProto.FLOAT16)):
        conv = index.node(name)
        assert {index.elem_type(t) for t in conv.inputs} == {kind}
        assert all(index.producers[t].op == "DequantizeLinear" for t in conv.inputs[:2])
    assert all(c.is_int8 for c in require_prediction(result).convolutions)
    assert "big.out" in result.float32


@pytest.mark.parametrize("factor", [1.0, 30000.0, 1e-7])
@pytest.mark.parametrize("input_type", ["float", "int8"])
def test_reported_scales_are_those_of_the_file(net: Net, factor: float, input_type: str) -> None:
    """Pairs of values too large for FP16 stay FP32, with scales that FP16 can hold.

    Scales below the smallest FP16 value are raised, with a note.
    """
    scaled = net.op("Mul", "scaled", net.conv("a", "x"), net.const("k", factor))
    other = net.op("Relu", "other", scaled)
    joined = net.op("Concat", "cat", scaled, other, axis=1)
    ends = net.conv("b", joined, 32), net.conv("c", "x"), net.conv("d", other)
    options = {"target": "trt11", "method": "max", "head": "none", "input_type": input_type}
    result = qdqtool.insert(net.output(*ends).model(19, ir=9), images(2), **options)
    index, reported = Model(result.model), {q.node: q.scale for q in result.quantized}
    for q in (n for n in index.nodes if n.op == "QuantizeLinear"):
        scale = index.constant(q.input(1))
        np.testing.assert_array_equal(scale, np.asarray(reported[q.name], scale.dtype))
        assert scale.ndim or 0.0 < scale == scale.astype(np.float16)
        for dq in index.consumers(q.output):
            other = index.constant(dq.input(1))
            assert other is not None and np.array_equal(scale, other)
            assert not index.is_constant(q.input(0)) or scale.dtype == other.dtype
    assert [
        {q.scale for q in result.activations if q.group == i} for i in range(len(result.groups))
    ] == [{g.scale} for g in result.groups]
    assert [g.group.quantized for g in result.groups] == [("cat.out", "other.out")]
    assert ("scales-raised" in note_codes(result.notes)) is (factor < 1)
