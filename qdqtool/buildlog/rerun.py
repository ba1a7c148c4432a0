"""The trtexec command that makes a listing with precisions, for a version."""

from __future__ import annotations

from qdqtool.buildlog.types import Build
from qdqtool.trt.targets import Trtexec, trtexec_of_version

_WANTED = ("--verbose", "--profilingVerbosity=detailed", "--dumpLayerInfo", "--exportLayerInfo=layers.json",
           "--dumpProfile", "--exportProfile=profile.json")
_OURS = ("--verbose", "--profilingVerbosity", "--dumpLayerInfo", "--exportLayerInfo", "--dumpProfile",
         "--exportProfile", "--separateProfileRun", "--nvtxMode")
_PRECISION = ("--int8", "--fp16", "--best", "--bf16", "--fp8", "--int4")


def rerun_commands(build: Build) -> dict[str, str]:
    """Commands that build the same engine again and print what the given file lacks, by TensorRT version.

    Where the version is known there is one command; else one for TensorRT 8.2 to 10 and one for 11. A version whose
    trtexec lists no layers has the listing in its verbose log.
    """
    program = None if build.tensorrt is None else trtexec_of_version(build.tensorrt)
    kept = _kept(build, program)
    if program is None or build.tensorrt is None:
        typed = [*kept, *(flag for flag in ("--int8", "--fp16") if flag not in kept)]
        untyped = [word for word in kept if word not in _PRECISION]
        return {"8.2 to 10": _line(typed, old=True), "11": _line(untyped, old=False)}
    if not program.lists_layers:
        words = [*kept, "--verbose", "--nvtxMode=verbose", "--dumpProfile", "> build.log 2>&1"]
        return {build.tensorrt: " ".join(words)}
    return {build.tensorrt: _line(kept, old=program.precision_flags)}


def _kept(build: Build, program: Trtexec | None) -> list[str]:
    words = build.command.split() if build.command else ["trtexec", "--onnx=model.onnx"]
    kept = [word for word in words if word.split("=")[0] not in _OURS and not word.startswith("--saveEngine")]
    if not build.command and program is not None and program.precision_flags:
        kept += ["--int8", "--fp16"]
    return kept


def _line(words: list[str], *, old: bool) -> str:
    extra = ("--separateProfileRun",) if old else ()
    return " ".join([*words, *_WANTED, *extra, "> build.log 2>&1"])
