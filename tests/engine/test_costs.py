"""Memory, operations and time of engine layers, against numbers worked out by hand."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from qdqtool.buildlog.read import read_build
from qdqtool.engine.costs import EngineReport, analyze, is_overhead
from tests.buildlog import samples
from tests.buildlog.evidence import build_file

INT8 = "Thirty-two wide channel vectorized row major Int8 format"
FP16, FP32 = "Row major linear FP16 format", "Row major linear FP32"


def tensor(name: str, dims: list[int], layout: str) -> dict[str, Any]:
    return {"Name": name, "Dimensions": dims, "Format/Datatype": layout}


def layer(name: str, kind: str, inputs: list[Any], outputs: list[Any], **fields: Any) -> dict[str, Any]:
    return {"Name": name, "LayerType": kind, "Inputs": inputs, "Outputs": outputs, **fields}


CONV = layer(
    "conv", "CaskConvolution", [tensor("x", [2, 64, 56, 56], INT8), tensor("r", [2, 128, 28, 28], FP16)],
    [tensor("y", [2, 128, 28, 28], FP16)], Kernel=[3, 3], Stride=[2, 2], OutMaps=128, Groups=1,
    Weights={"Type": "Int8", "Count": 128 * 64 * 9},
)


def report(*layers: dict[str, Any]) -> EngineReport:
    return analyze(read_build(io.BytesIO(json.dumps({"Layers": list(layers), "Bindings": []}).encode())))


def test_a_convolution_with_a_residual() -> None:
    row = report(CONV).rows[0]
    assert row.input_bytes == 2 * 64 * 56 * 56 + 2 * 128 * 28 * 28 * 2
    assert row.weight_bytes == 128 * 64 * 9
    assert row.output_bytes == 2 * 128 * 28 * 28 * 2
    assert row.total_bytes == row.input_bytes + row.weight_bytes + row.output_bytes
    assert row.macs == 2 * 128 * 28 * 28 * 64 * 9
    assert row.intensity == pytest.approx(row.macs / row.total_bytes)


def test_weights_not_listed_follow_from_kernel_maps_and_groups() -> None:
    fields = {key: value for key, value in CONV.items() if key != "Weights"}
    row = report({**fields, "Groups": 64, "OutMaps": 128}).rows[0]
    assert row.macs == 2 * 128 * 28 * 28 * 9
    assert (row.weight_bytes, row.total_bytes, row.intensity) == (None, None, None)


def test_a_deconvolution_counts_each_input_element() -> None:
    row = report(layer(
        "up", "CaskDeconvolutionV2", [tensor("x", [1, 256, 10, 10], INT8)], [tensor("y", [1, 64, 20, 20], INT8)],
        Kernel=[2, 2], Weights={"Type": "Int8", "Count": 256 * 64 * 4},
    )).rows[0]
    assert row.macs == 1 * 256 * 10 * 10 * 64 * 4  # ten by ten positions, each spread over 2 x 2 of 64 channels


def test_convolution_and_pooling_in_one_layer() -> None:
    row = report(layer(
        "stem", "ConvActPool", [tensor("x", [1, 3, 224, 224], "Row major Int8 format")],
        [tensor("y", [1, 64, 56, 56], INT8)], ConvKernel=[7, 7], ConvStride=[2, 2], ConvPrePadding=[3, 3],
        ConvPostPadding=[3, 3], ConvWeights={"Type": "Int8", "Count": 9408}, ParameterType="ConvActPool",
    )).rows[0]
    assert row.macs == 112 * 112 * 64 * 3 * 49  # the convolution makes 112 x 112, the pooling halves it
    assert row.weight_bytes == 9408


def test_matrix_products_and_layers_without_macs() -> None:
    rows = report(
        layer("mm", "gemm", [tensor("a", [4, 128, 64], FP16)], [tensor("b", [4, 128, 32], FP16)]),
        layer("add", "PointWiseV2", [tensor("a", [8], FP32), tensor("b", [8], FP32)], [tensor("c", [8], FP32)]),
        layer("dyn", "PointWiseV2", [tensor("a", [-1, 8], FP32)], [tensor("c", [-1, 8], FP32)]),
    ).rows
    assert rows[0].macs == 4 * 128 * 32 * 64
    left = layer("l", "gemm", [tensor("a", [1, 512, 900], FP16)], [tensor("b", [1, 6144, 900], FP16)])
    assert report(left).rows[0].macs == 6144 * 512 * 900  # the weights stand on the left: a convolution of 1x1
    assert (rows[1].macs, rows[1].total_bytes) == (0, 3 * 8 * 4)
    assert (rows[2].macs, rows[2].total_bytes) == (0, None)


def test_totals_keep_conversions_and_reformats_apart() -> None:
    q = layer("q", "Reformat", [tensor("i", [1, 3, 8, 8], FP32)], [tensor("x", [1, 3, 8, 8], INT8)], Origin="QDQ")
    copy = layer("Reformatting CopyNode for Input Tensor 0 to conv", "Reformat", [tensor("x", [4], INT8)],
                 [tensor("z", [4], INT8)])
    result = report(q, copy, CONV)
    assert {key: total.layers for key, total in result.totals("kind").items()} == {
        "convolution": 1, "conversion": 1, "reformat": 1,
    }
    assert [is_overhead(row) for row in result.rows] == [True, True, False]
    assert {key: total.layers for key, total in result.totals("precision").items()} == {"INT8": 2, "FP32": 1}
    assert sum(total.bytes for total in result.totals("type").values()) == sum(r.total_bytes or 0 for r in result.rows)


def test_order() -> None:
    result = report(CONV, layer("b", "PointWiseV2", [tensor("a", [8], FP32)], [tensor("c", [8], FP32)]))
    assert [r.name for r in result.sorted_rows("name")] == ["b", "conv"]
    assert [r.name for r in result.sorted_rows("bytes")] == ["conv", "b"]
    assert [r.name for r in result.sorted_rows("order")] == ["conv", "b"]


def test_times_come_from_the_profile_of_the_log() -> None:
    result = analyze(read_build(io.BytesIO(samples.trtexec_log().encode())))
    assert [(row.ms, row.share and round(row.share, 4)) for row in result.rows] == [(0.0125, 0.2), (0.05, 0.8),
    (None, None)]
    assert result.total_ms == pytest.approx(0.0625)
    conv = result.rows[1]  # its weights' size is in the parse section
    assert (conv.weight_bytes, conv.macs) == (16 * 3 * 9, 16 * 4 * 4 * 27)


def test_the_explorers_sums_on_a_recorded_build() -> None:
    case = "mobilenet-fpn-implicit-int8"
    result = analyze(read_build(build_file(case), build_file(case, "profile.json")))
    rows = {row.name: row for row in result.rows}
    stem, add = rows["Conv_0 + PWN(Clip_3)"], rows["PWN(Add_133)"]
    assert (stem.input_bytes, stem.weight_bytes, stem.output_bytes) == (1_179_648, 864, 3_145_728)
    assert stem.total_bytes == 4_326_240
    assert add.total_bytes == 589_824
    assert stem.ms == pytest.approx(0.0662771)


def test_macs_of_a_recorded_resnet18() -> None:
    """ResNet-18 at 224 x 224 has 1.814 GMACs an image; the batch is 32."""
    result = analyze(read_build(build_file("resnet18-a100-qat", "graph.json")))
    assert sum(row.macs or 0 for row in result.rows) / 32 / 1e9 == pytest.approx(1.814, abs=0.001)
