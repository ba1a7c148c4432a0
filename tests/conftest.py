"""Settings and fixtures of all tests.

Slow tests run with ``--all``.
"""

import contextlib
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.insertion.nets import Net
    from tests.trt.builder import Graph

# Tests run in several processes at once: more threads in each only wait for each other.
for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# Many tests start Python, which would compile the package each time: half of the suite's processor
# time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TESTS = Path(__file__).resolve().parent
STARTED = time.monotonic()
# Tests with this mark run only with this option.
OPTIONS = {"slow": "--all"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run slow tests, and more examples of each property"
    )


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import HealthCheck, settings

    # A busy machine is not a defect of the code under test, so deadlines are off.
    settings.register_profile(
        "qdqtool",
        max_examples=20 if config.getoption("--all") else 6,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("qdqtool")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import the test modules, each worker from another one on.

    All workers need all modules. In the same order, each would compile each module of a new
    checkout.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    named = [Path(argument.partition("::")[0]).resolve() for argument in session.config.args]
    files = sorted(p for p in TESTS.rglob("test_*.py") if any(p.is_relative_to(n) for n in named))
    first = int(worker["workerid"].removeprefix("gw")) * len(files) // worker["workercount"]
    for path in files[first:] + files[:first]:
        # The collection imports it again and reports the error.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    excluded = [mark for mark, option in OPTIONS.items() if not config.getoption(option)]
    deselected = [item for item in items if any(item.get_closest_marker(m) for m in excluded)]
    left_out = set(deselected)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=deselected)


@pytest.fixture(scope="session", autouse=True)
def convert_in_this_process() -> Iterator[None]:
    """Convert valid models in this process, which takes a 30th of the time of a child process.

    `tests/proto/test_shapes.py` tests conversion in a child process.
    """
    import onnx

    from qdqtool.proto.inference_checks import is_safe_to_infer
    from qdqtool.proto.shapes import convert_opset

    def convert(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
        try:
            onnx.checker.check_model(proto)
        except onnx.checker.ValidationError:
            return convert_opset(proto, opset)
        if is_safe_to_infer(proto):
            return onnx.version_converter.convert_version(proto, opset)
        return convert_opset(proto, opset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qdqtool.insertion.prepare.convert_opset", convert)
        patch.setattr("qdqtool.proto.functions.convert_opset", convert)
        yield


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.calibration.cluster.clusters import processes

    with processes(tmp_path_factory.mktemp("dask")) as dask_client:
        yield dask_client


@pytest.fixture
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def g() -> "Graph":
    from tests.trt.builder import Graph

    return Graph()


@pytest.fixture
def net() -> "Net":
    from tests.insertion.nets import Net

    return Net()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = Counter(str(r.longrepr[2]) for r in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        print(f"{time.monotonic() - STARTED:.0f} s, {sum(os.times()[:4]):.0f} s of processor time")
