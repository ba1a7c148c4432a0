"""A Dask scheduler to work with: one that runs already, a client of the caller's, or processes of this machine."""

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
from qdqtool.runtime import cores

if TYPE_CHECKING:
    from distributed import Client

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

    Args:
        where: A scheduler's address, ``local:N`` or a ``distributed.Client``.

    Raises:
        ClusterError: It is none of these, or Dask is not installed.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise ClusterError(f"`cluster` needs Dask: pip install 'qdqtool[cluster]' ({error})") from None
    if isinstance(where, Client):
        if where.asynchronous:
            raise ClusterError("`cluster` takes a client that is not asynchronous; open it with Client(...) alone")
        if where.status != "running":
            raise ClusterError("`cluster` is a client that is closed; open it again")
        return
    if not isinstance(where, str):
        raise ClusterError(f"`cluster` takes an address or a distributed.Client, not a {type(where).__name__}")
    local = _LOCAL.fullmatch(where)
    if local is None and not _ADDRESS.fullmatch(where):
        raise ClusterError(
            f"`cluster={where}`: give the address of a scheduler, such as tcp://host:8786, or local:N for N processes"
        )
    if local is not None and local[1] is not None and not 1 <= int(local[1]) <= 1024:
        raise ClusterError(f"`cluster={where}`: from 1 to 1024 processes are possible")


@contextlib.contextmanager
def connected(where: object) -> Iterator[Client]:
    """A client of the scheduler; one that was made here is closed at the end, with what was started here.

    Args:
        where: See :func:`check_where`.

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
        warnings.simplefilter("ignore")  # of other versions of what does not matter; what does is told by `facts`
        local = _LOCAL.fullmatch(where)
        address: Any = where
        if local is not None:
            address, security = stack.enter_context(_processes(local[1]))
        else:
            security = None  # as Dask's configuration says
        try:
            client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False, name="qdqtool", security=security)
        except (OSError, ValueError, ImportError, TimeoutError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ClusterError(
                f"`cluster={where}`: no scheduler can be reached there; start one with `dask scheduler` ({reason})"
            ) from None
        stack.callback(_close, client)
        yield client


@contextlib.contextmanager
def _processes(count: str | None) -> Iterator[Any]:
    """Workers of one thread each on this machine, with what they write in a folder that goes with them.

    Other users of the machine reach its ports, and whoever may connect to a worker runs programs on it: certificates
    that this process makes for itself admit nobody else. There are no web pages: they ask for none.

    Yields:
        The cluster, and what a client needs to connect to it.
    """
    import tempfile

    import dask
    from distributed import LocalCluster, Security
    from distributed.gc import disable_gc_diagnosis

    try:
        security = Security.temporary()
    except ImportError as error:
        raise ClusterError(f"`cluster=local:N` needs cryptography: pip install 'qdqtool[cluster]' ({error})") from None
    wanted = int(count) if count else cores()
    with tempfile.TemporaryDirectory(prefix="qdqtool-cluster-", ignore_cleanup_errors=True) as folder, \
            dask.config.set(_LOCAL_CONFIG):
        cluster = None
        try:
            try:
                with _interrupts_kept():
                    cluster = LocalCluster(
                        n_workers=0, threads_per_worker=1, processes=True, host="127.0.0.1",
                        dashboard_address=None, scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
                        silence_logs=logging.CRITICAL, local_directory=folder, security=security, protocol="tls://",
                    )
                    # Workers take an address alone as the wish for a dashboard, and without one listen to all networks.
                    cluster.new_spec["options"]["dashboard_address"] = "127.0.0.1:0"
                    # It is called while Python collects garbage, where an exception of a signal would be lost.
                    disable_gc_diagnosis(force=True)
                cluster.scale(wanted)
                cluster.wait_for_workers(wanted, timeout=START_SECONDS + wanted)
            except (OSError, RuntimeError) as error:  # timeouts are among them
                reason = " ".join(str(error).split())[:200]
                raise ClusterError(f"{wanted} worker processes cannot be started here: {reason}") from error
            yield cluster, security
        finally:
            if cluster is not None:
                with contextlib.suppress(Exception):
                    cluster.close(timeout=20)


@contextlib.contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Ctrl-C waits until the end of the block, and never reaches the threads that begin in it or their processes.

    A terminal sends it to all processes of the foreground: the workers would end, and tell of it at length, before this
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


def _close(client: Client) -> None:
    with contextlib.suppress(Exception):
        client.close(timeout=5)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing of Dask's log reaches stderr: what matters of it is told in one line of ours."""
    names = [n for n in logging.root.manager.loggerDict if n.partition(".")[0] in ("distributed", "tornado", "asyncio")]
    loggers = [logging.getLogger(n) for n in {*names, "distributed", "tornado", "asyncio"}]
    before = [(logger, logger.level) for logger in loggers]
    for logger in loggers:
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
        raise ClusterError("the cluster's scheduler has no qdqtool, by whose names work is sent; install the same "
                           "version there as here") from None
    found = client.run(importlib.resources.files, "qdqtool", on_error="return")
    for address, answer in sorted(found.items()):
        if isinstance(answer, ModuleNotFoundError):
            raise ClusterError(f"cluster worker {address} has no qdqtool; install the same version there as here")
        if isinstance(answer, Exception):
            raise ClusterError(f"cluster worker {address} does not answer: {' '.join(str(answer).split())[:200]}")
