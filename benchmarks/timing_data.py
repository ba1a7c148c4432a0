"""Derives the tables that the time model is fitted on, in our own format, from published profiles.

usage: python benchmarks/timing_data.py SHARED      # a folder with timing/ and evidence/ as they were published

Writes benchmarks/timing/layers.tsv: for each measured kernel of an engine what it computes and moves
(qdqtool.timing.work) and how long it took. The fit (benchmarks/fit_timing.py) reads that file alone, so that nobody
needs SHARED to repeat it.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from timing_tables import LAYERS, WORK, cells, number, write

from qdqtool.buildlog.read import read_build
from qdqtool.engine.costs import analyze
from qdqtool.timing import work
from qdqtool.timing.built import work_of
from qdqtool.timing.work import Work, width
from qdqtool.types import Precision

FIELDS = ("engine", "gpu", "layer", *WORK, "ms")
BUILDS = (  # engine, GPU, files
    (
        "resnet18-fp32",
        "A100 80GB PCIe",
        ("timing/resnet18-a100-fp32/graph.json", "timing/resnet18-a100-fp32/profile.json"),
    ),
    *(
        (
            name,
            "A100 80GB PCIe",
            (f"evidence/resnet18-a100-{folder}/graph.json", f"evidence/resnet18-a100-{folder}/profile.json"),
        )
        for name, folder in (
            ("resnet18-fp16", "fp16"),
            ("resnet18-qat", "qat"),
            ("resnet18-qat-residual", "qat-residual"),
            ("resnet18-qat-residual-qgap", "qat-residual-qgap"),
        )
    ),
    (
        "mobilenetv2-qat",
        "TITAN RTX",
        (
            "evidence/mobilenetv2-titanrtx-qat-residual/graph.json",
            "evidence/mobilenetv2-titanrtx-qat-residual/profile.json",
        ),
    ),
    (
        "bevfusion-3080ti",
        "RTX 3080 Ti",
        (
            "evidence/bevfusion-camera-rtx3080ti-trt8600/log.txt",
            "evidence/bevfusion-camera-rtx3080ti-trt8600/layer_info.json",
        ),
    ),
)
V100_EVERY = 3  # of the 4,500 single convolutions
_TYPES = {"Float": Precision.FP32, "Half": Precision.FP16, "Int8": Precision.INT8, "FP16": Precision.FP16}


def main(shared: Path) -> None:
    rows = [*builds(shared), *orin(shared), *listed(shared), *v100(shared)]
    write(LAYERS, FIELDS, rows)
    print(f"{len(rows)} layers written")


def row_of(engine: str, gpu: str, layer: str, found: Work, ms: float) -> list[object]:
    return [engine, gpu, layer, *cells(found), number(ms)]


def builds(shared: Path) -> Iterator[list[object]]:
    for engine, gpu, files in BUILDS:
        report = analyze(read_build(*(str(shared / f) for f in files)))
        for cost in report.rows:
            found = work_of(cost)
            if found is not None and found.kind != work.NOTHING and cost.ms:
                yield row_of(engine, gpu, f"{cost.index}", found, cost.ms)


def orin(shared: Path) -> Iterator[list[object]]:
    with open(shared / "evidence/bevfusion-camera-orin-trt8502/profile.tsv") as file:
        for number, row in enumerate(csv.DictReader(file, delimiter="\t")):
            source, target = ([int(d) for d in row[k].split("x")] for k in ("in", "out"))
            yield row_of(
                "bevfusion-orin",
                "Jetson AGX Orin 64GB",
                str(number),
                shaped(
                    row["layer"],
                    row["type"],
                    source,
                    target,
                    row["in_dtype"],
                    row["out_dtype"],
                    row["residual"],
                    int(row["kernel"] or 0),
                ),
                float(row["avg_ms"]),
            )


def listed(shared: Path) -> Iterator[list[object]]:
    for engine, gpu, name in (
        ("centerpoint-fp16", "A100 40GB", "centerpoint-a100-fp16.tsv"),
        ("resnet18-qat-laptop", "RTX 2000 Ada Laptop", "resnet18-rtx2000ada-qat.tsv"),
    ):
        with open(shared / "timing" / name) as file:
            for number, row in enumerate(csv.DictReader(file, delimiter="\t")):
                inputs, outputs = ([tensor(t) for t in row[k].split(";") if t.strip()] for k in ("inputs", "outputs"))
                if not inputs or not outputs:
                    continue
                (intype, source), (outtype, target) = inputs[0], outputs[0]
                if len(outputs) > 1:
                    target = [target[0], sum(o[1][1] for o in outputs), *target[2:]]
                residual = inputs[1][0] if len(inputs) > 1 else ""
                found = shaped(row["layer"], row["type"], source, target, intype, outtype, residual, 0)
                yield row_of(engine, gpu, str(number), found, float(row["median_ms"] or row["avg_ms"]))


def tensor(text: str) -> tuple[str, list[int]]:
    match = re.match(r"\s*(\w+)(?::\d+)?\[([\dx]+)\]", text)
    assert match, text
    return match[1], [int(d) for d in match[2].split("x")]


def shaped(
    layer: str,
    kind: str,
    source: list[int],
    target: list[int],
    intype: str,
    outtype: str,
    residual: str,
    kernel: int,
) -> Work:
    """The work of a layer of which a table tells types and shapes."""
    low, high = (_TYPES[t.split()[0].split(":")[0]] for t in (intype, outtype))
    read, written = math.prod(source) * width(low), math.prod(target) * width(high)
    if residual:
        read += math.prod(target) * width(_TYPES[residual.split()[0].split(":")[0]])
    if "Conv" not in kind and "Gemm" not in kind:
        plain = {"Resize": work.RESIZE, "CudaSoftMax": work.SOFTMAX, "Shuffle": work.SHUFFLE, "PoolingV2": work.POOL}
        text = kind.lower()
        name = plain.get(kind) or (
            work.POOL
            if "pool" in text
            else work.POINTWISE
            if "pointwise" in text
            else work.SHUFFLE
            if "shuffle" in text
            else work.CONVERSION
            if low != high or "QDQ" in kind
            else work.REFORMAT
            if "eformat" in layer
            else work.COPY
        )
        return Work(name, low, high, channels=float(source[1]), read=read, written=written)
    if not kernel:
        kernel = guessed(layer, source, target)
    pooled = "Pool" in layer or "Pool" in kind
    positions = math.prod(target[2:]) * (4 if pooled else 1)
    depth = source[1] * kernel * kernel
    kind = work.DECONV if "Deconv" in kind else work.CONV
    rows = target[0] * positions if kind == work.CONV else math.prod(source) // source[1]
    columns = target[1] * (kernel * kernel if kind == work.DECONV else 1)
    depth = depth if kind == work.CONV else source[1]
    read -= (math.prod(source) - work.touched(math.prod(source), rows, depth, 1)) * width(low)
    return Work(kind, low, high, rows, columns, depth, source[1], 1, read, depth * columns * width(low), written)


def guessed(layer: str, source: list[int], target: list[int]) -> int:
    """The kernel that the tables do not tell: ResNet-18's and CenterPoint's."""
    if len(source) < 3 or source[2] == 1:
        return 1
    if "downsample" in layer:
        return 1
    if layer.startswith("conv1.weight"):
        return 7
    if target[2] > source[2]:  # ConvTranspose without overlap
        return target[2] // source[2]
    if (source[1], target[1]) == (128, 256) and source[2] == target[2]:  # CenterPoint's first upsampling branch
        return 1
    return 3


def v100(shared: Path) -> Iterator[list[object]]:
    with open(shared / "timing/v100-single-convolutions.tsv") as file:
        for number, row in enumerate(csv.DictReader(file, delimiter="\t")):
            if number % V100_EVERY:
                continue
            precision = Precision(row["precision"])
            n, c, h, w, out, k, s = (
                int(row[x])
                for x in ("batch", "in_channels", "in_height", "in_width", "out_channels", "kernel", "stride")
            )
            deep = row["type"] == "Depthwise"
            ho, wo = -(-h // s), -(-w // s)
            size = width(precision)
            residual = int(row["fused_elementwise"]) * n * out * ho * wo * size
            found = Work(
                work.DEPTHWISE if deep else work.CONV, precision, precision, n * ho * wo, 1 if deep else out,
                k * k * (1 if deep else c), 1 if deep else c, c if deep else 1,
                work.touched(n * c * h * w, n * ho * wo * k * k, 1 if deep else c, c if deep else 1) * size + residual,
                k * k * out * (1 if deep else c) * size, n * out * ho * wo * size,
            )  # fmt: skip
            yield row_of(f"convolutions-{row['precision'].lower()}", "Tesla V100", str(number), found, float(row["ms"]))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: timing_data.py SHARED")
    main(Path(sys.argv[1]))
