from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qdqtool.evidence import Evidence
from qdqtool.ir.precision import Precision
from qdqtool.reasons.inputs import InputNotDequantized
from qdqtool.trt.passes.quantize_double_input_nodes import QuantizeDoubleInputNodes
from tests.trt.builder import Graph
from tests.trt.passes.step import Line, PassResult, end_of, run_pass, weakest_evidence

FLOAT_OUT = [
    ("Running", "c"),
    ("fusing", "(c.in.DQ and c.w.DQ)", "c"),
    ("Removing", "c.in.DQ"),
    ("Removing", "c.w.DQ"),
]
INT8_OUT = [
    ("Running", "c"),
    ("fusing", "p.Q", "c"),
    ("fusing", "(c.in.DQ and c.w.DQ)", "c"),
    ("Removing", "p.Q"),
    ("Removing", "c.in.DQ"),
    ("Removing", "c.w.DQ"),
]


def run(
    build: Callable[[Graph, str], list[str]], target: str = "trt8.5", **options: Any
) -> PassResult:
    g = Graph()
    out = g.conv(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "c", **options)
    return run_pass(g.model(*build(g, out)), QuantizeDoubleInputNodes, target=target)


@pytest.mark.parametrize("weights", ["qdq", "tensor", "int8"])
def test_output_without_q_is_float(weights: str) -> None:
    result = run(lambda g, out: [g.op("Softmax", out, "s")], weights=weights)
    assert (result.lines, result.reasons) == (FLOAT_OUT, [("c", "output-not-quantized")])
    assert [(r.node, r.op) for r in result.records[0].consumers] == [("s", "Softmax")]
    assert result.layer("c").int8 and not result.layer("c").int8_out


@pytest.mark.parametrize(
    ("options", "target"),
    [
        *(({"weights": weights}, "trt8.5") for weights in ("qdq", "tensor", "int8")),
        # centernet-resnet34-qat-trt80, 3 of 3: INT8 to INT8, weights per axis 1.
        ({"k": 2, "stride": 2, "op": "ConvTranspose"}, "trt8.0"),
    ],
)
def test_output_with_q_is_int8(options: dict[str, Any], target: str) -> None:
    result = run(lambda g, out: [g.op("Softmax", g.pair(out, "p"), "s")], target, **options)
    assert (result.lines, result.reasons) == (INT8_OUT, [])
    assert result.layer("c").out.name == "p.Q:0"
    assert weakest_evidence(result.layer("c")) == Evidence.SEEN


def normalized(g: Graph, out: str) -> list[str]:
    out = g.pool(g.relu(g.bn(out, "bn"), "r"), "pool")
    return [g.op("Softmax", g.pair(out, "p"), "s")]


@pytest.mark.parametrize(
    ("outputs", "lines", "reasons"),
    [
        # resnet18-qat-rtx2000-trt8510, line 2699: QuantizeLinear_15 is after the MaxPool.
        pytest.param(normalized, INT8_OUT, [], id="past BatchNormalization, Relu and MaxPool"),
        # yolo-resnet18-orin-trt8502, backbone/conv1: an Add reads its MaxPool as well.
        pytest.param(
            lambda g, out: [g.op("Softmax", g.pair(out, "p"), "s"), g.op("Tanh", out, "t")],
            FLOAT_OUT,
            [("c", "output-many-consumers")],
            id="float consumer",
        ),
        pytest.param(
            lambda g, out: [g.op("Softmax", g.pair(out, "p"), "s"), out],
            FLOAT_OUT,
            [("c", "output-many-consumers")],
            id="network output",
        ),
    ],
)
def test_q_is_fused_if_it_is_the_only_consumer(
    outputs: Callable[[Graph, str], list[str]], lines: list[Line], reasons: list[tuple[str, str]]
) -> None:
    result = run(outputs)
    assert (result.lines, result.reasons) == (lines, reasons)


def test_different_scales_keep_output_float() -> None:
    result = run(
        lambda g, out: [
            g.op("Softmax", g.pair(out, n, s), f"s{n}") for n, s in (("p", 0.1), ("q", 0.2))
        ]
    )
    assert (result.lines, result.reasons) == (FLOAT_OUT, [("c", "output-different-scales")])
    assert [r.scale for r in result.records[0].consumers] == [np.float32(0.1), np.float32(0.2)]
    assert weakest_evidence(result.layer("c")) == Evidence.ASSUMED


def test_shared_input_dq_is_removed_with_last_consumer(g: Graph) -> None:
    x = g.pair(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "in")
    outputs = [g.op("Softmax", g.conv(x, n, scale=None), f"s{n}") for n in "ab"]
    assert run_pass(g.model(*outputs), QuantizeDoubleInputNodes).lines == [
        ("Running", "a"),
        ("fusing", "(in.DQ and a.w.DQ)", "a"),
        ("Removing", "a.w.DQ"),
        ("Running", "b"),
        ("fusing", "(in.DQ and b.w.DQ)", "b"),
        ("Removing", "in.DQ"),
        ("Removing", "b.w.DQ"),
    ]


def computed_scale(g: Graph, x: str) -> str:
    scale = g.op("Abs", g.input(name="s"), "abs")
    quantized = g.op("QuantizeLinear", [x, scale, g.const("z", np.int8(0))], "in.Q")
    data = g.op("DequantizeLinear", [quantized, scale, g.const("z2", np.int8(0))], "in.DQ")
    return g.conv(data, "c", scale=None)


FLOAT: dict[str, Callable[[Graph, str], str]] = {
    "input-not-dequantized": lambda g, x: g.conv(x, "c", scale=None),
    "weights-not-dequantized": lambda g, x: g.conv(x, "c", weights="float"),
    "activation-per-channel": lambda g, x: g.conv(
        g.pair(x, "in", [0.1] * 8, axis=1), "c", scale=None
    ),
    "types": lambda g, x: g.conv(g.pair(x, "in", 0.1, integer=np.int16), "c", scale=None),
    "zero-point": lambda g, x: g.conv(g.pair(x, "in", 0.1, zero=3), "c", scale=None),
    "weights-axis": lambda g, x: g.op(
        "Conv",
        [
            g.pair(x, "in"),
            g.pair(g.const("w", g.random.normal(0, 1, (8, 8, 3, 3))), "w", [0.1] * 8, axis=1),
        ],
        "c",
    ),
    "scale-computed": computed_scale,
    "weights-not-constant": lambda g, x: g.op(
        "Conv",
        [
            g.pair(x, "in"),
            g.pair(g.op("Softmax", g.input(8, 8, 3, 3, name="y"), "moving"), "w", 0.1),
        ],
        "c",
    ),
}


VALUES: dict[str, dict[str, Any]] = {
    "input-not-dequantized": {"producer": "before", "op": "Softmax"},
    "weights-axis": {"axis": 1, "expected": 0},
    "zero-point": {"zero_points": (3, 3)},
}


@pytest.mark.parametrize(
    ("case", "values"),
    [(case, VALUES.get(case, {})) for case in FLOAT],
)
def test_float_convolution_is_reported_with_the_cause(case: str, values: dict[str, Any]) -> None:
    g = Graph(opset=21 if case == "types" else 13)
    out = FLOAT[case](g, g.op("Softmax", g.input(1, 8, 8, 8), "before"))
    result = run_pass(g.model(g.op("Softmax", out, "s")), QuantizeDoubleInputNodes)
    assert (result.lines, result.reasons) == ([], [("c", case)])
    assert {name: getattr(result.records[0], name) for name in values} == values


UP = {"k": 2, "stride": 2, "op": "ConvTranspose", "weights": "tensor"}


def fp8(**options: Any) -> Graph:
    g = Graph(opset=19, fp8=True)
    x = g.op("Softmax", g.input(1, 32, 8, 8), "before")
    g.op("Softmax", g.conv(x, "c", 32, **options), "end")
    return g


def mixed(data: Any, after: Any = None) -> Graph:
    """Return a convolution with FP8 weights, data of type ``data``, and a Q to type ``after``."""
    g = Graph(opset=19, fp8=True)
    x = g.pair(g.op("Softmax", g.input(1, 32, 8, 8), "before"), "in", integer=data)
    g.channels[x] = 32
    g.op("Softmax", g.pair(g.conv(x, "c", 32, scale=None), "p", integer=after), "end")
    return g


@pytest.mark.parametrize("target", ["trt8.5", "trt10"])
def test_fp8_weights_with_int8_data_are_reported(target: str) -> None:
    result = run_pass(mixed(np.int8).model("end:0"), QuantizeDoubleInputNodes, target=target)
    assert (result.reasons, result.records[0].types) == ([("c", "mixed-operands")], ("INT8", "FP8"))


@pytest.mark.parametrize(
    ("options", "target", "reasons"),
    [
        *(({"weights": w}, "trt10", ["output-not-quantized"]) for w in ("qdq", "tensor", "int8")),
        ({"k": 5}, "trt10", ["output-not-quantized"]),
        ({"k": 6}, "trt10", ["fp8-kernel"]),
        ({"k": 7}, "trt10", ["fp8-kernel"]),
        ({}, "10.1", ["fp8-version"]),
        ({}, "10.2", ["output-not-quantized"]),
        ({}, "trt11", ["output-not-quantized"]),
        (UP, "trt10", ["fp8-deconvolution"]),
    ],
)
def test_forms_of_convolutions_in_fp8(
    options: dict[str, Any], target: str, reasons: list[str]
) -> None:
    # Kernels have at most 32 elements. Convolutions have FP8 since 10.2, deconvolutions do not.
    result = run_pass(fp8(**options).model("end:0"), QuantizeDoubleInputNodes, target=target)
    layer = result.layer("c")
    is_fp8 = layer.int8 and layer.quantized_type == Precision.FP8
    assert is_fp8 == (reasons == ["output-not-quantized"])
    assert result.reasons == [("c", reason) for reason in reasons]


def test_q_of_another_type_after_a_layer_remains() -> None:
    result = run_pass(mixed(None, np.int8).model("end:0"), QuantizeDoubleInputNodes, "trt10")
    layer = result.layer("c")
    assert layer.quantized_type == Precision.FP8 and not layer.int8_out
    assert result.reasons == [("c", "output-type")]
    assert result.records[0].types == (Precision.FP8, Precision.INT8)


def _moved(g: Graph) -> str:
    g.opset, g.fp8 = 19, True
    x = g.pair(g.op("Softmax", g.input(1, 8, 4, 4), "before"), "in")
    x = g.op("Transpose", x, "turn", perm=[0, 1, 3, 2])
    g.channels[x] = 8
    return g.conv(x, "c", scale=None)


def _product(g: Graph) -> str:
    g.opset, g.fp8 = 19, True
    x = g.pair(g.op("Softmax", g.input(2, 8), "before"), "in")
    return g.op("MatMul", [x, g.pair(g.const("w", np.ones((8, 8))), "w.q")], "m")


def _sum(g: Graph, first: Any = None, second: Any = None) -> str:
    g.opset, g.fp8 = 19, True
    x = g.op("Softmax", g.input(1, 8, 4, 4), "before")
    return g.add(g.pair(x, "a", integer=first), g.pair(x, "b", 0.2, integer=second), "sum")


@pytest.mark.parametrize("types", [(None, None), (None, np.int8), (np.int8, np.int8)])
def test_sum_needs_one_type(g: Graph, types: tuple[Any, Any]) -> None:
    end = g.op("Tanh", _sum(g, *types), "end")
    result = run_pass(g.model(end), QuantizeDoubleInputNodes, target="trt10")
    assert result.layer("sum").int8 == (types[0] is types[1])


GRAPHS = {
    "QuantizeDoubleInputNodes/fp8-convolution": (end_of(fp8()), "trt10"),
    "QuantizeDoubleInputNodes/fp8-kernel": (end_of(fp8(k=7)), "trt10"),
    "QuantizeDoubleInputNodes/fp8-early": (end_of(fp8()), "10.1"),
    "QuantizeDoubleInputNodes/fp8-deconvolution": (end_of(fp8(**UP)), "trt10"),
    "QuantizeDoubleInputNodes/mixed-types": (end_of(mixed(np.int8)), "trt10"),
    "QuantizeDoubleInputNodes/other-type": (end_of(mixed(None, np.int8)), "trt10"),
    "QuantizeDoubleInputNodes/fp8-product": (_product, "trt10"),
    "QuantizeDoubleInputNodes/fp8-pointwise": (_sum, "trt10"),
    "QuantizeDoubleInputNodes/fp8-moved": (_moved, "trt10"),
}


def softmaxes(g: Graph, x: str, count: int) -> str:
    for i in range(count):
        x = g.op("Softmax", x, f"s{i}")
    return x


@pytest.mark.parametrize(
    ("between", "dq", "blocker"),
    [
        *(
            pytest.param(
                lambda g, y, count=count: [softmaxes(g, y, count)],
                dq,
                blocker,
                id=f"{count} in a row",
            )
            for count, dq, blocker in (
                (1, "p.DQ", "s0"),
                (2, "p.DQ", "s1"),
                (39, "p.DQ", "s38"),
                (40, "", None),
            )
        ),
        pytest.param(
            lambda g, y: [g.op("Softmax", g.op("LRN", y, "far", size=3), "near")],
            "p.DQ",
            "near",
            id="two operators",
        ),
        pytest.param(
            lambda g, y: [g.pool(y, "pool"), g.op("Tanh", y, "t")], "p.DQ", "pool", id="shared"
        ),
        pytest.param(
            lambda g, y: [g.concat([g.op("Tanh", "before:0", "t"), y], "cat")],
            "p.DQ",
            "cat",
            id="concat",
        ),
        pytest.param(
            lambda g, y: [
                g.op(
                    "Max",
                    [g.const("k", np.linspace(1, 2, 8)[None]), g.op("Softmax", y, "s")],
                    "max",
                )
            ],
            "p.DQ",
            "max",
            id="constant",
        ),
        pytest.param(
            lambda g, y: [
                g.op(
                    "Max",
                    [
                        g.op("LRN", s := g.op("Softmax", y, "s"), "a", size=3),
                        g.op("LRN", s, "b", size=3),
                    ],
                    "max",
                )
            ],
            "p.DQ",
            "max",
            id="twice",
        ),
        pytest.param(
            lambda g, y: [g.pool(g.pair("before:0", "channels", [0.1] * 8, axis=1), "pool")],
            "channels.DQ",
            "pool",
            id="scale per channel",
        ),
        pytest.param(
            lambda g, y: [g.pool(g.relu(y, "relu"), "pool"), g.op("Tanh", y, "t")],
            "p.DQ",
            "relu",
            id="passed",
        ),
        pytest.param(
            lambda g, y: [g.op("Tanh", g.conv(y, "first", scale=None), "t")],
            "",
            None,
            id="convolution",
        ),
        pytest.param(lambda g, y: ["before:0"], "", None, id="nothing"),
    ],
)
def test_report_names_blocked_dq_and_blocker(
    g: Graph, between: Callable[[Graph, str], list[str]], dq: str, blocker: str | None
) -> None:
    # An operator blocks the nearest DQ upstream if no DQ moves past it, if it is a Concat, or if the
    # DQ has other consumers or a scale for each channel. The search ends at a convolution, where a Q
    # is missing, and after 40 tensors.
    y, *outputs = between(g, g.pair(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "p"))
    result = run_pass(
        g.model(g.op("Softmax", g.conv(y, "c", scale=None), "end"), *outputs),
        QuantizeDoubleInputNodes,
    )
    record = next(r for r in result.records if r.node == "c")
    assert isinstance(record, InputNotDequantized) and record.weights_quantized
    assert (record.dq, record.blocker.node if record.blocker else None) == (dq, blocker)


@pytest.mark.parametrize(
    ("has_q", "lines", "reasons"),
    [
        # yolov8-orin-trt8412-excerpts: both inputs dequantized, output quantized.
        (True, [("fusing", "p.Q", "Add"), ("Removing", "p.Q")], []),
        # TensorRT 10.3 on an Orin Nano: PWN(Add) with two INT8 inputs and a float output.
        (False, [], [("Add", "output-not-quantized")]),
    ],
)
def test_add_of_quantized_tensors_runs_in_int8(
    g: Graph, has_q: bool, lines: list[Line], reasons: list[tuple[str, str]]
) -> None:
    x = g.op("Softmax", g.input(1, 8, 8, 8), "before")
    total = g.add(g.pair(x, "a"), g.pair(g.op("Tanh", x, "t"), "b"), "Add")
    result = run_pass(
        g.model(g.op("Softmax", g.pair(total, "p") if has_q else total, "s")),
        QuantizeDoubleInputNodes,
    )
    assert result.lines == [
        ("Running", "Add"),
        *lines[:1],
        ("fusing", "(a.DQ and b.DQ)", "Add"),
        *lines[1:],
        ("Removing", "a.DQ"),
        ("Removing", "b.DQ"),
    ]
    assert (result.layer("Add").int8, result.layer("Add").int8_out) == (True, has_q)
    assert result.reasons == reasons


@pytest.mark.parametrize("op", ["Relu", "Tanh", "Exp", "LeakyRelu"])
@pytest.mark.parametrize("has_q", [True, False])
def test_single_pointwise_layer_between_pairs_runs_in_int8(g: Graph, op: str, has_q: bool) -> None:
    x = g.op(op, g.pair(g.op("Softmax", g.input(1, 8, 8, 8), "before"), "a"), "p")
    result = run_pass(
        g.model(g.op("Softmax", g.pair(x, "q", 0.2) if has_q else x, "s")),
        QuantizeDoubleInputNodes,
    )
    layer = next(layer for layer in result.network.layers.values() if "p" in layer.nodes)
    assert layer.int8 and layer.int8_out is has_q
    assert not result.has_layer("a.DQ") and result.has_layer("q.Q") is False


@pytest.mark.parametrize(
    "build",
    [
        lambda g, x: g.add(g.pair(x, "a"), g.op("Tanh", x, "t"), "Add"),
        lambda g, x: g.pair(g.op("Tanh", x, "t"), "a"),
        lambda g, x: g.relu(g.pair(x, "a", [0.1] * 8, axis=1), "r"),
    ],
    ids=["sum with a float", "after floats", "per channel"],
)
def test_pointwise_layer_stays_float(g: Graph, build: Callable[[Graph, str], str]) -> None:
    # A YOLOv8n on 10.14.1 has 41 conversions after float layers, four of them after SiLU and Add.
    x = build(g, g.op("Softmax", g.input(1, 8, 8, 8), "before"))
    result = run_pass(g.model(g.op("Softmax", x, "s")), QuantizeDoubleInputNodes)
    assert result.lines == [] and result.has_layer("a.DQ")
