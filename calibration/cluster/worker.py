"""What runs on a worker: the facts that have to be the same everywhere, a job and its pieces of work."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import io
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from distributed.diagnostics.plugin import WorkerPlugin

from qdqtool.errors import ClusterError, QdqtoolError
from qdqtool.runtime import sessions
from qdqtool.types import TOOL_VERSION
from qdqtool.util.said import of_error, said

# Versions, our own source, and the numbers that come out ------------------------------------------------------------

#: What a worker has to have in the same version, in the order in which a difference is reported.
VERSIONS = ("qdqtool", "onnxruntime", "onnx", "numpy", "pillow")


def facts(threads: int = 1) -> dict[str, str]:
    """The facts of this process, where one onnxruntime session may use so many threads."""
    import onnx
    import PIL

    return {
        "qdqtool": TOOL_VERSION,
        "source": _source(),
        "onnxruntime": sessions.load_onnxruntime().__version__,
        "onnx": onnx.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
        "probe": _probe(threads),
        "processor": _processor(),
    }


def difference(theirs: dict[str, str], ours: dict[str, str], mixed_cpus: bool) -> str:
    """Why a worker cannot take part, as the rest of a sentence that begins with its address; empty where it can."""
    for name in VERSIONS:
        if theirs.get(name) != ours[name]:
            return (
                f"has {name} {theirs.get(name)}, here it is {ours[name]}; install the same version"
            )
    if theirs.get("source") != ours["source"]:
        return (
            f"has other source files of qdqtool {ours['qdqtool']} than here; install the same ones"
        )
    if theirs.get("probe") != ours["probe"] and not mixed_cpus:
        return said(
            "computes other numbers than here (a probe network's outputs differ; '{there}' there, '{here}' "
            "here), so that the result would depend on who computes what; use equal processors, or permit it "
            "with {`mixed_cpus`}",
            there=theirs.get("processor"),
            here=ours["processor"],
        )
    return ""


@functools.cache
def _source() -> str:
    """A hash of the Python files that take part: versions alone do not show an edited installation."""
    digest = hashlib.sha256()
    for package in ("calibration", "qdqtool"):
        found = importlib.util.find_spec(package)
        root = Path(found.origin).parent if found is not None and found.origin else Path(package)
        for path in sorted(root.rglob("*.py")):
            digest.update(
                path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
            )
    return digest.hexdigest()


def _processor() -> str:
    with (
        contextlib.suppress(OSError),
        open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file,
    ):
        for line in file:
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())[:80]
    return (platform.processor() or platform.machine())[:80]


@functools.cache
def _probe(threads: int) -> str:
    """A hash of what a fixed network makes of a fixed input, and of a picture decoded and resized."""
    model = probe_network().SerializeToString()
    found = []
    for count in sorted({1, max(1, threads)}):
        digest = hashlib.sha256(_picture())
        session = sessions.open_session(model, count)
        for array in session.run(None, {"x": _numbers((1, 3, 48, 48), 1)}):
            digest.update(np.ascontiguousarray(array).tobytes())
        found.append(digest.hexdigest())
    return " ".join(dict.fromkeys(found))  # one, where the number of threads changes nothing


def _numbers(shape: tuple[int, ...], seed: int) -> npt.NDArray[np.float32]:
    """Fixed numbers from -0.5 to 0.5, by integer arithmetic alone: no version of numpy makes others."""
    index = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(seed * 1_000_003)
    mixed = (index * np.uint64(2_654_435_761)) % np.uint64(1 << 24)
    mixed = (mixed * mixed) % np.uint64(16_777_213)
    return (mixed.astype(np.float64) / (1 << 24) - 0.5).astype(np.float32).reshape(shape)


def probe_network() -> Any:
    """Convolutions of every kind, activations, a product of matrices and a normalization: [1, 3, 48, 48] float32.

    Kernels that differ between processors (width of the vectors, fused multiplication) sum in another order, which
    shows in the last bits of long sums.
    """
    from onnx import TensorProto, helper, numpy_helper

    def weight(name: str, *shape: int, seed: int) -> Any:
        return numpy_helper.from_array(_numbers(shape, seed), name)

    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Sigmoid", ["c1"], ["s1"]),
        node("Mul", ["c1", "s1"], ["m1"]),
        node("Conv", ["m1", "w2"], ["c2"], pads=[1, 1, 1, 1]),
        node("Relu", ["c2"], ["r2"]),
        node("Conv", ["r2", "w3"], ["c3"]),
        node("Conv", ["c3", "w4"], ["c4"], pads=[1, 1, 1, 1], group=96),
        node("Add", ["c3", "c4"], ["a4"]),
        node("MaxPool", ["a4"], ["p5"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("ConvTranspose", ["p5", "w6"], ["t6"], strides=[2, 2]),
        node("Resize", ["p5", "", "scales"], ["z7"], mode="linear"),
        node("GlobalAveragePool", ["t6"], ["g8"]),
        node("Flatten", ["p5"], ["f9"]),
        node("Gemm", ["f9", "w9", "b9"], ["y9"], transB=1),
        node("Softmax", ["y9"], ["n9"]),
        node("Reshape", ["p5", "rows"], ["q10"]),
        node("MatMul", ["q10", "w10"], ["v10"]),
        node("Erf", ["v10"], ["e10"]),
        node("LayerNormalization", ["e10", "w11"], ["l11"], axis=-1),
        node("Tanh", ["t6"], ["h12"]),
    ]
    weights = [
        weight("w1", 64, 3, 3, 3, seed=2),
        weight("b1", 64, seed=3),
        weight("w2", 96, 64, 3, 3, seed=4),
        weight("w3", 96, 96, 1, 1, seed=5),
        weight("w4", 96, 1, 3, 3, seed=6),
        weight("w6", 96, 16, 2, 2, seed=7),
        weight("w9", 10, 96 * 144, seed=8),
        weight("b9", 10, seed=9),
        weight("w10", 144, 64, seed=10),
        weight("w11", 64, seed=11),
        numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales"),
        numpy_helper.from_array(np.array([96, 144], np.int64), "rows"),
    ]
    outputs = ["m1", "r2", "a4", "z7", "g8", "y9", "n9", "l11", "h12"]
    graph = helper.make_graph(
        nodes,
        "probe",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 48, 48])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _picture() -> bytes:
    """Pixels of a fixed picture as JPEG and WebP, decoded and resized: the libraries in Pillow's wheels differ."""
    from PIL import Image, features

    pixels = (_numbers((40, 56, 3), 12) + 0.5) * 64 + np.arange(56, dtype=np.float32)[
        None, :, None
    ] * 3
    picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    result = b""
    for form in ("JPEG", "WEBP"):
        if form == "WEBP" and not features.check("webp"):
            continue
        packed = io.BytesIO()
        picture.save(packed, form, quality=80)
        again = Image.open(io.BytesIO(packed.getvalue()), formats=[form]).convert("RGB")
        extent = (0, 0, *again.size)
        result += again.tobytes()
        result += again.transform(
            (31, 23), Image.Transform.EXTENT, extent, Image.Resampling.BILINEAR
        ).tobytes()
    return result


# A job --------------------------------------------------------------------------------------------------------------

#: Makes what the pieces of one job share, once for each process: (shared part, threads of the worker) to state.
Factory = Callable[[Any, int], Any]
_JOBS: dict[
    tuple[str, str], Carrier
] = {}  # by job and worker: several workers may live in one process


class Carrier(WorkerPlugin):  # type: ignore[misc]
    """Brings a job's shared part to a worker, and takes it away again.

    Attributes:
        refusal: Why this worker may not take part; empty where it may.
        stopped: Set when the job is over: pieces that are still being worked on end early.
    """

    refusal: str
    stopped: threading.Event

    def __init__(
        self, job: str, factory: str, payload: Any, expected: dict[str, str], mixed_cpus: bool
    ) -> None:
        """Describes it, as for :class:`~calibration.cluster.mapping.Job`; ``expected`` are the client's facts.

        A worker gets a copy of its own.
        """
        self.name, self.factory, self.payload = job, factory, payload
        self.expected, self.mixed_cpus = expected, mixed_cpus

    def setup(self, worker: Any) -> None:
        self.threads = int(worker.state.nthreads)
        self.refusal = difference(facts(self.threads), self.expected, self.mixed_cpus)
        self.stopped, self._lock, self._state = threading.Event(), threading.Lock(), None
        _JOBS[self.name, worker.address] = self

    def teardown(self, worker: Any) -> None:
        if _JOBS.pop((self.name, worker.address), None) is not None:
            self.stopped.set()

    def state(self) -> Any:
        """What the pieces share in this process, made by the first; the worker keeps its plugins, not their parts."""
        with self._lock:
            if self._state is None:
                self._state, self.payload = named(self.factory)(self.payload, self.threads), None
            return self._state


def named(name: str) -> Any:
    """What ``module:function`` names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def perform(job: str, function: str, item: Any) -> Any:
    """One piece of work: ``function(state, item, stopped)``.

    Raises:
        ClusterError: This worker may not take part, or the job is over.
    """
    from distributed import get_worker

    address = get_worker().address
    shared = _JOBS.get((job, address))
    if shared is None:
        raise ClusterError(
            f"cluster worker {address} got work of a job that is over or never reached it",
            code="job-over",
        )
    if shared.refusal:
        raise ClusterError(
            said("cluster worker {address} {refusal}", address=address, refusal=shared.refusal),
            code="worker-mismatch",
            parameter="cluster",
        )
    try:
        return named(function)(shared.state(), item, shared.stopped)
    except QdqtoolError as error:
        raise type(error)(
            said("cluster worker {address}: {error}", address=address, error=of_error(error)),
            code=error.code,
            parameter=error.parameter,
            node=error.node,
        ) from None


def refusals(job: str, dask_worker: Any) -> str:
    """Why this worker may not take part in a job; empty where it may. Dask gives the worker."""
    shared = _JOBS.get((job, dask_worker.address))
    return "did not take the work over" if shared is None else shared.refusal
