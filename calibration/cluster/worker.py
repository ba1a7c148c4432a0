"""Code that runs on a worker: its jobs, and the versions and hashes that must be equal everywhere.

Workers with equal versions and hashes compute equal statistics, bit for bit.
"""

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

# Versions, source files, and computed numbers -----------------------------------------------------

#: Packages that need the same version on all machines, in the order of the checks.
VERSIONS = ("qdqtool", "onnxruntime", "onnx", "numpy", "pillow")


def worker_facts(threads: int = 1) -> dict[str, str]:
    """Return the versions and hashes of this machine, which must be equal on all workers.

    Args:
        threads: Number of threads of one onnxruntime session.
    """
    import onnx
    import PIL

    return {
        "qdqtool": TOOL_VERSION,
        "source": _hash_source(),
        "onnxruntime": sessions.load_onnxruntime().__version__,
        "onnx": onnx.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
        "probe": _hash_probe(threads),
        "processor": _processor_name(),
    }


def describe_difference(theirs: dict[str, str], ours: dict[str, str], mixed_cpus: bool) -> str:
    """Return the reason why a worker cannot be used; empty if the worker can be used.

    The text continues a sentence that begins with the worker's address.

    Args:
        theirs: Versions and hashes of the worker; see :func:`worker_facts`.
        ours: Versions and hashes of the client.
        mixed_cpus: Whether to allow processors that compute different last bits.
    """
    for name in VERSIONS:
        if theirs.get(name) != ours[name]:
            versions = f"has {name} {theirs.get(name)}, here it is {ours[name]}"
            return f"{versions}; install the same version"
    if theirs.get("source") != ours["source"]:
        source = f"has other source files of qdqtool {ours['qdqtool']} than here"
        return f"{source}; install the same ones"
    if theirs.get("probe") != ours["probe"] and not mixed_cpus:
        return (
            "computes other numbers than this machine (a test network's outputs differ; "
            f"'{theirs.get('processor')}' there, '{ours['processor']}' here), so the statistics "
            "would depend on which worker counts which image; use equal processors, or allow the "
            "difference with `mixed_cpus`"
        )
    return ""


@functools.cache
def _hash_source() -> str:
    """Hash the Python files of qdqtool. An edited installation keeps its version number."""
    digest = hashlib.sha256()
    for package in ("calibration", "qdqtool"):
        spec = importlib.util.find_spec(package)
        root = Path(spec.origin).parent if spec is not None and spec.origin else Path(package)
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix().encode()
            digest.update(name + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _processor_name() -> str:
    with (
        contextlib.suppress(OSError),
        open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file,
    ):
        for line in file:
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())[:80]
    return (platform.processor() or platform.machine())[:80]


@functools.cache
def _hash_probe(threads: int) -> str:
    """Hash the outputs of a fixed network, and an image that was decoded and resized.

    Returns:
        Hash in hexadecimal; two hashes if one thread and `threads` threads give other outputs.
    """
    model = probe_network().SerializeToString()
    hashes = []
    for count in sorted({1, max(1, threads)}):
        digest = hashlib.sha256(_probe_pixels())
        session = sessions.open_session(model, count)
        for array in session.run(None, {"x": _deterministic_numbers((1, 3, 48, 48), 1)}):
            digest.update(np.ascontiguousarray(array).tobytes())
        hashes.append(digest.hexdigest())
    return " ".join(dict.fromkeys(hashes))


def _deterministic_numbers(shape: tuple[int, ...], seed: int) -> npt.NDArray[np.float32]:
    """Return pseudorandom numbers from -0.5 to 0.5 that are equal in every version of numpy."""
    index = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(seed * 1_000_003)
    mixed = (index * np.uint64(2_654_435_761)) % np.uint64(1 << 24)
    mixed = (mixed * mixed) % np.uint64(16_777_213)
    return (mixed.astype(np.float64) / (1 << 24) - 0.5).astype(np.float32).reshape(shape)


def probe_network() -> Any:
    """Return a network whose outputs differ between processors with other floating-point kernels.

    Kernels for other vector widths or with fused multiplication sum in another order, so the last
    bits of long sums differ. The network has convolutions, activations, matrix products and a
    normalization. The input `x` is float32 [1, 3, 48, 48].
    """
    from onnx import TensorProto, helper, numpy_helper

    def weight(name: str, *shape: int, seed: int) -> Any:
        return numpy_helper.from_array(_deterministic_numbers(shape, seed), name)

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


def _probe_pixels() -> bytes:
    """Return the pixels of a fixed image after coding as JPEG and WebP, and after resizing.

    Packages of Pillow contain different versions of the image libraries.
    """
    from PIL import Image, features

    ramp = np.arange(56, dtype=np.float32)[None, :, None] * 3
    pixels = (_deterministic_numbers((40, 56, 3), 12) + 0.5) * 64 + ramp
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    result = b""
    for image_format in ("JPEG", "WEBP"):
        if image_format == "WEBP" and not features.check("webp"):
            continue
        file = io.BytesIO()
        image.save(file, image_format, quality=80)
        decoded = Image.open(io.BytesIO(file.getvalue()), formats=[image_format]).convert("RGB")
        size, method, extent = (31, 23), Image.Transform.EXTENT, (0, 0, *decoded.size)
        resized = decoded.transform(size, method, extent, Image.Resampling.BILINEAR)
        result += decoded.tobytes() + resized.tobytes()
    return result


# Jobs ---------------------------------------------------------------------------------------------

#: Creates the state of a job in a process from the payload and the worker's number of threads.
Factory = Callable[[Any, int], Any]
# Plug-ins of this process by job and address of the worker. Several workers may share a process.
_PLUGINS: dict[tuple[str, str], JobPlugin] = {}


class JobPlugin(WorkerPlugin):  # type: ignore[misc]
    """Dask plug-in that holds the payload of a job on a worker; each worker has its own copy.

    Args:
        job: Name of the job.
        factory: See :class:`~calibration.cluster.jobs.ClusterJob`.
        payload: See :class:`~calibration.cluster.jobs.ClusterJob`.
        expected: Versions and hashes of the client; see :func:`worker_facts`.
        mixed_cpus: See :func:`describe_difference`.

    Attributes:
        rejection: Reason why this worker cannot be used; empty if the worker can be used.
        stopped: Event that is set when the job ends, so that running items end early.
    """

    rejection: str
    stopped: threading.Event

    def __init__(
        self, job: str, factory: str, payload: Any, expected: dict[str, str], mixed_cpus: bool
    ) -> None:
        self.name, self.factory, self.payload = job, factory, payload
        self.expected, self.mixed_cpus = expected, mixed_cpus

    def setup(self, worker: Any) -> None:
        """Compare the worker with the client, and register the plug-in. Called by Dask."""
        self.threads = int(worker.state.nthreads)
        facts = worker_facts(self.threads)
        self.rejection = describe_difference(facts, self.expected, self.mixed_cpus)
        self.stopped, self._lock, self._state = threading.Event(), threading.Lock(), None
        _PLUGINS[self.name, worker.address] = self

    def teardown(self, worker: Any) -> None:
        """Remove the plug-in, and tell running items to end. Called by Dask."""
        if _PLUGINS.pop((self.name, worker.address), None) is not None:
            self.stopped.set()

    def state(self) -> Any:
        """Return the state of the job in this process; the first call creates the state."""
        with self._lock:
            if self._state is None:
                self._state = import_function(self.factory)(self.payload, self.threads)
                self.payload = None  # frees memory: Dask keeps the plug-in until the job ends
            return self._state


def import_function(name: str) -> Any:
    """Import and return the function with the name ``module:function``."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def run_item(job: str, function: str, item: Any) -> Any:
    """Call ``function(state, item, stopped)`` for one item of a job, and return the result.

    Raises:
        ClusterError: This worker cannot be used, or the job has ended.
        QdqtoolError: The function failed. The message names the worker.
    """
    from distributed import get_worker

    address = get_worker().address
    plugin = _PLUGINS.get((job, address))
    if plugin is None:
        raise ClusterError(
            f"cluster worker {address} received an item of a job that has ended or was not sent to "
            "this worker",
            code="job-over",
        )
    if plugin.rejection:
        raise ClusterError(
            f"cluster worker {address} {plugin.rejection}",
            code="worker-mismatch",
            parameter="cluster",
        )
    try:
        return import_function(function)(plugin.state(), item, plugin.stopped)
    except QdqtoolError as error:
        raise type(error)(
            f"cluster worker {address}: {error}",
            code=error.code,
            parameter=error.parameter,
            node=error.node,
        ) from None


def find_rejection(job: str, dask_worker: Any) -> str:
    """Return the reason why a worker cannot be used for a job; empty if it can be used.

    Args:
        job: Name of the job.
        dask_worker: Worker, which Dask passes to functions with a parameter of this name.
    """
    plugin = _PLUGINS.get((job, dask_worker.address))
    return "did not receive the job" if plugin is None else plugin.rejection
