from collections import Counter

import numpy as np
import onnx
import pytest

from qdqtool.commands.demo_run import make_image, write_images, yolov8n
from qdqtool.errors import DataError, ModelError
from tests.insertion.nets import check, run


def test_architecture_is_yolov8n() -> None:
    """Counts of a simplified Ultralytics export of yolov8n, and 3,151,904 parameters as its fused summary says."""
    model = yolov8n(64)
    check(model)
    ops = Counter(n.op_type for n in model.graph.node)
    assert {op: ops[op] for op in ("Conv", "Concat", "Split", "MaxPool", "Resize", "Softmax")} == {
        "Conv": 64, "Concat": 19, "Split": 9, "MaxPool": 3, "Resize": 2, "Softmax": 1,
    }  # fmt: skip
    weights = [t for t in model.graph.initializer if t.name.startswith("model.")]
    assert sum(int(np.prod(t.dims)) for t in weights) == 3_151_904
    assert {p.key for p in model.metadata_props} >= {"names", "stride", "imgsz"}
    assert yolov8n(32, 2, 5).SerializeToString() == yolov8n(32, 2, 5).SerializeToString()
    assert yolov8n(32, 2, 5).SerializeToString() != yolov8n(32, 2, 6).SerializeToString()


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_activations_keep_their_size_from_layer_to_layer(activation: str) -> None:
    model = yolov8n(160, activation=activation)
    outputs = [n.output[0] for n in model.graph.node if n.op_type == "Conv" and "dfl" not in n.name]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(t) for t in outputs)
    feeds = {"images": np.asarray(make_image(160, 0), np.float32).transpose(2, 0, 1)[None] / 255}
    spreads = [float(v.std()) for v in run(model, feeds, outputs)]
    assert min(spreads) > 0.3
    assert max(spreads) < 4.0


def test_outputs_and_images(tmp_path: object) -> None:
    model = yolov8n(64, classes=7)
    feeds = {"images": np.asarray(make_image(64, 3), np.float32).transpose(2, 0, 1)[None] / 255}
    (output,) = run(model, feeds)
    assert output.shape == (1, 11, 84)
    assert [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim] == [1, 11, 84]
    assert ((output[:, 4:] > 0) & (output[:, 4:] < 1)).all()
    centres = output[0, :2]
    assert (centres > -300).all() and (centres < 364).all()
    one, again, other = (np.asarray(make_image(48, i)) for i in (1, 1, 2))
    assert one.shape == (48, 48, 3)
    assert (one == again).all()
    assert (one != other).any()
    with pytest.raises(DataError, match="cannot be written"):
        write_images("/no/such/folder", 1, 32)


@pytest.mark.parametrize("wrong", [{"size": 100}, {"size": 0}, {"classes": 0}, {"activation": "mish"}])
def test_wrong_arguments(wrong: dict[str, int]) -> None:
    with pytest.raises(ModelError, match="demo model"):
        yolov8n(**wrong)  # type: ignore[arg-type]
