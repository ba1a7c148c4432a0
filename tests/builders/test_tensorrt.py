"""The worker for the tensorrt package, with a stand-in for the package: there is no GPU where tests run."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from qdqtool import builders
from qdqtool.errors import BuilderError
from qdqtool.verification.build_model import build_model
from tests.builders.models import saved, two_convolutions

PACKAGE = '''
import enum, json, os
__version__ = "8.5.3"
class ILogger:
    def __init__(self): pass
class NetworkDefinitionCreationFlag: EXPLICIT_BATCH = 0; STRONGLY_TYPED = 1
class ProfilingVerbosity: DETAILED = 2
class LayerInformationFormat: JSON = 1
class BuilderFlag: INT8 = "int8"; FP16 = "fp16"
class Network:
    num_inputs = 0
class Config:
    def __init__(self): self.flags = set()
    def set_flag(self, flag): self.flags.add(flag)
class Plan:
    nbytes = 4
    def __bytes__(self): return b"plan"
class Builder:
    def __init__(self, logger):
        if os.environ.get("FAKE") == "no gpu": raise TypeError("pybind11::init(): factory function returned nullptr")
        self.logger = logger
    def create_network(self, flags):
        assert flags == 1, "explicit batch"
        return Network()
    def create_builder_config(self): self.config = Config(); return self.config
    def build_serialized_network(self, network, config):
        assert config.flags == {"int8", "fp16"}
        if os.environ.get("FAKE") == "crash": os.abort()
        self.logger.log(4, "Original: 4 layers")
        return memoryview(b"plan")
class Error:
    def desc(self): return "Assertion failed: no"
class OnnxParser:
    def __init__(self, network, logger): pass
    num_errors = 1
    def get_error(self, i): return Error()
    def parse_from_file(self, path): return os.environ.get("FAKE") != "refuse"
class Inspector:
    def get_engine_information(self, form):
        tensor = lambda n, t: {"Name": n, "Dimensions": [1, 8], "Format/Datatype": t}
        return json.dumps({"Layers": [
            {"Name": "w + QuantizeLinear_12 + first + Relu_18", "LayerType": "CaskConvolution",
             "Inputs": [tensor("x", "Row major Int8 format")], "Outputs": [tensor("y", "Row major Int8 format")]},
            {"Name": "second", "LayerType": "CaskConvolution", "Inputs": [tensor("y", "Row major linear FP16 format")],
             "Outputs": [tensor("z", "Row major linear FP16 format")]}], "Bindings": ["x", "z"]})
class Engine:
    def create_engine_inspector(self): return Inspector()
class Runtime:
    def __init__(self, logger): pass
    def deserialize_cuda_engine(self, plan): return Engine()
'''


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    home = tmp_path / "site"
    home.mkdir()
    (home / "tensorrt.py").write_text(textwrap.dedent(PACKAGE))
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.setenv("PYTHONPATH", str(home))
    return saved(two_convolutions(), tmp_path)


def test_a_build(model: str, tmp_path: Path) -> None:
    result = build_model(model, "tensorrt", tmp_path / "out", keep_engine=True)
    assert (result.status, result.version) == ("built", "8.5.3")
    assert {n.name: str(n.precision) for n in result.nodes} == {"first": "INT8", "second": "FP16"}
    assert result.engine_path is not None and result.engine_path.read_bytes() == b"plan"


@pytest.mark.parametrize(("case", "status"), [("refuse", "refused"), ("crash", "crashed")])
def test_refusal_and_crash(case: str, status: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", case)
    assert builders.build(model, "tensorrt").status == status


def test_no_gpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "no gpu")
    with pytest.raises(BuilderError, match="finds no usable GPU"):
        builders.build(model, "tensorrt")
