"""The graph rebuilt from a parse section."""

import gzip
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from qdqtool.base import budgets
from qdqtool.base.notes import Remark
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.reconstruct import MARK, attributes_of, graph_from_log
from qdqtool.buildlog.types import ParsedNode, ParsedTensor
from qdqtool.commands.cli import run
from qdqtool.errors import BuildLogError
from tests.buildlog import samples
from tests.buildlog.evidence import build_file
from tests.buildlog.rtx import build_log, c2f_split
from tests.raising import raises

Topology = list[tuple[str, str, list[str], list[str]]]


def topology(model: onnx.ModelProto) -> Topology:
    return [(n.name, n.op_type, list(n.input), list(n.output)) for n in model.graph.node]


def attributes(node: onnx.NodeProto) -> dict[str, object]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def test_a_small_build() -> None:
    model, unknown = graph_from_log(samples.build_of(samples.trtexec_log()))
    # The sample does not declare its zero points, as a graph whose Constants were printed would.
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
    assert Remark.SCALES_LACK(count=4) in unknown
    assert Remark.ATTRIBUTE_INFERRED(what="Conv strides", count=1) in unknown


@pytest.mark.parametrize("case", ["yolo-resnet18-orin-trt8502", "resnet18-qat-rtx2000-trt8510"])
def test_recorded_builds_give_the_graph_that_was_built(case: str) -> None:
    build = read_build(build_file(case))
    model, unknown = graph_from_log(build)
    original = onnx.ModelProto.FromString(
        gzip.decompress(build_file(case, "model.onnx.gz").read_bytes())
    )
    assert topology(model) == topology(original)
    assert [i.name for i in model.graph.input] == [i.name for i in original.graph.input]
    assert [o.name for o in model.graph.output] == [o.name for o in original.graph.output]
    shapes = {t.name: list(t.dims) for t in original.graph.initializer}
    assert {t.name: list(t.dims) for t in model.graph.initializer} == shapes
    for ours, theirs in zip(model.graph.node, original.graph.node, strict=True):
        if ours.op_type in ("Conv", "Concat", "Resize", "Gather", "Gemm"):
            wanted = {
                k: v
                for k, v in attributes(theirs).items()
                if k not in ("dilations", "group") or v not in (1, [1, 1])
            }
            given = attributes(ours)
            assert {k: given.get(k) for k in wanted} == wanted, ours.name
    onnx.checker.check_model(model, full_check=True)
    assert unknown[0].startswith("weights")


def test_merged_qs_share_a_scale_and_others_do_not() -> None:
    build = read_build(build_file("resnet18-qat-rtx2000-trt8510"))
    model, _ = graph_from_log(build)
    values = {
        n.output[0]: numpy_helper.to_array(n.attribute[0].t)
        for n in model.graph.node
        if n.op_type == "Constant"
    }
    values.update({t.name: numpy_helper.to_array(t) for t in model.graph.initializer})
    scale = {
        n.name: float(values[n.input[1]].flat[0])
        for n in model.graph.node
        if "uantizeLinear" in n.op_type
    }
    merges = [(e.subject, e.object) for e in build.trace if e.kind == "Eliminating"]
    assert len(merges) == 8
    assert all(scale[a] == scale[b] for a, b in merges)
    producers = {n.output[0]: n for n in model.graph.node}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear":
            assert scale[node.name] == scale[producers[node.input[0]].name]
    quantizers = [n.name for n in model.graph.node if n.op_type == "QuantizeLinear"]
    assert len({scale[name] for name in quantizers}) == len(quantizers) - 8


@pytest.fixture(scope="module")
def rtx_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_log(tmp_path_factory.mktemp("rtx"))


def test_a_build_with_tensorrt_rtx(rtx_log: Path) -> None:
    build = read_build(rtx_log)
    assert build.is_rtx
    assert build.lines.unexplained == 0
    assert [layer.name for layer in build.layers if layer.is_convolution] == [
        "cv1_myl0_1",
        "m0_myl0_3",
        "m1_myl0_5",
        "cv2_myl0_7",
    ]
    model, _ = graph_from_log(build)
    onnx.checker.check_model(model, full_check=True)
    assert topology(model) == topology(c2f_split())
    found = {n.name: attributes(n) for n in model.graph.node}
    assert found["cv1"] == {
        "kernel_shape": [1, 1],
        "strides": [1, 1],
        "pads": [0, 0, 0, 0],
        "group": 1,
    }
    assert found["m0"]["pads"] == [1, 1, 1, 1]
    assert (found["Concat"], found["Split"]) == ({"axis": 1}, {"axis": 1})
    split = next(t for t in model.graph.initializer if t.name.startswith("parts"))
    assert np.array_equal(numpy_helper.to_array(split), [32, 32])


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
    ("given", "made", "kernel", "stride", "pad"),
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
def test_strides_and_padding_fit_the_shapes(
    given: int, made: int, kernel: int, stride: int, pad: int
) -> None:
    parsed = node("Conv", [(1, 8, given, given), (16, 8, kernel, kernel)], [(1, 16, made, made)])
    found = attributes_of(parsed, {}).attributes
    assert (found["strides"], found["pads"]) == ([stride] * 2, [pad] * 4)
    assert (given + 2 * pad - kernel) // stride + 1 == made


def test_damaged_shapes_of_a_convolution_take_no_time() -> None:
    """A stride of 2^38 was looked for among all below it."""
    for source in ((1, 8, 1 << 40, 8), (1 << 40,)):
        attributes_of(node("Conv", [source, (16, 8, 3, 3)], [(1, 16, 4, 4)]), {})
        attributes_of(node("ConvTranspose", [(1, 8, 4, 4), (8, 16, 3, 3)], [source]), {})


def test_what_is_printed_wins() -> None:
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
    guess = attributes_of(parsed, {})
    assert guess.attributes == {
        "kernel_shape": [3, 3],
        "strides": [2, 2],
        "dilations": [1, 1],
        "pads": [0, 0, 1, 1],
        "group": 8,
    }
    assert guess.inferred == []
    pool = attributes_of(
        node("MaxPool", [(1, 8, 8, 8)], [(1, 8, 4, 4)]),
        {
            "PoolingWindowSize": [2, 2],
            "PoolingStride": [2, 2],
            "PoolingPrePadding": [0, 0],
            "PoolingPostPadding": [0, 0],
            "Kernel": [7, 7],
        },
    )
    assert pool.attributes == {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 0, 0]}


def test_builds_without_a_parse_section_and_with_other_operators(tmp_path: Path) -> None:
    text = samples.trtexec_log()
    with pytest.raises(BuildLogError, match="no parse section"):
        graph_from_log(
            samples.build_of(text[text.index("[10/31/2025-17:53:30] [V] [TRT] Original") :])
        )
    assert attributes_of(
        node("ConvTranspose", [(1, 8, 10, 10), (8, 4, 2, 2)], [(1, 4, 20, 20)]), {}
    ).attributes == {
        "kernel_shape": [2, 2],
        "group": 1,
        "strides": [2, 2],
        "pads": [0, 0, 0, 0],
    }
    assert attributes_of(
        node("Concat", [(1, 4, 8, 8), (1, 6, 8, 8)], [(1, 10, 8, 8)]), {}
    ).attributes == {"axis": 1}
    assert attributes_of(node("Transpose", [(1, 4, 8, 9)], [(1, 8, 9, 4)]), {}).attributes == {
        "perm": [0, 2, 3, 1]
    }
    assert attributes_of(node("Reshape", [(1, 4, 8), (2,)], [(1, 32)]), {}).values == {1: [1, 32]}
    assert attributes_of(node("Unsqueeze", [(1, 69, 3), (1,)], [(1, 69, 3, 1)]), {}).values == {
        1: [3]
    }
    assert attributes_of(node("Squeeze", [(1, 5, 1), (1,)], [(5, 1)]), {}).values == {1: [0]}
    assert attributes_of(node("ReduceMax", [(1, 7, 16)], [(1, 7)]), {}).attributes == {
        "keepdims": 0,
        "axes": [2],
    }
    assert attributes_of(node("Resize", [(1, 8, 4, 4), (0,), (4,)], [(1, 8, 8, 8)]), {}).values == {
        2: [1, 1, 2, 2]
    }
    assert attributes_of(node("Gemm", [(1, 512), (1000, 512)], [(1, 1000)]), {}).attributes == {
        "transB": 1
    }
    assert attributes_of(node("Relu", [(1,)], [(1,)]), {}).attributes == {}


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, output = tmp_path / "build.log", tmp_path / "graph.onnx"
    log.write_text(samples.trtexec_log())
    assert run(["log", str(log), "--to-onnx", str(output)]) == 0
    text = capsys.readouterr().out
    assert "6 nodes; not in the log, and filled in:" in text
    assert "scales of 4 Q and DQ: not in a log" in text
    assert len(onnx.load(output).graph.node) == 6


def test_constants_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Path("tests/data/logs/small-trt852.txt").read_text("utf-8")
    with raises(BuildLogError, "require w"):
        graph_from_log(
            samples.build_of(
                log.replace("[w -> (16, 3, 3, 3)", "[w -> (0, 999999999999, 999999999999, 3)")
            )
        )
    with raises(BuildLogError, "_Rebuilder._constant w 65"):
        graph_from_log(
            samples.build_of(log.replace("[w -> (16, 3, 3, 3)", f"[w -> ({', '.join('1' * 65)})"))
        )
    constants = 4 * (16 * 3 * 3 * 3 + 1)  # w and s
    monkeypatch.setattr(budgets, "LOG_CONSTANTS", constants)
    graph_from_log(samples.build_of(log))
    monkeypatch.setattr(budgets, "LOG_CONSTANTS", constants - 1)
    with raises(BuildLogError, "require s"):
        graph_from_log(samples.build_of(log))
