"""Delta debugging of ONNX models: tries smaller ones, the boldest first, and keeps what still holds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import onnx

from qdqtool.errors import BuilderError, ModelError
from qdqtool.extraction.moves import ALL, Move, prune
from qdqtool.model.inference import grows

Holds = Callable[[onnx.ModelProto], bool]


class Shrinker:
    """Makes a model smaller, step by step.

    Args:
        proto: The model; it is not changed.
        holds: Whether a smaller one still shows what it should; one that raises does not.
        moves: How to make it smaller; see :mod:`qdqtool.extraction.moves`.
        limit: The most models to try.

    Attributes:
        proto: The smallest model found so far that holds.
        tried: Models tried.
        exhausted: Whether the limit ended the search.
    """

    def __init__(
        self, proto: onnx.ModelProto, holds: Holds, moves: Sequence[Move] = ALL, limit: int = 2000
    ) -> None:
        self._strict = True
        try:
            self.proto = self._typed(proto)
        except Exception:
            # onnx refuses some models as a whole (plugins, odd types); then it cannot judge parts of them either.
            self._strict = False
            try:
                self.proto = self._typed(proto)
            except Exception as error:  # dimensions or data that it stumbles over
                raise ModelError("onnx cannot infer the model's shapes, so that nothing smaller can be looked for "
                                 f"({' '.join(str(error).split())[:200]}); leave out `minimize`") from error
        self._holds = holds
        self._moves = moves
        self._limit = limit
        self._seen: set[bytes] = {self._digest(self.proto)}
        self.tried = 0
        self.exhausted = False

    def steps(self) -> Iterator[bool]:
        """Goes on until nothing smaller holds; yields whether each model that was tried does."""
        progress = True
        while progress:
            progress = False
            for move in self._moves:
                found = True
                while found:
                    found = False
                    for candidate in move(self.proto):
                        if self.tried >= self._limit:
                            self.exhausted = True
                            return
                        answer = self._try(candidate)
                        if answer is None:
                            continue
                        yield answer
                        if answer:
                            found = progress = True
                            break

    def run(self) -> onnx.ModelProto:
        """Takes all steps and returns the smallest model."""
        for _ in self.steps():
            pass
        return self.proto

    def _try(self, candidate: onnx.ModelProto) -> bool | None:
        """Whether a candidate holds (it is then the new model); None when it is no model, or was tried before."""
        try:
            typed = self._typed(candidate)
        except Exception:
            # Cutting makes models that onnx refuses; they are no candidates.
            return None
        digest = self._digest(typed)
        if digest in self._seen:
            return None
        self._seen.add(digest)
        self.tried += 1
        try:
            holds = self._holds(typed)
        except BuilderError:
            raise  # the compiler is gone: nothing that comes after would mean anything
        except Exception:
            return False
        if holds:
            self.proto = typed
        return holds

    def _typed(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        clean = onnx.ModelProto()
        clean.CopyFrom(proto)
        prune(clean)
        if grows(clean):
            raise ModelError("its shapes need too much memory")
        return onnx.shape_inference.infer_shapes(clean, check_type=self._strict, strict_mode=self._strict)

    @staticmethod
    def _digest(proto: onnx.ModelProto) -> bytes:
        return hashlib.sha256(proto.SerializeToString(deterministic=True)).digest()
