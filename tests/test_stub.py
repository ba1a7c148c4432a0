"""Type checkers and editors see the parameters that functions get from options."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import qdqtool
from tests.tools.make_stub import PACKAGES, path_of, stub


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_stub_is_current(package: ModuleType) -> None:
    text = path_of(package).read_text(encoding="utf-8")
    assert text == stub(package), "run python -m tests.tools.make_stub"


def test_stub_types_are_type_aliases() -> None:
    """A checker that cannot see onnx or numpy would take them for variables."""
    for package in PACKAGES:
        for module, name in re.findall(r"^from (\S+) import (\w+)$", stub(package), re.MULTILINE):
            home = importlib.import_module(module)
            if not isinstance(getattr(home, name), type):
                source = Path(str(home.__file__)).read_text(encoding="utf-8")
                assert re.search(rf"^{name}: TypeAlias = ", source, re.MULTILINE), (
                    f"{module}.{name}"
                )


USER = """import calibration, qdqtool

qdqtool.predict("m.onnx", "trt8.5", way="python").convolutions
qdqtool.insert("m.onnx", method="max", target="trt8.5", size=(64, 64)).save("q.onnx")
qdqtool.predict("m.onnx", tarket="trt8.5")
qdqtool.insert("m.onnx", method=3)
calibration.collect("m.onnx", "images", ["x"], cache="c.npz")
calibration.collect("m.onnx", "images", ["x"], cahce="c.npz")
calibration.open_data("images", [], max_images="3")
qdqtool.predict("m.onnx", "trt8.5").convolution_names
qdqtool.insert("m.onnx").saved("q.onnx")
"""


@pytest.mark.slow
def test_mypy_reads_the_stubs(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    files = [str(path_of(package)) for package in PACKAGES]
    files += [str(inspect.getsourcefile(kind)) for kind in (qdqtool.Prediction, qdqtool.Insertion)]
    arguments = [
        "--strict",
        "--config-file=",
        "--follow-imports=skip",
        "--cache-dir",
        os.devnull,
        "--no-site-packages",
    ]  # other modules and libraries would take nine tenths of the time
    process = subprocess.run(
        [sys.executable, "-m", "mypy", *arguments, "user.py", *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"MYPYPATH": str(path_of(PACKAGES[0]).parents[1])},
        timeout=300,
    )
    errors = [
        line for line in process.stdout.splitlines() if re.match(r"user\.py:\d+: error: ", line)
    ]
    assert [line.split(":")[1] for line in errors] == ["5", "6", "8", "9", "10", "11"], (
        process.stdout + process.stderr
    )
    assert 'Unexpected keyword argument "tarket"' in errors[0] and 'expected "str"' in errors[1]
    assert (
        '"Prediction" has no attribute' in errors[4] and '"Insertion" has no attribute' in errors[5]
    )
