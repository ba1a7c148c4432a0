"""Time of a layer from its work: a roofline model with minimum time, padding and L2 cache.

The model gives the seconds of a kernel on a GPU, without the overhead that a profile adds:

    t        = minimum + latency + (compute^p + memory^p)^(1/p)   compute and memory overlap
    latency  = clocks for a step x steps of one tile                 equal for any number of SMs
    compute  = padded MACs / (rate x efficiency)
    memory   = max(bytes that miss the L2 / DRAM bandwidth, all bytes / L2 bandwidth)

The share of bytes that miss the L2 follows from the number of elements, not from their type.

``rate`` is the dense peak of the GPU at its clock. Output channels are padded to a multiple of the
tile (64 on tensor cores), and products per output to a multiple of 32.

A convolution of fewer than 16 input channels cannot use the tensor cores fully. In INT8, such a
convolution runs with dp4a, unless a pooling is fused with it (int8x4 tactics on an A100, an RTX
3080 Ti and an AGX Orin; these tactics write INT8 or FP32). All other convolutions of so few
channels have a rate per SM that is equal on all measured GPUs. Depthwise convolutions run on the
CUDA cores. On Blackwell, where Myelin compiles the whole engine, kernels start sooner, and INT8
reaches a smaller part of its peak rate. The constants come from ``constants.json``, which
``benchmarks/fit_timing.py`` writes.

No FP8 engine was measured. FP8 is assumed to have the efficiency of INT8, with the peak rate of FP8
(``Gpu.fp8_rate``). On Ada and GeForce Blackwell, FP8 convolutions are slower than this assumption,
and slower than INT8 convolutions (:data:`FP8_CONVOLUTION`).
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

from qdqtool.ir.precision import BYTES, Precision
from qdqtool.timing import work
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.work import LayerWork, bytes_per_element

Array = npt.NDArray[np.float64]
TILE = 64.0  # output channels of the smallest efficient tile of tensor cores
DEPTH_STEP = 32.0  # products per output value are padded to a multiple of this
STEP_BYTES = 64.0  # bytes of the depth that a tile reads in one step
DP4A_RATE = 256.0  # MAC per clock and SM: 64 integer lanes of 4 products
DP4A_TILE = 32.0  # output channels of the smallest int8x4 kernels
INT8_BLOCK = 32.0  # channels of the layout NC/32HW32 that INT8 convolutions read and write
L2_BYTES = 32.0  # bytes from L2 to one SM per clock, the unit of the constant ``l2``

# Speed of FP8 convolutions divided by the speed of INT8 convolutions, on GPUs whose tensor cores
# run ``mma.sync``. A FAR3D with a quantized CNN on an RTX 6000 Ada takes 24.6 ms in INT8 and
# 31.5 ms in FP8, although the peak rates are equal (TensorRT 10.11; NVIDIA/Model-Optimizer,
# examples/onnx_ptq/far3d/README.md). A ResNet-18 on an RTX 4090D was slower in FP8 than in FP16
# (Model-Optimizer issue 512). The ratio is assumed for compute capability 12.x, whose SM is like
# the SM of Ada. Hopper, B200 and Thor have other instructions and no published times.
FP8_CONVOLUTION = 24.6 / 31.5
_MMA_SYNC = ("8.9", "12.0", "12.1")

_CLOCK_STEPS = 8  # steps of the iteration over clock and utilization
_HBM = ("6.0", "7.0", "8.0", "9.0", "10.0", "10.3")  # compute capabilities with stacked memory

# Hardware units that multiply; each has its own fitted efficiency.
PATHS = ("int8", "fp16", "tf32", "fp32", "dp4a")
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
    "few_copy_hbm",
    "pool",
    "layout",
    "to_float_old",
    "floor_myelin",
    "int8_myelin",
)


@dataclass(frozen=True)
class TimeConstants:
    """Constants that were fitted to measured times.

    Attributes:
        values: Constants by name (:data:`NAMES`).
        architectures: Factor on computing rates, by compute capability of the measured GPUs.
        overhead_us: Microseconds that a profile adds to each layer (the median over GPUs; 0 to
            7.5 were seen).
        spreads: Factors within which 80 % of measured times lie. ``layer`` and ``total`` hold for a
            GPU whose times are not part of the fit, but times of its architecture are.
            ``total_unknown`` holds if no times of its architecture are part of the fit. ``gain`` is
            the factor within which 80 % of gains lie (time in FP16 divided by time with Q/DQ), if
            neither the GPU nor the network is part of the fit.
        gap_us: Microseconds between two kernels of an engine that runs without a CUDA graph.
        gap_myelin_us: The same gap on GPUs whose whole engine Myelin compiles.
        signs: Number of correct guesses and number of pairs. Each pair has measured times of INT8
            and FP16 that differ by more than 5 %. A guess is correct if the time model, fitted
            without this network and GPU, predicts which type is faster.
    """

    values: Mapping[str, float]
    architectures: Mapping[str, float]
    overhead_us: float
    spreads: Mapping[str, float]
    gap_us: float = 0.0
    gap_myelin_us: float = 0.0
    signs: tuple[int, int] = (0, 0)

    def gap_ms(self, gpu: Gpu) -> float:
        """Return the milliseconds between two kernels of an engine without a CUDA graph."""
        return (self.gap_myelin_us if gpu.has_fused_conversions else self.gap_us) * 1e-3

    def is_measured(self, cc: str) -> bool:
        """Return whether a GPU of this compute capability was measured."""
        return cc in self.architectures


def architecture_factor(cc: str, factors: Mapping[str, float]) -> float:
    """Return the factor on computing rates of an architecture.

    An architecture that was not measured has the factor of the measured architecture (from 7.2 on)
    with the closest number. GPUs without tensor cores (before 7.0) have the factor of 7.0, or 1.
    Evidence for Hopper: the time model predicts 0.69 of the ResNet-50 throughput that NVIDIA's
    MLPerf v3.0 configurations expect of an H100. For an A100, the fraction is similar (0.77).
    """
    number = float(cc)
    nearest = "7.0"
    if number >= 7.0:
        nearest = min(
            (key for key in factors if float(key) >= 7.2),
            key=lambda key: (abs(float(key) - number), key),
            default="",
        )
    return factors.get(cc, factors.get(nearest, 1.0))


@functools.cache
def load_constants() -> TimeConstants:
    """Return the constants that ship with the package."""
    data: dict[str, Any] = json.loads(Path(__file__).with_name("constants.json").read_text("utf-8"))
    signs = data["signs"]
    return TimeConstants(
        data["values"],
        data["architectures"],
        data["overhead_us"],
        data["spreads"],
        data["gap_us"],
        data["gap_myelin_us"],
        (signs["right"], signs["pairs"]),
    )


def kernel_features(
    works: Sequence[LayerWork], gpus: Sequence[Gpu], cold: Sequence[bool] | None = None
) -> SimpleNamespace:
    """Return the features of layers: arrays of shape [layers], by name; ``cc`` is a list.

    Args:
        works: Layers.
        gpus: GPU of each layer.
        cold: For each layer, whether its weights are read from memory in each run.
    """
    colds = cold or [False] * len(works)
    rows = [_feature_row(*layer) for layer in zip(works, gpus, colds, strict=True)]
    columns = {}
    for name in rows[0]:
        columns[name] = np.asarray([row[name] for row in rows])
    return SimpleNamespace(**columns, cc=[g.cc for g in gpus])


def _feature_row(w: LayerWork, gpu: Gpu, cold: bool) -> dict[str, Any]:
    path, rate = _compute_path(w.precision, gpu)
    is_old = float(gpu.cc) < 8.0
    is_fp8 = w.precision == Precision.FP8
    # If a layer writes far fewer bytes than its convolution computes, a pooling is fused.
    convolution_bytes = w.rows * w.columns * w.groups * bytes_per_element(w.written_as)
    return {
        "kind": w.kind,
        "path": PATHS.index(path),
        "rate": float(rate),  # MAC per clock and SM at the peak
        "clocks": gpu.clocks_per_second,  # sum over all SMs, per second
        "sms": float(gpu.sms),
        "bandwidth": gpu.bandwidth * 1e9,  # bytes per second
        "l2": gpu.l2 * 1e6,  # bytes
        "has_hbm": gpu.cc in _HBM,
        "pipe": float(gpu.rates.fp32_pipe),  # FP32 MAC per clock and SM of the CUDA cores
        "pipelined": not is_old,  # copies to shared memory overlap with computing
        "rows": float(w.rows),
        "columns": float(w.columns),
        "depth": float(w.depth * _padding_factor(w.channels, w)),
        "channels": float(w.channels),
        "groups": float(w.groups),
        "steps": float(w.steps),
        "pooled": w.written < 0.5 * convolution_bytes,
        "width": bytes_per_element(w.precision),
        "moved": float(_count_padded_bytes(w)),
        "in_fp16": _count_fp16_bytes(w),
        "cold": w.weights if cold else 0.0,  # bytes of weights read from memory in each run
        "is_myelin": gpu.has_fused_conversions,
        # Slow INT8 was measured only on 12.0. On 10.x, another instruction computes INT8.
        "is_slow_int8": float(gpu.cc) >= 12.0 and w.precision in BYTES,
        "is_fp8": is_fp8,
        "is_fp8_convolution": is_fp8 and not w.is_matrix_product and gpu.cc in _MMA_SYNC,
        "int8_rate": float(gpu.rates.int8),
        "to_float": is_old and w.written_as.is_float and not w.precision.is_float,
    }


def _is_padded(w: LayerWork) -> bool:
    return w.kind in (work.CONV, work.DECONV) and w.precision == Precision.INT8


def _padding_factor(channels: float, w: LayerWork) -> float:
    """Return the ratio of padded to actual channels of an INT8 convolution.

    The layout has blocks of 32 channels. The factor is 1 for few channels, which have a layout of
    groups of four, and for layers that are not INT8 convolutions. Both bytes and products are
    multiplied by the factor.
    """
    if not _is_padded(w) or channels < work.FEW_CHANNELS:
        return 1.0
    return math.ceil(channels / INT8_BLOCK) * INT8_BLOCK / channels


def _count_padded_bytes(w: LayerWork) -> float:
    if not _is_padded(w) or not w.columns:
        return w.bytes_moved
    inputs = _padding_factor(w.channels * w.groups, w)
    outputs = _padding_factor(w.columns * w.groups, w)
    written = w.written * (1.0 if w.written_as == Precision.FP32 else outputs)
    return w.read * inputs + w.weights * inputs + written


def _count_fp16_bytes(w: LayerWork) -> float:
    """Return the bytes that the layer would move if all tensors were FP16."""
    read = (w.read + w.weights) / bytes_per_element(w.precision)
    return 2.0 * (read + w.written / bytes_per_element(w.written_as))


_INTEGERS = (*BYTES, Precision.FP8, Precision.INT4)


def _compute_path(precision: Precision, gpu: Gpu) -> tuple[str, float]:
    """Return the unit that multiplies (one of `PATHS`), and its MACs per clock and SM."""
    r = gpu.rates
    if precision == Precision.FP8 and gpu.has_fp8:
        return "int8", gpu.fp8_rate
    if precision in _INTEGERS and r.int8:
        return "int8" if r.int8_path == "tensor" else "dp4a", r.int8
    if precision in (Precision.FP16, Precision.BF16):
        return ("fp16", r.fp16) if gpu.has_tensor_cores else ("fp32", max(r.fp32_pipe, r.fp16))
    return ("tf32", r.tf32) if gpu.has_tf32 else ("fp32", r.fp32_pipe)


def kernel_seconds(
    f: SimpleNamespace, c: Mapping[str, float], factors: Mapping[str, float]
) -> Array:
    """Return the seconds of each layer's kernel in a running engine, of shape [layers].

    Args:
        f: Features of the layers (:func:`kernel_features`).
        c: Constants by name.
        factors: Factors on computing rates by compute capability.
    """
    by_cc = {cc: architecture_factor(cc, factors) for cc in set(f.cc)}
    factor = np.asarray([by_cc[cc] for cc in f.cc])
    is_tensor = f.path <= PATHS.index("tf32")
    few = f.channels < work.FEW_CHANNELS
    rate = f.rate * np.asarray([c[p] for p in PATHS])[f.path] * factor
    is_integer = f.path == PATHS.index("int8")
    rate = np.where(f.is_slow_int8, rate * c["int8_myelin"], rate)
    # An FP8 convolution is slower than the same convolution in INT8.
    int8_rate = f.int8_rate * c["int8"] * factor * np.where(f.is_myelin, c["int8_myelin"], 1.0)
    fp8_rate = np.minimum(rate, int8_rate) * FP8_CONVOLUTION
    rate = np.where(f.is_fp8_convolution, fp8_rate, rate)
    by_dp4a = few & is_integer & ~f.pooled & ~f.is_fp8
    starved = np.where(
        by_dp4a, DP4A_RATE * c["dp4a"], factor * np.where(is_integer, c["few_int8"], c["few_fp16"])
    )
    starved = np.where(f.is_fp8_convolution, starved * FP8_CONVOLUTION, starved)
    rate = np.where(few & is_tensor, np.minimum(rate, starved), rate)
    tile = np.where(by_dp4a, DP4A_TILE, np.where(is_tensor, TILE, 16.0))
    columns = _round_up(np.maximum(f.columns, 1.0), tile)
    depth = np.where(is_tensor, _round_up(f.depth, DEPTH_STEP), f.depth)
    steps = depth * f.width / STEP_BYTES
    rate = np.where(is_tensor & ~few, rate * columns / (columns + c["narrow"]), rate)
    rate = np.where(f.to_float, rate * c["to_float_old"], rate)
    depthwise = f.kind == work.DEPTHWISE
    computing = depthwise | np.isin(f.kind, (work.CONV, work.DECONV))
    by_cores = f.rows * f.columns * f.depth * f.groups / (f.clocks * f.pipe * c["depthwise"])
    compute = np.where(depthwise, by_cores, f.rows * columns * depth * f.groups / (f.clocks * rate))
    compute = np.where(computing, compute, 0.0)
    copies = np.isin(f.kind, (work.COPY, work.CONVERSION, work.REFORMAT, work.SHUFFLE))
    # Layers with few bytes per position use neither memory nor L2 efficiently, least of all with
    # HBM: conversions of images reach 0.14 to 0.22 of the bandwidth on an A100, but 0.57 to 0.73
    # on an Orin Nano, an AGX Orin, an RTX 3080 Ti and an RTX 2000 Ada.
    scattered = few & np.isin(f.kind, (work.CONVERSION, work.REFORMAT))
    copy_share = np.where(f.kind == work.REFORMAT, c["layout"], c["copy"])
    few_copy = np.where(f.has_hbm, c["few_copy_hbm"], c["few_copy"])
    copy_share = np.where(scattered, few_copy, copy_share)
    share = np.where(copies, copy_share, np.where(computing, c["dram"], c["pool"]))
    moved = np.maximum(f.moved, 1.0)
    missing = l2_miss_share(f, c)
    slowdown = np.where(scattered, c["copy"] / few_copy, 1.0)
    cached = moved / (c["l2"] * f.clocks * L2_BYTES) * slowdown
    outside = f.cold + np.maximum(moved - f.cold, 0.0) * missing
    memory = np.maximum(outside / (share * f.bandwidth), cached)
    p = 1.0 + c["overlap"]
    step_clocks = np.where(f.pipelined, c["step_clocks"], c["step_clocks_old"])
    latency = np.where(computing & ~depthwise, step_clocks * steps * f.sms / f.clocks, 0.0)
    minimum = c["floor_us"] * 1e-6 + c["floor_clocks"] * f.sms / f.clocks
    minimum = np.where(f.is_myelin, minimum * c["floor_myelin"], minimum)
    time: Array = f.steps * minimum + latency + (compute**p + memory**p) ** (1.0 / p)
    return np.where(f.kind == work.NOTHING, 0.0, time)


def product_seconds(f: SimpleNamespace, c: Mapping[str, float]) -> Array:
    """Return the seconds of each layer's products at the fitted rate; 0 without products."""
    computing = np.isin(f.kind, work.COMPUTING)
    rate = f.rate * np.asarray([c[p] for p in PATHS])[f.path]
    seconds: Array = f.rows * f.columns * f.depth * f.groups / (f.clocks * rate)
    return np.where(computing, seconds, 0.0)


def scale_clock(f: SimpleNamespace, shares: Array) -> SimpleNamespace:
    """Return the features of layers whose GPUs run at `shares` [layers] of their clocks."""
    return SimpleNamespace(**(vars(f) | {"clocks": f.clocks * shares}))


def sustained_shares(
    f: SimpleNamespace,
    starts: npt.NDArray[np.intp],
    counts: Array,
    gpus: Sequence[Gpu],
    c: Mapping[str, float],
    factors: Mapping[str, float],
) -> Array:
    """Return the share of the boost clock at which each engine runs, of shape [engines].

    The share is below 1 on boards with a low power limit (``Gpu.clock_share_at``). The share
    depends on the utilization of the tensor cores, and the utilization depends on the clock, so
    both are computed in turn.

    Args:
        f: Features of the layers of all engines, one engine after the other.
        starts: Position of each engine's first layer, of shape [engines].
        counts: Number of kernels with the work of each layer, of shape [layers].
        gpus: GPU of each engine.
        c: Constants by name.
        factors: Factors on computing rates by compute capability.
    """
    shares, lengths = np.ones(len(gpus)), np.diff([*starts, len(f.cc)])
    if all(gpu.clock_share_under_load == 1.0 for gpu in gpus):
        return shares
    for _ in range(_CLOCK_STEPS):
        slowed = scale_clock(f, np.repeat(shares, lengths))
        busy = np.add.reduceat(counts * product_seconds(slowed, c), starts)
        total = np.add.reduceat(counts * kernel_seconds(slowed, c, factors), starts)
        utilization = busy / np.maximum(total, 1e-12)
        shares = np.asarray([g.clock_share_at(u) for g, u in zip(gpus, utilization, strict=True)])
    return shares


def l2_miss_share(f: SimpleNamespace, c: Mapping[str, float]) -> Array:
    """Return the share of a kernel's bytes that miss the L2 and move through memory.

    The share depends on the number of elements, not on their type. If it depended on the type, the
    estimated speedup of INT8 over FP16 would reach 2.6 in layers whose tensors fit into the L2 only
    in INT8. The largest measured speedup is 2.32.
    """
    share: Array = np.clip(1.0 - f.l2 * c["l2_share"] / np.maximum(f.in_fp16, 1.0), 0.0, 1.0)
    return share


def _round_up(values: Array, step: float | Array) -> Array:
    multiples: Array = np.ceil(values / step) * step
    return multiples


def estimate_seconds(works: Sequence[LayerWork], gpu: Gpu) -> Array:
    """Return the seconds of each layer's kernels in a running engine, of shape [layers]."""
    if not works:
        return np.zeros(0)
    constants = load_constants()
    cold = [has_cold_weights(works, gpu)] * len(works)
    features = kernel_features(works, [gpu] * len(works), cold)
    return kernel_seconds(features, constants.values, constants.architectures)


def estimate_engine(works: Sequence[LayerWork], gpu: Gpu) -> tuple[Array, float]:
    """Return the seconds of an engine's kernels, and the engine's share of the boost clock."""
    if not works:
        return np.zeros(0), 1.0
    constants, cold = load_constants(), [has_cold_weights(works, gpu)] * len(works)
    features = kernel_features(works, [gpu] * len(works), cold)
    values, factors = constants.values, constants.architectures
    starts = np.zeros(1, np.intp)
    shares = sustained_shares(features, starts, np.ones(len(works)), [gpu], values, factors)
    slowed = scale_clock(features, np.repeat(shares, len(works)))
    return kernel_seconds(slowed, values, factors), float(shares[0])


def has_cold_weights(works: Sequence[LayerWork], gpu: Gpu) -> bool:
    """Return whether all weights together exceed the L2, so that each run reads them again."""
    return sum(w.weights for w in works) > gpu.l2 * 1e6
