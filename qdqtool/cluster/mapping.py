"""Pieces of work sent to the workers of a scheduler, a bounded number at a time, each result given back once."""

from __future__ import annotations

import contextlib
import queue
import time
import uuid
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from qdqtool.cluster.connection import connected, require_qdqtool
from qdqtool.errors import ClusterError, QdqtoolError

if TYPE_CHECKING:
    from distributed import Client, Future

AHEAD = 2  # pieces for each thread of the cluster that are sent before results are there
WATCH_SECONDS = 2.0
WORKERLESS_SECONDS = 120.0
_FETCH_SECONDS = 30.0
_ATTEMPTS, _AGAIN_SECONDS = 3, 3.0  # to hand out the shared part


class Cluster(contextlib.ExitStack):
    """A scheduler whose workers are fit for the work. A context manager: it closes what it opened.

    Attributes:
        client: Dask's client.
        mixed_cpus: Whether processors that compute other last bits are permitted.
    """

    def __init__(self, where: object, mixed_cpus: bool = False) -> None:
        """Opens it.

        Args:
            where: A scheduler's address, ``local:N`` or a ``distributed.Client``.
            mixed_cpus: Whether processors that compute other last bits are permitted.

        Raises:
            ClusterError: The scheduler cannot be reached.
        """
        super().__init__()
        self.mixed_cpus = mixed_cpus
        self.client: Client = self.enter_context(connected(where))

    def threads(self) -> int:
        """Threads of all workers there are now, at least 1."""
        return max(1, int(sum(self.client.nthreads().values())))


class Job:
    """Pieces of work that share a part, which each worker gets once. A context manager: it leaves nothing behind.

    Attributes:
        slots: Threads of all workers, as last seen.
    """

    def __init__(self, cluster: Cluster, factory: str, payload: Any, function: str) -> None:
        """Prepares it; nothing is sent yet.

        Args:
            cluster: Where to work.
            factory: ``module:function`` that makes the state from the payload, once for each worker process; see
                :data:`qdqtool.cluster.worker.Factory`.
            payload: The shared part: what Dask can send.
            function: ``module:function`` called as ``function(state, item, stopped)`` for each piece; it ends early
                when the event ``stopped`` is set.
        """
        self.cluster = cluster
        self.client = cluster.client
        self.factory = factory
        self.payload = payload
        self.function = function
        self.name = f"qdqtool-{uuid.uuid4().hex}"
        self.slots = 1
        self._submitted = 0
        self._waiting: dict[Any, tuple[Future, Any]] = {}
        self._arrived: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._last_worker = time.monotonic()
        self._looked = 0.0

    def __enter__(self) -> Job:
        for attempt in range(_ATTEMPTS):
            try:
                self._hand_out()
                break
            except OSError as error:  # a worker that ends while it is asked breaks the answers of all
                self._clean()
                if attempt + 1 == _ATTEMPTS or self.client.status != "running":
                    raise ClusterError(f"the cluster does not answer ({' '.join(str(error).split())[:150]}); where "
                                       "workers end, as for want of memory, their logs tell why") from None
                self.name = f"qdqtool-{uuid.uuid4().hex}"
                time.sleep(_AGAIN_SECONDS)
            except BaseException:
                self._clean()
                raise
        self.payload = None
        return self

    def _hand_out(self) -> None:
        """Brings the shared part to the workers.

        Raises:
            ClusterError: One may not take part.
            OSError: One does not answer.
        """
        from qdqtool.cluster.worker import Carrier, facts, refusals

        require_qdqtool(self.client)
        carrier = Carrier(self.name, self.factory, self.payload, facts(), self.cluster.mixed_cpus)
        self.client.register_plugin(carrier, name=self.name)
        for address, refusal in sorted(self.client.run(refusals, self.name).items()):
            if refusal:
                raise ClusterError(f"cluster worker {address} {refusal}")
        self.slots = sum(self.client.nthreads().values())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clean()

    def results(self, items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Each item with its result, as they are done; items are taken as workers become free.

        A piece whose worker dies is worked on again by another; its result still comes once.

        Raises:
            ClusterError: The scheduler or all workers are gone, or a piece kills every worker that takes it.
            QdqtoolError: What a piece of work raised.
        """
        source = iter(items)
        more = True
        try:
            while more or self._waiting:
                while more and len(self._waiting) < AHEAD * max(self.slots, 1):
                    item = next(source, _END)
                    if item is _END:
                        more = False
                        break
                    with self._reached():
                        self._submit(item)
                found = self._next() if self._waiting else None
                if found is not None:
                    yield found
        finally:
            self._take_back()

    def _next(self) -> tuple[Any, Any] | None:
        """An item and its result; None where none came for a while."""
        try:
            future = self._arrived.get(timeout=WATCH_SECONDS)
        except queue.Empty:
            self._look()
            return None
        if time.monotonic() - self._looked > WATCH_SECONDS:
            self._look()
        found = self._waiting.get(future.key)
        if found is None or found[0] is not future:  # taken back
            return None
        try:
            result = self._fetched(future, found[1])
        except TimeoutError:
            self._arrived.put(future)
            return None
        del self._waiting[future.key]
        future.release()
        return found[1], result

    def _submit(self, item: Any) -> None:
        from qdqtool.cluster.worker import perform

        key = (self.name, self._submitted)
        self._submitted += 1
        future = self.client.submit(perform, self.name, self.function, item, key=key, pure=False)
        self._waiting[future.key] = future, item
        future.add_done_callback(self._arrived.put)

    def _fetched(self, future: Future, item: Any) -> Any:
        from distributed import CancelledError, KilledWorker

        try:
            return future.result(timeout=_FETCH_SECONDS)
        except (QdqtoolError, TimeoutError):
            raise
        except KilledWorker as error:
            raise ClusterError(
                f"{error.last_worker.address if error.last_worker else 'a worker'} and others before it died while "
                f"working on {item}: give the workers more memory, or look into their logs"
            ) from None
        except CancelledError:
            raise ClusterError("the connection to the cluster's scheduler was lost; start it again and run again"
                               ) from None
        except Exception as error:  # whatever a worker's machine does not have, or lets go wrong
            told = " ".join(str(error).split())[:300]
            raise ClusterError(f"a cluster worker failed on {item}: {type(error).__name__}: {told}") from error

    def _look(self) -> None:
        """How many threads there are now.

        Raises:
            ClusterError: The scheduler is gone, or there have been no workers for long.
        """
        self._looked = time.monotonic()
        with self._reached():
            self.slots = sum(self.client.nthreads().values())
        if self.slots:
            self._last_worker = self._looked
        elif self._looked - self._last_worker > WORKERLESS_SECONDS:
            raise ClusterError(f"the cluster has had no worker for {WORKERLESS_SECONDS:.0f} s; start some with "
                               "`dask worker ADDRESS`, and look into the logs of those that ended")

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        if self.client.status != "running":
            raise ClusterError("the connection to the cluster's scheduler was lost; start it again and run again")
        try:
            yield
        except OSError as error:  # of Dask's communication; all timeouts are among them
            raise ClusterError(f"the cluster's scheduler does not answer any more: {error}") from None

    def _take_back(self) -> None:
        """Takes back what is not done."""
        waiting = [future for future, _ in self._waiting.values()]
        self._waiting.clear()
        if waiting and self.client.status == "running":
            with contextlib.suppress(Exception):
                self.client.cancel(waiting, force=True)

    def _clean(self) -> None:
        """Takes back what is not done, and the shared part from the workers."""
        self._take_back()
        if self.client.status == "running":
            with contextlib.suppress(Exception):
                self.client.unregister_worker_plugin(self.name)


_END = object()
