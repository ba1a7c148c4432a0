from dataclasses import replace

import onnx
import pytest

from qdqtool.buildlog.build_status import is_implicit_int8
from qdqtool.buildlog.read import read_build
from qdqtool.commands.cli import run
from qdqtool.errors import BuildLogError
from qdqtool.verification.api import verify
from tests.buildlog.evidence import build_file
from tests.buildlog.samples import build_of
from tests.errors import has
from tests.trt.evidence import HOME
from tools.fuzz.net import Net

IMPLICIT = [("mobilenet-fpn-implicit-int8", "log.txt"), ("aeb-implicit-int8-layers", "graph.json")]


def quantized_convolution() -> onnx.ModelProto:
    net = Net()
    proto = net.model(net.conv(net.qdq(net.input((1, 8, 8, 8))), 8, 3, name="c"))
    for i, node in enumerate(n for n in proto.graph.node if n.op_type == "QuantizeLinear"):
        node.name = f"int8_{i}"
    return proto


CONV = "Layer(CaskConvolution): {}, Tactic: 0x1, x[{}(1,8,8,8)] -> y[{}(1,8,8,8)]\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CONV.format("Conv_0 + Relu_1", "Int8", "Int8"), True),
        (CONV.format("Conv_0 + Relu_1", "Half", "Half"), False),
        (CONV.format("w + QuantizeLinear_7 + Conv_0", "Int8", "Int8"), False),
        (CONV.format("Conv_0", "Int8", "Int8") + "[V] [TRT] Running: QDQToCopy on q\n", False),
        (
            "[V] [TRT] q0 [QuantizeLinear] inputs: [x -> (1)[FLOAT]], \n"
            + CONV.format("w + q1 + c", "Int8", "Int8"),
            False,
        ),
        (
            "[W] [TRT] Missing scale and zero-point for tensor 495, expect fall back to non-int8\n",
            True,
        ),
        ("[W] [TRT] Calibrator won't be used in explicit precision mode.\n", False),
    ],
)
def test_implicit_int8(text: str, expected: bool) -> None:
    assert is_implicit_int8(build_of(text)) is expected


@pytest.mark.parametrize(("case", "name"), IMPLICIT)
def test_commands_report_recorded_implicit_builds(
    case: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(build_file(case, name))
    for command in ("log", "engine"):
        assert run([command, path]) == 0
        assert "implicit-INT8 build" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("case", "name"), IMPLICIT)
def test_verify_rejects_recorded_implicit_builds(
    case: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = str(build_file(case, name)), str(HOME / "resnet18-a100-qat" / "model.onnx.gz")
    for argument, text in ((model, "another model"), ("--from-log", "implicit-INT8 build")):
        assert run(["verify", argument, path]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("resnet18-a100-qat", "graph.json"),
        ("mobilenetv2-titanrtx-qat-residual", "graph.json"),
        ("centernet-resnet34-qat-trt80", "log.txt"),
        ("bev-blackwell-trt10", "graph.json"),
        ("yolov8-orin-trt8412-excerpts", "log.txt"),
        ("resnet18-a100-fp16", "graph.json"),
        ("centerpoint-a100-trt823-fp16", "log.txt"),
    ],
)
def test_recorded_explicit_and_float_builds_are_not_implicit(case: str, name: str) -> None:
    assert not is_implicit_int8(read_build(build_file(case, name)))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (CONV.format("c", "Int8", "Int8"), "implicit-int8"),
        ("[W] [TRT] Missing scale and zero-point for tensor 495\n", "implicit-int8"),
        (CONV.format("other", "Int8", "Int8"), "different-models"),
        (CONV.format("c", "Int8", "Int8").replace("8,8,8)]", "4,4,4)]"), "different-models"),
    ],
    ids=["same model", "warning without layers", "another layer", "another size"],
)
def test_verify_compares_models_before_it_reports_implicit_int8(text: str, code: str) -> None:
    build = replace(build_of(text), files=["a.log", "b.json"])
    with pytest.raises(BuildLogError, check=has(code, path="a.log, b.json")):
        verify(quantized_convolution(), build)


def test_verify_finds_quantizers_by_their_names_in_the_model() -> None:
    build = build_of(CONV.format("w + int8_1 + c", "Int8", "Float"))
    assert is_implicit_int8(build)
    assert verify(quantized_convolution(), build).convolutions.total == 1
