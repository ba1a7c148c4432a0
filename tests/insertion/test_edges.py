"""The edges of the rules of insertion: unknown shapes, constants that others still read, and other rare neighbours."""

import inspect
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import qdqtool
from calibration import Preprocess
from qdqtool.base.notes import Remark, remarks
from qdqtool.commands.insert import command
from qdqtool.errors import DataError, ModelError, QdqtoolError
from qdqtool.explain import left_float
from qdqtool.insertion.api import insert
from qdqtool.insertion.halfprecision import to_half
from qdqtool.insertion.inputs import write_table
from qdqtool.insertion.placement import Rules, place
from qdqtool.insertion.prepare import prepare
from qdqtool.insertion.scales import choose_scale
from qdqtool.model.graph import Model
from qdqtool.model.heads import find_head
from tests.calibration.nets import refused
from tests.insertion.nets import (
    Net,
    check,
    copied,
    detector,
    images,
    in_half,
    nodes_of,
    run,
    value_of,
    with_constant_nodes,
)
from tests.insertion.test_api import one_layer
from tests.insertion.test_prepare import prepared, same
from tests.raising import raises
from tests.slow import slow_after


def test_constant_nodes_that_are_still_read_stay(net: Net) -> None:
    """Only float constants whose FP16 copies took their place go: shapes and the scales of a Resize are read on."""
    up = net.op(
        "Resize", "up", net.conv("c", "x"), "", net.const("scales", [1, 1, 2, 2]), mode="nearest"
    )
    flat = net.op("Reshape", "flat", up, net.const("shape", [1, 16, -1], np.int64))
    back = net.op("Reshape", "back", flat, net.const("shape_back", [1, 16, 16, 16], np.int64))
    net.output(net.conv("d", back))
    before = with_constant_nodes(net.model(19, ir=9))
    after = copied(before)
    to_half(Model(after))
    check(after)
    left = {n.output[0] for n in after.graph.node if n.op_type == "Constant"}
    assert {"scales", "shape", "shape_back"} <= left
    assert not any(t.startswith("c.weight") for t in left)
    np.testing.assert_allclose(run(after, images(1)[0])[0], run(before, images(1)[0])[0], atol=2e-2)


def test_residuals_and_boxes_of_unknown_shape(net: Net) -> None:
    """Shape inference stops at operators of other domains; what is not known to be a broadcast is taken as none."""
    stem = net.op("Relu", "stem", net.conv("c0", "x"))
    skip = net.op("Strange", "strange", stem, domain="example")
    out = net.op("Add", "add", net.conv("c1", stem), skip)
    net.output(net.op("Conv", "c2", out, "c0.weight", kernel_shape=[3, 3]))
    model = Model(net.open_model())
    assert model.shape("strange.out") is None and model.shape("c1.out") is not None
    placed = place(model, Rules(head="none"))
    assert [r.role for r in placed.readers["strange.out"]] == ["residual"]
    net = Net()
    # Then all of the Concat's inputs may: none is left out of what stays float
    strange = net.op("Strange", "strange", net.conv("a", "x"), domain="example")
    joined = net.op("Concat", "join", strange, net.conv("b", "x", cout=8), axis=1)
    values = {"starts": [0], "ends": [8], "axes": [1]}
    cut = net.op("Slice", "cut", joined, *(net.const(k, v, np.int64) for k, v in values.items()))
    soft = net.op("Softmax", "soft", cut, axis=1)
    net.output(net.op("Conv", "mean", soft, net.const("bins", np.arange(8).reshape(1, 8, 1, 1))))
    head = find_head(Model(net.open_model()))
    assert "b" in {net.nodes[i].name for i in head.boxes}


def test_constants_and_outputs_that_are_still_read_stay(net: Net) -> None:
    """Nodes in front of weights go with them; one of the same kind that makes an output of the network stays."""
    weight = net.op("Identity", "i", net.const("w", net.rng.standard_normal((16, 16, 3, 3))))
    out = net.op("Conv", "c", "x", weight, kernel_shape=[3, 3])
    net.output(
        net.op("Identity", "end", out), net.op("Transpose", "turned", out, perm=[0, 2, 3, 1])
    )
    before = net.model()
    after, _ = prepared(before)
    assert [n.name for n in after.graph.node] == ["c", "end", "turned"]
    same(before, after, 1e-5)
    net = Net()
    bias = net.const("bias", net.rng.standard_normal(16))
    first = net.op("Conv", "a", "x", net.const("wa", net.rng.standard_normal((16, 16, 1, 1))), bias)
    second = net.op(
        "Conv", "b", "x", net.const("wb", net.rng.standard_normal((16, 16, 1, 1))), bias
    )
    net.output(net.norm("n", first), second)
    before = net.model()
    after, _ = prepared(before)
    left = {t.name for t in after.graph.initializer}
    assert {"bias", "wb"} <= left and not {"wa", "n.gamma", "n.var"} & left
    same(before, after)
    net = Net()
    # 1e-5, which matters where the variance is as small
    parameters = {
        "gamma": np.ones(16),
        "beta": np.zeros(16),
        "mean": np.zeros(16),
        "var": np.full(16, 1e-5),
    }
    names = [net.const(k, v) for k, v in parameters.items()]
    net.output(net.op("BatchNormalization", "n", net.conv("c", "x"), *names))
    before = net.model()
    after, _ = prepared(before)
    assert [n.op_type for n in after.graph.node] == ["Conv"]
    same(before, after, 1e-3)


@pytest.mark.parametrize(("path", "told"), [("net.onnx", "net.onnx:"), ("", "model:")])
def test_errors_name_the_file(net: Net, path: str, told: str) -> None:
    net.output(net.conv("c", "x"))
    old = net.model(11)
    old.graph.node.append(
        onnx.helper.make_node("Upsample", ["x"], ["up"], "u", scales=[1.0, 1.0, 2.0, 2.0])
    )
    with raises(ModelError, f"raise_opset {told} 11 13") as raised:
        prepare(Model(old, path), opset=13)
    assert raised.value.path == (path or "model")
    recursive = net.model()
    call = onnx.helper.make_node("Again", ["a"], ["b"], domain="own")
    domains = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("own", 1)]
    recursive.functions.append(
        onnx.helper.make_function("own", "Again", ["a"], ["b"], [call], domains)
    )
    recursive.graph.node.append(onnx.helper.make_node("Again", ["x"], ["z"], "again", domain="own"))
    recursive.opset_import.append(domains[1])
    with raises(ModelError, f"_inline {told}") as inlined:
        prepare(Model(recursive, path), opset=13)
    assert inlined.value.path == (path or "model")


@pytest.mark.parametrize(
    ("between", "found"), [("Transpose", True), ("Reshape", True), ("MaxPool", False)]
)
def test_the_dfl_behind_operators_that_only_move_values(
    net: Net, between: str, found: bool
) -> None:
    """The mean over the bins may stand behind a Transpose or Reshape of the Softmax; one of maxima is none."""
    soft = net.op("Softmax", "soft", net.conv("box", "x", cout=8), axis=1)
    if between == "Transpose":
        moved = net.op("Transpose", "moved", soft, perm=[0, 1, 3, 2])
    elif between == "Reshape":
        moved = net.op("Reshape", "moved", soft, net.const("shape", [1, 8, 64, 1], np.int64))
    else:
        moved = net.op("MaxPool", "moved", soft, kernel_shape=[2, 2])
    net.output(net.op("Conv", "mean", moved, net.const("bins", np.arange(8).reshape(1, 8, 1, 1))))
    head = find_head(net.index())
    assert [net.nodes[i].name for i in head.dfl] == (["mean"] if found else [])


@pytest.mark.parametrize(
    ("perm", "boxes"),
    [
        ([0, 1, 3, 2], {"box"}),
        ([0, 2, 3, 1], {"box", "cls"}),
        (None, {"box", "cls"}),
    ],
)
def test_channels_are_followed_while_they_stay_axis_1(
    perm: list[int] | None, boxes: set[str]
) -> None:
    """Behind a Transpose that moves the channels, a Slice of axis 1 cuts rows: they come from both convolutions."""
    net = Net(side=16)
    joined = net.op(
        "Concat", "join", net.conv("box", "x", cout=8), net.conv("cls", "x", cout=8), axis=1
    )
    turned = net.op("Transpose", "turned", joined, **({} if perm is None else {"perm": perm}))
    values = {"starts": [0], "ends": [8], "axes": [1]}
    cut = net.op("Slice", "cut", turned, *(net.const(k, v, np.int64) for k, v in values.items()))
    soft = net.op("Softmax", "soft", cut, axis=1)
    net.output(net.op("Conv", "mean", soft, net.const("bins", np.arange(8).reshape(1, 8, 1, 1))))
    assert {net.nodes[i].name for i in find_head(net.index()).boxes} == boxes


def test_data_and_percentiles(net: Net) -> None:
    with pytest.raises(DataError, match="no calibration data"):
        qdqtool.insert(one_layer())
    with pytest.raises(DataError, match=r"\[1, 3, 8, 8\].*takes"):
        qdqtool.insert(one_layer(), images(2, 3))
    net.output(net.conv("d", net.op("Relu", "r", net.conv("c", "x"))))
    model = net.model()
    whole, largest = (
        {q.tensor: q.scale for q in insert(model, images(), predict=False, **how).quantized}
        for how in ({"method": "percentile", "percentile": 100.0}, {"method": "max"})
    )
    assert whole == largest
    with pytest.raises(QdqtoolError, match="percentile"):
        insert(model, images(), predict=False, method="percentile", percentile=100.5)


PIXELS = np.random.default_rng(3).integers(0, 256, (1, 16, 8, 8), np.uint8)


def two_layers() -> onnx.ModelProto:
    made = Net()
    made.output(made.conv("b", made.op("Relu", "relu", made.conv("a", "x"))))
    return made.model()


def inserted(kind: str, **options: Any) -> qdqtool.Insertion:
    return qdqtool.insert(two_layers(), images(), input_type=kind, predict=False, **options)


def test_int8_input_gives_the_same_outputs() -> None:
    plain, changed = inserted("float"), inserted("int8")
    check(changed.model)
    assert changed.model.graph.input[0].type.tensor_type.elem_type == TensorProto.INT8
    assert (
        len(nodes_of(changed.model, "QuantizeLinear"))
        == len(nodes_of(plain.model, "QuantizeLinear")) - 1
    )
    x = PIXELS.astype(np.float32) / 255
    scale = value_of(plain.model, "a/_input_quantizer/scale")
    codes = np.clip(np.rint(x / scale), -128, 127).astype(np.int8)
    np.testing.assert_array_equal(
        run(changed.model, {"x": codes})[0], run(plain.model, {"x": x})[0]
    )
    factor = changed.notes[-1].values["factor"]
    np.testing.assert_array_equal(
        np.clip(np.rint(PIXELS * factor), -128, 127).astype(np.int8), codes
    )


def test_uint8_input_with_mean_and_deviation_by_channel() -> None:
    made = Net(channels=3)
    made.output(made.conv("a", "x", cin=3))
    preprocess = Preprocess(mean=(0.3, 0.4, 0.5), std=(0.2, 0.25, 0.3))
    mean, std = (
        np.asarray(v, np.float32).reshape(1, -1, 1, 1) for v in (preprocess.mean, preprocess.std)
    )
    data = [{"x": (i["x"] - mean) / std} for i in images(channels=3)]
    plain = qdqtool.insert(made.model(), data, predict=False)
    changed = qdqtool.insert(
        made.model(), data, predict=False, input_type="uint8", preprocess=preprocess
    )
    check(changed.model)
    pixels = PIXELS[:, :3]
    x = (pixels.astype(np.float32) / 255 - mean) / std
    wanted, found = run(plain.model, {"x": x})[0], run(changed.model, {"x": pixels})[0]
    assert np.mean(np.abs(wanted - found) > 1e-4) < 0.02  # one code more or less at ties
    with raises(ModelError, "_by_channel 3"):
        inserted("uint8", preprocess=preprocess)


def test_inputs_of_integers() -> None:
    made = Net()
    made.output(made.op("Relu", "relu", made.conv("a", "x")), made.op("Sin", "other", "x"))
    with raises(ModelError, "_int8 other"):
        qdqtool.insert(made.model(), images(), input_type="int8", predict=False)
    changed = qdqtool.insert(made.model(), images(), input_type="uint8", predict=False)
    check(changed.model)
    found = run(changed.model, {"x": PIXELS})[1]
    np.testing.assert_allclose(found, np.sin(PIXELS.astype(np.float32) / 255), atol=1e-6)
    with raises(QdqtoolError, "check_input_type trt8.4"):
        inserted("uint8", target="trt8.4")
    with raises(ModelError, "change_inputs"):
        inserted("int8", exclude=["^a$"])


@pytest.mark.parametrize("kind", slow_after(1, ["int8", "uint8"]))
def test_the_prediction_stays(kind: str) -> None:
    data = [{"images": np.random.default_rng(0).random((1, 3, 64, 64), np.float32)}]
    plain, changed = (
        qdqtool.insert(
            detector(), data, method="max", residual="both", losses=0, input_type=i
        ).prediction
        for i in ("float", kind)
    )
    assert plain is not None and changed is not None
    before, after = plain.summary(), changed.summary()
    assert after["int8"] == before["int8"] == 27
    assert after["conversions"] == before["conversions"] - (kind == "int8")


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("mean", [0.0, 0.25])
def test_several_inputs_are_all_changed(kind: str, mean: float) -> None:
    made = Net()
    made.inputs.append(onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16, 8, 8]))
    made.output(made.conv("a", "x"), made.conv("b", "y"))
    first, second = images(), images(seed=2)
    data = [{"x": a["x"] - mean, "y": b["x"] - mean} for a, b in zip(first, second, strict=True)]
    preprocess = Preprocess(mean=(mean,) * 3)
    plain = qdqtool.insert(made.model(), data, predict=False, head="none")
    changed = qdqtool.insert(
        made.model(), data, predict=False, head="none", input_type=kind, preprocess=preprocess
    )
    check(changed.model)
    wanted = TensorProto.INT8 if kind == "int8" else TensorProto.UINT8
    assert [i.type.tensor_type.elem_type for i in changed.model.graph.input] == [wanted, wanted]
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
    for found, expected in zip(run(changed.model, fed), run(plain.model, floats), strict=True):
        assert np.mean(np.abs(found - expected) > 1e-4) < (
            0.02 if kind == "uint8" and mean else 1e-9
        )


@pytest.mark.parametrize("mean", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("target", ["trt8.5", "trt10"])
def test_inputs_of_a_float16_model(target: str, kind: str, mean: float) -> None:
    """Its input becomes integers too; the Cast to float that widening puts there (8.5) is the one Cast or goes."""
    model, preprocess = in_half(two_layers()), Preprocess(mean=(mean,) * 3)
    data = [{"x": (i["x"] - mean).astype(np.float16)} for i in images()]
    plain = qdqtool.insert(model, data, predict=False, preprocess=preprocess, target=target)
    changed = qdqtool.insert(
        model, data, predict=False, preprocess=preprocess, target=target, input_type=kind
    )
    check(changed.model)
    wanted_type = TensorProto.INT8 if kind == "int8" else TensorProto.UINT8
    assert changed.model.graph.input[0].type.tensor_type.elem_type == wanted_type
    casts = [n for n in nodes_of(changed.model, "Cast") if n.input[0] == "x"]
    assert len(casts) == (kind == "uint8")
    x = (PIXELS.astype(np.float32) / 255 - mean).astype(np.float16)
    scale = value_of(plain.model, "a/_input_quantizer/scale")
    codes = np.clip(np.rint(x.astype(np.float32) / scale), -128, 127).astype(np.int8)
    wanted = run(plain.model, {"x": x})[0].astype(np.float32)
    found = run(changed.model, {"x": codes if kind == "int8" else PIXELS})[0].astype(np.float32)
    # A float16 pixel is off by up to a half of a thousandth, and 10 divides in float16: one code more or less at ties.
    exact = kind == "int8" and target == "trt8.5"
    assert np.mean(np.abs(wanted - found) > (0.0 if exact else 0.01)) < (1e-9 if exact else 0.1)


@pytest.mark.parametrize(
    ("low", "high", "good"),
    [(0.0, 1.0, True), (0.2, 0.9, True), (-1.0, 1.0, False), (0, 255, False)],
)
def test_arrays_that_cannot_be_pixels_are_refused(low: float, high: float, good: bool) -> None:
    data = [{"x": np.linspace(low, high, 1024, dtype=np.float32).reshape(1, 16, 8, 8)}]
    if good:
        made = qdqtool.insert(two_layers(), data, input_type="uint8", predict=False)
        assert made.notes[-1].remark is Remark.FEED_UINT8_SCALED
        return
    with raises(ModelError, f"check_pixels {low:g} {high:g} 'x' `scale`"):
        qdqtool.insert(two_layers(), data, input_type="uint8", predict=False)
    scaled = Preprocess(scale=1.0) if high > 1 else Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3)
    assert qdqtool.insert(two_layers(), data, input_type="uint8", predict=False, preprocess=scaled)
    assert qdqtool.insert(two_layers(), data, input_type="int8", predict=False)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *(
            ({name: "kl"}, f"concern.<locals>.init `{name}='kl'`:")
            for name in ("head", "residual", "weights", "high_precision", "method", "input_type")
        ),
        ({"target": "trt7"}, "target_named 'trt7'"),
        ({"method_for": [("zzz", "max")]}, "MethodChoice.check `method_for` zzz=max"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], told: str) -> None:
    refused(QdqtoolError, told, qdqtool.insert, one_layer(), images(), **options)


def test_defaults_are_those_of_the_command_line() -> None:
    """As ``qdqtool insert --help`` says them; losses apart, which the command measures on two samples."""
    defaults = {
        n: p.default
        for n, p in inspect.signature(qdqtool.insert).parameters.items()
        if n != "model"
    }
    assert defaults == {
        "data": None,
        "method": "focus",
        "method_for": (),
        "percentile": 99.99,
        "max_images": 512,
        "preprocess": None,
        "size": None,
        "calib_cache": None,
        "overwrite_cache": False,
        "calib_table": None,
        "target": "trt10",
        "head": "box",
        "residual": "auto",
        "attention": "float",
        "smooth": None,
        "unify": True,
        "exclude": (),
        "include": (),
        "exclude_op": (),
        "weights": "float",
        "high_precision": None,
        "input_type": "float",
        "losses": 0,
        "predict": True,
        "progress": False,
        "cluster": None,
        "mixed_cpus": False,
    }
    shown = {p.name: p.default for p in command.params if isinstance(p.default, str | float | int)}
    same = {"method", "percentile", "max_images", "head", "residual", "weights", "input_type"}
    assert {n: defaults[n] for n in same} == {n: shown[n] for n in same}


@pytest.mark.parametrize("named", [True, False])
def test_refusals_name_the_file(net: Net, named: bool, tmp_path: Path) -> None:
    def given(model: onnx.ModelProto) -> onnx.ModelProto | Path:
        onnx.save(model, tmp_path / "m.onnx")
        return tmp_path / "m.onnx" if named else model

    name = str(tmp_path / "m.onnx") if named else "model"
    done = qdqtool.insert(one_layer(), images(), predict=False).model
    refused(ModelError, f"_copied {name}: Q/DQ", qdqtool.insert, given(done), images())
    torn = one_layer()
    torn.graph.output.add(name="lost")  # unlike one that is stored, in whatever form
    refused(ModelError, f"_copied {name}: lost", qdqtool.insert, given(torn), images())
    net.output(net.conv("c", net.conv("b", net.conv("a", "x"))))
    with pytest.raises(left_float.NothingToQuantize) as error:
        qdqtool.insert(given(net.model()), images(), exclude=["a", "b|c"])
    assert (error.value.path, error.value.count) == (name, 2)
    assert error.value.refusal == left_float.Excluded(left_float.PLACEMENT, "", "exclude", "b|c")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_powers_are_told_of_what_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def insert(method: str) -> qdqtool.Insertion:
        return qdqtool.insert(one_layer(), images(), method=method, predict=False)

    assert insert("max").calibration["powers"] == {} and insert("mse").calibration["powers"] == {
        "x": 2.0
    }
    chosen = lambda *a: (replace(choose_scale(*a)[0], power=2.34567), [])  # noqa: E731
    monkeypatch.setattr("qdqtool.insertion.api.choose_scale", chosen)
    assert insert("mse").calibration["powers"] == {"x": 2.35}


def test_a_table_has_no_samples_to_measure_losses_on(tmp_path: Path) -> None:
    first = qdqtool.insert(one_layer(), images(), predict=False, losses=1)
    assert (
        first.losses is not None
        and qdqtool.insert(one_layer(), images(), predict=False).losses is None
    )
    write_table(first, tmp_path / "t")
    second = qdqtool.insert(one_layer(), calib_table=tmp_path / "t", losses=1)
    assert second.losses is None and second.calibration == {
        "table": str(tmp_path / "t"),
        "images": 0,
        "methods": {"table": 1},
        "powers": {},
    }


@pytest.mark.parametrize(
    ("target", "weights", "warned"),
    [
        ("trt8.0", "int8", True),
        ("trt8.0", "float", False),
        ("trt10", "int8", False),
    ],
)
def test_a_target_that_cannot_read_int8_weights_is_warned_of(
    target: str, weights: str, warned: bool
) -> None:
    result = qdqtool.insert(one_layer(), images(), target=target, weights=weights, predict=False)
    assert remarks(result.warnings).count(Remark.INT8_WEIGHTS_UNREAD) == warned
