from collections import Counter

import numpy as np
import onnx
import pytest

from qdqtool.demo.images import make_image
from qdqtool.demo.network import yolov8n
from qdqtool.errors import ModelError
from tests.errors import has
from tests.insertion.nets import check, run


def test_yolov8n_has_the_published_architecture() -> None:
    """Compare with a simplified Ultralytics export and the parameters of its fused summary."""
    model = yolov8n(64)
    check(model)
    ops = Counter(n.op_type for n in model.graph.node)
    assert {op: ops[op] for op in ("Conv", "Concat", "Split", "MaxPool", "Resize", "Softmax")} == {
        "Conv": 64,
        "Concat": 19,
        "Split": 9,
        "MaxPool": 3,
        "Resize": 2,
        "Softmax": 1,
    }
    weights = [t for t in model.graph.initializer if t.name.startswith("model.")]
    assert sum(int(np.prod(t.dims)) for t in weights) == 3_151_904
    assert {p.key for p in model.metadata_props} >= {"names", "stride", "imgsz"}


def test_yolov8n_depends_on_its_seed_alone() -> None:
    first, again, other = (yolov8n(64, seed=i).SerializeToString() for i in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_yolov8n_activations_keep_their_size(activation: str) -> None:
    model = yolov8n(160, activation=activation)
    outputs = [n.output[0] for n in model.graph.node if n.op_type == "Conv" and "dfl" not in n.name]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(t) for t in outputs)
    feeds = {"images": np.asarray(make_image(160, 0), np.float32).transpose(2, 0, 1)[None] / 255}
    spreads = [float(v.std()) for v in run(model, feeds, outputs)]
    assert min(spreads) > 0.3 and max(spreads) < 4.0


def test_yolov8n_output_has_boxes_and_scores() -> None:
    model = yolov8n(64, classes=7)
    feeds = {"images": np.asarray(make_image(64, 3), np.float32).transpose(2, 0, 1)[None] / 255}
    (output,) = run(model, feeds)
    assert output.shape == (1, 11, 84)
    assert [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim] == [1, 11, 84]
    assert ((output[:, 4:] > 0) & (output[:, 4:] < 1)).all()
    centers = output[0, :2]
    assert (centers > -300).all() and (centers < 364).all()


@pytest.mark.parametrize("size", [100, 0])
def test_yolov8n_wrong_size(size: int) -> None:
    with pytest.raises(ModelError, check=has("out-of-range", parameter="size")):
        yolov8n(size)
