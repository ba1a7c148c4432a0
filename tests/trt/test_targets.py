from dataclasses import replace

import numpy as np
import pytest

from qdqtool import ConvOutcome, Precision
from qdqtool.errors import QdqtoolError, VersionError
from qdqtool.evidence import Evidence
from qdqtool.prediction import predict
from qdqtool.trt.targets import (
    RTX,
    TARGETS,
    Target,
    TrtexecSupport,
    strongly_typed,
    target_before,
    target_named,
    target_of_version,
    trtexec_of_version,
)
from tests.errors import has
from tests.trt.builder import Graph
from tools.fuzz.net import Net

CLASSIC = [t for t in TARGETS.values() if not t.is_rtx]
INT8, FLOAT = Precision.INT8, Precision.FLOAT


def stem(half: bool = False, k: int = 7) -> Graph:
    g = Graph(opset=19 if half else 13, half=half)
    x = g.relu(g.bn(g.conv(g.input(1, 3, 32, 32), "a", k=k, stride=2), "bn"), "r")
    g.op("Softmax", g.conv(g.pool(x, "pool", k=3), "b"), "s")
    return g


def outcomes(g: Graph, target: str | Target) -> dict[str, ConvOutcome]:
    return {c.name: c for c in predict(g.model("s:0"), target, advice=False).convolutions}


@pytest.mark.parametrize("target", [t.name for t in CLASSIC])
def test_stem_runs_in_int8_on_every_target(target: str) -> None:
    prediction = predict(stem().model("s:0"), target, advice=False)
    proof, _, rules = prediction.target_evidence.rpartition("; of the ")
    assert proof == f"{TARGETS[target].evidence}: {TARGETS[target].proof}"
    assert f"seen on {TARGETS[target].version[0]}.x" in rules
    assert [(c.name, c.inputs, c.precision) for c in prediction.convolutions] == [
        ("a", [INT8], INT8),
        ("b", [INT8], INT8),
    ]
    assert (prediction.target, prediction.conversion_nodes) == (target, ["a.in.Q"])
    # small-graphs-orinnano-trt103 shows a convolution without its pooling on 10.
    last = Evidence.SEEN if target == "trt10" else TARGETS[target].evidence
    assert [c.evidence for c in prediction.convolutions] == [TARGETS[target].evidence, last]


@pytest.mark.parametrize("target", TARGETS)
def test_constant_subgraph_has_no_layer(target: str) -> None:
    # An example is the table of positions in Swin V2: TensorRT-RTX lists no layer for it.
    net = Net(17)
    table = net.op(
        "MatMul",
        net.op("Relu", net.const(np.ones((16, 8)))),
        net.const(np.ones((8, 16))),
        name="table",
    )
    x = net.conv(net.qdq(net.input((1, 8, 16, 16))), 8, name="c")
    prediction = predict(net.model(net.op("Add", x, table)), target)
    assert [(c.name, c.weights) for c in prediction.convolutions] == [("c", "constant")]
    assert not prediction.float_products and prediction.summary()["matrix_products"] == 0
    assert all("table" not in (f.node, *f.convolutions) for f in prediction.findings)


# rtx1.7 is a separate compiler, whose properties do not follow from the version.
@pytest.mark.parametrize(
    ("prop", "since", "until", "on_rtx"),
    [
        ("merges_parallel", (8, 4), None, True),
        ("fuses_stem_pool", (8, 4), None, True),
        ("int8_weights", (8, 5), None, True),
        ("multiply_in_pointwise_name", (10, 0), None, False),
        ("constants_first", (10, 0), None, False),
        ("has_local_functions", (9, 0), None, True),
        ("has_bfloat16", (9, 0), None, True),
        ("float16_scales", (10, 0), None, True),
        ("strongly_typed", (11, 0), None, True),
        ("residual_through_activation", (11, 0), None, False),
        ("copies_dq", (11, 0), None, False),
        ("keeps_relu_name", (8, 0), (8, 0), False),
        ("has_seen_deconvolution", (8, 0), (8, 0), False),
        ("transposed_per_channel", (99, 0), None, False),  # in no version
    ],
)
def test_property_is_added_and_dropped_by_versions(
    prop: str, since: tuple[int, int], until: tuple[int, int] | None, on_rtx: bool
) -> None:
    names = {t.name for t in CLASSIC if getattr(t, prop) is True}
    assert names == {t.name for t in CLASSIC if since <= t.version <= (until or t.version)}
    assert getattr(TARGETS["rtx1.7"], prop) is on_rtx


@pytest.mark.parametrize("evidence", [Evidence.SEEN, Evidence.ASSUMED])
def test_outcomes_on_rtx_have_evidence_of_target(evidence: Evidence) -> None:
    assert {
        conv.evidence for conv in outcomes(stem(), replace(RTX, evidence=evidence)).values()
    } == {evidence}


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
def test_target_before(name: str, before: str | None) -> None:
    target = target_before(name)
    assert (target and target.name) == before


@pytest.mark.parametrize("target", ["trt8.4", "trt8.5", "trt8.6"])
def test_stem_fuses_max_pool_since_8_4(target: str) -> None:
    assert outcomes(stem(), target)["a"].layer == "a.weight + a.w.Q + a + pool"


def test_targets_after_8_6_are_assumed() -> None:
    assert TARGETS["trt8.5"].evidence == TARGETS["trt8.6"].evidence == Evidence.SEEN
    newer = [t for t in CLASSIC if t.version > TARGETS["trt8.6"].version]
    assert newer and all(t.evidence == Evidence.ASSUMED for t in newer)


def test_stem_other_than_7x7_is_assumed() -> None:
    conv = outcomes(stem(k=3), "trt8.5")["a"]
    assert "pool" in conv.fused
    assert (conv.evidence, conv.cases[-1]) == (Evidence.ASSUMED, "ConvActPoolFusion/stem-other")


@pytest.mark.parametrize("target", [t.name for t in CLASSIC if not t.strongly_typed])
@pytest.mark.parametrize("half", [False, True])
def test_weakly_typed_float_output_is_float(target: str, half: bool) -> None:
    assert outcomes(stem(half), target)["b"].output == FLOAT


def test_strongly_typed_before_trt10_is_an_error() -> None:
    with pytest.raises(QdqtoolError, check=has("unsupported", parameter="strongly_typed")):
        strongly_typed(target_named("trt8.5"))


@pytest.mark.parametrize(("half", "precision"), [(False, Precision.FP32), (True, Precision.FP16)])
def test_strongly_typed_float_output_has_onnx_type(half: bool, precision: Precision) -> None:
    assert outcomes(stem(half), "trt11")["b"].output == precision
    prediction = predict(stem(half).model("s:0"), "trt11", advice=False)
    (softmax,) = (layer for layer in prediction.layers if layer.type == "Softmax")
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
def test_outcome_has_evidence_of_its_rules(
    g: Graph, activation: str, groups: int, evidence: Evidence
) -> None:
    x = g.conv(g.input(1, 8, 8, 8), "c", groups=groups)
    x = g.silu(x, "act") if activation == "silu" else g.op(activation, x, "act")
    g.op("Softmax", g.conv(x, "d"), "s")
    result = outcomes(g, "trt8.5")
    assert (result["c"].evidence, result["c"].output) == (evidence, INT8)
    assert result["d"].evidence == Evidence.SEEN


def test_unknown_scale_makes_outcome_an_assumption(g: Graph) -> None:
    # Two Qs read one tensor. Whether they merge depends on a scale in a missing file.
    x = g.conv(g.input(1, 8, 8, 8), "c")
    g.op("Softmax", g.conv(x, "a"), "s")
    g.op("Softmax", g.conv(x, "b"), "t")
    model = g.model("s:0", "t:0")
    for tensor in model.graph.initializer:
        if tensor.name == "b.in.Q.scale":
            tensor.ClearField("raw_data")
            tensor.data_location = 1
            tensor.external_data.add(key="location", value="gone.bin")
    assert predict(model, advice=False).convolution("c").evidence == Evidence.ASSUMED


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
    ],
)
def test_target_of_version(version: str, target: str) -> None:
    assert target_of_version(version).name == target


@pytest.mark.parametrize(
    ("version", "code"),
    [
        ("7.2.3", "version-too-old"),
        ("", "wrong-version"),
        ("unknown", "wrong-version"),
        ("x.y", "wrong-version"),
    ],
)
def test_target_of_other_version_is_an_error(version: str, code: str) -> None:
    with pytest.raises(VersionError, check=has(code)) as caught:
        target_of_version(version)
    assert version in str(caught.value)


@pytest.mark.parametrize(
    ("version", "lists_layers", "flags", "layer_types"),
    [
        ("8.0.3", False, True, False),
        ("8.2.1", True, True, False),
        ("8.4.1", True, True, True),
        ("10.13.3", True, True, True),
        ("11.0", True, False, False),
        ("11", True, False, False),
    ],
)
def test_trtexec_options_of_version(
    version: str, lists_layers: bool, flags: bool, layer_types: bool
) -> None:
    assert trtexec_of_version(version) == TrtexecSupport(lists_layers, flags, layer_types)
    assert trtexec_of_version("no version") is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("10.7", "10.7"),
        ("10.7-strongly-typed", "10.7-strongly-typed"),
        ("trt10", "trt10"),
        ("trt10.3", "10.3"),
        ("trt10-strongly-typed", "trt10-strongly-typed"),
        ("8.5", "trt8.5"),
        ("TRT8.5", "trt8.5"),
    ],
)
def test_target_keeps_requested_name(name: str, expected: str) -> None:
    assert target_named(name).display_name == expected
    assert target_named(expected) == target_named(name)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("10.3", "trt10"),
        ("10.14.1", "trt10"),
        ("11.4", "trt11"),
        ("trt10.3", "trt10"),
        ("9.3", "trt8.6"),
        ("8.2", "trt8.0"),
        ("11.19", CLASSIC[-1].name),
        ("v10.7", "trt10"),
        ("10.3-strongly-typed", "trt10-strongly-typed"),
    ],
)
def test_version_uses_nearest_rules(version: str, name: str) -> None:
    target = target_named(version)
    assert target.name == name and target.borrows_rules and "nearest rules" in target.proof
    assert target.strongly_typed is (
        name.endswith("-strongly-typed") or TARGETS[name].strongly_typed
    )


@pytest.mark.parametrize("version", ["8.0.1", "8.4.1", "8.5.2", "8.5.2.2", "8.6.2", "trt8.5"])
def test_patch_version_has_the_rules_of_its_version(version: str) -> None:
    target = target_named(version)
    assert not target.borrows_rules and target.proof == TARGETS[target.name].proof
    assert version.removeprefix("trt").startswith(target.name.removeprefix("trt"))


@pytest.mark.parametrize("name", ["7", "trt7", "85", "ten", "8.5-strongly-typed", "10.x"])
def test_unknown_target_is_an_error(name: str) -> None:
    with pytest.raises(QdqtoolError) as caught:
        target_named(name)
    code = "unsupported" if name == "8.5-strongly-typed" else "unknown-choice"
    assert (caught.value.code, caught.value.parameter) == (code, "target")
    named = [name] if code == "unsupported" else [name, "trt8.0", "trt8.4"]
    assert all(text in str(caught.value) for text in named)
