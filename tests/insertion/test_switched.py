"""Every run is compared with onnxruntime's of a model from which the pairs are taken out, by hand."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import qdqtool
from qdqtool.errors import ModelError
from qdqtool.insertion import switched
from qdqtool.insertion.losses import without_pair
from qdqtool.insertion.result import Insertion
from qdqtool.insertion.switched import SwitchedNetwork
from qdqtool.model.graph import Model
from tests.insertion.nets import Array, Net, detector, images, run
from tests.raising import raises


def test_a_network_that_onnxruntime_cannot_run_is_told_in_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    network = SwitchedNetwork(Model(mismatched()), [], [], ["y"], 1)
    with raises(ModelError, "Fetcher.run"):
        network.run({"x": np.zeros((1, 3, 8, 8), np.float32)}, [])
    said = capfd.readouterr()
    assert said.out == said.err == ""  # nothing of onnxruntime's own


def mismatched() -> onnx.ModelProto:
    """A convolution of four channels on an input that turns out to have three."""
    weights = numpy_helper.from_array(np.ones((4, 4, 1, 1), np.float32), "w")
    open_ = helper.make_tensor_value_info("x", 1, [1, "channels", 8, 8])
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"])],
        "g",
        [open_],
        [helper.make_tensor_value_info("y", 1, None)],
        [weights],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def branched() -> Net:
    """A residual block, a branch that is read again behind it, and a sequence that crosses what is switched there."""
    net = Net()
    first = net.op("Relu", "r0", net.conv("c0", "x"))
    pieces = net.op(
        "SplitToSequence", "pieces", first, net.const("eights", [8, 8], np.int64), axis=1
    )
    second = net.op("Relu", "r1", net.conv("c1", first))
    net.output(net.op("Sigmoid", "early", second))
    third = net.op("Relu", "r2", net.conv("c2", net.op("Add", "sum", second, first)))
    again = net.op("ConcatFromSequence", "again", pieces, axis=1)
    net.output(net.conv("c3", net.op("Concat", "both", third, again, axis=1), 32))
    return net


def detecting() -> tuple[Insertion, list[dict[str, Array]]]:
    data = images(2, 3, 64, "images")
    return qdqtool.insert(
        detector(), data, method="max", residual="both", losses=0, predict=False
    ), data


def branching() -> tuple[Insertion, list[dict[str, Array]]]:
    data = images(2)
    return qdqtool.insert(branched().open_model(), data, predict=False), data


def opened(
    made: Insertion, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[SwitchedNetwork, list[int]]:
    """With every stretch that is run noted by its number."""
    model = Model(made.model)
    entries = [a for a in made.activations if a.tensor in alone]
    network = SwitchedNetwork(model, made.activations, entries, model.outputs, 1)
    ran: list[int] = []
    plain = switched._Stretch.run
    numbers = {id(stretch): number for number, stretch in enumerate(network._stretches)}

    def noted(stretch: switched._Stretch, values: dict[str, Array]) -> dict[str, Array]:
        ran.append(numbers[id(stretch)])
        return plain(stretch, values)

    monkeypatch.setattr(switched._Stretch, "run", noted)
    return network, ran


def near(found: Array, wanted: Array) -> bool:
    """A value on the edge between two steps may be rounded the other way."""
    return bool(np.abs(found - wanted).mean() <= 1e-3 * max(float(wanted.std()), 1e-6))


# Of the four activations of the first two lie where the sequence crosses; every third of the second is a cut.
@pytest.mark.parametrize(("make", "expected"), [(branching, 2), (detecting, 8)])
def test_what_is_left_out_is_what_the_model_without_it_computes(
    make: Callable[[], tuple[Insertion, list[dict[str, Array]]]],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, data = make()
    alone = [a.tensor for a in made.activations][:: len(made.activations) // 8 or 1]
    network, ran = opened(made, alone, monkeypatch)
    stretches = len(network._stretches)
    assert stretches == expected
    sample, names = data[1], [v.name for v in made.model.graph.output]
    floats = made.model
    for entry in made.activations:
        floats = without_pair(Model(floats), entry).proto
    found = network.run(sample, [a.tensor for a in made.activations])
    assert list(found) == names and ran == list(range(stretches))
    assert all(near(found[t], w) for t, w in zip(names, run(floats, sample), strict=True))
    ran.clear()
    by_tensor = dict(network.runs(sample, [None, *alone]))
    begun = [n for n, before in zip(ran, [-1, *ran], strict=False) if n != before + 1]
    assert sorted(by_tensor, key=str) == sorted([None, *alone], key=str)
    assert len(ran) < (len(alone) + 1) * stretches and set(begun) >= set(range(1, stretches))
    whole = run(made.model, sample)
    moved = 0
    for tensor, outputs in by_tensor.items():
        entry = next((a for a in made.activations if a.tensor == tensor), None)
        wanted = (
            whole if entry is None else run(without_pair(Model(made.model), entry).proto, sample)
        )
        assert all(near(outputs[t], w) for t, w in zip(names, wanted, strict=True)), tensor
        moved += any(not near(v, w) for v, w in zip(wanted, whole, strict=True))
    assert moved > len(alone) // 3, "leaving one out makes a difference"


def test_a_run_begins_where_the_activation_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of four convolutions in a row: what is in front of it is run once, for all quantized."""
    net = Net()
    tensor = "x"
    for name in "abc":
        tensor = net.op("Relu", f"{name}/relu", net.conv(name, tensor))
    net.output(net.conv("d", tensor))
    made = qdqtool.insert(net.model(), images(1), predict=False)
    for left_out, wanted in (
        (["c/relu.out", None], [0, 1, 1]),
        (["c/relu.out"], [0, 1]),
        (["x", None], [0, 0]),
        ([None], [0]),
        ([], []),
        (["a/relu.out", "c/relu.out", None], [0, 1, 2, 1, 2, 2]),
        (["a/relu.out", "c/relu.out"], [0, 1, 2, 1, 2]),
    ):
        network, ran = opened(made, [t for t in left_out if t], monkeypatch)
        assert [t for t, _ in network.runs(images(1)[0], left_out)] == left_out
        assert ran == wanted
        monkeypatch.undo()
