import gzip
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon
import pytest

from qdqtool import extract, predict
from qdqtool.commands import cli
from qdqtool.errors import ModelError
from qdqtool.ir import modelfile
from qdqtool.ir.modelfile import load, load_full, save
from qdqtool.proto import external_data as external
from qdqtool.runtime.sessions import open_proto
from qdqtool.util import limits
from tests.calibration.nets import conv_net, run_all
from tests.contract import residual
from tests.errors import has
from tests.proto.test_external_data import BINARY_DOCUMENTATION
from tests.trt.evidence import HOME

CASE = HOME / "yolov8-orin-trt8412-excerpts" / "model.onnx.gz"


def write(folder: Path, data: bytes) -> Path:
    (folder / "m.onnx").write_bytes(data)
    return folder / "m.onnx"


@pytest.fixture(scope="module")
def data() -> bytes:
    """Return a model of 502 nodes."""
    return gzip.decompress(CASE.read_bytes())


def test_load_accepts_paths_bytes_messages_and_graphs(tmp_path: Path, data: bytes) -> None:
    path, proto = write(tmp_path, data), onnx.ModelProto.FromString(data)
    names = [n.name for n in proto.graph.node]
    assert len(names) == 502
    for source in (CASE, path, str(path), data, proto, onnx_graphsurgeon.import_onnx(proto)):
        assert [n.name for n in load(source).nodes] == names
    assert load(path).sha256 == load(data).sha256


# Results and copies of a model repeat its names: 302 MB of names took 4 GB of memory.


def named(*names: str) -> onnx.ModelProto:
    nodes = [onnx.helper.make_node("Relu", ["x"], [name]) for name in names]
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names
    ]
    start = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    return onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [start], ends))


def test_name_is_at_most_65536_characters_long(tmp_path: Path) -> None:
    load(named("y" * 65536))
    path = write(tmp_path, named("y" * 65537).SerializeToString())
    with pytest.raises(ModelError, check=has("name-too-long", path=str(path))) as caught:
        load(path)
    assert "65537" in str(caught.value) and "65536" in str(caught.value)


def test_names_of_model_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMES", 2001)
    load(named("y" * 1000, "z" * 1000))
    with pytest.raises(ModelError, check=has("names-too-long", path="model in memory")):
        load(named("y" * 1000, "z" * 1001))


# External weights


def with_external_weight(entries: Mapping[str, str] | list[tuple[str, str]]) -> onnx.ModelProto:
    proto = conv_net()
    tensor = proto.graph.initializer[0]
    assert len(tensor.raw_data) == 432
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in entries.items() if isinstance(entries, Mapping) else entries:
        tensor.external_data.add(key=key, value=value)
    return proto


@pytest.mark.parametrize(
    ("entries", "code"),
    [
        ({"location": "m.onnx", "offset": "-5"}, "tensor-damaged"),
        ({"location": "m.onnx", "offset": "x"}, "tensor-damaged"),
        ({"location": "m.onnx", "length": "99999999999"}, "tensor-damaged"),
        ({"location": "/etc/hostname"}, "outside-folder"),
        ({"location": "../m.onnx"}, "outside-folder"),
        ({"location": "none.bin"}, "file-missing"),
        ({"location": "."}, "not-a-file"),
        ({"location": ""}, "not-a-file"),
        ({}, "not-a-file"),
    ],
)
def test_missing_or_foreign_external_weight_is_an_error(
    tmp_path: Path, entries: dict[str, str], code: str
) -> None:
    proto = with_external_weight(entries)
    (tmp_path / "in").mkdir()
    for path in (tmp_path / "m.onnx", tmp_path / "in" / "m.onnx"):
        path.write_bytes(proto.SerializeToString())
    with pytest.raises(
        ModelError, check=has(code, path=str(path), node=proto.graph.initializer[0].name)
    ):
        load_full(path)


# The current folder is not the folder of a model in memory.
def test_external_weight_of_a_model_in_memory_is_missing(current_folder: Path) -> None:
    (current_folder / "w.bin").write_bytes(bytes(432))
    proto = with_external_weight({"location": "w.bin"})
    with pytest.raises(ModelError, check=has("file-missing", path="model"), match="memory"):
        load_full(proto)


@pytest.mark.parametrize(
    ("entries", "value"),
    [
        ([("location", "w.bin"), ("length", "433")], "433"),
        ([("location", "w.bin"), ("location", "v.bin")], "location"),
    ],
    ids=["length beyond dimensions", "two locations"],
)
def test_wrong_entry_of_external_weight_is_an_error(
    tmp_path: Path, entries: list[tuple[str, str]], value: str
) -> None:
    # A stated length of 3 GB in a sparse file was read for a tensor of a hundred numbers.
    path = write(tmp_path, with_external_weight(entries).SerializeToString())
    (tmp_path / "w.bin").write_bytes(bytes(500))
    refused = has("tensor-damaged", path=str(path), node=conv_net().graph.initializer[0].name)
    with pytest.raises(ModelError, check=refused, match=value):
        load(path)


def test_external_weights_of_many_tensors_do_not_share_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty tensors that shared 120 MB of a sparse file took 7 GB of memory."""
    proto = with_external_weight({"location": "w.bin"})
    for number in range(2):
        proto.graph.initializer.add().CopyFrom(proto.graph.initializer[0])
        proto.graph.initializer[-1].name = f"again {number}"
    (tmp_path / "w.bin").write_bytes(bytes(432))
    path = write(tmp_path, proto.SerializeToString())
    assert load(path)
    monkeypatch.setattr(limits, "EXTERNAL_SHARED", 2 * 432 - 1)
    with pytest.raises(ModelError, check=has("weights-damaged", path=str(path))):
        load(path)


@pytest.mark.parametrize("entries", [{"location": "w.bin"}, {"location": "w.bin", "length": "432"}])
def test_external_weight_may_be_followed_by_other_data(
    tmp_path: Path, entries: dict[str, str]
) -> None:
    original = conv_net().graph.initializer[0]
    (tmp_path / "w.bin").write_bytes(original.raw_data + b"more")
    (tmp_path / "m.onnx").write_bytes(with_external_weight(entries).SerializeToString())
    values = load(tmp_path / "m.onnx").constant(original.name)
    assert values is not None and np.array_equal(values, onnx.numpy_helper.to_array(original))


# Damaged models


@pytest.fixture
def proto() -> onnx.ModelProto:
    return conv_net()


# The product of 20,000 such dimensions took half a minute, and that of 17 exceeds the range of a float.
@pytest.mark.parametrize("rank", [17, 2_000])
def test_initializer_with_impossible_dimensions_is_an_error(
    rank: int, proto: onnx.ModelProto
) -> None:
    proto.graph.initializer[0].dims.extend([1 << 62] * rank)
    name = proto.graph.initializer[0].name
    with pytest.raises(ModelError, check=has("tensor-damaged", path="model in memory", node=name)):
        load(proto)


@pytest.mark.parametrize("rank", [17, 2_000])
def test_input_with_impossible_dimensions_has_no_shape(
    tmp_path: Path, rank: int, proto: onnx.ModelProto
) -> None:
    for _ in range(rank):
        proto.graph.input[0].type.tensor_type.shape.dim.add(dim_value=1 << 62)
    assert load(proto).shape(proto.graph.input[0].name) is None
    path = write(tmp_path, proto.SerializeToString())
    assert cli.run(["predict", str(path), "--gpu", "T4", "-o", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    "weights",
    [
        onnx.helper.make_tensor("c1.weight", onnx.TensorProto.STRING, [1, 1, 3, 3], [b"a"] * 9),
        onnx.helper.make_tensor("c1.weight", onnx.TensorProto.FLOAT, [0, 8, 3, 3], []),
    ],
    ids=["texts", "empty"],
)
def test_unusable_weights_do_not_stop_prediction(weights: onnx.TensorProto) -> None:
    proto = residual()
    next(t for t in proto.graph.initializer if t.name == "c1.weight").CopyFrom(weights)
    assert predict(proto, target="rtx1.7").convolutions
    extract(proto, node="c1", hops=1, private=True)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty"),
        (b"not a model", "wrong-format"),
        (b"\x1f\x8b\x08broken", "file-damaged"),
        (gzip.compress(b"not a model"), "wrong-format"),
        (b"\x08\x08\xff", "file-damaged"),
        (CASE.read_bytes()[:2000], "file-damaged"),
    ],
    ids=["empty", "text", "broken gzip", "compressed text", "broken protobuf", "cut-off gzip"],
)
def test_file_that_is_not_a_model_is_an_error(tmp_path: Path, content: bytes, code: str) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, check=has(code, path=str(path))) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_folder_or_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, check=has("not-a-file", path=str(tmp_path))):
        load(tmp_path)
    missing = str(tmp_path / "none.onnx")
    with pytest.raises(ModelError, check=has("file-missing", path=missing)):
        load(missing)


def refer_to_attribute(proto: onnx.ModelProto) -> None:
    attribute = proto.graph.node[0].attribute[0]
    attribute.ref_attr_name = "alpha"
    attribute.ClearField("f")


def refer_to_attribute_in_branch(proto: onnx.ModelProto) -> None:
    refer_to_attribute(proto)
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    branch = onnx.helper.make_graph(proto.graph.node, "b", [], [y])
    node = onnx.helper.make_node(
        "If", ["x"], ["y"], "outer", then_branch=branch, else_branch=branch
    )
    del proto.graph.node[:]
    proto.graph.node.append(node)


@pytest.mark.parametrize(
    ("damage", "code", "node", "value"),
    [
        (lambda proto: proto.graph.input.add(), "missing-name", "", "input"),
        (lambda proto: proto.graph.output.add(), "missing-name", "", "output"),
        (lambda proto: proto.graph.input.add(name="x"), "duplicate", "x", "'x'"),
        (
            lambda proto: proto.opset_import.add(version=1 << 40),
            "wrong-opset",
            "",
            "1099511627776",
        ),
        (refer_to_attribute, "node-damaged", "n", "'alpha'"),
        (refer_to_attribute_in_branch, "node-damaged", "n", "'alpha'"),
    ],
    ids=["input", "output", "two inputs", "opset", "attribute", "attribute in branch"],
)
def test_damaged_model_is_rejected_by_every_command(
    damage: Callable[[onnx.ModelProto], Any],
    code: str,
    node: str,
    value: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[1, 3, 4, 4] x) => (float[1, 3, 4, 4] y)'
        "{ [n] y = Elu <alpha = 1.0> (x) }"
    )
    load(proto)
    damage(proto)
    path = write(tmp_path, proto.SerializeToString())
    for source in (proto, path, path.read_bytes()):
        with pytest.raises(ModelError, check=has(code, node=node), match=value):
            load(source)
    for command in ("predict", "predict --target rtx1.7", "predict --gpu T4", "fix -o o.onnx"):
        assert cli.run([*command.split(), str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


# Saving


def test_save_never_overwrites_source(tmp_path: Path, data: bytes) -> None:
    path = write(tmp_path, data)
    with pytest.raises(ModelError, check=has("output-is-input", path=str(path))):
        save(load(path).proto, path, source=str(path))
    assert path.read_bytes() == data


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelfile, "MAX_PROTO_BYTES", 100)


@pytest.mark.usefixtures("small_limit")
def test_large_model_is_saved_with_external_weights(tmp_path: Path, proto: onnx.ModelProto) -> None:
    weights = np.random.default_rng(0).normal(0, 1, (4, 4, 5, 20)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, "large"))
    save(proto, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx.data").stat().st_size == weights.nbytes
    saved = onnx.load(tmp_path / "m.onnx")
    assert (onnx.numpy_helper.to_array(saved.graph.initializer[-1]) == weights).all()
    feed = [{"images": np.ones((1, 3, 16, 16), np.float32)}]
    assert (run_all(saved, feed, ["r2"])["r2"] == run_all(proto, feed, ["r2"])["r2"]).all()


@pytest.mark.parametrize("build", BINARY_DOCUMENTATION)
def test_documentation_that_is_not_utf_8_is_saved(
    build: Callable[[], onnx.ModelProto], tmp_path: Path
) -> None:
    model = build()
    save(model, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").read_bytes() == model.SerializeToString(deterministic=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def assert_same_weights(a: onnx.ModelProto, b: onnx.ModelProto) -> None:
    for first, second in zip(a.graph.initializer, b.graph.initializer, strict=True):
        if first.data_type == onnx.TensorProto.STRING:
            assert first.string_data == second.string_data
        else:
            assert (
                onnx.numpy_helper.to_array(first) == onnx.numpy_helper.to_array(second)
            ).all(), first.name


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("build", BINARY_DOCUMENTATION)
def test_large_model_with_documentation_that_is_not_utf_8_is_saved(
    build: Callable[[], onnx.ModelProto], tmp_path: Path
) -> None:
    save(build(), tmp_path / "m.onnx")
    assert_same_weights(onnx.load(tmp_path / "m.onnx"), build())


@pytest.mark.usefixtures("small_limit")
def test_texts_and_half_bytes_stay_in_the_message(tmp_path: Path, proto: onnx.ModelProto) -> None:
    texts = onnx.numpy_helper.from_array(np.array([b"word"] * 600, object), "texts")
    halves = onnx.helper.make_tensor("halves", onnx.TensorProto.INT4, [3000], [1, -2, 3] * 1000)
    flags = onnx.helper.make_tensor("flags", onnx.TensorProto.BOOL, [3000], [1, 0, 1] * 1000)
    proto.graph.initializer.extend([texts, halves, flags])
    save(proto, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx.data").stat().st_size == 3000
    assert_same_weights(onnx.load(tmp_path / "m.onnx"), proto)


@pytest.mark.usefixtures("small_limit")
def test_session_of_large_model(monkeypatch: pytest.MonkeyPatch, proto: onnx.ModelProto) -> None:
    feed = {"images": np.ones((1, 3, 16, 16), np.float32)}
    expected = open_proto(proto, 1).run(None, feed)

    monkeypatch.setattr(external, "serialize", lambda proto: None)
    results = open_proto(proto, 1, folder="/nowhere").run(None, feed)
    assert all((a == b).all() for a, b in zip(expected, results, strict=True))


# Values


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "int8", "uint8", "int32", "int64", "bool", "uint16"]
)
def test_array_of_returns_values(dtype: str, raw: bool) -> None:
    values = np.array([[0, 1, 3], [5, 7, 100]]).astype(dtype)
    tensor = onnx.numpy_helper.from_array(values, "w")
    if not raw:
        numbers = values.reshape(-1).tolist()
        tensor = onnx.helper.make_tensor("w", tensor.data_type, values.shape, numbers)
    array = external.to_array(tensor)
    assert array.dtype == values.dtype and np.array_equal(array, onnx.numpy_helper.to_array(tensor))


@pytest.mark.parametrize("damage", [{"dims": [4, 2]}, {"dims": [2, 3], "raw_data": b"1"}])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bool", "uint16"])
def test_array_of_damaged_tensor_is_an_error(dtype: str, damage: dict[str, Any]) -> None:
    values = np.ones((2, 3), dtype)
    fields = {"raw_data": values.tobytes(), **damage}
    tensor = onnx.TensorProto(
        name="w", data_type=onnx.helper.np_dtype_to_tensor_dtype(values.dtype), **fields
    )
    with pytest.raises(ModelError, check=has("tensor-damaged", path="m.onnx", node="w")):
        external.to_array(tensor, "m.onnx")
