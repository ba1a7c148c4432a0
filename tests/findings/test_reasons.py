from collections.abc import Iterator

import pytest

from qdqtool.findings.rules import REASON_MODULES
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from qdqtool.reasons import compiler
from qdqtool.reasons.conversions import ConversionBetweenScales
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.fp8 import FloatFp8Column
from qdqtool.reasons.quantizers import UncoveredTypes, UnsupportedQuantizedType
from qdqtool.reasons.tensors import PathStep
from qdqtool.util.records import field_values
from tests.findings.graphs import GRAPHS

CLASSES = {
    kind.key: kind
    for module in REASON_MODULES
    if module is not compiler
    for kind in vars(module).values()
    if isinstance(kind, type)
    and issubclass(kind, Reason)
    and kind.key
    and kind not in (Reason, ConversionBetweenScales, FloatFp8Column)  # the last is TensorRT-RTX's
}

# Finding that each class becomes, and values in its causes.
FINDINGS: dict[str, tuple[str, set[object]]] = {
    "input-not-dequantized": ("IN-BLOCKED", {"c", "p.DQ", PathStep("soft", "Softmax")}),
    "weights-not-dequantized": ("W-NO-DQ", {"c", "c.weight"}),
    "weights-not-constant": ("W-NONCONST", {"c", "w"}),
    "scale-computed": ("SCALE-DYNAMIC", {"p.Q", "max:0"}),
    "types": ("QTYPE", {"a.Q", "int16"}),
    "float-types": ("FLOAT-MIXED", {"c", Precision.FP32, Precision.FP16}),
    "convtranspose-3d": ("CT3D-FLOAT", {"up"}),
    "activation-per-channel": ("ACT-PER-CHANNEL", {"a.Q"}),
    "zero-point": ("ZP-NONZERO", {"a.Q", (3, 3), "x"}),
    "weights-axis": ("W-AXIS", {"c", "wq.Q", 1}),
    "weights-shared": ("W-SHARED", {("a", "b"), "w.weight"}),
    "output-not-quantized": ("OUT-FLOAT", {"c0", "soft", "Softmax", "16x16x16"}),
    "output-different-scales": (
        "POOL-SCALE",
        {"c0", PathStep("pool", "MaxPool"), "a.in.Q", 0.02, "b.in.Q", 0.05},
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
    "many-consumers": ("CONVERSION", {"a.in.Q", PathStep("pool", "MaxPool"), "neg"}),
    "output-not-only-quantized": ("CONVERSION", {"a.in.Q", "cat", "soft", "Softmax"}),
    "concat-scales": ("CONCAT-SCALE", {"cat", 0.02, 0.05}),
    "scales-differ": ("DOUBLE-QDQ", {"first.Q", 0.2, "end.in.Q", 0.05}),
    "pooling-one-side": ("POOL-FLOAT", {"gap", "end.in.Q"}),
    "reduce-not-pooling": ("POOL-FLOAT", {"mean", "gap.DQ"}),
    "in-myelin": ("NOT-QUANTIZED", {"fc", PathStep("best", "ArgMax")}),
    "outside-rules": ("FP8-OUTSIDE", {"INT4", "wq.Q"}),
    "fp8-kernel": ("FP8-KERNEL", {"c", (7, 7)}),
    "fp8-deconvolution": ("FP8-DECONV", {"up"}),
    "fp8-version": ("FP8-VERSION", {"c", "10.1"}),
    "mixed-operands": ("BUILD-FAILS", {"c", "in.DQ", "wq.DQ", ("INT8", "FP8")}),
    "stem-before-pool": ("STEM-POOL", {"stem", "r", "pool"}),
    "output-type": ("FP8-MIXED", {"c0", "end.in.Q", ("INT8", "FP8")}),
    "stays": ("CONVERSION", {"end.in.Q", 0.05, ("SKIP-FLOAT", "sum")}),
}

# Classes that another record reports: a check of the model, or the conversion that results.
OTHERS = {
    "types": UnsupportedQuantizedType,
    "outside-rules": UncoveredTypes,
    "scales-differ": ConversionBetweenScales,
}

# Reasons that do not exist on 8.5
TARGETS = {
    "float-types": "trt11",
    "fp8-kernel": "trt10",
    "fp8-deconvolution": "trt10",
    "fp8-version": "10.1",
    "output-type": "trt10",
    "mixed-operands": "trt10",
    "stem-before-pool": "trt10",
}


def values(item: object) -> Iterator[object]:
    """Yield a record or tuple and all values in it; floats rounded to what was written."""
    yield round(item, 6) if isinstance(item, float) else item
    is_record = hasattr(item, "__match_args__") and not isinstance(item, tuple)
    for part in field_values(item) if is_record else item if isinstance(item, tuple) else ():
        yield from values(part)


def test_reason_classes_have_graph_finding_and_node() -> None:
    assert set(CLASSES) == set(GRAPHS) == set(FINDINGS)
    for kind in CLASSES.values():
        assert {"pass_name", "node"} < set(kind.__match_args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("reason", GRAPHS)
def test_reason_becomes_finding_with_its_values(reason: str) -> None:
    prediction = predict(GRAPHS[reason](), TARGETS.get(reason, "trt8.5"))
    assert reason in {r.key for r in prediction.refusals}
    code, expected = FINDINGS[reason]
    kind = OTHERS.get(reason, CLASSES[reason])
    causes = [list(values(f.causes)) for f in prediction.findings if f.code == code]
    assert any(expected <= set(c) and kind in map(type, c) for c in causes), causes
    for conv in prediction.convolutions:
        assert conv.quantized_in_quantized_out or conv.findings, conv.name
    nodes = {f.node for f in prediction.findings if f.code in ("CONVERSION", "INPUT-CONVERSION")}
    assert nodes == set(prediction.conversion_nodes)


@pytest.mark.parametrize("reason", GRAPHS)
def test_only_reasons_about_different_scales_have_scales_to_unify(reason: str) -> None:
    for finding in predict(GRAPHS[reason](), TARGETS.get(reason, "trt8.5")).findings:
        for cause in finding.causes:
            is_one_scale_advised = finding.code in {
                "CONCAT-SCALE",
                "SPLIT-SCALE",
                "POOL-SCALE",
                "SIBLING-SCALE",
            }
            assert bool(cause.reason.scales_to_unify()) == is_one_scale_advised, finding.code
