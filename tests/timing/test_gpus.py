import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.buildlog.types import Build, BuiltLayer
from qdqtool.errors import QdqtoolError
from qdqtool.evidence import Evidence
from qdqtool.ir.modelfile import load
from qdqtool.ir.precision import Precision
from qdqtool.prediction import predict
from qdqtool.reasons.finding import Severity
from qdqtool.timing import built_engine, gpus, time_calibration
from qdqtool.timing.built_engine import find_device_gpu, parse_device
from qdqtool.timing.gpus import find_gpu
from qdqtool.timing.on_gpu import predict_on_gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.timing.physics import estimate_seconds, load_constants
from qdqtool.trt.rtx.predict import build_status
from qdqtool.trt.targets import RTX, TARGETS
from tests.errors import has
from tests.notes import note, note_codes
from tests.timing.models import GPU, SHARED, TARGET, convolution_chain, estimate_model
from tests.trt import evidence
from tests.trt.builder import Graph


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 3080 Ti", "RTX 3080 Ti"),
        ("NVIDIA GeForce RTX 3080 Ti", "RTX 3080 Ti"),
        ("rtx3080ti", "RTX 3080 Ti"),
        ("Jetson Orin Nano", "Jetson Orin Nano 8GB"),
        ("orin-nx", "Jetson Orin NX 16GB"),
        ("Orin NX 8GB Super", "Jetson Orin NX 8GB Super"),
        ("Orin Nano 4GB Super", "Jetson Orin Nano 4GB Super"),
        ("AGX Orin", "Jetson AGX Orin 64GB"),
        ("Orin AGX", "Jetson AGX Orin 64GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("A100-SXM4-40GB", "A100 40GB"),
        ("T4", "Tesla T4"),
        ("V100-SXM2-16GB", "Tesla V100"),
        ("RTX 3060 (12GB)", "RTX 3060"),
        ("RTX 4070 SUPER", "RTX 4070 Super"),
        ("NVIDIA RTX 2000 Ada Generation Laptop GPU", "RTX 2000 Ada Laptop"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("rtx 4070 ti super", "RTX 4070 Ti Super"),
        ("3060", "RTX 3060"),
        ("1660 super", "GTX 1660 Super"),
        ("4070 ti super", "RTX 4070 Ti Super"),
        ("T1000", "T1000"),
        ("NVIDIA T1000 8GB", "T1000"),
        ("MX450", "MX450"),
        ("RTX 3050 6GB", "RTX 3050 6GB"),
        ("RTX 4060 Ti 16GB", "RTX 4060 Ti"),
        ("DGX Spark", "GB10"),
        ("gtx_1660_ti", "GTX 1660 Ti"),
        ("2080ti", "RTX 2080 Ti"),
    ],
)
def test_find_gpu_accepts_usual_spellings(text: str, name: str) -> None:
    assert gpus.find_gpu(text).name == name


@pytest.mark.parametrize("gpu", gpus.all_gpus(), ids=lambda gpu: gpu.name)
def test_table_of_gpus(gpu: gpus.Gpu) -> None:
    assert gpus.find_gpu(gpu.name) is gpus.find_gpu(gpu.name.upper()) is gpu
    for alias in gpu.aliases:
        shared = [g for g in gpus.all_gpus() if alias in g.aliases]
        assert gpus.match_gpus(alias) == shared, alias
        assert len(shared) > 1 or gpus.find_gpu(alias) is gpu, alias
    assert gpu.source and gpu.rates.source and gpu.cc in gpus.load_rates()
    assert 1 <= gpu.sms <= 200 and 500 <= gpu.clock <= 3000 and 0.1 <= gpu.l2 <= 130
    assert 20 <= gpu.bandwidth <= 9000 and 5 <= gpu.power <= 1400


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("RTX 3090", 0),
        ("RTX 4090", 1),  # FP32 accumulation at half the rate, as measured
        ("RTX 4060 Laptop", 1),
        ("RTX 5090", 1),
        ("L4", 2),
        ("L40S", 2),
        ("RTX 4000 Ada", 2),
        ("RTX 4000 SFF Ada", 2),
        ("RTX PRO 6000 Blackwell", 2),
        ("H100 SXM", 2),
        ("B200", 2),
        ("B300", 2),
    ],
)
def test_fp8_rate_over_fp16(name: str, ratio: float) -> None:
    gpu = gpus.find_gpu(name)
    assert (gpu.has_fp8, gpu.fp8_rate / gpu.rates.fp16) == (ratio > 0, ratio)


def test_list_of_gpus_is_refused() -> None:
    with pytest.raises(
        QdqtoolError, match="call the function once for each GPU", check=has("wrong-type")
    ):
        qdqtool.report(convolution_chain(), gpu=["RTX 4090", "L4"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "count"), [("Orin", 10), ("NVIDIA Tegra Orin (nvgpu)", 10), ("xavier", 2)]
)
def test_name_that_boards_share_is_ambiguous(text: str, count: int) -> None:
    with pytest.raises(
        QdqtoolError, match=f"{count} .*Jetson", check=has("ambiguous", parameter="gpu")
    ):
        gpus.choose_gpu(text)
    boards = gpus.match_gpus(text)
    assert len(boards) == count and all(gpus.find_gpu(g.name) is g for g in boards)


@pytest.mark.parametrize(
    ("text", "name", "others"),
    [
        ("A100", "A100 40GB", {"A100 80GB PCIe", "A100 80GB SXM"}),
        (
            "Orin NX",
            "Jetson Orin NX 16GB",
            {f"Jetson Orin NX {size}" for size in ("8GB", "8GB Super", "16GB Super")},
        ),
        ("RTX 3060", "RTX 3060", set()),
        ("T4", "Tesla T4", set()),
        ("RTX 4050", "RTX 4050 Laptop", set()),
        ("Jetson AGX Orin 64GB", "Jetson AGX Orin 64GB", set()),
        ("Orin Nano 16GB", "Jetson Orin Nano 8GB", set()),  # no board of this name has 16 GB
        ("RTX 3060 12GB", "RTX 3060", set()),
    ],
)
def test_variants_of_a_short_name(text: str, name: str, others: set[str]) -> None:
    gpu = gpus.choose_gpu(text)
    noted = [code for code in note_codes(gpu.notes) if code in ("taken-as", "size-ignored")]
    assert gpu.name == name and noted == ["taken-as"] * bool(others) + ["size-ignored"] * (
        text == "Orin Nano 16GB"
    )
    assert set(gpus.find_variants(text, name, [g.name for g in gpus.all_gpus()])) == others


# Dense INT8 TOPS and FP16 TFLOPS of NVIDIA's data sheets and whitepapers (half of the sparse figures).
@pytest.mark.parametrize(
    ("name", "int8", "fp16"),
    [
        ("A100 40GB", 624, 312),
        ("T4", 130, 65),
        ("RTX 3080", 238, 119),
        ("RTX 4090", 660.6, 330.3),
        ("A30", 330, 165),
        ("AGX Orin", 85, 42.5),
        ("Orin NX 16GB", 30, 15),
        ("H100 SXM", 1979, 989),
        ("RTX 2080 Ti", 215.2, 107.6),
        ("AGX Xavier", 22, 11),
        ("L4", 242, 121),
        ("Tesla P4", 22, None),
        ("V100", 62.7, 125),
        ("B200", 4500, 2250),
        ("B300", 150, 2250),
        ("GB300", 165, 2500),
    ],
)
def test_rates_agree_with_data_sheets(name: str, int8: float, fp16: float | None) -> None:
    gpu = gpus.find_gpu(name)
    assert math.isclose(2e-12 * gpu.mac_rate(Precision.INT8), int8, rel_tol=0.1)
    if fp16:
        assert math.isclose(2e-12 * gpu.mac_rate(Precision.FP16), fp16, rel_tol=0.1)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("rtx 9999", "unknown-choice"),
        ("", "missing-argument"),
        ("jetson", "unknown-choice"),
        pytest.param("x" * 1000, "missing-argument", id="long"),
        ("banana", "unknown-choice"),
    ],
)
def test_find_gpu_rejects_unknown_names(text: str, code: str) -> None:
    with pytest.raises(QdqtoolError, match="qdqtool gpus", check=has(code, parameter="gpu")):
        gpus.find_gpu(text)


@pytest.mark.parametrize(
    ("text", "first", "absent"),
    [
        ("T1200", "T1000", "Thor"),
        ("RTX 3060 Super", "RTX 3060", "Super"),
        ("RTX 3600", "RTX 3060", "5060"),
        ("RTX 3900 Ti", "RTX 3090 Ti", "5090"),
        ("RTX 3066", "RTX 3060", "5060"),
        ("RTX 30600", "RTX 3060", "5060"),
        ("RTX 360", "RTX 3060", "5060"),
        ("Orin AGX 64", "Jetson AGX Orin 64GB", "RTX"),
        ("L44", "L4", "RTX"),
        ("MX250", "MX350", "RTX"),
        ("jetson", "Jetson", "RTX"),
        ("GB200", "B200", "RTX"),
        ("RX 7900", "", "RTX"),
        ("K80", "", "mean"),
    ],
)
def test_suggested_names_are_of_the_same_series_or_number(
    text: str, first: str, absent: str
) -> None:
    near = gpus.suggest_names(text)
    assert near[0].startswith(first) if first else not near
    assert not any(absent in name for name in near)
    with pytest.raises(
        QdqtoolError, match=f"'{text}'.*{first}", check=has("unknown-choice", "`gpu='sm=8.6,")
    ):
        gpus.find_gpu(text)


def test_laptop_variant_has_a_lower_clock() -> None:
    desktop = gpus.find_gpu("RTX 2070 Super")
    gpu = gpus.choose_gpu("NVIDIA GeForce RTX 2070 Super with Max-Q Design")
    assert (
        gpu.sms == desktop.sms and gpu.clock < desktop.clock and note_codes(gpu.notes) == ["laptop"]
    )


def test_parse_description() -> None:
    gpu, listed = (
        gpus.choose_gpu("sm=8.6,sms=28,clock=1777,bandwidth=360,l2=3"),
        gpus.find_gpu("RTX 3060"),
    )
    assert (gpu.clocks_per_second, gpu.bandwidth) == (listed.clocks_per_second, listed.bandwidth)
    assert (gpu.rates, gpu.evidence) == (listed.rates, Evidence.ASSUMED)


def test_described_gpu_of_an_unknown_capability_has_the_rates_of_the_nearest() -> None:
    (note,) = gpus.choose_gpu("sm=9.9,sms=10,clock=1000,bandwidth=100").notes
    assert (note.code, note.values["nearest"]) == ("rates-of-nearest", "9.0")


@pytest.mark.parametrize(
    ("text", "ms"),
    [("5.3", 5.3), ("5.3 ms", 5.3), ("950us", 0.95), ("0.8 s", 800), ("profile.json", None)],
)
def test_parse_time(text: str, ms: float | None) -> None:
    assert time_calibration.parse_time(text) == (None if ms is None else pytest.approx(ms))


@pytest.mark.parametrize(
    ("text", "options", "code", "parameter"),
    [
        ("sm=8.6", {}, "wrong-type", "gpu"),
        ("sm=8.6,sms=0,clock=1,bandwidth=1", {}, "out-of-range", "gpu"),
        ("sm=x,sms=1,clock=1000,bandwidth=10", {}, "wrong-format", "sm"),
        ("foo=1", {}, "wrong-format", "gpu"),
        ("sm=4.0,sms=1,clock=1000,bandwidth=10", {}, "out-of-range", "sm"),
        ("sm=8.6,sms=nan,clock=1000,bandwidth=10", {}, "out-of-range", "gpu"),
        ("sm=8.6,sms=1,clock=1000,bandwidth=inf", {}, "out-of-range", "gpu"),
        ("orin nx", {"clock": 0.0}, "out-of-range", "clock"),
        ("orin nx", {"clock": 99999.0}, "out-of-range", "clock"),
        ("orin nx", {"clock": float("nan")}, "out-of-range", "clock"),
        ("orin nx", {"power": "lots"}, "unknown-choice", "power"),
        ("thor", {"power": "MAXN_FOO"}, "wrong-format", "power"),
        ("thor", {"power": "nan"}, "wrong-format", "power"),
        ("thor", {"power": "2W"}, "out-of-range", "power"),
        ("thor", {"power": "999W"}, "out-of-range", "power"),
    ],
)
def test_choose_gpu_rejects_descriptions_clocks_and_powers(
    text: str, options: dict[str, Any], code: str, parameter: str
) -> None:
    with pytest.raises(QdqtoolError, check=has(code, parameter=parameter)):
        gpus.choose_gpu(text, **options)


def test_gpus_that_do_not_sustain_their_clock() -> None:
    names = {g.name for g in gpus.all_gpus() if g.clock_share_under_load < 1}
    assert {"Tesla T4", "L4", "A10"} <= names <= {"Tesla T4", "L4", "A10", "MX450", "MX550"}
    # On a T4, YOLOv7 at batch 16 takes 1.54 times the estimate for the boost clock.
    assert (
        0.6 < gpus.find_gpu("T4").clock_share_under_load < 0.75
        and gpus.choose_gpu("T4", clock=1590).clock_share_under_load == 1
    )


def test_clock_falls_with_utilization_where_the_power_limit_is_low() -> None:
    t4 = gpus.find_gpu("T4")
    idle, half, full = (t4.clock_share_at(u) for u in (0.0, 0.5, 1.0))
    assert idle == 1 > half > full == pytest.approx(t4.clock_share_under_load)
    # 0.3 of the power under load remains without products, so half the products take 0.65 of it.
    assert (
        half == pytest.approx(full * 0.65**-0.4)
        and gpus.find_gpu("RTX 3060").clock_share_at(1.0) == 1
    )


def test_busy_network_is_timed_at_the_clock_of_the_power_limit() -> None:
    small, large = convolution_chain(channels=32), convolution_chain(channels=256, batch=16)
    assert estimate_model(small, gpus.find_gpu("T4"), compare=False)[1].clock_share == 1
    _, limited = estimate_model(large, gpus.find_gpu("T4"), compare=False)
    _, fixed = estimate_model(large, gpus.choose_gpu("T4", clock=1590), compare=False)
    assert (
        fixed.clock_share == 1 > limited.clock_share
        and fixed.total_ms < limited.total_ms < fixed.total_ms / limited.clock_share
    )
    _, same = estimate_model(
        large, gpus.choose_gpu("T4", clock=1590 * limited.clock_share), compare=False
    )
    assert same.total_ms == pytest.approx(limited.total_ms, rel=1e-3)
    # The upper end of the range is that of busy tensor cores.
    share, usual = gpus.find_gpu("T4").clock_share_under_load, load_constants().spreads["total"]
    assert limited.high_ms / limited.total_ms == pytest.approx(usual * limited.clock_share / share)


def network(act: str = "Relu", groups: int = 1) -> onnx.ModelProto:
    g = Graph()
    x = g.conv(g.input(1, 32, 16, 16), "a", 32, groups=groups)
    x = (
        g.relu(x, "r")
        if act == "Relu"
        else g.silu(x, "s")
        if act == "SiLU"
        else g.op(act, x, "act")
    )
    return g.model(g.conv(x, "b", 32, scale=0.05))


def codes(proto: onnx.ModelProto, sm: str, target: str = "trt8.5") -> set[str]:
    findings = predict_on_gpu(proto, target, TimingOptions(sm=sm))[0].findings
    ranks = [list(Severity).index(f.severity) for f in findings]
    assert ranks == sorted(ranks) and [f.id for f in findings] == list(range(len(findings)))
    return {f.code for f in findings if f.code.startswith("GPU-")}


@pytest.mark.parametrize(
    ("sm", "expected"),
    [
        ("GTX 1660", {"GPU-DP4A", "GPU-FUSION"}),
        ("6.1", {"GPU-DP4A", "GPU-FUSION"}),
        ("7.0", {"GPU-DP4A", "GPU-FUSION"}),
        ("V100", {"GPU-DP4A", "GPU-FUSION"}),
        ("GTX 1080", {"GPU-DP4A", "GPU-FUSION"}),
        ("7.5", set()),
        ("T4", set()),
        ("8.6", set()),
        ("6.0", {"GPU-NO-INT8"}),
        ("6.2", {"GPU-NO-INT8"}),
        ("P100", {"GPU-NO-INT8"}),
        ("TX2", {"GPU-NO-INT8"}),
        ("5.3", {"GPU-NO-INT8"}),
        ("AGX Orin", {"GPU-JETSON"}),
        ("Orin NX 16GB", {"GPU-JETSON"}),
        ("Orin Nano 8GB", set()),
        ("Jetson AGX Thor", {"GPU-VERSION"}),
        ("8.7", set()),
    ],
)
@pytest.mark.parametrize("act", ["LeakyRelu", "SiLU"])
def test_findings_of_a_gpu(sm: str, expected: set[str], act: str) -> None:
    assert codes(network(act), sm) - {"GPU-NO-FP16"} == expected


@pytest.mark.parametrize(
    ("request_", "int8"),
    [
        (TimingOptions(sm="75"), 0),
        (TimingOptions(sm="7.5"), 0),
        (TimingOptions(gpu="T4"), 0),
        (TimingOptions(gpu="RTX 2060", sm="7.5"), 0),
        (TimingOptions(sm="86"), 2),
        (TimingOptions(gpu="RTX 3060"), 2),
    ],
)
def test_rtx_has_no_int8_on_turing(request_: TimingOptions, int8: int) -> None:
    """Classic TensorRT has INT8 there."""
    prediction, time = predict_on_gpu(network(), "rtx1.7", request_)
    findings = [f.code for f in prediction.findings if f.convolutions]
    assert prediction.summary()["int8"] == int8 and findings.count("FLOAT-SM75") == 2 - int8
    if time is not None:  # without INT8 it is the time of the float network
        assert (time.gain is None) == ("without-qdq" in note_codes(time.notes)) == (not int8)
    assert predict_on_gpu(network(), "trt8.5", request_)[0].summary()["int8"] == 2


@pytest.mark.parametrize("gpu", gpus.all_gpus(), ids=lambda gpu: gpu.name)
def test_rtx_is_predicted_for_gpus_that_it_can_build_for(gpu: gpus.Gpu, g: Graph) -> None:
    assert TARGETS["trt10"].with_capability(gpu.cc).named_capability == gpu.cc  # any GPU
    # Values of ComputeCapability in TensorRT-RTX 1.7.1: Turing, Ampere, Ada and Blackwell of PCs.
    if gpu.cc in ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1"):
        assert RTX.with_capability(gpu.cc).capability_names == [gpu.cc]
        return
    model = g.model(g.relu(g.input(1, 16, 8, 8), "r"))
    for request in (TimingOptions(gpu=gpu.name), TimingOptions(sm=gpu.cc)):
        with pytest.raises(QdqtoolError, match=rf"^rtx1\.7 .* {gpu.cc}.* 12\.1"):
            predict_on_gpu(model, "rtx1.7", request)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, **machine: qdqtool.report(model, **machine),
        lambda model, **machine: qdqtool.compare(model, model, **machine),
        lambda model, **machine: qdqtool.verify(model, Build(layers=[BuiltLayer("a")]), **machine),
        lambda model, **machine: qdqtool.tune(model, [], **machine),
    ],
    ids=["report", "compare", "verify", "tune"],
)
def test_commands_reject_gpus_that_rtx_cannot_build_for(
    call: Callable[..., object], g: Graph
) -> None:
    model = g.model(g.conv(g.input(1, 16, 8, 8), "a", 16))
    with pytest.raises(QdqtoolError, match=r" 7\.0 .*V100"):
        call(model, target="rtx1.7", gpu="V100")


@pytest.mark.parametrize(("gpu", "status"), [("RTX 4090", "built"), ("RTX 3060", "refused")])
def test_type_that_a_gpu_lacks_is_refused_for_this_gpu(gpu: str, status: str) -> None:
    g = Graph(opset=19)
    scale, zero = g.const("scale", np.float32(0.1)), "zero"
    g.initializers.append(onnx.helper.make_tensor(zero, onnx.TensorProto.FLOAT8E4M3FN, [], [0.0]))
    x = g.op("QuantizeLinear", [g.input(1, 16, 8, 8), scale, zero], "q")
    proto = g.model(g.op("DequantizeLinear", [x, scale, zero], "dq"))
    prediction, _ = predict_on_gpu(proto, "rtx1.7", TimingOptions(gpu=gpu))
    assert build_status(prediction) == status


@pytest.mark.parametrize(
    ("groups", "gpu", "code", "expected"),
    [
        (32, "GTX 1650", "GPU-KERNELS", True),
        (32, "TITAN RTX", "GPU-KERNELS", False),
        (1, "GTX 1650", "GPU-KERNELS", False),
        (2, "GTX 1650", "GPU-KERNELS", False),
        (1, "6.1", "GPU-FUSION", False),  # without tensor cores, a Relu is fused nevertheless
    ],
)
def test_finding_about_kernels_of_a_gpu(groups: int, gpu: str, code: str, expected: bool) -> None:
    assert (code in codes(network("Relu", groups), gpu)) == expected


@pytest.mark.parametrize("sm", ["6.0", "AGX Orin"])
def test_float_model_has_no_findings_of_a_gpu(sm: str, g: Graph) -> None:
    assert not codes(g.model(g.conv(g.input(1, 16, 8, 8), "a", scale=None, weights="float")), sm)


# Device information that trtexec of TensorRT 8.2 to 8.6 prints: SMs, clock, memory, bus, memory clock.
ORIN_NX = {
    "Compute Capability": "8.7",
    "SMs": "4",
    "Compute Clock Rate": "0.765 GHz",
    "Device Global Memory": "7755 MiB",
    "Memory Bus Width": "256 bits (ECC disabled)",
    "Memory Clock Rate": "0.612 GHz",
}
AGX = {
    "Compute Capability": "8.7",
    "SMs": "16",
    "Compute Clock Rate": "1.275 GHz",
    "Device Global Memory": "28826 MiB",
    "Memory Bus Width": "128 bits (ECC disabled)",
    "Memory Clock Rate": "1.275 GHz",
}
TI = {
    "Compute Capability": "8.6",
    "SMs": "80",
    "Device Global Memory": "12023 MiB",
    "Memory Bus Width": "384 bits (ECC disabled)",
    "Application Compute Clock Rate": "1.695 GHz",
    "Application Memory Clock Rate": "9.501 GHz",
}
UNKNOWN = {"Compute Capability": "8.6", "SMs": "40", "Compute Clock Rate": "1.5 GHz"}
IMPOSSIBLE = {
    "Compute Capability": "8.6",
    "SMs": "0",
    "Compute Clock Rate": "9999 GHz",
    "Memory Bus Width": "1 bits",
    "Device Global Memory": "99999999999 MiB",
    "Memory Clock Rate": "1 GHz",
}


@pytest.mark.parametrize(
    ("name", "facts", "board", "sms", "clock", "bandwidth"),
    [
        ("Orin", ORIN_NX, "Jetson Orin NX 8GB", 4, 612, 102.4),
        ("Orin", AGX, "Jetson AGX Orin 64GB", 16, 1275, 204.8),
        (
            "Orin",
            AGX | {"SMs": "14", "Compute Clock Rate": "930 MHz", "Memory Clock Rate": "0.93 GHz"},
            "Jetson AGX Orin 32GB",
            14,
            930,
            204.8,
        ),
        ("NVIDIA GeForce RTX 3080 Ti", TI, "RTX 3080 Ti", 80, 1695, 384 / 8 * 9.501 * 2),
        (
            "NVIDIA A100-PCIE-40GB",
            {
                "Compute Capability": "8.0",
                "SMs": "108",
                "Compute Clock Rate": "1.41 GHz",
                "Memory Bus Width": "5120 bits (ECC enabled)",
                "Memory Clock Rate": "1.215 GHz",
            },
            "A100 40GB",
            108,
            1410,
            5120 / 8 * 1.215 * 2,
        ),
        (
            "Xavier",
            {"Compute Capability": "7.2", "SMs": "6", "Compute Clock Rate": "1.109 GHz"},
            "Jetson Xavier NX",
            6,
            1109,
            51.2,
        ),
        (
            "NVIDIA Future 9000",
            UNKNOWN | {"Memory Bus Width": "256 bits", "Memory Clock Rate": "7 GHz"},
            "NVIDIA Future 9000",
            40,
            1500,
            448,
        ),
        ("RTX 3060", IMPOSSIBLE, "RTX 3060", 28, 1777, 360),  # the figures of the table
    ],
)
def test_device_gpu_has_the_figures_of_the_log(
    name: str, facts: dict[str, str], board: str, sms: int, clock: float, bandwidth: float
) -> None:
    gpu = find_device_gpu(parse_device(name, facts))
    assert (gpu.name, gpu.sms, gpu.clock) == (board, sms, clock)
    # The clock is known.
    assert (gpu.bandwidth, gpu.clock_share_under_load) == (pytest.approx(bandwidth), 1)
    assert gpu.rates is gpus.load_rates()[facts["Compute Capability"]]


def test_device_gpu_notes_figures_that_differ_from_the_table() -> None:
    sms, clock = find_device_gpu(parse_device("Orin", ORIN_NX)).notes
    assert sms == note("sms-of-log", sms=4, board="Jetson Orin NX 8GB", own=8)
    assert clock.code == "clock-of-log" and 612 in (round(v) for v in clock.values.values())
    assert find_device_gpu(parse_device("Orin", AGX)).notes == ()


def test_device_gpu_guesses_the_bandwidth() -> None:
    gpu = find_device_gpu(parse_device("NVIDIA Future 9000", UNKNOWN))
    assert note_codes(gpu.notes) == ["bandwidth-guessed"] and 300 < gpu.bandwidth < 600


def test_device_gpu_clock_argument() -> None:
    gpu = find_device_gpu(parse_device("Orin", ORIN_NX), 500)
    assert (gpu.clock, gpu.sms) == (500, 4)


@pytest.mark.parametrize(
    "facts", [{}, {"Compute Capability": "8.7"}, {"SMs": "lots", "Compute Clock Rate": "fast"}]
)
def test_device_gpu_rejects_a_shared_name_without_figures(facts: dict[str, str]) -> None:
    with pytest.raises(QdqtoolError, match="10 GPUs", check=has("ambiguous", parameter="gpu")):
        find_device_gpu(parse_device("Orin", facts))
    build = Build(device="Orin", gpu=facts)
    assert built_engine.find_build_gpu(
        build
    ) is None and "Orin NX 8GB" in built_engine.explain_unknown_gpu(build)


@pytest.mark.parametrize(("name", "sms"), [("Orin NX 8GB", 4), ("AGX Orin", 4), ("RTX 3060", 28)])
def test_build_gpu_with_another_name(name: str, sms: int) -> None:
    """The number of SMs in the log counts unless the GPU has another compute capability."""
    assert built_engine.find_build_gpu(Build(device="Orin", gpu=ORIN_NX), name).sms == sms


# Calibration with a measured time or a profile.


def test_calibrate_with_a_measured_time() -> None:
    _, plain = estimate_model(convolution_chain(batch=8))
    measured = plain.total_ms * 1.3
    _, time = estimate_model(convolution_chain(batch=8), calibrate=f"{measured}ms")
    assert (
        time.total_ms == pytest.approx(measured, rel=1e-6)
        and time.high_ms / time.low_ms < plain.high_ms / plain.low_ms
    )


@pytest.fixture
def saved_calibration(tmp_path: Path) -> str:
    measured = estimate_model(convolution_chain(batch=8))[1].total_ms * 1.3
    _, time = estimate_model(convolution_chain(batch=8), calibrate=f"{measured}ms")
    (tmp_path / "machine.json").write_text(json.dumps(time.calibration.as_json()))
    return str(tmp_path / "machine.json")


def test_calibrate_with_a_saved_calibration(saved_calibration: str) -> None:
    (_, plain), (_, time) = (
        estimate_model(convolution_chain(2, batch=16), **options)
        for options in ({}, {"calibrate": saved_calibration})
    )
    assert time.total_ms == pytest.approx(1.3 * plain.total_ms, rel=1e-6)


def test_calibrate_rejects_the_calibration_of_another_gpu(saved_calibration: str) -> None:
    with pytest.raises(
        QdqtoolError, match="'RTX 3060'", check=has("different-gpus", path=saved_calibration)
    ):
        estimate_model(convolution_chain(), find_gpu("T4"), calibrate=saved_calibration)


def profile_layers(folder: Path, gpu: gpus.Gpu, more_us: float) -> tuple[np.ndarray, Any]:
    _, plain = estimate_model(convolution_chain(12, batch=8), gpu, compare=False)
    layers_ms = 1.5 * estimate_seconds(plain.workload.layers, gpu) * 1e3 + more_us * 1e-3
    profile = write_profile(folder, zip(layer_names(batch=8), layers_ms.tolist(), strict=True))
    options = {"calibrate": profile, "compare": False}
    return layers_ms, estimate_model(convolution_chain(12, batch=8), gpu, **options)[1]


@pytest.mark.parametrize(("more_us", "kernel_us"), [(4.0, 0.0), (9.5, 2.0)])
def test_calibrate_with_a_profile(tmp_path: Path, more_us: float, kernel_us: float) -> None:
    """Up to 7.5 us of each layer are the profiler's."""
    layers_ms, time = profile_layers(tmp_path, GPU, more_us)
    assert time.calibration.factor == pytest.approx(1.5, rel=0.05)
    assert time.calibration.overhead_us == pytest.approx(more_us - kernel_us, abs=0.5)
    assert time.calibration.kernel_us == pytest.approx(kernel_us, abs=0.5)
    overhead_ms = len(layers_ms) * (more_us - kernel_us) * 1e-3
    assert time.high_ms - 1.05 * time.total_ms == pytest.approx(overhead_ms, rel=0.3)


def test_calibrate_with_a_profile_of_a_jetson(tmp_path: Path) -> None:
    """On an Orin, the layers of a profile add up to the time without a profiler or to less."""
    layers_ms, time = profile_layers(tmp_path, find_gpu("AGX Orin 64GB"), 4.0)
    assert time.calibration.overhead_us == 0
    assert sum(time.layers) == pytest.approx(layers_ms.sum(), rel=0.02)


def test_calibrate_with_a_profile_without_visible_overhead(tmp_path: Path) -> None:
    """Each profile of a GPU with its own memory had an overhead of at least 0.5 us."""
    layers_ms, time = profile_layers(tmp_path, GPU, 0.0)
    assert time.calibration.overhead_us == 0.5
    assert sum(w.kind != "nothing" for w in time.workload.layers) == len(layers_ms)
    assert time.calibration.factor == pytest.approx(1.5, rel=0.01)
    assert time.calibration.kernel_us == pytest.approx(-0.5, abs=0.05)


def layer_names(**options: Any) -> list[str]:
    return [layer.name for layer in predict(load(convolution_chain(12, **options)), TARGET).layers]


def write_profile(folder: Path, layers: Iterable[tuple[str, float]]) -> str:
    rows = [
        {"name": name, "timeMs": ms, "averageMs": ms, "medianMs": ms, "percentage": 1.0}
        for name, ms in layers
    ]
    (folder / "profile.json").write_text(json.dumps([{"count": 1}, *rows]))
    return str(folder / "profile.json")


# Milliseconds of one execution without profiler, of engines that were profiled as well.
@pytest.mark.parametrize(
    ("case", "gpu", "measured"),
    [
        ("resnet18-a100-qat", "A100 80GB PCIe", 0.882),
        ("resnet18-a100-qat-residual", "A100 80GB PCIe", 0.546),
        ("resnet18-a100-qat-residual-qgap", "A100 80GB PCIe", 0.500),
    ],
)
def test_calibrate_with_a_recorded_profile(case: str, gpu: str, measured: float) -> None:
    profile = SHARED / case / "profile.json"
    if not profile.exists():
        pytest.skip("the published profiles are not available")
    _, time = estimate_model(evidence.model(case), find_gpu(gpu), calibrate=str(profile))
    assert (
        time.total_ms == pytest.approx(measured, rel=0.18)
        and time.low_ms <= 1.12 * measured
        and measured <= time.high_ms
    )


def test_calibrate_rejects_the_profile_of_another_engine(tmp_path: Path) -> None:
    layers = [(name if i == 3 else f"other{i}", 1.0) for i, name in enumerate(layer_names())]
    path = write_profile(tmp_path, layers)
    with pytest.raises(QdqtoolError, match="only 1 ", check=has("different-models", path=path)):
        estimate_model(convolution_chain(12), calibrate=path)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("0", "out-of-range"),
        ("0ms", "out-of-range"),
        *((text, "file-missing") for text in ("1e9s", "nothing.json", "5 parsecs", "-3")),
    ],
)
def test_calibrate_rejects_other_text(text: str, code: str) -> None:
    with pytest.raises(QdqtoolError, check=has(code, parameter="calibrate")):
        estimate_model(convolution_chain(), calibrate=text)


SCHEMA = '"schema": "qdqtool/time-calibration/1"'


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (f"{{{SCHEMA}}}", "file-damaged"),
        (f'{{{SCHEMA}, "gpu": "RTX 3060", "factor": NaN, "kernel_us": 0}}', "file-damaged"),
        (f'{{{SCHEMA}, "gpu": "RTX 3060", "factor": 1e9, "kernel_us": 0}}', "implausible-time"),
        ("[", "wrong-format"),
        ("{}", "no-layer-list"),
        ("", "empty"),
    ],
    ids=["no fields", "NaN", "huge factor", "bracket", "empty JSON", "empty"],
)
def test_calibrate_rejects_damaged_files(tmp_path: Path, content: str, code: str) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(QdqtoolError, match=r"c\.json", check=has(code)):
        estimate_model(convolution_chain(), calibrate=str(tmp_path / "c.json"))
