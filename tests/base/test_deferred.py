"""The command line's own onnx: its classes are onnx's, whatever is asked for later is all of it."""

from __future__ import annotations

import subprocess
import sys

_BEHAVES = """
import sys
from qdqtool.base.process import defer
defer()
import onnx
made = onnx.ModelProto(ir_version=8)
assert "onnx.helper" not in sys.modules and "onnx.serialization" not in sys.modules
from onnx import helper, TensorProto
assert helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]).name == "x"
assert "onnx.serialization" not in sys.modules
assert onnx.load_model_from_string(made.SerializeToString()) == made
assert type(onnx).__name__ == "module" and "onnx.serialization" in sys.modules
assert type(made) is onnx.ModelProto is sys.modules["onnx.onnx_ml_pb2"].ModelProto
assert not hasattr(onnx, "nothing")
defer()
assert sys.modules["onnx"] is onnx
"""
_FAILS = """
import sys
from qdqtool.base.process import defer
defer()
import onnx
sys.modules["onnx.serialization"] = None
try:
    onnx.load
except ImportError:
    assert "onnx" not in sys.modules
else:
    raise AssertionError("imported")
"""


def test_onnx_in_parts_is_onnx() -> None:
    for text in (_BEHAVES, _FAILS):
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
