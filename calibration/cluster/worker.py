"""Code that runs on a worker: jobs, and a check of versions and computed numbers.

If the package versions and the outputs of a test network are equal on two machines, both compute
equal statistics, bit for bit.
"""

from __future__ import annotations

import functools
import hashlib
import math
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

_PROBE = "test network"


def worker_facts() -> dict[str, str]:
    """Return the package versions on this machine, and a hash of a test network's outputs."""
    import onnx
    import PIL
    from PIL import features

    return {
        "qdqtool": TOOL_VERSION,
        "onnxruntime": sessions.load_onnxruntime().__version__,
        "onnx": onnx.__version__,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
        "libjpeg": str(features.version("jpg")),
        "libwebp": str(features.version("webp")),
        _PROBE: _hash_probe(),
    }


def describe_difference(theirs: dict[str, str], ours: dict[str, str], mixed_cpus: bool) -> str:
    """Return the reason why a worker cannot be used; empty if the worker can be used.

    The text continues a sentence that begins with the worker's address.

    Args:
        theirs: Facts of the worker; see :func:`worker_facts`.
        ours: Facts of the client.
        mixed_cpus: Whether to allow results that differ in the last bits.
    """
    for name, version in ours.items():
        if name != _PROBE and theirs.get(name) != version:
            versions = f"has {name} {theirs.get(name)}, and this machine has {name} {version}"
            return f"{versions}; install the same version"
    if theirs.get(_PROBE) != ours[_PROBE] and not mixed_cpus:
        return (
            "computes other numbers than this machine (a test network's outputs differ), so the "
            "statistics would depend on which worker counts which image; use equal processors, or "
            "allow the difference with `mixed_cpus`"
        )
    return ""


@functools.cache
def _hash_probe() -> str:
    session = sessions.open_session(probe_network().SerializeToString(), 1)
    digest = hashlib.sha256()
    for array in session.run(None, {"x": _deterministic_numbers((1, 3, 48, 48))}):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _deterministic_numbers(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Return pseudorandom numbers from -0.5 to 0.5 that are equal in every version of numpy."""
    index = np.arange(math.prod(shape), dtype=np.uint64)
    mixed = index * np.uint64(2_654_435_761) % np.uint64(1 << 24)
    return (mixed / (1 << 24) - 0.5).astype(np.float32).reshape(shape)


def probe_network() -> Any:
    """Return a network whose outputs differ if processors use different onnxruntime kernels.

    Kernels for other vector widths, and kernels with fused multiply-add, sum in another order, so
    that the last bits of long sums differ. The input `x` is float32 [1, 3, 48, 48].
    """
    from onnx import TensorProto, helper, numpy_helper

    shapes = {
        "w1": (64, 3, 3, 3),
        "w2": (96, 64, 3, 3),
        "w3": (96, 1, 3, 3),
        "w4": (96, 32, 2, 2),
        "w5": (2048, 10),
    }
    # The weights are constants, because onnxruntime prepares constants for its fastest kernels.
    weights = [
        numpy_helper.from_array(_deterministic_numbers(shape), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], strides=[4, 4]),
        helper.make_node("Sigmoid", ["c1"], ["s1"]),
        helper.make_node("Conv", ["s1", "w2"], ["c2"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["c2", "w3"], ["c3"], strides=[3, 3], group=96),
        helper.make_node("ConvTranspose", ["c3", "w4"], ["t4"], strides=[2, 2]),
        helper.make_node("Flatten", ["t4"], ["f4"]),
        helper.make_node("MatMul", ["f4", "w5"], ["y5"]),
        helper.make_node("Softmax", ["y5"], ["p5"]),
    ]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        for name in ("s1", "c2", "c3", "t4", "y5", "p5")
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 48, 48])
    graph = helper.make_graph(nodes, "probe", [x], outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


# Jobs ---------------------------------------------------------------------------------------------

#: Function that creates a process's state of a job. Its arguments are the payload and the worker's
#: number of threads.
Factory = Callable[[Any, int], Any]
#: Function that processes an item. Its arguments are the state, the item, and an event that is set
#: when the client has ended the job.
ItemFunction = Callable[[Any, Any, threading.Event], Any]


class JobPlugin(WorkerPlugin):  # type: ignore[misc]
    """Dask plug-in that holds the payload of a job on a worker; each worker has its own copy.

    Args:
        job: Name of the job.
        factory: Creates the state of the job.
        payload: First argument of `factory`.
        expected: Facts of the client; see :func:`worker_facts`.
        mixed_cpus: See :func:`describe_difference`.

    Attributes:
        rejection: Reason why this worker cannot be used; empty if the worker can be used.
        stopped: Event that is set when the job ends, so that running items end early.
    """

    rejection: str
    stopped: threading.Event

    def __init__(
        self, job: str, factory: Factory, payload: Any, expected: dict[str, str], mixed_cpus: bool
    ) -> None:
        self.name, self.factory, self.payload = job, factory, payload
        self.expected, self.mixed_cpus = expected, mixed_cpus

    def setup(self, worker: Any) -> None:
        """Compare the worker with the client. Called by Dask."""
        self.threads = int(worker.state.nthreads)
        self.rejection = describe_difference(worker_facts(), self.expected, self.mixed_cpus)
        self.stopped, self._lock, self._state = threading.Event(), threading.Lock(), None

    def teardown(self, worker: Any) -> None:
        """End running items early. Called by Dask."""
        self.stopped.set()

    def state(self) -> Any:
        """Return the state of the job in this process; the first call creates the state."""
        with self._lock:
            if self._state is None:
                self._state = self.factory(self.payload, self.threads)
                self.payload = None  # frees memory: Dask keeps the plug-in until the job ends
            return self._state


def run_item(job: str, function: ItemFunction, item: Any) -> Any:
    """Call a function for one item of a job on this worker, and return the result.

    Raises:
        ClusterError: This worker cannot be used, or the job has ended.
        QdqtoolError: The function failed. The message names the worker.
    """
    from distributed import get_worker

    worker = get_worker()
    plugin = worker.plugins.get(job)
    if plugin is None:
        raise ClusterError(
            f"cluster worker {worker.address} received an item of a job that has ended; run again",
            code="job-over",
        )
    if plugin.rejection:
        raise ClusterError(
            f"cluster worker {worker.address} {plugin.rejection}",
            code="worker-mismatch",
            parameter="cluster",
        )
    try:
        return function(plugin.state(), item, plugin.stopped)
    except QdqtoolError as error:
        raise type(error)(
            f"cluster worker {worker.address}: {error}",
            code=error.code,
            parameter=error.parameter,
            node=error.node,
        ) from None
