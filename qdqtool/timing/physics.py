"""The time of a layer from what it computes and moves: a roofline with a floor, padding, partly filled GPUs and an L2.

For a layer on a GPU, all in seconds, for the kernel itself (a profile adds its own overhead to each):

    t        = floor + latency + (compute^p + memory^p)^(1/p)        compute and memory overlap in part
    latency  = clocks for a step x steps of one tile                 what no number of SMs shortens
    compute  = padded MACs / (rate x efficiency)
    memory   = max(bytes that miss the L2 / DRAM, bytes / L2)

``rate`` is the dense peak of the GPU at its clock. Output channels are padded to the tile (64 on tensor cores),
products per output to 32. A convolution of fewer than 16 input channels cannot feed the tensor cores: in INT8 it runs
by dp4a (int8x4 tactics on an A100, an RTX 3080 Ti and an AGX Orin; they write INT8 or FP32), unless a pooling is
fused with it; else at a rate per SM that is the same on all GPUs measured. Depthwise convolutions run on the CUDA
cores. Sources of the constants:
``constants.json``, made by ``benchmarks/fit_timing.py``.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtool.timing import work
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.work import Work, width
from qdqtool.types import BYTES, Precision

Array = npt.NDArray[np.float64]
TILE = 64.0  # output channels that the smallest tensor core tiles worth choosing compute
DEPTH_STEP = 32.0  # products to which the depth is padded
STEP_BYTES = 64.0  # of the depth that a tile takes in one step
DP4A_RATE = 256.0  # MAC per clock and SM: 64 integer lanes of 4 products
DP4A_TILE = 32.0  # output channels of the smallest int8x4 kernels
INT8_BLOCK = 32.0  # channels of the layout NC/32HW32 that INT8 convolutions read and write
L2_BYTES = 32.0  # bytes from L2 to one SM per clock, the unit of the constant ``l2``

PATHS = (
    "int8",
    "fp16",
    "tf32",
    "fp32",
    "dp4a",
)  # what multiplies; each has an efficiency of its own
NAMES = (
    "floor_us",
    "floor_clocks",
    *PATHS,
    "dram",
    "l2",
    "l2_share",
    "few_int8",
    "few_fp16",
    "narrow",
    "step_clocks",
    "step_clocks_old",
    "overlap",
    "depthwise",
    "copy",
    "few_copy",
    "pool",
    "layout",
    "to_float_old",
)


@dataclass(frozen=True)
class Constants:
    """What was fitted."""

    values: Mapping[str, float]  # by name (:data:`NAMES`)
    # compute capability to the factor on computing rates, of those that were measured
    architectures: Mapping[str, float]
    overhead_us: float  # what a profile adds to each layer, in microseconds (the median over GPUs; 0 to 7.5 were seen)
    # ``layer``, ``total`` (the GPU left out of the fit, its architecture measured) and ``total_unknown`` (the
    # architecture left out): 80 % of what was measured lies within this factor of the model; ``gain`` is the same for
    # FP16's time over that of the network with Q/DQ, GPU and network left out
    spreads: Mapping[str, float]
    gap_us: float = (
        0.0  # between two kernels of an engine that runs without a CUDA graph, in microseconds
    )
    # of measured pairs of INT8 and FP16 that differ by more than 5 %, how many of them the model named the faster one
    # of, by a fit that had seen neither the network nor the GPU, and how many there are
    signs: tuple[int, int] = (0, 0)

    def is_measured(self, cc: str) -> bool:
        """Whether the architecture was in the measurements."""
        return cc in self.architectures


def factor_of(cc: str, factors: Mapping[str, float]) -> float:
    """The factor on computing rates; of an architecture that was not measured, that of the nearest one.

    Nearest is the closest number from 7.2 on; without tensor cores (before 7.0) it is that of 7.0 or 1. For Hopper
    that holds: against the ResNet-50 throughput that NVIDIA's MLPerf v3.0 configurations expect, the model is as far
    off on an H100 (x0.69 of the speed) as on an A100 (x0.77).
    """
    number = float(cc)
    near = (
        "7.0"
        if number < 7.0
        else min(
            (k for k in factors if float(k) >= 7.2),
            key=lambda k: (abs(float(k) - number), k),
            default="",
        )
    )
    return factors.get(cc, factors.get(near, 1.0))


@functools.cache
def constants() -> Constants:
    """The constants that ship with the package."""
    data: dict[str, Any] = json.loads(Path(__file__).with_name("constants.json").read_text("utf-8"))
    signs = data["signs"]
    return Constants(
        data["values"],
        data["architectures"],
        data["overhead_us"],
        data["spreads"],
        data["gap_us"],
        (signs["right"], signs["pairs"]),
    )


def features(
    works: Sequence[Work], gpus: Sequence[Gpu], cold: Sequence[bool] | None = None
) -> SimpleNamespace:
    """Arrays of one or more layers, each with its GPU, named as in :func:`_row`; ``cc`` is a list.

    ``cold`` says whose weights come from memory each time.
    """
    rows = [_row(*one) for one in zip(works, gpus, cold or [False] * len(works), strict=True)]
    columns = {name: np.asarray([row[name] for row in rows]) for name in rows[0]}
    return SimpleNamespace(**columns, cc=[g.cc for g in gpus])


def _row(w: Work, g: Gpu, cold: bool) -> dict[str, Any]:
    (path, rate), old = _path(w.precision, g), float(g.cc) < 8.0
    return {
        "kind": w.kind,
        "path": PATHS.index(path),
        "rate": float(rate),  # MAC per clock and SM at the peak
        "clocks": g.per_second,
        "sms": float(g.sms),  # SM clocks per second, all SMs
        "bandwidth": g.bandwidth * 1e9,
        "l2": g.l2 * 1e6,  # bytes/s, bytes
        "pipe": float(g.rates.fp32_pipe),  # FP32 MAC per clock and SM of the CUDA cores
        "pipelined": not old,  # copies to shared memory beside the computing
        "rows": float(w.rows),
        "columns": float(w.columns),
        "depth": float(w.depth * _filled(w.channels, w)),
        "channels": float(w.channels),
        "groups": float(w.groups),
        "steps": float(w.steps),
        # The layer writes far less than its convolution makes: a pooling is fused.
        "pooled": w.written < 0.5 * w.rows * w.columns * w.groups * width(w.written_as),
        "width": width(w.precision),
        "moved": float(_moved(w)),
        "cold": w.weights if cold else 0.0,  # bytes that come from memory each time
        "to_float": old and w.written_as.is_float and not w.precision.is_float,
    }


def _filled(channels: float, w: Work) -> float:
    """By how much a convolution in INT8 pads channels to the 32 of its layout; few channels come in fours.

    The tensors take the room of the padded channels, and the kernel multiplies all of them.
    """
    if (
        w.kind not in (work.CONV, work.DECONV)
        or w.precision != Precision.INT8
        or channels < work.FEW_CHANNELS
    ):
        return 1.0
    return math.ceil(channels / INT8_BLOCK) * INT8_BLOCK / channels


def _moved(w: Work) -> float:
    if w.kind not in (work.CONV, work.DECONV) or w.precision != Precision.INT8 or not w.columns:
        return w.moved
    come, go = _filled(w.channels * w.groups, w), _filled(w.columns * w.groups, w)
    return (
        w.read * come
        + w.weights * come
        + w.written * (1.0 if w.written_as == Precision.FP32 else go)
    )


_INTEGERS = (*BYTES, Precision.FP8, Precision.INT4)


def _path(precision: Precision, gpu: Gpu) -> tuple[str, float]:
    """What multiplies, tensor cores by type, dp4a, or (``fp32``) the CUDA cores; and its rate (FP16 has its own)."""
    r = gpu.rates
    if precision in _INTEGERS and r.int8:
        return "int8" if r.int8_path == "tensor" else "dp4a", r.int8
    if precision in (Precision.FP16, Precision.BF16):
        return ("fp16", r.fp16) if gpu.has_tensor_cores else ("fp32", max(r.fp32_pipe, r.fp16))
    return ("tf32", r.tf32) if gpu.has_tf32 else ("fp32", r.fp32_pipe)


def kernel_seconds(
    f: SimpleNamespace, c: Mapping[str, float], factors: Mapping[str, float]
) -> Array:
    """Seconds of each layer's kernel (:func:`features`) in a running engine.

    ``c`` are constants by name, ``factors`` those on computing rates by compute capability.
    """
    known = {cc: factor_of(cc, factors) for cc in set(f.cc)}
    factor = np.asarray([known[cc] for cc in f.cc])
    tensor = f.path <= PATHS.index("tf32")
    few = f.channels < work.FEW_CHANNELS
    rate = f.rate * np.asarray([c[p] for p in PATHS])[f.path] * factor
    integer = f.path == PATHS.index("int8")
    by_dp4a = few & integer & ~f.pooled
    starved = np.where(
        by_dp4a, DP4A_RATE * c["dp4a"], factor * np.where(integer, c["few_int8"], c["few_fp16"])
    )
    rate = np.where(few & tensor, np.minimum(rate, starved), rate)
    columns = _padded(
        np.maximum(f.columns, 1.0), np.where(by_dp4a, DP4A_TILE, np.where(tensor, TILE, 16.0))
    )
    depth = np.where(tensor, _padded(f.depth, DEPTH_STEP), f.depth)
    steps = depth * f.width / STEP_BYTES
    rate = np.where(tensor & ~few, rate * columns / (columns + c["narrow"]), rate)
    rate = np.where(f.to_float, rate * c["to_float_old"], rate)
    depthwise = f.kind == work.DEPTHWISE
    computing = depthwise | np.isin(f.kind, (work.CONV, work.DECONV))
    by_cores = f.rows * f.columns * f.depth * f.groups / (f.clocks * f.pipe * c["depthwise"])
    compute = np.where(depthwise, by_cores, f.rows * columns * depth * f.groups / (f.clocks * rate))
    compute = np.where(computing, compute, 0.0)
    copies = np.isin(f.kind, (work.COPY, work.CONVERSION, work.REFORMAT, work.SHUFFLE))
    # Few bytes of each position: neither memory nor L2 is used well.
    scattered = few & np.isin(f.kind, (work.CONVERSION, work.REFORMAT))
    of_copies = np.where(
        scattered, c["few_copy"], np.where(f.kind == work.REFORMAT, c["layout"], c["copy"])
    )
    share = np.where(copies, of_copies, np.where(computing, c["dram"], c["pool"]))
    moved = np.maximum(f.moved, 1.0)
    missing = np.clip(1.0 - f.l2 * c["l2_share"] / moved, 0.0, 1.0)
    cached = (
        moved
        / (c["l2"] * f.clocks * L2_BYTES)
        * np.where(scattered, c["copy"] / c["few_copy"], 1.0)
    )
    outside = f.cold + np.maximum(moved - f.cold, 0.0) * missing
    memory = np.maximum(outside / (share * f.bandwidth), cached)
    p = 1.0 + c["overlap"]
    per_step = np.where(f.pipelined, c["step_clocks"], c["step_clocks_old"])
    latency = np.where(computing & ~depthwise, per_step * steps * f.sms / f.clocks, 0.0)
    floor = c["floor_us"] * 1e-6 + c["floor_clocks"] * f.sms / f.clocks
    time: Array = f.steps * floor + latency + (compute**p + memory**p) ** (1.0 / p)
    return np.where(f.kind == work.NOTHING, 0.0, time)


def _padded(values: Array, step: float | Array) -> Array:
    padded: Array = np.ceil(values / step) * step
    return padded


def seconds(works: Sequence[Work], gpu: Gpu) -> Array:
    """Seconds of each layer in a running engine on a GPU."""
    if not works:
        return np.zeros(0)
    fitted = constants()
    cold = [weights_are_cold(works, gpu)] * len(works)
    return kernel_seconds(
        features(works, [gpu] * len(works), cold), fitted.values, fitted.architectures
    )


def weights_are_cold(works: Sequence[Work], gpu: Gpu) -> bool:
    """Whether a network's weights are more than the L2 holds, so that each execution reads them from memory."""
    return sum(w.weights for w in works) > gpu.l2 * 1e6
