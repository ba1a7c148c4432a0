import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.commands.cli import run
from qdqtool.comparison.api import is_model_file
from qdqtool.comparison.result import (
    ChangeKind,
    Comparison,
    LossReason,
    NodeSide,
    QuantizerScales,
    are_scales_different,
    compare_sides,
    scale_factor,
)
from qdqtool.comparison.text import describe_changes
from qdqtool.errors import BuildLogError, QdqtoolError
from tests.buildlog.evidence import build_file
from tests.comparison.networks import names_of, network, numbered
from tests.errors import has
from tests.trt.builder import Graph

INT8, FP16, FP32, UNKNOWN = (
    qdqtool.Precision.INT8,
    qdqtool.Precision.FP16,
    qdqtool.Precision.FP32,
    qdqtool.Precision.UNKNOWN,
)
LOST, GAINED = ChangeKind.LOST_INT8, ChangeKind.GAINED_INT8


def scales(*values: float, **fields: Any) -> QuantizerScales:
    return QuantizerScales(np.array(values), **fields)


def side(
    precision: qdqtool.Precision | None = INT8,
    output: qdqtool.Precision | None = INT8,
    **fields: Any,
) -> NodeSide:
    return NodeSide(
        "c", "Conv", precision, output=output, **{"data": True, "weights": True, **fields}
    )


@pytest.mark.parametrize(
    ("a", "b", "changes", "lost"),
    [
        (side(), side(), (), None),
        (side(), side(FP16, data=False), (LOST,), LossReason.DATA),
        (side(), side(FP16, weights=False), (LOST,), LossReason.WEIGHTS),
        (side(), side(FP16, data=False, weights=False), (LOST,), LossReason.PAIRS),
        (side(), side(FP16, data=False, weights=None), (LOST,), LossReason.PAIRS),
        (side(), side(FP16), (LOST,), LossReason.UNKNOWN),
        (side(data=None), side(FP16, data=False), (LOST,), LossReason.UNKNOWN),
        (side(FP32), side(), (GAINED,), None),
        (side(qdqtool.Precision.UINT8), side(), (), None),
        (side(None), side(), (), None),
        (side(), side(output=FP16), (ChangeKind.LOST_INT8_OUTPUT,), None),
        (side(output=FP32), side(), (ChangeKind.GAINED_INT8_OUTPUT,), None),
        (side(output=FP32), side(output=FP16), (), None),
        (side(), side(output=UNKNOWN), (), None),
        (side(output=None), side(), (), None),
        (side(FP16, FP16), side(FP16, INT8), (), None),
        (side(inputs=[INT8, INT8]), side(inputs=[INT8, FP16]), (ChangeKind.RESIDUAL,), None),
        (side(inputs=[INT8, INT8]), side(inputs=[INT8]), (), None),
        (side(FP16), side(FP16, weights=False), (ChangeKind.LOST_QDQ,), None),
        (side(FP16, data=False), side(FP16), (ChangeKind.GAINED_QDQ,), None),
        (side(FP16, data=None), side(FP16, data=False), (), None),
        (side(scale=scales(0.1)), side(scale=scales(0.2)), (ChangeKind.SCALE,), None),
        (side(scale=scales(0.1)), side(scale=scales(0.1000005)), (), None),
        (
            side(other_scales={1: scales(0.1)}),
            side(other_scales={1: scales(0.3)}),
            (ChangeKind.SCALE,),
            None,
        ),
        (
            side(scale=scales(0.1), pairs=frozenset({0})),
            side(other_scales={1: scales(0.3)}, pairs=frozenset({1})),
            (ChangeKind.LOST_QDQ, ChangeKind.GAINED_QDQ),
            None,
        ),
        (
            side(weights_scale=scales(0.1, 0.2)),
            side(weights_scale=scales(0.1, 0.3)),
            (ChangeKind.WEIGHTS_SCALE,),
            None,
        ),
        (
            side(weights_scale=scales(0.1, 0.2)),
            side(weights_scale=scales(0.2)),
            (ChangeKind.WEIGHTS_SCALE,),
            None,
        ),
        (
            side(layer="x", fused=["Relu", "Add"]),
            side(layer="y", fused=["Add"]),
            (ChangeKind.FUSION,),
            None,
        ),
        (side(layer="x", fused=["Relu", "Add"]), side(layer="y", fused=["Add", "Relu"]), (), None),
        (side(layer="x", fused=["Relu"]), side(fused=[]), (), None),
    ],
)
def test_compare_sides(
    a: NodeSide, b: NodeSide, changes: tuple[ChangeKind, ...], lost: LossReason | None
) -> None:
    change = compare_sides(a, b)
    assert (change.changes, change.lost) == (changes, lost)
    of_models = {
        ChangeKind.LOST_QDQ,
        ChangeKind.GAINED_QDQ,
        ChangeKind.SCALE,
        ChangeKind.WEIGHTS_SCALE,
    }
    assert compare_sides(a, b, scales=False).changes == tuple(
        c for c in changes if c not in of_models
    )


def test_pair_that_one_input_of_an_add_lost_has_no_unknown_scale(tmp_path: Path) -> None:
    paths = []
    for name, is_quantized in (("a", True), ("b", False)):
        g = Graph()
        x = g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16), "r0")
        branch = g.conv(x, "c1", 16)
        residual = g.pair(x, "residual", 0.05) if is_quantized else x
        total = g.op("Add", [residual, g.pair(branch, "branch", 0.04)], "sum")
        paths.append(tmp_path / f"{name}.onnx")
        onnx.save(g.model(total), paths[-1])
    (node,) = (n for n in qdqtool.compare(*paths).nodes if n.name == "sum")
    assert (node.changes, node.why) == ((ChangeKind.LOST_QDQ,), "Q/DQ removed")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (scales(0.5), scales(1.0), 2.0),
        (scales(0.5, 1.0), scales(0.125, 2.0), 0.25),
        (scales(0.5, 1.0), scales(4.0), 4.0),
        (None, scales(1.0), None),
        (scales(1.0), None, None),
        (scales(0.0, 1.0), scales(1.0, 1.0), None),
        (scales(1.0, 1.0), scales(0.0, 1.0), None),
        (scales(-1.0, 0.0), scales(1.0, 1.0), None),
    ],
)
def test_scale_factor(
    a: QuantizerScales | None, b: QuantizerScales | None, expected: float | None
) -> None:
    assert scale_factor(a, b) == expected


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (scales(0.1, 0.2), scales(0.1, 0.2), False),
        (scales(0.1, 0.2), scales(0.2, 0.1), True),  # exchanged
        (scales(0.1, 0.2, 0.3), scales(0.1, 0.3, 0.2), True),
        (scales(0.1, 0.2, 0.3), scales(0.1, 0.25, 0.3), True),
        *((scales(0.1, 0.2), scales(0.1, bad), True) for bad in (0.0, -0.2, NAN, INF)),
        *((scales(bad), scales(bad), False) for bad in (0.0, -0.2, NAN, INF)),
        (scales(0.0, 0.1), scales(0.1, 0.0), True),
        (scales(NAN), scales(0.0), True),
        (scales(0.1), None, True),
        (None, None, False),
        (scales(0.1, 0.2, axis=0), scales(0.1, 0.2, axis=1), True),
        (scales(0.1), scales(0.1, zero=(3,)), True),
        (scales(0.1), scales(0.1, type=qdqtool.Precision.UINT8), True),
    ],
)
def test_scales_differ(
    a: QuantizerScales | None, b: QuantizerScales | None, expected: bool
) -> None:
    assert (are_scales_different(a, b), are_scales_different(b, a)) == (expected, expected)
    change = compare_sides(side(scale=a, weights_scale=a), side(scale=b, weights_scale=b))
    assert change.changes == ((ChangeKind.SCALE, ChangeKind.WEIGHTS_SCALE) if expected else ())
    assert bool(describe_changes(change)) == expected
    json.dumps(change.as_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("name", "head", "expected"),
    [
        ("a.bin", b"\x08\x09", True),
        ("b.log", b"[V] text", False),
        ("c.json", b"{}", False),
        ("d.txt", b"", False),
        ("e.ONNX", b"", True),
    ],
)
def test_is_model_file(name: str, head: bytes, expected: bool, tmp_path: Path) -> None:
    """Standard input and files with the ending of a model are not opened."""
    (tmp_path / name).write_bytes(head)
    assert is_model_file(tmp_path / name) is expected
    assert not is_model_file("-") and is_model_file("nowhere.onnx.gz")


# Builds are compared with each other and with their model.

INT8, HALF = "Int8 NC/32HW32", "Half NHWC8"


def listing(
    float_convs: tuple[str, ...] = (), names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    layers, convs = [], [node for node in network().graph.node if node.op_type == "Conv"]
    tensors = ["x", *(f"{node.name}:0" for node in convs[:-1]), "b.end.DQ:0"]
    for i, node in enumerate(convs):
        floating = node.name in float_convs
        name, quantizer = ((names or {}).get(n, n) for n in (node.name, f"{node.name}.w.Q"))
        fused = name if floating else f"{node.name}.weight + {quantizer} + {name}"
        layout, maps = (HALF if floating else INT8), [4 if node.name.endswith("stem") else 8, 8]
        edge, out = (
            [
                {
                    "Name": tensors[i + k],
                    "Location": "Device",
                    "Dimensions": [1, maps[k], 16, 16],
                    "Format/Datatype": layout,
                }
            ]
            for k in range(2)
        )
        layers.append(
            {
                "Name": fused,
                "LayerType": "CaskConvolution",
                "Inputs": edge,
                "Outputs": out,
                "ParameterType": "Convolution",
                "Kernel": [1, 1] if node.name.endswith(".b") else [3, 3],
                "OutMaps": 8,
                "Groups": 1,
            }
        )
    return {"Layers": layers, "Bindings": ["x", "b.end.DQ:0"]}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "model.onnx").write_bytes(network().SerializeToString())
    (tmp_path / "good.json").write_text(json.dumps(listing()))
    (tmp_path / "bad.json").write_text(json.dumps(listing(("b1.a", "b2.b"))))
    return tmp_path


def write_listing(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


def compare_files(folder: Path, a: str, b: str) -> Comparison:
    return qdqtool.compare(folder / a, folder / b, target="trt8.5")


@pytest.mark.parametrize(
    ("a", "b", "options", "code", "parameter"),
    [
        ("model.onnx", "good.json", {"gpu": "T4"}, "option-without-effect", "gpu"),
        ([], "good.json", {}, "missing-argument", "a"),
    ],
    ids=["GPU of a build", "no file"],
)
def test_compare_rejects_arguments(
    files: Path, a: Any, b: str, options: dict[str, Any], code: str, parameter: str
) -> None:
    with pytest.raises(QdqtoolError, check=has(code, parameter=parameter)):
        qdqtool.compare(files / a if a else a, files / b, **options)


@pytest.mark.parametrize(
    ("a", "b", "change", "engines"),
    [
        ("model.onnx", "bad.json", ChangeKind.LOST_INT8, False),
        ("bad.json", "model.onnx", ChangeKind.GAINED_INT8, False),
        ("good.json", "bad.json", ChangeKind.LOST_INT8, True),
    ],
)
def test_compare_builds(files: Path, a: str, b: str, change: ChangeKind, engines: bool) -> None:
    result = compare_files(files, a, b)
    assert names_of(result, change) == {"b1.a", "b2.b"} and (result.engines is not None) == engines


def test_compare_recorded_builds_with_profiles() -> None:
    """The expected times are the sums of the recorded profiles."""
    cases = ("resnet18-a100-fp16", "resnet18-a100-qat-residual")
    result = qdqtool.compare(
        *([build_file(case, f"{name}.json") for name in ("graph", "profile")] for case in cases)
    )
    assert (result.a.int8, result.b.int8) == (0, 21)
    assert result.times_as_long == pytest.approx(0.731136 / 1.016832)


@pytest.mark.parametrize(
    ("a", "b", "change"),
    [
        ("good.json", "fewer.json", ChangeKind.ONLY_IN_A),
        ("fewer.json", "good.json", ChangeKind.ONLY_IN_B),
    ],
)
def test_compare_builds_with_a_missing_layer(
    files: Path, a: str, b: str, change: ChangeKind
) -> None:
    table = listing()
    table["Layers"].pop()
    write_listing(files / "fewer.json", table)
    result = compare_files(files, a, b)
    assert [n.changes for n in result.changed] == [(change,)]
    assert (result.times_as_long, result.b.int8_to_int8) == (None, 6 if b == "fewer.json" else 7)


def test_compare_model_with_the_build_of_another_version() -> None:
    model = build_file("resnet18-a100-qat-residual", "model.onnx.gz")
    build = build_file("resnet18-a100-qat", "graph.json")
    result = qdqtool.compare(model, build)
    assert (result.count(ChangeKind.LOST_INT8_OUTPUT), result.ok) == (11, False)
    assert [[s.int8_to_int8, s.conversions] for s in (result.a, result.b)] == [[19, 3], [8, 10]]
    assert run(["compare", str(model), str(build), "--fail-on", "any"]) == 1


@pytest.mark.parametrize(("a", "b"), [("good.json", "profile.json"), ("profile.json", "good.json")])
def test_compare_with_a_profile_leaves_types_unknown(files: Path, a: str, b: str) -> None:
    rows = [
        {"name": layer["Name"], "timeMs": 1.0, "averageMs": 0.01, "percentage": 1.0}
        for layer in listing()["Layers"]
    ]
    write_listing(files / "profile.json", [{"count": 100}, *rows])
    result = compare_files(files, a, b)
    counts = [len(nodes) for nodes in (result.nodes, result.unknown, result.changed)]
    assert counts == [7, 7, 0] and not result.ok


@pytest.mark.parametrize(
    "floats", [(), ("b0.a",), ("b1.a", "b2.b")], ids=["INT8", "one float", "two floats"]
)
def test_numbered_names_of_another_export(files: Path, floats: tuple[str, ...]) -> None:
    """Numbering starts one higher, so that the same name belongs to the next convolution."""
    model, built = network(residual=False), network()
    old_names = numbered(model)
    (files / "numbered.onnx").write_bytes(model.SerializeToString())
    built_names = {old: new for new, old in numbered(built, 1).items()}
    assert old_names["Conv_3"] == "b1.a" and built_names["b1.a"] == "Conv_4"
    write_listing(files / "numbered.json", listing(floats, built_names))
    result = compare_files(files, "numbered.onnx", "numbered.json")
    assert {old_names[name] for name in names_of(result, ChangeKind.LOST_INT8)} == set(floats)
    assert (result.unknown, result.matched_by, result.b.int8) == ([], "shapes", 7 - len(floats))
    builds = compare_files(files, "good.json", "numbered.json")
    assert (len(builds.where(ChangeKind.LOST_INT8)), len(builds.nodes)) == (len(floats), 7)
    with pytest.raises(BuildLogError, check=has("different-exports")):
        qdqtool.verify(files / "numbered.onnx", files / "numbered.json", target="trt8.5")


RESNET = {
    "model": "resnet18-a100-qat/model.onnx.gz",
    "engine": "resnet18-a100-qat-residual/graph.json",
    "log": "resnet18-qat-rtx2000-trt8510/log.txt",
    "float": "resnet18-a100-fp16/graph.json",
}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("model", "log"),
        ("model", "engine"),
        ("log", "engine"),
        ("float", "log"),
        ("model", "float"),
    ],
)
def test_exports_of_one_network_match_each_convolution(a: str, b: str) -> None:
    """The exporter numbered the nodes in the order of the network: partners have equal ranks."""
    result = qdqtool.compare(*[build_file(*RESNET[side].split("/")) for side in (a, b)])
    ranks = []
    for sides in ([n.a for n in result.nodes], [n.b for n in result.nodes]):
        names = [side.layer or side.name for side in sides if side is not None]
        numbers = [int(re.findall(r"(?:Conv|Gemm)_(\d+)", name)[-1]) for name in names]
        ranks.append([sorted(numbers).index(n) for n in numbers])
    assert len(ranks[0]) == 21 and ranks[0] == ranks[1] and not result.unknown


@pytest.mark.parametrize("a", ["model.onnx", "good.json"])
def test_compare_rejects_a_listing_of_names(files: Path, a: str) -> None:
    names = [layer["Name"] for layer in listing()["Layers"]]
    write_listing(files / "names.json", {"Layers": names, "Bindings": ["x", "b.end.DQ:0"]})
    with pytest.raises(BuildLogError, match="detailed", check=has("no-precisions")):
        compare_files(files, a, "names.json")


def test_convolution_without_layer_is_unknown(files: Path) -> None:
    table = listing()
    del table["Layers"][2]
    write_listing(files / "fewer.json", table)
    result = compare_files(files, "model.onnx", "fewer.json")
    assert (result.unknown, result.summary()["unknown"], result.ok) == (["b0.b"], 1, False)
    assert sum(n.b.is_int8 for n in result.nodes if n.b is not None) == 6


def test_compare_rejects_builds_of_different_networks(files: Path) -> None:
    other = listing()
    for layer in other["Layers"]:
        layer["Name"] = f"other.{layer['Name']}".replace(" + ", " + other.")
        for tensor in (*layer["Inputs"], *layer["Outputs"]):
            tensor["Dimensions"] = [1, 3, 5, 5]
    write_listing(files / "other.json", other)
    with pytest.raises(BuildLogError, check=has("different-models")):
        compare_files(files, "good.json", "other.json")


@pytest.mark.parametrize("a", ["model.onnx", "good.json"])
def test_compare_with_a_listing_that_is_cut_off(files: Path, a: str) -> None:
    content = (files / "good.json").read_bytes()
    (files / "cut.json").write_bytes(content[: int(len(content) * 0.7)])
    result = compare_files(files, a, "cut.json")
    assert result.b.missing and result.partial and not result.ok


def test_compare_with_a_log_that_is_cut_off(tmp_path: Path) -> None:
    case = "resnet18-qat-rtx2000-trt8510"
    (tmp_path / "cut.log").write_bytes(build_file(case).read_bytes()[:300_000])
    result = qdqtool.compare(build_file(case, "model.onnx.gz"), tmp_path / "cut.log")
    assert result.b.missing and result.partial and not result.ok


@pytest.mark.parametrize(
    "case", ["centernet-resnet34-qat-trt80/log.txt", "resnet18-a100-qat/graph.json"]
)
def test_compare_recorded_builds_with_their_own_profiles(case: str) -> None:
    folder, name = case.split("/")
    result = qdqtool.compare(build_file(folder, name), build_file(folder, "profile.json"))
    assert not result.changed and len(result.nodes) == result.a.convolutions


@pytest.mark.parametrize("case", ["", "-residual", "-residual-qgap"])
def test_compare_recorded_engines_with_their_models(case: str) -> None:
    folder = f"resnet18-a100-qat{case}"
    result = qdqtool.compare(build_file(folder, "model.onnx.gz"), build_file(folder, "graph.json"))
    assert result.ok and result.a.int8 == result.b.int8 == 21


def test_compare_recorded_profiles() -> None:
    result = qdqtool.compare(
        *[build_file(f"resnet18-a100-qat{case}", "profile.json") for case in ("", "-residual")]
    )
    assert (
        result.nodes == [] and result.engines is not None and result.engines.aligned_by == "names"
    )
    assert result.times_as_long == pytest.approx(0.731136 / 1.09568)
    assert [side.title.split("/")[0] for side in (result.a, result.b)] == [
        "resnet18-a100-qat",
        "resnet18-a100-qat-residual",
    ]


def test_metadata_names_a_product_in_a_fusion_of_tensorrt_10_3(tmp_path: Path) -> None:
    """The layers come from linear-orinnano-trt103: weights quantized, then weights and data."""

    def layer(name: str, kind: str, layout: str, metadata: str, tactic: str) -> dict[str, Any]:
        a, b, out = (
            {"Name": name, "Dimensions": [1, 8, 16], "Format/Datatype": layout_or_half}
            for name, layout_or_half in (("t0", layout), ("t1", layout), ("out", "Half"))
        )
        return {
            "Name": name,
            "LayerType": kind,
            "Inputs": [a, b],
            "TacticName": tactic,
            "StreamId": 0,
            "Outputs": [out],
            "Metadata": metadata,
        }

    name = "[ONNX Layer: q_proj_matmul]"
    more = f"{name}\u001f[ONNX Layer: node_of_q]\u001e[ONNX Layer: node_of_dq]"
    layers = [
        layer("q_proj_myl0_1", "gemm", "Half", name, "ampere_h16816gemm"),
        layer("__myl_FcCas_myl0_2", "fusion", "Int8", more, "xmma_gemm_i8f32"),
    ]
    result = qdqtool.compare(
        *(
            write_listing(tmp_path / f"{i}.json", {"Layers": [x], "Bindings": ["in", "out"]})
            for i, x in enumerate(layers)
        )
    )
    assert [(n.name, n.changes) for n in result.nodes] == [
        ("q_proj_matmul", (ChangeKind.GAINED_INT8,))
    ]


@pytest.mark.parametrize(
    ("build", "lost"),
    [
        ("resnet18-a100-fp16", LossReason.FLOAT_BUILD),
        ("resnet18-a100-qat-residual", None),
    ],
)
def test_finding_of_a_convolution_that_is_predicted_int8_is_no_reason(
    build: str, lost: LossReason | None
) -> None:
    result = qdqtool.compare(
        build_file("resnet18-a100-qat", "model.onnx.gz"), build_file(build, "graph.json")
    )
    assert {(n.lost, n.finding) for n in result.where(ChangeKind.LOST_INT8)} == (
        {(lost, "")} if lost else set()
    )


@pytest.mark.parametrize(
    ("name", "is_comparison"),
    [("good.json", True), ("model.onnx", True), ("model.onnx", False)],
    ids=["build", "compared model", "predicted model"],
)
def test_save_does_not_overwrite_inputs(files: Path, name: str, is_comparison: bool) -> None:
    model = files / "model.onnx"
    result = (
        compare_files(files, model.name, "good.json") if is_comparison else qdqtool.predict(model)
    )
    result.save(files / "result.json")
    assert json.loads((files / "result.json").read_text()) == json.loads(
        json.dumps(result.as_json())
    )
    with pytest.raises(QdqtoolError, match=name):
        result.save(files / name)
