"""One pass of onnxruntime over the data, collecting statistics of the wanted tensors."""

from __future__ import annotations

import contextlib
import operator
import os
import time
import warnings
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.arrays import open_data
from calibration.cache import Progress, Statistics, load_progress, save_progress
from calibration.counting import SampleCounter, ThreadPass, counting_turns
from calibration.dataset import DataQuality, Dataset
from calibration.focus import Focus
from calibration.listing import file_digest
from calibration.options import YOLO_PREPROCESS, Preprocess
from calibration.session import (
    check_tensors,
    external_folder,
    input_specs,
    metadata_size,
    open_session,
    sample_bytes,
    worker_count,
)
from calibration.statistics import DEFAULT_BINS, histogram_bytes
from qdqtool.errors import DataError, QdqtoolError
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import ModelSource, load
from qdqtool.ir.sizes import linear_inputs
from qdqtool.proto.external_data import location_of
from qdqtool.runtime.run_cost import check_loops
from qdqtool.runtime.sessions import core_count
from qdqtool.util.files import check_output
from qdqtool.util.notes import Note, Remark
from qdqtool.util.progress import track
from qdqtool.util.said import said

if TYPE_CHECKING:
    from calibration.clustered import ClusterPass

SAVE_SECONDS = 5.0


def collect(
    model: ModelSource | Model,
    data: object,
    tensors: Sequence[str],
    *,
    bins: int = DEFAULT_BINS,
    progress: bool = True,
    focus: Focus | None = None,
    preprocess: Preprocess = YOLO_PREPROCESS,
    max_images: int = 512,
    size: tuple[int, int] | None = None,
    cache: str | os.PathLike[str] | None = None,
    overwrite_cache: bool = False,
    cluster: object = None,
    mixed_cpus: bool = False,
) -> Statistics:
    """Collect statistics of tensors over calibration data, in one pass.

    Only the wanted tensors leave onnxruntime, and only one sample for each worker thread is held at a time, so that
    memory does not depend on the number of images.

    Args:
        model: A path, serialized bytes, a ModelProto or a Model.
        data: What :func:`calibration.arrays.open_data` takes, or a Dataset.
        tensors: Names of activations or graph inputs.
        bins: Resolution of the histograms, a power of two; see :class:`calibration.statistics.TensorStatistics`.
        progress: Draw a progress bar when stderr is a terminal.
        focus: Which tensors show where the network looks; the wanted tensors that are maps then get ``focus``
            statistics over these positions as well.
        preprocess: How images become inputs; arrays are used as they are.
        max_images: Maximum number of samples, spread_indices evenly over the data.
        size: Height and width in pixels if the model leaves them open. Default: its ``imgsz``
            metadata.
        cache: File that keeps the statistics. It is saved every few seconds and at the end,
            resumed after an interruption, and reused if model, data and tensors are the same.
            ``notes`` of the result says what was done.
        overwrite_cache: Whether a cache of another model or of other data is replaced. Otherwise
            it is an error.
        cluster: Workers that run the network: address of a Dask scheduler, ``local:N`` for N
            processes on this machine, or a ``distributed.Client``. Default: this process. The
            result is the same, bit for bit.
        mixed_cpus: Whether workers are allowed whose results may differ in the last bits.

    Raises:
        ModelError: The model cannot be run, has no such tensor, or a loop of which one run would not end.
        DataError: The data or the cache cannot be used, or a tensor is never finite.
        ClusterError: The cluster cannot be reached, or is not fit for the work.
    """
    if cluster is not None:
        from calibration.cluster.mapping import check_where

        check_where(cluster)
    bins = operator.index(bins)
    loaded = load(model)
    names = list(dict.fromkeys(tensors))
    check_loops(loaded)
    check_tensors(loaded, [*names, *(focus.scores if focus else ())])
    size = size or metadata_size(loaded)
    dataset = open_data(data, input_specs(loaded), preprocess, max_images, size)
    dataset.forget()
    job = _Job(
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
    return _checked(job.run(progress), names, loaded)


def _checked(statistics: Statistics, names: Sequence[str], model: Model) -> Statistics:
    broken = next((n for n in names if n in model.inputs and statistics[n].nonfinite), "")
    for name in names:
        part = statistics[name]
        if part.nonfinite and not part.count:
            if broken and name != broken:
                raise DataError(
                    f"the calibration data has {statistics[broken].nonfinite} values that are NaN or infinite in input "
                    f"'{broken}', so that tensor '{name}' never is finite; check the data and the preprocessing",
                    code="not-finite",
                    parameter="data",
                    node=broken,
                )
            raise DataError(
                f"tensor '{name}' is NaN or infinite for every input; check the weights and the "
                "preprocessing",
                model.path or "model",
                code="not-finite",
                node=name,
            )
        if part.nonfinite:
            total = part.count + part.nonfinite
            statistics.warnings.append(
                Remark.NONFINITE_TENSOR(tensor=name, nonfinite=part.nonfinite, total=total)
            )
    return statistics


class Mismatch(StrEnum):
    """Why a cache does not fit a calibration."""

    MODEL = "it was made for another model"
    DATA = "it was made from other data or with other preprocessing"
    BINS = "it has another number of bins"

    @property
    def code(self) -> str:
        """See :attr:`qdqtool.errors.QdqtoolError.code`."""
        return "different-models" if self is Mismatch.MODEL else f"different-{self.name.lower()}"


@dataclass
class _Job:
    """One call of collect: what the cache has already, the workers, and the saving."""

    model: Model
    dataset: Dataset
    names: list[str]
    bins: int
    cache: Path | None
    focus: Focus | None
    overwrite: bool
    where: object  # the cluster, where there is one
    mixed_cpus: bool
    key: str = ""
    notes: list[Note] = field(default_factory=list)
    before: Statistics = field(default_factory=lambda: Statistics({}))  # from an interrupted pass
    kept: Statistics = field(
        default_factory=lambda: Statistics({})
    )  # tensors that a finished pass had already
    done: set[int] = field(default_factory=set)
    seen: tuple[int, ...] | None = None  # the cache as this job knows it

    def run(self, progress: bool) -> Statistics:
        wanted = self.names
        if self.cache is not None:
            check_output(self.cache)
            self.key = _model_key(self.model, self.focus)
            finished = self._from_cache()
            if finished is not None:
                return finished
            wanted = [n for n in self.names if n not in self.kept]
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", module="PIL"
            )  # its remarks on odd files; broken ones are counted
            statistics = self._pass(wanted, progress)
        skipped = sorted(self.dataset.skipped)
        if not statistics.images and skipped:
            name, reason = skipped[0]
            raise DataError(
                f"none of the {len(skipped)} images could be read; the first, {name}: {reason}",
                code="file-damaged",
                parameter="data",
            )
        if not statistics.images:
            raise DataError("the calibration data holds no samples", code="empty", parameter="data")
        return statistics

    def _from_cache(self) -> Statistics | None:
        """What the cache offers: everything, a part to go on from, or nothing; notes say which."""
        assert self.cache is not None
        if not self.dataset.fingerprint:
            self.notes.append(Remark.NOT_REUSED(cache=self.cache))
        if not self.cache.exists():
            return None
        self.seen = _identity(self.cache)
        found = load_progress(self.cache)
        reason = self._mismatch(found)
        if reason:
            of_iterator = (
                not (found.statistics.fingerprint or self.dataset.fingerprint)
                and found.model == self.key
            )
            if not self.overwrite and not of_iterator:
                raise DataError(
                    said(
                        "{reason}; give another name, or {`overwrite_cache`} to replace it",
                        reason=reason,
                    ),
                    str(self.cache),
                    code=reason.code,
                    parameter="cache",
                )
            self.notes.append(Remark.NOT_USED(cache=self.cache, why=reason))
            return None
        missing = [n for n in self.names if n not in found.statistics]
        old = found.statistics
        if found.complete and not missing:
            self.notes.append(Remark.REUSED(cache=self.cache, images=old.images))
            return Statistics(
                {n: old[n] for n in self.names},
                images=old.images,
                fingerprint=old.fingerprint,
                warnings=old.warnings,
                skipped=old.skipped,
                notes=self.notes,
            )
        if found.complete:
            self.kept = old
            self.notes.append(Remark.REUSED_IN_PART(cache=self.cache, missing=len(missing)))
        elif missing:
            self.notes.append(Remark.UNFINISHED(cache=self.cache, tensor=missing[0]))
        else:
            self.before = Statistics(
                {n: old[n] for n in self.names}, images=old.images, skipped=old.skipped
            )
            self.done = found.done
            self.dataset.quality = found.quality
            self.dataset.skipped.extend(old.skipped)
            self.notes.append(Remark.RESUMED(cache=self.cache, images=old.images))
        return None

    def _mismatch(self, found: Progress) -> Mismatch | None:
        if not self.key or found.model != self.key:
            return Mismatch.MODEL
        if not self.dataset.fingerprint or found.statistics.fingerprint != self.dataset.fingerprint:
            return Mismatch.DATA
        return (
            Mismatch.BINS if any(p.bins != self.bins for p in found.statistics.values()) else None
        )

    def _check_own(self, cache: Path) -> None:
        """Another process may have written the cache since; one that is not of this calibration is not replaced.

        Raises:
            DataError: It is of another model or of other data.
        """
        now = _identity(cache)
        if now is None or now == self.seen or self.overwrite:
            return
        reason = self._mismatch(load_progress(cache))
        if reason:
            raise DataError(
                f"another process has written it, and {reason}; give another name",
                str(cache),
                code=reason.code,
                parameter="cache",
            )

    def _pass(self, wanted: list[str], progress: bool) -> Statistics:
        with contextlib.ExitStack() as stack:
            running = self._begun(wanted, stack)
            left = len(self.dataset) - len(self.done) if self.dataset.indices is not None else None
            saved = time.monotonic()
            results = running.results()
            try:
                for _ in track(results, "Calibrating", total=left) if progress else results:
                    if (
                        self.cache is not None
                        and not len(self.kept)
                        and time.monotonic() - saved > SAVE_SECONDS
                    ):
                        self._save(*running.snapshot())
                        saved = time.monotonic()
            except BaseException:
                results.close()
                counted, done = running.snapshot()
                if self.cache is not None and not len(self.kept) and done:
                    with contextlib.suppress(QdqtoolError):  # the first error is the one to report
                        self._save(counted, done)
                raise
            return self._save(*running.snapshot(), finished=True)

    def _begun(self, wanted: list[str], stack: contextlib.ExitStack) -> ThreadPass | ClusterPass:
        """A pass over the samples that are left; what it opens is closed with the stack."""
        scores = self.focus.scores if self.focus else ()
        computed = [n for n in dict.fromkeys([*wanted, *scores]) if n not in self.model.inputs]
        if self.where is not None:
            from calibration.cluster.mapping import Cluster
            from calibration.clustered import ClusterPass

            cluster = stack.enter_context(Cluster(self.where, self.mixed_cpus))
            return ClusterPass(
                cluster,
                self.model,
                self.dataset,
                self.done,
                wanted,
                computed,
                self.bins,
                self.focus,
            )
        count = 1
        if self.dataset.source.random_access:
            count = worker_count(
                sample_bytes(self.model, computed),
                core_count(),
                histogram_bytes(len(wanted), self.bins),
            )
        threads = max(1, core_count() // count)
        session = open_session(self.model, computed, threads) if computed else None
        samples = None if self.dataset.indices is None else len(self.dataset)
        by_channel = linear_inputs(self.model)
        turn = counting_turns(count)
        counters = [
            SampleCounter(
                session, wanted, self.bins, self.focus, threads, samples, by_channel, turn
            )
            for _ in range(count)
        ]
        return ThreadPass(self.dataset.tasks(self.done), counters)

    def _save(self, counted: Statistics, done: Set[int], finished: bool = False) -> Statistics:
        result = self.before.merge(counted)
        done = self.done | done
        tensors = {**self.kept.tensors, **result.tensors}
        dataset = self.dataset
        everything = Statistics(
            tensors,
            images=result.images,
            fingerprint=dataset.fingerprint,
            warnings=dataset.warnings,
            skipped=sorted(dataset.skipped),
            notes=self.notes,
        )
        if self.cache is not None and everything.images:
            total = len(done) if finished else None
            self._check_own(self.cache)
            save_progress(
                Progress(self.key, everything, done, total, DataQuality(**vars(dataset.quality))),
                self.cache,
            )
            self.seen = _identity(self.cache)
        everything.tensors = {n: tensors[n] for n in self.names}
        return everything


def _identity(path: Path) -> tuple[int, ...] | None:
    """What shows whether a file was replaced; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _model_key(model: Model, focus: Focus | None) -> str:
    """Identifies a model with its external weights and focus; empty where it is not known (over 2 GB in memory)."""
    folder = external_folder(model)
    if not model.sha256:
        return ""
    looked = f" {focus.threshold:g} {focus.share:g} {' '.join(focus.scores)}" if focus else ""
    if not folder:
        return model.sha256 + looked
    from onnx import external_data_helper

    files = sorted(
        {
            location_of(t)
            for t in model.proto.graph.initializer
            if external_data_helper.uses_external_data(t)
        }
    )
    return model.sha256 + "".join(file_digest(Path(folder) / f).hex() for f in files) + looked
