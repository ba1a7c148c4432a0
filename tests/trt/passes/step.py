import functools
from collections.abc import Callable
from dataclasses import dataclass

import onnx

from qdqtool.evidence import Evidence
from qdqtool.ir.modelfile import load
from qdqtool.reasons.finding import Reason
from qdqtool.trt import importer
from qdqtool.trt.layers import Layer
from qdqtool.trt.network import Network
from qdqtool.trt.pipeline import PIPELINE, Pass
from qdqtool.trt.targets import target_named
from qdqtool.trt.trace import Event
from tests.trt.builder import Graph

Line = tuple[str, ...]
Build = Callable[[Graph], list[str]]
"""Builds a graph and returns its outputs."""


@dataclass
class PassResult:
    """Effect of a pass.

    Attributes:
        lines: (event, subject[, object]) of the pass's events. Events of another pass begin with ``<pass>: ``.
        records: Missed optimizations that the pass recorded.
        network: The network after the pass.
    """

    lines: list[Line]
    records: list[Reason]
    network: Network

    @property
    def reasons(self) -> list[tuple[str, str]]:
        return [(r.node, r.key) for r in self.records]

    def layer(self, name: str) -> Layer:
        names = [layer.name for layer in self.network.layers.values()]
        assert names.count(name) == 1, (name, names)
        return next(layer for layer in self.network.layers.values() if layer.name == name)

    def has_layer(self, name: str) -> bool:
        return any(layer.name == name for layer in self.network.layers.values())


def run_pass(
    model: onnx.ModelProto, pass_type: type[Pass], target: str = "trt8.5", turn: int = 0
) -> PassResult:
    """Run all passes before the given turn of a pass in the pipeline, then the pass.

    Loops before it run to their end. The loop that contains the pass is in its first round.
    """
    chosen, network = target_named(target), importer.build(load(model))
    for stage in PIPELINE:
        if not isinstance(stage, tuple) and not issubclass(stage, Pass):
            network.rank_layers()
            continue
        is_loop, changed = isinstance(stage, tuple), True
        while changed:
            changed = False
            for step in stage if isinstance(stage, tuple) else (stage,):
                result = step(chosen).run(network)
                changed |= is_loop and bool(result.events)
                if step is not pass_type:
                    continue
                if turn == 0:
                    lines = [to_line(event, pass_type.__name__) for event in result.events]
                    return PassResult(lines, result.reasons, network)
                turn -= 1
    raise AssertionError(f"{pass_type.__name__} has no such turn")


def build_model(build: Build) -> onnx.ModelProto:
    g = Graph()
    return g.model(*build(g))


def end_of(drawn: Graph) -> Callable[[Graph], str]:
    def build(g: Graph) -> str:
        g.__dict__.update(drawn.__dict__)
        return "end:0"

    return build


def weakest_evidence(layer: Layer) -> Evidence:
    return functools.reduce(
        Evidence.choose_weaker, {case.evidence for case in layer.cases}, Evidence.SEEN
    )


def to_line(event: Event, owner: str) -> Line:
    kind = event.kind if event.pass_name in (owner, "") else f"{event.pass_name}: {event.kind}"
    return (kind, event.subject, event.object) if event.object else (kind, event.subject)
