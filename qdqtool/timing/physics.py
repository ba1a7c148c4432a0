"""The time of a layer from what it computes and moves: a roofline with a floor, padding, partly filled GPUs and an L2.

For a layer on a GPU, all in seconds, for the kernel itself (a profile adds its own overhead to each):

    t        = floor + (compute^p + memory^p)^(1/p)                  compute and memory overlap in part
    compute  = padded MACs / (rate x efficiency) + ramp              ramp: the first and last tile of every SM
    memory   = max(bytes that miss the L2 / DRAM, bytes / L2)

``rate`` is the dense peak of the GPU at its clock. Output channels are padded to the tile (64 on tensor cores), products
per output to 32. A convolution of fewer than 16 input channels cannot feed the tensor cores: it runs at a rate per SM
that is the same on all GPUs measured. Depthwise convolutions run on the CUDA cores. Sources of the constants:
``constants.json``, made by ``benchmarks/fit_timing.py``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from qdqtool.timing import work
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.work import Work
from qdqtool.types import Precision

Array = npt.NDArray[np.float64]
TILE = 64.0  # output channels that the smallest tensor core tiles worth choosing compute
DEPTH_STEP = 32.0  # products that a tile takes in one step
FEW_CHANNELS = 16  # input channels below which a convolution's kernel cannot feed the tensor cores
L2_BYTES = 32.0  # bytes from L2 to one SM per clock, the unit of the constant ``l2``

PATHS = ("int8", "fp16", "tf32", "fp32", "dp4a")  # what multiplies; each has an efficiency of its own
NAMES = (
    "floor_us", "int8", "fp16", "tf32", "fp32", "dp4a", "dram", "l2", "l2_share", "few_int8", "few_fp16", "ramp",
    "overlap", "depthwise", "copy", "pool",
)


@dataclass(frozen=True)
class Constants:
    """What was fitted.

    Attributes:
        values: By name (:data:`NAMES`).
        architectures: Compute capability to the factor on computing rates; 1 for one that was not measured.
        overhead_us: What a profile adds to each layer, in microseconds.
        layer_spread: 80 % of measured layers lie within this factor of the model, on a GPU left out of the fit.
        total_spread: Compute capability (or ``measured``, ``unknown``) to the same for whole networks.
    """

    values: Mapping[str, float]
    architectures: Mapping[str, float]
    overhead_us: float
    layer_spread: float
    total_spread: Mapping[str, float]

    def architecture(self, cc: str) -> float:
        return self.architectures.get(cc, 1.0)

    def is_measured(self, cc: str) -> bool:
        """Whether the architecture was in the measurements."""
        return cc in self.architectures


@functools.cache
def constants() -> Constants:
    """The constants that ship with the package."""
    data: dict[str, Any] = json.loads(resources.files("qdqtool.timing").joinpath("constants.json").read_text("utf-8"))
    return Constants(
        data["values"], data["architectures"], data["overhead_us"], data["layer_spread"], data["total_spread"]
    )


@dataclass
class Features:
    """Layers as arrays, one element for each, with the GPU figures that go with it."""

    kind: npt.NDArray[np.str_]
    path: npt.NDArray[np.int64]
    rate: Array  # MAC per clock and SM at the peak
    clocks: Array  # SM clocks per second, all SMs
    sms: Array
    bandwidth: Array  # bytes/s
    l2: Array  # bytes
    pipe: Array  # FP32 MAC per clock and SM of the CUDA cores
    rows: Array
    columns: Array
    depth: Array
    channels: Array
    groups: Array
    moved: Array
    steps: Array
    cc: list[str]


def features(works: Sequence[Work], gpus: Sequence[Gpu]) -> Features:
    """Arrays of layers, each with its GPU."""

    def array(values: Sequence[float]) -> Array:
        return np.asarray(values, dtype=np.float64)

    paths = [_path(w.precision, g) for w, g in zip(works, gpus, strict=True)]
    return Features(
        np.asarray([w.kind for w in works], dtype=np.str_),
        np.asarray([PATHS.index(p) for p in paths], dtype=np.int64),
        array([_rate(p, g) for p, g in zip(paths, gpus, strict=True)]),
        array([g.per_second for g in gpus]),
        array([g.sms for g in gpus]),
        array([g.bandwidth * 1e9 for g in gpus]),
        array([g.l2 * 1e6 for g in gpus]),
        array([g.rates.fp32_pipe for g in gpus]),
        array([w.rows for w in works]),
        array([w.columns for w in works]),
        array([w.depth for w in works]),
        array([w.channels for w in works]),
        array([w.groups for w in works]),
        array([w.moved for w in works]),
        array([w.steps for w in works]),
        [g.cc for g in gpus],
    )


def _path(precision: Precision, gpu: Gpu) -> str:
    rates = gpu.rates
    if precision in (Precision.INT8, Precision.UINT8, Precision.FP8, Precision.INT4) and rates.int8:
        return "int8" if rates.int8_path == "tensor" else "dp4a"
    if precision in (Precision.FP16, Precision.BF16) and rates.fp16 > rates.fp32_pipe:
        return "fp16" if rates.fp16 > 4 * rates.fp32_pipe or rates.tf32 or rates.cc == "7.5" else "fp32"
    return "tf32" if rates.tf32 > rates.fp32_pipe else "fp32"


def _rate(path: str, gpu: Gpu) -> float:
    r = gpu.rates
    return {"int8": r.int8, "dp4a": r.int8, "fp16": r.fp16, "tf32": r.tf32}.get(path, max(r.fp32_pipe, 1.0))


def kernel_seconds(f: Features, c: Mapping[str, float], factors: Mapping[str, float]) -> Array:
    """Seconds of each layer's kernel in a running engine.

    Args:
        f: The layers.
        c: Constants by name.
        factors: Compute capability to the factor on computing rates.
    """
    factor = np.asarray([factors.get(cc, 1.0) for cc in f.cc])
    tensor = f.path <= PATHS.index("tf32")
    few = f.channels < FEW_CHANNELS
    rate = f.rate * np.asarray([c[p] for p in PATHS])[f.path] * factor
    starved = factor * np.where(f.path == PATHS.index("int8"), c["few_int8"], c["few_fp16"])
    rate = np.where(few & tensor, np.minimum(rate, starved), rate)
    columns = np.where(tensor, _padded(f.columns, TILE), _padded(f.columns, 16.0))
    depth = np.where(tensor & ~few, _padded(f.depth, DEPTH_STEP), f.depth)
    clock = f.clocks / f.sms
    filled = np.minimum(1.0, np.maximum(1.0, f.rows / TILE) * np.maximum(1.0, columns / TILE) * f.groups / f.sms)
    compute = f.rows * columns * depth * f.groups / (f.clocks * rate) + c["ramp"] * filled * depth * TILE**2 / (
        clock * rate
    )
    depthwise = f.kind == work.DEPTHWISE
    computing = depthwise | np.isin(f.kind, (work.CONV, work.DECONV))
    compute = np.where(depthwise, f.rows * f.columns * f.depth * f.groups / (f.clocks * f.pipe * c["depthwise"]), compute)
    compute = np.where(computing, compute, 0.0)
    copies = np.isin(f.kind, (work.COPY, work.CONVERSION, work.REFORMAT, work.SHUFFLE))
    share = np.where(copies, c["copy"], np.where(computing, c["dram"], c["pool"]))
    moved = np.maximum(f.moved, 1.0)
    missing = np.clip(1.0 - f.l2 * c["l2_share"] / moved, 0.0, 1.0)
    cached = moved / (c["l2"] * f.clocks * L2_BYTES) * (c["dram"] / share)
    memory = np.maximum(moved * missing / (share * f.bandwidth), cached)
    p = 1.0 + c["overlap"]
    time: Array = f.steps * c["floor_us"] * 1e-6 + (compute**p + memory**p) ** (1.0 / p)
    return np.where(f.kind == work.NOTHING, 0.0, time)


def _padded(values: Array, step: float) -> Array:
    padded: Array = np.ceil(values / step) * step
    return padded


def seconds(works: Sequence[Work], gpu: Gpu, fitted: Constants | None = None) -> Array:
    """Seconds of each layer in a running engine on a GPU."""
    if not works:
        return np.zeros(0)
    fitted = fitted or constants()
    return kernel_seconds(features(works, [gpu] * len(works)), fitted.values, fitted.architectures)
