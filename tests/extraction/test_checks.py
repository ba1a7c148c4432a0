from pathlib import Path
from typing import Any
from unittest.mock import Mock

import onnx
import pytest

import qdqtool
from qdqtool.commands.process import StopRequest
from qdqtool.errors import QdqtoolError
from qdqtool.extraction.checks import CommandCheck
from qdqtool.util.process import INTERRUPTED
from tests.builders.models import needs_compiler
from tests.errors import has
from tests.extraction.networks import residual
from tests.insertion.nets import operators, with_constant_nodes
from tests.notes import note_codes
from tests.trt.builder import Graph


@needs_compiler
def test_builder_refusal_is_extracted(g: Graph) -> None:
    x = g.relu(g.conv(g.input(1, 8, 8, 8), "c0", scale=0.05), "r0")
    x = g.relu(g.conv(x, "c1", scale=0.05), "r1")
    result = qdqtool.extract(
        g.model(g.dq(g.q(x, "q", 0.1, zero=5), "dq", 0.1, zero=5)), builder="tensorrt-rtx"
    )
    assert result.checked.values["status"] == "refused"
    assert "zero point" in result.checked.values["message"].lower()
    assert operators(result.proto) == ["QuantizeLinear", "DequantizeLinear"]


def script(folder: Path, source: str) -> str:
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
    assert (result.checked.code, result.checked.values["exit_code"]) == ("checked-command", 3)


@pytest.mark.parametrize(
    ("options", "code", "phrases", "parameter"),
    [
        pytest.param(
            {"check": "sh -c 'exit 3'", "limit": 200},
            "check-ignores-model",
            [],
            "check",
            id="command that ignores the model",
        ),
        pytest.param(
            {"check": "sh -c 'exec sleep 30'", "check_timeout": 0.4, "limit": 200},
            "timeout",
            ["0.4 s", "`check_timeout`"],
            "check",
            id="command that does not end",
        ),
        pytest.param(
            {"builder": "tensorrt-rtx"},
            "builds-as-predicted",
            ["`finding`"],
            "builder",
            id="builder that builds as predicted",
            marks=needs_compiler,
        ),
    ],
)
def test_check_without_a_fault_is_an_error(
    options: dict[str, Any], code: str, phrases: list[str], parameter: str
) -> None:
    with pytest.raises(QdqtoolError, check=has(code, *phrases, parameter=parameter)):
        qdqtool.extract(residual(1), **options)


def test_command_gets_the_model_file_and_runs_without_shell(tmp_path: Path) -> None:
    arguments = tmp_path / "arguments"
    command = script(tmp_path, f"IFS='|'; printf %s \"$*\" > '{arguments}'")
    CommandCheck(residual(1), f"{command} --onnx={{}} ; $(true) last").close()
    first, *others = arguments.read_text().split("|")
    assert first.startswith("--onnx=") and first.endswith("model.onnx")
    assert others == [";", "$(true)", "last"]


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
    with pytest.raises(
        QdqtoolError, check=has("text-not-printed", "'never'", "(exit code 0)", parameter="says")
    ):
        CommandCheck(residual(1), script(tmp_path, TWO_FAULTS), "never")


@pytest.mark.slow
def test_exit_code_alone_may_find_another_fault(g: Graph, tmp_path: Path) -> None:
    result = qdqtool.extract(conv_and_pool(g), check=script(tmp_path, TWO_FAULTS), limit=12)
    assert "Conv" not in operators(result.proto) and "exit-code-alone" in note_codes(result.notes)


@pytest.mark.slow
def test_says_keeps_the_fault(g: Graph, tmp_path: Path) -> None:
    result = qdqtool.extract(
        conv_and_pool(g), check=script(tmp_path, TWO_FAULTS), says="pooling of", limit=30
    )
    assert {"Conv", "MaxPool"} <= set(operators(result.proto))
    assert (
        result.checked.code,
        result.checked.values["exit_code"],
        result.checked.values["says"],
    ) == ("checked-command-saying", 1, "pooling of")
    assert "exit-code-alone" not in note_codes(result.notes)


ADD_AND_NEIGHBORS: dict[str, Any] = {"node": "b1.sum", "hops": 2, "check": "true", "minimize": True}


@pytest.fixture
def interrupt_third_check(monkeypatch: pytest.MonkeyPatch, stop: BaseException) -> None:
    monkeypatch.setattr(CommandCheck, "has_same_behavior", Mock(side_effect=[True, True, stop]))


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), StopRequest(INTERRUPTED)])
@pytest.mark.usefixtures("interrupt_third_check")
def test_interrupted_minimize_returns_smallest_model() -> None:
    model = residual()
    result = qdqtool.extract(model, keep_interrupted=True, **ADD_AND_NEIGHBORS)
    assert result.interrupted and result.as_json()["interrupted"]
    assert result.notes[0].code == "interrupted"
    assert "SKIP-FLOAT" in result.prediction.findings_by_code()
    assert len(result.proto.graph.node) < len(model.graph.node)


@pytest.mark.parametrize(
    ("stop", "keep"),
    [(KeyboardInterrupt(), False), (StopRequest(INTERRUPTED), False), (StopRequest(143), True)],
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
        pytest.param("x" * (1 << 17), "not-started", id="too-long"),
    ],
)
def test_command_that_cannot_run_is_an_error(command: str, code: str) -> None:
    with pytest.raises(QdqtoolError, check=has(code, parameter="check")):
        CommandCheck(residual(1), command)


def test_text_is_found_at_the_end_of_the_output() -> None:
    check = CommandCheck(residual(1), "sh -c 'head -c 3000000 /dev/zero; printf there'", "there")
    assert check.has_same_behavior(residual(1))
    check.close()


def test_command_may_need_constant_nodes(tmp_path: Path) -> None:
    model = with_constant_nodes(residual(2))
    result = qdqtool.extract(
        model,
        finding="SKIP-FLOAT",
        check=script(tmp_path, 'if grep -q Constant "$1"; then exit 3; fi'),
    )
    plain = qdqtool.extract(model, finding="SKIP-FLOAT")
    assert "Constant" in operators(result.proto) and not result.notes
    assert "Constant" not in operators(plain.proto)
    assert len(plain.proto.graph.node) < len(result.proto.graph.node) < len(model.graph.node)
