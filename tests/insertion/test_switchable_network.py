from collections.abc import Callable

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.errors import ModelError
from qdqtool.insertion.result import Insertion
from qdqtool.insertion.switchable_network import SwitchableNetwork
from qdqtool.ir.graph import Model
from tests.insertion.nets import Array, Net, detector, images, remove_pairs, run


def test_error_of_onnxruntime_is_one_line(capfd: pytest.CaptureFixture[str], net: Net) -> None:
    net.inputs[0] = onnx.helper.make_tensor_value_info("x", 1, [1, "channels", 8, 8])
    mismatched = net.output(net.conv("c", "x", 4, 4)).open_model()
    network = SwitchableNetwork(Model(mismatched), [], ["c.out"], 1)
    with pytest.raises(ModelError) as caught:
        network.run({"x": np.zeros((1, 3, 8, 8), np.float32)})
    assert str(caught.value).isprintable()
    assert capfd.readouterr() == ("", "")  # onnxruntime prints nothing itself


def insert_detector() -> tuple[Insertion, list[dict[str, Array]]]:
    data = images(2, 3, 64, "images")
    options = {"method": "max", "residual": "both", "losses": 0, "predict": False}
    return qdqtool.insert(detector(), data, **options), data


def insert_branches() -> tuple[Insertion, list[dict[str, Array]]]:
    net, data = Net(), images(2)
    first = net.op("Relu", "r0", net.conv("c0", "x"))
    pieces = net.op(
        "SplitToSequence", "pieces", first, net.const("eights", [8, 8], np.int64), axis=1
    )
    second = net.op("Relu", "r1", net.conv("c1", first))
    third = net.op("Relu", "r2", net.conv("c2", net.op("Add", "sum", second, first)))
    again = net.op("ConcatFromSequence", "again", pieces, axis=1)
    last = net.conv("c3", net.op("Concat", "both", third, again, axis=1), 32)
    return qdqtool.insert(
        net.output(net.op("Sigmoid", "early", second), last).open_model(), data, predict=False
    ), data


def all_near(outputs: dict[str, Array], expected: list[Array]) -> bool:
    """Compare means, since a value between two integer steps may be rounded either way."""
    return all(
        np.abs(o - e).mean() <= 1e-3 * max(float(e.std()), 1e-6)
        for o, e in zip(outputs.values(), expected, strict=True)
    )


@pytest.mark.parametrize("make", [insert_branches, insert_detector])
def test_outputs_equal_those_of_models_without_pairs(
    make: Callable[[], tuple[Insertion, list[dict[str, Array]]]],
) -> None:
    result, (_, sample) = make()
    network = SwitchableNetwork(
        Model(result.model), result.activations, [v.name for v in result.model.graph.output], 1
    )
    quantized = run(result.model, sample)
    assert all_near(network.run(sample), quantized)
    outputs = network.run(sample, [entry.tensor for entry in result.activations])
    assert all_near(outputs, run(remove_pairs(result.model, *result.activations), sample))
    differs = 0
    entries = result.activations[:: len(result.activations) // 8 or 1]
    for entry in entries:
        outputs = network.run(sample, [entry.tensor])
        assert all_near(outputs, run(remove_pairs(result.model, entry), sample)), entry.tensor
        differs += not all_near(outputs, quantized)
    assert differs > len(entries) // 3, "leaving one out makes a difference"
