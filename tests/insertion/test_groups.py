from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import qdqtool
from qdqtool.demo.model import yolov8n
from qdqtool.graph import Model
from qdqtool.insertion.groups import ScaleGroup, scale_groups
from tests.insertion.nets import Net, images


def tied(groups: list[ScaleGroup]) -> list[tuple[str, ...]]:
    return [g.quantized for g in groups]


def test_concat_ties_its_inputs_and_output() -> None:
    net = Net()
    a, b = net.op("Relu", "a", net.conv("ca", "x")), net.op("Relu", "b", net.conv("cb", "x"))
    joined = net.op("Concat", "cat", a, b, axis=1)
    net.output(net.conv("c", joined, 32), net.conv("d", a))
    groups = scale_groups(net.index(), ["x", "cat.out", "a.out"])
    assert tied(groups) == [("x",), ("cat.out", "a.out")]
    assert set(groups[1].sources) == {"a.out", "b.out"}
    assert set(groups[1].tensors) == {"a.out", "b.out", "cat.out"}
    assert [g.tied for g in groups] == [False, True]


def test_chained_concats_fall_into_one_group() -> None:
    net = Net()
    a, b, c = (net.op("Relu", n, net.conv(f"c{n}", "x")) for n in "abc")
    first = net.op("Concat", "cat1", a, b, axis=1)
    second = net.op("Concat", "cat2", b, c, axis=1)
    net.output(net.conv("d", first, 32), net.conv("e", second, 32))
    groups = scale_groups(net.index(), ["cat1.out", "cat2.out"])
    assert tied(groups) == [("cat1.out", "cat2.out")]
    assert set(groups[0].sources) == {"a.out", "b.out", "c.out"}


def test_pools_resize_split_and_reshape_pass_the_scale_on() -> None:
    net = Net()
    a = net.op("Relu", "a", net.conv("ca", "x"))
    pool = net.op("MaxPool", "pool", a, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    up = net.op("Resize", "up", pool, "", net.const("s", [1, 1, 1, 1]), mode="nearest")
    halves = net.op("Split", "split", up, net.const("sizes", [8, 8], np.int64), outputs=2, axis=1)
    net.output(net.conv("d", halves[1], 8), net.conv("e", a))
    groups = scale_groups(net.index(), ["split.out1", "a.out"])
    assert tied(groups) == [("split.out1", "a.out")]
    assert groups[0].sources == ("a.out",)
    assert not groups[0].tied


def test_a_constant_joined_in_counts_with_its_values() -> None:
    net = Net()
    a = net.op("Relu", "a", net.conv("ca", "x"))
    joined = net.op("Concat", "cat", a, net.const("k", np.full((1, 16, 8, 8), 99.0)), axis=1)
    net.output(net.conv("d", joined, 32))
    (group,) = scale_groups(net.index(), ["cat.out"])
    assert set(group.sources) == {"a.out", "cat.out"}


def test_arithmetic_ends_a_group() -> None:
    net = Net()
    a = net.op("Relu", "a", net.conv("ca", "x"))
    bounds = net.const("low", 0.0), net.const("high", 6.0)
    clipped = net.op("Clip", "clip", a, *bounds)
    pool = net.op("AveragePool", "p", a, kernel_shape=[2, 2])
    net.output(net.conv("d", clipped), net.conv("e", a), net.conv("f", pool))
    assert len(scale_groups(net.index(), ["a.out", "clip.out", "p.out"])) == 3


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"),
    [
        ("Resize", ["", "scales"], {"mode": "linear"}),
        ("Pad", ["pads"], {}),
        ("Pad", ["pads", "zero"], {"mode": "constant"}),
        ("Pad", ["pads"], {"mode": "reflect"}),
        ("Pad", ["pads"], {"mode": "edge"}),
        ("GlobalMaxPool", [], {}),
        ("Dropout", [], {}),
        ("Cast", [], {"to": 1}),
        ("Identity", [], {}),
        ("DepthToSpace", [], {"blocksize": 2}),
    ],
)
def test_whatever_a_q_passes_ties(op: str, inputs: list[str], attributes: dict[str, Any]) -> None:
    net = Net()
    net.const("scales", [1, 1, 2, 2])
    net.const("pads", [0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    net.const("zero", 0.0)
    a = net.op("Relu", "a", net.conv("ca", "x"))
    net.output(net.op(op, "n", a, *inputs, **attributes))
    (group,) = scale_groups(net.index(), ["a.out", "n.out"])
    assert group.quantized == ("a.out", "n.out")
    assert group.sources == ("a.out",)


@pytest.mark.parametrize(("value", "groups"), [(0.0, 1), (1.0, 2)])
def test_a_pad_with_other_values_ends_a_group(value: float, groups: int) -> None:
    net = Net()
    a = net.op("Relu", "a", net.conv("ca", "x"))
    pads = net.const("pads", [0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    net.output(net.op("Pad", "n", a, pads, net.const("value", value)))
    assert len(scale_groups(net.index(), ["a.out", "n.out"])) == groups


def test_tensors_behind_a_concat_that_nobody_quantizes_are_not_tied() -> None:
    net = Net()
    a, b = net.op("Relu", "a", net.conv("ca", "x")), net.op("Relu", "b", net.conv("cb", "x"))
    net.output(net.op("Concat", "cat", a, b, axis=1), net.conv("d", a), net.conv("e", b))
    assert tied(scale_groups(net.index(), ["a.out", "b.out"])) == [("a.out",), ("b.out",)]


def test_without_unify_everyone_is_alone() -> None:
    net = Net()
    a, b = net.op("Relu", "a", net.conv("ca", "x")), net.op("Relu", "b", net.conv("cb", "x"))
    net.output(net.conv("c", net.op("Concat", "cat", a, b, axis=1), 32), net.conv("d", a))
    groups = scale_groups(net.index(), ["cat.out", "a.out"], unify=False)
    assert [(g.quantized, g.sources) for g in groups] == [(("cat.out",), ("cat.out",)), (("a.out",), ("a.out",))]


def test_yolov8s_neck_is_two_groups_and_sppf_one() -> None:
    """By hand from the architecture: layers 11 and 20 meet in layer 9's output, layers 14 and 17 in layer 12's."""
    model = Model(yolov8n(64, classes=2))
    quantized = [n.input(0) for n in model.ordered if n.op == "Conv"]
    groups = {g.quantized[-1]: set(g.sources) for g in scale_groups(model, quantized) if g.tied}
    act = "act/Mul_output_0"
    assert groups["/model.20/Concat_output_0"] == {f"/model.6/cv2/{act}", f"/model.9/cv2/{act}", f"/model.19/{act}"}
    assert groups["/model.17/Concat_output_0"] == {f"/model.4/cv2/{act}", f"/model.12/cv2/{act}", f"/model.16/{act}"}
    sppf = next(g for g in scale_groups(model, quantized) if "/model.9/Concat_output_0" in g.quantized)
    assert sppf.sources == (f"/model.9/cv1/{act}",)


@pytest.mark.parametrize("unify", [True, False])
@pytest.mark.parametrize("method", ["percentile", "max"])
@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
def test_a_pad_between_two_readers_leaves_one_scale(mode: str, method: str, unify: bool) -> None:
    """Without one scale for both, the simulator finds two at c0, which then writes float."""
    net = Net()
    c0 = net.conv("c0", "x")
    pads = net.const("pads", [0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    net.output(net.conv("c1", net.op("Pad", "pad", c0, pads, mode=mode)), net.conv("c2", c0))
    samples = images(2, seed=3)
    samples[0]["x"][..., 0] = 30.0  # at the border, which padding repeats
    result = qdqtool.insert(net.model(), samples, method=method, percentile=90.0, head="none", unify=unify)
    assert result.prediction is not None
    (c0_outcome,) = [c for c in result.prediction.convolutions if c.name == "c0"]
    scales = {q.scale for q in result.activations if q.tensor in ("c0.out", "pad.out")}
    assert len(scales) == 1 or not unify
    assert str(c0_outcome.output) == ("INT8" if len(scales) == 1 else "FLOAT")
