"""The page that ``qdqtool log`` prints, and finding codes, known errors and lines of a log as text."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from qdqtool.findings.codes import ALL_TARGETS, FindingCodeEntry
from qdqtool.findings.rules import PROMISED_CODES
from qdqtool.formats.output import TextPage
from qdqtool.types import Json
from qdqtool.util.records import to_json_fields
from qdqtool.util.text import as_text, cut_middle, format_count

if TYPE_CHECKING:
    from qdqtool.findings.errors import KnownError
    from qdqtool.findings.lines import LineAnswer, Rule
    from qdqtool.findings.ways import BuildMethod

_MANY = 12


def render(facts: Json, width: int = 80, *, everything: bool = False) -> str:
    """The page of what ``summarize`` gives; ``everything`` lists every conversion, reformat and merge."""
    page = TextPage(width, everything)
    _add_head(page, facts)
    for write in (
        _add_problems,
        _add_layers,
        _add_passes,
        functools.partial(_add_edges, title="Conversions at run time", which="conversions"),
        functools.partial(_add_edges, title="Reformats (layout only)", which="reformats"),
        _add_merged,
        _add_tuning,
        _add_memory,
        _add_performance,
        _add_profile,
        _add_rest,
    ):
        before = len(page.lines)
        write(page, facts)
        if len(page.lines) > before:
            page.lines.insert(before, "")
    return str(page)


def _add_fact(page: TextPage, label: str, text: str) -> None:
    page.fill(text, 12, f"{label:<12}")


def _add_head(page: TextPage, facts: Json) -> None:
    build, gpu, model = facts["build"], facts["gpu"], facts["model"]
    passed = {True: ", PASSED", False: ", FAILED", None: ""}[facts["passed"]]
    known = (
        ("compute capability {}", "Compute Capability"),
        ("{} SMs", "SMs"),
        ("{}", "Device Global Memory"),
    )
    details = ", ".join(text.format(gpu[name]) for text, name in known if gpu.get(name))
    device = (
        f" on {build['device']}" + (f" ({details})" if details else "") if build["device"] else ""
    )
    page.fill(f"{facts['title']}{device}{passed}")
    if facts["precision"]:
        names = [p.upper() if p[0] in "fbi" and p != "best" else p for p in facts["precision"]]
        hint = "; all other layers run in FP32: add --fp16" if facts["float_remainder_fp32"] else ""
        _add_fact(page, "precisions", ", ".join(names) + hint)
    if facts["implicit_int8"]:
        from qdqtool.buildlog.build_status import IMPLICIT_INT8

        _add_fact(page, "INT8", IMPLICIT_INT8)
    if model["file"]:
        extra = [
            f"opset {model['opset']}" if model["opset"] else "",
            model["producer"] or "",
            format_count(model["nodes"], "node") if model["nodes"] else "",
        ]
        _add_fact(page, "model", ", ".join([model["file"], *(text for text in extra if text)]))
    if facts["command"]:
        _add_fact(page, "command", facts["command"])
    _add_fact(page, "read", f"{build['source']}: {', '.join(build['files'])}")
    if facts["read"] and not build["complete"]:
        _add_fact(page, "holds", ", ".join(facts["read"]))
    if build["missing"]:
        _add_fact(page, "missing", ", ".join(build["missing"]))


def _add_problems(page: TextPage, facts: Json) -> None:
    if facts["names_only"]:
        page.add_lines("The listing has names and no precisions. Build again with details:")
        for version, text in facts["rerun"].items():
            page.add_lines(f"TensorRT {version}:", f"  {text}")


def _add_layers(page: TextPage, facts: Json) -> None:
    steps = [
        f"{layers} ({next(same)['what'].removeprefix('After ').lower()})"
        for layers, same in itertools.groupby(
            facts["milestones"], key=lambda milestone: milestone["layers"]
        )
    ]
    if steps:
        _add_fact(page, "Layers", " -> ".join(steps))
    if facts["placement"].get("DLA"):
        placed = ", ".join(f"{number} on {device}" for device, number in facts["placement"].items())
        _add_fact(page, "Placement", placed)
    engine = facts["engine"]
    if engine is None:
        return
    text = format_count(engine["layers"], "layer")
    if engine["convolutions"]:
        text += f", of them {format_count(engine['convolutions'], 'convolution')}:"
    _add_fact(page, "Engine", text)
    if engine["convolutions"]:
        page.add_lines(
            *(f"{number:>16} x {signature}" for signature, number in engine["signatures"].items())
        )


def _add_passes(page: TextPage, facts: Json) -> None:
    rows = facts["passes"]
    wide = min(40, max((len(row["pass"]) for row in rows), default=0))
    if rows:
        page.add_lines("Optimizer passes (layers examined; changes; --pass NAME lists the lines)")
    for row in rows:
        done = ", ".join(f"{kind} {number}" for kind, number in row["events"].items()) or "-"
        page.fill(
            done, wide + 10, f"  {row['pass'] or '(no pass)':<{wide}} {row['running'] or '':>5}  "
        )


def _add_edges(page: TextPage, facts: Json, *, title: str, which: str) -> None:
    rows = facts[which]
    if not rows:
        return
    page.add_lines(f"{title}: {len(rows)}")
    cells = []
    for row in page.first_rows(rows, _MANY):
        types = row["from"] if row["from"] == row["to"] else f"{row['from']} -> {row['to']}"
        shape = "x".join("?" if d is None else str(d) for d in row["shape"]) if row["shape"] else ""
        cells.append(("" if types == "UNKNOWN" else types, shape))
    first, second = (max(len(cell[i]) for cell in cells) for i in (0, 1))
    for row, (types, shape) in zip(page.iterate_rows(rows, _MANY), cells, strict=True):
        name = (
            row["name"]
            if row["qdq"] or page.everything
            else cut_middle(row["name"], page.width - 6)
        )
        start = f"  {types:<{first}}  {shape:<{second}}  "
        page.add_lines(
            *(
                [start + name]
                if len(start + name) <= page.width
                else [start.rstrip(), f"      {name}"]
            )
        )


def _add_merged(page: TextPage, facts: Json) -> None:
    if facts["merged"]:
        page.add_lines(f"Merged side by side: {len(facts['merged'])}")
    for group in page.iterate_rows(facts["merged"], _MANY):
        page.fill(" || ".join(group), 6, f"  {len(group)}: ")


def _add_tuning(page: TextPage, facts: Json) -> None:
    tuning = facts["tuning"]
    if not tuning["tactics"]:  # an excerpt: which kernels were passed over, for which layer and why
        for row in tuning["refused"]:
            layer = f" for {row['layer']}" if row["layer"] else ""
            _add_fact(page, "Tuning", f"{row['runner']} has no tactic{layer}{_format_times(row)}")
        for row in tuning["reasons"]:
            _add_fact(page, "Tuning", f"passed over: {row['reason']}{_format_times(row)}")
        return
    _add_fact(
        page,
        "Tuning",
        f"{format_count(tuning['tactics'], 'tactic')} timed for {format_count(tuning['layers'], 'layer')}, "
        f"{format_count(tuning['combinations'], 'format combination')}, "
        f"{format_count(tuning['reformats'], 'reformat')} costed, {format_count(tuning['added_reformats'], 'reformat')} added",
    )
    if facts["seconds"]:
        _add_fact(
            page,
            "",
            ", ".join(
                f"{s:g} s {what[0].lower() + what[1:]}" for what, s in facts["seconds"].items()
            ),
        )
    if tuning["chosen"]:
        _add_fact(
            page,
            "",
            "chosen: "
            + ", ".join(f"{n} {number}" for n, number in list(tuning["chosen"].items())[:6]),
        )
    slow = [row for row in tuning["slowest"] if row["seconds"] > 0][:5]
    if slow:
        page.add_lines("  slowest to tune:")
    for row in slow:
        name = cut_middle(row["name"], page.width - 30)
        page.add_lines(f"  {row['seconds']:>7.0f} s  {row['tactics']:>5} tactics  {name}")
    for row in tuning["slowest_reformats"][:1]:
        page.add_lines(
            f"  slowest reformat tried: {row['best_ms']:g} ms  {cut_middle(row['name'], page.width - 38)}"
        )


def _format_times(row: Json) -> str:
    return f" ({row['count']} times)" if row["count"] > 1 else ""


def _add_memory(page: TextPage, facts: Json) -> None:
    rows = {
        "activation": "activations",
        "device_persistent": "device, persistent",
        "scratch": "scratch",
        "host_persistent": "host, persistent",
        "weights": "weights",
        "engine_mib": "engine",
        "peak_gpu_mib": "peak, GPU",
        "peak_cpu_mib": "peak, CPU",
    }
    lines = [
        f"  {label:<20}{facts['memory'][key]:>17,} {'MiB' if key.endswith('_mib') else 'bytes'}"
        for key, label in rows.items()
        if facts["memory"][key] is not None
    ]
    page.add_lines(*(["Memory", *lines] if lines else []))


def _add_performance(page: TextPage, facts: Json) -> None:
    rows = facts["performance"]
    if rows:
        page.add_lines("Performance")
    for name, values in rows.items():
        if "value" in values:
            page.add_lines(
                f"  {name:<23}{values['value']:>12,.6g} {'qps' if name == 'Throughput' else 's'}"
            )
    timed = {name: values for name, values in rows.items() if "mean" in values}
    if timed:
        percentiles = dict.fromkeys(
            key for values in timed.values() for key in values if key.startswith("perc")
        )
        columns = ["min", "mean", "median", *list(percentiles)[-1:], "max"]
        heads = [column.removeprefix("percentile(").removesuffix(")") for column in columns]
        page.add_lines(f"  {'ms':<23}" + "".join(f"{head:>11}" for head in heads))
        for name, values in timed.items():
            cells = "".join(f"{values[c]:>11.6g}" if c in values else f"{'':>11}" for c in columns)
            page.add_lines(f"  {name:<23}{cells}")


def _add_profile(page: TextPage, facts: Json) -> None:
    profile = facts["profile"]
    if profile is None:
        return
    runs = f", {profile['iterations']} iterations" if profile["iterations"] else ""
    page.add_lines(
        f"Profile: {profile['total_ms']:.4f} ms in {format_count(profile['layers'], 'layer')}{runs}; the slowest:"
    )
    for row in profile["slowest"]:
        page.add_lines(
            f"  {row['ms']:>9.4f} ms {row['share']:>6.1%}  {cut_middle(row['name'], page.width - 24)}"
        )


def _add_rest(page: TextPage, facts: Json) -> None:
    explained: set[str] = set()
    for message in facts["messages"]:
        first = message["text"].splitlines()[0] if message["text"] else ""
        page.fill(
            f"line {message['line']}: {first[:500]}{_format_times(message)}",
            2,
            f"{message['level'].upper():<7} ",
        )
        if message.get("cause") and message["known"] not in explained:
            explained.add(message["known"])
            page.fill(message["cause"], 10, "  cause   ")
            page.fill(message["fix"], 10, "  fix     ")
    for note in facts["notes"]:
        page.fill(note, 8, "note    ")
    if facts["lines"]["unexplained"]:
        page.add_lines(
            f"{facts['lines']['unexplained']} of {facts['lines']['total']} lines were not understood"
        )


def pass_lines(rows: Iterable[tuple[int, str]]) -> str:
    """The lines of one pass, each with its place in the log."""
    return as_text(f"{line:>7}: {text}" for line, text in rows)


# Explanations of codes, errors and lines ----------------------------------------------------------------------------


def _add_sections(page: TextPage, **texts: str) -> None:
    """A heading and a paragraph for each text that there is."""
    for heading, text in texts.items():
        if text:
            page.add_lines("", heading.replace("_", " "))
            page.fill(text, 2, "  ")


def code_text(entry: FindingCodeEntry, width: int) -> str:
    """The long form of a code."""
    page = TextPage(width)
    page.fill(entry.title, 4, f"{entry.code} ({entry.severity.word}): ")
    _add_sections(
        page,
        Cause=entry.cause,
        What_TensorRT_does=entry.tensorrt,
        In_a_log=entry.log,
        Fix=entry.fix,
    )
    if entry.code in PROMISED_CODES:
        page.fill(
            f"qdqtool fix --only {entry.code} model.onnx -o fixed.onnx does this where no new data is needed.",
            2,
            "  ",
        )
    page.add_lines("", "Where it holds")
    for holds in entry.holds:
        severity = (
            f", {holds.severity.word}"
            if holds.severity is not None and holds.severity != entry.severity
            else ""
        )
        page.fill(
            f"{holds.evidence}{severity}: {holds.source}", 4, f"  {', '.join(holds.targets)}: "
        )
    other = [t for t in ALL_TARGETS if entry.on(t) is None]
    if other:
        page.fill(f"not on {', '.join(other)}", 2, "  ")
    return str(page)


def code_json(entry: FindingCodeEntry) -> Json:
    """A code and all that is known about it."""
    holds = [
        to_json_fields(h, "targets", "evidence", "source")
        | {"severity": str(h.severity or entry.severity)}
        for h in entry.holds
    ]
    names = ("code", "title", "severity", "cause", "tensorrt", "log", "fix")
    return to_json_fields(entry, *names) | {
        "automatic": entry.code in PROMISED_CODES,
        "holds": holds,
    }


def list_text(entries: Iterable[FindingCodeEntry], width: int) -> str:
    """Every code with its title, by severity."""
    page = TextPage(width)
    rows = sorted(entries, key=lambda c: (("error", "warning", "info").index(c.severity), c.code))
    wide = max(len(c.code) for c in rows)
    for entry in rows:
        page.fill(entry.title, wide + 11, f"{entry.code:<{wide}}  {entry.severity.word:<7}  ")
    return str(page)


def error_text(known: KnownError, width: int) -> str:
    """The long form of a known error message."""
    page = TextPage(width)
    page.fill(f"{known.title} ({known.severity})")
    _add_sections(
        page,
        Cause=known.cause,
        Fix=known.fix,
        Fixed_in=known.fixed,
        Not_known=known.unknown,
        Versions=known.versions,
        Source=known.source,
    )
    if known.codes:
        page.add_heading(
            f"'qdqtool predict' reports it before the build: {', '.join(known.codes)} (qdqtool explain "
            f"{known.codes[0]})"
        )
    return str(page)


def way_text(way: BuildMethod, width: int) -> str:
    """What to give a builder, and how to get its log."""
    page = TextPage(width)
    page.add_lines(f"With {way.title}")
    for heading, text in (
        ("flags, up to TensorRT 10", way.weak),
        ("flags, TensorRT 11", way.strong),
        ("log", way.log),
        ("note", way.care),
        ("source", way.source),
    ):
        page.fill(f"{heading}: {text}", 4, "  ")
    return str(page)


def line_text(answer: LineAnswer, width: int) -> str:
    """The answer to one line of a log, the likeliest pass first."""
    page = TextPage(width)
    page.fill(answer.line, 2, "  ")
    if answer.note:
        page.add_gap()
        page.fill(answer.note, 0)
    for rule in answer.rules:
        page.add_gap()
        _add_rule(page, rule, 1 if answer.event else len(rule.cases))
    return str(page)


def _add_rule(page: TextPage, rule: Rule, most: int) -> None:
    page.fill(rule.does, 4, f"{rule.pass_name}: ")
    if rule.means:
        page.fill(rule.means, 4, "  For you: ")
    page.add_lines("  Evidence")
    for name, case in list(rule.cases.items())[:most]:
        page.fill(f"{case.evidence}: {case.says}", 6, f"  - {name.rpartition('/')[2]}, ")
        if case.builds:
            page.fill(", ".join(case.builds), 8, "      in ")
        if case.source:
            page.fill(case.source, 8, "      ")
    if len(rule.cases) > most:
        page.fill(
            f"the likeliest case, by the names in the line; all {len(rule.cases)}: "
            f"qdqtool explain {rule.pass_name}",
            4,
            "    ",
        )
    page.add_lines(f"  Rule: {rule.file}", f"  Test: {rule.test}")
