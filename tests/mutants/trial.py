"""Runs the tests of a package on a changed copy of the tree, in processes that have the heavy imports behind them.

Each run is a fork of this process, in which pytest, numpy, onnx and onnxruntime are loaded and nothing of the project
is: starting anew would take longer than most tests. A first run without a change notes which test comes by which line,
so that a mutant meets only the tests that could see it.
"""

from __future__ import annotations

import ast
import compileall
import contextlib
import importlib
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path

import coverage
import pytest

from tests.mutants.sample import Mutant

LEAST = 20.0  # seconds that a test has at least, and MORE times what it took while it was watched
MORE = 5.0
_HEAVY = ("numpy", "onnx", "onnx.shape_inference", "onnxruntime", "hypothesis", "PIL.Image", "click", "rich.console")
_OURS = ("tests", "qdqtool", "calibration")


def copy_of(root: Path, to: Path) -> Path:
    """A copy of what git knows of a tree, compiled so that only a changed source is compiled again."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root,
                            check=True, capture_output=True).stdout.decode().split("\0")  # fmt: skip
    for name in filter(None, listed):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    # By hash: a mutant may have the size and the second of the original.
    compileall.compile_dir(to, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return to


def mirrored_tests(tree: Path, package: str) -> list[str]:
    """The test files that mirror a package."""
    folder = tree / "tests" / package.removeprefix("qdqtool/")
    return sorted(str(p.relative_to(tree)) for p in folder.rglob("test_*.py")) if folder.is_dir() else []


class _Chosen:
    """A pytest plugin: runs some tests alone, in a given order, and ends the process with one that takes too long."""

    def __init__(self, tests: Iterable[str], took: Mapping[str, float]) -> None:
        self.rank = {test: i for i, test in enumerate(tests)}
        self.took = took

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):  # type: ignore[no-untyped-def]
        signal.setitimer(signal.ITIMER_REAL, LEAST + MORE * self.took.get(item.nodeid, 0.0))
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.rank), key=lambda i: self.rank[i.nodeid])


class _Watch:
    """A pytest plugin: tells coverage which test is running, and notes how long each takes."""

    def __init__(self, tree: Path, notes: Path) -> None:
        self.notes = notes
        self.coverage = coverage.Coverage(data_file=str(notes / "lines"), branch=False, config_file=False,
                                          source=[str(tree / "qdqtool"), str(tree / "calibration")])  # fmt: skip
        self.coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):  # type: ignore[no-untyped-def]
        self.coverage.switch_context(item.nodeid)
        started = time.monotonic()
        yield
        self.coverage.switch_context("")
        with (self.notes / "seconds").open("a") as file:
            file.write(f"{time.monotonic() - started:.4f} {item.nodeid}\n")

    def pytest_unconfigure(self) -> None:
        self.coverage.stop()
        self.coverage.save()


class Trials:
    """The tests of one package.

    Attributes:
        seconds: What they take without a change.
    """

    def __init__(self, tree: Path, package: str) -> None:
        self.tree = tree
        self.files = mirrored_tests(tree, package)
        with tempfile.TemporaryDirectory(prefix="qdqtool-lines-") as folder:
            notes = Path(folder)
            result, self.told, self.seconds = self._run(self.files, 3600, watched_by=notes)
            self.pass_unchanged = result == "survived"
            self.took = {}
            if self.pass_unchanged:
                for row in (notes / "seconds").read_text().splitlines():
                    spent, _, test = row.partition(" ")
                    self.took[test] = float(spent)
                data = coverage.CoverageData(str(notes / "lines"))
                data.read()
                self.lines = {str(Path(f).relative_to(tree)): data.contexts_by_lineno(f)
                              for f in data.measured_files()}  # fmt: skip

    def seen_by(self, mutant: Mutant) -> list[str]:
        """The tests that come by a mutant's line, the quick ones first; those of its own file before all others."""
        lines = self.lines.get(mutant.file, {})
        found = {t for n in statement_at(self.tree / mutant.file, mutant.line) for t in lines.get(n, ())}
        if "" in found or not found:  # run by an import, or by nothing
            found = set(self.took)
        own = f"test_{Path(mutant.file).stem}.py::"
        return sorted(found & set(self.took), key=lambda t: (own not in t, self.took[t]))

    def try_mutant(self, mutant: Mutant) -> tuple[str, float]:
        """``killed``, ``timeout`` or ``survived``, and seconds; the file is as before afterwards."""
        tests = self.seen_by(mutant)
        limit = LEAST * 3 + MORE * sum(self.took[t] for t in tests)
        path = self.tree / mutant.file
        code = path.read_text(encoding="utf-8")
        path.write_text(mutant.apply(code), encoding="utf-8")
        try:
            files = sorted({t.partition("::")[0] for t in tests})
            result, _, seconds = self._run(files, limit, _Chosen(tests, self.took))
        finally:
            path.write_text(code, encoding="utf-8")
        return result, seconds

    def _run(
        self, files: list[str], limit: float, chosen: _Chosen | None = None, watched_by: Path | None = None
    ) -> tuple[str, str, float]:
        for name in _HEAVY:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        started = time.monotonic()
        with tempfile.TemporaryFile() as out:
            child = os.fork()
            if child == 0:
                self._child(files, out.fileno(), chosen, watched_by)
            try:
                code = _wait(child, started + limit)
            except BaseException:
                _kill(child)
                raise
            seconds = time.monotonic() - started
            if code is None:
                _kill(child)
            if code in (None, -signal.SIGALRM):
                return "timeout", "", seconds
            out.seek(0)
            told = out.read().decode(errors="replace")[-3000:]
        return "survived" if code == 0 else "killed", told, seconds

    def _child(self, files: list[str], out: int, chosen: _Chosen | None, watched_by: Path | None) -> None:
        """Never returns."""
        code = 99
        try:
            os.setsid()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.chdir(self.tree)
            os.environ.update(PYTHONPATH=str(self.tree), PYTHONDONTWRITEBYTECODE="1")
            sys.dont_write_bytecode = True
            for name in [m for m in sys.modules if m.partition(".")[0] in _OURS]:
                del sys.modules[name]
            sys.path[:] = [str(self.tree), *(p for p in sys.path if p and not (Path(p) / "qdqtool").is_dir())]
            importlib.invalidate_caches()
            plugins: list[object] = [_Watch(self.tree, watched_by)] if watched_by else []
            plugins += [chosen] if chosen else []
            code = int(pytest.main(
                ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", "-o", "addopts=",
                 "--rootdir", str(self.tree), *files], plugins))  # fmt: skip
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def statement_at(path: Path, line: int) -> range:
    """The lines of the statement around a line, of an ``if`` or a loop those of its head alone.

    A condition over several lines may end early: the change of a line can matter to tests that never came by it.
    """
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            body = getattr(node, "body", None)
            end = max(body[0].lineno - 1, node.lineno) if body else node.end_lineno or node.lineno
            if line <= end:  # the innermost comes last
                found = range(node.lineno, end + 1)
    return found


def _wait(child: int, until: float) -> int | None:
    """The exit code; None when time is up."""
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


def _kill(child: int) -> None:
    for kill in (os.killpg, os.kill):  # the group first: a test may have started processes of its own
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def changed_lines(tree: Path, mutant: Mutant) -> tuple[str, str]:
    """The line before and after."""
    code = (tree / mutant.file).read_text(encoding="utf-8")
    before, after = code.splitlines(), mutant.apply(code).splitlines()
    for old, new in zip(before, after, strict=False):
        if old != new:
            return old.strip(), new.strip()
    return "", ""
