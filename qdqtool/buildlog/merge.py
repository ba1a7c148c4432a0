"""Several files of one build, put together."""

from __future__ import annotations

from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.complete import DAMAGE, judge
from qdqtool.buildlog.records import ParseSection
from qdqtool.buildlog.types import Build, BuiltLayer, Listing
from qdqtool.errors import BuildLogError


def merge(build: Build, other: Build) -> None:
    """Adds to ``build`` what ``other``, read from another file of the same build, knows more.

    Raises:
        BuildLogError: Their layers or versions show that they are of different builds.
    """
    _check_same(build, other)
    if (
        build.source in (BuildSource.PROFILE_JSON, BuildSource.LAYER_JSON, BuildSource.LAYER_INFO)
        and other.source.is_log
    ) or build.source == BuildSource.PROFILE_JSON:
        build.source = other.source
    build.files.extend(other.files)
    for key in (
        "tensorrt",
        "device",
        "command",
        "flags",
        "gpu",
        "options",
        "trace",
        "headings",
        "milestones",
        "placement",
        "bindings",
        "reformats",
        "seconds",
        "passed",
    ):
        if not getattr(build, key) and getattr(other, key):
            setattr(build, key, getattr(other, key))
    build.is_rtx = build.is_rtx or other.is_rtx
    build.builds = max(build.builds, other.builds)
    if build.parse == ParseSection():
        build.parse = other.parse
    if other.profile_rows and not build.profile_rows:
        build.profile_rows, build.profile_total_ms = other.profile_rows, other.profile_total_ms
        build.iterations = other.iterations
    if not build.performance:
        build.performance = other.performance
    if not build.tactics.timed:
        build.tactics = other.tactics
    if build.memory.activation is None:
        build.memory = other.memory
    build.messages.extend(other.messages)
    build.notes.extend(other.notes)
    for key in ("total", "timing", "marked", "blank", "unexplained"):
        setattr(build.lines, key, getattr(build.lines, key) + getattr(other.lines, key))
    build.layers, second, build.listing = _listing(build, other)
    build.second_layers = [*second, *build.second_layers, *other.second_layers]
    build.missing = list(dict.fromkeys(m for m in (*build.missing, *other.missing) if m.startswith(DAMAGE)))
    judge(build)


def _listing(build: Build, other: Build) -> tuple[list[BuiltLayer], list[BuiltLayer], Listing]:
    """The richer listing, with the line numbers of the other; the other."""
    if _wealth(other.layers) > _wealth(build.layers):
        rich, poor, kind = other.layers, build.layers, other.listing
    else:
        rich, poor, kind = build.layers, other.layers, build.listing
    places = {layer.name: layer.line for layer in poor if layer.line}
    for layer in rich:
        layer.line = layer.line or places.get(layer.name, 0)
    return rich, poor, kind


def _wealth(layers: list[BuiltLayer]) -> tuple[bool, bool, int]:
    typed = any(layer.inputs or layer.outputs for layer in layers)
    detailed = any("ParameterType" in layer.extras or layer.onnx_names for layer in layers)
    return typed, detailed, len(layers)


def _check_same(build: Build, other: Build) -> None:
    names = f"{' + '.join(build.files)} and {' + '.join(other.files)}"
    if build.tensorrt and other.tensorrt and build.tensorrt != other.tensorrt:
        raise BuildLogError(f"{names} are of different builds: TensorRT {build.tensorrt} and {other.tensorrt}")
    first = {layer.name for layer in build.layers} or {row.name for row in build.profile_rows}
    second = {layer.name for layer in other.layers} or {row.name for row in other.profile_rows}
    if min(len(first), len(second)) < 3:
        return
    common = len(first & second)
    if 2 * common < min(len(first), len(second)):
        raise BuildLogError(
            f"{names} are of different builds: {common} of {min(len(first), len(second))} layer names in common"
        )
