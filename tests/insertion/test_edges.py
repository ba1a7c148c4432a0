import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import qdqtool
from calibration import Preprocess
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.insertion.placement import PlacementRules, compute_placement
from qdqtool.insertion.prepare import prepare_float_model
from qdqtool.insertion.ranges import write_table
from qdqtool.ir.graph import Model
from qdqtool.patterns.heads import find_head
from qdqtool.prediction import check_activations
from qdqtool.reasons import placement as placement_reasons
from tests.errors import has
from tests.insertion.nets import (
    Net,
    assert_same_outputs,
    check,
    detector,
    images,
    nodes_of,
    one_layer,
    require_prediction,
    run,
    set_value,
    store_as_half,
    two_layers,
    value_of,
    with_constant_nodes,
)
from tests.insertion.test_fp16 import copy_as_fp16
from tests.insertion.test_prepare import prepare_and_compare
from tests.notes import note_codes
from tests.slow import slow_after


def test_half_keeps_constant_nodes_with_consumers(net: Net) -> None:
    """Only float constants that FP16 copies replace are removed.

    The shapes and scales of a Resize remain.
    """
    up = net.op(
        "Resize", "up", net.conv("c", "x"), "", net.const("scales", [1, 1, 2, 2]), mode="nearest"
    )
    flat = net.op("Reshape", "flat", up, net.const("shape", [1, 16, -1], np.int64))
    back = net.op("Reshape", "back", flat, net.const("shape_back", [1, 16, 16, 16], np.int64))
    before = with_constant_nodes(net.output(net.conv("d", back)).model(19, ir=9))
    after = copy_as_fp16(before)
    left = {n.output[0] for n in after.graph.node if n.op_type == "Constant"}
    assert {"scales", "shape", "shape_back"} <= left
    assert not any(t.startswith("c.weight") for t in left)
    assert_same_outputs(before, after, images(1)[0], atol=2e-2)


def test_residual_of_unknown_shape_is_no_broadcast(net: Net) -> None:
    """Shape inference stops at operators of other domains."""
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    skip = net.op("Strange", "strange", stem, domain="example")
    out = net.op("Add", "add", net.conv("c1", stem), skip)
    model = Model(
        net.output(net.op("Conv", "c2", out, "c0.weight", kernel_shape=[3, 3])).open_model()
    )
    assert model.shape("strange.out") is None and model.shape("c1.out") is not None
    placement = compute_placement(model, PlacementRules(head="none"))
    assert [r.role for r in placement.inputs["strange.out"]] == ["residual"]


def test_prepare_removes_nodes_before_weights_but_not_before_outputs(net: Net) -> None:
    weight = net.op("Identity", "i", net.const("w", net.rng.standard_normal((16, 16, 3, 3))))
    out = net.op("Conv", "c", "x", weight, kernel_shape=[3, 3])
    after, _ = prepare_and_compare(
        net.output(
            net.op("Identity", "end", out), net.op("Transpose", "turned", out, perm=[0, 2, 3, 1])
        ).model(),
        1e-5,
    )
    assert [n.name for n in after.graph.node] == ["c", "end", "turned"]


def test_folding_keeps_bias_with_another_consumer(net: Net) -> None:
    bias = net.const("bias", net.rng.standard_normal(16))
    first = net.op("Conv", "a", "x", net.const("wa", net.rng.standard_normal((16, 16, 1, 1))), bias)
    second = net.op(
        "Conv", "b", "x", net.const("wb", net.rng.standard_normal((16, 16, 1, 1))), bias
    )
    after, _ = prepare_and_compare(net.output(net.norm("n", first), second).model())
    left = {t.name for t in after.graph.initializer}
    assert {"bias", "wb"} <= left and not {"wa", "n.gamma", "n.var"} & left


def test_folding_uses_default_epsilon(net: Net) -> None:
    """The default of 1e-5 changes the result if the variance is of this size."""
    parameters = {
        "gamma": np.ones(16),
        "beta": np.zeros(16),
        "mean": np.zeros(16),
        "var": np.full(16, 1e-5),
    }
    names = [net.const(k, v) for k, v in parameters.items()]
    before = net.output(net.op("BatchNormalization", "n", net.conv("c", "x"), *names)).model()
    after, _ = prepare_and_compare(before, 1e-3)
    assert [n.op_type for n in after.graph.node] == ["Conv"]


OLD = """
    <ir_version: 8, opset_import: ["": 11]>
    net (float[1, 16, 8, 8] x) => (float[1, 16, 16, 16] up)
    { up = Upsample <scales = [1.0, 1.0, 2.0, 2.0]> (x) }"""


@pytest.mark.parametrize(("path", "label"), [("net.onnx", "net.onnx"), ("", "model")])
def test_prepare_errors_name_file(path: str, label: str) -> None:
    model, refused = Model(onnx.parser.parse_model(OLD), path), has("opset-too-old", path=label)
    with pytest.raises(
        ModelError, check=refused, match="opset 11 cannot be raised to 13"
    ) as caught:
        prepare_float_model(model, opset=13)
    assert caught.value.reason.isprintable()  # one line, although onnx writes several


@pytest.mark.parametrize(
    ("op", "shape", "attributes", "is_dfl"),
    [
        ("Transpose", None, {"perm": [0, 1, 3, 2]}, True),
        ("Reshape", [1, 8, 64, 1], {}, True),
        ("MaxPool", None, {"kernel_shape": [2, 2]}, False),
    ],
)
def test_dfl_is_found_after_operators_that_move_values(
    net: Net, op: str, shape: list[int] | None, attributes: dict[str, Any], is_dfl: bool
) -> None:
    soft = net.op("Softmax", "soft", net.conv("box", "x", cout=8), axis=1)
    inputs = [soft] if shape is None else [soft, net.const("shape", shape, np.int64)]
    moved = net.op(op, "moved", *inputs, **attributes)
    bins = net.const("bins", np.arange(8).reshape(1, 8, 1, 1))
    head = find_head(net.output(net.op("Conv", "mean", moved, bins)).index())
    assert [net.nodes[i].name for i in head.dfl] == (["mean"] if is_dfl else [])


def add_box_head(net: Net, tensor: str) -> Net:
    bounds = {"starts": [0], "ends": [8], "axes": [1]}
    cut = net.op("Slice", "cut", tensor, *(net.const(k, v, np.int64) for k, v in bounds.items()))
    bins = net.const("bins", np.arange(8).reshape(1, 8, 1, 1))
    return net.output(net.op("Conv", "mean", net.op("Softmax", "soft", cut, axis=1), bins))


def test_every_input_of_concat_of_unknown_shape_belongs_to_boxes(net: Net) -> None:
    strange = net.op("Strange", "strange", net.conv("a", "x"), domain="example")
    joined = net.op("Concat", "join", strange, net.conv("b", "x", cout=8), axis=1)
    head = find_head(Model(add_box_head(net, joined).open_model()))
    assert "b" in {net.nodes[i].name for i in head.boxes}


@pytest.mark.parametrize(
    ("perm", "boxes"),
    [
        ([0, 1, 3, 2], {"box"}),
        ([0, 2, 3, 1], {"box", "cls"}),
        (None, {"box", "cls"}),
    ],
)
def test_box_channels_are_followed_while_they_stay_axis_1(
    perm: list[int] | None, boxes: set[str]
) -> None:
    """A Slice of axis 1 after a Transpose cuts rows, which come from both convolutions."""
    net = Net(side=16)
    joined = net.op(
        "Concat", "join", net.conv("box", "x", cout=8), net.conv("cls", "x", cout=8), axis=1
    )
    turned = net.op("Transpose", "turned", joined, **({} if perm is None else {"perm": perm}))
    assert {net.nodes[i].name for i in find_head(add_box_head(net, turned).index()).boxes} == boxes


PIXELS = np.random.default_rng(3).integers(0, 256, (1, 16, 8, 8), np.uint8)


def insert_into(
    kind: str,
    model: onnx.ModelProto | None = None,
    data: list[dict[str, Any]] | None = None,
    **options: Any,
) -> qdqtool.Insertion:
    options = {"input_type": kind, "predict": False, **options}
    result = qdqtool.insert(model or two_layers(), data or images(), **options)
    check(result.model)
    return result


PREPROCESS = Preprocess(mean=(0.3, 0.4, 0.5), std=(0.2, 0.25, 0.3))


def test_uint8_input_with_mean_and_deviation_by_channel() -> None:
    net = Net(channels=3)
    model = net.output(net.conv("a", "x", cin=3)).model()
    mean, std = (
        np.asarray(v, np.float32).reshape(1, -1, 1, 1) for v in (PREPROCESS.mean, PREPROCESS.std)
    )
    data = [{"x": (i["x"] - mean) / std} for i in images(channels=3)]
    plain, changed = (
        insert_into("float", model, data),
        insert_into("uint8", model, data, preprocess=PREPROCESS),
    )
    pixels = PIXELS[:, :3]
    x = (pixels.astype(np.float32) / 255 - mean) / std
    before, after = run(plain.model, {"x": x})[0], run(changed.model, {"x": pixels})[0]
    assert np.mean(np.abs(before - after) > 1e-4) < 0.02  # near ties, the code differs by one


def sine_branch() -> onnx.ModelProto:
    net = Net()
    return net.output(net.op("Relu", "r", net.conv("a", "x")), net.op("Sin", "other", "x")).model()


@pytest.mark.parametrize(
    ("kind", "options", "error", "code", "node", "value"),
    [
        ("uint8", {"preprocess": PREPROCESS}, ModelError, "wrong-shape", "x", "3 channels"),
        ("uint8", {"target": "trt8.4"}, QdqtoolError, "unsupported", "", "trt8.4"),
        ("int8", {"exclude": ["^a$"]}, ModelError, "option-without-effect", "", "'a' reads 'x' as"),
        ("int8", {"model": sine_branch()}, ModelError, "needed-as-float", "x", "'other'"),
    ],
    ids=["channels of mean", "target", "float input", "float consumer"],
)
def test_input_type_that_does_not_fit_is_refused(
    kind: str, options: dict[str, Any], error: type[QdqtoolError], code: str, node: str, value: str
) -> None:
    with pytest.raises(error, check=has(code, parameter="input_type", node=node), match=value):
        insert_into(kind, **options)


def test_uint8_input_with_float_consumer() -> None:
    sine = run(insert_into("uint8", sine_branch()).model, {"x": PIXELS})[1]
    np.testing.assert_allclose(sine, np.sin(PIXELS.astype(np.float32) / 255), atol=1e-6)


DATA = [{"images": np.random.default_rng(0).random((1, 3, 64, 64), np.float32)}]


@pytest.mark.parametrize("kind", slow_after(1, ["int8", "uint8"]))
def test_input_type_keeps_prediction(kind: str) -> None:
    plain, changed = (
        qdqtool.insert(detector(), DATA, method="max", residual="both", losses=0, input_type=i)
        for i in ("float", kind)
    )
    before, after = (require_prediction(result).summary() for result in (plain, changed))
    assert after["int8"] == before["int8"] == 27
    assert after["conversions"] == before["conversions"] - (kind == "int8")


def test_scales_of_a_uint8_input_fit_its_images() -> None:
    model = insert_into("uint8", detector(), DATA).model
    prediction = qdqtool.predict(model)
    pixels = [{"images": np.uint8(sample["images"] * 255)} for sample in DATA]
    check_activations(Model(model), prediction, pixels)
    assert "ACT-SCALE" not in {f.code for f in prediction.findings}


@pytest.mark.parametrize("factor", [None, 1 / 128, 1.0])
def test_pair_that_includes_the_pixel_factor_is_no_finding(factor: float | None) -> None:
    options = {} if factor is None else {"preprocess": Preprocess(scale=factor)}
    changed = insert_into("uint8", **options).model
    assert "PAIR-SCALE" not in {f.code for f in qdqtool.predict(changed).findings}
    scale = next(i.name for i in changed.graph.initializer if i.name.endswith("_pixels"))
    set_value(changed, scale, value_of(changed, scale) * np.float32(1.5))
    assert "PAIR-SCALE" in {f.code for f in qdqtool.predict(changed).findings}


def test_uint8_input_of_fp16_model_keeps_its_scale() -> None:
    """The scale of the first Q includes 1/255, but the recorded scale is that of float values.

    Two Casts precede the Q: one to FP32 and one to FP16.
    """
    plain, changed = (
        qdqtool.insert(
            detector(), DATA, method="max", target="rtx1.7", losses=0, input_type=input_type
        )
        for input_type in ("float", "uint8")
    )
    assert changed.quantized == plain.quantized and "scales-raised" not in note_codes(changed.notes)
    model = Model(changed.model)
    quantizer = next(
        n for n in model.ordered if n.op == "QuantizeLinear" and not model.is_constant(n.input(0))
    )
    cast = model.producer(quantizer.input(0))
    assert [cast.op, model.producer(cast.input(0)).op] == ["Cast", "Cast"]
    assert "PAIR-SCALE" not in {f.code for f in qdqtool.predict(changed.model).findings}


ELEMENTS = {"int8": onnx.TensorProto.INT8, "uint8": onnx.TensorProto.UINT8}
# Codes of the notes, by the input type and by whether a mean is subtracted.
NOTES = {
    ("int8", False): "feed-int8-pixels",
    ("int8", True): "feed-int8",
    ("uint8", False): "feed-uint8-scaled",
    ("uint8", True): "feed-uint8",
}


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("mean", [0.0, 0.25])
def test_input_type_changes_every_input(kind: str, mean: float, net: Net) -> None:
    net.inputs.append(
        onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 16, 8, 8])
    )
    model = net.output(net.conv("a", "x"), net.conv("b", "y")).model()
    first, second = images(), images(seed=2)
    data = [{"x": a["x"] - mean, "y": b["x"] - mean} for a, b in zip(first, second, strict=True)]
    preprocess = Preprocess(mean=(mean,) * 3)
    plain, changed = (
        insert_into(k, model, data, head="none", preprocess=preprocess) for k in ("float", kind)
    )
    assert [i.type.tensor_type.elem_type for i in changed.model.graph.input] == [ELEMENTS[kind]] * 2
    assert changed.notes[-1].code == NOTES[kind, bool(mean)]
    added = [n.op_type for n in nodes_of(changed.model, "Mul", "Add", "Div", "Cast")]
    assert mean or added == ["Cast"] * (2 if kind == "uint8" else 0), (
        "the factor is in the first scale"
    )
    pixels = {"x": PIXELS, "y": PIXELS[:, ::-1]}
    floats = {n: p.astype(np.float32) / 255 - np.float32(mean) for n, p in pixels.items()}
    fed = dict(pixels)
    if kind == "int8":
        scales = {
            n: value_of(plain.model, f"{c}/_input_quantizer/scale")
            for n, c in (("x", "a"), ("y", "b"))
        }
        fed = {
            n: np.clip(np.rint(v / scales[n]), -128, 127).astype(np.int8) for n, v in floats.items()
        }
        for note in changed.notes[-2:] if not mean else ():  # the factor turns pixels into inputs
            name, factor = note.values["name"], note.values["factor"]
            codes = np.clip(np.rint(pixels[name] * factor), -128, 127)
            np.testing.assert_array_equal(codes, fed[name])
    for after, before in zip(run(changed.model, fed), run(plain.model, floats), strict=True):
        assert np.mean(np.abs(after - before) > 1e-4) < (0.02 if kind == "uint8" and mean else 1e-9)


@pytest.mark.parametrize("mean", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("target", ["trt8.5", "trt10"])
def test_input_type_of_float16_model(target: str, kind: str, mean: float) -> None:
    """The Cast that widening to float32 adds for 8.5 stays for UINT8 and is removed for INT8."""
    model, preprocess = store_as_half(two_layers()), Preprocess(mean=(mean,) * 3)
    data = [{"x": (i["x"] - mean).astype(np.float16)} for i in images()]
    plain, changed = (
        insert_into(k, model, data, target=target, preprocess=preprocess) for k in ("float", kind)
    )
    assert changed.model.graph.input[0].type.tensor_type.elem_type == ELEMENTS[kind]
    assert len([n for n in nodes_of(changed.model, "Cast") if n.input[0] == "x"]) == (
        kind == "uint8"
    )
    x = (PIXELS.astype(np.float32) / 255 - mean).astype(np.float16)
    scale = value_of(plain.model, "a/_input_quantizer/scale")
    codes = np.clip(np.rint(x.astype(np.float32) / scale), -128, 127).astype(np.int8)
    before = run(plain.model, {"x": x})[0].astype(np.float32)
    after = run(changed.model, {"x": codes if kind == "int8" else PIXELS})[0].astype(np.float32)
    # Float16 pixels have relative errors of up to 0.0005, and the division by 10 is in float16.
    # Near ties, the INT8 code differs by one.
    exact = kind == "int8" and target == "trt8.5"
    assert np.mean(np.abs(before - after) > (0.0 if exact else 0.01)) < (1e-9 if exact else 0.1)


def ramp(low: float, high: float) -> list[dict[str, Any]]:
    return [{"x": np.linspace(low, high, 1024, dtype=np.float32).reshape(1, 16, 8, 8)}]


@pytest.mark.parametrize(
    ("low", "high", "preprocess"),
    [
        (-1.0, 1.0, Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3)),
        (0, 255, Preprocess(scale=1.0)),
    ],
    ids=["-1 to 1", "0 to 255"],
)
def test_uint8_input_refuses_data_of_another_preprocessing(
    low: float, high: float, preprocess: Preprocess
) -> None:
    refused = has("out-of-range", parameter="input_type", node="x")
    with pytest.raises(ModelError, check=refused, match=f"from {low:g} to {high:g} .*`scale`"):
        insert_into("uint8", data=ramp(low, high))
    insert_into("uint8", data=ramp(low, high), preprocess=preprocess)
    insert_into("int8", data=ramp(low, high))


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        *(
            (name, "kl", f"`{name}='kl'`")
            for name in ("head", "residual", "attention", "weights", "high_precision", "method")
        ),
        ("input_type", "kl", "`input_type='kl'`"),
        ("target", "trt7", "'trt7'"),
        ("method_for", [("zzz", "max")], "`method_for` zzz=max"),
    ],
)
def test_unknown_choice_is_named(parameter: str, value: object, message: str) -> None:
    with pytest.raises(QdqtoolError, match=message):
        qdqtool.insert(one_layer(), images(), **{parameter: value})


@pytest.fixture(params=["file", "memory"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., tuple[Any, str]]:
    def to_source(model: onnx.ModelProto) -> tuple[Any, str]:
        if request.param == "memory":
            return model, "model"
        onnx.save(model, tmp_path / "m.onnx")
        return tmp_path / "m.onnx", str(tmp_path / "m.onnx")

    return to_source


def torn_model() -> onnx.ModelProto:
    model = one_layer()
    model.graph.output.add(name="lost")
    return model


@pytest.mark.parametrize(
    ("make", "code", "node"),
    [
        (
            lambda: qdqtool.insert(one_layer(), images(), predict=False).model,
            "already-quantized",
            "",
        ),
        (torn_model, "output-without-producer", "lost"),
    ],
)
def test_insert_refuses_unsuitable_model(
    make: Callable[[], onnx.ModelProto],
    code: str,
    node: str,
    source: Callable[..., tuple[Any, str]],
) -> None:
    model, label = source(make())
    with pytest.raises(ModelError, check=has(code, path=label, node=node)):
        qdqtool.insert(model, images())


def test_insert_refuses_exclusion_of_every_node(
    net: Net, source: Callable[..., tuple[Any, str]]
) -> None:
    model, label = source(net.output(net.conv("c", net.conv("b", net.conv("a", "x")))).model())
    with pytest.raises(placement_reasons.NothingToQuantize) as caught:
        qdqtool.insert(model, images(), exclude=["a", "b|c"])
    assert (caught.value.path, caught.value.count) == (label, 2)
    assert caught.value.record == placement_reasons.ExcludedNode(
        placement_reasons.PLACEMENT, "", "exclude", "b|c"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_powers_of_searched_ranges() -> None:
    """The error's power falls from 3 to 2 while the focus grows from 0.06 to 0.18 of the map."""
    net = Net(side=16)
    heat = net.conv("heat", net.op("Relu", "r", net.conv("c", "x")), cout=1)
    model = net.output(net.op("Sigmoid", "sigmoid", heat)).model()
    set_value(model, "heat.bias", np.float32([-2.4]))
    powers = {
        method: qdqtool.insert(
            model, images(side=16), method=method, head="none", predict=False
        ).calibration["powers"]
        for method in ("max", "mse", "focus")
    }
    # 96 of 1024 positions: 3 - (0.09375 - 0.06) / 0.12 = 2.71875, which is rounded
    assert powers == {
        "max": {},
        "mse": {"x": 2.0, "r.out": 2.0},
        "focus": {"x": 2.72, "r.out": 2.72},
    }


def test_calibration_table_gives_scales_and_no_losses(tmp_path: Path) -> None:
    first = qdqtool.insert(one_layer(), images(), predict=False, losses=1)
    assert first.losses is not None
    write_table(first, tmp_path / "t")
    second = qdqtool.insert(one_layer(), calib_table=tmp_path / "t", losses=1)
    assert second.losses is None
    assert [q.scale for q in second.activations] == [q.scale for q in first.activations]
    assert second.calibration == {
        "table": str(tmp_path / "t"),
        "images": 0,
        "format": "TensorRT",
        "entries": 3,
        "unknown": 0,
        "skipped_entries": 0,
        "notes": [],
        "methods": {"table": 1},
        "powers": {},
    }


@pytest.mark.parametrize(
    ("target", "weights", "is_warned"),
    [
        ("trt8.0", "int8", True),
        ("trt8.0", "float", False),
        ("trt10", "int8", False),
    ],
)
def test_int8_weights_warn_for_targets_that_cannot_read_them(
    target: str, weights: str, is_warned: bool
) -> None:
    result = qdqtool.insert(one_layer(), images(), target=target, weights=weights, predict=False)
    assert note_codes(result.warnings).count("int8-weights-unread") == is_warned
