"""Record the answers of qdqtool, and compare them with the answers of another commit.

``python tools/snapshot.py --help``.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.snapshots import comparing, recording  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return 1 if more than texts differ, else 0."""
    parser = argparse.ArgumentParser(prog="tools/snapshot.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="run all scenarios and write their hashes")
    record.add_argument("output", type=Path, metavar="OUT.json")
    record.add_argument(
        "--repo", type=Path, default=ROOT, help="checkout to run (default: this one)"
    )
    record.add_argument(
        "--keep", type=Path, metavar="DIR", help="folder for the JSON that is hashed"
    )
    compare = commands.add_parser("compare", help="list the entries of two records that differ")
    compare.add_argument("records", type=Path, nargs=2, metavar="RECORD.json")
    compare.add_argument(
        "--kept",
        type=Path,
        nargs=2,
        metavar="DIR",
        help="the folders that --keep wrote, to show what differs",
    )
    diff = commands.add_parser("diff", help="record two commits, and compare the records")
    diff.add_argument("revision", metavar="REV", help="the older commit")
    diff.add_argument("other", nargs="?", metavar="REV", help="default: the files as they are")
    diff.add_argument("--keep", type=Path, metavar="DIR", help="folder for the JSON that differs")
    for command in (record, diff):
        command.add_argument(
            "--quick", action="store_true", help="run the quick set, which takes about a minute"
        )
        command.add_argument(
            "--only", action="append", default=[], metavar="GROUP", help="a group, or group/name"
        )
        command.add_argument("--jobs", type=int, default=2, metavar="N")
    options = parser.parse_args(arguments)
    if options.command == "record":
        return _record(options)
    if options.command == "compare":
        return _compare(*options.records, options.kept)
    return _diff(options)


def _record(options: argparse.Namespace) -> int:
    recorded = recording.record(
        options.repo.resolve(), options.only, options.quick, options.jobs, options.keep
    )
    recording.write(recorded, options.output)
    return 0


def _compare(before: Path, after: Path, kept: list[Path] | None) -> int:
    comparison = comparing.compare(recording.read(before), recording.read(after))
    print(comparison.describe(*(kept or ())))
    return comparison.exit_code


def _diff(options: argparse.Namespace) -> int:
    """Record both versions, and record different scenarios again to show the differences."""
    with tempfile.TemporaryDirectory(prefix="qdqtool-snapshot-") as temporary:
        folder = Path(temporary)
        repositories = [_checkout(options.revision, folder / "before")]
        repositories.append(_checkout(options.other, folder / "after") if options.other else ROOT)
        try:
            records = [
                recording.record(repo, options.only, options.quick, options.jobs)
                for repo in repositories
            ]
            comparison = comparing.compare(*records)
            names = sorted({entry.partition("|")[0] for entry in comparison.differing})
            kept = [(options.keep or folder) / f"kept-{side}" for side in ("before", "after")]
            if names:
                for repo, keep in zip(repositories, kept, strict=True):
                    recording.record(repo, names, options.quick, options.jobs, keep)
            print(comparison.describe(*kept))
            return comparison.exit_code
        finally:
            for repo in repositories:
                if repo != ROOT:
                    _git("worktree", "remove", "--force", str(repo))


def _checkout(revision: str, folder: Path) -> Path:
    _git("worktree", "add", "--quiet", "--detach", str(folder), revision)
    return folder


def _git(*words: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *words], check=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (recording.RecordingError, json.JSONDecodeError, OSError) as error:
        print(f"snapshot: {error}", file=sys.stderr)
        sys.exit(2)
