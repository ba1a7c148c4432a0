import subprocess
import sys

import onnx
import pytest

from qdqtool.proto.inference_checks import has_sane_attributes, is_safe_to_infer
from tests.proto.unsafe_models import BOMBS, CRASHES, IMAGE, ORDINARY, build, value
from tools.fuzz.grammar import network
from tools.growth.families import FAMILIES


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"functions"}))
def test_is_safe_clears_families_of_networks(family: str) -> None:
    assert is_safe_to_infer(FAMILIES[family](30))


def test_is_safe_clears_random_networks() -> None:
    assert all(is_safe_to_infer(network(seed)) for seed in range(30))


@pytest.mark.parametrize(
    ("model", "is_safe"),
    [
        *(pytest.param(model, False, id=f"crash: {name}") for name, model in CRASHES.items()),
        *(pytest.param(model, False, id=f"memory: {name}") for name, model in BOMBS.items()),
        *(pytest.param(model, True, id=f"ordinary: {name}") for name, model in ORDINARY.items()),
    ],
)
def test_is_safe_to_infer(model: onnx.ModelProto, is_safe: bool) -> None:
    assert is_safe_to_infer(model) is is_safe


@pytest.mark.parametrize(
    ("op", "outputs", "attributes", "sane"),
    [
        ("Flatten", 1, {"axis": 1}, True),
        ("Flatten", 1, {"axis": 1 << 31}, False),
        ("Constant", 1, {"value_int": 1 << 40}, True),
        ("Split", 2, {"num_outputs": 2}, True),
        ("Split", 2, {"num_outputs": 3}, False),
    ],
)
def test_has_sane_attributes(op: str, outputs: int, attributes: dict[str, int], sane: bool) -> None:
    node = onnx.helper.make_node(op, ["x"], [str(i) for i in range(outputs)], **attributes)
    assert has_sane_attributes(node) is sane


@pytest.mark.skipif(sys.platform == "win32", reason="needs exit codes of signals")
def test_onnx_crashes_without_the_check() -> None:
    """The child process is necessary, because onnx crashes on this model."""
    code = "import sys, onnx; onnx.shape_inference.infer_shapes(sys.stdin.buffer.read())"
    done = subprocess.run(
        [sys.executable, "-c", code], input=CRASHES["conv"].SerializeToString(), capture_output=True
    )
    assert done.returncode < 0


def test_is_safe_refuses_vectors_of_huge_stated_length() -> None:
    """onnx propagates one symbolic entry for each element of a vector."""
    model = build([onnx.helper.make_node("Relu", ["x"], ["y"])], [value("x", IMAGE)])
    assert is_safe_to_infer(model)
    model.graph.value_info.append(
        onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT32, [1 << 31])
    )
    assert not is_safe_to_infer(model)
