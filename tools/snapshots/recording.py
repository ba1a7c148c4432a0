"""Run scenarios in a checkout, and hash their outputs and files."""

import functools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tools.snapshots import normalize
from tools.snapshots.scenarios import HERE, ROOT, Scenario, Step, all_scenarios

SCHEMA = "qdqtool/snapshot/1"
_FAILURES = (70, -14)  # exit codes of the worker, for a failure and for its alarm


class RecordingError(Exception):
    """A scenario cannot be recorded, or a file is not a record."""


@dataclass
class Record:
    """Hashes of one checkout.

    Attributes:
        commit: Commit of the checkout, with ``+`` if files differ from the commit.
        scope: Recorded scenarios: ``all`` or the groups, with ``, quick`` for the quick set.
        versions: Versions of Python, onnx, numpy and onnxruntime.
        inputs: Hash of a scenario's files, by scenario.
        entries: Hash of the data and hash of all content, by ``scenario|step`` or
            ``scenario|step|file``.
    """

    commit: str
    scope: str
    versions: dict[str, str]
    inputs: dict[str, str] = field(default_factory=dict)
    entries: dict[str, list[str]] = field(default_factory=dict)


def write(record: Record, path: Path) -> None:
    content = {"schema": SCHEMA, **asdict(record)}
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read(path: Path) -> Record:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
        raise RecordingError(f"{path}: not a snapshot. Write one with 'record'.")
    return Record(**content)


def record(
    repository: Path,
    only: Sequence[str] = (),
    quick: bool = False,
    jobs: int = 2,
    keep: Path | None = None,
) -> Record:
    """Run scenarios in a checkout.

    Args:
        repository: The checkout.
        only: Groups, or names of scenarios; empty for all.
        quick: Whether to run the quick set.
        jobs: Number of scenarios that run at the same time.
        keep: Folder for the hashed JSON of each entry.
    """
    chosen = select(all_scenarios(), only, quick)
    scope = " ".join(only) or "all"
    recorded = Record(_commit(repository), f"{scope}, quick" if quick else scope, _versions())
    started = time.monotonic()
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="qdqtool-snapshot-") as work:
        run = functools.partial(_run_scenario, repository, Path(work), keep)
        # Slow scenarios come first, so that no process waits for a slow scenario at the end.
        names = sorted(chosen, key=lambda name: -len(chosen[name].steps))
        _scenarios.update(chosen)
        context = multiprocessing.get_context("fork")
        with context.Pool(jobs, _start_worker, (repository, Path(work))) as pool:
            for number, result in enumerate(pool.imap_unordered(run, names), 1):
                recorded.inputs[result.name] = result.inputs
                recorded.entries.update(result.entries)
                times[result.name] = result.seconds
                if sys.stderr.isatty():
                    print(f"\r{number}/{len(names)}", end="", file=sys.stderr)
    seconds = time.monotonic() - started
    print(
        f"{len(recorded.entries)} entries of {len(chosen)} scenarios in {seconds:.0f} s, "
        f"{sum(times.values()):.0f} s of processor time in the commands"
    )
    slowest = sorted(times, key=lambda name: -times[name])[:5]
    print("slowest: " + ", ".join(f"{name} {times[name]:.1f} s" for name in slowest))
    return recorded


def select(scenarios: Sequence[Scenario], only: Sequence[str], quick: bool) -> dict[str, Scenario]:
    """Return scenarios by name. The scenarios of the quick set have only their first steps."""
    chosen = {}
    for scenario in scenarios:
        if only and scenario.group not in only and scenario.name not in only:
            continue
        if quick and not scenario.quick:
            continue
        steps = scenario.steps[: scenario.quick] if quick else scenario.steps
        chosen[scenario.name] = Scenario(scenario.name, scenario.files, steps, scenario.quick)
    if not chosen:
        raise RecordingError(f"no scenario: {' '.join(only)}")
    return chosen


def _commit(repository: Path) -> str:
    def git(*words: str) -> str:
        command = ["git", "-C", str(repository), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "qdqtool", "calibration")
    return git("rev-parse", "--short=8", "HEAD") + ("+" if changed else "")


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    versions = {"python": sys.version.split()[0], "onnx": onnx.__version__, "numpy": np.__version__}
    return {**versions, "onnxruntime": version("onnxruntime")}


# In the processes of the pool ---------------------------------------------------------

_scenarios: dict[str, Scenario] = {}
_worker: subprocess.Popen[str] | None = None


def _start_worker(repository: Path, work: Path) -> None:
    """Start a process with the qdqtool of the checkout. The process ends with this process."""
    global _worker
    kept = ("PATH", "LANG", "LC_ALL", "PYTHONHASHSEED", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {
        "PYTHONPATH": str(repository),
        "PYTHONSAFEPATH": "1",
        "HOME": str(work),
        "TMPDIR": str(work),
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TZ": "UTC",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    _worker = subprocess.Popen(
        [sys.executable, str(HERE / "worker.py"), str(repository)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=work,
    )


def _ask_worker(request: dict[str, Any]) -> list[tuple[int, float]]:
    assert _worker is not None and _worker.stdin is not None and _worker.stdout is not None
    _worker.stdin.write(json.dumps(request) + "\n")
    _worker.stdin.flush()
    for line in _worker.stdout:
        if line.startswith("["):
            ends: list[tuple[int, float]] = json.loads(line)
            return ends
    raise RecordingError("the worker ended; its traceback is above")


@dataclass
class _Result:
    """Entries of one scenario, and its processor time in seconds."""

    name: str
    inputs: str
    entries: dict[str, list[str]]
    seconds: float


def _run_scenario(repository: Path, work: Path, keep: Path | None, name: str) -> _Result:
    scenario = _scenarios[name]
    folder = Path(tempfile.mkdtemp(prefix="scenario-", dir=work))
    scenario.write_files(folder)
    inputs = {f: normalize.hash_bytes((folder / f).read_bytes()) for f in scenario.files}
    known = _names_in(folder, scenario)
    ends = _ask_worker({"folder": str(folder), "steps": [s.as_json() for s in scenario.steps]})
    paths = [(folder, "<folder>"), (work, "<work>"), (repository, "<repo>"), (ROOT, "<repo>")]
    entries: dict[str, list[str]] = {}
    for number, (step, (code, _)) in enumerate(zip(scenario.steps, ends, strict=True)):
        streams = [(folder / f"{number}.{s}").read_text("utf-8") for s in ("stdout", "stderr")]
        if code in _FAILURES:
            raise RecordingError(f"{name}, {step.name}: exit code {code}\n{streams[1]}")
        out, error = (normalize.without_paths(text, paths) for text in streams)
        for entry, forms in _describe_step(step, code, out, error, folder, known).items():
            entries[f"{name}|{entry}"] = _hash(forms, paths, keep, f"{name}|{entry}")
    shutil.rmtree(folder)
    return _Result(name, normalize.hash_json(inputs), entries, sum(seconds for _, seconds in ends))


def _names_in(folder: Path, scenario: Scenario) -> set[str]:
    names: set[str] = set()
    for file in scenario.files:
        if file.endswith(".onnx"):
            try:
                model = onnx.load(folder / file, load_external_data=False)
            except Exception:  # a damaged model has no names
                continue
            names |= normalize.collect_names(model)
    return names


def _describe_step(
    step: Step, code: int, out: str, error: str, folder: Path, known: set[str]
) -> dict[str, tuple[Any, Any]]:
    """Return both normal forms of a step, and of each file that the step wrote."""
    answer = _parse(out)
    if isinstance(answer, str):
        answer = normalize.without_circumstances(answer)
    full = {
        "exit": code,
        "answer": answer,
        "stderr": normalize.without_circumstances(error).splitlines(),
    }
    data = {"exit": code, "answer": None if isinstance(answer, str) else answer}
    forms = {step.name: (full, data)}
    for output in step.outputs:
        path = folder / output
        if path.exists():
            forms[f"{step.name}|{output}"] = normalize.describe_file(path, known)
            known_names = (
                path.suffix == ".onnx" and output.startswith("demo/") and "qdq" not in output
            )
            if known_names:  # the demo's own network, which later steps read
                known |= normalize.collect_names(onnx.load(path, load_external_data=False))
        else:
            forms[f"{step.name}|{output}"] = ("missing", "missing")
    return forms


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _hash(
    forms: tuple[Any, Any], paths: list[tuple[Path, str]], keep: Path | None, entry: str
) -> list[str]:
    full, data = (
        normalize.without_run(json.loads(normalize.without_paths(json.dumps(form), paths)))
        for form in forms
    )
    data = normalize.to_data(data)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        path = keep / kept_name(entry)
        path.write_text(json.dumps({"data": data, "full": full}, indent=1, sort_keys=True))
    return [normalize.hash_json(data), normalize.hash_json(full)]


def kept_name(entry: str) -> str:
    """Return the name of the file that ``--keep`` writes for an entry."""
    readable = "".join(c if c.isalnum() or c in "._-" else "_" for c in entry)
    return f"{readable[:120]}.{normalize.hash_bytes(entry.encode())[:6]}.json"
