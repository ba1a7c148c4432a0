"""What a build log holds, on one page and as JSON; what it lacks, which TensorRT wrote it, who made its INT8."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.names import base_name
from qdqtool.buildlog.types import Build, BuiltLayer, Gap, GapKind, ListingSource, Section
from qdqtool.errors import BuildLogError
from qdqtool.trt import trace
from qdqtool.trt.targets import trtexec_of_version
from qdqtool.types import TOOL_VERSION, Json, Precision
from qdqtool.util.records import published
from qdqtool.util.text import counted


def set_build_status(build: Build) -> None:
    """Fills ``gaps``, ``complete``, ``names_only``, ``precision_flags`` and ``version_hint``; marks Q/DQ layers."""
    _mark_qdq(build)
    build.precision_flags = _precision_flags(build)
    build.names_only = bool(build.layers) and all(
        not x.type and not x.inputs and not x.outputs for x in build.layers
    )
    build.version_hint = _version_hint(build)
    gaps = build.gaps = [g for g in build.gaps if g.kind.is_unread]
    listing_cut = build.has_gap(Section.LISTING)
    if build.source.is_log:
        if not build.parse.nodes:
            gaps.append(Gap(Section.PARSE))
        elif build.parse.outputs == [] and not build.milestones:
            gaps.append(Gap(Section.PARSE, GapKind.CUT_AFTER_NODE, len(build.parse.nodes)))
        elif not build.parse.inputs or not build.parse.outputs:
            gaps.append(
                Gap(Section.PARSE, GapKind.LAST if build.parse.inputs else GapKind.BEGINNING)
            )
        if not build.trace and not build.milestones:
            gaps.append(Gap(Section.PASSES))
        elif not _is_optimizer_finished(build):
            gaps.append(Gap(Section.PASSES, GapKind.CUT))
        elif not any(m.name == "Original" for m in build.milestones):
            gaps.append(Gap(Section.PASSES, GapKind.BEGINNING))
    if not build.layers:
        gaps.append(Gap(Section.LISTING))
    elif build.names_only:
        gaps.append(Gap(Section.LISTING, GapKind.NAMES_ONLY))
    else:
        expected, hole = (
            _expected_layers(build),
            find_listing_hole(build, [t.name for t in build.parse.inputs]),
        )
        if expected is not None and len(build.layers) < expected:
            hole = Gap(Section.LISTING, GapKind.FEWER_LAYERS, len(build.layers), expected)
        if hole is not None and not listing_cut:
            gaps.append(hole)
    if build.source == BuildSource.TRTEXEC_LOG and build.command and build.passed is None:
        gaps.append(Gap(Section.END))
    harmless = [Gap(Section.PARSE, GapKind.BEGINNING), Gap(Section.PARSE, GapKind.LAST)]
    cut = any(
        g.kind.is_truncation and g.section != Section.PROFILE and g not in harmless for g in gaps
    )
    build.complete = bool(build.layers) and not build.names_only and not cut


def find_truncations(build: Build) -> list[Gap]:
    """What is cut off or torn, among the gaps: sections that were never asked for are no holes."""
    return [
        g for g in build.gaps if g.kind.is_unread or (not build.complete and g.kind.is_truncation)
    ]


_CONSTANT = re.compile(r"__mye\d[\w.]*")  # what Myelin makes of weights and numbers


def find_listing_hole(build: Build, inputs: Iterable[str]) -> Gap | None:
    """What shows that layers are missing from the listing; None where nothing does.

    In every listing seen, each tensor that a layer reads is written by another one, is a weight, or enters the network.
    ``inputs`` are the network's, for a build that does not name its bindings. Nothing is checked where neither is
    known, nor where the log says how many layers there are.
    """
    entering = {*build.bindings, *inputs}
    if not entering or build.names_only or _expected_layers(build) is not None:
        return None
    written = {t.tensor for layer in build.layers for t in (*layer.outputs, *layer.constants)}
    read = {t.tensor: layer.name for layer in build.layers for t in layer.inputs}
    orphan = next(
        (t for t in read if t not in written and t not in entering and not _CONSTANT.fullmatch(t)),
        None,
    )
    if orphan is not None:
        return Gap(Section.LISTING, GapKind.UNWRITTEN, name=read[orphan][:80], tensor=orphan[:80])
    # In a log, other programs may print among the bindings.
    ends = build.bindings if build.listing == ListingSource.LAYER_JSON else []
    idle = next((name for name in ends if name not in written and name not in read), None)
    return None if idle is None else Gap(Section.LISTING, GapKind.IDLE_BINDING, tensor=idle[:80])


def _mark_qdq(build: Build) -> None:
    """Sets the origin of Q and DQ layers where the listing does not give it and the rest of the log does."""
    copied = {e.subject for e in build.trace if e.pass_name == "QDQToCopy"}
    nodes = {n.name for n in build.parse.nodes if n.op in _QUANTIZERS and n.name}
    for layer in build.layers:
        if not layer.origin and (
            layer.name in copied or (nodes and base_name(layer.name) in nodes)
        ):
            layer.origin = "QDQ"


def _is_optimizer_finished(build: Build) -> bool:
    """Whether the optimizer came to its end: it says how long it took, or later sections follow."""
    done = any(
        key.startswith(("Graph construction", "Graph optimization")) for key in build.seconds
    )
    return done or bool(build.layers or build.placement or build.tactics.timed)


def _expected_layers(build: Build) -> int | None:
    """Layers that the listing must have; unknown for listings that open up Myelin's nodes."""
    if not build.source.is_log or build.listing == ListingSource.LAYER_JSON:
        return None
    after = build.milestone("After reformat layers")
    return build.milestones[-1].layers if after is None and build.milestones else after


def _precision_flags(build: Build) -> frozenset[str]:
    named = build.options.get("Build", {}).get("Precision", "").lower()
    found = {p.strip() for p in named.split("+")}.intersection(_PRECISIONS)
    if "strongly typed" in named:
        found.add("stronglyTyped")
    found.update(build.flags.keys() & {*_PRECISIONS[1:], "best", "stronglyTyped"})
    if build.command and found and "stronglyTyped" not in found:
        found.add("fp32")
    return frozenset(found)


_PRECISIONS = ("fp32", "fp16", "bf16", "int8", "fp8", "int4")


LATEST_SPELLING = "8.6"  # spells its listings as 10 does; a listing of today is more likely of 10
_MYELIN = (
    "kgen",
    "gemm",
    "fusion",
    "correlation",
    "shape_call",
)  # kernels that 8.x keeps inside one Myelin layer


def _version_hint(build: Build) -> str | None:
    """The earliest version that writes its listing like this one (spellings seen in real builds)."""
    if build.tensorrt:
        return build.tensorrt
    layers = build.layers
    if any("_quantize_scale_node" in layer.name for layer in layers):
        return "8.0"
    ends = [t for layer in layers for t in (*layer.inputs, *layer.outputs)]
    split = any(t.format.startswith("(") and t.precision != Precision.UNKNOWN for t in ends)
    if split or any("StrideOrder" in layer.extras for layer in layers):
        return "11"
    if any(layer.type in _MYELIN for layer in layers):
        return "10"
    if any(layer.onnx_names or "StreamId" in layer.extras for layer in layers):
        return LATEST_SPELLING
    if build.listing == ListingSource.ENGINE_LINES:
        if any(t.vector > 1 for t in ends):
            return "8.5"
        if layers and all(layer.tactic.startswith("0x") for layer in layers if layer.tactic):
            return "8.4"
        return "8.2" if layers else None
    return "8.4" if build.listing and layers else None


IMPLICIT_INT8 = (
    "an implicit-INT8 build: a calibration table or dynamic ranges chose what runs in INT8, no Q/DQ node is in it; "
    "the rules for Q/DQ do not apply"
)
_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
_RANGE_MESSAGES = (
    "Missing scale and zero-point for tensor",
    "Calibrator is not being used. Users must provide dynamic range",
)


def is_implicit_int8(build: Build) -> bool:
    """True where the build has INT8 layers or says that it lacks ranges, and nothing of it names a Q or DQ.

    With Q/DQ, the Q of its weights is in the name of every INT8 convolution (``weights + Q + Conv``), and in the parse
    section. Where a listing alone is available, Qs with names of the user's own would be taken for none.
    """
    if build.is_rtx or _shows_quantizers(build):
        return False
    if any(message.text.startswith(_RANGE_MESSAGES) for message in build.messages):
        return True
    return any(
        layer.is_convolution
        and layer.input_precision == Precision.INT8
        and layer.type[:1].isupper()  # not in Myelin
        for layer in build.layers
    )


def is_float_build(build: Build) -> bool:
    """True where a whole listing has no INT8 and no Q or DQ. Kernels of Myelin do not show them: False with any."""
    if not build.complete or build.is_rtx or _shows_quantizers(build):
        return False
    types = {t.precision for layer in build.layers for t in (*layer.inputs, *layer.outputs)}
    return Precision.INT8 not in types and all(
        x.type[:1].isupper() and x.type != "Myelin" for x in build.layers
    )


def _shows_quantizers(build: Build) -> bool:
    return (
        any(event.pass_name.startswith(("Quantize", "QDQ", "ConstQDQ")) for event in build.trace)
        or any(node.op in _QUANTIZERS for node in build.parse.nodes)
        or any(
            x.origin == "QDQ" or any("uantize" in n for n in (x.name, *x.onnx_names))
            for x in build.layers
        )
    )


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
)
_OLD = ("--separateProfileRun",)
_PRECISION = ("--int8", "--fp16", "--best", "--bf16", "--fp8", "--int4")


def rerun_commands(build: Build) -> dict[str, str]:
    """Commands that build the same engine again and print what the given file lacks, by TensorRT version.

    Where the version is known there is one command; else one for TensorRT 8.2 to 10 and one for 11. A version whose
    trtexec lists no layers has the listing in its verbose log.
    """
    words = build.command.split() if build.command else ["trtexec", "--onnx=model.onnx"]
    kept = [
        word
        for word in words
        if word.split("=")[0] not in _REPLACED_FLAGS and not word.startswith("--saveEngine")
    ]
    program = None if build.tensorrt is None else trtexec_of_version(build.tensorrt)
    if build.tensorrt is None or program is None:
        typed = [*kept, *(flag for flag in ("--int8", "--fp16") if flag not in kept)]
        untyped = [word for word in kept if word not in _PRECISION]
        return {
            "8.2 to 10": _join_command(typed, *_OUTPUT_FLAGS, *_OLD),
            "11": _join_command(untyped, *_OUTPUT_FLAGS),
        }
    if not build.command and program.precision_flags:
        kept += ["--int8", "--fp16"]
    if not program.lists_layers:
        return {
            build.tensorrt: _join_command(kept, "--verbose", "--nvtxMode=verbose", "--dumpProfile")
        }
    return {
        build.tensorrt: _join_command(
            kept, *_OUTPUT_FLAGS, *(_OLD if program.precision_flags else ())
        )
    }


def _join_command(words: list[str], *added: str) -> str:
    return " ".join([*words, *added, "> build.log 2>&1"])


# One page of facts, as the JSON that ``qdqtool log`` prints and its text is made of ----------------------------------

LOG_SCHEMA = "qdqtool/log/1"
SLOWEST = 8


def summarize(build: Build) -> Json:
    """The facts of a build, in the order of the page; a missing fact is None or an empty list."""
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
        # With the flag for INT8 and no 16-bit float, what is not INT8 runs in FP32.
        "float_remainder_fp32": "int8" in flags
        and not flags & {"fp16", "bf16", "best", "stronglyTyped"},
        "model": {
            "file": build.parse.onnx_file or build.options.get("Model", {}).get("Model") or None,
            "opset": build.parse.opset or None,
            "producer": build.parse.producer or None,
            "nodes": len(build.parse.nodes) or None,
        },
        "milestones": [
            {"what": m.name, **published(m, "layers", "line")} for m in build.milestones
        ],
        "placement": dict(Counter(device for device, _, _ in build.placement)),
        "passes": summarize_passes(build),
        "engine": _summarize_engine(build),
        "conversions": [_summarize_edge(layer) for layer in build.conversions],
        "reformats": [_summarize_edge(layer) for layer in build.layout_reformats],
        "merged": build.merged_layers,
        "tuning": _summarize_tuning(build),
        "seconds": dict(build.seconds),
        "memory": published(build.memory),
        "performance": {name: dict(values) for name, values in build.performance.items()},
        "profile": _summarize_profile(build),
        "messages": [
            {
                "level": "error" if m.level == "E" else "warning",
                **published(m, "text", "line", "count"),
            }
            for m in build.messages
        ],
        "names_only": build.names_only,
        "rerun": rerun_commands(build) if build.names_only else {},
        "notes": list(build.notes),
        "lines": published(build.lines, "total", "timing", "unexplained"),
    }


def describe_contents(build: Build) -> list[str]:
    """What of a build the files hold, in words; for an excerpt this is the answer to what it is."""
    tactics, parse = build.tactics, build.parse
    found = (
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
        (tactics.runners.total(), "kernel chosen"),
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
    parts = [_count_phrase(count, what) for count, what in found if count]
    lines = build.lines
    if not parts and lines.total > lines.blank:
        known = lines.total - lines.blank - lines.unexplained
        parts.append(
            f"{counted(known, 'line')} of TensorRT with nothing to keep"
            if known
            else f"{counted(lines.marked, 'line')} that TensorRT wrote and that this version does not know"
        )
    return parts


def _count_phrase(count: int, what: str) -> str:
    """Counts what the first word names (``2 layers placed on a device``), or the last (``2 engine layers``)."""
    if what.startswith(("engine", "optimizer", "format", "profile")):
        return counted(count, what)
    noun, space, rest = what.partition(" ")
    return f"{counted(count, noun)}{space}{rest}"


def summarize_passes(build: Build) -> list[Json]:
    """What each optimizer pass printed: name, number of ``Running`` lines, the other lines by kind, first line."""
    found: dict[str, tuple[int, Counter[str]]] = {}
    for event in build.trace:
        found.setdefault(event.pass_name, (event.line, Counter()))[1][event.kind] += 1
    return [
        {"pass": name, "running": kinds.pop(trace.RUNNING, 0), "events": dict(kinds), "line": line}
        for name, (line, kinds) in found.items()
    ]


def find_pass_lines(build: Build, name: str) -> list[tuple[int, str]]:
    """The log lines of one pass: line number and TensorRT's wording.

    Case does not matter in its name, and the beginning is enough where that is unique.
    """
    names = list(dict.fromkeys(e.pass_name for e in build.trace))
    wanted = name.lower()
    exact = [name] if name in names else [n for n in names if n.lower() == wanted]
    found = exact or [n for n in names if n and n.lower().startswith(wanted)]
    if len(found) != 1:
        listed = (
            ", ".join(sorted(n for n in found or names if n))
            or "none: the log has no optimizer lines"
        )
        problem = "more than one" if found else "no such"
        raise BuildLogError(
            f"{name}: {problem} pass in this log; it has {listed}",
            code="ambiguous" if found else "unknown-choice",
            parameter="name",
        )
    return [(e.line, trace.render(e.event)) for e in build.trace if e.pass_name == found[0]]


def signature(layer: BuiltLayer) -> str:
    """``INT8, FP32 -> FP32``: what goes in and what comes out."""
    inputs = ", ".join(str(t.precision) for t in layer.inputs) or "?"
    return f"{inputs} -> {', '.join(str(t.precision) for t in layer.outputs) or '?'}"


def _summarize_engine(build: Build) -> Json | None:
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


def _summarize_edge(layer: BuiltLayer) -> Json:
    tensor = next(iter([*layer.inputs, *layer.outputs]), None)
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
    slowest = sorted(tactics.layers.values(), key=lambda t: (-t.seconds, -t.tactics, t.name))[
        :SLOWEST
    ]
    reformats = [t for t in tactics.reformats.values() if t.best_ms is not None]
    reformats.sort(key=lambda t: (-(t.best_ms or 0.0), t.name))
    return {
        "tactics": tactics.timed,
        "combinations": tactics.combinations,
        "reformats": tactics.reformat_timings,
        "without_tactics": tactics.skipped,
        "cached": tactics.cached,
        "costed": len(tactics.costed),
        "reasons": [
            {"reason": reason, "count": count}
            for reason, count in tactics.reasons.most_common(SLOWEST)
        ],
        "refused": [
            {"runner": runner, "layer": layer, "count": count}
            for (runner, layer), count in tactics.refused.most_common(SLOWEST)
        ],
        "layers": len(tactics.layers),
        "chosen": dict(tactics.runners.most_common()),
        "added_reformats": len(build.reformats),
        "slowest": [
            published(t, "name", "seconds", "tactics", "best_ms", "runner") for t in slowest
        ],
        "slowest_reformats": [published(t, "name", "best_ms") for t in reformats[:3]],
    }


def _summarize_profile(build: Build) -> Json | None:
    if not build.profile_rows:
        return None
    total = build.profile_total_ms or sum(row.average_ms for row in build.profile_rows)
    rows = sorted(build.profile_rows, key=lambda row: -row.average_ms)[:SLOWEST]
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
