import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.errors import QdqtoolError
from qdqtool.insertion.calibration_cache import (
    LayerPrecisions,
    cache_header,
    choose_precisions,
    complete_scales,
    format_precisions,
    list_float_tensors,
)
from qdqtool.insertion.ranges import write_table
from qdqtool.insertion.result import Insertion
from qdqtool.insertion.rewrite import QuantizedTensor
from qdqtool.ir.graph import Model
from qdqtool.trt.targets import target_named
from tests.errors import has
from tests.insertion.nets import Net, detector, images, one_layer, run
from tests.insertion.test_scales import table


@pytest.mark.parametrize(
    ("target", "number"),
    [
        ("8.5.2", 8502),
        ("8.5.10", 8510),
        ("8.6.1.6", 8601),
        ("10.3", 100300),
        ("10.3.0.30", 100300),
        ("10.13.3", 101303),
        # A version without patch or minor number is the version that JetPack ships.
        ("trt8.0", 8001),
        ("8.2", 8201),
        ("8.4", 8401),
        ("8.5", 8502),
        ("8.6", 8602),
        ("trt10", 100300),
    ],
)
def test_first_line_is_that_of_the_target(target: str, number: int) -> None:
    assert cache_header(target_named(target)) == f"TRT-{number}-EntropyCalibration2"


@pytest.mark.parametrize("target", ["11", "11.4", "rtx1.7"])
def test_targets_without_calibrators_are_refused(target: str) -> None:
    with pytest.raises(QdqtoolError, check=has("unsupported", parameter="target")):
        cache_header(target_named(target))


def read_cache(path: Path) -> dict[str, float]:
    scales = {}
    for line in path.read_text().splitlines()[1:]:
        name, _, digits = line.rpartition(": ")
        assert len(digits) == 8
        scales[name] = float(np.array([int(digits, 16)], np.uint32).view(np.float32)[0])
    return scales


def quantize(**options: object) -> Insertion:
    return qdqtool.insert(detector(), images(3, 3, 64, "images"), predict=False, **options)  # type: ignore[arg-type]


def test_cache_of_insert_has_every_tensor(tmp_path: Path) -> None:
    result = quantize(target="8.5.2", head="none")
    report = write_table(result, tmp_path / "t.cache")
    assert (tmp_path / "t.cache").read_text().startswith("TRT-8502-EntropyCalibration2\n")
    scales = read_cache(tmp_path / "t.cache")
    assert set(scales) == set(list_float_tensors(Model(detector()))) and not report.scales.missing
    known = [entry for entry in result.activations if entry.tensor in scales]
    assert [scales[entry.tensor] for entry in known] == [np.float32(e.scale) for e in known]


def test_other_tensors_are_measured_on_the_data(tmp_path: Path) -> None:
    onnx.save(one_layer(), tmp_path / "m.onnx")
    result = qdqtool.insert(tmp_path / "m.onnx", images(), predict=False, head="none", method="max")
    result.quantized.append(QuantizedTensor("by channel", [0.5, 0.25], "other", None, "q"))
    report = write_table(result, tmp_path / "t.cache")
    assert report.scales.rules == {"x": "quantizer", "c.out": "measured", "r.out": "measured"}
    scales = read_cache(tmp_path / "t.cache")
    assert list(scales) == ["x", "c.out", "r.out"]
    assert scales["x"] == pytest.approx(max(s["x"].max() for s in images()) / 127, rel=1e-5)
    largest = max(run(one_layer(), sample)[0].max() for sample in images())
    assert scales["r.out"] == pytest.approx(largest / 127, rel=1e-5)


def test_cache_from_a_table_completes_it_without_data(tmp_path: Path, net: Net) -> None:
    model = net.output(net.conv("c1", net.op("Relu", "r", net.conv("c0", "x")))).model()
    path = table(tmp_path, **{"x": 0.5, "r.out": 0.25})
    result = qdqtool.insert(model, calib_table=path, predict=False, head="none")
    report = write_table(result, tmp_path / "out.cache")
    assert read_cache(tmp_path / "out.cache") == {"x": 0.5, "c0.out": 0.25, "r.out": 0.25}
    assert report.scales.missing == ["c1.out"]
    assert report.precisions.layers == {"c0": "int8", "c1": "int8"}
    assert report.precisions.outputs == {"c1": "fp16"} and "c1.out" in "\n".join(report.lines())


@pytest.mark.parametrize(("target", "has_precisions"), [("10.3", True), ("8.2", False)])
def test_build_command_names_cache_model_and_precisions(
    tmp_path: Path, target: str, has_precisions: bool
) -> None:
    report = write_table(quantize(target=target), tmp_path / "t.cache")
    words = shlex.split(report.command)
    assert {f"--calib={tmp_path / 't.cache'}", "--int8", "--fp16", "--useDLACore=0"} <= set(words)
    assert any(word.startswith("--layerPrecisions=") for word in words) is has_precisions
    assert report.as_json()["flags"] == [w for w in words if "recision" in w or "OutputTypes" in w]


# Rules for scales, and precisions of layers ------------------------------------------------------


def conv_relu(net: Net) -> list[str]:
    return [net.op("Relu", "r", net.conv("c", "x"))]


def moves(net: Net) -> list[str]:
    pooled = net.op("MaxPool", "pool", "x", kernel_shape=[2, 2])
    return [net.reshape("flat", net.op("Transpose", "turn", pooled, perm=[0, 2, 3, 1]), 1, -1)]


def concat(net: Net) -> list[str]:
    a, b = net.op("Relu", "a", net.conv("ca", "x")), net.op("Relu", "b", net.conv("cb", "x"))
    return [net.op("Concat", "cat", a, b, axis=1)]


def split(net: Net) -> list[str]:
    parts = net.op("Split", "s", net.conv("c", "x"), outputs=2, axis=1)
    return [net.op("Relu", name, part) for name, part in zip("ab", parts, strict=True)]


def average(net: Net) -> list[str]:
    return [net.op("Flatten", "flat", net.op("GlobalAveragePool", "pool", "x"))]


MOVED = ("moved", 0.5)


@pytest.mark.parametrize(
    ("build", "known", "rules", "missing"),
    [
        pytest.param(
            conv_relu,
            {"r.out": 0.5},
            {"c.out": ("clipped", 0.5)},
            ["x"],
            id="Relu of a convolution",
        ),
        pytest.param(
            lambda net: [*conv_relu(net), "c.out"],
            {"x": 1.0, "r.out": 0.5},
            {},
            ["c.out"],
            id="another consumer of the convolution",
        ),
        # The scale of these activations does not reach the convolution.
        pytest.param(
            lambda net: [net.silu("s", net.conv("c", "x"))],
            {"s/Mul.out": 0.5},
            {"s/Sigmoid.out": ("fixed", 1 / 127)},
            ["x", "c.out"],
            id="SiLU",
        ),
        pytest.param(
            lambda net: [net.op("Relu", "r", net.norm("bn", net.conv("c", "x")))],
            {"r.out": 0.5},
            {"bn.out": ("clipped", 0.5)},
            ["x", "c.out"],
            id="BatchNormalization and Relu",
        ),
        pytest.param(
            moves,
            {"x": 0.5},
            {"pool.out": MOVED, "turn.out": MOVED, "flat.out": MOVED},
            [],
            id="values that move downstream",
        ),
        pytest.param(
            moves,
            {"flat.out": 0.5},
            {"x": MOVED, "pool.out": MOVED, "turn.out": MOVED},
            [],
            id="values that move upstream",
        ),
        pytest.param(
            concat,
            {"a.out": 0.25, "b.out": 0.5},
            {"ca.out": ("clipped", 0.25), "cb.out": ("clipped", 0.5), "cat.out": MOVED},
            ["x"],
            id="Concat takes the largest scale",
        ),
        pytest.param(
            concat,
            {"cat.out": 0.5},
            {
                "a.out": MOVED,
                "b.out": MOVED,
                "ca.out": ("clipped", 0.5),
                "cb.out": ("clipped", 0.5),
            },
            ["x"],
            id="Concat gives its scale",
        ),
        pytest.param(
            concat,
            {"a.out": 0.25},
            {"ca.out": ("clipped", 0.25)},
            ["x", "cb.out", "b.out", "cat.out"],
            id="Concat of an unknown part",
        ),
        pytest.param(
            split,
            {"s.out": 0.5},
            {"a.out": ("bounded", 0.5)},
            ["x", "c.out", "s.out1", "b.out"],
            id="part of a tensor",
        ),
        pytest.param(
            split,
            {"s.out": 0.5, "s.out1": 0.75},
            {"c.out": ("moved", 0.75), "a.out": ("bounded", 0.5), "b.out": ("bounded", 0.75)},
            ["x"],
            id="all parts of a tensor",
        ),
        pytest.param(
            average,
            {"x": 0.5},
            {"pool.out": ("bounded", 0.5), "flat.out": MOVED},
            [],
            id="average is bounded by its input",
        ),
        pytest.param(
            average,
            {"x": 0.5, "flat.out": 0.1},
            {"pool.out": ("moved", 0.1)},
            [],
            id="average whose result is known",
        ),
        pytest.param(
            average,
            {"pool.out": 0.1},
            {"flat.out": ("moved", 0.1)},
            ["x"],
            id="input of an average",
        ),
    ],
)
def test_scales_follow_from_neighbors(
    net: Net,
    build: Callable[[Net], list[str]],
    known: dict[str, float],
    rules: dict[str, tuple[str, float]],
    missing: list[str],
) -> None:
    result = complete_scales(net.output(*build(net)).index(), known)
    others = {t: (result.rules[t], result.scales[t]) for t in result.scales if t not in known}
    assert others == rules and result.missing == missing


def test_measured_scales_are_used_next_to_those_of_quantizers(net: Net) -> None:
    result = complete_scales(
        net.output(net.op("Relu", "r", net.conv("c", "x"))).index(),
        {"r.out": 0.5},
        {"x": 0.25, "r.out": 9.0, "no": 1.0},
    )
    assert result.scales == {"x": 0.25, "c.out": 0.5, "r.out": 0.5}
    assert result.counts == {"measured": 1, "quantizer": 1, "clipped": 1}


def residual() -> Net:
    net = Net()
    return net.output(net.op("Add", "add", net.conv("c", "x"), "x"))


def test_convolution_before_an_add_gets_a_unary_scale_on_request() -> None:
    known = {"x": 0.25, "add.out": 0.5}
    assert complete_scales(residual().index(), known).missing == ["c.out"]
    unary = complete_scales(residual().index(), known, unary=True)
    assert (unary.rules["c.out"], unary.scales["c.out"]) == ("unary", 1.0)
    # Without the scale of the result, the Add runs in float.
    assert "c.out" not in complete_scales(residual().index(), {"x": 0.25}, unary=True).scales


def test_shapes_and_indices_are_no_float_tensors(net: Net) -> None:
    index = net.op("Cast", "index", "x", to=onnx.TensorProto.INT64)
    net.output(net.op("Reshape", "same", net.conv("c", "x"), net.op("Shape", "shape", "x")))
    net.output(index, dtype=onnx.TensorProto.INT64)
    assert list_float_tensors(net.index()) == ["x", "c.out", "same.out"]


# Precisions of layers


def test_precisions_keep_quantized_and_float_layers(net: Net) -> None:
    first = net.op("Relu", "r", net.conv("c0", "x"))
    model = net.output(
        net.op("Relu", "rh", net.conv("head", first)), net.conv("last", first)
    ).index()
    scales = complete_scales(model, {"x": 1.0, "r.out": 0.5, "rh.out": 0.5})
    precisions = choose_precisions(model, scales, {"c0", "last"})
    # The head is float, with its activation; the last layer is INT8 and writes float.
    assert precisions.layers == {"c0": "int8", "head": "fp16", "rh": "fp16", "last": "int8"}
    assert precisions.outputs == {"head": "fp16", "rh": "fp16", "last": "fp16"}
    assert format_precisions(precisions) == [
        "--precisionConstraints=prefer",
        "--layerPrecisions=c0:int8,head:fp16,rh:fp16,last:int8",
        "--layerOutputTypes=head:fp16,rh:fp16,last:fp16",
    ]


def test_layer_without_a_scale_for_its_input_is_float() -> None:
    model = residual().index()
    assert choose_precisions(model, complete_scales(model, {}), {"c"}).layers == {
        "c": "fp16",
        "add": "fp16",
    }


@pytest.mark.parametrize(
    ("name", "layers", "unnamed"),
    [
        pytest.param(
            "", {"node_of_c.out": "fp16", "node_of_add.out": "fp16"}, [], id="name of the output"
        ),
        pytest.param("same", {}, ["c.out", "add.out"], id="shared name"),
    ],
)
def test_precisions_of_nodes_without_a_name_of_their_own(
    name: str, layers: dict[str, str], unnamed: list[str]
) -> None:
    proto = residual().model()
    for node in proto.graph.node:
        node.name = name
    model = Model(proto)
    precisions = choose_precisions(model, complete_scales(model, {}), set())
    assert precisions.layers == precisions.outputs == layers and precisions.unnamed == unnamed


def test_names_with_separators_are_quoted() -> None:
    precisions = LayerPrecisions({"a:0": "int8", "b": "fp16"})
    assert format_precisions(precisions)[1] == "--layerPrecisions='a:0':int8,b:fp16"
    assert format_precisions(LayerPrecisions()) == []


@pytest.mark.parametrize("length", [200, 400])
def test_long_chains_are_completed(length: int, net: Net) -> None:
    tensor = "x"
    for number in range(length):
        tensor = net.op("Identity", f"i{number}", tensor)
    model: onnx.ModelProto = net.output(tensor).model()
    assert not complete_scales(Model(model), {tensor: 1.0}).missing
    assert not complete_scales(Model(model), {"x": 1.0}).missing
