"""These run everywhere: what holds of qdqtool without torch."""

import runpy
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.qat.backends import BACKENDS

_IMPORTS = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "pytorch_quantization", "modelopt"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
import qdqtool, qdqtool.commands.cli, qdqtool.testing, qdqtool.qat, calibration
qdqtool.predict, qdqtool.insert, qdqtool.verify
assert not {"torch", "pytorch_quantization", "modelopt"} & set(sys.modules)
"""


def test_qdqtool_is_imported_without_torch_and_training_says_what_to_install() -> None:
    code = (
        _IMPORTS
        + """
from qdqtool.errors import QdqtoolError
try:
    qdqtool.qat.prepare
except QdqtoolError as error:
    print(error)
"""
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'qdqtool[qat]'" in done.stdout
    assert done.stdout.count("\n") == 1


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_the_short_examples_run(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("modelopt.torch" if backend == "modelopt" else "pytorch_quantization")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"export_{backend.replace('-', '_')}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "'int8': 21, 'int8_to_int8': 20" in said and "'conversions': 1" in said
    onnx.checker.check_model(next(tmp_path.glob("*.onnx")))
