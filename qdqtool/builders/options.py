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
    """Builder, settings of the build, and files to keep.

    Attributes:
        builder: One of :data:`BUILDERS`.
        output: Folder for ``build.log`` and the engine; None keeps no files.
        sm: Compute capabilities to build for (TensorRT-RTX only).
        timeout: Time limit of the build in seconds.
        keep_engine: Whether to write ``engine.plan`` into `output`.
        shapes: Minimum, preferred and maximum shape of each input with dynamic dimensions, by name.
    """

    builder: str = "tensorrt-rtx"
    output: str | os.PathLike[str] | None = None
    sm: Sequence[int] | None = None
    timeout: float = 1800.0  # on a Jetson, a build may take many minutes
    keep_engine: bool = False
    shapes: Shapes | None = None

    def __post_init__(self) -> None:
        check_choice("builder", self.builder, BUILDERS, BuilderError)
        if self.sm and self.builder != "tensorrt-rtx":
            raise BuilderError(
                f"compute capabilities are for tensorrt-rtx only: {self.builder} builds for the "
                "GPU of this machine; leave the compute capabilities out",
                code="option-conflict",
                parameter="sm",
            )
        if self.keep_engine and self.output is None:
            raise BuilderError(
                "the engine is kept only in a folder; give `output`",
                code="missing-argument",
                parameter="output",
            )
        limits.check_seconds(self.timeout, "timeout")
