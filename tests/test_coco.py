import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from benchmarks import coco
from calibration.images import prepare_image
from qdqtool.accuracy.detections import Detections, decode_detections
from qdqtool.demo.network import yolov8n
from tests.insertion.nets import run

BOX = [10.0, 10.0, 50.0, 50.0]
OTHER = [60.0, 60.0, 90.0, 90.0]


def truth(*objects: tuple[list[float], int, bool]) -> coco.GroundTruth:
    boxes, classes, crowd = zip(*objects, strict=True) if objects else ([], [], [])
    return coco.GroundTruth(
        np.array(boxes, float).reshape(-1, 4), np.array(classes, int), np.array(crowd, bool)
    )


def found(*detections: tuple[list[float], float, int]) -> Detections:
    boxes, scores, classes = zip(*detections, strict=True) if detections else ([], [], [])
    return Detections(
        np.array(boxes, float).reshape(-1, 4), np.array(scores, float), np.array(classes, int)
    )


@pytest.mark.parametrize(
    ("objects", "detections", "values"),
    [
        pytest.param(
            [(BOX, 0, False), (OTHER, 3, False)],
            [(BOX, 0.9, 0), (OTHER, 0.2, 3)],
            [1.0] * 10,
            id="all found",
        ),
        # Precision is 1 at the recalls 0, .01, ... .5.
        pytest.param(
            [(BOX, 0, False), (OTHER, 0, False)],
            [(BOX, 0.9, 0)],
            [51 / 101] * 10,
            id="half found",
        ),
        # One class is found, one is missed, and one is detected without any object of it.
        pytest.param(
            [(BOX, 0, False), (OTHER, 1, False)],
            [(BOX, 0.9, 0), (BOX, 0.8, 7)],
            [0.5] * 10,
            id="classes",
        ),
        # The object is the second of two detections: precision 1/2 at every recall.
        pytest.param(
            [(BOX, 0, False)], [(OTHER, 0.9, 0), (BOX, 0.5, 0)], [0.5] * 10, id="false first"
        ),
        # The second detection of an object is false.
        pytest.param(
            [(BOX, 0, False), (OTHER, 0, False)],
            [(BOX, 0.9, 0), (BOX, 0.8, 0), (OTHER, 0.7, 0)],
            [(51 + 50 * 2 / 3) / 101] * 10,
            id="found twice",
        ),
        # The box overlaps by 2/3 of the union: found at .50, .55, .60 and .65.
        pytest.param(
            [(BOX, 0, False)],
            [([18.0, 10.0, 58.0, 50.0], 0.9, 0)],
            [1.0] * 4 + [0.0] * 6,
            id="shifted box",
        ),
        # A detection in a crowd does not count.
        pytest.param(
            [([0.0, 0.0, 200.0, 200.0], 0, True), (BOX, 0, False)],
            [(OTHER, 0.9, 0), (BOX, 0.5, 0)],
            [1.0] * 10,
            id="crowd",
        ),
        # The detection after the first 100 does not count.
        pytest.param(
            [(BOX, 0, False)],
            [*[(OTHER, 0.9, 5)] * 100, (BOX, 0.5, 0)],
            [0.0] * 10,
            id="more than 100 detections",
        ),
        pytest.param([], [(BOX, 0.9, 0)], [np.nan] * 10, id="no objects"),
    ],
)
def test_map_of_one_image(objects: list[Any], detections: list[Any], values: list[float]) -> None:
    result = coco.evaluate([truth(*objects)], [found(*detections)])
    assert result == pytest.approx(values, nan_ok=True)


@pytest.mark.parametrize("size", [(64, 64), (100, 40), (33, 97)])
def test_undo_letterbox_finds_the_object_in_the_image(size: tuple[int, int]) -> None:
    width, height = size
    pixels = np.zeros((height, width, 3), np.uint8)
    box = [width // 4, height // 4, width // 2, height // 2]
    pixels[box[1] : box[3], box[0] : box[2]] = 255
    rows, columns = np.nonzero(prepare_image(Image.fromarray(pixels), 64, 64)[0, 0] > 0.6)
    shown = np.array([[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]], float)
    image = coco.undo_letterbox(shown, width, height, 64)[0]
    assert image == pytest.approx(box, abs=1.6 * max(width, height) / 64)


def write_coco(folder: Path, model: onnx.ModelProto) -> None:
    (folder / "images").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "images" / "a.png")
    output = run(model, {"images": prepare_image(Image.fromarray(pixels), 64, 64)})[0]
    detections = decode_detections(output)
    best = np.flatnonzero(detections.classes == detections.classes[0])[:3]
    content = {
        "images": [{"id": 7, "file_name": "a.png"}],
        "categories": [{"id": 3 * n + 1} for n in range(80)],
        "annotations": [
            {
                "image_id": 7,
                "category_id": 3 * int(detections.classes[0]) + 1,
                "bbox": [*box[:2], *(box[2:] - box[:2])],
            }
            for box in coco.undo_letterbox(detections.boxes[best], 64, 64, 64)
        ],
    }
    (folder / "val.json").write_text(json.dumps(content))


def test_script_measures_each_model(tmp_path: Path) -> None:
    """The objects are the float model's own detections, so that its mAP is 1."""
    model = yolov8n(64)
    onnx.save(model, tmp_path / "m.onnx")
    write_coco(tmp_path, model)
    images, output = tmp_path / "images", tmp_path / "rows.json"
    options = ["--images", images, "--annotations", tmp_path / "val.json", "--calib", images]
    others = ["--other", f"same={tmp_path / 'm.onnx'}", "-o", output]
    coco.main([str(word) for word in (tmp_path / "m.onnx", *options, *others)])
    rows = {row["model"]: row for row in json.loads(output.read_text())}
    assert list(rows) == ["float", "qdqtool insert", "same"]
    assert rows["float"]["map50_95"] == rows["same"]["map50_95"] == pytest.approx(1.0)
    assert 0.0 <= rows["qdqtool insert"]["map50_95"] <= 1.0
    assert {row["images"] for row in rows.values()} == {1}


def test_script_refuses_other_files(tmp_path: Path) -> None:
    (tmp_path / "val.json").write_text("[]")
    with pytest.raises(SystemExit, match=r"val\.json"):
        coco.read_annotations(tmp_path / "val.json")
