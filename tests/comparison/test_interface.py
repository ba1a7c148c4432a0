import onnx
import pytest

from qdqtool.comparison.interface import compare_interfaces
from qdqtool.comparison.result import Comparison, SideSummary
from qdqtool.comparison.text import summarize_comparison
from qdqtool.formats.build_text import render_comparison
from qdqtool.ir.graph import Model

HEADER = '<ir_version: 8, opset_import: ["": 17]>'
IMAGE, BOXES = "float[1,3,8,8] x", "float[1,4] y"


def model(inputs: str = IMAGE, outputs: str = BOXES) -> Model:
    return Model(onnx.parser.parse_model(f"{HEADER} g ({inputs}) => ({outputs}) {{}}"))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (model(), model(), []),
        (model(), model("uint8[1,3,8,8] x"), ["input x is UINT8 instead of FP32"]),
        (model(), model(outputs="float16[1,4] y"), ["output y is FP16 instead of FP32"]),
        (
            model(),
            model("float[n,3,8,8] x"),
            ["input x has the shape -1x3x8x8 instead of 1x3x8x8"],
        ),
        (model("float[n,3,8,8] x"), model("float[batch,3,8,8] x"), []),
        (model(), model(outputs="float[n,4] y"), []),  # it follows from the input
        (
            model(),
            model(outputs="float[1,5] z"),
            ["output y is named z in B, has the shape 1x5 instead of 1x4"],
        ),
        (model(), model(f"{IMAGE}, float[1] s"), ["input s is only in B"]),
        (model(outputs=f"{BOXES}, float[1] s"), model(), ["output s is only in A"]),
        (model(f"{IMAGE}, float[1] s"), model(f"float[1] s, {IMAGE}"), []),
    ],
)
def test_changes_of_inputs_and_outputs(a: Model, b: Model, expected: list[str]) -> None:
    assert [change.why for change in compare_interfaces(a, b)] == expected


@pytest.mark.parametrize(
    ("count", "summary"), [(2, "input x0 is INT8"), (3, "3 inputs and outputs differ")]
)
def test_many_changes_are_listed_below_the_summary(count: int, summary: str) -> None:
    inputs = (", ".join(f"{dtype}[1] x{i}" for i in range(count)) for dtype in ("float", "int8"))
    comparison = Comparison(*[SideSummary("model", name, False, 0) for name in "ab"])
    comparison.interface = compare_interfaces(*map(model, inputs))
    assert len(comparison.as_json()["interface"]) == count
    assert summary in summarize_comparison(comparison)
    assert str(render_comparison(comparison)).count("is INT8 instead of FP32") == count


def test_interface_change_json() -> None:
    assert compare_interfaces(model(), model("uint8[n,3,8,8] x"))[0].as_json() == {
        "kind": "input",
        "a": {"name": "x", "type": "FP32", "shape": [1, 3, 8, 8]},
        "b": {"name": "x", "type": "UINT8", "shape": [-1, 3, 8, 8]},
        "changes": ["type", "shape"],
        "why": "input x is UINT8 instead of FP32, has the shape -1x3x8x8 instead of 1x3x8x8",
    }
