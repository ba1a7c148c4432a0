"""One model as the report looks at it: its prediction, and the time and the build where they are known."""

from __future__ import annotations

from dataclasses import dataclass, field

from qdqtool.buildlog.types import Build
from qdqtool.graph import Model
from qdqtool.modelfile import ModelSource, load
from qdqtool.onnxgraph.view import View
from qdqtool.prediction import predict
from qdqtool.timing import gpus, twin
from qdqtool.timing.estimate import TimeEstimate, estimate
from qdqtool.timing.gpu_findings import gpu_findings
from qdqtool.timing.gpus import Gpu
from qdqtool.timing.predicted import workload_of
from qdqtool.timing.work import Work
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.types import Prediction
from qdqtool.verified import Verification


@dataclass(slots=True)
class Subject:
    """A model with what is known about it.

    Attributes:
        model: The index of the ONNX model.
        prediction: What TensorRT makes of it; findings and layers carry times where a GPU is known.
        time: The estimate, None without a GPU.
        verification: The prediction compared with a build, None without one.
        build: The build.
        work: What each predicted layer computes and moves, in the prediction's order; empty where layers have no names.
    """

    model: Model
    prediction: Prediction
    time: TimeEstimate | None = None
    verification: Verification | None = None
    build: Build | None = None
    work: list[Work] = field(default_factory=list)
    view: View = field(init=False)

    def __post_init__(self) -> None:
        self.view = View(self.model)


def look_at(
    source: ModelSource | Model,
    target: str | Target | None,
    gpu: Gpu | None,
    build: Build | None = None,
    assume: dict[str, str] | None = None,
) -> Subject:
    """Predicts for a model, verifies it where a build is given, and estimates the time where a GPU is.

    Raises:
        ModelError: The model cannot be read.
        BuildLogError: The build is of another model.
    """
    model = load(source)
    verification = None
    if build is not None:
        from qdqtool.verification.api import verify

        verification = verify(model, build, target=target)
        assert verification.prediction is not None
        prediction = verification.prediction
    else:
        prediction = predict(model, target or DEFAULT_TARGET, assume=assume)
    chosen = target_named(prediction.target)
    time = None
    if gpu is not None:
        from qdqtool.verification.times import plain_in, runs_as_graph

        plain = plain_in(build) if build else gpu.plain
        time = estimate(model, prediction, gpu, chosen, plain=plain, graph=build is not None and runs_as_graph(build))
        prediction.time = time.as_json()
        prediction.findings += gpu_findings(prediction, gpu, model)
    subject = Subject(model, prediction, time, verification, build)
    subject.work = _work(subject)
    return subject


def _work(subject: Subject) -> list[Work]:
    """The work of the layers: what the estimate used, or the same in FP16 where nobody asked for a time."""
    layers = subject.prediction.layers
    load_ = subject.time.load if subject.time is not None else None
    if load_ is None:
        shaped, _ = twin.resolved(subject.model, 1)
        load_ = workload_of(shaped, subject.prediction)
    return load_.layers if len(load_.layers) == len(layers) else []


def gpu_for(build: Build | None, name: str | None, clock: float | None) -> Gpu | None:
    """The GPU that was named, or that the build ran on.

    Raises:
        QdqtoolError: It is not known.
    """
    if build is not None:
        from qdqtool.timing.expected import gpu_of

        return gpu_of(build, name, clock)
    return gpus.chosen(name, clock) if name is not None else None
