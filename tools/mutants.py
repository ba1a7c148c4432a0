"""Count the mutants that no test detects: ``make mutants N=200 SEED=7 P=qdqtool/trt``.

cosmic-ray changes one place of the code (a comparison, ``and``/``or``, a condition, a number, True
or False), and runs the tests of the package. There are tens of thousands of such mutants, and this
script selects a random sample. cosmic-ray changes files in place, so the script works in a copy of
the repository.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cosmic_ray.work_db import WorkDB

ROOT = Path(__file__).parents[1]
CONFIG = "tools/mutants.toml"
PACKAGES = (
    "calibration",
    "qdqtool/buildlog",
    "qdqtool/comparison",
    "qdqtool/findings",
    "qdqtool/fixing",
    "qdqtool/insertion",
    "qdqtool/findings/lint",
    "qdqtool/trt/rtx",
    "qdqtool/trt",
    "qdqtool/verification",
)
SECONDS = 60  # limit of one test, because a mutant can make a loop endless


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants", description="Count random mutants that tests find."
    )
    parser.add_argument(
        "packages", nargs="*", default=PACKAGES, help=f"default: {', '.join(PACKAGES)}"
    )
    parser.add_argument(
        "-n", "--mutants", type=int, default=200, help="total number, equal for each package"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(10**6),
        help="equal seeds select equal mutants",
    )
    parser.add_argument("--test", action="store_true", help="run the tests of the changed file")
    options = parser.parse_args()
    if options.test:
        return test_changed_file()
    packages = [p.rstrip("/") for p in options.packages]
    for package in packages:
        if not (ROOT / package).is_dir() or not test_folder(ROOT, package).is_dir():
            print(f"{package}: the package or its tests do not exist", file=sys.stderr)
            return 2
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="qdqtool-mutants-") as folder:
        tree = copy_repository(ROOT, Path(folder) / "tree")
        share = -(-options.mutants // len(packages))
        for package in packages:
            run_mutants(tree, package, share, f"{options.seed} {package}")
    return 0


def test_folder(root: Path, package: str) -> Path:
    return root / "tests" / package.removeprefix("qdqtool/")


def copy_repository(root: Path, to: Path) -> Path:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in (
        subprocess.run(command, cwd=root, check=True, capture_output=True)
        .stdout.decode()
        .split("\0")
    ):
        if name and (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    # Compile by hash, because a mutant may have the size and modification time of the original.
    compileall.compile_dir(
        to, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
    )
    for command in (["git", "init", "-q"], ["git", "add", "--all"]):
        subprocess.run(command, cwd=to, check=True)
    return to


def run_mutants(tree: Path, package: str, count: int, seed: str) -> None:
    """Try ``count`` mutants of a package.

    The function prints the mutants that no test detects, and the fraction of detected mutants.
    """
    from cosmic_ray.commands.init import init
    from cosmic_ray.tools.survival_rate import kills_count
    from cosmic_ray.work_db import use_db

    session = str(tree.parent / f"{package.replace('/', '-')}.sqlite")
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    options: dict[str, Any] = {"cwd": tree, "env": environment, "check": True}
    script = [
        sys.executable,
        "-m",
        "pytest",
        "-qx",
        "-p",
        "no:cacheprovider",
        str(test_folder(tree, package)),
    ]
    subprocess.run(script, **options, stdout=subprocess.DEVNULL)  # tests must pass without a mutant
    with use_db(session) as db:
        os.chdir(tree)
        init(sorted(Path(package).rglob("*.py")), db, {})
        places = sample(db, count, random.Random(seed))
        print(f"{package}: {db.num_work_items} of {places} places", flush=True)
    for words in (
        ["cli", "exec", CONFIG, session],
        ["tools.report", "--surviving-only", "--show-diff", session],
    ):
        subprocess.run([sys.executable, "-m", f"cosmic_ray.{words[0]}", *words[1:]], **options)
    with use_db(session) as db:
        killed, tried = kills_count(db), db.num_results
    print(f"{package}: {killed} of {tried} killed, {killed / max(tried, 1):.0%}", flush=True)


def sample(db: WorkDB, count: int, dice: random.Random) -> int:
    """Reduce a session to ``count`` mutants, with at most one mutant for each place.

    Returns:
        The number of places.
    """
    from cosmic_ray.config import load_config

    filters = load_config(CONFIG).sub("filters", "operators-filter")
    excluded = re.compile("|".join(filters["exclude-operators"]))
    places: dict[Any, list[Any]] = {}
    for item in sorted(
        db.work_items, key=lambda i: (i.mutations[0].operator_name, i.mutations[0].occurrence)
    ):
        change = item.mutations[0]
        line = (
            change.module_path.read_text(encoding="utf-8")
            .splitlines()[change.start_pos[0] - 1]
            .strip()
        )
        # Tests need not detect a change of slots=True, of an assertion, or of imports for type
        # checkers.
        if not excluded.match(change.operator_name) and not re.match(
            r"@|assert\b|if TYPE_CHECKING", line
        ):
            places.setdefault((str(change.module_path), *change.start_pos), []).append(item)
    chosen = dice.sample(sorted(places), min(count, len(places)))
    db.clear()
    db.add_work_items([dice.choice(places[place]) for place in chosen])
    return len(places)


def test_changed_file() -> int:
    """Run the tests of the package of the changed file.

    Tests that import the changed module run first.
    """
    command = ["git", "diff", "--name-only"]
    file = Path(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]
    )
    package = next(p for p in PACKAGES if file.is_relative_to(p))

    class OwnTestsFirst:
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items.sort(key=lambda item: f".{file.stem} import" not in item.path.read_text("utf-8"))

    timeout = [f"faulthandler_timeout={SECONDS}", "faulthandler_exit_on_timeout=true"]
    words = ["-qx", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"]
    return pytest.main(
        [*words, *(w for e in timeout for w in ("-o", e)), str(test_folder(Path(), package))],
        [OwnTestsFirst()],
    )


if __name__ == "__main__":
    sys.exit(main())
