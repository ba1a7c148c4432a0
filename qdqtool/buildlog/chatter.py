"""Lines of a TensorRT log that are understood and hold nothing to keep.

Beginnings of lines, from real logs of 8.0 to 8.5 and of TensorRT-RTX 1.7, from the sources of onnx-tensorrt and
trtexec, and from published excerpts of TensorRT 10.

Warnings and errors become one record for each wording.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from qdqtool.buildlog.records import Message
from qdqtool.buildlog.types import Build

_START_UP = """
Registered plugin creator
Plugin creator already registered
Plugin creator registration
Trying to load shared library
Loaded shared library
Using cublas
Using cuBLAS
Using cuDNN
CUDA lazy loading
TF32 is
Successfully created plugin
Loading supplied plugin library
Note: The application clock rates
Loading standard plugins
Start parsing network model
Finish parsing network model
Finished parsing network model
----------
Created symbolic
"""
_PARSING = """
Kernel weights are not set yet
Convolution input dimensions
Convolution output dimensions
Deconvolution input dimensions
Deconvolution output dimensions
Running deconvolution with
Original shape
Unsqueezing from
Squeezing from
Normalized from
Weight at index
Weight initialization
Casting to type
Using opA
GEMM: using
Running resize layer with
GlobalAveragePool operators
Truncating double weight
Static shape
Plugin in
No importer registered
Your ONNX model has been generated
"""
_OPTIMIZER = """
Applying generic optimizations
Generating copy for
Fusing convolution weights from
After scale fusion
Applying ScaleNodes fusions
Trying to split Reshape
FP32 and INT8 precisions have been specified
InternalBuildFlags
Compiler backend
Building graph using backend
ForeignNode {
Subgraph compilation
 (foreignNode)
(foreignNode)
"""
_TUNING = """
Local timing cache in use
Global timing cache in use
Timing cache disabled
Constructing optimization profile
Reserving memory for
Some tactics do not have sufficient workspace
Detected
Total number of blocks
Total number of generated kernels
Total per-runner
Pre-optimized block assignment
Optimized block assignment
Finalize:
Kernel:
Disabling unused tactic source
STILL ALIVE
For layer
Wrote
Using
"""
_RUNNING = """
Allocated activation device memory
Deserialization required
Setting persistentCacheLimit
Setting a default quantization params
Timing trace has
Warmup completed
Starting inference
Input binding for
Output binding for
Created input binding
Created output binding
Explanations of the performance
The profiling verbosity was set
The e2e network timing
To show e2e network timing
Capturing CUDA graph
Successfully captured CUDA graph
Switching optimization profile
Trace averages
Loading engine
Loaded engine
Saved engine
Layer Information
[MS]
"""
_BEGINNINGS = tuple(
    line
    for block in (_START_UP, _PARSING, _OPTIMIZER, _TUNING, _RUNNING)
    for line in block.splitlines()
    if line.strip()
)

_UNMISTAKABLE = (
    *(line for line in _BEGINNINGS if len(line.split()) > 2 or line.startswith("[")),
    "Engine built in", "Engine generation completed", "Engine deserialized in", "Created engine",
    "Graph construction and",
    "Graph optimization time", "Formats and tactics selection", "Total Host Persistent", "Total Device Persistent",
    "Total Scratch Memory", "Total Activation Memory", "Total Weights Memory", "Max Scratch Memory",
    "Loaded engine size", "[MemUsage", "[BlockAssignment]",
)


def is_chatter(text: str) -> bool:
    """Whether a line is one of TensorRT's that holds nothing to keep, or a note that someone wrote into the log."""
    return text.startswith(_BEGINNINGS) or text.endswith(" to plan file.") or _is_note(text)


def is_unmistakable(text: str) -> bool:
    """Whether a line of chatter could be TensorRT's only: most beginnings of three words or more are."""
    return text.startswith(_UNMISTAKABLE)


def _is_note(text: str) -> bool:
    """TensorRT's own words are ASCII: a line in another script that nothing else knew is a translation or a comment."""
    return sum(c.isalpha() and ord(c) >= 0x2E80 for c in text[:200]) >= 2


_EXCEPTION = re.compile(
    r"(?:[\w.]*(?:Error|Exception): |Traceback \(most recent call last\)|trtexec: |Aborted|Segmentation)"
)
_MAX_MESSAGES = 2000
_MAX_TEXT = 2000


class Messages:
    """Collects messages in ``build.messages``; ``keep`` says whether there is room for another record."""

    def __init__(self, build: Build, keep: Callable[[str], bool]) -> None:
        self._build = build
        self._keep = keep
        self._known: dict[tuple[str, str], Message] = {}
        self._last: Message | None = None

    def add(self, level: str, text: str, line: int) -> None:
        """Takes a warning or error."""
        key = (level, text[:500])
        found = self._known.get(key)
        if found is None:
            found = Message(level, text[:_MAX_TEXT], line, 0)
            if len(self._known) < _MAX_MESSAGES and self._keep(text[:_MAX_TEXT]):
                self._known[key] = found
                self._build.messages.append(found)
        found.count += 1
        self._last = found

    def continued(self, text: str, line: int) -> bool:
        """An unstamped line after a warning or error belongs to it; an exception is an error of its own."""
        if _EXCEPTION.match(text):
            self.add("E", text, line)
            return True
        if self._last is None:
            return False
        if len(self._last.text) < _MAX_TEXT:
            self._last.text += "\n" + text[:500]
        return True

    def end(self) -> None:
        """A stamped line of another kind: what follows belongs to no message."""
        self._last = None
