import importlib.util

import pytest

BACKENDS = [
    "pytorch-quantization",
    pytest.param(
        "modelopt",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("modelopt") is None, reason="nvidia-modelopt is not installed"
        ),
    ),
]
