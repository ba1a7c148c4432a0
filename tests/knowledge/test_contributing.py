"""The examples of docs/contributing.md, applied to a copy of the package: each works with the files that it names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import qdqtool

HOME = Path(qdqtool.__file__).parent
PAGE = HOME.parent / "docs" / "contributing.md"
EXAMPLE = re.compile(r"```(?:toml|python|tsv)\n# (\S+)\n(.*?)```", re.DOTALL)

# Where a line goes that is neither a whole file nor the end of one: behind this text.
BEHIND = {
    "qdqtool/trt/targets.py": "    for t in (\n",
    "qdqtool/model/operators.py": "_TABLE: tuple[Operator, ...] = (\n",
    "qdqtool/trt/passes/slice_removal.py": "from qdqtool.trt.passes._infra import",
}

CHECKS = {
    "error": """
from qdqtool.explain.errors import lookup
known = lookup("[E] tensor images was lost by the example")
assert known is not None and known.id == "example-lost-tensor" and known.codes == ("ZP-NONZERO",)
""",
    "code": """
from qdqtool.explain.codes import find
code = find("example_code")
assert code is not None and code.on("trt8.6").evidence == "documented" and code.on("trt10") is None
""",
    "way": """
from qdqtool.explain.ways import way_named
assert way_named("example").name == "example-runtime" and way_named("example").flags("trt8.5").startswith("example")
""",
    "gpu": """
from qdqtool.timing.gpus import find
assert find("example nine thousand").name == "Example 9000" and find("Example 9000").has_int8
""",
    "target": """
from qdqtool import predict
from tests.trt.builder import Graph
g = Graph()
prediction = predict(g.model(g.conv(g.input(1, 16, 8, 8), "c", 16)), "trt9.9")
assert prediction.summary()["int8"] == 1 and str(prediction.convolutions[0].evidence) == "assumed"
""",
    "operator": """
import numpy as np
from qdqtool import predict
from tests.trt.builder import Graph
for op, int8 in (("ExampleMove", True), ("Unknown", False)):
    g = Graph()
    x = g.op(op, g.conv(g.input(1, 16, 8, 8), "a", 16), "move")
    prediction = predict(g.model(g.conv(x, "b", 16)))
    assert prediction.convolution("a").int8_in_int8_out is int8, op
""",
    "pass": """
from qdqtool import predict
from qdqtool.explain.lines import explain_line
from tests.trt.builder import Graph
g = Graph()
prediction = predict(g.model(g.resize(g.input(1, 8, 8, 8), "up")))
assert [(e.pass_name, e.case) for e in prediction.trace if e.subject == "up"] == [("ExamplePass", "ExamplePass/lonely")]
assert explain_line("Running: ExamplePass on up").rules[0].means.startswith("What a line of it means")
""",
    "case": """
from qdqtool.trt.passes.slice_removal import SHOWN
assert SHOWN.evidence == "seen" and SHOWN.build_names() == ("resnet18-qat-rtx2000-trt8510",)
""",
}


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with every example in it."""
    root = tmp_path_factory.mktemp("contributing")
    shutil.copytree(HOME, root / "qdqtool", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in EXAMPLE.findall(PAGE.read_text("utf-8")):
        path = root / name
        if not path.exists():
            path.write_text(text, "utf-8")
            continue
        old = path.read_text("utf-8")
        if name in BEHIND:
            before, mark, after = old.partition(BEHIND[name])
            assert mark, name
            if name.endswith("removal.py"):  # behind the whole line of the import
                line, _, after = after.partition("\n")
                new = f"{before}{mark}{line}\nfrom qdqtool.knowledge.evidence import seen\n{text}{after}"
            else:
                new = f"{before}{mark}{text.rstrip()},\n{after}"
        elif name.endswith("meanings.toml"):
            new = old.replace("[passes]\n", text, 1)
        elif name.endswith("errors.toml"):
            new = old.replace("[[error]]", f"{text}\n[[error]]", 1)  # the first that is found decides
        else:
            new = f"{old.rstrip()}\n{text}"
        path.write_text(new, "utf-8")
    pipeline = root / "qdqtool" / "trt" / "pipeline.py"
    mark = "from qdqtool.trt.passes.scale_activation_fusion"
    text = pipeline.read_text("utf-8").replace("ConcatRemoval)", "ConcatRemoval, ExamplePass)")
    text = text.replace(mark, f"from qdqtool.trt.passes.example_pass import ExamplePass\n{mark}", 1)
    pipeline.write_text(text, "utf-8")
    return root


def test_every_example_has_a_check() -> None:
    assert len(EXAMPLE.findall(PAGE.read_text("utf-8"))) == len(CHECKS) + 1  # a pass has two
    sections = {s.split()[-1] for s in re.findall(r"^## (.*?) \(", PAGE.read_text("utf-8"), re.MULTILINE)}
    assert {"text", "code", "build", "GPU", "target", "operator", "pass"} <= sections


@pytest.mark.parametrize("check", CHECKS)
def test_example(check: str, changed: Path) -> None:
    paths = os.pathsep.join([str(changed), str(HOME.parent)])
    done = subprocess.run(
        [sys.executable, "-c", CHECKS[check]], env={**os.environ, "PYTHONPATH": paths}, cwd=changed, check=False,
        capture_output=True, text=True, timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
