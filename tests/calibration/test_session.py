import math
import pickle
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.message import EncodeError
from onnx import TensorProto, helper, numpy_helper

from calibration import session
from calibration.arrays import open_data
from calibration.clustered import Held, _Pace, shared
from calibration.counting import Tally, ThreadPass
from calibration.dataset import InputSpec, Task
from calibration.session import (
    Fetcher,
    check_tensors,
    external_folder,
    fetched_bytes,
    input_specs,
    metadata_size,
    open_packed,
    open_session,
    packed_model,
    partial_model,
    worker_count,
)
from qdqtool.base import budgets
from qdqtool.errors import ClusterError, ModelError
from qdqtool.model import sessions
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from tests.calibration.nets import conv_net, refused, run_all, write_pictures

FEED = {"images": np.random.default_rng(0).random((1, 3, 16, 16), np.float32)}


@pytest.mark.parametrize("shape", [(1, 3, 16, 16), ("n", 3, 16, 16), ("n", 3, "h", "w")])
def test_values_are_those_of_a_plain_run(shape: tuple[int | str, ...]) -> None:
    model = conv_net(shape)
    fetcher = Fetcher(open_session(load(model), ["r2", "c1"], 1))
    for feed in (FEED, {"images": FEED["images"][..., ::-1].copy()}):
        found = fetcher.run(feed)
        for name, values in run_all(model, [feed], ["c1", "r2"]).items():
            np.testing.assert_allclose(found[name].reshape(-1), values, rtol=1e-4, atol=1e-5)


def test_memory_of_values_and_messages() -> None:
    fetcher = Fetcher(open_session(load(conv_net()), ["c1"], 1))
    first = fetcher.run(FEED)
    kept = first["c1"].copy()
    second = fetcher.run({"images": -FEED["images"]})
    assert (first["c1"] == kept).all() and not (second["c1"] == kept).all()
    addresses = {v["c1"].ctypes.data for v in (first, second)}
    del first, second
    assert fetcher.run(FEED)["c1"].ctypes.data in addresses
    message = bytearray(conv_net().SerializeToString())
    source = bytes(message)
    alone = sys.getrefcount(source)
    opened = sessions.open_session(source, 1)
    assert sys.getrefcount(source) == alone
    assert opened.run(None, FEED)[0].shape == (1, 4, 16, 16)


def test_external_weights_go_into_the_model_where_the_folder_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(
        conv_net(),
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
    )
    inside = Fetcher(open_session(load(conv_net()), ["r2"], 1)).run(FEED)["r2"].copy()
    monkeypatch.setattr(sessions, "FOLDER_KEY", "session.unknown_to_this_version")
    outside = Fetcher(open_session(load(tmp_path / "m.onnx"), ["r2"], 1)).run(FEED)["r2"]
    assert (inside == outside).all()


def test_models_over_two_gigabytes_go_through_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []

    from qdqtool.model.modelfile import write_model as real

    def watched(proto: onnx.ModelProto, path: Path) -> None:
        opened.append(path)
        real(proto, path)

    partial = partial_model(load(conv_net()), ["r2"])

    class Refuses:
        graph, functions = partial.graph, partial.functions

        def SerializeToString(self) -> bytes:
            raise ValueError("Message onnx.ModelProto exceeds maximum protobuf size of 2GB")

        def Clear(self) -> None:
            self.cleared = True

    monkeypatch.setattr(sessions, "write_model", lambda _, path, **__: watched(partial, path))
    monkeypatch.setattr(session, "partial_model", lambda *_, **__: Refuses())
    found = Fetcher(open_session(load(conv_net()), ["r2"], 1)).run(FEED)["r2"]
    assert opened and not Path(str(opened[0])).exists(), "the file is gone again"
    np.testing.assert_allclose(
        found.reshape(-1), run_all(conv_net(), [FEED], ["r2"])["r2"], rtol=1e-4, atol=1e-5
    )


MB = 1 << 20


def test_workers_sizes_and_their_pace() -> None:
    assert [worker_count(1, cores) for cores in range(1, 11)] == [1, 2, 3, 2, 2, 3, 3, 4, 4, 4]
    assert worker_count(1, 0) == 1
    assert budgets.FETCHED == 256 * MB
    sizes = [
        0,
        1,
        64 * MB,
        64 * MB + 1,
        85 * MB,
        86 * MB,
        128 * MB,
        128 * MB + 1,
        256 * MB,
        257 * MB,
        1 << 50,
    ]
    assert [worker_count(s, 64) for s in sizes] == [4, 4, 4, 3, 3, 2, 2, 1, 1, 1, 1]
    assert budgets.COUNTED == 512 * MB
    assert [worker_count(1, 64, s * MB) for s in (1, 102, 103, 128, 129, 170, 171, 4096)] == [
        4,
        4,
        3,
        3,
        2,
        2,
        1,
        1,
    ]
    model = conv_net((2, 3, "h", 5))
    assert fetched_bytes(Model(model), ["images"]) == 4 * 2 * 3 * 5
    assert fetched_bytes(Model(model), []) == 0
    assert fetched_bytes(Model(model), ["images", "c1"]) == 4 * 2 * 3 * 5 + 4 * 2 * 4 * 5
    assert [_Pace().size(left, 4) for left in (1, 2, 1000)] == [2, 2, 2]
    pace = _Pace()
    pace.learn(10, 1.0, 0.01)
    pace.learn(30, 7.0, 0.05)
    assert (pace._samples, pace._counting) == (40, 8.0)
    assert pace._merging == pytest.approx(0.7 * 0.01 + 0.3 * 0.05)
    pace.learn(1, 1.0, 0.0)
    assert pace._merging == pytest.approx(0.7 * 0.022)


def test_a_packed_model_is_the_part_with_all_its_weights(tmp_path: Path) -> None:
    onnx.save(
        conv_net(),
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
    )
    packed = packed_model(load(tmp_path / "m.onnx"), ["c1"])
    inside = onnx.load_from_string(packed)
    assert [n.name for n in inside.graph.node] == ["conv1", "sigmoid1", "mul1"]
    assert not inside.graph.initializer[0].external_data
    assert (
        packed_model(load(conv_net()), ["c1"])
        == session.partial_model(load(conv_net()), ["c1"]).SerializeToString()
    )
    there = Fetcher(open_packed(packed, 1, "m.onnx")).run(FEED)["c1"]
    assert np.array_equal(there, Fetcher(open_session(load(conv_net()), ["c1"], 1)).run(FEED)["c1"])


@pytest.mark.parametrize("error", [ValueError, EncodeError])
@pytest.mark.parametrize("path", ["", "a/m.onnx"])
def test_a_model_too_large_to_travel(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], path: str
) -> None:
    class Refuses:
        def SerializeToString(self) -> bytes:
            raise error("exceeds maximum protobuf size of 2GB")

    monkeypatch.setattr(session, "partial_model", lambda *_: Refuses())
    refused(
        ModelError,
        f"packed_model {path or 'model'}: 2 GB",
        packed_model,
        Model(conv_net(), path=path),
        ["c1"],
    )


@pytest.mark.parametrize("path", ["", "a/m.onnx"])
def test_what_onnxruntime_refuses(path: str) -> None:
    model = conv_net()
    model.graph.node[0].op_type = "NoSuchOperator"
    told = f"{path or 'model'}: onnxruntime cannot run it: "
    with pytest.raises(ModelError) as caught:
        open_session(Model(model, path=path), ["c1"], 1)
    assert str(caught.value).startswith(told) and "\n" not in str(caught.value)
    with pytest.raises(ModelError) as caught:
        open_packed(model.SerializeToString(), 1, path)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 3, 16, 16), TensorProto.FLOAT),
        ((1, 3, 16, 16), TensorProto.FLOAT16),
        (("n", 3, 16, 16), TensorProto.FLOAT),
    ],
)
def test_outputs_keep_their_names_types_and_shapes(
    shape: tuple[int | str, ...], dtype: int
) -> None:
    model = conv_net(shape, dtype)
    for name, operator, options in (
        ("wide", "Cast", {"to": TensorProto.DOUBLE}),
        ("best", "ArgMax", {"axis": 1}),
    ):
        model.graph.node.append(helper.make_node(operator, ["out"], [name], **options))
    fetcher = Fetcher(open_session(load(model), ["best", "out", "wide"], 1))
    sample = {"images": FEED["images"].astype(helper.tensor_dtype_to_np_dtype(dtype))}
    found: dict[str, Any] = fetcher.run({**sample, "unused": np.zeros(3)})
    assert list(found) == ["best", "out", "wide"]
    assert [a.dtype.name for a in found.values()] == [
        "int64",
        sample["images"].dtype.name,
        "float64",
    ]
    assert (
        found["out"].shape == found["wide"].shape == (1, 4, 16, 16)
        and np.abs(found["out"]).max() > 0
    )
    assert (found["best"][:, 0] == found["out"].argmax(axis=1)).all() and (
        found["wide"] == found["out"]
    ).all()


VALUES = np.arange(12, dtype=np.float32)


def tasks(count: int) -> Iterator[tuple[int, Task]]:
    for number in range(count):
        yield number, lambda: ({"x": VALUES}, 1)


def test_snapshot_in_the_middle_and_at_the_end() -> None:
    tally = Tally(None, ["x"], 2048, None, 1)
    running = ThreadPass(tasks(50), [tally])
    results = running.results()
    next(results)
    middle, done = running.snapshot()
    seen = middle["x"].count
    assert seen == VALUES.size * len(done) == middle["x"].histogram.counts.sum()
    list(results)
    assert middle["x"].count == seen and middle["x"] is not tally.tensors["x"]
    end, done = running.snapshot()
    assert end["x"] is tally.tensors["x"]
    assert done == set(range(50)) and end["x"].count == 50 * VALUES.size


@pytest.mark.parametrize("left", [0, 1, 7, 90, 5000])
@pytest.mark.parametrize("slots", [0, 1, 4, 64])
@pytest.mark.parametrize(
    ("counting", "merging"),
    [
        (10.0, 0.0),
        (0.01, 0.0),
        (1.0, 0.001),
        (1.0, 0.2),
        (500.0, 0.1),
        (0.0, 0.1),
        (0.0, 0.0),
        (3000.0, 2.0),
    ],
)
def test_a_portion_is_worth_its_merging_and_leaves_work_for_all(
    left: int, slots: int, counting: float, merging: float
) -> None:
    """A quarter of the time for merging, ten seconds, two and a half portions a thread."""
    pace = _Pace()
    pace.learn(20, counting, merging)
    each = counting / 20 or 1e-9
    least = 4 * slots * merging / each
    most = max(10.0 / each, least)
    wanted = min(max(left / 2.5 / max(slots, 1), least), most)
    assert pace.size(left, slots) == max(1, min(left, 256, math.ceil(wanted)))


# The part of a model that is run, and what is said of models that cannot be.

value = helper.make_tensor_value_info


def with_inputs(*inputs: onnx.ValueInfoProto, path: str = "") -> Model:
    model = conv_net()
    model.graph.input.extend(inputs)
    return Model(model, path=path)


def test_shapes_and_types_of_inputs() -> None:
    more = [
        value("open", TensorProto.UINT8, ["n", 0, -1, 1, 2]),
        value("scalar", TensorProto.BOOL, []),
        value("half", TensorProto.FLOAT16, [None]),
        value("w1", TensorProto.FLOAT, [4, 3, 3, 3]),
    ]
    found = input_specs(with_inputs(*more))
    assert found == [
        InputSpec("images", (1, 3, 16, 16)),
        InputSpec("open", (None, None, None, 1, 2), "uint8"),
        InputSpec("scalar", (), "bool"),
        InputSpec("half", (None,), "float16"),
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (value("in", TensorProto.STRING, [1]), "object"),
        (value("in", TensorProto.COMPLEX64, [1]), "complex64"),
        (value("in", TensorProto.FLOAT, None), "rank"),
        (value("in", 0, [1]), "tensor"),
        (onnx.ValueInfoProto(name="in"), "tensor"),
        (helper.make_tensor_sequence_value_info("in", TensorProto.FLOAT, [1]), "tensor"),
    ],
)
def test_inputs_that_cannot_be_fed(given: onnx.ValueInfoProto, told: str) -> None:
    for path in ("", "a/net.onnx"):
        refused(
            ModelError,
            f"input_specs {path or 'model'}: 'in' {told}",
            input_specs,
            with_inputs(given, path=path),
        )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("640", (640, 640)),
        ("[1, 65536]", (1, 65536)),
        ("[65536, 1]", (65536, 1)),
        ("[1, 65537]", None),
        ("[65537, 1]", None),
        ("[0, 5]", None),
        ("[5, 0]", None),
        ("[-1, 5]", None),
        ("[5]", None),
        ("[5, 6, 7]", None),
        ("[5.5, 6]", None),
        ('["5", 6]', None),
        ("0", None),
        ("(5, 6)", (5, 6)),
        ("(5, 6, 7)", (5, 6)),
        ("5x6", (5, 6)),
        ("(5,)", None),
        ("{}", None),
        ("null", None),
        ("[" * 100_000, None),
        ("-", None),
    ],
)
def test_the_size_in_the_metadata(text: str, size: tuple[int, int] | None) -> None:
    model = conv_net()
    assert metadata_size(Model(model)) is None
    model.metadata_props.append(onnx.StringStringEntryProto(key="imgsz", value=text))
    assert metadata_size(Model(model)) == size


def test_tensors_that_cannot_be_asked_for() -> None:
    for path in ("", "a/net.onnx"):
        model = Model(conv_net(), path=path)
        check_tensors(model, ["images", "c1", "out"])
        for name, named in (
            ("w1", "constant;"),
            ("c11", "'c1'?"),
            ("imagess", "'images'?"),
            ("quite another", "no"),
        ):
            told = f"check_tensors {path or 'model'}: '{name}' {named}"
            refused(ModelError, told, check_tensors, model, ["c1", name])


def names(items: object) -> list[str]:
    return [i.name for i in items]  # type: ignore[attr-defined]


@pytest.mark.parametrize("ir_version", [3, 4, 9])
def test_what_a_part_takes_with_it(ir_version: int) -> None:
    """Weights are inputs only for readers of IR version 3, which want them there."""
    model = conv_net()
    model.ir_version = ir_version
    model.graph.input.extend(
        [
            value("w2", TensorProto.FLOAT, [4, 4, 3, 3]),
            value("w3", TensorProto.FLOAT, [4, 4, 3, 3]),
            value("unused", TensorProto.FLOAT, [1]),
        ]
    )
    whole = Model(model)
    part = partial_model(whole, ["r2"])
    assert names(part.graph.node) == ["conv1", "sigmoid1", "mul1", "conv2", "relu2"]
    assert names(part.graph.initializer) == ["w1", "w2"] and names(part.graph.output) == ["r2"]
    assert names(part.graph.input) == ["images"] + ["w2"] * (ir_version < 4)
    assert (part.ir_version, part.opset_import[0].version, part.graph.name) == (
        ir_version,
        17,
        "net",
    )
    given = [
        value("c1", TensorProto.FLOAT, [1, 4, 16, 16]),
        value("a1", TensorProto.FLOAT, [1, 4, 16, 16]),
    ]
    later = partial_model(whole, ["r2"], given)
    assert names(later.graph.node) == ["conv2", "relu2"]
    assert names(later.graph.input) == ["w2"] * (ir_version < 4) + ["c1"], (
        "only what is needed is fed"
    )
    assert names(later.graph.initializer) == ["w2"]
    again = partial_model(whole, ["out", "c1"], given[:1])
    assert names(again.graph.node) == ["conv2", "relu2", "conv3"] and names(again.graph.output) == [
        "out",
        "c1",
    ]
    fed = partial_model(whole, ["c1"], [value("images", TensorProto.FLOAT, [2, 3, 16, 16])])
    assert (
        names(fed.graph.input) == ["images"]
        and fed.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2
    )


def test_functions_sparse_weights_and_a_name_go_along() -> None:
    model = conv_net()
    model.graph.name = ""
    model.functions.append(
        helper.make_function(
            "own",
            "F",
            ["x"],
            ["y"],
            [helper.make_node("Relu", ["x"], ["y"])],
            [helper.make_opsetid("", 17)],
        )
    )
    for name in ("sparse", "unneeded"):
        values = numpy_helper.from_array(np.ones(1, np.float32), name)
        places = numpy_helper.from_array(np.zeros(1, np.int64), f"{name}_at")
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [4]))
    model.graph.node.append(helper.make_node("Add", ["out", "sparse"], ["sum"], "add"))
    part = partial_model(Model(model), ["sum"])
    assert [s.values.name for s in part.graph.sparse_initializer] == ["sparse"]
    assert part.graph.name == "calibration" and names(part.functions) == ["F"]


def test_the_folder_of_external_weights(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(conv_net(), path)
    assert external_folder(load(path)) == "" == external_folder(Model(conv_net()))
    onnx.save(conv_net(), path, save_as_external_data=True, location="w.bin", size_threshold=500)
    proto = onnx.load(path, load_external_data=False)
    assert [t.data_location == TensorProto.EXTERNAL for t in proto.graph.initializer] == [
        False,
        True,
        True,
    ]
    assert external_folder(load(path)) == str(tmp_path)
    refused(ModelError, "external_folder model: 'w2' 'w.bin';", external_folder, Model(proto))
    model = load(path)
    (tmp_path / "w.bin").unlink()
    refused(ModelError, f"external_folder {path}: 'w.bin' 'w2'", external_folder, model)


@pytest.mark.parametrize(("given", "run"), [(3, 3), (8, 8), (10, 10), (11, 10), (14, 10)])
def test_what_is_run_has_an_ir_version_that_every_onnxruntime_reads(given: int, run: int) -> None:
    model = conv_net()
    model.ir_version = given
    assert partial_model(Model(model), ["out"]).ir_version == run and model.ir_version == given


def test_the_same_samples_under_the_same_numbers(tmp_path: Path) -> None:
    paths = write_pictures(tmp_path, 5)
    here = open_data(tmp_path, [InputSpec("images", (2, 3, 16, 16))], max_images=3)
    there = pickle.loads(pickle.dumps(shared(here)))
    assert (len(there), there.batch, list(there.indices)) == (2, 2, [0, 1, 2])
    for one, other in zip(here, there, strict=True):
        assert np.array_equal(one["images"], other["images"])
    held = there.source
    assert isinstance(held, Held) and (held.count(), held.is_images, held.single_rows) == (
        3,
        True,
        True,
    )
    assert [held.name(k) for k in range(3)] == [
        "picture000.png",
        "picture002.png",
        "picture004.png",
    ]
    assert held.settings() == here.source.settings() and held.digest(1) == here.source.digest(2)
    paths[2].write_bytes(paths[1].read_bytes())
    refused(ClusterError, "Held.load picture002.png another", held.load, 1)
    paths[2].unlink()
    refused(ClusterError, "Held.load picture002.png read", held.load, 1)


def test_a_size_in_the_metadata_is_read_in_part() -> None:
    """As Python's objects, megabytes of nested lists would take forty times as much."""
    model = SimpleNamespace(metadata={"imgsz": "[" + "[[]]," * 100_000 + "[]]"})
    tracemalloc.start()
    try:
        assert metadata_size(model) is None
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
