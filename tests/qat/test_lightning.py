from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("lightning") is None:
    pytest.skip("needs lightning (pip install lightning)", allow_module_level=True)

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from qdqtool.qat.lightning import QATCallback
from qdqtool.qat.modules import quantizers_of
from tests.qat import nets

SAMPLE = torch.randn(1, 16, 8, 8)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nets.conv(), nn.BatchNorm2d(16), nn.ReLU(), nets.conv())

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        assert not self.net[1].training
        result: torch.Tensor = (self(batch[0]) - batch[1]).square().mean()
        return result

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def _trainer(folder: Path, callback: QATCallback, epochs: int) -> Any:
    return lightning.Trainer(
        max_epochs=epochs, callbacks=[callback], accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip


def test_fit_export_and_resume(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(32, 16, 8, 8), torch.randn(32, 16, 8, 8))
    loader = DataLoader(data, 16)
    callback = QATCallback(SAMPLE, network="net", path=tmp_path / "q.onnx")
    trainer = _trainer(tmp_path, callback, 1)
    module = Module()
    trainer.fit(module, loader)
    assert callback.exported is not None and callback.exported.summary["int8"] == 2
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = QATCallback(SAMPLE, network="net")
    other = Module()
    _trainer(tmp_path, again, 2).fit(other, loader, ckpt_path=tmp_path / "last.ckpt")
    assert len(list(quantizers_of(other.net))) == 4
    assert torch.equal(other.net[0]._input_quantizer._amax, module.net[0]._input_quantizer._amax)
    torch.load(tmp_path / "last.ckpt", weights_only=True)
