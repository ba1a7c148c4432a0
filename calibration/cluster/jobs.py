"""Jobs on the workers of a Dask scheduler."""

from __future__ import annotations

import contextlib
import queue
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from calibration.cluster.connection import Cluster, require_qdqtool
from qdqtool.errors import ClusterError, QdqtoolError

if TYPE_CHECKING:
    from distributed import Future

AHEAD = 2  # number of items per thread that are sent to the cluster in advance
WATCH_SECONDS = 2.0  # time between two checks of the workers
WORKERLESS_SECONDS = 120.0  # a cluster without workers for this time is an error
_FETCH_SECONDS = 30.0
_LOST = "the connection to the cluster's scheduler was lost; restart the scheduler and run again"
_END = object()


class ClusterJob:
    """Runs a function on many items, on all workers of a cluster.

    As a context manager, it sends a payload to each worker at the start, and removes the job from
    the cluster at the end.

    Args:
        cluster: Connection to the workers.
        factory: ``module:function`` that creates the state from the payload, once in each worker
            process; see :data:`calibration.cluster.worker.Factory`.
        payload: Data for all workers, in a form that Dask can send.
        function: ``module:function`` that is called as ``function(state, item, stopped)`` for each
            item. The function should end early if the event ``stopped`` is set.

    Attributes:
        slots: Number of threads of all workers at the last check.
    """

    def __init__(self, cluster: Cluster, factory: str, payload: Any, function: str) -> None:
        self.cluster, self.client = cluster, cluster.client
        self.factory, self.payload, self.function = factory, payload, function
        self.name = f"qdqtool-{uuid.uuid4().hex}"
        self.slots = 1
        self._submitted = 0
        self._waiting: dict[Any, tuple[Future, Any]] = {}
        self._finished: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._workers_seen = self._checked = time.monotonic()

    def __enter__(self) -> ClusterJob:
        try:
            self._distribute_payload()
        except BaseException as error:
            self._clean_up()
            if isinstance(error, OSError):
                raise _connection_error(
                    f"the cluster does not answer ({' '.join(str(error).split())[:150]}); check "
                    "the logs of the workers, which may have run out of memory"
                ) from None
            raise
        self.payload = None
        return self

    def __exit__(self, *_: object) -> None:
        self._clean_up()

    def _distribute_payload(self) -> None:
        """Send the payload to the workers.

        Raises:
            ClusterError: A worker has other software or hardware than the client.
            OSError: A worker does not answer.
        """
        from calibration.cluster.worker import JobPlugin, find_rejection, worker_facts

        require_qdqtool(self.client)
        facts, mixed_cpus = worker_facts(), self.cluster.mixed_cpus
        plugin = JobPlugin(self.name, self.factory, self.payload, facts, mixed_cpus)
        self.client.register_plugin(plugin, name=self.name)
        for address, rejection in sorted(self.client.run(find_rejection, self.name).items()):
            if rejection:
                raise ClusterError(
                    f"cluster worker {address} {rejection}",
                    code="worker-mismatch",
                    parameter="cluster",
                )
        self.slots = sum(self.client.nthreads().values())

    def results(self, items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield each item with its result as soon as a worker finishes it.

        Free workers receive the next item. If a worker dies, another worker repeats its item. Each
        result is yielded once.

        Raises:
            ClusterError: The scheduler or all workers are lost, or an item made several workers
                die.
            QdqtoolError: The function failed on an item.
        """
        source = iter(items)
        exhausted = False
        try:
            while not exhausted or self._waiting:
                while not exhausted and len(self._waiting) < AHEAD * max(self.slots, 1):
                    item = next(source, _END)
                    if item is _END:
                        exhausted = True
                    else:
                        with self._connection_errors():
                            self._submit(item)
                result = self._next_result() if self._waiting else None
                if result is not None:
                    yield result
        finally:
            self._cancel_waiting()

    def _next_result(self) -> tuple[Any, Any] | None:
        """Wait up to 2 s for a finished item; return the item and its result, else None."""
        try:
            future = self._finished.get(timeout=WATCH_SECONDS)
        except queue.Empty:
            self._check_workers()
            return None
        if time.monotonic() - self._checked > WATCH_SECONDS:
            self._check_workers()
        waiting, item = self._waiting.get(future.key, (None, None))
        if waiting is not future:  # cancelled
            return None
        try:
            result = self._fetch(future, item)
        except TimeoutError:
            self._finished.put(future)
            return None
        del self._waiting[future.key]
        future.release()
        return item, result

    def _submit(self, item: Any) -> None:
        from calibration.cluster.worker import run_item

        key = (self.name, self._submitted)
        self._submitted += 1
        future = self.client.submit(run_item, self.name, self.function, item, key=key, pure=False)
        self._waiting[future.key] = future, item
        future.add_done_callback(self._finished.put)

    def _fetch(self, future: Future, item: Any) -> Any:
        from distributed import CancelledError, KilledWorker

        try:
            return future.result(timeout=_FETCH_SECONDS)
        except (QdqtoolError, TimeoutError):
            raise
        except KilledWorker as error:
            worker = error.last_worker.address if error.last_worker else "a worker"
            raise ClusterError(
                f"{worker} and other workers before it died while working on {item}; give the "
                "workers more memory, or check their logs",
                code="crashed",
                parameter="cluster",
            ) from None
        except CancelledError:
            raise _connection_error(_LOST) from None
        except Exception as error:  # a worker with a broken installation may raise any class
            message = " ".join(str(error).split())[:300]
            raise ClusterError(
                f"a cluster worker failed on {item}: {type(error).__name__}: {message}",
                code="worker-failed",
                parameter="cluster",
            ) from error

    def _check_workers(self) -> None:
        """Update the number of threads of the cluster.

        Raises:
            ClusterError: The scheduler is lost, or the cluster has had no workers for 120 s.
        """
        self._checked = time.monotonic()
        with self._connection_errors():
            self.slots = sum(self.client.nthreads().values())
        if self.slots:
            self._workers_seen = self._checked
        elif self._checked - self._workers_seen > WORKERLESS_SECONDS:
            raise ClusterError(
                f"the cluster has had no worker for {WORKERLESS_SECONDS:.0f} s; start workers with "
                "`dask worker ADDRESS`, and check the logs of the previous workers",
                code="no-workers",
                parameter="cluster",
            )

    @contextlib.contextmanager
    def _connection_errors(self) -> Iterator[None]:
        """Raise a ClusterError in place of Dask's errors of a lost connection."""
        if self.client.status != "running":
            raise _connection_error(_LOST)
        try:
            yield
        except OSError as error:  # base class of Dask's communication errors and timeouts
            raise _connection_error(
                f"the cluster's scheduler no longer answers: {error}; restart it and run again"
            ) from None

    def _cancel_waiting(self) -> None:
        futures = [future for future, _ in self._waiting.values()]
        self._waiting.clear()
        if futures and self.client.status == "running":
            with contextlib.suppress(Exception):
                self.client.cancel(futures, force=True)

    def _clean_up(self) -> None:
        """Cancel unfinished items, and remove the payload from the workers."""
        self._cancel_waiting()
        if self.client.status == "running":
            with contextlib.suppress(Exception):
                self.client.unregister_worker_plugin(self.name)


def _connection_error(reason: str) -> ClusterError:
    return ClusterError(reason, code="connection", parameter="cluster")
