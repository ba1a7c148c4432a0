"""What onnx crashes on is not inferred, in whatever operator it is; and ordinary networks are inferred here."""

import faulthandler
import os
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qdqtool.base import budgets
from qdqtool.commands.cli import run
from qdqtool.errors import ModelError
from qdqtool.insertion.prepare import raise_opset
from qdqtool.model import apart
from qdqtool.model.graph import Model
from qdqtool.model.inference import is_odd
from tests.forks import can_fork
from tests.raising import raises
from tools.fuzz.grammar import network
from tools.growth.families import FAMILIES

FLOAT = TensorProto.FLOAT


def _value(name, dims):
    return helper.make_tensor_value_info(name, FLOAT, dims)


def _cut(node, dims=(1, 8, 4, 4), axis=2, version=17, **constants):
    """A node that reads x, and a Slice behind it."""
    values = {"begin": np.array([0]), "end": np.array([3]), "axis": np.array([axis]), **constants}
    nodes = [node, helper.make_node("Slice", [node.output[0], "begin", "end", "axis"], ["y"])]
    stored = [numpy_helper.from_array(np.asarray(v), name) for name, v in values.items()]
    graph = helper.make_graph(nodes, "g", [_value("x", dims)], [_value("y", None)], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=8)


def _node(op, inputs="x", **attributes):
    return helper.make_node(op, inputs.split(" "), ["z"], name="far", **attributes)


def _changed(model, change):
    change(model)
    return model


def _function(domain, name, op, *inputs):
    return helper.make_function(
        domain,
        name,
        inputs,
        ["b"],
        [helper.make_node(op, inputs, ["b"])],
        [helper.make_opsetid("", 17)],
    )


LARGE = np.ones((8, 8, 7, 7), np.float32)
CRASHES = {
    "Conv": _cut(_node("Conv", "x w"), w=LARGE),
    "Conv, stated": _cut(_node("Conv", "x w", kernel_shape=[7, 7]), w=LARGE),
    "ConvTranspose": _cut(_node("ConvTranspose", "x w", pads=[9] * 4), w=LARGE[:, :, :1, :1]),
    "MaxPool": _cut(_node("MaxPool", kernel_shape=[9, 9])),
    "AveragePool, padded": _cut(
        _node("AveragePool", kernel_shape=[9, 2], pads=[0, 0, 0, 9], auto_pad="SAME_LOWER"),
        version=19,
    ),
    "AveragePool": _cut(_node("AveragePool", kernel_shape=[9, 9])),
    "Pad": _cut(_node("Pad", "x p"), p=np.array([0, 0, -9, 0, 0, 0, 0, 0])),
    "Expand": _cut(_node("Expand", "x p"), dims=(1, 8, 1, 4), p=np.array([1, 1, -5, 1])),
    "Resize": _cut(_node("Resize", "x  s"), s=np.array([1, 1, -3, 1], np.float32)),
    "Resize, large": _cut(
        _node("Resize", "x  s"), dims=(1, 1, 1 << 29, 4), s=np.array([1, 1, 1e15, 1], np.float32)
    ),
    "Split": _cut(helper.make_node("Split", ["x", "p"], ["z", "v"], axis=2), p=np.array([-5, 9])),
    "TopK": _cut(helper.make_node("TopK", ["x", "p"], ["z", "v"], axis=2), p=np.array([-5])),
    "stated": _cut(_node("Relu"), dims=(1, 8, -4, 4)),
    "GatherND": onnx.helper.make_model(
        helper.make_graph(
            [_node("GatherND", "x i")],
            "g",
            [_value("x", [4, 4]), helper.make_tensor_value_info("i", 7, [-5])],
            [_value("z", None)],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    ),
    "EyeLike": onnx.helper.make_model(
        helper.make_graph([_node("EyeLike", "nowhere", dtype=1)], "g", [], [_value("z", None)]),
        opset_imports=[helper.make_opsetid("", 17)],
    ),
    "Resize, old": _cut(_node("Resize", "x s"), version=10, s=np.array([1, 1, -3, 1], np.float32)),
    "Split, equal": _cut(
        helper.make_node("Split", ["x"], [*map(str, range(7)), "z"], axis=2, num_outputs=8),
        dims=(1, 8, 9, 4),
        version=18,
    ),
    "negative batch_dims": onnx.helper.make_model(
        helper.make_graph(
            [_node("GatherND", "x i", batch_dims=-3)],
            "g",
            [_value("x", [4, 4]), helper.make_tensor_value_info("i", 7, [3, 1])],
            [_value("z", None)],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    ),
    "a stored size": _changed(
        _cut(_node("Relu", "w"), axis=0, w=np.ones(1)),
        lambda m: m.graph.initializer[-1].dims.__setitem__(0, -5),
    ),
    "a function's name": _changed(
        onnx.helper.make_model(
            helper.make_graph([_node("EyeLike", "nowhere", dtype=1)], "g", [], [_value("z", None)]),
            opset_imports=[helper.make_opsetid("", 17)],
        ),
        lambda m: m.functions.append(_function("", "EyeLike", "Relu", "a")),
    ),
    "a name in a function": _changed(
        _cut(
            helper.make_node("F", ["x", "q"], ["z"], domain="own"),
            p=np.zeros(8, int),
            q=np.array([0, 0, -9, 0, 0, 0, 0, 0]),
        ),
        lambda m: (
            m.functions.append(_function("own", "F", "Pad", "a", "p")),
            m.opset_import.add(domain="own", version=1),
        ),
    ),
    "other stated weights": _changed(
        _cut(
            helper.make_node("DequantizeLinear", ["w", "s"], ["d"]),
            w=np.ones((8, 8, 1, 1), np.int8),
            s=np.float32(1),
        ),
        lambda m: (
            m.graph.node.insert(1, _node("Conv", "x d")),
            m.graph.value_info.append(_value("d", [8, 8, 7, 7])),
            m.graph.node[-1].input.__setitem__(0, "z"),
        ),
    ),
    "other stated weights behind a Q": _changed(
        _cut(
            helper.make_node("DequantizeLinear", ["q", "s"], ["d"]),
            w=np.ones((8, 8, 1, 1), np.float32),
            s=np.float32(1),
        ),
        lambda m: (
            m.graph.node.insert(0, helper.make_node("QuantizeLinear", ["w", "s"], ["q"])),
            m.graph.node.insert(2, _node("Conv", "x d")),
            m.graph.value_info.append(_value("q", [8, 8, 7, 7])),
            m.graph.node[-1].input.__setitem__(0, "z"),
        ),
    ),
    "another type of attribute": _changed(
        _cut(helper.make_node("Split", ["x"], ["z", "v"], axis=2, split=[-9, 13]), version=12),
        lambda m: setattr(m.graph.node[0].attribute[-1], "type", onnx.AttributeProto.FLOATS),
    ),
    "batch_dims of another type": onnx.helper.make_model(
        helper.make_graph(
            [_node("GatherND", "x i", batch_dims=[-3])],
            "g",
            [_value("x", [4, 4]), helper.make_tensor_value_info("i", 7, [3, 1])],
            [_value("z", None)],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    ),
    "num_outputs": onnx.helper.make_model(
        helper.make_graph(
            [helper.make_node("Split", ["x"], ["z", "v"], num_outputs=1, axis=0)],
            "g",
            [_value("x", [1])],
            [_value("z", None)],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
    ),
}


@pytest.mark.parametrize("case", CRASHES)
def test_what_onnx_crashes_on_is_not_inferred_here(case: str) -> None:
    model = CRASHES[case]
    assert not apart._Look(model).harmless or any(is_odd(n, None) for n in model.graph.node)


def _strange(change):
    return _changed(_cut(_node("Relu")), change)


def _stated(attribute, change):
    """A GatherND whose attribute is changed after it was made."""
    return _changed(
        _cut(_node("GatherND", "x p", batch_dims=attribute), p=np.zeros((1, 1), int)), change
    )


def _in_loop():
    """Its constant has the name of what the body of a Loop is given."""
    body = helper.make_graph(
        [helper.make_node("Pad", ["x", "p"], ["v"])],
        "b",
        [_value(n, None) for n in "icp"],
        [_value("c", None), _value("p", None)],
    )
    loop = helper.make_node("Loop", ["n", "", "p"], ["z"], body=body)
    return _cut(loop, p=np.array([0, 0, 1, 0, 0, 0, 1, 0]), n=np.array(3))


def _pool(**attributes):
    return _cut(_node("MaxPool", **attributes))


def _blocks(*sizes):
    names = ["x", *(f"d{i}" for i in range(len(sizes)))]
    nodes = [
        helper.make_node("DepthToSpace", [a], [b], blocksize=n)
        for a, b, n in zip(names, names[1:], sizes, strict=False)
    ]
    return _strange(lambda m: m.graph.node.extend(nodes))


def _wide(count):
    """Each makes dimensions a million times as large."""
    node = _node("ConvTranspose", "x w", kernel_shape=[1 << 20] * 2, strides=[1 << 20] * 2)
    return _changed(_cut(node), lambda m: m.graph.node.extend([node] * (count - 1)))


@pytest.mark.parametrize(
    ("model", "harmless"),
    [
        (_blocks(1 << 10), True),
        (_blocks(1 << 17), False),
        (_blocks(1 << 10, 1 << 10), False),
        (_blocks(0), False),
        (_cut(_node("Relu"), dims=(1, 8, 1 << 29, 4)), True),
        (_cut(_node("Relu"), dims=(1, 8, 1 << 31, 4)), False),
        (_strange(lambda m: setattr(m.graph.node[0], "domain", "ai.onnx.ml")), False),
        (_strange(lambda m: setattr(m.graph.node[0], "domain", "own")), True),
        (_strange(lambda m: m.graph.output[0].CopyFrom(_value("y", [1, -4]))), False),
        (_strange(lambda m: m.graph.sparse_initializer.add(dims=[-5])), False),
        (_strange(lambda m: m.graph.sparse_initializer.add(dims=[5])), True),
        (_in_loop(), False),
        (_stated(0, lambda m: None), True),
        (_stated(-1, lambda m: None), False),
        (
            _stated(
                -3,
                lambda m: setattr(m.graph.node[0].attribute[0], "type", onnx.AttributeProto.FLOAT),
            ),
            False,
        ),
        (_stated(0, lambda m: setattr(m.graph.node[0].attribute[0], "ref_attr_name", "n")), False),
        (_cut(_node("TopK", "x p"), p=np.array([1])), True),
        (_cut(_node("TopK", "x p"), p=np.array([1 << 40])), False),
        (
            _changed(
                _cut(_node("TopK", "x p"), p=np.array([1])),
                lambda m: m.graph.initializer[-1].external_data.add(key="location", value="w"),
            ),
            False,
        ),
        (_cut(_node("Expand", "x p"), p=np.array([2, 1, 1, 1])), True),
        (_cut(_node("Tile", "x p"), p=np.array([1, 1, -1, 1])), False),
        (_cut(_node("Tile", "x p"), p=np.array([1, 1, 1 << 20, 1])), True),
        (_cut(_node("Pad", pads=[0, 0, -9, 0, 0, 0, 0, 0]), version=10), False),
        (_cut(_node("Upsample", scales=[1.0, 1.0, -2.0, 1.0]), version=8), False),
        (_pool(kernel_shape=[2, 2]), False),
        (_pool(kernel_shape=[2, 2], strides=[2, 2]), True),
        (_pool(kernel_shape=[1, 1]), True),
        (_pool(kernel_shape=[0, 0]), False),
        (_pool(kernel_shape=[1, 1], strides=[0, 0], pads=[1] * 4), False),
        (_pool(kernel_shape=[9, 9], dilations=[0, 0]), False),
        (_pool(kernel_shape=[2, 2], dilations=[2, 2]), False),
        (_pool(kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0]), False),
        (_pool(kernel_shape=[3, 3], strides=[3, 3], dilations=[2, 2]), True),
        (_pool(kernel_shape=[3, 3], strides=[2, 2], dilations=[2, 2]), False),
        (_cut(helper.make_node("Split", ["x"], ["z", "v"], num_outputs=1), version=18), False),
        (_cut(helper.make_node("Split", ["x"], ["z", "v"], split=[-9, 13]), version=12), False),
        (_wide(1), True),
        (_wide(2), False),
        (_cut(_node("ConvTranspose", "x w", output_shape=[-1, -1]), w=LARGE), False),
        (_cut(_node("ConvTranspose", "x w", output_padding=[-9, 0]), w=LARGE), False),
        (_cut(_node("ConvTranspose", "x w", output_padding=[1]), w=LARGE), False),
        (_cut(_node("ConvTranspose", "x w", strides=[8, 8]), w=LARGE), False),
        (_cut(_node("ConvTranspose", "x w"), w=LARGE), True),
    ],
)
def test_what_is_harmless(model: onnx.ModelProto, harmless: bool) -> None:
    """At the bounds of each check, with a Slice behind."""
    assert apart._Look(model).harmless is harmless


def test_what_is_odd() -> None:
    """Attributes that are cut, and numbers of outputs."""

    def odd(
        op: str, outputs: int = 1, function: onnx.FunctionProto | None = None, **attributes: int
    ) -> bool:
        return is_odd(
            helper.make_node(op, ["x"], [str(i) for i in range(outputs)], **attributes), function
        )

    assert (
        odd("Flatten", axis=1 << 31)
        and odd("Flatten", axis=-(1 << 31) - 1)
        and not odd("Flatten", axis=-(1 << 31))
    )
    assert not odd("Constant", value_int=1 << 40)
    assert odd("Split", 2, num_outputs=3) and not odd("Split", 2, num_outputs=2)
    assert not odd("Squeeze", 2, num_outputs=3)
    node = helper.make_node("Split", ["x"], ["y", "z"], num_outputs=2)
    node.attribute[0].ref_attr_name = "n"
    assert is_odd(node, None)
    function = _function("own", "F", "Relu", "a")
    function.attribute_proto.append(helper.make_attribute("axis", 1 << 40))
    assert odd("Flatten", function=function)


def test_all_is_converted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(apart._CHILD, "ask", lambda proto, opset: asked.append(opset))
    apart.convert_version(_cut(_node("Relu")), 18)
    apart.convert_version(_cut(_node("Flatten", axis=1 << 40)), 19)
    assert asked == [18, 19]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CRASHES][::4])
def test_what_onnx_crashes_on_ends_nothing(case: str) -> None:
    model = CRASHES[case]
    kept = model.SerializeToString()
    Model(model).shape("y")
    assert model.SerializeToString() == kept


def forked(work: Callable[[], object]) -> int:
    """How a process ends that has all of this one and does some work; 0 where that raised nothing."""
    fork = os.fork()
    if not fork:
        try:
            faulthandler.disable()
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(1)
    return os.waitpid(fork, 0)[1]


@can_fork
def test_without_our_look_onnx_crashes() -> None:
    """Else none of this is needed any more."""
    assert os.WIFSIGNALED(forked(lambda: onnx.shape_inference.infer_shapes(CRASHES["Conv"])))


def test_a_crash_is_an_error_and_the_next_model_is_inferred() -> None:
    with pytest.raises(RuntimeError):
        apart.infer_shapes(CRASHES["Conv"])
    whole = _cut(_node("Conv", "x w"), dims=(1, 8, 9, 9), w=LARGE)
    found = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in apart.infer_shapes(whole).graph.value_info
    }
    assert found["z"] == [1, 8, 3, 3]


def test_the_process_is_asked_again_after_an_error_and_after_its_end() -> None:
    child = apart._Child()
    whole = _cut(_node("Relu"))
    with pytest.raises(RuntimeError) as refused:
        child.ask(_cut(_node("Gemm")), 0, 0, 1, 0)
    assert "far" in str(refused.value)  # onnx's own words
    first = child._process
    assert child.ask(whole, 0, 0, 0, 0).graph.node == whole.graph.node
    assert child._process is first is not None
    first.kill()
    first.wait()
    assert child.ask(whole, 0, 0, 0, 0).graph.node == whole.graph.node
    child._close()


def test_half_an_answer_is_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = tmp_path / "half.py"
    half.write_text("import sys; sys.stdin.readline(); print(1, 9); print(end='half')")
    monkeypatch.setattr(apart, "_WORKER", half)
    with raises(RuntimeError, "_Child.ask"):
        apart._Child().ask(_cut(_node("Relu")), 0, 0, 0, 0)


@can_fork
def test_a_fork_asks_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that forks while another thread asks."""
    monkeypatch.setattr(apart._CHILD, "_process", object())
    with apart._CHILD._lock:
        if not (fork := os.fork()):
            os._exit(0 if apart._CHILD._process is None and not apart._CHILD._lock.locked() else 1)
    assert os.waitpid(fork, 0)[1] == 0


@pytest.mark.parametrize(
    "node", [_node("MaxPool", kernel_shape=[9, 9]), _node("Split", split="a text")]
)
def test_a_model_that_the_converter_crashes_on(node: onnx.NodeProto) -> None:
    with raises(ModelError, "raise_opset 12 13"):
        raise_opset(Model(_cut(node, version=12)), 13)


@pytest.mark.slow
def test_a_model_of_which_the_converter_makes_gigabytes() -> None:
    model = _cut(_node("Expand", "x n"), version=12)
    model.graph.input.append(helper.make_tensor_value_info("n", TensorProto.INT64, [1 << 28]))
    begin = os.times().children_user
    with raises(ModelError, "raise_opset 12 13 640 MB"):
        raise_opset(Model(model), 13)
    apart._CHILD._close()
    assert os.times().children_user - begin < 5


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no limits of processes there")
def test_a_model_that_the_converter_computes_long_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "ONNX_SECONDS", 1)
    apart._CHILD._close()
    nodes = [
        helper.make_node("Softmax", [f"x{i}" if i else "x"], [f"x{i + 1}"], axis=0)
        for i in range(8000)
    ]
    model = _changed(
        _cut(_node("Relu"), version=12), lambda m: m.graph.node.extend(nodes)
    )  # squared
    with raises(ModelError, "raise_opset 12 13 1 s"):
        raise_opset(Model(model), 13)
    monkeypatch.undo()
    assert apart.convert_version(_cut(_node("Relu"), version=12), 13).opset_import[0].version == 13


def test_the_child_loads_nothing_but_onnx_itself() -> None:
    """It starts in a fifth of the time that onnx takes with its Python, which loads numpy and protobuf's."""
    process = apart._CHILD._started()
    apart.convert_version(_cut(_node("Relu"), version=12), 13)
    maps = Path(f"/proc/{process.pid}/maps")
    assert not maps.exists() or (
        "onnx_cpp2py_export" in (text := maps.read_text()) and "numpy" not in text
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "predict m.onnx",
        "predict m.onnx --gpu T4 --target 11",
        "fix m.onnx -o out.onnx",
        "extract m.onnx --node far -o out.onnx",
        "report m.onnx -o out.html",
    ],
)
def test_commands(command, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(CRASHES["Conv"], "m.onnx")
    assert run(command.split()) in (0, 2)


def test_ordinary_networks_are_inferred_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart._CHILD, "ask", None)
    for seed in range(30):
        apart.infer_shapes(network(seed))
    for make in FAMILIES.values():
        apart.infer_shapes(make(30))
    cases = (
        ("Conv", "x w", {"kernel_shape": [3, 3], "pads": [1] * 4}),
        ("Conv", "x w", {"strides": [2, 2]}),
        ("MaxPool", "x", {"kernel_shape": [5, 5], "pads": [2] * 4}),
        ("MaxPool", "x", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("ConvTranspose", "x w", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("Resize", "x  s", {}),
        ("Pad", "x p", {}),
    )
    for op, inputs, attributes in cases:
        size = attributes.get("kernel_shape", [3, 3])
        apart.infer_shapes(
            _cut(
                _node(op, inputs, **attributes),
                w=np.ones((8, 8, *size), np.float32),
                s=np.array([1, 1, 2, 2], np.float32),
                p=np.array([0, 0, 1, 1] * 2),
            )
        )


def trial(seed: int, count: int) -> None:
    """Tries plain operators with whatever they may be given, without negative dimensions; none comes of it."""
    rng = random.Random(seed)
    for _ in range(count):
        op = rng.choice(sorted(apart.PLAIN - {"If", "Loop", "Constant"}))
        version = rng.choice((13, 17, 21))
        try:
            schema = onnx.defs.get_schema(op, version, "")
        except onnx.defs.SchemaError:
            continue
        model = _anything(schema, version, rng)
        try:
            found = onnx.shape_inference.infer_shapes(model, data_prop=rng.random() < 0.5)
        except Exception:
            continue
        assert all(
            d.dim_value >= 0 for v in found.graph.value_info for d in v.type.tensor_type.shape.dim
        ), model


def _anything(schema, version, rng):
    inputs, stored = [], []
    names = [f"i{i}" for i in range(rng.randint(schema.min_input, min(schema.max_input, 5)))]
    for name in names:
        choice = rng.random()
        if choice < 0.4:
            values = np.array(
                [rng.choice((0, 1, 2, 3, -1, -2, -10)) for _ in range(rng.choice((0, 1, 2, 4)))]
            )
            stored.append(
                numpy_helper.from_array(values.astype(rng.choice(("i8", "f4", "i4"))), name)
            )
        elif choice < 0.9:
            dims = [rng.choice((0, 1, 2, 4, 8, None, "n")) for _ in range(rng.choice((0, 1, 2, 4)))]
            inputs.append(helper.make_tensor_value_info(name, rng.choice((1, 1, 7, 9)), dims))
    node = helper.make_node(schema.name, names, [f"o{i}" for i in range(rng.randint(1, 3))])
    for name, stated in schema.attributes.items():
        values = {
            "INT": (0, 1, 2, -1, -4),
            "FLOAT": (0.0, 1.0, -1.0),
            "INTS": ([], [0], [-1, 2], [7, -2, 1, 1]),
            "STRING": ("", "a", "ab,bc->ac", "->a"),
        }.get(stated.type.name)
        if values is not None and rng.random() < 0.6:
            node.attribute.append(
                helper.make_attribute(name, rng.choice(values), attr_type=int(stated.type))
            )
    graph = helper.make_graph([node], "g", inputs, [], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)])


@can_fork
def test_plain_operators_crash_on_nothing() -> None:
    assert forked(lambda: trial(50, 1000)) == 0, "the traceback is on stderr"
