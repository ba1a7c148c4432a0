"""GPUs are found by any usual name, and their figures agree with what NVIDIA publishes."""

import json
import math
from pathlib import Path

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.base.notes import Remark, remarks
from qdqtool.buildlog.types import Build, BuiltLayer
from qdqtool.commands.cli import run
from qdqtool.errors import QdqtoolError
from qdqtool.model.modelfile import load
from qdqtool.options import Request
from qdqtool.prediction import predict
from qdqtool.timing import expected, gpus
from qdqtool.timing import parts as calibration
from qdqtool.timing.estimate import predict_on
from qdqtool.timing.expected import gpu_of_device, of_facts
from qdqtool.timing.gpus import find
from qdqtool.timing.physics import seconds
from qdqtool.trt.rtx.predict import status_of
from qdqtool.trt.targets import RTX, TARGETS
from qdqtool.types import Evidence, Precision
from tests.raising import raises
from tests.timing.models import GPU, SHARED, TARGET, chain, timed
from tests.trt import evidence
from tests.trt.builder import Graph


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("RTX 3080 Ti", "RTX 3080 Ti"),
        ("NVIDIA GeForce RTX 3080 Ti", "RTX 3080 Ti"),
        ("rtx3080ti", "RTX 3080 Ti"),
        ("Jetson Orin Nano", "Jetson Orin Nano 8GB"),
        ("orin-nx", "Jetson Orin NX 16GB"),
        ("AGX Orin", "Jetson AGX Orin 64GB"),
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
def test_names(typed, name):
    assert gpus.find(typed).name == name


def test_every_name_finds_its_own_line_with_sane_figures():
    for gpu in gpus.gpus():
        assert gpus.find(gpu.name) is gpus.find(gpu.name.upper()) is gpu
        for alias in gpu.aliases:
            shared = [g for g in gpus.gpus() if alias in g.aliases]
            assert gpus.answering(alias) == shared, alias
            assert len(shared) > 1 or gpus.find(alias) is gpu, alias
        assert gpu.source and gpu.rates.source, gpu.name
        assert 1 <= gpu.sms <= 200 and 500 <= gpu.clock <= 3000 and 0.1 <= gpu.l2 <= 130, gpu.name
        assert 20 <= gpu.bandwidth <= 9000 and 5 <= gpu.power <= 1000, gpu.name
    assert len({g.name for g in gpus.gpus()}) == len(gpus.gpus()) > 90
    assert {g.cc for g in gpus.gpus()} <= set(gpus.rates())
    paths = {
        "P100": "none",
        "GTX 1080": "dp4a",
        "V100": "dp4a",
        "GTX 1660": "dp4a",
        "T4": "tensor",
        "TX2": "none",
    }
    assert {name: gpus.find(name).rates.int8_path for name in paths} == paths


@pytest.mark.parametrize(
    ("typed", "boards"), [("Orin", 8), ("NVIDIA Tegra Orin (nvgpu)", 8), ("xavier", 2)]
)
def test_a_name_that_boards_share_is_refused_with_their_names(typed, boards):
    with raises(QdqtoolError, f"find {boards} Jetson"):
        gpus.chosen(typed)
    assert len(gpus.answering(typed)) == boards and all(
        gpus.find(g.name) is g for g in gpus.answering(typed)
    )


@pytest.mark.parametrize(
    ("typed", "taken", "others"),
    [
        ("A100", "A100 40GB", {"A100 80GB PCIe", "A100 80GB SXM"}),
        ("Orin NX", "Jetson Orin NX 16GB", {"Jetson Orin NX 8GB", "Jetson Orin NX 16GB Super"}),
        ("RTX 3060", "RTX 3060", set()),
        ("T4", "Tesla T4", set()),
        ("RTX 4050", "RTX 4050 Laptop", set()),
        ("Jetson AGX Orin 64GB", "Jetson AGX Orin 64GB", set()),
    ],
)
def test_what_a_short_name_could_mean_besides_is_said(typed, taken, others):
    gpu = gpus.chosen(typed)
    assert gpu.name == taken and (Remark.TAKEN_AS in remarks(gpu.notes)) == bool(others)
    assert set(gpus.variants(typed, taken, [g.name for g in gpus.gpus()])) == others


# Dense INT8 TOPS and FP16 TFLOPS as NVIDIA's data sheets and whitepapers print them (half of the sparse figure).
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
    ],
)
def test_rates_agree_with_published_ones(name, int8, fp16):
    gpu = gpus.find(name)
    assert math.isclose(2e-12 * gpu.mac_rate(Precision.INT8), int8, rel_tol=0.1)
    if fp16:
        assert math.isclose(2e-12 * gpu.mac_rate(Precision.FP16), fp16, rel_tol=0.1)


@pytest.mark.parametrize("typed", ["rtx 9999", "", "jetson", "x" * 1000, "banana"])
def test_unknown_names_are_refused_with_a_way_out(typed):
    with pytest.raises(QdqtoolError, match="qdqtool gpus"):
        gpus.find(typed)


@pytest.mark.parametrize(
    ("typed", "first", "never"),
    [
        ("T1200", "T1000", "Thor"),
        ("RTX 3060 Super", "RTX 3060", "Super"),
        ("MX250", "MX350", "RTX"),
        ("jetson", "Jetson", "RTX"),
        ("GB200", "B200", "RTX"),
        ("RX 7900", "", "RTX"),
        ("K80", "", "mean"),
    ],
)
def test_the_nearest_names_are_of_the_same_series_or_number(typed, first, never):
    near = gpus.near_names(typed)
    assert near[0].startswith(first) if first else not near
    assert not any(never in name for name in near)
    with raises(QdqtoolError, f"find {typed} {first}"):
        gpus.find(typed)


def test_gpus_that_are_unknown_or_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    gpu = gpus.chosen("NVIDIA GeForce RTX 2070 Super with Max-Q Design")
    assert (
        gpu.sms == gpus.find("RTX 2070 Super").sms and gpu.clock < gpus.find("RTX 2070 Super").clock
    )
    assert remarks(gpu.notes) == [Remark.LAPTOP]
    onnx.save(network(), tmp_path / "m.onnx")
    assert run(["predict", str(tmp_path / "m.onnx"), "--sm", "GTX 1666"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1 and "GTX 1660" in told.err
    gpu = gpus.chosen("sm=8.6,sms=28,clock=1777,bandwidth=360,l2=3")
    known = gpus.find("RTX 3060")
    assert (gpu.per_second, gpu.bandwidth, gpu.rates) == (
        known.per_second,
        known.bandwidth,
        known.rates,
    )
    assert gpu.evidence == Evidence.ASSUMED
    (note,) = gpus.chosen("sm=9.9,sms=10,clock=1000,bandwidth=100").notes
    assert (note.remark, note.values["nearest"]) == (Remark.RATES_OF_NEAREST, "9.0")
    times = {
        "5.3": 5.3,
        "5.3 ms": 5.3,
        "950us": pytest.approx(0.95),
        "0.8 s": 800,
        "profile.json": None,
    }
    assert {text: calibration.measured_time(text) for text in times} == times


@pytest.mark.parametrize(
    "text",
    [
        "sm=8.6",
        "sm=8.6,sms=0,clock=1,bandwidth=1",
        "sm=x,sms=1,clock=1000,bandwidth=10",
        "foo=1",
        "sm=4.0,sms=1,clock=1000,bandwidth=10",
        "sm=8.6,sms=nan,clock=1000,bandwidth=10",
        "sm=8.6,sms=1,clock=1000,bandwidth=inf",
    ],
)
def test_bad_descriptions(text):
    with pytest.raises(QdqtoolError):
        gpus.chosen(text)


def test_clock_and_power():
    assert gpus.chosen("orin nx", clock=600).clock == 600
    low = gpus.chosen("orin nx", power="10W")
    assert low.clock < gpus.chosen(
        "orin nx", power="MAXN"
    ).clock == 918 and Remark.CLOCK_GUESSED in remarks(low.notes)
    for bad in ({"clock": 0.0}, {"clock": 99999.0}, {"clock": float("nan")}, {"power": "lots"}):
        with pytest.raises(QdqtoolError):
            gpus.chosen("orin nx", **bad)
    low = {g.name for g in gpus.gpus() if g.sustained < 1}
    assert {"Tesla T4", "L4", "A10"} <= low <= {"Tesla T4", "L4", "A10", "MX450", "MX550"}
    assert (
        0.6 < gpus.find("T4").sustained < 0.75
    )  # YOLOv7 at batch 16 takes 1.54 times the estimate at the boost clock
    assert gpus.chosen("T4", clock=1590).sustained == 1


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
    prediction, _ = predict_on(proto, target, Request(sm=sm))
    return {f.code for f in prediction.findings if f.code.startswith("GPU-")}


@pytest.mark.parametrize(
    ("sm", "told"),
    [
        ("GTX 1660", {"GPU-DP4A", "GPU-FUSION"}),
        ("6.1", {"GPU-DP4A", "GPU-FUSION"}),
        ("7.0", {"GPU-DP4A", "GPU-FUSION"}),
        ("7.5", set()),
        ("T4", set()),
        ("8.6", set()),
        ("6.0", {"GPU-NO-INT8"}),
        ("6.2", {"GPU-NO-INT8"}),
        ("5.3", {"GPU-NO-INT8"}),
        ("AGX Orin", {"GPU-JETSON"}),
        ("8.7", set()),
    ],
)
@pytest.mark.parametrize("act", ["LeakyRelu", "SiLU"])
def test_gpus(sm: str, told: set[str], act: str) -> None:
    assert codes(network(act), sm) - {"GPU-NO-FP16"} == told


@pytest.mark.parametrize(
    ("request_", "int8"),
    [
        (Request(sm="75"), 0),
        (Request(sm="7.5"), 0),
        (Request(gpu="T4"), 0),
        (Request(gpu="RTX 2060", sm="7.5"), 0),
        (Request(sm="86"), 2),
        (Request(gpu="RTX 3060"), 2),
    ],
)
def test_tensorrt_rtx_has_no_int8_on_turing(request_: Request, int8: int) -> None:
    """One of its builds computes 163 patterns in float; classic TensorRT has INT8 there."""
    prediction, time = predict_on(network(), "rtx1.7", request_)
    told = [f.code for f in prediction.findings if f.convolutions]
    assert prediction.summary()["int8"] == int8 and told.count("FLOAT-SM75") == 2 - int8
    if time is not None:  # that of the float network
        assert (time.gain is None) == (Remark.WITHOUT_QDQ in remarks(time.notes)) == (not int8)
    assert predict_on(network(), "trt8.5", request_)[0].summary()["int8"] == 2


@pytest.mark.parametrize("gpu", gpus.gpus())
def test_tensorrt_rtx_is_predicted_for_gpus_that_it_builds_for(gpu: gpus.Gpu) -> None:
    """What ``ComputeCapability`` of its 1.7.1 names: Turing, Ampere, Ada and Blackwell of PCs."""
    g = Graph()
    model = g.model(g.relu(g.input(1, 16, 8, 8), "r"))
    for name in (gpu.name, gpu.cc):
        request = Request(gpu=name) if name == gpu.name else Request(sm=name)
        if gpu.cc in ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1"):
            assert RTX.built_for(gpu.cc).told == [gpu.cc]
        else:
            with raises(QdqtoolError, f"Target.built_for rtx1.7 {gpu.cc} 12.1"):
                predict_on(model, "rtx1.7", request)
        assert TARGETS["trt10"].built_for(gpu.cc) is TARGETS["trt10"]


def test_everything_that_takes_a_gpu_refuses_one_that_tensorrt_rtx_is_not_for() -> None:
    g, machine = Graph(), {"target": "rtx1.7", "gpu": "V100"}
    model = g.model(g.conv(g.input(1, 16, 8, 8), "a", 16))
    for call in (
        lambda: qdqtool.report(model, **machine),
        lambda: qdqtool.compare(model, model, **machine),
        lambda: qdqtool.verify(model, Build(layers=[BuiltLayer("a")]), **machine),
        lambda: qdqtool.tune(model, [], **machine),
    ):
        with raises(QdqtoolError, "Target.built_for 7.0 V100"):
            call()


@pytest.mark.parametrize(("gpu", "refused"), [("RTX 4090", False), ("RTX 3060", True)])
def test_a_type_that_a_gpu_lacks_ends_the_build_for_it_alone(gpu: str, refused: bool) -> None:
    g = Graph(opset=19)
    scale, zero = g.const("scale", np.float32(0.1)), "zero"
    g.initializers.append(onnx.helper.make_tensor(zero, onnx.TensorProto.FLOAT8E4M3FN, [], [0.0]))
    x = g.op("QuantizeLinear", [g.input(1, 16, 8, 8), scale, zero], "q")
    proto = g.model(g.op("DequantizeLinear", [x, scale, zero], "dq"))
    prediction, _ = predict_on(proto, "rtx1.7", Request(gpu=gpu))
    assert (status_of(prediction) == "refused") == refused


def test_findings_of_a_gpu(g: Graph) -> None:
    assert "GPU-FUSION" not in codes(network("Relu"), "6.1")
    for groups, gpu, told in (
        (32, "GTX 1650", True),
        (32, "TITAN RTX", False),
        (1, "GTX 1650", False),
        (2, "GTX 1650", False),
    ):
        assert ("GPU-KERNELS" in codes(network("Relu", groups), gpu)) == told
    proto = g.model(g.conv(g.input(1, 16, 8, 8), "a", 16, scale=None, weights="float"))
    assert not codes(proto, "6.0") and not codes(proto, "AGX Orin")


# Device information as trtexec prints it (TensorRT 8.2 to 8.6): SMs, clock, memory, bus, memory clock.
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
    ],
)
def test_the_log_decides(name, facts, board, sms, clock, bandwidth):
    gpu = gpu_of_device(of_facts(name, facts))
    assert (gpu.name, gpu.sms, gpu.clock) == (board, sms, clock)
    assert gpu.bandwidth == pytest.approx(bandwidth)
    assert gpu.sustained == 1  # the clock is known


def test_the_log_names_the_gpu():
    sms, clock = gpu_of_device(of_facts("Orin", ORIN_NX)).notes
    assert sms == Remark.SMS_OF_LOG(sms=4, board="Jetson Orin NX 8GB", own=8)
    assert clock.remark is Remark.CLOCK_OF_LOG and 612 in (round(v) for v in clock.values.values())
    assert gpu_of_device(of_facts("Orin", AGX)).notes == ()
    facts = {
        "Compute Capability": "8.6",
        "SMs": "40",
        "Compute Clock Rate": "1.5 GHz",
        "Memory Bus Width": "256 bits",
        "Memory Clock Rate": "7 GHz",
    }
    gpu = gpu_of_device(of_facts("NVIDIA Future 9000", facts))
    assert (gpu.name, gpu.sms, gpu.clock, gpu.bandwidth) == ("NVIDIA Future 9000", 40, 1500, 448)
    assert gpu.rates is gpus.rates()["8.6"]
    guessed = gpu_of_device(
        of_facts("NVIDIA Future 9000", {k: v for k, v in facts.items() if "emory" not in k})
    )
    assert remarks(guessed.notes) == [Remark.BANDWIDTH_GUESSED] and 300 < guessed.bandwidth < 600
    odd = {
        "Compute Capability": "8.6",
        "SMs": "0",
        "Compute Clock Rate": "9999 GHz",
        "Memory Bus Width": "1 bits",
        "Device Global Memory": "99999999999 MiB",
        "Memory Clock Rate": "1 GHz",
    }
    gpu, known = gpu_of_device(of_facts("RTX 3060", odd)), gpus.find("RTX 3060")
    assert (gpu.sms, gpu.clock, gpu.bandwidth) == (known.sms, known.clock, known.bandwidth)
    gpu = gpu_of_device(of_facts("Orin", ORIN_NX), 500)
    assert (gpu.clock, gpu.sms) == (500, 4)


@pytest.mark.parametrize(
    "facts", [{}, {"Compute Capability": "8.7"}, {"SMs": "lots", "Compute Clock Rate": "fast"}]
)
def test_a_shared_name_alone_is_no_gpu(facts):
    with raises(QdqtoolError, "gpu_of_device 8 GPUs"):
        gpu_of_device(of_facts("Orin", facts))
    build = Build(device="Orin", gpu=facts)
    assert expected.gpu_of(build) is None and "Orin NX 8GB" in expected.unknown_gpu(build)


@pytest.mark.parametrize(("named", "sms"), [("Orin NX 8GB", 4), ("AGX Orin", 4), ("RTX 3060", 28)])
def test_the_users_word_comes_first_and_the_logs_figures_count_where_they_can_be_its(named, sms):
    """A board switches SMs off; a desktop GPU of another compute capability is not the log's at all."""
    gpu = expected.gpu_of(Build(device="Orin", gpu=ORIN_NX), named)
    assert gpu is not None and gpu.sms == sms


# One measured time, or a profile, that corrects the estimate.


def test_one_measured_time_corrects_the_rest(tmp_path):
    _, plain = timed(chain(batch=8))
    measured = plain.total_ms * 1.3
    _, time = timed(chain(batch=8), calibrate=f"{measured}ms")
    assert time.total_ms == pytest.approx(measured, rel=1e-6)
    assert time.high_ms / time.low_ms < plain.high_ms / plain.low_ms
    kept = tmp_path / "machine.json"
    kept.write_text(json.dumps(time.calibration.as_json()))
    _, other = timed(chain(2, batch=16), calibrate=str(kept))
    assert other.total_ms == pytest.approx(1.3 * timed(chain(2, batch=16))[1].total_ms, rel=1e-6)
    with pytest.raises(QdqtoolError, match="calibration for 'RTX 3060'"):
        timed(chain(), find("T4"), calibrate=str(kept))


@pytest.mark.parametrize(("more", "kernel"), [(4.0, 0.0), (9.5, 2.0)])
def test_a_profile_gives_both_the_factor_and_its_own_overhead(tmp_path, more, kernel):
    """Layers that take 1.5 times the estimate and some us more: the profile's doing up to 7.5 us, then the kernels'."""
    raw = seconds(timed(chain(12, batch=8))[1].load.layers, GPU) * 1e3
    file = profile_of(
        tmp_path, [(n, 1.5 * t + more * 1e-3) for n, t in zip(names(batch=8), raw, strict=True)]
    )
    _, time = timed(chain(12, batch=8), calibrate=file)
    assert time.calibration.factor == pytest.approx(1.5, rel=0.05)
    assert time.calibration.overhead_us == pytest.approx(more - kernel, abs=0.5)
    assert time.calibration.kernel_us == pytest.approx(kernel, abs=0.5)
    assert time.high_ms - 1.05 * time.total_ms == pytest.approx(
        len(raw) * (more - kernel) * 1e-3, rel=0.3
    )


def names(**options):
    return [layer.name for layer in predict(load(chain(12, **options)), TARGET).layers]


def profile_of(folder, layers):
    """A profile as trtexec writes it: layers and their milliseconds."""
    file = folder / "profile.json"
    file.write_text(
        json.dumps(
            [
                {"count": 1},
                *(
                    {"name": n, "timeMs": ms, "averageMs": ms, "medianMs": ms, "percentage": 1.0}
                    for n, ms in layers
                ),
            ]
        )
    )
    return str(file)


# Engines that were timed with a profile and without: milliseconds of one execution without it.
@pytest.mark.parametrize(
    ("case", "gpu", "measured"),
    [
        ("resnet18-a100-qat", "A100 80GB PCIe", 0.882),
        ("resnet18-a100-qat-residual", "A100 80GB PCIe", 0.546),
        ("resnet18-a100-qat-residual-qgap", "A100 80GB PCIe", 0.500),
    ],
)
def test_a_real_profile_leads_to_the_time_without_it(case, gpu, measured):
    profile = SHARED / case / "profile.json"
    if not profile.exists():
        pytest.skip("the published profiles are not available")
    _, time = timed(evidence.model(case), find(gpu), calibrate=str(profile))
    assert time.total_ms == pytest.approx(measured, rel=0.07)
    assert time.low_ms <= 1.02 * measured and measured <= time.high_ms


def test_a_profile_of_another_engine_is_refused(tmp_path):
    file = profile_of(
        tmp_path, [(n if i == 3 else f"other{i}", 1.0) for i, n in enumerate(names())]
    )
    with raises(QdqtoolError, "_calibration 1"):
        timed(chain(12), calibrate=file)


@pytest.mark.parametrize("text", ["0", "0ms", "1e9s", "nothing.json", "5 parsecs", "-3"])
def test_bad_calibrations(text):
    with pytest.raises(QdqtoolError):
        timed(chain(), calibrate=text)


@pytest.mark.parametrize(
    "content",
    [
        '{"schema": "qdqtool/time-calibration/1"}',
        '{"schema": "qdqtool/time-calibration/1", "gpu": "RTX 3060", "factor": NaN, "kernel_us": 0}',
        '{"schema": "qdqtool/time-calibration/1", "gpu": "RTX 3060", "factor": 1e9, "kernel_us": 0}',
        "[",
        "{}",
        "",
    ],
)
def test_damaged_calibration_files(tmp_path, content):
    file = tmp_path / "c.json"
    file.write_text(content)
    with pytest.raises(QdqtoolError):
        timed(chain(), calibrate=str(file))
