from __future__ import annotations

from pathlib import Path

import onnx

from qdqtool.insertion.groups import ScaleGroup
from qdqtool.insertion.losses import Losses
from qdqtool.insertion.result import Insertion
from qdqtool.insertion.scales import GroupScale, Member
from qdqtool.types import ModelInfo, Prediction, QuantizedTensor, SkippedNode
from tests.insertion.nets import Net


def insertion() -> Insertion:
    net = Net()
    net.output(net.conv("c", "x"))
    quantized = [QuantizedTensor("x", 0.5, "max", 0, "q"), QuantizedTensor("w", [0.5, 1.0], "weights-max", None, "p")]
    group = GroupScale(ScaleGroup(("x",), ("x", "y"), ("y",)), 0.5, "max", (Member("y", 63.5, -0.25),))
    return Insertion(net.model(), quantized, [SkippedNode("n", "so")], {"images": 2}, [group])


def test_activations_and_weights_are_told_apart() -> None:
    made = insertion()
    assert [q.tensor for q in made.activations] == ["x"] and [q.tensor for q in made.weights] == ["w"]


def test_json_of_what_was_not_predicted_or_measured_and_of_what_was() -> None:
    made = insertion()
    data = made.as_json()
    assert (data["losses"], data["prediction"], data["output"], data["notes"]) == (None, None, "", [])
    assert data["groups"] == [{
        "group": 0, "scale": 0.5, "method": "max", "quantized": ["x"],
        "members": [{"tensor": "y", "amax": 63.5, "bits_lost": -0.25}],
    }]  # fmt: skip
    made.losses, made.prediction = Losses(0.5, [], 1, 2), Prediction(ModelInfo("", "", 17, 1), "trt8.5")
    data = made.as_json()
    assert data["losses"] == {"error": 0.5, "samples": 1, "tried": 2, "tensors": []}
    assert data["prediction"] == made.prediction.summary()


def test_saving_names_the_file_that_was_predicted(tmp_path: Path) -> None:
    made = insertion()
    made.save(tmp_path / "a.onnx")
    assert made.output == str(tmp_path / "a.onnx") and onnx.load(made.output) == made.model
    made.prediction = Prediction(ModelInfo("", "", 17, 1), "trt8.5")
    made.save(tmp_path / "b.onnx")
    assert made.prediction.model.path == made.output == str(tmp_path / "b.onnx")
