"""Weights on their way into onnxruntime: through a file, one after the other, and never all of them once more."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from calibration.session import partial_model
from qdqtool.errors import QdqtoolError
from qdqtool.model import external, sessions
from qdqtool.model.graph import Model
from qdqtool.model.sessions import open_proto
from qdqtool.model.slim import without_data


def wide(dtype: type[np.floating[Any]] = np.float32) -> onnx.ModelProto:
    """A product of matrices with 65536 elements each: one of raw bytes, one of typed numbers; and a small bias."""
    rng = np.random.default_rng(0)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    second = rng.normal(0, 0.1, (256, 256)).astype(dtype)
    weights = [
        numpy_helper.from_array(rng.normal(0, 0.1, (256, 256)).astype(dtype), "raw"),
        helper.make_tensor("typed", kind, [256, 256], second.reshape(-1)),
        numpy_helper.from_array(rng.normal(0, 1, 256).astype(dtype), "bias"),
        numpy_helper.from_array(np.zeros((2, 0), dtype), "nothing"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "raw"], ["a"]),
        helper.make_node("MatMul", ["a", "typed"], ["b"]),
        helper.make_node("Add", ["b", "bias"], ["c"]),
        helper.make_node("Concat", ["c", "nothing"], ["y"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, [2, 256])],
        [helper.make_tensor_value_info("y", kind, [2, 256])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def by_hand(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    raw, typed, bias = (
        numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer[:3]
    )
    return np.asarray(x.astype(np.float64) @ raw @ typed + bias)


def test_values_of_small_constants_alone_are_kept() -> None:
    model = Model(wide())
    assert model.constant("bias") is model.constant("bias")
    first, second = model.constant("raw"), model.constant("raw")
    assert (
        first is not None and second is not None and first is not second and (first == second).all()
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_weights_go_through_a_file_that_is_gone_afterwards(
    dtype: type[np.floating[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wide(dtype)
    slim = partial_model(Model(model), ["y"], weights=False)
    assert {
        t.name for t in slim.graph.initializer if not external.has_data(t) and 0 not in t.dims
    } == {"raw", "typed"}
    opened: list[object] = []
    real = sessions.open_session

    def watched(source: Any, threads: int, **options: Any) -> Any:
        opened.append(source)
        return real(source, threads, **options)

    monkeypatch.setattr(sessions, "open_session", watched)
    found = open_proto(slim, 1, weights=Model(model).initializers)
    x = np.random.default_rng(1).normal(0, 1, (2, 256)).astype(dtype)
    np.testing.assert_allclose(
        found.run(None, {"x": x})[0], by_hand(model, x), rtol=1e-4, atol=1e-4
    )
    assert isinstance(opened[0], Path) and not opened[0].parent.exists()
    assert model.SerializeToString() == wide(dtype).SerializeToString(), "the model is as it was"


@pytest.mark.parametrize("fault", ["no folder", "no room"])
def test_where_no_file_can_be_written_the_weights_go_into_the_message(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wide()
    x = np.random.default_rng(1).normal(0, 1, (2, 256)).astype(np.float32)

    def refused(*_: Any, **__: Any) -> None:
        raise (
            OSError(28, "No space left on device")
            if fault == "no folder"
            else QdqtoolError("cannot be written")
        )

    if fault == "no folder":
        monkeypatch.setattr(tempfile, "TemporaryDirectory", refused)
    else:
        monkeypatch.setattr(sessions, "write_apart", refused)
    found = open_proto(
        partial_model(Model(model), ["y"], weights=False), 1, weights=Model(model).initializers
    )
    np.testing.assert_allclose(
        found.run(None, {"x": x})[0], by_hand(model, x), rtol=1e-4, atol=1e-4
    )


def test_what_is_refused_or_kept_apart() -> None:
    model = wide()
    model.graph.node[2].op_type = "Nonsense"
    said = []
    for weights in (True, False):
        with pytest.raises(Exception, match="Nonsense") as caught:
            open_proto(
                partial_model(Model(model), ["y"], weights=weights),
                1,
                weights=Model(model).initializers,
            )
        said.append((caught.type, str(caught.value)))
    assert said[0] == said[1]
    small = numpy_helper.from_array(np.zeros(1 << 14, np.float32), "small")
    texts = helper.make_tensor("texts", TensorProto.STRING, [1 << 15], [b"a"] * (1 << 15))
    halves = helper.make_tensor("halves", TensorProto.INT4, [1 << 15], [1] * (1 << 15))
    large = numpy_helper.from_array(np.zeros((1 << 14) + 1, np.float32), "large")
    outside = without_data(large)
    outside.external_data.add(key="location", value="w.bin")
    tensors = (small, texts, halves, large, without_data(large), outside)
    assert [external.is_separable(t) for t in tensors] == [False, False, False, True, False, False]


_WEIGHTS = 8 * 1024 * 1024 * 4
_INSERT = """
import re, sys
import numpy as np
import onnx, onnxruntime, calibration, qdqtool.insertion.api, qdqtool.model.modelfile
from qdqtool.model.modelfile import load

def peak():
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\\s+(\\d+)", file.read())[1]) << 10

before = peak()
rng = np.random.default_rng(0)
data = [{"x": rng.random((1, 1024, 2, 2), np.float32)} for _ in range(2)]
qdqtool.insert(sys.argv[1], data, losses=int(sys.argv[3])).save(sys.argv[2])
print((peak() - before) / float(sys.argv[4]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.slow
def test_the_weights_are_held_in_the_model_and_by_onnxruntime_alone(tmp_path: Path) -> None:
    """On a network that is little else than weights; in multiples of all of them.

    The model holds them once. onnxruntime holds them twice while it changes their layout, and once more, with int8
    ones, while it folds their Q/DQ pairs.
    """
    rng = np.random.default_rng(0)
    nodes, weights, tensor = [], [], "x"
    for i in range(8):
        weights.append(
            numpy_helper.from_array(
                rng.normal(0, 0.04, (1024, 1024, 1, 1)).astype(np.float32), f"w{i}"
            )
        )
        nodes += [
            helper.make_node("Conv", [tensor, f"w{i}"], [f"c{i}"], f"conv{i}"),
            helper.make_node("Relu", [f"c{i}"], [f"r{i}"], f"relu{i}"),
        ]
        tensor = f"r{i}"
    ends = [[helper.make_tensor_value_info(n, 1, [1, 1024, 2, 2])] for n in ("x", tensor)]
    model = helper.make_model(
        helper.make_graph(nodes, "g", *ends, weights),
        ir_version=9,
        opset_imports=[helper.make_opsetid("", 17)],
    )
    onnx.save(model, tmp_path / "m.onnx")
    for losses, bound in (
        (0, 3.9),
        (1, 5.8),
    ):  # measured: 3.6, and 4.9 to 6.0 by the order of threads
        command = [
            sys.executable,
            "-c",
            _INSERT,
            str(tmp_path / "m.onnx"),
            str(tmp_path / "out.onnx"),
            str(losses),
            str(_WEIGHTS),
        ]
        tries = (
            subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(5)
        )
        assert any(float(done.stdout) < bound for done in tries), losses


def test_a_failure_is_told_in_one_line() -> None:
    told = sessions.failure(RuntimeError("a \n b" + "c" * 400))
    assert told.startswith("a bccc") and len(told) == 300
