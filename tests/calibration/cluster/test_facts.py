"""What is held equal between machines."""

import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from qdqtool.model import sessions

#: Only looked for: reading all tests does not load it.
pytestmark = pytest.mark.skipif(
    find_spec("distributed") is None, reason="the extra `cluster` is not installed"
)


_ELSEWHERE = """
import json, sys, types
for name in ("distributed", "distributed.diagnostics", "distributed.diagnostics.plugin"):
    sys.modules[name] = types.SimpleNamespace(WorkerPlugin=object)  # loading Dask takes half of the time, for nothing
from calibration.cluster.worker import facts
print(json.dumps([facts(), facts(3)]))
"""


def test_the_probe() -> None:
    from calibration.cluster import worker as facts

    here = facts.facts()
    out = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE], capture_output=True, text=True, check=True
    ).stdout
    for there in json.loads(out):
        assert there == here
        assert facts.difference(there, here, mixed_cpus=False) == ""
    model = facts.probe_network()
    x = facts._numbers((1, 3, 48, 48), 1)
    assert -0.5 <= x.min() < -0.49 and 0.49 < x.max() <= 0.5 and abs(x.mean()) < 0.02
    ours = sessions.open_session(model.SerializeToString(), 1).run(None, {"x": x})
    for name, found, wanted in zip(
        [o.name for o in model.graph.output],
        ours,
        ReferenceEvaluator(model).run(None, {"x": x}),
        strict=True,
    ):
        assert np.ptp(found) > 0, name  # an output that is the same everywhere would tell nothing
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-4, err_msg=name)


def test_each_difference_is_told() -> None:
    from calibration.cluster import worker as facts

    ours = facts.facts()
    for name in (*facts.VERSIONS, "source", "probe"):
        theirs = {**ours, name: "other", "processor": "Other 9000"}
        told = facts.difference(theirs, ours, mixed_cpus=False)
        assert told and "\n" not in told, name
        assert ("Other 9000" in told) == (name == "probe"), name
        assert bool(facts.difference(theirs, ours, mixed_cpus=True)) == (name != "probe"), name
