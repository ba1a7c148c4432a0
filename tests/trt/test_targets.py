"""The targets: their order, what they promise, and what they change in the answers."""

import numpy as np
import pytest

from qdqtool.base.records import replaced
from qdqtool.errors import QdqtoolError, VersionError
from qdqtool.explain.ways import trtexec_command, trtexec_remark
from qdqtool.options import DEFAULT_TARGET
from qdqtool.prediction import predict
from qdqtool.trt.targets import (
    RTX,
    TARGETS,
    Trtexec,
    strongly_typed,
    target_before,
    target_named,
    target_of_version,
    trtexec_of_version,
)
from qdqtool.types import ConvOutcome, Evidence, Precision
from tests.raising import raises
from tests.trt.builder import Graph
from tools.fuzz.net import Net

CLASSIC = [t for t in TARGETS.values() if not t.is_rtx]
INT8, FLOAT = Precision.INT8, Precision.FLOAT


def stem(half: bool = False) -> Graph:
    """Conv, BatchNormalization, Relu, MaxPool, Conv; the second one's output is the network's."""
    g = Graph(opset=19 if half else 13, half=half)
    x = g.relu(g.bn(g.conv(g.input(1, 3, 32, 32), "a", k=7, stride=2), "bn"), "r")
    g.op("Softmax", g.conv(g.pool(x, "pool", k=3), "b"), "s")
    return g


def found(g: Graph, target: str, output: str = "s:0") -> dict[str, ConvOutcome]:
    return {c.name: c for c in predict(g.model(output), target, advice=False).convolutions}


@pytest.mark.parametrize("target", [t.name for t in CLASSIC])
def test_every_target_answers(target: str) -> None:
    prediction = predict(stem().model("s:0"), target, advice=False)
    assert prediction.target == target
    general, _, used = prediction.target_evidence.rpartition("; of the ")
    assert general == f"{TARGETS[target].evidence}: {TARGETS[target].proof}"
    assert f"seen on {TARGETS[target].version[0]}.x" in used
    assert [(c.name, c.inputs, c.precision) for c in prediction.convolutions] == [
        ("a", [INT8], INT8),
        ("b", [INT8], INT8),
    ]
    assert prediction.conversion_nodes == ["a.in.Q"]
    # And the bare one on 10, whose builds show it (small-graphs-orinnano-trt103); a stem with its pooling is not
    expected = dict.fromkeys("ab", TARGETS[target].evidence) | (
        {"b": Evidence.SEEN} if target == "trt10" else {}
    )
    assert {name: conv.evidence for name, conv in found(stem(), target).items()} == expected


@pytest.mark.parametrize("target", TARGETS)
def test_what_constants_alone_make_is_computed_while_building(target: str) -> None:
    """Such as the table of positions in Swin V2: TensorRT-RTX lists no layer for it."""
    net = Net(17)
    table = net.op(
        "MatMul",
        net.op("Relu", net.const(np.ones((16, 8)))),
        net.const(np.ones((8, 16))),
        name="table",
    )
    x = net.conv(net.qdq(net.input((1, 8, 16, 16))), 8, name="c")
    prediction = predict(net.model(net.op("Add", x, table)), target)
    assert [c.name for c in prediction.convolutions] == ["c"]
    assert not prediction.float_products and prediction.summary()["matrix_products"] == 0
    assert all("table" not in (f.node, *f.convolutions) for f in prediction.findings)


# Each property came, or went, with one version and stayed so; rtx1.7 is a compiler of its own.
@pytest.mark.parametrize(
    ("prop", "since", "on_rtx"),
    [
        ("merges_parallel", "trt8.4", True),
        ("fuses_stem_pool", "trt8.4", True),
        ("int8_weights", "trt8.5", True),
        ("multiply_in_pointwise_name", "trt10", False),
        ("constants_first", "trt10", False),
        ("float16_scales", "trt10", True),
        ("strongly_typed", "trt11", True),
        ("residual_through_activation", "trt11", False),
        ("copies_dq", "trt11", False),
        ("transposed_per_channel", None, False),
    ],
)
def test_what_a_version_brought_stays(prop: str, since: str | None, on_rtx: bool) -> None:
    having = {t.name for t in CLASSIC if getattr(t, prop) is True}
    assert having == {t.name for t in CLASSIC if since and t.version >= TARGETS[since].version}
    assert getattr(TARGETS["rtx1.7"], prop) is on_rtx


@pytest.mark.parametrize(
    ("prop", "until"),
    [
        ("keeps_relu_name", "trt8.0"),
        ("deconvolution_seen", "trt8.0"),
        ("needs_zero_point", "trt8.6"),
    ],
)
def test_what_a_version_dropped_is_gone(prop: str, until: str) -> None:
    having = {t.name for t in CLASSIC if getattr(t, prop) is True}
    assert having == {t.name for t in CLASSIC if t.version <= TARGETS[until].version}
    assert getattr(TARGETS["rtx1.7"], prop) is False


@pytest.mark.parametrize("evidence", [Evidence.SEEN, Evidence.ASSUMED])
def test_outcomes_of_rtx_are_proven_as_its_rules_are(
    evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        TARGETS, "rtx9.9", replaced(RTX, name="rtx9.9", version=(9, 9), evidence=evidence)
    )
    assert {conv.evidence for conv in found(stem(), "rtx9.9").values()} == {evidence}


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("trt8.0", None),
        ("trt8.4", "trt8.0"),
        ("trt11", "trt10"),
        ("rtx1.7", None),
        ("none", None),
    ],
)
def test_the_target_before(name: str, before: str | None) -> None:
    found = target_before(name)
    assert (found and found.name) == before


def test_stems_and_default_targets(g: Graph) -> None:
    """What 8.0 makes of a stem is in the listing of centernet-resnet34-qat-trt80."""
    for target in ("trt8.4", "trt8.5", "trt8.6"):
        assert found(stem(), target)["a"].layer == "a.weight + a.w.Q + a + pool"
    assert DEFAULT_TARGET == "trt10"
    assert TARGETS["trt8.5"].evidence == TARGETS["trt8.6"].evidence == Evidence.SEEN
    newer = [t for t in CLASSIC if t.version > TARGETS["trt8.6"].version]
    assert newer and all(t.evidence == Evidence.ASSUMED for t in newer)
    # Only ResNet's 7x7 stem was seen
    x = g.relu(g.bn(g.conv(g.input(1, 3, 32, 32), "a", k=3, stride=2), "bn"), "r")
    g.op("Softmax", g.conv(g.pool(x, "pool", k=3), "b"), "s")
    conv = found(g, "trt8.5")["a"]
    assert "pool" in conv.fused
    assert (conv.evidence, conv.cases[-1]) == (Evidence.ASSUMED, "ConvActPoolFusion/stem-other")


@pytest.mark.parametrize("target", [t.name for t in CLASSIC if not t.strongly_typed])
@pytest.mark.parametrize("half", [False, True])
def test_float_remainder_is_the_builders_choice(target: str, half: bool) -> None:
    assert found(stem(half), target)["b"].output == FLOAT


def test_who_asked_for_a_strongly_typed_network_is_named() -> None:
    with raises(QdqtoolError, "strongly_typed `target=8.5.2-strongly-typed`"):
        target_named("8.5.2-strongly-typed")
    with raises(QdqtoolError, "strongly_typed `strongly_typed` trt8.5"):
        strongly_typed(target_named("trt8.5"))


@pytest.mark.parametrize(("half", "precision"), [(False, Precision.FP32), (True, Precision.FP16)])
def test_strongly_typed_remainder_has_the_onnx_type(half: bool, precision: Precision) -> None:
    assert found(stem(half), "trt11")["b"].output == precision
    prediction = predict(stem(half).model("s:0"), "trt11", advice=False)
    softmax = next(layer for layer in prediction.layers if layer.type == "Softmax")
    assert [t.precision for t in softmax.inputs] == [precision]


@pytest.mark.parametrize(
    ("activation", "groups", "evidence"),
    [
        ("LeakyRelu", 1, Evidence.SEEN),
        ("silu", 1, Evidence.SEEN),  # 39 times on 10.14.1; the same network on 8.6.1
        ("silu", 8, Evidence.ASSUMED),
        ("Clip", 8, Evidence.SEEN),
    ],
)
def test_weaker_rules_reach_the_outcome(
    g: Graph, activation: str, groups: int, evidence: Evidence
) -> None:
    x = g.conv(g.input(1, 8, 8, 8), "c", groups=groups)
    x = g.silu(x, "act") if activation == "silu" else g.op(activation, x, "act")
    g.op("Softmax", g.conv(x, "d"), "s")
    outcomes = found(g, "trt8.5")
    assert outcomes["c"].evidence == evidence
    assert outcomes["c"].output == INT8
    assert outcomes["d"].evidence == Evidence.SEEN


def test_unknown_scale_is_an_assumption(g: Graph) -> None:
    """Two Qs on one tensor, the scale of one not at hand: whether they merge is not known."""
    x = g.conv(g.input(1, 8, 8, 8), "c")
    g.op("Softmax", g.conv(x, "a"), "s")
    g.op("Softmax", g.conv(x, "b"), "t")
    model = g.model("s:0", "t:0")
    for tensor in model.graph.initializer:
        if tensor.name == "b.in.Q.scale":
            tensor.ClearField("raw_data")
            tensor.data_location = 1
            tensor.external_data.add(key="location", value="gone.bin")
    prediction = predict(model, advice=False)
    assert {c.name: c.evidence for c in prediction.convolutions}["c"] == Evidence.ASSUMED


@pytest.mark.parametrize(
    ("version", "target"),
    [
        ("8.0.1", "trt8.0"),
        ("8.2.3", "trt8.0"),
        ("8.4.12", "trt8.4"),
        ("8.5.2.2", "trt8.5"),
        ("8.6", "trt8.6"),
        ("9.3", "trt8.6"),
        ("10.13.0", "trt10"),
        ("11.4.1", "trt11"),
        ("7.2.3", None),
        ("", None),
        ("unknown", None),
        ("x.y", None),
    ],
)
def test_target_of_a_version(version: str, target: str | None) -> None:
    if target is not None:
        assert target_of_version(version).name == target
        return
    with raises(VersionError, "target_of_version TensorRT"):
        target_of_version(version)


@pytest.mark.parametrize(
    ("version", "lists_layers", "flags"),
    [
        ("8.0.3", False, True),
        ("8.2.1", True, True),
        ("10.13.3", True, True),
        ("11.0", True, False),
        ("11", True, False),
    ],
)
def test_what_trtexec_takes(version: str, lists_layers: bool, flags: bool) -> None:
    assert trtexec_of_version(version) == Trtexec(lists_layers, flags)
    assert trtexec_of_version("no version") is None


@pytest.mark.parametrize(
    ("target", "flags", "said"),
    [
        ("trt8.0", {"--fp16", "--int8"}, ""),
        ("8.6.1", {"--fp16", "--int8"}, ""),
        ("trt10", {"--fp16", "--int8"}, "10.12 and later"),
        ("10.3", {"--fp16", "--int8"}, "on a Jetson"),
        ("10.11", {"--fp16", "--int8"}, ""),
        ("10.12", {"--fp16", "--int8"}, "deprecated"),
        ("10.15.1", {"--fp16", "--int8"}, "deprecated"),
        ("10.15.1-strongly-typed", {"--stronglyTyped"}, ""),
        ("trt11", set(), ""),
        ("11.4", set(), ""),
    ],
)
def test_the_printed_command_has_the_flags_of_its_version(
    target: str, flags: set[str], said: str
) -> None:
    """Release notes of 10.12 deprecate weak typing, those of 11.0 remove it with all precision flags."""
    command, remark = (
        trtexec_command(target_named(target), "m.onnx"),
        trtexec_remark(target_named(target)),
    )
    assert {
        w for w in command.split() if w in ("--int8", "--fp16", "--stronglyTyped", "--best")
    } == flags
    assert said in remark and bool(said) == bool(remark) and command.endswith("> build.log 2>&1")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("10.7", "10.7"),
        ("10.7-strongly-typed", "10.7-strongly-typed"),
        ("trt10", "trt10"),
        ("trt10.3", "10.3"),
        ("trt10-strongly-typed", "trt10-strongly-typed"),
        ("8.5", "trt8.5"),
    ],
)
def test_a_target_is_named_as_it_was_given(given: str, named: str) -> None:
    assert target_named(given).given == named
    assert target_named(named) == target_named(given)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("10.3", "trt10"),
        ("10.14.1", "trt10"),
        ("11.4", "trt11"),
        ("trt10.3", "trt10"),
        ("8.5.2", "trt8.5"),
        ("9.3", "trt8.6"),
        ("8.2", "trt8.0"),
        ("19", CLASSIC[-1].name),
        ("v10.7", "trt10"),
        ("10.3-strongly-typed", "trt10-strongly-typed"),
    ],
)
def test_a_version_is_answered_by_the_nearest_rules(given: str, name: str) -> None:
    found = target_named(given)
    assert found.name == name
    assert "nearest rules" in found.proof
    assert found.strongly_typed is (
        name.endswith("-strongly-typed") or TARGETS[name].strongly_typed
    )


@pytest.mark.parametrize("given", ["7", "trt7", "85", "ten", "8.5-strongly-typed", "10.x"])
def test_what_is_no_version(given: str) -> None:
    with pytest.raises(QdqtoolError):
        target_named(given)
    with raises(QdqtoolError, "target_named trt7 trt8.0 trt8.4"):
        target_named("trt7")
    assert target_named("TRT8.5").name == "trt8.5"
