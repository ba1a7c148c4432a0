"""Insertion into networks with attention, and what is predicted of them."""

import functools
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.base.notes import Remark, remarks
from qdqtool.builders.child import is_installed
from qdqtool.errors import QdqtoolError
from qdqtool.explain.left_float import Part
from qdqtool.insertion.placement import Rules, place
from qdqtool.model.graph import Model
from qdqtool.model.heads import find_coordinates, find_head
from qdqtool.prediction import predict
from qdqtool.render.predict_text import render, verdict
from qdqtool.timing.twin import best_placement
from qdqtool.trt.faults import TakenByMyelin
from qdqtool.trt.refusals import ActivationPerChannel
from qdqtool.trt.rtx.operands import IntegersLost
from qdqtool.trt.targets import TARGETS, target_named
from qdqtool.types import Prediction, Refusal
from tests.insertion.nets import Net, copied, detector, images, run
from tests.insertion.transformers import HEADS, WIDTH, Tokens, detr, samples, vit
from tests.slow import slow_after
from tests.trt.builder import Graph

FEW_FIRST = slow_after(
    3, sorted(TARGETS, key=("trt8.6", "trt10", "rtx1.7").__contains__, reverse=True)
)
needs_compiler = pytest.mark.skipif(
    not is_installed("tensorrt_rtx"), reason="TensorRT-RTX is not installed"
)


@functools.cache
def quantized(**choices: Any) -> qdqtool.Insertion:
    return qdqtool.insert(vit(), samples(vit()), predict=False, losses=0, **choices)


def taken(prediction: Prediction) -> TakenByMyelin:
    (found,) = (
        c.refusal for f in prediction.findings if f.code == "MYELIN-REGION" for c in f.causes
    )
    assert isinstance(found, TakenByMyelin)
    return found


@pytest.mark.parametrize("target", FEW_FIRST)
def test_products_are_counted_alike_in_json_headline_and_findings(target: str) -> None:
    """2 blocks of 6 Linears and 2 products of activations, and the head; one convolution embeds the patches."""
    prediction = predict(quantized().model, target)
    summary = prediction.summary()
    assert (summary["convolutions"], summary["int8"]) == (14, 14)
    products = [summary[f"matrix_products{kind}"] for kind in ("", "_int8", "_float")]
    assert products == [17, 13, 4] and set(prediction.float_products) == {
        f"b{i}.attn.{product}" for i in (0, 1) for product in ("qk", "av")
    }
    assert verdict(prediction).startswith("1 convolution: 1 INT8")
    assert "17 matrix products: 13 INT8, 4 float" in verdict(prediction)
    region = taken(prediction)
    assert region.norms == 5 and region.softmaxes == 2
    assert region.int8 == region.products - 4 and region.products in (
        16,
        17,
    )  # 8.x: the pooling cuts the head off


@pytest.mark.parametrize(("target", "counted"), [("trt8.6", "possible"), ("trt10", "uncertain")])
def test_conversions_are_a_range_where_the_reach_of_myelin_is_not_known(
    target: str, counted: str
) -> None:
    """8.x: those of its Qs may be in it; 10: those behind pointwise layers may be outside."""
    prediction = predict(quantized().model, target)
    region = taken(prediction)
    sure = prediction.conversions
    assert sure is not None and getattr(region, counted) > 0
    low, high = (
        (sure - region.possible, sure) if counted == "possible" else (sure, sure + region.uncertain)
    )
    assert f"{low} to {high} conversions" in verdict(prediction)
    if counted == "possible":
        assert set(prediction.regions[0].possible) <= set(prediction.conversion_nodes)


@pytest.mark.parametrize(("target", "kernels"), [("trt10", 1), ("trt8.6", 0)])
def test_a_quantizer_that_is_a_kernel_of_myelin_is_counted_and_named(
    target: str, kernels: int
) -> None:
    """In front of a plain Gemm (gemm-mlp-trt10): no conversion of the engine, but as much to do."""
    net = Net()
    net.inputs = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [8, 16])]
    net.output(net.op("Gemm", "fc", "x", net.const("w", net.rng.standard_normal((16, 32)))))
    data = [{"x": net.rng.random((8, 16), np.float32)}]
    prediction = predict(
        qdqtool.insert(net.model(), data, method="max", target=target, predict=False).model, target
    )
    named = [name for region in prediction.regions for name in region.kernels]
    assert len(named) == kernels
    assert ("1 Q/DQ kernel of Myelin" in verdict(prediction)) is bool(kernels)
    assert all(name in render(prediction, 200) for name in named)


def test_networks_without_attention() -> None:
    for target in ("trt8.6", "trt10", "rtx1.7"):
        prediction = predict(detector(), target)
        assert "MYELIN-REGION" not in prediction.findings_by_code()
        assert "matrix product" not in verdict(prediction)
        assert prediction.summary()["matrix_products"] == 0
    net = Net()
    net.output(net.conv("c", "x"))
    result = qdqtool.insert(net.model(), images(2), attention="int8", predict=False)
    assert Remark.NO_ATTENTION in remarks(result.notes) and len(result.activations) == 1
    with pytest.raises(QdqtoolError, match="choose one of"):
        qdqtool.insert(net.model(), images(2), attention="int4")


def test_dead_and_constant_products_are_not_counted() -> None:
    model = copied(vit())
    gone = onnx.helper.make_node(
        "MatMul", ["b0.attn.q.add.out", "b0.attn.k.heads.out"], ["never"], "never"
    )
    model.graph.node.append(gone)
    folded = onnx.helper.make_node(
        "MatMul", ["b0.fc1.weight", "b0.fc2.weight"], ["folded"], "folded"
    )
    model.graph.node.append(folded)
    for target in ("trt8.6", "trt10"):
        assert predict(model, target).summary()["matrix_products"] == 17
    assert "folded" not in predict(model, "rtx1.7").float_products


# Attention in INT8 ----------------------------------------------------------------------------------------------------


def of_network(refusal: Refusal) -> bool:
    """Whether something else than the preset of attention leaves a node float."""
    return getattr(refusal, "what", None) != Part.ATTENTION


PRODUCTS = {f"b{i}.attn.{product}" for i in (0, 1) for product in ("qk", "av")}


def test_attention_is_a_choice() -> None:
    skipped = [s.refusal for s in quantized().skipped]
    assert {r.node for r in skipped} == PRODUCTS and not any(map(of_network, skipped))
    assert (
        quantized(attention="float").model.SerializeToString()
        == quantized().model.SerializeToString()
    )
    result = quantized(attention="int8", exclude=(r"\.qk$",))
    assert {s.node for s in result.skipped} == {"b0.attn.qk", "b1.attn.qk"}
    one = quantized(include=(r"b1\.attn\.av$",))
    assert {s.node for s in one.skipped} == PRODUCTS - {"b1.attn.av"}
    feeds = samples(vit(), 1)[0]
    (expected,), (found,) = run(vit(), feeds), run(quantized(attention="int8").model, feeds)
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def test_attention_in_int8(tmp_path: Any) -> None:
    """Both inputs of both products; the Softmax's scale is 1/127 whatever the data are, all others as without."""
    result = quantized(attention="int8")
    added, before = ({q.tensor: q for q in r.activations} for r in (result, quantized()))
    assert {t: q.scale for t, q in added.items() if t in before} == {
        t: q.scale for t, q in before.items()
    }
    new = added.keys() - before.keys()
    assert new == {
        f"b{i}.attn.{t}.out" for i in (0, 1) for t in ("q.heads", "k.heads", "v.heads", "soft")
    }
    for i in (0, 1):
        soft = added[f"b{i}.attn.soft.out"]
        assert soft.scale == float(np.float32(1 / 127)) and soft.method == "fixed"
    assert not result.skipped
    from qdqtool.insertion.inputs import write_table

    path = tmp_path / "table.cache"
    write_table(quantized(), path)
    with open(path, "a", encoding="ascii") as file:
        for i in (0, 1):
            file.writelines(f"b{i}.attn.{part}.heads.out: 3d010a14\n" for part in "qkv")
    result = qdqtool.insert(vit(), calib_table=path, attention="int8", predict=False)
    scales = {q.tensor: q.scale for q in result.activations}
    assert (
        scales["b0.attn.soft.out"] == float(np.float32(1 / 127))
        and len(scales) == len(quantized().activations) + 8
    )


@pytest.mark.parametrize("target", FEW_FIRST)
def test_predicted_of_attention_in_int8(target: str) -> None:
    prediction = predict(quantized(attention="int8").model, target)
    assert prediction.summary()["matrix_products_int8"] == 17 and not prediction.float_products
    assert {c.name for c in prediction.convolutions if c.weights == "computed"} == PRODUCTS


@needs_compiler
@pytest.mark.parametrize("attention", slow_after(1, ["int8", "float"]))
def test_tensorrt_rtx_makes_one_kernel_of_each_attention(attention: str) -> None:
    """It reads INT8 where the products' inputs are quantized: all 14 or 18 layers are as predicted."""
    from tools.fuzz.driver import Lab

    model = quantized(attention=attention, target="rtx1.7").model
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
def test_tune_can_take_attention_back(attention: str) -> None:
    """Each product alone and both of an attention are choices."""
    from qdqtool.insertion.scales import MethodChoice
    from qdqtool.trt.targets import target_named
    from qdqtool.tuning.configuration import Planner
    from qdqtool.tuning.sites import ATTENTION, find_sites

    planner = Planner(
        Model(vit()), Rules(attention=attention), target_named("trt10"), MethodChoice()
    )
    found = {s.name: s.nodes for s in find_sites(planner) if s.kind == ATTENTION}
    expected = {p: (p,) for p in PRODUCTS} | {
        f"attention of b{i}.attn.soft": (f"b{i}.attn.qk", f"b{i}.attn.av") for i in (0, 1)
    }
    assert found == (expected if attention == "int8" else {})


# The residual stream --------------------------------------------------------------------------------------------------


def with_pairs(model: onnx.ModelProto, *readers: str) -> onnx.ModelProto:
    """The same with a pair in front of every input of these nodes."""
    copy = copied(model)
    nodes = []
    for node in copy.graph.node:
        for i, tensor in enumerate(node.input if node.name in readers else ()):
            base = f"{node.name}.{i}"
            copy.graph.initializer.append(
                onnx.numpy_helper.from_array(np.float32(0.05), f"{base}.scale")
            )
            copy.graph.initializer.append(onnx.numpy_helper.from_array(np.int8(0), f"{base}.zero"))
            parameters = [f"{base}.scale", f"{base}.zero"]
            nodes.append(
                onnx.helper.make_node(
                    "QuantizeLinear", [tensor, *parameters], [f"{base}.q"], f"{base}.Q"
                )
            )
            nodes.append(
                onnx.helper.make_node(
                    "DequantizeLinear", [f"{base}.q", *parameters], [f"{base}.dq"], f"{base}.DQ"
                )
            )
            node.input[i] = f"{base}.dq"
        nodes.append(node)
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy


@functools.cache
def _inserted(pieces: bool) -> onnx.ModelProto:
    return qdqtool.insert(
        vit(pieces=pieces), samples(vit()), predict=False, method="max", losses=0
    ).model


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("target", ["trt8.5", "trt10", "rtx1.7"])
def test_pairs_in_the_residual_stream_are_warned_of(pieces: bool, target: str) -> None:
    """Each sum that a normalization reads; what insert places has none."""
    made = with_pairs(vit(pieces=pieces), "b0.res1", "b1.res2", "b0.fc1.add")
    found = {
        f.node: f.severity for f in predict(made, target).findings if f.code == "RESIDUAL-STREAM"
    }
    assert found == {"b0.res1": "warning", "b1.res2": "warning"}
    assert "RESIDUAL-STREAM" not in predict(_inserted(pieces), target).findings_by_code()


@pytest.mark.parametrize("target", FEW_FIRST)
def test_scales_by_channel_of_a_linears_input_are_refused_with_a_reason(target: str) -> None:
    """TensorRT takes one scale for a whole activation; along the channels that are summed up no target has INT8."""
    model = copied(quantized().model)
    q = next(
        n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "b0.ln2.out"
    )
    dq = next(n for n in model.graph.node if n.input and n.input[0] == q.output[0])
    for node in (q, dq):
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
    (found,) = [f for f in prediction.findings if f.code == "ACT-PER-CHANNEL"]
    (cause,) = {type(c.refusal) for c in found.causes}
    assert cause is (IntegersLost if target == "rtx1.7" else ActivationPerChannel)


@pytest.mark.parametrize(("axis", "precision"), [(1, "INT8"), (2, "FP32")])
def test_tensorrt_rtx_takes_scales_along_the_rows_of_a_product(axis: int, precision: str) -> None:
    """As the compiler does: those of tokens leave it INT8, without a finding; those of summed channels do not."""
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


# Heads of DETRs -------------------------------------------------------------------------------------------------------

KINDS = ("rt-detr", "dab-detr", "rf-detr", "d-fine", "d-fine column")


def expected_places(kind: str) -> set[str]:
    """What makes boxes and sampling points, the MLPs in front, and what reads reference points."""
    boxes = {f"{head}.{i}" for head in ("first", "d0.box", "d1.box") for i in range(3)}
    project = (
        {"d0.project", "d1.project"} if kind == "d-fine column" else set()
    )  # a vector takes no Q/DQ
    return (
        boxes | project | {f"d{i}.{part}" for i in (0, 1) for part in ("cross.offsets", "place.0")}
    )


@functools.cache
def inserted(kind: str, **choices: Any) -> qdqtool.Insertion:
    return qdqtool.insert(
        detr(kind), samples(detr(kind), 1), predict=False, method="max", losses=0, **choices
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_makes_places_stays_float(kind: str) -> None:
    vectors = (
        {"d0.project", "d1.project"} if kind == "d-fine" else set()
    )  # which take no Q/DQ anyway
    expected = {
        "box": expected_places(kind),
        "none": set(),
        "float": expected_places(kind) | {"select", "classes"},
    }
    for head, nodes in expected.items():
        skipped = place(Model(detr(kind)), Rules(head=head)).skipped
        assert {s.node for s in skipped if of_network(s.refusal)} == nodes | vectors


def test_each_layer_at_places_is_of_one_kind() -> None:
    model = Model(detr("rt-detr"))
    found = find_coordinates(model, find_head(model).finals)
    makers, mlps, readers, scores = (
        {model.nodes[i].name for i in kind}
        for kind in (found.makers, found.mlps, found.readers, found.scores)
    )
    heads = ("first", "d0.box", "d1.box")
    assert makers == {*(f"{head}.2" for head in heads), "d0.cross.offsets", "d1.cross.offsets"}
    assert mlps == {f"{head}.{i}" for head in heads for i in (0, 1)}
    assert readers == {"d0.place.0", "d1.place.0"} and scores == {"select"}


@pytest.mark.parametrize(
    ("kind", "target"),
    slow_after(2, [(kind, ("trt8.6", "trt10", "rtx1.7")[i % 3]) for i, kind in enumerate(KINDS)]),
)
def test_places_in_int8_are_warned_of(kind: str, target: str) -> None:
    found = {
        f.node
        for f in predict(inserted(kind, head="none").model, target).findings
        if f.code == "HEAD-QUANT"
    }
    assert found == expected_places(kind)
    assert "HEAD-QUANT" not in predict(inserted(kind).model, target).findings_by_code()


def test_ends_of_detectors_and_flows() -> None:
    """As DETR ends: an MLP of four columns beside one Linear of scores; a classifier of four classes is none."""
    from tests.insertion.transformers import Detr

    net = Detr(3, 32)
    x = net.block("b", net.embed(8))
    net.output(net.op("Sigmoid", "boxes", net.mlp("box", x, 4)), net.linear("classes", x, 16, 6))
    skipped = {s.node for s in place(net.index(), Rules()).skipped}
    assert {"box.0", "box.1", "box.2"} <= skipped and "classes" not in skipped
    net = Detr(3, 32)
    net.output(net.mlp("classes", net.block("b", net.embed(8)), 4))
    skipped = {s.node for s in place(net.index(), Rules()).skipped}
    assert skipped == {"b.attn.qk", "b.attn.av"}
    # What moves a picture: the last convolution makes the grid, those in front of it are as any other
    net = Net(3, 16)
    x = net.op("Relu", "r0", net.conv("c0", "x", 3, 32))
    flow = net.conv("flow", net.op("Relu", "r1", net.conv("c1", x, 32, 32)), 32, 2)
    grid = net.op(
        "Add",
        "moved",
        net.op("Transpose", "last", flow, perm=[0, 2, 3, 1]),
        net.const("at", np.zeros(2)),
    )
    net.output(net.conv("end", net.op("GridSample", "warped", x, grid), 32, 16))
    assert {s.node for s in place(net.index(), Rules()).skipped} == {"flow"}


@needs_compiler
@pytest.mark.parametrize("kind", slow_after(1, KINDS))
def test_tensorrt_rtx_builds_a_detr_as_predicted(kind: str) -> None:
    """Values that GridSample reads come from an INT8 Linear and are float: no Q passes it."""
    from tools.fuzz.driver import Lab

    with Lab() as lab:
        answer = lab.answer(inserted(kind, target="rtx1.7").model)
    assert answer.status == "built" and not answer.wrong and answer.convolutions > 20


# The patch embedding, and options that change nothing -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("patch", "target", "named"),
    [
        (16, "trt10", True),
        (16, "trt8.6", True),
        (16, "rtx1.7", False),
        (8, "trt10", False),
    ],
)
def test_the_patch_embedding_stays_float_where_prediction_would_advise_it(
    patch: int, target: str, named: bool
) -> None:
    model = vit(patch=patch)
    result = qdqtool.insert(model, samples(model, 1), target=target, method="max", losses=0)
    assert ("embed" in {s.node for s in result.skipped}) is named
    assert (
        result.prediction is not None and "KERNEL-LARGE" not in result.prediction.findings_by_code()
    )
    if named:
        wanted = qdqtool.insert(
            model, samples(model, 1), target=target, include=("^embed$",), method="max", losses=0
        )
        assert "embed" not in {s.node for s in wanted.skipped}
        assert (
            wanted.prediction is not None and "KERNEL-LARGE" in wanted.prediction.findings_by_code()
        )
    twin = Model(
        best_placement(Model(model), target_named(target)).proto
    )  # the estimates place alike
    assert ({n.op for n in twin.readers("x")} == {"Conv"}) is named


@pytest.mark.parametrize("residual", ["both", "skip", "auto", "none"])
def test_a_choice_of_residuals_that_changes_nothing_says_so(residual: str) -> None:
    notes = quantized(residual=residual).notes
    assert (Remark.NO_RESIDUAL(residual=residual) in notes) is (residual in ("both", "skip"))


EINSUMS = {
    "b0.attn.qk": "...id,...dj->...ij",
    "b1.attn.av": "bhij,bhjd->bhid",
    "b1.fc1": "...j,jk->...k",
}


def with_einsums(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same, where Einsums compute some of the products."""
    changed = copied(model)
    for node in changed.graph.node:
        if node.name in EINSUMS:
            node.op_type = "Einsum"
            node.attribute.append(onnx.helper.make_attribute("equation", EINSUMS[node.name]))
    return changed


@pytest.mark.parametrize("target", FEW_FIRST)
def test_products_in_einsums_are_counted_and_insert_writes_matmuls(target: str) -> None:
    """In a Q/DQ model TensorRT computes them in float, TensorRT-RTX in INT8; without Q/DQ all do in float."""
    plain, int8 = quantized().model, quantized(attention="int8").model
    (expected,), (found,) = (run(m, samples(vit(), 1)[0]) for m in (int8, with_einsums(int8)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    rtx = target_named(target).is_rtx
    for model, counts, warned in (
        (plain, (17, 13 - (not rtx), 4 + (not rtx)), {"b1.fc1"}),
        (int8, (17, 17 - 3 * (not rtx), 3 * (not rtx)), set(EINSUMS)),
    ):
        prediction = predict(with_einsums(model), target)
        summary = prediction.summary()
        assert (
            tuple(summary[f"matrix_products{kind}"] for kind in ("", "_int8", "_float")) == counts
        )
        assert f"17 matrix products: {counts[1]} INT8" in verdict(prediction)
        told = {f.node for f in prediction.findings if f.code == "EINSUM-FLOAT"}
        assert told == (set() if rtx else warned)
        assert taken(prediction).int8 == taken(prediction).products - counts[2]
    again = qdqtool.insert(
        with_einsums(vit()),
        samples(vit()),
        attention="int8",
        target=target,
        predict=False,
        losses=0,
    )
    assert predict(again.model, target).summary()["matrix_products_int8"] == 17


@pytest.mark.parametrize("target", FEW_FIRST)
@pytest.mark.parametrize("attention", ["float", "int8"])
def test_projections_with_weights_of_three_dimensions_are_quantized(
    target: str, attention: str
) -> None:
    """As Keras and Flax write attention: heads are axes of the weights, and every product is an Einsum."""
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
    assert result.prediction is not None
    summary = result.prediction.summary()
    assert (summary["matrix_products"], summary["matrix_products_int8"]) == (6, 6 if int8 else 4)
    (expected,), (found,) = (run(m, samples(model, 1)[0]) for m in (model, result.model))
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@needs_compiler
def test_tensorrt_rtx_computes_products_in_einsums_as_predicted() -> None:
    """One kernel of the attention, or two products: each is compared."""
    from tools.fuzz.driver import Lab

    with Lab() as lab:
        answer = lab.answer(with_einsums(quantized(attention="int8", target="rtx1.7").model))
    assert (answer.convolutions + answer.absent, answer.wrong) == (18, []) and answer.absent <= 2
