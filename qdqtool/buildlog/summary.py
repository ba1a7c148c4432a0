"""Summary of a build as JSON, and the commands that build the engine again."""

from __future__ import annotations

from collections import Counter, defaultdict

from qdqtool.buildlog.build_status import is_implicit_int8
from qdqtool.buildlog.types import NOTE, Build, BuiltLayer, LogMessage
from qdqtool.errors import BuildLogError
from qdqtool.trt import trace
from qdqtool.trt.targets import trtexec_of_version
from qdqtool.util.json_text import Json
from qdqtool.util.records import to_json_fields
from qdqtool.util.text import format_count
from qdqtool.version import TOOL_VERSION

_OUTPUT_FLAGS = (
    "--verbose",
    "--profilingVerbosity=detailed",
    "--dumpLayerInfo",
    "--exportLayerInfo=layers.json",
    "--dumpProfile",
    "--exportProfile=profile.json",
)
_REPLACED_FLAGS = (
    "--verbose",
    "--profilingVerbosity",
    "--dumpLayerInfo",
    "--exportLayerInfo",
    "--dumpProfile",
    "--exportProfile",
    "--separateProfileRun",
    "--nvtxMode",
    "--saveEngine",
)
# Flags of trtexec before TensorRT 11.
_PROFILE_RUN_FLAGS = ("--separateProfileRun",)
_PRECISION_FLAGS = ("--int8", "--fp16", "--best", "--bf16", "--fp8", "--int4")
_INT8_FLAGS = ("--int8", "--fp16")
LOG_SCHEMA = "qdqtool/log/1"
MAX_SLOWEST = 8


def rerun_commands(build: Build) -> dict[str, str]:
    """Return commands for a new build with log, listing and profile, by TensorRT version.

    Without a known version, there is a command for TensorRT 8.2 to 10 and a command for 11. If the
    trtexec of a version lists no layers, the command requests a verbose log, which has the listing.
    """
    default = ["trtexec", "--onnx=model.onnx", *_INT8_FLAGS]
    words = build.command.split() if build.command else default
    command = [word for word in words if word.split("=")[0] not in _REPLACED_FLAGS]
    since_11 = [word for word in command if word not in _PRECISION_FLAGS]
    commands = {
        "8.2 to 10": _join_command(command, *_OUTPUT_FLAGS, *_PROFILE_RUN_FLAGS),
        "11": _join_command(since_11, *_OUTPUT_FLAGS),
    }
    version = build.tensorrt or ""
    program = trtexec_of_version(version)
    if program is None:
        return commands
    if not program.lists_layers:
        flags = ("--verbose", "--nvtxMode=verbose", "--dumpProfile")
        return {version: _join_command(command, *flags)}
    return {version: commands["8.2 to 10" if program.precision_flags else "11"]}


def _join_command(words: list[str], *flags: str) -> str:
    return " ".join([*words, *flags, "> build.log 2>&1"])


def summarize(build: Build) -> Json:
    """Return the facts of a build as JSON, in the order of the text output of ``qdqtool log``.

    A missing fact is None or empty.
    """
    flags = build.precision_flags
    return {
        "schema": LOG_SCHEMA,
        "tool": TOOL_VERSION,
        "build": build.as_json(),
        "title": build.title,
        "read": describe_contents(build),
        "passed": build.passed,
        "gpu": dict(build.gpu),
        "command": build.command or None,
        "precision": sorted(flags),
        "implicit_int8": is_implicit_int8(build),
        # With --int8 and without a 16-bit flag, layers that are not INT8 run in FP32.
        "float_remainder_fp32": "int8" in flags
        and not flags & {"fp16", "bf16", "best", "stronglyTyped"},
        "model": _summarize_model(build),
        "milestones": [
            {"what": m.name, **to_json_fields(m, "layers", "line")} for m in build.milestones
        ],
        "placement": dict(Counter(device for device, _, _ in build.placement)),
        "passes": summarize_passes(build),
        "engine": _summarize_engine(build),
        "conversions": [_summarize_conversion(layer) for layer in build.conversions],
        "reformats": [
            {**_summarize_conversion(layer), "copy": not layer.parse_name().is_reformat}
            for layer in build.layout_reformats
        ],
        "merged": [e.subject.split(" || ") for e in build.trace if e.kind == "Merging layers"],
        "tuning": _summarize_tuning(build),
        "seconds": dict(build.seconds),
        "memory": to_json_fields(build.memory),
        "performance": {name: dict(values) for name, values in build.performance.items()},
        "profile": _summarize_profile(build),
        "messages": list(map(_summarize_message, build.messages)),
        "names_only": build.names_only,
        "rerun": rerun_commands(build) if build.names_only else {},
        "notes": list(build.notes),
        "lines": to_json_fields(build.lines, "total", "timing", "unexplained"),
    }


def _summarize_model(build: Build) -> Json:
    parse = build.parse
    return {
        "file": parse.onnx_file or build.options.get("Model", {}).get("Model") or None,
        "opset": parse.opset or None,
        "producer": parse.producer or None,
        "nodes": len(parse.nodes) or None,
    }


_LEVELS = {"E": "error", "W": "warning", NOTE: "note"}


def _summarize_message(message: LogMessage) -> Json:
    return {"level": _LEVELS[message.level], **to_json_fields(message, "text", "line", "count")}


def describe_contents(build: Build) -> list[str]:
    """Return the number of records of each kind, such as ``12 nodes of the parse section``."""
    tactics, parse, lines = build.tactics, build.parse, build.lines
    records = (
        (len(parse.nodes), "node", "of the parse section"),
        (len(parse.initializers), "initializer", "of the parse section"),
        (len(build.trace), "optimizer line", ""),
        (len(build.headings), "heading", "of the optimizer"),
        (len(build.placement), "layer", "placed on a device"),
        (len(build.milestones), "count", "of layers by the optimizer"),
        (tactics.timed, "tactic", "timed"),
        (tactics.combinations, "format combination", "tried"),
        (tactics.reformat_timings, "reformat", "costed"),
        (len(tactics.layers) + len(tactics.reformats), "record", "of tuned layers and reformats"),
        (tactics.runners.total(), "kernel", "chosen"),
        (len(tactics.costed), "layer", "whose costs were computed"),
        (tactics.cached, "timing", "from the cache"),
        (tactics.skipped, "record", "of skipped kernels and kernel types"),
        (len(build.reformats), "reformat", "added"),
        (len(build.layers), "engine layer", ""),
        (len(build.profile_rows), "profile row", ""),
        (len(build.performance), "line", "of the performance summary"),
        (sum(message.count for message in build.warnings), "warning", ""),
        (sum(message.count for message in build.errors), "error", ""),
        (sum(message.count for message in build.skipped_tactics), "error", "of skipped tactics"),
    )
    parts = [
        f"{format_count(count, noun)} {rest}".rstrip() for count, noun, rest in records if count
    ]
    if parts or lines.total <= lines.blank:
        return parts
    understood = lines.total - lines.blank - lines.unexplained
    if understood:
        return [
            f"{format_count(understood, 'line')} of TensorRT without information for the summary"
        ]
    unknown = format_count(lines.marked, "line")
    return [f"{unknown} of TensorRT that this version of qdqtool does not recognize"]


def summarize_passes(build: Build) -> list[Json]:
    """Return JSON for each optimizer pass: name, first line, and numbers of lines by kind."""
    first_lines: dict[str, int] = {}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for event in build.trace:
        first_lines.setdefault(event.pass_name, event.line)
        counts[event.pass_name][event.kind] += 1
    return [
        {
            "pass": name,
            "running": counts[name].pop(trace.RUNNING, 0),
            "events": dict(counts[name]),
            "line": line,
        }
        for name, line in first_lines.items()
    ]


def find_pass_lines(build: Build, name: str) -> list[tuple[int, str]]:
    """Return line number and text of each log line of one pass.

    Args:
        build: Build with the log.
        name: Name of the pass, or a unique beginning of it, in upper or lower case.

    Raises:
        BuildLogError: The log has no such pass, or several.
    """
    names = list(dict.fromkeys(event.pass_name for event in build.trace))
    matches = _match_names(names, name)
    if not matches:
        listed = ", ".join(sorted(filter(None, names)))
        advice = "the log has no optimizer lines; build again with --verbose"
        if listed:
            advice = f"choose from {listed}"
        raise BuildLogError(
            f"{name}: no such pass in this log; {advice}",
            code="unknown-choice",
            parameter="name",
        )
    if len(matches) > 1:
        raise BuildLogError(
            f"{name}: matches several passes of this log; choose from {', '.join(sorted(matches))}",
            code="ambiguous",
            parameter="name",
        )
    return [
        (event.line, trace.render(event.event))
        for event in build.trace
        if event.pass_name == matches[0]
    ]


def _match_names(names: list[str], name: str) -> list[str]:
    """Return the names that match `name`.

    These are the names equal to `name`, else those that differ only in case, else those that begin
    with `name` in upper or lower case.
    """
    lower = name.lower()
    if name in names:
        return [name]
    same = [candidate for candidate in names if candidate.lower() == lower]
    return same or [n for n in names if n and n.lower().startswith(lower)]


def format_types(layer: BuiltLayer) -> str:
    """Format the precisions of inputs and outputs as ``INT8, FP32 -> FP32``."""
    inputs, outputs = (
        ", ".join(str(tensor.precision) for tensor in tensors) or "?"
        for tensors in (layer.inputs, layer.outputs)
    )
    return f"{inputs} -> {outputs}"


def _summarize_engine(build: Build) -> Json | None:
    if not build.layers:
        return None
    convolutions = [layer for layer in build.layers if layer.is_convolution]
    return {
        "layers": len(build.layers),
        "listing": build.listing,
        "types": dict(Counter(layer.type or "unknown" for layer in build.layers).most_common()),
        "convolutions": len(convolutions),
        "signatures": dict(Counter(format_types(layer) for layer in convolutions).most_common()),
        "bindings": list(build.bindings),
    }


def _summarize_conversion(layer: BuiltLayer) -> Json:
    tensor = next(iter(layer.inputs or layer.outputs), None)
    shape = list(tensor.shape) if tensor is not None and tensor.shape is not None else None
    return {
        "name": layer.name,
        "from": str(layer.input_precision),
        "to": str(layer.output_precision),
        "shape": shape,
        "qdq": layer.is_qdq,
        "line": layer.line,
    }


def _summarize_tuning(build: Build) -> Json:
    tactics = build.tactics
    layers = sorted(tactics.layers.values(), key=lambda t: (-t.seconds, -t.tactics, t.name))
    reformats = sorted(
        (tuned for tuned in tactics.reformats.values() if tuned.best_ms is not None),
        key=lambda t: (-(t.best_ms or 0.0), t.name),
    )
    return {
        "tactics": tactics.timed,
        "combinations": tactics.combinations,
        "reformats": tactics.reformat_timings,
        "without_tactics": tactics.skipped,
        "cached": tactics.cached,
        "costed": len(tactics.costed),
        "reasons": [
            {"reason": reason, "count": count}
            for reason, count in tactics.reasons.most_common(MAX_SLOWEST)
        ],
        "refused": [
            {"runner": runner, "layer": layer, "count": count}
            for (runner, layer), count in tactics.refused.most_common(MAX_SLOWEST)
        ],
        "layers": len(tactics.layers),
        "chosen": dict(tactics.runners.most_common()),
        "added_reformats": len(build.reformats),
        "slowest": [
            to_json_fields(tuned, "name", "seconds", "tactics", "best_ms", "runner")
            for tuned in layers[:MAX_SLOWEST]
        ],
        "slowest_reformats": [to_json_fields(tuned, "name", "best_ms") for tuned in reformats[:3]],
    }


def _summarize_profile(build: Build) -> Json | None:
    if not build.profile_rows:
        return None
    total = build.profile_total_ms or sum(row.average_ms for row in build.profile_rows)
    rows = sorted(build.profile_rows, key=lambda row: -row.average_ms)[:MAX_SLOWEST]
    slowest = [
        {"name": r.name, "ms": r.average_ms, "share": r.average_ms / total if total else 0.0}
        for r in rows
    ]
    return {
        "iterations": build.iterations,
        "total_ms": total,
        "layers": len(build.profile_rows),
        "slowest": slowest,
    }
