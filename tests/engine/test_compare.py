"""Two engines side by side."""

from __future__ import annotations

import pytest

from qdqtool.buildlog.read import read_build
from qdqtool.engine.compare import compare
from qdqtool.engine.costs import EngineReport, analyze
from tests.buildlog.evidence import build_file
from tests.engine.test_costs import FP16, INT8, layer, report, tensor


def conv(name: str, layout: str, channels: int, source: str, target: str) -> dict[str, object]:
    return layer(name, "CaskConvolution", [tensor(source, [1, channels, 8, 8], layout)],
                 [tensor(target, [1, channels, 8, 8], layout)], Kernel=[3, 3])


def names(first: EngineReport, second: EngineReport) -> list[tuple[str | None, str | None]]:
    return [(p.first.name if p.first else None, p.second.name if p.second else None) for p in compare(first,
    second).pairs]


def test_layers_pair_by_the_nodes_they_hold() -> None:
    first = report(conv("/a/Conv + /a/Relu", FP16, 8, "x", "y"), conv("/b/Conv", FP16, 8, "y", "z"))
    second = report(
        layer("/a/q/QuantizeLinear", "Reformat", [tensor("x", [1, 8, 8, 8], FP16)], [tensor("w", [1, 8, 8, 8], INT8)]),
        conv("b.weight + /b/w/QuantizeLinear + /b/Conv", INT8, 8, "y", "z"),
        conv("a.weight + /a/w/QuantizeLinear + /a/Conv", INT8, 8, "w", "y"),
    )
    assert names(first, second) == [
        ("/a/Conv + /a/Relu", "a.weight + /a/w/QuantizeLinear + /a/Conv"),
        ("/b/Conv", "b.weight + /b/w/QuantizeLinear + /b/Conv"), (None, "/a/q/QuantizeLinear"),
    ]
    assert compare(first, second).by == "names"


def test_layers_with_other_names_pair_by_what_they_compute() -> None:
    first = report(conv("Conv_0", FP16, 8, "a", "b"), conv("Conv_1", FP16, 16, "b", "c"), conv("Conv_2", FP16, 8,
    "c", "d"))
    second = report(conv("Conv_9", INT8, 8, "a", "b"), conv("Conv_19", INT8, 16, "b", "c"))
    assert names(first, second) == [("Conv_0", "Conv_9"), ("Conv_1", "Conv_19"), ("Conv_2", None)]
    assert compare(first, second).by == "shapes"


def timed(case: str) -> EngineReport:
    return analyze(read_build(build_file(case, "graph.json"), build_file(case, "profile.json")))


@pytest.mark.parametrize(("case", "ms"), [
    ("resnet18-a100-qat", 1.09568), ("resnet18-a100-qat-residual", 0.731136), ("resnet18-a100-qat-residual-qgap",
    0.672768),
])
def test_recorded_engines(case: str, ms: float) -> None:
    """Sums of the recorded profiles' averages; every time is in one pair."""
    result = compare(timed("resnet18-a100-fp16"), timed(case))
    assert (result.first.total_ms, result.second.total_ms) == (pytest.approx(1.016832), pytest.approx(ms))
    change = sum(pair.change_ms or 0.0 for pair in result.pairs)
    assert change == pytest.approx(ms - 1.016832)
    both = [p for p in result.pairs if p.first and p.second]
    assert sum(p.first.layer.is_convolution for p in both if p.first) >= 18
    stem = next(p for p in result.pairs if p.first and p.first.name == "Conv_0 + Relu_1")
    assert stem.second is not None
    assert stem.second.name.startswith("conv1.weight")
