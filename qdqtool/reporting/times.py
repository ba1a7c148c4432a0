"""Where the time goes, the roofline, and the scale groups: facts of the subjects, put together for plots and tables."""

from __future__ import annotations

from collections import defaultdict

from qdqtool.insertion.groups import scale_groups
from qdqtool.qdq import is_qdq
from qdqtool.render.output import as_options
from qdqtool.reporting import data
from qdqtool.reporting.names import shown
from qdqtool.reporting.nodes import Collector, kind_of
from qdqtool.reporting.subject import Subject
from qdqtool.timing.estimate import in_profile
from qdqtool.types import Precision

MOST_ROWS = 50  # of a profile that no predicted layer stands for
PARTS = {
    "int8": ("INT8 layers", "convolutions and other layers that compute in INT8"),
    "float": ("Float layers", "layers that compute in a floating-point type"),
    "conversion": ("Conversions", "Q and DQ that stay: a change of data type at run time"),
    "copy": ("Copies", "copies that Concats and Splits need: memory only"),
    "layout": ("Layout changes", "reformats that change the layout in memory and no data type"),
    "region": ("Unlisted regions", "what the build compiles as one (ForeignNode) and the simulation does not list"),
    "edge": ("Inputs and outputs", "reformats of inputs and outputs, and what belongs to no predicted layer"),
}


def time_of(subject: Subject) -> data.Time | None:
    """The estimate as the page shows it."""
    time = subject.time
    if time is None:
        return None
    base = time.float_time
    return data.Time(
        time.gpu.name, time.gpu.clock, time.total_ms, time.low_ms, time.high_ms, time.conversions_ms,
        str(base.precision) if base else "", base.total_ms if base else None, time.gain,
        [as_options(note) for note in time.notes],
    )


def parts_of(subject: Subject, before: Subject | None) -> list[data.Part]:
    """Milliseconds by kind of layer, as a profile shows them: measured, estimated, and those of the model before."""
    mine, timed = _sums(subject), _measured(subject)
    other = _sums(before) if before is not None else {}
    none = (0.0, 0)
    return [
        data.Part(key, name, what, mine.get(key, (None,))[0], (timed.get(key) or mine.get(key, none))[1],
                  other.get(key, none)[0] if other else None, timed.get(key, none)[0] if timed else None)
        for key, (name, what) in PARTS.items()
        if mine.get(key, none)[0] or other.get(key, none)[0] or timed.get(key, none)[0]
    ]


def parts_note(subject: Subject, parts: list[data.Part]) -> str:
    """Why the parts do not add up to the headline: a profile adds time to each layer, and takes the gaps away."""
    time = subject.time
    timed = [p.measured_ms for p in parts if p.measured_ms is not None]
    text = f"Measured parts are the profile's own, {sum(timed):.3f} ms together. " if timed else ""
    if time is None or not parts:
        return text.strip()
    together = sum(p.ms or 0.0 for p in parts)
    return (f"{text}Estimated parts are as a profile shows them, {together:.3f} ms together; without a profiler, which "
            f"adds a few us per layer, the estimate is {time.total_ms:.3f} ms.")  # fmt: skip


def unlisted_of(subject: Subject) -> list[data.Row]:
    """The rows of a profile that belong to no predicted layer, the slowest first."""
    rows = subject.build.profile_rows if subject.build is not None else []
    matched = {id(row) for row in in_profile(subject.prediction.layers, rows) if row is not None}
    rest = sorted((r for r in rows if id(r) not in matched and r.average_ms > 0), key=lambda r: -r.average_ms)
    return [data.Row(shown(row.name), round(row.average_ms, 5)) for row in rest[:MOST_ROWS]]


def _measured(subject: Subject) -> dict[str, tuple[float, int]]:
    """Milliseconds of a profile by kind of layer; rows of no predicted layer are reformats, regions, or the rest."""
    rows = subject.build.profile_rows if subject.build is not None else []
    if not rows:
        return {}
    sums: dict[str, list[float]] = defaultdict(list)
    layers = subject.prediction.layers
    matched = in_profile(layers, rows)
    for layer, row in zip(layers, matched, strict=True):
        if row is not None:
            sums[kind_of(layer)].append(row.average_ms)
    known = {id(row) for row in matched if row is not None}
    for row in rows:
        if id(row) not in known:
            sums["layout" if row.name.startswith("Reformatting CopyNode") else
                 "region" if "ForeignNode" in row.name else "edge"].append(row.average_ms)
    return {kind: (sum(values), len(values)) for kind, values in sums.items()}


def _sums(subject: Subject) -> dict[str, tuple[float, int]]:
    time = subject.time
    if time is None or not time.layers:
        return {}
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for layer, ms in zip(subject.prediction.layers, time.layers, strict=True):
        sums[kind_of(layer)] += ms
        counts[kind_of(layer)] += ms > 0
    changes = sum(change["ms"] for layer in subject.prediction.layers for change in layer.layouts)
    if changes:
        sums["layout"], counts["layout"] = changes, sum(len(x.layouts) for x in subject.prediction.layers)
    listed = {layer.name for layer in subject.prediction.layers}
    names = {node.name for node in subject.model.nodes}
    alone = [k for k in time.kernels if k.name not in listed and k.name in names]
    if alone:
        sums["region"], counts["region"] = sum(k.ms for k in alone), len(alone)
    rest = sum(k.ms for k in time.kernels) - sum(time.layers) - changes - sums.get("region", 0.0)
    if rest > 1e-3:
        sums["edge"] = rest
        counts["edge"] = max(0, len(time.kernels) - sum(ms > 0 for ms in time.layers) - counts["layout"] - len(alone))
    return {key: (value, counts[key]) for key, value in sums.items()}


def roof_of(subject: Subject) -> data.Roof | None:
    """The GPU's peaks."""
    if subject.time is None:
        return None
    gpu = subject.time.gpu
    rates = {"FP32": gpu.mac_rate(Precision.FP32), "FP16": gpu.mac_rate(Precision.FP16)}
    if gpu.has_int8:
        rates["INT8"] = gpu.mac_rate(Precision.INT8)
    return data.Roof(gpu.name, gpu.clock, gpu.bandwidth * 1e9, rates)


def groups_of(collector: Collector, before: Subject | None) -> list[data.ScaleGroup]:
    """Quantized activations by scale: with the float model tied as ``insert`` ties them, else those of equal scales."""
    view = collector.subject.view
    quantizers: dict[str, list[str]] = defaultdict(list)
    for q in view.activation_qs:
        quantizers[q.input(0)].append(q.name)
    by_name = {n.name: n for n in view.quantizers}
    if before is not None and not any(is_qdq(n) for n in before.model.nodes):
        known = [t for t in quantizers if t in before.model.producers or t in before.model.inputs]
        sets = [list(g.quantized) for g in scale_groups(before.model, known)]
        sets += [[t] for t in quantizers if t not in set(known)]
        tied = True
    else:
        same: dict[object, list[str]] = defaultdict(list)
        for tensor, names in quantizers.items():
            same[view.params(by_name[names[0]]).key or tensor].append(tensor)
        sets, tied = list(same.values()), False
    rows = []
    for tensors in sets:
        names = [n for t in tensors for n in quantizers[t]]
        params = [view.params(by_name[n]) for n in names]
        one = params[0].scale
        equal = all(params[0].same_as(p) for p in params[1:])
        if len(tensors) == 1 or not tied:
            sharing = "alone" if len(tensors) == 1 else "equal scales"
        else:
            sharing = "tied, one scale" if equal else "tied, but scales differ"
        rows.append(data.ScaleGroup(
            float(one[0]) if one is not None and one.size == 1 and equal else None, [shown(t) for t in tensors],
            collector.nodes_of(names), len(names), sharing, int(one.size) if one is not None else 0,
        ))  # fmt: skip
    return sorted(rows, key=lambda g: -len(g.tensors))
