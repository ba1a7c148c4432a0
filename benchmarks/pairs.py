"""Compare published TensorRT 10 and 11 builds with predicted layers, conversions, times.

usage: python -m benchmarks.pairs SHARED FOLDER [--only TEXT] [--page docs/timing.md] [--store]

SHARED is the folder of published measurements. Its scripts rebuild each ONNX graph once in FOLDER,
with random weights. The files contain only small constants. benchmarks/timing/pairs-2026.tsv has
the measured figures. For fit_timing.py, --store writes the predicted layers of both networks of
each pair into benchmarks/timing/networks.tsv.gz, and the profiles of the U-Net into
benchmarks/timing/layers.tsv.
"""

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx

from benchmarks.common import parser_of, publish, table
from benchmarks.timing_data import Rows, pair_name, read, store_networks, store_profile, work_row
from qdqtool.buildlog.read import read_build
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import load
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from qdqtool.timing import model_variants, work
from qdqtool.timing.estimate import estimate_time
from qdqtool.timing.gpus import find_gpu
from qdqtool.timing.results import TimeEstimate
from qdqtool.timing.time_calibration import match_profile_rows
from qdqtool.timing.workload import predict_workload
from qdqtool.trt.targets import target_named

# The layer names of these builds show that two BatchNormalizations have the same bias, one of them
# through an Identity. TensorRT's parser decomposes the latter. The rebuilt graphs have two biases.
SHARED_BIASES = {
    name: [f"/layer{i}/layer{i}.0/downsample/downsample.1/BatchNormalization" for i in (1, 2)]
    for name in ("v1", "v2")
}
PLACES = ("timing/pairs-2026-11", "evidence")  # folders with scripts, relative to SHARED
KEYHOLE = "timing/pairs-2026-11/resnet50-ort/quantize_keyhole.py"  # for models ".keyhole"
UNET_GPU = "Jetson Orin Nano 8GB Super"
UNET_PROFILES = {
    "v0": "profile_trt_fp16.json",
    "v1": "profile_trt_int8_qat_v1.json",
    "v2": "profile_trt_int8_qat_v2.json",
}


@dataclass(frozen=True)
class PublishedPair:
    """A build with Q/DQ, and a build of the same network in FP16.

    Attributes:
        script: Script that rebuilds the graph, with its arguments. The path is relative to one of
            PLACES.
        model: Name of the model file, without ``.onnx``.
        network: Name of the network without its placement.
        gpu: Name of the GPU.
        target: TensorRT version, and whether the build is strongly typed.
        batch: Batch size of the times; None for that of the file.
        qdq_ms: Milliseconds with Q/DQ.
        float_ms: Milliseconds in FP16.
        gain: Time in FP16 divided by the time with Q/DQ.
        layers: Number of engine nodes, or a range of numbers.
        conversions: Number of Q and DQ that remain in the engine.
        note: Conditions of the measurement.
    """

    script: str
    model: str
    network: str
    gpu: str
    target: str
    batch: int | None
    qdq_ms: float | None
    float_ms: float | None
    gain: float | None
    layers: str
    conversions: str
    note: str


def read_pairs() -> list[PublishedPair]:
    def number(text: str) -> float | None:
        return float(text) if text else None

    return [
        PublishedPair(
            row["script"],
            row["model"],
            row["network"],
            row["gpu"],
            row["target"],
            int(row["batch"]) if row["batch"] else None,
            *(number(row[name]) for name in ("qdq_ms", "float_ms", "gain")),
            row["layers"],
            row["conversions"],
            row["note"],
        )
        for row in read("pairs-2026.tsv")
    ]


def find_script(shared: Path, script: str) -> Path:
    name = script.partition(" ")[0]
    for place in PLACES:
        if (shared / place / name).exists():
            return shared / place / name
    sys.exit(f"{shared}: has no {name}. Give the folder of published measurements.")


def rebuild(pair: PublishedPair, shared: Path, folder: Path) -> Path:
    """Return the file of a pair's graph. If the file does not exist, run the script."""
    _, _, argument = pair.script.partition(" ")
    place = folder / Path(pair.script.partition(" ")[0]).parent.name
    path = place / f"{pair.model}.onnx"
    if path.exists():
        return path
    script = find_script(shared, pair.script)
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        subprocess.run([sys.executable, script, work, *argument.split()], check=True)
        if pair.model.endswith(".keyhole"):
            source = Path(work, pair.model.removesuffix(".keyhole") + ".onnx")
            target = Path(work, f"{pair.model}.onnx")
            subprocess.run([sys.executable, shared / KEYHOLE, source, target], check=True)
        for built in Path(work).glob("*.onnx"):
            slim(built, place / built.name)
    return path


def slim(source: Path, target: Path) -> None:
    """Write a model whose large constants have no data."""
    model = load(source)
    target.with_suffix(".part").write_bytes(
        model_variants.strip_large_constants(model).SerializeToString()
    )
    os.replace(target.with_suffix(".part"), target)


def load_slim(path: Path) -> Model:
    proto = onnx.ModelProto.FromString(path.read_bytes())
    for node in list(proto.graph.node):
        if node.name in SHARED_BIASES.get(path.stem, ()):
            shared = onnx.helper.make_node("Identity", [node.input[2]], [f"{node.input[2]} shared"])
            node.input[2] = shared.output[0]
            proto.graph.node.insert(0, shared)
    return Model(proto, str(path))


@dataclass(frozen=True)
class JudgedPair:
    """A pair, and its prediction.

    Attributes:
        pair: The published figures.
        time: Estimated time.
        layers: Number of predicted kernels that take time.
        listed: Number of predicted layers.
        nodes: Number of predicted layers if each region of Myelin counts as one layer.
        conversions: Number of predicted conversions.
    """

    pair: PublishedPair
    time: TimeEstimate
    layers: int
    listed: int
    nodes: int
    conversions: int

    @property
    def error(self) -> float | None:
        """Logarithm of the ratio of estimated to measured gain; None without a measured gain."""
        if self.pair.gain is None or self.time.gain is None:
            return None
        return math.log(self.time.gain / self.pair.gain)

    def cells(self) -> Iterator[str]:
        pair, time = self.pair, self.time
        measured = time.float_time
        yield pair.model.removesuffix(".keyhole")
        yield f"{pair.gpu}, {pair.target}" + (f" b{pair.batch}" if pair.batch else "")
        nodes = f" or {self.nodes}" if self.nodes != self.listed else ""
        yield f"{pair.layers or '-'}, {self.listed}{nodes} ({self.layers})"
        yield f"{pair.conversions or '-'}, {self.conversions}"
        yield _compare(pair.qdq_ms, time.total_ms)
        yield _compare(pair.float_ms, measured.total_ms if measured else None)
        yield _compare(pair.gain, time.gain)
        yield "" if self.error is None else f"{math.expm1(self.error):+.0%}"
        yield "" if pair.gain is None else _verdict(pair.gain, time.gain or 1.0)


def _compare(measured: float | None, estimated: float | None) -> str:
    texts = ("-" if value is None else f"{value:.3g}" for value in (measured, estimated))
    return ", ".join(texts)


def _verdict(measured: float, estimated: float) -> str:
    if abs(math.log(measured)) <= math.log(1.05):
        return "within 5 %"
    return "right" if (measured > 1) == (estimated > 1) else "wrong"


def judge(pair: PublishedPair, path: Path) -> JudgedPair:
    model, target = load_slim(path), target_named(pair.target)
    prediction = predict(model, target, advice=False)
    time = estimate_time(model, prediction, find_gpu(pair.gpu), target, batch=pair.batch)
    return JudgedPair(
        pair,
        time,
        len(time.kernels),
        len(prediction.layers),
        prediction.engine_nodes,
        prediction.conversions or 0,
    )


def predicted_rows(pair: PublishedPair, path: Path) -> Rows:
    """Return the layers of a pair for networks.tsv.gz.

    The layers with Q/DQ are those of the estimate. The float layers are FP16.
    """
    gpu, typed, quantized = find_gpu(pair.gpu), target_named(pair.target), load_slim(path)
    time = estimate_time(
        quantized, predict(quantized, typed, advice=False), gpu, typed, compare=False
    )
    assert time.workload is not None
    model = model_variants.float_variant(quantized)
    target = target_named("trt10")  # in which the builder chooses FP16
    prediction = predict(model, target, advice=False)
    plain = predict_workload(model, prediction, Precision.FP16, gpu=gpu)
    name = pair_name(pair.network, pair.model, pair.gpu, pair.target)
    works = {"qdq": time.workload, "float": plain}
    return [work_row(name, variant, w) for variant, v in works.items() for w in v.all_work]


def profiled_rows(shared: Path, folder: Path) -> Rows:
    """Return the layers of the U-Net's profiles for layers.tsv.

    Layers are matched by name. Layers whose work is unknown are left out.
    """
    place = "unet-resnet50-orinnano-trt10162"
    target, gpu = target_named("10.16.2"), find_gpu(UNET_GPU)
    rows: Rows = []
    for name, file in UNET_PROFILES.items():
        model = load_slim(folder / place / f"{name}.onnx")
        prediction = predict(model, target, advice=False)
        workload = predict_workload(model, prediction, Precision.FP16, gpu=gpu)
        profile = read_build(shared / "evidence" / place / file).profile_rows
        matches = match_profile_rows(prediction.layers, profile)
        for number, (row, w) in enumerate(zip(matches, workload.layers, strict=True)):
            if row is not None and row.ms > 0 and w.kind not in (work.NOTHING, work.UNKNOWN):
                values = work_row("", "", w)[2:-1]
                rows.append([f"unet-{name}", UNET_GPU, number, *values, f"{row.ms:.6g}"])
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("shared", type=Path, help="folder of published measurements")
    parser.add_argument("folder", type=Path, help="folder for the rebuilt graphs")
    parser.add_argument("--only", default="", help="models whose script and name contain this")
    parser.add_argument("--store", action="store_true", help="write the tables of the fit")
    args = parser.parse_args()
    rows, networks = [], []
    for pair in read_pairs():
        if args.only in f"{pair.script} {pair.model} {pair.gpu}":
            path = rebuild(pair, args.shared, args.folder)
            rows.append(judge(pair, path))
            if args.store:
                networks += predicted_rows(pair, path)
    if args.store:
        store_networks(networks)
        store_profile(profiled_rows(args.shared, args.folder))
    head = ("network", "build", "layers", "conversions", "INT8 ms", "FP16 ms", "gain", "off", "")
    publish("timing-pairs", table(head, [tuple(row.cells()) for row in rows]), args.page)
    errors = sorted(abs(math.expm1(row.error)) for row in rows if row.error is not None)
    if errors:
        print(f"median error of {len(errors)} gains: {errors[len(errors) // 2]:.0%}")


if __name__ == "__main__":
    main()
