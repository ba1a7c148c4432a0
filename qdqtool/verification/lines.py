"""The result of ``verify``, and its parts: pass line by pass line, layer by layer, conversion by conversion."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from qdqtool.builders.run import log_names
from qdqtool.buildlog.agreement import (
    BuildFacts,
    ConversionCounts,
    ConvolutionCounts,
    Difference,
    LayerCounts,
    Mismatch,
    MismatchKind,
    MismatchSide,
    Said,
    TraceCounts,
)
from qdqtool.buildlog.names import SCALE_NODE
from qdqtool.buildlog.types import Build, BuiltLayer, BuiltTensor, Section
from qdqtool.ir.graph import Model
from qdqtool.ir.qdq import precision_of
from qdqtool.trt import trace
from qdqtool.trt.pipeline import passes
from qdqtool.types import (
    TOOL_VERSION,
    VERIFICATION_SCHEMA,
    Event,
    Json,
    Precision,
    Prediction,
    TensorPrecision,
)
from qdqtool.util.files import InputFiles
from qdqtool.util.notes import Note
from qdqtool.util.outputs import Saved
from qdqtool.util.records import published
from qdqtool.verification.build_model import Pair
from qdqtool.verification.convolutions import Mapper, built_nodes, in_myelin


@dataclass(slots=True, repr=False)
class Verification(Saved):
    """A prediction compared with a build.

    Attributes:
        build: Which build.
        convolutions: Convolution by convolution.
        layers: Engine layers by name and types.
        trace: Lines of the Q/DQ passes.
        conversions: Q and DQ that stay in the engine.
        copies: Lines of slice and concatenation removal, and of the copies made where that is refused.
        mismatches: Everything that differs.
        prediction: What was compared with the build.
        notes: What else the user should know.
        times: Estimated against measured time, where the build was timed and its GPU is known.
        read: The files it was made from.
    """

    build: BuildFacts
    convolutions: ConvolutionCounts = field(default_factory=ConvolutionCounts)
    layers: LayerCounts = field(default_factory=LayerCounts)
    trace: TraceCounts = field(default_factory=TraceCounts)
    conversions: ConversionCounts = field(default_factory=ConversionCounts)
    mismatches: list[Mismatch] = field(default_factory=list)
    prediction: Prediction | None = None
    notes: list[Note] = field(default_factory=list)
    copies: TraceCounts = field(default_factory=TraceCounts)
    times: Json | None = None
    read: InputFiles | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        c = self.convolutions
        return f"<Verification: {c.agree} of {c.total} convolutions agree, {len(self.mismatches)} mismatches>"

    @property
    def ok(self) -> bool:
        """Whether everything agrees with a build that is complete and leaves nothing open."""
        return not self.mismatches and self.complete and not self.convolutions.unknown

    @property
    def complete(self) -> bool:
        return self.build.complete

    def as_json(self) -> Json:
        return {
            "schema": VERIFICATION_SCHEMA,
            "tool": TOOL_VERSION,
            "model": self.prediction.model.as_json() if self.prediction else None,
            "target": self.prediction.target if self.prediction else None,
            "compute_capabilities": list(self.prediction.compute_capabilities)
            if self.prediction
            else [],
            **published(
                self,
                "build",
                "convolutions",
                "layers",
                "trace",
                "conversions",
                "copies",
                "mismatches",
            ),
            **published(self, "notes", "times"),
        }


_MOST_BITS = 4_000_000_000  # work for the longest common subsequence: 60,000 lines against as many


def agreement(predicted: Sequence[Hashable], built: Sequence[Hashable]) -> TraceCounts:
    """Counts of two sequences: each one's length, elements in common, and elements in common in the same order."""
    common = (Counter(predicted) & Counter(built)).total()
    return TraceCounts(len(predicted), len(built), common, in_order(predicted, built))


def in_order(first: Sequence[Hashable], second: Sequence[Hashable]) -> int | None:
    """Length of the longest common subsequence; None where that would take too long.

    Bit-parallel (Hyyro, 2004, "Bit-parallel LCS-length computation revisited"): a row of the usual table is one
    integer, a zero bit marking where the length grows.
    """
    if len(first) * len(second) > _MOST_BITS:
        return None
    places: dict[Hashable, int] = {}
    for position, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << position
    full = (1 << len(first)) - 1
    row = full
    for item in second:
        hits = row & places.get(item, 0)
        row = (row + hits | row - hits) & full
    return len(first) - row.bit_count()


#: What becomes of slices and concatenations: taken out of the network, or made by copying.
COPY_KINDS = frozenset(
    {
        trace.COPY_STOMPING,
        trace.COPY_STRIDING,
        trace.COPY_UNMOVABLE,
        trace.ELIMINATING_CONCAT,
        trace.ELIMINATING_SLICE,
        trace.REPLACING_SLICE,
        trace.RETARGETING,
    }
)
C = TypeVar("C")
_NUMBERED = re.compile(r"^(.*[A-Za-z])_\d+$")
MOST = 50  # mismatches of one kind listed; the counts give the rest


@dataclass
class Compared(Generic[C]):
    """Counts of one comparison, and every line, layer or conversion that differs or that only one side has."""

    counts: C
    mismatches: list[Mismatch] = field(default_factory=list)


@functools.cache
def compared_passes() -> frozenset[str]:
    """Names of the passes about Q/DQ and what they are fused into."""
    return frozenset(kind.__name__ for kind in passes() if kind.is_compared)


def is_copy_line(event: Event) -> bool:
    """Whether an optimizer line says what becomes of a slice or concatenation."""
    return event.kind in COPY_KINDS


def compare_trace(
    prediction: Prediction,
    build: Build,
    ended: bool,
    uncertain: Iterable[Event] = (),
    kind: MismatchKind = MismatchKind.TRACE,
) -> Compared[TraceCounts]:
    """Holds the simulated lines of the Q/DQ passes, or those about copies, against the logged ones, as multisets.

    Those about copies are printed once, near the end of the optimizer's part: ``After concat removal`` shows that they
    were. Unless the log holds the passes to their end, a predicted line that is not there says nothing; ``uncertain``
    events, which rest on scales that are not known, are left out on both sides.
    """
    unsure, copies = set(uncertain), kind == MismatchKind.COPY

    def wanted(event: Event) -> bool:
        return is_copy_line(event) if copies else event.pass_name in compared_passes()

    predicted = [e for e in prediction.trace if wanted(e) and e not in unsure]
    logged = [e for e in build.trace if wanted(e) and e.event not in unsure]
    if not any(map(wanted, build.trace)) and not (
        copies and build.milestone("After concat removal") is not None
    ):
        return Compared(TraceCounts(len(predicted)))
    events = [e.event for e in logged]
    result = Compared(agreement(predicted, events))
    mine, theirs = Counter(predicted), Counter(events)
    extra, missing = theirs - mine, mine - theirs
    for event in logged:
        if extra[event.event]:
            extra[event.event] -= 1
            what = Difference.LOGGED if result.mismatches else Difference.FIRST_LINE
            name = trace.render(event.event)
            result.mismatches.append(
                Mismatch(kind, name, {}, event.as_json(), what, (), event.line)
            )
    for expected in predicted if ended else ():
        if missing[expected]:
            missing[expected] -= 1
            name = trace.render(expected)
            result.mismatches.append(
                Mismatch(kind, name, expected.as_json(), {}, Difference.NOT_LOGGED)
            )
    return result


def compare_conversions(
    prediction: Prediction, build: Build, ended: bool
) -> Compared[ConversionCounts]:
    """Counts the Q and DQ that stay in the engine: from its listing, else from the QDQToCopy lines."""
    if build.layers and not build.names_only and not build.has_gap(Section.LISTING):
        names = [layer.name for layer in build.layers if layer.is_qdq]
    elif ended and any(e.pass_name in compared_passes() for e in build.trace):
        names = [
            e.subject for e in build.trace if e.pass_name == "QDQToCopy" and e.kind == "Running"
        ]
    else:
        return Compared(ConversionCounts(prediction.conversions))
    result = Compared(ConversionCounts(prediction.conversions, len(names)))
    if prediction.conversions is not None:
        mine = Counter(name.removesuffix(SCALE_NODE) for name in prediction.conversion_nodes)
        theirs = Counter(name.removesuffix(SCALE_NODE) for name in names)
        places = {layer.name.removesuffix(SCALE_NODE): layer.line for layer in build.layers}
        result.mismatches += [
            Mismatch(
                MismatchKind.CONVERSION,
                name,
                {},
                {"name": name},
                Difference.STAYS,
                (),
                places.get(name),
            )
            for name in (theirs - mine).elements()
        ]
        result.mismatches += [
            Mismatch(MismatchKind.CONVERSION, name, {"name": name}, {}, Difference.GONE)
            for name in (mine - theirs).elements()
        ]
    return result


def compare_layers(
    prediction: Prediction, build: Build, mapper: Mapper, reported: Collection[str | None] = ()
) -> Compared[LayerCounts]:
    """Compares engine layers by name and, where both have them, by the data types at their edges.

    ``reported`` are layers whose convolution is a mismatch already.
    """
    # Kernels of Myelin have no name that a prediction could give.
    listed = [
        x
        for x in mapper.layers
        if (x.type or build.names_only) and not (in_myelin(x) or x.type == "shape_call")
    ]
    predicted = {_layer_key(layer.name): layer for layer in prediction.layers}
    if not listed or prediction.conversions is None:
        return Compared(LayerCounts(len(listed) if listed else None))
    agree = 0
    mismatches: list[Mismatch] = []
    for layer in listed:
        if (mine := predicted.get(_layer_key(layer.name))) is None:
            continue
        said = _edge_difference(Difference.INPUT, mine.inputs, layer.inputs)
        said = said or _edge_difference(Difference.OUTPUT, mine.outputs, layer.outputs)
        agree += said is None
        if said is not None and layer.name not in reported:
            mismatches.append(
                Mismatch(
                    MismatchKind.LAYER,
                    layer.name,
                    mine.as_json(),
                    layer.as_json(),
                    *said,
                    layer.line,
                )
            )
    return Compared(LayerCounts(len(listed), agree), mismatches)


def inconsistent_tensors(model: Model, build: Build) -> list[Mismatch]:
    """Tensors that the listing gives two data types, or another one than the network's input or output can have."""
    seen: dict[str, tuple[Precision, BuiltLayer]] = {}
    found: list[Mismatch] = []
    for layer in (*build.layers, *build.second_layers):
        for tensor in (*layer.inputs, *layer.outputs):
            if (precision := tensor.precision) == Precision.UNKNOWN:
                continue
            before, where = seen.setdefault(tensor.tensor, (precision, layer))
            if before != precision:
                found.append(
                    Mismatch(
                        MismatchKind.LAYER,
                        tensor.tensor,
                        {},
                        layer.as_json(),
                        Difference.TWO_TYPES,
                        (before, where.line, precision, layer.line),
                        layer.line,
                    )
                )
    ends = {name: precision_of(model.elem_type(name)) for name in (*model.inputs, *model.outputs)}
    if ends and all(p.is_float for p in ends.values()):
        ends |= {
            name: Precision.FLOAT for name in build.bindings if name not in ends
        }  # named otherwise in the build
    for name, expected in ends.items():
        if name in seen and expected.is_float and seen[name][0] == Precision.INT8:
            built, where = seen[name]
            said: MismatchSide = {"precision": str(expected)}
            found.append(
                Mismatch(
                    MismatchKind.LAYER,
                    name,
                    said,
                    where.as_json(),
                    Difference.END,
                    (name, expected, built),
                    where.line,
                )
            )
    return found


def _layer_key(name: str) -> str:
    """The parser appends a number to some names (``/NonMaxSuppression_246``); ONNX names of the kind are kept."""
    plain = name.removesuffix(SCALE_NODE)
    match = _NUMBERED.match(plain) if plain.startswith("/NonMaxSuppression") else None
    return match[1] if match else plain


def _edge_difference(
    side: Difference, predicted: list[TensorPrecision], built: list[BuiltTensor]
) -> Said | None:
    for mine, theirs in zip(predicted, built, strict=False):
        plain = all(p.is_float or p == Precision.INT8 for p in (mine.precision, theirs.precision))
        if plain and not mine.precision.agrees(theirs.precision):
            return side, (mine.precision, theirs.precision)
    return None


def verify_rtx_build(model: Model, prediction: Prediction, build: Build) -> Verification:
    """Compares a prediction with a TensorRT-RTX log that was kept."""
    rows = {
        n.index: n
        for n in built_nodes(model, build.layers, log_names(model))
        if n.layer is not None
    }
    pairs = [Pair(c, rows.get(c.index)) for c in prediction.convolutions]
    return of_pairs(prediction, pairs, build.facts)


def of_pairs(prediction: Prediction, pairs: list[Pair], build: BuildFacts) -> Verification:
    """A verification from convolutions predicted and built; RTX has no named layers and no pass lines to compare."""
    unknown = tuple(p.predicted.name for p in pairs if p.agrees is None)
    mismatches = [
        Mismatch(
            MismatchKind.CONVOLUTION,
            p.predicted.name,
            p.predicted.as_json(),
            p.built.as_json(),
            Difference.PRECISION,
            (p.predicted.precision, p.built.precision),
        )
        for p in pairs
        if p.built is not None and not p.agrees
    ]
    counts = ConvolutionCounts(
        len(pairs), len(pairs) - len(unknown) - len(mismatches), len(unknown), unknown
    )
    return Verification(
        build,
        counts,
        trace=TraceCounts(len(prediction.trace)),
        mismatches=mismatches,
        prediction=prediction,
    )
