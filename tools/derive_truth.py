"""Write tests/data/evidence from published build logs and engine listings.

usage: python -m tools.derive_truth FOLDER

FOLDER contains a folder for each build (log.txt or graph.json, and model.onnx.gz). The logs and
listings are third-party files and not a part of this project. The project contains only names,
precisions and counts from these files. The script reads the files with its own regular expressions,
so that the tables do not depend on the code that they test.
"""

import gzip
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HOME = Path(__file__).parents[1] / "tests" / "data" / "evidence"
CASES = {
    "yolo-resnet18-orin-trt8502": ("8.5.2", "trt8.5", "log"),
    "resnet18-qat-rtx2000-trt8510": ("8.5.10", "trt8.5", "log"),
    "centernet-resnet34-qat-trt80": ("8.0", "trt8.0", "log"),
    "bevfusion-camera-orin-trt8502": ("8.5.2", "trt8.5", "tsv"),
    "bevfusion-camera-rtx3080ti-trt8600": ("8.6.0", "trt8.6", "log"),
    "resnet18-a100-qat": ("8.4 or 8.5", "trt8.5", "json"),
    "resnet18-a100-qat-residual": ("8.4 or 8.5", "trt8.5", "json"),
    "resnet18-a100-qat-residual-qgap": ("8.4 or 8.5", "trt8.5", "json"),
    "mobilenetv2-titanrtx-qat-residual": ("8.4 or 8.5", "trt8.5", "json"),
}
SOURCES = {"log": "log.txt", "json": "graph.json", "tsv": "layers.tsv"}
EXCERPTS = "yolov8-orin-trt8412-excerpts"
WEIGHTED = re.compile(r"(?:^|/)(?:Conv|ConvTranspose|Gemm)(?:_\d+)?$")
QUANTIZER = re.compile(
    r"(?:QuantizeLinear|DequantizeLinear)(?:_\d+)?(?:_quantize_scale_node)?(?:_clone_\d+)*$"
)
FUSED = re.compile(r"(?:^|/)(?:Add|Relu|MaxPool|LeakyRelu|Clip)(?:_\d+)?$")
IGNORED = ("TrainStation", "Constant", "Myelin", "DeviceToShapeHost", "ShapeHostToDevice")
LINE = re.compile(r"^Layer\((\w+)\): (.*?), Tactic: -?\w+, (.*?) ?-> ?(.*)$")
EDGE = re.compile(r"(?:^|, )(.+?) ?[(\[](Int8|Float|Half|Int32|Bool)[(\[]")


def precision(text: str) -> str:
    if "Int8" in text or "INT8" in text:
        return "INT8"
    return "FP16" if "FP16" in text or "Half" in text else "FP32"


def parts(name: str) -> list[str]:
    return [p.strip() for p in re.split(r" \+ ", re.sub(r"PWN\(([^()]*)\)", r"\1", name))]


def read_log(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        match = LINE.match(line.strip())
        if match:
            ends = [
                [(n.strip(), precision(t)) for n, t in EDGE.findall(side)]
                for side in (match[3], match[4])
            ]
            rows.append({"type": match[1], "name": match[2], "inputs": ends[0], "outputs": ends[1]})
    return rows


def read_json(path: Path) -> list[dict[str, Any]]:
    rows = []
    for layer in json.loads(path.read_text(errors="replace"), strict=False)["Layers"]:
        ends = [
            [(t["Name"], precision(t["Format/Datatype"])) for t in layer[side]]
            for side in ("Inputs", "Outputs")
        ]
        rows.append(
            {
                "type": layer["LayerType"],
                "name": layer["Name"],
                "inputs": ends[0],
                "outputs": ends[1],
            }
        )
    return rows


def read_table(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text().splitlines()[1:]:
        name, kind, types, output, tensors, tensor = line.split("\t")
        inputs = list(zip(tensors.split(","), map(precision, types.split(",")), strict=False))
        rows.append(
            {
                "type": kind.partition("/")[0],
                "name": name,
                "inputs": inputs,
                "outputs": [(tensor, precision(output))],
            }
        )
    return rows


def derive_tables(rows: list[dict[str, Any]]) -> dict[str, Any]:
    convolutions, conversions, layers, types = [], [], [], {}
    for row in rows:
        name = row["name"]
        if row["type"] in IGNORED or name.startswith("Reformatting CopyNode"):
            continue
        layers.append(name)
        if row["outputs"]:
            types[name] = [[p for _, p in row["inputs"]], row["outputs"][0][1]]
        pieces = parts(name)
        weighted = [p for p in pieces if WEIGHTED.search(p)]
        if weighted and row["type"] not in ("Reformat", "Scale"):
            convolutions.append(
                {
                    "name": weighted[0],
                    "layer": name,
                    "inputs": [p for _, p in row["inputs"]],
                    "output": row["outputs"][0][1],
                    "fused": [p for p in pieces if FUSED.search(p)],
                }
            )
        elif len(pieces) == 1 and QUANTIZER.search(name):
            conversions.append(name)
    return {
        "convolutions": convolutions,
        "conversions": conversions,
        "layers": layers,
        "types": types,
    }


LINES = (
    (r"Running: (\w+) on (.+)", "Running", 1, 2, 0),
    (r"(\w+): (Fusing) (.+) with (.+)", "Fusing", 1, 3, 4),
    (r"(\w+): (fusing) (.+) into (.+)", "fusing", 1, 3, 4),
    (r"Removing (.+)", "Removing", -1, 1, 0),
    (r"Swapping (.+) with (.+)", "Swapping", -1, 1, 2),
    (r"Eliminating (.+) which duplicates \(Q\) (.+)", "Eliminating", -1, 1, 2),
    (r"Swap the layer type of (.+) from (\w+ to \w+)", "Swap the layer type", -1, 1, 2),
    (r"Convert layer type of (.+) from (\w+ to \w+)", "Convert layer type", -1, 1, 2),
    (
        r"-----------SqueezePushDown kSQUEEZE_JOIN case: (.+?) --> (.+)",
        "SqueezePushDown kSQUEEZE_JOIN",
        -1,
        1,
        2,
    ),
    (r"Eliminating concatenation (.+)", "Eliminating concatenation", 0, 1, 0),
    (
        r"Generating copy for (.+) to (.+) because input does not support striding.",
        "Generating copy because input does not support striding",
        0,
        1,
        2,
    ),
    (
        r"Generating copy for (.+) to (.+) because of stomping hazard.",
        "Generating copy because of stomping hazard",
        0,
        1,
        2,
    ),
    (r"Retargeting (.+) to (.+)", "Retargeting", 0, 1, 2),
    (r"Eliminating slice (.+) by retargeting (.+)", "Eliminating slice", 0, 1, 2),
    (r"Replacing slice (.+) with copy from (.+)", "Replacing slice", 0, 1, 2),
    (r"Merging layers: (.+)", "Merging layers", 0, 1, 0),
)


def derive_trace(path: Path, excerpts: bool = False) -> list[list[str]]:
    """Return [pass, event, subject, object] of the optimizer's lines.

    Only lines between the first and the last heading are read. In excerpts, the headings and the
    line with the name of the pass may be missing.
    """
    rows: list[list[str]] = []
    inside, running = excerpts, ""
    for line in path.read_text(errors="replace").splitlines():
        text = re.sub(r"^\[[^]]*\] \[.\] \[TRT\] ", "", line)
        started = inside or text.startswith("Original: ")
        inside = started and (excerpts or not text.startswith("Graph construction and"))
        for pattern, event, owner, subject, other in LINES if inside else ():
            match = re.fullmatch(pattern, text)
            if match:
                running = match[1] if event == "Running" else running
                name = running if owner < 0 else match[owner] if owner else ""
                if event == "Swapping" and excerpts:
                    name = "VanillaSwapWithFollowingQ"
                rows.append([name, event, match[subject], match[other] if other else ""])
                break
    return rows


def main(folder: Path) -> None:
    for case, (version, target, kind) in CASES.items():
        home = HOME / case
        home.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / case / "model.onnx.gz", home / "model.onnx.gz")
        source = folder / case / SOURCES[kind]
        rows = {"log": read_log, "json": read_json, "tsv": read_table}[kind](source)
        truth = {"tensorrt": version, "target": target, **derive_tables(rows)}
        (home / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")
        if kind == "tsv":  # its lines are in a separate file
            source = source.parent / "lines.txt"
        if kind != "json" and version != "8.0":
            with gzip.GzipFile(home / "trace.json.gz", "wb", mtime=0) as file:
                file.write(json.dumps(derive_trace(source), indent=0).encode())
        counts = {k: len(v) for k, v in truth.items() if isinstance(v, list)}
        print(case, counts)
    home = HOME / EXCERPTS
    home.mkdir(exist_ok=True)
    quoted = derive_trace(folder / EXCERPTS / "log.txt", excerpts=True)
    unique = [
        list(row) for row in dict.fromkeys(map(tuple, quoted))
    ]  # the article quotes some lines twice
    (home / "lines.json").write_text("[\n" + ",\n".join(map(json.dumps, unique)) + "\n]\n")
    print(EXCERPTS, len(unique))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
