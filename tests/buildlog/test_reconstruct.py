import gzip
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.reconstruct import MARK, graph_from_log, infer_attributes
from qdqtool.buildlog.types import ParsedNode, ParsedTensor
from qdqtool.commands.cli import run
from qdqtool.errors import BuildLogError
from qdqtool.util import limits
from tests.buildlog import samples
from tests.buildlog.evidence import build_file
from tests.buildlog.rtx import build_log, c2f_split
from tests.errors import has
from tests.notes import note


def topology(model: onnx.ModelProto) -> list[tuple[str, str, list[str], list[str]]]:
    return [(n.name, n.op_type, list(n.input), list(n.output)) for n in model.graph.node]


def attributes(node: onnx.NodeProto) -> dict[str, object]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def test_graph_from_log_of_a_small_build() -> None:
    model, unknown = graph_from_log(samples.build_of(samples.trtexec_log()))
    # Zero points are missing: the sample does not print its constants.
    assert [n.op_type for n in model.graph.node] == [
        "QuantizeLinear",
        "DequantizeLinear",
        "QuantizeLinear",
        "DequantizeLinear",
        "Conv",
        "Relu",
    ]
    conv = model.graph.node[4]
    assert attributes(conv) == {
        "kernel_shape": [3, 3],
        "strides": [2, 2],
        "pads": [1, 1, 1, 1],
        "group": 1,
    }
    assert list(conv.input) == ["dq0_out", "wdq_out"]
    assert conv.doc_string == MARK + "strides, pads"
    assert attributes(model.graph.node[2]) == {"axis": 0}
    assert [o.name for o in model.graph.output] == ["out"]
    assert note("scales-lack", count=4) in unknown
    assert note("attribute-inferred", what="Conv strides", count=1) in unknown


@pytest.mark.parametrize("case", ["yolo-resnet18-orin-trt8502", "resnet18-qat-rtx2000-trt8510"])
def test_graph_from_log_of_recorded_builds_is_the_graph_that_was_built(case: str) -> None:
    model, unknown = graph_from_log(read_build(build_file(case)))
    original = onnx.ModelProto.FromString(
        gzip.decompress(build_file(case, "model.onnx.gz").read_bytes())
    )
    assert topology(model) == topology(original)
    assert [i.name for i in model.graph.input] == [i.name for i in original.graph.input]
    assert [o.name for o in model.graph.output] == [o.name for o in original.graph.output]
    shapes = {t.name: list(t.dims) for t in original.graph.initializer}
    assert {t.name: list(t.dims) for t in model.graph.initializer} == shapes
    for rebuilt, built in zip(model.graph.node, original.graph.node, strict=True):
        if rebuilt.op_type in ("Conv", "Concat", "Resize", "Gather", "Gemm"):
            assert {
                k: v
                for k, v in attributes(built).items()
                if k not in ("dilations", "group") or v not in (1, [1, 1])
            }.items() <= attributes(rebuilt).items(), rebuilt.name
    onnx.checker.check_model(model, full_check=True)
    assert unknown[0].startswith("weights")


def test_graph_from_log_gives_merged_quantizers_one_scale() -> None:
    build = read_build(build_file("resnet18-qat-rtx2000-trt8510"))
    model, _ = graph_from_log(build)
    values = {
        n.output[0]: onnx.numpy_helper.to_array(n.attribute[0].t)
        for n in model.graph.node
        if n.op_type == "Constant"
    }
    values.update({t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer})
    scale = {
        n.name: float(values[n.input[1]].flat[0])
        for n in model.graph.node
        if "uantizeLinear" in n.op_type
    }
    merges = [(e.subject, e.object) for e in build.trace if e.kind == "Eliminating"]
    assert len(merges) == 8 and all(scale[a] == scale[b] for a, b in merges)
    producers = {n.output[0]: n for n in model.graph.node}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear":
            assert scale[node.name] == scale[producers[node.input[0]].name]
    quantizers = [n.name for n in model.graph.node if n.op_type == "QuantizeLinear"]
    assert len({scale[name] for name in quantizers}) == len(quantizers) - 8


def test_graph_from_log_of_tensorrt_rtx(tmp_path: Path) -> None:
    build = read_build(build_log(tmp_path))
    assert (build.is_rtx, build.lines.unexplained) == (True, 0)
    assert [layer.name for layer in build.layers if layer.is_convolution] == [
        "cv1_myl0_1",
        "m0_myl0_3",
        "m1_myl0_5",
        "cv2_myl0_7",
    ]
    model, _ = graph_from_log(build)
    onnx.checker.check_model(model, full_check=True)
    assert topology(model) == topology(c2f_split())
    nodes = {n.name: attributes(n) for n in model.graph.node}
    assert nodes["cv1"] == {
        "kernel_shape": [1, 1],
        "strides": [1, 1],
        "pads": [0, 0, 0, 0],
        "group": 1,
    }
    assert nodes["m0"]["pads"] == [1, 1, 1, 1]
    assert nodes["Concat"] == nodes["Split"] == {"axis": 1}
    split = next(t for t in model.graph.initializer if t.name.startswith("parts"))
    assert np.array_equal(onnx.numpy_helper.to_array(split), [32, 32])


def node(
    op: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]], **details: object
) -> ParsedNode:
    return ParsedNode(
        "n",
        op,
        [ParsedTensor(f"i{i}", shape, "FLOAT") for i, shape in enumerate(inputs)],
        [ParsedTensor(f"o{i}", shape, "FLOAT") for i, shape in enumerate(outputs)],
        details=dict(details),
    )


@pytest.mark.parametrize(
    ("size", "output_size", "kernel", "stride", "pad"),
    [
        (224, 112, 7, 2, 3),
        (56, 56, 3, 1, 1),
        (56, 28, 3, 2, 1),
        (56, 28, 1, 2, 0),
        (640, 320, 3, 2, 1),
        (8, 4, 2, 2, 0),
        (32, 30, 3, 1, 0),
        (69, 35, 3, 2, 1),
    ],
)
def test_strides_and_padding_are_inferred_from_shapes(
    size: int, output_size: int, kernel: int, stride: int, pad: int
) -> None:
    inferred = infer_attributes(
        node(
            "Conv",
            [(1, 8, size, size), (16, 8, kernel, kernel)],
            [(1, 16, output_size, output_size)],
        ),
        {},
    ).attributes
    assert (inferred["strides"], inferred["pads"]) == ([stride] * 2, [pad] * 4)
    assert (size + 2 * pad - kernel) // stride + 1 == output_size


def test_printed_attributes_are_used() -> None:
    parsed = node(
        "Conv",
        [(1, 8, 8, 8), (16, 1, 3, 3)],
        [(1, 16, 4, 4)],
        kernel=[3, 3],
        strides=[2, 2],
        prepadding=[0, 0],
        postpadding=[1, 1],
        dilations=[1, 1],
    )
    node_attributes = infer_attributes(parsed, {})
    assert node_attributes.inferred == []
    assert node_attributes.attributes == {
        "kernel_shape": [3, 3],
        "strides": [2, 2],
        "dilations": [1, 1],
        "pads": [0, 0, 1, 1],
        "group": 8,
    }


def test_attributes_of_the_engine_layer_are_used() -> None:
    assert infer_attributes(
        node("MaxPool", [(1, 8, 8, 8)], [(1, 8, 4, 4)]),
        {
            "PoolingWindowSize": [2, 2],
            "PoolingStride": [2, 2],
            "PoolingPrePadding": [0, 0],
            "PoolingPostPadding": [0, 0],
            "Kernel": [7, 7],
        },
    ).attributes == {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 0, 0]}


def test_graph_from_log_needs_a_parse_section() -> None:
    text = samples.trtexec_log()
    build = samples.build_of(text[text.index("[10/31/2025-17:53:30] [V] [TRT] Original") :])
    with pytest.raises(BuildLogError, check=has("no-parse-section", path="stream")):
        graph_from_log(build)


@pytest.mark.parametrize(
    ("op", "inputs", "output", "expected"),
    [
        (
            "ConvTranspose",
            [(1, 8, 10, 10), (8, 4, 2, 2)],
            (1, 4, 20, 20),
            {"kernel_shape": [2, 2], "group": 1, "strides": [2, 2], "pads": [0, 0, 0, 0]},
        ),
        ("Concat", [(1, 4, 8, 8), (1, 6, 8, 8)], (1, 10, 8, 8), {"axis": 1}),
        ("Transpose", [(1, 4, 8, 9)], (1, 8, 9, 4), {"perm": [0, 2, 3, 1]}),
        ("ReduceMax", [(1, 7, 16)], (1, 7), {"keepdims": 0, "axes": [2]}),
        ("Gemm", [(1, 512), (1000, 512)], (1, 1000), {"transB": 1}),
        ("Relu", [(1,)], (1,), {}),
        ("Reshape", [(1, 4, 8), (2,)], (1, 32), {1: [1, 32]}),
        ("Unsqueeze", [(1, 69, 3), (1,)], (1, 69, 3, 1), {1: [3]}),
        ("Squeeze", [(1, 5, 1), (1,)], (5, 1), {1: [0]}),
        ("Resize", [(1, 8, 4, 4), (0,), (4,)], (1, 8, 8, 8), {2: [1, 1, 2, 2]}),
    ],
)
def test_attributes_and_constant_inputs_are_inferred_from_shapes(
    op: str, inputs: list[tuple[int, ...]], output: tuple[int, ...], expected: dict[Any, Any]
) -> None:
    inferred = infer_attributes(node(op, inputs, [output]), {})
    assert {**inferred.attributes, **inferred.values} == expected


def test_log_to_onnx_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, output = tmp_path / "build.log", tmp_path / "graph.onnx"
    log.write_text(samples.trtexec_log())
    assert run(["log", str(log), "--to-onnx", str(output)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "6 nodes" in text and "scales of 4 Q and DQ" in text
    assert len(onnx.load(output).graph.node) == 6


def test_graph_from_log_limits_the_size_of_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    log = samples.trtexec_log()
    huge = log.replace("[w -> (16, 3, 3, 3)", "[w -> (0, 999999999999, 999999999999, 3)")
    with pytest.raises(BuildLogError, match="'w'"):
        graph_from_log(samples.build_of(huge))
    size = 4 * (16 * 3 * 3 * 3 + 1)  # w and s
    monkeypatch.setattr(limits, "LOG_CONSTANTS", size)
    graph_from_log(samples.build_of(log))
    monkeypatch.setattr(limits, "LOG_CONSTANTS", size - 1)
    with pytest.raises(BuildLogError, match="'s'"):
        graph_from_log(samples.build_of(log))
