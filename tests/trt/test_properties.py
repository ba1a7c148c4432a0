import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, strategies as st

from qdqtool.ir import operators
from qdqtool.ir.modelfile import load
from qdqtool.prediction import predict
from qdqtool.trt.passes.const_qdq_initializers_fusion import ConstQDQInitializersFusion
from qdqtool.trt.passes.dq_q_fusion import DqQFusion
from qdqtool.trt.passes.horizontal_merge_q_nodes import HorizontalMergeQNodes
from qdqtool.trt.passes.split_q_across_preceding_fan_in import SplitQAcrossPrecedingFanIn
from qdqtool.trt.passes.vanilla_swap_with_following_q import VanillaSwapWithFollowingQ
from qdqtool.trt.passes.vanilla_swap_with_preceeding_dq import VanillaSwapWithPreceedingDQ
from qdqtool.trt.pipeline import Pass
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import TARGETS, target_named
from tests.insertion.nets import copy_model
from tests.trt.builder import Graph
from tests.trt.execute import Exporter, evaluate
from tests.trt.random_graphs import models

CLASSIC = sorted(t for t in TARGETS if not t.startswith("rtx"))
MOTION: tuple[type[Pass], ...] = (
    VanillaSwapWithPreceedingDQ,
    VanillaSwapWithFollowingQ,
    HorizontalMergeQNodes,
    SplitQAcrossPrecedingFanIn,
    DqQFusion,
)


def outcome(prediction: Prediction, names: dict[str, str] | None = None) -> Any:
    old = names or {}
    convolutions = {
        old.get(c.name, c.name): (
            c.precision,
            tuple(c.inputs),
            c.output,
            sorted(old.get(n, n) for n in c.fused),
            c.evidence,
        )
        for c in prediction.convolutions
    }
    return convolutions, prediction.conversions, sorted(la.type for la in prediction.layers)


def reordered(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    dice, waiting = random.Random(seed), list(model.graph.node)
    available = {v.name for v in model.graph.input} | {t.name for t in model.graph.initializer}
    available.add("")
    order = []
    while waiting:
        node = dice.choice([n for n in waiting if all(i in available for i in n.input)])
        waiting.remove(node)
        order.append(node)
        available.update(node.output)
    other = copy_model(model)
    del other.graph.node[:]
    other.graph.node.extend(order)
    return other


def renamed(model: onnx.ModelProto, seed: int) -> tuple[onnx.ModelProto, dict[str, str]]:
    numbers = list(range(10_000))
    random.Random(seed).shuffle(numbers)
    tensors: dict[str, str] = {"": ""}
    other = copy_model(model)
    graph, back = other.graph, {}

    def fresh(name: str) -> str:
        return tensors.setdefault(name, f"v{numbers.pop()}")

    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = fresh(value.name)
    for node in graph.node:
        new = f"n{numbers.pop()}"
        back[new] = node.name
        node.name = new
        node.input[:] = [fresh(i) for i in node.input]
        node.output[:] = [fresh(o) for o in node.output]
        for attribute in node.attribute:
            if attribute.HasField("t"):
                attribute.t.name = ""
    return other, back


@given(models(), st.sampled_from(CLASSIC))
def test_prediction_is_deterministic(model: onnx.ModelProto, target: str) -> None:
    first, second = (predict(model, target, advice=False) for _ in range(2))
    assert (first.as_json(), first.trace) == (second.as_json(), second.trace)
    assert first.refusals == second.refusals
    operators = [n for n in model.graph.node if n.op_type in ("Conv", "ConvTranspose", "Gemm")]
    assert len(first.convolutions) <= len(operators)
    for conv in first.convolutions:
        assert conv.layer in {layer.name for layer in first.layers} or conv.layer == (
            None if any(conv.name in region.nodes for region in first.regions) else ""
        )


@given(models(), st.integers(0, 99), st.sampled_from(CLASSIC))
def test_order_and_names_do_not_matter(model: onnx.ModelProto, seed: int, target: str) -> None:
    other = reordered(model, seed)
    assert outcome(predict(model, target, advice=False)) == outcome(
        predict(other, target, advice=False)
    )
    other, back = renamed(model, seed)
    assert outcome(predict(model, target, advice=False)) == outcome(
        predict(other, target, advice=False), back
    )


def move_quantizers(model: onnx.ModelProto) -> tuple[Exporter, set[str]]:
    exporter, fired = Exporter(load(model)), set()
    target = target_named("trt8.5")
    ConstQDQInitializersFusion(target).run(exporter.network)
    for _ in range(100):
        changed = {kind.__name__ for kind in MOTION if kind(target).run(exporter.network).events}
        fired |= changed
        if not changed:
            return exporter, fired
    raise AssertionError("the motions do not end")


@given(models())
def test_moving_quantizers_changes_no_number(model: onnx.ModelProto) -> None:
    # A Q that passes an operator by an exact rule commutes with it. A linear Resize is not exact.
    index = load(model)
    passages = [p for p in (operators.find_passage(index, n) for n in index.nodes) if p is not None]
    nearest = all(
        n.attributes.get("mode", "nearest") == "nearest" for n in index.nodes if n.op == "Resize"
    )
    assume(nearest and all(p.exact or p is operators.OPERATORS["Resize"].passage for p in passages))
    # In the network, a Gemm is a product and a sum, which round differently. So with a Gemm, the imported network is
    # the reference instead of the model.
    gemm = any(n.op_type == "Gemm" for n in model.graph.node)
    before = Exporter(load(model)).export() if gemm else model
    assert all(map(np.array_equal, evaluate(before), evaluate(move_quantizers(model)[0].export())))


def test_every_motion_fires_and_changes_no_number(g: Graph) -> None:
    x = g.op("Sigmoid", g.input(1, 4, 8, 8), "s")
    joined = g.concat([g.resize(g.pool(x, "pool"), "up"), g.slice(x, "cut", 0, 2), x], "cat")
    g.conv(g.pool(g.pair(x, "early", 0.01), "late"), "a", scale=0.01)
    g.conv(x, "b", scale=0.01)
    g.conv(joined, "c", scale=0.01)
    g.conv(g.pool(x, "average", "AveragePool"), "d", scale=0.01)
    model = g.model("a:0", "b:0", "c:0", "d:0")
    exporter, fired = move_quantizers(model)
    assert fired == {kind.__name__ for kind in MOTION}
    after = exporter.export()
    assert [n.op_type for n in after.graph.node] != [n.op_type for n in model.graph.node]
    assert all(map(np.array_equal, evaluate(model), evaluate(after)))


NODES: dict[str, Callable[[Graph, str, int], str]] = {
    "Concat": lambda g, x, i: g.concat([x, g.op("Softmax", "x", f"s{i}")], f"n{i}"),
    "Transpose": lambda g, x, i: g.op("Transpose", x, f"n{i}", perm=[0, 1, 3, 2]),
    "Mul": lambda g, x, i: g.op("Mul", [x, g.const(f"k{i}", np.ones((1, 4, 1, 1)))], f"n{i}"),
    "MaxPool": lambda g, x, i: g.pool(x, f"n{i}", k=3, stride=1),
    "Tanh": lambda g, x, i: g.op("Tanh", x, f"n{i}"),
    "Relu": lambda g, x, i: g.relu(x, f"n{i}"),
}


def chain(op: str, length: int) -> onnx.ModelProto:
    g = Graph()
    x = g.input(1, 4, 8, 8)
    for i in range(length):
        x = NODES[op](g, x, i)
    return g.model(g.op("Softmax", g.pair(x, "p"), "end"))


@pytest.mark.parametrize("op", NODES)
def test_text_of_long_chain_grows_linearly(op: str) -> None:
    # If all names of a chain were joined, trace and layer names would grow with the square of the
    # chain's length.
    sizes = []
    for length in (100, 400):
        prediction = predict(chain(op, length), advice=False)
        texts = {*(e.subject for e in prediction.trace), *(e.object for e in prediction.trace)}
        texts.update(layer.name for layer in prediction.layers)
        sizes.append(sum(map(len, texts)))
    # Nested Concats nest the suffixes of clones.
    assert sizes[1] < (16 if op == "Concat" else 6) * sizes[0]


@pytest.mark.parametrize("depth", [1, 5, 40])
def test_q_moves_up_past_alternating_concats_and_pools(g: Graph, depth: int) -> None:
    # Each level leaves one clone on its other input. The last level also leaves one on the innermost
    # tensor.
    x = g.op("Softmax", g.input(1, 1, 8, 8), "before")
    for i in range(depth):
        x = g.pool(
            g.concat([x, g.op("Softmax", "x", f"s{i}")], f"cat{i}"), f"pool{i}", k=3, stride=1
        )
    prediction = predict(g.model(g.conv(x, "c")), "trt8.5", advice=False)
    assert prediction.conversions == depth + 1
    pools = [layer for layer in prediction.layers if layer.type == "Pooling"]
    assert {str(t.precision) for layer in pools for t in (*layer.inputs, *layer.outputs)} == {
        "INT8"
    }
