"""Give damaged logs to the log reader.

``python -m tools.fuzz_logs [--files 10000] [--base 0] [--first 0]``.
"""

import argparse
import collections
import resource
import sys
import time

from tools.fuzz_logs.check import check
from tools.fuzz_logs.mutate import mutated

MEMORY_MB = 700  # memory of the process, with numpy and onnx; a file has at most 8 MB


def main() -> int:
    """Read the files in one process, and print counts, the slowest file and the memory.

    The first defect ends the run.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--base", type=int, default=0, help="seed of the files")
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--seconds", type=float, default=None, help="stop after this time")
    options = parser.parse_args()
    print(f"base {options.base}", flush=True)
    counts: collections.Counter[str] = collections.Counter()
    slowest = (0.0, 0)
    started = time.perf_counter()
    done = 0
    for number in range(options.first, options.first + options.files):
        if options.seconds is not None and time.perf_counter() - started > options.seconds:
            break
        done += 1
        data = mutated(number, options.base)
        begin = time.process_time()
        try:
            counts[check(data)] += 1
        except Exception:
            print(f"file {number} (base {options.base}, {len(data)} bytes):", file=sys.stderr)
            raise
        slowest = max(slowest, (time.process_time() - begin, number))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{done} files in {time.perf_counter() - started:.0f} s: {counts['read']} read, "
        f"{counts['refused']} refused; "
        f"slowest {slowest[0]:.2f} s (file {slowest[1]}); {memory:.0f} MB of memory"
    )
    return int(memory > MEMORY_MB)


if __name__ == "__main__":
    sys.exit(main())
