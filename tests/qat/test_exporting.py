import contextlib
import copy
import functools
import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import qdqtool
from examples import resnet
from examples.resnet import ResNet18
from qdqtool import qat
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.model.graph import Model
from qdqtool.qat.modules import folded_later
from qdqtool.qat.trace import (
    Call,
    drop_marks,
    export_proto,
    fold_constants,
    merge_pairs,
    transpose_weights,
)
from qdqtool.testing import assert_int8
from tests.base.test_parameters import HALVES, NEVER_RIGHT, WRONG
from tests.insertion.nets import run
from tests.qat import nets
from tests.qat.backends import BACKENDS
from tests.raising import raises
from tests.slow import slow_after

X = torch.randn(2, 16, 16, 16, generator=torch.Generator().manual_seed(5))


def _ready(model: nn.Module, sample: torch.Tensor = X, **options: object) -> nn.Module:
    return nets.ready(nets.randomise(model), sample, **options)


def _run(path: Path, x: torch.Tensor) -> np.ndarray:
    proto = onnx.load(path)
    return run(proto, {proto.graph.input[0].name: x.numpy()})[0]


def _weights(path: Path, op: str) -> tuple[np.ndarray, np.ndarray]:
    """What the Q in front of the weights of the first node of an operator reads, where BatchNormalization is folded."""
    graph = onnx.load(path).graph
    assert "BatchNormalization" not in {n.op_type for n in graph.node}
    made = {o: n for n in graph.node for o in n.output}
    values = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    q = made[made[next(n for n in graph.node if n.op_type == op).input[1]].input[0]]
    return values[q.input[0]], values[q.input[1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_networks_run_as_planned(backend: str, tmp_path: Path) -> None:
    sample = torch.randn(2, 3, 64, 64)
    model = _ready(ResNet18(10, nets.WIDTH), sample, backend=backend)
    done = qat.export(model, tmp_path / "q.onnx", sample)
    assert done.summary == qdqtool.predict(tmp_path / "q.onnx", "trt8.5").summary()
    assert done.summary["int8"] == len(done.plan.convolutions) == 21
    assert done.summary["int8_to_int8"] == 20 and done.summary["conversions"] == 1
    assert_int8(done.path, "trt8.5", max_conversions=1)
    with torch.no_grad():
        wanted = model.eval()(sample).numpy()
    error = np.sqrt(np.mean((_run(tmp_path / "q.onnx", sample) - wanted) ** 2)) / wanted.std()
    assert error == pytest.approx(done.difference, rel=1e-3) and error < 0.05
    x = torch.randn(2, 5, 32)
    model = _ready(nets.Tokens(), x, backend=backend)
    done = qat.export(model, tmp_path / "q.onnx", x)
    assert done.summary["int8"] == 2
    assert "Transpose" not in {n.op_type for n in onnx.load(tmp_path / "q.onnx").graph.node}


def test_batch_normalization_is_folded_without_changing_an_integer(tmp_path: Path) -> None:
    model = nn.Sequential(nets.conv(bias=False), nn.BatchNorm2d(16), nn.ReLU(), nets.conv())
    _ready(model)
    with torch.no_grad():
        model[1].weight[3] = -0.7  # a channel with a negative factor, and one with none
        model[1].weight[4] = 0.0
    qat.export(model, tmp_path / "q.onnx", X)
    folded, scale = _weights(tmp_path / "q.onnx", "Conv")
    scale = scale.reshape(-1, 1, 1, 1)
    weight = model[0]._parameters["weight"].detach().numpy()
    trained = np.round(weight / (np.abs(weight).max((1, 2, 3), keepdims=True) / 127))
    factor = model[1].weight.detach().numpy()
    np.testing.assert_array_equal(
        np.round(folded / scale), trained * np.sign(factor).reshape(-1, 1, 1, 1)
    )
    with torch.no_grad():
        wanted = model.eval()(X).numpy()
    np.testing.assert_allclose(_run(tmp_path / "q.onnx", X), wanted, atol=0.02 * wanted.std())


def test_fixed_ranges_and_kept_results(tmp_path: Path) -> None:
    model = nn.Sequential(nets.conv(bias=False), nn.BatchNorm2d(16), nn.ReLU(), nets.conv())
    _ready(model)
    nets.max_calibrate(model, X)
    model[0]._weight_quantizer._amax.mul_(0.5)  # as if the weights had grown since
    done = qat.export(model, tmp_path / "q.onnx", X)
    with torch.no_grad():
        wanted = model.eval()(X).numpy()
    np.testing.assert_allclose(_run(tmp_path / "q.onnx", X), wanted, atol=0.02 * wanted.std())
    assert done.difference < 0.02
    model = _ready(Keeping())
    model.train()
    model(X).sum().backward()
    assert model.kept.pyramid[0].grad_fn is not None
    done = qat.export(model, tmp_path / "q.onnx", X)
    assert done.summary["int8"] == 2
    assert model.kept.pyramid[0].grad_fn is not None, "the network is left as it was"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions(backend: str, groups: int, tmp_path: Path) -> None:
    model = _ready(nets.UpAndDown(groups), backend=backend)
    done = qat.export(model, tmp_path / "q.onnx", X)
    assert done.summary["int8"] == 3
    assert done.difference < 0.02
    # One scale for all channels, and the trained integers are those of the weights with BatchNormalization folded in.
    stored, scale = _weights(tmp_path / "q.onnx", "ConvTranspose")
    factor = (model.bn.weight / (model.bn.running_var + model.bn.eps).sqrt()).detach().numpy()
    weight = model.up._parameters["weight"].detach().numpy()  # [in, out / groups, 2, 2]
    parts = zip(np.split(weight, groups), np.split(factor, groups), strict=True)
    folded = np.concatenate([part * f.reshape(1, -1, 1, 1) for part, f in parts])
    assert scale == pytest.approx(np.abs(folded).max() / 127, rel=1e-5)
    np.testing.assert_allclose(stored, folded, rtol=1e-5, atol=1e-7)


def test_a_transposed_convolution_trains_with_the_integers_that_are_exported(
    tmp_path: Path,
) -> None:
    model = _ready(nets.UpAndDown())
    with torch.no_grad():
        model.bn.weight[:3] = torch.tensor(
            [4.0, 0.0, -2.0]
        )  # factors far apart, one of them nothing
    with torch.no_grad():
        given = torch.relu(model.eval().down(X))
        seen = model.up(given)
    factor = (
        (model.bn.weight / (model.bn.running_var + model.bn.eps).sqrt())
        .detach()
        .reshape(1, -1, 1, 1)
    )
    folded = model.up._parameters["weight"].detach() * factor
    scale = folded.abs().max() / 127
    quantized = (folded / scale).round() * scale
    wanted = torch.nn.functional.conv_transpose2d(
        model.up._input_quantizer(given), quantized, stride=2
    )
    torch.testing.assert_close(seen * factor, wanted, rtol=1e-4, atol=1e-4)
    model.train()
    model(X).square().mean().backward()
    assert model.up._parameters["weight"].grad is not None
    copied = copy.deepcopy(model)
    copied.bn = (
        nn.Identity()
    )  # as if somebody had folded it: from here on the weights are quantized as they are
    assert folded_later(copied.up) is None and folded_later(model.up) is not None
    assert copied.up.qdq_norm[0] is copied and set(copied.state_dict()) < set(model.state_dict())


@pytest.mark.parametrize("net", [nets.Shared, nets.Skips, nets.Heads])
def test_other_networks_compute_the_same(net: type[nn.Module], tmp_path: Path) -> None:
    model = _ready(net())
    done = qat.export(model, tmp_path / "q.onnx", X)
    assert done.difference < 0.02
    assert done.summary["float"] == 0


@pytest.mark.parametrize("target", ["trt8.5", "trt10", "trt11"])
def test_layers_that_run_twice_have_weights_of_their_own(target: str, tmp_path: Path) -> None:
    """A DQ of shared weights reaches no product; convolutions that share theirs are named W-SHARED."""
    model = nets.ready(nets.Again(), X, target=target)
    found = qat.export(model, tmp_path / "q.onnx", X).prediction
    outcomes = [str(c.precision) for c in found.convolutions if c.weights != "computed"]
    assert (
        outcomes == ["INT8"] * len(outcomes) and len(outcomes) >= 7
    )  # 1, 2 attentions of 2 or more, 2
    assert not {"W-SHARED", "W-NO-DQ"} & {f.code for f in found.findings}


@pytest.fixture(scope="module")
def batches(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[nn.Module, dict[str, torch.Tensor], Path]:
    """A network in training, its state before the export, and its file for any batch."""
    sample, path = torch.randn(1, 3, 64, 64), tmp_path_factory.mktemp("export") / "q.onnx"
    model = _ready(ResNet18(10, nets.WIDTH), sample).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    qat.export(
        model, path, sample, input_names=["images"], output_names=["scores"], dynamic_batch=True
    )
    return model, before, path


def test_constants_pairs_and_names(
    batches: tuple[nn.Module, dict[str, torch.Tensor], Path],
) -> None:
    graph = onnx.load(batches[2]).graph
    assert [i.name for i in graph.input] == ["images"] and [o.name for o in graph.output] == [
        "scores"
    ]
    constants = {t.name for t in graph.initializer}
    pairs = [n for n in graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert all({n.input[1], n.input[2]} <= constants for n in pairs)
    assert not {"Constant", "Identity", "Cast"} & {n.op_type for n in graph.node}
    assert len({n.name for n in graph.node}) == len(graph.node)
    names = {n.name for n in graph.node}
    assert {
        "/layer1/layer1.0/conv1/Conv",
        "/layer1/layer1.0/conv2/_input_quantizer/QuantizeLinear",
    } <= names
    # Three places read the input of layer2.0: one pair serves both convolutions; the skip is the downsample's result.
    activations = [
        n for n in pairs if n.op_type == "QuantizeLinear" and n.input[0] not in constants
    ]
    assert len(activations) == len({n.input[0] for n in activations})
    assert _run(batches[2], torch.randn(3, 3, 64, 64)).shape == (3, 10)


def test_exports_of_the_same_network(
    batches: tuple[nn.Module, dict[str, torch.Tensor], Path],
) -> None:
    model, before, _ = batches
    assert model.training
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    model(torch.randn(2, 3, 64, 64)).sum().backward()


def test_refusals(tmp_path: Path) -> None:
    with raises(QdqtoolError, "plan_of"):
        qat.export(nets.conv(), tmp_path / "q.onnx", X)
    model = nets.prepared(nets.Shared(), X)
    with raises(QdqtoolError, "_exported first._input_quantizer"):
        qat.export(model, tmp_path / "q.onnx", X)
    qat.calibrate(model, [X])
    with pytest.raises(QdqtoolError, match="13 or newer"):
        qat.export(model, tmp_path / "q.onnx", X, opset=11)
    with pytest.raises(QdqtoolError):
        qat.export(model, tmp_path / "none" / "q.onnx", X)
    assert not list(tmp_path.iterdir())


def test_results_that_are_not_the_networks_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _ready(nets.Shared())
    import qdqtool.qat.exporting as room

    honest = room.weight_scale
    monkeypatch.setattr(room, "weight_scale", lambda weight, axis: honest(weight, axis) * 0.2)
    with pytest.raises(ModelError, match="nothing was written"):
        qat.export(model, tmp_path / "q.onnx", X)
    with pytest.warns(UserWarning, match="written"):
        qat.export(model, tmp_path / "q.onnx", X, tolerance=10.0)
    (tmp_path / "q.onnx").unlink()
    assert not list(tmp_path.iterdir())


class Kept:
    """What a network puts its last results into that is no module, as RAFT does."""

    def __init__(self) -> None:
        self.pyramid: list[torch.Tensor] = []


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nets.conv(), nets.conv()
        self.kept = Kept()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.one(x))
        self.kept.pyramid = [y]
        return self.two(y)


RNG = np.random.default_rng(0)


def _model(
    nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], outputs: list[str]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor_value_info(o, TensorProto.FLOAT, [2, None]) for o in outputs],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def _run_cleanup(model: onnx.ModelProto) -> list[np.ndarray]:
    return run(model, {"x": np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)})


def _pair(
    tensor: str, name: str, scale: str = "s", zero: str = "z", **axis: int
) -> list[onnx.NodeProto]:
    return [
        helper.make_node(
            "QuantizeLinear", [tensor, scale, zero], [f"{name}_q"], f"{name}/Q", **axis
        ),
        helper.make_node(
            "DequantizeLinear", [f"{name}_q", scale, zero], [f"{name}_dq"], f"{name}/DQ", **axis
        ),
    ]


def _ops(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


CONSTANTS = {"s": np.float32(0.05).reshape(()), "z": np.int8(0).reshape(())}


def _tidied(model: onnx.ModelProto, tidy: Callable[[Model], Model]) -> onnx.ModelProto:
    """The tidied graph, which computes the same."""
    found = tidy(Model(model).copy()).proto
    onnx.checker.check_model(found)
    for before, after in zip(_run_cleanup(model), _run_cleanup(found), strict=True):
        np.testing.assert_array_equal(before, after)
    return found


def test_graphs_are_cleaned() -> None:
    weight = RNG.normal(size=(3, 4)).astype(np.float32)
    nodes = [
        helper.make_node(
            "Constant", [], ["c"], "c", value=numpy_helper.from_array(np.zeros((), np.float32))
        ),
        helper.make_node("Cast", ["c"], ["z"], "cast", to=TensorProto.INT8),
        helper.make_node("Identity", ["w"], ["w2"], "identity"),
        helper.make_node("Transpose", ["w2"], ["wt"], "transpose", perm=[1, 0]),
        *_pair("x", "x"),
        helper.make_node("MatMul", ["x_dq", "wt"], ["y"], "product"),
    ]
    model = _model(nodes, {"w": weight, "s": CONSTANTS["s"]}, ["y"])
    assert _ops(_tidied(model, fold_constants)) == ["QuantizeLinear", "DequantizeLinear", "MatMul"]
    scales = (np.abs(weight).max(1) / 127).astype(np.float32)
    nodes = [
        *_pair("w", "w", "ws", "wz", axis=0),
        helper.make_node("Transpose", ["w_dq"], ["wt"], "transpose", perm=[1, 0]),
        helper.make_node("MatMul", ["x", "wt"], ["y"], "product"),
    ]
    model = _model(nodes, {"w": weight, "ws": scales, "wz": np.zeros(3, np.int8)}, ["y"])
    assert _ops(_tidied(model, transpose_weights)) == [
        "QuantizeLinear",
        "DequantizeLinear",
        "MatMul",
    ]
    model = _model([*_pair("x", "a"), *_pair("x", "b")], CONSTANTS, ["a_dq", "b_dq"])
    assert _ops(_tidied(model, merge_pairs)).count("DequantizeLinear") == 2


@pytest.mark.parametrize(("second", "left"), [("s", 1), ("other", 2)])
def test_pairs_merge_where_the_scale_is_the_same(second: str, left: int) -> None:
    nodes = [
        *_pair("x", "a"),
        *_pair("x", "b", second),
        helper.make_node("Relu", ["a_dq"], ["y"], "relu"),
        helper.make_node("Neg", ["b_dq"], ["v"], "neg"),
    ]
    model = _model(nodes, {**CONSTANTS, "other": np.float32(0.1).reshape(())}, ["y", "v"])
    assert _ops(_tidied(model, merge_pairs)).count("QuantizeLinear") == left


def test_matrix_products_keep_a_dq_of_their_own() -> None:
    weight = RNG.normal(size=(4, 3)).astype(np.float32)
    nodes = [node for name in "abcd" for node in _pair("x", name)]
    nodes += [
        helper.make_node("MatMul", ["a_dq", "w"], ["one"], "one"),
        helper.make_node("Relu", ["b_dq"], ["two"], "two"),
        helper.make_node("Gemm", ["c_dq", "w"], ["three"], "three"),
        helper.make_node("Neg", ["d_dq"], ["four"], "four"),
    ]
    merged = _tidied(
        _model(nodes, {**CONSTANTS, "w": weight}, ["one", "two", "three", "four"]), merge_pairs
    )
    assert _ops(merged).count("QuantizeLinear") == 1 and _ops(merged).count("DequantizeLinear") == 3
    fed = {n.name: n.input[0] for n in merged.graph.node}
    assert fed["two"] == fed["four"] and len({fed[n] for n in ("one", "two", "three")}) == 3


def _branch(captured: str, name: str) -> onnx.GraphProto:
    nodes = [helper.make_node("Add", [captured, captured], [f"{name}_out"])]
    return helper.make_graph(
        nodes, name, [], [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)]
    )


def _if(captured: str) -> onnx.NodeProto:
    """A node whose both branches read a tensor from outside, as detectors of torchvision have them."""
    branches = {f"{n}_branch": _branch(captured, f"{n}_{captured}") for n in ("then", "else")}
    return helper.make_node("If", ["yes"], [f"if_{captured}"], f"if_{captured}", **branches)


def test_subgraphs() -> None:
    nodes = [
        helper.make_node(
            "Constant", [], ["c"], "c", value=numpy_helper.from_array(np.float32([1, 2, 3, 4]))
        ),
        *_pair("x", "a"),
        *_pair("x", "b"),
        _if("c"),
        _if("b_dq"),
        helper.make_node("Add", ["a_dq", "c"], ["sum"], "sum"),
        helper.make_node("Add", ["sum", "if_c"], ["more"], "more"),
        helper.make_node("Add", ["more", "if_b_dq"], ["y"], "y"),
    ]
    model = _model(nodes, {**CONSTANTS, "yes": np.array(True)}, ["y"])
    for tidy in (fold_constants, merge_pairs, lambda m: merge_pairs(fold_constants(m))):
        _tidied(model, tidy)
    mark = helper.make_node("Mark", ["x"], ["marked"], domain="qdqtool.qat", key=b"0")
    adding = helper.make_node("Add", ["if_marked", "marked"], ["y"])
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 4]) for n in "xy")
    yes = numpy_helper.from_array(np.array(True), "yes")
    graph = helper.make_graph([mark, _if("marked"), adding], "g", [x], [y], [yes])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("qdqtool.qat", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    drop_marks(model, {"marked": "x"})
    onnx.checker.check_model(model)
    values = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
    np.testing.assert_array_equal(_run_cleanup(model)[0], 3 * values)


# What the published engines hold (8, 12 + 7, 12 + 8 INT8 in and out), and their conversions.
PUBLISHED = {"convolutions": (8, 10), "residual": (19, 3), "pool": (20, 1)}


IMAGE = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@functools.cache
def exported(placement: str, opset: int) -> onnx.ModelProto:
    """A ResNet-18 with quantizers placed by hand; nobody changes it."""
    model = nets.handmade(placement)
    nets.max_calibrate(model, IMAGE)
    return nets.raw_export(model, IMAGE, opset)


@pytest.mark.parametrize(
    ("placement", "opset"), slow_after(1, [("convolutions", 17), ("pool", 17), ("residual", 13)])
)
def test_resnet18_is_predicted_as_the_published_engines(placement: str, opset: int) -> None:
    summary = qdqtool.predict(exported(placement, opset), target="trt8.5").summary()
    int8_to_int8, conversions = PUBLISHED[placement]
    counted = [
        summary[key] for key in ("convolutions", "int8", "int8_to_int8", "float", "conversions")
    ]
    assert counted == [21, 21, int8_to_int8, 0, conversions]


def test_modelopts_own_export_is_an_input_like_any_other() -> None:
    quantization = pytest.importorskip(
        "modelopt.torch.quantization", reason="nvidia-modelopt is not installed"
    )
    model = nets.randomise(resnet.ResNet18(10, nets.WIDTH))
    quantization.quantize(
        model.eval(), quantization.INT8_DEFAULT_CFG, lambda network: network(IMAGE)
    )
    proto = export_proto(model, Call((IMAGE,)), 17)
    assert "BatchNormalization" in {
        n.op_type for n in proto.graph.node
    }  # unfolded, and scales are Constant nodes
    prediction = qdqtool.predict(proto, "trt8.5")
    summary = prediction.summary()
    assert (summary["convolutions"], summary["int8"], summary["float"]) == (21, 21, 0)
    # Each block's first convolution, and the stem, whose MaxPool ModelOpt quantizes; the skips are float.
    outputs = {c.name: c.int8_in_int8_out for c in prediction.convolutions}
    assert {n for n, both in outputs.items() if both} == {"/conv1/Conv"} | {
        f"/layer{stage}/layer{stage}.{block}/conv1/Conv"
        for stage in (1, 2, 3, 4)
        for block in (0, 1)
    }
    with pytest.raises(AssertionError, match="SKIP-FLOAT"):
        assert_int8(proto, "trt8.5", max_conversions=1)


def test_assert_int8_names_the_skip_and_its_fix() -> None:
    proto = exported("convolutions", 17)
    assert_int8(proto, "trt8.5")
    with pytest.raises(AssertionError) as caught:
        assert_int8(proto, "trt8.5", max_conversions=1)
    message = str(caught.value)
    assert "10 conversions stay, 1 allowed" in message
    assert "SKIP-FLOAT" in message and "fix:" in message


# Arguments of other types -------------------------------------------------------------------------------------------

FUNCTIONS = [n for n in qat.__all__ if inspect.isfunction(getattr(qat, n))]
ARGUMENTS = [
    (n, p)
    for n in FUNCTIONS
    for p in inspect.signature(getattr(qat, n)).parameters
    if p not in ("model", "sample", "data")
]


class Strange:
    """What no parameter takes."""


@pytest.mark.parametrize(("name", "parameter"), ARGUMENTS)
def test_an_argument_of_another_type_is_refused_by_name(
    name: str, parameter: str, tmp_path: Path
) -> None:
    """Of every parameter of every public function; nothing is written."""
    given: dict[str, object] = {
        "model": nn.Linear(3, 3),
        "sample": X,
        "data": [X],
        "path": tmp_path / "m.onnx",
        "saved": {},
    }
    function = getattr(qat, name)
    arguments = {n: v for n, v in given.items() if n in inspect.signature(function).parameters}
    arguments[parameter] = Strange()

    def called() -> None:
        with contextlib.nullcontext() if name != "disabled" else function(**arguments):
            function(**arguments)

    with pytest.raises(QdqtoolError) as error:
        called()
    assert (
        f"`{parameter}=" in str(error.value)
        and "\n" not in str(error.value)
        and not list(tmp_path.iterdir())
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_comes_from_inside(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each parameter, models, samples and data included; what a function of the user's raises is the user's."""
    monkeypatch.chdir(tmp_path)
    function, sample = getattr(qat, name), torch.rand(1, 3, 8, 8)
    bare = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    model = bare if name in ("plan", "prepare") else _ready(bare, sample)
    for parameter in inspect.signature(function).parameters:
        own = parameter in ("fn", "report", "metric")
        for value in (v for v in (*WRONG, *NEVER_RIGHT, *HALVES) if not (own and callable(v))):
            given = {
                "model": copy.deepcopy(model),
                "sample": sample,
                "data": [sample],
                "path": "m.onnx",
                "saved": {},
            }
            arguments = {
                n: v for n, v in given.items() if n in inspect.signature(function).parameters
            }
            arguments[parameter] = value
            said = ""
            try:
                with contextlib.nullcontext() if name != "disabled" else function(**arguments):
                    function(**arguments)
            except QdqtoolError as error:
                said = str(error)
            except BaseException as error:
                error.add_note(f"{parameter}=..., given {type(value)}")
                raise
            assert "\n" not in said


def test_numbers_that_no_export_takes(tmp_path: Path) -> None:
    sample, path = torch.rand(1, 3, 8, 8), tmp_path / "m.onnx"
    model = _ready(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), sample)
    for tolerance in (float("nan"), -1.0):
        with raises(QdqtoolError, "_refuse_tolerance tolerance="):
            qat.export(model, path, sample, tolerance=tolerance)
    assert not path.exists()
