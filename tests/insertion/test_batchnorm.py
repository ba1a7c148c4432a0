from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from qdqtool.insertion.prepare import fold_batch_normalization, fold_leading
from qdqtool.model.graph import Model
from tests.insertion.nets import Net, images, run


def net(kernel: int) -> Net:
    made = Net()
    made.output(made.conv("c0", made.norm("norm", "x"), kernel=kernel))
    return made


def test_normalizations_in_front() -> None:
    proto = net(3).model()
    assert fold_leading(Model(proto)) == 0 and len(proto.graph.node) == 2
    made = net(1)
    made.output(made.op("Relu", "relu", "norm.out"))
    proto = made.model()
    assert fold_leading(Model(proto)) == 0
    made = net(1)
    made.output("norm.out")
    assert fold_leading(Model(made.model())) == 0
    made = Net()
    made.output(
        made.conv("c0", made.norm("n0", "x"), kernel=1),
        made.conv("c1", made.norm("n1", "x"), kernel=1, weight="c0.weight"),
    )
    proto = made.model()
    before = run(proto, images(1)[0])
    assert fold_leading(Model(proto)) == 2 and [n.op_type for n in proto.graph.node] == [
        "Conv",
        "Conv",
    ]
    for old, new in zip(before, run(proto, images(1)[0]), strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=5e-5)


def leading(
    cin: int, *, weight: tuple[int, ...], shift: bool = True, **attributes: Any
) -> onnx.ModelProto:
    """A normalization and a convolution with these weights and no more attributes than given."""
    made = Net(channels=cin)
    normed = made.norm("n", "x", cin)
    if not shift:
        for tensor in made.initializers:
            if tensor.name in ("n.beta", "n.mean"):
                tensor.raw_data = bytes(len(tensor.raw_data))
    data = normed
    if len(weight) == 3:
        made.inputs[0] = helper.make_tensor_value_info("x", 1, [1, cin, 64])
    made.output(
        made.op("Conv", "c", data, made.const("w", made.rng.standard_normal(weight)), **attributes)
    )
    return made.model()


SAME = {"auto_pad": "SAME_UPPER"}


@pytest.mark.parametrize(
    ("proto", "folds"),
    [
        (leading(16, weight=(24, 16, 1, 1)), True),
        (leading(16, weight=(24, 4, 2, 2), group=4), True),
        (leading(16, weight=(16, 1, 3, 3), group=16), True),
        (leading(16, weight=(24, 16, 3)), True),  # along one axis
        (leading(16, weight=(24, 16, 3, 3)), True),  # no padding is ONNX's default
        (leading(16, weight=(24, 16, 3, 3), pads=[0, 0, 0, 0]), True),
        (leading(16, weight=(24, 16, 3, 3), pads=[0, 0, 0, 1]), False),
        (leading(16, weight=(24, 16, 3, 3), pads=[0, 0, 0, 1], shift=False), True),
        (leading(16, weight=(24, 16, 3, 3), auto_pad="VALID"), True),
        (leading(16, weight=(24, 16, 3, 3), auto_pad="NOTSET"), True),
        (leading(16, weight=(24, 16, 3, 3), **SAME), False),
        (leading(16, weight=(24, 16, 3, 3), **SAME, shift=False), True),
    ],
)
def test_a_normalization_in_front_is_folded_where_nothing_is_padded_or_nothing_shifted(
    proto: onnx.ModelProto, folds: bool
) -> None:
    dims = [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(1).standard_normal(dims).astype(np.float32)
    before = run(proto, {"x": x})[0]
    assert fold_leading(Model(proto)) == folds
    assert (
        [n.op_type for n in proto.graph.node] == ["Conv"]
        if folds
        else ["BatchNormalization", "Conv"]
    )
    np.testing.assert_allclose(run(proto, {"x": x})[0], before, rtol=0, atol=5e-5)


def changed(kind: str) -> onnx.ModelProto:
    """A normalization between two convolutions, with something about it that forbids to fold it into either."""
    made = Net()
    normed = made.norm("n", made.conv("a", "x", kernel=1, bias=False))
    made.output(made.conv("b", normed, kernel=1))
    proto = made.model()
    first, norm, second = proto.graph.node
    values = {t.name: t for t in proto.graph.initializer}

    def compute(node: onnx.NodeProto, position: int) -> None:
        made = helper.make_node("Cos", [node.input[position]], ["computed"], "cos")
        node.input[position] = "computed"
        proto.graph.node.insert(0, made)

    if kind == "training":
        norm.attribute.append(helper.make_attribute("training_mode", 1))
    elif kind == "second output":
        norm.output.append("running_mean")
    elif kind == "other domain":
        first.domain = second.domain = "example"
    elif kind == "not a number":
        values["n.var"].CopyFrom(numpy_helper.from_array(np.full(16, -1.0, np.float32), "n.var"))
    elif kind == "infinite":
        values["n.beta"].CopyFrom(
            numpy_helper.from_array(np.full(16, np.inf, np.float32), "n.beta")
        )
    elif kind == "is an output":
        proto.graph.output.extend(
            [helper.make_empty_tensor_value_info(t) for t in (norm.output[0], first.output[0])]
        )
    elif kind == "read elsewhere":
        proto.graph.node.extend(
            helper.make_node("Cos", [n.output[0]], [f"{n.name}.cos"], f"{n.name}/cos")
            for n in (first, norm)
        )
        proto.graph.output.extend([helper.make_empty_tensor_value_info(f"{n}.cos") for n in "an"])
    elif kind == "parameters missing":
        del norm.input[4]
    else:
        compute(norm, ["gamma", "beta", "mean", "var"].index(kind) + 1)
    return proto


COMPUTED = ["gamma", "beta", "mean", "var"]


@pytest.mark.parametrize(
    "kind",
    [
        "training",
        "second output",
        "other domain",
        "is an output",
        "read elsewhere",
        "parameters missing",
        *COMPUTED,
    ],
)
@pytest.mark.parametrize("fold", [fold_batch_normalization, fold_leading])
def test_what_cannot_be_folded_stays_as_it_is(kind: str, fold: Callable[[Model], int]) -> None:
    proto = changed(kind)
    before = proto.SerializeToString()
    assert fold(Model(proto)) == 0
    assert proto.SerializeToString() == before


@pytest.mark.parametrize("kind", ["not a number", "infinite"])
def test_a_normalization_that_is_not_finite_goes_into_the_convolution_behind_which_it_is_found(
    kind: str,
) -> None:
    """The weights or the bias are named with it when they are quantized; in front of a convolution it stays."""
    assert fold_leading(Model(changed(kind))) == 0
    proto = changed(kind)
    assert fold_batch_normalization(Model(proto)) == 1
    folded = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    assert np.isnan(folded["a.weight_folded"]).all() == (kind == "not a number")
    assert not np.isfinite(folded["a.weight_folded_bias"]).any()


@pytest.mark.parametrize(
    ("weight", "group", "channels"),
    [
        ((16, 16), 1, 16),  # no convolution has weights of two dimensions
        ((16, 16, 1, 1), 1, 8),  # a factor for half of the channels
        ((16, 8, 1, 1), 1, 16),
        ((15, 4, 1, 1), 4, 16),  # outputs that the groups cannot share
    ],
)
def test_damaged_convolutions_behind_a_normalization_are_left_to_whoever_runs_them(
    weight: tuple[int, ...], group: int, channels: int
) -> None:
    made = Net()
    made.output(
        made.op(
            "Conv",
            "c",
            made.norm("n", "x", channels),
            made.const("w", np.ones(weight)),
            group=group,
        )
    )
    assert fold_leading(Model(made.open_model())) == 0


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
def test_parameters_that_do_not_fit_a_convolution_are_left_to_whoever_runs_them(
    name: str, value: np.ndarray
) -> None:
    made = Net()
    made.output(made.norm("n", made.conv("a", "x", kernel=1)))
    proto = made.model()
    next(t for t in proto.graph.initializer if t.name == name).CopyFrom(
        numpy_helper.from_array(value, name)
    )
    before = proto.SerializeToString()
    assert fold_batch_normalization(Model(proto)) == 0 and proto.SerializeToString() == before


@pytest.mark.parametrize(("group", "channels"), [(0, 16), (-2, 16), (3, 48)])
def test_groups_that_transposed_weights_cannot_have(group: int, channels: int) -> None:
    made = Net()
    weight = made.const("w", np.ones((16, 16, 1, 1)))
    made.output(made.norm("n", made.op("ConvTranspose", "a", "x", weight, group=group), channels))
    assert fold_batch_normalization(Model(made.open_model())) == 0


def test_computed_weights_and_biases_stay() -> None:
    for position in (1, 2):
        for fold, at in ((fold_batch_normalization, 0), (fold_leading, 2)):
            made = Net()
            made.output(made.conv("b", made.norm("n", made.conv("a", "x", kernel=1)), kernel=1))
            proto = made.model()
            conv = proto.graph.node[at]
            proto.graph.node.insert(
                0, helper.make_node("Cos", [conv.input[position]], ["computed"], "cos")
            )
            proto.graph.node[at + 1].input[position] = "computed"
            assert fold(Model(proto)) == 0


def test_what_is_no_normalization_to_fold() -> None:
    made = Net()
    made.output(made.op("Relu", "r", made.norm("n", "x")), made.conv("c", "x"))
    made.norm("dead", "c.out")
    made.norm("dead2", "x")
    proto = made.model()
    assert fold_leading(Model(proto)) == 0
    assert len(proto.graph.node) == 5
    assert (
        fold_batch_normalization(Model(proto)) == 0
    )  # the convolution's result leaves the network as well
    made = Net(channels=1)
    bounds = [
        made.const(n, [v], np.int64)
        for n, v in (("starts", 1), ("ends", 8), ("axes", 3), ("steps", 2))
    ]
    made.output(
        made.op("Slice", "s", made.conv("c", made.op("Slice", "t", "x", *bounds), 1, 4, 1), *bounds)
    )
    assert fold_leading(Model(made.model())) == 0
    assert fold_batch_normalization(Model(made.model())) == 0


@pytest.mark.parametrize(
    ("cin", "weight", "attributes"),
    [
        (16, (24, 16, 3), {}),
        (16, (16, 24, 2, 2), {"transposed": True}),
        (16, (16, 6, 2, 2), {"transposed": True, "group": 4}),
        (8, (8, 3, 2), {"transposed": True, "group": 2}),
    ],
)
def test_a_normalization_behind_is_folded_along_the_outputs(
    cin: int, weight: tuple[int, ...], attributes: dict[str, Any]
) -> None:
    made = Net(channels=cin)
    if len(weight) == 3:
        made.inputs[0] = helper.make_tensor_value_info("x", 1, [1, cin, 64])
    transposed = attributes.pop("transposed", False)
    outputs = weight[1] * attributes.get("group", 1) if transposed else weight[0]
    data = made.const("w", made.rng.standard_normal(weight))
    conv = made.op("ConvTranspose" if transposed else "Conv", "c", "x", data, **attributes)
    made.output(made.norm("n", conv, outputs))
    proto = made.model()
    dims = [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(1).standard_normal(dims).astype(np.float32)
    before = run(proto, {"x": x})[0]
    assert fold_batch_normalization(Model(proto)) == 1 and len(proto.graph.node) == 1
    np.testing.assert_allclose(run(proto, {"x": x})[0], before, rtol=0, atol=5e-5)
