"""A verification as the page shows it."""

from __future__ import annotations

from qdqtool.agreement import TraceCounts
from qdqtool.render.verify_text import verdict
from qdqtool.reporting import data
from qdqtool.reporting.names import shown, told
from qdqtool.reporting.nodes import Collector
from qdqtool.verification.api import exit_code
from qdqtool.verification.times import gpu_time

MOST = 500  # mismatches shown


def agreement_of(collector: Collector) -> data.Agreement | None:
    """What the build confirms, and every mismatch with the node that it is about."""
    result = collector.subject.verification
    if result is None:
        return None
    build = result.build
    version = f"TensorRT {build.tensorrt}" if build.tensorrt else "a TensorRT that does not state its version"
    where = f" on {build.device}" if build.device else ""
    files = ", ".join(shown(f, 120) for f in build.files)
    conv, layers, conversions = result.convolutions, result.layers, result.conversions
    rows = [["convolutions", str(conv.agree), str(conv.total), f"{conv.unknown} not stated by the build" if conv.unknown
             else "data types of inputs and output, and what each layer took in"]]
    if layers.total:
        rows.append(["engine layers", str(layers.agree), str(layers.total), "name and data types"])
    if conversions.built is not None and conversions.predicted is not None:
        rows.append(["conversions", str(min(conversions.built, conversions.predicted)),
                     str(max(conversions.built, conversions.predicted)),
                     f"{conversions.predicted} predicted, {conversions.built} built"])
    for name, counts in (("pass lines", result.trace), ("slice and copy lines", result.copies)):
        rows += _lines(name, counts)
    mismatches = result.mismatches[:MOST]
    notes = list(result.notes)
    if len(result.mismatches) > MOST:
        notes.append(f"{len(result.mismatches) - MOST} more mismatches (qdqtool verify --format json lists them all)")
    found = data.Agreement(
        f"{version}{shown(where, 120)} ({files or build.source})", verdict(result), exit_code(result, True) == 0,
        result.complete, [told(m) for m in build.missing], rows,
        [[str(m.kind), shown(m.name), "" if m.line is None else str(m.line), told(m.why)] for m in mismatches],
        [(collector.nodes_of([m.name]) or [-1])[0] for m in mismatches], [told(n) for n in notes],
    )  # fmt: skip
    if result.times is not None:
        found.measured_ms = result.times["built_ms"]
        found.measured_from = result.times["built_from"]
        found.predicted_ms = result.times["predicted_ms"]
    elif collector.subject.build is not None:  # the build does not say on which GPU it was timed
        measured = gpu_time(collector.subject.build)
        timed = [row.average_ms for row in collector.subject.build.profile_rows]
        found.measured_ms = sum(timed) if measured is None and timed else measured
        found.measured_from = "sum of the profile" if measured is None else "GPU compute time"
        found.predicted_ms = collector.subject.time.total_ms if collector.subject.time is not None else None
    return found


def _lines(name: str, counts: TraceCounts) -> list[list[str]]:
    if not counts.built:
        return []
    return [[name, str(counts.agree), str(counts.built), f"{counts.predicted} predicted"]]
