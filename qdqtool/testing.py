"""Assertions for test suites.

from qdqtool.testing import assert_int8

def test_export_runs_in_int8():
    assert_int8("yolov8n_qdq.onnx", target="trt8.5", allow_float=[r"/dfl/"], max_conversions=1)
"""

from __future__ import annotations

from collections.abc import Sequence

from qdqtool.errors import QdqtoolError
from qdqtool.formats.verdicts import describe_rejection
from qdqtool.ir.graph import Model
from qdqtool.ir.modelfile import ModelSource
from qdqtool.prediction import predict
from qdqtool.reasons.finding import Finding, Severity
from qdqtool.trt.result import ConvOutcome, Prediction
from qdqtool.trt.targets import DEFAULT_TARGET, Target
from qdqtool.util.checks import compile_pattern
from qdqtool.util.text import format_count

_MAX_FAILURES = 8  # number of failures in the message; a longer list would hide the first failures


def assert_int8(
    model: ModelSource | Model,
    target: str | Target = DEFAULT_TARGET,
    *,
    require: str | Sequence[str] | None = None,
    allow_float: str | Sequence[str] = (),
    max_conversions: int | None = None,
) -> Prediction:
    """Assert that TensorRT runs convolutions in INT8 or FP8, and that few conversions remain.

    Convolutions are Conv, ConvTranspose, Gemm and MatMul. Patterns are regular expressions that are
    searched for in the names of convolutions. A pattern that matches nothing is an error, because
    it is probably misspelled, or the model has changed.

    Args:
        model: Path, bytes or ModelProto of any exporter.
        target: As for :func:`qdqtool.predict`.
        require: Patterns of convolutions that must be INT8 or FP8, even if `allow_float` matches
            them too. Default: all convolutions that `allow_float` does not match.
        allow_float: Patterns of convolutions that may be float.
        max_conversions: Maximum number of Q and DQ that remain as layers in the engine, including
            the Q of the network's input. None: no limit.

    Returns:
        The prediction, for further assertions.

    Raises:
        AssertionError: TensorRT rejects the model, or would not run it as required. The message
            has the convolutions, causes and fixes.
        QdqtoolError: The model, the target or a pattern cannot be used, or conversions are not
            layers on the target.
    """
    prediction = predict(model, target)
    convolutions = prediction.convolutions
    allowed = _match_convolutions(convolutions, allow_float, "allow_float")
    if require is None:
        required = [c for c in convolutions if c not in allowed]
    else:
        required = _match_convolutions(convolutions, require, "require")
    failures = [_float_message(prediction, c) for c in required if not c.is_quantized]
    if max_conversions is not None and _count_conversions(prediction) > max_conversions:
        failures.append(_conversions_message(prediction, max_conversions))
    if prediction.rejected:
        # The types of a rejected model are hypothetical, so the rejection is the first failure.
        failures.insert(0, _rejection_message(prediction))
    if not convolutions:
        failures.append("the model has no Conv, ConvTranspose, Gemm or MatMul")
    if failures:
        raise AssertionError(_failure_message(prediction, len(required), failures))
    return prediction


def _match_convolutions(
    convolutions: Sequence[ConvOutcome], patterns: str | Sequence[str], option: str
) -> list[ConvOutcome]:
    matches: list[ConvOutcome] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        compiled = compile_pattern(pattern, f"{option} '{pattern}'", parameter=option)
        hits = [c for c in convolutions if compiled.search(c.name)]
        if not hits:
            example = f"; names look like '{convolutions[0].name}'" if convolutions else ""
            raise QdqtoolError(
                f"{option} '{pattern}' matches none of the convolutions{example}",
                code="no-match",
                parameter=option,
            )
        matches.extend(hits)
    return matches


def _failure_message(prediction: Prediction, required: int, failures: list[str]) -> str:
    summary = prediction.summary()
    path = prediction.model.path or "model"
    name, conversions = _name_types(prediction), ""
    if prediction.conversions is not None:
        conversions = f", {format_count(prediction.conversions, 'conversion')}"
    lines = [
        f"{path} on {prediction.target}: {summary['int8'] + summary['fp8']} of "
        f"{summary['convolutions']} convolutions in {name} "
        f"({summary['int8_to_int8'] + summary['fp8_to_fp8']} with {name} output), {required} "
        f"required{conversions}"
    ]
    lines.extend(failures[:_MAX_FAILURES])
    if len(failures) > _MAX_FAILURES:
        more = len(failures) - _MAX_FAILURES
        lines.append(f"... and {more} more; 'qdqtool predict --all {path}' lists them")
    return "\n".join(lines)


def _rejection_message(prediction: Prediction) -> str:
    errors = [f for f in prediction.errors() if not f.is_built]
    return f"* {describe_rejection(prediction)}{_cause_messages(errors)}"


def _name_types(prediction: Prediction) -> str:
    """Return the quantized types of the convolutions: INT8, FP8, or both."""
    types = {"FP8" if c.is_fp8 else "INT8" for c in prediction.convolutions if c.is_quantized}
    return " or ".join(sorted(types, reverse=True)) or "INT8"


def _float_message(prediction: Prediction, conv: ConvOutcome) -> str:
    findings = [f for f in prediction.findings if f.id in set(conv.findings)]
    causes = [f for f in findings if f.severity != Severity.INFO] or findings
    text = f"* {conv.name} ({conv.op}) is {conv.precision}, not {_name_types(prediction)}"
    if not causes:
        cause = "its data input or its weights have no Q/DQ pair"
        return f"{text}\n    cause: {cause}\n    fix: add Q/DQ pairs to both"
    return text + "".join(_finding_message(f) for f in causes[:2])


def _count_conversions(prediction: Prediction) -> int:
    if prediction.conversions is None:
        raise QdqtoolError(
            f"max_conversions: {prediction.target} does not show conversions as layers, so "
            "they cannot be counted; leave max_conversions out",
            code="option-without-effect",
            parameter="max_conversions",
        )
    return prediction.conversions


def _find_conversion_causes(prediction: Prediction) -> list[Finding]:
    """Return findings that may explain the conversions.

    These are the errors and warnings at the conversions, and the findings to which the findings at
    the conversions refer. Without them, they are all warnings. Without warnings either, they are
    all findings that are not about a conversion itself.
    """
    findings, names = prediction.findings, set(prediction.conversion_nodes)
    local = [f for f in findings if f.node in names]
    places = {place for f in local for cause in f.causes for place in cause.see}
    places |= {(f.code, f.node) for f in local if f.severity != Severity.INFO}
    return (
        [f for f in findings if (f.code, f.node) in places]
        or [f for f in findings if f.severity == Severity.WARNING]
        or [f for f in findings if not f.code.endswith("CONVERSION")]
    )


def _conversions_message(prediction: Prediction, limit: int) -> str:
    nodes = prediction.conversion_nodes
    verb = "remains" if prediction.conversions == 1 else "remain"
    text = (
        f"* {format_count(prediction.conversions, 'conversion')} {verb}; the limit is {limit}: "
        f"{', '.join(nodes[:3])}"
    )
    if len(nodes) > 3:
        text += f" and {len(nodes) - 3} more"
    return text + _cause_messages(_find_conversion_causes(prediction))


def _cause_messages(causes: Sequence[Finding]) -> str:
    """Return the first finding of each code, for at most three codes."""
    text = ""
    unique = {f.code: f for f in reversed(causes)}
    for finding in list(unique.values())[::-1][:3]:
        count = sum(f.code == finding.code for f in causes)
        text += _finding_message(finding, f" (and {count - 1} more)" if count > 1 else "")
    return text


def _finding_message(finding: Finding, more: str = "") -> str:
    place = f" at {finding.node}" if finding.node else ""
    cause = f"{finding.code}{place}{more}: {finding.message}"
    return f"\n    cause: {cause}\n    fix: {finding.fix}"
