"""Fit the constants of the time model (qdqtool.timing.physics), and measure its errors.

usage: python benchmarks/fit_timing.py [--write] [--quick]

The script reads only the derived tables in benchmarks/timing (see timing_data.py). It fits all
data. Then it fits the data again without one architecture at a time, and measures the errors for
the data that were left out. --write stores the constants in qdqtool/timing/constants.json, with the
spreads of the errors for the data that were left out. timing_docs.py then writes the tables and the
plot into docs/. The fit is damped least squares on logarithms, with robust weights. A prior holds
each constant near its start, so that a constant does not change if the data contain no information
about it.
"""

import argparse
import itertools
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from timing_data import HERE, OVERHEAD, Data, clock_shares, layers, totals, with_overhead

from qdqtool.timing import physics, work

CONSTANTS = Path(physics.__file__).with_name("constants.json")
Array = npt.NDArray[np.float64]
Fitted = tuple[dict[str, float], dict[str, float]]

# Microseconds that a call from Python without a CUDA graph adds to each kernel. The constant
# depends on the measurement, not on the GPU.
HOST = "host_us"
CALL = "call_us"  # microseconds per call of Ultralytics' predictor in Python
# Microseconds between two kernels of an engine without a CUDA graph, the default of trtexec.
GAP = "gap_us"
GAP_MYELIN = "gap_myelin_us"  # microseconds between two kernels on Blackwell
START = {
    "floor_us": 1.0,
    "floor_clocks": 4000.0,
    "int8": 0.75,
    "fp16": 0.75,
    "tf32": 0.75,
    "fp32": 0.75,
    "dp4a": 0.65,
    "dram": 0.85,
    "l2": 0.35,
    "l2_share": 0.5,
    "few_int8": 450.0,
    "few_fp16": 350.0,
    "narrow": 20.0,
    "step_clocks": 130.0,
    "step_clocks_old": 400.0,
    "overlap": 2.0,
    "depthwise": 0.25,
    "copy": 0.5,
    "few_copy": 0.5,
    "few_copy_hbm": 0.2,
    "pool": 0.55,
    HOST: 1.0,
    CALL: 500.0,
    GAP: 0.8,
    GAP_MYELIN: 0.4,
    "layout": 0.45,
    "floor_myelin": 0.8,
    "int8_myelin": 0.8,
    "to_float_old": 0.65,  # from one layer on a TITAN RTX, which takes 1.5 times as long as layers that write INT8
}
# Strengths of the priors. The prior for the fraction of the bandwidth is strong, because its value
# is almost fixed by physics. If the priors of the other constants were weak, constants that few
# layers determine (few_fp16: 130 to 490) changed when a network was left out.
LOOSE_PRIOR, SHARED_PRIOR, FIRM_PRIOR, ARCHITECTURE_PRIOR = 0.02, 0.1, 1.0, 0.2
# Weight of the gain of a measured pair. It is larger than the weight of the times (0.3 for one
# network on one GPU), because users decide by the gain.
GAIN_WEIGHT = 1.0
FIRM = ("dram", "overlap", "floor_us")
# Constants whose start values have no source.
LOOSE = ("floor_myelin", "int8_myelin", GAP_MYELIN, HOST, CALL)


class Model:
    """Time model for a set of measurements, as a function of the logarithms of its constants."""

    def __init__(self, data: Data) -> None:
        # The time of equal layers of a measurement is computed once.
        layers_of = [Counter(m.works) for m in data]
        works = [
            (w, m.gpu, m.cold) for m, found in zip(data, layers_of, strict=True) for w in found
        ]
        self.features = physics.kernel_features(*zip(*works, strict=True))
        self.counts = np.asarray([n for found in layers_of for n in found.values()], dtype=float)
        self.starts = np.cumsum([0, *(len(found) for found in layers_of[:-1])])
        self.measured = np.asarray([m.seconds for m in data])
        self.overhead = np.asarray([m.overhead for m in data])
        kernels = np.add.reduceat(
            self.counts * [float(w.kind != work.NOTHING) * w.steps for w, *_ in works],
            self.starts,
        )
        self.launches = kernels * [m.label.startswith("python ") for m in data]
        self.calls = np.asarray([m.label.startswith("python yolo") for m in data], dtype=float)
        enqueued = kernels * [m.label.startswith(("trtexec ", "blind ", "gain ")) for m in data]
        self.images = np.asarray([m.images for m in data])
        is_myelin = np.asarray([m.gpu.has_fused_conversions for m in data])
        self.enqueued, self.enqueued_myelin = enqueued * ~is_myelin, enqueued * is_myelin
        # The clock of engines on boards with a low power limit depends on their utilization.
        is_limited = [m.gpu.clock_share_under_load < 1 and len(m.works) > 1 for m in data]
        self.limited_at = np.flatnonzero(is_limited)
        self.limited: Model | None = None
        if not all(is_limited) and any(is_limited):
            self.limited = Model([data[i] for i in self.limited_at])
        self.gpus = [m.gpu for m in data]

    def seconds(self, constants: Mapping[str, float], factors: Mapping[str, float]) -> Array:
        """Return the seconds of each measurement, at the clock for its power limit and load."""
        shares = self.sustained_shares(constants, factors)
        if self.images.any():
            busy = self.seconds_at(shares, constants, factors)
            shares = shares * clock_shares(busy * 1e3, self.images)
        return self.seconds_at(shares, constants, factors)

    def sustained_shares(
        self, constants: Mapping[str, float], factors: Mapping[str, float]
    ) -> Array:
        """Return the fraction of the boost clock that the power limit of each GPU allows."""
        shares = np.ones(len(self.gpus))
        if len(self.limited_at) == len(self.gpus):
            return physics.sustained_shares(
                self.features, self.starts, self.counts, self.gpus, constants, factors
            )
        if self.limited is not None:
            shares[self.limited_at] = self.limited.sustained_shares(constants, factors)
        return shares

    def seconds_at(
        self, shares: Array, constants: Mapping[str, float], factors: Mapping[str, float]
    ) -> Array:
        """Return the seconds of each measurement at a fraction of the clock of its GPU."""
        lengths = np.diff([*self.starts, len(self.features.cc)])
        features = physics.scale_clock(self.features, np.repeat(shares, lengths))
        kernels = self.counts * physics.kernel_seconds(features, constants, factors)
        waiting = self.launches * constants[HOST] + self.enqueued * constants[GAP]
        waiting += self.calls * constants[CALL]
        waiting = (waiting + self.enqueued_myelin * constants[GAP_MYELIN]) * 1e-6
        total: Array = np.add.reduceat(kernels, self.starts) + self.overhead + waiting
        return total

    def errors(self, constants: Mapping[str, float], factors: Mapping[str, float]) -> Array:
        """Return log(estimated time / measured time) of each measurement."""
        result: Array = np.log(self.seconds(constants, factors) / self.measured)
        return result


def unpack(x: Array, architectures: Sequence[str]) -> Fitted:
    names = list(START)
    return (
        dict(zip(names, np.exp(x[: len(names)]).tolist(), strict=True)),
        dict(zip(architectures, np.exp(x[len(names) :]).tolist(), strict=True)),
    )


def fit(data: Data, rounds: int = 25, first: Fitted | None = None) -> Fitted:
    """Return the constants and the architecture factors, by damped, robust least squares.

    The search starts at `first`, or at the priors if `first` is None. Fewer rounds are needed if
    `first` is the fit of all measurements.
    """
    model = Model(data)
    architectures = sorted({m.gpu.cc for m in data})
    start = np.concatenate([np.log(list(START.values())), np.zeros(len(architectures))])
    priors = dict.fromkeys(START, SHARED_PRIOR)
    priors |= dict.fromkeys(FIRM, FIRM_PRIOR) | dict.fromkeys(LOOSE, LOOSE_PRIOR)
    prior = np.sqrt([*priors.values(), *[ARCHITECTURE_PRIOR] * len(architectures)])
    # The gain of a pair counts in addition to its two times. Only gains of trtexec count, because
    # times from Python contain more than the time of the engine.
    pairs = [
        (p.half, p.integer)
        for p in pairs_of(data)
        if p.what.startswith(("trtexec", "engine"))
        and data[p.half].weight > 0
        and data[p.integer].weight > 0
    ]
    halves, integers = np.asarray(pairs, dtype=np.int64).reshape(-1, 2).T
    weights = np.sqrt([m.weight for m in data] + [GAIN_WEIGHT] * len(pairs))

    def residuals(x: Array) -> Array:
        errors = model.errors(*unpack(x, architectures))
        return np.concatenate([errors, errors[halves] - errors[integers]])

    x, damping = start.copy(), 1e-2
    if first is not None:
        values, factors = first
        x = np.log([*(values[k] for k in START), *(factors.get(a, 1.0) for a in architectures)])
    errors = residuals(x)

    def cost(e: Array, at: Array) -> float:
        return float(
            np.sum(weights**2 * np.sqrt(e * e + 0.01)) + np.sum((prior * (at - start)) ** 2)
        )

    best = cost(errors, x)
    for _ in range(rounds):
        robust = weights / (errors * errors + 0.01) ** 0.25
        jacobian = np.empty((len(errors), len(x)))
        for i in range(len(x)):
            moved = x.copy()
            moved[i] += 1e-3
            jacobian[:, i] = (residuals(moved) - errors) / 1e-3
        weighted = jacobian * robust[:, None]
        normal = weighted.T @ weighted + np.diag(2 * prior**2)
        gradient = weighted.T @ (errors * robust) + 2 * prior**2 * (x - start)
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            trial = x - np.clip(step, -0.5, 0.5)
            found = residuals(trial)
            value = cost(found, trial)
            if value < best:
                gain = best - value
                x, errors, best, damping = trial, found, value, max(damping / 4, 1e-6)
                break
            damping *= 4
        else:
            break
        if gain < 1e-4:
            break
    return unpack(x, architectures)


# Report -----------------------------------------------------------------------------------------------------------


def summary(errors: Array) -> str:
    off = np.abs(np.exp(errors) - 1)
    return (
        f"median {np.median(off):6.1%}  mean {off.mean():6.1%}  90 % {np.quantile(off, 0.9):6.1%}  "
        f"middle x{np.exp(np.median(errors)):.2f}"
    )


def gpu_names(data: Data) -> list[str]:
    """Return the name of the GPU of each measurement.

    All A100 count as one GPU, so their names are returned without the memory size.
    """
    return ["A100" if m.gpu.name.startswith("A100") else m.gpu.name for m in data]


def fitter(data: Data) -> Callable[[Iterable[bool]], Fitted]:
    """Return a function that fits a selection of the measurements.

    Equal selections are fitted once. Measurements with weight 0 are never fitted.
    """
    first = fit([m for m in data if m.weight > 0])

    @cache
    def fitted(used: tuple[bool, ...]) -> Fitted:
        return fit([m for m, is_used in zip(data, used, strict=True) if is_used], first=first)

    return lambda named: fitted(tuple(n and m.weight > 0 for n, m in zip(named, data, strict=True)))


def left_out(data: Data, which: Sequence[str]) -> Array:
    """Return the error of each measurement for a fit without the measurements of its group.

    Args:
        data: The measurements.
        which: Group of each measurement, such as its GPU or its architecture.
    """
    errors, fitted = np.zeros(len(which)), fitter(data)
    for one in sorted(set(which)):
        inside = [w == one for w in which]
        left = [m for m, is_inside in zip(data, inside, strict=True) if is_inside]
        errors[inside] = Model(left).errors(*fitted(not i for i in inside))
        print(f"  without {one:22} {summary(errors[inside])}", flush=True)
    return errors


def spread(errors: Array, weights: Array, share: float = 0.8) -> float:
    """Return the factor within which a fraction of the estimates is correct.

    Args:
        errors: Logarithms of estimated times divided by measured times.
        weights: Weight of each measurement.
        share: Fraction of the total weight.
    """
    order = np.argsort(np.abs(errors))
    run = np.cumsum(weights[order])
    return float(np.exp(np.abs(errors)[order][np.searchsorted(run, share * run[-1])]))


def wide_enough(errors: Array, data: Data) -> float:
    """Return the factor within which 80 % of the estimates for whole networks are correct.

    It is the larger of two factors: one for 80 % of the weight, and one for 80 % of the engines.
    For the latter, an engine that was measured several times (the same GPU, network, types and
    batch) counts once, with its median error.
    """
    weights = np.asarray([m.weight for m in data])
    used = weights > 0
    engines: dict[tuple[str, str], list[float]] = defaultdict(list)
    for m, error in zip(data, errors, strict=True):
        if m.weight > 0:
            engines[m.gpu.name, m.label].append(abs(error))
    single = np.asarray([sorted(found)[len(found) // 2] for found in engines.values()])
    return max(spread(errors[used], weights[used]), spread(single, np.ones(len(single))))


def fit_governor(
    data: Data, constants: Mapping[str, float], factors: Mapping[str, float]
) -> tuple[float, float, float]:
    """Return the best HOST_MS, HOST_MS_PER_IMAGE and LOAD_EXPONENT of timing_data.py.

    They describe a clock that follows the load. With the best values, the errors for the FP32 times
    of such calls have the least scatter.
    """
    model = Model([m for m in data if m.images and " float FP32" in m.label])
    busy = model.seconds_at(np.ones(len(model.images)), constants, factors) * 1e3

    def spread_of(host: tuple[float, float, float]) -> float:
        shares = clock_shares(busy, model.images, host)
        errors = np.log(model.seconds_at(shares, constants, factors) / model.measured)
        return float(np.abs(errors - np.median(errors)).mean())

    return min(
        itertools.product((0.0, 5.0, 10.0, 20.0), (0.0, 0.1, 0.2, 0.4), (0.5, 1.0, 1.5, 2.0)),
        key=spread_of,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write constants.json and benchmarks/timing/judged.json",
    )
    parser.add_argument(
        "--quick", action="store_true", help="do not fit again without parts of the data"
    )
    args = parser.parse_args()
    single, whole = layers(), totals()
    count = len(single)
    constants, factors = fit([m for m in (*single, *whole) if m.weight > 0])
    print("constants", {k: float(f"{v:.3g}") for k, v in constants.items()})
    print("factors  ", {k: float(f"{v:.3g}") for k, v in factors.items()})
    seen = Model(whole).errors(constants, factors)
    print(f"host times and exponent of the load: {fit_governor(whole, constants, factors)}")
    print(f"layers of profiles, in the fit:  {summary(Model(single).errors(constants, factors))}")
    print(f"whole networks, in the fit:      {summary(seen[[m.weight > 0 for m in whole]])}")
    print(f"whole networks, judged only:     {summary(seen[[m.weight == 0 for m in whole]])}")
    if args.quick:
        return 0
    engines = [i for i, m in enumerate(single) if not m.label.startswith("convolutions-")]
    blind = with_overhead(single, OVERHEAD)
    unseen = [*blind, *whole]
    print("\nOne GPU left out")
    by_gpu = left_out(unseen, gpu_names(unseen))
    print("\nOne architecture left out")
    by_cc = left_out(unseen, [m.gpu.cc for m in unseen])
    spreads = {
        "layer": spread(by_gpu[engines], np.asarray([single[i].weight for i in engines])),
        "total": wide_enough(by_gpu[count:], whole),
        "total_unknown": wide_enough(by_cc[count:], whole),
    }
    spreads["total_unknown"] = max(spreads["total_unknown"], spreads["total"])
    spreads["total_calibrated"] = min(spread(*calibrated(whole, by_gpu[count:])), spreads["total"])
    print("\nPairs of INT8 and FP16, network and GPU left out")
    pairs = judge_pairs(unseen, whole, count)
    gains = gain_figures(pairs)
    print(f"  {len(pairs)} pairs: {gains}")
    spreads["gain"] = gains["spread"]
    in_fit = Model(blind).errors(constants, factors)
    shares = Model(whole).sustained_shares(constants, factors)
    profiles: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, m in enumerate(single):
        profiles[m.gpu.name, m.label].append(i)
    rows = [
        {
            "gpu": gpu,
            "engine": name,
            "layers": len(at),
            "left_out": median_off(by_gpu[at]),
            "in_fit": median_off(in_fit[at]),
        }
        for (gpu, name), at in sorted(profiles.items())
    ]
    networks = [
        {
            "gpu": m.gpu.name,
            "what": m.label,
            "measured_ms": m.seconds * 1e3,
            "fitted": m.weight > 0,
            "model_ms": float(m.seconds * 1e3 * np.exp(error)),
            "left_out_ms": float(m.seconds * 1e3 * np.exp(left)),
            "clock_share": float(share),
        }
        for m, error, left, share in zip(whole, seen, by_gpu[count:], shares, strict=True)
        if not m.label.startswith("gain ")
    ]
    print("\nspreads (80 %)", {k: round(v, 3) for k, v in spreads.items()})
    if args.write:
        data = {
            "made_by": "benchmarks/fit_timing.py --write",
            "values": rounded(
                {k: v for k, v in constants.items() if k not in (HOST, CALL, GAP, GAP_MYELIN)}
            ),
            HOST: float(f"{constants[HOST]:.3g}"),
            CALL: float(f"{constants[CALL]:.3g}"),
            "architectures": rounded(factors),
            "overhead_us": OVERHEAD,
            GAP: float(f"{constants[GAP]:.3g}"),
            GAP_MYELIN: float(f"{constants[GAP_MYELIN]:.3g}"),
            "spreads": rounded(spreads),
            "signs": {"right": gains["right"], "pairs": gains["pairs"]},
        }
        CONSTANTS.write_text(json.dumps(data, indent=1) + "\n")
        judged = {"layers": rows, "networks": networks, "pairs": pairs}
        (HERE / "judged.json").write_text(json.dumps(judged, indent=0) + "\n")
        print(f"wrote {CONSTANTS.name} and judged.json; docs: python benchmarks/timing_docs.py")
    return 0


def calibrated(data: Data, errors: Array) -> tuple[Array, Array]:
    """Return errors after a correction by another network on the same GPU, and their weights.

    Each ordered pair of different networks on one GPU has one error.
    """
    left, weights = [], []
    for i, one in enumerate(data):
        for j, other in enumerate(data):
            differs = one.label.split()[1] != other.label.split()[1]
            if one.gpu.name == other.gpu.name and differs and one.weight and other.weight:
                left.append(errors[i] - errors[j])
                weights.append(one.weight * other.weight)
    return np.asarray(left), np.asarray(weights)


@dataclass(frozen=True)
class Pair:
    """Times of one network on one GPU in INT8 and FP16, measured with one method.

    `half` and `integer` are the positions of the two times in the measurements.
    """

    gpu: str
    network: str
    what: str
    half: int
    integer: int


def pairs_of(data: Data) -> list[Pair]:
    """Return all pairs whose placement is known, in the order of the tables."""
    plain: dict[tuple[str, ...], int] = {}
    found = []
    whole = [(i, m.gpu, m.label) for i, m in enumerate(data) if " " in m.label]
    for i, gpu, label in whole:
        how, network, variant, precision, batch = (*label.split(), "")[:5]
        if variant == "float" and precision == "FP16":
            for key in (network, base_of(network)):
                plain.setdefault((gpu.name, how, key, batch), i)
    for i, gpu, label in whole:
        how, network, variant, _, batch = (*label.split(), "")[:5]
        other = plain.get(
            (gpu.name, how, network, batch), plain.get((gpu.name, how, base_of(network), batch))
        )
        if variant == "qdq" and other is not None:
            found.append(
                Pair(gpu.name, base_of(network), f"{how} {network} {batch}".strip(), other, i)
            )
    return found


def base_of(network: str) -> str:
    """Return the name of a network without its placement."""
    return re.sub(r"@.*|-pair-.*|-modelopt|-linears|-416|-qat.*", "", network)


def judge_pairs(everything: Data, whole: Data, first: int) -> list[dict[str, Any]]:
    """Estimate each pair with a fit of the data without its network and without its GPU.

    Args:
        everything: All measurements.
        whole: Measurements of whole networks, the last measurements in `everything`.
        first: Index of the first whole network in `everything`.
    """
    pairs = pairs_of(whole)
    gpus = gpu_names(everything)
    networks = [base_of(m.label.split()[1]) if " " in m.label else m.label for m in everything]
    fitted = fitter(everything)
    rows: list[dict[str, Any]] = []
    for pair in pairs:
        gpu = gpus[first + pair.half]
        constants = fitted(
            g != gpu and not n.startswith(pair.network) for g, n in zip(gpus, networks, strict=True)
        )
        both = [whole[pair.half], whole[pair.integer]]
        half, integer = Model(both).seconds(*constants)
        rows.append(
            {
                "gpu": pair.gpu,
                "network": pair.network,
                "what": pair.what,
                "measured": both[0].seconds / both[1].seconds,
                "left_out": float(half / integer),
            }
        )
    return rows


def gain_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the errors of the gains, and the number of pairs whose faster type is correct.

    Only pairs whose times differ by more than 5 % count for this number.
    """
    errors = np.asarray([np.log(r["left_out"] / r["measured"]) for r in rows])
    clear = [r for r in rows if abs(np.log(r["measured"])) > np.log(1.05)]
    right = sum((r["left_out"] > 1) == (r["measured"] > 1) for r in clear)
    return {
        "spread": spread(errors, np.ones(len(errors))),
        "right": right,
        "pairs": len(clear),
        "median": float(np.median(np.abs(np.exp(errors) - 1))),
    }


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {k: float(f"{v:.4g}") for k, v in values.items()}


def median_off(errors: Array) -> float:
    return float(np.median(np.abs(np.exp(errors) - 1)))


if __name__ == "__main__":
    sys.exit(main())
