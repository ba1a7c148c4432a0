"""Findings have equal keys if their causes differ only in sizes and removed nodes."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import onnx
import pytest

from qdqtool.errors import ModelError
from qdqtool.evidence import Evidence
from qdqtool.extraction.cut import ModelCutter
from qdqtool.findings.identity import finding_key
from qdqtool.findings.report import describe_finding
from qdqtool.ir.graph import Model
from qdqtool.prediction import predict
from qdqtool.reasons.compiler import IntegersLost, LossCause
from qdqtool.reasons.conversions import COVERED_TYPES, RemainingConversion
from qdqtool.reasons.finding import Cause, Finding, Severity
from qdqtool.reasons.outputs import OutputNotQuantized, PoolingQuantizedOnOneSide, ReduceNotPooling
from qdqtool.reasons.residuals import ResidualFloat
from qdqtool.reasons.tensors import ConsumerKind, PathStep, TensorConsumer, TensorOrigin, TensorSize
from qdqtool.trt.result import Prediction
from tests.findings.graphs import GRAPHS
from tests.findings.test_producers import prediction
from tests.findings.test_reasons import TARGETS
from tests.slow import slow_after
from tools.fuzz.grammar import network


def finding(reason: Any, code: Any = "OUT-FLOAT", **cause: Any) -> Finding:
    def words(_: Finding) -> tuple[str, str]:
        raise AssertionError("a key needs no words")

    return Finding(code, Severity.WARNING, "n", (Cause(reason, **cause),), Evidence.SEEN, words)


def key_of(reason: Any, code: Any = "OUT-FLOAT", **cause: Any) -> Any:
    return finding_key(finding(reason, code, **cause))


CONV = TensorConsumer(ConsumerKind.OP, "c", "Conv", feeds_weighted=True)
OUTPUT = TensorConsumer(ConsumerKind.OUTPUT, "a", "Output")
PLAIN = OutputNotQuantized("pass", "n", "t", (CONV,), TensorSize("8x4x4", 128))


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"elements": TensorSize("2", 2)}, True),
        ({"elements": None}, True),
        (
            {"consumers": (dataclasses.replace(CONV, gains=True, path=(PathStep("s", "Slice"),)),)},
            True,
        ),
        ({"tensor": "u", "activation": PathStep("s", "Relu")}, True),  # in no message
        ({"node": "m"}, False),
        ({"consumers": ()}, False),
        ({"consumers": (dataclasses.replace(CONV, node="d"),)}, False),
        ({"consumers": (dataclasses.replace(CONV, scale=0.5),)}, False),
        # Nothing after the consumer is quantized.
        ({"consumers": (dataclasses.replace(CONV, feeds_weighted=False),)}, False),
    ],
)
def test_key_has_the_values_that_decide_only(changes: dict[str, Any], is_same: bool) -> None:
    assert (key_of(dataclasses.replace(PLAIN, **changes)) == key_of(PLAIN)) == is_same


def test_key_ignores_names_of_network_outputs() -> None:
    first, second = (
        key_of(dataclasses.replace(PLAIN, consumers=(dataclasses.replace(OUTPUT, node=name),)))
        for name in "ab"
    )
    assert first == second != key_of(PLAIN)


def residual_key(*origin: str, quantizer: str = "") -> Any:
    return key_of(ResidualFloat("pass", "n", "add", TensorOrigin(*origin, quantizer=quantizer), ()))


@pytest.mark.parametrize(
    ("first", "same", "other"),
    [
        pytest.param("t m Relu c", "u o Add c", "t m Relu d", id="convolution"),
        pytest.param("t m Relu", "u m Add", "t o Relu", id="node"),
        pytest.param("t", "t", "u", id="tensor"),
    ],
)
def test_key_identifies_producer(first: str, same: str, other: str) -> None:
    """Keys contain the convolution that produces a tensor, else the node, else the tensor."""
    keys = [residual_key(*(*origin.split(), "", "")[:4]) for origin in (first, same, other)]
    assert keys[0] == keys[1] != keys[2]


def test_key_ignores_which_quantizer_a_producer_has() -> None:
    first, second, none = (residual_key("t", "m", "Relu", quantizer=q) for q in ("q", "r", ""))
    assert first == second != none


def test_key_of_pooling_is_its_quantized_side() -> None:
    q, r = (TensorConsumer(ConsumerKind.Q, name, "QuantizeLinear") for name in "qr")

    def pooling(quantized: bool, node: str, *consumers: TensorConsumer) -> Any:
        return key_of(
            PoolingQuantizedOnOneSide(
                "pass", "n", quantized, TensorOrigin("t", node, "Relu"), consumers
            )
        )

    assert pooling(True, "m", q, r) == pooling(True, "m", CONV, q) != pooling(True, "o", q)
    assert pooling(True, "m") != pooling(True, "m", q) != pooling(True, "m", r)
    assert pooling(False, "m", q, r) != pooling(False, "m", q) == pooling(False, "o", q, CONV)
    assert pooling(False, "m", q) != pooling(False, "m", r)


@pytest.mark.parametrize(
    "changes",
    [{"code": "OUT-MIXED"}, {"severity": Severity.INFO}, {"node": "m"}, {"gains": False}],
)
def test_key_has_each_field_of_the_finding(changes: dict[str, Any]) -> None:
    assert finding_key(dataclasses.replace(finding(PLAIN), **changes)) != key_of(PLAIN)


def test_key_has_classes_of_further_refusals() -> None:
    reduced = ReduceNotPooling("pass", "c", "q", ())
    others = (), (reduced,), (dataclasses.replace(reduced, dq="r"),)
    keys = [key_of(PLAIN, "POOL-FLOAT", also=also) for also in others]
    assert keys[0] != keys[1] == keys[2]


def test_key_with_scale_nan_equals_itself() -> None:
    consumers = [(dataclasses.replace(CONV, scale=float("nan")),) for _ in range(2)]
    first, second = (key_of(dataclasses.replace(PLAIN, consumers=readers)) for readers in consumers)
    assert first == second


@pytest.mark.parametrize(
    ("why", "equal"), [(LossCause.OPERATOR, False), (LossCause.INPUT_AXIS, True)]
)
def test_key_of_lost_integers_has_the_convolution(why: LossCause, equal: bool) -> None:
    first, second = (
        key_of(IntegersLost("pass", node, why, PathStep(node, "Relu"), "q")) for node in "ab"
    )
    assert (first == second) is equal
    assert key_of(IntegersLost("pass", "a", why, PathStep("a", "Relu"), "q", True)) != first


@pytest.mark.parametrize("target", ["trt8.5", "trt8.6"])
def test_key_of_conversion_has_the_producer_unless_another_finding_explains_it(
    target: str,
) -> None:
    reasons = [
        cause.reason
        for place in range(len(GRAPHS))
        for conversion in prediction(place, target).findings
        if conversion.code == "CONVERSION"
        for cause in conversion.causes
    ]
    assert len(reasons) > 10
    for stays in reasons:
        assert isinstance(stays, RemainingConversion)
        origin = dataclasses.replace(
            stays.origin, node="elsewhere", op="Relu", int8=not stays.origin.int8
        )
        moved = dataclasses.replace(stays, origin=origin)
        plain = stays.quantize and stays.precision in COVERED_TYPES
        assert (key_of(stays, "CONVERSION") == key_of(moved, "CONVERSION")) is not plain
        see, other = (("OUT-FLOAT", "c"),), (("OUT-FLOAT", "d"),)
        explained = key_of(stays, "CONVERSION", see=see)
        assert explained == key_of(moved, "CONVERSION", see=see)
        assert explained != key_of(stays, "CONVERSION", see=other)


@pytest.mark.parametrize(("place", "reason"), list(enumerate(GRAPHS)))
def test_keys_of_a_network_are_unique_and_repeatable(place: int, reason: str) -> None:
    own = TARGETS.get(reason, "trt8.5")
    for target in (own, "trt11", "rtx1.7"):
        keys = [finding_key(f) for f in prediction(place, target).findings]
        assert len(set(keys)) == len(keys)
        if target == own:
            assert [finding_key(f) for f in predict(GRAPHS[reason](), target).findings] == keys


def words_without_sizes(finding: Finding) -> tuple[str, ...]:
    causes = [
        dataclasses.replace(c, reason=dataclasses.replace(c.reason, elements=None))
        if hasattr(c.reason, "elements")
        else c
        for c in finding.causes
    ]
    return str(finding.severity), *describe_finding(
        dataclasses.replace(finding, causes=tuple(causes))
    )


def parts(proto: onnx.ModelProto, target: str) -> Iterator[Prediction]:
    model = Model(proto)
    cutter = ModelCutter(model)
    for place, node in enumerate(n for n in model.ordered if n.index not in cutter.constant):
        if place % 3 == 0:
            around = cutter.find_nodes_within([node], (1, 1, 3, 3)[place // 3 % 4])
            with contextlib.suppress(ModelError):  # a type that is unknown
                yield predict(cutter.build(cutter.complete_part(around, place % 2 == 1)), target)


def compare_parts(proto: onnx.ModelProto, target: str) -> Iterator[bool]:
    whole: dict[tuple[str, str], list[Finding]] = {}
    for finding in predict(proto, target).findings:
        whole.setdefault((finding.code, finding.node), []).append(finding)
    for finding in (finding for part in parts(proto, target) for finding in part.findings):
        for other in whole.get((finding.code, finding.node), ()):
            equal = finding_key(finding) == finding_key(other)
            assert equal == (words_without_sizes(finding) == words_without_sizes(other)), (
                finding.message,
                other.message,
            )
            yield equal


@pytest.mark.parametrize("target", slow_after(1, ["trt8.6", "rtx1.7"]))
def test_key_of_a_part_is_equal_if_the_words_are(target: str) -> None:
    nets = [*(make() for make in GRAPHS.values()), *map(network, (4, 5, 16, 30, 36, 52))]
    counts = Counter(equal for proto in nets for equal in compare_parts(proto, target))
    assert counts[True] > 50 and counts[False] > 10
