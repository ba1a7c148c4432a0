"""Build all experiments with TensorRT-RTX, and record the answers.

`python -m tools.rtx.record [fp8]`.

``answers.json`` has the answers in INT8 for SM86. ``answers_fp8.json`` has the answers for SM89:
the same experiments in FP8, the experiments of ``experiments_fp8``, and random networks. For SM120,
``answers_fp8.json`` has only the answers that differ from those for SM89.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx

from qdqtool.ir.precision import Precision
from qdqtool.util.files import write_text
from tools.fuzz.driver import Lab
from tools.fuzz.fp8 import convert_to_fp8
from tools.fuzz.grammar import network
from tools.rtx.experiments import EXPERIMENTS, FORMS, finish
from tools.rtx.experiments_fp8 import FP8
from tools.rtx.experiments_scales import HALVES, NEW, OLD, SCALES

TABLE = Path(__file__).parents[2] / "tests" / "data" / "rtx" / "answers.json"
FP8_TABLE = TABLE.with_name("answers_fp8.json")
SEEDS = range(150)
FP8_SEEDS = range(80)
MIXED_SEEDS = range(200, 230)
CAPABILITIES = (89, 120)


def build_models() -> dict[str, onnx.ModelProto]:
    models = {name: finish(make) for name, make in {**EXPERIMENTS, **SCALES}.items()}
    for name, make in OLD.items():
        models[name] = finish(make, 13)
        models[name].opset_import[0].version = 12  # opset 12 has no axis, but some files have one
    models.update({name: finish(make, 19) for name, make in FORMS.items()})
    models.update({name: finish(make, 21) for name, make in NEW.items()})
    models.update({name: finish(make, 19, True) for name, make in HALVES.items()})
    return models


def build_fp8_models() -> dict[str, onnx.ModelProto]:
    """Return the valid models of all experiments in FP8, by question."""
    models = {name: convert_to_fp8(model) for name, model in build_models().items()}
    models = {name: model for name, model in models.items() if _is_valid(model)}
    return {**models, **{name: make() for name, make in FP8.items()}}


def _is_valid(model: onnx.ModelProto) -> bool:
    """Return whether opset 19 has the operators, and the operators accept their input types."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    return True


def fp8_networks() -> dict[str, onnx.ModelProto]:
    fp8 = {f"fp8 {seed}": network(seed, "fp8") for seed in FP8_SEEDS}
    return {**fp8, **{f"mixed {seed}": network(seed, "mixed") for seed in MIXED_SEEDS}}


def answer(lab: Lab, model: onnx.ModelProto) -> dict[str, Any]:
    """Build a model, and return the status, and the type of each convolution that has a layer."""
    result = lab.build(model)
    types = {n.name: str(n.precision) for n in result.nodes if n.precision != Precision.UNKNOWN}
    return {"status": result.status, **({"types": types} if types else {})}


def write_table(path: Path, compiler: str, tables: dict[str, dict[str, Any]]) -> None:
    lines = [f'"compiler": "{compiler}"']
    for title, table in tables.items():
        rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table.items())
        lines.append(f'"{title}": {{\n{rows}\n }}')
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "{" + ",\n ".join(lines) + "}\n")


def record_int8() -> None:
    with Lab() as lab:
        experiments = {name: answer(lab, model) for name, model in build_models().items()}
        networks = {str(seed): answer(lab, network(seed)) for seed in SEEDS}
        version = lab.build(build_models()["through relu"]).version
    tables = {"experiments": experiments, "networks": networks}
    write_table(TABLE, f"TensorRT-RTX {version}, SM86", tables)


def record_fp8() -> None:
    questions = {"experiments": build_fp8_models(), "networks": fp8_networks()}
    tables: dict[str, dict[str, Any]] = {}
    for title, models in questions.items():
        answers = [list(answer_all(capability, models.values())) for capability in CAPABILITIES]
        tables[title] = {
            name: first if first == second else {**first, "SM120": second}
            for name, first, second in zip(models, *answers, strict=True)
        }
    with Lab(CAPABILITIES[0]) as lab:
        version = lab.build(questions["experiments"]["through relu"]).version
    write_table(FP8_TABLE, f"TensorRT-RTX {version}, SM89 and SM120", tables)


def answer_all(capability: int, models: Iterable[onnx.ModelProto]) -> Iterator[dict[str, Any]]:
    with Lab(capability) as lab:
        for model in models:
            yield answer(lab, model)


if __name__ == "__main__":
    record_fp8() if "fp8" in sys.argv[1:] else record_int8()
