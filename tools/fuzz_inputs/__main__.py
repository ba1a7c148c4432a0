"""Give damaged inputs to every command.

``python -m tools.fuzz_inputs [--seconds 60 | --cases N] [--seed S]``.
"""

import argparse
import collections
import gc
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from qdqtool.__main__ import OBJECTS_BETWEEN_COLLECTIONS
from tools.fuzz_inputs.check import MEMORY_MB, Bench


def main() -> int:
    """Run cases, and print counts, the slowest case and the memory. Return 1 if a case fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--cases", type=int, default=None)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--processes",
        type=int,
        default=0,
        help="number of first cases that run in separate processes",
    )
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock")
    parser.add_argument(
        "--keep", default=None, metavar="DIR", help="folder for the files of failing cases"
    )
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int(time.time())
    max_cases = options.cases if options.cases is not None else 10**9
    deadline = time.monotonic() + (options.seconds if options.seconds is not None else 10**9)
    print(f"seed {seed}", flush=True)
    codes: collections.Counter[int] = collections.Counter()
    slowest, largest = (0.0, 0), (0, 0)
    started = time.monotonic()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="qdqtool-fuzz-") as temporary:
        bench = Bench(Path(temporary))
        gc.freeze()  # so that 100,000 garbage collections do not visit these objects
        gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
        for number in range(options.first, options.first + max_cases):
            if time.monotonic() > deadline:
                break
            as_process = number - options.first < options.processes
            begin = time.process_time()
            try:
                codes[
                    bench.check_process(number, seed) if as_process else bench.check(number, seed)
                ] += 1
            except KeyboardInterrupt:
                break
            except AssertionError as error:
                failures += 1
                print(f"case {number}: {error}", flush=True)
                if options.keep:
                    Path(options.keep).mkdir(parents=True, exist_ok=True)
                    for file in Path(temporary).glob("mutated-*"):
                        shutil.copy(file, Path(options.keep) / f"{seed}-{number}-{file.name}")
            for file in Path(temporary).glob("mutated-*"):
                file.unlink()  # left by a failed case
            if (codes.total() + failures) % 1000 == 0:
                print(f"{codes.total() + failures} cases", flush=True)
            slowest = max(slowest, (time.process_time() - begin, number))
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            if memory > largest[0]:
                largest = memory, number
    print(
        f"{codes.total() + failures} cases in {time.monotonic() - started:.0f} s: exit codes "
        f"{dict(sorted(codes.items()))}, {failures} failures; slowest {slowest[0]:.1f} s of processor time "
        f"(case {slowest[1]}); {largest[0]} MB (case {largest[1]})"
    )
    return int(bool(failures) or largest[0] > MEMORY_MB)


if __name__ == "__main__":
    sys.exit(main())
