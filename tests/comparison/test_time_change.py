import re
from collections.abc import Callable, Container

import onnx
import pytest

import qdqtool
from qdqtool.formats.build_text import render_comparison
from tests.comparison.test_fp8 import quantized, three_convolutions
from tests.trt.builder import Graph


def silu_network(scale: float | None, has_inner_pairs: bool = False) -> onnx.ModelProto:
    """Return two convolutions that TensorRT merges, and one after their sum, each with a SiLU.

    With inner pairs, as onnxruntime's quantize_static adds them, no SiLU is fused.
    """
    g, weights = Graph(), ("float" if scale is None else "qdq")

    def add_layer(x: str, name: str) -> str:
        y = g.conv(x, name, 256, scale=scale, weights=weights)
        y = g.pair(y, f"{name}.conv") if has_inner_pairs else y
        gate = g.op("Sigmoid", y, f"{name}.gate")
        return g.op("Mul", [y, g.pair(gate, f"{name}.s") if has_inner_pairs else gate], f"{name}.m")

    x = g.input(1, 256, 56, 56)
    return g.model(add_layer(g.add(add_layer(x, "a"), add_layer(x, "b"), "sum"), "c"))


@pytest.mark.parametrize("gpu", ["RTX 4090", "L4"])
@pytest.mark.parametrize(
    "make_models",
    [
        pytest.param(lambda: (silu_network(None), silu_network(0.1)), id="float, INT8"),
        pytest.param(lambda: (silu_network(0.1), silu_network(0.1, True)), id="INT8, inner pairs"),
        pytest.param(lambda: (three_convolutions(), quantized("fp8")), id="float, FP8"),
    ],
)
def test_parts_of_the_time_change_add_up(
    make_models: Callable[[], tuple[onnx.ModelProto, onnx.ModelProto]], gpu: str
) -> None:
    models = make_models()
    comparison = qdqtool.compare(*models, gpu=gpu)
    answer = comparison.as_json()
    parts, nodes = answer["time_change"], {n["name"]: n["change_ms"] for n in answer["nodes"]}
    before, after = (qdqtool.predict(model, gpu=gpu) for model in models)
    nodes_ms = sum(ms or 0.0 for ms in nodes.values())
    assert parts["shared_ms"] == pytest.approx(
        sum_layers(after, nodes) - sum_layers(before, nodes) - nodes_ms, abs=1e-6
    )
    rest_ms = parts["shared_ms"] + parts["layouts_ms"] + parts["other_layers_ms"]
    assert nodes_ms + rest_ms == pytest.approx(
        after.time["total_ms"] - before.time["total_ms"], abs=1e-4
    )
    old, new = ({layer.name: layer.ms or 0.0 for layer in p.layers} for p in (before, after))
    assert all(
        row["ms"] == pytest.approx(new.get(name, 0.0) - old.get(name, 0.0), abs=2e-5)
        for row in parts["largest_other_layers"]
        if (name := row["name"]) in old or name in new
    )
    text = str(render_comparison(comparison)).partition("Time of B minus time of A")[2]
    total, *rows = map(float, re.findall(r"^(?: on|  [nlo]).* ([+-]\S+) ms$", text, re.M))
    assert sum(rows) == pytest.approx(total, abs=2e-4)
    assert sum(map(float, re.findall(r"^\w.*\): ([+-]\S+) ms$", text, re.M))) == pytest.approx(
        nodes_ms, abs=2e-4
    )


def sum_layers(prediction: qdqtool.Prediction, names: Container[str]) -> float:
    """Return the milliseconds of all layers that contain one of the convolutions."""
    layers = {c.layer for c in prediction.convolutions if c.name in names}
    return sum(layer.ms or 0.0 for layer in prediction.layers if layer.name in layers)
