"""Findings are alike by what caused them: sizes and what a cut takes away apart, and never by their words."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import onnx
import pytest

from qdqtool.base.records import replaced
from qdqtool.errors import ModelError
from qdqtool.explain.alike import key
from qdqtool.explain.messages import worded
from qdqtool.extraction.cut import Cutter
from qdqtool.model.graph import Model
from qdqtool.prediction import predict
from qdqtool.trt.refusals import (
    Origin,
    OutputNotQuantized,
    PoolingOneSide,
    Reader,
    ReaderKind,
    ReduceNotPooling,
    ResidualFloat,
    Size,
    Stays,
    Step,
)
from qdqtool.trt.rtx.operands import IntegersLost, Why
from qdqtool.types import Cause, Evidence, Finding, Precision, Prediction, Severity
from tests.explain.graphs import GRAPHS
from tests.explain.test_producers import prediction
from tests.explain.test_refusals import TARGETS
from tests.slow import slow_after
from tools.fuzz.grammar import network


def made(refusal: Any, code: Any = "OUT-FLOAT", **more: Any) -> Finding:
    """A finding that cannot be worded."""

    def words(_: Finding) -> tuple[str, str]:
        raise AssertionError("words were asked for")

    return Finding(code, Severity.WARNING, "n", (Cause(refusal, **more),), Evidence.SEEN, words)


CONV = Reader(ReaderKind.OP, "c", "Conv", feeds_weighted=True)
PLAIN = OutputNotQuantized("pass", "n", "t", (CONV,), Size("8x4x4", 128))


def test_sizes_and_what_lies_behind_the_readers_are_left_out() -> None:
    first = key(made(PLAIN))
    assert (
        key(made(replaced(PLAIN, elements=Size("2", 2))))
        == key(made(replaced(PLAIN, elements=None)))
        == first
    )
    gains = replaced(CONV, gains=True, path=(Step("s", "Slice"),))
    assert key(made(replaced(PLAIN, readers=(gains,)))) == first
    output = Reader(ReaderKind.OUTPUT, "a", "Output")
    ends = [key(made(replaced(PLAIN, readers=(replaced(output, node=name),)))) for name in "ab"]
    assert ends[0] == ends[1] != first
    assert (
        key(made(replaced(PLAIN, tensor="u", activation=Step("s", "Relu")))) == first
    )  # which no words name


def test_what_writes_a_tensor_is_known_by_its_convolution_else_by_its_node_else_by_the_tensor() -> (
    None
):
    def residual(*names: str, quantizer: str = "") -> Any:
        return key(made(ResidualFloat("pass", "n", "add", Origin(*names, quantizer=quantizer), ())))

    assert (
        residual("t", "m", "Relu", "c")
        == residual("u", "o", "Add", "c")
        != residual("t", "m", "Relu", "d")
    )
    assert residual("t", "m", "Relu") == residual("u", "m", "Add") != residual("t", "o", "Relu")
    assert residual("t", "", "") != residual("u", "", "")
    one, other, none = (residual("t", "m", "Relu", quantizer=name) for name in ("q", "r", ""))
    assert one == other != none


def test_a_pooling_counts_by_what_it_reads_where_that_is_quantized_and_by_its_quantizers() -> None:
    one, two = (Reader(ReaderKind.Q, name, "QuantizeLinear") for name in "qr")

    def pooling(quantized: bool, node: str, *readers: Reader) -> Any:
        return key(made(PoolingOneSide("pass", "n", quantized, Origin("t", node, "Relu"), readers)))

    assert pooling(True, "m", one, two) == pooling(True, "m", CONV, one) != pooling(True, "o", one)
    assert pooling(True, "m") != pooling(True, "m", one) != pooling(True, "m", two)
    assert (
        pooling(False, "m", one) == pooling(False, "o", one, CONV) != pooling(False, "m", one, two)
    )
    assert pooling(False, "m", one) != pooling(False, "m", two)


@pytest.mark.parametrize(
    "changes",
    [
        {"node": "m"},
        {"readers": ()},
        {"readers": (replaced(CONV, node="d"),)},
        {"readers": (replaced(CONV, scale=0.5),)},
        {
            "readers": (replaced(CONV, feeds_weighted=False),)
        },  # left float: nothing behind it is quantized
    ],
)
def test_each_value_that_decides_counts(changes: dict[str, Any]) -> None:
    assert key(made(replaced(PLAIN, **changes))) != key(made(PLAIN))


def test_code_class_severity_and_gains_count() -> None:
    finding = made(PLAIN)
    for changes in (
        {"code": "OUT-MIXED"},
        {"severity": Severity.INFO},
        {"node": "m"},
        {"gains": False},
    ):
        assert key(dataclasses.replace(finding, **changes)) != key(finding)  # type: ignore[arg-type]
    reduced = ReduceNotPooling("pass", "c", "q", ())
    pooled = [
        key(made(PLAIN, "POOL-FLOAT", also=also))
        for also in ((), (reduced,), (replaced(reduced, dq="r"),))
    ]
    assert pooled[0] != pooled[1] == pooled[2]


def test_a_scale_that_is_no_number_equals_another() -> None:
    readers = [(replaced(CONV, scale=float("nan")),) for _ in range(2)]
    assert key(made(replaced(PLAIN, readers=readers[0]))) == key(
        made(replaced(PLAIN, readers=readers[1]))
    )


def test_integers_that_are_lost_at_a_convolution_count_by_it() -> None:
    """But where its input's scales are at fault, whichever convolution reads them."""
    for why, alike in ((Why.OPERATOR, False), (Why.INPUT_AXIS, True)):
        keys = [
            key(made(IntegersLost("pass", node, why, Step(node, "Relu"), "q"))) for node in "ab"
        ]
        assert (keys[0] == keys[1]) is alike
        assert key(made(IntegersLost("pass", "a", why, Step("a", "Relu"), "q", True))) != keys[0]


def test_a_conversion_that_another_finding_explains() -> None:
    """Who writes its tensor counts where nothing else explains it."""
    for target in ("trt8.5", "trt8.6"):
        stays = [
            c.refusal
            for place in range(len(GRAPHS))
            for f in prediction(place, target).findings
            if f.code == "CONVERSION"
            for c in f.causes
        ]
        assert len(stays) > 10
        for r in stays:
            assert isinstance(r, Stays)
            moved = replaced(
                r, origin=replaced(r.origin, node="elsewhere", op="Relu", int8=not r.origin.int8)
            )
            plain = r.quantize and r.precision in (Precision.INT8, Precision.INT32)
            assert (key(made(r, "CONVERSION")) == key(made(moved, "CONVERSION"))) is not plain
            see = (("OUT-FLOAT", "c"),)
            one, two = (made(x, "CONVERSION", see=see) for x in (r, moved))
            assert key(one) == key(two) != key(made(r, "CONVERSION", see=(("OUT-FLOAT", "d"),)))


@pytest.mark.parametrize(("place", "reason"), list(enumerate(GRAPHS)))
def test_no_two_findings_of_a_network_are_alike(place: int, reason: str) -> None:
    own = TARGETS.get(reason, "trt8.5")
    for target in (own, "trt11", "rtx1.7"):
        findings = prediction(place, target).findings
        assert len({key(f) for f in findings}) == len(findings)
        if target == own:
            again = predict(GRAPHS[reason](), target).findings
            assert [key(f) for f in again] == [key(f) for f in findings]


def without_sizes(finding: Finding) -> tuple[str, ...]:
    """What is told of a finding, but for the sizes of tensors."""
    causes = [
        replaced(c, refusal=replaced(c.refusal, elements=None))
        if hasattr(c.refusal, "elements")
        else c
        for c in finding.causes
    ]
    return str(finding.severity), *worded(dataclasses.replace(finding, causes=tuple(causes)))


def parts(proto: onnx.ModelProto, target: str) -> Iterator[Prediction]:
    """Predictions of parts around every third node, small and larger ones in turn."""
    model = Model(proto)
    cutter = Cutter(model)
    for place, node in enumerate(n for n in model.ordered if n.index not in cutter.constant):
        if place % 3 == 0:
            hops = (1, 1, 3, 3)[place // 3 % 4]
            try:
                yield predict(
                    cutter.make(cutter.part(cutter.around([node], hops), place % 2 == 1)), target
                )
            except ModelError:  # a type that nobody knows
                continue


def compared(proto: onnx.ModelProto, target: str) -> Iterator[tuple[bool, bool]]:
    """Of each finding of a model and of a part of it, of one code and node: are their keys equal, and their words?"""
    whole: dict[tuple[str, str], list[Finding]] = {}
    for finding in predict(proto, target).findings:
        whole.setdefault((finding.code, finding.node), []).append(finding)
    for part in parts(proto, target):
        for finding in part.findings:
            for other in whole.get((finding.code, finding.node), ()):
                found = key(finding) == key(other), without_sizes(finding) == without_sizes(other)
                assert found[0] == found[1], (
                    finding.message,
                    other.message,
                    key(finding),
                    key(other),
                )
                yield found


@pytest.mark.parametrize("target", slow_after(1, ["trt8.6", "rtx1.7"]))
def test_findings_of_a_part_are_alike_where_they_tell_the_same(target: str) -> None:
    """The words are what a user compares: extracts grew until a value was the same that nobody is told."""
    nets = [*(make() for make in GRAPHS.values()), *map(network, (4, 5, 16, 30, 36, 52))]
    counts = Counter(found for proto in nets for found in compared(proto, target))
    assert counts[True, True] > 50 and counts[False, False] > 10
