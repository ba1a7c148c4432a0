"""Two real processes with gloo on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing, nn

from qdqtool import qat
from qdqtool.errors import DataError
from qdqtool.qat.modules import quantizers_of
from qdqtool.qat.networks import freeze
from tests.qat import nets

if not distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

X = torch.randn(2, 16, 16, 8, 8, generator=torch.Generator().manual_seed(0))
X[1] *= 3


def _network() -> nn.Module:
    model = nets.Skips()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.1
            )
    return nets.prepared(model, X[0])


def _ranges(model: nn.Module) -> list[float]:
    return [float(q.itself._amax) for q in quantizers_of(model) if not q.weight]


def _steps(model: nn.Module, x: torch.Tensor) -> None:
    freeze(model.train())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    place = Path(folder)
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=2
    )
    found: dict[str, Any] = {}
    wrapped = nn.parallel.DistributedDataParallel(_network())
    done = qat.calibrate(wrapped, [X[rank]], "max")  # each has data of its own
    found["images"], found["together"] = done.images, _ranges(wrapped.module)
    _steps(wrapped, X[rank])
    found["weights"] = {k: v.clone() for k, v in wrapped.module.state_dict().items()}
    if rank == 0:
        found["int8"] = qat.export(wrapped, place / "q.onnx", X[0][:1]).summary["int8"]
        torch.save(qat.checkpoint(wrapped), place / "qat.pt")
    before = _network()
    qat.calibrate(before, [X[rank]], "max")
    found["alone"] = _ranges(before)
    found["wrapped later"] = _ranges(nn.parallel.DistributedDataParallel(before).module)
    try:
        qat.calibrate(wrapped, [X[0]] if rank == 0 else [{"nothing": 1}], "max")
    except DataError as error:
        found["failed"] = str(error)

    def own(batch: torch.Tensor) -> torch.Tensor:
        return batch if rank == 0 else {}["img"]

    try:
        qat.calibrate(wrapped, [X[0]], "max", fn=own)
    except (DataError, KeyError) as error:
        found["own"] = f"{type(error).__name__}: {error}"
    torch.save(found, place / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    # Processes that are forked have torch; one that has started CUDA cannot be.
    how = "spawn" if torch.cuda.is_initialized() else "fork"
    multiprocessing.start_processes(_process, (str(tmp_path),), nprocs=2, start_method=how)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    alone = _network()
    qat.calibrate(alone, X, "max")
    assert first["together"] == second["together"] == pytest.approx(_ranges(alone), rel=1e-5)
    assert first["images"] == second["images"] == 32
    _steps(alone, X.flatten(0, 1))  # gradients of two processes are averaged
    for name, value in alone.state_dict().items():
        assert torch.equal(first["weights"][name], second["weights"][name])
        torch.testing.assert_close(first["weights"][name], value, rtol=1e-3, atol=1e-5)
    assert first["int8"] == 5
    restored = nets.Skips()
    qat.restore(restored, torch.load(tmp_path / "qat.pt", weights_only=True))
    assert _ranges(restored) == first["together"]
    # Found by each process alone they differ, until DistributedDataParallel hands out those of the first.
    assert (
        first["alone"] != second["alone"]
        and first["wrapped later"] == second["wrapped later"] == first["alone"]
    )
    # What fails in one process is told by all instead of leaving the others waiting.
    assert first["failed"] == second["failed"]
    assert first["failed"].startswith("process 1: a batch is a dict with nothing")
    assert (
        second["own"] == "KeyError: 'img'"
        and first["own"] == "DataError: process 1: KeyError: 'img'"
    )
