"""Measure the growth of cost with the size of a graph.

Twice the nodes may take at most 2^1.3 times the work and memory.

Calls of functions and bytes of objects are counted for small graphs. These counts are equal on all
computers. Seconds and the memory of processes are measured for graphs of up to 4,000 nodes.
"""

import cProfile
import ctypes
import gc
import importlib
import itertools
import math
import os
import resource
import sys
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx

import qdqtool
from qdqtool.fixing.api import fix
from qdqtool.fixing.savings import add_fix_savings
from qdqtool.runtime.run_cost import estimate_run_cost
from qdqtool.timing.on_gpu import predict_on_gpu
from qdqtool.timing.options import TimingOptions
from qdqtool.util import limits
from tools.growth.families import FAMILIES

Work = Callable[[onnx.ModelProto], object]
Measure = Callable[[Work, onnx.ModelProto], int]

EXPONENT = 1.3  # exponent of work as a function of the size of the file
SMALLEST = 16  # nodes; with one node, some families have no Q/DQ
SIZES = (500, 1000, 2000, 4000)
NOISE_SECONDS = 0.1
NOISE_BYTES = 16e6  # free memory of the process, which the work may use but which is not counted
# Fraction of the time that is noise, because nodes take longer if their data are larger than the
# caches.
CACHE_SHARE = 0.1
ATTEMPTS = 5  # the best attempt counts, because the computer may be busy

# Families whose calls are counted for 150 and 300 nodes instead of 100 and 200. In smaller graphs,
# most calls belong to the start, not to the nodes.
SLOW_START = (
    "C2f",
    "If",
    "mesh",
    "Relu",
    "Sigmoid",
    "Add",
    "Mul",
    "Transpose",
    "MaxPool",
    "Softmax",
    "Transposes of a dequantized weight",
    "Gemm",
    "Einsum",
    "LayerNormalization",
    "InstanceNormalization",
    "BatchNormalization",
    "ReduceMean",
    "Loops",
)
# Families that fill the lists of LIMITS (consumers of a tensor, paths to a tensor) only if they
# have at least 500 nodes.
BOUNDED = (
    "rolling Concat",
    "Concat of pairs",
    "crossed Concats with pairs",
    "Casts of a weight",
    "Transposes of a weight",
    "Reshapes of a weight",
    "one pair of weights",
    "MaxPool, read along",
)
# Families that need more nodes, because scales must be merged or C2f blocks must be complete.
COUNTED_SIZES = {"crossed Concats with pairs": (300, 450), "C2f": (250, 500)}
# Limits of lists, by module. Counts use an eighth of these limits, so that 150 to 300 nodes fill
# the lists. Lower limits would hide a list without a limit.
LIMITS = {
    "qdqtool.ir.bounds": ("_MAX_TENSORS",),
    "qdqtool.trt.neighbors": ("MAX_PATH_STEPS", "MAX_Q_STEPS", "STEPS"),
    "qdqtool.findings.lint.weights": ("STEPS",),
    "qdqtool.reasons.tensors": ("STEPS",),
    "qdqtool.trt.passes.const_weights_fusion": ("STEPS",),
    "qdqtool.fixing.weights": ("STEPS",),
}
# With about 600 nodes or more, the saving of residual Adds is estimated as a separate fix.
BEGINS_LATE = ("predict on a GPU", "residual")
# Families with subgraphs. For each subgraph, onnxruntime and onnx (shape inference and version
# converter) copy the table of all tensors. The other cost of these families is counted in calls.
SQUARE = ("If", "nested Ifs", "Loops")
# Families without counts, because they take seconds, or because other families (for example
# "crossed Concats with pairs") run the same code.
NOT_COUNTED = (
    "wide Split with own scales",
    "Concat of pairs",
    "Identity",
    "Cast",
    "Clip",
    "PRelu",
    "Flatten",
    "Tile",
    "AveragePool",
    "Where",
    "Expand",
    "GridSample",
    "DepthToSpace",
    "InstanceNormalization",
    "BatchNormalization",
    "Reshape",
    "Slice",
    "Gather",
    "TopK",
    "Pad and Slice",
    "LayerNormalization",
    "ReduceMean",
    "Gemm",
    "Einsum",
)


def _extract_finding(model: onnx.ModelProto, **options: Any) -> None:
    """Extract by the first finding, or by the last node without findings."""
    findings = qdqtool.predict(model, target="trt8.5").findings
    place = {"finding": findings[0].code} if findings else {"node": model.graph.node[-1].name}
    qdqtool.extract(model, target="trt8.5", **place, **options)


WORK: dict[str, Work] = {
    "predict": lambda model: qdqtool.predict(model, target="trt8.5").as_json(),
    "predict on a GPU": lambda model: predict_on_gpu(
        model, "trt8.5", TimingOptions(gpu="T4"), extend=add_fix_savings
    )[0].as_json(),
    "fix": lambda model: fix(model, target="trt8.5").as_json(),
    "fix to half": lambda model: fix(model, target="rtx1.7").as_json(),
    "extract": lambda model: qdqtool.extract(
        model, outputs=[model.graph.output[0].name], target="trt8.5"
    ),
    "extract a finding": _extract_finding,
    "extract in private": lambda model: _extract_finding(model, private=True),
    "extract the least": lambda model: _extract_finding(model, minimize=True),
    "report": lambda model: qdqtool.report(model, target="trt8.5"),
}

CASES = [(command, family) for command in WORK for family in FAMILIES]
# Cases of each command that together take minutes.
SAMPLE = CASES[9::23]
# Cases that are counted in every test run.
COUNTED_ALWAYS = (
    *(
        ("predict", family)
        for family in ("C2f", "If", "MatMul", "Shape", "lattice", "Concat of itself", "diamonds")
    ),
    ("fix", "C2f"),
    ("extract", "C2f"),
    ("predict on a GPU", "mesh"),
    ("predict on a GPU", "pooled residual"),
)
# Cases that only ``python -m tools.growth`` counts.
COUNTED_IN_SAMPLE = (
    *itertools.product(("fix", "fix to half"), SQUARE),
    ("fix", "residual"),
    ("fix", "fan-out"),
    ("extract", "lattice"),
    *(
        ("predict", family)
        for family in FAMILIES
        if family not in NOT_COUNTED and ("predict", family) not in COUNTED_ALWAYS
    ),
)


# Counts on small graphs ---------------------------------------------------------------


def count_calls(work: Work, model: onnx.ModelProto) -> int:
    """Return the number of function calls, including calls of built-in functions."""
    profile = cProfile.Profile(subcalls=False)
    profile.enable()
    try:
        work(model)
    finally:
        profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


def count_bytes(work: Work, model: onnx.ModelProto) -> int:
    """Return the largest number of bytes that Python objects take at the same time."""
    gc.collect()
    tracemalloc.start()
    try:
        work(model)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def find_excess(
    count: Measure, command: str, family: str, sizes: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the pairs of sizes between which a count grows too fast.

    Growth is relative to the size of the file, not to the number of nodes, because the file of a
    DenseNet with n nodes has n^2 numbers.
    """
    make, work = FAMILIES[family], WORK[command]
    smallest = make(SMALLEST)
    work(smallest)  # imports and fills caches
    start = count(work, make(SMALLEST))
    excess = []
    for few, many in sizes:
        small, large = make(few), make(many)
        ratio = large.ByteSize() / small.ByteSize()
        # Memory that another thread takes meanwhile counts too, so an excess is measured twice.
        if all(exceeds(start, count(work, small), count(work, large), ratio) for _ in range(2)):
            excess.append((few, many))
    return excess


def find_excess_calls(command: str, family: str) -> list[tuple[int, int]]:
    """Return the pairs of sizes between which the number of calls grows too fast.

    The sizes depend on the family.
    """
    sizes = COUNTED_SIZES.get(
        family, (150, 300) if family in (*SLOW_START, *BOUNDED) else (100, 200)
    )
    if family not in BOUNDED:
        return find_excess(count_calls, command, family, [sizes])
    with lower_limits():
        return find_excess(count_calls, command, family, [sizes])


@contextmanager
def lower_limits() -> Iterator[None]:
    """Set LIMITS to an eighth of their values until the context ends."""
    previous = []
    for module_name, names in LIMITS.items():
        module = importlib.import_module(module_name)
        for name in names:
            previous.append((module, name, getattr(module, name)))
            setattr(module, name, getattr(module, name) // 8)
    try:
        yield
    finally:
        for module, name, value in previous:
            setattr(module, name, value)


def exceeds(
    start: float,
    small: float,
    large: float,
    ratio: float,
    noise: float = 0,
    exponent: float = EXPONENT,
) -> bool:
    """Return whether the growth of a cost exceeds ``ratio**exponent``.

    ``start``, the cost of the smallest network, is subtracted if it is less than half of ``small``.
    """
    if start >= small / 2:
        start = 0
    return large - start >= ratio**exponent * (small - start) + noise


# Seconds and memory of processes ------------------------------------------------------


def measure_process(work: Work, model: onnx.ModelProto) -> tuple[float, float]:
    gc.collect()
    # The creation of models leaves free memory. The work would use this memory, which is not
    # counted.
    ctypes.CDLL(None).malloc_trim(0)
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            gc.freeze()
            work(model)
            os.write(writes, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(1)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise RuntimeError("the work failed; the traceback is on stderr")
    os.close(writes)
    with open(reads, encoding="ascii") as pipe:
        return usage.ru_utime + usage.ru_stime, int(pipe.read()) * 1024.0


def measure_growth(command: str, family: str) -> list[str]:
    """Measure a command for a family at all sizes.

    Returns:
        A line for each growth that is too fast.
    """
    sizes = SIZES[1:] if (command, family) == BEGINS_LATE else SIZES
    models = {size: FAMILIES[family](size) for size in (SMALLEST, *sizes)}
    spent = dict.fromkeys(models, (math.inf, math.inf))
    excess: list[str] = []
    for _ in range(ATTEMPTS):
        for size, model in models.items():
            seconds, peak = measure_process(WORK[command], model)
            spent[size] = (min(spent[size][0], seconds), min(spent[size][1], peak))
        # The peak of the smallest network must not exceed the peaks of larger networks, as in
        # extract.
        spent[SMALLEST] = (spent[SMALLEST][0], min(peak for _, peak in spent.values()))
        excess = [
            line
            for few, many in itertools.pairwise(sizes)
            for line in _describe_excess(command, family, models, spent, few, many)
        ]
        figures = ", ".join(f"{n}: {s:.2f} s {b / 1e6:.0f} MB" for n, (s, b) in spent.items())
        print(f"{command}, {family}: {figures}", flush=True)
        if not excess:
            break
    return excess


def _describe_excess(
    command: str,
    family: str,
    models: dict[int, onnx.ModelProto],
    spent: dict[int, tuple[float, float]],
    few: int,
    many: int,
) -> list[str]:
    """Return lines for time and for memory if they grow too fast from few to many nodes."""
    (start, start_bytes), (seconds, peak), (more_seconds, more_bytes) = (
        spent[size] for size in (SMALLEST, few, many)
    )
    file_ratio = models[many].ByteSize() / models[few].ByteSize()
    memory_ratio = file_ratio
    if command.startswith("fix"):
        memory_ratio = _bytes_to_run(models[many]) / _bytes_to_run(models[few])
    exponent = 2 if family in SQUARE else EXPONENT
    noise = NOISE_SECONDS + CACHE_SHARE * more_seconds
    lines = []
    if exceeds(start, seconds, more_seconds, file_ratio, noise, exponent):
        lines.append(f"{command}, {family}: time from {few} to {many} nodes")
    if exceeds(0, peak - start_bytes, more_bytes - start_bytes, memory_ratio, NOISE_BYTES):
        lines.append(f"{command}, {family}: memory from {few} to {many} nodes")
    return lines


def _bytes_to_run(model: onnx.ModelProto) -> int:
    """Return the size of the file and of its tensors at run time: ``fix`` compares outputs.

    The outputs of rolling Concats have n^2 numbers. Models above the limit of the package do not
    run.
    """
    run = estimate_run_cost(model, {}).peak_bytes
    return model.ByteSize() + (run if run <= limits.SESSION_BYTES else 0)


def measure_seconds(work: Callable[[Any], object], argument: Any) -> float:
    gc.collect()
    begin = time.process_time()
    work(argument)
    return time.process_time() - begin
