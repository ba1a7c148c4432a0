import pickle
from collections.abc import Callable

import numpy as np
import pytest

import qdqtool
from qdqtool.ir.modelfile import load
from qdqtool.reasons.tensors import ConsumerKind, TensorSize
from qdqtool.reasons.text import describe_consumers
from qdqtool.trt import importer
from qdqtool.trt.layers import Layer
from qdqtool.trt.neighbors import (
    find_consumers,
    find_origin,
    find_weighted_consumers,
    have_different_scales,
    tensor_size,
)
from qdqtool.trt.network import Network
from tests.trt.builder import Graph


def network_of(g: Graph, *outputs: str) -> Network:
    return importer.build(load(g.model(*outputs)))


def layer(network: Network, name: str) -> Layer:
    return next(x for x in network.layers.values() if x.name == name)


@pytest.mark.parametrize("shape", [None, (1, None, 5), (1, 0, 5)])
def test_size_of_unknown_shape_is_unknown(g: Graph, shape: tuple[int | None, ...] | None) -> None:
    exp = g.op("Exp", g.input(4, 8, 5, 5), "e")
    for outputs in ([exp], [g.op("Exp", exp, "f")]):
        out = layer(network_of(g, *outputs), "e").out
        out.shape = shape
        assert tensor_size(out) is None


def test_size_of_tensor_without_shape_is_that_of_its_reshape(g: Graph) -> None:
    # The shape leaves the batch out, but the number of values includes the batch.
    network = network_of(g, g.reshape(g.op("Exp", g.input(4, 8, 5, 5), "e"), "r", 4, 200))
    out = layer(network, "e").out
    assert tensor_size(out) == TensorSize("8x5x5", 800)
    out.shape = None
    assert tensor_size(out) == TensorSize("200", 800)
    out.is_output = True
    assert tensor_size(out) is None


@pytest.fixture
def x(g: Graph) -> str:
    return g.op("Exp", g.input(1, 8, 4, 4), "e")


def test_consumers_past_operators_that_a_q_passes(g: Graph, x: str) -> None:
    pooled = g.pool(x, "pool")
    joined = g.concat([g.op("Tanh", x, "t"), pooled], "cat")
    summed = g.add(pooled, g.op("Tanh", pooled, "u"), "sum")
    shifted = g.op("Add", [pooled, g.const("k", [[[[1.0]]]])], "shift")
    network = network_of(
        g, g.op("Neg", g.pair(pooled, "p", 0.3), "n"), joined, summed, shifted, g.op("Neg", x, "m")
    )
    consumers = {r.node: r for r in find_consumers(layer(network, "e").out)}
    assert {name: r.kind for name, r in consumers.items()} == {
        "p.Q": ConsumerKind.Q,
        "cat:0": ConsumerKind.OUTPUT,
        "sum": ConsumerKind.SUM,
        "shift": ConsumerKind.OP,
        "t": ConsumerKind.OP,
        "u": ConsumerKind.OP,
        "m": ConsumerKind.OP,
    }
    assert [(s.node, s.part) for s in consumers["cat:0"].path] == [("pool", -1), ("cat", 1)]
    assert [s.node for s in consumers["p.Q"].path] == ["pool"]
    assert consumers["p.Q"].scale == float(np.float32(0.3))
    assert consumers["sum"].shares  # p.Q reads the input that the path leads to
    direct = {r.node: r.kind for r in find_consumers(layer(network, "e").out, through=False)}
    assert direct == {"t": ConsumerKind.OP, "pool": ConsumerKind.OP, "m": ConsumerKind.OP}


@pytest.mark.parametrize("shared", [False, True])
def test_split_separates_consumers_of_concatenated_tensors(g: Graph, shared: bool) -> None:
    # As in YOLO's head: boxes and scores of each level are joined, reshaped, joined and split.
    x = g.input(1, 8, 4, 4)
    boxes, scores = g.op("Exp", x, "boxes"), g.op("Exp", x, "scores")
    levels = [
        g.reshape(g.concat([boxes, scores], "cat0"), "r0", 1, 16, 16),
        g.reshape(
            g.concat([g.op("Tanh", x, "t"), boxes if shared else x], "cat1"), "r1", 1, 16, 16
        ),
    ]
    rows = g.concat(levels, "rows", axis=2)
    parts = g.ops("Split", [rows, g.const("sizes", [8, 8], np.int64)], "split", 2, axis=1)
    network = network_of(g, g.op("Softmax", parts[0], "soft"), g.op("Sigmoid", parts[1], "sig"))

    def consumers_of(name: str) -> set[str]:
        return {r.node for r in find_consumers(layer(network, name).out)}

    assert consumers_of("scores") == {"sig"}
    assert consumers_of("boxes") == ({"soft", "sig"} if shared else {"soft"})


@pytest.mark.parametrize("count", [20, 60, 120])
def test_nested_concats_have_no_float_consumer(g: Graph, count: int) -> None:
    # Each Concat reads the previous Concat, and a Q reads each Concat.
    last, outputs = g.op("Exp", g.input(1, 8, 4, 4), "e"), []
    for i in range(count):
        last = g.concat([last, g.input(1, 8, 4, 4, name=f"x{i}")], f"cat{i}")
        outputs.append(g.op("Neg", g.pair(last, f"p{i}"), f"n{i}"))
    consumers = find_consumers(layer(network_of(g, *outputs), "e").out)
    assert len(consumers) > 15 and {r.kind for r in consumers} == {ConsumerKind.Q}


@pytest.mark.parametrize(
    ("count", "listed", "more", "text"), [(90, 90, "", "87 more"), (130, 100, "e:0", "97 more")]
)
def test_list_of_consumers_is_cut_at_100(
    g: Graph, x: str, count: int, listed: int, more: str, text: str
) -> None:
    network = network_of(g, *(g.op("Neg", x, f"n{i}") for i in range(count)))
    consumers = find_consumers(layer(network, "e").out)
    assert (len(consumers), consumers.more) == (listed, more)
    assert text in describe_consumers(consumers)
    assert ("e:0" in describe_consumers(consumers)) is bool(more)
    assert pickle.loads(pickle.dumps(consumers)).more == more


@pytest.mark.parametrize("near", [[], ["near"]])
def test_consumers_past_110_poolings_are_not_searched(g: Graph, near: list[str]) -> None:
    x = last = g.op("Exp", g.input(1, 8, 4, 4), "e")
    for i in range(110):
        last = g.pool(last, f"pool{i}")
    network = network_of(g, g.op("Neg", last, "far"), *(g.op("Neg", x, name) for name in near))
    consumers = find_consumers(layer(network, "e").out)
    assert consumers.more.startswith("pool")
    assert [r.node for r in consumers] == (near or [consumers.more])
    assert consumers.more in describe_consumers(consumers)


def dfl(g: Graph, x: str, transposes: int = 0, copies: int = 1) -> str:
    for i in range(transposes):
        x = g.op("Transpose", x, f"l{i}", perm=[0, 1, 3, 2])
    bins = np.tile(np.arange(4, dtype=np.float32), copies).reshape(-1, 4, 1, 1)
    return g.op("Conv", [x, g.const("bins", bins)], "c")


@pytest.mark.parametrize(
    ("downstream", "feeds"),
    [
        pytest.param(lambda g, y: g.conv(g.op("Tanh", y, "t"), "c"), True, id="quantized"),
        pytest.param(
            lambda g, y: g.conv(g.op("Tanh", y, "t"), "c", scale=None, weights="float"),
            True,
            id="float",
        ),
        pytest.param(
            lambda g, y: g.conv(
                g.op("Softmax", y, "s", axis=1), "c", 1, scale=None, weights="float"
            ),
            True,
            id="3x3 after Softmax",
        ),
        pytest.param(lambda g, y: y, False, id="nothing"),
        pytest.param(lambda g, y: dfl(g, g.op("Softmax", y, "s", axis=1)), False, id="dfl"),
        pytest.param(
            lambda g, y: dfl(g, g.op("Softmax", y, "s", axis=1), copies=2), True, id="wide dfl"
        ),
        pytest.param(dfl, True, id="no softmax"),
        pytest.param(
            lambda g, y: dfl(g, g.op("Softmax", y, "s", axis=1), transposes=20), False, id="far dfl"
        ),
        pytest.param(
            lambda g, y: dfl(g, g.op("LRN", g.op("Softmax", y, "s", axis=1), "between", size=3)),
            True,
            id="computed between",
        ),
    ],
)
def test_feeds_weighted(g: Graph, downstream: Callable[[Graph, str], str], feeds: bool) -> None:
    # YOLO's distribution focal loss, a 1x1 convolution to one channel after a Softmax, does not
    # count.
    y = downstream(g, g.op("LRN", g.op("Exp", g.input(1, 4, 5, 5), "e"), "reader", size=3))
    (reader,) = find_consumers(layer(network_of(g, g.op("Neg", y, "end")), "e").out)
    assert (reader.node, reader.feeds_weighted) == ("reader", feeds)


@pytest.mark.parametrize("is_quantized", [True, False])
def test_product_of_computed_weights_gains_if_they_are_quantized(
    g: Graph, is_quantized: bool
) -> None:
    weights = g.input(16, 16, name="w")
    inputs = [
        g.op("Exp", g.input(4, 16), "e"),
        g.pair(weights, "wq") if is_quantized else weights,
    ]
    network = network_of(g, g.gemm(g.op("MatMul", inputs, "m"), "fc", 16))
    assert [c.gains for c in find_consumers(layer(network, "e").out)] == [is_quantized]


def test_equal_parameters_of_batchnorm_are_shared(g: Graph) -> None:
    # Exporters write equal weights once: without training, bias and mean of a BatchNormalization
    # are one tensor.
    one, zero = (g.const(n, np.full(8, v, np.float32)) for n, v in (("weight", 1), ("bias", 0)))
    mean, variance = g.op("Identity", zero, "mean"), g.op("Identity", one, "variance")
    y = g.op(
        "BatchNormalization",
        [g.conv(g.input(1, 8, 4, 4), "c", k=1), one, zero, mean, variance],
        "bn",
    )
    assert qdqtool.predict(g.model(g.silu(y, "act"))).summary()["int8"] == 1


def test_differ_compares_scales(g: Graph, x: str) -> None:
    network = network_of(
        g, *(g.op("Neg", g.pair(x, n, s), f"n{n}") for n, s in (("a", 0.1), ("b", 0.1), ("c", 0.2)))
    )
    a, b, c = find_consumers(layer(network, "e").out)
    assert [have_different_scales(qs) for qs in ([a], [a, b], [a, c], [])] == [
        False,
        False,
        True,
        False,
    ]
    layer(network, "a.Q").has_computed_scale = True
    layer(network, "a.Q").quant = layer(network, "b.Q").quant = None
    a, b, c = find_consumers(layer(network, "e").out)
    assert (
        a.scale,
        have_different_scales([a]),
        have_different_scales([a, b]),
        have_different_scales([a, c]),
    ) == (None, False, True, True)


@pytest.mark.parametrize(
    ("build", "node", "path", "quantizer", "convolution"),
    [
        pytest.param(lambda g, x: x, "", [], "", "", id="input"),
        pytest.param(lambda g, x: g.op("Exp", x, "e"), "e", [], "", "", id="exp"),
        pytest.param(
            lambda g, x: g.pool(g.op("Exp", x, "e"), "pool"), "e", ["pool"], "", "", id="pool"
        ),
        pytest.param(
            lambda g, x: g.concat([g.op("Exp", x, "e"), "e:0"], "cat"),
            "cat",
            [],
            "",
            "",
            id="concat",
        ),
        pytest.param(
            lambda g, x: g.pool(g.pair(g.op("Exp", x, "e"), "p", 0.3), "pool"),
            "p.DQ",
            ["pool"],
            "p.Q",
            "",
            id="pair",
        ),
        pytest.param(
            lambda g, x: g.pool(g.conv(x, "c"), "pool"), "c", ["pool"], "", "c", id="conv"
        ),
    ],
)
def test_origin_of_tensor(
    g: Graph,
    build: Callable[[Graph, str], str],
    node: str,
    path: list[str],
    quantizer: str,
    convolution: str,
) -> None:
    # The search goes past operators that a Q passes, up to a Concat. A DQ is named by its Q.
    y = build(g, g.input(1, 8, 4, 4))
    origin = find_origin(layer(network_of(g, g.op("LRN", y, "end", size=3)), "end").data)
    assert (origin.node, [s.node for s in origin.path]) == (node, path)
    assert (origin.quantizer, origin.convolution) == (quantizer, convolution)
    assert origin.scale == (float(np.float32(0.3)) if quantizer else None)


def test_convolutions_downstream_of_quantized_tensor(g: Graph, x: str) -> None:
    # The search follows DQs and operators that a Q passes, but not weights or operators that compute.
    pooled = g.pool(g.pair(x, "p"), "pool")
    outputs = [
        g.conv(pooled, "a", scale=None),
        g.conv(g.op("Tanh", pooled, "t"), "b", scale=None),
        g.conv(x, "c"),
    ]
    network = network_of(g, *outputs)
    producers = [layer(network, name) for name in ("p.Q", "e", "a.w.Q")]
    assert [find_weighted_consumers(producer.out) for producer in producers] == [("a",), (), ()]
