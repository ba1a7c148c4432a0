from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from qdqtool.insertion.batchnorm import fold_batch_normalization, fold_leading_batch_normalization
from qdqtool.ir.graph import Model
from tests.insertion.nets import (
    Net,
    assert_same_outputs,
    copy_model,
    nodes_of,
    operators,
    set_value,
    value_of,
)


def fold_and_compare(proto: onnx.ModelProto, fold: Callable[[Model], int]) -> int:
    dims = [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
    feeds = {"x": np.random.default_rng(1).standard_normal(dims).astype(np.float32)}
    before = copy_model(proto)
    count = fold(Model(proto))  # in place
    assert_same_outputs(before, proto, feeds, rtol=0, atol=5e-5)
    return count


def test_fold_leading_with_shared_weights(net: Net) -> None:
    proto = net.output(
        net.conv("c0", net.norm("n0", "x"), kernel=1),
        net.conv("c1", net.norm("n1", "x"), kernel=1, weight="c0.weight"),
    ).model()
    assert fold_and_compare(proto, fold_leading_batch_normalization) == 2 and operators(proto) == [
        "Conv",
        "Conv",
    ]


def leading_norm(
    cin: int, *, weight: tuple[int, ...], shift: bool = True, **attributes: Any
) -> onnx.ModelProto:
    net = Net(channels=cin)
    if len(weight) == 3:
        net.inputs[0] = onnx.helper.make_tensor_value_info("x", 1, [1, cin, 64])
    normed, weights = net.norm("n", "x", cin), net.const("w", net.rng.standard_normal(weight))
    model = net.output(net.op("Conv", "c", normed, weights, **attributes)).model()
    for name in () if shift else ("n.beta", "n.mean"):
        set_value(model, name, np.zeros(cin, np.float32))
    return model


SAME = {"auto_pad": "SAME_UPPER"}


@pytest.mark.parametrize(
    ("proto", "folds"),
    [
        (leading_norm(16, weight=(24, 16, 1, 1)), True),
        (leading_norm(16, weight=(24, 4, 2, 2), group=4), True),
        (leading_norm(16, weight=(16, 1, 3, 3), group=16), True),
        (leading_norm(16, weight=(24, 16, 3)), True),  # along one axis
        (leading_norm(16, weight=(24, 16, 3, 3)), True),  # no padding is ONNX's default
        (leading_norm(16, weight=(24, 16, 3, 3), pads=[0, 0, 0, 0]), True),
        (leading_norm(16, weight=(24, 16, 3, 3), pads=[0, 0, 0, 1]), False),
        (leading_norm(16, weight=(24, 16, 3, 3), pads=[0, 0, 0, 1], shift=False), True),
        (leading_norm(16, weight=(24, 16, 3, 3), auto_pad="VALID"), True),
        (leading_norm(16, weight=(24, 16, 3, 3), auto_pad="NOTSET"), True),
        (leading_norm(16, weight=(24, 16, 3, 3), **SAME), False),
        (leading_norm(16, weight=(24, 16, 3, 3), **SAME, shift=False), True),
    ],
)
def test_fold_leading_needs_no_padding_or_no_shift(proto: onnx.ModelProto, folds: bool) -> None:
    assert fold_and_compare(proto, fold_leading_batch_normalization) == folds
    assert operators(proto) == ["BatchNormalization"] * (not folds) + ["Conv"]


def compute_input(proto: onnx.ModelProto, op: str, position: int) -> None:
    for node in nodes_of(proto, op):
        computed = f"{node.name}.computed"
        cos = onnx.helper.make_node("Cos", [node.input[position]], [computed], f"{node.name}/cos")
        node.input[position] = computed
        proto.graph.node.insert(0, cos)


def norm_between_convolutions(bias: bool = True) -> onnx.ModelProto:
    net = Net()
    normed = net.norm("n", net.conv("a", "x", kernel=1, bias=bias))
    return net.output(net.conv("b", normed, kernel=1)).model()


def move_to_other_domain(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        if node.op_type == "Conv":
            node.domain = "example"


def add_consumers(proto: onnx.ModelProto) -> None:
    for name in "an":
        cos = onnx.helper.make_node("Cos", [f"{name}.out"], [f"{name}.cos"], f"{name}/cos")
        proto.graph.node.append(cos)
        proto.graph.output.append(onnx.helper.make_empty_tensor_value_info(f"{name}.cos"))


# Changes of `norm_between_convolutions` that prevent folding. Its nodes are a, n and b.
UNSUITABLE: dict[str, Callable[[onnx.ModelProto], object]] = {
    "training": lambda proto: proto.graph.node[1].attribute.append(
        onnx.helper.make_attribute("training_mode", 1)
    ),
    "second output": lambda proto: proto.graph.node[1].output.append("running_mean"),
    "other domain": move_to_other_domain,
    "is an output": lambda proto: proto.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(f"{name}.out") for name in "an"
    ),
    "other consumers": add_consumers,
    "parameter missing": lambda proto: proto.graph.node[1].input.pop(),
    "computed gamma": lambda proto: compute_input(proto, "BatchNormalization", 1),
    "computed beta": lambda proto: compute_input(proto, "BatchNormalization", 2),
    "computed mean": lambda proto: compute_input(proto, "BatchNormalization", 3),
    "computed variance": lambda proto: compute_input(proto, "BatchNormalization", 4),
    "computed weights": lambda proto: compute_input(proto, "Conv", 1),
    "computed bias": lambda proto: compute_input(proto, "Conv", 2),
}


@pytest.mark.parametrize("change", UNSUITABLE.values(), ids=UNSUITABLE)
@pytest.mark.parametrize("fold", [fold_batch_normalization, fold_leading_batch_normalization])
def test_unsuitable_normalization_is_not_folded(
    change: Callable[[onnx.ModelProto], object], fold: Callable[[Model], int]
) -> None:
    proto = norm_between_convolutions()
    change(proto)
    before = proto.SerializeToString()
    assert fold(Model(proto)) == 0 and proto.SerializeToString() == before


@pytest.mark.parametrize(("name", "value"), [("n.var", -1.0), ("n.beta", np.inf)])
def test_normalization_that_is_not_finite_is_folded_into_convolution_before_it(
    name: str, value: float
) -> None:
    """Quantization then rejects the weights or the bias by name.

    A normalization before a convolution is not folded.
    """
    proto = norm_between_convolutions(bias=False)
    set_value(proto, name, np.full(16, value, np.float32))
    assert fold_leading_batch_normalization(Model(copy_model(proto))) == 0
    assert fold_batch_normalization(Model(proto)) == 1
    assert np.isnan(value_of(proto, "a.weight_folded")).all() == (name == "n.var")
    assert not np.isfinite(value_of(proto, "a.weight_folded_bias")).any()


@pytest.mark.parametrize(
    ("weight", "group", "channels"),
    [
        ((16, 16), 1, 16),  # no convolution has weights of two dimensions
        ((16, 16, 1, 1), 1, 8),  # a factor for half of the channels
        ((16, 8, 1, 1), 1, 16),
        ((15, 4, 1, 1), 4, 16),  # the groups cannot share the outputs
    ],
)
def test_fold_leading_leaves_damaged_convolutions(
    weight: tuple[int, ...], group: int, channels: int, net: Net
) -> None:
    normed, weights = net.norm("n", "x", channels), net.const("w", np.ones(weight))
    model = net.output(net.op("Conv", "c", normed, weights, group=group)).open_model()
    assert fold_leading_batch_normalization(Model(model)) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n.gamma", np.ones(3, np.float32)),
        ("n.mean", np.ones((2, 8), np.float32)),
        ("n.var", np.ones((), np.float32)),
        ("n.beta", np.array([b"a"] * 16, object)),
        ("a.bias", np.ones(3, np.float32)),
        ("a.weight", np.ones((16, 16), np.float32)),
        ("a.weight", np.array([b"a"], object).reshape(1, 1, 1, 1)),
    ],
)
def test_fold_leaves_parameters_that_do_not_fit(net: Net, name: str, value: np.ndarray) -> None:
    proto = net.output(net.norm("n", net.conv("a", "x", kernel=1))).model()
    set_value(proto, name, value)
    before = proto.SerializeToString()
    assert fold_batch_normalization(Model(proto)) == 0 and proto.SerializeToString() == before


@pytest.mark.parametrize(("group", "channels"), [(0, 16), (-2, 16), (3, 48)])
def test_fold_leaves_impossible_groups_of_transposed_weights(
    group: int, channels: int, net: Net
) -> None:
    weight = net.const("w", np.ones((16, 16, 1, 1)))
    transposed = net.op("ConvTranspose", "a", "x", weight, group=group)
    model = net.output(net.norm("n", transposed, channels)).open_model()
    assert fold_batch_normalization(Model(model)) == 0


@pytest.mark.parametrize("fold", [fold_batch_normalization, fold_leading_batch_normalization])
def test_fold_leaves_normalization_without_convolution_next_to_it(
    net: Net, fold: Callable[[Model], int]
) -> None:
    """A normalization is left before a ReLU, after the input, and after a convolution output."""
    net.output(net.op("Relu", "r", net.norm("n", "x")), net.conv("c", "x"))
    net.norm("dead", "c.out")
    net.norm("dead2", "x")
    proto = net.model()
    assert fold(Model(proto)) == 0 and len(proto.graph.node) == 5


@pytest.mark.parametrize("fold", [fold_batch_normalization, fold_leading_batch_normalization])
def test_fold_leaves_network_without_normalization(fold: Callable[[Model], int]) -> None:
    net, values = Net(channels=1), {"starts": 1, "ends": 8, "axes": 3, "steps": 2}
    bounds = [net.const(name, [value], np.int64) for name, value in values.items()]
    cut = net.conv("c", net.op("Slice", "t", "x", *bounds), 1, 4, 1)
    assert fold(Model(net.output(net.op("Slice", "s", cut, *bounds)).model())) == 0


@pytest.mark.parametrize(
    ("op", "cin", "weight", "group", "outputs"),
    [
        ("Conv", 16, (24, 16, 3), 1, 24),
        ("ConvTranspose", 16, (16, 24, 2, 2), 1, 24),
        ("ConvTranspose", 16, (16, 6, 2, 2), 4, 24),
        ("ConvTranspose", 8, (8, 3, 2), 2, 6),
    ],
)
def test_fold_along_output_channels(
    op: str, cin: int, weight: tuple[int, ...], group: int, outputs: int
) -> None:
    net = Net(channels=cin)
    if len(weight) == 3:
        net.inputs[0] = onnx.helper.make_tensor_value_info("x", 1, [1, cin, 64])
    weights = net.const("w", net.rng.standard_normal(weight))
    proto = net.output(net.norm("n", net.op(op, "c", "x", weights, group=group), outputs)).model()
    assert fold_and_compare(proto, fold_batch_normalization) == 1 and operators(proto) == [op]
