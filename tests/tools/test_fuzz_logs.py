"""A hundred damaged files (two hundred in slow tests), and one line of 100 MB.

``make fuzz-logs`` runs ten thousand files.
"""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from qdqtool.buildlog.read import read_build, split_lines
from qdqtool.util import limits
from tests.buildlog import samples
from tests.notes import note
from tests.slow import slow_after
from tools.fuzz_logs.check import check
from tools.fuzz_logs.mutate import mutated, seeds


def test_fuzz_logs_seeds_are_read() -> None:
    assert [check(seed) for seed in seeds()] == ["read"] * len(seeds())


@pytest.mark.parametrize("part", slow_after(1, range(2)))
def test_fuzz_logs_damaged_files_are_handled(part: int) -> None:
    outcomes = [check(mutated(number)) for number in range(part * 100, (part + 1) * 100)]
    assert outcomes.count("read") > 20  # most mutations are mild


_READ_ONE_LINE = """
import io, re, sys
from qdqtool.buildlog.read import read_build
class Source(io.RawIOBase):
    def __init__(self):
        self.left, self.head = 100_000_000, sys.argv[1].encode()
        self.tail = b"\\nOriginal: 5 layers\\n"
    def read(self, size=-1):
        if self.head:
            data, self.head = self.head, b""
        elif self.left > 0:
            data = b"Tactic: (PWN(a + b), " * (min(size, self.left, 1 << 20) // 21 + 1)
            self.left -= len(data)
        else:
            data, self.tail = self.tail, b""
        return data
build = read_build(Source())
status = open("/proc/self/status").read()  # getrusage would count the memory of the process that started this one
print(build.milestones[-1].layers, build.lines.total, int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) // 1024)
"""


_FIRST = "[V] Original: 4 layers\n"


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak memory is read from /proc"
)
@pytest.mark.parametrize(
    "head", [_FIRST + "[V] [TRT] ", _FIRST + "Layer(Cask): ", _FIRST + "Name: "]
)
def test_log_line_of_100_mb_takes_little_memory(head: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _READ_ONE_LINE, head],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    layers, lines, memory = map(int, done.stdout.split())
    assert (layers, lines) == (5, 3) and memory < 150


def test_log_long_lines_are_truncated() -> None:
    blocks = [b"first\nlo", *[b"x" * limits.LOG_LINE] * 5, b"end\nlast\nopen"]
    lines = [line for group in split_lines(iter(blocks)) for line in group]
    assert [len(line) for line in lines] == [5, limits.LOG_LINE, 4, 4]
    assert (lines[0], lines[2], lines[3]) == (b"first", b"last", b"open")


def test_log_number_of_records_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test uses a hundredth of the limit.

    The limit is 300,000 lines, a hundred times those of a real build.
    """
    assert limits.LOG_RECORDS == 300_000
    monkeypatch.setattr(limits, "LOG_RECORDS", 3000)
    line = b"[V] [TRT] Removing /some/layer/of/the/network/number\n"
    build = read_build(io.BytesIO(samples.trtexec_log().encode() + line * 3050))
    assert 2900 < len(build.trace) <= 3000
    assert note("too-long", records=3000) in build.notes and not build.complete
