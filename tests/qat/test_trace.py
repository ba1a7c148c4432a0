from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from examples.resnet import ResNet18
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.qat.sites import Site
from qdqtool.qat.trace import trace
from tests.qat import nets


def test_every_convolution_add_and_pool_is_found_again() -> None:
    model = ResNet18(10, nets.WIDTH)
    traced = trace(model, torch.randn(1, 3, 64, 64))
    nodes = {n.name: n for n in traced.proto.graph.node}
    kinds = {name: nodes[name].op_type for name, _ in traced.sites}
    assert sorted(kinds.values()) == ["Add"] * 8 + ["Conv"] * 20 + ["Gemm", "GlobalAveragePool"]
    modules = {s.module for s in traced.sites.values() if s.kind == "input"}
    assert modules == {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    for (node, position), site in traced.sites.items():
        if site.kind == "add":  # the node's name holds the block's; the sides are those of "out += identity"
            assert f"/{site.module}/" in node and site.position == position


def test_batch_normalizations_know_their_convolution() -> None:
    traced = trace(ResNet18(10, nets.WIDTH), torch.randn(1, 3, 64, 64))
    assert len(traced.norms) == 20
    assert traced.norms["layer3.0.bn2"] == "layer3.0.conv2"
    assert traced.norms["layer3.0.downsample.1"] == "layer3.0.downsample.0"


def test_the_graph_computes_what_the_network_does_and_has_no_marks() -> None:
    model = ResNet18(10, nets.WIDTH)
    nets.randomise(model)
    x = torch.randn(1, 3, 64, 64)
    proto = trace(model, x).proto
    assert {n.domain for n in proto.graph.node} == {""}
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    result = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    with torch.no_grad():
        np.testing.assert_allclose(result, model.eval()(x).numpy(), rtol=1e-3, atol=1e-4)


def test_the_network_is_left_as_it_was() -> None:
    model = nets.Moody()
    model.b.eval()
    before = [(n, m.training) for n, m in model.named_modules()]
    trace(model, torch.randn(1, 16, 8, 8))
    assert [(n, m.training) for n, m in model.named_modules()] == before
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_adds_in_containers_belong_to_the_module_around_them() -> None:
    traced = trace(nets.Skips(), torch.randn(1, 16, 8, 8))
    adds = {s for s in traced.sites.values() if s.kind == "add"}
    assert adds == {Site("", "add", call, position) for call in (0, 1) for position in (0, 1)}
    assert traced.calls["", "add"] == 2


@pytest.mark.parametrize("sample", [3, "x", None])
def test_a_sample_of_another_kind_is_refused(sample: object) -> None:
    with pytest.raises(QdqtoolError, match="give a tensor, a tuple of the network's arguments or a dict"):
        trace(nets.conv(), sample)


def test_what_torch_cannot_export_is_told_in_one_line() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such thing\nsecond line")

    with pytest.raises(ModelError, match=r"^Broken: torch cannot export it to ONNX: no such thing$"):
        trace(Broken(), torch.zeros(1))
