from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.qat.backends import BACKENDS

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_short_examples_run(backend: str, tmp_path: Path) -> None:
    script = EXAMPLES / f"export_{backend.replace('-', '_')}.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "'int8': 21, 'int8_to_int8': 20" in done.stdout and "'conversions': 1" in done.stdout
    onnx.checker.check_model(next(tmp_path.glob("*.onnx")))
