"""The GPU of a log: what its device information prints decides before the name."""

from __future__ import annotations

import pytest

from qdqtool.buildlog.types import Build
from qdqtool.errors import QdqtoolError
from qdqtool.timing import expected, gpus
from qdqtool.timing.device import gpu_of_device, of_facts

# Device information as trtexec prints it (TensorRT 8.2 to 8.6): SMs, clock, memory, bus, memory clock.
ORIN_NX = {"Compute Capability": "8.7", "SMs": "4", "Compute Clock Rate": "0.765 GHz",
           "Device Global Memory": "7755 MiB", "Memory Bus Width": "256 bits (ECC disabled)",
           "Memory Clock Rate": "0.612 GHz"}  # fmt: skip
AGX = {"Compute Capability": "8.7", "SMs": "16", "Compute Clock Rate": "1.275 GHz",
       "Device Global Memory": "28826 MiB", "Memory Bus Width": "128 bits (ECC disabled)",
       "Memory Clock Rate": "1.275 GHz"}  # fmt: skip
TI = {"Compute Capability": "8.6", "SMs": "80", "Device Global Memory": "12023 MiB",
      "Memory Bus Width": "384 bits (ECC disabled)", "Application Compute Clock Rate": "1.695 GHz",
      "Application Memory Clock Rate": "9.501 GHz"}  # fmt: skip


@pytest.mark.parametrize(("name", "facts", "board", "sms", "clock", "bandwidth"), [
    ("Orin", ORIN_NX, "Jetson Orin NX 8GB", 4, 612, 102.4),
    ("Orin", AGX, "Jetson AGX Orin 64GB", 16, 1275, 204.8),
    ("Orin", AGX | {"SMs": "14", "Compute Clock Rate": "930 MHz", "Memory Clock Rate": "0.93 GHz"},
     "Jetson AGX Orin 32GB", 14, 930, 204.8),
    ("NVIDIA GeForce RTX 3080 Ti", TI, "RTX 3080 Ti", 80, 1695, 384 / 8 * 9.501 * 2),
    ("NVIDIA A100-PCIE-40GB", {"Compute Capability": "8.0", "SMs": "108", "Compute Clock Rate": "1.41 GHz",
     "Memory Bus Width": "5120 bits (ECC enabled)", "Memory Clock Rate": "1.215 GHz"}, "A100 40GB", 108, 1410,
     5120 / 8 * 1.215 * 2),
    ("Xavier", {"Compute Capability": "7.2", "SMs": "6", "Compute Clock Rate": "1.109 GHz"}, "Jetson Xavier NX", 6,
     1109, 51.2),
])  # fmt: skip
def test_the_log_decides(name, facts, board, sms, clock, bandwidth):
    gpu = gpu_of_device(of_facts(name, facts))
    assert (gpu.name, gpu.sms, gpu.clock) == (board, sms, clock)
    assert gpu.bandwidth == pytest.approx(bandwidth)
    assert gpu.sustained == 1  # the clock is known


def test_switched_off_sms_and_an_odd_clock_are_said():
    note = gpu_of_device(of_facts("Orin", ORIN_NX)).note
    assert "4 SMs where the Jetson Orin NX 8GB has 8" in note and "612 MHz" in note
    assert gpu_of_device(of_facts("Orin", AGX)).note == ""


def test_a_gpu_that_is_in_no_table_is_taken_as_the_log_describes_it():
    facts = {"Compute Capability": "8.6", "SMs": "40", "Compute Clock Rate": "1.5 GHz",
             "Memory Bus Width": "256 bits", "Memory Clock Rate": "7 GHz"}  # fmt: skip
    gpu = gpu_of_device(of_facts("NVIDIA Future 9000", facts))
    assert (gpu.name, gpu.sms, gpu.clock, gpu.bandwidth) == ("NVIDIA Future 9000", 40, 1500, 448)
    assert gpu.rates is gpus.rates()["8.6"]
    guessed = gpu_of_device(of_facts("NVIDIA Future 9000", {k: v for k, v in facts.items() if "emory" not in k}))
    assert "memory" in guessed.note and 300 < guessed.bandwidth < 600


@pytest.mark.parametrize("facts", [{}, {"Compute Capability": "8.7"}, {"SMs": "lots", "Compute Clock Rate": "fast"}])
def test_a_shared_name_alone_is_no_gpu(facts):
    with pytest.raises(QdqtoolError, match="is the name of 8 GPUs"):
        gpu_of_device(of_facts("Orin", facts))
    build = Build(device="Orin", gpu=facts)
    assert expected.gpu_of(build) is None and "Orin NX 8GB" in expected.unknown_gpu(build)


@pytest.mark.parametrize(("named", "sms"), [("Orin NX 8GB", 4), ("AGX Orin", 4), ("RTX 3060", 28)])
def test_the_users_word_comes_first_and_the_logs_figures_count_where_they_can_be_its(named, sms):
    """A board switches SMs off; a desktop GPU of another compute capability is not the log's at all."""
    gpu = expected.gpu_of(Build(device="Orin", gpu=ORIN_NX), named)
    assert gpu is not None and gpu.sms == sms


def test_the_users_clock_comes_before_the_logs():
    gpu = gpu_of_device(of_facts("Orin", ORIN_NX), 500)
    assert (gpu.clock, gpu.sms) == (500, 4)


def test_absurd_figures_are_not_taken():
    odd = {"Compute Capability": "8.6", "SMs": "0", "Compute Clock Rate": "9999 GHz", "Memory Bus Width": "1 bits",
           "Device Global Memory": "99999999999 MiB", "Memory Clock Rate": "1 GHz"}  # fmt: skip
    gpu = gpu_of_device(of_facts("RTX 3060", odd))
    known = gpus.find("RTX 3060")
    assert (gpu.sms, gpu.clock, gpu.bandwidth) == (known.sms, known.clock, known.bandwidth)
