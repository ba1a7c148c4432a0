import argparse
import sys

from tests.snapshots import difference, path_of, render
from tests.snapshots.cases import SNAPSHOTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.snapshots")
    parser.add_argument("--update", action="store_true", help="renew the files that differ")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SNAPSHOTS))
    options = parser.parse_args()
    if unknown := set(options.names) - SNAPSHOTS.keys():
        parser.error(f"no such snapshot: {', '.join(sorted(unknown))}")
    differ = False
    for name in options.names or SNAPSHOTS:
        text = render(SNAPSHOTS[name]())
        diff = difference(name, text)
        if diff and options.update:
            path_of(name).write_text(text, encoding="utf-8")
            print(f"renewed {path_of(name)}")
        elif diff:
            differ = True
            print(diff)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
