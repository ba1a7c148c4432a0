"""What differs between two sides of one node, by a table; and which files are models."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qdqtool
from qdqtool.commands.cli import run
from qdqtool.errors import BuildLogError, QdqtoolError
from qdqtool.types import Precision
from qdqtool.verification.comparing.result import (
    Change,
    Lost,
    NodeSide,
    Scales,
    compare_sides,
    differ,
    factor,
    is_model,
)
from qdqtool.verification.comparing.words import why
from tests.buildlog.evidence import build_file
from tests.raising import raises
from tests.verification.comparing.networks import network, numbered

INT8, FP16, FP32, UNKNOWN = Precision.INT8, Precision.FP16, Precision.FP32, Precision.UNKNOWN
LOST, GAINED = Change.LOST_INT8, Change.GAINED_INT8


def scales(*values: float, **fields: Any) -> Scales:
    return Scales(np.array(values), **fields)


def side(
    precision: Precision | None = INT8, output: Precision | None = INT8, **fields: Any
) -> NodeSide:
    return NodeSide(
        "c", "Conv", precision, output=output, **{"data": True, "weights": True, **fields}
    )


@pytest.mark.parametrize(
    ("a", "b", "changes", "lost"),
    [
        (side(), side(), (), None),
        (side(), side(FP16, data=False), (LOST,), Lost.DATA),
        (side(), side(FP16, weights=False), (LOST,), Lost.WEIGHTS),
        (side(), side(FP16, data=False, weights=False), (LOST,), Lost.PAIRS),
        (side(), side(FP16, data=False, weights=None), (LOST,), Lost.PAIRS),
        (side(), side(FP16), (LOST,), Lost.UNKNOWN),
        (side(data=None), side(FP16, data=False), (LOST,), Lost.UNKNOWN),
        (side(FP32), side(), (GAINED,), None),
        (side(Precision.UINT8), side(), (), None),
        (side(None), side(), (), None),
        (side(), side(output=FP16), (Change.LOST_INT8_OUTPUT,), None),
        (side(output=FP32), side(), (Change.GAINED_INT8_OUTPUT,), None),
        (side(output=FP32), side(output=FP16), (), None),
        (side(), side(output=UNKNOWN), (), None),
        (side(output=None), side(), (), None),
        (side(FP16, FP16), side(FP16, INT8), (), None),
        (side(inputs=[INT8, INT8]), side(inputs=[INT8, FP16]), (Change.RESIDUAL,), None),
        (side(inputs=[INT8, INT8]), side(inputs=[INT8]), (), None),
        (side(FP16), side(FP16, weights=False), (Change.LOST_QDQ,), None),
        (side(FP16, data=False), side(FP16), (Change.GAINED_QDQ,), None),
        (side(FP16, data=None), side(FP16, data=False), (), None),
        (side(scale=scales(0.1)), side(scale=scales(0.2)), (Change.SCALE,), None),
        (side(scale=scales(0.1)), side(scale=scales(0.1000005)), (), None),
        (
            side(other_scales={1: scales(0.1)}),
            side(other_scales={1: scales(0.3)}),
            (Change.SCALE,),
            None,
        ),
        (
            side(weights_scale=scales(0.1, 0.2)),
            side(weights_scale=scales(0.1, 0.3)),
            (Change.WEIGHTS_SCALE,),
            None,
        ),
        (
            side(weights_scale=scales(0.1, 0.2)),
            side(weights_scale=scales(0.2)),
            (Change.WEIGHTS_SCALE,),
            None,
        ),
        (
            side(layer="x", fused=["Relu", "Add"]),
            side(layer="y", fused=["Add"]),
            (Change.FUSION,),
            None,
        ),
        (side(layer="x", fused=["Relu", "Add"]), side(layer="y", fused=["Add", "Relu"]), (), None),
        (side(layer="x", fused=["Relu"]), side(fused=[]), (), None),
    ],
)
def test_changes(a: NodeSide, b: NodeSide, changes: tuple[Change, ...], lost: Lost | None) -> None:
    found = compare_sides(a, b)
    assert (found.changes, found.lost) == (changes, lost)
    unscaled = compare_sides(a, b, scales=False).changes
    file_alone = {Change.LOST_QDQ, Change.GAINED_QDQ, Change.SCALE, Change.WEIGHTS_SCALE}
    assert unscaled == tuple(c for c in changes if c not in file_alone)


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
def test_factor(a: Scales | None, b: Scales | None, expected: float | None) -> None:
    assert factor(a, b) == expected


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (scales(0.1, 0.2), scales(0.1, 0.2), False),
        (scales(0.1, 0.2), scales(0.2, 0.1), True),  # another channel's
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
        (scales(0.1), scales(0.1, type=Precision.UINT8), True),
    ],
)
def test_whatever_differs_between_scales_is_a_difference(
    a: Scales | None, b: Scales | None, expected: bool
) -> None:
    assert (differ(a, b), differ(b, a)) == (expected, expected)
    found = compare_sides(side(scale=a, weights_scale=a), side(scale=b, weights_scale=b))
    assert found.changes == ((Change.SCALE, Change.WEIGHTS_SCALE) if expected else ())
    found.why = why(found)
    assert bool(found.why) == expected
    json.dumps(found.as_json(), allow_nan=False)


def test_files_and_errors(tmp_path: Path, files: Path) -> None:
    for name, head, model in (
        ("a.bin", b"\x08\x09", True),
        ("b.log", b"[V] text", False),
        ("c.json", b"{}", False),
        ("d.txt", b"", False),
        ("e.ONNX", b"", True),
    ):
        (tmp_path / name).write_bytes(head)
        assert is_model(tmp_path / name) is model, name
    assert is_model("-") is False and is_model("nowhere.onnx.gz") is True
    (tmp_path / "best.pt").write_bytes(b"PK\x03\x04archive")
    with pytest.raises(QdqtoolError, match=r"best\.pt"):
        is_model(tmp_path / "best.pt")
    (files / "names.json").write_text(json.dumps({"Layers": ["a", "b"], "Bindings": ["x"]}))
    with pytest.raises(BuildLogError, match="detailed"):
        qdqtool.compare(files / "good.json", files / "names.json")
    with raises(QdqtoolError, "compare gpu"):
        qdqtool.compare(files / "model.onnx", files / "good.json", gpu="T4")
    with pytest.raises(QdqtoolError, match="`a`: no file given"):
        qdqtool.compare([], files / "good.json")


# Builds against each other and against what their model asked for.

INT8, HALF = "Int8 NC/32HW32", "Half NHWC8"


def listing(
    float_convs: tuple[str, ...] = (), names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A layer JSON of the small network, fused as TensorRT names it; some convolutions stayed float or are renamed."""
    layers = []
    convs = [node for node in network().graph.node if node.op_type == "Conv"]
    tensors = [
        "x",
        *(f"{node.name}:0" for node in convs[:-1]),
        "b.end.DQ:0",
    ]  # one behind the other
    for i, node in enumerate(convs):
        floating = node.name in float_convs
        name, quantizer = ((names or {}).get(n, n) for n in (node.name, f"{node.name}.w.Q"))
        fused = name if floating else f"{node.name}.weight + {quantizer} + {name}"
        layout = HALF if floating else INT8
        maps = [4 if node.name.endswith("stem") else 8, 8]
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


def test_recorded_and_requested(files: Path) -> None:
    result = qdqtool.compare(files / "model.onnx", files / "bad.json", target="trt8.5")
    assert {n.name for n in result.where(Change.LOST_INT8)} == {"b1.a", "b2.b"}
    assert (result.a.int8, result.b.int8, result.ok) == (7, 5, False)
    assert qdqtool.compare(files / "model.onnx", files / "good.json", target="trt8.5").ok
    result = qdqtool.compare(files / "bad.json", files / "model.onnx", target="trt8.5")
    assert {n.name for n in result.where(Change.GAINED_INT8)} == {"b1.a", "b2.b"}
    result = qdqtool.compare(files / "good.json", files / "bad.json")
    assert result.summary()["lost_int8"] == 2 and result.engines is not None
    # Convolutions and conversions as they are listed; times are the sums of the recorded profiles
    result = qdqtool.compare(
        *(
            [build_file(case, "graph.json"), build_file(case, "profile.json")]
            for case in ("resnet18-a100-fp16", "resnet18-a100-qat-residual")
        )
    )
    assert (result.a.int8, result.b.int8) == (0, 21)
    assert result.times_as_long == pytest.approx(0.731136 / 1.016832)


def test_builds_with_more_or_other_layers(files: Path) -> None:
    table = listing()
    table["Layers"].pop()
    (files / "fewer.json").write_text(json.dumps(table))
    result = qdqtool.compare(files / "good.json", files / "fewer.json")
    assert [n.changes for n in result.changed] == [
        (Change.ONLY_IN_A,)
    ] and result.times_as_long is None
    back = qdqtool.compare(files / "fewer.json", files / "good.json")
    assert [n.changes for n in back.changed] == [(Change.ONLY_IN_B,)] and back.b.int8_to_int8 == 7
    # 8 convolutions write INT8 there and 10 Q stay, as its listing says; 19 and 3 in the build of this model
    model = build_file("resnet18-a100-qat-residual", "model.onnx.gz")
    build = build_file("resnet18-a100-qat", "graph.json")
    result = qdqtool.compare(model, build)
    assert (
        result.a.int8_to_int8,
        result.b.int8_to_int8,
        result.count(Change.LOST_INT8_OUTPUT),
    ) == (19, 8, 11)
    assert (result.a.conversions, result.b.conversions, result.ok) == (3, 10, False)
    assert run(["compare", str(model), str(build), "--fail-on", "any"]) == 1
    rows = [
        {"name": layer["Name"], "timeMs": 1.0, "averageMs": 0.01, "percentage": 1.0}
        for layer in listing()["Layers"]
    ]
    (files / "profile.json").write_text(json.dumps([{"count": 100}, *rows]))
    for pair in (("good.json", "profile.json"), ("profile.json", "good.json")):
        result = qdqtool.compare(*(files / name for name in pair))
        assert (len(result.nodes), result.changed, len(result.unknown)) == (
            7,
            [],
            7,
        ) and not result.ok


@pytest.mark.parametrize("floats", [(), ("b0.a",), ("b1.a", "b2.b")])
def test_numbered_names_of_another_export_are_not_believed(
    files: Path, floats: tuple[str, ...]
) -> None:
    """Numbers that begin at another one: the same name is the next convolution."""
    asked, other = network(residual=False), network()
    mine = numbered(asked)
    (files / "numbered.onnx").write_bytes(asked.SerializeToString())
    theirs = {old: new for new, old in numbered(other, 1).items()}
    assert mine["Conv_3"] == "b1.a" and theirs["b1.a"] == "Conv_4"
    (files / "numbered.json").write_text(json.dumps(listing(floats, theirs)))
    result = qdqtool.compare(files / "numbered.onnx", files / "numbered.json", target="trt8.5")
    assert {mine[n.name] for n in result.where(Change.LOST_INT8)} == set(
        floats
    ) and not result.unknown
    assert (result.matched_by, result.b.int8) == ("shapes", 7 - len(floats))
    (files / "lettered.json").write_text(json.dumps(listing()))
    builds = qdqtool.compare(files / "lettered.json", files / "numbered.json")
    assert len(builds.where(Change.LOST_INT8)) == len(floats) and len(builds.nodes) == 7
    with pytest.raises(BuildLogError, match="another export"):
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
def test_exports_of_one_network_are_matched_convolution_by_convolution(a: str, b: str) -> None:
    """Their exporter numbered the nodes in the order of the network: equal ranks are equal convolutions."""
    files = [build_file(*RESNET[side].split("/")) for side in (a, b)]
    result = qdqtool.compare(*files)
    ranks = []
    for sides in ([n.a for n in result.nodes], [n.b for n in result.nodes]):
        names = [t.layer or t.name for t in sides if t is not None]
        numbers = [int(re.findall(r"(?:Conv|Gemm)_(\d+)", name)[-1]) for name in names]
        ranks.append([sorted(numbers).index(n) for n in numbers])
    assert len(ranks[0]) == 21 and ranks[0] == ranks[1] and not result.unknown


def test_listings_that_cannot_be_compared(files: Path) -> None:
    names = [layer["Name"] for layer in listing()["Layers"]]
    (files / "names.json").write_text(
        json.dumps({"Layers": names, "Bindings": ["x", "b.end.DQ:0"]})
    )
    with pytest.raises(BuildLogError, match="detailed"):
        qdqtool.compare(files / "model.onnx", files / "names.json", target="trt8.5")
    table = listing()
    del table["Layers"][2]
    (files / "fewer.json").write_text(json.dumps(table))
    result = qdqtool.compare(files / "model.onnx", files / "fewer.json", target="trt8.5")
    assert (result.unknown, result.summary()["unknown"], result.ok) == (["b0.b"], 1, False)
    assert sum(n.b.is_int8 for n in result.nodes if n.b is not None) == 6
    other = listing()
    for layer in other["Layers"]:
        layer["Name"] = f"other.{layer['Name']}".replace(" + ", " + other.")
        for tensor in (*layer["Inputs"], *layer["Outputs"]):
            tensor["Dimensions"] = [1, 3, 5, 5]
    (files / "other.json").write_text(json.dumps(other))
    with raises(BuildLogError, "_builds common"):
        qdqtool.compare(files / "good.json", files / "other.json")


@pytest.mark.parametrize("a", ["model.onnx", "good.json"])
def test_a_listing_that_is_cut_off_is_told(files: Path, a: str) -> None:
    text = json.dumps(listing())
    (files / "cut.json").write_text(text[: int(len(text) * 0.7)])
    result = qdqtool.compare(files / a, files / "cut.json", target="trt8.5")
    assert result.b.missing and not result.ok and result.partial


@pytest.mark.parametrize(
    "case", ["centernet-resnet34-qat-trt80/log.txt", "resnet18-a100-qat/graph.json"]
)
def test_recorded_builds_and_their_own_profiles(case: str) -> None:
    folder, name = case.split("/")
    result = qdqtool.compare(build_file(folder, name), build_file(folder, "profile.json"))
    assert not result.changed and len(result.nodes) == result.a.convolutions


@pytest.mark.parametrize("case", ["", "-residual", "-residual-qgap"])
def test_recorded_engines_realize_all_that_was_requested(case: str) -> None:
    folder = f"resnet18-a100-qat{case}"
    result = qdqtool.compare(build_file(folder, "model.onnx.gz"), build_file(folder, "graph.json"))
    assert result.ok and result.a.int8 == result.b.int8 == 21


def test_logs_and_profiles_that_are_incomplete(tmp_path: Path) -> None:
    case = "resnet18-qat-rtx2000-trt8510"
    with open(build_file(case, "log.txt"), "rb") as log:
        (tmp_path / "cut.log").write_bytes(log.read(300_000))
    result = qdqtool.compare(build_file(case, "model.onnx.gz"), tmp_path / "cut.log")
    assert result.b.missing and result.partial and not result.ok
    assert (
        run(
            [
                "compare",
                str(build_file(case, "model.onnx.gz")),
                str(tmp_path / "cut.log"),
                "--fail-on",
                "lost-int8",
            ]
        )
        == 2
    )
    files = [build_file(f"resnet18-a100-qat{case}", "profile.json") for case in ("", "-residual")]
    result = qdqtool.compare(*files)
    assert result.nodes == [] and result.engines is not None and result.engines.by == "names"
    assert result.times_as_long == pytest.approx(0.731136 / 1.09568)
    assert result.a.title.startswith("resnet18-a100-qat/") and result.b.title.startswith(
        "resnet18-a100-qat-residual/"
    )


def test_a_fusion_of_10_3_is_a_matrix_product_and_metadata_names_it(tmp_path: Path) -> None:
    """linear-orinnano-trt103: weights alone quantized, and data as well; tensors have names of other nodes there."""

    def engine(name: str, kind: str, types: list[str], told: str, tactic: str) -> str:
        tensors = [
            {"Name": f"t{i}", "Dimensions": [1, 8, 16], "Format/Datatype": t}
            for i, t in enumerate(types)
        ]
        layers = [
            {
                "Name": name,
                "LayerType": kind,
                "Inputs": tensors,
                "TacticName": tactic,
                "StreamId": 0,
                "Outputs": [{"Name": "out", "Dimensions": [1, 8, 16], "Format/Datatype": "Half"}],
                "Metadata": told,
            }
        ]
        return json.dumps({"Layers": layers, "Bindings": ["in", "out"]})

    (tmp_path / "w8.json").write_text(
        engine(
            "q_proj_myl0_1",
            "gemm",
            ["Half", "Half"],
            "[ONNX Layer: q_proj_matmul]",
            "ampere_h16816gemm",
        )
    )
    (tmp_path / "w8a8.json").write_text(
        engine(
            "__myl_FcCas_myl0_2",
            "fusion",
            ["Int8", "Int8"],
            "[ONNX Layer: q_proj_matmul]\u001f[ONNX Layer: node_of_q]\u001e[ONNX Layer: node_of_dq]",
            "xmma_gemm_i8f32",
        )
    )
    result = qdqtool.compare(tmp_path / "w8.json", tmp_path / "w8a8.json")
    assert [(n.name, n.changes) for n in result.nodes] == [("q_proj_matmul", (Change.GAINED_INT8,))]


@pytest.mark.parametrize(
    ("build", "lost"),
    [
        ("resnet18-a100-fp16", Lost.FLOAT_BUILD),
        ("resnet18-a100-qat-residual", None),
    ],
)
def test_a_finding_about_what_is_predicted_int8_is_no_reason(build: str, lost: Lost | None) -> None:
    result = qdqtool.compare(
        build_file("resnet18-a100-qat", "model.onnx.gz"), build_file(build, "graph.json")
    )
    assert {(n.lost, n.finding) for n in result.where(Change.LOST_INT8)} == (
        {(lost, "")} if lost else set()
    )


def test_nothing_that_was_read_is_written_over(files: Path) -> None:
    compared = qdqtool.compare(files / "model.onnx", files / "good.json", target="trt8.5")
    for result, read in (
        (compared, "good.json"),
        (qdqtool.predict(files / "model.onnx"), "model.onnx"),
    ):
        result.save(files / "result.json")
        assert json.loads((files / "result.json").read_text()) == json.loads(
            json.dumps(result.as_json())
        )
        with pytest.raises(QdqtoolError):
            result.save(files / read)
