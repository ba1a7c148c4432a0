import re

import numpy as np
import onnx
import pytest

from qdqtool import Precision, Prediction, predict
from qdqtool.evidence import Evidence
from qdqtool.findings import codes
from qdqtool.findings.report import title_of
from qdqtool.formats.verdicts import verdict
from qdqtool.reasons.finding import Severity
from qdqtool.timing import work
from qdqtool.timing.gpus import all_gpus, find_gpu
from qdqtool.timing.on_gpu import predict_on_gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.trt.targets import target_named
from tests.trt.builder import Graph


def chain(*types: str, channels: int = 32, half: bool = False, **options: int) -> onnx.ModelProto:
    g = Graph(opset=19, half=half)
    x = g.input(1, channels, 8, 8)
    for number, kind in enumerate(types):
        g.fp8 = kind == "FP8"
        x = g.relu(g.conv(x, f"c{number}", channels, **options), f"r{number}")
    return g.model(x)


def severities(prediction: Prediction) -> dict[str, Severity]:
    return {f.code: f.severity for f in prediction.findings if f.code.startswith("FP8")}


@pytest.mark.parametrize("target", ["trt10", "trt11", "rtx1.7"])
def test_summary_counts_types_apart(target: str) -> None:
    prediction = predict(chain("INT8", "FP8", "FP8"), target)
    precisions = [c.precision for c in prediction.convolutions]
    assert precisions == [Precision.INT8, Precision.FP8, Precision.FP8]
    summary = prediction.summary()
    assert (summary["int8"], summary["fp8"], summary["float"]) == (1, 2, 0)
    assert "1 of 3 convolutions in INT8 and 2 in FP8" in verdict(prediction)


def test_fp8_layers_write_fp8_to_each_other() -> None:
    summary = predict(chain("FP8", "FP8", "FP8"), "trt11").summary()
    assert (summary["fp8_to_fp8"], summary["fp8_to_float"]) == (2, 1)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("target", ["trt8.0", "trt8.5", "trt8.6"])
def test_tensorrt_8_rejects_fp8(target: str, half: bool) -> None:
    findings = predict(chain("FP8", half=half), target).findings
    assert [f.code for f in findings if f.severity == Severity.ERROR] == ["FP8-TARGET"]


@pytest.mark.parametrize(
    ("channels", "severity"), [(32, Severity.WARNING), (16, Severity.INFO)], ids=["32", "16"]
)
def test_float_residual_of_fp8_is_a_note_with_few_channels(
    channels: int, severity: Severity
) -> None:
    g = Graph(opset=19, fp8=True)
    x = g.relu(g.conv(g.input(1, 32, 8, 8), "c0", channels), "r0")
    branch = g.conv(x, "c1", channels, scale=None, weights="float")
    y = g.concat([g.add(x, g.relu(branch, "r1"), "sum"), x], "cat")
    findings = predict(g.model(g.conv(y, "c2", 32)), "trt11").findings
    assert {f.severity for f in findings if f.code == "SKIP-FLOAT"} == {severity}


def test_weakly_typed_target_is_reported_and_built_strongly_typed() -> None:
    prediction = predict(chain("FP8"), "trt10")
    assert severities(prediction) == {"FP8-WEAK": Severity.INFO}
    assert prediction.choose_typing(target_named("trt10")).strongly_typed
    assert not predict(chain("INT8"), "trt10").choose_typing(target_named("trt10")).strongly_typed
    assert not severities(predict(chain("FP8"), "10.3-strongly-typed"))


@pytest.mark.parametrize(
    ("capability", "is_refused"), [("8.6", True), ("8.9", False), ("9.0", False), ("12.0", False)]
)
def test_gpu_without_fp8_is_an_error(capability: str, is_refused: bool) -> None:
    prediction = predict_on_gpu(chain("FP8"), "trt10", TimingOptions(sm=capability))[0]
    assert (severities(prediction).get("FP8-GPU") == Severity.ERROR) == is_refused


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, ""),
        ({"channels": 16}, "FP8-SLOW"),
        ({"channels": 17}, "CH-ALIGN"),
        ({"channels": 40}, "CH-ALIGN"),
        ({"groups": 32}, "FP8-SLOW"),
        ({"groups": 2, "channels": 64}, "FP8-SLOW"),
    ],
)
def test_few_channels_and_groups_are_slow(options: dict[str, int], code: str) -> None:
    codes = {f.code for f in predict(chain("FP8", **options), "trt10").findings}
    assert codes & {"FP8-SLOW", "CH-ALIGN", "CH-SMALL"} == ({code} if code else set())


@pytest.mark.parametrize("kernel", [3, 7])
@pytest.mark.parametrize("name", ["L4", "RTX 4090", "H100 SXM", "B200", "B300", "Jetson Thor"])
def test_advice_follows_the_rates_of_the_gpu(name: str, kernel: int) -> None:
    gpu = find_gpu(name)
    assert gpu.has_fp8
    model = chain("FP8", k=kernel, channels=16)
    prediction, _ = predict_on_gpu(model, "10.16", TimingOptions(gpu=name))
    general = {f.code: f.fix for f in predict(model, "10.16").findings}
    advice = {f.code: f.fix for f in prediction.findings if f.code.startswith("FP8-")}
    code = "FP8-KERNEL" if kernel == 7 else "FP8-SLOW"
    assert ("make it INT8" in advice[code]) == (gpu.rates.int8 > gpu.rates.fp16)
    assert advice[code] != general[code]


def test_advice_without_a_gpu_names_none() -> None:
    for code in ("FP8-KERNEL", "FP8-SLOW", "FP8-DECONV"):
        entry = codes.get(code)
        text = " ".join((entry.cause, entry.tensorrt, entry.fix, *entry.fix_by_rate))
        assert not [gpu.name for gpu in all_gpus() if gpu.name in text]
        assert entry.fix_on(True) != entry.fix_on(False) and entry.fix_on(None) == entry.fix


def chain_of_type(name: str) -> onnx.ModelProto:
    model = chain("FP8", "FP8")
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT8E4M3FN:
            new = onnx.helper.make_tensor(
                tensor.name,
                getattr(onnx.TensorProto, name),
                tensor.dims,
                [0.0] * int(np.prod(tensor.dims)),
            )
            tensor.CopyFrom(new)
    return model


@pytest.mark.parametrize("name", ["FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E4M3FNUZ"])
@pytest.mark.parametrize("target", ["trt8.5", "trt10", "trt11", "rtx1.7"])
def test_other_fp8_types_are_an_error(name: str, target: str) -> None:
    prediction = predict(chain_of_type(name), target)
    assert "QTYPE" in {f.code for f in prediction.findings if f.severity == Severity.ERROR}
    assert not any(c.is_fp8 for c in prediction.convolutions)


def test_rtx_predicts_fp8_for_8_9_unless_a_gpu_is_named() -> None:
    assert predict(chain("FP8"), "rtx1.7").compute_capabilities == ["8.9"]
    assert predict(chain("INT8"), "rtx1.7").compute_capabilities == ["8.6"]
    findings = predict(chain("FP8"), target_named("rtx1.7").with_capability("8.6")).findings
    assert any(f.severity == Severity.ERROR for f in findings)


@pytest.mark.parametrize(
    ("target", "capability", "is_computed"),
    [
        ("10.0", "9.0", False),
        ("10.1", "9.0", False),
        ("10.2", "9.0", True),
        ("10.2", "8.9", False),
        ("10.2.0", "12.0", False),
        ("10.3", "8.9", True),
        ("11.0", "8.9", True),
    ],
)
def test_first_version_with_fp8_convolutions(
    target: str, capability: str, is_computed: bool
) -> None:
    """NVIDIA in NVIDIA/TensorRT issue 3987: 10.2 on Hopper, 10.3 on Ada."""
    prediction = predict_on_gpu(chain("FP8", "FP8"), target, TimingOptions(sm=capability))[0]
    assert prediction.summary()["fp8"] == (2 if is_computed else 0)
    assert ("FP8-VERSION" in severities(prediction)) != is_computed


def test_10_2_without_a_gpu_is_predicted_for_hopper_with_a_warning() -> None:
    prediction = predict(chain("FP8", "FP8"), "10.2")
    assert prediction.summary()["fp8"] == 2
    (finding,) = (f for f in prediction.findings if f.code == "FP8-VERSION")
    assert finding.severity == Severity.WARNING and set(finding.convolutions) == {"c0", "c1"}


@pytest.mark.parametrize("target", ["trt10", "10.1", "10.3"])
def test_float_rest_of_fp8_is_predicted_as_the_printed_command_builds_it(target: str) -> None:
    """``--stronglyTyped`` keeps the FP32 of the file."""
    prediction = predict(chain("FP8", "FP8"), target)
    assert prediction.choose_typing(target_named(target)).strongly_typed
    assert "FLOAT-FP32" in {f.code for f in prediction.findings}
    assert prediction.convolutions[-1].output == Precision.FP32
    assert prediction.requested_target == target
    assert f" for TensorRT {target.removeprefix('trt')}, strongly typed: " in repr(prediction)
    timed, time = predict_on_gpu(chain("FP8"), target, TimingOptions(gpu="L4"))
    assert timed.target == prediction.target
    assert {w.written_as for w in time.workload.layers if w.kind == work.CONV} == {Precision.FP32}
    assert time.quantized == Precision.FP8


@pytest.mark.parametrize("target", ["trt10", "trt11", "rtx1.7"])
@pytest.mark.parametrize("op", ["Conv", "MatMul", "Gemm"])
@pytest.mark.parametrize("data", ["INT8", "FP8"])
def test_one_layer_of_both_types_is_an_error(data: str, op: str, target: str) -> None:
    """TensorRT-RTX 1.7.1 rejects the layer for 8.9."""
    g = Graph(opset=19)
    x = g.input(1, 32, 8, 8) if op == "Conv" else g.input(8, 32)
    weights = g.const("weights", np.ones((32, 32, 1, 1) if op == "Conv" else (32, 32)))
    operands = []
    for tensor, is_fp8 in ((x, data == "FP8"), (weights, data != "FP8")):
        g.fp8 = is_fp8
        operands.append(g.pair(tensor, f"{tensor}.pair"))
    prediction = predict(g.model(g.op(op, operands, "layer")), target)
    (error,) = (f for f in prediction.findings if f.severity == Severity.ERROR)
    assert error.code == "BUILD-FAILS" and "layer" in error.convolutions
    assert {"INT8", "FP8"} <= set(re.findall(r"\w+", error.message))


@pytest.mark.parametrize("target", ["trt10", "trt11"])
def test_texts_about_e5m2_do_not_say_int8(target: str) -> None:
    findings = predict(chain_of_type("FLOAT8E5M2"), target).findings
    assert not any("INT8" in f.message for f in findings)
    assert any("E5M2" in f.message and "E4M3FN" in f.fix for f in findings)


@pytest.mark.parametrize("target", ["trt10", "trt11"])
def test_findings_of_an_fp8_network_do_not_speak_of_int8(target: str) -> None:
    """The findings are OUT-FLOAT, INPUT-CONVERSION and FP8-WEAK. No TensorRT build shows them."""
    prediction = predict(chain("FP8", "FP8"), target)
    findings = {f.code: f for f in prediction.findings if f.code != "FLOAT-FP32"}
    assert {"OUT-FLOAT", "INPUT-CONVERSION"} <= findings.keys()
    for finding in findings.values():
        assert "INT8" not in finding.message + finding.fix and finding.evidence != Evidence.SEEN
        assert not title_of(finding.code).startswith("An INT8")
    assert not any(c.evidence == Evidence.SEEN for c in prediction.convolutions if c.is_fp8)
