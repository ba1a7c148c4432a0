"""Builds against each other and against what their model asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import qdqtool
from qdqtool.comparing.result import Change
from qdqtool.errors import BuildLogError, QdqtoolError
from tests.buildlog.evidence import build_file
from tests.comparing.networks import network

INT8, HALF = "Int8 NC/32HW32", "Half NHWC8"


def listing(float_convs: tuple[str, ...] = ()) -> dict[str, Any]:
    """A layer JSON of the small network, fused as TensorRT names it; some convolutions stayed float."""
    model = network()
    layers = []
    for node in model.graph.node:
        if node.op_type != "Conv":
            continue
        floating = node.name in float_convs
        name = node.name if floating else f"{node.name}.weight + {node.name}.w.Q + {node.name}"
        layout = HALF if floating else INT8
        same = {"Location": "Device", "Dimensions": [1, 8, 16, 16], "Format/Datatype": layout}
        edge, out = [{"Name": f"{node.name}-in", **same}], [{"Name": f"{node.name}:0", **same}]
        layers.append({"Name": name, "LayerType": "CaskConvolution", "Inputs": edge, "Outputs": out,
                       "ParameterType": "Convolution", "Kernel": [3, 3], "OutMaps": 8, "Groups": 1})
    return {"Layers": layers, "Bindings": ["x", "b.end.DQ:0"]}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "model.onnx").write_bytes(network().SerializeToString())
    (tmp_path / "good.json").write_text(json.dumps(listing()))
    (tmp_path / "bad.json").write_text(json.dumps(listing(("b1.a", "b2.b"))))
    return tmp_path


def test_requested_and_realized(files: Path) -> None:
    result = qdqtool.compare(files / "model.onnx", files / "bad.json", target="trt8.5")
    assert {n.name for n in result.nodes if Change.LOST_INT8 in n.changes} == {"b1.a", "b2.b"}
    assert (result.a.int8, result.b.int8, result.ok) == (7, 5, False)
    assert qdqtool.compare(files / "model.onnx", files / "good.json", target="trt8.5").ok


def test_realized_first_is_the_same_the_other_way_round(files: Path) -> None:
    result = qdqtool.compare(files / "bad.json", files / "model.onnx", target="trt8.5")
    assert {n.name for n in result.nodes if Change.GAINED_INT8 in n.changes} == {"b1.a", "b2.b"}


def test_two_builds(files: Path) -> None:
    result = qdqtool.compare(files / "good.json", files / "bad.json")
    assert result.summary()["lost_int8"] == 2 and result.engines is not None


def test_two_builds_of_which_one_has_a_layer_more(files: Path) -> None:
    table = listing()
    table["Layers"].pop()
    (files / "fewer.json").write_text(json.dumps(table))
    result = qdqtool.compare(files / "good.json", files / "fewer.json")
    assert [n.changes for n in result.changed] == [(Change.ONLY_IN_A,)] and result.times_as_long is None
    back = qdqtool.compare(files / "fewer.json", files / "good.json")
    assert [n.changes for n in back.changed] == [(Change.ONLY_IN_B,)] and back.b.int8_to_int8 == 7


def test_errors_say_what_to_do(files: Path) -> None:
    (files / "names.json").write_text(json.dumps({"Layers": ["a", "b"], "Bindings": ["x"]}))
    with pytest.raises(BuildLogError, match="detailed"):
        qdqtool.compare(files / "good.json", files / "names.json")
    with pytest.raises(QdqtoolError, match="`gpu` is for two models"):
        qdqtool.compare(files / "model.onnx", files / "good.json", gpu="T4")
    with pytest.raises(QdqtoolError, match="`a`: no file given"):
        qdqtool.compare([], files / "good.json")


def test_recorded_engines() -> None:
    """Convolutions and conversions as they are listed; times are the sums of the recorded profiles."""
    float_, placed = (
        [build_file(case, "graph.json"), build_file(case, "profile.json")]
        for case in ("resnet18-a100-fp16", "resnet18-a100-qat-residual")
    )
    result = qdqtool.compare(float_, placed)
    assert (result.a.int8, result.b.int8) == (0, 21)
    assert result.times_as_long == pytest.approx(0.731136 / 1.016832)


@pytest.mark.parametrize("case", ["", "-residual", "-residual-qgap"])
def test_recorded_engines_realize_all_that_was_requested(case: str) -> None:
    folder = f"resnet18-a100-qat{case}"
    result = qdqtool.compare(build_file(folder, "model.onnx.gz"), build_file(folder, "graph.json"))
    assert result.ok and result.a.int8 == result.b.int8 == 21


def test_profiles_alone_are_compared_by_names_and_times() -> None:
    files = [build_file(f"resnet18-a100-qat{case}", "profile.json") for case in ("", "-residual")]
    result = qdqtool.compare(*files)
    assert result.nodes == [] and result.engines is not None and result.engines.by == "names"
    assert result.times_as_long == pytest.approx(0.731136 / 1.09568)
    assert result.a.title.startswith("resnet18-a100-qat/") and result.b.title.startswith("resnet18-a100-qat-residual/")


def test_builds_of_different_networks_are_refused(files: Path) -> None:
    other = listing()
    for layer in other["Layers"]:
        layer["Name"] = f"other.{layer['Name']}".replace(" + ", " + other.")
        for tensor in (*layer["Inputs"], *layer["Outputs"]):
            tensor["Dimensions"] = [1, 3, 5, 5]
    (files / "other.json").write_text(json.dumps(other))
    with pytest.raises(BuildLogError, match="no layer in common"):
        qdqtool.compare(files / "good.json", files / "other.json")


def test_a_fusion_of_10_3_is_a_matrix_product_and_metadata_names_it(tmp_path: Path) -> None:
    """linear-orinnano-trt103: weights alone quantized, and data as well; tensors have names of other nodes there."""

    def engine(name: str, kind: str, types: list[str], told: str, tactic: str) -> str:
        tensors = [{"Name": f"t{i}", "Dimensions": [1, 8, 16], "Format/Datatype": t} for i, t in enumerate(types)]
        layers = [{"Name": name, "LayerType": kind, "Inputs": tensors, "TacticName": tactic, "StreamId": 0,
                   "Outputs": [{"Name": "out", "Dimensions": [1, 8, 16], "Format/Datatype": "Half"}],
                   "Metadata": told}]
        return json.dumps({"Layers": layers, "Bindings": ["in", "out"]})

    (tmp_path / "w8.json").write_text(engine(
        "q_proj_myl0_1", "gemm", ["Half", "Half"], "[ONNX Layer: q_proj_matmul]", "ampere_h16816gemm"))
    (tmp_path / "w8a8.json").write_text(engine(
        "__myl_FcCas_myl0_2", "fusion", ["Int8", "Int8"],
        "[ONNX Layer: q_proj_matmul]\u001f[ONNX Layer: node_of_q]\u001e[ONNX Layer: node_of_dq]", "xmma_gemm_i8f32"))
    result = qdqtool.compare(tmp_path / "w8.json", tmp_path / "w8a8.json")
    assert [(n.name, n.changes) for n in result.nodes] == [("q_proj_matmul", (Change.GAINED_INT8,))]
