"""Cost grows with the input: four times the nodes take at most about four times the time."""

import gc
import io
import time

import pytest

import qdqtool
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.reconstruct import graph_from_log
from qdqtool.fixing.api import fix
from qdqtool.model.editor import Editor
from qdqtool.model.graph import Model
from tests.growth import FAMILIES

# 4^1.3, as much again for a busy machine, and what is too short to be measured.
RATIO, LEAST = 12.0, 0.03
QUICK = ("C2f", "If")  # the others have names and code in common with these

SOME = ("convolutions", "residual", "C2f", "Split and Concat", "fan-out", "wide Concat")


def _families(names):
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]


def _seconds(work, model) -> float:
    gc.collect()
    begin = time.process_time()
    work(model)
    return time.process_time() - begin


def _grows(seconds, size: int, ratio: float = RATIO) -> None:
    """Of work on an input of a size; measured once more where the machine may have been busy."""
    assert any(seconds(4 * size) < ratio * max(seconds(size), LEAST) for _ in range(2))


def _grows_with_the_input(work, family: str, size: int) -> None:
    work(FAMILIES["Relu"](1))
    _grows(lambda size: _seconds(work, FAMILIES[family](size)), size)


@pytest.mark.parametrize("family", _families(FAMILIES))
def test_predict(family):
    _grows_with_the_input(lambda model: qdqtool.predict(model, target="trt8.5").as_json(), family, 300)


@pytest.mark.parametrize("family", _families(SOME))
def test_fix(family):
    _grows_with_the_input(lambda model: fix(model, target="trt8.5").as_json(), family, 150)


@pytest.mark.parametrize("family", _families(["residual", "C2f", "pairs", "lattice", "wide Split"]))
def test_report(family, tmp_path):
    def work(model):
        qdqtool.report(model, target="trt8.5").save(tmp_path / "page.html")

    _grows_with_the_input(work, family, 100)


def test_extracts_and_logs():
    def work(model):
        qdqtool.extract(model, node=next(n.name for n in model.graph.node if n.op_type == "Conv"), target="trt8.5")

    _grows_with_the_input(work, "pairs", 40)
    # Of Qs of which each has its scales for channels, and which all write and read the same tensors
    node = ("q [QuantizeLinear] inputs: [x -> (16, 3, 3, 3)[FLOAT]], [s -> (16)[FLOAT]], [z -> (16)[INT8]], ",
            "q [QuantizeLinear] outputs: [x -> (16, 3, 3, 3)[FLOAT]], ")
    stamp = "[10/31/2025-17:53:30] [V] [TRT] "

    def seconds(size):
        lines = [stamp + line for _ in range(size) for line in ("Parsing node: q [QuantizeLinear]", *node)]
        text = "\n".join([f"{stamp}Trace of TensorRT version: 8.5.2", *lines]) + "\n"
        build = read_build(io.BytesIO(text.encode()))
        return _seconds(graph_from_log, build)

    _grows(seconds, 400)


def test_what_many_quantizers_share_costs_no_more_to_leave():
    """A change leaves the index true in time that goes with its size, also where all scales are one tensor."""
    def work(model):
        editor = Editor(model)
        for node in [n for n in model.nodes if n.op == "QuantizeLinear" and "x" not in n.inputs][:-1]:
            editor.bypass(node, [n for n in model.readers(node.output) if n.op == "DequantizeLinear"])
        editor.finish()

    _grows(lambda size: _seconds(work, Model(FAMILIES["fan-out, equal"](size))), 4000, 8)
