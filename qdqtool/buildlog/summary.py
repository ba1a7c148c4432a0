"""One page's worth of facts about a build, as the JSON that ``qdqtool log`` prints and its text is made of."""

from __future__ import annotations

from collections import Counter

from qdqtool.buildlog.complete import implicit_int8, rerun_commands
from qdqtool.buildlog.types import Build, BuiltLayer
from qdqtool.errors import BuildLogError
from qdqtool.trt import trace
from qdqtool.types import TOOL_VERSION, Json

LOG_SCHEMA = "qdqtool/log/1"
SLOWEST = 8


def summarize(build: Build) -> Json:
    """The facts of a build, in the order of the page; a missing fact is None or an empty list."""
    return {
        "schema": LOG_SCHEMA,
        "tool": TOOL_VERSION,
        "build": build.as_json(),
        "title": build.title,
        "read": what_was_read(build),
        "passed": build.passed,
        "gpu": dict(build.gpu),
        "command": build.command or None,
        "precision": sorted(build.precision_flags),
        "implicit_int8": implicit_int8(build),
        "float_remainder_fp32": _fp32_remainder(build),
        "model": {"file": build.parse.onnx_file or build.options.get("Model", {}).get("Model") or None,
                  "opset": build.parse.opset or None, "producer": build.parse.producer or None,
                  "nodes": len(build.parse.nodes) or None},
        "milestones": [{"what": m.what, "layers": m.layers, "line": m.line} for m in build.milestones],
        "placement": dict(Counter(device for device, _, _ in build.placement)),
        "passes": passes(build),
        "engine": _engine(build),
        "conversions": [_edge(layer) for layer in build.conversions],
        "reformats": [_edge(layer) for layer in build.layout_reformats],
        "merged": build.merged,
        "tuning": _tuning(build),
        "seconds": dict(build.seconds),
        "memory": _memory(build),
        "performance": {name: dict(values) for name, values in build.performance.items()},
        "profile": _profile(build),
        "messages": [
            {"level": "error" if m.level == "E" else "warning", "text": m.text, "line": m.line, "count": m.count}
            for m in build.messages
        ],
        "names_only": build.names_only,
        "rerun": rerun_commands(build) if build.names_only else {},
        "notes": list(build.notes),
        "lines": {"total": build.lines.total, "timing": build.lines.timing, "unexplained": build.lines.unexplained},
    }


def what_was_read(build: Build) -> list[str]:
    """What of a build the files hold, in words; for an excerpt this is the answer to what it is."""
    tactics, parse = build.tactics, build.parse
    counted = (
        (len(parse.nodes), "node of the parse section"),
        (len(parse.initializers), "initializer of the parse section"),
        (len(build.trace), "optimizer line"),
        (len(build.headings), "heading of the optimizer"),
        (len(build.placement), "layer placed on a device"),
        (len(build.milestones), "count of layers by the optimizer"),
        (tactics.timed, "tactic timed"),
        (tactics.combinations, "format combination tried"),
        (tactics.reformat_timings, "reformat costed"),
        (len(tactics.layers) + len(tactics.reformats), "layer or reformat tuned"),
        (tactics.chosen.total(), "kernel chosen"),
        (len(tactics.costed), "layer whose costs were computed"),
        (tactics.cached, "timing from the cache"),
        (tactics.skipped, "kernel or kind of kernels passed over"),
        (len(build.reformats), "reformat added"),
        (len(build.layers), "engine layer"),
        (len(build.profile_rows), "profile row"),
        (len(build.performance), "line of the performance summary"),
        (sum(m.count for m in build.warnings), "warning"),
        (sum(m.count for m in build.errors), "error"),
    )
    parts = [_plural(count, what) for count, what in counted if count]
    lines = build.lines
    if not parts and lines.total > lines.blank:
        known = lines.total - lines.blank - lines.unexplained
        parts.append(f"{_plural(known, 'line')} of TensorRT with nothing to keep" if known else
                    f"{_plural(lines.marked, 'line')} that TensorRT wrote and that this version does not know")
    return parts


def _plural(count: int, what: str) -> str:
    noun, space, rest = what.partition(" ")
    if count != 1 and noun in ("tactic", "node", "initializer", "reformat", "layer", "timing", "kernel", "warning",
                               "error", "line", "count"):
        return f"{count} {noun}s{space}{rest}"
    return f"{count} {what}s" if count != 1 else f"{count} {what}"


def passes(build: Build) -> list[Json]:
    """What each optimizer pass printed: name, number of ``Running`` lines, the other lines by kind, first line."""
    table: dict[str, Json] = {}
    for event in build.trace:
        row = table.setdefault(
            event.pass_name, {"pass": event.pass_name, "running": 0, "events": Counter(), "line": event.line}
        )
        if event.kind == trace.RUNNING:
            row["running"] += 1
        else:
            row["events"][event.kind] += 1
    return [{**row, "events": dict(row["events"])} for row in table.values()]


def lines_of_pass(build: Build, name: str) -> list[tuple[int, str]]:
    """The log lines of one pass: line number and TensorRT's wording.

    Args:
        build: The build.
        name: The pass; case does not matter, and its beginning is enough where that is unique.

    Raises:
        BuildLogError: No pass of that name printed anything.
    """
    names = list(dict.fromkeys(e.pass_name for e in build.trace))
    wanted = name.lower()
    exact = [name] if name in names else [n for n in names if n.lower() == wanted]
    found = exact or [n for n in names if n and n.lower().startswith(wanted)]
    if len(found) != 1:
        listed = ", ".join(sorted(n for n in found or names if n)) or "none: the log has no optimizer lines"
        problem = "more than one" if found else "no such"
        raise BuildLogError(f"{name}: {problem} pass in this log; it has {listed}")
    return [(e.line, trace.render(e.event)) for e in build.trace if e.pass_name == found[0]]


def signature(layer: BuiltLayer) -> str:
    """``INT8, FP32 -> FP32``: what goes in and what comes out."""
    inputs = ", ".join(str(t.precision) for t in layer.inputs) or "?"
    return f"{inputs} -> {', '.join(str(t.precision) for t in layer.outputs) or '?'}"


def _fp32_remainder(build: Build) -> bool:
    """Whether the builder got the flag for INT8 and no 16-bit float: what is not INT8 then runs in FP32."""
    flags = build.precision_flags
    return "int8" in flags and not flags & {"fp16", "bf16", "best", "stronglyTyped"}


def _engine(build: Build) -> Json | None:
    if not build.layers:
        return None
    convolutions = [layer for layer in build.layers if layer.is_convolution]
    return {
        "layers": len(build.layers),
        "listing": build.listing,
        "types": dict(Counter(layer.type or "unknown" for layer in build.layers).most_common()),
        "convolutions": len(convolutions),
        "signatures": dict(Counter(signature(layer) for layer in convolutions).most_common()),
        "bindings": list(build.bindings),
    }


def _edge(layer: BuiltLayer) -> Json:
    tensor = next(iter([*layer.inputs, *layer.outputs]), None)
    return {
        "name": layer.name,
        "from": str(layer.input_precision),
        "to": str(layer.output_precision),
        "shape": list(tensor.shape) if tensor is not None and tensor.shape is not None else None,
        "qdq": layer.is_qdq,
        "line": layer.line,
    }


def _tuning(build: Build) -> Json:
    tactics = build.tactics
    slowest = sorted(tactics.layers.values(), key=lambda t: (-t.seconds, -t.tactics, t.name))[:SLOWEST]
    reformats = [t for t in tactics.reformats.values() if t.best_ms is not None]
    reformats.sort(key=lambda t: (-(t.best_ms or 0.0), t.name))
    return {
        "tactics": tactics.timed,
        "combinations": tactics.combinations,
        "reformats": tactics.reformat_timings,
        "without_tactics": tactics.skipped,
        "cached": tactics.cached,
        "costed": len(tactics.costed),
        "reasons": [{"reason": reason, "count": count} for reason, count in tactics.reasons.most_common(SLOWEST)],
        "refused": [
            {"runner": runner, "layer": layer, "count": count}
            for (runner, layer), count in tactics.refused.most_common(SLOWEST)
        ],
        "layers": len(tactics.layers),
        "chosen": dict(tactics.chosen.most_common()),
        "added_reformats": len(build.reformats),
        "slowest": [
            {"name": t.name, "seconds": t.seconds, "tactics": t.tactics, "best_ms": t.best_ms, "runner": t.runner}
            for t in slowest
        ],
        "slowest_reformats": [{"name": t.name, "best_ms": t.best_ms} for t in reformats[:3]],
    }


def _memory(build: Build) -> Json:
    memory = build.memory
    return {
        "host_persistent": memory.host_persistent,
        "device_persistent": memory.device_persistent,
        "scratch": memory.scratch,
        "activation": memory.activation,
        "weights": memory.weights,
        "engine_mib": memory.engine_mib,
        "peak_cpu_mib": memory.peak_cpu_mib,
        "peak_gpu_mib": memory.peak_gpu_mib,
    }


def _profile(build: Build) -> Json | None:
    if not build.profile_rows:
        return None
    total = build.profile_total_ms or sum(row.average_ms for row in build.profile_rows)
    rows = sorted(build.profile_rows, key=lambda row: -row.average_ms)[:SLOWEST]
    return {
        "iterations": build.iterations,
        "total_ms": total,
        "layers": len(build.profile_rows),
        "slowest": [
            {"name": r.name, "ms": r.average_ms, "share": r.average_ms / total if total else 0.0} for r in rows
        ],
    }
