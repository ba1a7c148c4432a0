import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qdqtool
from calibration.cache import Statistics
from calibration.methods import choose_range
from calibration.statistics import Histogram, TensorStatistics
from qdqtool.demo.network import yolov8n
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.insertion.options import CacheOptions
from qdqtool.insertion.ranges import collect_statistics, read_table_scales
from qdqtool.insertion.scales import (
    METHODS,
    MethodChoice,
    ScaleGroup,
    choose_scale,
    clamp_scale,
    find_scale_groups,
    weight_scale,
)
from qdqtool.ir.graph import Model
from tests.errors import has
from tests.insertion.nets import Net, images, one_layer, require_prediction
from tests.notes import note

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
    wide = values.astype(np.float64)
    restored = np.clip(np.rint(wide / scale), -127, 127) * scale
    return float(np.sqrt(((wide - restored) ** 2).mean() / (wide**2).mean()))


PAIR = statistics(a=WIDE, b=NARROW)


def test_max_range_of_group_is_largest() -> None:
    chosen, warnings = choose_scale(group("a", "b"), PAIR, MethodChoice("max"))
    assert chosen.scale == pytest.approx(float(np.abs(WIDE).max()) / 127, rel=1e-6)
    assert [m.tensor for m in chosen.members] == ["a", "b"]
    ratio = np.abs(WIDE).max() / np.abs(NARROW).max()
    assert [m.bits_lost for m in chosen.members] == pytest.approx([0.0, np.log2(ratio)], abs=1e-4)
    assert (chosen.power, warnings) == (None, [])


def test_percentile_of_group_is_that_of_all_values() -> None:
    chosen, _ = choose_scale(group("a", "b"), PAIR, MethodChoice("percentile", percentile=99.0))
    expected = np.percentile(np.abs(np.concatenate([WIDE, NARROW])), 99.0) / 127
    assert chosen.scale == pytest.approx(expected, rel=0.01)


def test_mse_range_of_group_has_least_summed_error() -> None:
    chosen, _ = choose_scale(group("a", "b"), PAIR, MethodChoice("mse"))

    def total(scale: float) -> float:
        return relative_error(WIDE, scale) + relative_error(NARROW, scale)

    best = min(total(s) for s in np.geomspace(0.2, 2.0, 200) * chosen.scale)
    assert total(chosen.scale) <= best * 1.02
    assert total(chosen.scale) < total(float(np.abs(WIDE).max()) / 127) * 0.9
    assert chosen.power == 2.0


# Steps far below, and above, the depth of SiLU's negative side.
@pytest.mark.parametrize(("spread", "power"), [(2.0, 3.0), (30.0, 2.0)])
def test_focus_range_of_group_has_least_error(spread: float, power: float) -> None:
    rng = np.random.default_rng(4)
    inputs = {n: rng.normal(0.0, spread * k, 40_000) for n, k in (("a", 1.0), ("b", 0.6))}
    values = {n: (x / (1 + np.exp(-x))).astype(np.float32) for n, x in inputs.items()}
    stats = statistics(**values)
    for name, array in values.items():
        stats[name].add_focus([array[:2000]])
    chosen, _ = choose_scale(group("a", "b"), stats, MethodChoice("focus"))
    assert chosen.power == power

    def total(scale: float) -> float:
        errors = []
        for array in values.values():
            restored = np.clip(np.rint(array / scale), -127, 127) * scale
            powers = np.abs(array - restored) ** power, np.abs(array) ** power
            errors.append([0.1 * p.mean() + 0.9 * p[:2000].mean() for p in powers])
        return float(sum((error / size) ** (1 / power) for error, size in errors))

    own = [m.amax / 127 for m in chosen.members]
    assert total(chosen.scale) <= min(total(s) for s in np.geomspace(min(own), max(own), 60)) * 1.02


@pytest.mark.parametrize("method", ["max", "mse", "percentile", "entropy"])
def test_zero_tensor_does_not_change_scale_of_group(method: str) -> None:
    stats = statistics(a=np.zeros(100), b=NARROW)
    both, warnings = choose_scale(group("a", "b"), stats, MethodChoice(method))
    alone, _ = choose_scale(group("b"), stats, MethodChoice(method))
    assert both.scale == alone.scale and warnings == [note("always-zero", tensor="a")]
    assert [(m.tensor, m.bits_lost) for m in both.members] == [("a", 0.0), ("b", 0.0)]
    assert [m.amax for m in both.members] == pytest.approx([0.0, 127 * both.scale], rel=1e-6)
    only, warnings = choose_scale(group("a"), stats, MethodChoice(method))
    assert (only.scale, only.power, len(warnings)) == (np.float32(1 / 127), None, 1)


class CountedStatistics(TensorStatistics):
    reads = 0

    @property
    def histogram(self) -> Histogram:
        self.reads += 1
        return super().histogram

    def coarse(self, bits: int) -> Histogram:
        self.reads += 1
        return super().coarse(bits)


@pytest.mark.parametrize("sources", [("a",), ("a", "z"), ("z", "a")])
@pytest.mark.parametrize("method", METHODS)
def test_single_tensor_is_searched_once(method: str, sources: tuple[str, ...]) -> None:
    """The tensor's own range is the group's range, also if another tensor is all zeros."""
    alone, grouped = CountedStatistics(), CountedStatistics()
    for counted in (alone, grouped):
        counted.add(WIDE)
    own = choose_range(alone, method)
    stats = Statistics({"a": grouped, "z": TensorStatistics.of(np.zeros(9, np.float32))})
    chosen, _ = choose_scale(group(*sources), stats, MethodChoice(method))
    assert (chosen.scale, chosen.power) == (float(np.float32(own.amax / 127)), own.power)
    assert grouped.reads == alone.reads


CHOICE = MethodChoice("mse", (("^a", "max"), ("b", "percentile")))


@pytest.mark.parametrize(
    ("tensors", "method"),
    [
        (["abc"], "max"),  # the first pattern that matches
        (["cb"], "percentile"),
        (["z"], "mse"),
        (["a1", "z", "a2"], "max"),  # a tensor without match follows the others
        (["z", "a1"], "max"),
    ],
)
def test_method_of_group(tensors: list[str], method: str) -> None:
    assert CHOICE.method_for(group(*tensors)) == method


def test_group_with_two_methods_is_refused() -> None:
    with pytest.raises(
        QdqtoolError, check=has("ambiguous", parameter="method_for"), match=r"'a1'.*'b1'"
    ):
        CHOICE.method_for(group("a1", "b1"))


@pytest.mark.parametrize(
    ("choice", "tensors", "code", "parameter", "value"),
    [
        (CHOICE, ["z", "y", "x"], "no-match", "method_for", r"`method_for` \^a=max.*'z'"),
        (CHOICE, [], "no-match", "method_for", r"`method_for` \^a=max"),
        (MethodChoice("kl"), [], "unknown-choice", "method", "'kl'"),
        (MethodChoice("mse", (("(", "max"),)), ["z"], "invalid-pattern", "", "regular expression"),
        (MethodChoice("max", (("z", "kl"),)), ["z"], "unknown-choice", "method", "'kl'"),
        *(
            (MethodChoice(percentile=p), [], "out-of-range", "percentile", f"{p:g}")
            for p in (0.9999, 49.99, 100.01)
        ),
    ],
)
def test_choice_of_methods_is_refused(
    choice: MethodChoice, tensors: list[str], code: str, parameter: str, value: str
) -> None:
    with pytest.raises(QdqtoolError, check=has(code, parameter=parameter), match=value):
        choice.check(tensors)


@pytest.mark.parametrize(
    ("choice", "tensors"),
    [(CHOICE, ["a", "b"]), *((MethodChoice(percentile=p), []) for p in (50.0, 99.99, 100.0))],
)
def test_choice_of_methods_passes(choice: MethodChoice, tensors: list[str]) -> None:
    choice.check(tensors)


def test_values_that_are_not_finite_are_refused() -> None:
    stats = statistics(a=[1.0, np.nan, 2.0])
    with pytest.raises(
        DataError, check=has("not-finite", node="a"), match=r"1 of 3 values.*`exclude`"
    ):
        choose_scale(group("a"), stats, MethodChoice())


def test_weight_scale_per_channel() -> None:
    weight = RNG.normal(0, 1, (4, 3, 3, 3)).astype(np.float32)
    scale = weight_scale(weight, 0)
    assert (scale.shape, scale.dtype) == ((4,), np.float32)
    assert scale == pytest.approx(np.abs(weight).max(axis=(1, 2, 3)) / 127, rel=1e-6)
    assert weight_scale(weight, 1) == pytest.approx(
        np.abs(weight).max(axis=(0, 2, 3)) / 127, rel=1e-6
    )
    single = weight_scale(weight, None)
    assert single.shape == () and single == pytest.approx(np.abs(weight).max() / 127, rel=1e-6)


TINY = float(np.finfo(np.float32).tiny)


@pytest.mark.parametrize(
    ("weight", "axis", "expected"),
    [
        ([[0.25, -0.5]], None, float(np.float32(0.5 / 127))),
        ([[0.25, -0.5]], 0, [float(np.float32(0.5 / 127))]),
        ([[127.0], [0.0], [1e-40]], 0, [1.0, 1.0, 1.0]),  # zeros get the largest scale
        ([[127 * TINY], [126 * TINY], [127.0]], 0, [TINY, 1.0, 1.0]),
        (np.zeros((2, 2)), 0, [1.0, 1.0]),
        (np.zeros((2, 0)), 0, [1.0, 1.0]),
        (np.zeros((2, 0)), None, 1.0),
    ],
)
def test_weight_scale_is_positive(weight: object, axis: int | None, expected: object) -> None:
    assert weight_scale(np.asarray(weight, np.float32), axis).tolist() == expected


@pytest.mark.parametrize(
    ("scale", "expected"), [(0.0, TINY), (1e-45, TINY), (0.1, float(np.float32(0.1)))]
)
def test_positive(scale: float, expected: float) -> None:
    assert clamp_scale(scale) == expected


def table(folder: Path, **scales: float) -> Path:
    path = folder / "calib.table"
    rows = [f"{name}: {struct.pack('!f', scale).hex()}" for name, scale in scales.items()]
    path.write_text("\n".join(["TRT-8502-EntropyCalibration2", *rows]) + "\n")
    return path


MODEL = Model(one_layer())
GROUP = ScaleGroup(("joined",), ("joined", "a", "b"), ("a", "b"))


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({"a": 0.25, "b": 0.5, "joined": 0.125, "other": 9.0}, {"a": 0.25, "b": 0.5}),
        ({"a": 0.25}, {"a": 0.25}),
    ],
)
def test_scale_from_table_is_largest_of_group(
    scales: dict[str, float], expected: dict[str, float], tmp_path: Path
) -> None:
    (chosen,) = read_table_scales(table(tmp_path, **scales), [GROUP], MODEL)[0]
    assert (chosen.scale, chosen.method, chosen.power) == (max(expected.values()), "table", None)
    members = [(m.tensor, m.amax, m.bits_lost) for m in chosen.members]
    assert members == [(tensor, scale * 127, 0.0) for tensor, scale in expected.items()]


@pytest.mark.parametrize(
    ("scales", "code", "node"),
    [
        ({"x": 1.0, "other": 1.0}, "missing-scale", "joined"),
        ({"x": 1.0, "a": 0.0, "other": 1.0}, "missing-scale", "joined"),
        ({"images": 1.0, "Conv_0_out": 1.0}, "other-model", ""),
        *(({"a": scale}, "invalid-scale", "a") for scale in (1e-45, 1e-30, 3e4, 1e22, 3e38)),
    ],
)
def test_table_without_usable_scale_is_refused(
    scales: dict[str, float], code: str, node: str, tmp_path: Path
) -> None:
    path = table(tmp_path, **scales)
    with pytest.raises(
        DataError, check=has(code, path=str(path), parameter="calib_table", node=node)
    ):
        read_table_scales(path, [GROUP], MODEL)


def test_entries_of_other_widths_are_named(tmp_path: Path) -> None:
    entry = {"bw": 16, "dtype": "INT", "is_sym": True, "offset": [-32768], "scale": [1e-4]}
    path = tmp_path / "aimet.json"
    entries = [{"name": name, **entry} for name in ("a", "b", "joined")]
    path.write_text(json.dumps({"version": "1.0.0", "activation_encodings": entries}))
    with pytest.raises(DataError, check=has("missing-scale", path=str(path)), match="8-bit"):
        read_table_scales(path, [GROUP], MODEL)


def report_calibration(data: object, cache: Path | None = None) -> dict[str, Any]:
    net = Net()
    body = net.op("Relu", "r", net.conv("c", "x"))
    model = net.output(net.op("Sigmoid", "s", net.conv("heat", body, cout=3))).index()
    groups = [ScaleGroup(("x",), ("x",), ("x",)), ScaleGroup((body,), (body,), (body, "x"))]
    _, report = collect_statistics(
        model, data, groups, max_images=3, cache=CacheOptions(calib_cache=cache)
    )
    return report


def test_calibration_report_of_arrays_and_files(tmp_path: Path) -> None:
    report = report_calibration(images())
    assert report.pop("fingerprint")
    assert report == report | {
        "images": 3,
        "tensors": 2,
        "focus": ["heat.out"],
        "cache": None,
        "data": "",
        "skipped": [],
        "notes": [],
    }
    np.save(tmp_path / "x.npy", np.concatenate([i["x"] for i in images()]))
    report = report_calibration(tmp_path / "x.npy", tmp_path / "cache.npz")
    assert report == report | {
        "data": str(tmp_path / "x.npy"),
        "cache": str(tmp_path / "cache.npz"),
    }


def test_calibration_without_data_is_refused() -> None:
    with pytest.raises(
        DataError, check=has("missing-argument", parameter="data"), match="`calib_table`"
    ):
        report_calibration(None)


def list_tensors(groups: list[ScaleGroup]) -> list[tuple[str, ...]]:
    return [g.quantized for g in groups]


@pytest.fixture
def concat(net: Net) -> Net:
    a, b = net.op("Relu", "a", net.conv("ca", "x")), net.op("Relu", "b", net.conv("cb", "x"))
    joined = net.op("Concat", "cat", a, b, axis=1)
    return net.output(net.conv("c", joined, 32), net.conv("d", a), net.conv("e", b))


def test_concat_ties_its_inputs(concat: Net) -> None:
    groups = find_scale_groups(concat.index(), ["x", "cat.out", "a.out"])
    assert list_tensors(groups) == [("x",), ("cat.out", "a.out")]
    assert set(groups[1].sources) == {"a.out", "b.out"}
    assert set(groups[1].tensors) == {"a.out", "b.out", "cat.out"}
    assert [g.is_shared for g in groups] == [False, True]


@pytest.mark.parametrize(
    ("tensors", "unify"), [(["a.out", "b.out"], True), (["cat.out", "a.out"], False)]
)
def test_concat_that_is_not_quantized_or_not_unified_ties_nothing(
    concat: Net, tensors: list[str], unify: bool
) -> None:
    groups = find_scale_groups(concat.index(), tensors, unify=unify)
    assert list_tensors(groups) == [g.sources for g in groups] == [(t,) for t in tensors]


def test_concat_with_constant_is_source_itself(net: Net) -> None:
    a = net.op("Relu", "a", net.conv("ca", "x"))
    joined = net.op("Concat", "cat", a, net.const("k", np.full((1, 16, 8, 8), 99.0)), axis=1)
    (group,) = find_scale_groups(net.output(net.conv("d", joined, 32)).index(), ["cat.out"])
    assert set(group.sources) == {"a.out", "cat.out"}


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
def test_fill_of_pad_before_maxpool_has_no_part_in_range(
    net: Net, fill: float, op: str, below: bool
) -> None:
    a = net.op("Relu", "a", net.conv("ca", "x"))
    pads = net.const("pads", [0, 0, 0, 0, 0, 0, 1, 1], np.int64)
    padded = net.op("Pad", "p", a, pads, net.const("fill", fill))
    net.output(net.conv("d", net.op(op, "m", padded, kernel_shape=[3, 3])))
    (group,) = find_scale_groups(net.index(), ["m.out"])
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
def test_scale_groups_tie_operators_that_q_passes(
    net: Net, op: str, inputs: list[str], attributes: dict[str, Any], ties: bool
) -> None:
    for name, value in {"scales": [1, 1, 2, 2], "zero": 0.0, "six": 6.0}.items():
        net.const(name, value)
    for name, value in {"pads": [0, 0, 1, 1, 0, 0, 1, 1], "flat": [1, 16, 64]}.items():
        net.const(name, value, np.int64)
    net.output(net.op(op, "n", net.op("Relu", "a", net.conv("ca", "x")), *inputs, **attributes))
    groups = find_scale_groups(net.index(), ["a.out", "n.out"])
    assert list_tensors(groups) == ([("a.out", "n.out")] if ties else [("a.out",), ("n.out",)])
    assert groups[0].sources == ("a.out",) and not groups[0].is_shared


def test_scale_groups_of_yolov8() -> None:
    """Layers 11 and 20 share layer 9's output, layers 14 and 17 layer 12's; SPPF is a group."""
    model = Model(yolov8n(64, classes=2))
    quantized = [n.input(0) for n in model.ordered if n.op == "Conv"]
    groups = {
        g.quantized[-1]: set(g.sources) for g in find_scale_groups(model, quantized) if g.is_shared
    }
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
    assert next(
        g for g in find_scale_groups(model, quantized) if "/model.9/Concat_output_0" in g.quantized
    ).sources == (f"/model.9/cv1/{act}",)


@pytest.mark.parametrize("unify", [True, False])
@pytest.mark.parametrize("method", ["percentile", "max"])
@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
def test_pad_between_two_consumers_keeps_one_scale(
    net: Net, mode: str, method: str, unify: bool
) -> None:
    """With two scales at its output, ``c0`` would write float."""
    c0, pads = net.conv("c0", "x"), net.const("pads", [0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    net.output(net.conv("c1", net.op("Pad", "pad", c0, pads, mode=mode)), net.conv("c2", c0))
    samples = images(2, seed=3)
    samples[0]["x"][..., 0] = 30.0  # at the border, which padding repeats
    options = {"percentile": 90.0} if method == "percentile" else {}
    result = qdqtool.insert(
        net.model(), samples, method=method, head="none", unify=unify, **options
    )
    outcome = require_prediction(result).convolution("c0")
    scales = {q.scale for q in result.activations if q.tensor in ("c0.out", "pad.out")}
    assert len(scales) == 1 or not unify
    assert str(outcome.output) == ("INT8" if len(scales) == 1 else "FLOAT")


def test_table_of_another_tool(tmp_path: Path) -> None:
    path = tmp_path / "ranges.json"
    path.write_text(json.dumps({"a": [-1.0, 2.54], "b": [0.0, 1.0], "elsewhere": [0.0, 9.0]}))
    model = Model(one_layer())
    model.inputs.append("a")
    (chosen,), report = read_table_scales(path, [GROUP], model)
    assert chosen.scale == pytest.approx(0.02)
    assert report == report | {"format": "onnxruntime ranges", "entries": 3, "unknown": 2}
    assert report["notes"] == [note("table-unknown-tensors", count=2, first="b")]
