"""What may be called a cluster, and what is said when it is none."""

import contextlib
import gc
import logging
import os
import socket
import tempfile
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

from calibration.cluster.mapping import check_where, connected
from qdqtool.base.budgets import PROCESSES, TOGETHER
from qdqtool.base.process import pause_gc
from qdqtool.commands import cli
from qdqtool.errors import ClusterError
from tests.raising import raises

#: Only looked for: reading all tests does not load it.
pytestmark = pytest.mark.skipif(
    find_spec("distributed") is None, reason="the extra `cluster` is not installed"
)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    "where", ["local", "local:4", "tcp://host:8786", "tls://10.0.0.1:8786", "host:8786"]
)
def test_addresses(where: str) -> None:
    check_where(where)


@pytest.mark.parametrize(
    ("where", "named"),
    [
        *(
            (where, "tcp://host:8786 local:N")
            for where in ("", "host", "local:x", "local:", "tcp://", "a b:1", "/tmp/scheduler.json")
        ),
        ("local:0", "1 1024"),
        ("local:9999", "1 1024"),
        (3, "distributed.Client int"),
    ],
)
def test_what_is_no_address(where: object, named: str) -> None:
    with raises(ClusterError, f"check_where `cluster {named}"):
        check_where(where)


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], scheme: str
) -> None:
    monkeypatch.setattr("calibration.cluster.mapping.CONNECT_SECONDS", 0.5)
    where = f"{scheme}://127.0.0.1:{closed_port()}"
    level = logging.getLogger("distributed").level
    with raises(ClusterError, "connected") as caught, connected(where):
        raise AssertionError
    assert where in str(caught.value) and "\n" not in str(caught.value)
    assert logging.getLogger("distributed").level == level
    assert capfd.readouterr() == ("", "")


def test_the_command_line_says_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()
    assert cli.run(["insert", "m.onnx", "--calib", "images", "--cluster", "nowhere"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("qdqtool: --cluster nowhere: give the address") and told.count("\n") == 1
    assert cli.run(["insert", "m.onnx", "--calib", "images", "--mixed-cpus"]) == 2
    assert "--mixed-cpus" in capsys.readouterr().err


def listening(*pids: int) -> set[str]:
    """Addresses on which processes listen, as /proc has them."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(link))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                words = bytes.fromhex(fields[1].partition(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, packed))
    return found


def test_workers_of_this_machine_leave_no_folder_and_refuse_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the scheduler nor a worker takes a connection without the run's own credentials; nothing else listens."""
    from distributed import Client, Security

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with connected("local:1") as client:
        facts = client.scheduler_info()
        (worker,) = facts["workers"]
        assert client.submit(int, "7").result() == 7
        assert [p.name.startswith("qdqtool-") for p in tmp_path.iterdir()] == [True]
        assert client.run(os.getenv, TOGETHER) == dict.fromkeys(
            facts["workers"], str(next(tmp_path.iterdir()))
        )
        assert client.run(os.getenv, PROCESSES) == dict.fromkeys(facts["workers"], "1")
        assert TOGETHER not in os.environ and PROCESSES not in os.environ
        assert client.scheduler.address.startswith("tls://127.0.0.1:")
        for address in (client.scheduler.address, worker, facts["workers"][worker]["nanny"]):
            assert address.startswith("tls://127.0.0.1:")
            for given in (address, address.replace("tls://", "tcp://")):
                security = Security.temporary() if given.startswith("tls") else None
                with pause_gc():
                    with (
                        pytest.raises(OSError),  # noqa: PT011 - a timeout or the end of a handshake
                        Client(given, timeout=2, set_as_default=False, security=security),
                    ):
                        raise AssertionError
                    # Close the young client: that would wait forever while another one starts.
                    gc.collect(1)
        for services in (facts["services"], facts["workers"][worker]["services"]):
            for port in services.values():
                for page in (
                    "",
                    "status",
                    "info/main/workers.html",
                    "metrics",
                    "health",
                    "json/counts.json",
                ):
                    with pytest.raises(urllib.error.HTTPError, match="404"):
                        urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=5)
        if Path("/proc/net/tcp").exists():
            assert listening(os.getpid(), *client.run(os.getpid).values()) == {"127.0.0.1"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("where", "setting", "told"),
    [
        ("local:1", {"distributed.nanny.preload": ["no_such_module"]}, "_processes no_such_module"),
        ("local:1", {"distributed.comm.tls.min-version": "none"}, "_processes none"),
        ("tcp://127.0.0.1:1", {"distributed.client.heartbeat": "often"}, "connected often"),
    ],
)
def test_settings_of_dask_that_nothing_can_begin_with(
    where: str, setting: dict[str, object], told: str
) -> None:
    """At once: workers that end are not waited for."""
    import dask

    with dask.config.set(setting), raises(ClusterError, told), connected(where):
        raise AssertionError


@pytest.mark.slow
def test_a_worker_that_ends_while_it_begins_is_not_waited_for() -> None:
    import dask

    with (
        dask.config.set({"distributed.worker.preload": ["no_such_module"]}),
        raises(ClusterError, "_processes no_such_module"),
        connected("local:1"),
    ):
        raise AssertionError


def test_missing_cryptography(monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed import Security

    def missing() -> None:
        raise ImportError("no cryptography")

    monkeypatch.setattr(Security, "temporary", missing)
    with raises(ClusterError, "_processes qdqtool[cluster]"), connected("local:1"):
        raise AssertionError
