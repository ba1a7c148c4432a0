import numpy as np
import onnx
import onnxruntime
import pytest

import qdqtool
from qdqtool.errors import ModelError
from qdqtool.ir.modelfile import load
from tests.errors import has
from tests.trt.builder import Graph

LEAKY = """
    <domain: "pkg", opset_import: ["": 17]>
    Leaky <slope: float = 0.25> (a) => (b)
    { middle = Neg (a)
      [act] c = LeakyRelu <alpha: float = @slope> (middle)
      b = Neg (c) }"""
MODELS = {
    "one call": "g (float[1, 4] x) => (float[1, 4] y) { [first] y = pkg.Leaky (x) }" + LEAKY,
    "two calls": """g (float[1, 4] x) => (float[1, 4] y)
        { [one] t = pkg.Leaky <slope = 0.5> (x)
          [two] y = pkg.Leaky (t) }"""
    + LEAKY,
    "calls without names, names in use": """g (float[1, 4] x) => (float[1, 4] y)
        { t = pkg.Leaky (x)
          "t/middle" = Abs (t)
          "y/c" = pkg.Leaky ("t/middle")
          y = Neg ("y/c") }"""
    + LEAKY,
    "nested, attribute passed on": """g (float[1, 4] x) => (float[1, 4] y)
        { [outer] y = pkg.Outer <factor = 0.125> (x) }"""
    + LEAKY
    + """
        <domain: "pkg", opset_import: ["": 17, "pkg": 1]>
        Outer <factor> (a) => (b)
        { [inner] t = pkg.Leaky <slope: float = @factor> (a)
          b = Abs (t) }""",
    "in branches": """g (float[1, 4] x, bool flag) => (float[1, 4] y)
        { y = If (flag) <
            then_branch = yes () => (float[1, 4] t) { [a] t = pkg.Leaky (x) },
            else_branch = no () => (float[1, 4] e) { e = Neg (x) }> }"""
    + LEAKY,
    "branches inside": """g (float[1, 4] x, bool flag) => (float[1, 4] y)
        { [one] t = pkg.Choose (x, flag)
          [two] y = pkg.Choose (t, flag) }
        <domain: "pkg", opset_import: ["": 17, "pkg": 1]>
        Choose (a, f) => (b)
        { double = Add (a, a)
          b = If (f) <
            then_branch = yes () => (r) { r = pkg.Leaky (double) },
            else_branch = no () => (s) { s = Neg (double) }> }"""
    + LEAKY,
    "output is an input": """g (float[1, 4] x) => (float[1, 4] y)
        { t, y = pkg.Both (x) }
        <domain: "pkg", opset_import: ["": 17]>
        Both (a) => (a, b) { b = Neg (a) }""",
    "optional input and output missing": """g (float[1, 4] x) => (float[1, 4] y)
        { y = pkg.Limit (x) }
        <domain: "pkg", opset_import: ["": 17]>
        Limit (a, low, high) => (b, unused) { b = Clip (a, low, high)  unused = Neg (b) }""",
    "older operator set": """g (float[1, 4] x) => (float[1, 4] y) { [f] y = pkg.Old (x) }
        <domain: "pkg", opset_import: ["": 11]>
        Old (a) => (b)
        { u = Unsqueeze <axes: ints = [0]> (a)
          s = Squeeze <axes: ints = [0]> (u)
          b = Relu (s) }""",
    "domain of ONNX": """g (float[1, 4] x) => (float[1, 4] y) { y = Strange (x) }
        <domain: "", opset_import: ["": 17]>
        Strange (a) => (b) { b = Neg (a) }""",
    "unused function": "g (float[1, 4] x) => (float[1, 4] y) { y = Neg (x) }" + LEAKY,
}
X = np.asarray([[-2, -1, 1, 3]], np.float32)


def leaky(x: np.ndarray, slope: float = 0.25) -> np.ndarray:
    return np.where(x > 0, slope * x, x).astype(np.float32)


# Results by hand, since no runtime reads all of these functions.
EXPECTED = {
    "one call": lambda x, flag: leaky(x),
    "two calls": lambda x, flag: leaky(leaky(x, 0.5)),
    "calls without names, names in use": lambda x, flag: -leaky(abs(leaky(x))),
    "nested, attribute passed on": lambda x, flag: abs(leaky(x, 0.125)),
    "in branches": lambda x, flag: leaky(x) if flag else -x,
    "branches inside": lambda x, flag: leaky(2 * leaky(2 * x)) if flag else 4 * x,
    "output is an input": lambda x, flag: -x,
    "optional input and output missing": lambda x, flag: x,
    "older operator set": lambda x, flag: np.maximum(x, 0),
    "domain of ONNX": lambda x, flag: -x,
    "unused function": lambda x, flag: -x,
}


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 17, "pkg": 1]>' + text)


def call_chain(length: int, body: str) -> str:
    header = '<domain: "pkg", opset_import: ["": 17, "pkg": 1]>'
    functions = [f"{header} F{k} (a) => (b) {{ {body.format(next=k + 1)} }}" for k in range(length)]
    last = f"{header} F{length} (a) => (b) {{ b = Relu (a) }}"
    return "\n".join(["g (float[1] x) => (float[1] y) { y = pkg.F0 (x) }", *functions, last])


def run(proto: onnx.ModelProto, flag: bool) -> np.ndarray:
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    feeds = {"x": X, "flag": np.asarray(flag)}
    return session.run(None, {i.name: feeds[i.name] for i in proto.graph.input})[0]


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_inlined_model_computes_the_same(name: str, flag: bool) -> None:
    before = parse(MODELS[name])
    text = before.SerializeToString()
    after = load(before).proto
    assert before.SerializeToString() == text and not after.functions
    np.testing.assert_array_equal(run(after, flag), EXPECTED[name](X, flag))


def test_names_tell_the_call() -> None:
    model = load(parse(MODELS["nested, attribute passed on"]))
    assert [n.name for n in model.nodes][1] == "outer/inner/act"
    assert {"outer/inner/middle", "outer/t", "y"} <= set(model.producers)
    assert model.inlined_functions == ("Leaky", "Outer")
    assert model.function_node_names["outer/inner/act"] == "act"


def test_unnamed_calls_are_named_by_their_outputs() -> None:
    model = load(parse(MODELS["calls without names, names in use"]))
    assert "t/act" in [n.name for n in model.nodes]
    assert len(set(model.producers)) == 8  # no tensor lost to an equal name


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            """g (float[1] x) => (float[1] y) { y = pkg.A (x) }
            <domain: "pkg", opset_import: ["pkg": 1]> A (a) => (b) { b = pkg.B (a) }
            <domain: "pkg", opset_import: ["pkg": 1]> B (a) => (b) { b = pkg.A (a) }""",
            "recursive-function",
        ),
        ("g (float[1, 4] x) => (float[1, 4] y) { y = pkg.Leaky (x, x) }" + LEAKY, "node-damaged"),
        (call_chain(1201, "b = pkg.F{next} (a)"), "nested-too-deeply"),
        (call_chain(30, "t = pkg.F{next} (a) b = pkg.F{next} (t)"), "too-many-nodes"),
        (
            """g (float[1] x) => (float[1] y) { y = pkg.Drop <at = [0]> (x) }
            <domain: "pkg", opset_import: ["": 11]>
            Drop <at> (a) => (b) { b = Squeeze <axes: ints = @at> (a) }""",
            "functions-not-inlined",
        ),
    ],
    ids=[
        "recursive",
        "too many inputs",
        "deep chain",
        "doubling calls",
        "operator that cannot be converted",
    ],
)
def test_functions_that_cannot_be_inlined(text: str, code: str) -> None:
    with pytest.raises(ModelError, check=has(code)):
        load(parse(text))


def blocks(body: str) -> onnx.ModelProto:
    g = Graph()
    x = g.input(1, 16, 16, 16)
    for number in (0, 1):
        weights = np.random.default_rng(number).normal(0, 0.1, (16, 16, 3, 3))
        arguments = [x, g.const(f"w{number}", weights, np.float32)]
        arguments += [g.const(f"s{number}", 0.05, np.float32), g.const(f"z{number}", np.int8(0))]
        x = g.op("Block", arguments, f"layer{number}", domain="pkg")
    proto = g.model(x)
    header = '<domain: "pkg", opset_import: ["": 13]> Block (x, w, s, z) => (y)'
    proto.functions.append(onnx.parser.parse_function(header + body))
    proto.opset_import.add(domain="pkg", version=1)
    return proto


def quantized_blocks() -> onnx.ModelProto:
    return blocks("""
        { [in_Q] xq = QuantizeLinear (x, s, z)
          [in_DQ] xd = DequantizeLinear (xq, s, z)
          [w_Q] wq = QuantizeLinear (w, s, z)
          [w_DQ] wd = DequantizeLinear (wq, s, z)
          [Conv] c = Conv <pads = [1, 1, 1, 1]> (xd, wd)
          [Relu] y = Relu (c) }""")


def test_insert_quantizes_convolutions_of_functions() -> None:
    model = blocks("""
        { [Conv] c = Conv <pads = [1, 1, 1, 1]> (x, w)
          [Relu] y = Relu (c) }""")
    data = np.random.default_rng(0).normal(0, 1, (4, 16, 16, 16)).astype(np.float32)
    insertion = qdqtool.insert(model, [{"x": data[i : i + 1]} for i in range(4)])
    assert "inlined" in [note.code for note in insertion.notes]
    assert qdqtool.predict(insertion.model).summary()["int8"] == 2


def test_predict_names_convolutions_and_layers_of_functions() -> None:
    # TensorRT's parser names layers by the nodes of the function, and numbers repeated names.
    prediction = qdqtool.predict(quantized_blocks())
    first, second = prediction.convolutions
    assert (first.name, second.name) == ("layer0/Conv", "layer1/Conv")
    assert first.layer.endswith("Conv + Relu")
    assert second.layer and second.layer != first.layer and prediction.summary()["int8"] == 2
    assert not [f for f in prediction.findings if f.code == "FUNC-LOCAL"]


@pytest.mark.parametrize(
    ("target", "is_refused"), [("8.0", True), ("8.6", True), ("9.0", False), ("rtx1.7", False)]
)
def test_parsers_before_9_refuse_functions(target: str, is_refused: bool) -> None:
    codes = [f.code for f in qdqtool.predict(quantized_blocks(), target).findings]
    assert ("FUNC-LOCAL" in codes) == is_refused


def test_fix_writes_the_model_without_functions() -> None:
    fixed = qdqtool.fix(quantized_blocks(), "8.6")
    assert [a.code for a in fixed.applied] == ["FUNC-LOCAL"] and not fixed.proto.functions
    assert "FUNC-LOCAL" not in [f.code for f in fixed.after.findings]


def test_compare_and_extract_see_functions() -> None:
    model = quantized_blocks()
    assert qdqtool.compare(model, load(model).copy()).summary()["lost_int8"] == 0
    assert "Conv" in [
        n.op_type for n in qdqtool.extract(model, node="layer1/Conv", hops=1).proto.graph.node
    ]
