"""What :func:`qdqtool.tune` gives back."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import onnx

from qdqtool.insertion.result import largest_json
from qdqtool.ir.modelfile import save
from qdqtool.tuning.configuration import Configuration, Cost
from qdqtool.types import TOOL_VERSION, Json, Prediction, QuantizedTensor
from qdqtool.util.files import InputFiles, forbid_overwrite
from qdqtool.util.notes import Note
from qdqtool.util.outputs import save_answer

SCHEMA = "qdqtool/tuning/1"


@dataclass
class Choice:
    """One choice at a site: what was predicted and measured of it."""

    choice: str  # ``float``, ``int8``, a calibration method, or ``own-scale``
    cost: Cost  # of the network with this choice alone
    error: float | None = (
        None  # of everything INT8 without what this alone takes away; None where not measured
    )
    why: str = ""  # why it was not measured, or empty


@dataclass
class SiteResult:
    """A site and what became of it."""

    site: str  # its name
    kind: str  # ``convolution``, ``group``, ``residual``, ``head`` or ``attention``
    nodes: tuple[str, ...]  # nodes that are float where it is
    tensors: tuple[str, ...]  # activations that are not quantized any more then
    choice: str  # what was chosen
    why: str  # in one sentence
    loss: (
        float | None
    )  # by how much the output error falls when it is float; None where that was not measured
    choices: list[Choice]  # all that were looked at

    def as_json(self, base: Cost) -> Json:
        first = self.choices[0] if self.choices else None
        return {
            "site": self.site,
            "kind": self.kind,
            "nodes": list(self.nodes),
            "tensors": list(self.tensors),
            "choice": self.choice,
            "why": self.why,
            "loss": _rounded(self.loss),
            **(
                {"ms": None, "int8": 0, "conversions": 0}
                if first is None
                else _change(first.cost, base)
            ),
            "choices": [
                {
                    "choice": c.choice,
                    "measured": c.error is not None,
                    "error": _rounded(c.error),
                    **_change(c.cost, base),
                    "cost": _rounded(c.cost.value - base.value),
                    "why": c.why,
                }
                for c in self.choices
            ],
        }


def _change(cost: Cost, base: Cost) -> Json:
    ms = None if cost.ms is None or base.ms is None else _rounded(cost.ms - base.ms)
    return {
        "ms": ms,
        "int8": cost.int8 - base.int8,
        "conversions": cost.conversions - base.conversions,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


@dataclass
class Point:
    """A placement with what it costs and how well it does."""

    name: str  # in a few words
    configuration: Configuration  # what is chosen
    sites: list[str]  # sites that are float, by name
    changed: dict[str, str]  # other choices by site
    cost: Cost  # predicted
    chosen_on: float  # the metric on the samples that choices were made on
    metric: float | None = None  # on those that it is judged on; None where that was not measured
    low: float | None = None  # with ``high`` its 95 % interval, by bootstrap over the samples
    high: float | None = None

    def as_json(self) -> Json:
        return {
            "name": self.name,
            "float": list(self.sites),
            "changed": dict(self.changed),
            "nodes": sorted(self.configuration.floats),
            "convolutions": self.cost.convolutions,
            "int8": self.cost.int8,
            "conversions": self.cost.conversions,
            "ms": _rounded(self.cost.ms),
            "cost": _rounded(self.cost.value),
            "metric": _rounded(self.metric),
            "low": _rounded(self.low),
            "high": _rounded(self.high),
            "chosen_on": _rounded(self.chosen_on),
        }


@dataclass
class Bought:
    """What one choice of the chosen placement bought, seen from it: everything else as chosen, this site in INT8."""

    site: str
    choice: str
    metric: float | None
    int8: int
    conversions: int
    ms: float | None

    def as_json(self) -> Json:
        return {
            "site": self.site,
            "choice": self.choice,
            "metric": _rounded(self.metric),
            "int8": self.int8,
            "conversions": self.conversions,
            "ms": _rounded(self.ms),
        }


@dataclass(repr=False)
class Tuning:
    """The chosen Q/DQ model, and everything that was looked at on the way.

    Attributes:
        model: The Q/DQ model.
        quantized: What got a Q/DQ pair.
        prediction: What TensorRT makes of it.
        reached: Whether the goal was reached on the images that nothing was chosen by.
        keep: The part of the float model's metric that was to be kept; None with a budget.
        budget_ms: Milliseconds that it may take; None without.
        chosen: The chosen placement.
        bought: What those of its choices bought that took most away alone, six at most.
        front: Placements of which none is both cheaper and better (on the samples that choices were made on).
        others: The others that were measured.
        sites: All sites.
        base: What everything INT8 costs.
        metric: Name, sentence, and the float model's own value.
        cost: Unit and sentence of what is made small.
        images: Numbers of images of each set, and where they are from.
        effort: How much was measured.
        info: Path, hash, opset and number of nodes of the float model.
        target: Which TensorRT.
        gpu: Which GPU; None without.
        float_type: Type of what is not quantized, ``fp32`` or ``fp16``.
        float32: Tensors that stay FP32 in a model in FP16, with the largest value that was seen.
    """

    model: onnx.ModelProto
    quantized: list[QuantizedTensor]
    prediction: Prediction
    reached: bool
    keep: float | None
    budget_ms: float | None
    chosen: Point
    bought: list[Bought]
    front: list[Point]
    others: list[Point]
    sites: list[SiteResult]
    base: Cost
    metric: Json
    cost: Json
    images: Json
    effort: Json
    info: Json
    target: str
    gpu: str | None = None
    notes: list[Note] = field(default_factory=list)
    warnings: list[Note] = field(default_factory=list)
    source: str = ""
    output: str = ""
    float_type: str = "fp32"
    float32: dict[str, float] = field(default_factory=dict)
    builder: Callable[[Configuration], onnx.ModelProto] | None = field(
        default=None, repr=False, compare=False
    )
    read: InputFiles | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        name = self.source or "a model in memory"
        return f"<Tuning of {name} for {self.target}: {len(self.front)} placements in front>"

    @property
    def ok(self) -> bool:
        """Whether the goal was reached, see :attr:`reached`."""
        return self.reached

    def model_of(self, point: Point) -> onnx.ModelProto:
        """The Q/DQ model of another point of :attr:`front` or :attr:`others`."""
        assert self.builder is not None
        return self.builder(point.configuration)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the Q/DQ model, atomically.

        Raises:
            QdqtoolError: ``path`` is a file that was read, or cannot be written.
        """
        with forbid_overwrite(self.read):
            save(self.model, path, source=self.source)
        self.output = os.fspath(path)

    def save_result(self, path: str | os.PathLike[str]) -> None:
        """Writes :meth:`as_json` to a file, for ``qdqtool report``.

        Raises:
            QdqtoolError: ``path`` is a file that was read, or cannot be written.
        """
        save_answer(path, self.as_json(), self.read)

    def as_json(self) -> Json:
        front = [{"index": i, **p.as_json()} for i, p in enumerate(self.front)]
        index = next((i for i, p in enumerate(self.front) if p is self.chosen), None)
        return {
            "schema": SCHEMA,
            "tool": TOOL_VERSION,
            "model": self.info,
            "output": self.output,
            "target": self.target,
            "compute_capabilities": list(self.prediction.compute_capabilities),
            "gpu": self.gpu,
            "goal": {"keep": self.keep, "budget_ms": self.budget_ms, "reached": self.reached},
            "metric": self.metric,
            "cost": self.cost,
            "images": self.images,
            "sites": [s.as_json(self.base) for s in self.sites],
            "front": front,
            "others": [p.as_json() for p in self.others],
            "chosen": {
                **self.chosen.as_json(),
                "index": index,
                "choices": [b.as_json() for b in self.bought],
            },
            "float_type": self.float_type,
            "float32": largest_json(self.float32),
            "effort": self.effort,
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }
