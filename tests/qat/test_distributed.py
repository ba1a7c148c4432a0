from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing, nn

from qdqtool import qat
from qdqtool.errors import DataError
from qdqtool.qat.batch_norms import freeze_batch_norms
from qdqtool.qat.modules import find_quantizers
from tests.qat import nets

if not distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

X = torch.randn(2, 16, 16, 8, 8, generator=torch.Generator().manual_seed(0))
X[1] *= 3


def new_network() -> nn.Module:
    model = nets.Skips()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.1
            )
    return nets.prepared(model, X[0])


def ranges(model: nn.Module) -> list[float]:
    return [nets.range_of(model, q.name) for q in find_quantizers(model) if not q.is_weight]


def train(model: nn.Module, x: torch.Tensor) -> None:
    freeze_batch_norms(model.train())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def run_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    place = Path(folder)
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=2
    )
    # A network that outlives the group can wait forever for the group's thread when it is deleted.
    torch.save(calibrate_and_train(rank, place), place / f"{rank}.pt")
    distributed.destroy_process_group()


def calibrate_and_train(rank: int, place: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    wrapped = nn.parallel.DistributedDataParallel(new_network())
    calibration = qat.calibrate(wrapped, [X[rank]], "max")  # each process has its own data
    results["images"], results["together"] = calibration.images, ranges(wrapped.module)
    train(wrapped, X[rank])
    results["weights"] = {k: v.clone() for k, v in wrapped.module.state_dict().items()}
    if rank == 0:
        results["int8"] = qat.export(wrapped, place / "q.onnx", X[0][:1]).summary["int8"]
        torch.save(qat.checkpoint(wrapped), place / "qat.pt")
    before = new_network()
    qat.calibrate(before, [X[rank]], "max")
    results["alone"] = ranges(before)
    results["wrapped later"] = ranges(nn.parallel.DistributedDataParallel(before).module)

    def fail_in_second(batch: torch.Tensor) -> torch.Tensor:
        return batch if rank == 0 else {}["img"]

    for name, data, options in (
        ("data", [X[0]] if rank == 0 else [{"nothing": 1}], {}),
        ("function", [X[0]], {"fn": fail_in_second}),
    ):
        try:
            qat.calibrate(wrapped, data, "max", **options)
        except (DataError, KeyError) as error:
            results[name] = type(error).__name__, getattr(error, "code", ""), str(error)
    return results


@pytest.mark.slow
def test_calibration_and_training_in_two_processes(tmp_path: Path) -> None:
    # Forked processes have imported torch; a process that has started CUDA cannot fork.
    method = "spawn" if torch.cuda.is_initialized() else "fork"
    multiprocessing.start_processes(run_process, (str(tmp_path),), nprocs=2, start_method=method)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    alone = new_network()
    qat.calibrate(alone, X, "max")
    assert first["together"] == second["together"] == pytest.approx(ranges(alone), rel=1e-5)
    assert first["images"] == second["images"] == 32
    train(alone, X.flatten(0, 1))  # gradients of two processes are averaged
    for name, value in alone.state_dict().items():
        assert torch.equal(first["weights"][name], second["weights"][name])
        torch.testing.assert_close(first["weights"][name], value, rtol=1e-3, atol=1e-5)
    assert first["int8"] == 5
    restored = nets.Skips()
    qat.restore(restored, torch.load(tmp_path / "qat.pt", weights_only=True))
    assert ranges(restored) == first["together"] and first["alone"] != second["alone"]
    # Processes calibrate apart. Wrapping then copies the ranges of the first process.
    assert first["alone"] != second["alone"]
    assert first["wrapped later"] == second["wrapped later"] == first["alone"]
    # A failure in one process ends all of them, instead of leaving the others waiting.
    assert first["data"] == second["data"]
    assert first["data"][1] == "failed-elsewhere" and "process 1" in first["data"][2]
    assert first["function"][1] == "failed-elsewhere" and "KeyError: 'img'" in first["function"][2]
    assert second["function"][0] == "KeyError"
