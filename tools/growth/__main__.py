"""Measure time and memory of commands on families of graphs.

``python -m tools.growth [--sample] [--only FAMILY]``.
"""

import argparse
import sys

from tools.growth.families import FAMILIES
from tools.growth.measure import (
    CASES,
    COUNTED_IN_SAMPLE,
    SAMPLE,
    WORK,
    find_excess_calls,
    measure_growth,
)


def main(arguments: list[str] | None = None) -> int:
    """Measure cases, and return 1 if a cost grows too fast."""
    parser = argparse.ArgumentParser(prog="python -m tools.growth", description=__doc__)
    parser.add_argument(
        "--sample", action="store_true", help="measure one case in 23, which takes ten minutes"
    )
    parser.add_argument("--only", choices=FAMILIES, metavar="FAMILY", help="one family")
    parser.add_argument("--command", choices=WORK, metavar="COMMAND", help="one command")
    options = parser.parse_args(arguments)

    def is_chosen(case: tuple[str, str]) -> bool:
        return options.command in (None, case[0]) and options.only in (None, case[1])

    failures = []
    for command, family in filter(is_chosen, COUNTED_IN_SAMPLE):
        excess = find_excess_calls(command, family)
        failures += [f"{command}, {family}: calls from {a} to {b} nodes" for a, b in excess]
        print(f"{command}, {family}: calls counted", flush=True)
    for command, family in filter(is_chosen, SAMPLE if options.sample else CASES):
        failures += measure_growth(command, family)
    for line in failures:
        print(f"grows too fast: {line}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
