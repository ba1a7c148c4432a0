import gc
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from calibration.cluster.connection import check_cluster, connect
from qdqtool.commands import cli
from qdqtool.errors import ClusterError
from qdqtool.runtime import sessions
from qdqtool.util.limits import PROCESSES
from qdqtool.util.process import pause_gc
from tests.calibration.watchers import HANG
from tests.errors import has

# find_spec does not import: collecting all tests does not load Dask.
pytestmark = pytest.mark.skipif(
    find_spec("distributed") is None, reason="the extra `cluster` is not installed"
)


@pytest.mark.parametrize(
    "where", ["local", "local:4", "tcp://host:8786", "tls://10.0.0.1:8786", "host:8786"]
)
def test_check_cluster_accepts_addresses(where: str) -> None:
    check_cluster(where)


@pytest.mark.parametrize(
    ("where", "code", "values"),
    [
        *(
            (where, "invalid-address", [where, "tcp://host:8786", "local:N"])
            for where in ("", "host", "local:x", "local:", "tcp://", "a b:1", "/tmp/scheduler.json")
        ),
        ("local:0", "out-of-range", ["local:0", "1 to 1024"]),
        ("local:9999", "out-of-range", ["local:9999", "1 to 1024"]),
    ],
)
def test_check_cluster_rejects_other_values(where: object, code: str, values: list[str]) -> None:
    with pytest.raises(ClusterError, check=has(code, *values, parameter="cluster")):
        check_cluster(where)


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_unreachable_scheduler_is_one_error_and_no_log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], scheme: str
) -> None:
    monkeypatch.setattr("calibration.cluster.connection.CONNECT_SECONDS", 0.5)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"{scheme}://127.0.0.1:{probe.getsockname()[1]}"
    level = logging.getLogger("distributed").level
    with (
        pytest.raises(ClusterError, check=has("connection", where, parameter="cluster")),
        connect(where),
    ):
        raise AssertionError
    assert logging.getLogger("distributed").level == level and capfd.readouterr() == ("", "")


def test_command_line_names_the_cluster_options(
    current_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("images").mkdir()
    assert cli.run(["insert", "m.onnx", "--calib", "images", "--cluster", "nowhere"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("qdqtool: --cluster nowhere: ") and message.count("\n") == 1
    assert cli.run(["insert", "m.onnx", "--calib", "images", "--mixed-cpus"]) == 2
    assert "--mixed-cpus" in capsys.readouterr().err


def test_local_workers_leave_no_folder_and_refuse_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler and the workers reject connections without the credentials of the run."""
    import psutil  # installed with distributed
    from distributed import Client, Security, default_client

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with connect("local:1") as cluster:
        client = cluster.client
        with pytest.raises(ValueError, match="No clients"):  # the user's default stays
            default_client()
        facts = client.scheduler_info()
        (worker,) = facts["workers"]
        assert client.submit(int, "7").result() == 7
        (folder,) = tmp_path.iterdir()
        assert folder.name.startswith("qdqtool-")
        assert client.run(os.getenv, PROCESSES) == {worker: "1"} and PROCESSES not in os.environ
        for address in (client.scheduler.address, worker, facts["workers"][worker]["nanny"]):
            assert address.startswith("tls://127.0.0.1:")
            for scheme, security in (("tls", Security.temporary()), ("tcp", None)):
                url = address.replace("tls://", f"{scheme}://")
                with pause_gc():
                    with (
                        pytest.raises(OSError),  # noqa: PT011 - a timeout or the end of a handshake
                        Client(url, timeout=2, set_as_default=False, security=security),
                    ):
                        raise AssertionError
                    # Close the young client: that would wait forever while another one starts.
                    gc.collect(1)
        pages = ("", "status", "info/main/workers.html", "metrics", "health", "json/counts.json")
        for services in (facts["services"], facts["workers"][worker]["services"]):
            for port in services.values():
                for page in pages:
                    with pytest.raises(urllib.error.HTTPError, match="404"):
                        urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=HANG)
        if sys.platform == "linux":  # elsewhere, only the superuser sees the connections
            pids = {os.getpid(), *client.run(os.getpid).values()}
            listening = [
                c for c in psutil.net_connections() if c.pid in pids and c.status == "LISTEN"
            ]
            assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("where", "settings", "code", "value"),
    [
        pytest.param(
            "local:1",
            {"distributed.nanny.preload": ["no_such_module"]},
            "not-started",
            "no_such_module",
            id="nanny",
        ),
        pytest.param(
            "local:1",
            {"distributed.worker.preload": ["no_such_module"]},
            "not-started",
            "no_such_module",
            id="worker",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "local:1",
            {"distributed.comm.tls.min-version": "none"},
            "not-started",
            "none",
            id="tls version",
        ),
        pytest.param(
            "tcp://127.0.0.1:1",
            {"distributed.client.heartbeat": "often"},
            "connection",
            "often",
            id="client",
        ),
    ],
)
def test_settings_of_dask_that_prevent_a_start_are_reported_without_waiting(
    where: str, settings: dict[str, object], code: str, value: str
) -> None:
    import dask

    # distributed adds its defaults to the settings on import. The end of `dask.config.set` would remove them
    # otherwise, for all later tests of the process.
    import distributed  # noqa: F401

    with (
        dask.config.set(settings),
        pytest.raises(ClusterError, check=has(code, value, parameter="cluster")),
        connect(where),
    ):
        raise AssertionError


def test_missing_cryptography_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed import Security

    def temporary() -> None:
        raise ImportError("no cryptography")

    monkeypatch.setattr(Security, "temporary", temporary)
    with (
        pytest.raises(ClusterError, check=has("missing-package", "qdqtool[cluster]")),
        connect("local:1"),
    ):
        raise AssertionError


# Versions and numbers that have to be equal on all machines

# Replaces Dask, whose import takes half of the time.
PRINT_FACTS = """
import json, sys, types
for name in ("distributed", "distributed.diagnostics", "distributed.diagnostics.plugin"):
    sys.modules[name] = types.SimpleNamespace(WorkerPlugin=object)
from calibration.cluster.worker import worker_facts
print(json.dumps(worker_facts()))
"""


def test_facts_are_equal_in_another_process() -> None:
    from calibration.cluster.worker import describe_difference, worker_facts

    output = subprocess.run(
        [sys.executable, "-c", PRINT_FACTS], capture_output=True, text=True, check=True
    ).stdout
    ours = worker_facts()
    assert json.loads(output) == ours
    assert describe_difference(json.loads(output), ours, mixed_cpus=False) == ""


def test_probe_network_outputs_depend_on_every_operator() -> None:
    from calibration.cluster.worker import probe_network

    model = probe_network()
    weights = np.concatenate([numpy_helper.to_array(t).ravel() for t in model.graph.initializer])
    assert -0.5 <= weights.min() < -0.49 and 0.49 < weights.max() <= 0.5
    assert abs(weights.mean()) < 0.02
    x = np.random.default_rng(0).uniform(-0.5, 0.5, (1, 3, 48, 48)).astype(np.float32)
    outputs = sessions.open_session(model.SerializeToString(), 1).run(None, {"x": x})
    expected = ReferenceEvaluator(model).run(None, {"x": x})
    for info, array, reference in zip(model.graph.output, outputs, expected, strict=True):
        assert np.ptp(array) > 0, f"{info.name}: a constant output cannot differ between machines"
        np.testing.assert_allclose(array, reference, rtol=2e-3, atol=2e-4, err_msg=info.name)


@pytest.mark.parametrize(
    "fact", ["qdqtool", "onnxruntime", "onnx", "numpy", "pillow", "libjpeg", "test network"]
)
def test_difference_of_each_fact(fact: str) -> None:
    from calibration.cluster.worker import describe_difference, worker_facts

    ours = worker_facts()
    theirs = {**ours, fact: "other"}
    message = describe_difference(theirs, ours, mixed_cpus=False)
    assert message and "\n" not in message
    # --mixed-cpus permits other numbers, but no other versions.
    assert bool(describe_difference(theirs, ours, mixed_cpus=True)) == (fact != "test network")
