"""Predict and build random networks, and compare prediction and build."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from qdqtool.builders.compiler_process import CompilerProcess
from qdqtool.builders.options import BuildOptions
from qdqtool.builders.run import build_with_package, choose_log_names, read_log
from qdqtool.ir import modelfile
from qdqtool.trt.rtx.predict import build_status, predict_rtx
from qdqtool.trt.targets import DEFAULT_SM, RTX
from qdqtool.verification.local_build import (
    BuiltModel,
    is_status_as_predicted,
    map_build_to_nodes,
    pair_convolutions,
)

TIMEOUT = 60.0


@dataclass
class Answer:
    """Comparison of the prediction and the build of one network.

    Attributes:
        convolutions: Number of convolutions that both prediction and build list; 1 for a wrong
            status.
        wrong: (name, predicted, built) of each disagreement; the name is empty for the status.
        absent: Convolutions that are not layers of the engine.
        status: Outcome of the build.
    """

    convolutions: int
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    absent: int = 0
    status: str = "built"


class Lab:
    """Compiler of models in a child process that starts again after a crash.

    Args:
        capability: Compute capability to build for, 86 for SM86.
    """

    def __init__(self, capability: int = DEFAULT_SM[0]) -> None:
        self.capability = capability
        self.target = RTX.with_capability(str(capability))
        self.process = CompilerProcess()
        self._folder = tempfile.TemporaryDirectory(prefix="qdqtool-fuzz-")
        self.work = Path(self._folder.name)

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.close()
        self._folder.cleanup()

    def build(self, proto: onnx.ModelProto) -> BuiltModel:
        path = self.work / "model.onnx"
        path.write_bytes(proto.SerializeToString())
        (self.work / "build.log").unlink(missing_ok=True)
        options = BuildOptions(timeout=TIMEOUT, sm=(self.capability,))
        result = build_with_package(self.process, options, path, self.work)
        model = modelfile.load(proto)
        read_log(model, choose_log_names(model), self.work, result)
        return map_build_to_nodes(result)

    def answer(self, proto: onnx.ModelProto) -> Answer:
        """Return the disagreements between prediction and build."""
        model = modelfile.load(proto)
        prediction = predict_rtx(model, self.target)
        result = self.build(proto)
        if not is_status_as_predicted(prediction, result):
            return Answer(
                1,
                [("", build_status(prediction), f"{result.status}: {result.message}")],
                0,
                result.status,
            )
        if result.status != "built":
            return Answer(1, [], 0, result.status)
        pairs = pair_convolutions(prediction, result.nodes)
        built = [p for p in pairs if p.built is not None]
        wrong = [
            (
                p.predicted.name,
                str(p.predicted.precision),
                f"{p.built.precision} writing {p.built.output}",
            )
            for p in built
            if p.built is not None and not p.same_precision
        ]
        return Answer(len(built), wrong, len(pairs) - len(built), "built")


def run_seeds(
    seeds: Iterator[int], make: Callable[[int], onnx.ModelProto], lab: Lab
) -> Iterator[tuple[int, Answer]]:
    for seed in seeds:
        yield seed, lab.answer(make(seed))
