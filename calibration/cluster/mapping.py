"""Pieces of work on the workers of a Dask scheduler, each result given back once.

The scheduler is one that runs already, a client of the caller's, or processes of this machine.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import logging
import multiprocessing.resource_tracker
import queue
import re
import signal
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from qdqtool.errors import ClusterError, QdqtoolError
from qdqtool.runtime.sessions import core_count
from qdqtool.util.limits import PROCESSES
from qdqtool.util.process import pause_gc
from qdqtool.util.said import said
from qdqtool.util.subprocesses import temporary_folder

if TYPE_CHECKING:
    from distributed import Client, Future, LocalCluster


CONNECT_SECONDS = 15.0
START_SECONDS = 60.0
# Dask has its workers give freed memory back at once, which costs a fifth of the time where large arrays come and go,
# and watches what they do a hundred times a second.
_LOCAL_CONFIG = {
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 1 << 27,
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 1 << 25,
    "distributed.worker.profile.enabled": False,
    # Its web servers begin without dashboards too; these then have no page.
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "5s",
}
_LOCAL = re.compile(r"local(?::(\d{1,4}))?")
_ADDRESS = re.compile(r"(?:[a-z]+://)?[^\s/]+:\d{1,5}/?|[a-z]+://\S+")


def check_where(where: object) -> None:
    """Refuses what cannot be a cluster, before any work is done.

    Raises:
        ClusterError: It is no address of a scheduler, ``local:N`` or ``distributed.Client``, or Dask is not installed.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise ClusterError(
            said(
                "{`cluster`} needs Dask: pip install 'qdqtool[cluster]' ({error})", error=str(error)
            ),
            code="missing-package",
            parameter="cluster",
        ) from None
    if isinstance(where, Client):
        if where.asynchronous:
            raise ClusterError(
                said(
                    "{`cluster`} takes a client that is not asynchronous; open it with Client(...) "
                    "alone"
                ),
                code="client-asynchronous",
                parameter="cluster",
            )
        if where.status != "running":
            raise ClusterError(
                said("{`cluster`} is a client that is closed; open it again"),
                code="client-closed",
                parameter="cluster",
            )
        return
    if not isinstance(where, str):
        raise ClusterError(
            said(
                "{`cluster`} takes an address or a distributed.Client, not a {name}",
                name=type(where).__name__,
            ),
            code="wrong-type",
            parameter="cluster",
        )
    local = _LOCAL.fullmatch(where)
    if local is None and not _ADDRESS.fullmatch(where):
        raise ClusterError(
            said(
                "{`cluster`:{where}}: give the address of a scheduler, such as tcp://host:8786, or "
                "local:N for N processes",
                where=where,
            ),
            code="invalid-address",
            parameter="cluster",
        )
    if local is not None and local[1] is not None and not 1 <= int(local[1]) <= 1024:
        raise ClusterError(
            said("{`cluster`:{where}}: from 1 to 1024 processes are possible", where=where),
            code="out-of-range",
            parameter="cluster",
        )


@contextlib.contextmanager
def connected(where: object) -> Iterator[Client]:
    """A client of the scheduler; one that was made here is closed at the end, with what was started here.

    Raises:
        ClusterError: The scheduler cannot be reached, or the processes cannot be started.
    """
    check_where(where)
    from distributed import Client

    if isinstance(where, Client):
        yield where
        return
    assert isinstance(where, str)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter(
            "ignore"
        )  # of other versions of what does not matter; what does is reported by `facts`
        local = _LOCAL.fullmatch(where)
        address: Any
        address, security = (
            (where, None) if local is None else stack.enter_context(_processes(local[1]))
        )
        try:
            # One that failed before is closed when it is collected: for ever, where that is while Dask holds its lock.
            with pause_gc():
                client = Client(
                    address,
                    timeout=CONNECT_SECONDS,
                    set_as_default=False,
                    name="qdqtool",
                    security=security,
                )
        except Exception as error:  # settings of Dask in the environment bring any
            raise ClusterError(
                said(
                    "{`cluster`:{where}}: no scheduler can be reached there; start one with `dask "
                    "scheduler` ({reason})",
                    where=where,
                    reason=_reason(error),
                ),
                code="connection",
                parameter="cluster",
            ) from None
        try:
            yield client
        finally:
            with contextlib.suppress(Exception), pause_gc():
                client.close(timeout=5)


@contextlib.contextmanager
def _processes(count: str | None) -> Iterator[Any]:
    """Workers of one thread each on this machine, with what they write in a folder that goes with them.

    Other users of the machine reach its ports, and whoever may connect to a worker runs programs on it: certificates
    that this process makes for itself admit nobody else. There are no web pages: they ask for none.

    Yields the cluster, and what a client needs to connect to it.
    """
    import dask
    from distributed import LocalCluster, Security
    from distributed.gc import disable_gc_diagnosis

    wanted = int(count) if count else core_count()
    try:
        security = Security.temporary()
    except ImportError as error:
        raise ClusterError(
            said(
                "{`cluster`:local:N} needs cryptography: pip install 'qdqtool[cluster]' ({error})",
                error=str(error),
            ),
            code="missing-package",
            parameter="cluster",
        ) from None
    except Exception as error:
        raise _not_begun(wanted, error) from None
    with temporary_folder("cluster-") as folder, contextlib.ExitStack() as settings:
        settings.enter_context(
            dask.config.set(
                {
                    **_LOCAL_CONFIG,
                    "temporary-directory": folder,
                    f"distributed.nanny.environ.{PROCESSES}": str(wanted),
                }
            )
        )
        cluster = None
        try:
            try:
                with _interrupts_kept(), pause_gc():
                    cluster = LocalCluster(
                        n_workers=0,
                        threads_per_worker=1,
                        processes=True,
                        host="127.0.0.1",
                        dashboard_address=None,
                        scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
                        silence_logs=logging.CRITICAL,
                        local_directory=folder,
                        security=security,
                        protocol="tls://",
                    )
                    # Workers take an address alone as the wish for a dashboard, and without one listen to all networks.
                    cluster.new_spec["options"]["dashboard_address"] = "127.0.0.1:0"
                    # It is called while Python collects garbage, where an exception of a signal would be lost.
                    disable_gc_diagnosis(force=True)
                for _ in range(wanted):
                    cluster.worker_spec.update(cluster.new_worker_spec())
                cluster.sync(_begun, cluster, callback_timeout=START_SECONDS + wanted)
            except Exception as error:
                raise _not_begun(wanted, error) from None
            yield cluster, security
        finally:
            if cluster is not None:
                with contextlib.suppress(Exception), pause_gc():
                    cluster.close(timeout=20)


async def _begun(cluster: LocalCluster) -> None:
    """Waits for the workers; of one that ends before, its error, where ``scale`` would wait for it until the end."""
    await cluster


def _not_begun(wanted: int, error: Exception) -> ClusterError:
    return ClusterError(
        f"{wanted} worker processes cannot be started here; settings of Dask, such as DASK_..., hold for them too "
        f"({_reason(error)})",
        code="not-started",
        parameter="cluster",
    )


def _reason(error: BaseException) -> str:
    """An error of Dask in one line, and what it came of."""
    words = " ".join((str(error) or type(error).__name__).split())[:200]
    return words if error.__cause__ is None else f"{words} {_reason(error.__cause__)}"


@contextlib.contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Ctrl-C waits until the end of the block, and never reaches the threads that begin in it or their processes.

    A terminal sends it to all processes of the foreground: the workers would end, and report it at length, before this
    one can take the work back.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Started by one of those threads, multiprocessing's tracker would take the block away again.
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing of Dask's log reaches stderr: what matters of it is reported in one line of ours."""
    roots = ("distributed", "tornado", "asyncio")
    names = {*roots, *(n for n in logging.root.manager.loggerDict if n.partition(".")[0] in roots)}
    before = [(logger, logger.level) for logger in map(logging.getLogger, names)]
    for logger, _ in before:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


def require_qdqtool(client: Client) -> None:
    """Makes sure that the scheduler and every worker can import what is sent by name.

    Raises:
        ClusterError: One cannot.
    """
    # A function of the standard library: one of ours could not even be read there.
    try:
        client.run_on_scheduler(importlib.resources.files, "qdqtool")
    except ModuleNotFoundError:
        raise ClusterError(
            "the cluster's scheduler has no qdqtool, by whose names work is sent; install the same "
            "version there as here",
            code="missing-package",
            parameter="cluster",
        ) from None
    found = client.run(importlib.resources.files, "qdqtool", on_error="return")
    for address, answer in sorted(found.items()):
        if isinstance(answer, ModuleNotFoundError):
            raise ClusterError(
                f"cluster worker {address} has no qdqtool; install the same version there as here",
                code="missing-package",
                parameter="cluster",
            )
        if isinstance(answer, Exception):
            raise ClusterError(
                f"cluster worker {address} does not answer: {' '.join(str(answer).split())[:200]}",
                code="connection",
                parameter="cluster",
            )


# Work ----------------------------------------------------------------------------------------------------------------

AHEAD = 2  # pieces for each thread of the cluster that are sent before results are there
WATCH_SECONDS = 2.0
WORKERLESS_SECONDS = 120.0
_FETCH_SECONDS = 30.0
_ATTEMPTS, _AGAIN_SECONDS = 3, 3.0  # to hand out the shared part


class Cluster(contextlib.ExitStack):
    """A scheduler whose workers are fit for the work. A context manager: it closes what it opened."""

    def __init__(self, where: object, mixed_cpus: bool = False) -> None:
        """Opens it; ``mixed_cpus`` permits processors that compute other last bits.

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
    """Pieces of work that share a part, which each worker gets once. A context manager: it leaves nothing behind."""

    def __init__(self, cluster: Cluster, factory: str, payload: Any, function: str) -> None:
        """Prepares it; nothing is sent yet.

        Args:
            cluster: Where to work.
            factory: ``module:function`` that makes the state from the payload, once for each worker process; see
                :data:`calibration.cluster.worker.Factory`.
            payload: The shared part: what Dask can send.
            function: ``module:function`` called as ``function(state, item, stopped)`` for each piece; it ends early
                when the event ``stopped`` is set.
        """
        self.cluster, self.client = cluster, cluster.client
        self.factory, self.payload, self.function = factory, payload, function
        self.name = ""
        self.slots = 1  # threads of all workers, as last seen
        self._submitted = 0
        self._waiting: dict[Any, tuple[Future, Any]] = {}
        self._arrived: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._last_worker = time.monotonic()
        self._looked = 0.0

    def __enter__(self) -> Job:
        for attempt in range(_ATTEMPTS):
            self.name = f"qdqtool-{uuid.uuid4().hex}"
            try:
                self._hand_out()
                break
            except (
                OSError
            ) as error:  # a worker that ends while it is asked breaks the answers of all
                self._clean()
                if attempt + 1 == _ATTEMPTS or self.client.status != "running":
                    raise ClusterError(
                        f"the cluster does not answer ({' '.join(str(error).split())[:150]}); where "
                        "workers end, as for want of memory, their logs say why",
                        code="connection",
                        parameter="cluster",
                    ) from None
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
        from calibration.cluster.worker import Carrier, facts, refusals

        require_qdqtool(self.client)
        carrier = Carrier(self.name, self.factory, self.payload, facts(), self.cluster.mixed_cpus)
        self.client.register_plugin(carrier, name=self.name)
        for address, refusal in sorted(self.client.run(refusals, self.name).items()):
            if refusal:
                raise ClusterError(
                    said("cluster worker {address} {refusal}", address=address, refusal=refusal),
                    code="worker-mismatch",
                    parameter="cluster",
                )
        self.slots = sum(self.client.nthreads().values())

    def __exit__(self, *_: object) -> None:
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
        from calibration.cluster.worker import perform

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
                f"working on {item}: give the workers more memory, or look into their logs",
                code="crashed",
                parameter="cluster",
            ) from None
        except CancelledError:
            raise ClusterError(
                "the connection to the cluster's scheduler was lost; start it again and run again",
                code="connection",
                parameter="cluster",
            ) from None
        except Exception as error:  # whatever a worker's machine does not have, or lets go wrong
            message = " ".join(str(error).split())[:300]
            raise ClusterError(
                f"a cluster worker failed on {item}: {type(error).__name__}: {message}",
                code="worker-failed",
                parameter="cluster",
            ) from error

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
            raise ClusterError(
                f"the cluster has had no worker for {WORKERLESS_SECONDS:.0f} s; start some with "
                "`dask worker ADDRESS`, and look into the logs of those that ended",
                code="no-workers",
                parameter="cluster",
            )

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        if self.client.status != "running":
            raise ClusterError(
                "the connection to the cluster's scheduler was lost; start it again and run again",
                code="connection",
                parameter="cluster",
            )
        try:
            yield
        except OSError as error:  # of Dask's communication; all timeouts are among them
            raise ClusterError(
                f"the cluster's scheduler does not answer any more: {error}",
                code="connection",
                parameter="cluster",
            ) from None

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
