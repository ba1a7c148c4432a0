"""Shrinking of a model, step by step, while the model passes a check."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy

import onnx

from qdqtool.errors import BuilderError, ModelError
from qdqtool.extraction.options import PREDICTED_MODELS
from qdqtool.extraction.reductions import (
    ALL,
    LARGE,
    READING_CONSTANTS,
    Reduction,
    can_hold_sizes,
    prune_unused,
)
from qdqtool.proto.external_data import data_size, has_data
from qdqtool.proto.shapes import infer_shapes
from qdqtool.proto.slim import strip_data, tensor_bytes
from qdqtool.util import limits

ModelCheck = Callable[[onnx.ModelProto], bool]
_FINDING_COST = 8  # finding a candidate spends 1/8 of the budget that its prediction spends


class ModelShrinker:
    """Makes a model smaller, step by step, while the model passes a check.

    Candidates are created without large constants. The constants are restored only in candidates
    that are checked.

    Args:
        proto: The model. It is not changed.
        holds: Function that returns whether a smaller model passes the check. If it raises an
            exception other than BuilderError, the model does not pass.
        reductions: Functions that propose smaller models; see
            :mod:`qdqtool.extraction.reductions`.
        limit: Maximum number of models to try.
        bounded: Whether the total numbers of nodes and bytes of all models are limited too; see
            :mod:`qdqtool.util.limits`.

    Attributes:
        tried: Number of models that were tried.
        exhausted: Whether a limit ended the search.

    Raises:
        ModelError: onnx cannot infer the shapes of the model.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        holds: ModelCheck,
        reductions: Sequence[Reduction] = ALL,
        limit: int = PREDICTED_MODELS,
        bounded: bool = False,
    ) -> None:
        self._budget = (limits.MINIMIZED_NODES, limits.MINIMIZED_BYTES) if bounded else None
        self._strict = True
        self._constants: dict[str, onnx.TensorProto] = {}
        light = detach_constants(proto, self._constants)
        try:
            self._light = self._infer_types(light)
        except Exception:
            # In strict mode, onnx rejects some valid models (with plugins or unusual types). It
            # would also reject their parts. Strict mode is therefore off for all candidates.
            self._strict = False
            try:
                self._light = self._infer_types(light)
            except Exception as error:
                raise ModelError(
                    "the model cannot be minimized, because onnx cannot infer its shapes "
                    f"({' '.join(str(error).split())[:200]}); leave out `minimize`",
                    code="shapes-unknown",
                    parameter="minimize",
                ) from error
        self._holds = holds
        self._reductions = reductions
        self._limit = limit
        self._digests: set[bytes] = {_digest(self._light)}
        self.tried = 0
        self.exhausted = False

    @property
    def proto(self) -> onnx.ModelProto:
        """Smallest model found so far that passes the check."""
        return attach_constants(self._light, self._constants)

    def steps(self) -> Iterator[bool]:
        """Try smaller models until none passes or a limit is reached; yield whether each passes."""
        progress = True
        while progress and not self.exhausted:
            progress = False
            for reduction in self._reductions:
                is_smaller = True
                while is_smaller and not self.exhausted:
                    is_smaller = False
                    for holds in self._try_candidates(reduction):
                        yield holds
                        is_smaller = holds
                    progress = progress or is_smaller

    def _try_candidates(self, reduction: Reduction) -> Iterator[bool]:
        reads_constants = reduction in READING_CONSTANTS
        arguments = [self._find_constant] if reads_constants else []
        candidates = reduction(self._light, *arguments)
        while (candidate := next(candidates, None)) is not None:
            if self.tried >= self._limit:
                self.exhausted = True
                return
            holds = self._try_candidate(
                candidate, _constant_size(candidate) if reads_constants else 0
            )
            del candidate  # frees memory: a candidate may be as large as the model
            if holds is not None and not self.exhausted:
                yield holds
            if holds or self.exhausted:
                return

    def _spend_budget(self, nodes: int, size: int = 0) -> bool:
        if self._budget is not None:
            self._budget = (self._budget[0] - nodes, self._budget[1] - size)
            self.exhausted = min(self._budget) < 0
        return not self.exhausted

    def _find_constant(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        return self._constants.get(tensor.doc_string, tensor)

    def _try_candidate(self, candidate: onnx.ModelProto, copied_bytes: int = 0) -> bool | None:
        """Check a candidate. If it passes, it replaces the model that is made smaller.

        Args:
            candidate: Model proposed by a reduction.
            copied_bytes: Bytes of constants that were copied for the candidate.

        Returns:
            Whether the candidate passes. None if it was not checked, because it is invalid, was
            tried before, or exceeds the budget.
        """
        if not self._spend_budget(len(candidate.graph.node) // _FINDING_COST, copied_bytes):
            return None
        constants = dict(self._constants)
        try:
            typed = self._infer_types(detach_constants(candidate, constants))
        except Exception:
            return None  # reductions may create invalid models
        digest = _digest(typed)
        if digest in self._digests:
            return None
        self._digests.add(digest)
        complete = attach_constants(typed, constants)
        if not self._spend_budget(len(complete.graph.node), _constant_size(complete)):
            return None
        self.tried += 1
        try:
            holds = self._holds(complete)
        except BuilderError:
            raise  # the compiler cannot run any more, so no model can be checked
        except Exception:
            return False
        if holds:
            self._accept_candidate(typed, constants)
        return holds

    def _accept_candidate(
        self, typed: onnx.ModelProto, constants: Mapping[str, onnx.TensorProto]
    ) -> None:
        self._light = typed
        marks = (t.doc_string for t in typed.graph.initializer)
        # New tensors are copied, because the original would keep its whole candidate in memory.
        self._constants = {
            m: self._constants.get(m) or deepcopy(constants[m]) for m in marks if m in constants
        }

    def _infer_types(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        return infer_shapes(proto, check_type=self._strict, strict_mode=self._strict)


def _digest(proto: onnx.ModelProto) -> bytes:
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).digest()


def _constant_size(proto: onnx.ModelProto) -> int:
    return sum(data_size(t) for t in proto.graph.initializer if has_data(t))


def detach_constants(
    proto: onnx.ModelProto, constants: dict[str, onnx.TensorProto]
) -> onnx.ModelProto:
    """Return a pruned copy of a model without the data of large constants.

    Args:
        proto: The model.
        constants: Dictionary to which the removed constants are added. The key is a hash, which is
            also the doc string of the constant without data.
    """

    def detach(tensor: onnx.TensorProto) -> onnx.TensorProto:
        if tensor_bytes(tensor) <= LARGE or can_hold_sizes(tensor):
            return tensor
        mark = hashlib.sha256(tensor.SerializeToString(deterministic=True)).hexdigest()
        constants.setdefault(mark, tensor)
        stub = strip_data(tensor)
        stub.doc_string = mark
        return stub

    return prune_unused(proto, detach)


def attach_constants(
    proto: onnx.ModelProto, constants: Mapping[str, onnx.TensorProto]
) -> onnx.ModelProto:
    """Return a copy of a model with the data that :func:`detach_constants` removed."""
    complete = deepcopy(proto)
    for tensor in complete.graph.initializer:
        constant = constants.get(tensor.doc_string)
        if constant is not None:
            name = tensor.name
            tensor.CopyFrom(constant)
            tensor.name = name
    return complete
