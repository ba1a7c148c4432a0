from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import TensorDataset

from qdqtool.qat.lightning import QATCallback
from tests.qat import nets

torch.manual_seed(0)
SAMPLE = torch.randn(1, 16, 8, 8)
SIZES = torch.linspace(0.5, 2, 32).view(-1, 1, 1, 1)
DATA = TensorDataset(torch.randn(32, 16, 8, 8) * SIZES, torch.randn(32, 16, 8, 8))


class Module(lightning.LightningModule):
    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            nets.conv(), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), nets.conv()
        )
        self.learned: list[bool] = []
        self.folder = folder

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.learned.append(self.net[1].training)
        result: torch.Tensor = (self(batch[0]) - batch[1]).square().mean()
        return result

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)

    def ranges(self) -> dict[str, torch.Tensor]:
        return {k: v for k, v in self.net.state_dict().items() if k.endswith("_amax")}

    def on_train_end(self) -> None:
        if self.folder is not None:
            torch.save(
                dict(self.net.named_parameters()) | self.ranges(),
                self.folder / f"{self.global_rank}.pt",
            )


def trainer_in(folder: Path, callback: QATCallback, epochs: int, **options: Any) -> Any:
    return lightning.Trainer(
        max_epochs=epochs,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
