import runpy
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import calibration
import qdqtool
from calibration.cache import read_tensorrt_cache
from calibration.runner import Mismatch
from qdqtool.base.notes import Remark, remarks
from qdqtool.commands.demo_run import write_images, yolov8n
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.explain.left_float import PLACEMENT, FloatForAccuracy, SkippedNode
from qdqtool.insertion.inputs import write_table
from qdqtool.insertion.losses import Losses
from qdqtool.insertion.placement import float_nodes
from qdqtool.insertion.result import Insertion
from qdqtool.insertion.scales import GroupScale, Member, ScaleGroup
from qdqtool.model.graph import Model
from qdqtool.model.heads import find_head
from qdqtool.types import ModelInfo, Prediction, QuantizedTensor
from tests.indexing import indexed
from tests.insertion.nets import Net, check, copied, detector, images, run
from tests.raising import raises
from tests.slow import slow_after

SIZE = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images")
    write_images(path, 6, SIZE)
    return path


def small() -> onnx.ModelProto:
    """Two convolutions behind an image of three channels."""
    net = Net(3, SIZE)
    net.output(net.op("Softmax", "end", net.conv("b", net.op("Relu", "r", net.conv("a", "x", 3)))))
    return net.model()


def one_layer(**attributes: object) -> onnx.ModelProto:
    net = Net(**attributes)  # type: ignore[arg-type]
    net.output(net.op("Relu", "r", net.conv("c", "x")))
    return net.model()


def test_yolov8_end_to_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole one; the others are of :func:`detector`, the half of it.

    It is indexed when it is read; no edit indexes it again, nor does a prediction of it. The rest are copies without
    weights: one for each way to place, and one without quantizers, to find the head.
    """
    yolo = yolov8n(SIZE, classes=8)
    made = indexed(monkeypatch)
    inserted = qdqtool.insert(yolo, folder)
    assert made == {"_load": 1, "sketch": 2, "_float_network": 1}
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
    assert inserted.prediction is not None
    summary = inserted.prediction.summary()
    assert (summary["int8"], summary["int8_to_int8"]) == (60, 54)
    assert inserted.prediction.conversion_nodes == ["/model.0/conv/_input_quantizer/QuantizeLinear"]


@pytest.mark.parametrize(
    "target", slow_after(1, ["trt8.4", "trt8.0", "trt11", "trt8.6", "trt10", "rtx1.7"])
)
def test_every_target_runs_all_but_the_head_in_int8(target: str) -> None:
    result = qdqtool.insert(detector(), images(1, 3, SIZE, "images"), target=target, method="max")
    assert result.prediction is not None
    assert result.prediction.target == target
    assert result.prediction.summary()["int8"] == 27


def test_what_is_given_is_not_changed_and_gives_the_same(folder: Path) -> None:
    given = residual_chain(True)
    before = given.SerializeToString(deterministic=True)
    qdqtool.insert(given, images(1), method="max", predict=False, weights="int8")
    qdqtool.insert(Model(given), images(1), method="max", predict=False)
    assert given.SerializeToString(deterministic=True) == before
    model = small()
    one, two = (qdqtool.insert(model, folder, predict=False).model for _ in range(2))
    assert one.SerializeToString(deterministic=True) == two.SerializeToString(deterministic=True)
    result = qdqtool.insert(
        small(), folder, method="percentile", method_for=[("^x$", "max")], predict=False
    )
    methods = {q.tensor: q.method for q in result.activations}
    assert methods.pop("x") == "max"
    assert set(methods.values()) == {"percentile"}
    assert result.calibration["methods"] == {"max": 1, "percentile": len(methods)}
    result = qdqtool.insert(one_layer(batch=4), images(6), predict=False)
    assert result.calibration["images"] == 6


@pytest.mark.parametrize("targets", [("trt10", "trt11"), ("trt11", "trt10"), ("trt8.5", "trt11")])
def test_a_cache_is_reused_for_another_target_whatever_was_prepared(
    targets: tuple[str, str], tmp_path: Path
) -> None:
    """Weights computed from constants and a Sum are rewritten for each of them, and that changes no tensor."""
    net = Net()
    x = net.op("Sum", "sum", net.conv("a", "x"), "x")
    turned = net.op(
        "Transpose", "turned", net.const("w", np.full((16, 16, 1, 1), 0.5)), perm=[1, 0, 2, 3]
    )
    net.output(net.op("Conv", "b", x, turned))
    path, cache = tmp_path / "model.onnx", tmp_path / "cache.npz"
    onnx.save(net.model(opset=13), path)
    for target in targets:
        found = qdqtool.insert(path, images(2), target=target, calib_cache=cache, predict=False)
        assert {Remark.SUMS_AS_ADDS(count=1), Remark.WEIGHTS_COMPUTED(count=1)} <= set(found.notes)
    assert Remark.REUSED in remarks(found.calibration["notes"])
    net.initializers[-1].CopyFrom(
        onnx.numpy_helper.from_array(np.full((16, 16, 1, 1), 0.75, np.float32), "w")
    )
    onnx.save(net.model(opset=13), path)
    with raises(QdqtoolError, "_Job._from_cache overwrite_cache"):
        qdqtool.insert(path, images(2), target=targets[0], calib_cache=cache, predict=False)


def test_a_cache_is_reused_for_another_method(folder: Path, tmp_path: Path) -> None:
    cache, path = tmp_path / "cache.npz", tmp_path / "model.onnx"
    onnx.save(small(), path)
    plain = qdqtool.insert(path, folder, method="percentile", predict=False)
    qdqtool.insert(path, folder, calib_cache=cache, predict=False)
    again = qdqtool.insert(path, folder, method="percentile", calib_cache=cache, predict=False)
    assert remarks(again.calibration["notes"]) == [Remark.REUSED]
    assert [q.scale for q in again.quantized] == [q.scale for q in plain.quantized]
    # Another model must not take these ranges, not even one that differs in a prepared weight alone.
    other = small()
    other.graph.initializer[0].raw_data = bytes(len(other.graph.initializer[0].raw_data))
    onnx.save(other, path)
    changed = qdqtool.insert(
        path, folder, method="percentile", calib_cache=cache, overwrite_cache=True, predict=False
    )
    assert changed.calibration["notes"] == [Remark.NOT_USED(cache=cache, why=Mismatch.MODEL)]


def test_a_tensorrt_table_replaces_calibration(folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "calib.table"
    first = qdqtool.insert(small(), folder, predict=False)
    write_table(first, table)
    assert read_tensorrt_cache(table)["x"] == pytest.approx(first.activations[0].scale)
    second = qdqtool.insert(small(), calib_table=table, predict=False)
    assert [q.scale for q in second.activations] == [q.scale for q in first.activations]


def test_dynamic_batch_and_size(folder: Path) -> None:
    model = copied(detector())
    dims = model.graph.input[0].type.tensor_type.shape.dim
    dims[0].dim_param, dims[2].dim_param, dims[3].dim_param = "batch", "height", "width"
    del model.graph.value_info[:]
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    output = model.graph.output[0].type.tensor_type.shape
    for name in ("batch", "channels", "anchors"):
        output.dim.add(dim_param=name)
    # Its imgsz metadata say 64
    result = qdqtool.insert(model, folder, method="max", residual="both", losses=0, predict=False)
    kept = result.model.graph.input[0].type.tensor_type.shape.dim
    assert [d.dim_param for d in kept] == ["batch", "", "height", "width"]
    assert len(result.weights) == 27
    run(result.model, images(1, 3, 64, "images")[0])


def test_external_weights(tmp_path: Path) -> None:
    path = tmp_path / "in" / "model.onnx"
    path.parent.mkdir()
    model = one_layer()
    onnx.save(one_layer(), path, save_as_external_data=True, location="w.bin", size_threshold=16)
    result = qdqtool.insert(path, images(), predict=False)
    out = tmp_path / "q.onnx"
    result.save(out)
    np.testing.assert_allclose(
        run(onnx.load(out), images(1)[0])[0], run(model, images(1)[0])[0], atol=0.05
    )
    (path.parent / "w.bin").unlink()
    with pytest.raises(ModelError, match="missing"):
        qdqtool.insert(path, images())


def residual_chain(activation: bool) -> onnx.ModelProto:
    net = Net()
    tensor = net.op("Relu", "stem", net.conv("c0", "x"))
    for i in range(3):
        inner = net.conv(f"b{i}", net.op("Relu", f"r{i}", net.conv(f"a{i}", tensor)))
        if activation:
            inner = net.silu(f"s{i}", inner)
        tensor = net.op("Add", f"add{i}", inner, tensor)
        if not activation:
            tensor = net.op("Relu", f"ra{i}", tensor)
    net.output(net.conv("last", tensor))
    return net.model()


def test_residuals() -> None:
    counts = {}
    for choice in ("auto", "skip", "both", "none"):
        prediction = qdqtool.insert(residual_chain(True), images(2), residual=choice).prediction
        assert prediction is not None
        counts[choice] = prediction.conversions or 0
    assert counts["auto"] == min(counts.values())
    assert counts["auto"] < counts["none"]
    prediction = qdqtool.insert(residual_chain(False), images(2)).prediction
    assert prediction is not None
    summary = prediction.summary()
    assert (summary["int8"], summary["int8_to_int8"]) == (8, 7)
    assert prediction.conversions == 1


def test_a_prediction_that_fails_costs_nobody_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object, **kwargs: object) -> None:
        raise QdqtoolError("pass Nonsense failed")

    monkeypatch.setattr("qdqtool.prediction.predict", failing)
    result = qdqtool.insert(one_layer(), images())
    assert result.prediction is None
    assert result.warnings == [Remark.NOT_PREDICTED(error="pass Nonsense failed")]
    check(result.model)


def test_saving(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(one_layer(), path)
    before = path.read_bytes()
    result = qdqtool.insert(path, images(), predict=False)
    with pytest.raises(ModelError, match="is the input"):
        result.save(path)
    assert path.read_bytes() == before
    with pytest.raises(QdqtoolError, match="does not exist"):
        result.save(tmp_path / "no" / "q.onnx")
    made = insertion()
    made.save(tmp_path / "a.onnx")
    assert made.output == str(tmp_path / "a.onnx") and onnx.load(made.output) == made.model
    made.prediction = Prediction(ModelInfo("", "", 17, 1), "trt8.5")
    made.save(tmp_path / "b.onnx")
    assert made.prediction.model.path == made.output == str(tmp_path / "b.onnx")


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quantize_yolov8.py"


def run_example(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return caught.value.code


def test_the_example_quantizes_a_yolov8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(detector(), tmp_path / "m.onnx")
    (tmp_path / "images").mkdir()
    write_images(tmp_path / "images", 3, 64)
    assert (
        run_example(monkeypatch, tmp_path / "m.onnx", tmp_path / "images", tmp_path / "q.onnx") == 0
    )
    check(onnx.load(tmp_path / "q.onnx"))
    assert "27 of 31 convolutions INT8, 1 conversions" in capsys.readouterr().out
    code = run_example(monkeypatch, tmp_path / "no.onnx", tmp_path / "images", tmp_path / "q.onnx")
    assert "no such file" in str(code)


def insertion() -> Insertion:
    net = Net()
    net.output(net.conv("c", "x"))
    quantized = [
        QuantizedTensor("x", 0.5, "max", 0, "q"),
        QuantizedTensor("w", [0.5, 1.0], "weights-max", None, "p"),
    ]
    group = GroupScale(
        ScaleGroup(("x",), ("x", "y"), ("y",)), 0.5, "max", (Member("y", 63.5, -0.25),)
    )
    return Insertion(
        net.model(),
        quantized,
        [SkippedNode(FloatForAccuracy(PLACEMENT, "n"))],
        {"images": 2},
        [group],
    )


@pytest.mark.parametrize(
    ("target", "predict", "wanted"),
    [
        ("trt10", False, []),
        ("rtx1.7", False, ["8.6"]),
        ("rtx1.7", True, ["8.6"]),
    ],
)
def test_the_gpus_are_the_same_whether_it_is_predicted_or_not(
    target: str, predict: bool, wanted: list[str]
) -> None:
    net = Net()
    net.output(net.conv("c", "x"))
    made = qdqtool.insert(
        net.model(), images(1), target=target, predict=predict, method="max", losses=0
    )
    assert (
        made.as_json()["compute_capabilities"] == wanted
        and (made.prediction is not None) is predict
    )


def test_json_of_what_was_not_predicted_or_measured_and_of_what_was() -> None:
    made = insertion()
    data = made.as_json()
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
    made.losses, made.prediction = (
        Losses(0.5, [], 1, 2),
        Prediction(ModelInfo("", "", 17, 1), "trt8.5"),
    )
    data = made.as_json()
    assert data["losses"] == {"error": 0.5, "samples": 1, "tried": 2, "tensors": []}
    assert data["prediction"] == made.prediction.summary()
    assert [q.tensor for q in made.activations] == ["x"] and [q.tensor for q in made.weights] == [
        "w"
    ]


BOXES = {f"/model.22/cv2.{i}/cv2.{i}.2/Conv" for i in range(3)}
CLASSES = {f"/model.22/cv3.{i}/cv3.{i}.2/Conv" for i in range(3)}
DFL = {"/model.22/dfl/conv/Conv"}


def names(model: Model, indices: object) -> set[str]:
    return {model.nodes[i].name for i in indices}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("none", set()), ("box", BOXES | DFL), ("float", BOXES | DFL | CLASSES)],
)
def test_choices(choice: str, expected: set[str]) -> None:
    model = Model(detector())
    assert names(model, float_nodes(model, choice)) == expected


def head(order: str, product: str = "Conv") -> Model:
    """One level of a head, box branch first or class branch first."""
    net = Net()
    box, cls = net.conv("box", "x", 16, 32, 1), net.conv("cls", "x", 16, 4, 1)
    parts = [box, cls] if order == "box first" else [cls, box]
    joined = net.op("Concat", "cat", *parts, axis=1)
    flat = net.op("Reshape", "flat", joined, net.const("flat_shape", [1, 36, 64], np.int64))
    sizes = net.const("sizes", [32, 4] if order == "box first" else [4, 32], np.int64)
    halves = net.op("Split", "split", flat, sizes, outputs=2, axis=1)
    boxes, scores = halves if order == "box first" else halves[::-1]
    bins = net.op("Reshape", "bins", boxes, net.const("bins_shape", [1, 4, 8, 64], np.int64))
    if product == "Conv":
        soft = net.op("Softmax", "soft", net.op("Transpose", "t", bins, perm=[0, 2, 1, 3]), axis=1)
        mean = net.op(
            "Conv", "dfl", soft, net.const("dfl.weight", np.arange(8).reshape(1, 8, 1, 1))
        )
    else:
        soft = net.op("Softmax", "soft", net.op("Transpose", "t", bins, perm=[0, 1, 3, 2]), axis=3)
        mean = net.op("MatMul", "dfl", soft, net.const("dfl.weight", np.arange(8).reshape(8, 1)))
    net.output(mean, net.op("Sigmoid", "sig", scores))
    return net.index()


@pytest.mark.parametrize("order", ["box first", "class first"])
@pytest.mark.parametrize("product", ["Conv", "MatMul"])
def test_box_channels_are_followed_through_split_and_concat(order: str, product: str) -> None:
    model = head(order, product)
    assert set(names(model, float_nodes(model, "box"))) == {"box", "dfl"}
    assert set(names(model, float_nodes(model, "float"))) == {"box", "cls", "dfl"}


def test_what_is_no_dfl_and_no_detector(net: Net) -> None:
    flat = net.op("Flatten", "flat", net.op("GlobalAveragePool", "gap", net.conv("c", "x")))
    fc = net.op("Gemm", "fc", flat, net.const("w", np.ones((16, 10))))
    net.output(net.op("Softmax", "soft", fc))
    model = net.index()
    assert float_nodes(model, "box") == {}
    assert set(names(model, float_nodes(model, "float"))) == {"fc"}
    net = Net()
    flat = net.op("Flatten", "flat", net.op("GlobalAveragePool", "gap", net.conv("c", "x")))
    net.output(
        *(net.op("Gemm", f"fc{i}", flat, net.const(f"w{i}", np.ones((16, 10)))) for i in range(2))
    )
    assert float_nodes(net.index(), "box") == {}
    net = Net()
    net.output(net.op("Relu", "r", net.conv("c", "x")))
    assert find_head(net.index()).finals == set()


@pytest.mark.parametrize(
    ("ends", "expected"), [(1, set()), (2, {"end0", "end1"}), (3, {"end0", "end1", "end2"})]
)
def test_other_detectors_keep_their_last_convolutions_float(
    net: Net, ends: int, expected: set[str]
) -> None:
    stem = net.op("Relu", "r", net.conv("stem", "x"))
    net.output(*(net.conv(f"end{i}", stem, kernel=1) for i in range(ends)))
    model = net.index()
    assert names(model, float_nodes(model, "box")) == expected
    assert float_nodes(model, "none") == {}
