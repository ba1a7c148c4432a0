"""The scenarios of a snapshot.

A scenario has files in a folder, and steps that read and write files in the folder.
"""

import functools
import io
import random
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from PIL import Image

from tools.fuzz.grammar import network
from tools.fuzz_inputs import mutate
from tools.fuzz_logs.mutate import mutated as mutated_log, seeds as whole_logs
from tools.growth.families import FAMILIES
from tools.snapshots import networks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DATA = ROOT / "tests" / "data"
SHARED = ROOT.parent / "shared"

Content = Callable[[], bytes] | Path


@dataclass(frozen=True)
class Step:
    """A command line or a function of a script, and the files that it writes."""

    name: str
    arguments: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    script: str = ""
    function: str = ""
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        if self.script:
            return {"script": self.script, "function": self.function, "keywords": self.keywords}
        return {"arguments": self.arguments}


@dataclass(frozen=True)
class Scenario:
    """Files in a folder, and steps that run in this folder in turn.

    Attributes:
        name: ``group/subject``.
        files: By file name, a function that makes the bytes of the file, or the path of a file to
            copy.
        steps: The steps.
        quick: Number of steps in the quick set, which are the first steps.
    """

    name: str
    files: Mapping[str, Content]
    steps: Sequence[Step]
    quick: int = 0

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]

    def write_files(self, folder: Path) -> None:
        for name, content in self.files.items():
            data = content.read_bytes() if isinstance(content, Path) else content()
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def cli(words: str, *outputs: str, name: str = "", text: bool = False) -> Step:
    """Return the step of a command line. The answer is JSON if ``text`` is not set."""
    arguments = shlex.split(words)
    if not text:
        arguments += ["--format", "json"]
    return Step(name or words, tuple(arguments), outputs)


def python(script: str, function: str, *outputs: str, **keywords: Any) -> Step:
    words = " ".join(f"{k}={v}" for k, v in keywords.items() if not isinstance(v, list | dict))
    path = str(HERE / f"{script}.py")
    return Step(f"{function} {words}", (), outputs, path, function, keywords)


def serialized(make: Callable[[], onnx.ModelProto]) -> Callable[[], bytes]:
    return lambda: make().SerializeToString()


# Recorded builds ----------------------------------------------------------------------

PREDICTIONS = tuple(
    f"predict {{}} --target {target}"
    for target in (
        "8.5 --gpu T4",
        "10",
        "rtx1.7",
        "8.0",
        "8.4 --gpu 'AGX Orin 64GB'",
        "8.6 --gpu 'RTX 3060'",
        "10 --gpu 'Orin Nano 8GB' --strongly-typed",
        "11 --gpu L4",
        "rtx1.7 --gpu 'RTX 4090'",
    )
)


def recorded_builds() -> Iterator[Scenario]:
    """Yield models of recorded builds, with all commands that need no images."""
    for path in sorted((DATA / "evidence").glob("*/model.onnx.gz")):
        steps = [
            *(cli(words.format("model.onnx.gz")) for words in PREDICTIONS),
            cli("fix model.onnx.gz --target 8.5 -o fixed.onnx", "fixed.onnx"),
            cli("compare model.onnx.gz fixed.onnx --target 8.5 --gpu T4"),
            cli("fix model.onnx.gz --target rtx1.7 -o half.onnx", "half.onnx"),
            cli("report model.onnx.gz --gpu T4 -o page.html", "page.html"),
            cli("predict model.onnx.gz --target 8.5", name="predict again"),
            cli("extract model.onnx.gz --finding {finding} --target 8.5 -o part.onnx", "part.onnx"),
            cli(
                "extract model.onnx.gz --finding {finding} --private -o private.onnx",
                "private.onnx",
            ),
        ]
        yield Scenario(f"evidence/{path.parent.name}", {"model.onnx.gz": path}, steps, 3)


_LOGS = ("log.txt", "lines.txt", "log_excerpt.txt")
_LAYERS = ("layer_info.json", "graph.json", "engine_w8.json", "engine_w8a8.json")


def logs_of_builds() -> Iterator[Scenario]:
    """Yield logs, layer tables and profiles of recorded builds, if ``../shared`` has them."""
    for folder in sorted((SHARED / "evidence").glob("*/")):
        kept = {
            p.name: p
            for p in sorted(folder.iterdir())
            if p.name.startswith("profile") and "meta" not in p.name
        }
        kept |= {
            n: folder / n for n in (*_LOGS, *_LAYERS, "model.onnx.gz") if (folder / n).exists()
        }
        kept.pop("profile.tsv", None)
        files = {name: kept[name] for name in sorted(kept) if name != "model.onnx.gz"}
        steps = [cli(f"log {name}") for name in files]
        steps += [cli(f"engine {name}") for name in files if name in (*_LOGS, *_LAYERS)]
        build = " ".join(n for n in files if n in ("log.txt", "layer_info.json", "graph.json"))
        if build and "profile.json" in files:
            steps.append(cli(f"engine {build.split()[-1]} --profile profile.json --gpu A100"))
        if build and "model.onnx.gz" in kept:
            whole = f"{build} profile.json" if "profile.json" in files else build
            steps += [
                cli(f"verify model.onnx.gz {whole}"),
                cli(f"verify model.onnx.gz {whole} --gpu A100 --allow-partial"),
                cli(f"compare model.onnx.gz {build.split()[0]}"),
                cli(f"report model.onnx.gz {whole} -o page.html", "page.html"),
            ]
        if "log.txt" in files:
            steps += [
                cli("verify --from-log log.txt"),
                cli("log log.txt --to-onnx graph.onnx", "graph.onnx"),
                cli("log log.txt --pass ConvReluFusion"),
            ]
        if steps:
            yield Scenario(
                f"builds/{folder.name}", kept, steps, 99 if "resnet18" in folder.name else 0
            )


# Random inputs ------------------------------------------------------------------------


def families() -> Iterator[Scenario]:
    for number, (family, make) in enumerate(FAMILIES.items()):
        files = {"model.onnx": serialized(functools.partial(make, 40))}
        quick = [
            cli("predict model.onnx --target 8.5"),
            cli("predict model.onnx --target 10 --gpu T4"),
            cli("fix model.onnx --target 8.5 -o fixed.onnx", "fixed.onnx"),
        ]
        steps = [
            *quick,
            cli("predict model.onnx --target 11 --gpu L4"),
            cli("predict model.onnx --target rtx1.7"),
            cli("fix model.onnx --target rtx1.7 -o half.onnx", "half.onnx"),
            cli("predict model.onnx --target 8.5", name="predict again"),
            cli("extract model.onnx --finding {finding} --target 8.5 -o part.onnx", "part.onnx"),
        ]
        if number % 8 == 0:
            steps += [
                cli("report model.onnx --target 8.5 -o page.html", "page.html"),
                cli("extract model.onnx --node n2 --hops 2 --private -o part.onnx", "part.onnx"),
                cli(
                    "extract model.onnx --finding {finding} --minimize --limit 40 -o part.onnx",
                    "part.onnx",
                ),
            ]
        yield Scenario(f"growth/{family}", files, steps, 3 if number % 4 == 1 else 0)


def random_networks() -> Iterator[Scenario]:
    for seed in range(60):
        files = {"model.onnx": serialized(functools.partial(network, seed))}
        steps = [
            cli("predict model.onnx --target 8.5"),
            cli("predict model.onnx --target 10 --gpu 'RTX 3060'"),
            cli("predict model.onnx --target 11"),
            cli("predict model.onnx --target rtx1.7"),
            cli("fix model.onnx -o fixed.onnx", "fixed.onnx"),
            cli("compare model.onnx fixed.onnx"),
        ]
        if seed % 10 == 0:
            steps.append(cli("report model.onnx -o page.html", "page.html"))
        yield Scenario(f"fuzz/{seed:02}", files, steps, 6 if seed % 6 == 0 else 0)


def damaged_inputs() -> Iterator[Scenario]:
    """Yield damaged models and logs of the other fuzzers, which give answers or errors."""
    sources = {
        "random": network(11).SerializeToString(),
        "C2f": FAMILIES["C2f"](30).SerializeToString(),
    }
    for source, data in sources.items():
        for part in range(3):
            files: dict[str, Content] = {}
            steps = []
            for number in range(part * 12, part * 12 + 12):
                name = f"{number}.onnx"
                files[name] = functools.partial(
                    mutate.mutated, data, "model.onnx", random.Random(number)
                )
                steps += [
                    cli(f"predict {name}"),
                    cli(f"fix {name} -o fixed-{name}", f"fixed-{name}"),
                ]
            yield Scenario(f"damaged/models {source} {part}", files, steps, 0 if part else 99)
    for part in range(6):
        files = {}
        steps = []
        for number in range(part * 20, part * 20 + 20):
            name = f"{number}.log"
            files[name] = functools.partial(mutated_log, number)
            steps += [cli(f"log {name}"), cli(f"engine {name}")]
        yield Scenario(f"damaged/logs {part}", files, steps, 0 if part else 99)


def whole_small_logs() -> Iterator[Scenario]:
    for number, data in enumerate(whole_logs()):
        steps = [
            cli("log build.log"),
            cli("engine build.log"),
            cli("verify --from-log build.log"),
            cli("log build.log --to-onnx graph.onnx", "graph.onnx"),
            cli("compare build.log build.log"),
        ]
        yield Scenario(f"logs/{number}", {"build.log": functools.partial(bytes, data)}, steps, 99)


def public_questions() -> Iterator[Scenario]:
    """Yield small models from public questions, if ``../shared`` has them."""
    for path in sorted((SHARED / "replay3").glob("*.onnx")):
        steps = [
            *(cli(words.format("model.onnx")) for words in PREDICTIONS[:3]),
            cli("predict model.onnx --target 8.6 --gpu T4"),
            cli("fix model.onnx -o fixed.onnx", "fixed.onnx"),
            cli("compare model.onnx fixed.onnx"),
        ]
        yield Scenario(f"replay/{path.stem}", {"model.onnx": path}, steps, 99)
    if (log := SHARED / "replay3" / "torchtrt.log").exists():
        files = {"build.log": log, "model.onnx": log.parent / "torchtrt_model.onnx"}
        steps = [cli("log build.log"), cli("verify model.onnx build.log")]
        yield Scenario("replay/torchtrt log", files, steps, 99)


# Insertion ----------------------------------------------------------------------------

OPTIONS = (
    "--target 8.5",
    "--target 8.6 --weights int8",
    "--target 10 --gpu T4",
    "--target 10 --strongly-typed",
    "--target 11",
    "--target rtx1.7",
    "--method mse",
    "--method max",
    "--method percentile --percentile 99.9",
    "--method entropy",
    "--head none",
    "--head float",
    "--residual both",
    "--residual skip --target 8.5",
    "--residual none",
    "--no-unify",
    "--high-precision fp16",
    "--input-type uint8",
    "--input-type int8",
    "--smooth",
    "--exclude '.*0.*' --exclude-op MatMul",
    "--attention int8",
    "--losses 4",
    "--write-table table.cache",
)


def insertion_steps(model: str, data: str, options: Sequence[str]) -> Iterator[Step]:
    for number, words in enumerate(options):
        written = [f"q{number}.onnx", *(["table.cache"] if "write-table" in words else [])]
        yield cli(
            f"insert {model} --calib {data} {words} -o q{number}.onnx",
            *written,
            name=f"insert {words}",
        )


def insertions() -> Iterator[Scenario]:
    for name, make in networks.FLOAT_NETWORKS.items():
        files = {
            "float.onnx": serialized(make),
            "data.npz": functools.partial(lambda make: networks.samples(make(), 8), make),
        }
        steps = [
            *insertion_steps("float.onnx", "data.npz", OPTIONS),
            cli(
                "insert float.onnx --calib data.npz --calib-cache statistics.npz -o cached.onnx",
                "cached.onnx",
                "statistics.npz",
            ),
            cli("insert float.onnx --calib-table table.cache -o table.onnx", "table.onnx"),
            cli("compare float.onnx q0.onnx"),
            cli("predict q0.onnx --calib data.npz --gpu T4 --target 8.5"),
            cli(
                "report q0.onnx --float float.onnx --calib-cache statistics.npz -o page.html",
                "page.html",
            ),
            cli("fix q0.onnx -o fixed.onnx", "fixed.onnx"),
            *_python_steps(name),
        ]
        yield Scenario(f"insert/{name}", files, steps, 99)
    for seed in range(40):
        model = networks.random_float_network(seed)
        if model is not None:
            yield _small_insertion(f"insert-fuzz/{seed:02}", model, 99 if seed % 5 == 0 else 0)
    for number, name in enumerate(FAMILIES):
        model = networks.float_family(name, 30)
        if model is not None:
            yield _small_insertion(f"insert-growth/{name}", model, 99 if number % 9 == 0 else 0)


def _small_insertion(name: str, model: onnx.ModelProto, quick: int) -> Scenario:
    files = {
        "float.onnx": functools.partial(bytes, model.SerializeToString()),
        "data.npz": functools.partial(networks.samples, model, 3),
    }
    options = (
        "--target 8.5 --include . --head none",
        "--target 11 --method max --residual both --include .",
    )
    steps = [*insertion_steps("float.onnx", "data.npz", options), cli("compare float.onnx q0.onnx")]
    return Scenario(name, files, steps, quick)


_TENSORS = {
    "classifier": ["x_1", "Relu_5_y", "Add_13_y"],
    "segmenter": ["x_1", "Mul_6_y"],
    "transformer": ["x_1", "LayerNormalization_11_y"],
}


def _python_steps(name: str) -> list[Step]:
    return [
        python(
            "python_steps", "ranges", model="float.onnx", data="data.npz", tensors=_TENSORS[name]
        ),
        python(
            "python_steps",
            "insertion",
            "inserted.onnx",
            model="float.onnx",
            data="data.npz",
            method="mse",
            target="trt8.5",
        ),
        python("python_steps", "results", quantized="q0.onnx", other="float.onnx"),
    ]


def tunings() -> Iterator[Scenario]:
    for name in ("classifier", "segmenter"):
        make = networks.FLOAT_NETWORKS[name]
        files = {
            "float.onnx": serialized(make),
            "data.npz": functools.partial(lambda make: networks.samples(make(), 16), make),
        }
        steps = [
            cli(
                f"tune float.onnx --calib data.npz --workers 1 --no-state {words} -o q{i}.onnx",
                f"q{i}.onnx",
            )
            for i, words in enumerate(
                ("--target 8.5 --gpu T4 --keep 0.99", "--front", "--budget-ms 0.05 --gpu T4")
            )
        ]
        yield Scenario(f"tune/{name}", files, steps, 1 if name == "classifier" else 0)


def _pictures(folder: str, count: int) -> dict[str, Content]:
    def encode(number: int) -> bytes:
        rows = np.random.default_rng(number).integers(0, 255, (6, 8, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(rows).resize((80, 60), Image.Resampling.BILINEAR).save(out, "PNG")
        return out.getvalue()

    return {f"{folder}/{i}.png": functools.partial(encode, i) for i in range(count)}


def demonstrations() -> Iterator[Scenario]:
    for activation in ("silu", "relu"):
        model = "demo/yolov8n-demo.onnx"
        written = [model, "demo/yolov8n-demo_qdq.onnx", "demo/yolov8n-demo_report.html"]
        steps = [
            cli(
                f"demo -o demo --images 4 --size 64 --activation {activation}",
                *written,
                text=True,
            ),
            *insertion_steps(model, "pictures", OPTIONS if activation == "silu" else OPTIONS[:2]),
            cli("predict q0.onnx --target 8.5 --gpu T4 --all"),
            cli("predict q4.onnx --target 11 --gpu L4")
            if activation == "silu"
            else cli("predict q1.onnx"),
            cli("fix q0.onnx --only HEAD-QUANT -o fixed.onnx", "fixed.onnx"),
            cli(f"compare {model} q0.onnx --gpu T4"),
            cli(
                "extract q0.onnx --node /model.8/m.0/cv1/conv/Conv --hops 3 -o part.onnx",
                "part.onnx",
            ),
        ]
        yield Scenario(f"demo/{activation}", _pictures("pictures", 5), steps, 3)


def trainings() -> Iterator[Scenario]:
    if find_spec("torch") is None:
        return
    for backend in ("pytorch-quantization", "modelopt"):
        if find_spec(backend.replace("-", "_")) is None:
            continue
        for number, network_name in enumerate(("residual", "decoder", "tokens")):
            steps = [
                python(
                    "training_steps",
                    "export",
                    f"{target}.onnx",
                    network=network_name,
                    output=f"{target}.onnx",
                    target=target,
                    backend=backend,
                    method=method,
                )
                for target, method in (("trt8.5", "mse"), ("trt10", "max"))
            ]
            name = f"qat/{backend} {network_name}"
            yield Scenario(name, {}, steps[: 2 - number % 2])


# Words --------------------------------------------------------------------------------

CODES = ("SKIP-FLOAT", "OUT-FLOAT", "NOT-QUANTIZED", "SILU-INNER-Q", "BIAS-DQ", "W-SCALE", "NO-QDQ")
TEXTS = (
    "TRT only supports symmetric quantization",
    "Could not fuse 2nd input (kernel weights) of CONVOLUTION",
    "ConstShuffleFusion: Fusing a with b",
    "QuantizeDoubleInputNodes: fusing q into c",
    "Could not find any implementation for node {ForeignNode[a...b]}.",
    "xyzzy",
)
MISUSES = (
    "predict none.onnx",
    "predict garbage.onnx",
    "predict model.onnx --target trt7",
    "predict model.onnx --require nowhere",
    "predict model.onnx --fail-on error",
    "predict model.onnx --fail-on warning",
    "predict model.onnx --gpu nothing",
    "predict model.onnx --clock 900",
    "insert model.onnx -o q.onnx",
    "insert model.onnx --calib garbage.onnx -o q.onnx",
    "insert model.onnx --calib none -o q.onnx",
    "fix model.onnx -o model.onnx",
    "fix model.onnx -o fixed.onnx --only NOTHING",
    "verify model.onnx garbage.onnx",
    "verify model.onnx",
    "log garbage.onnx",
    "engine garbage.onnx",
    "extract model.onnx --node nowhere -o part.onnx",
    "compare model.onnx garbage.onnx",
    "tune model.onnx --calib none -o q.onnx",
    "report none.onnx",
)


def explanations() -> Iterator[Scenario]:
    ways = ("trtexec", "python", "deepstream", "torch-tensorrt", "onnxruntime")
    steps = [
        cli("explain --list"),
        *(cli(f"explain {code}") for code in CODES),
        *(cli(f"explain {shlex.quote(text)}") for text in TEXTS),
        *(cli(f"explain --for {way}") for way in ways),
        cli("gpus"),
        cli("gpus 'orin nx'"),
        cli("gpus --sources"),
    ]
    yield Scenario("explain/all", {}, steps, 99)
    files: dict[str, Content] = {
        "model.onnx": serialized(functools.partial(FAMILIES["partly quantized"], 40)),
        "garbage.onnx": functools.partial(bytes, b"garbage"),
    }
    yield Scenario("misuse/all", files, [cli(words) for words in MISUSES], True)


GROUPS = (
    recorded_builds,
    logs_of_builds,
    families,
    random_networks,
    damaged_inputs,
    whole_small_logs,
    public_questions,
    insertions,
    tunings,
    demonstrations,
    trainings,
    explanations,
)


def all_scenarios() -> list[Scenario]:
    scenarios = [scenario for group in GROUPS for scenario in group()]
    assert len({s.name for s in scenarios}) == len(scenarios)
    return scenarios
