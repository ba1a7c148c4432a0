"""The page that ``qdqtool log`` prints: text made of :func:`qdqtool.buildlog.summary.summarize`'s facts."""

from __future__ import annotations

from collections.abc import Iterable

from qdqtool.buildlog.implicit import IMPLICIT
from qdqtool.render.output import wrap
from qdqtool.text import as_text
from qdqtool.types import Json

_MANY = 12


def render(facts: Json, width: int = 80, *, everything: bool = False) -> str:
    """The page.

    Args:
        facts: What ``summarize`` gives.
        width: Columns.
        everything: List every conversion, reformat and merge instead of the first dozen.
    """
    limit = 10**9 if everything else _MANY
    blocks = [
        _head(facts, width), _problems(facts), _layers(facts, width), _passes(facts, width),
        _edges("Conversions at run time", facts["conversions"], limit, width),
        _edges("Reformats (layout only)", facts["reformats"], limit, width),
        _merged(facts, limit, width), _tuning(facts, width), _memory(facts), _performance(facts),
        _profile(facts, width), _rest(facts, width),
    ]
    return "\n".join(as_text(block) for block in blocks if block)


def _head(facts: Json, width: int) -> list[str]:
    build, gpu = facts["build"], facts["gpu"]
    passed = {True: "PASSED", False: "FAILED", None: ""}[facts["passed"]]
    details = ", ".join(
        text for text in (
            f"compute capability {gpu['Compute Capability']}" if "Compute Capability" in gpu else "",
            f"{gpu['SMs']} SMs" if "SMs" in gpu else "", gpu.get("Device Global Memory", ""),
        ) if text
    )
    device = f" on {build['device']}" + (f" ({details})" if details else "") if build["device"] else ""
    lines = wrap(f"{facts['title']}{device}{', ' + passed if passed else ''}", 2, width, "")
    if facts["precision"]:
        names = [p.upper() if p[0] in "fbi" and p != "best" else p for p in facts["precision"]]
        hint = "; what is not INT8 runs in FP32: add --fp16" if facts["float_remainder_fp32"] else ""
        lines += wrap(", ".join(names) + hint, 12, width, "precisions  ")
    if facts["implicit_int8"]:
        lines += wrap(IMPLICIT, 12, width, "INT8        ")
    model = facts["model"]
    if model["file"]:
        extra = [f"opset {model['opset']}" if model["opset"] else "", model["producer"] or "",
                 count(model["nodes"], "node") if model["nodes"] else ""]
        lines += wrap(", ".join([model["file"], *(text for text in extra if text)]), 12, width, "model       ")
    if facts["command"]:
        lines += wrap(facts["command"], 12, width, "command     ")
    lines += wrap(f"{build['source']}: {', '.join(build['files'])}", 12, width, "read        ")
    if facts["read"] and not build["complete"]:
        lines += wrap(", ".join(facts["read"]), 12, width, "holds       ")
    if build["missing"]:
        lines += wrap(", ".join(build["missing"]), 12, width, "missing     ")
    return lines


def _problems(facts: Json) -> list[str]:
    if not facts["names_only"]:
        return []
    lines = ["The listing has names and no precisions. Build again with details:"]
    for version, text in facts["rerun"].items():
        lines += [f"TensorRT {version}:", f"  {text}"]
    return lines


def _layers(facts: Json, width: int) -> list[str]:
    lines: list[str] = []
    steps: list[str] = []
    before = None
    for milestone in facts["milestones"]:
        if milestone["layers"] != before:
            steps.append(f"{milestone['layers']} ({milestone['what'].removeprefix('After ').lower()})")
            before = milestone["layers"]
    if steps:
        lines += wrap(" -> ".join(steps), 12, width, "Layers      ")
    if facts["placement"].get("DLA"):
        placed = ", ".join(f"{number} on {device}" for device, number in facts["placement"].items())
        lines += wrap(placed, 12, width, "Placement   ")
    engine = facts["engine"]
    if engine is None:
        return lines
    if engine["convolutions"]:
        text = f"{count(engine['layers'], 'layer')}, of them {count(engine['convolutions'], 'convolution')}:"
        lines += wrap(text, 12, width, "Engine      ")
        lines += [f"{number:>16} x {signature}" for signature, number in engine["signatures"].items()]
    else:
        lines += wrap(count(engine["layers"], "layer"), 12, width, "Engine      ")
    return lines


def _passes(facts: Json, width: int) -> list[str]:
    if not facts["passes"]:
        return []
    wide = min(40, max(len(row["pass"]) for row in facts["passes"]))
    lines = ["Optimizer passes (layers looked at; what was done; --pass NAME lists the lines)"]
    for row in facts["passes"]:
        done = ", ".join(f"{kind} {number}" for kind, number in row["events"].items()) or "-"
        name = row["pass"] or "(no pass)"
        lines += wrap(done, wide + 10, width, f"  {name:<{wide}} {row['running'] or '':>5}  ")
    return lines


def _edges(title: str, rows: list[Json], limit: int, width: int) -> list[str]:
    if not rows:
        return []
    lines = [f"{title}: {len(rows)}"]
    cells = []
    for row in rows[:limit]:
        types = row["from"] if row["from"] == row["to"] else f"{row['from']} -> {row['to']}"
        shape = "x".join("?" if d is None else str(d) for d in row["shape"]) if row["shape"] else ""
        name = row["name"] if row["qdq"] or limit > _MANY else short(row["name"], 90)
        cells.append(("" if types == "UNKNOWN" else types, shape, name))
    first, second = (max(len(cell[i]) for cell in cells) for i in (0, 1))
    lines += [f"  {types:<{first}}  {shape:<{second}}  {name}" for types, shape, name in cells]
    return lines + _more(len(rows), limit)


def _merged(facts: Json, limit: int, width: int) -> list[str]:
    rows = facts["merged"]
    if not rows:
        return []
    lines = [f"Merged side by side: {len(rows)}"]
    for group in rows[:limit]:
        lines += wrap(" || ".join(group), 6, width, f"  {len(group)}: ")
    return lines + _more(len(rows), limit)


def _tuning(facts: Json, width: int) -> list[str]:
    tuning = facts["tuning"]
    if not tuning["tactics"]:
        return _passed_over(tuning, width)
    chosen = ", ".join(f"{name} {number}" for name, number in list(tuning["chosen"].items())[:6])
    lines = wrap(
        f"{count(tuning['tactics'], 'tactic')} timed for {count(tuning['layers'], 'layer')}, "
        f"{count(tuning['combinations'], 'format combination')}, {count(tuning['reformats'], 'reformat')} costed, "
        f"{count(tuning['added_reformats'], 'reformat')} added",
        12, width, "Tuning      ",
    )
    spent = [f"{seconds:g} s {what[0].lower() + what[1:]}" for what, seconds in facts["seconds"].items()]
    lines += wrap(", ".join(spent), 12, width, "            ") if spent else []
    lines += wrap(f"chosen: {chosen}", 12, width, "            ") if chosen else []
    slow = [row for row in tuning["slowest"] if row["seconds"] > 0][:5]
    if slow:
        lines.append("  slowest to tune:")
        lines += [
            f"  {row['seconds']:>7.0f} s  {row['tactics']:>5} tactics  {short(row['name'], width - 30)}" for row in slow
        ]
    for row in tuning["slowest_reformats"][:1]:
        lines.append(f"  slowest reformat tried: {row['best_ms']:g} ms  {short(row['name'], width - 38)}")
    return lines


def _passed_over(tuning: Json, width: int) -> list[str]:
    """For excerpts without a timed tactic: which kernels were passed over, for which layer and why."""
    lines: list[str] = []
    for row in tuning["refused"]:
        layer = f" for {row['layer']}" if row["layer"] else ""
        lines += wrap(f"{row['runner']} has no tactic{layer}{_times(row['count'])}", 12, width, "Tuning      ")
    for row in tuning["reasons"]:
        lines += wrap(f"passed over: {row['reason']}{_times(row['count'])}", 12, width, "Tuning      ")
    return lines


def _times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""


def _memory(facts: Json) -> list[str]:
    memory = facts["memory"]
    rows = [(label, memory[key]) for label, key in (
        ("activations", "activation"), ("device, persistent", "device_persistent"), ("scratch", "scratch"),
        ("host, persistent", "host_persistent"), ("weights", "weights"),
    ) if memory[key] is not None]
    lines = [f"  {label:<20}{value:>17,} bytes" for label, value in rows]
    lines += [f"  {label:<20}{memory[key]:>17,} MiB" for label, key in (
        ("engine", "engine_mib"), ("peak, GPU", "peak_gpu_mib"), ("peak, CPU", "peak_cpu_mib"),
    ) if memory[key] is not None]
    return ["Memory", *lines] if lines else []


def _performance(facts: Json) -> list[str]:
    rows = facts["performance"]
    if not rows:
        return []
    lines = ["Performance"]
    for name, values in rows.items():
        if "value" in values:
            lines.append(f"  {name:<23}{values['value']:>12,.6g} {'qps' if name == 'Throughput' else 's'}")
    timed = {name: values for name, values in rows.items() if "mean" in values}
    if timed:
        percentiles = dict.fromkeys(key for values in timed.values() for key in values if key.startswith("perc"))
        columns = ["min", "mean", "median", *list(percentiles)[-1:], "max"]
        heads = [column.removeprefix("percentile(").removesuffix(")") for column in columns]
        lines.append(f"  {'ms':<23}" + "".join(f"{head:>11}" for head in heads))
        for name, values in timed.items():
            cells = "".join(f"{values[c]:>11.6g}" if c in values else f"{'':>11}" for c in columns)
            lines.append(f"  {name:<23}{cells}")
    return lines


def _profile(facts: Json, width: int) -> list[str]:
    profile = facts["profile"]
    if profile is None:
        return []
    runs = f", {profile['iterations']} iterations" if profile["iterations"] else ""
    lines = [f"Profile: {profile['total_ms']:.4f} ms in {count(profile['layers'], 'layer')}{runs}; the slowest:"]
    for row in profile["slowest"]:
        lines.append(f"  {row['ms']:>9.4f} ms {row['share']:>6.1%}  {short(row['name'], width - 24)}")
    return lines


def _rest(facts: Json, width: int) -> list[str]:
    lines: list[str] = []
    explained: set[str] = set()
    for message in facts["messages"]:
        times = f" ({message['count']} times)" if message["count"] > 1 else ""
        first = message["text"].splitlines()[0] if message["text"] else ""
        lines += wrap(f"line {message['line']}: {first[:500]}{times}", 2, width, f"{message['level'].upper():<7} ")
        if message.get("cause") and message["known"] not in explained:
            explained.add(message["known"])
            lines += wrap(message["cause"], 10, width, "  cause   ")
            lines += wrap(message["fix"], 10, width, "  fix     ")
    for note in facts["notes"]:
        lines += wrap(note, 8, width, "note    ")
    if facts["lines"]["unexplained"]:
        lines.append(f"{facts['lines']['unexplained']} of {facts['lines']['total']} lines were not understood")
    return lines


def _more(total: int, limit: int) -> list[str]:
    return [f"  ... and {total - limit} more (--all)"] if total > limit else []


def count(number: int, word: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def short(name: str, width: int) -> str:
    """A name in at most ``width`` columns; the middle is cut, since beginning and end distinguish layers."""
    width = max(20, width)
    if len(name) <= width:
        return name
    tail = (width - 3) * 2 // 3
    return f"{name[: width - 3 - tail]}...{name[-tail:]}"


def pass_lines(rows: Iterable[tuple[int, str]]) -> str:
    """The lines of one pass, each with its place in the log."""
    return as_text(f"{line:>7}: {text}" for line, text in rows)
