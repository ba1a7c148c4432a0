"""Random small graphs: what must hold of every insertion."""

import math

import numpy as np
import onnx
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import qdqtool
from qdqtool.base.notes import Remark, remarks
from qdqtool.explain.left_float import NothingToQuantize
from qdqtool.fixing.api import fix
from qdqtool.insertion.api import insert
from qdqtool.insertion.placement import Rules, place
from qdqtool.insertion.rewrite import ActivationScale, rewrite
from qdqtool.insertion.scales import METHODS
from qdqtool.model.graph import Model
from qdqtool.model.qdq import is_q, read_params
from qdqtool.trt.faults import FloatStays
from qdqtool.trt.outcome import simulate
from qdqtool.trt.refusals import OutputDifferentScales
from qdqtool.trt.targets import target_named
from qdqtool.types import Severity
from tests.insertion.nets import Net, check, detector, images, nodes_of, run
from tests.slow import slow_after

_STEPS = [
    "conv",
    "conv",
    "silu",
    "relu",
    "add",
    "concat",
    "split",
    "pool",
    "resize",
    "norm",
    "gap",
    "slice",
    "pad",
    "linear",
    "hard_swish",
    "same",
]


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """A graph of up to a dozen steps; each reads tensors made before it."""
    net = Net(seed=draw(st.integers(0, 99)))
    tensors = [("x", 16, 8)]  # name, channels, side
    count = draw(st.integers(2, 12))
    for i in range(count):
        step = draw(st.sampled_from(_STEPS)) if i else "conv"
        name, channels, side = tensors[
            draw(st.integers(max(0, len(tensors) - 3), len(tensors) - 1))
        ]
        label = f"/b.{i}/{step}"
        if step == "conv":
            made = (
                net.conv(f"{label}/Conv", name, channels, 16, draw(st.sampled_from([1, 3]))),
                16,
                side,
            )
        elif step == "silu":
            made = (net.silu(label, name), channels, side)
        elif step == "relu":
            made = (net.op("Relu", label, name), channels, side)
        elif step == "norm":
            made = (net.norm(label, name, channels), channels, side)
        elif step == "pool":
            pooled = net.op(
                "MaxPool", label, name, kernel_shape=[3, 3], pads=[1] * 4, strides=[1, 1]
            )
            made = (pooled, channels, side)
        elif step == "gap":
            pooled = net.op("GlobalAveragePool", label, name)
            made = (net.conv(f"{label}/Conv", pooled, channels, 16, 1), 16, 1)
        elif step == "resize" and side <= 8:
            scales = net.const(f"{label}.scales", [1, 1, 2, 2])
            made = (net.op("Resize", label, name, "", scales, mode="nearest"), channels, 2 * side)
        elif step == "linear" and side <= 8:
            scales = net.const(f"{label}.scales", [1, 1, 2, 2])
            made = (net.op("Resize", label, name, "", scales, mode="linear"), channels, 2 * side)
        elif step == "pad" and 2 < side <= 8:
            pads = net.const(f"{label}.pads", [0, 0, 1, 1, 0, 0, 1, 1], np.int64)
            mode = draw(st.sampled_from(["constant", "reflect", "edge"]))
            made = (net.op("Pad", label, name, pads, mode=mode), channels, side + 2)
        elif step == "hard_swish":
            three, six = net.const(f"{label}.3", 3.0), net.const(f"{label}.6", 6.0)
            clipped = net.op(
                "Clip", f"{label}/Clip", net.op("Add", f"{label}/Add", name, three), "", six
            )
            made = (
                net.op("Div", f"{label}/Div", net.op("Mul", f"{label}/Mul", name, clipped), six),
                channels,
                side,
            )
        elif step == "same":
            op, attributes = draw(
                st.sampled_from([("Identity", {}), ("Dropout", {}), ("Cast", {"to": 1})])
            )
            made = (net.op(op, label, name, **attributes), channels, side)
        elif step in ("split", "slice") and channels == 16:
            if step == "split":
                sizes = net.const(f"{label}.sizes", [8, 8], np.int64)
                half = net.op("Split", label, name, sizes, outputs=2, axis=1)[1]
            else:
                bounds = [
                    net.const(f"{label}.{k}", [v], np.int64)
                    for k, v in (("from", 4), ("to", 12), ("axis", 1))
                ]
                half = net.op("Slice", label, name, *bounds)
            made = (half, 8, side)
        elif step in ("add", "concat"):
            others = [t for t in tensors if t[1:] == (channels, side) and t[0] != name]
            if not others:
                continue
            other = draw(st.sampled_from(others))[0]
            if step == "add":
                made = (net.op("Add", label, name, other), channels, side)
            else:
                joined = net.op("Concat", label, name, other, axis=1)
                made = (net.conv(f"{label}/Conv", joined, 2 * channels, 16, 1), 16, side)
        else:
            continue
        tensors.append(made)
    net.output(*dict.fromkeys(t[0] for t in tensors[-2:] if t[0] != "x"))
    model = net.model()
    assume(any(n.op_type == "Conv" for n in _living(model)))  # what `include` names below
    return model


def _living(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes that an output depends on: insertion drops the others."""
    needed = {o.name for o in model.graph.output}
    found = []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            found.append(node)
            needed.update(node.input)
    return found


@given(graphs(), st.sampled_from(["auto", "skip", "both", "none"]), st.booleans())
def test_every_insertion_is_valid_and_runs(
    model: onnx.ModelProto, residual: str, unify: bool
) -> None:
    result = qdqtool.insert(model, images(2), residual=residual, unify=unify, include=["Conv"])
    check(result.model)
    assert result.prediction is not None, result.warnings
    outputs = run(result.model, images(1)[0])
    assert all(np.isfinite(o).all() for o in outputs)
    index = Model(result.model)
    for node in index.nodes:
        if is_q(node):
            params = read_params(index, node)
            assert params.scale is not None
            assert (params.scale > 0).all()
            assert params.zero_point is not None
            assert not params.zero_point.any()
            assert params.per_channel == ("_weight_quantizer" in node.name)
    if unify:
        for group in result.groups:
            scales = [q.scale for q in result.activations if q.tensor in group.group.quantized]
            assert set(scales) == {group.scale}


@given(graphs(), st.sampled_from(METHODS), st.sampled_from(["auto", "skip", "both"]))
def test_no_insertion_makes_two_scales_meet(
    model: onnx.ModelProto, method: str, residual: str
) -> None:
    """Scales are chosen for what a Q passes, so that the simulator never finds two at one convolution."""
    result = qdqtool.insert(
        model, images(2), method=method, residual=residual, include=["Conv"], predict=False
    )
    prediction = simulate(Model(result.model), target_named("trt8.5"))
    assert [r for r in prediction.refusals if isinstance(r, OutputDifferentScales)] == []


@given(graphs())
def test_insertion_keeps_the_function(model: onnx.ModelProto) -> None:
    """With INT8 swapped for INT16 and steps 256 times finer, only rounding of a hundred-thousandth is left."""
    index = Model(onnx.ModelProto.FromString(model.SerializeToString()))
    placement = place(index, Rules(residual="both", include=["Conv"]))
    rewrite(index, placement, {t: ActivationScale(2.0**-8, "max", None) for t in placement.readers})
    fine = index.proto
    _to_int16(fine)
    for feeds in images(2):
        for one, two in zip(run(model, feeds), run(fine, feeds), strict=True):
            assert np.abs(two - one).max() <= 2e-2 * max(1.0, float(np.abs(one).max()))


def _to_int16(model: onnx.ModelProto) -> None:
    """Opset 21 has INT16 Q/DQ; the operators used here are the same in 17 and 21."""
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


# What insertion does, prediction does not advise against, and a fix that is named is one that can be applied.

# What a user asks for against the defaults, and is warned of.
ASKED = {
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
TARGETS = ["trt8.0", "trt8.5", "trt8.6", "trt10", "trt11", "rtx1.7"]


@settings(derandomize=True, phases=[Phase.generate])
@given(
    graphs(),
    st.sampled_from(TARGETS),
    st.fixed_dictionaries({k: st.sampled_from(v) for k, v in OPTIONS.items()}),
)
def test_nothing_warns_of_what_insertion_did(
    model: onnx.ModelProto, target: str, options: dict[str, object]
) -> None:
    living = _living(model)
    del model.graph.node[:]
    model.graph.node.extend(reversed(living))
    try:
        made = insert(model, images(2), method="max", target=target, **options)  # type: ignore[arg-type]
    except NothingToQuantize:
        return
    assert made.prediction is not None, made.warnings
    allowed = set().union(*(ASKED.get(item, set()) for item in options.items()))
    told = {f.code for f in made.prediction.findings if f.severity != Severity.INFO}
    assert told <= allowed
    bare = _bare(made.model)
    assert _counted(qdqtool.predict(bare, target)) == _counted(made.prediction)
    fixes = {f.code for f in made.prediction.findings if f.automatic}
    if options["residual"] in ("none", "both"):
        fixes -= ASKED["residual", "none"] | ASKED["residual", "both"]  # tried, and worth it or not
    for code in sorted(
        fixes - ASKED["unify", False]
    ):  # a shared scale costs what only a run can tell
        fixed = fix(made.model, target, [code], images(1)[0])
        assert code in {c.code for c in fixed.applied}, fixed.refused


def _attention(net: Net) -> str:
    """Attention with a depthwise position encoding of its values, as in YOLO11."""
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


def _gated(net: Net) -> str:
    """A squeeze and excitation: the product reads as float what the average reads."""
    x = net.conv("stem", "x")
    gate = net.op(
        "Sigmoid", "gate", net.conv("squeeze", net.op("GlobalAveragePool", "gap", x), kernel=1)
    )
    return net.op("Mul", "gated", x, gate)


def _upsampled(net: Net) -> str:
    weights = net.const("up.weight", net.rng.standard_normal((16, 16, 2, 2)) * 0.1)
    up = net.op(
        "ConvTranspose", "up", net.conv("stem", "x"), weights, strides=[2, 2], kernel_shape=[2, 2]
    )
    return net.op("Relu", "act", net.norm("bn", up))


def _shifted(net: Net) -> str:
    """HardSwish behind SiLU: its Add of a constant is no residual."""
    x = net.silu("act", net.conv("stem", "x"))
    clipped = net.op(
        "Clip", "clip", net.op("Add", "plus", x, net.const("three", 3.0)), "", net.const("six", 6.0)
    )
    return net.op("Div", "div", net.op("Mul", "mul", x, clipped), net.const("by", 6.0))


NETWORKS = {
    "attention": _attention,
    "gated": _gated,
    "upsampled": _upsampled,
    "shifted": _shifted,
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
def test_nothing_warns_of_what_insertion_did_with_parts_of_known_networks(
    net: Net, name: str, target: str
) -> None:
    net.output(net.conv("end", NETWORKS[name](net), kernel=1))
    made = insert(net.model(), images(1), method="max", target=target, losses=0)
    assert made.prediction is not None
    assert not [f.code for f in made.prediction.findings if f.severity != Severity.INFO]
    if name == "depthwise":  # builds of 8.5 and 8.6 failed on it
        assert ("dw" in {s.node for s in made.skipped}) == target.startswith("trt8")


@st.composite
def chains(draw: st.DrawFn) -> onnx.ModelProto:
    """Residual Adds of which one side or both are convolutions with a chain of elementwise nodes behind them."""
    net = Net(seed=draw(st.integers(0, 9)))
    stem = net.conv("stem", "x")
    sides = [_chain(draw, net, "long", net.conv("b", net.op("Relu", "inner", net.conv("a", stem))))]
    sides.append(
        _chain(draw, net, "short", net.conv("down", stem)) if draw(st.booleans()) else stem
    )
    out = net.op("Add", "add", *draw(st.permutations(sides)))
    net.output(net.conv("end", net.op("Relu", "last", out) if draw(st.booleans()) else out))
    return net.model()


def _chain(draw: st.DrawFn, net: Net, side: str, tensor: str) -> str:
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
            tensor = net.op(
                op, name, net.op("Abs", f"{name}.abs", tensor) if op == "Sqrt" else tensor
            )
    return tensor


@given(chains(), st.sampled_from(["trt8.5", "trt10", "trt11"]))
def test_no_chain_behind_a_convolution_gets_pairs_that_prediction_advises_against(
    model: onnx.ModelProto, target: str
) -> None:
    made = insert(model, images(1), method="max", target=target)
    told = {f.code for f in qdqtool.predict(made.model, target).findings}
    assert not told & {"ADD-BOTH", "SKIP-FLOAT"}
    assert not [c.code for c in fix(made.model, target).applied if c.code.startswith("ADD")]


def test_what_the_simulator_has_fused_and_what_is_advised(net: Net) -> None:
    """The simulator has it fused, so that the skip alone is quantized, as behind a bare convolution."""
    x = net.conv("a", "x")
    net.output(
        net.conv(
            "d",
            net.op("Add", "add", net.op("Mul", "mul", net.conv("b", x), net.const("k", 2.0)), x),
        )
    )
    made = insert(net.model(), images(1), method="max", target="trt10")
    assert made.prediction is not None
    outcome = made.prediction.convolution("b")
    assert outcome is not None and outcome.fused == ["mul", "add"] and outcome.int8_in_int8_out
    assert [q.tensor for q in made.activations if q.tensor == "mul.out"] == []
    net = Net()
    # A convolution left float by the user, beside one in INT8: INT8 for both lets what they read be written so
    x = net.conv("stem", "x")
    beside = net.op("Exp", "exp", net.conv("left", x))
    net.output(net.conv("end", net.conv("a", x)), net.conv("end2", beside))
    made = insert(net.model(), images(1), method="max", target="trt10", exclude=["left"])
    assert made.prediction is not None
    assert [
        (f.code, f.node) for f in made.prediction.findings if f.severity == Severity.WARNING
    ] == [("OUT-MIXED", "left")]


def _bare(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph under other names and without metadata."""
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
            for i, name in enumerate(tensors):
                tensors[i] = names.setdefault(name, f"t{len(names)}")
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    return copy


def _counted(prediction: qdqtool.Prediction) -> list[tuple[str, str, int]]:
    found = [(f.code, str(f.severity)) for f in prediction.findings]
    return sorted((*key, found.count(key)) for key in set(found))


@pytest.mark.parametrize("target", slow_after(1, ["trt11", "rtx1.7"]))
def test_a_detector_for_a_strongly_typed_target_is_fp16_and_nothing_advises_against_it(
    target: str,
) -> None:
    made = insert(
        detector(),
        images(2, 3, 64, "images"),
        target=target,
        method="max",
        residual="both",
        losses=1,
    )
    assert made.float_type == "fp16" and not made.float32
    types = {
        v.type.tensor_type.elem_type for v in (*made.model.graph.input, *made.model.graph.output)
    }
    assert types == {onnx.TensorProto.FLOAT}
    index = Model(made.model)
    float_outputs = [
        n
        for n in nodes_of(made.model, "Conv")
        if index.elem_type(n.output[0]) == onnx.TensorProto.FLOAT
    ]
    assert [n.name for n in float_outputs] == ["/model.22/dfl/conv/Conv"]
    assert made.agreement is not None and 0.0 < made.agreement.error < 0.2
    assert made.prediction is not None
    told = {f.code for f in made.prediction.findings}
    assert not told & {"FLOAT-FP32", "ADD-BOTH", "HEAD-QUANT"}


def test_fp32_can_be_asked_for_and_the_fix_that_is_named_works() -> None:
    made = insert(
        detector(),
        images(1, 3, 64, "images"),
        target="trt11",
        method="max",
        residual="both",
        high_precision="fp32",
    )
    assert made.prediction is not None and made.float_type == "fp32" and made.agreement is None
    finding = next(f for f in made.prediction.findings if f.code == "FLOAT-FP32")
    assert finding.automatic
    stays = finding.causes[0].refusal
    assert isinstance(stays, FloatStays) and (stays.convolutions, stays.total) == (30, 31)
    fixed = fix(made.model, "trt11", ["FLOAT-FP32"])
    assert [c.code for c in fixed.applied] == ["FLOAT-FP32"]
    assert not [f for f in fixed.after.findings if f.code == "FLOAT-FP32"]


@pytest.mark.parametrize(("largest", "kept"), [(60000.0, True), (33000.0, True), (20000.0, False)])
def test_values_that_half_cannot_hold_stay_float32_and_are_named(
    net: Net, largest: float, kept: bool
) -> None:
    """A square inside, as LayerNorm in pieces has it: no Q says how large it is."""
    first = net.conv("a", "x", kernel=1)
    wide = net.op(
        "Mul",
        "wide",
        net.op("Clip", "clip", first, "", net.const("one", 1.0)),
        net.const("k", largest),
    )
    small = net.op(
        "Mul",
        "small",
        net.op("Clip", "cut", wide, "", net.const("low", largest)),
        net.const("i", 1e-4),
    )
    net.output(net.conv("b", small, kernel=1))
    net.initializers[0].CopyFrom(
        onnx.numpy_helper.from_array(np.ones((16, 16, 1, 1), np.float32), "a.weight")
    )
    made = insert(net.model(), images(2), target="trt11", method="max", losses=1)
    assert ("wide.out" in made.float32) == kept
    index = Model(made.model)
    assert (index.elem_type("wide.out") == onnx.TensorProto.FLOAT) == kept
    assert made.agreement is not None and math.isfinite(made.agreement.error)
    assert made.prediction is not None and "FLOAT-FP32" not in {
        f.code for f in made.prediction.findings
    }


@pytest.mark.parametrize(("offset", "warned"), [(12000.0, True), (8.0, False)])
def test_an_error_that_fp16_makes_is_a_warning(net: Net, offset: float, warned: bool) -> None:
    """FP16 holds nothing between 12000 and 12008, so that both constants become one."""
    moved = net.op("Add", "away", net.conv("a", "x", kernel=1), net.const("o", offset + 3))
    net.output(net.conv("b", net.op("Sub", "back", moved, net.const("p", offset - 3)), kernel=1))
    made = insert(net.model(), images(2), target="rtx1.7", method="max", losses=1)
    assert made.losses is not None and made.losses.error < 0.1
    assert (Remark.HALF_DIFFERS in remarks(made.warnings)) == warned


@pytest.mark.parametrize(
    ("mode", "refused"), [("half_pixel_symmetric", True), ("half_pixel", False)]
)
def test_what_ends_the_build_is_a_warning_of_insert(net: Net, mode: str, refused: bool) -> None:
    scales = net.const("s", np.asarray([1, 1, 2, 2]), np.float32)
    net.output(
        net.op("Resize", "r", net.conv("a", "x"), "", scales, coordinate_transformation_mode=mode)
    )
    made = insert(net.model(), images(2), target="rtx1.7", method="max")
    assert (
        made.prediction is not None
        and ("BUILD-FAILS" in made.prediction.findings_by_code()) is refused
    )
    assert bool(made.warnings) is refused


def test_a_range_that_a_scale_says_keeps_a_whole_convolution_and_its_pairs_float32(
    net: Net,
) -> None:
    big = net.op("Mul", "big", net.conv("a", "x"), net.const("k", 40000.0))
    net.output(net.conv("b", big), net.conv("c", "x"))
    made = insert(net.model(), images(2), target="trt11", method="max", head="none")
    index = Model(made.model)
    for name, wanted in (("b", onnx.TensorProto.FLOAT), ("c", onnx.TensorProto.FLOAT16)):
        conv = index.node(name)
        assert {index.elem_type(t) for t in conv.inputs} == {wanted}
        assert all(index.producers[t].op == "DequantizeLinear" for t in conv.inputs[:2])
    assert made.prediction is not None and all(c.is_int8 for c in made.prediction.convolutions)
    assert "big.out" in made.float32


@pytest.mark.parametrize("factor", [1.0, 30000.0, 1e-7])
@pytest.mark.parametrize("input_type", ["float", "int8"])
def test_a_pair_has_one_scale_and_what_is_said_of_it_is_in_the_file(
    net: Net, factor: float, input_type: str
) -> None:
    """A pair is FP32 where values are too large for FP16; scales below its least are raised, and that is said."""
    scaled = net.op("Mul", "scaled", net.conv("a", "x"), net.const("k", factor))
    net.output(
        net.conv("b", net.op("Concat", "cat", scaled, scaled, axis=1), 32), net.conv("c", "x")
    )
    made = insert(
        net.model(), images(2), target="trt11", method="max", head="none", input_type=input_type
    )
    index = Model(made.model)
    said = {q.node: q.scale for q in made.quantized}
    for q in (n for n in index.nodes if n.op == "QuantizeLinear"):
        scale = index.constant(q.input(1))
        for dq in index.readers(q.output):
            other = index.constant(dq.input(1))
            assert scale is not None and other is not None and np.array_equal(scale, other)
            assert not index.is_constant(q.input(0)) or scale.dtype == other.dtype
        assert scale is not None and np.array_equal(scale, np.asarray(said[q.name], scale.dtype))
    assert all(
        g.scale == {q.scale for q in made.activations if q.group == i}.pop()
        for i, g in enumerate(made.groups)
    )
    assert (Remark.SCALES_RAISED in remarks(made.notes)) is (factor < 1)
