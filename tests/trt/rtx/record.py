"""Build every experiment with TensorRT-RTX and record the answers: `python -m tests.trt.rtx.record`."""

import json
from pathlib import Path
from typing import Any

import onnx

from qdqtool.types import Precision
from qdqtool.util.outputs import write_text
from tests.trt.rtx.experiments import EXPERIMENTS, FORMS, finish
from tests.trt.rtx.experiments_scales import HALVES, NEW, OLD, SCALES
from tools.fuzz.driver import Lab
from tools.fuzz.grammar import network

TABLE = Path(__file__).parents[2] / "data" / "rtx" / "answers.json"
SEEDS = range(150)


def build_models() -> dict[str, onnx.ModelProto]:
    """Return the models of all experiments, by question."""
    models = {name: finish(make) for name, make in {**EXPERIMENTS, **SCALES}.items()}
    for name, make in OLD.items():
        models[name] = finish(make, 13)
        models[name].opset_import[0].version = 12  # without axis in onnx, but files have one
    models.update({name: finish(make, 19) for name, make in FORMS.items()})
    models.update({name: finish(make, 21) for name, make in NEW.items()})
    models.update({name: finish(make, 19, True) for name, make in HALVES.items()})
    return models


def answer(lab: Lab, model: onnx.ModelProto) -> dict[str, Any]:
    """Build a model; return the status, and the type of each convolution that has a layer."""
    result = lab.build(model)
    types = {n.name: str(n.precision) for n in result.nodes if n.precision != Precision.UNKNOWN}
    return {"status": result.status, **({"types": types} if types else {})}


def main() -> None:
    with Lab() as lab:
        experiments = {name: answer(lab, model) for name, model in build_models().items()}
        networks = {str(seed): answer(lab, network(seed)) for seed in SEEDS}
        version = lab.build(build_models()["through relu"]).version
    lines = [f'"compiler": "TensorRT-RTX {version}, SM86"']
    for title, table in (("experiments", experiments), ("networks", networks)):
        rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table.items())
        lines.append(f'"{title}": {{\n{rows}\n }}')
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    write_text(TABLE, "{" + ",\n ".join(lines) + "}\n")


if __name__ == "__main__":
    main()
