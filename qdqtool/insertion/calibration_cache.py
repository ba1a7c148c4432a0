"""TensorRT calibration caches of float models, and trtexec commands that build with them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qdqtool.errors import QdqtoolError
from qdqtool.insertion.tensor_scales import LayerPrecisions, TensorScales, format_precisions
from qdqtool.trt.targets import Target
from qdqtool.util.json_text import Json
from qdqtool.util.text import format_count

_MAX_NAMES = 4


def cache_header(target: Target) -> str:
    """Return the first line of a cache: ``TRT-8502-EntropyCalibration2`` for 8.5.2.

    TensorRT ignores a cache of another version or calibrator. From TensorRT 10 on, minor and patch
    number have two digits each (``TRT-100300-EntropyCalibration2``).

    Raises:
        QdqtoolError: The target reads no calibration cache.
    """
    if not target.has_calibrators:
        raise QdqtoolError(
            f"`target` {target.display_name}: this version has no calibrators, so it cannot read "
            "a calibration cache; build the Q/DQ model instead",
            code="unsupported",
            parameter="target",
        )
    return f"TRT-{target.table_number}-EntropyCalibration2"


@dataclass
class CacheReport:
    """A calibration cache and how to build with it.

    Attributes:
        path: The cache.
        model: The float model.
        header: First line of the cache.
        scales: Scales of the tensors.
        precisions: Layer precisions to pass to trtexec.
        has_precisions: Whether the target's trtexec has options for layer precisions.
    """

    path: str
    model: str
    header: str
    scales: TensorScales
    precisions: LayerPrecisions
    has_precisions: bool

    @property
    def command(self) -> str:
        """The trtexec command that builds for a Jetson's DLA, with the GPU as fallback."""
        words = [
            f"--onnx={self.model}",
            f"--calib={self.path}",
            "--int8",
            "--fp16",
            "--useDLACore=0",
            "--allowGPUFallback",
        ]
        if self.has_precisions:
            words += format_precisions(self.precisions)
        return " ".join(["trtexec", *map(shlex.quote, words)])

    def as_json(self) -> Json:
        """Return the JSON fields."""
        return {
            "path": self.path,
            "model": self.model,
            "header": self.header,
            "tensors": len(self.scales.scales),
            "rules": self.scales.counts,
            "missing": list(self.scales.missing),
            "layer_precisions": dict(self.precisions.layers),
            "layer_output_types": dict(self.precisions.outputs),
            "unnamed_nodes": list(self.precisions.unnamed),
            "flags": format_precisions(self.precisions) if self.has_precisions else [],
            "command": self.command,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text report, without the trtexec command."""
        counts = ", ".join(f"{n} {rule}" for rule, n in self.scales.counts.items())
        total = len(self.scales.scales) + len(self.scales.missing)
        yield (
            f"Wrote {self.path}: scales of {len(self.scales.scales)} of {total} tensors "
            f"({counts}); first line {self.header}"
        )
        missing = self.scales.missing
        if missing:
            more = f" and {len(missing) - _MAX_NAMES} more" if len(missing) > _MAX_NAMES else ""
            yield (
                f"  {format_count(len(missing), 'tensor')} without a known range: "
                f"{', '.join(missing[:_MAX_NAMES])}{more}; their layers run in FP16. Calibration "
                "images (`data`) give these ranges."
            )
        if self.precisions.unnamed:
            yield (
                f"  {format_count(len(self.precisions.unnamed), 'node')} without a precision, "
                "because trtexec cannot tell nodes of the same name apart; give each node a unique "
                "name"
            )


def write_cache(
    path: str | os.PathLike[str],
    model: str | os.PathLike[str],
    target: Target,
    scales: TensorScales,
    precisions: LayerPrecisions,
) -> CacheReport:
    """Write a calibration cache for a float model, and return the report.

    Raises:
        QdqtoolError: The target reads no cache, or the file cannot be written.
        DataError: A scale or a tensor name cannot be written to a cache.
    """
    from calibration.cache import write_tensorrt_cache

    header = cache_header(target)
    write_tensorrt_cache(path, scales.scales, header)
    return CacheReport(
        os.fspath(path),
        os.fspath(model) or Path("float.onnx").name,
        header,
        scales,
        precisions,
        target.trtexec.layer_types,
    )
