"""What changed between two models: known beforehand, since the test made the change."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qdqtool
from qdqtool.errors import QdqtoolError
from qdqtool.model.graph import Model
from qdqtool.model.view import View
from qdqtool.render.predict_text import verdict
from qdqtool.verification.comparing.matching import match
from qdqtool.verification.comparing.result import Change, Comparison, Lost, NodeChange
from qdqtool.verification.comparing.words import answer
from tests.raising import raises
from tests.trt.builder import Graph
from tests.verification.comparing.networks import float_network, network

T = "trt8.5"


def compare(a: onnx.ModelProto, b: onnx.ModelProto) -> Comparison:
    return qdqtool.compare(a, b, target=T)


def changed(result: Comparison) -> dict[str, tuple[Change, ...]]:
    return {n.name: n.changes for n in result.changed}


def at(result: Comparison, name: str) -> NodeChange:
    return next(n for n in result.nodes if n.name == name)


def test_models_that_differ_in_convolutions() -> None:
    result = compare(float_network(), network())
    assert (result.a.quantized, result.b.quantized, result.a.int8, result.b.int8) == (
        False,
        True,
        0,
        7,
    )
    assert result.summary()["gained_int8"] == 7 and result.ok
    assert result.summary()["scales"] == 0  # there were none
    result = compare(network(3), network(2))
    assert {n.name for n in result.where(Change.ONLY_IN_A)} == {
        "b2.a",
        "b2.b",
    } and not result.where(Change.ONLY_IN_B)
    result = compare(network(), network(residual=False))
    assert result.where(Change.LOST_INT8_OUTPUT) and not result.ok
    a, b = result.summary()["conversions"]
    assert b > a and {n.name for n in result.where(Change.LOST_QDQ)} == {
        "b0.add",
        "b1.add",
        "b2.add",
    }
    result = compare(network(), network())
    assert (result.changed, result.ok, result.matched_by, result.summary()["lost_int8"]) == (
        [],
        True,
        "names",
        0,
    )


@pytest.mark.parametrize(
    ("weights", "data", "lost"),
    [
        ("float", 0.1, Lost.WEIGHTS),
        ("qdq", None, Lost.DATA),
        ("float", None, Lost.PAIRS),
    ],
)
def test_lost_pairs_say_which_are_gone(weights: str, data: float | None, lost: Lost) -> None:
    result = compare(network(), network(spoilt=[1], spoilt_weights=weights, data=data))
    assert result.summary()["lost_int8"] == 1 and not result.ok
    node = at(result, "b1.a")
    assert (node.lost, Change.LOST_INT8 in node.changes) == (lost, True)


def test_scales_that_differ() -> None:
    result = compare(network(scale=0.1), network(scale=0.25))
    assert (result.count(Change.SCALE), result.count(Change.WEIGHTS_SCALE)) == (
        10,
        0,
    )  # 7 convolutions, 3 Adds
    assert at(result, "b0.a").factor == pytest.approx(2.5)
    rounded = compare(network(scale=0.1), network(scale=0.10005))
    assert rounded.count(Change.SCALE) == 10 and at(rounded, "b0.a").factor == pytest.approx(1.0005)
    result = compare(network(), network(spoilt=[2], spoilt_weights="tensor"))
    assert changed(result) == {"b2.a": (Change.WEIGHTS_SCALE,)}
    node = at(result, "b2.a")
    assert (
        node.a is not None and node.b is not None and node.a.weights_scale and node.b.weights_scale
    )
    assert (node.a.weights_scale.count, node.b.weights_scale.count) == (8, 1)


def test_branches_and_reasons() -> None:
    """A zero point that is not 0 keeps a convolution from INT8 although nothing was removed."""
    spoilt = network()
    for tensor in spoilt.graph.initializer:
        if tensor.name in ("b1.a.in.Q.zero", "b1.a.in.DQ.zero"):
            tensor.CopyFrom(onnx.helper.make_tensor(tensor.name, onnx.TensorProto.INT8, [], [3]))
    node = at(compare(network(), spoilt), "b1.a")
    assert (node.lost, node.finding) == (Lost.FINDING, "ZP-NONZERO")

    def branches(order: list[str]) -> onnx.ModelProto:
        g = Graph()
        x = g.input(1, 4, 8, 8)
        made = {name: g.conv(x, name, scale=None, weights="float") for name in order}
        return g.model(g.concat([made["p"], made["q"], made["r"]], "cat"))

    found = pairs(branches(["p", "q", "r"]), branches(["r", "p", "q"]))
    assert found == {n: n for n in ("p", "q", "r", "cat")}


def test_what_is_no_network_in_common(g: Graph) -> None:
    other = g.model(g.conv(g.input(1, 3, 9, 9), "c", 5, k=5, scale=None, weights="float"))
    with raises(QdqtoolError, "_models layer"):
        compare(network(), other)
    g = Graph()
    # The stem and its name are those of the other network, and so are some shapes further down
    x = g.relu(g.conv(g.input(1, 4, 16, 16), "b.stem", scale=None, weights="float"), "b.stem.relu")
    for i, (channels, k) in enumerate([(8, 5), (16, 3), (8, 1), (8, 3), (8, 5), (32, 1), (8, 3)]):
        x = g.relu(g.conv(x, f"b{i}.a", channels, k=k, scale=None, weights="float"), f"b{i}.ra")
    for a, b in (
        (float_network(), g.model(x)),
        (g.model(x), float_network()),
        (network(4), g.model(x)),
    ):
        with pytest.raises(QdqtoolError, match="different networks"):
            compare(a, b)


def test_scales_exchanged_between_channels_and_scales_that_are_none() -> None:
    def spoil(
        change: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]],
    ) -> onnx.ModelProto:
        proto = network()
        for tensor in proto.graph.initializer:
            values = onnx.numpy_helper.to_array(tensor)
            if tensor.name.startswith("b1.a.w") and values.dtype == np.float32 and values.ndim == 1:
                tensor.CopyFrom(onnx.numpy_helper.from_array(change(values.copy()), tensor.name))
        return proto

    assert not compare(network(), spoil(lambda v: v)).changed
    for change in (
        lambda v: v[::-1],
        lambda v: np.roll(v, 1),
        *(
            lambda v, bad=bad: np.where(np.arange(v.size) == 3, np.float32(bad), v)
            for bad in (0, -0.1, np.nan, np.inf)
        ),
    ):
        result = compare(network(), spoil(change))
        assert [n.name for n in result.where(Change.WEIGHTS_SCALE)] == ["b1.a"]
        json.dumps(result.as_json(), allow_nan=False)


def test_times_files_and_blocks(tmp_path: Path) -> None:
    result = compare(network(), network(spoilt=[0]))
    data = json.loads(json.dumps(result.as_json()))
    assert (data["schema"], data["summary"]["lost_int8"]) == ("qdqtool/comparison/1", 1)
    assert data["summary"]["conversions"] == [result.a.conversions, result.b.conversions]
    lost = next(n for n in data["nodes"] if n["name"] == "b0.a")
    assert (lost["a"]["precision"], lost["b"]["precision"], lost["lost"]) == (
        "INT8",
        "FLOAT",
        "weights",
    )
    assert (
        lost["a"]["quantized"] == {"data": True, "weights": True}
        and lost["b"]["quantized"]["weights"] is False
    )
    result = qdqtool.compare(float_network(), network(), target=T, gpu="T4")
    assert (
        result.a.ms
        and result.b.ms
        and result.times_as_long == pytest.approx(result.b.ms / result.a.ms)
    )
    assert not result.a.measured
    data = network().SerializeToString()
    (tmp_path / "a.onnx").write_bytes(data)
    (tmp_path / "b.onnx.gz").write_bytes(gzip.compress(data))
    (tmp_path / "c.bin").write_bytes(data)
    for other in ("b.onnx.gz", "c.bin"):
        assert not qdqtool.compare(tmp_path / "a.onnx", tmp_path / other).changed


def test_forms_that_tensorrt_does_not_take_are_told_first(tmp_path: Path) -> None:
    """onnxruntime's own exports: integer operators, dynamic ranges, UINT8, zero points."""
    ort = pytest.importorskip("onnxruntime.quantization")
    path = tmp_path / "float.onnx"
    onnx.save(float_network(), path)

    class Reader(ort.CalibrationDataReader):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.left = [{onnx.load(path).graph.input[0].name: np.ones((1, 4, 16, 16), np.float32)}]

        def get_next(self) -> dict[str, npt.NDArray[np.float32]] | None:
            return self.left.pop() if self.left else None

    def static(name: str, kind: str, activations: str, **more: Any) -> None:
        ort.quantize_static(
            path,
            tmp_path / name,
            Reader(),
            quant_format=getattr(ort.QuantFormat, kind),
            activation_type=getattr(ort.QuantType, activations),
            **more,
        )

    ort.quantize_dynamic(path, tmp_path / "dynamic.onnx")
    static("integers.onnx", "QOperator", "QUInt8")
    static("unsigned.onnx", "QDQ", "QUInt8")
    static("asymmetric.onnx", "QDQ", "QInt8")
    for name, told in (
        ("dynamic.onnx", "DynamicQuantizeLinear"),
        ("integers.onnx", "QLinearConv"),
        ("unsigned.onnx", "UINT8"),
        ("asymmetric.onnx", "zero points"),
    ):
        assert told in verdict(qdqtool.predict(tmp_path / name, T)), name
        if told in ("DynamicQuantizeLinear", "QLinearConv"):
            for a, b in ((path, tmp_path / name), (tmp_path / name, path)):
                with pytest.raises(QdqtoolError, match=told):
                    qdqtool.compare(a, b)
        else:
            result = qdqtool.compare(path, tmp_path / name, target=T)
            assert told in result.b.obstacle and answer(result).startswith(
                f"B has {result.b.obstacle}"
            )
            assert result.b.int8 == result.count(Change.GAINED_INT8) == 0
    static(
        "again.onnx",
        "QDQ",
        "QInt8",
        weight_type=ort.QuantType.QInt8,
        extra_options={"ActivationSymmetric": True},
    )  # as those lines say
    again = qdqtool.compare(path, tmp_path / "again.onnx", target=T)
    assert not again.b.obstacle and again.count(Change.GAINED_INT8)
    assert not qdqtool.compare(path, path).a.obstacle and "--gpu" in verdict(qdqtool.predict(path))


def pairs(first: onnx.ModelProto, second: onnx.ModelProto) -> dict[str, str]:
    one = Model(first)
    return {
        one.nodes[i].name: n.name for i, n in match(View(one), View(Model(second))).pairs.items()
    }


def test_partners() -> None:
    for other in (float_network(), network()):
        assert pairs(float_network(), other) == {n.name: n.name for n in float_network().graph.node}
    found = pairs(network(4), network(4, left_out=3))
    assert not {"b3.a", "b3.b"} & set(found) and all(a == b for a, b in found.items())
    assert {"b.stem", "b0.a", "b0.b", "b1.a", "b1.b", "b2.a", "b2.b"} <= set(found)

    # An exporter that numbers its nodes: with one convolution less, the same name is another convolution
    def chain(sizes: list[int]) -> onnx.ModelProto:
        g = Graph()
        x = g.input(1, 3, 8, 8)
        for i, size in enumerate(sizes):
            x = g.relu(g.conv(x, f"Conv_{i}", size, scale=None, weights="float"), f"Relu_{i}")
        return g.model(x)

    found = pairs(chain([4, 8, 8, 8, 16, 32, 16, 8, 4, 12]), chain([8, 8, 8, 16, 32, 16, 8, 4, 12]))
    assert all(found[f"Conv_{i}"] == f"Conv_{i - 1}" for i in range(4, 10))


@pytest.mark.parametrize("blocks", [1, 3, 12])
def test_other_names_match_by_structure(blocks: int) -> None:
    found = pairs(network(blocks, names="b"), network(blocks, names="layer", scale=0.3))
    assert found == {n: n.replace("b", "layer", 1) for n in found}
    assert len(found) == len(float_network(blocks).graph.node)


@given(st.integers(1, 5), st.booleans(), st.booleans(), st.sampled_from(["b", "x/y"]))
def test_no_node_has_two_partners_and_partners_are_alike(
    blocks: int, half: bool, quantized: bool, names: str
) -> None:
    first = network(blocks) if quantized else float_network(blocks)
    second = network(blocks + half, names=names)
    one, two = Model(first), Model(second)
    found = match(View(one), View(two)).pairs
    assert len({n.index for n in found.values()}) == len(found)
    assert all(one.nodes[i].op == n.op for i, n in found.items())
