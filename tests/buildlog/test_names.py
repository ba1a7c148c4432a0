"""Fused names taken apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqtool.buildlog.names import base_name, clone_suffix, parts

CASES = [
    ("Conv_1", "layer", [["Conv_1"]]),
    ("W + Q + Conv + PWN(PWN(a), b) + Add + Relu", "layer", [["W", "Q", "Conv", "a", "b", "Add", "Relu"]]),
    ("conv1.weight + QuantizeLinear_7_quantize_scale_node + Conv_9", "layer",
     [["conv1.weight", "QuantizeLinear_7_quantize_scale_node", "Conv_9"]]),
    ("Conv_62 + Relu_63 || Conv_65 + Relu_66", "layer", [["Conv_62", "Relu_63"], ["Conv_65", "Relu_66"]]),
    ("PWN(PWN(/model.0/act/Sigmoid), PWN(/model.0/act/Mul))", "layer", [["/model.0/act/Sigmoid", "/model.0/act/Mul"]]),
    ("PWN((Unnamed Layer* 112) [ElementWise], PWN(PWN((Unnamed Layer* 109) [Constant] + (Unnamed Layer* 110) "
     "[ElementWise], (Unnamed Layer* 111) [Unary]), (Unnamed Layer* 113) [ElementWise]))", "layer",
     [["(Unnamed Layer* 112) [ElementWise]", "(Unnamed Layer* 109) [Constant]", "(Unnamed Layer* 110) [ElementWise]",
       "(Unnamed Layer* 111) [Unary]", "(Unnamed Layer* 113) [ElementWise]"]]),
    ("{ForeignNode[/head/Constant_2_output_0.../Unsqueeze_2]}", "foreign",
     [["/head/Constant_2_output_0", "/Unsqueeze_2"]]),
    ("/img/layer1/layer1_0/conv1/Conv_myl2_16", "myelin", [["/img/layer1/layer1_0/conv1/Conv"]]),
    ("__myl_MulAddSilu_myl0_2", "myelin", [[]]),
    ("[trainStation1]", "station", []),
    ("(Unnamed Layer* 718) [NMS]_1_output[DevicetoShapeHostCopy]", "station", []),
    ("", "layer", [[]]),
]


@pytest.mark.parametrize(("name", "kind", "alternatives"), CASES)
def test_parts(name: str, kind: str, alternatives: list[list[str]]) -> None:
    fused = parts(name)
    assert (fused.kind, fused.alternatives) == (kind, alternatives)


def test_reformats_and_copies_name_what_they_serve() -> None:
    fused = parts("Reformatting CopyNode for Input Tensor 1 to Conv_0 + PWN(Clip_3)")
    assert (fused.kind, fused.of, fused.index) == ("reformat-input", "Conv_0 + PWN(Clip_3)", 1)
    assert fused.components == ["Conv_0", "Clip_3"]
    fused = parts("Reformatting CopyNode for Output Tensor 0 to Conv_64")
    assert (fused.kind, fused.of, fused.index) == ("reformat-output", "Conv_64", 0)
    fused = parts("Reformatting CopyNode for Network Input voxels")
    assert (fused.kind, fused.of) == ("reformat-network", "voxels")
    fused = parts("/neck/Concat_/neck/Resize_output_0_clone_0 copy")
    assert (fused.kind, fused.of) == ("copy", "/neck/Concat_/neck/Resize_output_0_clone_0")
    assert all(parts(n).is_copy for n in ("a copy", "Reformatting CopyNode for Input Tensor 0 to b"))


def test_base_names() -> None:
    assert base_name("QuantizeLinear_7751_clone_1_clone_2") == "QuantizeLinear_7751"
    assert base_name("QuantizeLinear_7_quantize_scale_node") == "QuantizeLinear_7"
    assert base_name("QuantizeLinear_7_clone_1_quantize_scale_node") == "QuantizeLinear_7"
    assert base_name("/a/clone_1/Conv") == "/a/clone_1/Conv"
    assert clone_suffix("Q_clone_1_clone_2") == "_clone_1_clone_2"
    assert clone_suffix("Q") == ""


def test_known_names_win_over_the_signs_in_them() -> None:
    known = {"a + b", "conv", "w", "relu(1, 2", "x || y"}
    assert parts("w + a + b + conv", known).components == ["w", "a + b", "conv"]
    assert parts("w + a + b + conv").components == ["w", "a", "b", "conv"]
    assert parts("PWN(a + b, conv)", known).components == ["a + b", "conv"]
    assert parts("a + b", known).alternatives == [["a + b"]]
    assert parts("x || y || conv", known).alternatives == [["x || y"], ["conv"]]


def test_a_lone_bracket_in_a_name_does_not_swallow_the_rest() -> None:
    assert parts("odd(name + Conv_1 + Relu_2").components == ["odd(name", "Conv_1", "Relu_2"]
    assert parts("a) + b").components == ["a)", "b"]


def test_deep_and_long_names_end() -> None:
    parts("PWN(" * 5000 + "a" + ")" * 5000)
    parts(" + ".join(["x"] * 50_000), frozenset({"x + x"}))
    parts("(a + " * 40_000, frozenset({"b + c"}))


_PLAIN = st.from_regex(r"[A-Za-z/._0-9]{1,12}", fullmatch=True)


@given(st.lists(st.lists(_PLAIN, min_size=1, max_size=4), min_size=1, max_size=3))
def test_joined_names_come_apart_again(groups: list[list[str]]) -> None:
    joined = " || ".join(" + ".join(group) for group in groups)
    assert parts(joined).alternatives == groups


@given(st.lists(st.lists(_PLAIN, min_size=1, max_size=3).map(" + ".join), min_size=1, max_size=4, unique=True))
def test_names_with_joints_come_apart_where_known(names: list[str]) -> None:
    """Unambiguous as long as no name is another's beginning."""
    if any(a != b and (b.startswith(a) or (a + " + ").startswith(b)) for a in names for b in names):
        return
    known = frozenset(names)
    pieces = {piece for name in names for piece in name.split(" + ")}
    if len(pieces) < sum(name.count(" + ") + 1 for name in names):
        return
    assert parts(" + ".join(names), known).components == names


@pytest.mark.parametrize(("name", "components"), [
    ("w + f( + b + x + y", ["w", "f(", "b", "x + y"]),  # never closed: each of them is a name
    ("w + f(a + b) + x + y", ["w", "f(a + b)", "x + y"]), ("x + y + x + z", ["x + y", "x", "z"]),
    ("f( + x + y) + b", ["f( + x + y)", "b"]),
])  # fmt: skip
def test_brackets_beside_a_name_that_holds_a_joint(name: str, components: list[str]) -> None:
    assert parts(name, frozenset({"x + y"})).components == components
