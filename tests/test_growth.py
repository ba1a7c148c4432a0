"""Cost grows with the input: twice the nodes take at most 2^1.3 times the work and the memory."""

import cProfile
import ctypes
import gc
import io
import itertools
import math
import os
import resource
import sys
import time
import traceback
import tracemalloc

import onnx
import pytest

import qdqtool
from qdqtool.base import budgets
from qdqtool.buildlog.read import read_build
from qdqtool.buildlog.reconstruct import graph_from_log
from qdqtool.fixing import api, site, weights
from qdqtool.fixing.api import add_fixes, fix
from qdqtool.model.editor import Editor
from qdqtool.model.graph import Model
from qdqtool.model.run_cost import estimate_run_cost
from qdqtool.model.view import View
from qdqtool.options import Request
from qdqtool.timing.estimate import predict_on
from qdqtool.trt import refusals, surroundings
from qdqtool.trt.passes import const_weights_fusion
from qdqtool.trt.targets import TARGETS
from tests.growth import FAMILIES
from tests.slow import slow_after

EXPONENT = 1.3  # of work, by the size of the file
QUICK = ("C2f", "If")  # the others have names and code in common with these
CHAINS = ("MatMul", "Shape")
SOME = (("fix", "residual"), ("fix", "fan-out"), ("extract", "lattice"))
# The first two cost seconds, and are asked below, or are of the kind of "crossed Concats with pairs"; for no other of
# them alone is there any code.
ELSEWHERE = (
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
)


def _extract(model, **how):
    """By the first finding; by the last node where there is none."""
    found = qdqtool.predict(model, target="trt8.5").findings
    what = {"finding": found[0].code} if found else {"node": model.graph.node[-1].name}
    qdqtool.extract(model, target="trt8.5", **what, **how)


WORK = {
    "predict": lambda model: qdqtool.predict(model, target="trt8.5").as_json(),
    "predict on a GPU": lambda model: predict_on(
        model, "trt8.5", Request(gpu="T4"), also=add_fixes
    )[0].as_json(),
    "fix": lambda model: fix(model, target="trt8.5").as_json(),
    "fix to half": lambda model: fix(model, target="rtx1.7").as_json(),
    "extract": lambda model: qdqtool.extract(
        model, outputs=[model.graph.output[0].name], target="trt8.5"
    ),
    "extract a finding": _extract,
    "extract in private": lambda model: _extract(model, private=True),
    "extract the least": lambda model: _extract(model, minimize=True),
    "report": lambda model: qdqtool.report(model, target="trt8.5"),
}
# What is listed of each tensor (readers, ways to them, to a constant) is bounded, all full only from 500 nodes on.
LATER = (
    "rolling Concat",
    "Concat of pairs",
    "crossed Concats with pairs",
    "Casts of a weight",
    "Transposes of a weight",
    "Reshapes of a weight",
    "one pair of weights",
    "MaxPool, read along",
)
# ... or with an eighth of these bounds from 300 on, most from 150; more would hide that one of them is not kept.
BOUNDS = {
    surroundings: ("MAX_PATH_STEPS", "MAX_Q_STEPS", "STEPS"),
    refusals: ("STEPS",),
    const_weights_fusion: ("STEPS",),
    weights: ("STEPS",),
}
# Of others, what begins small and ends soon is still most of it at 100: half of the sizes show the rest as well.
AT_300 = (
    *QUICK,
    *LATER,
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
    "LayerNormalization",
    "InstanceNormalization",
    "BatchNormalization",
    "ReduceMean",
    "Loops",
)
BEGIN_LATER = {"crossed Concats with pairs": (300, 450)}  # merges of scales
# What fixes save is estimated too, of which the one of residual Adds is made by itself from some 600 nodes on.
AUTOMATIC = ("predict on a GPU", "residual")
# For each subgraph onnx's shape inference and its converter of opsets, and onnxruntime, copy the table of all tensors,
# a second for what is inferred; what else these cost is counted below.
SQUARED = ("If", "nested Ifs", "Loops")
_LEAST = 16  # nodes; of one, some families have no Q/DQ
SIZES = (500, 1000, 2000, 4000)
SHORT, LITTLE = (
    0.1,
    16e6,
)  # seconds and bytes that are chance: what the process had left free is not counted
BEYOND_CACHES = 0.1  # of the time: that of as much work for each node, which grows as what it reads leaves the caches
RATIO, LEAST = (
    8.0,
    0.03,
)  # of seconds for four times the input, and what is too short to be measured


def _calls(work, model) -> int:
    """Calls of functions, Python's own among them: the same on every machine, however busy it is."""
    profile = cProfile.Profile(subcalls=False)
    profile.enable()
    try:
        work(model)
    finally:
        profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


def _bytes(work, model) -> int:
    """The most that objects take at the same time."""
    gc.collect()
    tracemalloc.start()
    try:
        work(model)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _grows_with_the_file(measured, work, family: str, sizes, size=onnx.ModelProto.ByteSize) -> None:
    """DenseNet's file has n^2 numbers for n nodes; every other one goes with the nodes."""
    make = FAMILIES[family]
    work(make(_LEAST))
    least = measured(work, make(_LEAST))
    for few, many in sizes:
        small, big = make(few), make(many)
        ratio = size(big) / size(small)
        less = measured(work, small)
        assert not _too_much(least, less, measured(work, big), ratio), (few, many)


def _too_much(
    least: float,
    less: float,
    more: float,
    ratio: float,
    chance: float = 0,
    exponent: float = EXPONENT,
) -> bool:
    """Whether cost, that of the least network apart, grew by more than the law allows for a ratio of sizes."""
    start = (
        least if least < less / 2 else 0
    )  # a part of a handful of nodes is trimmed, one of hundreds is not
    return more - start >= ratio**exponent * (less - start) + chance


def _spent(work, model) -> tuple[float, float]:
    """Processor time in seconds of a process of its own and all that it starts, and its most memory in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(
        0
    )  # what making models has left free would be taken without being counted
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            gc.freeze()  # what the tests have loaded is not for the work to search through
            work(model)
            os.write(writes, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(1)
    _, status, usage = os.wait4(child, 0)
    assert status == 0, "the traceback is on stderr"
    os.close(writes)
    with open(reads, encoding="ascii") as pipe:
        return usage.ru_utime + usage.ru_stime, int(pipe.read()) * 1024.0


CASES = [(command, family) for command in WORK for family in FAMILIES]
# A few minutes of these are for every change: some of each command, and of `--minimize` those that end soon.
SAMPLED = set(CASES[9::23])


@pytest.mark.parametrize(
    ("command", "family"),
    [pytest.param(*case, marks=[pytest.mark.sampled] if case in SAMPLED else []) for case in CASES],
)
@pytest.mark.growth
def test_time_and_memory(command, family):
    """A machine that is busy is asked up to five times; of each the best counts."""
    sizes = SIZES[1:] if (command, family) == AUTOMATIC else SIZES
    models = {size: FAMILIES[family](size) for size in (_LEAST, *sizes)}
    spent = dict.fromkeys(models, (math.inf, math.inf))
    for _ in range(5):
        for size, model in models.items():
            spent[size] = tuple(map(min, spent[size], _spent(WORK[command], model)))
        # Some families make much of little, which is run as long as it can be.
        spent[_LEAST] = (spent[_LEAST][0], min(held for _, held in spent.values()))
        grown = [
            (few, many, *_beyond(command, family, models, spent, few, many))
            for few, many in itertools.pairwise(sizes)
        ]
        print(
            command, family, {size: f"{s:.2f} s {b / 1e6:.0f} MB" for size, (s, b) in spent.items()}
        )
        if not any(time or memory for *_, time, memory in grown):
            return
    pytest.fail(str(grown))


def _beyond(command: str, family: str, models, spent, few: int, many: int) -> tuple[bool, bool]:
    """Whether time and memory grew by more than the law allows from few to many nodes."""

    def ratio(size) -> float:
        return size(models[many]) / size(models[few])

    (first, held), (less, taken), (more, most) = (spent[size] for size in (_LEAST, few, many))
    memory = _held if command.startswith("fix") else onnx.ModelProto.ByteSize
    exponent = 2 if family in SQUARED else EXPONENT
    chance = SHORT + BEYOND_CACHES * more
    return (
        _too_much(first, less, more, ratio(onnx.ModelProto.ByteSize), chance, exponent),
        _too_much(0, taken - held, most - held, ratio(memory), LITTLE),
    )


def _held(model: onnx.ModelProto) -> int:
    """The file, and what a run holds, for `fix` compares outputs: those of rolling Concats are n^2 numbers.

    Where that is too much, as with Concats that double at each step, nothing is run.
    """
    run = estimate_run_cost(model, {}).peak_bytes
    return model.ByteSize() + (run if run <= budgets.SESSION_BYTES else 0)


def bounded_by_an_eighth(patch):
    for module, names in BOUNDS.items():
        for name in names:
            patch.setattr(module, name, getattr(module, name) // 8)


AT_ONCE = (
    *(("predict", family) for family in (*QUICK, *CHAINS)),
    ("fix", QUICK[0]),
    ("extract", QUICK[0]),
    ("predict on a GPU", "mesh"),
)
SOON = (
    *itertools.product(("fix", "fix to half"), SQUARED),
    *SOME,
    *(("predict", f) for f in FAMILIES if f not in (*QUICK, *CHAINS, *ELSEWHERE)),
)


@pytest.mark.parametrize(("command", "family"), AT_ONCE)
def test_work_of_a_few(command, family, monkeypatch):
    _grows_by_calls(command, family, monkeypatch)


@pytest.mark.parametrize(("command", "family"), SOON)
@pytest.mark.growth
@pytest.mark.sampled
def test_work_of_some(command, family, monkeypatch):
    """Above are all commands and families, up to 4,000 nodes."""
    _grows_by_calls(command, family, monkeypatch)


def _grows_by_calls(command, family, monkeypatch):
    if family in LATER:
        bounded_by_an_eighth(monkeypatch)
    sizes = BEGIN_LATER.get(family, (150, 300) if family in AT_300 else (100, 200))
    _grows_with_the_file(_calls, WORK[command], family, [sizes])


def test_what_many_read_is_looked_at_once():
    """Each of many Qs on one tensor names all the others; the names of these are collected once."""
    _grows_with_the_file(_calls, WORK["predict"], "wide Split with own scales", [(80, 160)])


def test_ways_to_what_writes_a_tensor_are_listed_in_part(monkeypatch):
    monkeypatch.setattr(surroundings, "STEPS", 5)
    found = qdqtool.predict(FAMILIES["MaxPool, read along"](60), target="trt8.5").refusals
    origins = {r.name: r.origin for r in found if isinstance(r, refusals.Stays)}
    ways = [(len(o.path), o.op) for o in origins.values()]
    assert (1, "Conv") in ways and ways.count((5, "MaxPool")) > 4 and max(ways)[0] == 5


def test_nothing_is_collected_while_times_are_estimated():
    """All objects stay: to look for garbage among them took a third of the time, more of it the more there were."""
    was, seen = gc.isenabled(), []
    gc.enable()
    predict_on(
        FAMILIES["convolutions"](6),
        "trt8.5",
        Request(gpu="T4"),
        also=lambda *_: seen.append(gc.isenabled()),
    )
    seen.append(gc.isenabled())
    if not was:
        gc.disable()
    assert seen == [False, True]


@pytest.mark.slow
def test_names_of_folded_constants_are_bounded():
    _grows_with_the_file(_bytes, WORK["predict"], "constants", [(300, 600)])


@pytest.mark.slow
def test_what_is_between_weights_and_their_quantizers_is_listed_in_part(monkeypatch):
    bounded_by_an_eighth(monkeypatch)
    for measured in (_calls, _bytes):
        _grows_with_the_file(measured, WORK["predict"], "Casts of a weight", [(125, 250)])


@pytest.mark.parametrize(
    ("family", "sizes"),
    slow_after(1, [("one pair of weights", (100, 200)), ("Casts of a weight", (125, 250))]),
)
def test_fix_of_what_many_convolutions_read(family, sizes, monkeypatch):
    """The constants on the way are computed once, and one refusal does not name all that read them."""
    bounded_by_an_eighth(monkeypatch)
    _grows_with_the_file(_calls, WORK["fix"], family, [sizes])


@pytest.mark.slow
def test_what_many_read_is_asked_once_whether_it_becomes_half():
    _grows_with_the_file(_calls, WORK["fix to half"], "Concat with the root", [(100, 200)])
    _grows_with_the_file(
        _calls, WORK["fix to half"], "wide Split", [(100, 200)]
    )  # read by one node n times


def test_changes_answer_their_own_findings_where_all_of_these_name_one_tensor(monkeypatch):
    monkeypatch.setattr(site, "_SHARED", 5)
    model = FAMILIES["parts of a weight"](100)
    predicted = qdqtool.predict(model, target="trt8.5")
    view, target, wanted = (
        View(Model(model)),
        TARGETS["trt8.5"],
        {str(f.code) for f in predicted.findings},
    )
    sites = [s for step in api.STEPS for s in step.sites(view, target, predicted, wanted)]
    assert len(sites) >= 20 and max(len(s.answers) for s in sites) <= 5


@pytest.mark.parametrize("family", ["convolutions", "residual", "C2f"])
def test_fix_predicts_the_whole_a_few_times_however_large_it_is(family, monkeypatch):
    """Places of a step are tried together, and those at fault are left out by what the prediction shows."""
    seen = []
    monkeypatch.setattr(
        api, "predict", lambda *args: seen.append(1) or qdqtool.predict(args[0], args[1].name)
    )
    fix(FAMILIES[family](200), target="trt8.5")
    assert len(seen) <= 5


def _seconds(work, model) -> float:
    gc.collect()
    begin = time.process_time()
    work(model)
    return time.process_time() - begin


def _grows(seconds, size: int, ratio: float = RATIO) -> None:
    """Of work on an input of a size; measured once more where the machine may have been busy."""
    assert any(seconds(4 * size) < ratio * max(seconds(size), LEAST) for _ in range(2))


@pytest.mark.slow
def test_what_many_quantizers_share_costs_no_more_to_leave():
    """A change leaves the index true in time that goes with its size, also where all scales are one tensor."""

    def work(model):
        editor = Editor(model)
        for node in [n for n in model.nodes if n.op == "QuantizeLinear" and "x" not in n.inputs][
            :-1
        ]:
            editor.bypass(
                node, [n for n in model.readers(node.output) if n.op == "DequantizeLinear"]
            )
        editor.finish()

    _grows(lambda size: _seconds(work, Model(FAMILIES["fan-out, equal"](size))), 2000)


@pytest.mark.slow
def test_what_is_read_past_a_chain_is_found_in_one_walk():
    """Each reader along a chain of nodes that are all passed by reads what the first of them reads."""

    def work(model):
        editor = Editor(model)
        for node in [n for n in model.nodes if n.op == "Cast"]:
            editor.pass_by(node, node.input(0))
        editor.finish()

    _grows(lambda size: _seconds(work, Model(FAMILIES["Casts of a weight"](size))), 4000)


@pytest.mark.slow
def test_graph_from_a_log():
    """Of Qs of which each has its scales for channels, and which all write and read the same tensors."""
    node = (
        "q [QuantizeLinear] inputs: [x -> (16, 3, 3, 3)[FLOAT]], [s -> (16)[FLOAT]], [z -> (16)[INT8]], ",
        "q [QuantizeLinear] outputs: [x -> (16, 3, 3, 3)[FLOAT]], ",
    )
    stamp = "[10/31/2025-17:53:30] [V] [TRT] "

    def seconds(size):
        lines = [
            stamp + line
            for _ in range(size)
            for line in ("Parsing node: q [QuantizeLinear]", *node)
        ]
        text = "\n".join([f"{stamp}Trace of TensorRT version: 8.5.2", *lines]) + "\n"
        build = read_build(io.BytesIO(text.encode()))
        return _seconds(graph_from_log, build)

    _grows(seconds, 400, 12.0)
