"""Every class of refusal: some graph produces it, and a finding tells its nodes and values."""

from collections.abc import Iterator

import pytest

from qdqtool.base.records import contents
from qdqtool.explain.coded import ScalesAround
from qdqtool.prediction import predict
from qdqtool.trt import refusals
from qdqtool.trt.faults import OtherTypes, TypeUnknown
from qdqtool.trt.refusals import Step
from qdqtool.types import Precision, Refusal
from tests.explain.graphs import GRAPHS

CLASSES = {
    kind.reason: kind
    for kind in vars(refusals).values()
    if isinstance(kind, type) and issubclass(kind, Refusal) and kind is not Refusal
}

# The finding that each class becomes, and values that its causes have to hold.
TOLD: dict[str, tuple[str, set[object]]] = {
    "input-not-dequantized": ("IN-BLOCKED", {"c", "p.DQ", Step("soft", "Softmax")}),
    "weights-not-dequantized": ("W-NO-DQ", {"c", "c.weight"}),
    "weights-not-constant": ("W-NONCONST", {"c", "w"}),
    "scale-computed": ("SCALE-DYNAMIC", {"q", "max:0"}),
    "types": ("QTYPE", {"a.Q", "int16"}),
    "float-types": ("FLOAT-MIXED", {"c", Precision.FP32, Precision.FP16}),
    "convtranspose-3d": ("CT3D-FLOAT", {"up"}),
    "activation-per-channel": ("ACT-PER-CHANNEL", {"a.Q"}),
    "zero-point": ("ZP-NONZERO", {"a.Q", (3, 3)}),
    "weights-axis": ("W-AXIS", {"c", "wq.Q", 1}),
    "weights-shared": ("W-SHARED", {("a", "b"), "w.weight"}),
    "output-not-quantized": ("OUT-FLOAT", {"c0", "soft", "Softmax", "16x16x16"}),
    "output-different-scales": (
        "POOL-SCALE",
        {"c0", Step("pool", "MaxPool"), "a.in.Q", 0.02, "b.in.Q", 0.05},
    ),
    "output-many-consumers": ("OUT-MIXED", {"c0", "soft", "Softmax", "a.in.Q"}),
    "output-scale": ("OUT-FLOAT", {"c0", "wide.Q"}),
    "residual-float": ("SKIP-FLOAT", {"c2", "sum", "c0"}),
    "residual-both-quantized": ("ADD-BOTH", {"c2", "sum", "side.Q", 0.08, 0.07}),
    "add-output-not-quantized": ("ADD-OUT-FLOAT", {"c2", "sum", "res.DQ", "soft", "Softmax"}),
    "activation-before-add": ("ADD-ACT", {"c2", "s2.m", "sum", "res.Q"}),
    "activation-joined": ("OUT-FLOAT", {"c0", ("sig", "mul"), "soft", "Softmax"}),
    "batchnorm-not-constant": ("BN-UNFOLDED", {"c0", "bn"}),
    "convtranspose-batchnorm": ("CT-BN", {"up", "bn", "16x16x16"}),
    "inside-activation": ("SILU-INNER-Q", {"inner.Q", "c0", "sig", "gate.Q"}),
    "behind-pad": ("PAD-SPLIT", {"end", "pad"}),
    "not-commuting": ("CONVERSION", {"end.in.Q", "pad"}),
    "many-consumers": ("CONVERSION", {"a.in.Q", Step("pool", "MaxPool"), "neg"}),
    "output-not-only-quantized": ("CONVERSION", {"a.in.Q", "cat", "soft", "Softmax"}),
    "concat-scales": ("CONCAT-SCALE", {"cat", 0.02, 0.05}),
    "scales-differ": ("DOUBLE-QDQ", {"first.Q", 0.2, "end.in.Q", 0.05}),
    "pooling-one-side": ("POOL-FLOAT", {"gap", "end.in.Q"}),
    "reduce-not-pooling": ("POOL-FLOAT", {"mean", "gap.DQ"}),
    "in-myelin": ("NOT-QUANTIZED", {"fc", Step("best", "ArgMax")}),
    "outside-rules": ("FP8-OUTSIDE", {"FP8", "in.Q"}),
    "stays": ("CONVERSION", {"end.in.Q", 0.05, ("SKIP-FLOAT", "sum")}),
}

# Those that another record tells: a check of the model, or the conversion that comes of it.
OTHERS = {"types": TypeUnknown, "outside-rules": OtherTypes, "scales-differ": ScalesAround}

TARGETS = {"float-types": "trt11"}  # where the reason does not exist on 8.5


def values(item: object) -> Iterator[object]:
    """A record or tuple, what it holds, and what that does; scales with as many digits as were written."""
    yield round(item, 6) if isinstance(item, float) else item
    for inner in (
        item if isinstance(item, tuple) else contents(item) if hasattr(item, "_fields") else ()
    ):
        yield from values(inner)


def test_every_class_has_a_graph_and_a_text() -> None:
    assert set(CLASSES) == set(GRAPHS) == set(TOLD)
    for kind in CLASSES.values():
        assert {"pass_name", "node"} < set(kind._fields)  # type: ignore[attr-defined]


@pytest.mark.parametrize("reason", GRAPHS)
def test_every_refusal_becomes_a_finding(reason: str) -> None:
    prediction = predict(GRAPHS[reason](), TARGETS.get(reason, "trt8.5"))
    assert reason in {r.reason for r in prediction.refusals}
    code, wanted = TOLD[reason]
    kind = OTHERS.get(reason, CLASSES[reason])
    held = [list(values(f.causes)) for f in prediction.findings if f.code == code]
    assert any(wanted <= set(found) and kind in map(type, found) for found in held), held
    for conv in prediction.convolutions:
        assert conv.int8_in_int8_out or conv.findings, conv.name
    told = {f.node for f in prediction.findings if f.code in ("CONVERSION", "INPUT-CONVERSION")}
    assert told == set(prediction.conversion_nodes)
