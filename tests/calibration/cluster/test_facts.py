"""Versions and numbers that have to be equal on all machines of a cluster."""

import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from qdqtool.runtime import sessions

# find_spec does not import: collecting all tests does not load Dask.
pytestmark = pytest.mark.skipif(
    find_spec("distributed") is None, reason="the extra `cluster` is not installed"
)

# Replaces Dask, whose import takes half of the time.
PRINT_FACTS = """
import json, sys, types
for name in ("distributed", "distributed.diagnostics", "distributed.diagnostics.plugin"):
    sys.modules[name] = types.SimpleNamespace(WorkerPlugin=object)
from calibration.cluster.worker import worker_facts
print(json.dumps(worker_facts()))
"""


def test_facts_are_equal_in_another_process() -> None:
    from calibration.cluster.worker import describe_difference, worker_facts

    command = [sys.executable, "-c", PRINT_FACTS]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ours = worker_facts()
    assert json.loads(output) == ours
    assert describe_difference(json.loads(output), ours, mixed_cpus=False) == ""


def test_probe_network_outputs_depend_on_every_operator() -> None:
    from calibration.cluster.worker import probe_network

    model = probe_network()
    weights = np.concatenate([numpy_helper.to_array(t).ravel() for t in model.graph.initializer])
    assert -0.5 <= weights.min() < -0.49 and 0.49 < weights.max() <= 0.5
    assert abs(weights.mean()) < 0.02
    x = np.random.default_rng(0).uniform(-0.5, 0.5, (1, 3, 48, 48)).astype(np.float32)
    outputs = sessions.open_session(model.SerializeToString(), 1).run(None, {"x": x})
    expected = ReferenceEvaluator(model).run(None, {"x": x})
    for info, array, reference in zip(model.graph.output, outputs, expected, strict=True):
        assert np.ptp(array) > 0, f"{info.name}: a constant output cannot differ between machines"
        np.testing.assert_allclose(array, reference, rtol=2e-3, atol=2e-4, err_msg=info.name)


@pytest.mark.parametrize(
    "fact", ["qdqtool", "onnxruntime", "onnx", "numpy", "pillow", "libjpeg", "test network"]
)
def test_difference_of_each_fact(fact: str) -> None:
    from calibration.cluster.worker import describe_difference, worker_facts

    ours = worker_facts()
    theirs = {**ours, fact: "other"}
    message = describe_difference(theirs, ours, mixed_cpus=False)
    assert message and "\n" not in message
    # --mixed-cpus permits other numbers, but no other versions.
    assert bool(describe_difference(theirs, ours, mixed_cpus=True)) == (fact != "test network")
