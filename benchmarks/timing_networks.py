"""Derives the layers of whole networks, as the simulator predicts them, for the latencies that others published.

usage: python benchmarks/timing_networks.py SHARED FOLDER   # FOLDER holds exported models, <network>.onnx
       python benchmarks/timing_networks.py FOLDER          # adds these networks to the table, keeps the others

Writes benchmarks/timing/networks.tsv.gz (work of each layer at batch 1; float types are left
open in networks without Q/DQ, FP16 in those with) and latencies.tsv
(published times in milliseconds a call). Networks: exports of torchvision and Ultralytics; see docs/timing.md.
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

from timing_tables import LATENCIES, NETWORKS, WORK, cells, read, write

from qdqtool.errors import QdqtoolError
from qdqtool.graph import Model
from qdqtool.insertion.halfprecision import to_half
from qdqtool.insertion.prepare import prepare
from qdqtool.modelfile import load
from qdqtool.onnxgraph.half import HALF_OPSET
from qdqtool.prediction import predict
from qdqtool.timing import twin
from qdqtool.timing.gpus import find
from qdqtool.timing.predicted import workload_of
from qdqtool.trt.targets import strongly_typed, target_named
from qdqtool.types import Precision

FIELDS = ("network", "variant", *WORK)
EVIDENCE = {  # engines with a profile: network, model
    "resnet18-qat": "resnet18-a100-qat",
    "resnet18-qat-residual": "resnet18-a100-qat-residual",
    "resnet18-qat-residual-qgap": "resnet18-a100-qat-residual-qgap",
    "bevfusion-orin": "bevfusion-camera-orin-trt8502",
    "bevfusion-3080ti": "bevfusion-camera-rtx3080ti-trt8600",
    "mobilenetv2-qat": "mobilenetv2-titanrtx-qat-residual",
    "resnet18-qat-laptop": "resnet18-qat-rtx2000-trt8510",
}
NAMES = {
    "resnet50-v1": "resnet50",
    "resnet101-v1": "resnet101",
    "mobilenet-v2": "mobilenet_v2",
    "efficientnet-b0": "efficientnet_b0",
    "yolov8n-cls(640)": "yolov8n-cls",
    "yolov9-c": "yolov9c",
}
TARGET = "trt8.6"
GPUS = {"yolo26m-416": "RTX PRO 6000 Blackwell", "yolo26m-416-modelopt@trt10": "RTX PRO 6000 Blackwell"}  # others: any
TYPED = ("yolov8n-modelopt@trt10",)  # built strongly typed, with an FP16 remainder


def main(shared: Path, folder: Path) -> None:
    rows: list[list[object]] = []
    models = {p.stem: p for p in sorted(folder.glob("*.onnx"))}
    models |= {name: shared / "evidence" / at / "model.onnx.gz" for name, at in EVIDENCE.items()}
    for name, path in models.items():
        print(name, flush=True)
        rows += of_network(name, path)
    write(NETWORKS, FIELDS, rows)
    known = {str(row[0]) for row in rows}
    with open(shared / "timing/latency.tsv") as source:
        found = [published(row, known) for row in csv.DictReader(source, delimiter="\t")]
    lines = [line for line in found if line]
    write(LATENCIES, ("gpu", "network", "variant", "float", "batch", "ms", "how", "source"), lines)
    print(f"{len(rows)} layers of {len(known)} networks, {len(lines)} latencies")


def add(folder: Path) -> None:
    """The networks of a folder beside those of the table."""
    models = {p.stem: p for p in sorted(folder.glob("*.onnx"))}
    rows: list[list[object]] = [
        [row.get(f) or 1 for f in FIELDS] for row in read(NETWORKS) if row["network"] not in models]
    for name, path in models.items():
        print(name, flush=True)
        rows += of_network(name, path)
    write(NETWORKS, FIELDS, rows)


def of_network(name: str, path: Path) -> list[list[object]]:
    target = target_named(name.partition("@")[2] or TARGET)  # yolov8n-modelopt@trt10
    model = load(path)
    if name in TYPED:
        target = strongly_typed(target)
        prepare(model, opset=HALF_OPSET)
        to_half(model)
    model, _ = twin.resolved(Model(model.proto, str(path)))
    variants: list[tuple[str, Model]] = []
    if twin.has_qdq(model):
        variants = [("qdq", model), ("float", twin.float_twin(model))]
    else:
        variants = [("float", model)]
        try:
            variants.append(("qdq", twin.best_placement(model, target)))
        except QdqtoolError as error:
            print(f"  {error}")
    rows: list[list[object]] = []
    for variant, chosen in variants:
        # With Q/DQ some tensors of a layer are floats and some are not: their width has to be settled here.
        plain = Precision.FLOAT if variant == "float" else Precision.FP16
        gpu = find(GPUS[name]) if name in GPUS else None
        work = workload_of(chosen, predict(chosen, target, advice=False), plain, gpu=gpu)
        if work.unknown:
            print(f"  {variant}: {len(work.unknown)} of {len(work.layers)} layers of unknown shape: {work.unknown[:3]}")
        rows += [[name, variant, *cells(w)] for w in work.all]
    return rows


def published(row: dict[str, str], known: set[str]) -> list[object] | None:
    name = row["network"].split()[0]
    name = NAMES.get(name, name)
    if name not in known or row["network"].startswith(("bevfusion", "mobilenetv2 QDQ")):
        return None
    if "1024" in row["input"] or ("resnet18" in name and "trtexec" in row["what"]):
        return None
    if "yolov9" in name and row["network"].split()[-1] not in ("SiLU", "ReLU"):
        return None
    try:
        gpu = find(re.sub(r" \(.*", "", row["gpu"])).name
    except QdqtoolError:
        return None
    batch, ms = int(row["batch"]), float(row["latency_ms"])
    how = "trtexec" if "trtexec" in row["what"] else "python"
    if "per IMAGE" in row["what"]:
        ms *= batch
    if "val, batch 1" in row["what"]:
        how = "validation"
    variant = "qdq" if "INT8" in row["precision"] else "float"
    if "DOUBT" in row["precision"]:
        return None
    plain = "FP32" if row["precision"].startswith("FP32") and variant == "float" else "FP16"
    return [gpu, name, variant, plain, batch, f"{ms:.6g}", how, row["source"].split(" @")[0]]


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: timing_networks.py [SHARED] FOLDER")
    if len(sys.argv) == 2:
        add(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
