"""What refusals record of the readers and the origin of a tensor."""

import pickle

import numpy as np
import pytest

import qdqtool
from qdqtool.explain.messages import others_words, readers_words
from qdqtool.model.modelfile import load
from qdqtool.model.qdq import PerChannel
from qdqtool.trt import importer
from qdqtool.trt.layers import Layer
from qdqtool.trt.network import Network
from qdqtool.trt.refusals import ReaderKind, Size
from qdqtool.trt.surroundings import (
    differ,
    elements,
    origin_of,
    readers_of,
    scale_of,
    weighted_behind,
)
from tests.trt.builder import Graph


def network_of(g: Graph, *outputs: str) -> Network:
    return importer.build(load(g.model(*outputs)))


def layer(network: Network, name: str) -> Layer:
    return next(x for x in network.layers.values() if x.name == name)


def test_sizes_of_tensors(g: Graph) -> None:
    """All its values; the dimensions are told without the batch."""
    network = network_of(g, g.op("Exp", g.input(4, 8, 5, 5), "e"))
    assert elements(layer(network, "e").out) == Size("8x5x5", 800)
    for shape in (None, (1, None, 5), (1, 0, 5)):
        layer(network, "e").out.shape = shape
        assert elements(layer(network, "e").out) is None
    g = Graph()
    # The tensor in between has no shape of its own; a tensor that has one, or that others read, is taken as it is
    network = network_of(g, g.reshape(g.op("Exp", g.input(1, 8, 5, 5), "e"), "r", 1, 200))
    out = layer(network, "e").out
    assert elements(out) == Size("8x5x5", 200)
    out.shape = None
    assert elements(out) == Size("200", 200)
    out.is_output = True
    assert elements(out) is None
    g = Graph()
    out = layer(network_of(g, g.op("Exp", g.op("Exp", g.input(1, 8), "e"), "f")), "e").out
    out.shape = None
    assert elements(out) is None, "an Exp is no reshape"


def test_readers_and_windows(g: Graph) -> None:
    x = g.op("Exp", g.input(1, 8, 4, 4), "e")
    pooled = g.pool(x, "pool")
    joined = g.concat([g.op("Tanh", x, "t"), pooled], "cat")
    summed = g.add(pooled, g.op("Tanh", pooled, "u"), "sum")
    shifted = g.op("Add", [pooled, g.const("k", [[[[1.0]]]])], "shift")
    network = network_of(
        g, g.op("Neg", g.pair(pooled, "p", 0.3), "n"), joined, summed, shifted, g.op("Neg", x, "m")
    )
    found = {r.node: r for r in readers_of(layer(network, "e").out)}
    assert {name: r.kind for name, r in found.items()} == {
        "p.Q": ReaderKind.Q,
        "cat:0": ReaderKind.OUTPUT,
        "sum": ReaderKind.SUM,
        "shift": ReaderKind.OP,
        "t": ReaderKind.OP,
        "u": ReaderKind.OP,
        "m": ReaderKind.OP,
    }
    assert [(s.node, s.part) for s in found["cat:0"].path] == [("pool", -1), ("cat", 1)]
    assert ([s.node for s in found["p.Q"].path], found["p.Q"].scale) == (
        ["pool"],
        float(np.float32(0.3)),
    )
    direct = {r.node: r.kind for r in readers_of(layer(network, "e").out, through=False)}
    assert direct == {"t": ReaderKind.OP, "pool": ReaderKind.OP, "m": ReaderKind.OP}
    g = Graph()
    y = g.op(
        "Softmax", g.op("LRN", g.op("Exp", g.input(1, 4, 5, 5), "e"), "reader", size=3), "s", axis=1
    )
    network = network_of(g, g.conv(y, "c", 1, 3, scale=None, weights="float"))
    assert readers_of(layer(network, "e").out)[0].feeds_weighted is True


@pytest.mark.parametrize("count", [20, 60, 120])
def test_what_a_q_could_pass_is_no_reader_because_nobody_looked_behind_it(
    g: Graph, count: int
) -> None:
    """Each Concat takes the one before, and a Q reads each: none of them reads float, however many there are."""
    last = g.op("Exp", g.input(1, 8, 4, 4), "e")
    outputs = []
    for i in range(count):
        last = g.concat([last, g.input(1, 8, 4, 4, name=f"x{i}")], f"cat{i}")
        outputs.append(g.op("Neg", g.pair(last, f"p{i}"), f"n{i}"))
    found = readers_of(layer(network_of(g, *outputs), "e").out)
    assert len(found) > 15 and {r.kind for r in found} == {ReaderKind.Q}


def test_a_list_of_readers_says_that_it_is_cut(g: Graph) -> None:
    """Of 130 readers 100 are listed; behind 110 poolings nobody looks; and the words say so. 90 are all there are."""
    x = g.op("Exp", g.input(1, 8, 4, 4), "e")
    network = network_of(g, *(g.op("Neg", x, f"n{i}") for i in range(130)))
    many = readers_of(layer(network, "e").out)
    assert (len(many), many.more) == (100, "e:0")
    assert readers_words(many) == (
        "n0 (Neg), n1 (Neg), n2 (Neg) and 97 more read it as float (and others behind e:0, which were not looked at)"
    )
    assert pickle.loads(pickle.dumps(many)).more == "e:0"
    g = Graph()
    x = g.op("Exp", g.input(1, 8, 4, 4), "e")
    few = readers_of(layer(network_of(g, *(g.op("Neg", x, f"n{i}") for i in range(90))), "e").out)
    assert (len(few), few.more, others_words(few)) == (90, "", "")
    for others in (0, 1):
        g = Graph()
        x = last = g.op("Exp", g.input(1, 8, 4, 4), "e")
        for i in range(110):
            last = g.pool(last, f"pool{i}")
        network = network_of(
            g, g.op("Neg", last, "far"), *(g.op("Neg", x, f"near{i}") for i in range(others))
        )
        found = readers_of(layer(network, "e").out)
        behind = found.more
        assert behind.startswith("pool") and [r.node for r in found] == [
            "near0" if others else behind
        ]
        assert readers_words(found) == (
            f"near0 (Neg) reads it as float (and others behind {behind}, which were not looked at)"
            if others
            else f"what reads it is behind {behind} and was not looked at"
        )


@pytest.mark.parametrize(
    ("behind", "feeds"),
    [
        ("quantized", True),
        ("float", True),
        ("nothing", False),
        ("dfl", False),
        ("wide dfl", True),
        ("no softmax", True),
        ("far dfl", False),
        ("computed between", True),
    ],
)
def test_whether_a_convolution_lies_behind(g: Graph, behind: str, feeds: bool) -> None:
    """YOLO's distribution focal loss, a 1x1 convolution to one channel behind a Softmax, is none."""
    x = g.op("Exp", g.input(1, 4, 5, 5), "e")
    y = g.op("LRN", x, "reader", size=3)
    if behind in ("quantized", "float"):
        y = g.conv(
            g.op("Tanh", y, "t"),
            "c",
            **({} if behind == "quantized" else {"scale": None, "weights": "float"}),
        )
    elif behind != "nothing":
        y = y if behind == "no softmax" else g.op("Softmax", y, "s", axis=1)
        for i in range({"far dfl": 20}.get(behind, 0)):
            y = g.op("Transpose", y, f"l{i}", perm=[0, 1, 3, 2])
        y = g.op("LRN", y, "between", size=3) if behind == "computed between" else y
        bins = np.tile(np.arange(4, dtype=np.float32), 2 if behind == "wide dfl" else 1).reshape(
            -1, 4, 1, 1
        )
        y = g.op("Conv", [y, g.const("bins", bins)], "c")
    network = network_of(g, g.op("Neg", y, "end"))
    (reader,) = readers_of(layer(network, "e").out)
    assert (reader.node, reader.feeds_weighted) == ("reader", feeds)


def test_origins_and_scales(g: Graph) -> None:
    """Exporters write equal weights once: a BatchNormalization without training has its bias as mean as well."""
    one, zero = (g.const(n, np.full(8, v, np.float32)) for n, v in (("weight", 1), ("bias", 0)))
    mean, variance = g.op("Identity", zero, "mean"), g.op("Identity", one, "variance")
    y = g.op(
        "BatchNormalization",
        [g.conv(g.input(1, 8, 4, 4), "c", k=1), one, zero, mean, variance],
        "bn",
    )
    assert qdqtool.predict(g.model(g.silu(y, "act"))).summary()["int8"] == 1
    g = Graph()
    x = g.op("Exp", g.input(1, 8, 4, 4), "e")
    network = network_of(
        g, *(g.op("Neg", g.pair(x, n, s), f"n{n}") for n, s in (("a", 0.1), ("b", 0.1), ("c", 0.2)))
    )
    a, b, c = readers_of(layer(network, "e").out)
    assert [differ(qs) for qs in ([a], [a, b], [a, c], [])] == [False, False, True, False]
    layer(network, "a.Q").computed_scale = True
    layer(network, "a.Q").quant = layer(network, "b.Q").quant = None
    a, b, c = readers_of(layer(network, "e").out)
    assert (a.scale, differ([a]), differ([a, b]), differ([a, c])) == (None, False, True, True)


@pytest.mark.parametrize(
    ("form", "node", "path", "quantizer", "convolution"),
    [
        ("input", "", [], "", ""),
        ("exp", "e", [], "", ""),
        ("pool", "e", ["pool"], "", ""),
        ("concat", "cat", [], "", ""),
        ("pair", "p.DQ", ["pool"], "p.Q", ""),
        ("conv", "c", ["pool"], "", "c"),
    ],
)
def test_where_a_tensor_comes_from(
    form: str, node: str, path: list[str], quantizer: str, convolution: str
) -> None:
    """Looked for past what a Q passes, up to a Concat; a DQ is told by the Q in front of it."""
    g = Graph()
    y = x = g.input(1, 8, 4, 4)
    if form in ("exp", "pool", "concat"):
        y = g.op("Exp", x, "e")
    if form == "pair":
        y = g.pair(g.op("Exp", x, "e"), "p", 0.3)
    if form == "conv":
        y = g.conv(x, "c")
    if form in ("pool", "pair", "conv"):
        y = g.pool(y, "pool")
    if form == "concat":
        y = g.concat([y, y], "cat")
    found = origin_of(layer(network_of(g, g.op("LRN", y, "end", size=3)), "end").data)
    assert (found.node, [s.node for s in found.path]) == (node, path)
    assert (found.quantizer, found.convolution) == (quantizer, convolution)
    assert found.scale == (float(np.float32(0.3)) if form == "pair" else None)


def test_whose_data_a_tensor_is(g: Graph) -> None:
    """Through DQs and what a Q passes, not through weights and what computes."""
    x = g.op("Exp", g.input(1, 8, 4, 4), "e")
    pooled = g.pool(g.pair(x, "p"), "pool")
    outputs = [
        g.conv(pooled, "a", scale=None),
        g.conv(g.op("Tanh", pooled, "t"), "b", scale=None),
        g.conv(x, "c"),
    ]
    network = network_of(g, *outputs)
    assert weighted_behind(layer(network, "p.Q").out) == ("a",)
    assert weighted_behind(layer(network, "e").out) == ()
    assert weighted_behind(layer(network, "a.w.Q").out) == ()
    g = Graph()
    x = g.op("Exp", g.input(1, 2, 4, 4), "e")
    network = network_of(g, g.op("Neg", g.pair(g.pair(x, "p", 0.5), "q", [0.5, 0.25], axis=1), "n"))
    told = scale_of(layer(network, "q.DQ"))
    assert scale_of(layer(network, "p.Q")) == 0.5
    assert isinstance(told, PerChannel) and (told.count, told.least, told.greatest) == (
        2,
        0.25,
        0.5,
    )
    assert scale_of(layer(network, "e")) is scale_of(None) is None
