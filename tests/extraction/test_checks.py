"""Compilers and commands that judge smaller models."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import onnx
import pytest

import qdqtool
from qdqtool.base import budgets
from qdqtool.base.notes import Remark, remarks
from qdqtool.base.owntime import OwnTime
from qdqtool.base.process import INTERRUPTED, Stopped
from qdqtool.builders import run
from qdqtool.builders.child import is_installed
from qdqtool.errors import QdqtoolError
from qdqtool.extraction import checks
from qdqtool.extraction.checks import CommandCheck
from tests.errors import has
from tests.extraction.networks import residual, with_constant_nodes
from tests.extraction.processes import needs_proc, new_mark, sleeping, wait_until
from tests.trt.builder import Graph

needs_compiler = pytest.mark.skipif(
    not is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed"
)


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@needs_compiler
def test_builder_refusal_is_extracted() -> None:
    """The compiler refuses the zero point of the last quantizer."""
    g = Graph()
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "c0", scale=0.05), "r0")
    x = g.relu(g.conv(x, "c1", scale=0.05), "r1")
    model = g.model(g.dq(g.q(x, "q", 0.1, zero=5), "dq", 0.1, zero=5))
    result = qdqtool.extract(model, builder="tensorrt-rtx")
    assert result.checked.values["status"] == "refused"
    assert "zero point" in result.checked.values["message"].lower()
    assert operators(result.proto) == ["QuantizeLinear", "DequantizeLinear"]


@needs_compiler
def test_builder_that_builds_as_predicted_is_an_error() -> None:
    expected = has("builds-as-predicted", parameter="builder")
    with pytest.raises(QdqtoolError, check=expected) as caught:
        qdqtool.extract(residual(1), builder="tensorrt-rtx")
    assert "`finding`" in str(caught.value)


def script(folder: Path, source: str) -> str:
    """Write a shell script, which starts in a fifth of Python's time, and return its command."""
    path = folder / "check it.sh"
    path.write_text(source)
    return f"sh '{path}'"


def conv_and_pool(g: Graph) -> onnx.ModelProto:
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "c0", scale=None, weights="float"), "r0")
    return g.model(g.relu(g.pool(x, "pool"), "r1"))


def test_command_exit_code_decides(g: Graph, tmp_path: Path) -> None:
    command = script(tmp_path, 'if grep -q MaxPool "$1"; then exit 3; fi')
    result = qdqtool.extract(conv_and_pool(g), check=command)
    assert operators(result.proto) == ["MaxPool"]
    assert (result.checked.remark, result.checked.values["code"]) == (Remark.CHECKED_COMMAND, 3)


def test_command_that_ignores_the_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(QdqtoolError, check=has("check-ignores-model", parameter="check")):
        qdqtool.extract(residual(1), check=script(tmp_path, "exit 3"), limit=200)


def test_says_without_command_is_an_error() -> None:
    with pytest.raises(QdqtoolError, check=has("missing-argument", parameter="check")):
        qdqtool.extract(residual(1), finding="SKIP-FLOAT", says="pooling")


def test_command_runs_without_shell(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    CommandCheck(residual(1), f"true ; touch {trap} $(touch {trap})").close()
    assert not trap.exists()


def test_command_placeholder_is_the_model_file(tmp_path: Path) -> None:
    arguments = tmp_path / "arguments"
    command = script(tmp_path, f"IFS='|'; printf %s \"$*\" > '{arguments}'")
    CommandCheck(residual(1), f"{command} --onnx={{}} last").close()
    first, last = arguments.read_text().split("|")
    assert first.startswith("--onnx=") and first.endswith("model.onnx") and last == "last"


# In a file, an operator's name follows its length.
TWO_FAULTS = r"""
has() { LC_ALL=C grep -q "$(printf "$(printf '"\\%03o%s' ${#1} $1)")" "$model"; }
model=$1; conv=0; pool=0; relu=0
if has Conv; then conv=1; fi
if has MaxPool; then pool=1; fi
if has Relu; then relu=1; fi
head -c 3000000 /dev/zero
case $conv$pool in
11) echo "Error: pooling of $((2 + relu))" >&2; exit 1;;
0?) if [ $pool$relu != 00 ]; then echo another Error >&2; exit 1; fi;;
esac
"""


def test_text_that_the_command_does_not_print_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(QdqtoolError, check=has("text-not-printed", parameter="says")) as caught:
        CommandCheck(residual(1), script(tmp_path, TWO_FAULTS), "never")
    assert "'never'" in str(caught.value) and "(exit code 0)" in str(caught.value)


@pytest.mark.slow
def test_exit_code_alone_may_find_another_fault(g: Graph, tmp_path: Path) -> None:
    command = script(tmp_path, TWO_FAULTS)
    result = qdqtool.extract(conv_and_pool(g), check=command, limit=12)
    assert "Conv" not in operators(result.proto)
    assert Remark.EXIT_CODE_ALONE in remarks(result.notes)


@pytest.mark.slow
def test_says_keeps_the_fault(g: Graph, tmp_path: Path) -> None:
    command = script(tmp_path, TWO_FAULTS)
    result = qdqtool.extract(conv_and_pool(g), check=command, says="pooling of", limit=30)
    assert {"Conv", "MaxPool"} <= set(operators(result.proto))
    assert result.checked.remark is Remark.CHECKED_COMMAND_SAYING
    assert (result.checked.values["code"], result.checked.values["says"]) == (1, "pooling of")
    assert Remark.EXIT_CODE_ALONE not in remarks(result.notes)


ADD_AND_NEIGHBORS: dict[str, Any] = {"node": "b1.sum", "hops": 2, "check": "true", "minimize": True}


@pytest.fixture
def interrupt_third_check(monkeypatch: pytest.MonkeyPatch, stop: BaseException) -> None:
    answers = iter([True, True])

    def holds(self: CommandCheck, proto: onnx.ModelProto) -> bool:
        for answer in answers:
            return answer
        raise stop

    monkeypatch.setattr(CommandCheck, "holds", holds)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Stopped(INTERRUPTED)])
@pytest.mark.usefixtures("interrupt_third_check")
def test_interrupted_minimize_returns_smallest_model() -> None:
    model = residual()
    result = qdqtool.extract(model, keep_interrupted=True, **ADD_AND_NEIGHBORS)
    assert result.interrupted and result.as_json()["interrupted"]
    assert result.notes[0].remark is Remark.INTERRUPTED
    assert "SKIP-FLOAT" in result.prediction.findings_by_code()
    assert len(result.proto.graph.node) < len(model.graph.node)


@pytest.mark.parametrize(
    ("stop", "keep"),
    [(KeyboardInterrupt(), False), (Stopped(INTERRUPTED), False), (Stopped(143), True)],
)
@pytest.mark.usefixtures("interrupt_third_check")
def test_stopped_minimize_raises(stop: BaseException, keep: bool) -> None:
    with pytest.raises(type(stop)):
        qdqtool.extract(residual(), keep_interrupted=keep, **ADD_AND_NEIGHBORS)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        pytest.param("", "empty", id="empty"),
        pytest.param("'open", "wrong-format", id="open-quote"),
        pytest.param("no-such-program-here", "missing-program", id="no-program"),
        pytest.param("true a\0b", "not-started", id="nul"),
        pytest.param("true \ud800", "not-started", id="surrogate"),
        pytest.param("x" * (budgets.COMMAND + 1), "too-long", id="too-long"),
    ],
)
def test_command_that_cannot_run_is_an_error(command: str, code: str) -> None:
    with pytest.raises(QdqtoolError, check=has(code, parameter="check")):
        CommandCheck(residual(1), command)


def test_command_that_does_not_end_is_an_error() -> None:
    with pytest.raises(QdqtoolError, check=has("timeout", parameter="check")) as caught:
        qdqtool.extract(residual(1), check="sh -c 'exec sleep 900'", check_timeout=0.4)
    assert "0.4 s" in str(caught.value) and "`check_timeout`" in str(caught.value)


def test_check_timeout_of_zero_is_an_error() -> None:
    with pytest.raises(QdqtoolError, match="check_timeout=0"):
        qdqtool.extract(residual(1), check="true", check_timeout=0)


HANG_WITHOUT_POOL = """
if grep -q Conv "$1"; then while :; do :; done; fi
grep -q MaxPool "$1" || exec sleep 900
"""


class RecordingCheck(CommandCheck):
    """A check that keeps the time of each run."""

    times: list[OwnTime]

    def code(self, proto: onnx.ModelProto, own: OwnTime) -> int | None:
        self.times = [*getattr(self, "times", ()), own]
        return super().code(proto, own)


@needs_proc
def test_command_that_hangs_on_a_smaller_model_is_ended_early(
    g: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "PATIENCE", 0.05)
    monkeypatch.setattr(checks, "SLOWER", 0.1)
    pool = g.model(g.pool(g.input(1, 8, 8, 8), "pool"))
    check = RecordingCheck(pool, script(tmp_path, HANG_WITHOUT_POOL), timeout=60)
    g = Graph()
    for model in (residual(1), g.model(g.relu(g.input(1, 8, 8, 8), "asleep"))):
        assert not check.holds(model)
    check.close()
    whole, busy, asleep = check.times
    assert min(busy.seconds, asleep.seconds) > 0.05 + 0.1 * whole.seconds
    assert busy.is_over(os.getpid()) and asleep.is_over(os.getpid())


@needs_proc
def test_own_time_counts_sleep_but_no_stop() -> None:
    with subprocess.Popen(["sleep", "900"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            own = OwnTime()
            own.is_over(process.pid)
            stopped = own.seconds
            for _ in range(3):
                own.is_over(process.pid)
            assert own.seconds == stopped
            process.send_signal(signal.SIGCONT)
            wait_until(lambda: own.is_over(process.pid) or own.seconds > stopped)
        finally:
            process.kill()


def test_own_time_is_the_clock_if_the_process_is_not_shown() -> None:
    """As on systems without /proc."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    begin = time.monotonic()
    own = OwnTime()
    created = time.monotonic()
    assert not own.is_over(process.pid)
    assert OwnTime(0.0).is_over(process.pid)
    before = time.monotonic() - created
    assert not own.is_over(process.pid)
    assert before <= own.seconds <= time.monotonic() - begin


def test_command_output_is_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "COMMAND_OUTPUT", 100_000)
    command = "sh -c 'printf here; head -c 3000000 /dev/zero; printf there'"
    check = CommandCheck(residual(1), command, "here")
    assert check.output.stat().st_size == 100_000 and check.holds(residual(1))
    check.close()
    with pytest.raises(QdqtoolError, check=has("text-not-printed", parameter="says")):
        CommandCheck(residual(1), command, "there")


@pytest.fixture
def mark() -> str:
    return new_mark()


@needs_proc
@pytest.mark.parametrize(
    ("command", "timeout"),
    [
        ("sh -c 'timeout 900 sleep {}; exit 3'", 1.0),
        ("bash -c 'set -m; sleep {} & wait'", 1.0),
        ("sh -c 'setsid sleep {} & sleep 900'", 1.0),
        ("sh -c '(env -i setsid sleep {} &); exec sleep 900'", 1.0),
        ("sh -c 'kill -STOP $PPID; sleep {}'", 1.0),
        ("sh -c '(while :; do kill -STOP $PPID; done) & sleep {}'", 0.4),  # it is busy
        ("sh -c 'kill -STOP $PPID; exec env -i setsid sleep {}'", 1.0),
    ],
)
def test_command_that_does_not_end_leaves_no_process(
    command: str, timeout: float, mark: str
) -> None:
    with pytest.raises(QdqtoolError, check=has("timeout", parameter="check")):
        CommandCheck(residual(1), command.replace("{}", mark), timeout=timeout)
    assert not sleeping(mark)


@needs_proc
def test_command_that_ends_leaves_no_process(mark: str) -> None:
    kinds = f"sleep {mark} & setsid sleep {mark} & (env -i setsid sleep {mark} &)"
    CommandCheck(residual(1), f"sh -c '{kinds} ; exit 0'").close()
    assert not sleeping(mark)


@needs_proc
def test_command_that_kills_its_parent_leaves_no_process(mark: str, tmp_path: Path) -> None:
    started = tmp_path / "started"
    begin = f'env -i setsid sh -c "echo > {started}; exec sleep {mark}" &'
    wait = f"until [ -e {started} ]; do :; done"
    end = f"sleep {mark} & setsid sleep {mark} & sleep {mark}"
    with pytest.raises(QdqtoolError, match=r"signal 9"):
        CommandCheck(residual(1), f"sh -c '{begin} {wait}; kill -KILL $PPID; {end}'")
    assert not sleeping(mark)


@needs_proc
def test_killed_process_leaves_nothing_stopped(mark: str) -> None:
    process = os.fork()
    if not process:
        try:
            run.exit_code(["sh", "-c", f"kill -STOP $PPID; sleep {mark}"], 60)
        finally:
            os._exit(0)
    try:
        # The command's parent is stopped. Its command line is there before the command runs.
        wait_until(lambda: len(sleeping(mark, "T")) == 1)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    wait_until(lambda: not sleeping(mark))


def test_command_may_need_constant_nodes(tmp_path: Path) -> None:
    model = with_constant_nodes(residual(2))
    command = script(tmp_path, 'if grep -q Constant "$1"; then exit 3; fi')
    result = qdqtool.extract(model, finding="SKIP-FLOAT", check=command)
    plain = qdqtool.extract(model, finding="SKIP-FLOAT")
    assert "Constant" in operators(result.proto) and not result.notes
    assert "Constant" not in operators(plain.proto)
    assert len(plain.proto.graph.node) < len(result.proto.graph.node) < len(model.graph.node)
