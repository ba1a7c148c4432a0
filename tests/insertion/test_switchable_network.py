"""Runs with float activations, compared with onnxruntime on models without these Q/DQ pairs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from onnx import helper

import qdqtool
from qdqtool.errors import ModelError
from qdqtool.insertion.losses import remove_pair
from qdqtool.insertion.result import Insertion
from qdqtool.insertion.rewrite import QuantizedTensor
from qdqtool.insertion.switchable_network import NetworkSegment, SwitchableNetwork
from qdqtool.ir.graph import Model
from tests.insertion.nets import Array, Net, chain, detector, images, run


def test_error_of_onnxruntime_is_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    network = SwitchableNetwork(Model(mismatched_network()), [], [], ["c.out"], 1)
    with pytest.raises(ModelError) as caught:
        network.run({"x": np.zeros((1, 3, 8, 8), np.float32)}, [])
    assert str(caught.value).isprintable()
    assert capfd.readouterr() == ("", "")  # onnxruntime prints nothing itself


def mismatched_network() -> onnx.ModelProto:
    """Return a convolution of four channels with an input of any number of channels."""
    net = Net()
    net.inputs[0] = helper.make_tensor_value_info("x", 1, [1, "channels", 8, 8])
    return net.output(net.conv("c", "x", 4, 4)).open_model()


def insert_detector() -> tuple[Insertion, list[dict[str, Array]]]:
    data = images(2, 3, 64, "images")
    options = {"method": "max", "residual": "both", "losses": 0, "predict": False}
    return qdqtool.insert(detector(), data, **options), data


def insert_branches() -> tuple[Insertion, list[dict[str, Array]]]:
    """Return a residual block whose input is used again after it, crossed by a sequence."""
    net, data = Net(), images(2)
    first = net.op("Relu", "r0", net.conv("c0", "x"))
    sizes = net.const("eights", [8, 8], np.int64)
    pieces = net.op("SplitToSequence", "pieces", first, sizes, axis=1)
    second = net.op("Relu", "r1", net.conv("c1", first))
    third = net.op("Relu", "r2", net.conv("c2", net.op("Add", "sum", second, first)))
    again = net.op("ConcatFromSequence", "again", pieces, axis=1)
    last = net.conv("c3", net.op("Concat", "both", third, again, axis=1), 32)
    model = net.output(net.op("Sigmoid", "early", second), last).open_model()
    return qdqtool.insert(model, data, predict=False), data


@dataclass(frozen=True)
class RecordedSegment(NetworkSegment):
    """Segment that notes its number when it runs."""

    number: int
    log: list[int]

    def run(self, values: dict[str, Array]) -> dict[str, Array]:
        self.log.append(self.number)
        return super().run(values)


def record_segments(
    result: Insertion, float_tensors: list[str]
) -> tuple[SwitchableNetwork, list[int]]:
    """Return a network with switches, and the numbers of the segments that it runs."""
    model = Model(result.model)
    entries = [a for a in result.activations if a.tensor in float_tensors]
    network = SwitchableNetwork(model, result.activations, entries, model.outputs, 1)
    log: list[int] = []
    network.segments = [
        RecordedSegment(segment.fetcher, segment.outputs, number, log)
        for number, segment in enumerate(network.segments)
    ]
    return network, log


def remove_pairs(model: onnx.ModelProto, *entries: QuantizedTensor) -> onnx.ModelProto:
    """Return the model without the Q/DQ pairs of some activations."""
    for entry in entries:
        model = remove_pair(Model(model), entry).proto
    return model


def near(actual: Array, expected: Array) -> bool:
    """Compare means, since a value between two integer steps may be rounded either way."""
    return bool(np.abs(actual - expected).mean() <= 1e-3 * max(float(expected.std()), 1e-6))


def all_near(outputs: dict[str, Array], expected: list[Array]) -> bool:
    return all(near(o, e) for o, e in zip(outputs.values(), expected, strict=True))


@pytest.mark.parametrize("make", [insert_branches, insert_detector])
def test_run_with_all_activations_float(
    make: Callable[[], tuple[Insertion, list[dict[str, Array]]]],
) -> None:
    result, (sample, *_) = make()
    tensors = [a.tensor for a in result.activations]
    network, log = record_segments(result, tensors)
    outputs = network.run(sample, tensors)
    assert list(outputs) == [v.name for v in result.model.graph.output]
    assert all_near(outputs, run(remove_pairs(result.model, *result.activations), sample))
    assert log == list(range(len(network.segments)))


# Two of the four activations of the first network lie where the sequence crosses and are no cuts;
# of the second network every third activation is a cut.
@pytest.mark.parametrize(("make", "segments"), [(insert_branches, 2), (insert_detector, 8)])
def test_run_without_activation_equals_model_without_pair(
    make: Callable[[], tuple[Insertion, list[dict[str, Array]]]], segments: int
) -> None:
    result, (_, sample) = make()
    entries = result.activations[:: len(result.activations) // 8 or 1]
    network, log = record_segments(result, [entry.tensor for entry in entries])
    assert len(network.segments) == segments
    outputs = dict(network.run_each(sample, [None, *(entry.tensor for entry in entries)]))
    assert len(log) < (len(entries) + 1) * segments
    begins = {n for n, previous in zip(log, [-1, *log], strict=False) if n != previous + 1}
    assert begins >= set(range(1, segments))
    whole = run(result.model, sample)
    assert all_near(outputs.pop(None), whole)
    expected = {entry.tensor: run(remove_pairs(result.model, entry), sample) for entry in entries}
    assert outputs.keys() == expected.keys()
    assert [t for t in expected if not all_near(outputs[t], expected[t])] == []
    moved = [t for t in expected if not all_near(outputs[t], whole)]
    assert len(moved) > len(entries) // 3, "leaving one out makes a difference"


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        (["c/relu.out", None], [0, 1, 1]),
        (["c/relu.out"], [0, 1]),
        (["x", None], [0, 0]),
        ([None], [0]),
        ([], []),
        (["a/relu.out", "c/relu.out", None], [0, 1, 2, 1, 2, 2]),
        (["a/relu.out", "c/relu.out"], [0, 1, 2, 1, 2]),
    ],
)
def test_run_begins_at_segment_of_activation(
    left_out: list[str | None], expected: list[int]
) -> None:
    """Segments before the activation run once, with all activations quantized."""
    result = qdqtool.insert(chain(), images(1), predict=False)
    network, log = record_segments(result, [t for t in left_out if t])
    assert [t for t, _ in network.run_each(images(1)[0], left_out)] == left_out
    assert log == expected
