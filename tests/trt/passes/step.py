"""Runs the pipeline up to one pass, and that pass once: what its tests look at."""

import functools
from dataclasses import dataclass

import onnx

from qdqtool.model.modelfile import load
from qdqtool.trt import importer
from qdqtool.trt.layers import Layer
from qdqtool.trt.network import Network
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.pipeline import PIPELINE
from qdqtool.trt.targets import target_named
from qdqtool.types import Event, Evidence, Refusal

Row = tuple[str, ...]


@dataclass
class Step:
    """What a pass did.

    Attributes:
        rows: (event, subject[, object]) of its events; an event of another pass begins with ``<pass>: ``.
        refusals: Its refusals.
        network: The network behind it.
    """

    rows: list[Row]
    refusals: list[Refusal]
    network: Network

    @property
    def reasons(self) -> list[tuple[str, str]]:
        """(node, reason) of every refusal."""
        return [(r.node, r.reason) for r in self.refusals]

    def layer(self, name: str) -> Layer:
        found = [layer for layer in self.network.layers.values() if layer.name == name]
        assert len(found) == 1, (name, [layer.name for layer in self.network.layers.values()])
        return found[0]

    def has(self, name: str) -> bool:
        return any(layer.name == name for layer in self.network.layers.values())


def step(model: onnx.ModelProto, kind: type[Pass], target: str = "trt8.5", nth: int = 0) -> Step:
    """Runs what comes before the ``nth`` turn of a pass in the pipeline, then the pass.

    Loops before it run to their end; of the loop that it belongs to, its first round.
    """
    chosen = target_named(target)
    network = importer.build(load(model))
    for stage in PIPELINE:
        if not isinstance(stage, tuple) and not issubclass(stage, Pass):
            network.order()
            continue
        passes = stage if isinstance(stage, tuple) else (stage,)
        again = True
        while again:
            again = False
            for one in passes:
                result = one(chosen).run(network)
                again = again or (isinstance(stage, tuple) and bool(result.events))
                if one is kind:
                    if nth == 0:
                        return Step(
                            [row(e, kind.__name__) for e in result.events], result.refusals, network
                        )
                    nth -= 1
    raise AssertionError(f"{kind.__name__} has no such turn")


def evidence_of(layer: Layer) -> Evidence:
    """The weakest evidence of a layer's cases."""
    return functools.reduce(Evidence.weaker, {case.evidence for case in layer.cases}, Evidence.SEEN)


def row(event: Event, owner: str) -> Row:
    kind = event.kind if event.pass_name in (owner, "") else f"{event.pass_name}: {event.kind}"
    return (kind, event.subject, event.object) if event.object else (kind, event.subject)
