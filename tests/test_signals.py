"""Signals at any moment: what is ended, what is cleaned up, and with which code."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.grammar import network
from tests.fuzz_inputs import interrupts
from tests.fuzz_inputs.seeds import write_seeds
from tests.slow import slow_after


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
import sys, time
from qdqtool.commands import cli
from qdqtool.base import outputs
from qdqtool.base import process
import click
@cli.cli.command("wait")
@click.argument("path")
def wait(path):
    with outputs.atomic_write(path) as file:
        file.write(b"half")
        file.flush()
        print("ready", flush=True)
        time.sleep(60)
cli.LazyGroup.get_command = lambda self, ctx, name: click.Group.get_command(self, ctx, name)
cli.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_signals_clean_up(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", _WAIT, "wait", str(tmp_path / "out")], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, preexec_fn=_default_signals)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert len(list(tmp_path.iterdir())) == 1
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert "nothing half-written" in error and "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_a_module_of_the_users_can_be_interrupted_while_it_is_loaded(tmp_path: Path) -> None:
    write_seeds(tmp_path)
    (tmp_path / "slow.py").write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(300)\n")
    words = "tune float.onnx --include conv --no-state --workers 1 --calib samples.npy -o out --metric slow:metric"
    run = subprocess.Popen([sys.executable, "-m", "qdqtool", *words.split()], cwd=tmp_path, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL, preexec_fn=_default_signals)
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


@pytest.mark.parametrize("kind", ["ImportError", "RuntimeError", "SystemError"])
def test_a_signal_that_a_library_turned_into_its_own_error(kind: str) -> None:
    """Ctrl-C while onnxruntime is loaded came as an error of its bindings, and ended with 2."""
    code = (
        "import os, signal, sys\n"
        "from qdqtool.commands import cli\n"
        "def main(**_):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except BaseException:\n"
        f"        raise {kind}('initialization failed') from None\n"
        "cli.cli.main = main\n"
        "cli.main()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (130, "")
    assert run.stderr == "qdqtool: interrupted; nothing half-written was left\n"


def test_a_stop_that_python_drops_comes_again() -> None:
    """Exceptions that are raised while an object is deleted are printed and forgotten."""
    code = (
        "import os, signal, time\n"
        "from qdqtool.commands import cli\n"
        "class Thing:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(0.1)\n"
        "def main(**_):\n"
        "    Thing()\n"
        "    time.sleep(30)\n"
        "cli.cli.main = main\n"
        "cli.main()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=25)
    assert (run.returncode, run.stdout) == (130, "")
    assert run.stderr == "qdqtool: interrupted; nothing half-written was left\n"


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


def test_a_signal_waits_for_a_compiled_module_whichever_thread_takes_it() -> None:
    """Threads that libraries start take signals as well, and Python's handler runs in the one that loads."""
    code = (
        "import os, signal, threading\n"
        "from importlib.machinery import ExtensionFileLoader\n"
        "from qdqtool.commands import cli\n"
        "begun = threading.Event()\n"
        "def send():\n"
        "    begun.wait()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "thread = threading.Thread(target=send)\n"
        "def load(*_):\n"
        "    begun.set()\n"
        "    thread.join()\n"
        "    print('loaded whole')\n"
        "ExtensionFileLoader.exec_module = load\n"
        "def main(**_):\n"
        "    thread.start()\n"
        "    ExtensionFileLoader.exec_module(None)\n"
        "    print('went on')\n"
        "cli.cli.main = main\n"
        "cli.main()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=25)
    assert (run.returncode, run.stdout) == (130, "loaded whole\n"), run.stderr
    assert run.stderr == "qdqtool: interrupted; nothing half-written was left\n"


def test_ctrl_c_while_a_library_of_python_modules_loads(tmp_path: Path) -> None:
    """Protobuf's compiled code calls Python's while onnx's classes are made, and does not bear an exception there."""
    (tmp_path / "library.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('loaded whole')\n")
    code = ("from qdqtool.commands import cli\ndef main(**_):\n    import library\n    print('went on')\n"
            "cli.cli.main = main\ncli.main()\n")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=25,
                         env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])})
    assert (run.returncode, run.stdout) == (130, "loaded whole\n"), run.stderr


@pytest.mark.parametrize("place", slow_after(1, [3, 5, 1, 0, 2, 4]))
def test_ctrl_c_at_any_moment(tmp_path: Path, place: int) -> None:
    (tmp_path / "model.onnx").write_bytes(network(11).SerializeToString())
    code, _, said = interrupts.trial("fix", tmp_path, place * 0.08)
    assert interrupts.right(code, said), (code, said)
