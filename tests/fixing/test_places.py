import functools

import numpy as np
import onnx
import onnx.compose
import pytest

import qdqtool
from qdqtool.fixing import pairs
from qdqtool.fixing.site import FixStep, collect_names
from qdqtool.fixing.steps import STEPS
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from qdqtool.prediction import predict
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.fusions import QuantizerInsideActivation
from qdqtool.reasons.outputs import OutputMixedConsumers
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import target_named
from tests.findings.lint.test_api import shared_model
from tests.findings.lint.test_quantizers import with_weights
from tests.findings.test_producers import predictions, views
from tests.fixing.steps import find_sites
from tests.slow import slow_after
from tests.trt.builder import Graph
from tools.fuzz.grammar import network


def faults() -> onnx.ModelProto:
    g = Graph()
    x = g.pair(g.input(1, 16, 8, 8), "in")
    behind = g.op("Identity", g.const("w0", np.ones((16, 16, 1, 1), np.float32)), "between")
    stored = g.const("b", np.ones(16, np.int32))
    bias = g.dq(stored, "bias", np.full(16, 0.01), axis=0, integer=np.int32)
    first = g.op("Conv", [x, g.pair(behind, "w0q", 0.02), bias], "c0", kernel_shape=[1, 1])
    g.channels[first] = 16
    zeros = g.pair(g.const("w1", np.zeros((16, 16, 1, 1), np.float32)), "w1q", np.zeros(16), axis=0)
    return g.model(
        g.op("Conv", [g.pair(g.relu(first, "r"), "mid"), zeros], "c1", kernel_shape=[1, 1])
    )


def detector() -> onnx.ModelProto:
    g = Graph()
    stem = g.relu(g.conv(g.input(1, 16, 8, 8), "stem", 16), "r")
    gate = g.pair(g.op("Sigmoid", stem, "gate"), "dead", 4.0)
    g.channels[gate] = 16
    weights = np.geomspace(0.01, 1.0, 16 * 16, dtype=np.float32).reshape(16, 16, 1, 1)
    inputs = [gate, g.pair(g.const("w", weights), "wq", 1 / 127)]
    mixed = g.op("Conv", inputs, "mix", kernel_shape=[1, 1])
    g.channels[mixed] = 16
    box = g.conv(g.relu(mixed, "rm"), "box", 4, k=1)
    score = g.op("Sigmoid", g.conv(stem, "score", 8, k=1), "probability")
    return g.model(g.pair(g.concat([box, score], "all"), "behind", 5.0))


def duplicate(proto: onnx.ModelProto) -> onnx.ModelProto:
    first, second = (onnx.compose.add_prefix(proto, prefix) for prefix in ("1.", "2."))
    for field in ("node", "initializer", "input", "output", "value_info"):
        getattr(first.graph, field).extend(getattr(second.graph, field))
    return first


@functools.cache
def others() -> list[View]:
    small = shared_model(), faults(), with_weights(np.full(4, 1e-30)), detector()
    return [View(Model(proto)) for proto in (*small, *map(network, range(12)))]


def reported_in(prediction: Prediction, step: FixStep) -> list[Reason]:
    causes = [r for f in prediction.findings for c in f.causes for r in (c.reason, *c.also)]
    return list(
        dict.fromkeys(
            r for r in (*causes, *prediction.refusals) if isinstance(r, step.reason_types)
        )
    )


@pytest.mark.parametrize(
    ("target", "steps"),
    slow_after(
        1,
        [
            ("trt8.5", len(STEPS)),
            ("trt8.4", len(STEPS)),
            ("trt10", len(STEPS) - 1),
            ("trt11", len(STEPS) - 1),
            ("rtx1.7", 7),
        ],
    ),
)
def test_step_finds_only_reported_places(target: str, steps: int) -> None:
    """Each reason alone gives its places.

    Two copies of a network have the places of each copy.
    """
    chosen = target_named(target)
    acted: dict[int, tuple[onnx.ModelProto, set[str]]] = {}
    for view, prediction in zip(
        (*views(), *others()),
        (*predictions(target), *(predict(view.model, chosen) for view in others())),
        strict=True,
    ):
        for number, step in enumerate(STEPS):
            reported = reported_in(prediction, step)
            assert step.find(view, chosen, []) == []
            found = step.find(view, chosen, reported) if reported else []
            assert all(not collect_names(reported).isdisjoint({s.node, *s.names}) for s in found)
            apart = {s.node for s in found}
            if len(reported) > 1:
                assert apart == {s.node for r in reported for s in step.find(view, chosen, [r])}
            if found:
                acted.setdefault(number, (view.model.proto, apart))
    assert len(acted) >= steps, acted.keys()
    for number, (proto, places) in acted.items():
        model, step = Model(duplicate(proto)), STEPS[number]
        found = step.find(View(model), chosen, reported_in(predict(model, chosen), step))
        assert {s.node for s in found} == {f"{copy}.{place}" for copy in (1, 2) for place in places}


def test_pair_without_activation_is_not_moved(g: Graph) -> None:
    """TensorRT merges the pair with the pair that feeds the activation."""
    y = g.relu(g.conv(g.input(1, 16, 8, 8), "c0", 16), "r")
    flat = g.pair(g.op("Flatten", y, "flat"), "a", 0.1)
    out = g.op(
        "Gemm", [flat, g.pair(g.const("w", np.ones((1024, 4), np.float32)), "w", 0.01)], "fc"
    )
    model = Model(g.model(out, g.op("Tanh", g.pair(y, "b", 0.1), "tanh")))
    refusals = predict(model, "trt8.5").refusals
    (inside,) = (r for r in refusals if isinstance(r, QuantizerInsideActivation))
    assert (inside.node, inside.activation) == ("a.Q", "tanh")
    assert find_sites(pairs.find_pairs_inside_activations, model) == []


@pytest.mark.parametrize(
    ("other", "automatic"),
    [
        ("pair", True),
        ("read by a Q", True),
        ("float", True),
        ("cast", True),
        ("float block", False),
    ],
)
def test_sum_is_automatic_if_only_sums_read_the_residual_as_float(
    g: Graph, other: str, automatic: bool
) -> None:
    """The other input of the sum comes from a convolution that is not quantized.

    If this convolution reads the residual as float, the fix states that it needs Q/DQ as well.
    """
    data = g.input(1, 16, 8, 8)
    first = g.relu(g.conv(data, "c0", 16), "r0")
    second = g.conv(
        first if other == "float block" else data, "c1", 16, weights="float", scale=None
    )
    ends = [g.conv(first, "c2", 16)]
    if other == "read by a Q":
        ends.append(g.conv(second, "c3", 16))
    total = g.add(
        g.op("Cast", first, "cast", to=1) if other == "cast" else first,
        g.pair(second, "o") if other == "pair" else second,
        "sum",
    )
    model = Model(g.model(*ends, g.conv(g.relu(total, "rs"), "c4", 16)))
    (told,) = (f for f in predict(model, "trt8.5").findings if f.code == "SKIP-FLOAT")
    assert told.node == "sum" and [type(c.reason) for c in told.causes] == [OutputMixedConsumers]
    assert told.automatic == (automatic and told.gains)
    assert ("c1 (Conv) reads the result through Q/DQ as well" in told.fix) == (
        other == "float block"
    )
    fixed = qdqtool.fix(model, "trt8.5", only=["SKIP-FLOAT"])
    assert [s.node for s in fixed.applied] == ["sum"] * automatic
