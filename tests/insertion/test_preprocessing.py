import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

import qdqtool
from calibration import PRESETS, Preprocess
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.prediction import check_activations
from tests.calibration.nets import write_pictures
from tests.errors import has
from tests.insertion.nets import Net
from tests.notes import note, note_codes

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def classifier(**metadata: str) -> onnx.ModelProto:
    net = Net(3, 16)
    tensor = net.op("Relu", "act", net.conv("c0", "x", 3, 16))
    pooled = net.op("GlobalAveragePool", "pool", net.conv("c1", tensor))
    model = net.output(net.conv("fc", pooled, 16, 10, 1)).model()
    onnx.helper.set_model_props(model, metadata)
    return model


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_pictures(tmp_path / "photos", 8, 40, 30)
    return tmp_path / "photos"


def recorded(model: onnx.ModelProto) -> dict[str, Any]:
    return dict(json.loads(Model(model).metadata["qdqtool.preprocess"]))


def test_insert_states_and_records_the_default_and_warns(photos: Path) -> None:
    result = qdqtool.insert(classifier(), photos)
    used = result.as_json()["calibration"]["preprocess"]
    assert (used["name"], used["origin"], used["size"]) == ("yolo", "default", [16, 16])
    assert recorded(result.model) == used and note("default-preprocess") in result.warnings


def test_insert_uses_the_named_preprocessing(photos: Path) -> None:
    result = qdqtool.insert(classifier(), photos, preprocess="imagenet", method="max")
    assert "default-preprocess" not in note_codes(result.warnings)
    assert recorded(result.model)["name"] == "imagenet"
    largest = 0.0
    for path in photos.iterdir():
        with Image.open(path) as image:
            width, height = image.size
            size = (18, 18 * height // width) if width < height else (18 * width // height, 18)
            resized = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BILINEAR))
        top, left = round((size[1] - 16) / 2), round((size[0] - 16) / 2)
        values = (resized[top : top + 16, left : left + 16] / 255.0 - MEAN) / STD
        largest = max(largest, float(np.abs(values).max()))
    (scale,) = (q.scale for q in result.quantized if q.tensor == "x")
    assert scale == pytest.approx(largest / 127, rel=1e-5)


def test_metadata_of_ultralytics_choose_the_preprocessing(photos: Path) -> None:
    metadata = {"task": "classify", "names": "{0: 'a'}", "imgsz": "[16, 16]", "stride": "1"}
    result = qdqtool.insert(classifier(**metadata), photos)
    assert recorded(result.model)["name"] == "ultralytics-classify"
    assert recorded(result.model)["origin"] == "metadata"
    assert "default-preprocess" not in note_codes(result.warnings)
    # The user's choice comes first.
    other = qdqtool.insert(classifier(**metadata), photos, preprocess="clip")
    assert recorded(other.model) == other.calibration["preprocess"]
    assert recorded(other.model)["name"] == "clip"


def test_arrays_have_no_preprocessing() -> None:
    data = {"x": np.random.default_rng(0).normal(size=(4, 3, 16, 16)).astype(np.float32)}
    result = qdqtool.insert(classifier(), data)
    assert result.calibration["preprocess"] is None
    assert "default-preprocess" not in note_codes(result.warnings)
    assert "qdqtool.preprocess" not in Model(result.model).metadata


@pytest.mark.parametrize(
    ("options", "values", "codes"),
    [
        (
            {"preprocess": "imagenet"},
            {"name": "imagenet", "origin": "model"},
            ["preprocess", "scales-checked"],
        ),
        # The default warns again for a classifier.
        (
            {},
            {"name": "yolo", "origin": "default"},
            ["preprocess", "default-preprocess", "scales-checked"],
        ),
    ],
)
def test_predict_and_fix_use_the_recorded_preprocessing(
    photos: Path, options: dict[str, str], values: dict[str, str], codes: list[str]
) -> None:
    model = qdqtool.insert(classifier(), photos, **options).model
    prediction = qdqtool.predict(model)
    check_activations(model, prediction, photos)
    assert (note_codes(prediction.notes), prediction.notes[0].values) == (codes, values)
    assert prediction.as_json()["notes"] == list(prediction.notes)
    assert {*prediction.notes[:-1]} <= {*qdqtool.fix(model, data=photos).notes}
    # One scale for the input of each of the three convolutions.
    assert prediction.notes[-1] == note("scales-checked", scales=3, samples=8, findings=[])


def to_input(image: Image.Image) -> Any:
    return np.asarray(image.resize((16, 16)), np.float32).transpose(2, 0, 1) / 100


def test_function_of_the_caller(photos: Path) -> None:
    result = qdqtool.insert(classifier(), photos, preprocess=to_input, method="max")
    assert recorded(result.model)["name"] == "to_input"
    (scale,) = (q.scale for q in result.quantized if q.tensor == "x")
    largest = 0.0
    for path in photos.iterdir():
        with Image.open(path) as image:
            largest = max(largest, float(to_input(image.convert("RGB")).max()))
    assert scale == pytest.approx(largest / 127, rel=1e-5)
    prediction = qdqtool.predict(result.model)
    check_activations(result.model, prediction, photos)
    assert "default-preprocess" in note_codes(prediction.notes)


def test_uint8_input_needs_a_known_preprocessing(photos: Path) -> None:
    with pytest.raises(QdqtoolError, check=has("option-conflict", parameter="input_type")):
        qdqtool.insert(classifier(), photos, preprocess=to_input, input_type="uint8")


@pytest.mark.parametrize("preprocess", ["yolo", "imagenet"])
def test_quantizer_of_a_uint8_input_needs_no_fix(photos: Path, preprocess: str) -> None:
    """A Cast, and with a mean also a Mul and an Add, are before the first quantizer."""
    inserted = qdqtool.insert(classifier(), photos, preprocess=preprocess, input_type="uint8")
    (finding,) = (f for f in qdqtool.predict(inserted.model).findings if f.code == "CONVERSION")
    assert "quantizes the network's input 'x'" in finding.message and not finding.fix
    assert "--input-type int8" in finding.message
    integers = qdqtool.insert(classifier(), photos, preprocess=preprocess, input_type="int8")
    assert qdqtool.predict(integers.model).conversions == 0


def test_tune_states_and_records_the_preprocessing(photos: Path) -> None:
    tuning = qdqtool.tune(classifier(), photos, keep=0.5)
    assert tuning.as_json()["images"]["preprocess"] == recorded(tuning.model)
    assert note("preprocess", name="yolo", origin="default") in tuning.notes
    assert note("default-preprocess") in tuning.warnings
    again = qdqtool.tune(classifier(), photos, keep=0.5, preprocess=PRESETS["vit"].preprocess)
    assert recorded(again.model)["name"] == "vit"
    assert "default-preprocess" not in note_codes(again.warnings)


def open_size(**metadata: str) -> onnx.ModelProto:
    model = classifier(**metadata)
    for dimension in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        dimension.dim_param = "side"
    return model


def test_open_size_is_that_of_the_metadata_in_every_step(photos: Path) -> None:
    result = qdqtool.insert(open_size(imgsz="[24, 16]"), photos, losses=2)
    assert recorded(result.model)["size"] == [24, 16] and result.losses is not None


def test_size_must_be_a_multiple_of_the_stride_of_the_metadata(photos: Path) -> None:
    model = open_size(stride="8")
    with pytest.raises(DataError, check=has("out-of-range", parameter="size")):
        qdqtool.insert(model, photos, size=(20, 16))
    assert qdqtool.insert(model, photos, size=(24, 16)).calibration["preprocess"]["size"] == [
        24,
        16,
    ]


def test_custom_settings_have_no_name(photos: Path) -> None:
    result = qdqtool.insert(classifier(), photos, preprocess=Preprocess("stretch", scale=0.01))
    assert recorded(result.model)["name"] == "custom"


def test_compare_uses_what_the_quantized_model_records(photos: Path) -> None:
    model = classifier()
    quantized = qdqtool.insert(model, photos, preprocess="imagenet").model
    result = qdqtool.compare(model, quantized, data=photos)
    assert note("preprocess", name="imagenet", origin="model") in result.notes
    assert result.agreement.as_json()["preprocess"]["name"] == "imagenet"
    assert "default-preprocess" not in note_codes(result.notes)
    assert note("default-preprocess") in qdqtool.compare(model, model, data=photos).notes
