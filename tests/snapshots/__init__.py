"""Snapshots of all texts for users: help, answers, errors, findings and notes.

Each file `tests/snapshots/<name>.txt` holds cases: a heading, its text as printed at 80 columns, and a line between
cases. `tests/snapshots/test_snapshots.py` compares the files with the present. After rewording something:

    python -m tests.snapshots                    # show what differs
    python -m tests.snapshots --update           # renew all files
    python -m tests.snapshots --update predict   # renew some

Then read `git diff tests/snapshots`. All other tests look at codes, attributes and data, so that rewording a message
changes these files alone. Numbers that were measured here are shown as `#.#`, because they differ between machines.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path

HOME = Path(__file__).parent

Cases = Mapping[str, str]  # heading to text


def path_of(name: str) -> Path:
    return HOME / f"{name}.txt"


def render(cases: Cases) -> str:
    return f"\n{'-' * 80}\n\n".join(
        f"{heading}\n{text.rstrip()}\n" for heading, text in cases.items()
    )


def difference(name: str, text: str) -> str:
    path = path_of(name)
    before = path.read_text("utf-8") if path.exists() else ""
    return "\n".join(
        difflib.unified_diff(
            before.splitlines(), text.splitlines(), f"{path.name} (snapshot)", "now", lineterm=""
        )
    )
