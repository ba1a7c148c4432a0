"""Options of time estimates."""

from __future__ import annotations

from dataclasses import dataclass

from qdqtool.errors import QdqtoolError


@dataclass(frozen=True)
class GpuOptions:
    """GPU that times are estimated for.

    Attributes:
        gpu: Name as in ``qdqtool gpus``. None: the GPU that a build names; no times
            without a build.
        clock: SM clock in MHz under load. None: the boost clock.
        power: Power mode of a Jetson, such as ``15W`` or ``MAXN``.
    """

    gpu: str | None = None
    clock: float | None = None
    power: str | None = None

    def __post_init__(self) -> None:
        if self.power is not None and self.gpu is None:
            raise QdqtoolError(
                "`power` has no effect without a GPU; give `gpu` as well",
                code="option-without-effect",
                parameter="gpu",
            )
        if self.clock is not None:
            object.__setattr__(self, "clock", float(self.clock))


@dataclass(frozen=True)
class TimingOptions(GpuOptions):
    """GPU, batch and calibration of a time estimate.

    Attributes:
        sm: Compute capability such as ``7.5``, for findings without times.
        batch: Batch size to estimate for. None: the model's batch size.
        no_fp16: Whether float layers compute in FP32.
        calibrate: A measured time, a profile or a calibration file.
        save_calibration: File to which the correction is written.
        size: Height and width in pixels to estimate for, if the model does not fix them. None: the
            size in the model's metadata, else 640x640.
    """

    sm: str | None = None
    batch: int | None = None
    no_fp16: bool = False
    calibrate: str | None = None
    save_calibration: str | None = None
    size: tuple[int, int] | None = None
