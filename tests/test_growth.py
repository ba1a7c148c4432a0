"""Growth of cost with the size of a graph.

Twice the nodes take at most 2^1.3 times the calls. `make growth` measures time and memory.
"""

import gc
import io
from collections.abc import Callable

import pytest

import qdqtool
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.reconstruct import graph_from_log
from qdqtool.fixing import session, site
from qdqtool.fixing.steps import STEPS
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from qdqtool.reasons.conversions import RemainingConversion
from qdqtool.timing.on_gpu import predict_on_gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.trt import neighbors
from qdqtool.trt.targets import TARGETS
from tests.slow import slow_after
from tools.growth.families import FAMILIES
from tools.growth.measure import (
    COUNTED_ALWAYS,
    count_bytes,
    count_calls,
    exceeds,
    find_excess,
    find_excess_calls,
    lower_limits,
    measure_seconds,
)


@pytest.mark.parametrize(("command", "family"), COUNTED_ALWAYS)
def test_growth_of_calls(command: str, family: str) -> None:
    assert find_excess_calls(command, family) == []


@pytest.mark.parametrize(
    ("small", "large", "excess"),
    [
        pytest.param(100.0, 200.0, False, id="linear"),
        pytest.param(100.0, 240.0, False, id="n^1.26"),
        pytest.param(100.0, 400.0, True, id="square"),
    ],
)
def test_growth_limit_is_the_power_of_1_3(small: float, large: float, excess: bool) -> None:
    assert exceeds(0.0, small, large, ratio=2.0) is excess
    assert exceeds(10.0, small + 10, large + 10, ratio=2.0) is excess


@pytest.mark.parametrize(
    ("count", "command", "family", "sizes"),
    slow_after(
        1,
        [
            # The finding of each Q on a tensor names all other Qs, whose names are collected once.
            (count_calls, "predict", "wide Split with own scales", (80, 160)),
            (count_bytes, "predict", "constants", (300, 600)),  # names of folded constants
            # A tensor is examined once, even if one node consumes it n times.
            (count_calls, "fix to half", "Concat with the root", (100, 200)),
            (count_calls, "fix to half", "wide Split", (100, 200)),
        ],
    ),
)
def test_growth_of_calls_and_bytes(
    count: Callable[..., int], command: str, family: str, sizes: tuple[int, int]
) -> None:
    assert find_excess(count, command, family, [sizes]) == []


def test_paths_to_a_producer_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbors, "STEPS", 5)
    found = qdqtool.predict(FAMILIES["MaxPool, read along"](60), target="trt8.5").refusals
    origins = {r.name: r.origin for r in found if isinstance(r, RemainingConversion)}
    ways = [(len(o.path), o.op) for o in origins.values()]
    assert (1, "Conv") in ways and ways.count((5, "MaxPool")) > 4 and max(ways)[0] == 5


def test_estimate_pauses_garbage_collection() -> None:
    """All objects stay alive, so garbage collection would waste a third of the time."""
    was_enabled, during = gc.isenabled(), []
    gc.enable()
    predict_on_gpu(
        FAMILIES["convolutions"](6),
        "trt8.5",
        TimingOptions(gpu="T4"),
        extend=lambda *_: during.append(gc.isenabled()),
    )
    after = gc.isenabled()
    if not was_enabled:
        gc.disable()
    assert (during, after) == ([False], True)


@pytest.mark.parametrize(
    ("count", "command", "family", "sizes"),
    slow_after(
        1,
        [
            (count_calls, "fix", "one pair of weights", (100, 200)),
            (count_calls, "fix", "Casts of a weight", (125, 250)),
            (count_calls, "predict", "Casts of a weight", (125, 250)),
            (count_bytes, "predict", "Casts of a weight", (125, 250)),
        ],
    ),
)
def test_growth_between_weights_and_their_quantizers(
    count: Callable[..., int], command: str, family: str, sizes: tuple[int, int]
) -> None:
    """Constants are computed once, and a finding does not name all consumers."""
    with lower_limits():
        assert find_excess(count, command, family, [sizes]) == []


def test_fix_sites_share_findings_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "MAX_REPORTS_OF_NAME", 5)
    model = FAMILIES["parts of a weight"](100)
    predicted = qdqtool.predict(model, target="trt8.5")
    codes = {str(f.code) for f in predicted.findings}
    view, target = View(Model(model)), TARGETS["trt8.5"]
    sites = [s for step in STEPS for s in step.find_sites(view, target, predicted, codes)]
    assert len(sites) >= 20 and max(len(s.findings) for s in sites) <= 5


@pytest.mark.parametrize("family", ["convolutions", "residual", "C2f"])
def test_fix_predicts_a_few_times(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sites of a step are tried together.

    The prediction shows the sites without an improvement.
    """
    calls = []
    monkeypatch.setattr(
        session, "predict", lambda *args: calls.append(1) or qdqtool.predict(args[0], args[1].name)
    )
    qdqtool.fix(FAMILIES[family](200), target="trt8.5")
    assert len(calls) <= 5


def assert_time_grows_slowly(
    seconds: Callable[[int], float], size: int, ratio: float = 8.0, shortest: float = 0.03
) -> None:
    assert any(seconds(4 * size) < ratio * max(seconds(size), shortest) for _ in range(2))


def remove_quantizers_with_one_scale(editor: Editor, model: Model) -> None:
    for node in [n for n in model.nodes if n.op == "QuantizeLinear" and "x" not in n.inputs][:-1]:
        editor.remove_pairs(
            node, [n for n in model.consumers(node.output) if n.op == "DequantizeLinear"]
        )


def remove_chain_of_casts(editor: Editor, model: Model) -> None:
    for node in [n for n in model.nodes if n.op == "Cast"]:
        editor.bypass(node, node.input(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remove", "family", "size"),
    [
        (remove_quantizers_with_one_scale, "fan-out, equal", 2000),
        # All consumers along the chain are connected to the input of its first node.
        (remove_chain_of_casts, "Casts of a weight", 4000),
    ],
)
def test_growth_of_edits(remove: Callable[[Editor, Model], None], family: str, size: int) -> None:
    def edit(model: Model) -> None:
        editor = Editor(model)
        remove(editor, model)
        editor.finish()

    assert_time_grows_slowly(
        lambda size: measure_seconds(edit, Model(FAMILIES[family](size))), size
    )


@pytest.mark.slow
def test_growth_of_graph_from_a_log() -> None:
    """All Qs have scales per channel, and read and write the same tensors."""
    node = (
        "q [QuantizeLinear] inputs: [x -> (16, 3, 3, 3)[FLOAT]], [s -> (16)[FLOAT]], [z -> (16)[INT8]], ",
        "q [QuantizeLinear] outputs: [x -> (16, 3, 3, 3)[FLOAT]], ",
    )
    stamp = "[10/31/2025-17:53:30] [V] [TRT] "

    def seconds(size: int) -> float:
        lines = [
            stamp + line
            for _ in range(size)
            for line in ("Parsing node: q [QuantizeLinear]", *node)
        ]
        text = "\n".join([f"{stamp}Trace of TensorRT version: 8.5.2", *lines]) + "\n"
        return measure_seconds(graph_from_log, read_build(io.BytesIO(text.encode())))

    assert_time_grows_slowly(seconds, 400, 12.0)
