"""Callback for Lightning: insert quantizers before training, write a Q/DQ model after it.

    from qdqtool.qat.lightning import QATCallback
    Trainer(callbacks=[QATCallback(sample, path="model_qdq.onnx")]).fit(module, loader)

The callback works with ``lightning`` and with ``pytorch_lightning``.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from qdqtool.errors import QdqtoolError
from qdqtool.qat.batch_norms import FREEZE_NORMS, freeze_batch_norms
from qdqtool.qat.exporting import Export, export
from qdqtool.qat.modules import find_uncalibrated
from qdqtool.qat.planning import Plan
from qdqtool.qat.preparation import (
    apply_plan,
    is_prepared,
    plan_from_dict,
    plan_to_dict,
    prepare,
    read_plan,
)
from qdqtool.qat.ranges import calibrate

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError as error:
        raise QdqtoolError(
            f"the callback needs Lightning ({error}); run pip install lightning",
            code="missing-package",
        ) from error


class QATCallback(Callback):  # type: ignore[misc]
    """Lightning callback for quantization-aware training.

    The callback inserts quantizers before Lightning creates the optimizer and wraps the network. It
    calibrates the quantizers once, on batches of the training loader. Checkpoints contain the plan,
    which states where the network has quantizers. If training is resumed, the quantizers of the
    plan are inserted before the weights are loaded.

    Args:
        sample: A tensor, a tuple of arguments or a dict of keyword arguments of the network.
        network: Attribute of the LightningModule that holds the network. If empty, the
            LightningModule is the network.
        fn: Function that converts a batch of the training loader to the arguments of the network,
            as for :func:`qdqtool.qat.calibrate`.
        batches: Number of batches for the calibration.
        method: Method that chooses ranges, as for :func:`qdqtool.qat.calibrate`.
        freeze_norms: Whether BatchNormalization keeps its statistics, see
            :data:`qdqtool.qat.batch_norms.FREEZE_NORMS`.
        path: File to which the Q/DQ model is written when training ends. None: no file is written.
        options: Options of :func:`qdqtool.qat.prepare`, such as ``target``, ``backend``, ``head``
            and ``exclude``.

    Attributes:
        exported: Result of the export at the end of the training; None until then.
    """

    def __init__(
        self,
        sample: Any,
        *,
        network: str = "",
        fn: Any = None,
        batches: int = 32,
        method: str = "mse",
        freeze_norms: bool = FREEZE_NORMS,
        path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.sample, self.network, self.fn = sample, network, fn
        self.batches, self.method, self.freeze_norms = batches, method, freeze_norms
        self.path, self.options = path, {"report": None, **options}
        self.exported: Export | None = None
        self._plan: Plan | None = None

    def _find_network(self, module: Any) -> nn.Module:
        network = getattr(module, self.network, None) if self.network else module
        if not isinstance(network, nn.Module):
            raise QdqtoolError(
                f"network='{self.network}': the LightningModule has no module with this name; give "
                "the attribute name of the network",
                code="unknown-choice",
                parameter="network",
            )
        return network

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Insert missing quantizers, with the checkpoint's plan if training is resumed."""
        network = self._find_network(pl_module)
        if not is_prepared(network):
            if self._plan is not None:
                apply_plan(network, self._plan)
            else:
                prepare(network, self.sample, **self.options)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Calibrate all quantizers if one of them has no range yet."""
        network = self._find_network(pl_module)
        if find_uncalibrated(network):
            trainer.fit_loop.setup_data()
            calibrate(
                network,
                trainer.train_dataloader,
                self.method,
                fn=self.fn,
                max_batches=self.batches,
                together=True,
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Freeze BatchNormalization again if requested: Lightning resets the mode each epoch."""
        if self.freeze_norms:
            freeze_batch_norms(self._find_network(pl_module))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the Q/DQ model in the main process, if `path` is given."""
        if self.path is not None and trainer.is_global_zero:
            self.exported = export(self._find_network(pl_module), self.path, self.sample)

    def state_dict(self) -> dict[str, Any]:
        """Return the plan as dicts, lists, strings and numbers, for Lightning's checkpoint."""
        return {} if self._plan is None else {"plan": plan_to_dict(self._plan)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the plan from Lightning's checkpoint."""
        if "plan" in state_dict:
            self._plan = plan_from_dict(state_dict["plan"])

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Read the plan from the network, so that `state_dict` can return it."""
        self._plan = read_plan(self._find_network(pl_module))
