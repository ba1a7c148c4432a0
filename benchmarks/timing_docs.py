"""Writes docs/timing.md and docs/timing.svg: the time model against what was measured.

usage: python benchmarks/timing_docs.py     # after fit_timing.py --write; reads benchmarks/timing/judged.json alone
"""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

from qdqtool.timing.physics import constants

HERE = Path(__file__).parent / "timing"
DOCS = Path(__file__).parent.parent / "docs"
COLOURS = {
    "A100": "#1f77b4",
    "Jetson": "#2ca02c",
    "RTX 20": "#d62728",
    "RTX 30": "#ff7f0e",
    "RTX 40": "#9467bd",
    "TITAN": "#8c564b",
    "Tesla T4": "#e377c2",
}
SIZE, MARGIN = 560, 70
Rows = list[dict[str, Any]]


def main() -> None:
    data = json.loads((HERE / "judged.json").read_text())
    DOCS.mkdir(exist_ok=True)
    (DOCS / "timing.svg").write_text(plot(data["networks"]))
    (DOCS / "timing.md").write_text(page(data["layers"], data["networks"]))
    print("wrote docs/timing.md and docs/timing.svg")


def page(layers: Rows, networks: Rows) -> str:
    c = constants()
    s = c.spreads
    fitted = [n for n in networks if n["fitted"]]
    blind = [n for n in networks if n["what"].startswith("blind")]
    yolo = once([n for n in networks if "yolo" in n["what"] and "validation" not in n["what"]])
    own = [n for n in yolo if not (n["what"].split()[2] == "qdq" and n["what"].startswith("python"))]
    inside = [n for n in fitted if abs(math.log(n["left_out_ms"] / n["measured_ms"])) <= math.log(s["total"])]
    blocks = [
        "# How long will it take: the time model",
        "`qdqtool predict MODEL --gpu NAME` estimates milliseconds from the predicted engine: its layers, their "
        "types, shapes "
        "and conversions. No GPU is needed. This page says what the model is and how far it was off; `make fit-timing` "
        "writes it.",
        "## The model",
        "One kernel takes",
        "    floor + latency of the depth + (compute^p + memory^p)^(1/p)",
        "compute: products, padded to tiles, over the peak rate of SMs x clock times an efficiency for each "
        "data type and a "
        "factor for each architecture; memory: bytes that miss the L2 over the memory's bandwidth, or all bytes "
        "over the "
        f"L2's. {len(c.values)} constants and one factor for each of {len(c.architectures)} architectures were "
        f"fitted to "
        f"{sum(r['layers'] for r in layers)} timed layers and {len(fitted)} times of whole networks "
        "(`benchmarks/fit_timing.py`, `qdqtool/timing/constants.json`).",
        "Bytes are those that a kernel has to touch: a 1x1 convolution of stride 2 reads a quarter of its input. A "
        "convolution of fewer than 16 input channels in INT8 writes FP32 where it does not write INT8, also in an FP16 "
        "build: kernels for groups of four channels have no FP16 output (every combination that the logs of three "
        "builds autotune). Poolings behind it stay FP32, other readers get a reformat. Calls from Python, without a "
        "CUDA graph, wait for launches: that is fitted beside the model and is in no estimate.",
        "Milliseconds of a *layer* are what a profile would show; a profile adds its own overhead to each layer "
        "(0 to 7.5 us "
        f"were seen, {c.overhead_us:g} is assumed). The *total* is one execution without a profiler, copies "
        f"from and to the "
        "host apart.",
        "## Layers",
        "Median error of a layer, with the GPU in the fit, and with all its measurements left out of it (an "
        "A100 is one "
        "GPU). The assumed overhead of profiles is in both columns, not the engine's own.",
        table(
            ("GPU", "engine", "layers", "in the fit", "left out"),
            [(r["gpu"], r["engine"], r["layers"], f"{r['in_fit']:.0%}", f"{r['left_out']:.0%}") for r in layers],
        ),
        "The V100's are single convolutions timed by others outside TensorRT engines; they count little in the "
        "fit, and the "
        "model is poor on them.",
        "## Whole networks",
        "Model over measured, the middle of each group; `left out` is a fit that has not seen the GPU.",
        table(("GPU", "what", "times", "in the fit", "left out", "fitted"), network_rows(networks)),
        "Kinds: `engine` and `trtexec` are GPU compute times under trtexec; `python` whole calls from Python; "
        "`validation` "
        "Ultralytics' figures per image of its validation loop; `blind` was published on a GPU that is in no "
        "fit, and looked "
        f"up after the model's form was settled on the others (median error {median(blind, 'model_ms'):.0%}). "
        f"`qdq` is the "
        "network with Q/DQ where `insert` would put it, also for published INT8 times of calibration-table "
        "builds, which "
        "convert more. Not fitted: AGX Orin calls of another power mode (about four times too slow), batch 1 on "
        "a Xavier NX, "
        "Ultralytics' INT8 and A100 figures, which hold more than the engine.",
        f"YOLO networks, each GPU, network and precision once, `validation` apart: median error "
        f"{median(yolo, 'model_ms'):.0%} "
        f"over all {len(yolo)}, {median(yolo, 'left_out_ms'):.0%} with their GPU left out; "
        f"{median(own, 'model_ms'):.0%} and "
        f"{median(own, 'left_out_ms'):.0%} without the INT8 of calibration tables ({len(own)}).",
        "![model against measured](timing.svg)",
        "## The range",
        f"`low_ms` to `high_ms` is the estimate divided and multiplied by {s['total']:.2f}: the factor within "
        f"which 80 % of the "
        "measured networks lie (by number and by their weights in the fit) when their GPU is left out of the fit; "
        f"{len(inside)} of {len(fitted)} do. Where the architecture was not measured it is "
        f"{s['total_unknown']:.2f}, and wider "
        "still for guessed clocks and unknown shapes. With `--calibrate` and a time of the same network it is 5 "
        "%; with a "
        f"calibration kept from another network {s['total_calibrated']:.2f}: what one network tells of another "
        f"is the clock, "
        "hardly more.",
        "## What it does not know",
        "* Clocks: the boost clock is taken; a T4, an L4 or a laptop under load may run well below it. Give `--clock`.",
        "* The tactic that TensorRT will choose, and the reformats between layouts that come with it.",
        "* The host: without a CUDA graph small networks wait for their launches, and a loop in Python adds its own.",
        "* TensorRT-RTX names no layers: it is estimated as the engine that classic TensorRT would build.",
        "* Hopper and Blackwell were not measured: they take the factor of the nearest architecture (for 9.0 to "
        "11.0, whose "
        "tensor cores have twice the rate per SM, times an assumed 0.7).",
    ]
    return "\n\n".join(wrapped(block) for block in blocks) + "\n"


def wrapped(block: str) -> str:
    if block.startswith(("|", "#", "    ", "!")):
        return block
    return textwrap.fill(
        block,
        118,
        break_long_words=False,
        break_on_hyphens=False,
        subsequent_indent="  " if block.startswith("* ") else "",
    )


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def network_rows(networks: Rows) -> list[tuple[Any, ...]]:
    groups: dict[tuple[str, str, bool], Rows] = defaultdict(list)
    for n in networks:
        groups[n["gpu"], " ".join(n["what"].split()[:3]), n["fitted"]].append(n)
    found = []
    for (gpu, what, used), rows in sorted(groups.items()):
        seen, left = (statistics.median(r[k] / r["measured_ms"] for r in rows) for k in ("model_ms", "left_out_ms"))
        found.append((gpu, what, len(rows), f"x{seen:.2f}", f"x{left:.2f}", "yes" if used else "no"))
    return found


def once(rows: Rows) -> Rows:
    """One row for each GPU, network, precision and batch: the one in the middle."""
    groups: dict[tuple[str, str], Rows] = defaultdict(list)
    for row in rows:
        groups[row["gpu"], row["what"]].append(row)
    return [sorted(g, key=lambda r: r["model_ms"] / r["measured_ms"])[len(g) // 2] for g in groups.values()]


def median(rows: Rows, key: str) -> float:
    return statistics.median(abs(r[key] / r["measured_ms"] - 1) for r in rows)


def plot(networks: Rows) -> str:
    """Measured against modelled milliseconds, both logarithmic, as an SVG."""
    shown = [n for n in networks if "validation" not in n["what"]]
    low, high = 0.1, 1000.0

    def place(value: float) -> float:
        return MARGIN + (SIZE - 2 * MARGIN) * (math.log10(value / low) / math.log10(high / low))

    def x(value: float) -> float:
        return place(value)

    def y(value: float) -> float:
        return SIZE - place(value)

    def line(a: tuple[float, float], b: tuple[float, float], style: str) -> str:
        return f'<line x1="{x(a[0]):.1f}" y1="{y(a[1]):.1f}" x2="{x(b[0]):.1f}" y2="{y(b[1]):.1f}" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE}" height="{SIZE}" viewBox="0 0 {SIZE} {SIZE}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{SIZE}" height="{SIZE}" fill="white"/>',
    ]
    for power in range(-1, 4):
        value = 10.0**power
        parts += [
            line((value, low), (value, high), 'stroke="#ddd"'),
            line((low, value), (high, value), 'stroke="#ddd"'),
            f'<text x="{x(value):.1f}" y="{SIZE - MARGIN + 18}" text-anchor="middle">{value:g}</text>',
            f'<text x="{MARGIN - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>',
        ]
    parts.append(line((low, low), (high, high), 'stroke="black"'))
    factor = constants().spreads["total"]
    for f in (factor, 1 / factor):
        a = (low, low * f) if f > 1 else (low / f, low)
        b = (high / f, high) if f > 1 else (high, high * f)
        parts.append(line(a, b, 'stroke="#888" stroke-dasharray="4 3"'))
    for n in shown:
        if not (low < n["measured_ms"] < high and low < n["left_out_ms"] < high):
            continue
        colour = next((c for k, c in COLOURS.items() if n["gpu"].startswith(k)), "#555")
        fill = colour if n["fitted"] else "none"
        parts.append(
            f'<circle cx="{x(n["measured_ms"]):.1f}" cy="{y(n["left_out_ms"]):.1f}" r="3.2" fill="{fill}" '
            f'stroke="{colour}" fill-opacity="0.6"><title>{n["gpu"]}: {n["what"]}</title></circle>'
        )
    for i, (name, colour) in enumerate(COLOURS.items()):
        parts += [
            f'<circle cx="{MARGIN + 14}" cy="{MARGIN + 14 + 16 * i}" r="4" fill="{colour}"/>',
            f'<text x="{MARGIN + 24}" y="{MARGIN + 18 + 16 * i}">{name}'
            f"{'..' if 'RTX' in name and name[-1] == '0' else ''}</text>",
        ]
    parts += [
        f'<text x="{SIZE / 2}" y="{SIZE - 24}" text-anchor="middle">measured, ms</text>',
        f'<text x="22" y="{SIZE / 2}" text-anchor="middle" transform="rotate(-90 22 {SIZE / 2})">'
        "model that has not seen the "
        "GPU, ms</text>",
        f'<text x="{SIZE / 2}" y="28" text-anchor="middle" font-size="14">'
        "Whole networks: model against measured</text>",
        f'<text x="{SIZE / 2}" y="46" text-anchor="middle">'
        "dashed: the range; hollow: judged only (other power mode, other "
        "INT8)</text>", "</svg>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
