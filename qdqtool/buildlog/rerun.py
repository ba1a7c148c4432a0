"""The trtexec command that makes a listing with precisions, for a version."""

from __future__ import annotations

from qdqtool.buildlog.types import Build

_WANTED = ("--verbose", "--profilingVerbosity=detailed", "--dumpLayerInfo", "--exportLayerInfo=layers.json",
           "--dumpProfile", "--exportProfile=profile.json")
_OURS = ("--verbose", "--profilingVerbosity", "--dumpLayerInfo", "--exportLayerInfo", "--dumpProfile",
         "--exportProfile", "--separateProfileRun", "--nvtxMode")
_PRECISION = ("--int8", "--fp16", "--best", "--bf16", "--fp8", "--int4")


def rerun_commands(build: Build) -> dict[str, str]:
    """Commands that build the same engine again and print what the file at hand lacks, by TensorRT version.

    Where the version is known there is one command; else one for TensorRT 8.2 to 10 and one for 11 (whose trtexec
    refuses precision flags and always times layers in a run of their own). TensorRT 8.0 and 8.1 know neither
    ``--profilingVerbosity`` nor ``--exportLayerInfo``: there the verbose log has the listing.
    """
    version = _number(build.tensorrt)
    kept = _kept(build, version)
    if version is None:
        typed = [*kept, *(flag for flag in ("--int8", "--fp16") if flag not in kept)]
        untyped = [word for word in kept if word not in _PRECISION]
        return {"8.2 to 10": _line(typed, old=True), "11": _line(untyped, old=False)}
    assert build.tensorrt is not None
    if version < (8, 2):
        words = [*kept, "--verbose", "--nvtxMode=verbose", "--dumpProfile", "> build.log 2>&1"]
        return {build.tensorrt: " ".join(words)}
    return {build.tensorrt: _line(kept, old=version < (11, 0))}


def _kept(build: Build, version: tuple[int, int] | None) -> list[str]:
    words = build.command.split() if build.command else ["trtexec", "--onnx=model.onnx"]
    kept = [word for word in words if word.split("=")[0] not in _OURS and not word.startswith("--saveEngine")]
    if not build.command and version is not None and version < (11, 0):
        kept += ["--int8", "--fp16"]
    return kept


def _line(words: list[str], *, old: bool) -> str:
    extra = ("--separateProfileRun",) if old else ()
    return " ".join([*words, *_WANTED, *extra, "> build.log 2>&1"])


def _number(version: str | None) -> tuple[int, int] | None:
    if version is None:
        return None
    pieces = version.split(".")
    try:
        return int(pieces[0]), int(pieces[1]) if len(pieces) > 1 else 0
    except ValueError:
        return None
