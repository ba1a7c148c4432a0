"""Code that runs on a worker: its jobs, and a check of versions and hash.

Workers with equal versions and an equal hash compute equal statistics, bit for bit.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from distributed.diagnostics.plugin import WorkerPlugin

from qdqtool.errors import ClusterError, QdqtoolError
from qdqtool.runtime import sessions
from qdqtool.version import TOOL_VERSION

# Versions and computed numbers --------------------------------------------------------------------

#: Packages that need the same version on all machines, in the order of the checks.
VERSIONS = ("qdqtool", "onnxruntime", "onnx", "numpy", "pillow")


def worker_facts(threads: int = 1) -> dict[str, str]:
    """Return the versions and the hash of this machine, which must be equal on all workers.

    Args:
        threads: Number of threads of one onnxruntime session.
    """
    import onnx
    import PIL

    return {
        "qdqtool": TOOL_VERSION,
        "onnxruntime": sessions.load_onnxruntime().__version__,
        "onnx": onnx.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
        "probe": _hash_probe(threads),
    }


def describe_difference(theirs: dict[str, str], ours: dict[str, str], mixed_cpus: bool) -> str:
    """Return the reason why a worker cannot be used; empty if the worker can be used.

    The text continues a sentence that begins with the worker's address.

    Args:
        theirs: Versions and hash of the worker; see :func:`worker_facts`.
        ours: Versions and hash of the client.
        mixed_cpus: Whether to allow processors that compute different last bits.
    """
    for name in VERSIONS:
        if theirs.get(name) != ours[name]:
            versions = f"has {name} {theirs.get(name)}, here it is {ours[name]}"
            return f"{versions}; install the same version"
    if theirs.get("probe") != ours["probe"] and not mixed_cpus:
        return (
            "computes other numbers than this machine (a test network's outputs differ), so the "
            "statistics would depend on which worker counts which image; use equal processors, or "
            "allow the difference with `mixed_cpus`"
        )
    return ""


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


# The inputs other than `x` become constants, which onnxruntime prepares for its fastest kernels.
_PROBE = """<ir_version: 9, opset_import: ["" : 17]>
probe (float[1,3,48,48] x, float[64,3,3,3] w1, float[64] b1, float[96,64,3,3] w2,
       float[96,96,1,1] w3, float[96,1,3,3] w4, float[96,16,2,2] w6, float[10,13824] w9,
       float[10] b9, float[144,64] w10, float[64] w11)
    => (float m1, float r2, float a4, float z7, float g8, float y9, float n9,
        float l11, float h12)
<float[4] scales = {1, 1, 2, 2}, int64[2] rows = {96, 144}>
{
    c1 = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w1, b1)
    s1 = Sigmoid (c1)
    m1 = Mul (c1, s1)
    c2 = Conv <pads = [1, 1, 1, 1]> (m1, w2)
    r2 = Relu (c2)
    c3 = Conv (r2, w3)
    c4 = Conv <pads = [1, 1, 1, 1], group = 96> (c3, w4)
    a4 = Add (c3, c4)
    p5 = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (a4)
    t6 = ConvTranspose <strides = [2, 2]> (p5, w6)
    z7 = Resize <mode = "linear"> (p5, , scales)
    g8 = GlobalAveragePool (t6)
    f9 = Flatten (p5)
    y9 = Gemm <transB = 1> (f9, w9, b9)
    n9 = Softmax (y9)
    q10 = Reshape (p5, rows)
    v10 = MatMul (q10, w10)
    e10 = Erf (v10)
    l11 = LayerNormalization <axis = -1> (e10, w11)
    h12 = Tanh (t6)
}"""


def probe_network() -> Any:
    """Return a network whose outputs differ between processors with other kernels.

    Kernels for other vector widths or with fused multiplication sum in another order, so the last
    bits of long sums differ. The input `x` is float32 [1, 3, 48, 48].
    """
    from onnx import TensorProto, helper, numpy_helper, parser

    parsed = parser.parse_model(_PROBE)
    x, *declared = parsed.graph.input
    weights = list(parsed.graph.initializer)
    for seed, weight in enumerate(declared, 2):
        shape = tuple(d.dim_value for d in weight.type.tensor_type.shape.dim)
        weights.append(numpy_helper.from_array(_deterministic_numbers(shape, seed), weight.name))
    outputs = [
        helper.make_tensor_value_info(output.name, TensorProto.FLOAT, None)
        for output in parsed.graph.output
    ]
    graph = helper.make_graph(parsed.graph.node, "probe", [x], outputs, weights)
    return helper.make_model(graph, opset_imports=parsed.opset_import, ir_version=9)


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
