import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from qdqtool import predict
from qdqtool.qat.modules import find_quantizers
from tests.qat.torchvision_ops import usable_torchvision


@pytest.fixture(scope="module")
def own() -> Any:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("needs lightning (pip install lightning)")
    usable_torchvision()
    return importlib.import_module("tests.qat.lightning_module")


def test_callback_exports_and_resumes(own: Any, tmp_path: Path) -> None:
    loader = DataLoader(own.DATA, 16)
    callback = own.QATCallback(own.SAMPLE, network="net", path=tmp_path / "q.onnx")
    trainer = own.trainer_in(tmp_path, callback, 1)
    module = own.Module()
    trainer.fit(module, loader)
    assert callback.exported is not None and callback.exported.summary["int8"] == 2
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = own.Module()
    trainer = own.trainer_in(tmp_path, own.QATCallback(own.SAMPLE, network="net"), 2)
    trainer.fit(resumed, loader, ckpt_path=tmp_path / "last.ckpt")
    assert len(list(find_quantizers(resumed.net))) == 4
    assert resumed.ranges() == module.ranges() != {}
    torch.load(tmp_path / "last.ckpt", weights_only=True)


@pytest.mark.parametrize("frozen", [None, False, True])
def test_freeze_norms(own: Any, frozen: bool | None, tmp_path: Path) -> None:
    options = {} if frozen is None else {"freeze_norms": frozen}
    module = own.Module()
    before = module.net[1].running_mean.clone()
    callback = own.QATCallback(own.SAMPLE, network="net", **options)
    own.trainer_in(tmp_path, callback, 2).fit(module, DataLoader(own.DATA, 16))
    assert set(module.learned) == {not frozen}
    assert torch.equal(before, module.net[1].running_mean) is bool(frozen)


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed"
)
def test_callback_in_two_processes(own: Any, tmp_path: Path) -> None:
    callback = own.QATCallback(own.SAMPLE, network="net", method="max", path=tmp_path / "q.onnx")
    # A forked process needs no import of torch and Lightning. Once CUDA has started, a process
    # cannot fork.
    strategy = "ddp_spawn" if torch.cuda.is_initialized() else "ddp_fork"
    own.trainer_in(tmp_path, callback, 2, devices=2, strategy=strategy).fit(
        own.Module(tmp_path), DataLoader(own.DATA, 8)
    )
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert float(first["0._input_quantizer._amax"]) == pytest.approx(
        float(own.DATA[:][0].abs().max()), rel=1e-5
    )
    assert predict(tmp_path / "q.onnx", "trt8.5").summary()["int8"] == 2
