"""What a build came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qdqtool.buildlog.types import Build
    from qdqtool.graph import Model


@dataclass(slots=True)
class BuildResult:
    """One build.

    Attributes:
        builder: ``tensorrt-rtx``, ``trtexec`` or ``tensorrt``.
        status: ``built``; ``refused`` (the parser or the builder says no); ``crashed`` (the compiler died);
            ``timeout``.
        version: The compiler's version, empty when not known.
        targets: Compute capabilities built for (TensorRT-RTX).
        message: The compiler's own words for a refusal, one line; empty for ``built``.
        errors: All error lines, in order.
        seconds: Wall time of the child process.
        model: The model that was built; None before it was read.
        names: Node index to the node's name in the build's own listing.
        build: The log, read, with those names; None when nothing was written.
        log_path: The verbose log; None when not kept.
        engine_path: The engine; None when not kept.
    """

    builder: str
    status: str
    version: str = ""
    targets: tuple[int, ...] = ()
    message: str = ""
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    model: Model | None = None
    names: dict[int, str] = field(default_factory=dict)
    build: Build | None = None
    log_path: Path | None = None
    engine_path: Path | None = None
