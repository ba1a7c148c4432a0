"""What may be called a cluster, and what is said when it is none."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from qdqtool import cli
from qdqtool.cluster.connection import check_where, connected
from qdqtool.errors import ClusterError

pytest.importorskip("distributed", reason="the extra `cluster` is not installed")


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("where", ["local", "local:4", "tcp://host:8786", "tls://10.0.0.1:8786", "host:8786"])
def test_addresses(where: str) -> None:
    check_where(where)


@pytest.mark.parametrize("where", ["", "host", "local:x", "local:", "tcp://", "a b:1", "/tmp/scheduler.json"])
def test_what_is_no_address(where: str) -> None:
    with pytest.raises(ClusterError, match="give the address of a scheduler, such as tcp://host:8786, or local:N"):
        check_where(where)


@pytest.mark.parametrize("where", ["local:0", "local:9999"])
def test_numbers_of_processes(where: str) -> None:
    with pytest.raises(ClusterError, match="from 1 to 1024"):
        check_where(where)


def test_other_objects() -> None:
    with pytest.raises(ClusterError, match=r"an address or a distributed\.Client, not a int"):
        check_where(3)


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("qdqtool.cluster.connection.CONNECT_SECONDS", 0.5)
    where = f"tcp://127.0.0.1:{closed_port()}"
    level = logging.getLogger("distributed").level
    with pytest.raises(ClusterError, match="no scheduler can be reached there") as caught, connected(where):
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
