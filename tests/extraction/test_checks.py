"""Compilers and commands that judge smaller models."""

from pathlib import Path
from typing import Any

import onnx
import pytest

import qdqtool
from qdqtool.base import budgets
from qdqtool.base.notes import Remark, remarks
from qdqtool.base.process import INTERRUPTED, Stopped
from qdqtool.builders.child import is_installed
from qdqtool.errors import QdqtoolError
from qdqtool.extraction.checks import CommandCheck
from tests.extraction.networks import residual, with_constant_nodes
from tests.raising import raises
from tests.trt.builder import Graph

needs_compiler = pytest.mark.skipif(
    not is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed"
)


def refused() -> onnx.ModelProto:
    """A network whose last quantizer has a zero point, which the compiler refuses."""
    g = Graph()
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "c0", scale=0.05), "r0")
    x = g.relu(g.conv(x, "c1", scale=0.05), "r1")
    return g.model(g.dq(g.q(x, "q", 0.1, zero=5), "dq", 0.1, zero=5))


@needs_compiler
def test_builds_that_are_refused_and_healthy_ones() -> None:
    result = qdqtool.extract(refused(), builder="tensorrt-rtx")
    assert result.checked.values["status"] == "refused"
    assert "zero point" in result.checked.values["message"].lower()  # the compiler's words
    assert [n.op_type for n in result.proto.graph.node] == ["QuantizeLinear", "DequantizeLinear"]
    with raises(QdqtoolError, "Job.use finding"):
        qdqtool.extract(residual(1), builder="tensorrt-rtx")


def script(folder: Path, source: str) -> str:
    """For a shell, which starts in a fifth of Python's time."""
    path = folder / "check it.sh"
    path.write_text(source)
    return f"sh '{path}'"


def test_commands_that_say_something(g: Graph, tmp_path: Path) -> None:
    """Exits with 3 for models that hold a MaxPool."""
    x = g.conv(g.input(1, 8, 8, 8), "c0", scale=None, weights="float")
    model = g.model(g.relu(g.pool(x, "pool"), "r1"))
    command = script(tmp_path, 'if grep -q MaxPool "$1"; then exit 3; fi')
    result = qdqtool.extract(model, check=command)
    assert [n.op_type for n in result.proto.graph.node] == ["MaxPool"]
    assert (result.checked.remark, result.checked.values["code"]) == (Remark.CHECKED_COMMAND, 3)
    with raises(QdqtoolError, "CommandCheck.__init__ never 0"):
        CommandCheck(residual(1), script(tmp_path, _TWO_FAULTS), "never")
    with raises(QdqtoolError, "extract well"):
        qdqtool.extract(residual(1), finding="SKIP-FLOAT", says="pooling")
    with raises(QdqtoolError, "Job.minimize model"):
        qdqtool.extract(result.proto, check=script(tmp_path, "exit 3"), limit=200)
    trap = tmp_path / "trap"
    check = CommandCheck(residual(1), f"true ; touch {trap} $(touch {trap})")
    check.close()
    assert not trap.exists()
    seen = tmp_path / "seen"
    command = script(tmp_path, f"IFS='|'; printf %s \"$*\" > '{seen}'")
    CommandCheck(residual(1), f"{command} --onnx={{}} last").close()
    first, last = seen.read_text().split("|")
    assert first.startswith("--onnx=") and first.endswith("model.onnx") and last == "last"


# An operator's name stands behind its length.
_TWO_FAULTS = r"""
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


@pytest.mark.slow
def test_the_same_exit_code_for_another_reason_is_another_fault(g: Graph, tmp_path: Path) -> None:
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "c0", scale=None, weights="float"), "r0")
    model = g.model(g.relu(g.pool(x, "pool"), "r1"))
    command = script(tmp_path, _TWO_FAULTS)
    loose = qdqtool.extract(model, check=command, limit=12)
    assert all(n.op_type != "Conv" for n in loose.proto.graph.node)
    assert Remark.EXIT_CODE_ALONE in remarks(loose.notes)
    held = qdqtool.extract(model, check=command, says="pooling of", limit=30)
    assert {"Conv", "MaxPool"} <= {n.op_type for n in held.proto.graph.node}
    assert held.checked.remark is Remark.CHECKED_COMMAND_SAYING
    assert (held.checked.values["code"], held.checked.values["says"]) == (1, "pooling of")
    assert Remark.EXIT_CODE_ALONE not in remarks(held.notes)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Stopped(INTERRUPTED)])
def test_what_was_found_before_an_interruption_is_kept(
    monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    calls = 0

    def holds(self: CommandCheck, proto: onnx.ModelProto) -> bool:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise stop
        return True

    monkeypatch.setattr(CommandCheck, "holds", holds)
    model = residual()
    whole: dict[str, Any] = {"node": "b1.sum", "hops": 2, "check": "true", "minimize": True}
    result = qdqtool.extract(model, keep_interrupted=True, **whole)
    assert (
        result.interrupted
        and result.as_json()["interrupted"]
        and result.notes[0].remark is Remark.INTERRUPTED
    )
    assert any(f.code == "SKIP-FLOAT" for f in result.prediction.findings) and len(
        result.proto.graph.node
    ) < len(model.graph.node)
    calls = 0
    with pytest.raises(type(stop)):
        qdqtool.extract(model, **whole)


def test_searches_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def holds(self: CommandCheck, proto: onnx.ModelProto) -> bool:
        raise Stopped(143)

    monkeypatch.setattr(CommandCheck, "holds", holds)
    with pytest.raises(Stopped):
        qdqtool.extract(residual(), check="true", keep_interrupted=True)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "is empty"),
        ("'open", "cannot be split"),
        ("no-such-program-here", "cannot be run"),
        ("true a\0b", "cannot be run"),
        ("true \ud800", "cannot be run"),
        ("x" * (budgets.COMMAND + 1), "characters"),
    ],
)
def test_commands_that_are_none(command: str, said: str) -> None:
    with pytest.raises(QdqtoolError, match=said):
        CommandCheck(residual(1), command)


def test_command_check_reports_a_timeout() -> None:
    command = "sh -c 'exec sleep 30'"
    with pytest.raises(QdqtoolError, match=r"did not end within 0\.5 s"):
        CommandCheck(residual(1), command, timeout=0.5)
    with pytest.raises(QdqtoolError, match=r"did not end within 0\.4 s"):
        qdqtool.extract(residual(1), check=command, check_timeout=0.4)
    with pytest.raises(QdqtoolError, match="check_timeout=0"):
        qdqtool.extract(residual(1), check=command, check_timeout=0)


def test_only_the_first_of_the_output_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "COMMAND_OUTPUT", 100_000)
    command = "sh -c 'printf here; head -c 3000000 /dev/zero; printf there'"
    check = CommandCheck(residual(1), command, "here")
    assert check._output.stat().st_size == 100_000 and check.holds(residual(1))
    check.close()
    with raises(QdqtoolError, "CommandCheck.__init__ there"):
        CommandCheck(residual(1), command, "there")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_constants_stay_nodes_where_the_command_needs_them(tmp_path: Path) -> None:
    model = with_constant_nodes(residual(2))
    command = script(tmp_path, 'if grep -q Constant "$1"; then exit 3; fi')
    result = qdqtool.extract(model, finding="SKIP-FLOAT", check=command)
    plain = qdqtool.extract(model, finding="SKIP-FLOAT")
    assert any(n.op_type == "Constant" for n in result.proto.graph.node) and not result.notes
    assert not any(n.op_type == "Constant" for n in plain.proto.graph.node)
    assert len(plain.proto.graph.node) < len(result.proto.graph.node) < len(model.graph.node)
