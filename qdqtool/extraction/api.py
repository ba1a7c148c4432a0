"""``qdqtool.extract``: cut out a part of a model, shrink it, and hide names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING

import onnx

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.extraction.cut import ModelCutter, ModelPart
from qdqtool.extraction.invariants import (
    Invariants,
    choose_finding,
    describe_missing,
    has_same_types,
    is_shown_elsewhere,
    list_new_codes,
)
from qdqtool.extraction.options import SelectionOptions, ShrinkOptions
from qdqtool.extraction.private import PrivateNames, find_changed_fixes, make_private
from qdqtool.extraction.reductions import ALL, BYTES_FIRST, store_constants
from qdqtool.extraction.result import Extraction
from qdqtool.extraction.shrinking import ModelShrinker
from qdqtool.extraction.trimming import PartTrimmer, TrimBudget, grow_part
from qdqtool.findings.identity import finding_key
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.metadata import mark_part
from qdqtool.ir.modelfile import ModelSource, load, load_full
from qdqtool.prediction import predict, predict_part
from qdqtool.reasons.finding import Finding
from qdqtool.trt.result import ConvOutcome, Prediction
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.util import limits
from qdqtool.util.files import record_inputs
from qdqtool.util.notes import Note
from qdqtool.util.process import INTERRUPTED
from qdqtool.util.progress import track_progress
from qdqtool.util.text import format_count, format_list

if TYPE_CHECKING:
    from qdqtool.extraction.checks import ModelCheck

_PART = "a part"  # used in place of a hash, whose computation is slow
_HEAD_CODES = frozenset({"HEAD-CONCAT", "HEAD-QUANT", "HEAD-SCORE"})  # findings on a detection head
_Rename = Callable[[str], str]


class ExtractionJob:
    """An extraction. Its methods are the steps, its attributes the state between the steps.

    Args:
        model: The whole model.
        target: Name of the TensorRT version to predict for.

    Attributes:
        model: The whole model.
        target: Name of the TensorRT version to predict for.
        cutter: Cuts parts out of the model.
        invariants: Findings and convolutions that the small model must reproduce.
        budget: Number of nodes that may still be predicted while the part is trimmed.
        check: Builder or command that tests each model; None if there is neither.
        notes: Notes of the result that contain no names of the model.
        proto: The smallest model found so far.
        is_whole: Whether the whole model was restored, because the check failed for the selected
            part.
        is_interrupted: Whether Ctrl-C ended the shrinking.
    """

    def __init__(self, model: Model, target: str) -> None:
        self.model, self.target = model, target
        self.cutter = ModelCutter(model)
        self.invariants = Invariants()
        self.budget = TrimBudget()
        self.check: ModelCheck | None = None
        self.notes: list[Note] = []
        self.proto = model.proto
        self.is_whole = self.is_interrupted = False
        self._is_between = self._is_minimized = False
        # These functions return texts with names of nodes. Their argument is a function that
        # renames nodes, because a private model has other names.
        self._describe_selection: Callable[[_Rename], str] = lambda rename: ""
        self._describe_cut: Callable[[_Rename], Note] | None = None
        # The part with its Constant nodes, before initializers replaced them.
        self._proto_with_nodes: onnx.ModelProto | None = None

    @cached_property
    def whole(self) -> Prediction:
        """Prediction of the whole model."""
        return predict(self.model, self.target)

    # Selection ------------------------------------------------------------------------------------

    def select(self, selection: SelectionOptions, is_checked: bool) -> None:
        """Select the part of the model, and set its invariants.

        Args:
            selection: Selection of the user.
            is_checked: Whether a builder or command tests each model. The selection may then be
                empty.

        Raises:
            ModelError: The model has no such finding, node or tensor.
            QdqtoolError: The selection is empty, or options contradict each other.
        """
        selection.check_consistency()
        if selection.inputs or selection.outputs:
            self._is_between = True
            self._set_part(self.cutter.find_between(selection.inputs, selection.outputs))
            self._describe_selection = lambda rename: "everything between `inputs` and `outputs`"
            self._select_common_invariants()
        elif selection.findings:
            texts = dict.fromkeys(selection.findings)
            self._select_findings([choose_finding(self.whole, t, selection.node) for t in texts])
        elif selection.node is not None:
            self._select_node(self._find_node(selection.node), selection.hops)
        elif is_checked:
            # No invariants are needed here, but the prediction of the whole model raises an error
            # early if the model is invalid.
            self._set_part(self.cutter.whole_part())
            self.invariants = Invariants.from_findings(self.whole, ())
            self._describe_selection = lambda rename: "the part that the build depends on"
        else:
            raise QdqtoolError(
                "no part is selected; give a `finding`, a `node`, `inputs` and `outputs`, or a "
                "`builder` or `check`",
                code="missing-argument",
            )

    def _select_findings(self, findings: Sequence[Finding]) -> None:
        self.invariants = Invariants.from_findings(self.whole, findings)
        self._narrow_part(self.find_anchors(findings))

        def describe(rename: _Rename) -> str:
            places = [f"{f.code} at {rename(f.node) or 'the network'}" for f in findings]
            return f"the part that {format_list(places)} depends on"

        self._describe_selection = describe

    def _select_node(self, node: Node, hops: int | None) -> None:
        self.invariants = Invariants.from_node(self.whole, node.name)
        if hops is None:
            self._narrow_part([node])
            self._describe_selection = lambda rename: (
                f"the part that the prediction of {rename(node.name)} depends on"
            )
            return
        self._set_part(self.cutter.complete_part(self.cutter.find_nodes_within([node], hops)))
        self._describe_selection = lambda rename: (
            f"{rename(node.name)} and the nodes up to {format_count(hops, 'hop')} around it"
        )
        prediction = self._predict_proto(self.proto)
        missing = self.invariants.find_missing(prediction)
        self.invariants = self.invariants.without(missing)
        missing = [m for m in missing if not is_shown_elsewhere(m, prediction, node.name)]
        if missing:
            self._describe_cut = lambda rename: Note(
                f"the part within `hops` is too small to reproduce "
                f"{describe_missing(missing, rename)}; increase `hops`, or leave `hops` out",
                code="not-shown",
            )

    def find_anchors(self, findings: Sequence[Finding]) -> list[Node]:
        """Return the nodes at which the search for a part with these findings starts.

        These are the nodes that the findings name. Nodes with only constant inputs are left out,
        unless a finding is at the node itself. If the findings name no nodes, the first node of the
        model is returned.
        """
        anchors: dict[int, Node] = {}
        for finding in findings:
            for name in (finding.node, *finding.convolutions, *finding.nodes):
                node = self._find_node_or_producer(name)
                if node is None:
                    continue
                if node.index not in self.cutter.constant or name == finding.node:
                    anchors[node.index] = node
        return list(anchors.values()) or list(self.model.ordered[:1])

    def _find_node_or_producer(self, name: str) -> Node | None:
        return self.model.find_node(name) or self.model.producer(name)

    def _find_node(self, name: str) -> Node:
        node = self._find_node_or_producer(name)
        if node is not None:
            return node
        names = [n.name for n in self.model.nodes]
        longer = [n for n in names if n.startswith(name)]
        similar = difflib.get_close_matches(name, names, 3, 0.5)
        hint = "; give the name of a node or of a tensor that it computes"
        if similar:
            hint = f"; did you mean {', '.join(similar)}?"
        if longer:
            hint = f"; did you mean {longer[0]}?"
            if len(longer) > 1:
                hint = (
                    f"; {len(longer)} names begin with this text: {format_list(longer, 3)}; give "
                    "one of these names"
                )
        raise ModelError(
            f"has no node '{name}'{hint}",
            self.model.path or "model",
            code="unknown-choice",
            parameter="node",
            node=name,
        )

    def _narrow_part(self, anchors: Sequence[Node]) -> None:
        """Set the part to a small part around the anchors that reproduces the invariants.

        The part grows from the anchors and is then trimmed. The first search is fast, because it
        predicts models without large constants. If the complete model of the part that it finds
        does not reproduce the invariants, the search is repeated with complete models.
        """
        names = self.invariants.required_nodes()
        nodes = map(self._find_node_or_producer, names)
        needed = frozenset(node.index for node in nodes if node is not None)
        for holds in (self._is_reproduced_by_sketch, self._is_reproduced_by_part):
            part = self.cutter.whole_part()
            for grown in track_progress(grow_part(self.cutter, anchors, holds, needed), "cutting"):
                part = grown or part
            trimmer = PartTrimmer(self.cutter, part, anchors, holds, self.budget, needed)
            for _ in track_progress(trimmer.steps(), "trimming"):
                pass
            part = trimmer.part
            if self._is_reproduced_by_part(part):
                break
        if self.budget.nodes_left < 0:
            self.notes.append(
                Note(
                    f"trimming ended after {limits.TRIMMED_NODES:,} predicted nodes: the part may "
                    "be larger than necessary; `minimize` reduces it",
                    code="trimming-ended",
                )
            )
        self._set_part(part)
        if part != self.cutter.whole_part():
            self._store_constants()

    def _store_constants(self) -> None:
        for candidate in store_constants(self.proto):
            if self.invariants.are_reproduced_by(self._predict_proto(candidate)):
                self._proto_with_nodes, self.proto = self.proto, candidate

    def _is_reproduced_by_sketch(self, part: ModelPart) -> bool:
        try:
            prediction = predict_part(self.cutter.sketch_model(part), target_named(self.target))
        except ModelError:
            return False
        self.budget.spend(max(0, len(prediction.findings) - len(part.nodes)))
        return self.invariants.are_reproduced_by(prediction)

    def _is_reproduced_by_part(self, part: ModelPart) -> bool:
        try:
            return self.invariants.are_reproduced_by(self._predict_proto(self.cutter.build(part)))
        except ModelError:
            return False

    def _as_model(self, proto: onnx.ModelProto) -> Model:
        # External weights are not read, because this would be slow.
        return Model(proto, self.model.path, _PART, self.model.base_dir)

    def _predict_proto(self, proto: onnx.ModelProto) -> Prediction:
        return predict(self._as_model(proto), self.target)

    def _set_part(self, part: ModelPart) -> None:
        self.proto = load_full(self._as_model(self.cutter.build(part))).proto

    def _select_common_invariants(self) -> None:
        prediction = self._predict_proto(self.proto)
        outcomes = {c.name: c for c in prediction.convolutions}
        unchanged, changed = [], []
        for convolution in self.whole.convolutions:
            outcome = outcomes.get(convolution.name)
            if outcome is None:
                continue
            if has_same_types(convolution, outcome):
                unchanged.append(convolution)
            else:
                changed.append((convolution, outcome))
        keys = {finding_key(f) for f in prediction.findings}
        findings = (f for f in self.whole.findings if finding_key(f) in keys and f.node)
        self.invariants = Invariants(tuple(findings), tuple(unchanged))
        if changed:
            self._describe_cut = lambda rename: _describe_changes(changed, rename)

    # Checks and shrinking -------------------------------------------------------------------------

    def start_check(self, options: ShrinkOptions, seconds: float, stack: ExitStack) -> None:
        """Run the builder or command on the whole model, and prepare the check of smaller models.

        Args:
            options: Options with the builder or command.
            seconds: Time limit of one run of the command, in seconds.
            stack: Stack to which the end of processes and the removal of temporary files are added.

        Raises:
            BuilderError: The builder is not on this machine, or exceeds the time limit.
            QdqtoolError: The whole model has no fault to extract, or the command cannot be run,
                exceeds the time limit or does not print the text.
        """
        from qdqtool.extraction.checks import BuilderCheck, CommandCheck

        # External weights are read into a copy, because the model of the user must not change.
        whole = load_full(self._as_model(deepcopy(self.model.proto))).proto
        if options.builder is not None:
            builder_check = BuilderCheck(whole, options.builder, self.target)
            stack.callback(builder_check.close)
            if builder_check.whole.is_as_predicted and not self._has_invariants:
                raise QdqtoolError(
                    f"the build with {options.builder} matches the prediction: no "
                    "fault can be extracted; give `finding` or `node` as well",
                    self.model.path or "model",
                    code="builds-as-predicted",
                    parameter="builder",
                )
            self.check = builder_check
        elif options.check is not None:
            command_check = CommandCheck(whole, options.check, options.says or "", seconds)
            stack.callback(command_check.close)
            self.check = command_check

    @property
    def _has_invariants(self) -> bool:
        return bool(self.invariants.findings or self.invariants.convolutions)

    def restore_until_check_holds(self) -> None:
        """If the part fails the check, restore its Constant nodes, or else the whole model."""
        check = self.check
        if check is None or check.has_same_behavior(self.proto):
            return
        if self._proto_with_nodes is not None and check.has_same_behavior(self._proto_with_nodes):
            self.proto = self._proto_with_nodes
            return
        self.is_whole = True
        self._set_part(self.cutter.whole_part())

    def _is_reproduced_by_proto(self, proto: onnx.ModelProto) -> bool:
        if self._has_invariants:
            model = load(proto)
            model.sha256 = _PART
            if not self.invariants.are_reproduced_by(
                predict_part(model, target_named(self.target))
            ):
                return False
        return self.check is None or self.check.has_same_behavior(proto)

    def minimize(self, options: ShrinkOptions, keep_interrupted: bool = False) -> None:
        """Shrink the part while it reproduces the invariants and passes the check.

        Args:
            options: Options of shrinking.
            keep_interrupted: Whether Ctrl-C ends the shrinking and keeps the smallest model so far.

        Raises:
            QdqtoolError: Every node was removed.
        """
        self._is_minimized = True
        if self.check is not None and self.check.is_ambiguous:
            self.notes.append(
                Note(
                    "only the exit code was checked, not the output of the command; give `says` "
                    "to check for a text as well",
                    code="exit-code-alone",
                )
            )
        reductions = BYTES_FIRST if self.check is None else ALL
        bounded = options.limit is None and self.check is None
        shrinker = ModelShrinker(
            self.proto, self._is_reproduced_by_proto, reductions, options.tries, bounded
        )
        try:
            for _ in track_progress(shrinker.steps(), "minimizing", options.tries):
                pass
        except KeyboardInterrupt as stop:
            if not keep_interrupted or getattr(stop, "code", INTERRUPTED) != INTERRUPTED:
                raise
            self.is_interrupted = True
        self._note_early_end(shrinker, options.tries)
        self.proto = shrinker.proto
        if not self.proto.graph.node:
            self._raise_nothing_left(options)

    def _note_early_end(self, shrinker: ModelShrinker, limit: int) -> None:
        tries = shrinker.tried
        count = "1 try" if tries == 1 else f"{tries} tries"
        if self.is_interrupted:
            self.notes.append(
                Note(
                    f"interrupted after {count}; more tries may make the part smaller",
                    code="interrupted",
                    tries=tries,
                )
            )
        if shrinker.exhausted and tries >= limit:
            self.notes.append(
                Note(
                    f"stopped after {count}; a higher `limit` may make the part smaller",
                    code="stopped",
                    tries=tries,
                )
            )
        elif shrinker.exhausted:
            self.notes.append(
                Note(
                    f"stopped after {count}, because the model is large; set `limit` to allow "
                    "more tries",
                    code="stopped-early",
                    tries=tries,
                )
            )

    def _raise_nothing_left(self, options: ShrinkOptions) -> None:
        if self.check is None:
            raise QdqtoolError(
                "minimizing removed every node, because the predicted result depends on none of "
                "the nodes; leave out `minimize`",
                code="nothing-left",
                parameter="minimize",
            )
        advice = "check the installation of the builder"
        if options.builder is None:
            advice = (
                "give a check whose exit code changes when the fault is gone, or a text that the "
                "check prints (`says`)"
            )
        raise QdqtoolError(
            f"the outcome ({self.check.describe_behavior()}) is the same for a model without "
            f"nodes, so the check does not depend on the model; {advice}",
            code="check-ignores-model",
            parameter="check" if options.builder is None else "builder",
        )

    # Result ---------------------------------------------------------------------------------------

    def finish(self, options: ShrinkOptions) -> Extraction:
        """Predict the final model, replace its names and data if requested, and return the result.

        Raises:
            ModelError: The final model does not reproduce the invariants, or cannot be made
                private.
        """
        proto, invariants = self.proto, self.invariants
        prediction = predict(proto, self.target)
        if self._has_false_head(prediction):
            mark_part(proto)
            prediction = predict(proto, self.target)
        missing = invariants.find_missing(prediction)
        if missing:
            raise ModelError(
                f"the extract does not show {describe_missing(missing)}; this is a defect of "
                "qdqtool, please report it",
                self.model.path or "model",
                code="internal",
            )
        different_fixes = invariants.find_different_fixes(prediction)
        new_codes = list_new_codes(prediction, self.whole)
        names: PrivateNames | None = None
        rename: _Rename = str
        checked = self.check.describe_behavior() if self.check is not None else ""
        if options.private:
            proto, names = make_private(self.model, proto, prediction)
            rename = names.rename_layer
            part, prediction = prediction, predict(proto, self.target)
            changed = {(f.code, f.node) for f in find_changed_fixes(part, prediction, names)}
            different_fixes += [f for f in invariants.findings if (f.code, f.node) in changed]
            invariants = names.select_invariants(invariants, prediction)
            if self.check is not None:
                checked = self.check.describe_behavior(names.replace_names)
        same = _describe_invariants(invariants, different_fixes)
        if checked:
            outcome = "the build" if options.builder else "the outcome of the command"
            same.append(f"{outcome} ({checked})")
        description = self._describe_part(proto, rename, same)
        if new_codes:
            description += f". Only in the part: {format_list(new_codes)}"
        cut_notes = [self._describe_cut(rename)] if self._describe_cut is not None else []
        return Extraction(
            proto,
            prediction,
            self.whole,
            invariants,
            (len(proto.graph.node), len(self.model.nodes)),
            description,
            [*cut_notes, *self.notes],
            checked,
            names,
            self.is_interrupted,
        )

    def _has_false_head(self, prediction: Prediction) -> bool:
        """Return whether nodes at the cut are taken for those of a head."""
        if not _HEAD_CODES.isdisjoint(f.code for f in self.invariants.findings):
            return False
        known = {f.node for f in self.whole.findings if f.code in _HEAD_CODES}
        return any(f.code in _HEAD_CODES and f.node not in known for f in prediction.findings)

    def _describe_part(self, proto: onnx.ModelProto, rename: _Rename, same: list[str]) -> str:
        selection = self._describe_selection(rename)
        if self._is_minimized and self._is_between:
            selection = f"the relevant nodes of {selection}"
        text = f"{len(proto.graph.node)} of {len(self.model.nodes)} nodes: {selection}"
        return f"{text}. As in the whole model: {', '.join(same)}" if same else text


def _describe_invariants(invariants: Invariants, different_fixes: Sequence[Finding]) -> list[str]:
    texts = []
    if invariants.findings:
        codes = list(dict.fromkeys(str(f.code) for f in invariants.findings))
        plural = "s" if len(invariants.findings) > 1 else ""
        fixes = "with the same fix"
        if different_fixes:
            different = list(dict.fromkeys(str(f.code) for f in different_fixes))
            fixes = f"(with another fix for {format_list(different)} in the part)"
            if different == codes:
                fixes = "(with another fix in the part)"
        texts.append(f"the finding{plural} {format_list(codes)} {fixes}")
    if invariants.convolutions:
        names = [c.name for c in invariants.convolutions]
        texts.append(f"the prediction of {format_list(names, 3)}")
    return texts


def _describe_changes(changes: Sequence[tuple[ConvOutcome, ConvOutcome]], rename: _Rename) -> Note:
    texts = [
        f"{rename(whole.name)} (computes in {whole.precision} and writes {whole.output}, in the "
        f"part {part.precision} and {part.output})"
        for whole, part in changes
    ]
    return Note(
        f"the cut changes predictions: {format_list(texts, 3)}; move `inputs` and `outputs` away "
        "from these convolutions",
        code="predicted-otherwise",
    )


def extract(
    model: ModelSource | Model,
    *,
    keep_interrupted: bool = False,
    finding: str | Sequence[str] | None = (),
    node: str | None = None,
    hops: int | None = None,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    target: str | Target = DEFAULT_TARGET,
    minimize: bool = False,
    builder: str | None = None,
    check: str | None = None,
    says: str | None = None,
    check_timeout: float | None = None,
    limit: int | None = None,
    private: bool = False,
) -> Extraction:
    """Extract a small part of a Q/DQ model that reproduces a finding or a failing build.

    Args:
        model: The Q/DQ model: a path, bytes, ModelProto or onnx-graphsurgeon Graph. It is not
            changed.
        keep_interrupted: Whether Ctrl-C ends the shrinking and returns the smallest model found so
            far.
        finding: One or several texts: ``CODE`` for the first finding with this code, or ``CODE:n``
            for the n-th, in the order of ``predict``. If `node` is given, findings at other nodes
            are ignored.
        node: Name of a node whose predicted types and findings must not change.
        hops: Maximum number of steps from `node` to other nodes. Default: as many as needed to keep
            the prediction.
        inputs: Tensors at which the part begins. Default: the network's inputs.
        outputs: Tensors at which the part ends. Default: the network's outputs.
        target: TensorRT version such as ``8.5``, ``10.3`` or ``11``, or ``rtx1.7``; or a
            :class:`qdqtool.trt.targets.Target`.
        minimize: Whether to shrink the part further: fewer nodes, channels and pixels, and weights
            with equal values.
        builder: ``tensorrt-rtx``, ``trtexec`` or ``tensorrt``, which builds each model. The build
            of the small model must fail, or differ from the prediction, in the same way as that of
            the whole model. If nothing is selected, the whole model is shrunk as with `minimize`.
        check: Command that must exit with the same code for the small and for the whole model; see
            :class:`qdqtool.extraction.checks.CommandCheck`.
        says: Text that the command must print for the small and for the whole model. It
            distinguishes errors that have the same exit code.
        check_timeout: Time limit of one run of the command in seconds. Default: 600. For smaller
            models, the limit is at most five times the time that the whole model took, plus a
            minute.
        limit: Maximum number of models that are tried while the part is shrunk. Default: 2000, or
            400 with a builder or a command. If builder, command and limit are not given, the
            shrinking also ends after a minute or two.
        private: Whether to replace names, weights, scales and metadata; see
            :mod:`qdqtool.extraction.private`.

    Returns:
        The small model, its prediction, and a description of the selection. Equal arguments give
        equal bytes.

    Raises:
        ModelError: The model cannot be read, or has no such finding, node or tensor.
        BuilderError: The builder is not on this machine, or exceeds the time limit.
        QdqtoolError: The arguments contradict each other, the build is as predicted and nothing
            else is selected, or the command cannot be run or used.
    """
    options = ShrinkOptions(minimize, builder, check, says, check_timeout, limit, private)
    selection = SelectionOptions(finding, node, hops, inputs, outputs)
    seconds = limits.check_seconds(check_timeout, "check_timeout")
    version = target_named(target)
    with record_inputs() as read:  # temporary files are not recorded
        model = load(model)
    job = ExtractionJob(model, version.name)
    job.select(selection, options.is_checked)
    with ExitStack() as stack:
        if options.is_checked:
            job.start_check(options, seconds, stack)
        job.restore_until_check_holds()
        if options.minimize or selection.is_empty:
            job.minimize(options, keep_interrupted)
        elif job.is_whole:
            job.notes.append(
                Note(
                    "the part alone does not build like the whole model, so the whole model was "
                    "kept; give `minimize` to shrink it",
                    code="whole-kept",
                )
            )
    extraction = job.finish(options)
    extraction.source, extraction.read = model.path, read
    return extraction
