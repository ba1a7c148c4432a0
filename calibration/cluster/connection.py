"""Connections to Dask schedulers, and worker processes on this machine."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.resource_tracker
import re
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qdqtool.errors import ClusterError
from qdqtool.runtime.sessions import core_count
from qdqtool.util.limits import PROCESSES
from qdqtool.util.process import pause_gc
from qdqtool.util.subprocesses import temporary_folder

if TYPE_CHECKING:
    from distributed import Client


CONNECT_SECONDS = 15.0
_MAX_PROCESSES = 1024
# By default, Dask's workers return freed memory at once, which costs 20 % of the time with large
# arrays, and profile their stacks a hundred times a second. These settings switch both off.
_LOCAL_CONFIG = {
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 1 << 27,
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 1 << 25,
    "distributed.worker.profile.enabled": False,
    # Dask starts web servers even without a dashboard. Without routes, they serve no page.
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "5s",
}
_LOCAL = re.compile(r"local(?::(\d{1,4}))?")
_ADDRESS = re.compile(r"(?:[a-z]+://)?[^\s/]+:\d{1,5}/?|[a-z]+://\S+")
_LOGGERS = ("distributed", "tornado", "asyncio")


def check_cluster(cluster: Any) -> None:
    """Check the user's cluster argument, without connecting to the cluster.

    Args:
        cluster: Address of a scheduler, ``local:N``, or a `distributed.Client`.

    Raises:
        ClusterError: `cluster` is not a valid address or number of processes, or Dask is not
            installed.
    """
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise cluster_error(
            f"`cluster` needs Dask: pip install 'qdqtool[cluster]' ({error})", "missing-package"
        ) from None
    if not isinstance(cluster, str):
        return
    local = _LOCAL.fullmatch(cluster)
    if local is None and not _ADDRESS.fullmatch(cluster):
        raise cluster_error(
            f"`cluster={cluster}`: give the address of a scheduler, such as tcp://host:8786, or "
            "local:N for N processes",
            "invalid-address",
        )
    if local is not None and local[1] is not None and not 1 <= int(local[1]) <= _MAX_PROCESSES:
        raise cluster_error(
            f"`cluster={cluster}`: give a number of processes from 1 to {_MAX_PROCESSES}",
            "out-of-range",
        )


def cluster_error(reason: str, code: str) -> ClusterError:
    """Return an error about the `cluster` argument."""
    return ClusterError(reason, code=code, parameter="cluster")


@dataclass(frozen=True)
class Cluster:
    """Connection to a Dask scheduler.

    Attributes:
        client: Dask's client.
        mixed_cpus: Whether to allow workers whose results differ in the last bits.
    """

    client: Client
    mixed_cpus: bool = False

    def threads(self) -> int:
        """Return the number of threads of all connected workers."""
        return int(sum(self.client.nthreads().values()))


@contextlib.contextmanager
def connect(cluster: Any, mixed_cpus: bool = False) -> Iterator[Cluster]:
    """Yield a connection to a Dask scheduler; at the end, close it and stop started workers.

    A client that the user gives remains open.

    Args:
        cluster: See :func:`check_cluster`.
        mixed_cpus: Whether to allow workers whose results differ in the last bits.

    Raises:
        ClusterError: The scheduler cannot be reached, or the processes cannot be started.
    """
    check_cluster(cluster)
    from distributed import Client

    if not isinstance(cluster, str):
        yield Cluster(cluster, mixed_cpus)
        return
    local = _LOCAL.fullmatch(cluster)
    # Dask warns about different versions. `worker_facts` checks all versions that matter.
    with _silence_logs(), warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        address, security = cluster, None
        try:
            if local is not None:
                count = int(local[1]) if local[1] else core_count()
                address, security = stack.enter_context(_start_workers(count))
            # Python's garbage collector closes clients that earlier failures left open. Closing
            # waits forever if Dask holds its lock at that time.
            with pause_gc():
                client = Client(
                    address,
                    timeout=CONNECT_SECONDS,
                    set_as_default=False,
                    name="qdqtool",
                    security=security,
                )
        except ClusterError:
            raise
        except Exception as error:  # invalid Dask settings in the environment raise any class
            raise _connection_error(cluster, local is not None, error) from None
        try:
            yield Cluster(client, mixed_cpus)
        finally:
            with contextlib.suppress(Exception), pause_gc():
                client.close(timeout=5)


def _connection_error(cluster: str, is_local: bool, error: Exception) -> ClusterError:
    reason = _describe_error(error)
    if is_local:
        return cluster_error(
            f"`cluster={cluster}`: cannot start worker processes on this machine ({reason}); check "
            "Dask's settings, such as DASK_... in the environment",
            "not-started",
        )
    return cluster_error(
        f"`cluster={cluster}`: no scheduler answers at this address ({reason}); start one with "
        "`dask scheduler`",
        "connection",
    )


@contextlib.contextmanager
def _start_workers(count: int) -> Iterator[Any]:
    """Start worker processes of one thread each; yield the cluster and its TLS credentials.

    A process that connects to a worker can run programs there, and other users of the machine can
    reach the worker's port. TLS with temporary certificates admits only this process. The workers
    write files into a temporary folder.
    """
    import dask
    from distributed import LocalCluster, Security

    try:
        security = Security.temporary()
    except ImportError as error:
        raise cluster_error(
            f"`cluster=local:N` needs cryptography: pip install 'qdqtool[cluster]' ({error})",
            "missing-package",
        ) from None
    with temporary_folder("cluster-") as folder:
        settings = {
            **_LOCAL_CONFIG,
            "temporary-directory": folder,
            f"distributed.nanny.environ.{PROCESSES}": str(count),
        }
        with dask.config.set(settings), contextlib.ExitStack() as stack:
            with _block_interrupts(), pause_gc():
                cluster = LocalCluster(
                    n_workers=count,
                    threads_per_worker=1,
                    processes=True,
                    host="127.0.0.1",
                    dashboard_address=None,
                    scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
                    # Without an address for its dashboard, a worker listens on all networks.
                    worker_dashboard_address="127.0.0.1:0",
                    silence_logs=logging.CRITICAL,
                    local_directory=folder,
                    security=security,
                    protocol="tls://",
                )
                stack.callback(cluster.close, timeout=20)
            yield cluster, security


def _describe_error(error: BaseException) -> str:
    text = " ".join((str(error) or type(error).__name__).split())[:200]
    return text if error.__cause__ is None else f"{text} {_describe_error(error.__cause__)}"


@contextlib.contextmanager
def _block_interrupts() -> Iterator[None]:
    """Block Ctrl-C (SIGINT) for the threads and processes that start in the context.

    A terminal sends SIGINT to all foreground processes. The workers would print tracebacks and end
    before this process cancels their work.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Starting multiprocessing's resource tracker unblocks SIGINT, so the tracker is started first.
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _silence_logs() -> Iterator[None]:
    """Silence Dask's log in the context, because this package's errors name the causes."""
    names = {*_LOGGERS, *logging.root.manager.loggerDict}
    loggers = [logging.getLogger(n) for n in names if n.partition(".")[0] in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
