"""``qdqtool.extract``: the smallest model that still shows it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from qdqtool.base import budgets
from qdqtool.base.parameters import typed
from qdqtool.errors import QdqtoolError
from qdqtool.extraction.job import Job
from qdqtool.extraction.result import Extraction
from qdqtool.io.files import watch
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import ModelSource, load
from qdqtool.trt.targets import DEFAULT_TARGET, Target, target_named

TRIES = 2000  # predictions
BUILDS = 400  # builds or runs of the user's command


@typed
def extract(
    model: ModelSource | Model,
    *,
    finding: str | Sequence[str] | None = None,
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
    private: bool = False,
    limit: int | None = None,
    keep_interrupted: bool = False,
) -> Extraction:
    """Cuts the part out of a Q/DQ model that a finding, a node or a failing build depends on.

    Args:
        model: Path, bytes, ModelProto, or an onnx-graphsurgeon Graph. It is not changed.
        finding: ``CODE`` or ``CODE:n`` (the n-th of that code, from 1, in the order of ``predict``), or several; with
            ``node`` those at that node.
        node: Name of a node: what is predicted of it stays.
        hops: Take this many nodes around ``node`` instead of as many as its prediction needs.
        inputs: Tensors where the part begins (default: the network's inputs).
        outputs: Tensors where it ends (default: the network's outputs).
        target: As for :func:`qdqtool.predict`.
        minimize: Shrink further: fewer nodes, channels, pixels, and plain weights.
        builder: ``tensorrt-rtx``, ``trtexec`` or ``tensorrt``: stay with what builds, fails or differs as the whole;
            alone, or a check alone, it searches the whole model for what the build depends on, as ``minimize`` does.
        check: A command: stay with what it exits for with the same code as for the whole; see
            :class:`qdqtool.extraction.checks.CommandCheck`.
        says: A text that the command prints of the whole model and has to print of the part; the exit code alone
            cannot distinguish one error from another.
        check_timeout: Seconds that one run of the command may take; 600 by default.
        private: Replace names, weights, scales and metadata; see :mod:`qdqtool.extraction.private`.
        limit: The most models to try when shrinking (default 2000; 400 with a builder or a command).
        keep_interrupted: Whether Ctrl-C while shrinking ends that, and the smallest model found by then is returned.

    Returns:
        The small model, its prediction, and what was kept and why. The same arguments give the same bytes.

    Raises:
        ModelError: The model cannot be read, or has no such finding, node or tensor.
        BuilderError: The builder is not here.
        QdqtoolError: The arguments do not go together.
    """
    if builder is not None and check is not None:
        raise QdqtoolError("give a builder or a check, not both")
    timeout = budgets.seconds(check_timeout, "check_timeout")
    tries = limit if limit is not None else (BUILDS if builder or check else TRIES)
    if tries < 1 or (hops is not None and hops < 0):
        raise QdqtoolError("limit is at least 1, hops at least 0")
    if not (finding or node or inputs or outputs):
        minimize = True  # whatever the build depends on: that has to be found
    findings = [finding] if isinstance(finding, str) else list(finding or ())
    given = [*findings, *inputs, *outputs, *(x for x in (node, check, says) if x is not None)]
    if says is not None and check is None:
        raise QdqtoolError("`says` is what a `check` prints; give that as well")
    if not all(text.strip() for text in given):
        raise QdqtoolError("a name or command is empty; leave the option out, or say what it is")
    name = target_named(target).name
    with watch() as guard:  # not over the whole: shrinking writes and reads files of its own
        index = load(model)
    job = Job(index, name)
    job.select(findings, node, hops, inputs, outputs, free=bool(builder or check))
    with ExitStack() as stack:
        if builder or check:
            job.use(builder, check, says or "", stack, timeout)
        job.keep_checked()
        if minimize:
            job.minimize(tries, keep_interrupted)
        elif job.widened:
            job.notes.append("the part alone does not build as the whole does; the whole is kept: use `minimize`")
    result = job.finish(private)
    result.source, result.read = index.path, guard
    return result
