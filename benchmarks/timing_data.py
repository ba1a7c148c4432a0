"""Measurements for the time model: layers of profiles, and latencies of whole networks.

usage: python benchmarks/timing_data.py FOLDER     # exported models, FOLDER/<network>.onnx

The script adds these networks to benchmarks/timing/networks.tsv.gz, with the layers that are
predicted for batch size 1. The float types of networks without Q/DQ are not fixed. Those of
networks with Q/DQ are FP16, or FP32 in the variant ``qdq-fp32``. The target is trt8.6, except for
files ``<network>@<target>.onnx``. The other tables are layers.tsv (kernels of published profiles:
the work of each kernel, see :mod:`qdqtool.timing.work`, and its time), latencies.tsv and
latencies-2026.tsv (published milliseconds per call), and blind.tsv (published times that are never
fitted).
"""

import csv
import gzip
import io
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qdqtool.errors import QdqtoolError
from qdqtool.insertion.fp16 import convert_to_fp16
from qdqtool.insertion.prepare import prepare_float_model
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import load
from qdqtool.ir.precision import Precision
from qdqtool.patterns.half import HALF_OPSET
from qdqtool.prediction import predict
from qdqtool.timing import model_variants, work
from qdqtool.timing.gpus import Gpu, choose_gpu, find_gpu
from qdqtool.timing.physics import has_cold_weights
from qdqtool.timing.work import LayerWork, bytes_per_element
from qdqtool.timing.workload import predict_workload
from qdqtool.trt.targets import strongly_typed, target_named

HERE = Path(__file__).parent / "timing"
NETWORKS = "networks.tsv.gz"
WORK = (
    "kind",
    "precision",
    "written_as",
    "rows",
    "columns",
    "depth",
    "channels",
    "groups",
    "read",
    "weights",
    "written",
    "steps",
)
FIELDS = ("network", "variant", *WORK)
# Milliseconds per call, measured by trtexec without profiling, for engines that also have a
# profile. Their layers are predicted.
TOTALS = (
    ("A100 80GB PCIe", "resnet18-qat", "float", "FP32", 2.0),
    ("A100 80GB PCIe", "resnet18-qat", "float", "FP16", 0.8628),
    ("A100 80GB PCIe", "resnet18-qat", "qdq", "FP16", 0.8823),
    ("A100 80GB PCIe", "resnet18-qat-residual", "qdq", "FP16", 0.5457),
    ("A100 80GB PCIe", "resnet18-qat-residual-qgap", "qdq", "FP16", 0.4998),
    ("TITAN RTX", "mobilenetv2-qat", "qdq", "FP16", 0.2639),
    ("RTX 2000 Ada Laptop", "resnet18-qat-laptop", "qdq", "FP16", 0.134),
    ("Jetson AGX Orin 64GB", "bevfusion-orin", "qdq", "FP16", 8.607),
    ("RTX 3080 Ti", "bevfusion-3080ti", "qdq", "FP16", 1.584),
)
# Microseconds that a profile adds to each layer: (sum of layers - time without profiling) / layers.
# Other engines have OVERHEAD.
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
# Overhead of engines for which the time of the whole engine is unknown. It is in the middle of the
# values above, and has the smallest error for the worst engine.
OVERHEAD = 2.4
# Jetsons that were measured in a power mode other than MAXN. The author published the same times in
# a file with 30 W in its name. The clock was not fixed: the calls wait for the images of a data
# loader, and the governor lowers the clock of a GPU that waits. These rows are never fitted.
MODES = {("Jetson AGX Orin 64GB", "Juanx65/ArtTRT"): "30W"}
# Such a GPU runs at the fraction (busy / (busy + host)) ^ exponent of the mode's clock (306 to 612
# MHz). With these values, the errors for the FP32 times of the source, which are in no pair, have
# the least scatter (fit_governor).
LOWEST_CLOCK = 0.5
HOST_MS, HOST_MS_PER_IMAGE, LOAD_EXPONENT = 10.0, 0.4, 1.0
# INT8 builds with calibration tables and without the FP16 flag, whose float layers are FP32 or
# TF32.
INT8_IN_FP32 = "qdq-fp32"
TARGET = "trt8.6"
GPUS = {
    "yolo26m-416": "RTX PRO 6000 Blackwell",
    "yolo26m-416-modelopt@trt10": "RTX PRO 6000 Blackwell",
}  # networks that are not listed are for all GPUs
TYPED = ("yolov8n-modelopt@trt10",)  # strongly typed builds, with FP16 layers


def read(name: str) -> list[dict[str, str]]:
    raw = (HERE / name).read_bytes()
    text = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode()
    return list(
        csv.DictReader(
            (line for line in io.StringIO(text) if not line.startswith("#")), delimiter="\t"
        )
    )


@dataclass(frozen=True)
class Measurement:
    """Time of a layer or of a network, with the work of the layers.

    Attributes:
        works: Work of each layer.
        gpu: The GPU.
        label: For a layer, its engine. For a network, the method, network, variant, float type and
            batch.
        seconds: Measured time.
        overhead: Seconds that the measurement added to the time.
        weight: Weight in the fit; 0 for measurements that are never fitted.
        cold: Whether the weights of the network are larger than the L2 cache.
        images: Number of images in a call on a GPU whose clock follows the load; 0 if the clock is
            fixed.
    """

    works: Sequence[LayerWork]
    gpu: Gpu
    label: str
    seconds: float
    overhead: float
    weight: float
    cold: bool
    images: float = 0.0


Data = Sequence[Measurement]
Array = npt.NDArray[np.float64]
Rows = list[list[object]]


def with_overhead(data: Data, overhead: float) -> list[Measurement]:
    """Return measurements with the usual overhead of a profile, in microseconds per layer.

    The overhead is needed for engines for which the time of the whole engine is unknown.
    """
    return [
        replace(m, overhead=0.0 if m.label.startswith("convolutions-") else overhead * 1e-6)
        for m in data
    ]


def layers() -> list[Measurement]:
    data, rows = [], read("layers.tsv")
    counts = Counter(row["engine"] for row in rows)
    weights: dict[str, float] = defaultdict(float)
    for row in rows:
        weights[row["engine"]] += float(row["weights"])
    for row in rows:
        gpu, engine = find_gpu(row["gpu"]), row["engine"]
        single = engine.startswith("convolutions-")
        overhead = 0.0 if single else OVERHEADS.get(engine, OVERHEAD)
        data.append(
            Measurement(
                [work_of(row)],
                gpu,
                engine,
                float(row["ms"]) * 1e-3,
                overhead * 1e-6,
                (0.02 if single else 0.35) / counts[engine],
                not single and weights[engine] > gpu.l2 * 1e6,
            )
        )
    return data


def totals() -> list[Measurement]:
    """Return the times of whole networks: engines with a profile, then published latencies.

    Latencies whose notes contain a warning are left out.
    """
    data: list[Measurement] = []
    networks: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in read(NETWORKS):
        networks[row["network"], row["variant"]].append(row)

    def add(
        how: str,
        gpu: Gpu,
        network: str,
        variant: str,
        plain: str,
        ms: float,
        weight: float,
        offset: float = 0.0,
        batch: str = "",
        follows_load: bool = False,
    ) -> None:
        rows = networks[network, variant]
        if variant == "qdq" and plain == Precision.FP32:
            rows = networks[network, INT8_IN_FP32]
        works = network_work(rows, Precision(plain), float(batch or 1), gpu)
        label = f"{how} {network} {variant} {plain}" + (f" b{float(batch):.0f}" if batch else "")
        data.append(
            Measurement(
                works,
                gpu,
                label,
                ms * 1e-3,
                offset * 1e-6,
                weight,
                has_cold_weights(works, gpu),
                float(batch or 1) if follows_load else 0.0,
            )
        )

    pairs = [row for row in read("pairs-2026.tsv") if not row["note"].startswith("wall 2")]
    counts = Counter((row["gpu"], row["network"]) for row in pairs)
    for row in pairs:
        name = pair_name(row["network"], row["model"], row["gpu"], row["target"])
        times = {"qdq": row["qdq_ms"], "float": row["float_ms"]}
        how, weight = "trtexec", 0.3 / counts[row["gpu"], row["network"]]
        if not row["qdq_ms"] or row["gpu"] == "L4":  # at 72 W, the clock is unknown
            # Only the gain is known, so any times with this gain can be used.
            times = times if row["qdq_ms"] else {"qdq": "1", "float": row["gain"]}
            how, weight = "gain", 0.0
        for variant, ms in times.items():
            if ms:
                add(
                    how,
                    find_gpu(row["gpu"]),
                    name,
                    variant,
                    "FP16",
                    float(ms),
                    weight,
                    0.0,
                    row["batch"],
                )
    for name, network, variant, plain, ms in TOTALS:
        add("engine", find_gpu(name), network, variant, plain, ms, 0.15)
    rows = (
        read("latencies.tsv")
        + read("latencies-2026.tsv")
        + [row | {"how": _blind_kind(row["source"])} for row in read("blind.tsv")]
    )
    counts = Counter((row["gpu"], row["network"]) for row in rows)
    for row in rows:
        yolo, gpu = row["network"].startswith("yolo"), find_gpu(row["gpu"])
        mode = MODES.get((row["gpu"], row["source"]))
        if mode is not None:
            gpu = choose_gpu(row["gpu"], power=mode)
        slow_host = (
            row["gpu"] == "Jetson Xavier NX" and row["batch"] == "1"
        )  # a call from Python takes milliseconds
        doubtful = mode is not None or slow_host or row["how"].startswith(("validation", "blind"))
        remote = (
            row["gpu"] == "A100 40GB" and not yolo
        )  # the latency includes copies from the host and to the host
        # Microseconds of a call from Python. For calls of Ultralytics, they are fitted.
        offset = 80.0 if remote else 50.0 if row["how"] == "python" and not yolo else 0.0
        weight = (0.05 if remote else 0.3) / counts[row["gpu"], row["network"]]
        add(
            row["how"],
            gpu,
            row["network"],
            row["variant"],
            row["float"],
            float(row["ms"]),
            0.0 if doubtful else weight,
            0.0 if doubtful else offset,
            row["batch"],
            follows_load=mode is not None,
        )
    return data


def _blind_kind(source: str) -> str:
    """Return the kind of a time that is never fitted; a CUDA graph has no kernel gaps."""
    return "blind-graph" if "with a CUDA graph" in source else "blind"


def clock_shares(
    busy_ms: Array,
    images: Array,
    host: tuple[float, float, float] = (HOST_MS, HOST_MS_PER_IMAGE, LOAD_EXPONENT),
) -> Array:
    """Return the fraction of the mode's clock at which each call ran; 1 if the clock is fixed.

    Args:
        busy_ms: Milliseconds of a call at the clock of the mode.
        images: Number of images in a call; 0 if the clock is fixed.
        host: Milliseconds of the host for a call, and for an image; and the exponent of the load.
    """
    for_call, for_image, exponent = host
    load = busy_ms / (busy_ms + for_call + for_image * images)
    return np.where(images > 0, np.clip(load**exponent, LOWEST_CLOCK, 1.0), 1.0)


def network_work(
    rows: Sequence[Mapping[str, str]], plain: Precision, batch: float, gpu: Gpu
) -> list[LayerWork]:
    made = [work_of(row, plain, batch) for row in rows]
    if (
        plain == Precision.FP32
    ):  # no conversions to FP16 at inputs and outputs; without TF32, all layouts are linear
        without = (work.CONVERSION,) if gpu.has_tf32 else (work.CONVERSION, work.REFORMAT)
        made = [
            w
            for w in made
            if not (w.kind in without and w.precision.is_float and w.written_as.is_float)
        ]
    return made


def work_of(
    row: Mapping[str, str], plain: Precision = Precision.FP16, batch: float = 1.0
) -> LayerWork:
    low, high = Precision(row["precision"]), Precision(row["written_as"])
    real_low, real_high = (plain if p == Precision.FLOAT else p for p in (low, high))
    grow, widen = (
        bytes_per_element(real_low) / bytes_per_element(low),
        bytes_per_element(real_high) / bytes_per_element(high),
    )
    return LayerWork(
        row["kind"],
        real_low,
        real_high,
        float(row["rows"]) * batch,
        float(row["columns"]),
        float(row["depth"]),
        float(row["channels"]),
        float(row["groups"]),
        float(row["read"]) * grow * batch,
        float(row["weights"]) * grow,
        float(row["written"]) * widen * batch,
        float(row.get("steps") or 1),
    )


# Adding networks --------------------------------------------------------------------------------------------------


def add_networks(folder: Path) -> None:
    models = {p.stem: p for p in sorted(folder.glob("*.onnx"))}
    rows: Rows = []
    for name, path in models.items():
        print(name, flush=True)
        rows += of_network(name, path)
    store_networks(rows)


def pair_name(network: str, model: str, gpu: str, target: str) -> str:
    return f"{network}-pair-{model}-{gpu.replace(' ', '-')}@{target}"


def work_row(network: str, variant: str, w: LayerWork) -> list[object]:
    values = (getattr(w, f) for f in WORK)
    cells = (f"{v:.9g}" if isinstance(v, (int, float)) else str(v) for v in values)
    return [network, variant, *cells]


def store_networks(rows: Rows) -> None:
    """Write rows into networks.tsv.gz, and replace the rows of the same networks."""
    names = {row[0] for row in rows}
    kept = [[row.get(f) or 1 for f in FIELDS] for row in read(NETWORKS)]
    buffer = io.StringIO()
    lines = [FIELDS, *(row for row in kept if row[0] not in names), *rows]
    csv.writer(buffer, delimiter="\t", lineterminator="\n").writerows(lines)
    (HERE / NETWORKS).write_bytes(gzip.compress(buffer.getvalue().encode(), mtime=0))


def store_profile(rows: Rows) -> None:
    """Write rows into layers.tsv, and replace the rows of the same engines."""
    path = HERE / "layers.tsv"
    head, *lines = path.read_text().splitlines()
    engines = {str(row[0]) for row in rows}
    kept = [line for line in lines if line.partition("\t")[0] not in engines]
    added = ["\t".join(map(str, row)) for row in rows]
    path.write_text("\n".join([head, *kept, *added]) + "\n")


def of_network(name: str, path: Path) -> list[list[object]]:
    target = target_named(name.partition("@")[2] or TARGET)
    model = load(path)
    if name in TYPED:
        target = strongly_typed(target)
        prepare_float_model(model, opset=HALF_OPSET)
        convert_to_fp16(model)
    model, _ = model_variants.resolve_inputs(Model(model.proto, str(path)))
    if model_variants.has_qdq(model):
        variants = [("qdq", model), ("float", model_variants.float_variant(model))]
    else:
        variants = [("float", model)]
        try:
            quantized = model_variants.quantized_variant(model, target)
            variants += [("qdq", quantized), (INT8_IN_FP32, quantized)]
        except QdqtoolError as error:
            print(f"  {error}")
    rows: list[list[object]] = []
    for variant, chosen in variants:
        # In networks with Q/DQ, only some tensors of a layer are floats, so the float type must be
        # fixed here.
        plain = {"float": Precision.FLOAT, INT8_IN_FP32: Precision.FP32}.get(
            variant, Precision.FP16
        )
        gpu = find_gpu(GPUS[name]) if name in GPUS else None
        found = predict_workload(chosen, predict(chosen, target, advice=False), plain, gpu=gpu)
        if found.unknown:
            print(
                f"  {variant}: {len(found.unknown)} of {len(found.layers)} layers of unknown shape: "
                f"{found.unknown[:3]}"
            )
        rows += [work_row(name, variant, each) for each in found.all_work]
    return rows


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: timing_data.py FOLDER")
    add_networks(Path(sys.argv[1]))
