"""Automatic fixes of a Q/DQ model, checked by a prediction and a comparison of outputs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import onnx

from calibration.arrays import CalibrationSource
from calibration.options import ImageFunction, Preprocess
from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.findings import codes
from qdqtool.findings.rules import (
    ATTEMPTED_CODES,
    UNPROMISED_CODES,
)
from qdqtool.fixing.anchors import find_restorable_constants
from qdqtool.fixing.outputs import OutputError, read_samples
from qdqtool.fixing.promises import review_promises
from qdqtool.fixing.quantizers import to_axis_opset
from qdqtool.fixing.runner import FixOptions
from qdqtool.fixing.savings import add_fix_savings
from qdqtool.fixing.session import (
    FixAttempt,
    FixSession,
    apply_sites,
    count_error_findings,
)
from qdqtool.fixing.speed import SpeedCheck
from qdqtool.fixing.steps import MODEL_STEPS
from qdqtool.insertion.options import ImageOptions
from qdqtool.insertion.prepare import MIN_OPSET, raise_opset
from qdqtool.ir.branches import count_subgraphs, has_nested_quantizers
from qdqtool.ir.graph import Model
from qdqtool.ir.graphsurgeon import to_graphsurgeon
from qdqtool.ir.modelfile import ModelSource, load_full, save
from qdqtool.ir.qdq import is_quantized
from qdqtool.patterns.fake_quantizers import (
    find_aten_nodes,
    find_fake_quantizers,
    find_nested_quantizers,
    rewrite_fake_quantizers,
)
from qdqtool.patterns.half import HALF_OPSET
from qdqtool.patterns.view import AXIS_OPSET, View
from qdqtool.prediction import add_findings, predict
from qdqtool.reasons.finding import Severity
from qdqtool.timing.gpu_checks import gpu_findings
from qdqtool.timing.gpus import Gpu, choose_gpu
from qdqtool.timing.on_gpu import predict_on_gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.timing.results import TimeEstimate
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.util.files import InputFiles, forbid_overwrite, record_inputs
from qdqtool.util.json_text import Json
from qdqtool.util.notes import Note
from qdqtool.util.process import pause_gc
from qdqtool.util.progress import track_progress
from qdqtool.util.text import format_count, format_count_were, round_significant
from qdqtool.version import TOOL_VERSION

if TYPE_CHECKING:
    import onnx_graphsurgeon

    from qdqtool.fixing.detections import DetectionVerdict

FIX_SCHEMA = "qdqtool/fix/1"


@dataclass(slots=True)
class Fixed:
    """Result of :func:`fix`.

    Attributes:
        proto: The fixed model. If no fix was kept, it equals the original model.
        before: Prediction of the model before fixing.
        after: Prediction of the fixed model.
        applied: Fixes that were kept.
        refused: Fixes that were not kept, with the reason.
        noise_before: Error of the output with the largest error, before fixing. The error is the
            root mean square of the difference to the float network's output, divided by the root
            mean square of the float network's output. None if outputs could not be compared.
        noise_after: Error of the output with the largest error, in the fixed model. None if outputs
            could not be compared.
        notes: Further notes for the user.
        read: Files that were read; :meth:`save` does not overwrite them.
        errors: Errors of all outputs. If boxes and scores share an output, each has its own error.
        detections: Comparison of the detections before and after the fixes. None without images of
            a detector, without changes, or with too few detections.
        samples: Number of images, or of samples in `inputs`, on which outputs were compared. 0 for
            random inputs.
        time: Estimated time of the fixed model, and the time that further fixes would save. None if
            no GPU was given, or if TensorRT rejects the model. ``time.as_json()`` has the fields of
            ``Prediction.time``.
        time_before_ms: Estimated milliseconds of the model before fixing. None without `time`, if
            TensorRT rejects the model, or on a GPU without INT8.
        time_before: Estimate of the model before fixing, whose quantizers may be rewritten in a
            common form. None without `time`, or on a GPU without INT8.
    """

    proto: onnx.ModelProto
    before: Prediction
    after: Prediction
    applied: list[FixAttempt] = field(default_factory=list)
    refused: list[FixAttempt] = field(default_factory=list)
    noise_before: float | None = None
    noise_after: float | None = None
    notes: list[Note] = field(default_factory=list)
    read: InputFiles | None = field(default=None, repr=False, compare=False)
    errors: list[OutputError] = field(default_factory=list)
    samples: int = 0
    time: TimeEstimate | None = None
    time_before_ms: float | None = None
    detections: DetectionVerdict | None = None
    time_before: TimeEstimate | None = None

    def __repr__(self) -> str:
        places = format_count(self.fixed_places().total(), "place")
        changes = format_count(len(self.applied), "change")
        return (
            f"<Fixed {self.before.model.path or 'model in memory'} for {self.after.target_title}: "
            f"{places} fixed by {changes}, {len(self.refused)} refused>"
        )

    @property
    def ok(self) -> bool:
        """Whether the fixed model has no finding that is an error."""
        return all(f.severity != Severity.ERROR for f in self.after.findings)

    @property
    def model(self) -> onnx.ModelProto:
        """The fixed model (:attr:`proto`). Other results use the name `model` too."""
        return self.proto

    def fixed_places(self) -> Counter[str]:
        """Return the number of findings with an automatic fix that the fixes removed, by code.

        A finding that became a note because it costs nothing anymore counts as removed. A finding
        of a code that promises no fix (ADD-ACT) counts if a change was for its place.

        One change may remove several findings, and one finding may need several changes. If the
        model had no finding of a code before fixing, for example because an error prevented the
        check, the number of changes is returned for this code.
        """
        remaining = [f for f in self.after.findings if f.gains]
        left = {(f.code, f.node) for f in remaining}
        unpromised = {(a.code, a.node) for a in self.applied if a.code in UNPROMISED_CODES}
        unpromised -= {(f.code, f.node) for f in self.after.findings}
        removed = Counter(
            f.code
            for f in self.before.findings
            if (f.automatic and (f.code, f.node) not in left) or (f.code, f.node) in unpromised
        )
        change = Counter(f.code for f in self.before.findings)
        hidden = Counter(a.code for a in self.applied if a.code not in change)
        change.subtract(f.code for f in remaining)
        return (removed & change) + hidden

    def summary(self) -> Json:
        """Return the numbers of fixed places and of changes, and both predictions' summaries.

        ``applied`` and ``refused`` count changes. One change may fix several places, and one place
        may need several changes.
        """
        return {
            "places": self.fixed_places().total(),
            "applied": len(self.applied),
            "refused": len(self.refused),
            "before": self.before.summary(),
            "after": self.after.summary(),
        }

    def to_graphsurgeon(self) -> onnx_graphsurgeon.Graph:
        """Return a copy of the model as an onnx-graphsurgeon graph."""
        return to_graphsurgeon(self.proto)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fixed model atomically.

        Raises:
            QdqtoolError: `path` is a file that was read, or the file cannot be written.
        """
        with forbid_overwrite(self.read):
            save(self.proto, path, source=self.before.model.path)

    def as_json(self) -> Json:
        """Return the result as a JSON object."""
        before_ms = self.time_before_ms
        return {
            "schema": FIX_SCHEMA,
            "tool": TOOL_VERSION,
            "model": self.before.model.as_json(),
            "target": self.before.target,
            "compute_capabilities": list(self.before.compute_capabilities),
            "applied": [a.as_json() for a in self.applied],
            "refused": [a.as_json() for a in self.refused],
            "before": {
                "summary": self.before.summary(),
                "findings": dict(self.before.findings_by_code()),
            },
            "after": {
                "summary": self.after.summary(),
                "findings": dict(self.after.findings_by_code()),
            },
            "noise": {"before": self.noise_before, "after": self.noise_after},
            "outputs": [e.as_json() for e in self.errors],
            "samples": self.samples,
            "agreement": None if self.detections is None else self.detections.as_json(),
            "time": None if self.time is None else self.time.as_json(),
            "time_before_ms": before_ms if before_ms is None else round_significant(before_ms),
            "notes": list(self.notes),
            "fixed": dict(self.fixed_places()),
        }


def fix(
    source: ModelSource | Model,
    target: str | Target = DEFAULT_TARGET,
    only: Sequence[str] = (),
    inputs: Mapping[str, Any] | None = None,
    effort: float = 1.0,
    *,
    data: CalibrationSource | None = None,
    preprocess: Preprocess | str | ImageFunction | None = None,
    size: tuple[int, int] | None = None,
    gpu: str | None = None,
    power: str | None = None,
    progress: bool = False,
) -> Fixed:
    """Apply automatic fixes to a Q/DQ model, without calibration.

    A fix is kept only if it improves the prediction and does not make the outputs worse than
    permitted; see ``docs/fix.md``.

    Args:
        source: The Q/DQ model with all its weights. The name is that of version 0.1; the other
            functions name this parameter `model`.
        target: TensorRT version such as ``8.5``, ``10.3`` or ``11``, or ``rtx1.7``; or a
            :class:`qdqtool.trt.targets.Target`.
        only: Finding codes to fix. Default: all codes with an automatic fix, but ``HEAD-QUANT``
            only if the finding is an error, because its fix removes quantizers.
        inputs: Arrays by input name, with which the model is run. Default: random arrays.
        effort: Factor for the limits of multiplications and bytes in the runs that compare outputs.
            Large models need a factor above 1.
        data: Images on which outputs are compared, as for :func:`calibration.open_data`: folder,
            list file, npz, npy or arrays. Default: random inputs.
        preprocess: How images become inputs: a name of :data:`calibration.PRESETS` (``yolo``,
            ``imagenet``, ...), a :class:`calibration.Preprocess`, or a function that converts an
            RGB image of Pillow to an input array. Default: the preprocessing in the model's
            metadata, else ``yolo`` (letterbox, RGB, divided by 255).
        size: Height and width in pixels, if they are dynamic in the model. Default: ``imgsz`` in
            the model's metadata.
        gpu: GPU for which times are estimated; see ``qdqtool gpus``. Unless `only` is given, a
            change that is to save time is not kept if it makes the model slower on this GPU.
        power: Power mode of a Jetson, such as ``15W`` or ``MAXN``; see ``qdqtool gpus NAME``.
        progress: Whether to show on stderr how many changes were tried: a bar on a terminal, else
            one line per minute.

    Raises:
        ModelError: The model cannot be read, has no Q/DQ, or a weight file is missing.
        QdqtoolError: A code in `only` is unknown or has no automatic fix, the GPU is unknown, or
            `inputs` and `data` are both given.
        DataError: The model does not accept the inputs or the data.
    """
    version, options = target_named(target), FixOptions(only, inputs, effort)
    requested = _resolve_codes(options.only)
    timing = TimingOptions(gpu=gpu, power=power)
    named_gpu = None if gpu is None else choose_gpu(gpu, power=power)
    if named_gpu is not None:
        version = version.with_capability(named_gpu.cc, named_gpu.name)
    if data is not None and inputs is not None:
        raise QdqtoolError(
            "`inputs` and `data` exclude each other: give one of them",
            code="options-exclude-each-other",
            parameter="inputs",
        )
    with record_inputs() as read:
        original = load_full(source)
        prepared = _PreparedModel(original)
        _raise_axis_opset(prepared, requested)
        _rewrite_quantizers(prepared, requested)
        _require_quantizers(prepared.model)
        _restore_constants(prepared)
        options_of_images = ImageOptions(preprocess, size)
        images, count, notes = read_samples(prepared.model, data, options_of_images)
        samples = images or (None if inputs is None else [dict(inputs)])
        with pause_gc():
            speed = None if gpu is None else SpeedCheck.for_gpu(prepared.model, version, timing)
            session = FixSession(
                prepared.model, version, samples, options.effort, requested, speed=speed
            )
            session.applied += prepared.applied
            session.notes += [*prepared.notes, *notes, *_note_subgraphs(original)]
            attempts = _apply_fixes(session, requested)
            for _ in track_progress(attempts, "attempts to fix") if progress else attempts:
                pass
            is_unprepared = prepared.model is original
            before = session.before if is_unprepared else predict(original, version)
            review_promises(session.model, session.prediction)
            time = None if gpu is None else _estimate_time(session.model, version, timing)
            if named_gpu is not None:
                session.notes += named_gpu.notes
                _add_gpu_findings(session.model, session.prediction, named_gpu)
                if before is not session.prediction:
                    _add_gpu_findings(original, before, named_gpu)
            time_before_ms = None
            if speed is not None and time is not None and not before.rejected:
                time_before_ms = speed.measure_ms(original)
    noise_before, noise_after = session.judge.first_noise, session.judge.noise
    detections = session.judge.compare_detections() if session.applied else None
    if detections is not None:
        detections = replace(detections, images=count)  # a sample of a fixed batch has several
    return Fixed(
        session.model.proto,
        before,
        session.prediction,
        session.applied,
        session.refused,
        noise_before.relative if noise_before is not None else None,
        noise_after.relative if noise_after is not None else None,
        session.notes,
        read,
        session.judge.list_errors(),
        count if images else len(samples or ()),
        time,
        time_before_ms,
        detections,
        None if speed is None or time is None else speed.time,
    )


def _estimate_time(model: Model, target: Target, options: TimingOptions) -> TimeEstimate | None:
    prediction, time = predict_on_gpu(model, target, options, extend=add_fix_savings)
    return None if prediction.time is None else time


def _add_gpu_findings(model: Model, prediction: Prediction, gpu: Gpu) -> None:
    add_findings(prediction, gpu_findings(prediction, gpu, model), model)


@dataclass(slots=True)
class _PreparedModel:
    """A model with the fixes that are made before the outputs are compared.

    Attributes:
        model: The model, with these fixes.
        applied: The fixes.
        notes: Notes on the fixes.
    """

    model: Model
    applied: list[FixAttempt] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def _raise_axis_opset(prepared: _PreparedModel, requested: set[str]) -> None:
    """Raise the opset if it does not permit the model's per-channel Q/DQ.

    Unlike for other fixes, the outputs are not compared, because onnxruntime rejects the original
    model.

    Raises:
        ModelError: onnx cannot raise the opset.
    """
    model = prepared.model
    if requested and "OPSET-AXIS" not in requested:
        return
    if not View(model).needs_axis_opset:
        return
    description = f"opset {model.opset} raised to {AXIS_OPSET}, in which Q and DQ have an axis"
    prepared.model = to_axis_opset(model)
    prepared.applied.append(FixAttempt("OPSET-AXIS", "", description))


def _rewrite_quantizers(prepared: _PreparedModel, requested: set[str]) -> None:
    """Replace other tools' quantizers by Q/DQ.

    Outputs are not compared for this fix, because onnxruntime cannot run the operators of other
    tools. A note tells the user if values may differ.
    """
    fakes = [fake for fake in find_fake_quantizers(prepared.model) if not fake.problem]
    if not fakes or (requested and "FAKE-QUANT" not in requested):
        return
    copy = prepared.model = prepared.model.copy()
    is_half = any(onnx.TensorProto.FLOAT16 in fake.elem_types for fake in fakes)
    opset = HALF_OPSET if is_half else MIN_OPSET
    if copy.opset < opset:
        raise_opset(copy, opset)
    rewrite_fake_quantizers(copy)
    prepared.applied += [
        FixAttempt("FAKE-QUANT", fake.name, f"{fake.name}: {fake.form} quantizer as Q and DQ")
        for fake in fakes
    ]
    narrow = sum(fake.is_narrow for fake in fakes)
    inexact = sum(fake.is_inexact for fake in fakes)
    if narrow:
        prepared.notes.append(_describe_narrow_range(narrow))
    if inexact:
        prepared.notes.append(_describe_inexact_rounding(inexact))


def _restore_constants(prepared: _PreparedModel) -> None:
    """Replace rounded anchors and strides by exact ones.

    Outputs are not compared for this fix, because the float network of the comparison has the same
    constants. The restored values are proven by the feature maps.
    """
    sites, note = find_restorable_constants(View(prepared.model))
    if note is not None:
        prepared.model, _ = apply_sites(prepared.model, sites)
        prepared.notes.append(note)


def _describe_inexact_rounding(count: int) -> Note:
    return Note(
        f"the original model has {format_count(count, 'quantizer')} that rounded differently from "
        "Q, because of multiplication by the reciprocal of the scale or computation in float16. "
        "Values halfway between two steps may therefore differ by one step",
        code="rounding-differs",
        count=count,
    )


def _describe_narrow_range(count: int) -> Note:
    return Note(
        f"{format_count(count, 'quantizer')} clipped at -127 steps, but Q clips at -128. For "
        "equal results, the fixed model has a Clip before each such Q of an activation, and "
        "clipped weights",
        code="narrow-range",
        count=count,
    )


def _note_subgraphs(model: Model) -> list[Note]:
    count = count_subgraphs(model).get("quantizers", 0)
    if not count:
        return []
    return [
        Note(
            f"{format_count_were(count, 'Q/DQ node')} not changed, because branches of If and "
            "bodies of Loop and Scan are not analyzed",
            code="subgraphs-unchanged",
            count=count,
        )
    ]


def _require_quantizers(model: Model) -> None:
    """Check that a model has Q/DQ.

    Raises:
        ModelError: The model has neither Q/DQ nor quantizers that can be rewritten as Q/DQ.
    """
    if is_quantized(model):
        return
    fakes = find_fake_quantizers(model) or find_nested_quantizers(model)
    if fakes:
        raise ModelError(
            f"has quantizers ({fakes[0].form}) that cannot be written as Q/DQ: {len(fakes)}, such "
            f"as '{fakes[0].name}' ({fakes[0].problem}). Export Q/DQ (qdqtool explain FAKE-QUANT)",
            model.path or "model",
            code="not-quantized",
            node=fakes[0].name,
        )
    if has_nested_quantizers(model):
        raise ModelError(
            "its Q/DQ nodes are in branches of If or bodies of Loop and Scan, which fix does not "
            "analyze; export the model without control flow (qdqtool explain SUBGRAPH)",
            model.path or "model",
            code="subgraph-quantized",
        )
    aten = find_aten_nodes(model)
    reason = "quantize it first (qdqtool insert)"
    if aten:
        reason = (
            f"its exporter fell back to operators of ATen ('{aten[0].name}'), which TensorRT "
            "rejects; export the model again (qdqtool explain ATEN-FALLBACK)"
        )
    raise ModelError(f"has no Q/DQ; {reason}", model.path or "model", code="not-quantized")


def _resolve_codes(texts: Sequence[str]) -> set[str]:
    resolved: set[str] = set()
    for text in texts:
        entry = codes.find(text)
        if entry is None:
            raise QdqtoolError(
                f"no finding has the code '{text}'; {codes.suggest_code(text)}",
                code="unknown-finding-code",
                parameter="only",
            )
        if entry.code not in ATTEMPTED_CODES:
            raise QdqtoolError(
                f"{entry.code} has no automatic fix (see 'qdqtool explain {entry.code}'). "
                f"{entry.fix}".rstrip(),
                code="no-automatic-fix",
                parameter="only",
            )
        resolved.add(entry.code)
    return resolved


def _apply_fixes(session: FixSession, requested: set[str]) -> Iterator[None]:
    """Try all fixes; yield after each attempt."""
    yield from session.try_steps()
    errors = count_error_findings(session.prediction)
    for model_step in MODEL_STEPS:
        if requested.intersection(model_step.codes) or (
            not requested and session.is_tried_by_default(model_step)
        ):
            session.try_model_step(model_step)
            yield
    if count_error_findings(session.prediction) < errors:
        # For example, a new Q with a float16 scale was an error before the model became float32.
        yield from session.try_steps(rounds=(False,))
    session.remove_idle_relus()
    session.record_scales()
    session.drop_outdated_refusals()
    session.record_refusals()
    session.record_unfixed(requested)
    session.note_added_relus()
    session.note_losses()
