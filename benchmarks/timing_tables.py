"""The derived tables of the time model in benchmarks/timing: their names, how a layer's work is written and read.

timing_data.py and timing_networks.py write them, timing_measurements.py reads them for the fit; blind.tsv, published
times that are judged only, and latencies-2026.tsv are written by hand.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from qdqtool.timing.work import Work, width
from qdqtool.types import Precision

HERE = Path(__file__).parent / "timing"
LAYERS, NETWORKS, LATENCIES, BLIND = "layers.tsv", "networks.tsv.gz", "latencies.tsv", "blind.tsv"
RECENT = "latencies-2026.tsv"
WORK = (
    "kind", "precision", "written_as", "rows", "columns", "depth", "channels", "groups", "read", "weights", "written",
    "steps",
)  # fmt: skip


def read(name: str) -> list[dict[str, str]]:
    raw = (HERE / name).read_bytes()
    text = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode()
    lines = (line for line in io.StringIO(text) if not line.startswith("#"))
    return list(csv.DictReader(lines, delimiter="\t"))


def write(name: str, fields: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerow(fields)
    writer.writerows(rows)
    raw = buffer.getvalue().encode()
    HERE.mkdir(exist_ok=True)
    (HERE / name).write_bytes(gzip.compress(raw, mtime=0) if name.endswith(".gz") else raw)


def cells(found: Work) -> list[str]:
    """What stands in the columns of WORK."""
    values = (getattr(found, name) for name in WORK)
    return [number(v) if isinstance(v, (int, float)) else str(v) for v in values]


def number(value: float) -> str:
    return f"{value:.9g}"


def work_of(row: Mapping[str, str], plain: Precision = Precision.FP16, batch: float = 1.0) -> Work:
    low, high = Precision(row["precision"]), Precision(row["written_as"])
    real_low, real_high = (plain if p == Precision.FLOAT else p for p in (low, high))
    grow, widen = width(real_low) / width(low), width(real_high) / width(high)
    return Work(
        row["kind"], real_low, real_high, float(row["rows"]) * batch, float(row["columns"]), float(row["depth"]),
        float(row["channels"]), float(row["groups"]), float(row["read"]) * grow * batch, float(row["weights"]) * grow,
        float(row["written"]) * widen * batch, float(row.get("steps") or 1),
    )  # fmt: skip
