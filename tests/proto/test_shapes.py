import subprocess
import sys
from pathlib import Path

import pytest
from onnx import NodeProto, helper

from qdqtool.errors import ModelError
from qdqtool.insertion.prepare import raise_opset
from qdqtool.ir.graph import Model
from qdqtool.proto.inference_checks import is_safe_to_infer
from qdqtool.proto.shapes import convert_opset, infer_shapes, infer_types
from tests.proto.unsafe_models import (
    BOMBS,
    CRASHES,
    IMAGE,
    INT64,
    LARGE_KERNEL,
    before_slice,
    build,
    sizes,
    value,
)


def test_infer_shapes_reports_a_crash_and_infers_the_next_model() -> None:
    with pytest.raises(RuntimeError, match="crashes"):
        infer_shapes(CRASHES["conv"])
    whole = before_slice("Conv", "x w", dims=(1, 8, 9, 9), w=LARGE_KERNEL)
    assert not is_safe_to_infer(whole)
    inferred = {v.name: v.type.tensor_type.shape for v in infer_shapes(whole).graph.value_info}
    assert [d.dim_value for d in inferred["z"].dim] == [1, 8, 3, 3]


@pytest.mark.parametrize("name", ["max-pool", "split-equal"])
def test_model_shape_is_unknown_after_a_crash(name: str) -> None:
    model = CRASHES[name]
    before = model.SerializeToString()
    assert Model(model).shape("y") is None and model.SerializeToString() == before


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[9, 9]),
        helper.make_node("Split", ["x"], ["y"], split="a text"),
    ],
    ids=["max-pool", "split"],
)
def test_raise_opset_reports_a_crash(node: NodeProto) -> None:
    slicing = helper.make_node("Slice", ["y", "b", "e", "a"], ["z"])
    model = build([node, slicing], [value("x", IMAGE)], 12, b=sizes(0), e=sizes(3), a=sizes(2))
    with pytest.raises(ModelError, match="onnx crashes on this model"):
        raise_opset(Model(model), 13)


def test_convert_opset_converts_a_model_again_after_a_change() -> None:
    model = build([helper.make_node("Relu", ["x"], ["y"])], [value("x", IMAGE)], 12)
    first, again = convert_opset(model, 13), convert_opset(model, 13)
    assert first is not again and first == again, "callers change the results"
    model.graph.node[0].op_type = "Sigmoid"
    assert [n.op_type for n in convert_opset(model, 13).graph.node] == ["Sigmoid"]
    assert convert_opset(model, 14).opset_import[0].version == 14


def test_convert_opset_limits_memory() -> None:
    expand = helper.make_node("Expand", ["x", "n"], ["y"])
    model = build([expand], [value("x", IMAGE), value("n", [1 << 28], INT64)], 12)
    with pytest.raises(RuntimeError, match="640 MB"):
        convert_opset(model, 13)


def test_infer_types_takes_little_memory(tmp_path: Path) -> None:
    """Infer in a process that is limited to 1 GB; the child process has another limit."""
    paths = [tmp_path / name for name in ("add", "slice-step", "gather-of-itself", "function")]
    for path in paths:
        path.write_bytes(BOMBS[path.name].SerializeToString())
    code = (
        "import resource, sys, onnx; from qdqtool.proto.shapes import infer_types;"
        "from qdqtool.util import limits; limits.ONNX_SECONDS = 0.5;"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30));"
        "[infer_types(onnx.load(path)) for path in sys.argv[1:]]"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)], timeout=300, capture_output=True
    )
    assert done.returncode == 0, done.stderr


def test_infer_types_follows_computed_shapes() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "first"], ["batch"]),
        helper.make_node("Concat", ["batch", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    types = infer_types(build(nodes, [value("x", (2, 8, 4, 4))], first=sizes(0), rest=sizes(128)))
    assert [d.dim_value for d in types["y"].tensor_type.shape.dim] == [2, 128]
