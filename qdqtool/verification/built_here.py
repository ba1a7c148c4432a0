"""Builds a model on this machine and verifies it in one step."""

from __future__ import annotations

import os

from qdqtool.buildlog.agreement import BuildFacts, BuildSource, Mismatch, MismatchKind
from qdqtool.errors import BuilderError, QdqtoolError
from qdqtool.model.modelfile import load
from qdqtool.prediction import predict
from qdqtool.trt.targets import TARGETS, Target, target_named
from qdqtool.verification.result import Verification


def verify_with_builder(
    model: str | os.PathLike[str], builder: str, sm: str | None = None, target: str | Target | None = None
) -> Verification:
    """Builds ``model`` with a TensorRT found here and compares the prediction with what came out.

    Args:
        model: Path of the Q/DQ model.
        builder: ``tensorrt-rtx``, ``trtexec`` or ``tensorrt``.
        sm: Compute capability to build for (TensorRT-RTX), such as ``86`` or ``sm86``.
        target: Overrides the target that the builder's version chooses.

    Raises:
        BuilderError: The builder is not here, or the build ran out of time.
        ModelError: The model cannot be read.
    """
    from qdqtool.builders.child import print_once
    from qdqtool.rtx.predict import status_of
    from qdqtool.verification import api
    from qdqtool.verification.build_model import build_model
    from qdqtool.verification.pairs import compare, status_agrees
    from qdqtool.verification.rtx import of_pairs

    index = load(model)
    if builder == "tensorrt-rtx":
        print_once()
    result = build_model(model, builder, sm=_capability(sm))
    if result.status == "timeout":
        raise BuilderError(f"{model}: the build did not end in time; {result.message}")
    if builder != "tensorrt-rtx" and result.build is not None and result.status == "built":
        return api.verify(index, result.build, target=target)
    prediction = predict(index, target_named(target) if target is not None else TARGETS["rtx1.7"])
    described = BuildFacts(
        BuildSource(builder), tensorrt=result.version or None, complete=True, status=result.status,
        message=result.message,
    )
    verification = of_pairs(prediction, compare(prediction, result) if result.status == "built" else [], described)
    if status_agrees(prediction, result) is False:
        said = status_of(prediction)
        why = f"predicted to be {said}, the compiler says {result.status}"
        if result.message:
            why += f": {result.message}"
        verification.mismatches.append(
            Mismatch(MismatchKind.BUILD, index.path or "model", {"status": said}, {"status": result.status}, why)
        )
    elif result.status != "built":
        verification.notes.append(f"predicted and built alike: {result.status}: {result.message}")
    return verification


def _capability(sm: str | None) -> list[int] | None:
    if sm is None:
        return None
    digits = sm.lower().removeprefix("sm")
    if not digits.isdigit():
        raise QdqtoolError(f"'{sm}' is not a compute capability; give it as 86 or sm86")
    return [int(digits)]
