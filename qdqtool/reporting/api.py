"""``qdqtool.report``: create an HTML page about a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from qdqtool.buildlog.types import Build
from qdqtool.comparison.matching import is_same_network, match_nodes
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.ir.input_shapes import find_common_size, with_size
from qdqtool.ir.modelfile import ModelSource, load
from qdqtool.reasons.finding import Severity
from qdqtool.reporting import data, sections
from qdqtool.reporting.graphs import add_drawings
from qdqtool.reporting.nodes import ModelCollector, ReportSubject, analyze_model, choose_gpu
from qdqtool.reporting.options import ReportInputs
from qdqtool.reporting.page import render_page, require_packages
from qdqtool.timing.on_gpu import check_image_size
from qdqtool.timing.options import GpuOptions
from qdqtool.trt.targets import Target
from qdqtool.util import limits
from qdqtool.util.files import InputFiles, forbid_overwrite, record_inputs, write_text
from qdqtool.util.json_text import Json
from qdqtool.verification.api import load_build
from qdqtool.version import TOOL_VERSION

REPORT_SCHEMA = "qdqtool/report/1"


@dataclass(slots=True)
class Report:
    """An HTML page about a model.

    Attributes:
        page: Contents of the page.
        html: The page as text, without references to other files.
        output: Path to which :meth:`save` wrote the page; empty if the page was not saved.
        read: Input files, which :meth:`save` never overwrites.
    """

    page: data.PageContents
    html: str
    output: str = ""
    read: InputFiles | None = None

    def __repr__(self) -> str:
        output = f", {self.output}" if self.output else ""
        return f"Report({limits.format_bytes(len(self.html.encode()))}{output})"

    @property
    def ok(self) -> bool:
        """Whether no finding is a warning or an error, and the build (if given) agrees."""
        quiet = all(f.severity == Severity.INFO for f in self.page.model.findings)
        return quiet and (self.page.agreement is None or self.page.agreement.ok)

    def summary(self) -> Json:
        """Return the counts of the model's prediction."""
        return dict(self.page.model.counts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page, atomically.

        Raises:
            QdqtoolError: ``path`` is an input, its folder is missing, or it cannot be written.
        """
        with forbid_overwrite(self.read):
            write_text(path, self.html)
        self.output = os.fspath(path)

    def as_json(self) -> Json:
        """Return the summary that ``--format json`` prints."""
        page = self.page
        return {
            "schema": REPORT_SCHEMA,
            "tool": TOOL_VERSION,
            "output": self.output,
            "bytes": len(self.html.encode()),
            "model": page.model.path,
            "before": page.before.path if page.before else None,
            "target": page.model.rules,
            "compute_capabilities": list(page.model.compute_capabilities),
            "summary": page.model.counts,
            "verdict": page.model.verdict,
            "drawn": {"onnx": len(page.model.onnx.boxes), "engine": len(page.model.engine.boxes)},
            "histograms": len(page.histograms),
            "tuning": page.tuning is not None,
            "agreement": page.agreement.verdict if page.agreement else None,
            "gpu": page.model.time.gpu if page.model.time else None,
        }


def report(
    model: ModelSource | Model,
    *builds: str | os.PathLike[str] | Build,
    before: ModelSource | Model | None = None,
    calib_cache: str | os.PathLike[str] | None = None,
    tuning: str | os.PathLike[str] | None = None,
    target: str | Target | None = None,
    gpu: str | None = None,
    clock: float | None = None,
    power: str | None = None,
    assume: Mapping[str, str] | None = None,
    size: tuple[int, int] | None = None,
) -> Report:
    """Create one HTML page about a model: verdict, graphs, tables, plots.

    Args:
        model: The Q/DQ model, or a float model.
        builds: Files of one build of the model: a log, a layer JSON, a profile. The prediction is
            made for the build's TensorRT version and compared with the build.
        before: Another model to compare with: the float model (``--float``), or an earlier version.
        calib_cache: Calibration cache of ``insert``. The page then shows histograms, and the range
            that each calibration method would choose.
        tuning: JSON of ``qdqtool tune``. The page then shows the Pareto front.
        target: TensorRT version to predict for. Default: the version of the build. Default without
            a build: ``trt10``.
        gpu: GPU to estimate times for; see ``qdqtool gpus``. Default: the GPU that the build names.
        clock: SM clock in MHz under load.
        power: Power mode of a Jetson, such as ``15W`` or ``MAXN``, without a build; see ``qdqtool
            gpus NAME``.
        assume: Outcome of fusions that TensorRT decides by timing: ``{"silu-add": "fused"}``
            or ``"apart"``.
        size: Height and width in pixels if they are dynamic in the models. Default: the size that
            one of the models records, else 640x640.

    Raises:
        DataError: `before`, `calib_cache` or `tuning` belongs to another network, or one of the two
            files cannot be read.
        QdqtoolError: jinja2 or fast-sugiyama is missing, a file cannot be used, or the page is
            too large.
    """
    gpu_options = GpuOptions(gpu, clock, power)
    inputs = ReportInputs(before, calib_cache, tuning, target, gpu_options, assume, size)
    with record_inputs() as read:
        require_packages()
        page = collect(model, *builds, inputs=inputs)
        html = render_page(page)
    bytes_in_page = len(html.encode())
    limits.check_size(
        bytes_in_page, limits.REPORT, f"{page.model.path or 'the model'}: its report takes"
    )
    return Report(page, html, read=read)


def collect(
    model: ModelSource | Model, *builds: str | os.PathLike[str] | Build, inputs: ReportInputs
) -> data.PageContents:
    """Analyze a model and return the contents of the page; see :func:`report`.

    Args:
        model: The Q/DQ model, or a float model.
        builds: Files of one build of the model.
        inputs: Further input files and options.

    Raises:
        QdqtoolError: As for :func:`report`.
    """
    options = inputs.gpu
    if options.clock is not None and options.gpu is None and not builds:
        raise QdqtoolError(
            "`clock` needs a GPU; give `gpu` as well", code="missing-argument", parameter="gpu"
        )
    build = load_build(builds) if builds else None
    gpu = choose_gpu(build, options)
    models = [load(m) for m in (model, inputs.before) if m is not None]
    check_image_size(inputs.size, *models)
    size = inputs.size or find_common_size(*models)
    models = [with_size(m, size) for m in models]
    subject = analyze_model(models[0], inputs, gpu, build)
    collector = ModelCollector(subject, "model" if inputs.before is None else "after")
    page = data.PageContents(TOOL_VERSION, _collect_model(collector))
    sections.add_weights(collector)
    before = None
    if inputs.before is not None:
        before = analyze_model(models[1], inputs, gpu, None, subject.target)
        _check_same_network(before, subject)
        page.before = _collect_model(ModelCollector(before, "before"))
        _add_earlier_outcomes(page.model, page.before)
    page.groups = sections.collect_scale_groups(collector, before)
    page.parts = sections.collect_time_parts(subject, before)
    page.parts_note = sections.explain_time_parts(subject, page.parts)
    page.unlisted = sections.collect_unlisted_rows(subject)
    page.roof = sections.collect_roofline(subject)
    page.agreement = sections.collect_agreement(collector)
    if inputs.calib_cache is not None:
        page.histograms, page.calibration = sections.read_histograms(inputs.calib_cache, collector)
    if inputs.tuning is not None:
        page.tuning = sections.read_tuning(inputs.tuning, subject.model)
    return page


def _collect_model(collector: ModelCollector) -> data.ModelContents:
    contents = collector.collect()
    contents.time = sections.collect_time(collector.subject)
    add_drawings(collector)
    return contents


def _check_same_network(before: ReportSubject, after: ReportSubject) -> None:
    """Raise an error, as ``compare`` does, unless two models are versions of one network.

    Raises:
        DataError: The networks differ.
    """
    matching = match_nodes(before.view, after.view)
    if not is_same_network(before.view, after.view, matching):
        raise DataError(
            f"is another network: only {matching.likeness:.0%} of its layers match layers of "
            f"{after.model.path or 'the model'}. Give a version of the same network, such as the "
            "model without Q/DQ",
            before.model.path or "the model before",
            code="different-models",
            parameter="before",
        )


def _add_earlier_outcomes(model: data.ModelContents, before: data.ModelContents) -> None:
    """Copy the outcomes of convolutions and the times of their layers from another model.

    Convolutions are matched by name. The outcome is ``missing`` if the other model has no such
    convolution.
    """
    convs = {conv.name: conv for conv in before.convs}
    for conv in model.convs:
        earlier = convs.get(conv.name)
        if earlier is None:
            conv.before = "missing"
            continue
        conv.before = f"{earlier.precision} → {earlier.output}"
        if conv.layer >= 0 and earlier.layer >= 0:
            model.layers[conv.layer].before_ms = before.layers[earlier.layer].ms
