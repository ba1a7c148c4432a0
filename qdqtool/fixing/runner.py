"""Runs of models in onnxruntime, with limits on memory and work."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from qdqtool.fixing.options import FixOptions
from qdqtool.proto.external_data import serialize
from qdqtool.runtime import sessions
from qdqtool.runtime.run_cost import estimate_run_cost
from qdqtool.util import limits

Arrays = dict[str, npt.NDArray[Any]]
_MAX_THREADS = 4


class RunError(Exception):
    """Error: onnxruntime cannot run a model.

    Attributes:
        code: Identifier of the cause, such as ``"memory-limit"``. It does not change when the
            message is reworded.
        node: Tensor that the error is about. Empty if there is none.
    """

    def __init__(self, message: str, *, code: str, node: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.node = node


class RunLimitError(RunError):
    """Error: a model takes more work or memory than `effort` permits."""


class ModelRunner:
    """Runner of models in onnxruntime, with limits on memory and work.

    Memory and work are computed from the model, not measured, so that the load of the machine does
    not change which runs are permitted.

    Args:
        effort: Factor on the limits.
        samples: Number of samples on which outputs are compared.

    Attributes:
        work_left: Multiplications that are left for all runs.
    """

    def __init__(self, effort: float = FixOptions.effort, samples: int = 1) -> None:
        self.effort = effort
        self.work_left = limits.SESSION_WORK_ALL * effort * samples

    def run(self, proto: onnx.ModelProto, inputs: Arrays) -> Arrays:
        """Return the outputs of a model, computed on the CPU without fusing Q/DQ.

        Inputs that the model does not have are ignored. Outputs that are not arrays of numbers are
        left out.

        Raises:
            RunLimitError: The model needs more than permitted, or the work for all runs is used up.
            RunError: onnxruntime cannot load or run the model.
        """
        inputs = {v.name: inputs[v.name] for v in proto.graph.input if v.name in inputs}
        source = _serialize(proto)
        self._spend_work(proto, inputs, len(source))
        threads = min(_MAX_THREADS, sessions.core_count())
        try:
            session = sessions.open_session(source, threads, optimize="basic", fold_qdq=False)
            names = [output.name for output in session.get_outputs()]
            with sessions.silence_output():
                values = session.run(names, inputs)
        except Exception as error:  # onnxruntime's exceptions share no other base class
            raise RunError(sessions.describe_failure(error), code="onnxruntime-error") from error
        return {
            name: value
            for name, value in zip(names, values, strict=True)
            if isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
        }

    def _spend_work(self, proto: onnx.ModelProto, inputs: Arrays, model_bytes: int) -> None:
        cost = estimate_run_cost(proto, {n: array.shape for n, array in inputs.items()})
        memory = limits.SESSION_BYTES * self.effort
        if cost.peak_bytes > memory:
            raise RunLimitError(
                "the tensors of a run would take "
                f"{limits.format_excess(cost.peak_bytes, memory, ' at once')}; increase `effort`",
                code="memory-limit",
            )
        if cost.operations > limits.SESSION_WORK * self.effort:
            raise RunLimitError(
                f"a run takes {cost.operations:.2g} multiplications; the limit is "
                f"{limits.SESSION_WORK * self.effort:.2g}; increase `effort`",
                code="work-limit",
            )
        work = cost.operations + limits.SESSION_RUN + limits.SESSION_WORK_BYTE * model_bytes
        if work > self.work_left:
            raise RunLimitError(
                "the limit of work for comparing outputs is reached; increase `effort`",
                code="work-used-up",
            )
        self.work_left -= work


def _serialize(proto: onnx.ModelProto) -> bytes:
    """Return the bytes of a model, with an IR version that onnxruntime accepts."""
    source = serialize(proto)
    if source is None:
        raise RunError("the model exceeds 2 GB", code="model-too-large")
    if proto.ir_version > sessions.IR_VERSION:
        # If a serialized message has a scalar field twice, protobuf reads the last value.
        source += onnx.ModelProto(ir_version=sessions.IR_VERSION).SerializeToString()
    return source
