"""Text of ``log`` (summary) and ``explain`` (finding codes, errors, log lines)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from qdqtool.findings.codes import ALL_TARGETS, FindingCodeEntry
from qdqtool.findings.rules import ATTEMPTED_CODES, PROMISED_CODES, UNPROMISED_CODES
from qdqtool.formats.output import Style, TextPage
from qdqtool.util.json_text import Json
from qdqtool.util.records import to_json_fields
from qdqtool.util.text import cut_middle, format_count, format_shape

if TYPE_CHECKING:
    from qdqtool.findings.build_methods import BuildMethod
    from qdqtool.findings.errors import KnownError
    from qdqtool.findings.lines import LineExplanation, PassRule

_MAX_ROWS = 12  # maximum number of rows of a list if --all is not given


def render(facts: Json, width: int = 80, *, everything: bool = False) -> TextPage:
    """Return the text of ``log``.

    `facts` is the result of :func:`qdqtool.findings.errors.explain_messages`. If `everything` is
    set, all conversions, reformats, copies and merged layers are listed.
    """
    page = TextPage(width, everything)
    _add_log_summary(page, facts)
    for write in (
        _add_problems,
        _add_layers,
        _add_passes,
        _add_moves,
        _add_merged_layers,
        _add_tuning,
        _add_memory,
        _add_performance,
        _add_profile,
        _add_messages,
    ):
        section = TextPage(width, everything)
        write(section, facts)
        if section.lines:
            page.add_gap()
            page.add_page(section)
    return page


def _add_fact(page: TextPage, label: str, text: str) -> None:
    page.fill(text, 12, f"{label:<12}")


def _add_log_summary(page: TextPage, facts: Json) -> None:
    build = facts["build"]
    result = {True: ", PASSED", False: ", FAILED", None: ""}[facts["passed"]]
    style = {True: Style.GOOD, False: Style.BAD, None: Style.BOLD}[facts["passed"]]
    page.fill(f"{facts['title']}{_describe_device(facts)}{result}", style=style)
    if facts["precision"]:
        names = [p.upper() if p[0] in "fbi" and p != "best" else p for p in facts["precision"]]
        hint = ""
        if facts["float_remainder_fp32"]:
            hint = "; all other layers run in FP32: add --fp16"
        _add_fact(page, "precisions", ", ".join(names) + hint)
    if facts["implicit_int8"]:
        from qdqtool.buildlog.build_status import IMPLICIT_INT8

        _add_fact(page, "INT8", IMPLICIT_INT8)
    if facts["model"]["file"]:
        _add_fact(page, "model", _describe_model(facts["model"]))
    if facts["command"]:
        _add_fact(page, "command", facts["command"])
    _add_fact(page, "read", f"{build['source']}: {', '.join(build['files'])}")
    if facts["read"] and not build["complete"]:
        _add_fact(page, "contains", ", ".join(facts["read"]))
    if build["missing"]:
        _add_fact(page, "missing", ", ".join(build["missing"]))


def _describe_device(facts: Json) -> str:
    device = facts["build"]["device"]
    if not device:
        return ""
    formats = (
        ("compute capability {}", "Compute Capability"),
        ("{} SMs", "SMs"),
        ("{}", "Device Global Memory"),
    )
    gpu = facts["gpu"]
    details = ", ".join(text.format(gpu[name]) for text, name in formats if gpu.get(name))
    return f" on {device} ({details})" if details else f" on {device}"


def _describe_model(model: Json) -> str:
    parts = [model["file"]]
    if model["opset"]:
        parts.append(f"opset {model['opset']}")
    if model["producer"]:
        parts.append(model["producer"])
    if model["nodes"]:
        parts.append(format_count(model["nodes"], "node"))
    return ", ".join(parts)


def _add_problems(page: TextPage, facts: Json) -> None:
    if facts["names_only"]:
        page.fill(
            "The layer listing has names but no precisions. Build again with details:",
            style=Style.UNCLEAR,
        )
        for version, text in facts["rerun"].items():
            page.add_lines(f"TensorRT {version}:")
            page.add_command("", text)


def _add_layers(page: TextPage, facts: Json) -> None:
    steps = []
    milestones = itertools.groupby(facts["milestones"], key=lambda milestone: milestone["layers"])
    for layers, same in milestones:
        step = next(same)["what"].removeprefix("After ").lower()
        steps.append(f"{layers} ({step})")
    if steps:
        _add_fact(page, "Layers", " -> ".join(steps))
    if facts["placement"].get("DLA"):
        devices = [f"{number} on {device}" for device, number in facts["placement"].items()]
        _add_fact(page, "Placement", ", ".join(devices))
    engine = facts["engine"]
    if engine is None:
        return
    text = format_count(engine["layers"], "layer")
    if engine["convolutions"]:
        text += f", of them {format_count(engine['convolutions'], 'convolution')}:"
    _add_fact(page, "Engine", text)
    if engine["convolutions"]:
        for signature, number in engine["signatures"].items():
            page.add_lines(f"{number:>16} x {signature}")


def _add_passes(page: TextPage, facts: Json) -> None:
    rows = facts["passes"]
    column = min(40, max((len(row["pass"]) for row in rows), default=0))
    if rows:
        page.add_heading("Optimizer passes (layers examined; changes; --pass NAME lists the lines)")
    for row in rows:
        events = ", ".join(f"{kind} {number}" for kind, number in row["events"].items()) or "-"
        start = f"  {row['pass'] or '(no pass)':<{column}} {row['running'] or '':>5}  "
        page.fill(events, column + 10, start)


def _add_moves(page: TextPage, facts: Json) -> None:
    """Add the layers that only convert or move data: Q/DQ layers, reformats and copies."""
    moves = facts["reformats"]
    for title, rows in (
        ("Q/DQ layers at run time", facts["conversions"]),
        ("Reformats (layout only)", [row for row in moves if not row["copy"]]),
        ("Copies (such as inputs of a Concat)", [row for row in moves if row["copy"]]),
    ):
        if rows:
            _add_edges(page, title, rows)


def _add_edges(page: TextPage, title: str, rows: list[Json]) -> None:
    page.add_heading(f"{title}: {len(rows)}")
    cells = [
        (_format_types(row), format_shape(row["shape"] or ()))
        for row in page.first_rows(rows, _MAX_ROWS)
    ]
    first, second = (max(len(cell[i]) for cell in cells) for i in (0, 1))
    for row, (types, shape) in zip(page.iterate_rows(rows, _MAX_ROWS), cells, strict=True):
        full = row["qdq"] or page.everything
        name = row["name"] if full else cut_middle(row["name"], page.width - 6)
        start = f"  {types:<{first}}  {shape:<{second}}  "
        if len(start + name) <= page.width:
            page.add_lines(start + name)
        else:
            page.add_lines(start.rstrip(), f"      {name}")


def _format_types(row: Json) -> str:
    if row["from"] != row["to"]:
        return f"{row['from']} -> {row['to']}"
    return "" if row["from"] == "UNKNOWN" else str(row["from"])


def _add_merged_layers(page: TextPage, facts: Json) -> None:
    if facts["merged"]:
        page.add_heading(f"Layers merged horizontally: {len(facts['merged'])}")
    for group in page.iterate_rows(facts["merged"], _MAX_ROWS):
        page.fill(" || ".join(group), 6, f"  {len(group)}: ")


def _add_skipped_kernels(page: TextPage, tuning: Json) -> None:
    for row in tuning["refused"]:
        layer = f" for {row['layer']}" if row["layer"] else ""
        _add_fact(page, "Tuning", f"{row['runner']} has no tactic{layer}{_format_times(row)}")
    for row in tuning["reasons"]:
        _add_fact(page, "Tuning", f"tactics skipped: {row['reason']}{_format_times(row)}")


def _add_tuning(page: TextPage, facts: Json) -> None:
    tuning = facts["tuning"]
    if not tuning["tactics"]:  # the log is an excerpt without timings
        _add_skipped_kernels(page, tuning)
        return
    counts = (
        f"{format_count(tuning['tactics'], 'tactic')} timed for "
        f"{format_count(tuning['layers'], 'layer')}",
        format_count(tuning["combinations"], "format combination"),
        f"{format_count(tuning['reformats'], 'reformat')} tried",
        f"{format_count(tuning['added_reformats'], 'reformat')} added",
    )
    _add_fact(page, "Tuning", ", ".join(counts))
    if facts["seconds"]:
        steps = [f"{s:g} s {name[0].lower()}{name[1:]}" for name, s in facts["seconds"].items()]
        _add_fact(page, "", ", ".join(steps))
    if tuning["chosen"]:
        kernels = [f"{name} {number}" for name, number in list(tuning["chosen"].items())[:6]]
        _add_fact(page, "", f"chosen: {', '.join(kernels)}")
    slow = [row for row in tuning["slowest"] if row["seconds"] > 0][:5]
    if slow:
        page.add_lines("  slowest to tune:")
    for row in slow:
        name = cut_middle(row["name"], page.width - 30)
        page.add_lines(f"  {row['seconds']:>7.0f} s  {row['tactics']:>5} tactics  {name}")
    for row in tuning["slowest_reformats"][:1]:
        name = cut_middle(row["name"], page.width - 38)
        page.add_lines(f"  slowest reformat tried: {row['best_ms']:g} ms  {name}")


def _format_times(row: Json) -> str:
    return f" ({row['count']} times)" if row["count"] > 1 else ""


def _add_memory(page: TextPage, facts: Json) -> None:
    labels = {
        "activation": "activations",
        "device_persistent": "device, persistent",
        "scratch": "scratch",
        "host_persistent": "host, persistent",
        "weights": "weights",
        "engine_mib": "engine",
        "peak_gpu_mib": "peak, GPU",
        "peak_cpu_mib": "peak, CPU",
    }
    lines = []
    for key, label in labels.items():
        amount = facts["memory"][key]
        if amount is not None:
            unit = "MiB" if key.endswith("_mib") else "bytes"
            lines.append(f"  {label:<20}{amount:>17,} {unit}")
    if lines:
        page.add_heading("Memory")
        page.add_lines(*lines)


def _add_performance(page: TextPage, facts: Json) -> None:
    rows = facts["performance"]
    if rows:
        page.add_heading("Performance")
    for name, values in rows.items():
        if "value" in values:
            unit = "qps" if name == "Throughput" else "s"
            page.add_lines(f"  {name:<23}{values['value']:>12,.6g} {unit}")
    timed = {name: values for name, values in rows.items() if "mean" in values}
    if timed:
        _add_time_table(page, timed)


def _add_time_table(page: TextPage, timed: Json) -> None:
    keys = itertools.chain.from_iterable(timed.values())
    percentiles = list(dict.fromkeys(key for key in keys if key.startswith("perc")))
    columns = ["min", "mean", "median", *percentiles[-1:], "max"]
    heads = [column.removeprefix("percentile(").removesuffix(")") for column in columns]
    page.add_lines(f"  {'ms':<23}" + "".join(f"{head:>11}" for head in heads))
    for name, values in timed.items():
        cells = [f"{values[c]:>11.6g}" if c in values else " " * 11 for c in columns]
        page.add_lines(f"  {name:<23}{''.join(cells)}")


def _add_profile(page: TextPage, facts: Json) -> None:
    profile = facts["profile"]
    if profile is None:
        return
    number = profile["iterations"]
    runs = f", {format_count(number, 'iteration')}" if number else ""
    layers = format_count(profile["layers"], "layer")
    page.add_heading(
        f"Profile (mean times): {profile['total_ms']:.4f} ms in {layers}{runs}; the slowest:"
    )
    for row in profile["slowest"]:
        name = cut_middle(row["name"], page.width - 24)
        page.add_lines(f"  {row['ms']:>9.4f} ms {row['share']:>6.1%}  {name}")


def _add_messages(page: TextPage, facts: Json) -> None:
    explained: set[str] = set()
    for message in facts["messages"]:
        first = message["text"].splitlines()[0] if message["text"] else ""
        page.fill(
            f"line {message['line']}: {first[:500]}{_format_times(message)}",
            2,
            f"{message['level'].upper():<7} ",
            Style.BAD if message["level"].lower() == "error" else Style.UNCLEAR,
        )
        if message.get("cause") and message["known"] not in explained:
            explained.add(message["known"])
            page.fill(message["cause"], 10, "  cause   ")
            page.fill(message["fix"], 10, "  fix     ")
    for note in facts["notes"]:
        page.fill(note, 8, "note    ")
    lines = facts["lines"]
    if lines["unexplained"]:
        page.add_lines(
            f"Lines that were not recognized: {lines['unexplained']} of {lines['total']}"
        )


def render_pass_lines(rows: Iterable[tuple[int, str]]) -> TextPage:
    """Return a page with log lines and their line numbers."""
    page = TextPage()
    page.add_verbatim(*(f"{line:>7}: {text}" for line, text in rows))
    return page


# Codes, errors and lines --------------------------------------------------------------------------


def _add_sections(page: TextPage, **texts: str) -> None:
    for heading, text in texts.items():
        if text:
            page.add_heading(heading.replace("_", " "))
            page.fill(text, 2, "  ")


def render_finding_code(entry: FindingCodeEntry, width: int) -> TextPage:
    """Return the text that explains a finding code."""
    page = TextPage(width)
    page.fill(entry.title, 4, f"{entry.code} ({entry.severity_text}): ", Style.BOLD)
    _add_sections(
        page,
        Cause=entry.cause,
        Effect_in_TensorRT=entry.tensorrt,
        In_a_log=entry.log,
        Fix=entry.fix,
    )
    if entry.code in ATTEMPTED_CODES:
        condition = "the file contains all values that the fix needs"
        if entry.code in UNPROMISED_CODES:
            condition = "existing scales suffice and the prediction improves"
        page.fill(
            f"qdqtool fix --only {entry.code} model.onnx -o fixed.onnx applies this fix at the "
            f"places where {condition}. predict marks these places.",
            2,
            "  ",
        )
    page.add_heading("Applies to")
    varies = any(holds.severity is not None for holds in entry.holds)
    for holds in entry.holds:
        severity = f" ({(holds.severity or entry.severity).word})" if varies else ""
        start = f"  {', '.join(holds.targets)}{severity}: "
        page.fill(f"{holds.evidence_text}: {holds.source}", 4, start)
    other = [t for t in ALL_TARGETS if entry.scope_on(t) is None]
    if other:
        page.fill(f"not on {', '.join(other)}", 2, "  ")
    return page


def finding_code_json(entry: FindingCodeEntry) -> Json:
    """Return the JSON fields of a finding code."""
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


def render_code_list(entries: Iterable[FindingCodeEntry], width: int) -> TextPage:
    """Return a list of all codes with their titles, sorted by severity."""
    page = TextPage(width)
    rows = sorted(entries, key=lambda c: (("error", "warning", "info").index(c.severity), c.code))
    column = max(len(c.code) for c in rows)
    for entry in rows:
        page.fill(entry.title, column + 11, f"{entry.code:<{column}}  {entry.severity.word:<7}  ")
    return page


def render_error(error: KnownError, width: int) -> TextPage:
    """Return the text that explains a known error message."""
    page = TextPage(width)
    page.fill(f"{error.title} ({error.severity})", style=Style.BOLD)
    _add_sections(
        page,
        Cause=error.cause,
        Fix=error.fix,
        Fixed_in=error.fixed,
        Unknown=error.unknown,
        Versions=error.versions,
        Source=error.source,
    )
    if error.codes:
        page.add_heading(
            f"'qdqtool predict' finds this error before the build: {', '.join(error.codes)} "
            f"(qdqtool explain {error.codes[0]})"
        )
    return page


def render_build_method(way: BuildMethod, width: int) -> TextPage:
    """Return the text on a build method: its flags, and how to write its log."""
    page = TextPage(width)
    page.add_heading(f"With {way.title}")
    for heading, text in (
        ("flags, up to TensorRT 10", way.weak),
        ("flags, TensorRT 11", way.strong),
        ("log", way.log),
        ("note", way.care),
        ("source", way.source),
    ):
        page.fill(f"{heading}: {text}", 4, "  ")
    return page


def render_log_line(answer: LineExplanation, width: int) -> TextPage:
    """Return the text that explains a log line by possible passes, the likeliest pass first."""
    page = TextPage(width)
    page.fill(answer.line, 2, "  ", Style.BOLD)
    if answer.note:
        page.add_gap()
        page.fill(answer.note, 0)
    for rule in answer.rules:
        page.add_gap()
        _add_rule(page, rule, 1 if answer.event else len(rule.cases))
    return page


def _add_rule(page: TextPage, rule: PassRule, limit: int) -> None:
    page.fill(rule.does, 4, f"{rule.pass_name}: ")
    if rule.means:
        page.fill(rule.means, 4, "  Meaning: ")
    page.add_lines("  Evidence")
    for name, case in list(rule.cases.items())[:limit]:
        page.fill(f"{case.evidence}: {case.says}", 6, f"  - {name.rpartition('/')[2]}, ")
        if case.builds:
            page.fill(", ".join(case.builds), 8, "      in ")
        if case.source:
            page.fill(case.source, 8, "      ")
    if len(rule.cases) > limit:
        page.fill(
            f"This is the likeliest of {len(rule.cases)} cases, by the names in the line. All "
            f"cases: qdqtool explain {rule.pass_name}",
            4,
            "    ",
        )
    page.add_lines(f"  Rule: {rule.file}", f"  Test: {rule.test}")
