"""Signals at any moment: what is ended, what is cleaned up, and with which code."""

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
from tests.forks import can_fork
from tests.slow import slow_after
from tools.fuzz.grammar import network
from tools.fuzz_inputs import interrupts


def _default_signals() -> None:
    """What runs the tests in the background may have told its children to ignore Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


_WAIT = """
import json, os, sys, time
from qdqtool.commands import cli
from qdqtool.base import outputs
import click
@cli.cli.command("wait")
@click.argument("path")
def wait(path):
    with outputs.atomic_write(path) as file:
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


@can_fork
def test_signals_clean_up(tmp_path: Path) -> None:
    """In copies of a process that has loaded the command line."""
    folders = {
        signal.SIGTERM: tmp_path / "term",
        signal.SIGHUP: tmp_path / "hup",
        signal.SIGINT: tmp_path / "int",
    }
    for folder in folders.values():
        folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", _WAIT, *map(str, folders.values())],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_default_signals,
    )
    assert process.stdout is not None
    ready = [process.stdout.readline().split() for _ in folders]
    pids = {Path(path).parent: int(pid) for pid, path in ready}
    for number, folder in folders.items():
        assert len(list(folder.iterdir())) == 1
        os.kill(pids[folder], number)
    out, _ = process.communicate(timeout=60)
    assert json.loads(out) == [143, 129, 130]
    for folder in folders.values():
        error = folder.with_suffix(".err").read_text()
        assert "nothing half-written" in error and "Traceback" not in error
        assert not list(folder.iterdir())


def test_a_module_of_the_users_can_be_interrupted_while_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "float.onnx").write_bytes(conv_net().SerializeToString())
    np.save(tmp_path / "samples.npy", np.random.default_rng(0).random((8, 3, 16, 16), np.float32))
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(300)\n"
    )
    words = "tune float.onnx --include conv --no-state --workers 1 --calib samples.npy -o out --metric slow:metric"
    run = subprocess.Popen(
        [sys.executable, "-m", "qdqtool", *words.split()],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_default_signals,
    )
    try:
        until((tmp_path / "begun").exists)
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 130
    finally:
        run.kill()
        run.wait()


def test_ctrl_c_that_python_drops_while_the_command_line_is_loaded_comes_again() -> None:
    code = (
        "import sys, time, types, weakref\n"
        "import qdqtool.__main__ as program\n"
        "def stop(_):\n"
        "    raise KeyboardInterrupt\n"
        "def main():\n"
        "    gone = weakref.ref(type('Gone', (), {})(), stop)\n"
        "    time.sleep(20)\n"
        "sys.modules['qdqtool.commands.cli'] = types.SimpleNamespace(main=main)\n"
        "program.main()\n"
    )
    run = subprocess.run([sys.executable, "-c", code, "predict"], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


#: What happens to the command line, by name: its source, and what is on stdout when it has ended with 130.
_STOPPED = {
    # Ctrl-C while onnxruntime is loaded came as an error of its bindings, and ended with 2.
    **{
        kind: (
            f"""
def main(**_):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        raise {kind}('initialization failed') from None
cli.cli.main = main
""",
            "",
        )
        for kind in ("ImportError", "RuntimeError", "SystemError")
    },
    # Exceptions that are raised while an object is deleted are printed and forgotten.
    "dropped": (
        """
class Thing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
def main(**_):
    Thing()
    time.sleep(30)
cli.cli.main = main
""",
        "",
    ),
    # Threads that libraries start take signals as well, and Python's handler runs in the one that loads.
    "compiled": (
        """
begun = threading.Event()
def send():
    begun.wait()
    os.kill(os.getpid(), signal.SIGINT)
thread = threading.Thread(target=send)
def load(*_):
    begun.set()
    thread.join()
    print('loaded whole')
ExtensionFileLoader.exec_module = load
def main(**_):
    thread.start()
    ExtensionFileLoader.exec_module(None)
    print('went on')
cli.cli.main = main
""",
        "loaded whole\n",
    ),
    # Protobuf's compiled code calls Python's while onnx's classes are made, and does not bear an exception there.
    "modules": (
        """
Path('library.py').write_text("import os, signal\\nos.kill(os.getpid(), signal.SIGINT)\\nprint('loaded whole')\\n")
sys.path.insert(0, '')
def main(**_):
    import library
    print('went on')
cli.cli.main = main
""",
        "loaded whole\n",
    ),
}

#: Each in a copy of a process that has loaded the command line.
_EACH = """
import json, os, signal, sys, threading, time
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from qdqtool.commands import cli
codes = {}
for name, source in json.load(sys.stdin).items():
    if not (child := os.fork()):
        for number, end in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}.{end}", os.O_CREAT | os.O_WRONLY), number)
        exec(source)
        cli.main()
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""


@can_fork
def test_a_stop_that_a_library_keeps_or_drops_comes_again(tmp_path: Path) -> None:
    sources = json.dumps({name: source for name, (source, _) in _STOPPED.items()})
    run = subprocess.run(
        [sys.executable, "-c", _EACH],
        input=sources,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    said = "qdqtool: interrupted; nothing half-written was left\n"
    for name, code in json.loads(run.stdout).items():
        found = [(tmp_path / f"{name}.{end}").read_text() for end in ("out", "err")]
        assert (code, *found) == (130, _STOPPED[name][1], said), name


def test_a_stop_does_not_wait_for_threads_that_are_at_work(tmp_path: Path) -> None:
    """A second Ctrl-C leaves threads in a library; what is done at the end is done."""
    code = f"""if 1:
        import atexit, os, signal, threading, time
        from qdqtool.commands import cli
        def work():
            threading.Thread(target=time.sleep, args=(50,)).start()
            atexit.register(os.mkdir, {str(tmp_path / "ended")!r})
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(50)
        cli.run = work
        cli.main()
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=25)
    assert (run.returncode, run.stderr, (tmp_path / "ended").is_dir()) == (130, "", True)


@pytest.mark.parametrize("place", slow_after(1, [3, 5, 1, 0, 2, 4]))
def test_ctrl_c_at_any_moment(tmp_path: Path, place: int) -> None:
    (tmp_path / "model.onnx").write_bytes(network(11).SerializeToString())
    code, _, said = interrupts.trial("fix", tmp_path, place * 0.08)
    assert interrupts.right(code, said), (code, said)
