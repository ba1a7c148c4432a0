"""Jobs on the workers of a Dask scheduler."""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from calibration.cluster.connection import Cluster, cluster_error
from qdqtool.errors import ClusterError, QdqtoolError
from qdqtool.util.text import format_reason

if TYPE_CHECKING:
    from distributed import Client, Future

    from calibration.cluster.worker import Factory, ItemFunction

AHEAD = 2  # number of items per thread that are sent to the cluster in advance
WATCH_SECONDS = 2.0  # time between two checks of the workers
WORKERLESS_SECONDS = 120.0  # a cluster without workers for this time is an error


class ClusterJob:
    """Runs a function on many items, on all workers of a cluster.

    As a context manager, it sends a payload to each worker at the start, and removes the job from
    the cluster at the end. Workers import the functions, so these must be functions of a module.

    Args:
        cluster: Connection to the workers.
        factory: Creates the state of the job from the payload, once in each worker process.
        payload: Data for all workers, in a form that Dask can send.
        function: Function that runs on the workers for each item. It should end early if the event
            among its arguments is set.

    Attributes:
        slots: Number of threads of all workers at the last check.
    """

    def __init__(
        self, cluster: Cluster, factory: Factory, payload: Any, function: ItemFunction
    ) -> None:
        self.cluster, self.client = cluster, cluster.client
        self.factory, self.payload, self.function = factory, payload, function
        self.name = f"qdqtool-{uuid.uuid4().hex}"
        self.slots = 1
        self._numbers = itertools.count()

    def __enter__(self) -> ClusterJob:
        from calibration.cluster.worker import JobPlugin, worker_facts

        facts, mixed_cpus = worker_facts(), self.cluster.mixed_cpus
        plugin = JobPlugin(self.name, self.factory, self.payload, facts, mixed_cpus)
        self.payload = None
        with contextlib.ExitStack() as stack:
            stack.callback(self._remove)
            try:
                self.client.register_plugin(plugin, name=self.name)
                self.slots = self.cluster.threads()
            except Exception as error:  # a worker with a broken installation may raise any class
                raise cluster_error(
                    f"the cluster cannot start the work ({format_reason(error)}); install the same "
                    "version of qdqtool on the scheduler and on each worker, and check their logs",
                    "connection",
                ) from error
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def results(self, items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield each item with its result as soon as a worker finishes it.

        Free workers receive the next item. If a worker dies, Dask gives its item to another worker.
        Each result is yielded once.

        Raises:
            ClusterError: The scheduler or all workers are lost, or several workers died while they
                worked on one item.
            QdqtoolError: The function failed on an item.
        """
        source = iter(items)
        waiting: dict[Any, tuple[Future, Any]] = {}
        finished: queue.SimpleQueue[Future] = queue.SimpleQueue()
        try:
            while True:
                free = max(0, AHEAD * max(self.slots, 1) - len(waiting))
                for item in itertools.islice(source, free):
                    future = self._submit(item)
                    waiting[future.key] = future, item
                    future.add_done_callback(finished.put)
                if not waiting:
                    return
                future = self._wait(finished)
                item = waiting[future.key][1]
                result = self._fetch(future, item)
                del waiting[future.key]
                future.release()
                yield item, result
        finally:
            if waiting and self.client.status == "running":
                with contextlib.suppress(Exception):
                    self.client.cancel([future for future, _ in waiting.values()], force=True)

    def _submit(self, item: Any) -> Future:
        from calibration.cluster.worker import run_item

        key = (self.name, next(self._numbers))
        with _translate_connection_errors(self.client):
            return self.client.submit(run_item, self.name, self.function, item, key=key, pure=False)

    def _wait(self, finished: queue.SimpleQueue[Future]) -> Future:
        """Wait for a finished item, and update the number of threads of the cluster.

        Raises:
            ClusterError: The scheduler is lost, or the cluster has had no workers for 120 s.
        """
        workers_seen = time.monotonic()
        while True:
            with _translate_connection_errors(self.client):
                self.slots = self.cluster.threads()
            if self.slots:
                workers_seen = time.monotonic()
            elif time.monotonic() - workers_seen > WORKERLESS_SECONDS:
                raise cluster_error(
                    f"the cluster has had no worker for {WORKERLESS_SECONDS:.0f} s; start workers "
                    "with `dask worker ADDRESS`, and check the logs of the previous workers",
                    "no-workers",
                )
            with contextlib.suppress(queue.Empty):
                return finished.get(timeout=WATCH_SECONDS)

    def _fetch(self, future: Future, item: Any) -> Any:
        from distributed import CancelledError, KilledWorker

        try:
            with _translate_connection_errors(self.client):
                return future.result(timeout=WORKERLESS_SECONDS)
        except QdqtoolError:
            raise
        except KilledWorker as error:
            worker = error.last_worker.address if error.last_worker else "a worker"
            raise cluster_error(
                f"several workers, {worker} last, died while they worked on {item}; give the "
                "workers more memory, or check their logs",
                "crashed",
            ) from None
        except CancelledError as error:
            raise _lost_connection(format_reason(error)) from None
        except Exception as error:  # a worker with a broken installation may raise any class
            raise cluster_error(
                f"a cluster worker failed on {item} ({type(error).__name__}: "
                f"{format_reason(error, 300)}); check the installation and the logs of the workers",
                "worker-failed",
            ) from error

    def _remove(self) -> None:
        """Remove the payload from the workers; items that run there end early."""
        if self.client.status == "running":
            with contextlib.suppress(Exception):
                self.client.unregister_worker_plugin(self.name)


@contextlib.contextmanager
def _translate_connection_errors(client: Client) -> Iterator[None]:
    """Raise a ClusterError in place of Dask's errors of a lost connection."""
    if client.status != "running":
        raise _lost_connection(f"the client is {client.status}")
    try:
        yield
    except OSError as error:  # base class of Dask's communication errors and timeouts
        raise _lost_connection(format_reason(error)) from None


def _lost_connection(reason: str) -> ClusterError:
    return cluster_error(
        f"the connection to the cluster's scheduler was lost ({reason}); restart the scheduler "
        "and run again",
        "connection",
    )
