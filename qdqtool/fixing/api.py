"""``fix``: applies the fixes that need no new data, each predicted and run before it is kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import onnx

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.findings import codes
from qdqtool.findings.coded import TRIED, ScalesAround, fixed, fixes_of
from qdqtool.fixing import compare, gains, pairs, quantizers, weights
from qdqtool.fixing.options import FixOptions
from qdqtool.fixing.outputs import (
    OutputError,
    OutputPart,
    errors_of,
    find_output_parts,
    read_samples,
)
from qdqtool.fixing.site import Aim, Site, Step
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import ModelSource, load_full, save
from qdqtool.ir.qdq import is_quantized
from qdqtool.patterns.rewrites import remove_quantizers
from qdqtool.patterns.view import View
from qdqtool.prediction import predict
from qdqtool.timing.estimate import TimeEstimate, estimate_variant
from qdqtool.timing.results import FixTime
from qdqtool.trt import faults
from qdqtool.trt import refusals as trt
from qdqtool.trt.rtx.operands import IntegersLost, ScalesJoined
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.types import TOOL_VERSION, Finding, Json, Prediction, Severity
from qdqtool.util.files import InputFiles, forbid_overwrite, record_inputs
from qdqtool.util.notes import Note, Remark
from qdqtool.util.process import pause_gc
from qdqtool.util.said import Said, of_error, said

if TYPE_CHECKING:
    from calibration.options import Preprocess

FIX_SCHEMA = "qdqtool/fix/1"

# By how much the outputs' distance from the float network may grow. A rewrite that keeps the numbers can still flip an
# integer step by the last bit of a float, and a deep network makes a tenth more or less of that.
_EXACT = 1.3
# One scale for several tensors costs the smaller ones a part of their resolution.
_SHARED = 1.5
# uint8 to int8 costs up to one bit, which is twice the noise.
_ONE_BIT = 2.5
_ROUGH = 0.5  # noise above which little can be read from it
_FEW = 4  # places; of more the prediction shows which are at fault
_TRIES = 24  # of a step, however many places it has: each predicts the whole model
_NODES = 20_000  # that a step may predict by more tries than that, where the model is small

# Symmetric ranges have up to one bit less.
_HALVING = fixes_of((trt.NonzeroZeroPoint, faults.UnsignedZeroPoint))

STEPS = (
    Step(
        (
            trt.NonzeroZeroPoint,
            faults.UnsignedZeroPoint,
            faults.ZeroPointMissing,
            faults.ZeroPointCount,
        ),
        _ONE_BIT,
        find=quantizers.zero_points,
    ),
    Step((faults.ScaleNotPositive,), _EXACT, find=quantizers.positive_scales),
    Step((IntegersLost, trt.ActivationPerChannel), _ONE_BIT, find=quantizers.scalars),
    Step((faults.BiasQuantized,), _EXACT, find=weights.biases),
    Step((faults.WeightsBehind, faults.StoredReadElsewhere), _EXACT, find=weights.computed),
    Step((faults.WeightsStored,), _EXACT, find=weights.stored_integers),
    Step((trt.WeightsShared,), _EXACT, find=weights.shared),
    Step((trt.BatchNormNotConstant,), _EXACT, find=weights.parameters),
    Step((trt.ConvTransposeBatchNorm,), _EXACT, find=weights.folded_into_transposed),
    Step((trt.WeightsAxis,), _ONE_BIT, find=weights.transposed),
    Step((trt.WeightsNotDequantized,), _ONE_BIT, find=weights.bare),
    Step((faults.WeightsPerTensor,), _EXACT, weights=True, find=weights.per_channel),
    Step((faults.JoinedBehindHead,), _EXACT, costs=True, find=pairs.head_tails),
    Step((faults.HeadQuantized,), _EXACT, costs=True, find=pairs.heads),
    Step((faults.ScaleDead,), _ONE_BIT, find=quantizers.dead_scales),
    Step((trt.InsideActivation,), _EXACT, find=pairs.inside_activations),
    Step((trt.ResidualBothQuantized,), _EXACT, find=pairs.convolution_side),
    Step((trt.BehindPad,), _EXACT, find=pairs.behind_pads),
    Step(
        (
            trt.ResidualFloat,
            trt.OutputManyConsumers,
            trt.ActivationBeforeAdd,
            trt.AddOutputNotQuantized,
            trt.Stays,
        ),
        _SHARED,
        find=pairs.residuals,
    ),
    Step(
        (
            trt.OutputDifferentScales,
            trt.ConcatScales,
            ScalesJoined,
            ScalesAround,
            trt.ScalesDiffer,
            trt.Stays,
        ),
        _SHARED,
        find=pairs.scales,
    ),
)
"""What is tried, in this order. Conversions are taken by two steps: where no other finding says why they stay."""
_WHOLE: tuple[tuple[Aim, str, Callable[[Model, Target], Model | None]], ...] = (
    (Aim((faults.ScaleHalf,), _EXACT, retypes=True), "the model is float32", quantizers.to_float),
    (
        Aim((faults.NormInPieces,), _EXACT),
        "layer normalizations in pieces as LayerNormalization",
        quantizers.to_layer_norm,
    ),
    (
        Aim((faults.FloatStays,), _EXACT, retypes=True, rounding=compare.HALF_ROUNDING),
        "what is not quantized is FP16",
        quantizers.to_half,
    ),
)


@dataclass(slots=True)
class Change:
    """A fix that was tried.

    Attributes:
        code: The finding code.
        node: Where.
        what: What was done, or would have been.
        why_not: Why it was not kept; empty for one that was.
    """

    code: str
    node: str
    what: str
    why_not: str = ""

    def as_json(self) -> Json:
        return {"code": self.code, "node": self.node, "what": self.what, "why_not": self.why_not}


@dataclass(slots=True)
class Fixed:
    """The result of :func:`fix`.

    Attributes:
        proto: The fixed model; the one given where nothing was kept.
        before: Prediction of the model given.
        after: Prediction of the fixed one.
        applied: What was kept.
        refused: What was tried and not kept, and why.
        noise_before: Distance of the outputs from the float network's, relative, of the model given.
        noise_after: The same of the fixed one.
        notes: What else the user should know.
        read: The files that were read, none of which :meth:`save` overwrites.
        errors: The distances of all outputs, those of boxes and scores that share one apart.
        samples: Images that outputs were compared on; 0 for random inputs.
    """

    proto: onnx.ModelProto
    before: Prediction
    after: Prediction
    applied: list[Change] = field(default_factory=list)
    refused: list[Change] = field(default_factory=list)
    noise_before: float | None = None
    noise_after: float | None = None
    notes: list[Note] = field(default_factory=list)
    read: InputFiles | None = field(default=None, repr=False, compare=False)
    errors: list[OutputError] = field(default_factory=list)
    samples: int = 0

    def __repr__(self) -> str:
        return (
            f"<Fixed {self.before.model.path or 'model in memory'} for {self.after.target}: {len(self.applied)} "
            f"applied, {len(self.refused)} refused>"
        )

    @property
    def ok(self) -> bool:
        """Whether no finding that is an error is left."""
        return all(f.severity != Severity.ERROR for f in self.after.findings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fixed model, atomically.

        Raises:
            QdqtoolError: ``path`` is a file that was read, or cannot be written.
        """
        with forbid_overwrite(self.read):
            save(self.proto, path, source=self.before.model.path)

    def as_json(self) -> Json:
        return {
            "schema": FIX_SCHEMA,
            "tool": TOOL_VERSION,
            "model": self.before.model.as_json(),
            "target": self.before.target,
            "compute_capabilities": list(self.before.compute_capabilities),
            "applied": [c.as_json() for c in self.applied],
            "refused": [c.as_json() for c in self.refused],
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
            "notes": list(self.notes),
        }


def fix(
    source: ModelSource | Model,
    target: str | Target = DEFAULT_TARGET,
    only: Sequence[str] = (),
    inputs: Mapping[str, Any] | None = None,
    effort: float = 1.0,
    *,
    data: object = None,
    preprocess: Preprocess | None = None,
    size: tuple[int, int] | None = None,
) -> Fixed:
    """Apply the fixes of a Q/DQ model that need no calibration.

    Each fix is tried, and kept only if that shows it to be one; see ``docs/fix.md``.

    Args:
        source: The model; all its weights must be available.
        target: TensorRT version such as ``8.5``, ``10.3`` or ``11``, or ``rtx1.7``; or a
            :class:`qdqtool.trt.targets.Target`.
        only: Finding codes to fix. Default: all except those of the head (``HEAD-QUANT``) that
            are not errors, because they change what is quantized.
        inputs: Arrays by input name to run the model with. Default: random ones.
        effort: Factor on the limits of comparing outputs (multiplications, bytes), for large
            models.
        data: Images to compare outputs on instead of random inputs, as for
            :func:`calibration.open_data`: folder, list file, npz, npy or arrays.
        preprocess: How images become inputs. Default: letterbox, RGB, divided by 255.
        size: Height and width in pixels if the model leaves them open. Default: its ``imgsz``
            metadata.

    Raises:
        ModelError: The model cannot be read, has no Q/DQ, or a weight file is missing.
        QdqtoolError: A code in `only` is unknown or has no automatic fix.
        DataError: The inputs or the data do not fit.
    """
    chosen, options = target_named(target), FixOptions(only, inputs, effort)
    with record_inputs() as read:
        fixed = _fix(source, chosen, options, data, preprocess, size)
    fixed.read = read
    return fixed


def _fix(
    source: ModelSource | Model,
    target: Target,
    options: FixOptions,
    data: object,
    preprocess: Preprocess | None,
    size: tuple[int, int] | None,
) -> Fixed:
    wanted = _wanted(options.only)
    if data is not None and options.inputs is not None:
        raise QdqtoolError(
            said("{`inputs`} and {`data`} exclude each other: give one of them"),
            code="options-exclude-each-other",
            parameter="inputs",
        )
    model = load_full(source)
    if not is_quantized(model):
        raise ModelError(
            "has no Q/DQ; quantize it first (qdqtool insert)",
            model.path or "model",
            code="not-quantized",
        )
    samples = None if data is None else read_samples(model, data, preprocess, size)
    with pause_gc():
        work = _Work(model, target, options.inputs, samples, options.effort)
        for step in STEPS:
            if wanted.intersection(step.codes) or (not options.only and work.is_due(step)):
                work.try_step(step, wanted if options.only else set(step.codes))
        work.try_together()
        for aim, what, convert in _WHOLE:
            if not options.only or wanted.intersection(aim.codes):
                work.try_whole(aim, what, convert)
        work.account_for(wanted)
        work.report_losses()
    return work.result()


def _wanted(only: Sequence[str]) -> set[str]:
    wanted: set[str] = set()
    for text in only:
        entry = codes.find(text)
        if entry is None:
            raise QdqtoolError(
                f"no finding has the code '{text}'; {codes.hint(text)}",
                code="unknown-finding-code",
                parameter="only",
            )
        if entry.code not in TRIED:
            raise QdqtoolError(
                f"{entry.code} has no automatic fix; see 'qdqtool explain {entry.code}'",
                code="no-automatic-fix",
                parameter="only",
            )
        wanted.add(entry.code)
    return wanted


@dataclass(frozen=True)
class _Tried:
    """An attempt: of which step, with which places, and what would have come of it."""

    step: Step
    places: list[tuple[str, str]]
    prediction: Prediction


class _Work:
    """The model as it stands, and what is known about it."""

    def __init__(
        self,
        model: Model,
        target: Target,
        inputs: Mapping[str, npt.NDArray[Any]] | None,
        samples: list[compare.Arrays] | None,
        effort: float,
    ) -> None:
        self.model = model
        self.given = model
        self.target = target
        self.before = self.prediction = predict(model, target)
        self.applied: list[Change] = []
        self.refused: list[Change] = []
        self.notes: list[Note] = []
        self._runs = compare.Runs(effort, len(samples or (None,)))
        self._given = inputs
        self._samples = samples
        self._arrays: list[compare.Arrays] = []  # of each sample
        self._parts: list[OutputPart] = []
        self._reference: list[compare.Arrays] | None = None
        self._noise: compare.Noise | None = None
        self._first_noise: compare.Noise | None = None
        self._cannot_run: Said | None = None
        self._body = False
        self._left: list[tuple[Step, set[str]]] = []
        self._first: _Tried | None = (
            None  # the last attempt of the first of these, unless the model is another now
        )
        self._answers: dict[
            tuple[str, str], tuple[str, str]
        ] = {}  # finding to change, each by code and node

    def result(self) -> Fixed:
        return Fixed(
            self.model.proto,
            self.before,
            self.prediction,
            self.applied,
            self.refused,
            self._first_noise.relative if self._first_noise is not None else None,
            self._noise.relative if self._noise is not None else None,
            self.notes,
            errors=self._errors(),
            samples=len(self._samples or ()),
        )

    def _errors(self) -> list[OutputError]:
        before, after = self._first_noise, self._noise
        if before is None or after is None:
            return []
        return errors_of(
            self._parts, (before.each, after.each), (before.parts, after.parts), after.lost
        )

    def report_losses(self) -> None:
        """Notes whose error grew, and that the float model gives better ranges where fixes gave up some."""
        if self._given is not None or self._samples is not None:
            self._prepare()  # also if there was nothing to try
        errors = self._errors()
        grown = [e for e in errors if e.grew]
        self.notes += [
            Remark.ERROR_GREW(output=e.title, before=e.before, after=e.after) for e in grown
        ]
        self.notes += [Remark.OUTPUT_LOST(output=e.title) for e in errors if e.lost]
        halved = sum(c.code in _HALVING for c in self.applied)
        per_tensor = any(
            isinstance(c.refusal, faults.WeightsPerTensor) and c.refusal.lossy
            for f in self.prediction.findings
            for c in f.causes
        )
        rounded = quantizers.rounded_constants(View(self.model))
        if rounded:
            step, tensor = max(rounded)
            self.notes.append(
                Remark.CONSTANTS_ROUNDED(count=len(rounded), tensor=tensor, step=step)
            )
        if halved or per_tensor or grown or rounded:
            self.notes.append(Remark.INSERT_IS_BETTER())

    def is_due(self, step: Step) -> bool:
        """Whether a step is tried unasked: what gives up speed is, where it answers an error."""
        return not step.costs or any(
            f.code in step.codes and f.severity == Severity.ERROR for f in self.prediction.findings
        )

    def try_step(self, step: Step, wanted: set[str]) -> None:
        """Tries all places of a step together, and without those that are at fault where that is refused.

        What the prediction shows to get worse is laid to the nearest place; where it shows nothing, as when outputs
        would differ, halves are tried. So the number of tries hardly grows with that of the places.
        """
        refused: dict[tuple[str, str], Change] = {}
        tries = most = max(_TRIES, _NODES // (1 + len(self.model.nodes)))
        kept: set[tuple[str, str]] = set()
        suspects: list[tuple[str, str]] = []  # one of them at least is at fault
        why_not = ""
        while sites := [
            s for s in self._sites(step, wanted) if (s.code, s.node) not in refused.keys() | kept
        ]:
            self._answers.update(
                (answered, (s.code, s.node)) for s in sites for answered in s.answers
            )
            left = {(s.code, s.node): s for s in sites if s.refusal}
            if left:
                refused.update((k, Change(*k, s.what, s.refusal)) for k, s in left.items())
                continue
            if not tries:
                why_not = (Remark.NOT_SEPARATED_AS if why_not else Remark.NOT_SEPARATED)(
                    tries=most, why=why_not
                )
                refused.update(
                    {(s.code, s.node): Change(s.code, s.node, s.what, why_not) for s in sites}
                )
                break
            chosen = [
                s for s in sites if (s.code, s.node) in suspects[: max(1, len(suspects) // 2)]
            ] or sites
            keys = [(s.code, s.node) for s in chosen]
            tries -= 1
            why_not, fault = self._attempt(chosen, step)
            if not why_not:
                kept.update(keys)
                suspects = [k for k in suspects if k not in kept]
                if chosen is sites:
                    break
                continue
            if self._cannot_run:
                fault = dict.fromkeys(range(len(chosen)), why_not)
            elif len(chosen) <= _FEW:
                fault = {0: why_not} if len(chosen) == 1 else {}
            for number, why in fault.items():
                site = chosen[number]
                refused[keys[number]] = Change(site.code, site.node, site.what, why)
            suspects = [] if fault else keys
        if refused:
            self._left.append((step, wanted))
            self.refused += refused.values()

    def _sites(self, step: Step, wanted: set[str]) -> list[Site]:
        return step.sites(View(self.model), self.target, self.prediction, wanted)

    def _attempt(self, sites: list[Site], step: Step) -> tuple[str, dict[int, str]]:
        """Why some changes were not kept, empty where they were; and those of them that the prediction blames."""
        editor = Editor(self.model.copy())
        changes = [Change(s.code, s.node, s.what) for s in sites]
        touched = []
        try:
            for site in sites:
                editor.edited = set()
                site.apply(editor)
                touched.append(editor.edited)
            candidate = editor.finish()
        except ModelError as error:
            return of_error(error), {}
        prediction = predict(candidate, self.target)
        if not self._left:
            self._first = _Tried(step, [(s.code, s.node) for s in sites], prediction)
        against = gains.no_better(self.prediction, prediction, step)
        if against is not None:
            fault = gains.blamed(self.model, candidate, touched, self.prediction, prediction, step)
            if not fault and not against.worse:
                fault = dict.fromkeys(range(len(sites)), against.why)
            return against.why, fault
        return self._keep(candidate, prediction, changes, step), {}

    def try_together(self) -> None:
        """Tries steps together that were refused alone: a skip and a Concat that share a tensor need both."""
        if len(self._left) < 2 or self._cannot_run:  # what cannot be compared is never kept
            return
        model, prediction, changes = self.model, self.prediction, []
        tried: list[Step] = []
        for step, wanted in self._left:
            sites = step.sites(View(model), self.target, prediction, wanted)
            sites = [s for s in sites if not s.refusal]
            editor = Editor(model.copy())
            try:
                for site in sites:
                    site.apply(editor)
                edited = editor.finish()
            except ModelError:  # reported when the step was tried alone
                continue
            if sites:
                places = [(s.code, s.node) for s in sites]
                first = None if tried else self._first
                if first is not None and (first.step, first.places) == (step, places):
                    prediction = first.prediction
                else:
                    prediction = predict(edited, self.target)
                model = edited
                changes += [Change(s.code, s.node, s.what) for s in sites]
                tried.append(step)
        if not changes:
            return
        aim = Aim(
            tuple(kind for step in tried for kind in step.kinds),
            max(step.noise for step in tried),
            costs=any(step.costs for step in tried),
        )
        if not self._judge(model, prediction, changes, aim):
            kept = {(c.code, c.node) for c in changes}
            self.refused = [c for c in self.refused if (c.code, c.node) not in kept]

    def try_whole(
        self, aim: Aim, what: str, convert: Callable[[Model, Target], Model | None]
    ) -> None:
        """Tries a rewrite of the whole model."""
        found = [f for f in self.prediction.findings if aim.answered(f)]
        if not found:
            return
        change = Change(found[0].code, "", what)
        try:
            candidate = convert(self.model, self.target)
        except ModelError as error:
            change.why_not = of_error(error)
        else:
            if candidate is None:
                return
            change.why_not = self._judge(candidate, predict(candidate, self.target), [change], aim)
        self._answers.update(((f.code, f.node), (change.code, change.node)) for f in found)
        if change.why_not:
            self.refused.append(change)

    def account_for(self, wanted: Collection[str]) -> None:
        """Says of each code that was asked for where it is not found, and of each place why nothing was tried there."""
        found = {f.code for f in self.before.findings} | {
            c.code for c in (*self.applied, *self.refused)
        }
        missing = sorted(set(wanted) - found)
        self.notes += [
            Remark.CODE_NOT_FOUND(code=code, target=self.target.name) for code in missing
        ]
        refused = {(c.code, c.node) for c in self.refused}
        for finding in self.prediction.findings:
            change = self._answers.get((finding.code, finding.node))
            if finding.code in wanted and change not in refused:
                why_not = _untried(finding) if change is None else Remark.LEFT_AFTER_FIX()
                self.refused.append(Change(finding.code, finding.node, finding.fix, why_not))

    def _judge(
        self, candidate: Model, prediction: Prediction, changes: list[Change], aim: Aim
    ) -> str:
        """Keeps a changed model if it is better and computes the same; else says why not."""
        against = gains.no_better(self.prediction, prediction, aim)
        return self._keep(candidate, prediction, changes, aim) if against is None else against.why

    def _keep(
        self, candidate: Model, prediction: Prediction, changes: list[Change], aim: Aim
    ) -> str:
        """Keeps a changed model whose prediction is better if it computes the same; else says why not."""
        fewer = _error_count(prediction) < _error_count(self.prediction)
        why_not, noise = self._runs_as_well(candidate, aim, fewer)
        if why_not:
            return why_not
        self.model, self.prediction, self._noise, self._first = candidate, prediction, noise, None
        self.applied += changes
        return ""

    def _runs_as_well(
        self, candidate: Model, aim: Aim, fewer_errors: bool
    ) -> tuple[str, compare.Noise | None]:
        """Why a candidate does not compute the same, empty where it does; and its noise.

        Weights that are quantized no more are compared with a float network that has them so. Of parts of outputs,
        such as the scores of a detector, only real inputs tell; where the build would end otherwise, they decide
        nothing and are reported.
        """
        self._prepare()
        if self._reference is None or self._noise is None:
            return Remark.NOT_COMPARABLE(error=self._cannot_run), None
        try:
            proto, cut = compare.runnable(candidate, self._body)
            part = Model(proto, self.given.path, sha256="part") if cut else candidate
            if aim.weights:
                exact = self._run_all(remove_quantizers(part.copy(), weights=True).proto)
                current, _ = compare.runnable(self.model, self._body)
                now, then = (self._noise_of(p, exact) for p in (current, proto))
                if not compare.within(now, then, aim.noise, aim.rounding):
                    return _grown(now, then, aim.noise, False), None
            reference = self._reference
            if aim.costs or aim.weights:
                reference = self._run_all(remove_quantizers(part.copy()).proto)
            noise = self._noise_of(proto, reference)
        except compare.RunError as error:
            return Remark.RESULT_CANNOT_RUN(error=of_error(error)), None
        real = self._given is not None or self._samples is not None
        judged = real and not fewer_errors
        if not aim.weights and not compare.within(
            self._noise, noise, aim.noise, aim.rounding, parts=judged
        ):
            return _grown(self._noise, noise, aim.noise, judged), None
        self._reference = reference
        return "", noise

    def _run_all(self, proto: onnx.ModelProto) -> list[compare.Arrays]:
        return [self._runs.run(proto, arrays) for arrays in self._arrays]

    def _noise_of(self, proto: onnx.ModelProto, reference: list[compare.Arrays]) -> compare.Noise:
        pairs = list(zip(self._run_all(proto), reference, strict=True))
        return compare.noise_of_samples(pairs, self._parts)

    def _prepare(self) -> None:
        """Runs the model given and its float network, once; up to its last convolutions where the whole cannot run."""
        if self._reference is not None or self._cannot_run:
            return
        for self._body in (False, True):
            try:
                self._run_given()
            except compare.TooMuch as error:  # a part of it would hardly need less
                self._cannot_run = of_error(error)
                return
            except compare.RunError as error:
                self._cannot_run = self._cannot_run or of_error(error)
            else:
                if self._cannot_run:
                    self.notes.append(Remark.COMPARED_IN_BODY(error=self._cannot_run))
                self._cannot_run = None
                return

    def _run_given(self) -> None:
        proto, cut = compare.runnable(self.given, self._body)
        part = Model(proto, self.given.path, sha256="part") if cut else self.given
        if self._samples is not None:
            self._arrays = [compare.check_inputs(part, sample) for sample in self._samples]
        elif self._given is not None:
            self._arrays = [compare.check_inputs(part, self._given)]
        else:
            self._arrays = [compare.random_inputs(part)]
        floats = remove_quantizers(part.copy())
        reference = self._run_all(floats.proto)
        for outputs in reference:
            compare.check_finite(outputs)
        self._parts = find_output_parts(floats, self._arrays[0], self._runs.run)
        self._reference = reference
        try:
            self._noise = self._first_noise = self._noise_of(proto, reference)
        except compare.RunError:
            self._reference = None
            raise
        if self._noise.relative > _ROUGH:
            self.notes.append(Remark.WEAK_COMPARISON(error=self._noise.relative))
        if cut and not self._body:
            self.notes.append(Remark.COMPARED_IN_FRONT(nodes=cut[:3]))


def _untried(finding: Finding) -> str:
    """Why no change was tried at the place of a finding."""
    if not fixed(finding):
        return "no fix does this by itself for what causes it here"
    return Remark.FIX_LACKS() if finding.gains else Remark.BRINGS_NOTHING()


def _error_count(prediction: Prediction) -> int:
    return sum(f.severity == Severity.ERROR for f in prediction.findings)


def _grown(before: compare.Noise, after: compare.Noise, factor: float, parts: bool) -> Note:
    if not after.finite:
        return Remark.NO_NUMBERS()
    part = compare.worst_part(before, after, factor) if parts else None
    if part is not None:
        return Remark.DISTANCE_OF_PART_GROWS(
            output=part[0],
            part=part[1],
            before=before.parts.get(part, 0.0),
            after=after.parts[part],
        )
    worst = max(after.each, key=lambda n: after.each[n] / (before.each.get(n, 0.0) + 1e-9))
    return Remark.DISTANCE_GROWS(
        output=worst, before=before.each.get(worst, 0.0), after=after.each[worst]
    )


# What each kind of fix saves on a GPU --------------------------------------------------------------------------------


_MOST_SITES = 512


def add_fixes(model: Model, prediction: Prediction, time: TimeEstimate, target: Target) -> None:
    """Adds to an estimate what the fixes that ``qdqtool fix`` does by itself save, those of one kind together.

    A kind that saves nothing is left out; so is one that the model refuses (weights not available).
    """
    if not time.gpu.has_int8:
        return
    view = View(model)
    found = {f.code for f in prediction.findings if f.automatic}
    for step in STEPS:
        wanted = found.intersection(step.codes)
        if not wanted or step.costs:
            continue
        try:
            sites = step.sites(view, target, prediction, wanted)
            sites = [s for s in sites if not s.refusal]
            if not 0 < len(sites) <= _MOST_SITES:
                continue
            editor = Editor(model.copy())
            for site in sites:
                site.apply(editor)
            after = estimate_variant(time, editor.finish(), target)
        except QdqtoolError:
            continue
        if time.total_ms - after > 0:
            codes = sorted({s.code for s in sites})
            time.fixes.append(FixTime(codes, [s.node for s in sites], time.total_ms - after))
    time.fixes.sort(key=lambda f: -f.saves_ms)
