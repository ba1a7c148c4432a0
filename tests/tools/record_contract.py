"""Record the contract of the present code: `python -m tests.tools.record_contract`.

Record the contract for a release, or after additions. Never record it to make a failing test pass,
because a record is a promise to users.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from qdqtool.commands import COMMANDS
from tests import contract
from tests.contract import Description


def record() -> Description:
    with tempfile.TemporaryDirectory() as folder:
        contract.prepare(Path(folder))
        runs = contract.run_all(Path(folder))
    modules = {name: contract.describe_module(name) for name in contract.MODULES}
    # The classes of these modules are results: users read their attributes and construct none.
    for module in ("qdqtool", "qdqtool.fixing.api", "qdqtool.qat"):
        for value in modules[module].values():
            if value["kind"] == "class":
                del value["parameters"]
    commands = {name: contract.describe_command(name) for name in COMMANDS}
    return {"python": modules, "commands": commands, "runs": runs}


def as_lines(sections: Description) -> Iterator[str]:
    for section, entries in sections.items():
        rows = [
            f"{json.dumps(entry)}: "
            + (
                json.dumps(values, sort_keys=True)
                if section == "runs"
                else "{\n"
                + ",\n".join(
                    f"  {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in values.items()
                )
                + "\n }"
            )
            for entry, values in entries.items()
        ]
        yield f"{json.dumps(section)}: {{\n " + ",\n ".join(rows) + "\n}"


if __name__ == "__main__":
    text = "{\n" + ",\n".join(as_lines(record())) + "\n}\n"
    contract.RECORDS["0.2"].write_text(text, encoding="utf-8")
