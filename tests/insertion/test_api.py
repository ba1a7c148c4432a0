import runpy
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import calibration
import qdqtool
from calibration.runner import CacheMismatch
from qdqtool.demo.images import write_images
from qdqtool.demo.network import yolov8n
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.formats import insertion_text
from qdqtool.insertion.losses import ActivationLosses
from qdqtool.insertion.placement import find_head_float_nodes
from qdqtool.insertion.rewrite import QuantizedTensor
from qdqtool.insertion.scales import GroupMember, GroupScale, ScaleGroup
from qdqtool.ir.graph import Model
from qdqtool.ir.input_shapes import ModelInfo
from qdqtool.reasons.placement import PLACEMENT, FloatNode, SkipCause, SkippedNode
from tests.indexing import indexed
from tests.insertion.nets import (
    Net,
    assert_same_outputs,
    check,
    copy_model,
    detector,
    images,
    one_layer,
    require_prediction,
    run,
    set_value,
)
from tests.notes import note, note_codes
from tests.slow import slow_after

SIZE = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images")
    write_images(path, 6, SIZE)
    return path


def small() -> onnx.ModelProto:
    net = Net(3, SIZE)
    last = net.conv("b", net.op("Relu", "r", net.conv("a", "x", 3)))
    return net.output(net.op("Softmax", "end", last)).model()


def test_insert_yolov8_end_to_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yolo, indexings = yolov8n(SIZE, classes=8), indexed(monkeypatch)
    inserted = qdqtool.insert(yolo, folder)
    # The model, the copy to edit, and copies without weights: one for each of two placements, and
    # one without quantizers.
    assert len(indexings) == 5
    check(inserted.model)
    assert len(inserted.weights) == 60
    assert {s.node for s in inserted.skipped} == {
        *(f"/model.22/cv2.{i}/cv2.{i}.2/Conv" for i in range(3)),
        "/model.22/dfl/conv/Conv",
    }
    sample = next(
        iter(calibration.open_data(folder, [calibration.InputSpec("images", (1, 3, SIZE, SIZE))]))
    )
    before, after = run(yolo, sample)[0], run(inserted.model, sample)[0]
    assert np.abs(after - before)[:, :4].mean() < 1.5  # pixels, of 64
    assert np.corrcoef(after[:, 4:].ravel(), before[:, 4:].ravel())[0, 1] > 0.98
    prediction = require_prediction(inserted)
    summary = prediction.summary()
    assert (summary["int8"], summary["int8_to_int8"]) == (60, 54)
    assert prediction.conversion_nodes == ["/model.0/conv/_input_quantizer/QuantizeLinear"]


@pytest.mark.parametrize(
    "target", slow_after(1, ["trt8.4", "trt8.0", "trt11", "trt8.6", "trt10", "rtx1.7"])
)
def test_insert_quantizes_all_but_box_outputs_for_every_target(target: str) -> None:
    result = qdqtool.insert(detector(), images(1, 3, SIZE, "images"), target=target, method="max")
    prediction = require_prediction(result)
    assert (prediction.target, prediction.summary()["int8"]) == (target, 27)


def test_insert_leaves_input_model_unchanged() -> None:
    model = residual_chain(True)
    before = model.SerializeToString(deterministic=True)
    qdqtool.insert(model, images(1), method="max", predict=False, weights="int8")
    qdqtool.insert(Model(model), images(1), method="max", predict=False)
    assert model.SerializeToString(deterministic=True) == before


def test_insert_is_deterministic(folder: Path) -> None:
    first, second = (qdqtool.insert(small(), folder, predict=False).model for _ in range(2))
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(
        deterministic=True
    )


def test_method_for_overrides_method(folder: Path) -> None:
    result = qdqtool.insert(
        small(), folder, method="percentile", method_for=[("^x$", "max")], predict=False
    )
    methods = {q.tensor: q.method for q in result.activations}
    assert methods.pop("x") == "max" and set(methods.values()) == {"percentile"}
    assert result.calibration["methods"] == {"max": 1, "percentile": len(methods)}


@pytest.mark.parametrize("targets", [("trt10", "trt11"), ("trt11", "trt10"), ("trt8.5", "trt11")])
def test_cache_is_reused_for_another_target(
    targets: tuple[str, str], tmp_path: Path, net: Net
) -> None:
    """Preparation rewrites computed weights and a Sum alike for both targets."""
    turned = net.op(
        "Transpose", "turned", net.const("w", np.full((16, 16, 1, 1), 0.5)), perm=[1, 0, 2, 3]
    )
    net.output(net.op("Conv", "b", net.op("Sum", "sum", net.conv("a", "x"), "x"), turned))
    path, cache = tmp_path / "model.onnx", tmp_path / "cache.npz"
    onnx.save(net.model(opset=13), path)
    for target in targets:
        result = qdqtool.insert(path, images(2), target=target, calib_cache=cache, predict=False)
        for code in ("sums-as-adds", "weights-computed"):
            assert note(code, count=1) in result.notes
    assert "reused" in note_codes(result.calibration["notes"])
    changed = net.model(opset=13)
    set_value(changed, "w", np.full((16, 16, 1, 1), 0.75, np.float32))
    onnx.save(changed, path)
    with pytest.raises(QdqtoolError, match="overwrite_cache"):
        qdqtool.insert(path, images(2), target=targets[0], calib_cache=cache, predict=False)
    assert qdqtool.insert(
        path, images(2), calib_cache=cache, overwrite_cache=True, predict=False
    ).calibration["notes"] == [note("not-used", cache=cache, why=CacheMismatch.MODEL)]


def test_insert_keeps_dynamic_batch_and_size(folder: Path) -> None:
    model = copy_model(detector())
    dims = model.graph.input[0].type.tensor_type.shape.dim  # the metadata imgsz says 64
    dims[0].dim_param, dims[2].dim_param, dims[3].dim_param = "batch", "height", "width"
    del model.graph.value_info[:]
    sizes = ["batch", "channels", "anchors"]
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("output0", 1, sizes))
    result = qdqtool.insert(model, folder, method="max", residual="both", losses=0, predict=False)
    kept = result.model.graph.input[0].type.tensor_type.shape.dim
    assert [d.dim_param for d in kept] == ["batch", "", "height", "width"]
    assert len(result.weights) == 27
    run(result.model, images(1, 3, 64, "images")[0])


def test_insert_reads_external_weights(tmp_path: Path) -> None:
    path = tmp_path / "in" / "model.onnx"
    path.parent.mkdir()
    model = one_layer()
    onnx.save(
        copy_model(model), path, save_as_external_data=True, location="w.bin", size_threshold=16
    )
    qdqtool.insert(path, images(), predict=False).save(tmp_path / "q.onnx")
    assert_same_outputs(model, onnx.load(tmp_path / "q.onnx"), images(1)[0], atol=0.05)
    (path.parent / "w.bin").unlink()
    with pytest.raises(ModelError, match="missing") as caught:
        qdqtool.insert(path, images())
    assert caught.value.path == str(path)


def residual_chain(activation: bool) -> onnx.ModelProto:
    net = Net()
    tensor = net.op("Relu", "stem", net.conv("c0", "x"))
    for i in range(3):
        inner = net.conv(f"b{i}", net.op("Relu", f"r{i}", net.conv(f"a{i}", tensor)))
        inner = net.silu(f"s{i}", inner) if activation else inner
        tensor = net.op("Add", f"add{i}", inner, tensor)
        tensor = tensor if activation else net.op("Relu", f"ra{i}", tensor)
    return net.output(net.conv("last", tensor)).model()


def test_residual_auto_leaves_fewest_conversions() -> None:
    model = residual_chain(True)
    counts = {
        choice: require_prediction(qdqtool.insert(model, images(2), residual=choice)).conversions
        for choice in ("auto", "skip", "both", "none")
    }
    assert counts["auto"] == min(counts.values()) < counts["none"]


def test_residual_add_of_bare_convolution_needs_no_conversion() -> None:
    summary = require_prediction(qdqtool.insert(residual_chain(False), images(2))).summary()
    assert [summary[k] for k in ("int8", "int8_to_int8", "conversions")] == [8, 7, 1]


def test_insert_returns_model_when_prediction_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object, **kwargs: object) -> None:
        raise QdqtoolError("pass Nonsense failed")

    monkeypatch.setattr("qdqtool.prediction.predict", failing)
    result = qdqtool.insert(one_layer(), images())
    assert result.prediction is None
    (warning,) = (w for w in result.warnings if w.code != "few-images")
    assert warning == note("not-predicted", error="pass Nonsense failed")
    check(result.model)


def test_save_sets_output_and_path_of_prediction(tmp_path: Path) -> None:
    result = insertion()
    result.save(tmp_path / "a.onnx")
    assert result.output == str(tmp_path / "a.onnx") and onnx.load(result.output) == result.model
    result.prediction = qdqtool.Prediction(ModelInfo("", "", 17, 1), "trt8.5")
    result.save(tmp_path / "b.onnx")
    assert result.prediction.model.path == result.output == str(tmp_path / "b.onnx")


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quantize_yolov8.py"


def run_example(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return caught.value.code


def test_example_quantizes_yolov8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(detector(), tmp_path / "m.onnx")
    (tmp_path / "images").mkdir()
    write_images(tmp_path / "images", 3, 64)
    assert (
        run_example(monkeypatch, tmp_path / "m.onnx", tmp_path / "images", tmp_path / "q.onnx") == 0
    )
    check(onnx.load(tmp_path / "q.onnx"))
    assert "27 of 31 convolutions INT8, remaining conversions: 1" in capsys.readouterr().out
    code = run_example(monkeypatch, tmp_path / "no.onnx", tmp_path / "images", tmp_path / "q.onnx")
    assert "no such file" in str(code)


def insertion() -> qdqtool.Insertion:
    quantized = [
        QuantizedTensor("x", 0.5, "max", 0, "q"),
        QuantizedTensor("w", [0.5, 1.0], "weights-max", None, "p"),
    ]
    return qdqtool.Insertion(
        one_layer(),
        quantized,
        [SkippedNode(FloatNode(PLACEMENT, "n", SkipCause.ACCURACY))],
        {"images": 2},
        [
            GroupScale(
                ScaleGroup(("x",), ("x", "y"), ("y",)), 0.5, "max", (GroupMember("y", 63.5, -0.25),)
            )
        ],
    )


@pytest.mark.parametrize(
    ("target", "predict", "capabilities"),
    [
        ("trt10", False, []),
        ("rtx1.7", False, ["8.6"]),
        ("rtx1.7", True, ["8.6"]),
    ],
)
def test_json_compute_capabilities_do_not_need_prediction(
    target: str, predict: bool, capabilities: list[str]
) -> None:
    result = qdqtool.insert(
        one_layer(), images(1), target=target, predict=predict, method="max", losses=0
    )
    assert result.as_json()["compute_capabilities"] == capabilities
    assert (result.prediction is not None) is predict


def test_json_of_losses_groups_and_prediction() -> None:
    result = insertion()
    data = result.as_json()
    assert (data["losses"], data["prediction"], data["output"], data["notes"]) == (
        None,
        None,
        "",
        [],
    )
    assert data["groups"] == [
        {
            "group": 0,
            "scale": 0.5,
            "method": "max",
            "quantized": ["x"],
            "members": [{"tensor": "y", "amax": 63.5, "bits_lost": -0.25}],
        }
    ]
    result.losses = ActivationLosses(0.5, [], 1, 2)
    result.prediction = qdqtool.Prediction(ModelInfo("", "", 17, 1), "trt8.5")
    data = result.as_json()
    assert data["losses"] == {
        "error": 0.5,
        "samples": 1,
        "tried": 2,
        "trial_samples": 0,
        "at_objects": False,
        "uncovered": [],
        "tensors": [],
    }
    assert data["prediction"] == result.prediction.summary()


def test_shared_range_below_that_of_a_tensor_loses_no_bits() -> None:
    text = str(insertion_text.render(insertion(), 200, everything=True))
    assert "; less than 0.1 bit of precision lost\n" in text and "bits lost: y 0.0\n" in text


BOXES = {f"/model.22/cv2.{i}/cv2.{i}.2/Conv" for i in range(3)}
CLASSES = {f"/model.22/cv3.{i}/cv3.{i}.2/Conv" for i in range(3)}
DFL = {"/model.22/dfl/conv/Conv"}


def names(model: Model, indices: object) -> set[str]:
    return {model.nodes[i].name for i in indices}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("none", set()), ("box", BOXES | DFL), ("float", BOXES | DFL | CLASSES)],
)
def test_float_nodes_of_yolov8_head(choice: str, expected: set[str]) -> None:
    model = Model(detector())
    assert names(model, find_head_float_nodes(model, choice)) == expected


def head(order: str, product: str = "Conv") -> Model:
    net = Net()
    box, cls = net.conv("box", "x", 16, 32, 1), net.conv("cls", "x", 16, 4, 1)
    joined = net.op("Concat", "cat", *([box, cls] if order == "box first" else [cls, box]), axis=1)
    flat = net.op("Reshape", "flat", joined, net.const("flat_shape", [1, 36, 64], np.int64))
    sizes = net.const("sizes", [32, 4] if order == "box first" else [4, 32], np.int64)
    halves = net.op("Split", "split", flat, sizes, outputs=2, axis=1)
    boxes, scores = halves if order == "box first" else halves[::-1]
    bins = net.op("Reshape", "bins", boxes, net.const("bins_shape", [1, 4, 8, 64], np.int64))
    perm, axis, shape = (
        ([0, 2, 1, 3], 1, (1, 8, 1, 1)) if product == "Conv" else ([0, 1, 3, 2], 3, (8, 1))
    )
    soft = net.op("Softmax", "soft", net.op("Transpose", "t", bins, perm=perm), axis=axis)
    mean = net.op(product, "dfl", soft, net.const("dfl.weight", np.arange(8).reshape(shape)))
    return net.output(mean, net.op("Sigmoid", "sig", scores)).index()


@pytest.mark.parametrize("order", ["box first", "class first"])
@pytest.mark.parametrize("product", ["Conv", "MatMul"])
def test_float_nodes_follow_box_channels_through_split_and_concat(order: str, product: str) -> None:
    model = head(order, product)
    assert names(model, find_head_float_nodes(model, "box")) == {"box", "dfl"}
    assert names(model, find_head_float_nodes(model, "float")) == {"box", "cls", "dfl"}


@pytest.mark.parametrize("outputs", [1, 2])
def test_float_nodes_of_classifier(net: Net, outputs: int) -> None:
    flat = net.op("Flatten", "flat", net.op("GlobalAveragePool", "gap", net.conv("c", "x")))
    for i in range(outputs):
        scores = net.op("Gemm", f"fc{i}", flat, net.const(f"w{i}", np.ones((16, 10))))
        net.output(net.op("Softmax", f"soft{i}", scores))
    model = net.index()
    assert find_head_float_nodes(model, "box") == {}
    assert names(model, find_head_float_nodes(model, "float")) == {f"fc{i}" for i in range(outputs)}


@pytest.mark.parametrize(
    ("ends", "expected"), [(1, set()), (2, {"end0", "end1"}), (3, {"end0", "end1", "end2"})]
)
def test_float_nodes_of_detector_without_dfl(net: Net, ends: int, expected: set[str]) -> None:
    stem = net.op("Relu", "r", net.conv("stem", "x"))
    model = net.output(*(net.conv(f"end{i}", stem, kernel=1) for i in range(ends))).index()
    assert names(model, find_head_float_nodes(model, "box")) == expected
    assert find_head_float_nodes(model, "none") == {}
