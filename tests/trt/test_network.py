import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

from qdqtool.errors import ModelError
from qdqtool.ir.modelfile import load
from qdqtool.ir.operators import LayerKind
from qdqtool.prediction import predict
from qdqtool.reasons.finding import Reason
from qdqtool.trt import importer
from qdqtool.trt.layers import WEIGHTED, Layer, LayerWeights
from qdqtool.trt.network import Network
from qdqtool.trt.pipeline import PIPELINE, Pass, PipelineRun
from qdqtool.trt.targets import TARGETS, target_named
from tests.errors import has
from tests.slow import slow_after
from tests.trt.builder import Graph
from tests.trt.evidence import DIFFERENT, graph as published
from tests.trt.random_graphs import FORKS, models
from tests.trt.test_spellings import FLOAT, INT8, conv_names, outcomes

CLASSIC = sorted(t for t in TARGETS if not t.startswith("rtx"))


def inconsistencies(network: Network) -> list[str]:
    layers = list(network.layers.values())
    alive, faults = {id(layer) for layer in layers}, []
    for layer in layers:
        faults += [f"{t.name}: producer" for t in layer.outputs if t.producer is not layer]
        for tensor in layer.inputs:
            if tensor.consumers.get(layer, 0) != sum(t is tensor for t in layer.inputs):
                faults.append(f"{tensor.name}: count of consumer {layer.name}")
    for tensor in {id(t): t for layer in layers for t in (*layer.inputs, *layer.outputs)}.values():
        faults += [
            f"{tensor.name}: {consumer.name} is not a consumer"
            for consumer in tensor.consumers
            if id(consumer) not in alive or not any(t is tensor for t in consumer.inputs)
        ]
        if tensor.producer is not None and id(tensor.producer) not in alive:
            faults.append(f"{tensor.name}: producer {tensor.producer.name} was removed")
    return faults


class CheckedRun(PipelineRun):
    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.network = network

    def run_pass(self, step: Pass) -> list[Reason]:
        reasons = super().run_pass(step)
        assert inconsistencies(self.network) == [], step.name
        return reasons


def run_checked(model: onnx.ModelProto, target_name: str) -> None:
    network, target = importer.build(load(model)), target_named(target_name)
    assert inconsistencies(network) == []
    run = CheckedRun(network)
    for stage in PIPELINE:
        if isinstance(stage, tuple):
            run.run_loop([step(target) for step in stage])
        elif issubclass(stage, Pass):
            run.run_pass(stage(target))
        else:
            network.rank_layers()


@given(models(max_steps=8, steps=FORKS), st.sampled_from(CLASSIC))
def test_every_pass_leaves_graph_consistent(model: onnx.ModelProto, target: str) -> None:
    run_checked(model, target)


@pytest.mark.parametrize("case", slow_after(4, DIFFERENT))
def test_every_pass_leaves_published_network_consistent(case: str) -> None:
    run_checked(published(case).proto, "trt8.5")


@pytest.mark.parametrize("target", CLASSIC)
def test_passes_keep_weights_shared_by_two_products_consistent(g: Graph, target: str) -> None:
    # The first product that becomes a convolution fuses its weights. The constant remains for the
    # second product.
    g.input(2, 16)
    weights = g.const("w", np.ones((16, 16), np.float32))
    for op in ("Gemm", "MatMul"):
        run_checked(
            g.model(
                g.op(op, ["x", weights], f"{op}1"),
                g.op(op, [g.op("Tanh", "x", f"t{op}"), weights], f"{op}2"),
            ),
            target,
        )


@pytest.mark.parametrize(
    ("op", "attributes", "kind"),
    [
        ("LRN", {"size": 3}, "LRN"),
        ("GlobalMaxPool", {}, "Pooling"),
        ("MaxPool", {"kernel_shape": [2, 2]}, "Pooling"),
        ("Softmax", {}, "Softmax"),
    ],
)
def test_layer_type_defaults_to_operator(
    g: Graph, op: str, attributes: dict[str, object], kind: str
) -> None:
    layers = predict(g.model(g.op(op, g.input(1, 8, 4, 4), "n", **attributes))).layers
    assert [layer.type for layer in layers if layer.nodes == ["n"]] == [kind]


def test_convolution_of_constants_is_not_reported(g: Graph) -> None:
    anchors = g.conv(g.const("grid", np.ones((1, 8, 8, 8))), "anchors", 8, scale=None)
    prediction = predict(g.model(g.add(g.conv(g.input(1, 8, 8, 8), "c"), anchors, "sum")), "trt8.5")
    assert outcomes(prediction).keys() == {"c"}


@pytest.mark.parametrize("op", ["Custom", "GridSample", "Einsum"])
def test_unknown_operator_is_a_float_layer(g: Graph, op: str) -> None:
    g.nodes.append(
        onnx.helper.make_node(
            op,
            [g.conv(g.input(1, 3, 8, 8), "c")],
            ["u:0"],
            "u",
            domain="my.plugins" if op == "Custom" else "",
        )
    )
    g.channels["u:0"] = 8
    prediction = predict(g.model(g.op("Softmax", g.conv("u:0", "d"), "s")), "trt8.5", advice=False)
    assert outcomes(prediction) == {"c": ([INT8], FLOAT), "d": ([INT8], FLOAT)}
    assert prediction.conversions == 2


@pytest.mark.parametrize(
    ("scale", "inputs"),
    [
        *(
            pytest.param(
                {"value": onnx.numpy_helper.from_array(np.array(value, np.float32))},
                ["s", "z"],
                id=str(value),
            )
            for value in (0, -1, np.nan, np.inf, [])
        ),
        pytest.param({"value_string": "0.1"}, ["nowhere"], id="text, or missing"),
    ],
)
def test_senseless_scale_does_not_stop_prediction(
    g: Graph, scale: dict[str, Any], inputs: list[str]
) -> None:
    # A finding reports the scale.
    g.nodes.append(onnx.helper.make_node("Constant", [], ["s"], **scale))
    x = g.op("QuantizeLinear", [g.input(1, 3, 8, 8), "s", g.const("z", np.int8(0))], "Q")
    data = g.op("DequantizeLinear", [x, *inputs], "DQ")
    assert conv_names(predict(g.model(g.conv(data, "c", scale=None)), advice=False)) == ["c"]


@pytest.mark.parametrize(
    ("op", "attribute", "value"),
    [
        ("Conv", "group", "two"),
        ("Conv", "group", [1, 2]),
        ("Conv", "strides", 1),
        ("MaxPool", "kernel_shape", 3.0),
        ("Concat", "axis", "one"),
    ],
)
def test_attribute_of_wrong_type_is_reported_with_node(
    g: Graph, op: str, attribute: str, value: Any
) -> None:
    x = g.conv(g.input(1, 3, 8, 8), "c", scale=None)
    g.nodes.append(onnx.helper.make_node(op, [x, x], ["n:0"], "n", **{attribute: value}))
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            g.nodes,
            "g",
            g.inputs,
            [onnx.helper.make_empty_tensor_value_info("n:0")],
            g.initializers,
        ),
        opset_imports=[onnx.helper.make_opsetid("", 13)],
    )
    with pytest.raises(ModelError, check=has("node-damaged", node="n"), match=rf"\({op}\)"):
        predict(model, advice=False)


@pytest.mark.parametrize(
    ("shape", "build", "int8", "computing", "conversions"),
    [
        pytest.param(
            (1, 32, 32, 32),
            lambda g, x: g.conv(x, "c", 32),
            1,
            [("Convolution", ["INT8"], "FLOAT")],
            ["c.in.Q"],
            id="per_channel_conv",
        ),
        pytest.param(
            (32, 64),
            lambda g, x: g.op(
                "MatMul",
                [
                    g.pair(x, "a", 0.03),
                    g.pair(g.const("w", np.ones((64, 64), np.float32)), "w", 0.01),
                ],
                "m",
            ),
            1,
            [("kgen", ["FP32"], "INT8"), ("MatrixMultiply", ["INT8"], "FLOAT")],
            [],
            id="symmetric_matmul",
        ),
        pytest.param(
            (1, 32, 32, 32),
            lambda g, x: g.op(
                "Add",
                [
                    g.pair(g.conv(x, f"c{i}", 32, scale=None, weights="float"), f"b{i}", 0.02)
                    for i in (0, 1)
                ],
                "add",
            ),
            0,
            [("Convolution", ["FLOAT"], "FLOAT"), ("PointWise", ["INT8", "INT8"], "FLOAT")],
            ["b0.Q", "b1.Q"],
            id="residual_branches",
        ),
        pytest.param(
            (1, 32, 32, 32),
            lambda g, x: g.relu(g.bn(g.conv(x, "c", 32, scale=None, weights="float"), "bn"), "r"),
            0,
            [("Convolution", ["FLOAT"], "FLOAT")],
            [],
            id="conv_bn_relu",
        ),
    ],
)
def test_small_graphs_match_their_builds(
    g: Graph,
    shape: tuple[int, ...],
    build: Callable[[Graph, str], str],
    int8: int,
    computing: list[tuple[str, list[str], str]],
    conversions: list[str],
) -> None:
    # The four graphs of small-graphs-orinnano-trt103 (TensorRT 10.3).
    # small-graphs-orinnano-trt103 lists the layers of per_channel_conv and residual_branches.
    prediction = predict(g.model(build(g, g.input(*shape))), "10.3")
    assert [
        (x.type, [str(t.precision) for t in x.inputs], str(x.outputs[0].precision))
        for x in prediction.layers
        if x.type in ("Convolution", "PointWise", "MatrixMultiply", "NoOp", "kgen")
    ] == computing
    assert (prediction.summary()["int8"], prediction.conversion_nodes) == (int8, conversions)


def casts_at_both_ends(g: Graph) -> onnx.ModelProto:  # as ModelOpt writes FP16 models
    half = g.op("Cast", g.input(1, 16, 8, 8), "to_half", to=onnx.TensorProto.FLOAT16)
    return g.model(g.op("Cast", g.conv(half, "c", 16), "to_float", to=onnx.TensorProto.FLOAT))


def test_inputs_and_outputs_of_the_network_have_their_type_in_the_model(g: Graph) -> None:
    layers = predict(casts_at_both_ends(g), "trt8.5", advice=False).layers
    assert [(x.type, *(str(t.precision) for t in (*x.inputs, *x.outputs))) for x in layers] == [
        ("Conversion", "FP32", "INT8"),
        ("Identity", "INT8", "INT8"),
        ("Convolution", "INT8", "FLOAT"),
        ("Identity", "FLOAT", "FP32"),
    ]


def test_products_in_a_row_keep_int8_between_them(g: Graph) -> None:
    # gemm-mlp-trt10: kgen, three gemm, kgen. A Q or DQ next to a float is a kernel of its own.
    x = g.input(8, 16)
    for i in range(3):
        weights = g.pair(g.const(f"w{i}", np.ones((16, 16), np.float32)), f"w{i}p", 0.01)
        x = g.op("MatMul", [g.pair(x, f"q{i}"), weights], f"m{i}")
    layers = predict(g.model(g.pair(x, "out")), "trt10", advice=False).layers
    assert [(x.type, *(str(t.precision) for t in (*x.inputs, *x.outputs))) for x in layers] == [
        ("kgen", "FP32", "INT8"),
        *[("MatrixMultiply", "INT8", "INT8")] * 3,
        ("kgen", "INT8", "FP32"),
    ]
    for producer, consumer in itertools.pairwise(layers):
        assert consumer.inputs[0].tensor == producer.outputs[0].tensor


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {
            "kernel_shape": [3, 3],
            "strides": [1, 1],
            "dilations": [1, 1],
            "pads": [0] * 4,
            "group": 1,
            "auto_pad": "NOTSET",
        },
    ],
    ids=["absent", "defaults"],
)
def test_importer_uses_defaults_of_onnx(attributes: dict[str, object]) -> None:
    weights = imported_weights(plain_conv(**attributes), "c")
    assert (weights.kernel, weights.strides, weights.pads) == ((3, 3), (1, 1), (0, 0, 0, 0))
    assert (weights.dilations, weights.group, weights.auto_pad) == ((1, 1), 1, "NOTSET")
    assert (weights.dims, weights.axis, weights.constant) == ((8, 8, 3, 3), 0, True)


# Import of a model: geometry with ONNX's defaults, and operators that the parser decomposes.


def imported(model: onnx.ModelProto) -> Network:
    return importer.build(load(model))


@pytest.mark.parametrize("count", [2, 3])
def test_single_consumer_pairs_skip_fused_layers(count: int, g: Graph) -> None:
    x = g.input(1, 4, 16, 16)
    for i in range(count):
        x = g.pool(x, f"p{i}")
    network, kind = imported(g.model(x)), LayerKind.POOLING
    pairs = []
    for layer, consumer in network.single_consumer_pairs(kind, consumer_kind=kind):
        pairs.append((layer.nodes[0], consumer.nodes[0]))
        network.absorb_consumer(layer, consumer, layer.name)
    assert (pairs, inconsistencies(network)) == ([("p0", "p1")], [])


def imported_weights(model: onnx.ModelProto, node: str) -> LayerWeights:
    layers = imported(model).layers.values()
    return next(layer.weights for layer in layers if node in layer.nodes and layer.kind in WEIGHTED)


def plain_conv(**attributes: object) -> onnx.ModelProto:
    g = Graph()
    weights = g.const("w", np.zeros((8, 8, 3, 3), np.float32))
    return g.model(g.op("Conv", [g.input(1, 8, 8, 8), weights], "c", **attributes))


@pytest.mark.parametrize(
    ("key", "value"), [("strides", [2, 2]), ("dilations", [2, 2]), ("pads", [1] * 4)]
)
def test_importer_reads_geometry(key: str, value: list[int]) -> None:
    assert getattr(imported_weights(plain_conv(**{key: value}), "c"), key) == tuple(value)


@pytest.mark.parametrize(
    ("op", "attributes", "axis"),
    [
        ("MatMul", {}, 1),
        ("Gemm", {}, 1),
        ("Gemm", {"transB": 1}, 0),
    ],
)
def test_importer_finds_output_axis_of_weights(
    g: Graph, op: str, attributes: dict, axis: int
) -> None:
    g.input(2, 16)
    shape = (4, 16) if attributes else (16, 4)
    product = g.op(op, ["x", g.const("w", np.zeros(shape, np.float32))], "m", **attributes)
    weights = imported_weights(g.model(product), "m")
    assert (weights.dims, weights.axis, weights.name, weights.constant) == (shape, axis, "w", True)
    # The weights of a product are an input, those of a convolution belong to the layer.
    assert weights.in_layer is False and imported_weights(plain_conv(), "c").in_layer is True


def test_importer_decomposes_batchnorm_with_computed_parameters(g: Graph) -> None:
    # (x - mean) / sqrt(var + epsilon) * scale + bias. Each parameter passes a shuffle, the bias is
    # added last.
    x = g.input(1, 4, 8, 8)
    names = [
        g.op("Abs", g.const(n, np.ones(4, np.float32)), f"abs_{n}")
        for n in ("scale", "bias", "mean", "var")
    ]
    network = imported(g.model(g.op("BatchNormalization", [x, *names], "bn")))
    last = next(layer for layer in network.layers.values() if layer.out.name == "bn:0")

    def sources(layer: Layer) -> list[str]:
        producers = [tensor.producer for tensor in layer.inputs]
        return [
            p.inputs[0].name if p is not None and p.kind == LayerKind.SHUFFLE else "computed"
            for p in producers
        ]

    scaled = last.inputs[0].producer
    divided = scaled.inputs[1].producer
    centered = divided.inputs[0].producer
    assert divided.operation == "DIV"
    assert [(x.operation, sources(x)) for x in (last, scaled, centered)] == [
        ("SUM", ["computed", "abs_bias:0"]),
        ("PROD", ["abs_scale:0", "computed"]),
        ("SUB", ["computed", "abs_mean:0"]),
    ]
    # The constant epsilon has no type: the layer that adds it has the type of var.
    for layer in network.layers_of_kind(LayerKind.ELEMENTWISE, LayerKind.UNARY):
        assert layer.out.elem_type == onnx.TensorProto.FLOAT, layer
    assert (divided.inputs[1].producer.out.shape, centered.out.shape) == (
        (4,),
        (1, 4, 8, 8),
    )


@pytest.mark.parametrize("where", ["plain", "captured", "mixed"])
def test_importer_folds_shape_arithmetic(g: Graph, where: str) -> None:
    # A node that reads another tensor as well, directly or in a subgraph, is a layer.
    x = g.input(1, 8, 4, 4)
    size = g.op("Gather", [g.op("Shape", x, "shape"), g.const("at", np.array([0]))], "gather")
    size = g.op("Mul", [size, g.const("two", np.array([1], np.int64))], "times")
    if where == "captured":
        body = onnx.helper.make_graph(
            [
                onnx.helper.make_node(
                    "Cast", ["captured"], ["inside"], "cast", to=onnx.TensorProto.INT64
                )
            ],
            "body",
            [],
            [onnx.helper.make_tensor_value_info("inside", onnx.TensorProto.INT64, [1])],
        )
        g.op("Softmax", g.reshape(x, "flat", 128), "s")
        g.slice("s:0", "captured", 0, 1, axis=0)
        g.nodes[-1].output[0] = "captured"
        flag = g.op("Cast", g.input(1, name="n"), "chosen", to=onnx.TensorProto.BOOL)
        size = g.op("If", flag, "mixed", then_branch=body, else_branch=body)
    elif where == "mixed":
        size = g.op(
            "Mul",
            [size, g.op("Cast", g.input(1, name="n"), "cast", to=onnx.TensorProto.INT64)],
            "mixed",
        )
    to = g.op("Concat", [size, g.const("rest", np.array([-1]))], "cat", axis=0)
    network = imported(
        g.model(
            g.op("Reshape", [g.op("Exp", x, "e"), to], "r"), *([] if where == "plain" else [size])
        )
    )
    names = {layer.name for layer in network.layers.values()}
    assert {"e", "r"} <= names and not names & {"shape", "gather", "times", "flag"}
    assert ("mixed" in names) is (where != "plain")


@pytest.mark.parametrize(
    "op",
    [
        "Relu",
        "HardSwish",
        "Softmax",
        "Sigmoid",
        "GlobalAveragePool",
        "GlobalMaxPool",
        "Exp",
        "Identity",
        "Dropout",
        "Flatten",
        "Softplus",
        "Celu",
    ],
)
def test_imported_operator_reads_its_input(op: str) -> None:
    # The network's input is upstream of the output, layer by layer.
    g = Graph(opset=14)
    network = imported(g.model(g.op(op, g.input(1, 4, 8, 8), "n")))
    seen, queue = (
        set(),
        [next(layer.out for layer in network.layers.values() if layer.out.name == "n:0")],
    )
    for tensor in queue:
        seen.add(tensor.name)
        if tensor.producer is not None:
            queue.extend(tensor.producer.inputs)
    assert "x" in seen
