"""Published builds of TensorRT 10 and 11 against their predictions: layers, conversions, times and gains.

usage: python -m benchmarks.pairs SHARED FOLDER [--only TEXT] [--page docs/timing.md]

SHARED is the folder of published measurements. Its scripts rebuild the ONNX graphs with random weights in FOLDER, each
once; only small constants remain in the files. benchmarks/timing/pairs-2026.tsv has the measured figures.
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
from benchmarks.timing_data import read
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import load
from qdqtool.prediction import predict
from qdqtool.timing import model_variants
from qdqtool.timing.estimate import TimeEstimate, estimate
from qdqtool.timing.gpus import find_gpu
from qdqtool.trt.targets import target_named

# The layer names of these builds show that torch shared a bias between two BatchNormalizations, with an Identity. The
# parser decomposes the second one. The rebuilt graphs have two biases.
SHARED_BIASES = {
    name: [f"/layer{i}/layer{i}.0/downsample/downsample.1/BatchNormalization" for i in (1, 2)]
    for name in ("v1", "v2")
}
PLACES = ("timing/pairs-2026-11", "evidence")  # folders of scripts, relative to SHARED
KEYHOLE = (
    "timing/pairs-2026-11/resnet50-ort/quantize_keyhole.py"  # adds the Q/DQ of models ".keyhole"
)


@dataclass(frozen=True)
class PublishedPair:
    """A build with Q/DQ, and one of the same network in FP16.

    Attributes:
        script: Script that rebuilds the graph, relative to one of PLACES, with its arguments.
        model: Name of the file.
        gpu: GPU.
        target: TensorRT version, with its typing.
        batch: Batch of the times; None for that of the file.
        qdq_ms: Milliseconds with Q/DQ.
        float_ms: Milliseconds in FP16.
        gain: Time of FP16 over that with Q/DQ.
        layers: Number of engine nodes, or the range of it.
        conversions: Number of Q and DQ that remain in the engine.
        note: Conditions of the measurement.
    """

    script: str
    model: str
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
    """Return the rows of pairs-2026.tsv."""

    def number(text: str) -> float | None:
        return float(text) if text else None

    return [
        PublishedPair(
            row["script"],
            row["model"],
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
    """Return the script that rebuilds a graph."""
    name = script.partition(" ")[0]
    for place in PLACES:
        if (shared / place / name).exists():
            return shared / place / name
    sys.exit(f"{shared}: has no {name}. Give the folder of published measurements.")


def rebuild(pair: PublishedPair, shared: Path, folder: Path) -> Path:
    """Return the file of a pair's graph; run its script if the file does not exist."""
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
    """Return a model that was written by :func:`slim`."""
    proto = onnx.ModelProto.FromString(path.read_bytes())
    for node in list(proto.graph.node):
        if node.name in SHARED_BIASES.get(path.stem, ()):
            shared = onnx.helper.make_node("Identity", [node.input[2]], [f"{node.input[2]} shared"])
            node.input[2] = shared.output[0]
            proto.graph.node.insert(0, shared)
    return Model(proto, str(path))


@dataclass(frozen=True)
class JudgedPair:
    """A pair with its prediction.

    Attributes:
        pair: The published figures.
        time: Estimate.
        layers: Number of predicted kernels that take time.
        listed: Number of predicted layers.
        conversions: Number of predicted conversions.
    """

    pair: PublishedPair
    time: TimeEstimate
    layers: int
    listed: int
    conversions: int

    @property
    def error(self) -> float | None:
        """Logarithm of the estimated gain over the measured one; None if that is not published."""
        if self.pair.gain is None or self.time.gain is None:
            return None
        return math.log(self.time.gain / self.pair.gain)

    def cells(self) -> Iterator[str]:
        pair, time = self.pair, self.time
        measured = time.float_time
        yield pair.model.removesuffix(".keyhole")
        yield f"{pair.gpu}, {pair.target}" + (f" b{pair.batch}" if pair.batch else "")
        yield f"{pair.layers or '-'}, {self.listed} ({self.layers})"
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
    """Say whether the faster one is named rightly."""
    if abs(math.log(measured)) <= math.log(1.05):
        return "within 5 %"
    return "right" if (measured > 1) == (estimated > 1) else "wrong"


def judge(pair: PublishedPair, path: Path) -> JudgedPair:
    """Predict a rebuilt graph, and estimate its time."""
    model, target = load_slim(path), target_named(pair.target)
    prediction = predict(model, target, advice=False)
    time = estimate(model, prediction, find_gpu(pair.gpu), target, batch=pair.batch)
    return JudgedPair(
        pair, time, len(time.kernels), len(prediction.layers), prediction.conversions or 0
    )


def main() -> None:
    """Rebuild, predict and print."""
    parser = parser_of(__doc__)
    parser.add_argument("shared", type=Path, help="folder of published measurements")
    parser.add_argument("folder", type=Path, help="folder for the rebuilt graphs")
    parser.add_argument("--only", default="", help="models whose script and name contain this")
    args = parser.parse_args()
    rows = [
        judge(pair, rebuild(pair, args.shared, args.folder))
        for pair in read_pairs()
        if args.only in f"{pair.script} {pair.model} {pair.gpu}"
    ]
    head = ("network", "build", "layers", "conversions", "INT8 ms", "FP16 ms", "gain", "off", "")
    publish("timing-pairs", table(head, [tuple(row.cells()) for row in rows]), args.page)
    errors = sorted(abs(math.expm1(row.error)) for row in rows if row.error is not None)
    if errors:
        print(f"median error of {len(errors)} gains: {errors[len(errors) // 2]:.0%}")


if __name__ == "__main__":
    main()
