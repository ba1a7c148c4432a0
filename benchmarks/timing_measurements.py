"""What the time model is fitted on and judged by: layers of profiles and latencies of whole networks, with weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from timing_tables import BLIND, LATENCIES, LAYERS, NETWORKS, RECENT, read, work_of

from qdqtool.timing import work
from qdqtool.timing.gpus import Gpu, find
from qdqtool.timing.physics import weights_are_cold
from qdqtool.timing.work import Work
from qdqtool.types import Precision

# Milliseconds a call under trtexec without profiling, of the engines with a profile; their layers are those predicted.
TOTALS = (
    ("A100 80GB PCIe", "resnet18-qat", "float", "FP32", 1.0, 2.0),
    ("A100 80GB PCIe", "resnet18-qat", "float", "FP16", 1.0, 0.8628),
    ("A100 80GB PCIe", "resnet18-qat", "qdq", "FP16", 1.0, 0.8823),
    ("A100 80GB PCIe", "resnet18-qat-residual", "qdq", "FP16", 1.0, 0.5457),
    ("A100 80GB PCIe", "resnet18-qat-residual-qgap", "qdq", "FP16", 1.0, 0.4998),
    ("TITAN RTX", "mobilenetv2-qat", "qdq", "FP16", 1.0, 0.2639),
    ("RTX 2000 Ada Laptop", "resnet18-qat-laptop", "qdq", "FP16", 1.0, 0.134),
    ("Jetson AGX Orin 64GB", "bevfusion-orin", "qdq", "FP16", 1.0, 8.607),
    ("RTX 3080 Ti", "bevfusion-3080ti", "qdq", "FP16", 1.0, 1.584),
)
# What a profile added to each layer: (sum of layers - time without profiling) / layers; the others as in OVERHEAD.
OVERHEADS = {
    "resnet18-fp32": 5.2,
    "resnet18-fp16": 6.2,
    "resnet18-qat": 6.1,
    "resnet18-qat-residual": 7.1,
    "resnet18-qat-residual-qgap": 7.5,
    "mobilenetv2-qat": 1.6,
    "centerpoint-fp16": 2.4,
    "resnet18-qat-laptop": 3.2,
    "bevfusion-orin": 0.0,
    "bevfusion-3080ti": 0.5,
}
# For an engine of which only the profile is known: within the middle of those, least error on the worst engine.
OVERHEAD = 2.4
# Judged only: published latencies of another power mode, about four times too slow; one network on one Blackwell.
UNFIT = ("Jetson AGX Orin 64GB", "RTX PRO 6000 Blackwell")


@dataclass
class Data:
    """Measurements: layers, and totals over segments of layers."""

    works: list[Work] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)  # seconds
    overhead: list[float] = field(default_factory=list)  # seconds that the measurement added
    weights: list[float] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)  # number of works of each measurement
    cold: list[bool] = field(default_factory=list)  # of each work: its network's weights do not fit the L2

    def add(
        self, works: Sequence[Work], gpu: Gpu, label: str, ms: float, overhead: float, weight: float,
        cold: bool | None = None,
    ) -> None:  # fmt: skip
        self.works += works
        self.cold += [weights_are_cold(works, gpu) if cold is None else cold] * len(works)
        self.gpus += [gpu] * len(works)
        self.labels.append(label)
        self.measured.append(ms * 1e-3)
        self.overhead.append(overhead * 1e-6)
        self.weights.append(weight)
        self.segments.append(len(works))

    def of(self, keep: Sequence[bool]) -> Data:
        result, start = Data(), 0
        for i, count in enumerate(self.segments):
            if keep[i]:
                result.add(
                    self.works[start : start + count],
                    self.gpus[start],
                    self.labels[i],
                    self.measured[i] * 1e3,
                    self.overhead[i] * 1e6,
                    self.weights[i],
                    self.cold[start],
                )
            start += count
        return result

    @property
    def firsts(self) -> list[Gpu]:
        """The GPU of each measurement."""
        starts = np.cumsum([0, *self.segments[:-1]])
        return [self.gpus[i] for i in starts]


def layers() -> Data:
    data = Data()
    rows = read(LAYERS)
    counts: dict[str, int] = defaultdict(int)
    weights: dict[str, float] = defaultdict(float)
    for row in rows:
        counts[row["engine"]] += 1
        weights[row["engine"]] += float(row["weights"])
    for row in rows:
        single = row["engine"].startswith("convolutions-")
        overhead = 0.0 if single else OVERHEADS.get(row["engine"], OVERHEAD)
        data.add(
            [work_of(row)],
            find(row["gpu"]),
            row["engine"],
            float(row["ms"]),
            overhead,
            (0.02 if single else 0.35) / counts[row["engine"]],
            not single and weights[row["engine"]] > find(row["gpu"]).l2 * 1e6,
        )
    return data


def networks() -> dict[tuple[str, str], list[dict[str, str]]]:
    found: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in read(NETWORKS):
        found[row["network"], row["variant"]].append(row)
    return found


def network_work(rows: Sequence[Mapping[str, str]], plain: Precision, batch: float, gpu: Gpu) -> list[Work]:
    made = [work_of(row, plain, batch) for row in rows]
    if plain == Precision.FP32:  # no reformats to FP16 at the edges; without TF32 linear everywhere
        without = (work.CONVERSION,) if gpu.has_tf32 else (work.CONVERSION, work.REFORMAT)
        made = [w for w in made if not (w.kind in without and w.precision.is_float and w.written_as.is_float)]
    return made


def totals() -> Data:
    """Whole networks: engines with a profile, then published latencies that the notes do not warn of."""
    data, table = Data(), networks()
    for gpu, network, variant, plain, batch, ms in TOTALS:
        data.add(
            network_work(table[network, variant], Precision(plain), batch, find(gpu)),
            find(gpu),
            f"engine {network} {variant} {plain}",
            ms,
            0.0,
            0.15,
        )
    rows = read(LATENCIES) + read(RECENT) + [row | {"how": "blind"} for row in read(BLIND)]
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        counts[row["gpu"], row["network"]] += 1
    for row in rows:
        yolo = row["network"].startswith("yolo")
        slow_host = row["gpu"] == "Jetson Xavier NX" and row["batch"] == "1"  # the call from Python takes milliseconds
        doubtful = (
            row["gpu"] in UNFIT
            or slow_host
            or row["how"] in ("validation", "blind")
            or (yolo and row["how"] == "python" and (row["variant"] == "qdq" or row["gpu"].startswith("A100")))
        )
        batch = float(row["batch"])
        remote = row["gpu"] == "A100 40GB" and not yolo  # latency with the copies from and to the host
        offset = 80.0 if remote else 50.0 if row["how"] == "python" else 0.0  # a call from Python, in microseconds
        data.add(
            network_work(table[row["network"], row["variant"]], Precision(row["float"]), batch, find(row["gpu"])),
            find(row["gpu"]),
            f"{row['how']} {row['network']} {row['variant']} {row['float']} b{batch:.0f}",
            float(row["ms"]),
            0.0 if doubtful else offset,
            0.0 if doubtful else (0.05 if remote else 0.3) / counts[row["gpu"], row["network"]],
        )
    return data


def joined(*parts: Data) -> Data:
    result = Data()
    for part in parts:
        for name in ("works", "gpus", "labels", "measured", "overhead", "weights", "segments", "cold"):
            getattr(result, name).extend(getattr(part, name))
    return result


def replace_overhead(data: Data, overhead: float) -> Data:
    """The same layers with the usual overhead of a profile: what is known of an engine nobody has measured."""
    usual = [0.0 if label.startswith("convolutions-") else overhead * 1e-6 for label in data.labels]
    return replace(data, overhead=usual)
