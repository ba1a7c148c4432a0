"""Writes tests/data/contract.json from the code at hand: ``python -m tests.tools.record_contract``.

Run it on a release, never to make a failing test pass: what it wrote for 0.1 is what users were promised.
"""

import json
import tempfile
from pathlib import Path

from tests import contract


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        contract.prepare(Path(folder))
        found = {
            "python": contract.python_api(),
            "commands": contract.command_line(),
            "runs": contract.runs(Path(folder)),
        }
    contract.DATA.write_text(json.dumps(found, sort_keys=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
