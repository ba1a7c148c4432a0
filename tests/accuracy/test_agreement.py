import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

import qdqtool
from calibration import open_data
from calibration.session import input_specs
from qdqtool.accuracy.agreement import NetworkAgreement, measure_agreement
from qdqtool.accuracy.detections import (
    compute_average_precision,
    decode_detections,
    match_detections,
)
from qdqtool.accuracy.metrics import TopClassMetric, estimate_interval
from qdqtool.comparison.text import list_image_notes
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.formats.build_text import add_agreement
from qdqtool.formats.output import TextPage
from qdqtool.insertion.options import ImageOptions
from qdqtool.ir.graph import Model
from tests.calibration.nets import write_pictures
from tests.comparison.networks import quantize
from tests.errors import has
from tests.insertion.nets import Net, copy_model, detector, images, run, set_value, value_of
from tests.insertion.test_transformers import add_pairs
from tests.notes import note, note_codes
from tests.tuning.nets import open_dimensions, resnet


def agreement(reference: onnx.ModelProto, model: onnx.ModelProto, data: object) -> NetworkAgreement:
    return measure_agreement(
        Model(reference),
        Model(model),
        data,
        images=ImageOptions(),
        max_images=512,
        counterparts={},
    )


def quantized(reference: onnx.ModelProto, data: object, **options: Any) -> onnx.ModelProto:
    return qdqtool.insert(reference, data, predict=False, **options).model


def test_agreement_of_classifier_is_share_of_equal_classes() -> None:
    reference, data = resnet(), images(24, 3, 16)
    model = quantized(reference, data[:2], head="none", method="max")
    classes = [[run(m, sample)[0].argmax() for sample in data] for m in (reference, model)]
    result = agreement(reference, model, data)
    assert (result.measure.metric, result.measure.count, result.images) == (
        "top-1-agreement",
        24,
        24,
    )
    assert result.measure.value == pytest.approx(np.mean(np.equal(*classes)))


def test_agreement_of_classifier_includes_its_output_error() -> None:
    reference, data = resnet(), images(6, 3, 16)
    model = quantized(reference, data)
    pairs = [[run(m, sample)[0] for m in (reference, model)] for sample in data]
    errors = [math.sqrt(np.mean((a - b) ** 2) / a.var()) for a, b in pairs]
    measure = agreement(reference, model, data).measures[1]
    assert measure.metric == "output-agreement" and measure.low < measure.value < measure.high
    assert measure.value == pytest.approx(1 - np.mean(errors), abs=1e-4)


@pytest.mark.parametrize(
    ("equal", "count", "low", "high"), [(9, 10, 0.596, 0.982), (10, 10, 0.722, 1.0)]
)
def test_interval_of_share_is_that_of_wilson(
    equal: int, count: int, low: float, high: float
) -> None:
    evidence = [1.0] * equal + [0.0] * (count - equal)
    assert estimate_interval(TopClassMetric(("y",)), evidence) == pytest.approx(
        (low, high), abs=1e-3
    )


def sorting_detector(
    step: float | None = None, result: str = "detections = Identity (values)", rows: int = 5
) -> onnx.ModelProto:
    """Return a detector whose detections are its input: rows of two corners, score and class.

    Its TopK of the scores has no consumer. If a step is given, one Q/DQ pair with that scale
    quantizes all values. Nodes in the syntax of ONNX compute the result.
    """
    pair = "q = QuantizeLinear (rows, step, zero) values = DequantizeLinear (q, step, zero)"
    return onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        detector (float[1, {rows}, 6] rows) => (float[1, {rows}, 6] detections)
        <int64[1] start = {{4}}, int64[1] end = {{5}}, int64[1] axis = {{2}},
        int64[3] limit = {{99, 99, 99}}, float step = {{{step or 1.0}}}, int8 zero = {{0}}> {{
            {"values = Identity (rows)" if step is None else pair}
            scores = Slice (values, start, end, axis)
            flat = Squeeze (scores, axis)
            top, order = TopK <axis = 1> (flat, end)
            {result}
        }}""")


ROWS = np.array(
    [
        [10, 10, 50, 50, 0.9, 0],
        [60, 10, 90, 50, 0.8, 1],
        [10, 60, 50, 90, 0.6, 0],
        [60, 60, 90, 90, 0.1, 1],
        [0, 0, 5, 5, 0.0, 0],
    ],
    np.float32,
)[None]


@pytest.mark.parametrize(
    ("rows", "count", "codes"),
    [
        (ROWS, 9, ["few-images"]),  # three scores of .25 and more
        (np.repeat(ROWS[:, :1], 300, axis=1), 900, ["most-detections", "few-images"]),
    ],
)
def test_agreement_of_equal_detections_is_1(rows: Any, count: int, codes: list[str]) -> None:
    model = sorting_detector(rows=rows.shape[1])
    result = agreement(model, model, [{"rows": rows}] * 3)
    assert (result.measure.metric, result.measure.value) == ("agreement-map", 1.0)
    assert (result.images, result.measure.count) == (3, count)
    assert note_codes(list_image_notes(result)) == codes


@pytest.mark.parametrize("opened", [False, True])
def test_agreement_is_0_if_a_step_erases_the_scores(opened: bool) -> None:
    """With a step of 5.2, boxes remain and every score becomes 0.

    The shapes of opened models follow only from a run, as those after a TopK of a computed number.
    """
    limited = "shape = Shape (values) sides = Min (shape, limit)"
    results = [f"{limited} detections = Reshape (values, sides)"] if opened else []
    models = [sorting_detector(step, *results) for step in (None, 5.2)]
    for model in models if opened else ():
        open_dimensions(model, (0, 1, 2))
    result = agreement(*models, [{"rows": ROWS}])
    assert (result.measure.metric, result.measure.value) == ("agreement-map", 0.0)
    assert result.notes == (note("wide-interval", images=1, enough=10),)


@pytest.mark.parametrize("has_metadata", [True, False])
def test_agreement_of_unrecognized_detector_has_a_note(net: Net, has_metadata: bool) -> None:
    """Boxes and scores in separate outputs are not recognized."""
    reference, data = net.output(net.conv("conv", "x")).model(), images(2)
    if has_metadata:
        reference.metadata_props.add(key="task", value="detect")
    else:
        reference, data = copy_model(detector()), images(1, 3, 64, "images")
        parts = list(reference.graph.node.pop().input)
        del reference.graph.output[:], reference.metadata_props[:]
        reference.graph.output.extend(
            onnx.helper.make_tensor_value_info(part, 1, None) for part in parts
        )
    assert "raw-outputs-compared" in [
        note.code for note in agreement(reference, reference, data).notes
    ]


@pytest.mark.parametrize(
    ("changes", "value", "found", "extra", "below"),
    [
        # Two of three objects are found before any false detection: 67 of 101 recalls have
        # precision 1.
        ({(2, 4): 0.0}, 67 / 101, 2, 0, 0),
        # The box from x = 76 to 90 covers 14 of 30 columns of A's box, the third score is too low,
        # and A's fourth score is too low. Of three recalls, the first has precision 1, and the
        # second has 2 / 4, at 34 and 33 of 101 recalls.
        ({(1, 0): 76, (2, 4): 0.22, (3, 4): 0.3}, (34 + 33 / 2) / 101, 1, 2, 1),
    ],
    ids=["lost", "lost-moved-and-new"],
)
def test_agreement_counts_detections_at_score_025_and_iou_05(
    changes: dict[tuple[int, int], float], value: float, found: int, extra: int, below: int
) -> None:
    rows = ROWS.copy()
    for (row, column), number in changes.items():
        rows[0, row, column] = number
    model = sorting_detector(result="detections = Mul (values, mask)")
    mask = onnx.numpy_helper.from_array((rows / np.maximum(ROWS, 1e-9)).astype(np.float32), "mask")
    model.graph.initializer.append(mask)
    result = agreement(sorting_detector(), model, [{"rows": ROWS}] * 2)
    assert result.measure.value == pytest.approx(value)
    counts = {name: result.as_json()[name] for name in ("count", "found", "extra", "below")}
    assert counts == {"count": 6, "found": 2 * found, "extra": 2 * extra, "below": 2 * below}
    page = TextPage(200)
    add_agreement(page, result)
    assert ("others at scores of 0.2 to 0.25" in str(page.lines)) == bool(below)


@pytest.mark.parametrize("has_dfl", [False, True])
def test_agreement_without_any_detection_is_unknown(has_dfl: bool) -> None:
    """In the network with a DFL, Q/DQ surround the Sigmoid of the scores."""
    model, data = sorting_detector(), [{"rows": ROWS * np.float32([1, 1, 1, 1, 0, 1])}]
    if has_dfl:
        model = add_pairs(detector(), "/model.22/Sigmoid", "/model.22/Concat_5")
        data = images(1, 3, 64, "images")
    measure = agreement(model, model, data).measure
    assert (measure.metric, measure.value, measure.count) == ("agreement-map", None, 0)


def detecting_network() -> onnx.ModelProto:
    """Raise the biases of the class outputs: the random network's scores are at most .05."""
    reference = copy_model(detector())
    for node in reference.graph.node:
        if node.op_type == "Conv" and re.search(r"/cv3\.\d/cv3\.\d\.2/Conv$", node.name):
            bias = value_of(reference, node.input[2])
            set_value(reference, node.input[2], bias + np.float32(3.0))
    return reference


def segmenting_network(sign: int) -> onnx.ModelProto:
    """Return a detector with six mask coefficients and prototypes of pixels with a sign."""
    model = detecting_network()
    make, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    kernel = np.full((6, 3, 4, 4), sign, np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(kernel, "kernel"))
    (output,) = model.graph.output
    model.graph.node.extend(
        [
            make("Concat", [output.name, output.name], ["both"], axis=1),
            make("Conv", ["images", "kernel"], ["prototypes"], strides=[4, 4]),
        ]
    )
    rows = [d.dim_value for d in output.type.tensor_type.shape.dim]
    del model.graph.output[:]
    model.graph.output.extend(
        [value("both", 1, [1, 2 * rows[1], rows[2]]), value("prototypes", 1, [1, 6, 16, 16])]
    )
    return model


def test_agreement_of_segmentation_includes_masks() -> None:
    reference, data = segmenting_network(1), images(3, 3, 64, "images")
    result = agreement(reference, segmenting_network(-1), data)
    assert (result.measure.metric, result.measure.value) == ("agreement-map", 1.0)
    assert (
        result.masks is not None and result.masks.count > 0 == result.masks.value == result.lowest
    )
    assert agreement(reference, reference, data).lowest == 1.0


@pytest.mark.parametrize("task", ["segment", "pose", "obb"])
def test_agreement_notes_unmeasured_results(task: str) -> None:
    reference = copy_model(detector())
    reference.metadata_props.add(key="task", value=task)
    result = agreement(reference, reference, images(1, 3, 64, "images"))
    assert [note.code for note in result.notes] == ["boxes-only"]


def test_agreement_of_keypoints_without_metadata_is_that_of_boxes() -> None:
    """The visibility has a Sigmoid too, and its convolutions have other channels than classes."""
    reference = detecting_network()
    del reference.metadata_props[:]
    graph, make = reference.graph, onnx.helper.make_node
    branches = [n for n in graph.node if re.search(r"/cv3\.\d/cv3\.\d\.2/Conv$", n.name)]
    (output,) = graph.output
    rows, anchors = (d.dim_value for d in output.type.tensor_type.shape.dim[1:])
    for number, branch in enumerate(branches):
        kernel = np.ones((3, value_of(reference, branch.input[1]).shape[1], 1, 1), np.float32)
        graph.initializer.append(onnx.numpy_helper.from_array(kernel, f"kernel{number}"))
        graph.node.extend(
            [
                make("Conv", [branch.input[0], f"kernel{number}"], [f"map{number}"]),
                make("Reshape", [f"map{number}", "shape"], [f"level{number}"]),
            ]
        )
    for name, numbers in (("shape", [1, 3, -1]), ("start", [2]), ("end", [3]), ("axis", [1])):
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(numbers, np.int64), name))
    levels = [f"level{number}" for number in range(len(branches))]
    graph.node.extend(
        [
            make("Concat", levels, ["points"], axis=2),
            make("Slice", ["points", "start", "end", "axis"], ["raw"]),
            make("Sigmoid", ["raw"], ["visible"]),
            make("Concat", [output.name, "points", "visible"], ["all"], axis=1),
        ]
    )
    graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("all", 1, [1, rows + 4, anchors]))
    result = agreement(reference, reference, images(2, 3, 64, "images"))
    assert (result.measure.metric, result.measure.value) == ("agreement-map", 1.0)
    assert note_codes(result.notes) == ["boxes-only", "wide-interval"]


def test_agreement_of_detector_is_average_precision_of_its_detections() -> None:
    reference, data = detecting_network(), images(4, 3, 64, "images")
    model, matches = quantized(reference, data, method="max"), []
    for sample in data:
        truth, found = (decode_detections(run(m, sample)[0]) for m in (reference, model))
        matches.append(match_detections(truth.filter_by_score(0.25), found))
    result = agreement(reference, model, data)
    assert result.measure.count == sum(len(m.truth) for m in matches) > 0
    expected = compute_average_precision(matches, pooled=True).mean()
    assert result.measure.value == pytest.approx(expected)
    assert result.measure.low <= result.measure.value <= result.measure.high


@pytest.mark.parametrize("stacked", [False, True])
def test_agreement_counts_each_image_of_a_fixed_batch_once(tmp_path: Path, stacked: bool) -> None:
    net = Net(batch=4)
    reference = net.output(net.conv("conv", "x")).model()
    data: Any = images(6)
    if stacked:
        np.save(tmp_path / "x.npy", np.concatenate([sample["x"] for sample in data]))
        data = tmp_path / "x.npy"
    result = agreement(reference, reference, data)
    assert (result.images, result.measure.value) == (6, 1.0)


def test_agreement_of_other_names_is_by_position(net: Net) -> None:
    reference = net.output(net.conv("conv", "x")).model()
    assert (
        agreement(reference, onnx.compose.add_prefix(reference, "other/"), images(2)).measure.value
        == 1.0
    )


def test_agreement_of_nonfinite_outputs_is_0(net: Net) -> None:
    reference, broken = net.output(net.conv("conv", "x")).model(), Net()
    x = broken.op("Mul", "mul", "x", broken.const("huge", 1e38))
    model = broken.output(broken.conv("conv", broken.op("Exp", "exp", x))).model()
    model.graph.output[0].name = reference.graph.output[0].name
    assert agreement(reference, model, images(2)).measure.value == 0.0
    with pytest.raises(ModelError, check=has("not-finite")):
        agreement(model, reference, images(2))


def test_agreement_of_scalar_output_is_unknown(net: Net) -> None:
    reference = net.output(net.op("ReduceMean", "mean", net.conv("conv", "x"), keepdims=0)).model()
    assert agreement(reference, reference, images(2)).measure.value is None


def test_agreement_of_other_input_shapes_is_refused() -> None:
    nets = [Net(side=side) for side in (8, 16)]
    models = [net.output(net.conv("conv", "x")).model() for net in nets]
    with pytest.raises(ModelError, check=has("wrong-shape")):
        agreement(*models, images(2))


# By qdqtool.compare


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_pictures(tmp_path / "photos", 3, 64, 48)
    return tmp_path / "photos"


@pytest.mark.parametrize(
    "options",
    [{}, {"target": "11"}, {"weights": "int8"}, {"input_type": "uint8"}],
    ids=["fp32", "fp16", "int8-weights", "uint8-input"],
)
def test_compare_measures_every_form_of_model(photos: Path, options: dict[str, Any]) -> None:
    net = Net(3, 32)
    reference = net.output(net.conv("b", net.op("Relu", "relu", net.conv("a", "x", 3, 16)))).model()
    result = qdqtool.compare(
        reference, qdqtool.insert(reference, photos, head="none", **options).model, data=photos
    )
    agreement = result.as_json()["agreement"]
    assert agreement["images"] == 3 and 0.9 < agreement["value"] < 1.0


@pytest.fixture
def reference() -> onnx.ModelProto:
    net = Net(3, 32)
    return net.output(net.conv("a", "x", 3, 16)).model()


def test_compare_refuses_int8_inputs(photos: Path, reference: onnx.ModelProto) -> None:
    model = qdqtool.insert(reference, photos, head="none", input_type="int8").model
    with pytest.raises(ModelError, check=has("wrong-type", node="x")):
        qdqtool.compare(reference, model, data=photos)


def test_compare_notes_few_images(photos: Path, reference: onnx.ModelProto) -> None:
    (photos / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    notes = {n.code: n.values for n in qdqtool.compare(reference, reference, data=photos).notes}
    assert (notes["few-images"]["images"], notes["unread-images"]["count"]) == (3, 1)
    assert "subfolders-read" not in notes


def test_commands_name_the_folders_of_the_images(photos: Path, reference: onnx.ModelProto) -> None:
    write_pictures(photos / "test", 2, 64, 48)
    inserted = qdqtool.insert(reference, photos.parent, head="none")
    results = (
        inserted.warnings,
        qdqtool.compare(reference, reference, data=photos.parent).notes,
        qdqtool.fix(inserted.model, data=photos.parent).notes,
    )
    assert all(
        len(re.findall(r"5 images.*?: photos \(3\), photos/test \(2\). Leave", str(texts))) == 1
        for texts in results
    )


def test_compare_refuses_images_for_a_build(
    photos: Path, tmp_path: Path, reference: onnx.ModelProto
) -> None:
    build = tmp_path / "layers.json"
    build.write_text('{"Layers": [{"Name": "conv", "LayerType": "CaskConvolution"}]}')
    with pytest.raises(QdqtoolError, check=has("option-without-effect", parameter="data")):
        qdqtool.compare(reference, build, data=photos)


def test_compare_measures_model_of_onnxruntime(photos: Path, tmp_path: Path) -> None:
    """By default, onnxruntime writes nonzero zero points and renames outputs."""
    source, net = tmp_path / "float.onnx", Net(3, 32)
    x = net.op("Relu", "relu", net.conv("a", "x", 3, 16))
    onnx.save(net.output(net.conv("b", x)).model(), source)
    samples = list(open_data(str(photos), input_specs(Model(onnx.load(source)))))
    output = quantize(source, "QDQ", "QInt8", samples)
    assert 0.8 < qdqtool.compare(source, output, data=photos).agreement.measure.value < 1.0
