"""Fits the constants of the time model (qdqtool.timing.physics) and says how far they can be trusted.

usage: python benchmarks/fit_timing.py [--write] [--quick]

Reads the derived tables in benchmarks/timing alone (see timing_data.py). Fits all, then again without each architecture
in turn, and judges what was left out. --write puts the constants, with the spreads measured on what was left out, into
qdqtool/timing/constants.json; timing_docs.py then writes the tables and the plot into docs/. Damped least squares on
logarithms with robust weights; a prior holds each constant near its start, so that data that say nothing about one do
not move it.
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from timing_data import HERE, OVERHEAD, Data, joined, layers, totals

from qdqtool.timing import physics, work

CONSTANTS = Path(physics.__file__).with_name("constants.json")
Array = npt.NDArray[np.float64]

# What a call from Python, without a CUDA graph, takes more for each kernel: of those measurements, not of the GPU.
HOST = "host_us"
GAP = "gap_us"  # between two kernels of an engine that is enqueued without a CUDA graph, as trtexec does by default
START = {
    "floor_us": 1.0, "floor_clocks": 4000.0, "int8": 0.75, "fp16": 0.75, "tf32": 0.75, "fp32": 0.75, "dp4a": 0.65,
    "dram": 0.85, "l2": 0.35, "l2_share": 0.5, "few_int8": 450.0, "few_fp16": 350.0, "narrow": 20.0,
    "step_clocks": 130.0, "step_clocks_old": 400.0, "overlap": 2.0, "depthwise": 0.25, "copy": 0.5, "few_copy": 0.3,
    "pool": 0.55, HOST: 1.0, GAP: 0.8, "layout": 0.45,
    "to_float_old": 0.65,  # the one such layer of a TITAN RTX takes 1.5 times what those that write INT8 do
}  # fmt: skip
# How firmly a prior holds a constant: physics leaves little room for the share of bandwidth that is reached.
SHARED_PRIOR, FIRM_PRIOR, ARCHITECTURE_PRIOR = 0.02, 1.0, 0.2
GAIN_WEIGHT = 0.1  # of a measured pair; one network on one GPU has .3
FIRM = ("dram", "overlap", "floor_us")


class Model:
    """The physical model over a set of measurements, as a function of the logarithms of its constants."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.features = physics.features(data.works, data.gpus, data.cold)
        self.starts = np.cumsum([0, *data.segments[:-1]])
        self.measured = np.asarray(data.measured)
        self.overhead = np.asarray(data.overhead)
        self.weights = np.sqrt(np.asarray(data.weights))
        called = [label.startswith("python ") for label in data.labels]
        kernels = np.add.reduceat([float(w.kind != work.NOTHING) * w.steps for w in data.works], self.starts)
        self.launches = np.where(called, kernels, 0.0)
        enqueued = [label.startswith(("trtexec ", "blind ")) for label in data.labels]
        self.enqueued = np.where(enqueued, kernels, 0.0)

    def seconds(self, constants: Mapping[str, float], factors: Mapping[str, float]) -> Array:
        kernels = physics.kernel_seconds(self.features, constants, factors)
        waiting = (self.launches * constants[HOST] + self.enqueued * constants[GAP]) * 1e-6
        total: Array = np.add.reduceat(kernels, self.starts) + self.overhead + waiting
        return total

    def errors(self, constants: Mapping[str, float], factors: Mapping[str, float]) -> Array:
        """log(model / measured)."""
        result: Array = np.log(self.seconds(constants, factors) / self.measured)
        return result


def unpack(x: Array, architectures: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    names = list(START)
    return (
        dict(zip(names, np.exp(x[: len(names)]).tolist(), strict=True)),
        dict(zip(architectures, np.exp(x[len(names) :]).tolist(), strict=True)),
    )


def fit(data: Data, rounds: int = 25) -> tuple[dict[str, float], dict[str, float]]:
    """Constants and factors of architectures: damped, robust least squares."""
    model = Model(data)
    architectures = sorted({g.cc for g in data.gpus})
    start = np.concatenate([np.log(list(START.values())), np.zeros(len(architectures))])
    prior = np.sqrt(np.asarray([FIRM_PRIOR if n in FIRM else SHARED_PRIOR for n in START]
                               + [ARCHITECTURE_PRIOR] * len(architectures)))
    halves, integers, weights = gain_places(data)
    model.weights = np.concatenate([model.weights, np.sqrt(weights)])

    def residuals(x: Array) -> Array:
        errors = model.errors(*unpack(x, architectures))
        return np.concatenate([errors, errors[halves] - errors[integers]])

    x, damping = start.copy(), 1e-2
    errors = residuals(x)

    def cost(e: Array, at: Array) -> float:
        return float(np.sum(model.weights**2 * np.sqrt(e * e + 0.01)) + np.sum((prior * (at - start)) ** 2))

    best = cost(errors, x)
    for _ in range(rounds):
        robust = model.weights / (errors * errors + 0.01) ** 0.25
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
        if gain < 1e-7:
            break
    return unpack(x, architectures)


def gain_places(data: Data) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Array]:
    """Pairs whose gain the fit counts beside both times: places of FP16 and INT8, and weights.

    Only times under trtexec: calls from Python hold more than the engine.
    """
    found = [
        (p.half, p.integer) for p in pairs_of(data)
        if p.what.startswith(("trtexec", "engine")) and data.weights[p.half] > 0 and data.weights[p.integer] > 0
    ]  # fmt: skip
    halves, integers = np.asarray(found, dtype=np.int64).reshape(-1, 2).T
    return halves, integers, np.full(len(found), GAIN_WEIGHT)


# Report -----------------------------------------------------------------------------------------------------------


def summary(errors: Array) -> str:
    off = np.abs(np.exp(errors) - 1)
    return (f"median {np.median(off):6.1%}  mean {off.mean():6.1%}  90 % {np.quantile(off, 0.9):6.1%}  "
            f"middle x{np.exp(np.median(errors)):.2f}")


def groups(data: Data) -> dict[tuple[str, str], list[int]]:
    """Indices of measurements by GPU and engine (layers), or GPU and kind of measurement (totals)."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, (gpu, label) in enumerate(zip(data.firsts, data.labels, strict=True)):
        words = label.split()
        many = words[0] == "python" and "yolo" not in label
        found[gpu.name, f"python {words[2]} {words[3]}" if many else " ".join(words[:3])].append(i)
    return found


def report(title: str, data: Data, constants: Mapping[str, float], factors: Mapping[str, float]) -> Array:
    errors = Model(data).errors(constants, factors)
    print(f"\n{title}")
    for (gpu, name), at in sorted(groups(data).items()):
        print(f"  {gpu:22} {name[:44]:44} n={len(at):4}  {summary(errors[at])}")
    return errors


def gpu_names(data: Data) -> list[str]:
    """The GPU of each measurement; an A100 is one GPU, whatever its memory."""
    return ["A100" if g.name.startswith("A100") else g.name for g in data.firsts]


def left_out(data: Data, key: str) -> tuple[list[str], Array]:
    """Errors of every measurement by a fit that has not seen its GPU (``name``) or its architecture (``cc``)."""
    which = [g.cc for g in data.firsts] if key == "cc" else gpu_names(data)
    errors = np.zeros(len(which))
    fits: dict[tuple[bool, ...], tuple[dict[str, float], dict[str, float]]] = {}  # the same for all that are in none
    for one in sorted(set(which)):
        outside = [w != one for w in which]
        used = tuple(o and weight > 0 for o, weight in zip(outside, data.weights, strict=True))
        if used not in fits:
            fits[used] = fit(data.of(used))
        fitted = fits[used]
        inside = np.flatnonzero([not o for o in outside])
        errors[inside] = Model(data.of([not o for o in outside])).errors(*fitted)
        print(f"  without {one:22} {summary(errors[inside])}", flush=True)
    return which, errors


def spread(errors: Array, weights: Array, share: float = 0.8) -> float:
    """The factor within which a share of measurements lies, each counted by its weight."""
    order = np.argsort(np.abs(errors))
    run = np.cumsum(weights[order])
    return float(np.exp(np.abs(errors)[order][np.searchsorted(run, share * run[-1])]))


def wide_enough(errors: Array, weights: Array, data: Data) -> float:
    """The factor within which 80 % of whole networks lie, by weight and by number.

    By number an engine that was measured several times (the same GPU, network, types and batch) counts once, with the
    error in the middle.
    """
    used = weights > 0
    engines: dict[tuple[str, str], list[float]] = defaultdict(list)
    for gpu, label, error, use in zip(data.firsts, data.labels, errors, used, strict=True):
        if use:
            engines[gpu.name, label].append(abs(error))
    single = np.asarray([sorted(found)[len(found) // 2] for found in engines.values()])
    return max(spread(errors[used], weights[used]), spread(single, np.ones(len(single))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write constants.json and benchmarks/timing/judged.json")
    parser.add_argument("--quick", action="store_true", help="no leaving out")
    args = parser.parse_args()
    single, whole = layers(), totals()
    everything = joined(single, whole)
    count = len(single.labels)
    constants, factors = fit(everything.of([w > 0 for w in everything.weights]))
    print("constants", {k: float(f"{v:.3g}") for k, v in constants.items()})
    print("factors  ", {k: float(f"{v:.3g}") for k, v in factors.items()})
    report("Layers of profiles, in the fit", single, constants, factors)
    seen = report("Whole networks, in the fit (those of weight 0 are judged only)", whole, constants, factors)
    if args.quick:
        return 0
    engines = [i for i, label in enumerate(single.labels) if not label.startswith("convolutions-")]
    blind = single.with_overhead(OVERHEAD)
    print("\nOne GPU left out")
    _, by_gpu = left_out(joined(blind, whole), "name")
    print("\nOne architecture left out")
    _, by_cc = left_out(joined(blind, whole), "cc")
    weights = np.asarray(everything.weights)
    layer_weights, total_weights = weights[:count], weights[count:]
    spreads = {
        "layer": spread(by_gpu[:count][engines], layer_weights[engines]),
        "total": wide_enough(by_gpu[count:], total_weights, whole),
        "total_unknown": wide_enough(by_cc[count:], total_weights, whole),
    }
    spreads["total_unknown"] = max(spreads["total_unknown"], spreads["total"])
    spreads["total_calibrated"] = min(spread(*calibrated(whole, by_gpu[count:])), spreads["total"])
    print("\nPairs of INT8 and FP16, network and GPU left out")
    pairs = judge_pairs(joined(blind, whole), whole, count)
    gains = gain_figures(pairs)
    print(f"  {len(pairs)} pairs: {gains}")
    spreads["gain"] = gains["spread"]
    in_fit = Model(blind).errors(constants, factors)
    rows = [{"gpu": gpu, "engine": name, "layers": len(at), "left_out": median_off(by_gpu[at]),
             "in_fit": median_off(in_fit[at])} for (gpu, name), at in sorted(groups(single).items())]  # fmt: skip
    networks_rows = []
    for i, (one, label) in enumerate(zip(whole.firsts, whole.labels, strict=True)):
        ms = whole.measured[i] * 1e3
        networks_rows.append({
            "gpu": one.name, "what": label, "measured_ms": ms, "fitted": whole.weights[i] > 0,
            "model_ms": float(ms * np.exp(seen[i])), "left_out_ms": float(ms * np.exp(by_gpu[count + i])),
        })  # fmt: skip
    print("\nspreads (80 %)", {k: round(v, 3) for k, v in spreads.items()})
    for name, errors in (("GPU", by_gpu), ("architecture", by_cc)):
        used = total_weights > 0
        factor = spreads["total" if name == "GPU" else "total_unknown"]
        inside = np.abs(errors[count:][used]) <= np.log(factor)
        print(f"coverage of the range of whole networks, {name} left out: "
              f"{np.average(inside, weights=total_weights[used]):.0%} by weight, {inside.mean():.0%} of {used.sum()}")
    if args.write:
        data = {
            "made_by": "benchmarks/fit_timing.py --write",
            "values": rounded({k: v for k, v in constants.items() if k not in (HOST, GAP)}),
            HOST: float(f"{constants[HOST]:.3g}"), "architectures": rounded(factors), "overhead_us": OVERHEAD,
            GAP: float(f"{constants[GAP]:.3g}"), "spreads": rounded(spreads),
            "signs": {"right": gains["right"], "pairs": gains["pairs"]},
        }  # fmt: skip
        CONSTANTS.write_text(json.dumps(data, indent=1) + "\n")
        judged = {"layers": rows, "networks": networks_rows, "pairs": pairs}
        (HERE / "judged.json").write_text(json.dumps(judged, indent=0) + "\n")
        print(f"wrote {CONSTANTS.name} and judged.json; docs: python benchmarks/timing_docs.py")
    return 0


def calibrated(data: Data, errors: Array) -> tuple[Array, Array]:
    """What is left of the errors of one network on a GPU when another network on it corrects them; weights."""
    left, weights = [], []
    firsts = data.firsts
    for i, one in enumerate(firsts):
        for j, other in enumerate(firsts):
            differs = data.labels[i].split()[1] != data.labels[j].split()[1]
            if one.name == other.name and differs and data.weights[i] and data.weights[j]:
                left.append(errors[i] - errors[j])
                weights.append(data.weights[i] * data.weights[j])
    return np.asarray(left), np.asarray(weights)


@dataclass(frozen=True)
class Pair:
    """INT8 and FP16 of one network on one GPU, measured the same way: places of both in the measurements."""

    gpu: str
    network: str
    what: str
    half: int
    integer: int


def pairs_of(data: Data) -> list[Pair]:
    """Every pair whose placement is known, in the order of the tables; nothing is left out by how well it fits."""
    plain: dict[tuple[str, ...], int] = {}
    found = []
    every = enumerate(zip(data.firsts, data.labels, strict=True))
    whole = [(i, gpu, label) for i, (gpu, label) in every if " " in label]
    for i, gpu, label in whole:
        how, network, variant, precision, batch = (*label.split(), "")[:5]
        if variant == "float" and precision == "FP16":
            for key in (network, base_of(network)):
                plain.setdefault((gpu.name, how, key, batch), i)
    for i, gpu, label in whole:
        how, network, variant, _, batch = (*label.split(), "")[:5]
        other = plain.get((gpu.name, how, network, batch), plain.get((gpu.name, how, base_of(network), batch)))
        if variant == "qdq" and other is not None:
            found.append(Pair(gpu.name, base_of(network), f"{how} {network} {batch}".strip(), other, i))
    return found


def base_of(network: str) -> str:
    """The network whatever its placement."""
    return re.sub(r"@.*|-modelopt|-linears|-416|-qat.*", "", network)


def judge_pairs(everything: Data, whole: Data, first: int) -> list[dict[str, Any]]:
    """Each pair by a fit that has seen neither its network nor its GPU; ``first`` is where whole networks begin."""
    pairs = pairs_of(whole)
    gpus = gpu_names(everything)
    networks = [base_of(label.split()[1]) if " " in label else label for label in everything.labels]
    fits: dict[tuple[bool, ...], tuple[dict[str, float], dict[str, float]]] = {}
    rows: list[dict[str, Any]] = []
    for pair in pairs:
        gpu = gpus[first + pair.half]
        used = tuple(g != gpu and not n.startswith(pair.network) and w > 0
                     for g, n, w in zip(gpus, networks, everything.weights, strict=True))
        if used not in fits:
            fits[used] = fit(everything.of(used))
        both = whole.of([i in (pair.half, pair.integer) for i in range(len(whole.labels))])
        half, integer = Model(both).seconds(*fits[used])[:: 1 if pair.half < pair.integer else -1]
        rows.append({
            "gpu": pair.gpu, "network": pair.network, "what": pair.what,
            "measured": whole.measured[pair.half] / whole.measured[pair.integer], "left_out": float(half / integer),
        })  # fmt: skip
    return rows


def gain_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How far gains lie off, and how often the faster one was right where the two differ by more than 5 %."""
    errors = np.asarray([np.log(r["left_out"] / r["measured"]) for r in rows])
    clear = [r for r in rows if abs(np.log(r["measured"])) > np.log(1.05)]
    right = sum((r["left_out"] > 1) == (r["measured"] > 1) for r in clear)
    return {"spread": spread(errors, np.ones(len(errors))), "right": right, "pairs": len(clear),
            "median": float(np.median(np.abs(np.exp(errors) - 1)))}  # fmt: skip


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {k: float(f"{v:.4g}") for k, v in values.items()}


def median_off(errors: Array) -> float:
    return float(np.median(np.abs(np.exp(errors) - 1)))


if __name__ == "__main__":
    sys.exit(main())
