"""What shows that a build is not whole: holes in a listing, files cut off, several builds in one file."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.types import Build
from qdqtool.errors import BuildLogError
from tests.buildlog import samples

LOG = samples.trtexec_log()


def layer(name: str, source: str, target: str) -> dict[str, Any]:
    def edge(tensor: str) -> list[dict[str, Any]]:
        return [{"Name": tensor, "Dimensions": [1, 8, 4, 4], "Format/Datatype": "Row major Int8 format"}]

    return {"Name": name, "LayerType": "CaskConvolution", "Inputs": edge(source), "Outputs": edge(target)}


LAYERS = [layer("a", "x", "t"), layer("b", "t", "u"), layer("c", "u", "y")]


def read(layers: list[dict[str, Any]]) -> Build:
    return read_build(io.BytesIO(json.dumps({"Layers": layers, "Bindings": ["x", "y"]}).encode()))


def test_a_chain_from_input_to_output_is_whole() -> None:
    assert read(LAYERS).complete


@pytest.mark.parametrize(
    ("lost", "said"),
    [(0, "b reads t, which none writes"), (1, "c reads u, which none writes"), (2, "none reads or writes the binding")],
)
def test_a_layer_that_is_missing_is_noticed(lost: int, said: str) -> None:
    build = read([*LAYERS[:lost], *LAYERS[lost + 1 :]])
    assert not build.complete
    assert any(said in m for m in build.missing)


def test_a_listing_without_bindings_is_not_judged() -> None:
    assert read_build(io.BytesIO(json.dumps({"Layers": LAYERS[1:]}).encode())).complete


def test_a_layer_json_cut_off_is_not_complete() -> None:
    whole = json.dumps({"Layers": LAYERS, "Bindings": ["x", "y"]}, indent=1)
    build = read_build(io.BytesIO(whole[: whole.index('"c"')].encode()))
    assert [x.name for x in build.layers] == ["a", "b"]
    assert not build.complete
    assert any(m.startswith("engine listing (cut off: the end of") for m in build.missing)


def test_a_cut_profile_does_not_spoil_the_listing() -> None:
    rows = [f'{{ "name" : "{n}", "timeMs" : 1, "averageMs" : 0.3, "percentage" : 33 }}' for n in "abc"]
    profile = "[\n" + "\n, ".join(rows)
    build = read_build(io.BytesIO(json.dumps({"Layers": LAYERS, "Bindings": ["x", "y"]}).encode()),
                       io.BytesIO(profile.encode()))
    assert list(build.profile) == ["a", "b", "c"]
    assert build.complete
    assert any(m.startswith("profile (cut off") for m in build.missing)


def test_of_two_builds_in_one_file_the_last_one_counts() -> None:
    first = read_build(io.BytesIO(LOG.encode()))
    second = read_build(io.BytesIO((LOG + LOG).encode()))
    assert (first.builds, second.builds) == (1, 2)
    assert len(second.parse.nodes) == len(first.parse.nodes)
    assert [x.name for x in second.layers] == [x.name for x in first.layers]
    assert second.tactics.timed == first.tactics.timed
    assert second.complete


def test_the_listing_of_an_earlier_build_is_not_taken_for_the_last_one() -> None:
    cut = LOG[: LOG.index("Engine Layer Information")]
    build = read_build(io.BytesIO((LOG + cut).encode()))
    assert build.layers == []
    assert "engine listing" in build.missing
    assert not build.complete


def test_a_description_of_the_device_is_no_listing() -> None:
    with pytest.raises(BuildLogError, match="no layer listing"):
        read_build(io.BytesIO(json.dumps([{"Name": "NVIDIA A100", "ComputeCapability": [8, 0]}]).encode()))
