"""Connections to Dask schedulers, and worker processes on this machine."""

from __future__ import annotations

import contextlib
import importlib.resources
import logging
import multiprocessing.resource_tracker
import re
import signal
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from qdqtool.errors import ClusterError
from qdqtool.runtime.sessions import core_count
from qdqtool.util.limits import PROCESSES
from qdqtool.util.process import pause_gc
from qdqtool.util.subprocesses import temporary_folder

if TYPE_CHECKING:
    from distributed import Client, LocalCluster


CONNECT_SECONDS = 15.0
START_SECONDS = 60.0
_MAX_PROCESSES = 1024
# By default, Dask's workers return freed memory at once, which costs a fifth of the time with large
# arrays, and profile their stacks a hundred times a second. Both are switched off.
_LOCAL_CONFIG = {
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 1 << 27,
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 1 << 25,
    "distributed.worker.profile.enabled": False,
    # Web servers start even without dashboards; without routes they serve no page.
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "5s",
}
_LOCAL = re.compile(r"local(?::(\d{1,4}))?")
_ADDRESS = re.compile(r"(?:[a-z]+://)?[^\s/]+:\d{1,5}/?|[a-z]+://\S+")
_LOGGERS = ("distributed", "tornado", "asyncio")


def check_cluster(cluster: Any) -> None:
    """Check a cluster before any work is done, without connecting to it.

    Args:
        cluster: Address of a scheduler, ``local:N``, or a `distributed.Client`.

    Raises:
        ClusterError: `cluster` has another type or form, or Dask is not installed.
    """
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise _argument_error(
            f"`cluster` needs Dask: pip install 'qdqtool[cluster]' ({error})", "missing-package"
        ) from None
    if not isinstance(cluster, str):
        return
    local = _LOCAL.fullmatch(cluster)
    if local is None and not _ADDRESS.fullmatch(cluster):
        raise _argument_error(
            f"`cluster={cluster}`: give the address of a scheduler, such as tcp://host:8786, or "
            "local:N for N processes",
            "invalid-address",
        )
    if local is not None and local[1] is not None and not 1 <= int(local[1]) <= _MAX_PROCESSES:
        raise _argument_error(
            f"`cluster={cluster}`: from 1 to {_MAX_PROCESSES} processes are possible",
            "out-of-range",
        )


def _argument_error(reason: str, code: str) -> ClusterError:
    return ClusterError(reason, code=code, parameter="cluster")


class Cluster(contextlib.ExitStack):
    """Connection to a scheduler.

    A context manager that closes the clients and workers that it opened.

    Args:
        cluster: See :func:`check_cluster`.
        mixed_cpus: Whether workers are allowed whose processors compute other last bits.

    Raises:
        ClusterError: The scheduler cannot be reached.
    """

    def __init__(self, cluster: Any, mixed_cpus: bool = False) -> None:
        super().__init__()
        self.mixed_cpus = mixed_cpus
        self.client: Client = self.enter_context(connect(cluster))

    def threads(self) -> int:
        """Return the number of threads of all present workers, at least 1."""
        return max(1, int(sum(self.client.nthreads().values())))


@contextlib.contextmanager
def connect(cluster: Any) -> Iterator[Client]:
    """Yield a client of a scheduler; close it at the end, unless it is the user's.

    Args:
        cluster: See :func:`check_cluster`.

    Raises:
        ClusterError: The scheduler cannot be reached, or the processes cannot be started.
    """
    check_cluster(cluster)
    from distributed import Client

    if not isinstance(cluster, str):
        yield cluster
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_silence_logs())
        # Dask warns of different versions; `worker_facts` checks those that matter.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        address: Any = cluster
        security = None
        local = _LOCAL.fullmatch(cluster)
        if local is not None:
            count = int(local[1]) if local[1] else core_count()
            address, security = stack.enter_context(_start_workers(count))
        try:
            # The collector closes clients that failed before, and waits forever if that happens
            # while Dask holds its lock.
            with pause_gc():
                client = Client(
                    address,
                    timeout=CONNECT_SECONDS,
                    set_as_default=False,
                    name="qdqtool",
                    security=security,
                )
        except Exception as error:  # Dask's settings in the environment cause any class
            raise _argument_error(
                f"`cluster={cluster}`: no scheduler can be reached there; start one with `dask "
                f"scheduler` ({_describe_error(error)})",
                "connection",
            ) from None
        try:
            yield client
        finally:
            with contextlib.suppress(Exception), pause_gc():
                client.close(timeout=5)


@contextlib.contextmanager
def _start_workers(count: int) -> Iterator[Any]:
    """Start worker processes of one thread; yield their cluster and its credentials.

    Anyone who can connect to a worker runs programs on it, and other users of the machine reach its
    ports. Certificates of this process admit nobody else. Files of the workers are in a temporary
    folder.
    """
    import dask
    from distributed import LocalCluster, Security

    try:
        security = Security.temporary()
    except ImportError as error:
        raise _argument_error(
            f"`cluster=local:N` needs cryptography: pip install 'qdqtool[cluster]' ({error})",
            "missing-package",
        ) from None
    except Exception as error:
        raise _start_error(count, error) from None
    with temporary_folder("cluster-") as folder:
        settings = {
            **_LOCAL_CONFIG,
            "temporary-directory": folder,
            f"distributed.nanny.environ.{PROCESSES}": str(count),
        }
        cluster = None
        with dask.config.set(settings):
            try:
                with _block_interrupts(), pause_gc():
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
                    # Without an address for a dashboard, a worker listens to all networks.
                    cluster.new_spec["options"]["dashboard_address"] = "127.0.0.1:0"
                for _ in range(count):
                    cluster.worker_spec.update(cluster.new_worker_spec())
                cluster.sync(_wait_for, cluster, callback_timeout=START_SECONDS + count)
            except Exception as error:
                _close(cluster)
                raise _start_error(count, error) from None
            try:
                yield cluster, security
            finally:
                _close(cluster)


async def _wait_for(cluster: LocalCluster) -> None:
    """Wait until the workers run, or raise the error of a worker that ends.

    Dask's own `scale` would wait forever after such an error.
    """
    await cluster


def _close(cluster: LocalCluster | None) -> None:
    if cluster is not None:
        with contextlib.suppress(Exception), pause_gc():
            cluster.close(timeout=20)


def _start_error(count: int, error: Exception) -> ClusterError:
    return _argument_error(
        f"{count} worker processes cannot be started here; settings of Dask, such as DASK_..., "
        f"hold for them too ({_describe_error(error)})",
        "not-started",
    )


def _describe_error(error: BaseException) -> str:
    """Return the message of an error of Dask and of its causes, in one line."""
    text = " ".join((str(error) or type(error).__name__).split())[:200]
    return text if error.__cause__ is None else f"{text} {_describe_error(error.__cause__)}"


@contextlib.contextmanager
def _block_interrupts() -> Iterator[None]:
    """Block Ctrl-C (SIGINT) for the threads and processes that start in the context.

    A terminal sends the signal to all foreground processes. Workers would end with tracebacks
    before this process cancels their work.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # If one of those threads started multiprocessing's tracker, it would unblock the signal.
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _silence_logs() -> Iterator[None]:
    """Silence Dask's log until the context ends; this package's errors report all causes."""
    names = {*_LOGGERS, *logging.root.manager.loggerDict}
    loggers = [logging.getLogger(n) for n in names if n.partition(".")[0] in _LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def require_qdqtool(client: Client) -> None:
    """Check that the scheduler and every worker have qdqtool, because work is sent by name.

    Raises:
        ClusterError: The scheduler or a worker does not have qdqtool.
    """
    # A function of the standard library: theirs could not import one of this package.
    try:
        client.run_on_scheduler(importlib.resources.files, "qdqtool")
    except ModuleNotFoundError:
        raise _argument_error(
            "the cluster's scheduler has no qdqtool, by whose names work is sent; install the same "
            "version there as here",
            "missing-package",
        ) from None
    answers = client.run(importlib.resources.files, "qdqtool", on_error="return")
    for address, answer in sorted(answers.items()):
        if isinstance(answer, ModuleNotFoundError):
            reason = "has no qdqtool; install the same version there as here"
            raise _argument_error(f"cluster worker {address} {reason}", "missing-package")
        if isinstance(answer, Exception):
            reason = f"does not answer: {' '.join(str(answer).split())[:200]}"
            raise _argument_error(f"cluster worker {address} {reason}", "connection")
