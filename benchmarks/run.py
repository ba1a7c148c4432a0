"""Run benchmarks: `python benchmarks/run.py [NAME ...]`.

Without names, all benchmarks run that need no data and no missing packages.

Each benchmark is a script in this folder with a `main()`, and with a docstring that describes the
measurement. Arguments after `--` go to the script:
`python benchmarks/run.py attention -- --table vit`.

`python benchmarks/run.py --compare COMMIT [CASE ...]` compares the speed and the memory of two
versions. It runs whole processes of COMMIT and of the present sources in turns, and prints ratios
with intervals (`benchmarks/speed.py`).
"""

import argparse
import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from benchmarks.speed import CASES, HEAD, USUAL, compare  # noqa: E402

DATA = {  # benchmarks that need data of the user; they run only if they are named
    "accuracy": "your models and images",
    "coco": "a YOLO model, and COCO's images and annotations",
    "detection_counts": "detectors and images",
    "evaluation_images": "a detector and images",
    "fix": "your models and images",
    "pairs": "a folder of published measurements",
    "qat": "a trained checkpoint and photographs",
    "tune": "your models and images",
}


def benchmarks() -> dict[str, str]:
    """Return the first line of the docstring of each script with a main(), by name."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        has_main = any(
            isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body
        )
        if has_main and path != Path(__file__).resolve():
            found[path.stem] = (ast.get_docstring(tree) or "").splitlines()[0]
    return found


def missing(name: str) -> str:
    """Return the data or the missing packages that a benchmark needs; empty if it can run."""
    if name in DATA:
        return DATA[name]
    tree = ast.walk(ast.parse((HERE / f"{name}.py").read_text("utf-8")))
    modules = {m for node in tree for m in imported(node)}
    return ", ".join(sorted(m for m in modules if importlib.util.find_spec(m) is None))


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [str(node.module).partition(".")[0]]
    return [n.name.partition(".")[0] for n in node.names] if isinstance(node, ast.Import) else []


def main() -> int:
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, passed = arguments[:at], arguments[at + 1 :]
    known = benchmarks()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--list", action="store_true", help="list the benchmarks with descriptions")
    parser.add_argument(
        "--compare",
        metavar="COMMIT",
        help=f"compare with a version: {', '.join(CASES)} [default: {' '.join(USUAL)}]",
    )
    parser.add_argument("--runs", type=int, default=7, help="number of turns of --compare")
    parser.add_argument(
        "--model", type=Path, help="model for the cases of --compare with photographs"
    )
    parser.add_argument("--photos", type=Path, help="folder of photographs")
    parser.add_argument(
        "--page", type=Path, help="write the table of --compare between its marks into this page"
    )
    options = parser.parse_args(arguments)
    choices = CASES if options.compare else known
    unknown = [n for n in options.names if n not in choices]
    if unknown:
        parser.error(
            f"{'case' if options.compare else 'benchmark'} '{unknown[0]}' is unknown; "
            f"choose from {', '.join(choices)}"
        )
    if options.runs < 1:
        parser.error("--runs: give at least 1")
    if options.compare:
        given = (path and path.resolve() for path in (options.model, options.photos))
        rows = compare(options.compare, options.names or USUAL, options.runs, *given)
        # Imported late, because the peak memory of a child process is at least that of its parent.
        import common

        common.publish("speed", common.table(HEAD, rows), options.page)
        return 0
    if options.list:
        print("\n".join(f"{name:<20} {text}" for name, text in known.items()))
        return 0
    failed = []
    for name in options.names or known:
        why = "" if options.names else missing(name)
        if why:
            print(f"== {name}: skipped; needs {why}", flush=True)
            continue
        print(f"== {name}: {known[name]}", flush=True)
        if subprocess.run(
            [sys.executable, str(HERE / f"{name}.py"), *passed], cwd=HERE.parent
        ).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
