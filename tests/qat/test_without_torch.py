import runpy
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.qat.backends import BACKENDS

SCRIPT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "pytorch_quantization", "modelopt"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
import qdqtool, qdqtool.commands.cli, qdqtool.testing, qdqtool.qat, calibration
qdqtool.predict, qdqtool.insert, qdqtool.verify
assert not {"torch", "pytorch_quantization", "modelopt"} & set(sys.modules)
from qdqtool.errors import QdqtoolError
try:
    qdqtool.qat.prepare
except QdqtoolError as error:
    print(error.code, error)
"""


def test_import_without_torch() -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True
    )
    assert process.stdout.startswith("missing-package ")
    assert "pip install 'qdqtool[qat]'" in process.stdout and process.stdout.count("\n") == 1


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_export_example_runs(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("modelopt.torch" if backend == "modelopt" else "pytorch_quantization")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"export_{backend.replace('-', '_')}.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert "'int8': 21, 'int8_to_int8': 20" in output and "'conversions': 1" in output
    onnx.checker.check_model(next(tmp_path.glob("*.onnx")))
