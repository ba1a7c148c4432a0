"""The network stays one graph: after every pass, who writes and who reads a tensor is told the same from both sides."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qdqtool.modelfile import load
from qdqtool.trt import importer, pipeline
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


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
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
