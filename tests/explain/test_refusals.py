"""Every class of refusal: some graph produces it, and a finding tells its nodes and values."""


import pytest

from qdqtool.prediction import predict
from qdqtool.trt import refusals
from qdqtool.types import Refusal
from tests.explain.graphs import GRAPHS

CLASSES = {
    kind.reason: kind for kind in vars(refusals).values()
    if isinstance(kind, type) and issubclass(kind, Refusal) and kind is not Refusal
}

# The finding that each class becomes, and what its message has to name.
TOLD = {
    "input-not-dequantized": ("IN-BLOCKED", ("c", "p.DQ", "soft (Softmax)")),
    "weights-not-dequantized": ("W-NO-DQ", ("c", "c.weight")),
    "weights-not-constant": ("W-NONCONST", ("c", "'w'")),
    "scale-computed": ("SCALE-DYNAMIC", ("q", "max:0")),
    "types": ("QTYPE", ("a.Q", "int16")),
    "float-types": ("FLOAT-MIXED", ("c", "FP32", "FP16")),
    "convtranspose-3d": ("CT3D-FLOAT", ("up", "an activation and a Q")),
    "activation-per-channel": ("ACT-PER-CHANNEL", ("a.Q", "16 scales")),
    "zero-point": ("ZP-NONZERO", ("a.Q", "zero point 3")),
    "weights-axis": ("W-AXIS", ("c", "wq.Q", "axis 1")),
    "weights-shared": ("W-SHARED", ("a", "b", "w.weight")),
    "output-not-quantized": ("OUT-FLOAT", ("c0", "soft (Softmax)", "16x16x16")),
    "output-different-scales": ("POOL-SCALE", ("pool (MaxPool)", "0.02 (a.in.Q)", "0.05 (b.in.Q)", "c0")),
    "output-many-consumers": ("OUT-MIXED", ("c0", "soft (Softmax)", "a.in.Q")),
    "output-scale": ("OUT-FLOAT", ("c0", "wide.Q")),
    "residual-float": ("SKIP-FLOAT", ("c2", "sum", "the result of c0")),
    "residual-both-quantized": ("ADD-BOTH", ("sum", "0.08 and 0.07", "side.Q", "c2")),
    "add-output-not-quantized": ("ADD-OUT-FLOAT", ("c2", "sum", "res.DQ", "soft (Softmax)")),
    "activation-before-add": ("ADD-ACT", ("c2", "s2.m", "sum", "is quantized")),
    "activation-joined": ("OUT-FLOAT", ("c0", "sig", "mul", "soft (Softmax)")),
    "batchnorm-not-constant": ("BN-UNFOLDED", ("c0", "bn")),
    "convtranspose-batchnorm": ("CT-BN", ("up", "bn", "16x16x16")),
    "not-commuting": ("CONVERSION", ("end.in.Q", "pad")),
    "many-consumers": ("CONVERSION", ("a.in.Q", "pool (MaxPool)", "neg")),
    "output-not-only-quantized": ("CONVERSION", ("a.in.Q", "cat", "soft (Softmax)")),
    "concat-scales": ("CONCAT-SCALE", ("cat", "0.02", "0.05")),
    "scales-differ": ("DOUBLE-QDQ", ("0.2 (first.Q)", "0.05 (end.in.Q)")),
    "pooling-one-side": ("POOL-FLOAT", ("gap", "end.in.Q")),
    "reduce-not-pooling": ("POOL-FLOAT", ("mean", "keepdims=1")),
    "in-myelin": ("NOT-QUANTIZED", ("fc", "best (ArgMax)")),
    "outside-rules": ("FP8-OUTSIDE", ("FP8", "in.Q")),
    "stays": ("CONVERSION", ("end.in.Q", "0.05", "SKIP-FLOAT at sum")),
}

TARGETS = {"float-types": "trt11"}  # where the reason does not exist on 8.5


def test_every_class_has_a_graph_and_a_text() -> None:
    assert set(CLASSES) == set(GRAPHS) == set(TOLD)
    for kind in CLASSES.values():
        assert {"pass_name", "node"} < set(kind._fields)  # type: ignore[attr-defined]


@pytest.mark.parametrize("reason", GRAPHS)
def test_refusal_becomes_a_finding(reason: str) -> None:
    prediction = predict(GRAPHS[reason](), TARGETS.get(reason, "trt8.5"))
    assert reason in {r.reason for r in prediction.refusals}
    code, words = TOLD[reason]
    messages = [f.message for f in prediction.findings if f.code == code]
    assert any(all(w in m for w in words) for m in messages), messages or [
        (f.code, f.message) for f in prediction.findings]


@pytest.mark.parametrize("reason", GRAPHS)
def test_nothing_is_left_unexplained(reason: str) -> None:
    prediction = predict(GRAPHS[reason](), TARGETS.get(reason, "trt8.5"))
    for conv in prediction.convolutions:
        assert conv.int8_in_int8_out or conv.findings, conv.name
    told = {f.node for f in prediction.findings if f.code in ("CONVERSION", "INPUT-CONVERSION")}
    assert told == set(prediction.conversion_nodes)
    assert all("qdqtool" not in f.message + f.fix for f in prediction.findings)
