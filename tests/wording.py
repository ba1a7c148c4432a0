"""Networks, models and records that show every wording of messages; see `tests.snapshots`."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx

import qdqtool
from qdqtool.evidence import Evidence
from qdqtool.findings import obstacles, report
from qdqtool.findings.rules import REASON_MODULES, finding_code
from qdqtool.formats.build_text import render_comparison
from qdqtool.ir.graph import Model
from qdqtool.patterns.view import View
from qdqtool.reasons import MODEL_CHECK, placement as placement_reasons
from qdqtool.reasons.attention import DecomposedNorm
from qdqtool.reasons.convolutions import DepthwiseAdd, LargeKernel
from qdqtool.reasons.finding import Cause, Finding, Reason, Severity
from qdqtool.reasons.gpus import GpuFact, GpuLimit
from qdqtool.reasons.scales import ActivationFit, ActivationScales, OutlierScales, UniformScales
from qdqtool.reasons.weights import WeightsNotConstant
from tests.comparison.networks import float_network, network
from tests.comparison.test_changes import listing
from tests.findings import test_each_code as each_code
from tests.findings.graphs import GRAPHS, attention, ones, weighted
from tests.findings.lint import test_api as lint, test_bfloat16 as bfloat16
from tests.findings.lint.test_operators import conv3d, pair_of, recurrent, runtime_model
from tests.findings.lint.test_quantizers import (
    INTEGERS,
    channel,
    with_half_scale,
    with_weights,
)
from tests.findings.test_causes import residual
from tests.findings.test_reasons import TARGETS
from tests.fixing import test_quantizers as constants
from tests.fixing.test_places import detector
from tests.ir import test_branches as branches
from tests.patterns import test_fake_quantizers as fakes
from tests.proto.test_functions import quantized_blocks
from tests.trt.builder import Graph


def after_pair(op: str, **attributes: object) -> onnx.ModelProto:
    g = Graph()
    return g.model(g.op(op, g.pair(g.conv(g.input(1, 32, 8, 8), "c", 32), "p"), "n", **attributes))


def conv(channels: int, op: str = "", **options: int) -> onnx.ModelProto:
    g = Graph()
    x = g.relu(g.input(1, 32, 8, 8), "r")
    y = g.conv(x, "c", channels, **options)
    return g.model(g.silu(y, "s") if op == "SiLU" else g.add(y, x, "sum") if op == "Add" else y)


def padded() -> onnx.ModelProto:
    g = Graph()
    pads = g.const("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64))
    return g.model(g.conv(g.op("Pad", [g.relu(g.input(1, 16, 8, 8), "r"), pads], "pad"), "c", 16))


def fp8_networks() -> Iterator[tuple[str, onnx.ModelProto, str]]:
    for name, channels, options in (("depthwise", 32, {"groups": 32}), ("channels", 8, {})):
        g = Graph(opset=19, fp8=True)
        model = g.model(g.conv(g.input(1, 32, 8, 8), "c", channels, **options))
        yield f"FP8 {name}", model, "trt10"
        if name == "depthwise":
            yield "FP8 for Hopper", model, "10.2"
    for name, channels, height in (("column", 4, 8), ("kernel", 8, 16)):
        g, k = Graph(opset=19, fp8=True), (1 if name == "column" else 7)
        model = g.model(g.conv(g.input(1, channels, height, 1), "c", 8, k=k))
        yield f"FP8 {name}, rtx1.7", model, "rtx1.7"
    for target in ("trt10", "rtx1.7"):
        g = Graph(opset=19, fp8=True)
        x = g.pair(g.input(1, 32, 8, 8), "in", zero=3)
        g.channels[x] = 32
        yield f"FP8 zero point, {target}", g.model(g.conv(x, "c", 32, scale=None)), target


def networks() -> Iterator[tuple[str, onnx.ModelProto, str]]:
    for reason, make in GRAPHS.items():
        for target in (TARGETS.get(reason, "trt8.5"), "trt8.4", "trt11", "rtx1.7"):
            yield f"{reason}, {target}", make(), target
    plain = {
        "zero point": lint.simple(zero=3),
        "unsigned zero point": lint.simple(zero=128, integer=np.uint8),
        "no zero point": lint.simple(zero=None),
        "unsigned": lint.simple(zero=0, integer=np.uint8),
        "scale of 0": lint.simple(scale=0.0),
        "scale of NaN": lint.simple(scale=float("nan")),
        "scale below 0": lint.simple(scale=-0.1),
        "scale of 1e22": lint.simple(scale=1e22),
        "scale of 1e-30": lint.simple(scale=1e-30),
        "weight scale of NaN": with_weights(channel(1, float("nan"))),
        "weight scale of 0": with_weights(channel(1, 0.0)),
        "NaN weights": with_weights(
            channel(1, float("nan")), np.full((4, 4, 1, 1), np.nan, np.float32)
        ),
        "integers with scale of NaN": with_weights(channel(1, float("nan")), INTEGERS),
        "float16 scale of 0": with_half_scale(0.0),
        "scales by channel": lint.simple(scale=np.full(16, 0.1), axis=1),
        "bare weights": lint.weights_model("float"),
        "axis": lint.weights_model(axis=1),
        "axis of transposed": lint.weights_model(op="ConvTranspose", axis=1),
        "shared weights": lint.shared_model(),
        "stored": lint.stored("int8"),
        "behind": lint.stored("float", "Identity"),
        "bias": lint.quantized_bias(),
        "few scales": lint.too_few_scales(),
        "few zero points": lint.too_few_zero_points(),
        "head": lint.head(),
        "joined head": lint.head(join=True),
        "float": float_network(1),
        "24": conv(24),
        "8": conv(8),
        "groups": conv(32, groups=4),
        "depthwise SiLU": conv(32, "SiLU", groups=32),
        "Softmax": after_pair("Softmax"),
        "plugin": after_pair("Special", domain="trt"),
        "residual": residual("float"),
        "one residual": residual("own", behind=False),
        "both": residual("own", conv_side=True),
        "Pad of zeros": padded(),
        "SiLU in front": residual("own", activation=True, relu=False),
        "shared skip": residual("shared"),
    }
    yield from ((name, proto, "trt8.5") for name, proto in plain.items())
    yield from (
        ("float types", lint.simple(), "trt11"),
        ("stored behind", lint.stored("int8", "Identity"), "trt10"),
        *fp8_networks(),
        ("vector", lint.simple(scale=[0.05], zero=0), "rtx1.7"),
        ("depthwise Add", conv(32, "Add", groups=32), "trt8.6"),
        ("3D", conv3d(), "trt8.0"),
        ("bfloat16", bfloat16.quantized(), "trt8.6"),
        ("bfloat16 by a flag", bfloat16.quantized(), "trt10"),
        ("functions", quantized_blocks(), "trt8.6"),
        *(
            (f"decomposed: {name}", fakes.network(fakes.DECOMPOSED[name]), "trt10")
            for name in ("dynamo", "narrow")
        ),
        *(
            (f"quantizers of {name}", fakes.network(make), "trt10")
            for name, (make, _) in fakes.OPERATORS.items()
        ),
        *(
            (f"inexact: {name}", fakes.network(make, per_channel=False), "trt10")
            for name, make in fakes.INEXACT.items()
        ),
        ("If", branches.model_with(branches.conditional(), flag=True), "trt10"),
        ("LSTM", recurrent(quantized=True), "trt10"),
        ("pair", pair_of(0.5), "trt10"),
        ("onnxruntime", runtime_model("FusedConv"), "trt10"),
        ("packed weights", runtime_model("MatMulNBits"), "trt10"),
        ("Loop", branches.loop(), "trt10"),
        ("fallback to ATen", fakes.fallback(), "trt10"),
        ("scale of a product", constants.network("scale", constants.product), "trt10"),
        ("zero point of an Identity", constants.network("zero", constants.identity), "trt8.6"),
    )


# Networks of one statement, one for each wording that no other network shows.
SINGLE_WORDINGS: tuple[tuple[str, Callable[[Graph], onnx.ModelProto], str], ...] = (
    (
        "rank",
        lambda g: lint.without_shapes(
            g, weighted(g, g.pair(ones(g), "w.q", np.full((16, 1, 1, 1), 0.1), axis=0))
        ),
        "trt10",
    ),
    (
        "integers",
        lambda g: lint.without_shapes(
            g, g.ops("DynamicQuantizeLinear", [g.input(1, 8)], "d", 3)[0]
        ),
        "trt8.5",
    ),
    (
        "stored elsewhere",
        lambda g: g.model(
            g.add(
                g.input(1, 16),
                g.op("Cast", [g.const("table", np.ones(16, np.int8))], "reader", to=1),
                "sum",
            )
        ),
        "trt10",
    ),
    ("weights as output", each_code.output_weights, "trt8.5"),
    (
        "product",
        lambda g: g.model(
            g.op(
                "MatMul", [g.pair(g.input(1, 4, 8, 8, name=name), name) for name in "ab"], "product"
            )
        ),
        "trt8.5",
    ),
    (
        "Einsum",
        lambda g: g.model(
            g.op(
                "Einsum",
                [g.pair(g.input(2, 8, 16), "p"), g.weights("w", (16, 16), "qdq", axis=1)],
                "e",
                equation="bij,jk->bik",
            )
        ),
        "trt8.5",
    ),
    ("large kernel", each_code.large_kernel, "trt8.6"),
    (
        "FP16",
        lambda g: g.model(
            g.add(
                g.relu(g.conv(g.input(1, 16, 8, 8), "c", 16), "r"),
                g.const("k", np.float32(1e-12)),
                "tiny",
            )
        ),
        "trt8.5",
    ),
    (
        "squares",
        lambda g: g.model(
            g.op("ReduceSumSquare", g.conv(g.input(1, 16, 8, 8), "c", 16), "squares", axes=[1])
        ),
        "trt10",
    ),
    (
        "joined",
        lambda g: g.model(
            g.conv(
                g.concat(
                    [
                        g.pair(g.input(1, 16, 8, 8, name=name), name, scale)
                        for name, scale in (("a", 0.1), ("b", 0.2))
                    ],
                    "join",
                ),
                "c",
                16,
                scale=None,
            )
        ),
        "rtx1.7",
    ),
    (
        "joined pairs",
        lambda g: g.model(
            g.op(
                "Tanh",
                g.pair(
                    g.concat(
                        [
                            g.pair(g.conv(g.input(1, 16, 8, 8, name="a"), "ca", 16), "own"),
                            g.conv(g.input(1, 16, 8, 8), "c", 16),
                        ],
                        "join",
                    ),
                    "behind",
                    0.3,
                ),
                "end",
            )
        ),
        "trt8.5",
    ),
    (
        "pool",
        lambda g: g.model(
            g.op(
                "Tanh",
                g.op(
                    "GlobalAveragePool",
                    g.pair(g.op("Softmax", g.input(1, 8, 8, 8), "soft"), "in"),
                    "pool",
                ),
                "end",
            )
        ),
        "trt8.5",
    ),
    (
        "float input",
        lambda g: g.model(g.conv(g.input(1, 16, 8, 8), "c", 16, scale=None)),
        "trt8.5",
    ),
)


def single_wordings() -> Iterator[tuple[str, onnx.ModelProto, str]]:
    """Yield a small network for each wording that no other network shows."""
    yield "attention", attention(64), "trt10"
    for label, make, target in SINGLE_WORDINGS:
        yield label, make(Graph()), target
    g = Graph(opset=12)
    yield (
        "axis by opset",
        lint.without_shapes(g, weighted(g, g.pair(ones(g), "w.q", np.full(16, 0.1)))),
        "trt8.5",
    )
    g = Graph(opset=17)
    x = g.add(g.input(1, 8, 16), g.pair(g.input(1, 8, 16, name="y"), "p"), "sum")
    x = g.op("LayerNormalization", [x, g.const("gain", np.ones(16, np.float32))], "norm", axis=-1)
    x = g.op("MatMul", [g.pair(x, "q"), g.weights("w", (16, 16), "qdq", axis=1)], "fc")
    yield "stream", g.model(x), "trt10"
    g, gains = Graph(opset=17), np.where(np.arange(64) < 2, 600.0, 1.0).astype(np.float32)
    x = g.op("LayerNormalization", [g.input(1, 8, 64), g.const("gain", gains)], "norm", axis=-1)
    x = g.op("MatMul", [g.pair(x, "q", 20.0), g.weights("w", (64, 16), "qdq", axis=1)], "fc")
    yield "outliers", g.model(x), "trt10"
    yield "scales of other tensors", detector(), "trt8.5"
    g = Graph()
    gate = g.pair(g.op("Sigmoid", g.conv(g.input(1, 16, 8, 8), "c", 16), "gate"), "dead", 4.0)
    parts = [gate, g.pair(g.relu(g.input(1, 16, 8, 8, name="y"), "r"), "own", 4.0)]
    yield (
        "dead part",
        g.model(g.op("Tanh", g.pair(g.concat(parts, "join"), "behind", 4.0), "end")),
        "trt8.5",
    )
    g = Graph()
    x = g.relu(g.conv(g.input(1, 16, 16, 16), "c0", 16), "r0")
    consumers = (g.conv(x, "a", 16, scale=0.02), g.conv(x, "b", 16, scale=0.05))
    yield "scales of siblings", g.model(*consumers), "trt8.5"


def records() -> list[Reason]:
    """Return findings that need data or a GPU, one for each wording.

    Forms of decomposed LayerNorm are included.
    """
    listed: list[Reason] = [
        GpuLimit("GPU", "", fact, "a GPU", 2, "c", ("trt10", "10.0")) for fact in GpuFact
    ]
    fits = (ActivationFit("a.Q", 0.1, 0.25, 0.1, 2.0), ActivationFit("b.Q", 0.2, 0.0, 0.0, 0.125))
    listed += [
        ActivationScales(MODEL_CHECK, "a.Q", fits[:bad], bad, 5, samples, factor)
        for bad, samples, factor in ((1, 1, 2.0), (3, 4, 0.5), (3, 4, 0.0))
    ]
    listed += [
        OutlierScales(MODEL_CHECK, "a.Q", (("a.Q", 0.1, 50.0),), 2, 5, 4, linear, "a", ("c",), 99.9)
        for linear in (True, False)
    ]
    listed.append(UniformScales(MODEL_CHECK, "", 0.1, 4, 4))
    listed += [
        DecomposedNorm(MODEL_CHECK, "n", exact, opset)
        for exact in (True, False)
        for opset in (13, 17)
    ]
    return listed


@functools.cache
def findings() -> tuple[tuple[str, list[Finding]], ...]:
    predicted = [
        (label, qdqtool.predict(proto, target).findings)
        for label, proto, target in (*networks(), *single_wordings())
    ]
    recorded = [
        Finding(
            finding_code(r),
            Severity.WARNING,
            r.node,
            (Cause(r),),
            Evidence.SEEN,
            report.describe_finding,
            target="trt8.5",
        )
        for r in records()
    ]
    return (*predicted, ("records", recorded))


def kinds_worded() -> set[type[Reason]]:
    return {type(cause.reason) for _, listed in findings() for f in listed for cause in f.causes}


def headlines() -> list[str]:
    models = {label: proto for label, proto, _ in (*networks(), *single_wordings())}
    texts = [
        obstacles.describe_obstacles(listed, View(Model(models[label])))
        for label, listed in findings()
        if label in models
    ]
    return list(dict.fromkeys(filter(None, texts)))


def comparisons(folder: Path) -> dict[str, list[str]]:
    """Return the lines that `compare` prints for pairs of sides, and the texts of its JSON.

    Files are written into the folder, which must be the current folder.
    """
    models = {
        "good": network(),
        "two spoilt": network(spoilt=[0, 2]),
        "short": network(2),
        "float": float_network(),
        "no data": network(spoilt=[1], spoilt_weights="qdq", data=None),
        "no residual": network(residual=False),
        "scales": network(scale=0.25),
        "near": network(scale=0.10005),
        "renamed": network(names="layer"),
        "tensor": network(spoilt=[2], spoilt_weights="tensor"),
    }
    for name, proto in models.items():
        onnx.save(proto, folder / f"{name}.onnx")
    for name, floats in (("good", ()), ("bad", ("b1.a", "b2.b"))):
        (folder / f"{name}.json").write_text(json.dumps(listing(floats)))
    pairs = [("good.onnx", f"{name}.onnx") for name in models]
    pairs += [
        ("float.onnx", "good.onnx"),
        ("two spoilt.onnx", "good.onnx"),
        ("short.onnx", "good.onnx"),
    ]
    pairs += [("good.onnx", f"{name}.json") for name in ("good", "bad")]
    pairs += [("bad.json", "good.onnx"), ("good.json", "bad.json")]
    lines = {}
    for a, b in pairs:
        compared = qdqtool.compare(a, b, target=None if "json" in a and "json" in b else "trt8.5")
        keys = ("name", "changes", "lost", "finding", "scale_factor", "weights_scale_factor")
        nodes = [
            json.dumps({key: node[key] for key in keys})
            for node in compared.as_json()["nodes"]
            if node["changes"]
        ]
        text = render_comparison(compared).lines
        lines[f"{a} {b}"] = [*text, json.dumps(compared.summary(), sort_keys=True), *nodes]
    return lines


def skip_classes() -> list[type[Reason]]:
    modules = (placement_reasons, *REASON_MODULES)
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Reason)
    }
    kinds = [kind for kind in classes if kind.skip_reason is not Reason.skip_reason]
    return sorted(kinds, key=lambda kind: kind.__name__)


def left_float_reasons() -> dict[str, list[str]]:
    kinds: dict[type[Reason], list[tuple[object, ...]]] = {
        kind: [()] for kind in skip_classes()
    } | {
        placement_reasons.ExcludedNode: [("exclude_op", "Add")],
        placement_reasons.CustomDomain: [("example",)],
        placement_reasons.PresetExclusion: [(part,) for part in placement_reasons.PresetPart],
        WeightsNotConstant: [("w",)],
        placement_reasons.FloatNode: [(cause,) for cause in placement_reasons.SkipCause],
        LargeKernel: [((16, 16),)],
        placement_reasons.NonFloatWeights: [("double",)],
        placement_reasons.UnsupportedWeightsRank: [(3,)],
        placement_reasons.SmallConvolution: [(3, 8, (3, 1))],
        placement_reasons.SubgraphLayers: [(2,)],
        placement_reasons.EinsumProduct: [(why,) for why in placement_reasons.EinsumObstacle],
        DepthwiseAdd: [("add",)],
    }
    return {
        kind.__name__: [
            placement_reasons.SkippedNode(kind(placement_reasons.PLACEMENT, "n", *values)).reason
            for values in rows
        ]
        for kind, rows in kinds.items()
    }
