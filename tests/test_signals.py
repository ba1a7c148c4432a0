import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.calibration.nets import conv_net
from tests.slow import slow_after
from tools.fuzz.grammar import network
from tools.fuzz_inputs import interrupts


def restore_signals() -> None:
    """Let a child process receive signals.

    A shell starts background processes with Ctrl-C ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


WAIT = """
import json, os, sys, time
from qdqtool.commands import cli
from qdqtool.util import files
import click
@cli.cli.command("wait")
@click.argument("path")
def wait(path):
    with files.atomic_write(path) as file:
        file.write(b"half")
        file.flush()
        os.write(1, f"{os.getpid()} {path}\\n".encode())  # in one piece: three write there
        time.sleep(60)
cli.LazyGroup.get_command = lambda self, ctx, name: click.Group.get_command(self, ctx, name)
children = []
for path in sys.argv[1:]:
    if not (child := os.fork()):
        os.dup2(os.open(f"{path}.err", os.O_CREAT | os.O_WRONLY), 2)
        sys.argv[1:] = ["wait", f"{path}/out"]
        cli.main()
    children.append(child)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_signal_removes_temporary_files(tmp_path: Path) -> None:
    """The processes are forked after the import of the command line."""
    folders = {
        signal.SIGTERM: tmp_path / "term",
        signal.SIGHUP: tmp_path / "hup",
        signal.SIGINT: tmp_path / "int",
    }
    for folder in folders.values():
        folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT, *map(str, folders.values())],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=restore_signals,
    )
    ready = [process.stdout.readline().split() for _ in folders]
    pids = {Path(path).parent: int(pid) for pid, path in ready}
    for number, folder in folders.items():
        assert len(list(folder.iterdir())) == 1
        os.kill(pids[folder], number)
    out, _ = process.communicate(timeout=60)
    assert json.loads(out) == [143, 129, 130]
    for folder in folders.values():
        error = folder.with_suffix(".err").read_text()
        assert len(error.splitlines()) == 1 and "Traceback" not in error
        assert not list(folder.iterdir())


def test_interrupt_while_a_metric_is_imported(tmp_path: Path) -> None:
    (tmp_path / "float.onnx").write_bytes(conv_net().SerializeToString())
    np.save(tmp_path / "samples.npy", np.random.default_rng(0).random((8, 3, 16, 16), np.float32))
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(300)\n"
    )
    words = (
        "tune float.onnx --include conv --no-state --workers 1 --calib samples.npy -o out "
        "--metric slow:metric"
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "qdqtool", *words.split()],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=restore_signals,
    )
    try:
        wait_until((tmp_path / "begun").exists)
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
    finally:
        run.kill()
        run.wait()


@pytest.mark.parametrize("place", slow_after(1, [3, 5, 1, 0, 2, 4]))
def test_interrupt_at_any_moment(tmp_path: Path, place: int) -> None:
    (tmp_path / "model.onnx").write_bytes(network(11).SerializeToString())
    code, _, error = interrupts.trial("fix", tmp_path, place * 0.08)
    assert interrupts.right(code, error), (code, error)


def test_interrupt_after_the_end_keeps_the_exit_code() -> None:
    """A function that runs during the shutdown of Python sends the signal."""
    script = (
        "import atexit, os, signal; from qdqtool.__main__ import main\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, "explain", "SKIP-FLOAT"],
        capture_output=True,
        text=True,
        preexec_fn=restore_signals,
    )
    assert (run.returncode, run.stderr) == (0, "") and "SKIP-FLOAT" in run.stdout
