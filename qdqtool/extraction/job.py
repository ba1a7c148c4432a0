"""One extraction on its way: chooses the part, asks what has to stay, shrinks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING

import onnx

from qdqtool.errors import ModelError, QdqtoolError
from qdqtool.extraction.cut import Cutter, Part
from qdqtool.extraction.moves import ALL, BYTES_FIRST, constants
from qdqtool.extraction.options import SelectionOptions, ShrinkOptions
from qdqtool.extraction.private import made_private
from qdqtool.extraction.result import Extraction
from qdqtool.extraction.select import (
    Effort,
    Shown,
    Shrinker,
    choose,
    grow,
    lacking,
    of_findings,
    of_node,
    same,
    trim,
)
from qdqtool.findings.alike import key
from qdqtool.ir.graph import Model, Node
from qdqtool.ir.modelfile import ModelSource, load, load_full
from qdqtool.prediction import predict, predict_part
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named
from qdqtool.types import ConvOutcome, Finding, Prediction
from qdqtool.util import limits
from qdqtool.util.files import record_inputs
from qdqtool.util.notes import Note, Remark
from qdqtool.util.process import INTERRUPTED
from qdqtool.util.progress import track
from qdqtool.util.said import Said, said
from qdqtool.util.text import listed

if TYPE_CHECKING:
    from qdqtool.extraction.checks import Check

_PART = "a part"  # in place of a hash of each that is tried


class Job:
    """One extraction on its way."""

    def __init__(self, model: Model, target: str) -> None:
        self.model, self.target = model, target
        self.cutter = Cutter(model)
        self.shown = Shown()
        self.effort = Effort()
        self.check: Check | None = None
        self.notes: list[Note] = []
        self.why = self.checked = Said()
        self.proto = model.proto
        self.widened = self.interrupted = self.built = self.between = False
        self.with_nodes: onnx.ModelProto | None = (
            None  # the part while its Constant nodes are not yet initializers
        )

    @cached_property
    def whole(self) -> Prediction:
        """What is predicted of the whole model, when it is needed: wrong names of nodes and tensors are told first."""
        return predict(self.model, self.target)

    # Selecting ---------------------------------------------------------------------------------------------------

    def select(
        self,
        findings: Sequence[str],
        node: str | None,
        hops: int | None,
        inputs: Sequence[str],
        outputs: Sequence[str],
        free: bool,
    ) -> None:
        """Chooses the part."""
        self.between = between = bool(inputs or outputs)
        if between and (findings or node or hops is not None):
            raise QdqtoolError(
                said("give {`inputs`} and {`outputs`}, or a {`finding`} or {`node`}; not both"),
                code="option-conflict",
                parameter="inputs" if inputs else "outputs",
            )
        if hops is not None and (node is None or findings):
            raise QdqtoolError(
                said("{`hops`}: are counted from a {`node`}: give one, and no {`finding`}"),
                code="option-conflict" if findings else "missing-argument",
                parameter="hops" if findings else "node",
            )
        if not (between or findings or node or free):
            raise QdqtoolError(
                said(
                    "say what to extract: a {`finding`}, a {`node`}, {`inputs`} and {`outputs`}, or a "
                    "{`builder`} or {`check`}"
                ),
                code="missing-argument",
            )
        if between:
            self._set(self.cutter.between(inputs, outputs))
            self.why = said("everything between the tensors given")
            self.shown = self._common()
        elif findings:
            chosen = [choose(self.whole, f, node) for f in dict.fromkeys(findings)]
            self.shown = of_findings(self.whole, chosen)
            self._narrow(self.find_anchors(chosen))
            places = [(f.code, f.node or "the network") for f in chosen]
            self.why = said("what {places:first 4 %s at %s} depends on", places=places)
        elif node is not None:
            anchor = self._node(node)
            self.shown = of_node(self.whole, anchor.name)
            if hops is not None:
                self._set(self.cutter.part(self.cutter.around([anchor], hops)))
                self.why = said(
                    "{node} and what is up to {hops} hops around it", node=anchor.name, hops=hops
                )
                self._drop_unshown()
            else:
                self._narrow([anchor])
                self.why = said("what the prediction of {node} depends on", node=anchor.name)
        else:
            self._set(self.cutter.whole())
            self.shown = of_findings(
                self.whole, ()
            )  # nothing; no builder is asked about what cannot be predicted
            self.why = said("what the build depends on")

    def find_anchors(self, findings: Sequence[Finding]) -> list[Node]:
        """Return the nodes that a part for these findings grows from; the first node if they name none."""
        named = (self._named([f.node, *f.convolutions, *f.nodes]) for f in findings)
        anchors = {node.index: node for nodes in named for node in nodes}
        return list(anchors.values()) or list(self.model.ordered[:1])

    def _node(self, name: str) -> Node:
        found = self._find(name)
        if found is not None:
            return found
        import difflib

        names = [n.name for n in self.model.nodes]
        begun = [n for n in names if n.startswith(name)]
        near = difflib.get_close_matches(name, names, 3, 0.5)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        if begun:
            hint = f"; {len(begun)} begin so: {listed(begun, 3)}; name one of them"
        raise ModelError(
            f"has no node '{name}'{hint}",
            self.model.path or "model",
            code="unknown-choice",
            parameter="node",
            node=name,
        )

    def _named(self, names: Sequence[str]) -> list[Node]:
        """The nodes of these names; of a tensor's name, its maker. Constant nodes show nothing by themselves."""
        found: dict[int, Node] = {}
        for name in names:
            node = self._find(name)
            if node is not None and (node.index not in self.cutter.constant or name == names[0]):
                found[node.index] = node
        return list(found.values())

    def _find(self, name: str) -> Node | None:
        try:
            return self.model.node(name)
        except KeyError:
            return self.model.producer(name)

    def _narrow(self, anchors: Sequence[Node]) -> None:
        """Grows and trims the part around the anchors."""
        needed = frozenset(n.index for n in map(self._find, self.shown.needed()) if n is not None)
        for holds in (self._sketch_holds, self._part_holds):
            part = (
                _last(track(grow(self.cutter, anchors, holds, needed), "cutting"))
                or self.cutter.whole()
            )
            part = (
                _last(
                    track(trim(self.cutter, part, anchors, holds, self.effort, needed), "trimming")
                )
                or part
            )
            if self._part_holds(part):
                break
        if self.effort.left < 0:
            self.notes.append(Remark.TRIMMING_ENDED(nodes=limits.TRIMMED_NODES))
        self._set(part)
        if part != self.cutter.whole():
            self._plainer()

    def _plainer(self) -> None:
        """Constant nodes become initializers, where that shows the same."""
        for candidate in constants(self.proto):
            if self.shown.holds(self._predict(candidate)):
                self.with_nodes, self.proto = self.proto, candidate

    def _sketch_holds(self, part: Part) -> bool:
        try:
            found = predict_part(self.cutter.sketch(part), target_named(self.target))
        except ModelError:
            return False
        self.effort.left -= max(0, len(found.findings) - len(part.nodes))
        return self.shown.holds(found)

    def _part_holds(self, part: Part) -> bool:
        try:
            return self.shown.holds(self._predict(self.cutter.make(part)))
        except ModelError:
            return False

    def _indexed(self, proto: onnx.ModelProto) -> Model:
        # Weights stay where they are, so that a cut costs no reading.
        return Model(proto, self.model.path, _PART, self.model.base_dir)

    def _predict(self, proto: onnx.ModelProto) -> Prediction:
        return predict(self._indexed(proto), self.target)

    def _set(self, part: Part) -> None:
        """Takes a part, with its weights read in."""
        self.proto = load_full(self._indexed(self.cutter.make(part))).proto

    def keep_checked(self) -> None:
        """Goes back to Constant nodes, or to the whole model, where the part does not build as that does."""
        check = self.check
        if check is None or check.holds(self.proto):
            return
        if self.with_nodes is not None and check.holds(self.with_nodes):
            self.proto = self.with_nodes
            return
        self.widened = True
        self._set(self.cutter.whole())

    def _common(self) -> Shown:
        """What a part that was chosen by other means shows as the whole does."""
        prediction = self._predict(self.proto)
        there = {c.name: c for c in prediction.convolutions}
        whole = [c for c in self.whole.convolutions if c.name in there]
        unchanged = tuple(c for c in whole if same(c, there[c.name]))
        keys = {key(f) for f in prediction.findings}
        self._note_changed([c for c in whole if c not in unchanged], there)
        return Shown(tuple(f for f in self.whole.findings if key(f) in keys and f.node), unchanged)

    def _drop_unshown(self) -> None:
        prediction = self._predict(self.proto)
        missing = self.shown.missing(prediction)
        if missing:
            self.notes.append(Remark.NOT_SHOWN(missing=lacking(missing)))
        keys = {key(f) for f in prediction.findings}
        there = {c.name: c for c in prediction.convolutions}
        self.shown = Shown(
            tuple(f for f in self.shown.findings if key(f) in keys),
            tuple(c for c in self.shown.convolutions if c.name in there and same(c, there[c.name])),
        )

    def _note_changed(self, changed: Sequence[ConvOutcome], there: dict[str, ConvOutcome]) -> None:
        if changed:
            here = [
                (c.name, c.precision, c.output, there[c.name].precision, there[c.name].output)
                for c in changed
            ]
            self.notes.append(Remark.PREDICTED_OTHERWISE(convolutions=here))

    # Shrinking ---------------------------------------------------------------------------------------------------

    def use(
        self, builder: str | None, command: str | None, says: str, stack: ExitStack, seconds: float
    ) -> None:
        """Asks a compiler or a command about the whole model."""
        from qdqtool.extraction.checks import BuilderCheck, CommandCheck

        # A copy: the weights are read into it, and the model given is not to be changed.
        copy = onnx.ModelProto()
        copy.CopyFrom(self.model.proto)
        whole = load_full(self._indexed(copy)).proto
        if builder is not None:
            asked = BuilderCheck(whole, builder, self.target)
            stack.callback(asked.close)
            if asked.whole.healthy and not (self.shown.findings or self.shown.convolutions):
                raise QdqtoolError(
                    said(
                        "builds with {builder} as predicted, so that there is nothing to "
                        "extract; give {`finding`} or {`node`} as well",
                        builder=builder,
                    ),
                    self.model.path or "model",
                    code="builds-as-predicted",
                    parameter="builder",
                )
            self.check, self.built = asked, True
        elif command is not None:
            ran = CommandCheck(whole, command, says, seconds)
            stack.callback(ran.close)
            self.check = ran
        assert self.check is not None
        self.checked = self.check.words

    def minimize(self, limit: int, keep_interrupted: bool = False, bounded: bool = False) -> None:
        """Shrinks the part, or the whole model where the part does not build as the whole does."""
        check = self.check
        asked = bool(self.shown.findings or self.shown.convolutions)

        def holds(proto: onnx.ModelProto) -> bool:
            if asked:
                index = load(proto)
                index.sha256 = _PART
                if not self.shown.holds(predict_part(index, target_named(self.target))):
                    return False
            return check is None or check.holds(proto)

        if check is not None and check.loose:
            self.notes.append(Remark.EXIT_CODE_ALONE())
        moves = BYTES_FIRST if check is None else ALL
        shrinker = Shrinker(self.proto, holds, moves, limit, bounded)
        try:
            for _ in track(shrinker.steps(), "minimizing", limit):
                pass
        except KeyboardInterrupt as stop:
            if not keep_interrupted or getattr(stop, "code", INTERRUPTED) != INTERRUPTED:
                raise
            self.interrupted = True
            self.notes.append(Remark.INTERRUPTED(tries=shrinker.tried))
        if shrinker.exhausted:
            remark = Remark.STOPPED if shrinker.tried >= limit else Remark.STOPPED_EARLY
            self.notes.append(remark(tries=shrinker.tried))
        self.proto = shrinker.proto
        if not self.proto.graph.node:
            if not self.checked:
                raise QdqtoolError(
                    said(
                        "nothing is left: what is predicted there depends on no node; leave out "
                        "{`minimize`}"
                    ),
                    code="nothing-left",
                    parameter="minimize",
                )
            raise QdqtoolError(
                said(
                    "{checked}, for a model without nodes as well: that does not depend on the model; "
                    "give a check that comes out otherwise when the fault is gone, or a text that it "
                    "prints ({`says`})",
                    checked=self.checked,
                ),
                code="check-ignores-model",
                parameter="builder" if self.built else "check",
            )
        if self.between:
            self.why = said("what counts of {why}", why=self.why)

    # Finishing ---------------------------------------------------------------------------------------------------

    def finish(self, private: bool) -> Extraction:
        """The result, checked once more."""
        proto, hidden = self.proto, None
        prediction = predict(proto, self.target)
        missing = self.shown.missing(prediction)
        if missing:
            raise ModelError(
                said(
                    "the extract does not show {missing:first 4 %s}; this is a defect of qdqtool, please "
                    "report it",
                    missing=lacking(missing),
                ),
                self.model.path or "model",
                code="internal",
            )
        if private:
            proto, hidden = made_private(self.model, proto, prediction)
            prediction = predict(proto, self.target)
            self.shown = hidden.shown(self.shown, prediction)
            self.why = self.why.renamed(hidden.value)
            if self.check is not None:
                self.checked = self.check.shareable.renamed(hidden.value)
            self.notes = [n.renamed(hidden.value) for n in self.notes]
        return Extraction(
            proto,
            prediction,
            self.whole,
            self.shown,
            (len(proto.graph.node), len(self.model.nodes)),
            self._kept(len(proto.graph.node)),
            self.notes,
            self.checked,
            hidden,
            self.interrupted,
        )

    def _kept(self, nodes: int) -> str:
        same = []
        if self.shown.findings:
            codes = list(dict.fromkeys(str(f.code) for f in self.shown.findings))
            same.append(
                f"the finding{'s' if len(self.shown.findings) > 1 else ''} {listed(codes)} with the same fix"
            )
        if self.shown.convolutions:
            same.append(f"the prediction of {listed([c.name for c in self.shown.convolutions], 3)}")
        if self.checked:
            same.append(
                f"{'the build' if self.built else 'the outcome of the command'} ({self.checked})"
            )
        line = f"kept {nodes} of {len(self.model.nodes)} nodes: {self.why}"
        return line + (f"; the same as in the whole: {', '.join(same)}" if same else "")


def _last(steps: Iterator[Part | None]) -> Part | None:
    found = None
    for part in steps:
        found = part if part is not None else found
    return found


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
    """Extract the part of a Q/DQ model that a finding, a node or a failing build depends on.

    Args:
        model: Path, bytes, ModelProto, or an onnx-graphsurgeon Graph. It is not changed.
        keep_interrupted: Whether Ctrl-C while shrinking returns the smallest model so far.
        finding: ``CODE`` or ``CODE:n`` (the n-th of that code, from 1, in the order of
            ``predict``), or several. With `node`: those at that node.
        node: Name of a node whose prediction stays.
        hops: Number of nodes around `node`. Default: as many as its prediction needs.
        inputs: Tensors at which the part begins. Default: the network's inputs.
        outputs: Tensors at which it ends. Default: the network's outputs.
        target: TensorRT version such as ``8.5``, ``10.3`` or ``11``, or ``rtx1.7``; or a
            :class:`qdqtool.trt.targets.Target`.
        minimize: Whether to shrink further: fewer nodes, channels and pixels, plain weights.
        builder: ``tensorrt-rtx``, ``trtexec`` or ``tensorrt``. The small model builds, fails or
            differs as the whole does. A builder or a check alone searches the whole model for
            what the build depends on, as `minimize` does.
        check: Command that exits with the same code for the small model as for the whole; see
            :class:`qdqtool.extraction.checks.CommandCheck`.
        says: Text that the command prints for the whole model and has to print for the small
            one. The exit code alone cannot distinguish errors.
        check_timeout: Seconds for one run of the command. Default: 600. On a smaller model it may
            take ten seconds more than three times the time of the whole.
        limit: Maximum number of models to try when shrinking. Default: 2000, or 400 with a
            builder or a command. Without both and without a limit, shrinking also ends after a
            minute or two.
        private: Whether to replace names, weights, scales and metadata; see
            :mod:`qdqtool.extraction.private`.

    Returns:
        The small model, its prediction, and what was kept and why. The same arguments give the
        same bytes.

    Raises:
        ModelError: The model cannot be read, or has no such finding, node or tensor.
        BuilderError: The builder is not on this machine.
        QdqtoolError: The arguments contradict each other.
    """
    shrinking = ShrinkOptions(minimize, builder, check, says, check_timeout, limit, private)
    selection = SelectionOptions(finding, node, hops, inputs, outputs)
    timeout = limits.check_seconds(check_timeout, "check_timeout")
    name = target_named(target).name
    with record_inputs() as read:  # not over the whole: shrinking reads and writes own files
        index = load(model)
    result = _extract(Job(index, name), selection, shrinking, timeout, keep_interrupted)
    result.source, result.read = index.path, read
    return result


def _extract(
    job: Job,
    selection: SelectionOptions,
    shrinking: ShrinkOptions,
    timeout: float,
    keep_interrupted: bool,
) -> Extraction:
    job.select(
        selection.findings,
        selection.node,
        selection.hops,
        selection.inputs,
        selection.outputs,
        free=shrinking.is_checked,
    )
    with ExitStack() as stack:
        if shrinking.is_checked:
            job.use(shrinking.builder, shrinking.check, shrinking.says or "", stack, timeout)
        job.keep_checked()
        if shrinking.minimize or selection.is_empty:  # what the build depends on is unknown
            bounded = shrinking.limit is None and job.check is None
            job.minimize(shrinking.tries, keep_interrupted, bounded=bounded)
        elif job.widened:
            job.notes.append(Remark.WHOLE_KEPT())
    return job.finish(shrinking.private)
