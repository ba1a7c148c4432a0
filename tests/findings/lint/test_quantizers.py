from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.reasons.scales import ScaleOwner
from tests.findings.lint.test_api import cause, finding, simple
from tests.insertion.nets import value_of
from tests.trt.builder import Graph

NAN, INF = float("nan"), float("inf")
NOT_POSITIVE, EXTREME = "SCALE-NONPOS", "SCALE-EXTREME"


def with_weights(scale: Any, weights: np.ndarray | None = None, axis: int = 0) -> onnx.ModelProto:
    g = Graph()
    if weights is None:
        weights = np.random.default_rng(0).normal(0, 0.3, (4, 4, 1, 1)).astype(np.float32)
    add, name = (g.dq, "wdq") if weights.dtype == np.int8 else (g.pair, "wq")
    w = add(g.const("w", weights), name, scale, axis=axis)
    return g.model(g.op("Conv", [g.pair(g.input(1, 4, 8, 8), "in"), w], "c", kernel_shape=[1, 1]))


INTEGERS = np.random.default_rng(0).integers(1, 127, (4, 4, 1, 1)).astype(np.int8)


def with_half_scale(scale: float) -> onnx.ModelProto:
    g = Graph(opset=19, half=True)
    return g.model(g.conv(g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16), "r"), "c1", scale=scale))


def channel(position: int, value: float) -> np.ndarray:
    scales = np.full(4, 0.01, np.float32)
    scales[position] = value
    return scales


def codes(proto: onnx.ModelProto, target: str = "trt10") -> set[str]:
    return {f.code for f in qdqtool.predict(proto, target).findings}


@pytest.mark.parametrize("target", ["trt8.5", "trt10", "trt11"])
@pytest.mark.parametrize(
    ("scale", "code"),
    [
        (NAN, NOT_POSITIVE),
        (INF, NOT_POSITIVE),
        (0.0, NOT_POSITIVE),
        (-0.1, NOT_POSITIVE),
        (1e22, EXTREME),
        (3e4, EXTREME),
        (1e-30, EXTREME),
        (2.0**-23, EXTREME),
    ],
)
def test_scale_of_activation_is_an_error_without_automatic_fix(
    scale: float, code: str, target: str
) -> None:
    fault = finding(simple(scale=scale), code, target)
    assert fault.severity == "error" and "c1.in" in fault.node
    assert fault.automatic == (scale == -0.1)


@pytest.mark.parametrize(
    ("step", "reported"), [(5.0, 0), (25.0, 0), (1000.0, 4)], ids=["untrained", "steep", "far"]
)
def test_scales_that_shrink_gradually_are_not_reported(
    g: Graph, step: float, reported: int
) -> None:
    """The values of a network without training shrink from layer to layer."""
    x, scales = g.input(1, 4, 8, 8), [0.05 / step**i for i in range(6)]
    for number, scale in enumerate(scales):
        x = g.conv(x, f"c{number}", 4, scale=scale)
    faults = [f for f in qdqtool.predict(g.model(x)).findings if f.code == EXTREME]
    assert len(faults) == reported == (sum(s <= 2.0**-23 for s in scales) if reported else 0)


@pytest.mark.parametrize("scale", [2e-7, 1e-3, 10.0, 516.0])
def test_usual_scales_are_not_reported(scale: float) -> None:
    assert codes(simple(scale=scale)).isdisjoint({NOT_POSITIVE, EXTREME})


@pytest.mark.parametrize("value", [NAN, 0.0, 1e22])
def test_single_channel_of_activation_is_counted(value: float) -> None:
    scales = np.where(np.arange(16) == 3, value, 0.05)
    reason = cause(finding(simple(scale=scales, axis=1), EXTREME if value > 0 else NOT_POSITIVE))
    assert (reason.bad, reason.count) == (1, 16)


@pytest.mark.parametrize(
    ("make", "owner"),
    [
        (lambda value: simple(scale=value), ScaleOwner.ACTIVATION),
        (lambda value: with_weights(channel(1, value)), ScaleOwner.WEIGHTS),
        (lambda value: with_weights(channel(1, value), INTEGERS), ScaleOwner.INTEGERS),
        (
            lambda value: with_weights(channel(1, value), np.full((4, 4, 1, 1), NAN, np.float32)),
            ScaleOwner.BROKEN_WEIGHTS,
        ),
    ],
    ids=["activation", "weights", "integers", "broken weights"],
)
@pytest.mark.parametrize("value", [NAN, 0.0])
def test_owner_decides_what_follows_from_the_file(
    make: Any, owner: ScaleOwner, value: float
) -> None:
    fault = finding(make(value), NOT_POSITIVE)
    assert cause(fault).owner == owner
    is_zero_of_integers = owner == ScaleOwner.INTEGERS and value == 0
    assert fault.automatic == (owner == ScaleOwner.WEIGHTS or is_zero_of_integers)


@pytest.mark.parametrize("scale", [0.0, INF])
def test_float16_scale_names_the_limits_of_float16(scale: float) -> None:
    assert cause(finding(with_half_scale(scale), NOT_POSITIVE, "trt10")).is_half


@pytest.mark.parametrize("scale", [NAN, INF, 0.0, 1e22, 3e4, 1e-30])
def test_fix_invents_no_scale_of_an_activation(scale: float) -> None:
    before = simple(scale=scale)
    fixed = qdqtool.fix(before)
    kept = {t.name: t.raw_data for t in fixed.proto.graph.initializer}
    assert all(kept[t.name] == t.raw_data for t in before.graph.initializer) and not fixed.ok


@pytest.mark.parametrize("value", [NAN, 0.0, INF, -0.01])
def test_fix_computes_scales_of_weights_from_the_weights(value: float) -> None:
    fixed = qdqtool.fix(with_weights(channel(2, value)), only=[NOT_POSITIVE])
    assert [a.code for a in fixed.applied] == [NOT_POSITIVE]
    (q,) = (n for n in fixed.proto.graph.node if n.name == "wq.Q")
    largest = np.abs(value_of(fixed.proto, "w")).max(axis=(1, 2, 3))
    np.testing.assert_allclose(
        value_of(fixed.proto, q.input[1]), channel(2, largest[2] / 127), rtol=1e-6
    )


def test_fix_keeps_zeros_of_stored_integers() -> None:
    """A scale of 0 makes the channel 0, whatever its integers are."""
    fixed = qdqtool.fix(with_weights(channel(2, 0.0), INTEGERS), only=[NOT_POSITIVE])
    (dq,) = (n for n in fixed.proto.graph.node if n.name == "wdq")
    assert (value_of(fixed.proto, dq.input[1]) > 0).all()
    integers = value_of(fixed.proto, dq.input[0])
    assert not integers[2].any() and integers[1].all()


def weights_and_scales() -> tuple[np.ndarray, np.ndarray]:
    weights = np.random.default_rng(0).normal(0, 0.3, (4, 4, 1, 1)).astype(np.float32)
    return weights, np.abs(weights).max(axis=(1, 2, 3)) / np.float32(127)


@pytest.mark.parametrize("value", [1e22, 3e4, 50.0, 1e-6, 1e-10, 1e-30])
@pytest.mark.parametrize("channels", [[0, 1, 2, 3], [2]])
def test_extreme_scale_of_weights_is_computed_again(value: float, channels: list[int]) -> None:
    """A single wrong layer is reported, because its weights in the file prove the scale wrong."""
    weights, exact = weights_and_scales()
    proto = with_weights(np.where(np.isin(np.arange(4), channels), value, exact), weights)
    fault = finding(proto, EXTREME)
    assert fault.automatic and "W-SCALE" not in codes(proto)
    reason = cause(fault)
    assert (reason.bad, reason.count, reason.owner) == (len(channels), 4, ScaleOwner.WEIGHTS)
    fixed = qdqtool.fix(proto)
    assert fixed.ok and [change.code for change in fixed.applied] == [EXTREME]
    for node in fixed.proto.graph.node:
        if node.name.startswith("wq"):
            np.testing.assert_allclose(value_of(fixed.proto, node.input[1]), exact, rtol=1e-6)


@pytest.mark.parametrize("value", [NAN, 0.0, 1e-30])
def test_scale_behind_an_identity_is_folded_and_computed_again(value: float) -> None:
    proto, names = with_weights(np.full(4, value)), {}
    for node in proto.graph.node:
        if node.name.startswith("wq"):
            names[node.input[1]] = node.input[1] = f"{node.input[1]}_copy"
    for name, copy in [(copy.removesuffix("_copy"), copy) for copy in names.values()]:
        proto.graph.node.insert(0, onnx.helper.make_node("Identity", [name], [copy], copy))
    fixed, code = qdqtool.fix(proto), (EXTREME if value > 0 else NOT_POSITIVE)
    assert {change.code for change in fixed.applied} == {"SCALE-INDIRECT", code} and fixed.ok


def test_scales_of_weights_that_are_nearly_zero_are_not_reported() -> None:
    weights, scales = weights_and_scales()
    weights[1], scales[1] = 0.0, 1e-30
    weights[2], scales[2] = 1e-9, 2.0**-23
    assert codes(with_weights(scales, weights)).isdisjoint({EXTREME, "W-SCALE"})
    assert codes(with_weights(np.full(4, 1e-30), weights * 0)).isdisjoint({EXTREME, "W-SCALE"})


@pytest.mark.parametrize("value", [1e22, 3e4])
def test_huge_scale_of_integer_weights_is_reported(value: float) -> None:
    assert EXTREME in codes(with_weights(channel(0, value), INTEGERS))


def test_tiny_scales_of_integer_weights_are_reported_if_all_are_tiny() -> None:
    """A single tiny scale may belong to a channel of zeros."""
    assert not finding(with_weights(np.full(4, 1e-30), INTEGERS), EXTREME).automatic
    assert EXTREME not in codes(with_weights(channel(0, 1e-30), INTEGERS))


def test_infinite_scale_that_rtx_accepts_is_reported() -> None:
    """TensorRT-RTX builds the model; every value becomes 0."""
    assert codes(simple(scale=INF), "rtx1.7") >= {EXTREME}
    assert NOT_POSITIVE not in codes(simple(scale=INF), "rtx1.7")
