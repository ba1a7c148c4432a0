"""Reading and writing model files."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import EncodeError
from onnx import TensorProto, helper, numpy_helper

from qdqtool import extract, predict
from qdqtool.base import budgets
from qdqtool.commands import cli
from qdqtool.errors import ModelError
from qdqtool.model import external, modelfile
from qdqtool.model.modelfile import load, load_full, save
from qdqtool.model.sessions import open_proto
from tests.calibration.nets import conv_net, run_all
from tests.contract import residual
from tests.model.test_message import OTHERWISE
from tests.raising import raises
from tests.trt.evidence import HOME

CASE = HOME / "yolov8-orin-trt8412-excerpts" / "model.onnx.gz"


def test_sources_and_graphsurgeon_graphs(tmp_path: Path) -> None:
    data = gzip.decompress(CASE.read_bytes())
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    names = [n.name for n in load(CASE).nodes]
    assert len(names) == 502
    for source in (data, str(path), onnx.ModelProto.FromString(data)):
        assert [n.name for n in load(source).nodes] == names
    assert load(path).sha256 == load(data).sha256
    gs = pytest.importorskip("onnx_graphsurgeon")
    graph = gs.import_onnx(onnx.ModelProto.FromString(gzip.decompress(CASE.read_bytes())))
    assert [n.op for n in load(graph).nodes if n.op == "Conv"] == ["Conv"] * 82


def test_names_that_no_exporter_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is repeated in everything said of the model: 302 MB of names took 4 GB."""

    def named(*names: str) -> onnx.ModelProto:
        nodes = [helper.make_node("Relu", ["x"], [name]) for name in names]
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
        start = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
        return helper.make_model(helper.make_graph(nodes, "g", [start], ends))

    load(named("y" * budgets.NAME))
    path = tmp_path / "m.onnx"
    path.write_bytes(named("y" * (budgets.NAME + 1)).SerializeToString())
    with raises(ModelError, "_with_short_names m.onnx 65537 65536"):
        load(path)
    monkeypatch.setattr(budgets, "NAMES", 2001)
    load(named("y" * 1000, "z" * 1000))
    with raises(ModelError, "require tensors"):
        load(named("y" * 1000, "z" * 1001))


def test_a_directory_in_the_place_of_weights(tmp_path: Path) -> None:
    proto = conv_net()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=".")
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with raises(ModelError, f"load_full {tensor.name} directory"):
        load_full(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "entries",
    [
        {"location": "m.onnx", "offset": "-5"},
        {"location": "m.onnx", "offset": "x"},
        {"location": "m.onnx", "length": "99999999999"},
        {"location": "/etc/hostname"},
        {"location": "../m.onnx"},
        {"location": "none.bin"},
        {"location": ""},
        {},
    ],
)
def test_external_weights_that_are_not_there_or_elsewhere(
    tmp_path: Path, entries: dict[str, str]
) -> None:
    (tmp_path / "in").mkdir()
    proto = conv_net()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    for path in (tmp_path / "m.onnx", tmp_path / "in" / "m.onnx"):
        path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=f"'{tensor.name}'"):
        load_full(tmp_path / "in" / "m.onnx")


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ((("location", "w.bin"), ("length", "433")), "_length 433 432"),
        ((("location", "w.bin"), ("location", "v.bin")), "_length location"),
        ((("location", "w.bin"),), ""),
        ((("location", "w.bin"), ("length", "432")), ""),
    ],
)
def test_of_a_file_a_tensor_takes_what_its_dimensions_need(
    tmp_path: Path, entries: tuple[tuple[str, str], ...], says: str
) -> None:
    """A length of 3 GB in a sparse file was read for a hundred numbers; one that is not stated is all that is left."""
    proto = conv_net()
    tensor = proto.graph.initializer[0]
    values = numpy_helper.to_array(tensor)
    assert values.nbytes == 432
    (tmp_path / "w.bin").write_bytes(tensor.raw_data + b"more")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in entries:
        tensor.external_data.add(key=key, value=value)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    if says:
        with raises(ModelError, says):
            load(tmp_path / "m.onnx")
    else:
        read = load(tmp_path / "m.onnx").constant(tensor.name)
        assert read is not None and np.array_equal(read, values)


@pytest.mark.parametrize("rank", [17, 20_000])
def test_dimensions_that_no_tensor_has(tmp_path: Path, rank: int) -> None:
    """Their product takes half a minute, and is no number that a float holds."""
    proto = conv_net()
    proto.graph.initializer[0].dims.extend([1 << 62] * rank)
    with raises(ModelError, f"check_names {proto.graph.initializer[0].name}"):
        load(proto)
    proto = conv_net()
    for _ in range(rank):
        proto.graph.input[0].type.tensor_type.shape.dim.add(dim_value=1 << 62)
    assert load(proto).shape(proto.graph.input[0].name) is None
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    assert cli.run(["predict", str(path), "--gpu", "T4", "-o", str(tmp_path / "said")]) == 0


@pytest.mark.parametrize(
    "odd",
    [
        helper.make_tensor("", onnx.TensorProto.STRING, [1, 1, 3, 3], [b"a"] * 9),
        helper.make_tensor("", onnx.TensorProto.FLOAT, [0, 8, 3, 3], []),
    ],
)
def test_weights_that_are_no_numbers_or_none(odd: onnx.TensorProto) -> None:
    proto = residual()
    tensor = next(t for t in proto.graph.initializer if t.name == "c1.weight")
    name = tensor.name
    tensor.CopyFrom(odd)
    tensor.name = name
    assert predict(proto, target="rtx1.7").convolutions
    extract(proto, node="c1", hops=1, private=True)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "_parse model"),
        (b"not a model", "_parse model"),
        (b"\x1f\x8b\x08broken", "unpack read"),
    ],
)
def test_what_is_no_model(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(content)
    with raises(ModelError, says) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_and_what_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx.gz"
    path.write_bytes(CASE.read_bytes()[:2000])
    with pytest.raises(ModelError, match="cut off"):
        load(path)
    with pytest.raises(ModelError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(ModelError, match="no such file"):
        load(tmp_path / "none.onnx")
    path = tmp_path / "m.onnx"
    path.write_bytes(gzip.decompress(CASE.read_bytes()))
    with pytest.raises(ModelError, match="is the input"):
        save(load(path).proto, path, source=str(path))


def save_apart(model: onnx.ModelProto, path: Path) -> None:
    """As one that is over the limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modelfile, "MAX_PROTO_BYTES", 1000)
        save(model, path)


def test_a_model_over_the_limit_is_saved_with_external_weights(tmp_path: Path) -> None:
    model = conv_net()
    big = np.random.default_rng(0).normal(0, 1, (4, 4, 5, 20)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(big, "big"))
    save_apart(model, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx.data").stat().st_size == big.nbytes
    back = onnx.load(tmp_path / "m.onnx")
    assert (onnx.numpy_helper.to_array(back.graph.initializer[-1]) == big).all()
    feed = [{"images": np.ones((1, 3, 16, 16), np.float32)}]
    assert (run_all(back, feed, ["r2"])["r2"] == run_all(model, feed, ["r2"])["r2"]).all()


@pytest.mark.parametrize("made", OTHERWISE)
def test_documentation_that_is_not_utf_8_hinders_no_saving(
    made: Callable[[], onnx.ModelProto], tmp_path: Path
) -> None:
    model = made()
    save(model, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").read_bytes() == model.SerializeToString(deterministic=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    save_apart(model, tmp_path / "over.onnx")
    saved = onnx.load(tmp_path / "over.onnx").graph.initializer
    for found, wanted in zip(saved, model.graph.initializer, strict=True):
        if wanted.name != "texts":
            assert (onnx.numpy_helper.to_array(found) == onnx.numpy_helper.to_array(wanted)).all()


def test_texts_and_half_bytes_stay_in_the_message(tmp_path: Path) -> None:
    model = conv_net()
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.array([b"word"] * 600, object), "texts")
    )
    model.graph.initializer.append(
        onnx.helper.make_tensor("halves", onnx.TensorProto.INT4, [3000], [1, -2, 3] * 1000)
    )
    model.graph.initializer.append(
        onnx.helper.make_tensor("flags", onnx.TensorProto.BOOL, [3000], [1, 0, 1] * 1000)
    )
    save_apart(model, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx.data").stat().st_size == 3000
    back = onnx.load(tmp_path / "m.onnx")
    for name in ("texts", "halves", "flags"):
        found, wanted = (
            onnx.numpy_helper.to_array(t)
            for m in (back, model)
            for t in m.graph.initializer
            if t.name == name
        )
        assert (found == wanted).all(), name


def test_a_session_on_a_model_over_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """protobuf refuses to serialize such a model; here every model is one."""
    model = conv_net()
    feed = {"images": np.ones((1, 3, 16, 16), np.float32)}
    wanted = open_proto(model, 1).run(None, feed)
    monkeypatch.setattr(modelfile, "MAX_PROTO_BYTES", 100)

    def refuse(proto: onnx.ModelProto) -> bytes:
        raise EncodeError("Failed to serialize proto")

    monkeypatch.setattr("qdqtool.model.sessions.serialized", refuse)
    found = open_proto(model, 1, folder="/nowhere").run(None, feed)
    assert all((a == b).all() for a, b in zip(wanted, found, strict=True))


def model() -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 3, 4, 4]) for n in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("Elu", ["x"], ["y"], "n", alpha=1.0)], "g", values[:1], values[1:]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def referring(proto: onnx.ModelProto) -> None:
    attribute = proto.graph.node[0].attribute[0]
    attribute.ref_attr_name = "alpha"
    attribute.ClearField("f")


def referring_inside(proto: onnx.ModelProto) -> None:
    referring(proto)
    inner = helper.make_graph(
        proto.graph.node, "b", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    )
    del proto.graph.node[:]
    proto.graph.node.append(
        helper.make_node("If", ["x"], ["y"], "outer", then_branch=inner, else_branch=inner)
    )


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda proto: proto.graph.input.add(), "check_form input"),
        (lambda proto: proto.graph.output.add(), "check_form output"),
        (lambda proto: proto.graph.input.add(name="x"), "check_form x"),
        (lambda proto: proto.opset_import.add(version=1 << 40), "check_form 1099511627776"),
        (referring, "check_form n alpha"),
        (referring_inside, "check_form n alpha"),
    ],
)
def test_refused_by_every_way_in(
    damage, said, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proto = model()
    load(proto)
    damage(proto)
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    for source in (proto, path, path.read_bytes()):
        with raises(ModelError, said):
            load(source)
    for command in ("predict", "predict --target rtx1.7", "predict --gpu T4", "fix -o o.onnx"):
        assert cli.run([*command.split(), str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize(
    "kind", ["float32", "float64", "float16", "int8", "uint8", "int32", "int64", "bool", "uint16"]
)
def test_values_are_those_that_onnx_reads(kind: str, raw: bool) -> None:
    values = np.array([[0, 1, 3], [5, 7, 100]]).astype(kind)
    tensor = onnx.numpy_helper.from_array(values, "w")
    if not raw:
        tensor = onnx.helper.make_tensor(
            "w", tensor.data_type, values.shape, values.reshape(-1).tolist()
        )
    found = external.array_of(tensor)
    assert found.dtype == values.dtype and np.array_equal(found, onnx.numpy_helper.to_array(tensor))
    for damage in ({"dims": [4, 2]}, {"dims": [2, 3], "raw_data": b"1"}):
        broken = onnx.TensorProto(
            name="w", data_type=tensor.data_type, **{"raw_data": values.tobytes(), **damage}
        )
        with raises(ModelError, "array_of m.onnx w") as raised:
            external.array_of(broken, "m.onnx")
        assert raised.value.path == "m.onnx"
