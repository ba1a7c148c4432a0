"""The network stays one graph: after every pass, who writes and who reads a tensor is told the same from both sides."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqtool.modelfile import load
from qdqtool.operator_facts import LayerKind
from qdqtool.trt import importer, pipeline
from qdqtool.trt.layers import Layer, Tensor
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass, PassResult
from qdqtool.trt.targets import TARGETS, target_named
from tests.trt.builder import Graph
from tests.trt.evidence import CASES, HOME
from tests.trt.random_graphs import FORKS, models

CLASSIC = sorted(t for t in TARGETS if not t.startswith("rtx"))


def inconsistencies(network: Network) -> list[str]:
    """Tensors whose producer or consumers are not those that write or read them."""
    found = []
    layers = list(network.layers.values())
    for layer in layers:
        found += [f"{t.name}: written by {layer.name}, says {t.producer}" for t in layer.outputs
                  if t.producer is not layer]  # fmt: skip
        for tensor in layer.inputs:
            if tensor.consumers.get(layer, 0) != sum(t is tensor for t in layer.inputs):
                found.append(f"{tensor.name}: read by {layer.name}, says {tensor.consumers}")
    here = {id(layer) for layer in layers}
    for tensor in {id(t): t for layer in layers for t in (*layer.inputs, *layer.outputs)}.values():
        found += [f"{tensor.name}: says that {c.name} reads it" for c in tensor.consumers
                  if id(c) not in here or not any(t is tensor for t in c.inputs)]  # fmt: skip
        if tensor.producer is not None and id(tensor.producer) not in here:
            found.append(f"{tensor.name}: says that {tensor.producer.name} writes it, which is gone")
    return found


def small() -> tuple[Network, dict[str, Layer], dict[str, Tensor]]:
    """x -> split -> (a, b); add(a, b) -> c; neg(c) -> d, the output."""
    network, layers = Network(), {}
    tensors = {name: Tensor(name) for name in "xabcd"}
    network.inputs, network.outputs = [tensors["x"]], [tensors["d"]]
    tensors["d"].is_output = True
    for name, kind, inputs, outputs in (
        ("split", LayerKind.SLICE, "x", "ab"), ("add", LayerKind.ELEMENTWISE, "ab", "c"),
        ("neg", LayerKind.UNARY, "c", "d"),
    ):  # fmt: skip
        layers[name] = network.add(Layer(kind, name), [tensors[t] for t in inputs], [tensors[t] for t in outputs])
    return network, layers, tensors


def test_a_layer_that_writes_another_tensor_lets_go_of_its_own() -> None:
    """The first output alone; what another layer writes by now stays that one's."""
    network, layers, tensors = small()
    new = Tensor("n")
    network.set_output(layers["split"], new)
    assert layers["split"].outputs == [new, tensors["b"]]
    assert (new.producer, tensors["a"].producer, tensors["b"].producer) == (layers["split"], None, layers["split"])
    assert new in network.touched
    network.set_output(layers["neg"], tensors["a"])  # takes it over, as a swap of two layers does
    assert (tensors["a"].producer, tensors["d"].producer) == (layers["neg"], None)
    layers["add"].outputs[0].producer = layers["neg"]
    network.set_output(layers["add"], tensors["d"])
    assert tensors["c"].producer is layers["neg"], "it is another layer's by now"
    assert (layers["add"].outputs, tensors["d"].producer) == ([tensors["d"]], layers["add"])


def test_one_of_several_outputs_is_exchanged() -> None:
    network, layers, tensors = small()
    new = Tensor("n")
    network.set_output_of(layers["split"], tensors["b"], new)
    assert layers["split"].outputs == [tensors["a"], new]
    assert (new.producer, tensors["b"].producer) == (layers["split"], None)


@pytest.mark.parametrize("edit", ["set_input", "drop_input", "add_input", "replace_reader", "retarget", "remove",
                                  "absorb_reader", "insert_before"])  # fmt: skip
def test_what_an_edit_touches_is_seen_by_the_next_round(edit: str) -> None:
    """A loop's later rounds look at touched tensors alone; both sides of a tensor tell the same behind each edit."""
    network, layers, tensors = small()
    split, add, neg = layers.values()
    if edit == "set_input":
        network.set_input(add, 1, tensors["a"])
        assert tensors["a"].consumers == {add: 2} and tensors["b"].consumers == {}
        assert set(network.touched) == {tensors["a"], tensors["b"]}
    elif edit == "drop_input":
        network.drop_input(add, 0)
        assert add.inputs == [tensors["b"]] and set(network.touched) == {tensors["a"]}
    elif edit == "add_input":
        network.add_input(neg, tensors["a"])
        assert neg.inputs == [tensors["c"], tensors["a"]] and set(network.touched) == {tensors["a"]}
    elif edit == "replace_reader":
        network.set_input(add, 1, tensors["a"])
        network.replace_reader(tensors["a"], tensors["x"], add)
        assert add.inputs == [tensors["x"]] * 2 and tensors["x"].consumers == {split: 1, add: 2}
    elif edit == "retarget":
        network.set_input(add, 1, tensors["a"])
        network.retarget(tensors["a"], tensors["b"])
        assert add.inputs == [tensors["b"]] * 2 and tensors["b"].consumers == {add: 2}
        network.retarget(tensors["d"], tensors["c"])
        assert network.outputs == [tensors["c"]] and (tensors["c"].is_output, tensors["d"].is_output) == (True, False)
    elif edit == "remove":
        network.remove(neg)
        assert not network.alive(neg) and network.of_kind(LayerKind.UNARY) == []
        assert tensors["d"].producer is None and tensors["c"] in network.touched
    elif edit == "absorb_reader":
        network.add_input(neg, tensors["x"])
        network.absorb_reader(add, neg, "both")
        assert (add.name, add.outputs, add.inputs[2:]) == ("both", [tensors["d"]], [tensors["x"]])
        assert tensors["c"].producer is None and tensors["d"].producer is add
    else:
        network.insert_before(add, 1, Layer(LayerKind.SHUFFLE, "between"), Tensor("m"))
        assert [t.name for t in add.inputs] == ["a", "m"] and add.inputs[1].producer.inputs == [tensors["b"]]  # type: ignore[union-attr]
    assert inconsistencies(network) == []


def test_what_no_output_depends_on_is_dead() -> None:
    network, layers, tensors = small()
    network.add(Layer(LayerKind.UNARY, "dead"), [tensors["a"]], [Tensor("e")])
    network.remove_dead()
    assert [layer.name for layer in network.layers.values()] == list(layers)


def test_a_layer_is_visited_behind_all_that_it_reads() -> None:
    """Breadth first, whatever the order of creation; the merging of convolutions goes depth first from the outputs."""
    network = Network()
    t = {name: Tensor(name) for name in "xabcde"}
    for name, inputs in (("last", "bd"), ("d", "c"), ("c", "x"), ("b", "a"), ("a", "x")):
        network.add(Layer(LayerKind.UNARY, name), [t[i] for i in inputs], [t["e" if name == "last" else name]])
    network.outputs = [t["e"]]
    assert [layer.name for layer in network.in_order()] == ["c", "a", "d", "b", "last"]
    assert [layer.name for layer in network.depth_first()] == ["c", "d", "a", "b", "last"]
    network.order()
    assert [layer.name for layer in network.of_kind(LayerKind.UNARY)] == ["c", "a", "d", "b", "last"]
    network.focus = {t["d"]: None}
    assert [layer.name for layer in network.near(LayerKind.UNARY)] == ["d", "last"]
    assert network.near(LayerKind.SLICE) == []


def run_checked(model: onnx.ModelProto, target: str) -> None:
    network = importer.build(load(model))
    assert inconsistencies(network) == []
    run = Pass.run

    def checked(self: Pass, edited: Network) -> PassResult:
        result = run(self, edited)
        assert inconsistencies(edited) == [], self.name
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pass, "run", checked)
        pipeline.run(network, target_named(target))


@given(models(max_steps=8, steps=FORKS), st.sampled_from(CLASSIC))
def test_every_pass_leaves_one_graph(model: onnx.ModelProto, target: str) -> None:
    run_checked(model, target)


@pytest.mark.parametrize("case", CASES)
def test_every_pass_leaves_one_graph_of_a_built_network(case: str) -> None:
    run_checked(load(HOME / case / "model.onnx.gz").proto, "trt8.5")


@pytest.mark.parametrize("target", CLASSIC)
def test_weights_that_two_matrix_products_read(target: str) -> None:
    """The first that becomes a convolution takes its weights in; the constant stays for the other."""
    g = Graph()
    g.input(2, 16)
    weights = g.const("w", np.ones((16, 16), np.float32))
    for op in ("Gemm", "MatMul"):
        first = g.op(op, ["x", weights], f"{op}1")
        run_checked(g.model(first, g.op(op, [g.op("Tanh", "x", f"t{op}"), weights], f"{op}2")), target)
