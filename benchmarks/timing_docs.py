"""Writes docs/timing.md and docs/timing.svg: the time model against what was measured.

usage: python benchmarks/timing_docs.py     # after fit_timing.py --write; reads benchmarks/timing/judged.json alone
"""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from fit_timing import gain_figures
from timing_tables import NETWORKS, read

from qdqtool.timing.estimate import UNMEASURED
from qdqtool.timing.gpus import find
from qdqtool.timing.physics import constants

HERE = Path(__file__).parent / "timing"
DOCS = Path(__file__).parent.parent / "docs"
COLOURS = {  # Okabe and Ito's, told apart by the colour-blind too
    "A100": "#0072b2",
    "Jetson": "#009e73",
    "RTX 20": "#56b4e9",
    "RTX 30": "#e69f00",
    "RTX 40": "#cc79a7",
    "TITAN": "#999999",
    "Tesla T4": "#d55e00",
    "L4": "#000000",
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 440, 70, 150, 62, 56
Rows = list[dict[str, Any]]


def main() -> None:
    data = json.loads((HERE / "judged.json").read_text())
    DOCS.mkdir(exist_ok=True)
    (DOCS / "timing.svg").write_text(plot(data["networks"]))
    (DOCS / "timing.md").write_text(page(data["layers"], data["networks"], data["pairs"]))
    print("wrote docs/timing.md and docs/timing.svg")


def page(layers: Rows, networks: Rows, pairs: Rows) -> str:
    c = constants()
    s = c.spreads
    fitted = [n for n in networks if n["fitted"]]
    blind = [n for n in networks if n["what"].startswith("blind")]
    within = sum(is_inside(n) for n in blind)
    gains = gain_figures(pairs)
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
        f"{sum(r['layers'] for r in layers)} timed layers and {len(fitted)} times of whole networks, "
        "and to the gains of pairs timed by trtexec (`benchmarks/fit_timing.py`, `qdqtool/timing/constants.json`).",
        "Bytes are those that a kernel has to touch: a 1x1 convolution of stride 2 reads a quarter of its input. A "
        "convolution of fewer than 16 input channels in INT8 writes FP32 where it does not write INT8, also in an FP16 "
        "build: kernels for groups of four channels have no FP16 output (every combination that the logs of three "
        "builds autotune). Poolings behind it stay FP32, other readers get a reformat. INT8 convolutions compute and "
        "store their channels in blocks of 32. Weights come from memory each time where those of the whole network do "
        "not fit the L2. Each kernel of an engine without a CUDA graph waits "
        f"{c.gap_us:.2g} us (yolo11n on an L40S takes .13 ms more so, for 156 kernels). Calls from Python wait longer "
        "for launches: that is fitted beside the model and is in no estimate.",
        "## Layouts and regions",
        "An engine holds reformats that convert nothing: between the layouts of INT8 (NC/32HW32, NC/4HW4), of FP16 "
        "(NHWC8, NC/2HW2) and linear. `qdqtool/timing/layouts.py` says which layout each kernel reads and writes, by "
        "engines that print formats, and simulates it; `time.layouts_ms` and `predict --layers` show the reformats, "
        "never mixed with conversions. Where an INT8 convolution writes a float, SiLU is a kernel of its own; where "
        "the builder chooses the width of floats, the convolution writes FP32 to it, which is linear and needs no "
        "reformat "
        f"(inferred from the counts below). YOLOv8n with ModelOpt's placement: {copies('yolov8n-modelopt@trt10')} on "
        "10.14.1, strongly typed (46 and 49 in two builds), "
        f"{copies('yolov8n-modelopt')} on 8.6.1 (25 in all). FP32 by TF32 is channels last as well. On Blackwell "
        "Myelin takes the whole network (one engine seen): no changes of layout, and conversions beside kernels that "
        "map or copy values cost nothing. Attention and normalization are regions of few kernels "
        "(`qdqtool/timing/regions.py`): a Q inside costs no kernel.",
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
        table(
            ("GPU", "what", "times", "in the fit", "left out", "fitted"),
            network_rows([n for n in networks if n not in blind]),
        ),
        "Kinds: `engine` and `trtexec` are GPU compute times under trtexec; `python` whole calls from Python; "
        "`validation` "
        "Ultralytics' figures per image of its validation loop. `qdq` is the "
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
        "## Judged blind",
        f"{len(blind)} published times of GPUs that are in no fit, or (AGX Orin) of a network that is not "
        "(`benchmarks/timing/blind.tsv`, which "
        "tells the rule by which sources were taken or not): each was written down before our estimate of it was "
        f"looked at (the model has changed since). Median error {median(blind, 'model_ms'):.0%}; {within} of "
        f"{len(blind)} "
        f"({within / len(blind):.0%}) lie in the range.",
        table(("GPU", "what", "times", "model over measured", "median error", "in the range"), blind_rows(blind)),
        "Every T4 is slower than estimated, the more the harder it works (x0.64 with YOLOv7 at batch 16): its 70 W do "
        "not keep the boost clock, and the range says so. INT8 of others' Q/DQ gains a tenth less than estimated on "
        "an RTX 4090 and an AGX Orin. Tried on the times left out and dropped, for nothing got better: a cost of SiLU "
        "in the epilogue (YOLOv9 takes as long with ReLU on an RTX 4050).",
        "## Will INT8 pay",
        "Pairs of INT8 and FP16 of one network, GPU and batch, measured the same way and of known placement: every one "
        "in `benchmarks/timing/latencies*.tsv` and the engines with a profile. Each gain (FP16's time over INT8's) is "
        "by a fit that has seen neither the network nor the GPU. INT8 from calibration tables counts as Q/DQ wherever "
        "`insert` would put it.",
        f"The faster of the two is right in {gains['right']} of {gains['pairs']} pairs that differ by more than 5 % "
        f"({gains['right'] / gains['pairs']:.0%}); the gain is off by {gains['median']:.0%} in the median, and 80 % "
        f"lie "
        f"within a factor of {gains['spread']:.2f}, which is the range of `time.gain`. To say INT8 always would be "
        f"right in "
        f"{sum(r['measured'] > 1.05 for r in pairs)} of them: pairs in which INT8 loses are few. That includes "
        f"whole calls from "
        f"Python; of those under trtexec alone {trtexec(pairs)}.",
        table(("GPU", "network", "pair", "measured", "estimated", "faster"), [
            (r["gpu"], r["network"], r["what"], f"{r['measured']:.2f}", f"{r['left_out']:.2f}", verdict(r))
            for r in pairs
        ]),
        "Left out, with reasons: networks whose export or placement is not published (YOLOv6, YOLOX, RT-DETR, RF-DETR, "
        "CLIP ViT-L, Stable Diffusion, FasterViT, ResNet v1 and v2 of the model zoo, MobileNet v1); FP16 rows of an "
        "RTX "
        "4050 that equal its Q/DQ rows; QAT of YOLO26m on 11.2, whose placement there is not told; user reports "
        "without a network of known layers.",
        "![model against measured](timing.svg)",
        "## The range",
        f"`low_ms` to `high_ms` is the estimate divided and multiplied by {s['total']:.2f}: the factor within "
        f"which 80 % of the "
        "measured networks lie (by number, where an engine that was measured several times counts once, and by their "
        "weights in the fit) when their GPU is left out of the fit; of all times "
        f"{len(inside)} of {len(fitted)} do ({most_outside(fitted)}). Where the architecture was not measured it is "
        f"{s['total_unknown'] * UNMEASURED:.2f}, and wider still for guessed clocks and unknown shapes. On boards with "
        "less than half the watts per SM and clock of their kind (T4, L4, A10) it goes up to the clock that those "
        "watts surely allow. With `--calibrate` and a time of the same network it is 5 %; with a profile, up to where "
        "what profiles add would be the kernels' own (so three of four engines come out within 6 % of their time "
        "without "
        f"a profiler, MobileNetV2 on a TITAN RTX 31 % above); with a calibration kept from another network "
        f"{s['total_calibrated']:.2f}: what one network tells "
        "of another is the clock, hardly more.",
        "## What it does not know",
        "* Clocks: the boost clock is taken; a T4, an L4 or a laptop under load may run well below it. Give `--clock`.",
        "* The tactic that TensorRT will choose; a third of the reformats of YOLOv8n on 10.14.1 are not explained.",
        "* The host: a slow one keeps the GPU waiting for launches, and a loop in Python adds its own.",
        "* TensorRT-RTX names no layers: it is estimated as the engine that classic TensorRT would build.",
        "* Hopper was not measured, Blackwell by one network: it takes the factor of the nearest architecture. "
        "Against the "
        "ResNet-50 throughput that NVIDIA's MLPerf v3.0 configurations expect (INT8, other kernels than TensorRT's "
        "own), the estimate is x0.77 of the speed on A100 and x0.69 on H100.",
    ]
    return "\n\n".join(wrapped(block) for block in blocks) + "\n"


def most_outside(fitted: Rows) -> str:
    """Which network on which GPU most of the times outside the range belong to."""
    factor = math.log(constants().spreads["total"])
    found = Counter(
        (r["what"].split()[1], r["gpu"]) for r in fitted if abs(math.log(r["left_out_ms"] / r["measured_ms"])) > factor
    )
    (network, gpu), count = found.most_common(1)[0]
    return f"{count} of the others are {network} on the {gpu}"


def copies(network: str) -> str:
    """Changes of layout and copies of a network with Q/DQ, as they were derived for the fit."""
    kinds = [row["kind"] for row in read(NETWORKS) if (row["network"], row["variant"]) == (network, "qdq")]
    return f"{kinds.count('reformat')} and {kinds.count('copy')} copies"


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


def blind_rows(blind: Rows) -> list[tuple[Any, ...]]:
    groups: dict[tuple[str, str], Rows] = defaultdict(list)
    for n in blind:
        _, network, variant, plain, batch = n["what"].split()
        family = network if network in ("resnet50", "yolov7", "yolov9c") else "YOLOv8 to 11, 26"
        kind = "INT8 (Q/DQ)" if variant == "qdq" else plain
        groups[n["gpu"], f"{family} {kind}, batch {batch[1:]}"].append(n)
    return [
        (gpu, what, len(rows), f"x{statistics.median(r['model_ms'] / r['measured_ms'] for r in rows):.2f}",
         f"{median(rows, 'model_ms'):.0%}", f"{sum(map(is_inside, rows))} of {len(rows)}")
        for (gpu, what), rows in groups.items()
    ]  # fmt: skip


def verdict(row: dict[str, Any]) -> str:
    """Whether the faster one of a pair was named rightly."""
    if abs(math.log(row["measured"])) <= math.log(1.05):
        return "within 5 %"
    return "right" if (row["measured"] > 1) == (row["left_out"] > 1) else "**wrong**"


def trtexec(pairs: Rows) -> str:
    """Right and all of the pairs whose times are GPU compute times."""
    rows = [r for r in pairs if not r["what"].startswith(("python", "validation"))]
    told = [verdict(r) for r in rows if verdict(r) != "within 5 %"]
    off = statistics.median(abs(r["left_out"] / r["measured"] - 1) for r in rows)
    return f"{told.count('right')} of {len(told)} are right and the median gain is off by {off:.0%}"


def is_inside(row: dict[str, Any], watts: bool = True) -> bool:
    """Whether a measured time lies in the range that the estimate has; ``watts``: wider for boards of few of them."""
    spread, slowed = constants().spreads["total"], 1 / find(row["gpu"]).sustained if watts else 1.0
    return bool(row["model_ms"] / spread <= row["measured_ms"] <= row["model_ms"] * spread * slowed)


def once(rows: Rows) -> Rows:
    """One row for each GPU, network, precision and batch: the one in the middle."""
    groups: dict[tuple[str, str], Rows] = defaultdict(list)
    for row in rows:
        groups[row["gpu"], row["what"]].append(row)
    return [sorted(g, key=lambda r: r["model_ms"] / r["measured_ms"])[len(g) // 2] for g in groups.values()]


def median(rows: Rows, key: str) -> float:
    return statistics.median(abs(r[key] / r["measured_ms"] - 1) for r in rows)


def plot(networks: Rows) -> str:
    """Estimate over measurement against measured milliseconds, both logarithmic, as an SVG."""
    shown = [n for n in networks if n["fitted"] or n["what"].startswith("blind")]
    low, high, least, most = 0.1, 1000.0, 0.4, 2.5

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / low) / math.log(high / low)

    def y(value: float) -> float:
        inside = min(max(value, least), most)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(inside / least) / math.log(most / least)

    def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'

    def text(at: float, height: float, what: str, style: str = 'text-anchor="middle"') -> str:
        return f'<text x="{at:.1f}" y="{height:.1f}" {style}>{what}</text>'

    def mark(at: float, height: float, colour: str, is_blind: bool, told: str = "") -> str:
        title = f"<title>{told}</title>" if told else ""
        if is_blind:
            path = f"M{at:.1f} {height - 5:.1f}l5 5l-5 5l-5 -5z"
            return f'<path d="{path}" fill="white" stroke="{colour}" stroke-width="1.8">{title}</path>'
        return f'<circle cx="{at:.1f}" cy="{height:.1f}" r="4" fill="{colour}" fill-opacity="0.7">{title}</circle>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text((LEFT + WIDTH - RIGHT) / 2, 24, "Whole networks: estimate over measurement", 'text-anchor="middle" '
             'font-size="15"'),
        text((LEFT + WIDTH - RIGHT) / 2, 44, "by a model that has not seen the GPU; the band is the range"),
    ]  # fmt: skip
    factor = constants().spreads["total"]
    parts.append(
        f'<rect x="{LEFT}" y="{y(factor):.1f}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{y(1 / factor) - y(factor):.1f}" fill="#eef3f7"/>'
    )
    for value in (0.1, 1, 10, 100, 1000):
        parts += [line(x(value), TOP, x(value), HEIGHT - BOTTOM, 'stroke="#ccc"'),
                  text(x(value), HEIGHT - BOTTOM + 18, f"{value:g}")]  # fmt: skip
    for value in (0.4, 0.5, 0.75, 1, 1.33, 2, 2.5):
        style = 'stroke="black"' if value == 1 else 'stroke="#ddd"'
        parts += [line(LEFT, y(value), WIDTH - RIGHT, y(value), style),
                  text(LEFT - 8, y(value) + 4, f"x{value:g}", 'text-anchor="end"')]  # fmt: skip
    for n in sorted(shown, key=lambda n: n["what"].startswith("blind")):
        family = "RTX 40" if "Ada" in n["gpu"] else n["gpu"]
        colour = next((c for k, c in COLOURS.items() if family.startswith(k)), "#555")
        ratio = n["model_ms" if n["what"].startswith("blind") else "left_out_ms"] / n["measured_ms"]
        told = f"{n['gpu']}: {n['what']}, {n['measured_ms']:.3g} ms, x{ratio:.2f}"
        parts.append(mark(x(n["measured_ms"]), y(ratio), colour, n["what"].startswith("blind"), told))
    side = WIDTH - RIGHT + 20
    for i, (name, colour) in enumerate(COLOURS.items()):
        told = f"{name} series" if name.startswith("RTX") else name
        parts += [mark(side, TOP + 12 + 20 * i, colour, False), text(side + 12, TOP + 16 + 20 * i, told, "")]
    below = TOP + 30 + 20 * len(COLOURS)
    parts += [
        mark(side, below, "#555", False), text(side + 12, below + 4, "fitted, its GPU", ""),
        text(side + 12, below + 19, "left out of the fit", ""),
        mark(side, below + 40, "#555", True), text(side + 12, below + 44, "in no fit: blind", ""),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "measured, ms"), "</svg>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
