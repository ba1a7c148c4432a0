"""Reads a 200 MB build log, made up of our own lines in TensorRT's wording: at most 10 s and 150 MB of memory.

Run with ``python benchmarks/buildlog.py [megabytes]``. The log has a parse section, optimizer lines, autotuning lines
(as in real logs, nearly everything) and an engine listing of 150 layers.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

SECONDS, MEGABYTES = 10.0, 150.0
_LAYERS = 150
_READ = """
import sys
from qdqtool.buildlog.read import read_build
build = read_build(sys.argv[1])
assert (len(build.layers), len(build.parse.nodes), len(build.trace)) == (150, 150, 300), "the log was not understood"
print(build.lines.total, build.tactics.timed)
"""


def write_log(path: Path, size: int) -> None:
    """Writes a log of about ``size`` bytes."""
    with path.open("wb") as file:
        _put(file, "I", "=== Build Options ===", "Precision: FP32+INT8", "")
        for i in range(_LAYERS):
            name = f"/model.{i}/conv/Conv"
            _put(
                file,
                "V",
                f"Parsing node: {name} [Conv]",
                f"Searching for input: t{i}",
                f"{name} [Conv] inputs: [t{i} -> (1, 64, 80, 80)[FLOAT]], [w{i} -> (64, 64, 3, 3)[FLOAT]], ",
                f"{name} [Conv] outputs: [t{i + 1} -> (1, 64, 80, 80)[FLOAT]], ",
            )
        _put(file, "V", f"Marking t{_LAYERS} as output: t{_LAYERS}", f"Original: {2 * _LAYERS} layers")
        for i in range(_LAYERS):
            _put(
                file,
                "V",
                f"Running: ConvReluFusion on /model.{i}/conv/Conv",
                f"ConvReluFusion: Fusing /model.{i}/conv/Conv with /model.{i}/act/Relu",
            )
        _put(file, "V", "Graph construction and optimization completed in 0.5 seconds.")
        layer = 0
        while file.tell() < size:
            name = f"/model.{layer % _LAYERS}/conv/Conv + /model.{layer % _LAYERS}/act/Relu"
            _put(
                file,
                "V",
                "=============== Computing costs for ",
                "*************** Autotuning format combination: Int8(6400,80,1) -> Int8(6400,80,1) ***************",
                f"--------------- Timing Runner: {name} (CaskConvolution)",
            )
            for tactic in range(40):
                _put(
                    file,
                    "V",
                    f"{name} Set Tactic Name: sm80_xmma_fprop_i8i8_i8i32_f32_nchw_{tactic} Tactic: 0x{tactic:016x}",
                    f"Tactic: 0x{tactic:016x} Time: 0.0{tactic}1234",
                )
            _put(
                file,
                "V",
                f"Fastest Tactic: 0x{0:016x} Time: 0.001234",
                f">>>>>>>>>>>>>>> Chose Runner Type: CaskConvolution Tactic: 0x{0:016x}",
            )
            layer += 1
        _put(file, "V", f"After reformat layers: {_LAYERS} layers", "Engine Layer Information:")
        for i in range(_LAYERS):
            file.write(
                f"Layer(CaskConvolution): /model.{i}/conv/Conv + /model.{i}/act/Relu, Tactic: 0x{i:016x}, "
                f"t{i} (Int8[1,64:32,80,80]) -> t{i + 1} (Int8[1,64:32,80,80])\n".encode()
            )


def _put(file: BinaryIO, level: str, *messages: str) -> None:
    prefix = f"[10/31/2025-17:53:35] [{level}] [TRT] " if level == "V" else f"[10/31/2025-17:53:35] [{level}] "
    file.write("".join(f"{prefix}{message}\n" for message in messages).encode())


def main() -> int:
    """Measures a fresh process; returns 1 when a limit is missed."""
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "build.log"
        write_log(path, size * 1_000_000)
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", _READ, str(path)], check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        megabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        lines, tactics = done.stdout.split()
        print(
            f"{path.stat().st_size / 1e6:.0f} MB, {lines} lines, {tactics} tactics: {seconds:.1f} s "
            f"(limit {SECONDS:.0f}), {megabytes:.0f} MB of memory (limit {MEGABYTES:.0f})"
        )
    return int(seconds > SECONDS or megabytes > MEGABYTES)


if __name__ == "__main__":
    sys.exit(main())
