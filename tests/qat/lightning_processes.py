"""Lightning in two processes on the CPU; it starts the second by running this again."""

import sys
from pathlib import Path

from tests.qat.torchvision_ops import usable_torchvision


def main(folder: Path) -> None:
    usable_torchvision()  # Lightning's metrics import it
    import torch
    from torch.utils.data import DataLoader

    from qdqtool.qat.lightning import QATCallback
    from tests.qat.lightning_module import DATA, SAMPLE, Module, trainer_in

    torch.set_num_threads(1)
    callback = QATCallback(SAMPLE, network="net", method="max", path=folder / "q.onnx")
    trainer_in(folder, callback, 2, devices=2, strategy="ddp").fit(Module(folder), DataLoader(DATA, 8))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
