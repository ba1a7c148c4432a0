"""The examples that need no training framework run as their first lines say."""

import subprocess
import sys
from pathlib import Path

import onnx

from tests.calibration.nets import write_pictures
from tests.insertion.nets import detector

OUTPUT = "/model.3/act/Mul_output_0"
EXAMPLES = Path(__file__).parents[1] / "examples"


def test_edit_with_graphsurgeon_cuts_and_quantizes(tmp_path: Path) -> None:
    onnx.save(detector(), tmp_path / "float.onnx")
    write_pictures(tmp_path / "images", 4, 64, 64)
    arguments = ["float.onnx", "images", "--outputs", OUTPUT, "-o", "out.onnx"]
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "edit_with_graphsurgeon.py"), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "3 of 3 convolutions in INT8" in run.stdout
    model = onnx.load(tmp_path / "out.onnx")
    assert [output.name for output in model.graph.output] == [OUTPUT]
    quantizers = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert quantizers and all(node.name.startswith("qdq/") for node in quantizers)
