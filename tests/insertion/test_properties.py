"""Random small graphs: what must hold of every insertion."""

from __future__ import annotations

import numpy as np
import onnx
from hypothesis import assume, given
from hypothesis import strategies as st

import qdqtool
from qdqtool.insertion.placement import Rules, place
from qdqtool.insertion.rewrite import ActivationScale, rewrite
from qdqtool.insertion.scales import METHODS
from qdqtool.model.graph import Model
from qdqtool.model.qdq import is_q, read_params
from qdqtool.trt.outcome import simulate
from qdqtool.trt.refusals import OutputDifferentScales
from qdqtool.trt.targets import target_named
from tests.insertion.nets import Net, check, images, run

_STEPS = ["conv", "conv", "silu", "relu", "add", "concat", "split", "pool", "resize", "norm", "gap", "slice", "pad",
          "linear", "hard_swish", "same"]


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """A graph of up to a dozen steps; each reads tensors made before it."""
    net = Net(seed=draw(st.integers(0, 99)))
    tensors = [("x", 16, 8)]  # name, channels, side
    count = draw(st.integers(2, 12))
    for i in range(count):
        step = draw(st.sampled_from(_STEPS)) if i else "conv"
        name, channels, side = tensors[draw(st.integers(max(0, len(tensors) - 3), len(tensors) - 1))]
        label = f"/b.{i}/{step}"
        if step == "conv":
            made = (net.conv(f"{label}/Conv", name, channels, 16, draw(st.sampled_from([1, 3]))), 16, side)
        elif step == "silu":
            made = (net.silu(label, name), channels, side)
        elif step == "relu":
            made = (net.op("Relu", label, name), channels, side)
        elif step == "norm":
            made = (net.norm(label, name, channels), channels, side)
        elif step == "pool":
            pooled = net.op("MaxPool", label, name, kernel_shape=[3, 3], pads=[1] * 4, strides=[1, 1])
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
            clipped = net.op("Clip", f"{label}/Clip", net.op("Add", f"{label}/Add", name, three), "", six)
            made = (net.op("Div", f"{label}/Div", net.op("Mul", f"{label}/Mul", name, clipped), six), channels, side)
        elif step == "same":
            op, attributes = draw(st.sampled_from([("Identity", {}), ("Dropout", {}), ("Cast", {"to": 1})]))
            made = (net.op(op, label, name, **attributes), channels, side)
        elif step in ("split", "slice") and channels == 16:
            if step == "split":
                sizes = net.const(f"{label}.sizes", [8, 8], np.int64)
                half = net.op("Split", label, name, sizes, outputs=2, axis=1)[1]
            else:
                bounds = [net.const(f"{label}.{k}", [v], np.int64) for k, v in (("from", 4), ("to", 12), ("axis", 1))]
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
def test_every_insertion_is_valid_and_runs(model: onnx.ModelProto, residual: str, unify: bool) -> None:
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
def test_no_insertion_makes_two_scales_meet(model: onnx.ModelProto, method: str, residual: str) -> None:
    """Scales are chosen for what a Q passes, so that the simulator never finds two at one convolution."""
    result = qdqtool.insert(model, images(2), method=method, residual=residual, include=["Conv"], predict=False)
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
    weights = {n.input[1] for n in model.graph.node if n.op_type == "QuantizeLinear" and "_weight_" in n.name}
    for tensor in model.graph.initializer:
        value = onnx.numpy_helper.to_array(tensor)
        if value.dtype == np.int8:
            tensor.CopyFrom(onnx.numpy_helper.from_array(value.astype(np.int16), tensor.name))
        elif tensor.name in weights:
            tensor.CopyFrom(onnx.numpy_helper.from_array(value / np.float32(256), tensor.name))
    for value_info in model.graph.value_info:
        if value_info.type.tensor_type.elem_type == onnx.TensorProto.INT8:
            value_info.type.tensor_type.elem_type = onnx.TensorProto.INT16
