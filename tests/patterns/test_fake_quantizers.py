from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.errors import ModelError
from qdqtool.formats.verdicts import build_verdict, describe_rejection
from qdqtool.ir.modelfile import load
from qdqtool.patterns.fake_quantizers import QuantizerForm, find_fake_quantizers
from tests.errors import has
from tests.insertion import nets
from tests.trt.builder import Graph

INT8 = onnx.TensorProto.INT8
MakeQuantizer = Callable[[Graph, str, str, np.ndarray], str]
"""Makes a quantizer of a tensor: graph, tensor, name and scales in a shape that broadcasts."""


def arithmetic(*steps: str) -> MakeQuantizer:
    """Return a maker of quantizers whose operators are `steps`, keys of the table `operands`."""

    def make(g: Graph, x: str, name: str, scale: np.ndarray) -> str:
        inverse = (1 / scale).astype(np.float32)
        operands = {
            "/": ("Div", [scale]),
            "*inverse": ("Mul", [inverse]),
            "round": ("Round", []),
            "+": ("Add", [np.float32(0)]),
            "-": ("Sub", [np.float32(0)]),
            "clip": ("Clip", [np.float32(-128), np.float32(127)]),
            "narrow": ("Clip", [np.float32(-127), np.float32(127)]),
            "max": ("Max", [np.float32(-128)]),
            "min": ("Min", [np.float32(127)]),
            "*": ("Mul", [scale]),
            "/inverse": ("Div", [inverse]),
        }
        for number, step in enumerate(steps):
            if step.startswith("cast"):
                x = g.op("Cast", x, f"{name}.{number}", to=int(step.removeprefix("cast")))
                continue
            op, values = operands[step]
            constants = [
                g.const(f"{name}.{number}.{i}", np.asarray(value, np.float32))
                for i, value in enumerate(values)
            ]
            x = g.op(op, [x, *constants], f"{name}.{number}")
        return x

    return make


def floor(g: Graph, x: str, name: str, scale: np.ndarray) -> str:
    s = g.const(f"{name}.s", np.asarray(scale, np.float32))
    x = g.op(
        "Add",
        [g.op("Div", [x, s], f"{name}.0"), g.const(f"{name}.h", np.float32(0.5))],
        f"{name}.1",
    )
    bounds = [g.const(f"{name}.{key}", np.float32(b)) for key, b in (("l", -128), ("u", 127))]
    x = g.op("Clip", [g.op("Floor", x, f"{name}.2"), *bounds], f"{name}.3")
    return g.op("Mul", [x, s], f"{name}.4")


def qonnx(
    g: Graph,
    x: str,
    name: str,
    scale: np.ndarray,
    *,
    domain: str = "qonnx.custom_op.general",
    op: str = "Quant",
    bits: int = 8,
    **changes: Any,
) -> str:
    values = {"scale": scale, "zero": 0, "bits": bits}
    inputs = [g.const(f"{name}.{k}", np.asarray(v, np.float32)) for k, v in values.items()]
    if op == "BipolarQuant":
        return g.op(op, [x, inputs[0]], name, domain=domain)
    attributes = {"signed": 1, "narrow": 0, "rounding_mode": "ROUND"} | changes
    return g.op(op, [x, *inputs], name, domain=domain, **attributes)


def openvino(g: Graph, x: str, name: str, scale: np.ndarray) -> str:
    low = g.const(f"{name}.low", np.asarray(-128 * scale, np.float32))
    high = g.const(f"{name}.high", np.asarray(127 * scale, np.float32))
    ends = [low, high, low, high]
    return g.op("FakeQuantize", [x, *ends], name, domain="org.openvinotoolkit", levels=256)


def affine(
    domain: str,
    op: str,
    g: Graph,
    x: str,
    name: str,
    scale: np.ndarray,
    *,
    factor: float | None = None,
    **attributes: Any,
) -> str:
    values: list[Any] = [np.asarray(scale.reshape(-1) if scale.size > 1 else scale, np.float32)]
    values.append(np.zeros(values[0].shape, np.int64))
    is_channel = scale.size > 1
    values += [np.int64(0)] if is_channel else []
    values += [np.int64(-128), np.int64(127)]
    values += [] if factor is None else [np.float32(factor)]
    inputs = [g.const(f"{name}.{i}", value) for i, value in enumerate(values)]
    suffix = "channel" if is_channel else "tensor"
    names = {k: v.format(suffix) for k, v in attributes.items()}
    return g.op(op.format(suffix), [x, *inputs], name, domain=domain, **names)


def pt2e(names: str, g: Graph, x: str, name: str, scale: np.ndarray) -> str:
    domain, suffix = "quantized_decomposed", "channel" if scale.size > 1 else "tensor"
    integers = affine(domain, names.format("", suffix), g, x, f"{name}.q", scale)
    inputs = [f"{name}.q.{i}" for i in range(5 if scale.size > 1 else 4)]
    return g.op(names.format("de", suffix), [integers, *inputs], name, domain=domain)


def reversed_operands(g: Graph, x: str, name: str, scale: np.ndarray) -> str:
    values = {"i": 1 / scale, "l": np.float32(-128), "h": np.float32(127), "s": scale}
    c = {k: g.const(f"{name}.{k}", np.asarray(v, np.float32)) for k, v in values.items()}
    x = g.op("Round", g.op("Mul", [c["i"], x], f"{name}.0"), f"{name}.1")
    x = g.op("Max", [c["l"], g.op("Min", [c["h"], x], f"{name}.2")], f"{name}.3")
    return g.op("Mul", [c["s"], x], f"{name}.4")


def dq_operator(g: Graph, x: str, name: str, scale: np.ndarray) -> str:
    s = g.const(f"{name}.s", np.asarray(scale, np.float32))
    bounds = [g.const(f"{name}.{key}", np.float32(b)) for key, b in (("l", -128), ("u", 127))]
    x = g.op("Round", g.op("Div", [x, s], f"{name}.0"), f"{name}.1")
    x = g.op("Cast", g.op("Clip", [x, *bounds], f"{name}.2"), f"{name}.3", to=INT8)
    flat = g.const(f"{name}.flat", np.asarray(scale, np.float32).reshape(-1))
    zero = g.const(f"{name}.zero", np.zeros(np.size(scale), np.int8))
    return g.op("DequantizeLinear", [x, flat, zero], f"{name}.4", axis=0)


def qcdq(low: int, high: int, g: Graph, x: str, name: str, scale: np.ndarray) -> str:
    flat = np.asarray(scale, np.float32).reshape(-1 if np.size(scale) > 1 else ())
    pair = [g.const(f"{name}.s", flat), g.const(f"{name}.z", np.zeros(flat.shape, np.int8))]
    bounds = [g.const(f"{name}.{k}", np.int8(b)) for k, b in (("l", low), ("h", high))]
    x = g.op(
        "Clip", [g.op("QuantizeLinear", [x, *pair], f"{name}.q", axis=0), *bounds], f"{name}.c"
    )
    return g.op("DequantizeLinear", [x, *pair], f"{name}.dq", axis=0)


def custom(domain: str, op: str, **attributes: Any) -> MakeQuantizer:
    return lambda g, x, name, scale: g.op(op, x, name, domain=domain, **attributes)


PT2E = partial(pt2e, "{}quantize_per_{}")
DECOMPOSED: dict[str, MakeQuantizer] = {
    "dynamo": arithmetic("*inverse", "round", "+", "clip", "-", "*"),
    "no offsets": arithmetic("*inverse", "round", "clip", "*"),
    "division": arithmetic("/", "round", "+", "clip", "-", "*"),
    "offset first": arithmetic("/", "+", "round", "clip", "-", "*"),
    "clip first": arithmetic("/", "clip", "round", "*"),
    "narrow": arithmetic("*inverse", "round", "narrow", "/inverse"),
    "minimum and maximum": arithmetic("*inverse", "round", "max", "min", "*"),
    "straight through": lambda g, x, name, scale: g.op(
        "Add",
        [
            x,
            g.op(
                "Sub",
                [arithmetic("/", "round", "clip", "*")(g, x, name, scale), x],
                f"{name}.difference",
            ),
        ],
        f"{name}.sum",
    ),
    "reversed operands": reversed_operands,
    "operator DQ": dq_operator,
    "casts": arithmetic("*inverse", "round", "+", "clip", "cast3", "cast1", "-", "*"),
}
OPERATORS: dict[str, tuple[MakeQuantizer, QuantizerForm]] = {
    "QONNX": (qonnx, QuantizerForm.QONNX),
    "Brevitas": (partial(qonnx, domain="onnx.brevitas"), QuantizerForm.QONNX),
    "IntQuant": (partial(qonnx, op="IntQuant"), QuantizerForm.QONNX),
    "OpenVINO": (openvino, QuantizerForm.OPENVINO),
    "ATen": (
        partial(affine, "org.pytorch.aten", "ATen", operator="fake_quantize_per_{}_affine"),
        QuantizerForm.ATEN,
    ),
    "PT2E": (PT2E, QuantizerForm.PT2E),
    "ATen, learnable": (
        partial(
            affine,
            "org.pytorch.aten",
            "ATen",
            factor=1.0,
            operator="_fake_quantize_learnable_per_{}_affine",
        ),
        QuantizerForm.ATEN,
    ),
    "PT2E, name with dots": (partial(pt2e, "{}quantize_per_{}.default"), QuantizerForm.PT2E),
    "PT2E, whole name": (
        partial(pt2e, "quantized_decomposed_{}quantize_per_{}_default"),
        QuantizerForm.PT2E,
    ),
    "QCDQ": (partial(qcdq, -128, 127), QuantizerForm.QCDQ),
    "MQBench": (
        partial(affine, "", "FakeQuantizeLearnablePer{}Affine"),
        QuantizerForm.MQBENCH,
    ),
}
INEXACT: dict[str, MakeQuantizer] = {
    "4 bits": partial(qonnx, bits=4),
    "rounding": partial(qonnx, rounding_mode="FLOOR"),
    "bipolar": partial(qonnx, op="BipolarQuant"),
    "halves up": floor,
    "AIMET": lambda g, x, name, scale: g.op(
        "QcQuantizeOp", x, name, domain="aimet.customop.cpu", op_name=name
    ),
    "AIMET, blocks": custom("aimet.customop.cuda", "GroupedBlockQuantizeDequantize"),
    "no bounds": arithmetic("/", "round", "*"),
    "unsigned and narrow": partial(qonnx, signed=0, narrow=1),
    "Trunc": partial(qonnx, op="Trunc"),
    "MultiThreshold": partial(qonnx, op="MultiThreshold"),
    "ModelOpt": custom("tensorrt", "quantize_op"),
    "torchao": custom("torchao", "quantize_affine"),
    "ATen, observer": custom(
        "org.pytorch.aten", "ATen", operator="fused_moving_avg_obs_fake_quant"
    ),
    "TensorFlow": custom("tf", "FakeQuantWithMinMaxVars"),
}


def network(
    make: MakeQuantizer,
    count: int = 2,
    per_channel: bool = True,
    step: float = 0.02,
    opset: int = 17,
) -> onnx.ModelProto:
    g = Graph(opset=opset)
    x = g.input(1, 16, 8, 8)
    for number in range(count):
        weights = np.random.default_rng(number).normal(0, 0.1, (16, 16, 1, 1)).astype(np.float32)
        scale = np.abs(weights).max((1, 2, 3), keepdims=True).astype(np.float32) / 127
        scale = scale if per_channel else scale.max()
        data = make(g, x, f"a{number}", np.asarray(step, np.float32))
        w = make(g, g.const(f"w{number}", weights), f"q{number}", np.asarray(scale))
        x = g.relu(g.op("Conv", [data, w], f"c{number}", kernel_shape=[1, 1]), f"r{number}")
    proto = g.model(x)
    missing = {n.domain for n in proto.graph.node} - {o.domain for o in proto.opset_import}
    proto.opset_import.extend(onnx.helper.make_opsetid(domain, 1) for domain in sorted(missing))
    return proto


def run(proto: onnx.ModelProto) -> np.ndarray:
    x = np.random.default_rng(9).normal(0, 1, (1, 16, 8, 8)).astype(np.float32)
    return nets.run(proto, {"x": x})[0]


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("name", DECOMPOSED)
def test_fix_rewrites_arithmetic_exactly(name: str, per_channel: bool) -> None:
    before = network(DECOMPOSED[name], per_channel=per_channel)
    codes = qdqtool.predict(before).findings_by_code()
    assert codes.get("FAKE-QUANT") == 1 and "NO-QDQ" not in codes
    fixed = qdqtool.fix(before)
    assert [a.code for a in fixed.applied] == ["FAKE-QUANT"] * 4
    assert fixed.after.summary()["int8"] == 2
    assert [note.code for note in fixed.notes].count("narrow-range") == (name == "narrow")
    np.testing.assert_allclose(run(fixed.proto), run(before), atol=1e-5)


def test_fix_limits_each_channel_of_computed_weights() -> None:
    def make(g: Graph, x: str, name: str, scale: np.ndarray) -> str:
        return DECOMPOSED["narrow"](g, g.op("Identity", x, f"{name}.i"), name, scale)

    before = network(make)
    np.testing.assert_allclose(run(qdqtool.fix(before).proto), run(before), atol=1e-5)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("name", OPERATORS)
def test_fix_rewrites_operators_of_other_tools(name: str, per_channel: bool) -> None:
    make, form = OPERATORS[name]
    before = network(make, per_channel=per_channel)
    assert {f.form for f in find_fake_quantizers(load(before))} == {form}
    (finding,) = (f for f in qdqtool.predict(before).findings if f.code == "FAKE-QUANT")
    assert finding.severity == "error" and finding.automatic
    fixed = qdqtool.fix(before)
    assert fixed.after.summary()["int8"] == 2 and fixed.ok
    assert {n.domain for n in fixed.proto.graph.node} == {""}
    expected = run(network(DECOMPOSED["dynamo"], per_channel=per_channel))
    np.testing.assert_allclose(run(fixed.proto), expected, atol=1e-5)


@pytest.mark.parametrize("name", INEXACT)
def test_quantizer_without_exact_pair_is_named(name: str) -> None:
    before = network(INEXACT[name], per_channel=False)
    (finding,) = (f for f in qdqtool.predict(before).findings if f.code == "FAKE-QUANT")
    # TensorRT builds two of the forms.
    assert finding.severity == ("warning" if name in ("halves up", "no bounds") else "error")
    assert not finding.automatic and finding.causes[0].reason.problem
    with pytest.raises(ModelError, check=has("not-quantized")):
        qdqtool.fix(before)


@pytest.mark.parametrize("name", ["dynamo", "QONNX", "AIMET", "PT2E"])
def test_insert_never_quantizes_twice(name: str) -> None:
    makes = DECOMPOSED | INEXACT | {key: make for key, (make, _) in OPERATORS.items()}
    with pytest.raises(ModelError, check=has("already-quantized")):
        qdqtool.insert(network(makes[name]), [{"x": np.zeros((1, 16, 8, 8), np.float32)}])


def test_other_rounding_is_no_quantizer() -> None:
    g = Graph(opset=17)
    y = g.conv(g.input(1, 16, 8, 8), "c", 16, weights="float", scale=None)
    unbounded = g.model(arithmetic("/", "round", "*")(g, y, "r", np.asarray(0.5)))
    rescaled = network(arithmetic("/", "round", "clip", "/"))
    assert not find_fake_quantizers(load(unbounded)) and not find_fake_quantizers(load(rescaled))


def test_chain_with_a_second_consumer_is_no_quantizer() -> None:
    proto = network(DECOMPOSED["dynamo"], count=1)
    (clip,) = (n for n in proto.graph.node if n.name == "a0.3")
    proto.graph.output.append(onnx.helper.make_tensor_value_info(clip.output[0], 1, [1, 16, 8, 8]))
    assert [f.name for f in find_fake_quantizers(load(proto))] == ["q0.0"]


def fallback() -> onnx.ModelProto:
    g = Graph(opset=17)
    y = g.op(
        "ATen", g.input(1, 16, 8, 8), "conv", domain="org.pytorch.aten", operator="_convolution"
    )
    return g.model(g.relu(y, "r"))


def test_fallback_to_aten_is_an_error() -> None:
    (finding,) = (f for f in qdqtool.predict(fallback()).findings if f.code == "ATEN-FALLBACK")
    assert (finding.severity, finding.causes[0].reason.operator) == ("error", "_convolution")


def test_insert_names_operators_that_hide_layers() -> None:
    feeds = [{"x": np.zeros((1, 16, 8, 8), np.float32)}]
    with pytest.raises(ModelError, check=has("nothing-to-quantize"), match="ATen"):
        qdqtool.insert(fallback(), feeds)
    g = Graph(opset=17)
    y = g.op("FusedConv", g.input(1, 16, 8, 8), "fused", domain="com.microsoft")
    with pytest.raises(ModelError, check=has("nothing-to-quantize"), match="FusedConv"):
        qdqtool.insert(g.model(y), feeds)


@pytest.mark.parametrize("per_channel", [True, False])
def test_arithmetic_of_stored_integers_becomes_a_dq(per_channel: bool) -> None:

    def weights(g: Graph, x: str, name: str, scale: np.ndarray) -> str:
        (tensor,) = (t for t in g.initializers if t.name == x)
        values = onnx.numpy_helper.to_array(tensor)
        stored = g.const(f"{name}.i", np.clip(np.rint(values / scale), -127, 127).astype(np.int8))
        s = g.const(f"{name}.s", np.asarray(scale, np.float32))
        return g.op("Mul", [g.op("Cast", stored, f"{name}.c", to=1), s], f"{name}.m")

    def make(g: Graph, x: str, name: str, scale: np.ndarray) -> str:
        quantize = arithmetic("/", "round", "clip", "*")
        return (weights if x.startswith("w") else quantize)(g, x, name, scale)

    proto = network(make, per_channel=per_channel)
    fixed = qdqtool.fix(proto)
    assert fixed.after.summary()["int8"] == 2
    np.testing.assert_allclose(run(fixed.proto), run(proto), atol=1e-6)


def test_clip_to_four_bits_is_named() -> None:
    prediction = qdqtool.predict(network(partial(qcdq, -8, 7), per_channel=False))
    (finding,) = (f for f in prediction.findings if f.code == "FAKE-QUANT")
    assert (finding.severity, finding.automatic) == ("error", False)


def test_bounds_of_an_integer_clip_are_the_only_fault() -> None:
    """The parser reads the bounds of a Clip, so that they do not count as integers without a DQ."""
    codes = qdqtool.predict(
        network(partial(qcdq, -127, 127), count=1, per_channel=False)
    ).findings_by_code()
    # WEIGHT-INDIRECT is the Clip of the weights.
    assert codes["FAKE-QUANT"] == codes["WEIGHT-INDIRECT"] == 1


def test_verdict_of_integer_clips_names_wrong_results() -> None:
    """TensorRT-RTX builds integer Clips, with weights of zeros."""
    prediction = qdqtool.predict(network(partial(qcdq, -127, 127), per_channel=False), "rtx1.7")
    verdict = build_verdict(prediction)
    assert "builds this model" in verdict.text
    assert "FAKE-QUANT" in verdict.text and not describe_rejection(prediction)


def with_type(proto: onnx.ModelProto, kind: int) -> onnx.ModelProto:
    for tensor in proto.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.helper.make_tensor(tensor.name, kind, values.shape, values.ravel()))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = kind
    del proto.graph.value_info[:]
    return proto


@pytest.mark.parametrize("steps", [("*inverse", "round", "clip", "*"), ("/", "round", "clip", "*")])
@pytest.mark.parametrize("per_channel", [True, False])
def test_fix_rewrites_float16_arithmetic(steps: tuple[str, ...], per_channel: bool) -> None:
    """Q and DQ have float16 scales; the reciprocal of a float16 scale is rounded."""
    before = network(arithmetic(*steps), 1, per_channel, step=0.037, opset=19)
    fixed = qdqtool.fix(with_type(before, onnx.TensorProto.FLOAT16), "10.3")
    assert [a.code for a in fixed.applied] == ["FAKE-QUANT"] * 2
    assert fixed.after.summary()["int8"] == 1 and fixed.ok
    assert [n.values["count"] for n in fixed.notes if n.code == "rounding-differs"] == [2]
    quantizers = [n for n in fixed.proto.graph.node if n.op_type.endswith("Linear")]
    scales = {t.name: t for t in fixed.proto.graph.initializer}
    assert {scales[n.input[1]].data_type for n in quantizers} == {onnx.TensorProto.FLOAT16}
    onnx.checker.check_model(fixed.proto, full_check=True)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (arithmetic("/", "round", "clip", "*"), 0),
        (arithmetic("*inverse", "round", "clip", "*"), 4),
        (PT2E, 4),
        (qonnx, 0),
    ],
)
def test_quantizers_that_round_differently_are_counted(make: MakeQuantizer, count: int) -> None:
    assert [
        n.values["count"] for n in qdqtool.fix(network(make)).notes if n.code == "rounding-differs"
    ] == [count] * (count > 0)


@pytest.mark.parametrize("make", [qonnx, openvino], ids=["QONNX", "OpenVINO"])
def test_fix_writes_float16_scales_for_operators_of_other_tools(make: MakeQuantizer) -> None:
    """onnx cannot infer the output types of QONNX and OpenVINO operators."""
    fixed = qdqtool.fix(
        with_type(network(make, per_channel=False), onnx.TensorProto.FLOAT16), "10.3"
    )
    assert fixed.after.summary()["int8"] == 2
    assert "FLOAT-MIXED" not in fixed.after.findings_by_code()


def test_arithmetic_in_bfloat16_is_named() -> None:
    proto = network(arithmetic("*inverse", "round", "clip", "*"), per_channel=False, step=0.037)
    proto = with_type(proto, onnx.TensorProto.BFLOAT16)
    findings = qdqtool.predict(proto).findings_by_code()
    assert findings["FAKE-QUANT"] == 1 and "NO-QDQ" not in findings
    with pytest.raises(ModelError, check=has("already-quantized")):
        qdqtool.insert(proto, [{"x": np.zeros((1, 16, 8, 8), np.float32)}])
