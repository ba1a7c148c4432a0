"""Scales for every tensor of a float network: the rules, and precisions of layers."""

from typing import Any

import numpy as np
import onnx
import pytest

from qdqtool.insertion.calibration_cache import (
    LayerPrecisions,
    choose_precisions,
    complete_scales,
    format_precisions,
    list_float_tensors,
)
from qdqtool.ir.graph import Model
from tests.insertion.nets import Net


def rules_of(net: Net, known: dict[str, float], **options: bool) -> dict[str, tuple[str, float]]:
    result = complete_scales(net.index(), known, **options)
    return {t: (result.rules[t], result.scales[t]) for t in result.scales if t not in known}


def test_convolution_and_relu_share_the_scale_of_the_result() -> None:
    net = Net()
    net.output(net.op("Relu", "r", net.conv("c", "x")))
    assert rules_of(net, {"r.out": 0.5}) == {"c.out": ("clipped", 0.5)}


@pytest.mark.parametrize(
    ("add", "tensor", "rule"),
    [
        (lambda net, c: net.silu("s", c), "s/Mul.out", {"s/Sigmoid.out": ("fixed", 1 / 127)}),
        (
            lambda net, c: net.op("Relu", "r", net.norm("bn", c)),
            "r.out",
            {"bn.out": ("clipped", 0.5)},
        ),
    ],
    ids=["SiLU", "BatchNormalization and Relu"],
)
def test_scale_of_an_activation_does_not_reach_the_convolution(
    add: Any, tensor: str, rule: dict[str, tuple[str, float]]
) -> None:
    net = Net()
    net.output(add(net, net.conv("c", "x")))
    assert rules_of(net, {tensor: 0.5}) == rule
    assert complete_scales(net.index(), {tensor: 0.5}).missing == ["x", "c.out"]


def test_convolution_with_another_consumer_is_not_fused() -> None:
    net = Net()
    conv = net.conv("c", "x")
    net.output(net.op("Relu", "r", conv), conv)
    result = complete_scales(net.index(), {"x": 1.0, "r.out": 0.5})
    assert result.missing == ["c.out"]


def test_values_that_move_keep_their_scale_in_both_directions() -> None:
    net = Net()
    shape = net.const("shape", [1, -1], np.int64)
    pooled = net.op("MaxPool", "pool", "x", kernel_shape=[2, 2])
    turned = net.op("Transpose", "turn", pooled, perm=[0, 2, 3, 1])
    net.output(net.op("Reshape", "flat", turned, shape))
    for start in ("x", "flat.out"):
        others = rules_of(net, {start: 0.5})
        assert set(others.values()) == {("moved", 0.5)} and len(others) == 3


def test_concat_takes_the_largest_scale_and_gives_it_to_inputs_without_one() -> None:
    net = Net()
    a, b = net.op("Relu", "a", net.conv("ca", "x")), net.op("Relu", "b", net.conv("cb", "x"))
    net.output(net.op("Concat", "cat", a, b, axis=1))
    assert rules_of(net, {"a.out": 0.25, "b.out": 0.5})["cat.out"] == ("moved", 0.5)
    assert rules_of(net, {"cat.out": 0.5})["a.out"] == ("moved", 0.5)
    assert "cat.out" not in rules_of(net, {"a.out": 0.25})


def test_part_of_a_tensor_does_not_decide_about_the_whole() -> None:
    net = Net()
    first, second = net.op("Split", "s", net.conv("c", "x"), outputs=2, axis=1, num_outputs=2)
    net.output(net.op("Relu", "a", first), net.op("Relu", "b", second))
    model = Model(net.model(opset=18))
    one = complete_scales(model, {first: 0.5})
    assert "c.out" not in one.scales
    both = complete_scales(model, {first: 0.5, second: 0.75})
    assert (both.rules["c.out"], both.scales["c.out"]) == ("moved", 0.75)


def test_average_is_bounded_by_its_input_unless_the_result_is_known() -> None:
    net = Net()
    pooled = net.op("GlobalAveragePool", "pool", "x")
    net.output(net.op("Flatten", "flat", pooled))
    assert rules_of(net, {"x": 0.5}) == {
        "pool.out": ("bounded", 0.5),
        "flat.out": ("moved", 0.5),
    }
    assert rules_of(net, {"x": 0.5, "flat.out": 0.1}) == {"pool.out": ("moved", 0.1)}
    assert "x" not in rules_of(net, {"pool.out": 0.1})


def test_measured_scales_are_used_next_to_those_of_quantizers() -> None:
    net = Net()
    net.output(net.op("Relu", "r", net.conv("c", "x")))
    result = complete_scales(net.index(), {"r.out": 0.5}, {"x": 0.25, "r.out": 9.0, "no": 1.0})
    assert result.scales == {"x": 0.25, "c.out": 0.5, "r.out": 0.5}
    assert result.counts == {"measured": 1, "quantizer": 1, "clipped": 1}


def residual() -> Net:
    net = Net()
    return net.output(net.op("Add", "add", net.conv("c", "x"), "x"))


def test_convolution_before_an_add_gets_a_unary_scale_on_request() -> None:
    known = {"x": 0.25, "add.out": 0.5}
    assert complete_scales(residual().index(), known).missing == ["c.out"]
    assert rules_of(residual(), known, unary=True) == {"c.out": ("unary", 1.0)}
    # Without the scale of the result, the Add runs in float.
    assert rules_of(residual(), {"x": 0.25}, unary=True) == {}


def test_shapes_and_indices_are_no_float_tensors() -> None:
    net = Net()
    shape = net.op("Shape", "shape", "x")
    net.output(net.op("Reshape", "same", net.conv("c", "x"), shape))
    assert list_float_tensors(net.index()) == ["x", "c.out", "same.out"]


# Precisions of layers


def test_precisions_keep_quantized_and_float_layers() -> None:
    net = Net()
    first = net.op("Relu", "r", net.conv("c0", "x"))
    net.output(net.op("Relu", "rh", net.conv("head", first)), net.conv("last", first))
    model = net.index()
    scales = complete_scales(model, {"x": 1.0, "r.out": 0.5, "rh.out": 0.5})
    precisions = choose_precisions(model, scales, {"c0", "last"})
    # The head is float, with its activation; the last layer is INT8 and writes float.
    assert precisions.layers == {"c0": "int8", "head": "fp16", "rh": "fp16", "last": "int8"}
    assert precisions.outputs == {"head": "fp16", "rh": "fp16", "last": "fp16"}
    assert format_precisions(precisions) == [
        "--precisionConstraints=prefer",
        "--layerPrecisions=c0:int8,head:fp16,rh:fp16,last:int8",
        "--layerOutputTypes=head:fp16,rh:fp16,last:fp16",
    ]


def test_layer_without_a_scale_for_its_input_is_float() -> None:
    net = residual()
    model = net.index()
    precisions = choose_precisions(model, complete_scales(model, {}), {"c"})
    assert precisions.layers == {"c": "fp16", "add": "fp16"}


def test_nodes_without_a_name_are_named_by_their_output() -> None:
    precisions = choose_renamed("")
    assert precisions.layers == {"node_of_c.out": "fp16", "node_of_add.out": "fp16"}
    assert precisions.outputs == precisions.layers
    assert not precisions.unnamed


def test_nodes_that_share_a_name_cannot_be_set() -> None:
    precisions = choose_renamed("same")
    assert not precisions.layers and not precisions.outputs
    assert precisions.unnamed == ["c.out", "add.out"]


def choose_renamed(name: str) -> LayerPrecisions:
    """Return the precisions of a network whose nodes all have the same name."""
    proto = residual().model()
    for node in proto.graph.node:
        node.name = name
    model = Model(proto)
    return choose_precisions(model, complete_scales(model, {}), set())


def test_names_with_separators_are_quoted() -> None:
    precisions = LayerPrecisions({"a:0": "int8", "b": "fp16"})
    assert format_precisions(precisions)[1] == "--layerPrecisions='a:0':int8,b:fp16"
    assert format_precisions(LayerPrecisions()) == []


@pytest.mark.parametrize("length", [200, 400])
def test_long_chains_are_completed(length: int) -> None:
    net = Net()
    tensor = "x"
    for number in range(length):
        tensor = net.op("Identity", f"i{number}", tensor)
    model: onnx.ModelProto = net.output(tensor).model()
    assert not complete_scales(Model(model), {tensor: 1.0}).missing
    assert not complete_scales(Model(model), {"x": 1.0}).missing
