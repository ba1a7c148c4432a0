import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qdqtool
from calibration.cache import Statistics
from calibration.methods import range_of
from calibration.statistics import TensorStatistics
from qdqtool.base.notes import Remark
from qdqtool.base.options import Kept
from qdqtool.commands.demo_run import yolov8n
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.insertion import scales
from qdqtool.insertion.inputs import collect_for, scales_from_table, write_table
from qdqtool.insertion.scales import (
    METHODS,
    MethodChoice,
    ScaleGroup,
    choose_scale,
    positive,
    scale_groups,
    weight_scale,
)
from qdqtool.model.graph import Model
from qdqtool.types import QuantizedTensor
from tests.calibration.nets import refused
from tests.insertion.nets import Net, images
from tests.raising import raises

RNG = np.random.default_rng(0)
WIDE = RNG.laplace(0.0, 4.0, 40_000).astype(np.float32)
NARROW = RNG.normal(0.0, 0.5, 40_000).astype(np.float32)


def statistics(**tensors: object) -> Statistics:
    return Statistics(
        {k: TensorStatistics.of(np.asarray(v, np.float32)) for k, v in tensors.items()}
    )


def group(*sources: str) -> ScaleGroup:
    return ScaleGroup((sources[0],), sources, sources)


def relative_error(values: np.ndarray, scale: float) -> float:
    """By hand: quantize with that scale, root of squared error over power."""
    wide = values.astype(np.float64)
    restored = np.clip(np.rint(wide / scale), -127, 127) * scale
    return float(np.sqrt(((wide - restored) ** 2).mean() / (wide**2).mean()))


def test_ranges_of_groups() -> None:
    found, said = choose_scale(group("a", "b"), statistics(a=WIDE, b=NARROW), MethodChoice("max"))
    assert found.scale == pytest.approx(float(np.abs(WIDE).max()) / 127, rel=1e-6)
    assert [m.tensor for m in found.members] == ["a", "b"]
    ratio = np.abs(WIDE).max() / np.abs(NARROW).max()
    assert found.members[0].bits_lost == pytest.approx(0.0, abs=1e-6)
    assert found.members[1].bits_lost == pytest.approx(np.log2(ratio), abs=1e-4)
    assert said == []
    found, _ = choose_scale(
        group("a", "b"), statistics(a=WIDE, b=NARROW), MethodChoice("percentile", percentile=99.0)
    )
    assert found.scale == pytest.approx(
        np.percentile(np.abs(np.concatenate([WIDE, NARROW])), 99.0) / 127, rel=0.01
    )
    found, _ = choose_scale(group("a", "b"), statistics(a=WIDE, b=NARROW), MethodChoice("mse"))

    def total(scale: float) -> float:
        return relative_error(WIDE, scale) + relative_error(NARROW, scale)

    best = min(total(s) for s in np.geomspace(0.2, 2.0, 200) * found.scale)
    assert total(found.scale) <= best * 1.02
    assert total(found.scale) < total(float(np.abs(WIDE).max()) / 127) * 0.9
    assert found.power == 2.0


def test_the_power_of_a_group_is_told_and_its_range_has_the_least_error_to_it() -> None:
    silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731
    for spread, power in (
        (2.0, 3.0),
        (30.0, 2.0),
    ):  # steps far below, and above, SiLU's negative side
        values = {
            n: silu(RNG.normal(0.0, spread * k, 40_000)).astype(np.float32)
            for n, k in (("a", 1.0), ("b", 0.6))
        }
        stats = statistics(**values)
        for name, array in values.items():
            stats[name].add_focus([array[:2000]])
        found, _ = choose_scale(group("a", "b"), stats, MethodChoice("focus"))
        assert found.power == power

        def total(scale: float) -> float:
            errors = []
            for array in values.values():  # noqa: B023
                restored = np.clip(np.rint(array / scale), -127, 127) * scale
                wrong, size = np.abs(array - restored) ** power, np.abs(array) ** power  # noqa: B023
                errors.append([0.1 * e.mean() + 0.9 * e[:2000].mean() for e in (wrong, size)])
            return float(sum((a / b) ** (1 / power) for a, b in errors))  # noqa: B023

        own = [m.amax / 127 for m in found.members]
        assert (
            total(found.scale) <= min(total(s) for s in np.geomspace(min(own), max(own), 60)) * 1.02
        )
    assert (
        choose_scale(group("a", "b"), statistics(a=WIDE, b=NARROW), MethodChoice("max"))[0].power
        is None
    )


@pytest.mark.parametrize("method", ["max", "mse", "percentile", "entropy"])
def test_an_always_zero_tensor_gets_a_positive_scale_and_a_warning(method: str) -> None:
    found, said = choose_scale(group("a"), statistics(a=np.zeros(100)), MethodChoice(method))
    assert found.scale > 0
    assert said == [Remark.ALWAYS_ZERO(tensor="a")]
    assert found.scale == np.float32(1 / 127) and found.power is None
    both, said = choose_scale(
        group("a", "b"), statistics(a=np.zeros(100), b=NARROW), MethodChoice(method)
    )
    assert [(m.tensor, m.bits_lost) for m in both.members] == [("a", 0.0), ("b", 0.0)]
    assert both.members[0].amax == 0.0 and both.members[1].amax / 127 == pytest.approx(
        both.scale, rel=1e-6
    )
    alone, _ = choose_scale(group("b"), statistics(b=NARROW), MethodChoice(method))
    assert both.scale == alone.scale
    assert len(said) == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_tensor_alone_is_searched_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scale is that of its own range; nothing is merged or searched again for one tensor, nor for none."""
    monkeypatch.setattr(scales, "_least_error", None)
    monkeypatch.setattr("calibration.statistics.merge_all", None)
    stats = statistics(a=WIDE, z=np.zeros(9))
    for sources in (("a",), ("a", "z"), ("z", "a")):
        found, _ = choose_scale(group(*sources), stats, MethodChoice(method))
        assert found.scale == pytest.approx(range_of(stats["a"], method).amax / 127, rel=1e-6)
        assert found.power == range_of(stats["a"], method).power
    assert choose_scale(group("z"), stats, MethodChoice(method))[0].scale == np.float32(1 / 127)


def test_weights_and_overrides() -> None:
    choice = MethodChoice("mse", (("^a", "max"), ("b", "percentile")))
    assert choice.of(group("abc")) == "max"  # the first pattern that matches
    assert choice.of(group("cb")) == "percentile"
    assert choice.of(group("z")) == "mse"
    with raises(QdqtoolError, "MethodChoice.of a1 b1"):
        choice.of(group("a1", "b1"))
    assert (
        choice.of(group("a1", "z", "a2")) == choice.of(group("z", "a1")) == "max"
    )  # what matches none follows
    for tensors, example in ((["z", "y", "x"], "'z'"), ([], "")):
        refused(
            QdqtoolError,
            f"MethodChoice.check `method_for` ^a=max: {example}",
            choice.check,
            tensors,
        )
    choice.check(["a", "b"])
    with pytest.raises(QdqtoolError, match="not a regular expression"):
        MethodChoice("mse", (("(", "max"),)).check(["z"])
    with raises(QdqtoolError, "MethodChoice.check kl"):
        MethodChoice("kl").check([])
    with raises(QdqtoolError, "MethodChoice.check kl"):
        MethodChoice("max", (("z", "kl"),)).check(["z"])
    stats = statistics(a=[1.0, np.nan, 2.0])
    refused(
        DataError,
        "choose_scale 'a': 1 3 NaN `exclude`",
        choose_scale,
        group("a"),
        stats,
        MethodChoice(),
    )


@pytest.mark.parametrize(
    ("percentile", "right"),
    [
        (0.9999, False),
        (49.99, False),
        (50.0, True),
        (99.99, True),
        (100.0, True),
        (100.01, False),
    ],
)
def test_percentiles_go_from_50_to_100(percentile: float, right: bool) -> None:
    assert MethodChoice().percentile == 99.99
    choice = MethodChoice("percentile", percentile=percentile)
    if right:
        choice.check([])
        return
    with raises(QdqtoolError, f"MethodChoice.check {percentile:g}"):
        choice.check([])


def test_weight_scales_are_per_channel_and_positive() -> None:
    weight = RNG.normal(0, 1, (4, 3, 3, 3)).astype(np.float32)
    weight[2] = 0.0
    weight[3] *= 1e-40
    expected = np.abs(weight).reshape(4, -1).max(axis=1) / 127
    found = weight_scale(weight, 0)
    assert found.shape == (4,)
    assert found.dtype == np.float32
    assert found[:2] == pytest.approx(expected[:2], rel=1e-6)
    assert found[2] == found[3] == expected[:2].max().astype(np.float32)
    across = weight_scale(weight, 1)
    assert across == pytest.approx(np.abs(weight).max(axis=(0, 2, 3)) / 127, rel=1e-6)
    single = weight_scale(weight, None)
    assert single.shape == ()
    assert single == pytest.approx(np.abs(weight).max() / 127, rel=1e-6)
    small = weight_scale(np.float32([[0.25, -0.5]]), None)
    assert small == np.float32(0.5 / 127) and weight_scale(np.float32([[0.25, -0.5]]), 0) == [small]
    assert weight_scale(np.zeros((2, 2), np.float32), 0).tolist() == [1.0, 1.0]
    assert weight_scale(np.zeros((2, 0), np.float32), 0).tolist() == [1.0, 1.0]
    assert weight_scale(np.zeros((2, 0), np.float32), None).tolist() == 1.0
    tiny = float(np.finfo(np.float32).tiny)
    weight = np.array([[127.0 * tiny], [126.0 * tiny], [127.0]])
    assert weight_scale(weight, 0).tolist() == [tiny, 1.0, 1.0]
    assert positive(0.0) == float(np.finfo(np.float32).tiny)
    assert positive(1e-45) > 0
    assert positive(0.1) == float(np.float32(0.1))


def table(folder: Path, **scales: float) -> Path:
    path = folder / "calib.table"
    rows = [f"{name}: {struct.pack('!f', scale).hex()}" for name, scale in scales.items()]
    path.write_text("\n".join(["TRT-8502-EntropyCalibration2", *rows]) + "\n")
    return path


GROUP = ScaleGroup(("joined",), ("joined", "a", "b"), ("a", "b"))


def test_tables_of_scales(tmp_path: Path) -> None:
    path = table(tmp_path, a=0.25, b=0.5, joined=0.125, other=9.0)
    (found,) = scales_from_table(path, [GROUP])
    assert (found.scale, found.method, found.power) == (0.5, "table", None)
    assert [(m.tensor, m.amax, m.bits_lost) for m in found.members] == [
        ("a", 0.25 * 127, 0.0),
        ("b", 0.5 * 127, 0.0),
    ]
    (one,) = scales_from_table(table(tmp_path, a=0.25), [GROUP])
    assert one.scale == 0.25 and [m.tensor for m in one.members] == ["a"]
    made = Net()
    made.output(made.conv("c", "x"))
    result = qdqtool.insert(made.model(), images(), predict=False, head="none", method="max")
    result.quantized.append(QuantizedTensor("by channel", [0.5, 0.25], "other", None, "q"))
    write_table(result, tmp_path / "out.table")
    rows = (tmp_path / "out.table").read_text().splitlines()[1:]
    largest = max(float(np.abs(i["x"]).max()) for i in images())
    assert rows == [f"x: {struct.pack('!f', largest / 127).hex()}"]


@pytest.mark.parametrize("scale", [0.0, None])
def test_what_the_table_has_no_range_for_is_named(scale: float | None, tmp_path: Path) -> None:
    path = table(tmp_path, other=1.0) if scale is None else table(tmp_path, a=scale, other=1.0)
    refused(DataError, f"scales_from_table {path}: 'joined'", scales_from_table, path, [GROUP])
    small = scales_from_table(table(tmp_path, a=1e-45), [GROUP])[0].scale
    assert small == float(np.finfo(np.float32).tiny)  # as small as a scale can be


def test_what_is_reported_of_calibration(tmp_path: Path) -> None:
    made = Net()
    body = made.op("Relu", "r", made.conv("c", "x"))
    made.output(made.op("Sigmoid", "s", made.conv("heat", body, cout=3)))
    model = made.index()
    groups = [ScaleGroup(("x",), ("x",), ("x",)), ScaleGroup((body,), (body,), (body, "x"))]

    def report(data: object, cache: Path | None = None) -> dict[str, object]:
        _, told = collect_for(model, data, groups, max_images=3, kept=Kept(calib_cache=cache))
        return told

    told = report(images())
    assert (told["images"], told["tensors"], told["focus"]) == (3, 2, ["heat.out"])
    assert told["cache"] is None and told["data"] == ""
    assert told["skipped"] == told["notes"] == [] and told["fingerprint"]
    np.save(tmp_path / "x.npy", np.concatenate([i["x"] for i in images()]))
    told = report(tmp_path / "x.npy", tmp_path / "cache.npz")
    assert told["data"] == str(tmp_path / "x.npy") and told["cache"] == str(tmp_path / "cache.npz")
    refused(DataError, "collect_for (`data`) (`calib_table`)", report, None)


def tied(groups: list[ScaleGroup]) -> list[tuple[str, ...]]:
    return [g.quantized for g in groups]


def test_groups_of_a_concat(net: Net) -> None:
    a, b = net.op("Relu", "a", net.conv("ca", "x")), net.op("Relu", "b", net.conv("cb", "x"))
    joined = net.op("Concat", "cat", a, b, axis=1)
    net.output(net.conv("c", joined, 32), net.conv("d", a))
    groups = scale_groups(net.index(), ["x", "cat.out", "a.out"])
    assert tied(groups) == [("x",), ("cat.out", "a.out")]
    assert set(groups[1].sources) == {"a.out", "b.out"}
    assert set(groups[1].tensors) == {"a.out", "b.out", "cat.out"}
    assert [g.tied for g in groups] == [False, True]
    net = Net()
    a = net.op("Relu", "a", net.conv("ca", "x"))
    joined = net.op("Concat", "cat", a, net.const("k", np.full((1, 16, 8, 8), 99.0)), axis=1)
    net.output(net.conv("d", joined, 32))
    (group,) = scale_groups(net.index(), ["cat.out"])
    assert set(group.sources) == {"a.out", "cat.out"}
    net = Net()
    a, b = net.op("Relu", "a", net.conv("ca", "x")), net.op("Relu", "b", net.conv("cb", "x"))
    net.output(net.op("Concat", "cat", a, b, axis=1), net.conv("d", a), net.conv("e", b))
    assert tied(scale_groups(net.index(), ["a.out", "b.out"])) == [("a.out",), ("b.out",)]
    net = Net()
    a, b = net.op("Relu", "a", net.conv("ca", "x")), net.op("Relu", "b", net.conv("cb", "x"))
    net.output(net.conv("c", net.op("Concat", "cat", a, b, axis=1), 32), net.conv("d", a))
    groups = scale_groups(net.index(), ["cat.out", "a.out"], unify=False)
    assert [(g.quantized, g.sources) for g in groups] == [
        (("cat.out",), ("cat.out",)),
        (("a.out",), ("a.out",)),
    ]


@pytest.mark.parametrize(
    ("fill", "op", "below"),
    [
        (-np.inf, "MaxPool", True),
        (np.inf, "MaxPool", False),
        (-1e38, "MaxPool", True),
        (-1e38, "AveragePool", False),
        (1.0, "MaxPool", False),
    ],
)
def test_what_a_pad_fills_in_below_all_has_no_part_in_a_range(
    net: Net, fill: float, op: str, below: bool
) -> None:
    a = net.op("Relu", "a", net.conv("ca", "x"))
    pads = net.const("pads", [0, 0, 0, 0, 0, 0, 1, 1], np.int64)
    padded = net.op("Pad", "p", a, pads, net.const("fill", fill))
    net.output(net.conv("d", net.op(op, "m", padded, kernel_shape=[3, 3])))
    (group,) = scale_groups(net.index(), ["m.out"])
    assert group.sources == ("a.out" if below else ("m.out" if op == "AveragePool" else "p.out"),)


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "ties"),
    [
        ("Resize", ["", "scales"], {"mode": "linear"}, True),
        ("Resize", ["", "scales"], {"mode": "nearest"}, True),
        ("Pad", ["pads"], {}, True),
        ("Pad", ["pads", "zero"], {"mode": "constant"}, True),
        ("Pad", ["pads", "six"], {"mode": "constant"}, False),
        ("Pad", ["pads"], {"mode": "reflect"}, True),
        ("Pad", ["pads"], {"mode": "edge"}, True),
        ("MaxPool", [], {"kernel_shape": [2, 2]}, True),
        ("GlobalMaxPool", [], {}, True),
        ("AveragePool", [], {"kernel_shape": [2, 2]}, False),
        ("Clip", ["zero", "six"], {}, False),
        ("Dropout", [], {}, True),
        ("Cast", [], {"to": 1}, True),
        ("Identity", [], {}, True),
        ("Reshape", ["flat"], {}, True),
        ("DepthToSpace", [], {"blocksize": 2}, True),
    ],
)
def test_whatever_a_q_passes_ties(
    net: Net, op: str, inputs: list[str], attributes: dict[str, Any], ties: bool
) -> None:
    net.const("scales", [1, 1, 2, 2])
    net.const("pads", [0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    net.const("flat", [1, 16, 64], np.int64)
    net.const("zero", 0.0)
    net.const("six", 6.0)
    a = net.op("Relu", "a", net.conv("ca", "x"))
    net.output(net.op(op, "n", a, *inputs, **attributes))
    groups = scale_groups(net.index(), ["a.out", "n.out"])
    assert tied(groups) == ([("a.out", "n.out")] if ties else [("a.out",), ("n.out",)])
    assert groups[0].sources == ("a.out",) and not groups[0].tied


def test_yolov8s_neck_is_two_groups_and_sppf_one() -> None:
    """By hand from the architecture: layers 11 and 20 meet in layer 9's output, layers 14 and 17 in layer 12's."""
    model = Model(yolov8n(64, classes=2))
    quantized = [n.input(0) for n in model.ordered if n.op == "Conv"]
    groups = {g.quantized[-1]: set(g.sources) for g in scale_groups(model, quantized) if g.tied}
    act = "act/Mul_output_0"
    assert groups["/model.20/Concat_output_0"] == {
        f"/model.6/cv2/{act}",
        f"/model.9/cv2/{act}",
        f"/model.19/{act}",
    }
    assert groups["/model.17/Concat_output_0"] == {
        f"/model.4/cv2/{act}",
        f"/model.12/cv2/{act}",
        f"/model.16/{act}",
    }
    sppf = next(
        g for g in scale_groups(model, quantized) if "/model.9/Concat_output_0" in g.quantized
    )
    assert sppf.sources == (f"/model.9/cv1/{act}",)


@pytest.mark.parametrize("unify", [True, False])
@pytest.mark.parametrize("method", ["percentile", "max"])
@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
def test_a_pad_between_two_readers_leaves_one_scale(
    net: Net, mode: str, method: str, unify: bool
) -> None:
    """Without one scale for both, the simulator finds two at c0, which then writes float."""
    c0 = net.conv("c0", "x")
    pads = net.const("pads", [0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    net.output(net.conv("c1", net.op("Pad", "pad", c0, pads, mode=mode)), net.conv("c2", c0))
    samples = images(2, seed=3)
    samples[0]["x"][..., 0] = 30.0  # at the border, which padding repeats
    result = qdqtool.insert(
        net.model(), samples, method=method, percentile=90.0, head="none", unify=unify
    )
    assert result.prediction is not None
    (c0_outcome,) = [c for c in result.prediction.convolutions if c.name == "c0"]
    scales = {q.scale for q in result.activations if q.tensor in ("c0.out", "pad.out")}
    assert len(scales) == 1 or not unify
    assert str(c0_outcome.output) == ("INT8" if len(scales) == 1 else "FLOAT")
