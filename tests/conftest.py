"""Settings of all tests: quick by default; ``--all`` adds the slow ones and more examples of the properties."""

import contextlib
import fcntl
import functools
import gc
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.runner import runtestprotocol

if TYPE_CHECKING:
    from tests.insertion.nets import Net
    from tests.trt.builder import Graph

for library in (
    "OMP",
    "OPENBLAS",
    "MKL",
):  # tests run side by side; threads that wait busily help nobody
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# Each of the many processes would compile the whole package, and each run all tests: half of what they take.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["HYPOTHESIS_NO_PLUGINS"] = (
    "1"  # trio's, which comes with selenium, takes as long to load as all else of it
)

#: Files, or folders, whose tests share what takes long to make: trees of sources and predictions, a cluster, libraries
#: of training.
SHARING = (
    (
        "tests/test_structure.py",
        "tests/test_files.py",
        "tests/test_options.py",
        "tests/explain/test_producers.py",
        "tests/explain/test_alike.py",
        "tests/explain/test_each_code.py",
        "tests/fixing/test_api.py",
        "tests/fixing/test_places.py",
        "tests/trt/rtx/test_experiments.py",
        "tests/test_patterns.py",
    ),
    (
        "tests/trt/test_evidence.py",
        "tests/trt/test_cases.py",
        "tests/trt/test_network.py",
        "tests/explain/test_codes.py",
        "tests/render/reporting/test_collect.py",
        "tests/timing/",
        "tests/verification/",
        "tests/fixing/test_effects.py",
    ),
    (
        "tests/calibration/test_clustered.py",
        "tests/calibration/cluster/test_mapping.py",
        "tests/tuning/test_clustered.py",
    ),
    ("tests/qat/",),
)

#: What `make test-all` adds, and what a file has in it that adds to that: it reads no other.
ADDED = "slow or hypothesis"
ADDS = re.compile(rb"mark\.slow|slow_after|hypothesis")

STARTED = time.monotonic()


BLOCK = 1 << 16
ZEROS = bytes(BLOCK)


@pytest.fixture(scope="session", autouse=True)
def published_models_are_unpacked_once() -> Iterator[None]:
    """They are megabytes of zeros behind kilobytes, and kept with one block of zeros for all."""
    from qdqtool.model import modelfile

    home, read, kept = Path(__file__).parent / "data" / "evidence", modelfile._read, {}

    def unpacked(path: Path) -> bytes:
        if path in kept:
            return b"".join(kept[path])
        data = read(path)
        if path.is_relative_to(home):
            blocks = (data[i : i + BLOCK] for i in range(0, len(data), BLOCK))
            kept[path] = [ZEROS if block == ZEROS else block for block in blocks]
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modelfile, "_read", unpacked)
        yield


CLUSTER = contextlib.ExitStack()


@functools.cache
def cluster_in(folder: Path) -> Any:
    from tests.calibration.cluster.clusters import processes

    CLUSTER.callback(cluster_in.cache_clear)
    return CLUSTER.enter_context(processes(folder))


@pytest.fixture
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a Dask cluster of two processes, which a test leaves as it was for the one behind it."""
    return cluster_in(tmp_path_factory.getbasetemp() / "dask")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """A cluster takes an eighth of a core while it does nothing: it ends with the last of the tests in a row."""
    if nextitem is None or "client" not in getattr(nextitem, "fixturenames", ()):
        CLUSTER.close()


@pytest.fixture
def g() -> "Graph":
    """An empty graph."""
    from tests.trt.builder import Graph

    return Graph()


@pytest.fixture
def net() -> "Net":
    """An empty network of floats with an image ``x``."""
    from tests.insertion.nets import Net

    return Net()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="the slow tests as well, and more examples of each property",
    )
    parser.addoption(
        "--growth", action="store_true", help="the law of growth for commands and families: hours"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no":
        return  # others run the tests
    from hypothesis import HealthCheck, settings

    # A busy machine is no defect of the code under test.
    for name, examples in (("quick", 6), ("all", 20)):
        settings.register_profile(
            name, max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck)
        )
    settings.load_profile("all" if config.getoption("--all") else "quick")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Who is first reads all tests alone: what that compiles, the others find."""
    gc.disable()  # next to nothing of what is read is let go, and looking for it takes a fifth of the time
    with open(__file__) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
        return (yield)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Most files have nothing to add, and reading them takes as long as reading the others."""
    if config.option.markexpr != ADDED or not collection_path.match("test_*.py"):
        return None
    return None if ADDS.search(collection_path.read_bytes()) else True


#: What is left out without an option.
WITHOUT = {"slow": "--all", "growth": "--growth"}


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> pytest.Item | None:
    """Of a whole function that is left out one item says so: the law of growth would have two thousand."""
    marks = getattr(obj, "pytestmark", None)
    names = {mark.name for mark in marks} if isinstance(marks, list) else set()
    left = any(
        mark in names and not collector.config.getoption(option) for mark, option in WITHOUT.items()
    )
    if not left or not collector.istestfunction(obj, name):
        return None
    return pytest.Function.from_parent(collector, name=name)


@pytest.hookimpl(trylast=True)  # when hypothesis has marked its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marks = [{mark.name for mark in item.iter_markers()} for item in items]
    added = {
        item.path
        for item, own in zip(items, marks, strict=True)
        if not own.isdisjoint(("slow", "hypothesis"))
    }
    if silent := [str(path) for path in sorted(added) if not ADDS.search(path.read_bytes())]:
        raise pytest.UsageError(
            f"test-all would not read these, for they do not say what is slow: {silent}"
        )
    without = {mark for mark, option in WITHOUT.items() if not config.getoption(option)}
    left = [item for item, own in zip(items, marks, strict=True) if not own.isdisjoint(without)]
    items[:] = [item for item, own in zip(items, marks, strict=True) if own.isdisjoint(without)]
    config.hook.pytest_deselected(items=left)


def shared_by(nodeid: str) -> str:
    """What a test shares things with: its file, or several."""
    file = nodeid.partition("::")[0]
    return next((group[0] for group in SHARING if file.startswith(group)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process has all tests of a file, for what they share is made once.

    The marks that xdist 3.8 has for it do nothing in pytest 9.2, which keeps no id that it could change.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = shared_by
    return scheduler


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A process that works for another tells it of a test once: how it ended, and what went wrong around it."""
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


def pytest_collection_finish() -> None:
    gc.freeze()  # what all imports made is never garbage
    gc.set_threshold(20_000)
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests were skipped, one line a reason."""
    reasons = Counter(str(r.longrepr[2]) for r in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


def pytest_sessionfinish() -> None:
    gc.freeze()  # pytest looks through all that is left five times


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """How long it took, once those who worked (with -n) are done."""
    if not hasattr(config, "workerinput"):
        print(f"{time.monotonic() - STARTED:.0f} s, {sum(os.times()[:4]):.0f} s of processor time")
