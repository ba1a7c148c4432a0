"""Sessions of onnxruntime: weights go through a file, so that memory does not hold them once more."""

import itertools
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from calibration.session import partial_model
from qdqtool.base.process import Crew
from qdqtool.model import external, sessions
from qdqtool.model.graph import Model
from qdqtool.model.sessions import open_proto
from qdqtool.model.slim import without_data


def wide(dtype: type[np.floating[Any]] = np.float32) -> onnx.ModelProto:
    """Build two products with 65536 weights each, of raw bytes and of typed numbers, and a small bias."""
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


def expected_output(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    raw, typed, bias = (
        numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer[:3]
    )
    return np.asarray(x.astype(np.float64) @ raw @ typed + bias)


def assert_runs(session: Any, model: onnx.ModelProto, dtype: type[np.floating[Any]]) -> None:
    x = np.random.default_rng(1).normal(0, 1, (2, 256)).astype(dtype)
    (output,) = session.run(None, {"x": x})
    np.testing.assert_allclose(output, expected_output(model, x), rtol=1e-4, atol=1e-4)


def slim(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without the data of its large weights."""
    return partial_model(Model(model), ["y"], weights=False)


def test_only_small_constants_are_cached() -> None:
    model = Model(wide())
    assert model.constant("bias") is model.constant("bias")
    first, second = model.constant("raw"), model.constant("raw")
    assert first is not None and first is not second and np.array_equal(first, second)


def test_partial_model_has_no_data_of_large_weights() -> None:
    weights = slim(wide()).graph.initializer
    missing = {t.name for t in weights if not external.has_data(t) and 0 not in t.dims}
    assert missing == {"raw", "typed"}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_weights_go_through_temporary_file(
    dtype: type[np.floating[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wide(dtype)
    sources: list[Path] = []
    open_session = sessions.open_session

    def record(source: Path, threads: int, **options: Any) -> Any:
        sources.append(source)
        return open_session(source, threads, **options)

    monkeypatch.setattr(sessions, "open_session", record)
    assert_runs(open_proto(slim(model), 1, weights=Model(model).initializers), model, dtype)
    assert isinstance(sources[0], Path) and not sources[0].parent.exists()
    assert model.SerializeToString() == wide(dtype).SerializeToString()


@pytest.mark.parametrize("fault", ["no folder", "no room"])
def test_large_weights_go_into_message_without_temporary_file(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "no folder":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    model = wide()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if fault == "no room":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        session = open_proto(slim(model), 1, weights=Model(model).initializers)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_runs(session, model, np.float32)


def test_error_of_onnxruntime_does_not_depend_on_temporary_file() -> None:
    model = wide()
    model.graph.node[2].op_type = "Nonsense"
    errors = []
    for weights in (True, False):
        part = partial_model(Model(model), ["y"], weights=weights)
        with pytest.raises(Exception, match="Nonsense") as caught:
            open_proto(part, 1, weights=Model(model).initializers)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


LARGE = numpy_helper.from_array(np.zeros((1 << 14) + 1, np.float32), "large")
EXTERNAL = without_data(LARGE)
EXTERNAL.external_data.add(key="location", value="w.bin")


@pytest.mark.parametrize(
    ("tensor", "separable"),
    [
        (LARGE, True),
        (numpy_helper.from_array(np.zeros(1 << 14, np.float32), "small"), False),
        (helper.make_tensor("texts", TensorProto.STRING, [1 << 15], [b"a"] * (1 << 15)), False),
        (helper.make_tensor("halves", TensorProto.INT4, [1 << 15], [1] * (1 << 15)), False),
        (without_data(LARGE), False),
        (EXTERNAL, False),
    ],
    ids=["large", "small", "texts", "half bytes", "without data", "external"],
)
def test_large_tensors_of_bytes_are_separable(tensor: onnx.TensorProto, separable: bool) -> None:
    assert external.is_separable(tensor) is separable


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
@pytest.mark.parametrize(
    ("losses", "limit"),
    [(0, 3.9), (1, 5.8)],  # measured: 3.6, and 4.9 to 6.0 depending on the order of threads
)
def test_insert_holds_weights_in_model_and_onnxruntime_only(
    tmp_path: Path, losses: int, limit: float
) -> None:
    # The network is little else than weights, and the limit a multiple of their size. The model
    # holds them once. onnxruntime holds them twice while it changes their layout, and once more,
    # with int8 ones, while it folds their Q/DQ pairs.
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
    arguments = [tmp_path / "m.onnx", tmp_path / "out.onnx", losses, _WEIGHTS]
    command = [sys.executable, "-c", _INSERT, *map(str, arguments)]
    runs = (subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(5))
    assert any(float(run.stdout) < limit for run in runs)


def squares(crew: Crew[int, int]) -> None:
    for task in crew.tasks():
        crew.put(task * task)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_each_task_is_done_once(workers: int) -> None:
    crew: Crew[int, int] = Crew(i for i in range(200))  # one thread at a time may use a generator
    assert sorted(crew.results([lambda: squares(crew)] * workers)) == [i * i for i in range(200)]


def test_error_of_work_ends_all_threads() -> None:
    def fails(crew: Crew[int, int]) -> None:
        for task in crew.tasks():
            if task == 3:
                raise ValueError("task 3")
            crew.put(task)

    before = threading.active_count()
    crew: Crew[int, int] = Crew(range(1000))
    with pytest.raises(ValueError, match="task 3"):
        list(crew.results([lambda: fails(crew)] * 2))
    assert crew.stopped and threading.active_count() == before


def test_error_of_tasks_is_raised() -> None:
    def tasks() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    crew: Crew[int, int] = Crew(tasks())
    with pytest.raises(OSError, match="gone"):
        list(crew.results([lambda: squares(crew)] * 2))


def test_crew_without_threads_has_no_results() -> None:
    crew: Crew[int, int] = Crew([1])
    assert list(crew.results([])) == []


def test_threads_end_when_results_are_closed() -> None:
    before = threading.active_count()
    crew: Crew[int, int] = Crew(itertools.count())
    results = crew.results([lambda: squares(crew)] * 2)
    next(results)
    results.close()
    assert threading.active_count() == before


_GROWING = """
import re, sys
import numpy as np
from qdqtool.base import budgets
import calibration
from qdqtool.errors import ModelError
budgets.session_memory = lambda: 1 << 28
try:
    calibration.collect(sys.argv[1], [{"x": np.full((1, 8), 0.5, np.float32)}], ["y"])
except ModelError:
    # Of getrusage's, what another process had when it forked would be a part.
    print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


def doubling() -> onnx.ModelProto:
    """Build a loop whose input decides how often a tensor is doubled: 4 kB of model, 2^40 numbers."""
    value, bools, ints = helper.make_tensor_value_info, TensorProto.BOOL, TensorProto.INT64
    node = helper.make_node
    body = helper.make_graph(
        [node("Identity", ["go"], ["goes"]), node("Concat", ["a", "a"], ["twice"], axis=0)],
        "body",
        [value("turn", ints, []), value("go", bools, []), value("a", TensorProto.FLOAT, None)],
        [value("goes", bools, []), value("twice", TensorProto.FLOAT, None)],
    )
    nodes = [
        node("ReduceMax", ["x"], ["most"], keepdims=0),
        node("Mul", ["most", "80"], ["many"]),
        node("Cast", ["many"], ["turns"], to=ints),
        node("Loop", ["turns", "yes", "one"], ["long"], body=body),
        node("ReduceMean", ["long"], ["mean"], keepdims=0),
        node("Add", ["x", "mean"], ["y"]),
    ]
    constants = {"80": np.float32(80), "yes": np.array(True), "one": np.ones(1, np.float32)}
    x, y = (value(name, TensorProto.FLOAT, [1, 8]) for name in "xy")
    stored = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc"
)
def test_size_decided_by_a_run_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "doubling.onnx"
    onnx.save(doubling(), path)
    ended = subprocess.run(
        [sys.executable, "-c", _GROWING, str(path)], capture_output=True, text=True, check=True
    )
    assert int(ended.stdout) < 600_000  # KB: the limit of 256 MB and the libraries


def test_failure_is_one_short_line() -> None:
    line = sessions.failure(RuntimeError("a \n b" + "c" * 400))
    assert line.startswith("a bccc") and len(line) == 300


def test_sizes_by_run() -> None:
    # A Resize by numbers of the model has a known size. By computed ones it may have any.
    def resize(scales: str) -> onnx.ModelProto:
        nodes = [
            helper.make_node("Constant", [], ["stated"], value_floats=[2.0, 2.0]),
            helper.make_node("Resize", ["x", "", scales], ["y"]),
        ]
        return helper.make_model(
            helper.make_graph(
                nodes, "g", [], [], [numpy_helper.from_array(np.ones(2, np.float32), "stored")]
            )
        )

    assert [sessions.sizes_by_run(resize(scales)) for scales in ("stated", "stored", "made")] == [
        False,
        False,
        True,
    ]
    assert sessions.sizes_by_run(doubling())
