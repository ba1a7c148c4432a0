import importlib.util

import pytest

_MODELOPT = importlib.util.find_spec("modelopt") is None
BACKENDS = [
    "pytorch-quantization",
    pytest.param(
        "modelopt", marks=pytest.mark.skipif(_MODELOPT, reason="nvidia-modelopt is not installed")
    ),
]
