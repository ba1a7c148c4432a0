"""Findings about a float result name the reason that the simulator recorded for it.

The rules are checked on random graphs in which quantizers of equal and of different scales consume one result through
operators that a Q moves past (Pad, poolings, Slice, Split, Dropout, Transpose, Resize, Concat).
"""

from collections.abc import Callable, Iterator

import onnx
import pytest
from hypothesis import Phase, given, settings, strategies as st

import qdqtool
from qdqtool.buildlog.agreement import (
    BuildFacts,
    BuildSource,
    Difference,
    Mismatch,
    MismatchKind,
)
from qdqtool.evidence import Evidence
from qdqtool.findings.report import describe_finding
from qdqtool.reasons.conversions import RemainingConversion
from qdqtool.reasons.finding import Cause, Finding, Reason, Severity
from qdqtool.reasons.fusions import (
    ActivationBeforeAdd,
    BatchNormNotConstant,
    ConvTransposeBatchNorm,
)
from qdqtool.reasons.inputs import InputNotDequantized
from qdqtool.reasons.outputs import (
    OutputDifferentScales,
    OutputMixedConsumers,
    OutputNotQuantized,
    PoolingQuantizedOnOneSide,
    ReduceNotPooling,
)
from qdqtool.reasons.residuals import AddOutputNotQuantized, ResidualFloat
from qdqtool.reasons.tensors import ConsumerKind, TensorConsumer
from qdqtool.reasons.weights import WeightsNotDequantized
from qdqtool.trt.result import ConvOutcome, EngineLayer, Prediction
from qdqtool.trt.targets import TARGETS
from tests.trt.builder import Graph
from tests.trt.random_graphs import FORKS, models

thorough = settings(  # no shrinking: minutes for a failure that is expected; add Phase.shrink to look at one
    derandomize=True, phases=(Phase.explicit, Phase.generate)
)

# The reasons of an output, as they decide: the first of them that was recorded.
DECIDE = (
    BatchNormNotConstant,
    ConvTransposeBatchNorm,
    ResidualFloat,
    AddOutputNotQuantized,
    ActivationBeforeAdd,
    OutputDifferentScales,
    OutputMixedConsumers,
    OutputNotQuantized,
)


def written_float(prediction: Prediction) -> Iterator[tuple[ConvOutcome, type[Reason]]]:
    for conv in prediction.convolutions:
        if conv.is_int8 and conv.output.is_float:
            recorded = {type(r) for r in prediction.refusals if r.node == conv.name}
            decisive = next((kind for kind in DECIDE if kind in recorded), None)
            if decisive is not None:
                yield conv, decisive


def disagreements(prediction: Prediction) -> list[str]:
    lines = []
    for conv, decisive in written_float(prediction):
        findings = [f for f in prediction.findings if f.id in conv.findings]
        if not any(isinstance(c.reason, decisive) for f in findings for c in f.causes):
            lines.append(
                f"{conv.name}: {decisive.__name__}, found {[(f.code, f.message) for f in findings]}"
            )
    return lines


# Claims of findings


def claimed_float(finding: Finding) -> set[str]:
    nodes: set[str] = set()
    for cause in finding.causes:
        r = cause.reason
        if isinstance(
            r,
            (
                OutputMixedConsumers,
                OutputNotQuantized,
                AddOutputNotQuantized,
            ),
        ):
            nodes |= {x.node for x in r.consumers if x.kind in (ConsumerKind.OP, ConsumerKind.SUM)}
        elif isinstance(r, ResidualFloat):
            nodes.add(r.add)
        elif isinstance(
            r,
            (
                InputNotDequantized,
                WeightsNotDequantized,
                PoolingQuantizedOnOneSide,
                ReduceNotPooling,
            ),
        ):
            nodes.add(r.node)
        elif (
            isinstance(r, RemainingConversion)
            and r.quantize
            and not (cause.see or cause.also or r.requantizes)
        ):
            nodes |= {r.origin.node} - {"" if not r.origin.int8 else r.origin.node}
    return nodes


def false_claims(prediction: Prediction, model: onnx.ModelProto) -> list[str]:
    nodes = {n.name: n for n in model.graph.node}
    home = {name: layer for layer in prediction.layers for name in layer.nodes}
    consumers: dict[str, list[str]] = {}
    for node in model.graph.node:
        for tensor in node.input:
            consumers.setdefault(tensor, []).append(node.name)

    def is_int8(name: str) -> bool:
        """Return whether the layer of a node reads only INT8.

        A node without a layer, such as a Dropout, counts as INT8 if all its consumers do.
        """
        layer = home.get(name)
        if layer is not None:
            return reads_int8(layer)
        after = [c for out in nodes[name].output for c in consumers.get(out, ())]
        return bool(after) and all(map(is_int8, after))

    return [
        f"{f.code}: '{f.message}', but {name} reads INT8"
        for f in prediction.findings
        for name in sorted(claimed_float(f) & set(nodes))
        if is_int8(name)
    ]


def reads_int8(layer: EngineLayer) -> bool:
    if layer.type == "Conversion":  # a Q reads float, a DQ writes it
        return False
    return bool(layer.inputs) and all(t.precision == qdqtool.Precision.INT8 for t in layer.inputs)


# Random graphs


@thorough
@given(
    models(max_steps=6, steps=FORKS),
    st.sampled_from(sorted(t for t in TARGETS if not t.startswith("rtx"))),
)
def test_findings_agree_with_reasons_and_layers(model: onnx.ModelProto, target: str) -> None:
    assert disagreements(qdqtool.predict(model, target)) == []
    assert false_claims(qdqtool.predict(model, target), model) == []


# One graph for each operator


def pad(g: Graph, x: str, mode: str) -> str:
    return g.op("Pad", [x, g.const("pads", [0, 0, 1, 1, 0, 0, 1, 1])], "moved", mode=mode)


MOVES: dict[str, Callable[[Graph, str], str]] = {
    "nothing": lambda g, x: x,
    "zero Pad": lambda g, x: pad(g, x, "constant"),
    "reflecting Pad": lambda g, x: pad(g, x, "reflect"),
    "MaxPool": lambda g, x: g.pool(x, "moved"),
    "GlobalMaxPool": lambda g, x: g.op("GlobalMaxPool", x, "moved"),
    "Slice": lambda g, x: g.slice(x, "moved", 0, 4),
    "Split": lambda g, x: g.ops("Split", [x], "moved", count=2, axis=1)[0],
    "Dropout": lambda g, x: g.op("Dropout", x, "moved"),
    "Identity": lambda g, x: g.op("Identity", x, "moved"),
    "Transpose": lambda g, x: g.op("Transpose", x, "moved", perm=[0, 1, 3, 2]),
    "nearest Resize": lambda g, x: g.resize(x, "moved"),
    "linear Resize": lambda g, x: g.resize(x, "moved", "linear"),
    "Concat": lambda g, x: g.concat([x, x], "moved"),
}
OPEN = (
    "reflecting Pad",
    "linear Resize",
)  # other tests decide whether a Q passes these; findings agree either way


def forked(move: str, scales: tuple[float, float]) -> onnx.ModelProto:
    g = Graph()
    x = g.conv(g.input(1, 8, 8, 8), "c0", 8, 1, scale=0.05)
    first = g.conv(MOVES[move](g, x), "c1", 8, 1, scale=scales[0])
    return g.model(first, g.conv(x, "c2", 8, 1, scale=scales[1]))


@pytest.mark.parametrize("target", ["trt8.5", "trt10"])
@pytest.mark.parametrize("move", MOVES)
def test_findings_agree_if_consumers_have_two_scales(move: str, target: str) -> None:
    model = forked(move, (0.1, 0.2))
    prediction = qdqtool.predict(model, target)
    reasons = {conv.name: reason for conv, reason in written_float(prediction)}
    assert reasons["c0"] is OutputDifferentScales or move in OPEN
    assert disagreements(prediction) == [] == false_claims(prediction, model)


@pytest.mark.parametrize("move", MOVES)
def test_findings_agree_if_consumers_have_one_scale(move: str) -> None:
    model = forked(move, (0.1, 0.1))
    prediction = qdqtool.predict(model)
    assert prediction.convolution("c0").int8_in_int8_out or move in OPEN
    assert false_claims(prediction, model) == []


def test_false_claims_reports_a_wrong_finding() -> None:
    model = forked("MaxPool", (0.1, 0.1))
    prediction = qdqtool.predict(model)
    assert false_claims(prediction, model) == []
    reader = TensorConsumer(ConsumerKind.OP, "moved", "MaxPool")
    claim = OutputNotQuantized("Pass", "c0", "c0:0", (reader,))
    prediction.findings.append(
        Finding("OUT-FLOAT", Severity.INFO, "c0", (Cause(claim),), Evidence.SEEN, describe_finding)
    )
    assert false_claims(prediction, model) != []


# Keys of version 0.1; more may be added.
def test_build_facts_of_a_refused_model() -> None:
    data = BuildFacts(BuildSource.TENSORRT_RTX, status="refused", message="no").as_json()
    assert (data["status"], data["message"]) == ("refused", "no")


@pytest.mark.parametrize("differs", Difference)
def test_mismatch_why_has_the_values_of_each_difference(differs: Difference) -> None:
    values = tuple(f"v{i}" for i in range(differs.count("{}")))
    why = Mismatch(MismatchKind.LAYER, "l", {}, {}, differs, values, rule="by Pass").as_json()[
        "why"
    ]
    assert "{" not in why and "by Pass" in why and all(value in why for value in values)
