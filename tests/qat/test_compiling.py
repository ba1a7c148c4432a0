from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from qdqtool import qat
from qdqtool.errors import QdqtoolError
from tests.qat import nets
from tests.qat.backends import BACKENDS

X = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_network_computes_trains_and_exports_as_without(backend: str, tmp_path: Path) -> None:
    """Traced by torch's compiler, gradients included; the code it would make of that is not ours to test."""
    torch.manual_seed(0)
    model = nets.Skips()
    nets.randomise(model)
    qat.prepare(model, X, backend=backend, report=None)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    qat.calibrate(compiled, [X])
    qat.calibrate(plain, [X])
    torch.testing.assert_close(compiled.eval()(X), plain.eval()(X))
    for network in (compiled.train(), plain.train()):
        network(X).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)
    summaries = [qat.export(n, tmp_path / f"{i}.onnx", X).summary for i, n in enumerate((compiled, plain))]
    assert summaries[0] == summaries[1] and summaries[0]["int8"] == 5
    with pytest.raises(QdqtoolError, match=r"prepare the network before torch\.compile"):
        qat.prepare(torch.compile(nets.Skips()), X)
