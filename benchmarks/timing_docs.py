"""Write the tables of docs/timing.md, and docs/timing.svg: estimated and measured times.

usage: python benchmarks/timing_docs.py     # after fit_timing.py --write

The script reads only benchmarks/timing/judged.json.
"""

import json
import math
import re
import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import publish, table
from fit_timing import gain_figures
from timing_data import HERE, MODES, NETWORKS, read

from qdqtool.timing.gpus import find_gpu
from qdqtool.timing.physics import load_constants
from qdqtool.timing.results import UNMEASURED_SPREAD

DOCS = Path(__file__).parent.parent / "docs"
COLORS = {  # colors of Okabe and Ito, which colorblind readers can distinguish
    "A100": "#0072b2",
    "Jetson": "#009e73",
    "RTX 20": "#56b4e9",
    "RTX 30": "#e69f00",
    "RTX 40": "#cc79a7",
    "TITAN": "#999999",
    "Tesla T4": "#d55e00",
    "L4": "#000000",
}
Rows = list[dict[str, Any]]


def main() -> None:
    data = json.loads((HERE / "judged.json").read_text())
    layers, networks, pairs = data["layers"], data["networks"], data["pairs"]
    blind = [n for n in networks if is_blind(n)]
    fitted = [n for n in networks if n["fitted"]]
    blocks = {
        "timing-summary": summary(blind, pairs),
        "timing-fit": fit_figures(layers, fitted),
        "timing-layers": table(
            ("GPU", "engine", "layers", "in the fit", "left out"),
            [
                (r["gpu"], r["engine"], r["layers"], f"{r['in_fit']:.0%}", f"{r['left_out']:.0%}")
                for r in layers
            ],
        ),
        "timing-networks": f"{network_table([n for n in networks if not is_blind(n)])}\n\n{yolo_figures(networks)}",
        "timing-blind": f"{blind_figures(blind)}\n\n{blind_table(blind)}",
        "timing-gains": f"{gain_sentence(pairs)}\n\n{gain_table(pairs)}",
        "timing-range": range_figures(fitted),
    }
    for name, text in blocks.items():
        publish(name, text, DOCS / "timing.md")
    publish("ultralytics", ultralytics_table(blind), DOCS / "times.md")
    plot([n for n in networks if n["fitted"] or is_blind(n)], DOCS / "timing.svg")


def fit_figures(layers: Rows, fitted: Rows) -> str:
    c = load_constants()

    def copies(network: str, *built: int) -> str:
        """Return the numbers of derived layout changes and copies of a network with Q/DQ.

        The text also has the number of copies in each build that were not derived.
        """
        kinds = [
            row["kind"]
            for row in read(NETWORKS)
            if (row["network"], row["variant"]) == (network, "qdq")
        ]
        layouts, moved = kinds.count("reformat"), kinds.count("copy")
        left = " and ".join(str(max(0, count - layouts - moved)) for count in built)
        return f"{layouts} and {moved}; {left} not explained"

    return table(
        ("in the model", ""),
        [
            (
                "constants, and factors of architectures",
                f"{len(c.values)} and {len(c.architectures)}",
            ),
            ("fitted to timed layers", sum(r["layers"] for r in layers)),
            ("and to times of whole networks", len(fitted)),
            ("wait of each kernel in an engine without a CUDA graph", f"{c.gap_us:.2g} us"),
            ("assumed overhead of a profile for each layer", f"{c.overhead_us:g} us"),
            (
                "reformats and copies of YOLOv8n, ModelOpt's placement, 10.14.1 strongly typed (46 and 49 in two builds)",
                copies("yolov8n-modelopt@trt10", 46, 49),
            ),
            ("the same on 8.6.1 (25 in all)", copies("yolov8n-modelopt", 25)),
        ],
    )


def yolo_figures(networks: Rows) -> str:
    """Return a table of the median errors for YOLO networks.

    For each GPU, network, precision and batch size, the row with the median error counts.
    """
    groups: dict[tuple[str, str], Rows] = defaultdict(list)
    for row in networks:
        if "yolo" in row["what"] and "validation" not in row["what"]:
            groups[row["gpu"], row["what"]].append(row)
    yolo = [
        sorted(g, key=lambda r: r["model_ms"] / r["measured_ms"])[len(g) // 2]
        for g in groups.values()
    ]
    own = [
        n for n in yolo if not (n["what"].split()[2] == "qdq" and n["what"].startswith("python"))
    ]
    return table(
        ("YOLO networks, median error", "times", "in the fit", "their GPU left out"),
        [
            (
                what,
                len(rows),
                f"{median(rows, 'model_ms'):.0%}",
                f"{median(rows, 'left_out_ms'):.0%}",
            )
            for what, rows in (("all", yolo), ("without the INT8 of calibration tables", own))
        ],
    )


def blind_figures(blind: Rows) -> str:
    within = sum(map(is_inside, blind))
    return (
        f"The median error of the {len(blind)} times is {median(blind, 'model_ms'):.0%}. {within} "
        f"({within / len(blind):.0%}) are in the range."
    )


def has_steady_clock(pair: dict[str, Any]) -> bool:
    """Return whether the clock of a pair was fixed (see MODES of timing_data)."""
    modes = {gpu for gpu, _ in MODES}
    return pair["gpu"] not in modes or not pair["what"].startswith("python ")


def summary(blind: Rows, pairs: Rows) -> str:
    gains, steady = gain_figures(pairs), [p for p in pairs if has_steady_clock(p)]
    text = (
        f"For {len(blind)} published times of GPUs or networks to which the model was not fitted, the median error is "
        f"{median(blind, 'model_ms'):.0%}. The faster of INT8 and FP16 is correct for {gains['right']} of "
        f"{gains['pairs']} measured pairs that differ by more than 5 %, each judged by a fit without its network and "
        f"GPU. The median error of the gain is {gains['median']:.1%} for all {len(pairs)} pairs, and "
        f"{gain_figures(steady)['median']:.1%} without the {len(pairs) - len(steady)} pairs of an AGX Orin whose clock "
        "varied with the load and had to be inferred."
    )
    return textwrap.fill(text, 120)


def gain_sentence(pairs: Rows) -> str:
    gains, steady = gain_figures(pairs), gain_figures(list(filter(has_steady_clock, pairs)))
    engine = [r for r in pairs if not r["what"].startswith(("python", "validation"))]
    verdicts = [v for v in map(verdict, engine) if v != "within 5 %"]
    off = statistics.median(abs(r["left_out"] / r["measured"] - 1) for r in engine)
    always = sum(r["measured"] > 1.05 for r in pairs)
    shown = table(
        (
            "pairs",
            "faster one correct",
            "correct with always INT8",
            "median error of the gain",
            "80 % within",
        ),
        [
            (
                "all",
                f"{gains['right']} of {gains['pairs']} ({gains['right'] / gains['pairs']:.0%})",
                f"{always} of {gains['pairs']}",
                f"{gains['median']:.1%}",
                f"x{gains['spread']:.2f}",
            ),
            (
                "without the AGX Orin whose clock followed the load",
                f"{steady['right']} of {steady['pairs']}",
                "",
                f"{steady['median']:.1%}",
                f"x{steady['spread']:.2f}",
            ),
            (
                "under trtexec alone",
                f"{verdicts.count('right')} of {len(verdicts)}",
                f"{sum(r['measured'] > 1.05 for r in engine)} of {len(verdicts)}",
                f"{off:.0%}",
                "",
            ),
        ],
    )
    return (
        f"{shown}\n\nAlways choosing INT8 would be right in {always} of the {gains['pairs']} pairs that differ by more "
        f"than 5 %. Few pairs with a slower INT8 are published, so this figure alone is weak evidence."
    )


def gain_table(pairs: Rows) -> str:
    return table(
        ("GPU", "network", "pair", "measured", "estimated", "faster"),
        [
            (
                r["gpu"],
                r["network"],
                short(r["what"]),
                f"{r['measured']:.2f}",
                f"{r['left_out']:.2f}",
                verdict(r),
            )
            for r in pairs
        ],
    )


def range_figures(fitted: Rows) -> str:
    spreads = load_constants().spreads
    outside = [
        r
        for r in fitted
        if abs(math.log(r["left_out_ms"] / r["measured_ms"])) > math.log(spreads["total"])
    ]
    (network, gpu), count = Counter((r["what"].split()[1], r["gpu"]) for r in outside).most_common(
        1
    )[0]
    return table(
        ("factor of the range", ""),
        [
            ("`low_ms` to `high_ms`", f"{spreads['total']:.2f}"),
            (
                "if the architecture was not measured",
                f"{spreads['total_unknown'] * UNMEASURED_SPREAD:.2f}",
            ),
            ("with a calibration saved from another network", f"{spreads['total_calibrated']:.2f}"),
            (
                "times of whole networks in the range, their GPU left out",
                f"{len(fitted) - len(outside)} of {len(fitted)} ({count} of the others are {network} on the {gpu})",
            ),
        ],
    )


def network_table(networks: Rows) -> str:
    groups: dict[tuple[str, str, bool], Rows] = defaultdict(list)
    for n in networks:
        groups[n["gpu"], " ".join(n["what"].split()[:3]), n["fitted"]].append(n)
    found = []
    for (gpu, what, used), rows in sorted(groups.items()):
        seen, left = (
            statistics.median(r[k] / r["measured_ms"] for r in rows)
            for k in ("model_ms", "left_out_ms")
        )
        found.append(
            (gpu, short(what), len(rows), f"x{seen:.2f}", f"x{left:.2f}", "yes" if used else "no")
        )
    return table(("GPU", "kind and network", "times", "in the fit", "left out", "fitted"), found)


def blind_table(blind: Rows) -> str:
    groups: dict[tuple[str, str], Rows] = defaultdict(list)
    for n in blind:
        how, network, variant, plain, batch = n["what"].split()
        family = network if network in ("resnet50", "yolov7", "yolov9c") else "YOLOv8 to 11, 26"
        kind = "INT8 (Q/DQ)" if variant == "qdq" else plain
        graph = ", CUDA graph" if how == "blind-graph" else ""
        groups[n["gpu"], f"{family} {kind}, batch {batch[1:]}{graph}"].append(n)
    return table(
        ("GPU", "network", "times", "model over measured", "median error", "in the range"),
        [
            (
                gpu,
                what,
                len(rows),
                f"x{statistics.median(r['model_ms'] / r['measured_ms'] for r in rows):.2f}",
                f"{median(rows, 'model_ms'):.0%}",
                f"{sum(map(is_inside, rows))} of {len(rows)}",
            )
            for (gpu, what), rows in groups.items()
        ],
    )


def ultralytics_table(blind: Rows) -> str:
    """Return a table of FP16 times on a T4 that Ultralytics published, with estimates."""
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for row in blind:
        _, network, _, plain, batch = row["what"].split()
        named = re.fullmatch(r"(yolov?\d+)([a-z])", network)
        if row["gpu"] == "Tesla T4" and named and (plain, batch) == ("FP16", "b1"):
            size = {"t": "n", "c": "l", "e": "x"}.get(named[2], named[2])
            text = f"{row['measured_ms']:.2f}, {row['model_ms']:.2f}"
            cells[named[1]].setdefault(size, text)  # another source repeats some values
    sizes = "nsmblx"
    return table(
        ("published, estimated ms", *sizes),
        [(family, *(row.get(size, "") for size in sizes)) for family, row in cells.items()],
    )


def short(what: str) -> str:
    """Return the label of a measurement without the GPU, which has its own column."""
    return re.sub(r"-pair-([\w.]+?)(?:\.keyhole)?-[^@]*@", r" \1@", what)


def verdict(row: dict[str, Any]) -> str:
    if abs(math.log(row["measured"])) <= math.log(1.05):
        return "within 5 %"
    return "right" if (row["measured"] > 1) == (row["left_out"] > 1) else "**wrong**"


def is_blind(row: dict[str, Any]) -> bool:
    return bool(row["what"].startswith("blind"))


def is_inside(row: dict[str, Any]) -> bool:
    """Return whether a measured time is in the range of its estimate.

    The range is wider for boards with a power of few watts.
    """
    spread = load_constants().spreads["total"]
    slowed = row["clock_share"] / find_gpu(row["gpu"]).clock_share_under_load
    return bool(row["model_ms"] / spread <= row["measured_ms"] <= row["model_ms"] * spread * slowed)


def median(rows: Rows, key: str) -> float:
    return statistics.median(abs(r[key] / r["measured_ms"] - 1) for r in rows)


def plot(networks: Rows, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "qdqtool", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.6, 4.4), layout="constrained")
    factor = load_constants().spreads["total"]
    axes.axhspan(1 / factor, factor, color="#eef3f7", zorder=0)
    axes.axhline(1, color="black", linewidth=0.8, zorder=1)

    def draw(rows: Sequence[dict[str, Any]], key: str, color: str, marker: str, label: str) -> None:
        ratios = [min(max(r[key] / r["measured_ms"], 0.4), 2.5) for r in rows]
        face = color if marker == "o" else "white"
        axes.scatter(
            [r["measured_ms"] for r in rows],
            ratios,
            22,
            face,
            marker=marker,
            edgecolors=color,
            label=label,
        )

    for name, color in [*COLORS.items(), ("", "#555")]:
        mine = [
            n for n in networks if ("RTX 40" if "Ada" in n["gpu"] else n["gpu"]).startswith(name)
        ]
        networks = [n for n in networks if n not in mine]
        label = f"{name} series" if name.startswith("RTX") else name or "others"
        draw([n for n in mine if not is_blind(n)], "left_out_ms", color, "o", label)
        draw([n for n in mine if is_blind(n)], "model_ms", color, "D", "")
    draw([], "", "#555", "D", "not in the fit: blind")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(0.1, 1000),
        ylim=(0.38, 2.6),
        xlabel="measured, ms",
        title="Whole networks: estimate over measurement\nby a model that has not seen the GPU; band: the range",
    )
    axes.set_yticks(
        [0.4, 0.5, 0.75, 1, 1.33, 2, 2.5], [f"x{v:g}" for v in (0.4, 0.5, 0.75, 1, 1.33, 2, 2.5)]
    )
    axes.minorticks_off()
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
