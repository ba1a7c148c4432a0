import os
import subprocess
import sys
from pathlib import Path

import pytest

from qdqtool.util.subprocesses import run_command, temporary_folder


def test_run_command_returns_the_exit_code_and_output(tmp_path: Path) -> None:
    output = tmp_path / "output"
    command = [sys.executable, "-c", "import sys; print('text'); sys.exit(3)"]
    with output.open("wb") as file:
        assert run_command(command, 60, file) == 3
    assert output.read_text() == "text\n"


def test_run_command_returns_none_after_a_timeout() -> None:
    assert run_command([sys.executable, "-c", "import time; time.sleep(60)"], 0.2) is None


def test_run_command_raises_for_a_missing_program() -> None:
    with pytest.raises(OSError, match="no-such-program"):
        run_command(["no-such-program"], 60)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no process groups here")
@pytest.mark.parametrize("timeout", [60, 0.5], ids=["exits", "timeout"])
def test_run_command_ends_the_process_group(tmp_path: Path, timeout: float) -> None:
    """A grandchild keeps the write end of a pipe open until it ends."""
    read, write = os.pipe()
    sleep = f"{sys.executable} -c 'import time; time.sleep(600)'"
    wait = "wait" if timeout < 1 else ":"
    os.set_inheritable(write, True)
    script = f"import subprocess; subprocess.Popen({f'{sleep} & {wait}'!r}, shell=True, close_fds=False).wait()"
    child = (
        "import os, sys; from qdqtool.util.subprocesses import run_command; "
        f"os.write(1, str(run_command([sys.executable, '-c', {script!r}], {timeout})).encode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", child], pass_fds=[write], capture_output=True, text=True, timeout=120
    )
    os.close(write)
    assert done.returncode == 0, done.stderr
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b""  # all writers are gone


def test_temporary_folder_is_removed() -> None:
    with temporary_folder("test-") as folder:
        (Path(folder) / "file").write_text("text")
        assert Path(folder).name.startswith("qdqtool-test-")
    assert not Path(folder).exists()
