"""Update the generated parts of README.md: the sample output of `predict`, and figures.

usage: python -m tools.readme [--figures]

The sample is the output of this version for the demo's network. The figures are copied from the
tables in docs/, which the scripts in benchmarks/ write. `make docs` and the tests reject a README
with outdated parts. --figures updates only the figures, which is fast.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from qdqtool.demo.images import make_image, write_images
from qdqtool.demo.network import yolov8n
from qdqtool.ir.modelfile import save

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
SAMPLE = 'qdqtool predict yolov8n_naive.onnx --gpu "RTX 3060"'
IMAGES, SIZE = 100, 320  # number of images, and size of the demo's network
OTHER_IMAGES = 40  # number of images that are not used for calibration
_SIGN = 0.05  # if the times of a pair differ by less than this fraction, no type counts as faster


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", action="store_true", help="renew the figures alone")
    text = README.read_text("utf-8")
    README.write_text(
        with_figures(text) if parser.parse_args().figures else renew(text), encoding="utf-8"
    )


def renew(text: str) -> str:
    return with_figures(with_sample(text))


# Sample -------------------------------------------------------------------------------


def with_sample(text: str) -> str:
    block = f"```\n$ {SAMPLE}\n{print_sample()}\n```"
    pattern = r"^```\n\$ qdqtool predict .*?^```"
    return re.sub(pattern, lambda _: block, text, count=1, flags=re.M | re.S)


def print_sample() -> str:
    """Return the first screen of `predict` with its first warning, and the last line.

    The network is the demo's network with float residual inputs, as many tools write it.
    """
    options = ["--residual", "none", "--losses", "0", "--no-predict"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_demo(folder)
        arguments = ["insert", "yolov8n.onnx", "--calib", "images", "-o", "yolov8n_naive.onnx"]
        run(arguments + options, folder)
        sections = run(shlex.split(SAMPLE)[1:], folder)[0].rstrip().split("\n\n")
    first = next(n for n, text in enumerate(sections) if text.startswith(("error", "warning")))
    closing = [text.split("\n")[0] for text in sections[first:] if text.startswith("Found")]
    return "\n\n".join(sections[: first + 1]) + "\n".join(["\n...", *closing])


def write_demo(folder: Path) -> None:
    save(yolov8n(SIZE), folder / "yolov8n.onnx")
    (folder / "images").mkdir()
    write_images(folder / "images", IMAGES, SIZE)
    (folder / "other-images").mkdir()
    for index in range(IMAGES, IMAGES + OTHER_IMAGES):
        make_image(SIZE, index).save(folder / "other-images" / f"demo-{index}.png")


def run(arguments: list[str], folder: Path, seconds: float = 600.0) -> tuple[str, int]:
    """Return the output of a command (stderr if the exit code is 2) and the exit code."""
    env = {
        **os.environ,
        "COLUMNS": "80",
        "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": str(folder / ".state"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "qdqtool", *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    text = done.stderr if done.returncode == 2 else done.stdout
    return text.replace(f"{folder}/", ""), done.returncode


# Figures ------------------------------------------------------------------------------


def with_figures(text: str) -> str:
    pattern = r"(<!-- figures: [^\n]*-->\n).*?(\n<!-- end of figures -->)"
    return re.sub(pattern, lambda m: f"{m[1]}{write_table()}{m[2]}", text, flags=re.S)


def write_table() -> str:
    rows = [
        (
            "question",
            "builds from which no rule and no time was derived",
            "builds from which rules and times were derived",
        ),
        ("---", "---", "---"),
        ("Is INT8 faster than FP16?", _describe_unseen_pairs(), _describe_fitted_pairs()),
        ("How many milliseconds?", _describe_times(), "fitted to published layer times"),
        ("Which types and fusions?", _UNSEEN_TYPES, _describe_engines()),
        (
            "Is INT8 accurate?",
            _describe_accuracy(),
            "settings were chosen by results on several of these sets",
        ),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


_UNSEEN_TYPES = (
    "a YOLOv8n on 10.14.1: all 64 convolutions. Few builds of 10 and 11 are published; each "
    "prediction states how many of its rules were seen in one of them"
)


def _describe_unseen_pairs() -> str:
    unseen = tomllib.loads((ROOT / "benchmarks/timing/unseen-2026.toml").read_text("utf-8"))
    others = [
        (float(measured), float(estimated))
        for *_, measured, estimated in read_tsv(ROOT / "benchmarks/timing/judged-2026.tsv")
    ]
    signed = [pair for pair in others if abs(pair[0] - 1.0) > _SIGN]
    wrong = sum((measured > 1.0) != (estimated > 1.0) for measured, estimated in signed)
    error = statistics.median(abs(estimated / measured - 1.0) for measured, estimated in others)
    return (
        f"right for {unseen['signs_right']} of {unseen['signs']} pairs of TensorRT 10 and 11 (judged "
        f"once, with version 0.2); gain off by {unseen['median_error'] * 100:.0f} % (median), "
        f"{unseen['in_range']} of {unseen['pairs']} in the 80 % range. For other kinds of networks (ReLU "
        f"between Q/DQ pairs, U-Net, transformers) wrong for {wrong} of {len(signed)}, gain off by "
        f"{error * 100:.0f} %; the rules for these networks were changed since"
    )


def _describe_fitted_pairs() -> str:
    page = read_page("timing.md")
    row = find(r"^\| all \| (\d+) of (\d+) \([^|]*\| (\d+) of \d+ \| ([\d.]+)% \|", page)
    return (
        f"right for {row[1]} of {row[2]} pairs, each judged by times derived without its network and GPU "
        f"(always choosing INT8: {row[3]}); gain off by {row[4]} %"
    )


def _describe_times() -> str:
    row = find(
        r"median error of the (\d+) times is (\d+)%. (\d+) \(\d+%\) are in", read_page("timing.md")
    )
    return (
        f"{row[1]} published times: off by {row[2]} % (median), {row[3]} in their 80 % range "
        "([times](docs/timing.md))"
    )


def _describe_engines() -> str:
    page = read_page("evidence.md")
    rows = re.findall(r"^\| `[^|]*\| (\d+) of (\d+) \| [^|]* \| (?:(\d+) of (\d+))?", page, re.M)
    right, convolutions = (sum(int(row[n]) for row in rows) for n in (0, 1))
    simulated, lines = (sum(int(row[n] or 0) for row in rows) for n in (2, 3))
    return (
        f"{right} of {convolutions} convolutions and {simulated:,} of {lines:,} log lines of "
        f"{len(rows)} engines ([evidence](docs/evidence.md))"
    )


def _describe_accuracy() -> str:
    page = read_page("accuracy.md")
    kept: dict[str, list[float]] = {"molecules": [], "others": []}
    for name, value in re.findall(r"^\| (\w+),[^|]*\| \*\*([\d.]+)\*\* \|", page, re.M):
        kept["molecules" if name == "molecules" else "others"].append(float(value))
    others, drawn = (f"{min(v):.2f} to {max(v):.2f}" for v in (kept["others"], kept["molecules"]))
    rows = re.findall(r"^\| \d+ \| ([\d.]+) \(([\d.]+) to[^|]*\| [\d.]+ \([^|]*\|$", page, re.M)
    values = [float(value) for value, _low in rows]
    weak = f"{min(values):.2f} to {max(values):.2f}"
    lowest = f"{min(float(low) for _value, low in rows):.2f}"
    return (
        f"agreement with the float model's detections {others} (people, pages), {weak} (detector of "
        f"people on photographs that mostly show something else; {lowest} is possible), {drawn} (tiny drawings) "
        "([accuracy](docs/accuracy.md)). mAP on COCO could not be measured: "
        "[script](benchmarks/coco.py)"
    )


def read_page(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


def read_tsv(path: Path) -> list[list[str]]:
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    return [line.split("\t") for line in lines[1:]]


def find(pattern: str, text: str) -> re.Match[str]:
    """Return the first match.

    Raises:
        ValueError: The pattern does not match.
    """
    match = re.search(pattern, text, re.M)
    if match is None:
        raise ValueError(f"no page of docs/ has a line like {pattern}; adapt tools/readme.py")
    return match


if __name__ == "__main__":
    main()
