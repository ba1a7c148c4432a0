"""These run everywhere: what holds of qdqtool without torch."""

from __future__ import annotations

import subprocess
import sys

_IMPORTS = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "pytorch_quantization", "modelopt"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
import qdqtool, qdqtool.cli, qdqtool.testing, qdqtool.qat, calibration
qdqtool.predict, qdqtool.insert, qdqtool.verify
assert not {"torch", "pytorch_quantization", "modelopt"} & set(sys.modules)
"""


def test_qdqtool_is_imported_without_torch() -> None:
    subprocess.run([sys.executable, "-c", _IMPORTS], check=True)


def test_training_without_torch_says_what_to_install() -> None:
    code = _IMPORTS + """
from qdqtool.errors import QdqtoolError
try:
    qdqtool.qat.prepare
except QdqtoolError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'qdqtool[qat]'" in done.stdout
    assert done.stdout.count("\n") == 1
