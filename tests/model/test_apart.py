"""Inference and conversion by onnx, in another process for models that could end this one."""

import contextlib
import faulthandler
import itertools
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.fuzz.grammar import network
from tests.growth import FAMILIES

FLOAT = TensorProto.FLOAT
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")


def value_info(name, dims):
    return helper.make_tensor_value_info(name, FLOAT, dims)


def sliced(node, dims=(1, 8, 4, 4), axis=2, version=17, **constants):
    """Build a node that reads x, and a Slice of its output."""
    values = {"begin": np.array([0]), "end": np.array([3]), "axis": np.array([axis]), **constants}
    nodes = [node, helper.make_node("Slice", [node.output[0], "begin", "end", "axis"], ["y"])]
    stored = [numpy_helper.from_array(np.asarray(v), name) for name, v in values.items()]
    graph = helper.make_graph(nodes, "g", [value_info("x", dims)], [value_info("y", None)], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=8)


def operator(op, inputs="x", **attributes):
    return helper.make_node(op, inputs.split(" "), ["z"], name="far", **attributes)


def changed(model, change):
    change(model)
    return model


def function(domain, name, op, *inputs):
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
    "Conv": sliced(operator("Conv", "x w"), w=LARGE),
    "Conv, stated": sliced(operator("Conv", "x w", kernel_shape=[7, 7]), w=LARGE),
    "ConvTranspose": sliced(operator("ConvTranspose", "x w", pads=[9] * 4), w=LARGE[:, :, :1, :1]),
    "MaxPool": sliced(operator("MaxPool", kernel_shape=[9, 9])),
    "AveragePool, padded": sliced(
        operator("AveragePool", kernel_shape=[9, 2], pads=[0, 0, 0, 9], auto_pad="SAME_LOWER"),
        version=19,
    ),
    "AveragePool": sliced(operator("AveragePool", kernel_shape=[9, 9])),
    "Pad": sliced(operator("Pad", "x p"), p=np.array([0, 0, -9, 0, 0, 0, 0, 0])),
    "Expand": sliced(operator("Expand", "x p"), dims=(1, 8, 1, 4), p=np.array([1, 1, -5, 1])),
    "Resize": sliced(operator("Resize", "x  s"), s=np.array([1, 1, -3, 1], np.float32)),
    "Resize, large": sliced(
        operator("Resize", "x  s"), dims=(1, 1, 1 << 29, 4), s=np.array([1, 1, 1e15, 1], np.float32)
    ),
    "Split": sliced(helper.make_node("Split", ["x", "p"], ["z", "v"], axis=2), p=np.array([-5, 9])),
    "TopK": sliced(helper.make_node("TopK", ["x", "p"], ["z", "v"], axis=2), p=np.array([-5])),
    "stated": sliced(operator("Relu"), dims=(1, 8, -4, 4)),
    "GatherND": onnx.helper.make_model(
        helper.make_graph(
            [operator("GatherND", "x i")],
            "g",
            [value_info("x", [4, 4]), helper.make_tensor_value_info("i", 7, [-5])],
            [value_info("z", None)],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    ),
    "EyeLike": onnx.helper.make_model(
        helper.make_graph(
            [operator("EyeLike", "nowhere", dtype=1)], "g", [], [value_info("z", None)]
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    ),
    "Resize, old": sliced(
        operator("Resize", "x s"), version=10, s=np.array([1, 1, -3, 1], np.float32)
    ),
    "Split, equal": sliced(
        helper.make_node("Split", ["x"], [*map(str, range(7)), "z"], axis=2, num_outputs=8),
        dims=(1, 8, 9, 4),
        version=18,
    ),
    "negative batch_dims": onnx.helper.make_model(
        helper.make_graph(
            [operator("GatherND", "x i", batch_dims=-3)],
            "g",
            [value_info("x", [4, 4]), helper.make_tensor_value_info("i", 7, [3, 1])],
            [value_info("z", None)],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    ),
    "a stored size": changed(
        sliced(operator("Relu", "w"), axis=0, w=np.ones(1)),
        lambda m: m.graph.initializer[-1].dims.__setitem__(0, -5),
    ),
    "a function's name": changed(
        onnx.helper.make_model(
            helper.make_graph(
                [operator("EyeLike", "nowhere", dtype=1)], "g", [], [value_info("z", None)]
            ),
            opset_imports=[helper.make_opsetid("", 17)],
        ),
        lambda m: m.functions.append(function("", "EyeLike", "Relu", "a")),
    ),
    "a name in a function": changed(
        sliced(
            helper.make_node("F", ["x", "q"], ["z"], domain="own"),
            p=np.zeros(8, int),
            q=np.array([0, 0, -9, 0, 0, 0, 0, 0]),
        ),
        lambda m: (
            m.functions.append(function("own", "F", "Pad", "a", "p")),
            m.opset_import.add(domain="own", version=1),
        ),
    ),
    "other stated weights": changed(
        sliced(
            helper.make_node("DequantizeLinear", ["w", "s"], ["d"]),
            w=np.ones((8, 8, 1, 1), np.int8),
            s=np.float32(1),
        ),
        lambda m: (
            m.graph.node.insert(1, operator("Conv", "x d")),
            m.graph.value_info.append(value_info("d", [8, 8, 7, 7])),
            m.graph.node[-1].input.__setitem__(0, "z"),
        ),
    ),
    "other stated weights behind a Q": changed(
        sliced(
            helper.make_node("DequantizeLinear", ["q", "s"], ["d"]),
            w=np.ones((8, 8, 1, 1), np.float32),
            s=np.float32(1),
        ),
        lambda m: (
            m.graph.node.insert(0, helper.make_node("QuantizeLinear", ["w", "s"], ["q"])),
            m.graph.node.insert(2, operator("Conv", "x d")),
            m.graph.value_info.append(value_info("q", [8, 8, 7, 7])),
            m.graph.node[-1].input.__setitem__(0, "z"),
        ),
    ),
    "another type of attribute": changed(
        sliced(helper.make_node("Split", ["x"], ["z", "v"], axis=2, split=[-9, 13]), version=12),
        lambda m: setattr(m.graph.node[0].attribute[-1], "type", onnx.AttributeProto.FLOATS),
    ),
    "batch_dims of another type": onnx.helper.make_model(
        helper.make_graph(
            [operator("GatherND", "x i", batch_dims=[-3])],
            "g",
            [value_info("x", [4, 4]), helper.make_tensor_value_info("i", 7, [3, 1])],
            [value_info("z", None)],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    ),
    "num_outputs": onnx.helper.make_model(
        helper.make_graph(
            [helper.make_node("Split", ["x"], ["z", "v"], num_outputs=1, axis=0)],
            "g",
            [value_info("x", [1])],
            [value_info("z", None)],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
    ),
}


@pytest.mark.parametrize("case", CRASHES)
def test_model_that_crashes_onnx_is_not_harmless(case: str) -> None:
    model = CRASHES[case]
    assert not apart.is_harmless(model) or any(is_odd(n, None) for n in model.graph.node)


def changed_relu(change):
    return changed(sliced(operator("Relu")), change)


def gather_with(attribute, change):
    """Build a GatherND and change its attribute."""
    return changed(
        sliced(operator("GatherND", "x p", batch_dims=attribute), p=np.zeros((1, 1), int)), change
    )


def loop_with_name_of_constant():
    """Build a Loop whose body has an input with the name of a constant."""
    body = helper.make_graph(
        [helper.make_node("Pad", ["x", "p"], ["v"])],
        "b",
        [value_info(n, None) for n in "icp"],
        [value_info("c", None), value_info("p", None)],
    )
    loop = helper.make_node("Loop", ["n", "", "p"], ["z"], body=body)
    return sliced(loop, p=np.array([0, 0, 1, 0, 0, 0, 1, 0]), n=np.array(3))


def max_pool(**attributes):
    return sliced(operator("MaxPool", **attributes))


def depth_to_space(*sizes):
    names = ["x", *(f"d{i}" for i in range(len(sizes)))]
    nodes = [
        helper.make_node("DepthToSpace", [a], [b], blocksize=n)
        for a, b, n in zip(names, names[1:], sizes, strict=False)
    ]
    return changed_relu(lambda m: m.graph.node.extend(nodes))


def wide(count):
    """Build nodes that each make dimensions a million times larger."""
    node = operator("ConvTranspose", "x w", kernel_shape=[1 << 20] * 2, strides=[1 << 20] * 2)
    return changed(sliced(node), lambda m: m.graph.node.extend([node] * (count - 1)))


@pytest.mark.parametrize(
    ("model", "harmless"),
    [
        (depth_to_space(1 << 10), True),
        (depth_to_space(1 << 17), False),
        (depth_to_space(1 << 10, 1 << 10), False),
        (depth_to_space(0), False),
        (sliced(operator("Relu"), dims=(1, 8, 1 << 29, 4)), True),
        (sliced(operator("Relu"), dims=(1, 8, 1 << 31, 4)), False),
        (changed_relu(lambda m: setattr(m.graph.node[0], "domain", "ai.onnx.ml")), False),
        (changed_relu(lambda m: setattr(m.graph.node[0], "domain", "own")), True),
        (changed_relu(lambda m: m.graph.output[0].CopyFrom(value_info("y", [1, -4]))), False),
        (changed_relu(lambda m: m.graph.sparse_initializer.add(dims=[-5])), False),
        (changed_relu(lambda m: m.graph.sparse_initializer.add(dims=[5])), True),
        (loop_with_name_of_constant(), False),
        (gather_with(0, lambda m: None), True),
        (gather_with(-1, lambda m: None), False),
        (
            gather_with(
                -3,
                lambda m: setattr(m.graph.node[0].attribute[0], "type", onnx.AttributeProto.FLOAT),
            ),
            False,
        ),
        (
            gather_with(0, lambda m: setattr(m.graph.node[0].attribute[0], "ref_attr_name", "n")),
            False,
        ),
        (sliced(operator("TopK", "x p"), p=np.array([1])), True),
        (sliced(operator("TopK", "x p"), p=np.array([1 << 40])), False),
        (
            changed(
                sliced(operator("TopK", "x p"), p=np.array([1])),
                lambda m: m.graph.initializer[-1].external_data.add(key="location", value="w"),
            ),
            False,
        ),
        (sliced(operator("Expand", "x p"), p=np.array([2, 1, 1, 1])), True),
        (sliced(operator("Tile", "x p"), p=np.array([1, 1, -1, 1])), False),
        (sliced(operator("Tile", "x p"), p=np.array([1, 1, 1 << 20, 1])), True),
        (sliced(operator("Pad", pads=[0, 0, -9, 0, 0, 0, 0, 0]), version=10), False),
        (sliced(operator("Upsample", scales=[1.0, 1.0, -2.0, 1.0]), version=8), False),
        (max_pool(kernel_shape=[2, 2]), False),
        (max_pool(kernel_shape=[2, 2], strides=[2, 2]), True),
        (max_pool(kernel_shape=[1, 1]), True),
        (max_pool(kernel_shape=[0, 0]), False),
        (max_pool(kernel_shape=[1, 1], strides=[0, 0], pads=[1] * 4), False),
        (max_pool(kernel_shape=[9, 9], dilations=[0, 0]), False),
        (max_pool(kernel_shape=[2, 2], dilations=[2, 2]), False),
        (max_pool(kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0]), False),
        (max_pool(kernel_shape=[3, 3], strides=[3, 3], dilations=[2, 2]), True),
        (max_pool(kernel_shape=[3, 3], strides=[2, 2], dilations=[2, 2]), False),
        (sliced(helper.make_node("Split", ["x"], ["z", "v"], num_outputs=1), version=18), False),
        (sliced(helper.make_node("Split", ["x"], ["z", "v"], split=[-9, 13]), version=12), False),
        (wide(1), True),
        (wide(2), False),
        (sliced(operator("ConvTranspose", "x w", output_shape=[-1, -1]), w=LARGE), False),
        (sliced(operator("ConvTranspose", "x w", output_padding=[-9, 0]), w=LARGE), False),
        (sliced(operator("ConvTranspose", "x w", output_padding=[1]), w=LARGE), False),
        (sliced(operator("ConvTranspose", "x w", strides=[8, 8]), w=LARGE), False),
        (sliced(operator("ConvTranspose", "x w"), w=LARGE), True),
    ],
)
def test_is_harmless(model: onnx.ModelProto, harmless: bool) -> None:
    assert apart.is_harmless(model) is harmless


@pytest.mark.parametrize(
    ("op", "outputs", "attributes", "odd"),
    [
        # onnx reads 32 bits of an axis.
        ("Flatten", 1, {"axis": 1 << 31}, True),
        ("Flatten", 1, {"axis": -(1 << 31) - 1}, True),
        ("Flatten", 1, {"axis": -(1 << 31)}, False),
        ("Constant", 1, {"value_int": 1 << 40}, False),
        ("Split", 2, {"num_outputs": 3}, True),
        ("Split", 2, {"num_outputs": 2}, False),
        ("Squeeze", 2, {"num_outputs": 3}, False),
    ],
)
def test_is_odd(op: str, outputs: int, attributes: dict[str, int], odd: bool) -> None:
    names = [f"y{i}" for i in range(outputs)]
    assert is_odd(helper.make_node(op, ["x"], names, **attributes), None) is odd


def test_number_of_outputs_from_function_is_odd() -> None:
    split = helper.make_node("Split", ["x"], ["y", "z"], num_outputs=2)
    split.attribute[0].ref_attr_name = "n"
    assert is_odd(split, None)


def test_default_of_function_is_odd() -> None:
    own = function("own", "F", "Relu", "a")
    own.attribute_proto.append(helper.make_attribute("axis", 1 << 40))
    assert is_odd(helper.make_node("F", ["x"], ["y"]), own)


def test_versions_are_converted_in_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx.version_converter.convert_version", None)
    converted = apart.convert_version(sliced(operator("Relu")), 18)
    assert converted.opset_import[0].version == 18


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CRASHES][::4])
def test_shape_of_model_that_crashes_onnx(case: str) -> None:
    model = CRASHES[case]
    before = model.SerializeToString()
    Model(model).shape("y")
    assert model.SerializeToString() == before


def forked(work: Callable[[], object]) -> int:
    """Do some work in a fork; return its exit status, 0 if the work raised nothing."""
    fork = os.fork()
    if not fork:
        try:
            signal.alarm(120)  # a deadlock ends
            faulthandler.disable()
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(1)
    return os.waitpid(fork, 0)[1]


@can_fork
def test_onnx_crashes_in_this_process() -> None:
    # When this fails, onnx no longer needs another process.
    assert os.WIFSIGNALED(forked(lambda: onnx.shape_inference.infer_shapes(CRASHES["Conv"])))


def inferred_z(model: onnx.ModelProto) -> list[int]:
    """Return the dimensions of the tensor z that onnx infers."""
    values = {v.name: v.type.tensor_type for v in apart.infer_shapes(model).graph.value_info}
    return [d.dim_value for d in values["z"].shape.dim]


def test_model_after_a_crash_is_inferred() -> None:
    with pytest.raises(RuntimeError):
        apart.infer_shapes(CRASHES["Conv"])
    assert inferred_z(sliced(operator("Conv", "x w"), dims=(1, 8, 9, 9), w=LARGE)) == [1, 8, 3, 3]


def convert() -> None:
    assert apart.convert_version(sliced(operator("Relu")), 18).opset_import[0].version == 18


def onnx_processes() -> dict[int, str]:
    """Return the memory maps of the child processes that have loaded onnx, by process id."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            maps = (folder / "maps").read_text() if int(parent) == os.getpid() else ""
            if "onnx_cpp2py_export" in maps:
                processes[int(folder.name)] = maps
    return processes


@needs_proc
def test_process_stays_after_an_error_and_is_replaced_after_its_end() -> None:
    convert()
    (process,) = onnx_processes()
    model = changed(
        sliced(operator("Gemm")),
        lambda m: m.graph.node.append(helper.make_node("EyeLike", ["x"], ["eye"])),
    )
    with pytest.raises(RuntimeError, match="far"):  # the message of onnx names the node
        apart.infer_shapes(model, strict_mode=True)
    convert()
    assert onnx_processes().keys() == {process}
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    convert()
    assert process not in onnx_processes() and len(onnx_processes()) == 1


@can_fork
def test_fork_uses_its_own_process_while_another_thread_converts() -> None:
    converting, stop = threading.Event(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            convert()
            converting.set()

    thread = threading.Thread(target=work)
    thread.start()
    converting.wait()
    try:
        assert forked(convert) == 0
    finally:
        stop.set()
        thread.join()
    convert()


@pytest.mark.parametrize(
    "node", [operator("MaxPool", kernel_shape=[9, 9]), operator("Split", split="a text")]
)
def test_model_that_crashes_converter_is_an_error(node: onnx.NodeProto) -> None:
    with pytest.raises(ModelError) as caught:
        raise_opset(Model(sliced(node, version=12)), 13)
    assert "opset 12" in str(caught.value) and "13" in str(caught.value)


@pytest.mark.slow
def test_model_that_takes_gigabytes_to_convert_is_an_error() -> None:
    model = sliced(operator("Expand", "x n"), version=12)
    model.graph.input.append(helper.make_tensor_value_info("n", TensorProto.INT64, [1 << 28]))
    with pytest.raises(ModelError) as caught:
        raise_opset(Model(model), 13)
    assert "opset 12" in str(caught.value) and "640 MB" in str(caught.value)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no limits of processes there")
def test_model_that_takes_too_long_to_convert_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The converter takes the square of the number of nodes.
    names = ["x", *(f"x{i}" for i in range(1, 8001))]
    nodes = [helper.make_node("Softmax", [a], [b], axis=0) for a, b in itertools.pairwise(names)]
    model = changed(sliced(operator("Relu"), version=12), lambda m: m.graph.node.extend(nodes))
    with monkeypatch.context() as patch:
        patch.setattr(budgets, "ONNX_SECONDS", 1)
        with pytest.raises(ModelError) as caught:
            raise_opset(Model(model), 13)
    assert "opset 12" in str(caught.value) and "1 s" in str(caught.value)
    convert()


@needs_proc
def test_process_loads_neither_numpy_nor_python_of_onnx() -> None:
    convert()
    (maps,) = onnx_processes().values()
    assert "numpy" not in maps


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
def test_command_survives_model_that_crashes_onnx(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(CRASHES["Conv"], "m.onnx")
    assert run(command.split()) in (0, 2)


@pytest.mark.parametrize("seed", range(30))
def test_random_network_is_harmless(seed: int) -> None:
    assert apart.is_harmless(network(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_network_of_family_is_harmless(family: str) -> None:
    assert apart.is_harmless(FAMILIES[family](30))


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"),
    [
        ("Conv", "x w", {"kernel_shape": [3, 3], "pads": [1] * 4}),
        ("Conv", "x w", {"strides": [2, 2]}),
        ("MaxPool", "x", {"kernel_shape": [5, 5], "pads": [2] * 4}),
        ("MaxPool", "x", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("ConvTranspose", "x w", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("Resize", "x  s", {}),
        ("Pad", "x p", {}),
    ],
)
def test_usual_operator_is_harmless(op: str, inputs: str, attributes: dict[str, Any]) -> None:
    size = attributes.get("kernel_shape", [3, 3])
    constants = {
        "w": np.ones((8, 8, *size), np.float32),
        "s": np.array([1, 1, 2, 2], np.float32),
        "p": np.array([0, 0, 1, 1] * 2),
    }
    assert apart.is_harmless(sliced(operator(op, inputs, **attributes), **constants))


def trial(seed: int, count: int) -> None:
    """Infer plain operators of random inputs without negative dimensions; none may result."""
    rng = random.Random(seed)
    for _ in range(count):
        op = rng.choice(sorted(apart.PLAIN - {"If", "Loop", "Constant"}))
        version = rng.choice((13, 17, 21))
        try:
            schema = onnx.defs.get_schema(op, version, "")
        except onnx.defs.SchemaError:
            continue
        model = random_model(schema, version, rng)
        try:
            inferred = onnx.shape_inference.infer_shapes(model, data_prop=rng.random() < 0.5)
        except Exception:
            continue
        types = [v.type.tensor_type for v in inferred.graph.value_info]
        assert all(d.dim_value >= 0 for t in types for d in t.shape.dim), model


def random_model(schema, version, rng):
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
def test_plain_operators_do_not_crash() -> None:
    assert forked(lambda: trial(50, 1000)) == 0, "the traceback is on stderr"
