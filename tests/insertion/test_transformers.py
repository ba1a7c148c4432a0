import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.formats import insertion_text
from qdqtool.formats.predict_text import render
from qdqtool.formats.verdicts import verdict
from qdqtool.insertion.placement import PlacementRules, compute_placement
from qdqtool.insertion.ranges import write_table
from qdqtool.insertion.scales import MethodChoice
from qdqtool.ir.graph import Model
from qdqtool.patterns.heads import find_coordinates, find_head
from qdqtool.prediction import predict
from qdqtool.reasons.attention import MyelinCompiledRegion
from qdqtool.reasons.compiler import IntegersLost
from qdqtool.reasons.finding import Reason
from qdqtool.reasons.placement import PresetPart
from qdqtool.reasons.scales import ActivationPerChannel
from qdqtool.timing.model_variants import quantized_variant
from qdqtool.trt.result import Prediction
from qdqtool.trt.targets import TARGETS, target_named
from qdqtool.tuning.planner import Planner
from qdqtool.tuning.sites import ATTENTION, find_sites
from tests.builders.models import needs_compiler
from tests.insertion.nets import (
    Net,
    copy_model,
    detector,
    images,
    one_layer,
    require_prediction,
    run,
)
from tests.insertion.transformers import HEADS, WIDTH, Detr, Tokens, detr, samples, vit
from tests.notes import note, note_codes
from tests.slow import slow_after
from tests.trt.builder import Graph
from tools.fuzz.driver import Answer, Lab

FEW_FIRST = slow_after(
    3, sorted(TARGETS, key=("trt8.6", "trt10", "rtx1.7").__contains__, reverse=True)
)


def build(model: onnx.ModelProto) -> Answer:
    with Lab() as lab:
        return lab.answer(model)


@functools.cache
def quantize(**choices: Any) -> qdqtool.Insertion:
    return qdqtool.insert(vit(), samples(vit()), predict=False, losses=0, **choices)


def myelin_region(prediction: Prediction) -> MyelinCompiledRegion:
    (region,) = (
        c.reason for f in prediction.findings if f.code == "MYELIN-REGION" for c in f.causes
    )
    return region


@pytest.mark.parametrize("target", FEW_FIRST)
def test_matrix_products_in_summary_verdict_and_finding(target: str) -> None:
    """Two blocks have 6 Linears and 2 products of activations each.

    The head follows. A Conv embeds the patches.
    """
    prediction = predict(quantize().model, target)
    summary = prediction.summary()
    assert (summary["convolutions"], summary["int8"]) == (14, 14)
    products = [summary[f"matrix_products{kind}"] for kind in ("", "_int8", "_float")]
    assert products == [17, 13, 4] and set(prediction.float_products) == {
        f"b{i}.attn.{product}" for i in (0, 1) for product in ("qk", "av")
    }
    assert verdict(prediction).startswith("1 convolution in INT8")
    assert "13 of 17 matrix products in INT8, 4 in FP" in verdict(prediction)
    region = myelin_region(prediction)
    assert (region.norms, region.softmaxes, region.products - region.int8) == (5, 2, 4)
    assert region.products in (16, 17)  # the pooling separates the head in 8.x


@pytest.mark.parametrize(("target", "counted"), [("trt8.6", "possible"), ("trt10", "uncertain")])
def test_conversions_are_a_range_if_extent_of_myelin_is_unknown(target: str, counted: str) -> None:
    """On 8.x the Qs may be in the region. On 10, Qs after pointwise layers may be outside."""
    prediction = predict(quantize().model, target)
    region, sure = myelin_region(prediction), prediction.conversions
    assert sure is not None and getattr(region, counted) > 0
    low, high = (
        (sure - region.possible, sure) if counted == "possible" else (sure, sure + region.uncertain)
    )
    assert f"{low} to {high} Q/DQ layers" in verdict(prediction)
    assert len(prediction.uncertain_conversions) == high - low
    if counted == "possible":
        assert set(prediction.regions[0].possible) <= set(prediction.conversion_nodes)


@pytest.mark.parametrize(("target", "kernels"), [("trt10", 1), ("trt8.6", 0)])
def test_quantizer_kernel_of_myelin_is_counted_and_named(
    target: str, kernels: int, net: Net
) -> None:
    """The Q before a plain Gemm does not count as a conversion, but takes as much time."""
    net.inputs = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [8, 16])]
    net.output(net.op("Gemm", "fc", "x", net.const("w", net.rng.standard_normal((16, 32)))))
    made = qdqtool.insert(net.model(), [{"x": net.rng.random((8, 16), np.float32)}], method="max")
    prediction = predict(made.model, target)
    named = [name for region in prediction.regions for name in region.kernels]
    assert len(named) == kernels
    part = "1 Q/DQ node runs inside Myelin's layers (matrix products)"
    assert (part in verdict(prediction)) is bool(kernels)
    text = str(render(prediction, 200, everything=True))
    ends = [len(label) for label in re.findall(r"^  (?:Matrix products|Confidence) +", text, re.M)]
    assert len(ends) == 2 and ends[0] == ends[1] and all(name in text for name in named)


@pytest.mark.parametrize("target", ["trt8.6", "trt10", "rtx1.7"])
def test_prediction_without_attention_has_no_myelin_region(target: str) -> None:
    prediction = predict(detector(), target)
    assert "MYELIN-REGION" not in prediction.findings_by_code()
    assert "matrix product" not in verdict(prediction)
    assert prediction.summary()["matrix_products"] == 0


@pytest.mark.parametrize("attention", ["int8", "float"])
def test_attention_int8_without_attention_is_a_note(attention: str) -> None:
    result = qdqtool.insert(one_layer(), images(2), attention=attention, predict=False)
    assert ("no-attention" in note_codes(result.notes)) is (attention == "int8")
    assert len(result.activations) == 1


def test_unused_and_constant_products_are_not_counted() -> None:
    model = copy_model(vit())
    model.graph.node.extend(
        onnx.helper.make_node("MatMul", operands, [name], name)
        for name, operands in (
            ("unused", ["b0.attn.q.add.out", "b0.attn.k.heads.out"]),
            ("folded", ["b0.fc1.weight", "b0.fc2.weight"]),
        )
    )
    for target in ("trt8.6", "trt10"):
        assert predict(model, target).summary()["matrix_products"] == 17
    assert "folded" not in predict(model, "rtx1.7").float_products


# Attention in INT8 --------------------------------------------------------------------------------


def is_left_by_attention(reason: Reason) -> bool:
    return getattr(reason, "part", None) == PresetPart.ATTENTION


PRODUCTS = {f"b{i}.attn.{product}" for i in (0, 1) for product in ("qk", "av")}


def test_attention_is_float_by_default() -> None:
    skipped = [s.record for s in quantize().skipped]
    assert {r.node for r in skipped} == PRODUCTS and all(map(is_left_by_attention, skipped))
    explicit = quantize(attention="float").model
    assert explicit.SerializeToString() == quantize().model.SerializeToString()


@pytest.mark.parametrize(
    ("choices", "skipped"),
    [
        ({"attention": "int8", "exclude": (r"\.qk$",)}, {"b0.attn.qk", "b1.attn.qk"}),
        ({"include": (r"b1\.attn\.av$",)}, PRODUCTS - {"b1.attn.av"}),
    ],
    ids=["exclude", "include"],
)
def test_patterns_choose_products_of_attention(choices: dict[str, Any], skipped: set[str]) -> None:
    assert {s.node for s in quantize(**choices).skipped} == skipped


def test_int8_attention_changes_outputs_little() -> None:
    feeds = samples(vit(), 1)[0]
    (before,), (after,) = run(vit(), feeds), run(quantize(attention="int8").model, feeds)
    assert np.linalg.norm(after - before) < 0.05 * np.linalg.norm(before)


def test_int8_attention_quantizes_inputs_of_products() -> None:
    """The Softmax has the scale 1/127 for any data.

    INT8 attention does not change other scales.
    """
    result = quantize(attention="int8")
    added, before = ({q.tensor: q for q in r.activations} for r in (result, quantize()))
    assert {t: q.scale for t, q in added.items() if t in before} == {
        t: q.scale for t, q in before.items()
    }
    assert (added.keys() - before.keys()) == {
        f"b{i}.attn.{t}.out" for i in (0, 1) for t in ("q.heads", "k.heads", "v.heads", "soft")
    }
    assert {(q.scale, q.method) for t, q in added.items() if t.endswith(".soft.out")} == {
        (float(np.float32(1 / 127)), "fixed")
    }
    # The two attentions have four products, which have no weights.
    assert f"Quantized {len(result.weights) + 4} layers " in str(
        insertion_text.render(replace(result, prediction=predict(result.model)))
    )
    assert not result.skipped


def test_int8_attention_with_calibration_table(tmp_path: Path) -> None:
    path = tmp_path / "table.cache"
    write_table(quantize(), path)
    with open(path, "a", encoding="ascii") as file:
        for i in (0, 1):
            file.writelines(f"b{i}.attn.{part}.heads.out: 3d010a14\n" for part in "qkv")
    result = qdqtool.insert(vit(), calib_table=path, attention="int8", predict=False)
    scales = {q.tensor: q.scale for q in result.activations}
    assert scales["b0.attn.soft.out"] == float(np.float32(1 / 127))
    assert len(scales) == len(quantize().activations) + 8


@pytest.mark.parametrize("target", FEW_FIRST)
def test_int8_attention_is_predicted_in_int8(target: str) -> None:
    prediction = predict(quantize(attention="int8").model, target)
    assert prediction.summary()["matrix_products_int8"] == 17 and not prediction.float_products
    assert {c.name for c in prediction.convolutions if c.weights == "computed"} == PRODUCTS


@needs_compiler
@pytest.mark.parametrize("attention", slow_after(1, ["int8", "float"]))
def test_tensorrt_rtx_builds_attention_as_predicted(attention: str) -> None:
    """TensorRT-RTX fuses each attention; it reads INT8 if the products' inputs are quantized."""
    model = quantize(attention=attention, target="rtx1.7").model
    with Lab() as lab:
        answer, built = (
            lab.answer(model),
            {n.name: str(n.precision) for n in lab.build(model).nodes},
        )
    assert (answer.convolutions, answer.wrong, answer.absent) == (
        14 if attention == "float" else 18,
        [],
        0,
    )
    assert {built[p] for p in PRODUCTS} == ({"INT8"} if attention == "int8" else {"FP16"})


@pytest.mark.parametrize("attention", ["float", "int8"])
def test_tuning_sites_of_attention(attention: str) -> None:
    planner = Planner(
        Model(vit()), PlacementRules(attention=attention), target_named("trt10"), MethodChoice()
    )
    sites = {s.name: s.nodes for s in find_sites(planner) if s.kind == ATTENTION}
    expected = {p: (p,) for p in PRODUCTS} | {
        f"attention of b{i}.attn.soft": (f"b{i}.attn.qk", f"b{i}.attn.av") for i in (0, 1)
    }
    assert sites == (expected if attention == "int8" else {})


# The residual stream ------------------------------------------------------------------------------


def add_pairs(model: onnx.ModelProto, *consumers: str) -> onnx.ModelProto:
    copy = copy_model(model)
    del copy.graph.node[:]
    for node in model.graph.node:
        pairs = [f"{node.name}.{i}" for i in range(len(node.input)) if node.name in consumers]
        for base, tensor in zip(pairs, node.input, strict=False):
            parameters = [f"{base}.scale", f"{base}.zero"]
            copy.graph.initializer.extend(
                onnx.numpy_helper.from_array(value, name)
                for name, value in zip(parameters, (np.float32(0.05), np.int8(0)), strict=True)
            )
            for op, source, output in (
                ("Quantize", tensor, "q"),
                ("Dequantize", f"{base}.q", "dq"),
            ):
                inputs, outputs = [source, *parameters], [f"{base}.{output}"]
                copy.graph.node.add(
                    op_type=f"{op}Linear", name=f"{base}.{op}", input=inputs, output=outputs
                )
        copy.graph.node.append(node)
        copy.graph.node[-1].input[:] = [f"{base}.dq" for base in pairs] or node.input
    return copy


@functools.cache
def insert_vit(pieces: bool) -> onnx.ModelProto:
    model = vit(pieces=pieces)
    return qdqtool.insert(model, samples(model), predict=False, method="max", losses=0).model


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("target", ["trt8.5", "trt10", "rtx1.7"])
def test_pairs_in_residual_stream_are_warned_of(pieces: bool, target: str) -> None:
    """The stream is every sum that a normalization reads; insertion places no pair there."""
    model = add_pairs(vit(pieces=pieces), "b0.res1", "b1.res2", "b0.fc1.add")
    assert {
        f.node: f.severity for f in predict(model, target).findings if f.code == "RESIDUAL-STREAM"
    } == {"b0.res1": "warning", "b1.res2": "warning"}
    assert "RESIDUAL-STREAM" not in predict(insert_vit(pieces), target).findings_by_code()


@pytest.mark.parametrize("target", FEW_FIRST)
def test_per_channel_scales_of_linear_input_run_float(target: str) -> None:
    """TensorRT takes one scale per activation; along the summed channels no target has INT8."""
    model = copy_model(quantize().model)
    q = next(
        n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "b0.ln2.out"
    )
    for node in (q, next(n for n in model.graph.node if n.input and n.input[0] == q.output[0])):
        for position, value in (
            (1, np.linspace(0.01, 0.1, 16, dtype=np.float32)),
            (2, np.zeros(16, np.int8)),
        ):
            node.input[position] = f"{node.name}.by_channel.{position}"
            model.graph.initializer.append(
                onnx.numpy_helper.from_array(value, node.input[position])
            )
        node.attribute.append(onnx.helper.make_attribute("axis", 2))
    prediction = predict(model, target)
    assert not prediction.convolution("b0.fc1").is_int8
    (finding,) = [f for f in prediction.findings if f.code == "ACT-PER-CHANNEL"]
    (cause,) = {type(c.reason) for c in finding.causes}
    assert cause is (IntegersLost if target == "rtx1.7" else ActivationPerChannel)


@pytest.mark.parametrize(("axis", "precision"), [(1, "INT8"), (2, "FP32")])
def test_tensorrt_rtx_takes_scales_per_row(axis: int, precision: str) -> None:
    """Scales per token leave the product in INT8 without a finding.

    Scales per summed channel do not.
    """
    graph = Graph()
    x = graph.pair(graph.input(1, 8, 64), "in", np.linspace(0.01, 0.1, (1, 8, 64)[axis]), axis=axis)
    w = graph.pair(
        graph.const("w", np.ones((64, 32), np.float32)), "weight", np.full(32, 0.01), axis=1
    )
    prediction = predict(graph.model(graph.op("MatMul", [x, w], "fc")), "rtx1.7")
    assert prediction.convolution("fc").precision == precision
    assert {f.code for f in prediction.findings} & {"ACT-PER-CHANNEL", "W-AXIS"} == (
        set() if axis == 1 else {"ACT-PER-CHANNEL"}
    )


# Heads of DETRs -----------------------------------------------------------------------------------

KINDS = ("rt-detr", "dab-detr", "rf-detr", "d-fine", "d-fine column")


def coordinate_nodes(kind: str) -> set[str]:
    boxes = {f"{head}.{i}" for head in ("first", "d0.box", "d1.box") for i in range(3)}
    project = {"d0.project", "d1.project"} if kind == "d-fine column" else set()
    return (
        boxes | project | {f"d{i}.{part}" for i in (0, 1) for part in ("cross.offsets", "place.0")}
    )


@functools.cache
def insert_detr(kind: str, **choices: Any) -> qdqtool.Insertion:
    return qdqtool.insert(
        detr(kind), samples(detr(kind), 1), predict=False, method="max", losses=0, **choices
    )


@pytest.mark.parametrize("kind", KINDS)
def test_coordinates_stay_float(kind: str) -> None:
    vectors = {"d0.project", "d1.project"} if kind == "d-fine" else set()  # never quantized
    for head, nodes in {
        "box": coordinate_nodes(kind),
        "none": set(),
        "float": coordinate_nodes(kind) | {"select", "classes"},
    }.items():
        skipped = compute_placement(Model(detr(kind)), PlacementRules(head=head)).skipped
        assert {s.node for s in skipped if not is_left_by_attention(s.record)} == nodes | vectors


def test_find_coordinates() -> None:
    model = Model(detr("rt-detr"))
    places = find_coordinates(model, find_head(model).finals)
    makers, mlps, readers, scores = (
        {model.nodes[i].name for i in kind}
        for kind in (places.producers, places.mlps, places.consumers, places.scores)
    )
    heads = ("first", "d0.box", "d1.box")
    assert makers == {*(f"{head}.2" for head in heads), "d0.cross.offsets", "d1.cross.offsets"}
    assert mlps == {f"{head}.{i}" for head in heads for i in (0, 1)}
    assert readers == {"d0.place.0", "d1.place.0"} and scores == {"select"}


@pytest.mark.parametrize(
    ("kind", "target"),
    slow_after(2, [(kind, ("trt8.6", "trt10", "rtx1.7")[i % 3]) for i, kind in enumerate(KINDS)]),
)
def test_int8_coordinates_are_warned_of(kind: str, target: str) -> None:
    findings = predict(insert_detr(kind, head="none").model, target).findings
    assert {f.node for f in findings if f.code == "HEAD-QUANT"} == coordinate_nodes(kind)
    assert "HEAD-QUANT" not in predict(insert_detr(kind).model, target).findings_by_code()


def find_skipped_nodes(net: Net) -> set[str]:
    return {s.node for s in compute_placement(net.index(), PlacementRules()).skipped}


def test_box_mlp_next_to_scores_stays_float() -> None:
    """DETR ends with an MLP of four columns next to a Linear of scores."""
    net = Detr(3, 32)
    x = net.block("b", net.embed(8))
    net.output(net.op("Sigmoid", "boxes", net.mlp("box", x, 4)), net.linear("classes", x, 16, 6))
    skipped = find_skipped_nodes(net)
    assert {"box.0", "box.1", "box.2"} <= skipped and "classes" not in skipped


def test_classifier_of_four_classes_is_no_box_mlp() -> None:
    net = Detr(3, 32)
    assert find_skipped_nodes(net.output(net.mlp("classes", net.block("b", net.embed(8)), 4))) == {
        "b.attn.qk",
        "b.attn.av",
    }


def test_convolution_of_flow_grid_stays_float() -> None:
    net = Net(3, 16)
    x = net.op("Relu", "r0", net.conv("c0", "x", 3, 32))
    flow = net.conv("flow", net.op("Relu", "r1", net.conv("c1", x, 32, 32)), 32, 2)
    last = net.op("Transpose", "last", flow, perm=[0, 2, 3, 1])
    grid = net.op("Add", "moved", last, net.const("at", np.zeros(2)))
    assert find_skipped_nodes(
        net.output(net.conv("end", net.op("GridSample", "warped", x, grid), 32, 16))
    ) == {"flow"}


@needs_compiler
@pytest.mark.parametrize("kind", slow_after(1, KINDS))
def test_tensorrt_rtx_builds_detr_as_predicted(kind: str) -> None:
    answer = build(insert_detr(kind, target="rtx1.7").model)
    assert answer.status == "built" and not answer.wrong and answer.convolutions > 20


# The patch embedding, and options without effect --------------------------------------------------

PATCHES = pytest.mark.parametrize(
    ("patch", "target", "is_float"),
    [
        (16, "trt10", True),
        (16, "trt8.6", True),
        (16, "rtx1.7", False),
        (8, "trt10", False),
    ],
)


@PATCHES
@pytest.mark.parametrize("include", [(), ("^embed$",)], ids=["default", "included"])
def test_patch_embedding_stays_float_if_prediction_advises_it(
    patch: int, target: str, is_float: bool, include: tuple[str, ...]
) -> None:
    model = vit(patch=patch)
    result = qdqtool.insert(
        model, samples(model, 1), target=target, include=include, method="max", losses=0
    )
    assert ("embed" in {s.node for s in result.skipped}) is (is_float and not include)
    advised = "KERNEL-LARGE" in require_prediction(result).findings_by_code()
    assert advised is (is_float and bool(include))


@PATCHES
def test_best_placement_treats_patch_embedding_as_insert(
    patch: int, target: str, is_float: bool
) -> None:
    twin = Model(quantized_variant(Model(vit(patch=patch)), target_named(target)).proto)
    assert ({n.op for n in twin.consumers("x")} == {"Conv"}) is is_float


@pytest.mark.parametrize("residual", ["both", "skip", "auto", "none"])
def test_residual_without_effect_is_a_note(residual: str) -> None:
    notes = quantize(residual=residual).notes
    assert (note("no-residual", residual=residual) in notes) is (residual in ("both", "skip"))


EINSUMS = {
    "b0.attn.qk": "...id,...dj->...ij",
    "b1.attn.av": "bhij,bhjd->bhid",
    "b1.fc1": "...j,jk->...k",
}


def replace_by_einsums(model: onnx.ModelProto) -> onnx.ModelProto:
    result = copy_model(model)
    for node in result.graph.node:
        if node.name in EINSUMS:
            node.op_type = "Einsum"
            node.attribute.append(onnx.helper.make_attribute("equation", EINSUMS[node.name]))
    return result


@pytest.mark.parametrize("target", FEW_FIRST)
def test_einsum_products_are_counted(target: str) -> None:
    """TensorRT computes an Einsum of a Q/DQ model in float, TensorRT-RTX in INT8."""
    plain, int8 = quantize().model, quantize(attention="int8").model
    rtx = target_named(target).is_rtx
    for model, counts, warned in (
        (plain, (17, 13 - (not rtx), 4 + (not rtx)), {"b1.fc1"}),
        (int8, (17, 17 - 3 * (not rtx), 3 * (not rtx)), set(EINSUMS)),
    ):
        prediction = predict(replace_by_einsums(model), target)
        summary = prediction.summary()
        assert (
            tuple(summary[f"matrix_products{kind}"] for kind in ("", "_int8", "_float")) == counts
        )
        assert (
            f"{'all' if counts[1] == 17 else f'{counts[1]} of'} 17 matrix products in INT8"
            in verdict(prediction)
        )
        nodes = {f.node for f in prediction.findings if f.code == "EINSUM-FLOAT"}
        assert nodes == (set() if rtx else warned)
        assert myelin_region(prediction).int8 == myelin_region(prediction).products - counts[2]


@pytest.mark.parametrize("target", FEW_FIRST)
def test_insert_replaces_einsums_by_matmuls(target: str) -> None:
    options = {"attention": "int8", "target": target, "predict": False, "losses": 0}
    result = qdqtool.insert(replace_by_einsums(vit()), samples(vit()), **options)
    assert predict(result.model, target).summary()["matrix_products_int8"] == 17


@pytest.mark.parametrize("target", FEW_FIRST)
@pytest.mark.parametrize("attention", ["float", "int8"])
def test_projections_with_three_dimensional_weights_are_quantized(
    target: str, attention: str
) -> None:
    """In Keras and Flax, heads are axes of the weights, and every product is an Einsum."""
    net = Tokens(3, 32)
    x, part = net.embed(8), WIDTH // HEADS
    q, k, v = (
        net.op(
            "Einsum",
            n,
            x,
            net.const(f"{n}.w", net.rng.standard_normal((WIDTH, HEADS, part)) / 4),
            equation="abc,cde->abde",
        )
        for n in "qkv"
    )
    scores = net.op(
        "Softmax", "soft", net.op("Einsum", "qk", k, q, equation="aecd,abcd->acbe"), axis=-1
    )
    joined = net.op("Einsum", "av", scores, v, equation="acbe,aecd->abcd")
    weight = net.const("out.w", net.rng.standard_normal((HEADS, part, WIDTH)) / 4)
    net.output(net.op("Einsum", "out", joined, weight, equation="abcd,cde->abe"))
    model, int8 = net.model(), attention == "int8"
    result = qdqtool.insert(model, samples(model), attention=attention, target=target, losses=0)
    assert {s.node.split("/")[0] for s in result.skipped} == (set() if int8 else {"qk", "av"})
    summary = require_prediction(result).summary()
    assert (summary["matrix_products"], summary["matrix_products_int8"]) == (6, 6 if int8 else 4)
    (before,), (after,) = (run(m, samples(model, 1)[0]) for m in (model, result.model))
    assert np.abs(after - before).max() < 0.05 * np.abs(before).max()


@needs_compiler
def test_tensorrt_rtx_builds_einsums_as_predicted() -> None:
    answer = build(replace_by_einsums(quantize(attention="int8", target="rtx1.7").model))
    assert (answer.convolutions + answer.absent, answer.wrong) == (18, []) and answer.absent <= 2
