"""Collection of tensor statistics in one pass of onnxruntime over calibration data."""

from __future__ import annotations

import contextlib
import operator
import os
import time
import warnings
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.arrays import CalibrationSource, open_data
from calibration.cache import CalibrationProgress, Statistics, load_progress, save_progress
from calibration.counting import SampleCounter, ThreadPass, make_counting_semaphore
from calibration.dataset import Dataset
from calibration.focus import Focus
from calibration.listing import file_digest
from calibration.options import YOLO_PREPROCESS, DaskCluster, ImageFunction, Preprocess
from calibration.session import (
    check_tensors,
    choose_size,
    external_folder,
    input_specs,
    open_session,
    sample_bytes,
    worker_count,
)
from calibration.statistics import DEFAULT_BINS, histogram_bytes
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import ModelSource, load
from qdqtool.ir.sizes import find_linear_inputs
from qdqtool.proto.external_data import is_external, read_location
from qdqtool.runtime.sessions import core_count
from qdqtool.util.files import check_output
from qdqtool.util.notes import Note
from qdqtool.util.progress import track_progress
from qdqtool.util.text import format_count

if TYPE_CHECKING:
    from calibration.cluster_pass import ClusterPass

SAVE_SECONDS = 5.0


def collect(
    model: ModelSource | Model,
    data: CalibrationSource,
    tensors: Sequence[str],
    *,
    bins: int = DEFAULT_BINS,
    progress: bool = True,
    focus: Focus | None = None,
    preprocess: Preprocess | str | ImageFunction = YOLO_PREPROCESS,
    max_images: int = 512,
    size: tuple[int, int] | None = None,
    cache: str | os.PathLike[str] | None = None,
    overwrite_cache: bool = False,
    cluster: DaskCluster | None = None,
    mixed_cpus: bool = False,
) -> Statistics:
    """Collect statistics of tensors over calibration data, in one pass.

    The required memory does not depend on the number of images: onnxruntime returns only the
    tensors in `tensors`, and each thread holds one sample at a time.

    Args:
        model: A path, serialized bytes, a ModelProto or a Model.
        data: Calibration data, see :func:`calibration.arrays.open_data`, or a Dataset.
        tensors: Names of activations or graph inputs.
        bins: Resolution of the histograms, a power of two; see
            :class:`calibration.statistics.TensorStatistics`.
        progress: Whether to draw a progress bar if stderr is a terminal.
        focus: Class outputs of a detector. Activations of four dimensions then also have statistics
            over the positions in focus.
        preprocess: Conversion of images to inputs, by name (:data:`calibration.PRESETS`), as a
            :class:`Preprocess`, or as a function from an RGB image of Pillow to the input; arrays
            are used as they are.
        max_images: Maximum number of images or rows, spread evenly over the data.
        size: Height and width in pixels for a model with dynamic image size. Default: the ``imgsz``
            in the model's metadata.
        cache: File that stores the statistics. The file is written every few seconds and at the
            end. A later call resumes an interrupted pass, and reuses a finished pass if model, data
            and tensors are the same. ``notes`` of the result describe the use of the cache.
        overwrite_cache: Whether to replace a cache of another model or of other data. Otherwise
            such a cache is an error.
        cluster: Workers that run the network: address of a Dask scheduler, ``local:N`` for N
            processes on this machine, or a ``distributed.Client``. Default: this process. Without
            `mixed_cpus`, all choices give equal results, bit for bit.
        mixed_cpus: Whether to allow workers whose results differ in the last bits.

    Raises:
        ModelError: The model cannot be run, has no such tensor, or has a loop that takes too long.
        DataError: The data or the cache cannot be used, or a tensor is never finite.
        ClusterError: The cluster cannot be reached, or a worker has other software or hardware.
    """
    if cluster is not None:
        from calibration.cluster.connection import check_cluster

        check_cluster(cluster)
    bins = operator.index(bins)
    loaded = load(model)
    names = list(dict.fromkeys(tensors))
    check_tensors(loaded, [*names, *(focus.scores if focus else ())])
    dataset = open_data(
        data, input_specs(loaded), preprocess, max_images, choose_size(loaded, size)
    )
    dataset.forget()
    calibration = _Calibration(
        loaded,
        dataset,
        names,
        bins,
        None if cache is None else Path(cache),
        focus,
        overwrite_cache,
        cluster,
        mixed_cpus,
    )
    statistics = calibration.run(progress)
    statistics.preprocessing = dataset.source.preprocessing
    for note in dataset.folder_notes:
        (statistics.warnings if note.values["evaluation"] else statistics.notes).append(note)
    _check_finite(statistics, names, loaded)
    return statistics


def _check_finite(statistics: Statistics, names: Sequence[str], model: Model) -> None:
    """Warn about each tensor with some NaN or infinite values.

    Raises:
        DataError: A tensor has no finite value.
    """
    broken_inputs = [n for n in names if n in model.inputs and statistics[n].nonfinite]
    for name in names:
        part = statistics[name]
        if not part.nonfinite:
            continue
        if not part.count:
            raise _nonfinite_error(name, statistics, broken_inputs, model)
        total = part.count + part.nonfinite
        statistics.warnings.append(
            Note(
                f"tensor '{name}': {part.nonfinite} of {total} values are NaN or infinite and do "
                "not count; check the model and the preprocessing",
                code="nonfinite-tensor",
                tensor=name,
                nonfinite=part.nonfinite,
                total=total,
            )
        )


def _nonfinite_error(
    name: str, statistics: Statistics, broken_inputs: list[str], model: Model
) -> DataError:
    if broken_inputs and broken_inputs[0] != name:
        source = broken_inputs[0]
        return DataError(
            f"the calibration data has {statistics[source].nonfinite} values that are NaN or "
            f"infinite for input '{source}', so tensor '{name}' is never finite; check the data "
            "and the preprocessing",
            code="not-finite",
            parameter="data",
            node=source,
        )
    kind, checked = ("input", "data") if name in model.inputs else ("tensor", "weights")
    return DataError(
        f"{kind} '{name}' is NaN or infinite for every sample; check the {checked} and the "
        "preprocessing",
        model.path or "model",
        code="not-finite",
        node=name,
    )


class CacheMismatch(StrEnum):
    """Reason why a cache cannot be used for a calibration."""

    MODEL = "it was made for another model"
    DATA = "it was made from other data or with other preprocessing"
    BINS = "it has another number of bins"

    @property
    def code(self) -> str:
        """Code of the error for this reason; see :class:`qdqtool.errors.QdqtoolError`."""
        return (
            "different-models" if self is CacheMismatch.MODEL else f"different-{self.name.lower()}"
        )


@dataclass
class _Calibration:
    """One call of :func:`collect`: read the cache, run the pass, and write the cache."""

    model: Model
    dataset: Dataset
    names: list[str]
    bins: int
    cache: Path | None
    focus: Focus | None
    overwrite: bool
    cluster: DaskCluster | None
    mixed_cpus: bool
    key: str = ""
    notes: list[Note] = field(default_factory=list)
    #: Statistics and samples of an interrupted pass.
    resumed: Statistics = field(default_factory=lambda: Statistics({}))
    done: set[int] = field(default_factory=set)
    #: Tensors of a finished pass over the same data.
    finished: Statistics = field(default_factory=lambda: Statistics({}))

    def run(self, progress: bool) -> Statistics:
        names = self.names
        if self.cache is not None:
            check_output(self.cache)
            self.key = _model_key(self.model, self.focus)
            statistics = self._read_cache(self.cache)
            if statistics is not None:
                return statistics
            names = [name for name in names if name not in self.finished]
        with warnings.catch_warnings():
            # Pillow warns about unusual files. Broken images are counted and reported instead.
            warnings.filterwarnings("ignore", module="PIL")
            statistics = self._run_pass(names, progress)
        skipped = sorted(self.dataset.skipped)
        if not statistics.images and skipped:
            name, reason = skipped[0]
            images = (
                "the only image" if len(skipped) == 1 else f"the first of {len(skipped)} images"
            )
            raise DataError(
                f"{self._explain_list_file()}none of the images could be read; {images}, {name}: "
                f"{reason}",
                code="file-damaged",
                parameter="data",
            )
        if not statistics.images:
            raise DataError(
                "the calibration data holds no samples; give at least one image or array",
                code="empty",
                parameter="data",
            )
        return statistics

    def _explain_list_file(self) -> str:
        """Return the beginning of an error message about a list of images; empty for other data."""
        path = getattr(self.dataset.source, "list_file", None)
        return "" if path is None else f"{path} was read as a list of image paths, one per line: "

    # Cache

    def _read_cache(self, cache: Path) -> Statistics | None:
        """Return the cached statistics if the pass is finished and has all tensors, else None.

        Add a note on the use of the cache. Prepare to resume an interrupted pass, or to keep the
        tensors of a finished pass.

        Raises:
            DataError: The cache belongs to another calibration.
        """
        if not self.dataset.fingerprint:
            reason = "cannot be reused, because data from an iterator cannot be identified later"
            self._add_note(f"{cache}: {reason}", "not-reused")
        if not cache.exists():
            return None
        progress = load_progress(cache)
        mismatch = self._find_mismatch(progress)
        if mismatch is None:
            return self._use_cache(cache, progress)
        both_iterators = not (progress.statistics.fingerprint or self.dataset.fingerprint)
        if not self.overwrite and not (both_iterators and progress.model == self.key):
            raise DataError(
                f"{mismatch}; give another name, or `overwrite_cache` to replace it",
                str(cache),
                code=mismatch.code,
                parameter="cache",
            )
        self._add_note(
            f"{cache}: not used, because {mismatch}; calibrating again", "not-used", why=mismatch
        )
        return None

    def _use_cache(self, cache: Path, progress: CalibrationProgress) -> Statistics | None:
        """Return the statistics of a matching cache, or prepare to reuse a part of the cache.

        See :meth:`_read_cache`.
        """
        old = progress.statistics
        missing = [name for name in self.names if name not in old]
        if progress.is_complete and missing:
            self.finished = old
            text = f"reused, except for {format_count(len(missing), 'tensor')} that it lacks"
            self._add_note(f"{cache}: {text}", "reused-in-part", missing=len(missing))
            return None
        if missing:
            text = f"not used, because it is incomplete and lacks '{missing[0]}'; calibrating again"
            self._add_note(f"{cache}: {text}", "unfinished", tensor=missing[0])
            return None
        statistics = Statistics(
            {name: old[name] for name in self.names},
            images=old.images,
            fingerprint=old.fingerprint,
            warnings=old.warnings,
            skipped=old.skipped,
        )
        if progress.is_complete:
            text = f"reused ({old.images} images, same model and data); nothing was run"
            self._add_note(f"{cache}: {text}", "reused", images=old.images)
            statistics.notes = list(self.notes)
            return statistics
        self.resumed = Statistics(statistics.tensors, images=old.images, skipped=old.skipped)
        self.done = progress.done
        self.dataset.quality = progress.quality
        self.dataset.skipped.extend(old.skipped)
        self._add_note(f"{cache}: resumed after {old.images} images", "resumed", images=old.images)
        return None

    def _add_note(self, text: str, code: str, **values: object) -> None:
        self.notes.append(Note(text, code=code, cache=self.cache, **values))

    def _find_mismatch(self, progress: CalibrationProgress) -> CacheMismatch | None:
        statistics = progress.statistics
        if not self.key or progress.model != self.key:
            return CacheMismatch.MODEL
        if not self.dataset.fingerprint or statistics.fingerprint != self.dataset.fingerprint:
            return CacheMismatch.DATA
        if any(part.bins != self.bins for part in statistics.values()):
            return CacheMismatch.BINS
        return None

    def _save_progress(
        self, counted: Statistics, done: Set[int], finished: bool = False
    ) -> Statistics:
        """Merge this pass with earlier statistics, write the cache, and return the result.

        Args:
            counted: Statistics of this pass.
            done: Numbers of the samples of this pass.
            finished: Whether no samples remain.
        """
        dataset = self.dataset
        result = self.resumed.merge(counted)
        result.tensors = {**self.finished.tensors, **result.tensors}
        result.fingerprint = dataset.fingerprint
        result.warnings = list(dataset.warnings)
        result.skipped = sorted(dataset.skipped)
        result.notes = list(self.notes)
        if self.cache is not None and result.images:
            done = self.done | done
            total = len(done) if finished else None
            quality = replace(dataset.quality)
            save_progress(CalibrationProgress(self.key, result, done, total, quality), self.cache)
        result.tensors = {name: result.tensors[name] for name in self.names}
        return result

    # Pass

    def _run_pass(self, names: list[str], progress: bool) -> Statistics:
        # A pass that only adds tensors to a finished cache is saved only at its end: a cache cannot
        # store that only some of its tensors are incomplete.
        saves_progress = self.cache is not None and not len(self.finished)
        with contextlib.ExitStack() as stack:
            running = self._start_pass(names, stack)
            results = running.results()
            numbers: Iterable[int] = results
            if progress:
                has_length = self.dataset.indices is not None
                left = len(self.dataset) - len(self.done) if has_length else None
                numbers = track_progress(results, "Calibrating", total=left)
            saved = time.monotonic()
            try:
                for _ in numbers:
                    if saves_progress and time.monotonic() - saved > SAVE_SECONDS:
                        self._save_progress(*running.snapshot())
                        saved = time.monotonic()
            except BaseException:
                results.close()
                counted, done = running.snapshot()
                if saves_progress and done:
                    with contextlib.suppress(QdqtoolError):  # the first error is raised below
                        self._save_progress(counted, done)
                raise
            return self._save_progress(*running.snapshot(), finished=True)

    def _start_pass(
        self, names: list[str], stack: contextlib.ExitStack
    ) -> ThreadPass | ClusterPass:
        """Return a pass over the remaining samples, by threads or by a cluster.

        Args:
            names: Tensors to count.
            stack: Closes the connection to the cluster.
        """
        scores = self.focus.scores if self.focus else ()
        computed = [n for n in dict.fromkeys([*names, *scores]) if n not in self.model.inputs]
        if self.cluster is not None:
            from calibration.cluster.connection import connect
            from calibration.cluster_pass import ClusterPass

            cluster = stack.enter_context(connect(self.cluster, self.mixed_cpus))
            return ClusterPass(
                cluster,
                self.model,
                self.dataset,
                self.done,
                names,
                computed,
                self.bins,
                self.focus,
            )
        count = 1
        if self.dataset.source.random_access:
            fetched = sample_bytes(self.model, computed)
            count = worker_count(fetched, core_count(), histogram_bytes(len(names), self.bins))
        threads = max(1, core_count() // count)
        session = open_session(self.model, computed, threads) if computed else None
        samples = None if self.dataset.indices is None else len(self.dataset)
        by_channel = find_linear_inputs(self.model)
        turns = make_counting_semaphore(count)
        counters = [
            SampleCounter(
                session, names, self.bins, self.focus, threads, samples, by_channel, turns
            )
            for _ in range(count)
        ]
        return ThreadPass(self.dataset.tasks(self.done), counters)


def _model_key(model: Model, focus: Focus | None) -> str:
    """Return a text that identifies a model, its external weights and the focus.

    The text is empty if the model has no hash (a model of more than 2 GB in memory).
    """
    folder = external_folder(model)
    if not model.sha256:
        return ""
    key = model.sha256
    if folder:
        initializers = model.proto.graph.initializer
        files = {read_location(t) for t in initializers if is_external(t)}
        key += "".join(file_digest(Path(folder) / file).hex() for file in sorted(files))
    if focus:
        key += f" {focus.threshold:g} {focus.share:g} {' '.join(focus.scores)}"
    return key
