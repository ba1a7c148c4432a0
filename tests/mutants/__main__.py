"""``python -m tests.mutants``: see the package."""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.mutants.sample import Mutant, draw
from tests.mutants.trial import Trials, changed_lines, copy_of, mirrored_tests

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "calibration", "qdqtool/buildlog", "qdqtool/explain", "qdqtool/fixing", "qdqtool/insertion", "qdqtool/lint",
    "qdqtool/rtx", "qdqtool/trt", "qdqtool/verification",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Which random mutants do tests see?")
    parser.add_argument("packages", nargs="*", help=f"as {', '.join(PACKAGES)} (the default)")
    parser.add_argument("-n", "--mutants", type=int, default=200, help="in all, the same share for each package")
    parser.add_argument("--seed", type=int, default=None, help="draws the same mutants again")
    parser.add_argument("--keep", type=Path, help="write every mutant and what became of it (JSON lines)")
    parser.add_argument("--again", type=Path, help="only the survivors of a file written by --keep")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    packages = [p.rstrip("/") for p in options.packages] or [p for p in PACKAGES if (ROOT / p).is_dir()]
    for package in packages:
        if not mirrored_tests(ROOT, package):
            print(f"{package}: no such package, or no tests of its own", file=sys.stderr)
            return 2
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="qdqtool-mutants-") as folder:
        tree = copy_of(ROOT, Path(folder) / "tree")
        chosen = _again(options.again) if options.again else _drawn(tree, packages, options.mutants, seed)
        return _run(tree, chosen, options.keep)


def _drawn(tree: Path, packages: list[str], count: int, seed: int) -> dict[str, list[Mutant]]:
    chosen = {}
    for i, package in enumerate(packages):
        share = count // len(packages) + (i < count % len(packages))
        chosen[package], places = draw(tree, package, share, random.Random(f"{seed} {package}"))
        print(f"{package}: {len(chosen[package])} of {places} places", flush=True)
    return chosen


def _again(path: Path) -> dict[str, list[Mutant]]:
    chosen: dict[str, list[Mutant]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row.pop("result") == "survived":
            chosen.setdefault(row.pop("package"), []).append(Mutant(**row))
    return chosen


def _run(tree: Path, chosen: dict[str, list[Mutant]], keep: Path | None) -> int:
    results: dict[str, Counter[str]] = {}
    survivors: list[Mutant] = []
    kept = keep.open("w") if keep else None
    for package, mutants in chosen.items():
        trials = Trials(tree, package)
        if not trials.pass_unchanged:
            print(f"{package}: its tests fail without a mutant:\n{trials.told}", file=sys.stderr)
            return 2
        print(f"{package}: {len(trials.took)} tests in {trials.seconds:.0f} s", flush=True)
        counts = results[package] = Counter()
        for mutant in sorted(mutants, key=lambda m: (m.file, m.line, m.column)):
            result, spent = trials.try_mutant(mutant)
            counts[result] += 1
            if result == "survived":
                survivors.append(mutant)
            if kept:
                kept.write(json.dumps({"package": package, "result": result, **asdict(mutant)}) + "\n")
                kept.flush()
            old, new = changed_lines(tree, mutant)
            print(f"{result:<8} {spent:5.1f} s  {mutant.file}:{mutant.line}  {old}  ->  {new}", flush=True)
    print()
    for package, counts in results.items():
        total = counts.total()
        seen = total - counts["survived"]
        share = f"{seen / total:.0%}" if total else "-"
        print(f"{package:<24} {seen:3} of {total:3} killed  {share}")
    for mutant in survivors:
        old, new = changed_lines(tree, mutant)
        print(f"\nsurvived: {mutant.file}:{mutant.line}\n  - {old}\n  + {new}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the child that runs tests goes with it
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; the tree is as it was", file=sys.stderr)
        sys.exit(130)
