import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.message import EncodeError

from calibration import InputSpec, open_data, session
from calibration.cluster_pass import VerifiedSource, share_dataset
from calibration.session import (
    TensorFetcher,
    check_tensors,
    external_folder,
    input_specs,
    open_packed_session,
    open_session,
    pack_model,
    partial_model,
    sample_bytes,
    worker_count,
)
from qdqtool.errors import ClusterError, ModelError
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import load, write_model
from qdqtool.runtime import sessions
from qdqtool.util import limits
from tests.calibration.nets import conv_net, run_all, save_external, write_pictures
from tests.errors import has

FEED = {"images": np.random.default_rng(0).random((1, 3, 16, 16), np.float32)}
MB = 1 << 20

each_path = pytest.mark.parametrize("path", ["", "a/m.onnx"], ids=["in memory", "from a file"])
make_value = onnx.helper.make_tensor_value_info


def run_tensor(model: Any, name: str) -> Any:
    return TensorFetcher(open_session(load(model), [name], 1)).run(FEED)[name]


# Sessions


@pytest.mark.parametrize("shape", [(1, 3, 16, 16), ("n", 3, 16, 16), ("n", 3, "h", "w")])
def test_fetched_values_are_those_of_a_plain_run(shape: tuple[int | str, ...]) -> None:
    model = conv_net(shape)
    fetcher = TensorFetcher(open_session(load(model), ["r2", "c1"], 1))
    for feed in (FEED, {"images": FEED["images"][..., ::-1].copy()}):
        values = fetcher.run(feed)
        for name, expected in run_all(model, [feed], ["c1", "r2"]).items():
            np.testing.assert_allclose(values[name].reshape(-1), expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def model() -> onnx.ModelProto:
    return conv_net()


def test_missing_plugin_names_the_remedy(model: onnx.ModelProto) -> None:
    """A table of ranges works without running the plugin."""
    model.graph.node[0].op_type, model.graph.node[0].domain = "RotateTRT", "trt.plugins"
    model.opset_import.append(onnx.helper.make_opsetid("trt.plugins", 1))
    with pytest.raises(ModelError, match="calib_table"):
        open_session(load(model), ["c1"], 1)


def test_session_does_not_keep_the_message() -> None:
    source = conv_net().SerializeToString()
    before = sys.getrefcount(source)
    opened = sessions.open_session(source, 1)
    assert sys.getrefcount(source) == before and opened.run(None, FEED)[0].shape == (1, 4, 16, 16)


def test_external_weights_go_into_the_model_for_older_onnxruntime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_external(tmp_path / "m.onnx")
    inside = run_tensor(conv_net(), "r2").copy()
    monkeypatch.setattr(sessions, "FOLDER_KEY", "session.unknown_to_this_version")
    assert (inside == run_tensor(tmp_path / "m.onnx", "r2")).all()


class HugeModel:
    error: type[Exception] = ValueError

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph, self.functions = model.graph, model.functions

    def SerializeToString(self, **options: bool) -> bytes:
        raise self.error("exceeds maximum protobuf size of 2GB")

    def Clear(self) -> None:
        pass


def test_model_over_two_gigabytes_is_run_from_a_temporary_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partial = partial_model(load(conv_net()), ["r2"])
    paths: list[Path] = []

    def write(model: Any, path: Path, **options: Any) -> None:
        paths.append(path)
        write_model(partial, path)

    monkeypatch.setattr(sessions, "write_model", write)
    monkeypatch.setattr(session, "partial_model", lambda *_, **__: HugeModel(partial))
    values = run_tensor(conv_net(), "r2")
    assert paths and not Path(paths[0]).exists()
    expected = run_all(conv_net(), [FEED], ["r2"])["r2"]
    np.testing.assert_allclose(values.reshape(-1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("error", [ValueError, EncodeError])
@each_path
def test_model_over_two_gigabytes_cannot_be_sent(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], path: str
) -> None:
    monkeypatch.setattr(HugeModel, "error", error)
    monkeypatch.setattr(session, "partial_model", lambda *_: HugeModel(conv_net()))
    with pytest.raises(ModelError, check=has("model-too-large", "2 GB", path=path or "model")):
        pack_model(Model(conv_net(), path=path), ["c1"])


def test_packed_model_is_the_part_with_all_its_weights(tmp_path: Path) -> None:
    save_external(tmp_path / "m.onnx")
    packed = pack_model(load(tmp_path / "m.onnx"), ["c1"])
    model = onnx.load_from_string(packed)
    assert [n.name for n in model.graph.node] == ["conv1", "sigmoid1", "mul1"]
    assert not model.graph.initializer[0].external_data
    inside = pack_model(load(conv_net()), ["c1"])
    assert inside == partial_model(load(conv_net()), ["c1"]).SerializeToString()
    values = TensorFetcher(open_packed_session(packed, 1, "m.onnx")).run(FEED)["c1"]
    assert np.array_equal(values, run_tensor(conv_net(), "c1"))


@each_path
def test_errors_of_onnxruntime_name_the_model(path: str, model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "NoSuchOperator"
    check = has("onnxruntime-failed", "onnxruntime", path=path or "model")
    with pytest.raises(ModelError, check=check):
        open_session(Model(model, path=path), ["c1"], 1)
    with pytest.raises(ModelError, check=check):
        open_packed_session(model.SerializeToString(), 1, path)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 3, 16, 16), onnx.TensorProto.FLOAT),
        ((1, 3, 16, 16), onnx.TensorProto.FLOAT16),
        (("n", 3, 16, 16), onnx.TensorProto.FLOAT),
    ],
)
def test_fetched_values_keep_their_order_types_and_shapes(
    shape: tuple[int | str, ...], dtype: int
) -> None:
    model = conv_net(shape, dtype)
    model.graph.node.append(
        onnx.helper.make_node("Cast", ["out"], ["wide"], to=onnx.TensorProto.DOUBLE)
    )
    model.graph.node.append(onnx.helper.make_node("ArgMax", ["out"], ["best"], axis=1))
    fetcher = TensorFetcher(open_session(load(model), ["best", "out", "wide"], 1))
    images = FEED["images"].astype(onnx.helper.tensor_dtype_to_np_dtype(dtype))
    values: dict[str, Any] = fetcher.run({"images": images, "unused": np.zeros(3)})
    assert {name: array.dtype.name for name, array in values.items()} == {
        "best": "int64",
        "out": images.dtype.name,
        "wide": "float64",
    }
    best, out, wide = values.values()
    assert out.shape == wide.shape == (1, 4, 16, 16) and np.abs(out).max() > 0
    assert (best[:, 0] == out.argmax(axis=1)).all() and (wide == out).all()


# Workers, and the bytes that they hold


@pytest.mark.parametrize(
    ("fetched", "cores", "counted", "count"),
    [
        (1, 0, 0, 1),
        (1, 1, 0, 1),
        (1, 2, 0, 2),
        (1, 3, 0, 3),
        (1, 4, 0, 2),
        (1, 5, 0, 2),
        (1, 6, 0, 3),
        (1, 7, 0, 3),
        (1, 8, 0, 4),
        (1, 9, 0, 4),
        (1, 10, 0, 4),
        (0, 64, 0, 4),
        (1, 64, 0, 4),
        (64 * MB, 64, 0, 4),
        (64 * MB + 1, 64, 0, 3),
        (85 * MB, 64, 0, 3),
        (86 * MB, 64, 0, 2),
        (128 * MB, 64, 0, 2),
        (128 * MB + 1, 64, 0, 1),
        (256 * MB, 64, 0, 1),
        (257 * MB, 64, 0, 1),
        (1 << 50, 64, 0, 1),
        (1, 64, 1 * MB, 4),
        (1, 64, 102 * MB, 4),
        (1, 64, 103 * MB, 3),
        (1, 64, 128 * MB, 3),
        (1, 64, 129 * MB, 2),
        (1, 64, 170 * MB, 2),
        (1, 64, 171 * MB, 1),
        (1, 64, 4096 * MB, 1),
    ],
)
def test_worker_count_by_cores_and_bytes(
    fetched: int, cores: int, counted: int, count: int
) -> None:
    assert (limits.FETCHED, limits.COUNTED) == (256 * MB, 512 * MB)
    assert worker_count(fetched, cores, counted) == count


@pytest.mark.parametrize(
    ("tensors", "values"),
    [([], 0), (["images"], 2 * 3 * 5), (["images", "c1"], 2 * 3 * 5 + 2 * 4 * 5)],
)
def test_fetched_bytes_count_open_dimensions_as_one(tensors: list[str], values: int) -> None:
    assert sample_bytes(Model(conv_net((2, 3, "h", 5))), tensors) == 4 * values


# Inputs and tensors of a model


def with_inputs(*inputs: onnx.ValueInfoProto, path: str = "") -> Model:
    model = conv_net()
    model.graph.input.extend(inputs)
    return Model(model, path=path)


def test_input_specs_have_shapes_and_types() -> None:
    assert input_specs(
        with_inputs(
            make_value("open", onnx.TensorProto.UINT8, ["n", 0, -1, 1, 2]),
            make_value("scalar", onnx.TensorProto.BOOL, []),
            make_value("half", onnx.TensorProto.FLOAT16, [None]),
            make_value("w1", onnx.TensorProto.FLOAT, [4, 3, 3, 3]),  # an initializer
        )
    ) == [
        InputSpec("images", (1, 3, 16, 16)),
        InputSpec("open", (None, None, None, 1, 2), "uint8"),
        InputSpec("scalar", (), "bool"),
        InputSpec("half", (None,), "float16"),
    ]


@pytest.mark.parametrize(
    ("value", "code", "text"),
    [
        (make_value("in", onnx.TensorProto.STRING, [1]), "wrong-type", "object"),
        (make_value("in", onnx.TensorProto.COMPLEX64, [1]), "wrong-type", "complex64"),
        (make_value("in", onnx.TensorProto.FLOAT, None), "unknown-rank", ""),
        (make_value("in", 0, [1]), "not-a-tensor", ""),
        (onnx.ValueInfoProto(name="in"), "not-a-tensor", ""),
        (
            onnx.helper.make_tensor_sequence_value_info("in", onnx.TensorProto.FLOAT, [1]),
            "not-a-tensor",
            "",
        ),
    ],
    ids=["string", "complex", "no shape", "no type", "nothing", "sequence"],
)
@each_path
def test_inputs_that_cannot_be_fed_are_rejected(
    value: onnx.ValueInfoProto, code: str, text: str, path: str
) -> None:
    with pytest.raises(ModelError, check=has(code, text, path=path or "model", node="in")):
        input_specs(with_inputs(value, path=path))


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("w1", "constant-tensor", "'w1'"),
        ("c11", "unknown-choice", "'c1'?"),
        ("imagess", "unknown-choice", "'images'?"),
        ("quite another", "unknown-choice", "'quite another'"),
    ],
)
@each_path
def test_tensors_that_are_not_computed_are_rejected(
    name: str, code: str, text: str, path: str
) -> None:
    model = Model(conv_net(), path=path)
    check_tensors(model, ["images", "c1", "out"])
    with pytest.raises(ModelError, check=has(code, text, path=path or "model", node=name)):
        check_tensors(model, ["c1", name])


# The part of a model


def names(graph: onnx.GraphProto) -> dict[str, list[str]]:
    return {
        part: [value.name for value in getattr(graph, part)]
        for part in ("node", "initializer", "input", "output")
    }


@pytest.mark.parametrize("ir_version", [3, 4, 9])
def test_partial_model_has_what_its_tensors_need(ir_version: int, model: onnx.ModelProto) -> None:
    """Weights are inputs only for IR version 3, which needs them there."""
    model.ir_version = ir_version
    model.graph.input.extend(
        [
            make_value("w2", onnx.TensorProto.FLOAT, [4, 4, 3, 3]),
            make_value("w3", onnx.TensorProto.FLOAT, [4, 4, 3, 3]),
            make_value("unused", onnx.TensorProto.FLOAT, [1]),
        ]
    )
    whole, weights = Model(model), ["w2"] if ir_version < 4 else []
    part = partial_model(whole, ["r2"])
    assert names(part.graph) == {
        "node": ["conv1", "sigmoid1", "mul1", "conv2", "relu2"],
        "initializer": ["w1", "w2"],
        "input": ["images", *weights],
        "output": ["r2"],
    }
    assert (part.ir_version, part.opset_import[0].version, part.graph.name) == (
        ir_version,
        17,
        "net",
    )
    # Tensors that are fed are not computed, and those that are not needed are not fed.
    fed = [make_value(name, onnx.TensorProto.FLOAT, [1, 4, 16, 16]) for name in ("c1", "a1")]
    assert names(partial_model(whole, ["r2"], fed).graph) == {
        "node": ["conv2", "relu2"],
        "initializer": ["w2"],
        "input": [*weights, "c1"],
        "output": ["r2"],
    }
    both = names(partial_model(whole, ["out", "c1"], fed[:1]).graph)
    assert (both["node"], both["output"]) == (["conv2", "relu2", "conv3"], ["out", "c1"])


def test_partial_model_takes_the_shape_of_a_fed_input() -> None:
    fed = make_value("images", onnx.TensorProto.FLOAT, [2, 3, 16, 16])
    assert list(partial_model(Model(conv_net()), ["c1"], [fed]).graph.input) == [fed]


def test_partial_model_keeps_functions_and_sparse_weights_and_gets_a_name(
    model: onnx.ModelProto,
) -> None:
    model.graph.name = ""
    relu, opset = onnx.helper.make_node("Relu", ["x"], ["y"]), onnx.helper.make_opsetid("", 17)
    model.functions.append(onnx.helper.make_function("own", "F", ["x"], ["y"], [relu], [opset]))
    for name in ("sparse", "unneeded"):
        values = onnx.numpy_helper.from_array(np.ones(1, np.float32), name)
        places = onnx.numpy_helper.from_array(np.zeros(1, np.int64), f"{name}_at")
        model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, places, [4]))
    model.graph.node.append(onnx.helper.make_node("Add", ["out", "sparse"], ["sum"], "add"))
    part = partial_model(Model(model), ["sum"])
    assert [s.values.name for s in part.graph.sparse_initializer] == ["sparse"]
    assert part.graph.name == "calibration" and [f.name for f in part.functions] == ["F"]


@pytest.mark.parametrize(("version", "limited"), [(3, 3), (8, 8), (10, 10), (11, 10), (14, 10)])
def test_partial_model_has_an_ir_version_that_onnxruntime_reads(
    version: int, limited: int, model: onnx.ModelProto
) -> None:
    model.ir_version = version
    assert (partial_model(Model(model), ["out"]).ir_version, model.ir_version) == (limited, version)


def test_external_folder(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(conv_net(), path)
    assert external_folder(load(path)) == "" == external_folder(Model(conv_net()))
    save_external(path, threshold=500)  # the first weight is smaller
    assert external_folder(load(path)) == str(tmp_path)
    with pytest.raises(
        ModelError, check=has("external-weights", "'w.bin'", path="model", node="w2")
    ):
        external_folder(Model(onnx.load(path, load_external_data=False)))
    model = load(path)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, check=has("file-missing", "'w.bin'", path=str(path), node="w2")):
        external_folder(model)


# Data for the workers of a cluster


def test_shared_data_has_the_same_samples_under_the_same_numbers(tmp_path: Path) -> None:
    write_pictures(tmp_path, 5)
    data = open_data(tmp_path, [InputSpec("images", (2, 3, 16, 16))], max_images=3)
    copy = pickle.loads(pickle.dumps(share_dataset(data)))
    assert (len(copy), copy.batch, list(copy.indices)) == (2, 2, [0, 1, 2])
    for theirs, ours in zip(copy, data, strict=True):
        assert np.array_equal(theirs["images"], ours["images"])
    held = copy.source
    assert isinstance(held, VerifiedSource) and held.is_images and held.single_rows
    assert [held.name(k) for k in range(held.count())] == [f"picture00{k}.png" for k in (0, 2, 4)]
    assert held.settings() == data.source.settings() and held.digest(1) == data.source.digest(2)


def test_shared_data_rejects_other_files(tmp_path: Path) -> None:
    path, other = write_pictures(tmp_path, 2)
    data = share_dataset(open_data(tmp_path, [InputSpec("images", (1, 3, 16, 16))]))
    path.write_bytes(other.read_bytes())
    with pytest.raises(ClusterError, check=has("different-files", path.name)):
        data.source.load(0)
    path.unlink()
    with pytest.raises(ClusterError, check=has("file-unreadable", path.name)):
        data.source.load(0)
