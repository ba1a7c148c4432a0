"""Options of builds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qdqtool.errors import BuilderError
from qdqtool.util import limits
from qdqtool.util.checks import check_choice

Shapes = Mapping[str, Sequence[Sequence[int]]]
BUILDERS = ("tensorrt-rtx", "trtexec", "tensorrt")


@dataclass(frozen=True)
class BuildOptions:
    """Builder, its settings, and the files to keep.

    Attributes:
        builder: One of :data:`BUILDERS`.
        output: Folder for ``build.log``, layers and engine. None keeps no file.
        sm: Compute capabilities to build for (TensorRT-RTX).
        timeout: Seconds until the build is stopped.
        keep_engine: Whether to write ``engine.plan`` into `output`.
        shapes: Minimum, preferred and maximum shape of inputs with run-time dimensions.
    """

    builder: str = "tensorrt-rtx"
    output: str | os.PathLike[str] | None = None
    sm: Sequence[int] | None = None
    timeout: float = 1800.0  # on a Jetson, timing tactics takes many minutes
    keep_engine: bool = False
    shapes: Shapes | None = None

    def __post_init__(self) -> None:
        check_choice("builder", self.builder, BUILDERS, BuilderError)
        if self.sm and self.builder != "tensorrt-rtx":
            raise BuilderError(
                f"compute capabilities are for tensorrt-rtx; {self.builder} builds for the GPU of "
                "this machine",
                code="option-conflict",
                parameter="sm",
            )
        if self.keep_engine and self.output is None:
            raise BuilderError(
                "storing an engine requires a folder; give `output`",
                code="missing-argument",
                parameter="output",
            )
        limits.check_seconds(self.timeout, "timeout")
