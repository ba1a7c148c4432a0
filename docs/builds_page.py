"""The page of the builds: every build, its source, and which rules rest on it."""

from __future__ import annotations

from collections.abc import Iterator

from qdqtool.knowledge.tables import Case
from qdqtool.trt.pipeline import cases
from qdqtool.trt.targets import BUILDS, Build
from qdqtool.types import Evidence

_HEAD = """# Builds and the rules that rest on them

Made from the cases that passes (`qdqtool/trt/passes`) and operators (`qdqtool/model/operators.py`) list. A line of a
simulated trace is emitted through one case only; the JSON of a prediction names the cases behind each convolution, and
`qdqtool explain "<a line of a log>"` leads from a log to them. Numbers behind a build are lines of its log.
"""


def page() -> str:
    """The page as Markdown."""
    return "\n".join((_HEAD, *_builds(), *_seen(), *_others()))


def _builds() -> Iterator[str]:
    yield "## Builds\n"
    yield "| build | TensorRT | GPU | flags | network | parts | source | in the truth run | rules made from it |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for build in BUILDS.values():
        yield _row(build)
    yield ""


def _row(build: Build) -> str:
    cells = (
        f"`{build.name}`", build.tensorrt, build.gpu or "not stated", build.flags, build.network, build.parts,
        build.source, "yes" if build.graph else "no", "yes" if build.made_rules else "no",
    )
    return f"| {' | '.join(cells)} |"


def _seen() -> Iterator[str]:
    yield "## Rules seen in builds\n"
    yield "Rules that one build alone shows are marked **one**: another build may refute them.\n"
    yield "| rule | what TensorRT does | builds | |"
    yield "|---|---|---|---|"
    for name, case in cases().items():
        if case.evidence == Evidence.SEEN:
            marked = "**one**" if len(case.build_names()) == 1 else str(len(case.build_names()))
            yield f"| `{name}` | {_says(case)} | {', '.join(case.builds)} | {marked} |"
    yield ""


def _others() -> Iterator[str]:
    for evidence, title in (
        (Evidence.DOCUMENTED, "Rules that are documented"), (Evidence.ASSUMED, "Rules that are assumed"),
    ):
        yield f"## {title}\n"
        yield "| rule | what TensorRT does | why it is taken so |"
        yield "|---|---|---|"
        for name, case in cases().items():
            if case.evidence == evidence:
                yield f"| `{name}` | {case.says} | {case.source} |"
        yield ""


def _says(case: Case) -> str:
    return f"{case.says} ({case.source})" if case.source else case.says
