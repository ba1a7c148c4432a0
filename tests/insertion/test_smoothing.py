from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.commands.cli import run as command
from qdqtool.errors import QdqtoolError
from qdqtool.insertion.placement import PlacementRules, compute_placement
from qdqtool.insertion.smoothing import ScaleMigration, smooth_activations
from qdqtool.ir.graph import Model
from qdqtool.ir.metadata import read_smoothed_tensors
from tests.builders.models import needs_compiler
from tests.errors import has
from tests.insertion.nets import (
    add_output,
    assert_same_outputs,
    copy_model,
    images,
    one_layer,
    run,
    value_of,
)
from tests.insertion.test_transformers import build
from tests.insertion.transformers import WIDTH, Tokens, samples, vit
from tests.notes import note_codes
from tests.patterns.test_structures import gelu

OUT = 3  # the outlier channel


def add_outliers(model: onnx.ModelProto, factor: float = 200.0) -> onnx.ModelProto:
    result = copy_model(model)
    for tensor in result.graph.initializer:
        value = onnx.numpy_helper.to_array(tensor).copy()
        if tensor.name.endswith((".gamma", ".beta")) and tensor.name.startswith("b"):
            value[OUT] *= factor
        elif tensor.name.endswith((".q.weight", ".k.weight", ".v.weight", ".fc1.weight")):
            value[OUT] /= factor
        tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
    return result


def smooth_model(
    model: onnx.ModelProto, alpha: float = 0.5
) -> tuple[onnx.ModelProto, list[ScaleMigration]]:
    work = Model(model).copy()
    places, _ = smooth_activations(
        work, compute_placement(work, PlacementRules()), alpha, samples(model)
    )
    for sample in samples(model):
        assert_same_outputs(model, work.proto, sample, rtol=1e-5, atol=2e-5)
    return work.proto, places


def error(model: onnx.ModelProto, **options: Any) -> float:
    quantized = qdqtool.insert(model, samples(model), predict=False, **options).model
    floats, integers = (np.stack([run(m, s)[0] for s in samples(m)]) for m in (model, quantized))
    return float(np.sqrt(((floats - integers) ** 2).mean() / floats.var()))


@pytest.mark.parametrize(
    ("pieces", "alpha"), [(False, 0.0), (False, 0.5), (True, 0.5), (True, 1.0)]
)
def test_smoothed_transformer_computes_the_same(pieces: bool, alpha: float) -> None:
    """In each block, q, k and v share one factor s per channel.

    The last projection, fc1 and fc2 have separate factors. The factors of the last projection
    pass the attention heads and reach the projection of the values. The factors of the class head
    pass its pooling.
    """
    model = add_outliers(vit(pieces=pieces))
    after, places = smooth_model(model, alpha)
    assert [len(p.linears) for p in places] == [3, 1, 1, 1, 3, 1, 1, 1, 1]
    assert next(p for p in places if p.linears == ("b0.attn.out",)).makers == ("b0.attn.v",)
    before = {t.name: t for t in model.graph.initializer}
    changed = {t.name for t in after.graph.initializer if t != before.get(t.name)}
    assert {
        "b0.ln1.gamma",
        "b0.attn.q.weight",
        "b0.fc1.weight",
        "b0.fc2.weight",
        "b0.attn.v.bias",
        "b0.attn.out.weight",
    } <= changed
    assert not changed & {"embed.weight", "head.bias", "b0.attn.k.bias", "b0.attn.q.bias"}
    assert [n.name for n in after.graph.node] == [n.name for n in model.graph.node]


def test_smoothing_factors_equal_those_of_the_paper() -> None:
    model = add_outliers(vit())
    after, (first, *_) = smooth_model(model, 0.7)
    copy = add_output(model, "b0.ln1.out")
    sizes = np.max([np.abs(run(copy, s)[1]).max(axis=(0, 1)) for s in samples(model)], axis=0)
    projections = [value_of(model, f"b0.attn.{part}.weight") for part in "qkv"]
    weights = np.max([np.abs(w).max(axis=1) for w in projections], axis=0)
    factors = value_of(model, "b0.ln1.gamma") / value_of(after, "b0.ln1.gamma")
    np.testing.assert_allclose(factors, sizes**0.7 / weights**0.3, rtol=1e-4)
    assert first.before == pytest.approx(sizes.max() / np.median(sizes), rel=1e-3)
    assert first.after < first.before / 10


@pytest.mark.parametrize(
    ("model", "most"), [(add_outliers(vit()), 0.1), (vit(), 1.3)], ids=["outliers", "no outliers"]
)
def test_smoothing_changes_int8_error(model: onnx.ModelProto, most: float) -> None:
    assert error(model, smooth=0.5) < most * error(model)


@pytest.mark.parametrize(
    ("options", "count"), [({"smooth": 0.5}, 9), ({}, 0)], ids=["smoothed", "not smoothed"]
)
def test_insertion_names_smoothed_tensors(options: dict[str, Any], count: int) -> None:
    result = qdqtool.insert(add_outliers(vit()), samples(vit()), predict=False, **options)
    assert len(result.as_json()["smoothed"]) == len(result.smoothed) == count
    assert read_smoothed_tensors(Model(result.model)) == {
        t for s in result.smoothed for t in s.tensors
    }


def chain(build: Callable[[Tokens, str], str], consumers: int = 1) -> onnx.ModelProto:
    """Return an embedding's tokens, the nodes of ``build`` and Linears on their output.

    The Linears are ``last0``, ``last1`` and so on.
    """
    net = Tokens(3, 32)
    x = build(net, net.embed(8))
    return net.output(*(net.linear(f"last{i}", x) for i in range(consumers))).model(17)


def open_batch(model: onnx.ModelProto) -> onnx.ModelProto:
    result = copy_model(model)
    result.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    result.graph.ClearField("value_info")
    return result


def windows(net: Tokens, x: str) -> str:
    """Add Swin's shift and windows between a normalization and its Linears.

    Channels stay in place.
    """
    x = net.layer_norm("ln", x)
    bounds = [
        [net.const(f"{n}{i}", [v], np.int64) for n, v in (("from", a), ("to", b), ("axis", 1))]
        for i, (a, b) in enumerate([(4, 16), (0, 4)])
    ]
    x = net.op(
        "Concat",
        "roll",
        *(net.op("Slice", f"slice{i}", x, *b) for i, b in enumerate(bounds)),
        axis=1,
    )
    x = net.op("Reshape", "grid", x, net.const("grid.shape", [1, 2, 2, 4, WIDTH], np.int64))
    x = net.op("Transpose", "turn", x, perm=[0, 2, 1, 3, 4])
    return str(net.op("Reshape", "flat", x, net.const("flat.shape", [4, 4, WIDTH], np.int64)))


def scaling(net: Tokens, x: str) -> str:
    """Add a normalization whose output a Mul consumes as well.

    The Mul absorbs s as a Linear does.
    """
    x = net.layer_norm("ln", x)
    net.output(net.op("Mul", "mul", x, net.const("factor", net.rng.uniform(1, 2, WIDTH))))
    return x


def one_tensor(net: Tokens, x: str) -> str:
    """Add an attention as torch exports MultiheadAttention.

    One Linear computes queries, keys and values. A Reshape to a computed shape and three Gathers
    separate them. After this Reshape, onnx infers no shapes.
    """
    w = net.const("qkv.weight", net.rng.standard_normal((WIDTH, 3 * WIDTH)) / 4)
    x = net.op(
        "Add",
        "qkv.add",
        net.op("MatMul", "qkv", x, w),
        net.const("qkv.bias", net.rng.uniform(1, 2, 3 * WIDTH)),
    )
    rows = net.op(
        "Slice",
        "rows",
        net.op("Shape", "shape", x),
        net.const("zero", [0], np.int64),
        net.op("Mod", "mod", net.const("five", [5], np.int64), net.const("three", [3], np.int64)),
    )
    shape = net.op(
        "Concat", "sizes", rows, net.const("parts", [3, 2, WIDTH // 2], np.int64), axis=0
    )
    x = net.op("Transpose", "first", net.op("Reshape", "apart", x, shape), perm=[2, 0, 3, 1, 4])
    q, k, v = (
        net.op("Gather", part, x, net.const(f"{part}.at", i, np.int64), axis=0)
        for i, part in enumerate("qkv")
    )
    scores = net.op("MatMul", "qk", q, net.op("Transpose", "turned", k, perm=[0, 1, 3, 2]))
    out = net.op("MatMul", "av", net.op("Softmax", "soft", scores, axis=-1), v)
    flat = net.const("flat", [1, 16, WIDTH], np.int64)
    return str(
        net.op("Reshape", "joined", net.op("Transpose", "back", out, perm=[0, 2, 1, 3]), flat)
    )


def test_smoothing_changes_values_of_shared_projection() -> None:
    model = chain(one_tensor)
    after, places = smooth_model(model)
    assert [p.makers for p in places if "last0" in p.linears] == [("qkv",)]
    for name in ("qkv.weight", "qkv.bias"):
        ratio = value_of(model, name) / value_of(after, name)
        np.testing.assert_array_equal(ratio[..., : 2 * WIDTH], 1.0)
        assert np.ptp(ratio[..., 2 * WIDTH :]) > 0.1


def test_smoothing_copies_shared_scale_of_normalization() -> None:
    net = Tokens(3, 32)
    first = net.op("Tanh", "t", net.layer_norm("ln", net.embed(8)))
    other = net.op("LayerNormalization", "other", first, "ln.gamma", "ln.beta", axis=-1)
    after, (smoothed_place,) = smooth_model(net.output(net.linear("last0", other)).model(17))
    assert smoothed_place.makers == ("other",)
    assert next(n for n in after.graph.node if n.name == "ln").input[1] == "ln.gamma"


def test_smoothing_divides_the_rows_of_one_part() -> None:
    net = Tokens(3, 32)
    scaled = net.op("Mul", "m", net.embed(8), net.const("c", np.full((16, WIDTH), 2.0)))
    first, second = net.op("Split", "rows", scaled, outputs=2, axis=1)
    net.output(net.op("Sigmoid", "s", first), net.linear("last0", second))
    after, places = smooth_model(net.model(17))
    assert [p.makers for p in places] == [("m",)]
    assert (value_of(after, "c")[:8] == 2.0).all() and (value_of(after, "c")[8:] != 2.0).any()


@pytest.mark.parametrize(
    ("build", "makers"),
    [
        (lambda net, x: gelu(net, net.linear("first", x)), {"half"}),
        (windows, {"ln"}),
        (scaling, {"ln"}),
        (
            lambda net, x: str(
                net.op(
                    "Add", "sum", net.linear("one", x), net.linear("two", net.layer_norm("ln", x))
                )
            ),
            {"one", "two"},
        ),
        (
            lambda net, x: net.op(
                "Sub", "sub", net.const("c", np.ones(WIDTH)), net.linear("first", x)
            ),
            {"first"},
        ),
        (
            lambda net, x: net.op(
                "Div", "div", net.op("Sigmoid", "s", x), net.const("c", np.full((1, 1, WIDTH), 2.0))
            ),
            {"div"},
        ),
        (lambda net, x: net.layer_norm("ln", x, pieces=True), {"ln.scale"}),
        (
            lambda net, x: net.op(
                "Flatten",
                "flat",
                net.op(
                    "GlobalAveragePool",
                    "pool",
                    net.op(
                        "Transpose",
                        "turn",
                        net.reshape("grid", net.layer_norm("ln", x), 1, 4, 4, WIDTH),
                        perm=[0, 3, 1, 2],
                    ),
                ),
            ),
            {"ln"},
        ),
    ],
)
@pytest.mark.parametrize("form", [copy_model, open_batch])
def test_smoothing_changes_producer(
    build: Callable[[Tokens, str], str], makers: set[str], form: Callable[..., onnx.ModelProto]
) -> None:
    _, places = smooth_model(form(chain(build, 2)))
    last = next(p for p in places if "last0" in p.linears)
    assert set(last.makers) == makers and set(last.linears) >= {"last0", "last1"}


def graph_output(net: Tokens, x: str) -> str:
    x = net.layer_norm("ln", x)
    net.output(x)
    return x


def normalized_stream(net: Tokens, x: str) -> str:
    x = net.layer_norm("ln", x)
    net.output(net.layer_norm("next", net.op("Add", "sum", x, net.linear("branch", x))))
    return x


@pytest.mark.parametrize(
    "build",
    [
        graph_output,
        normalized_stream,
        lambda net, x: net.op(
            "Reshape",
            "back",
            net.op(
                "Tanh",
                "t",
                net.reshape("r", net.layer_norm("ln", x), 1, 32, 8),
            ),
            net.const("s2", [1, 16, WIDTH], np.int64),
        ),
        lambda net, x: net.op("Sigmoid", "s", net.linear("first", x)),
        lambda net, x: net.op("Mul", "m", net.op("Tanh", "t", x), net.const("c", np.ones((16, 1)))),
        lambda net, x: net.op(
            "Transpose", "t", net.layer_norm("ln", x, width=WIDTH), perm=[0, 2, 1]
        ),
        lambda net, x: x,
        lambda net, x: net.op(
            "MatMul",
            "qk",
            y := net.linear("first", x),
            net.op("Transpose", "turned", net.linear("other", y), perm=[0, 2, 1]),
        ),
        # A product of a Linear's output with itself: s would divide the product twice.
        lambda net, x: net.op("MatMul", "square", y := net.linear("first", x), y),
    ],
)
def test_smoothing_leaves_unsuitable_producer(build: Callable[[Tokens, str], str]) -> None:
    _, places = smooth_model(chain(build))
    assert "last0" not in {n for p in places for n in p.linears}


def run_insert(folder: Path, model: onnx.ModelProto, data: list[Any], *options: str) -> int:
    onnx.save(model, folder / "m.onnx")
    np.save(folder / "x.npy", np.concatenate([next(iter(d.values())) for d in data]))
    arguments = ["--calib", str(folder / "x.npy"), "-o", str(folder / "q.onnx"), "--losses", "0"]
    return command(["insert", *(o.format(folder / "m.onnx") for o in options), *arguments])


@pytest.mark.parametrize(
    ("model", "data", "remark", "hint"),
    [
        (chain(lambda net, x: x), samples(vit()), "none-smoothed", False),
        (open_batch(chain(lambda net, x: x)), samples(vit()), "none-smoothed", True),
        (one_layer(), images(2), "no-linear", False),
    ],
    ids=["Linear of the input", "any batch size", "no Linear"],
)
def test_smooth_without_effect_is_a_note(
    model: onnx.ModelProto, data: list[Any], remark: str, hint: bool, tmp_path: Path
) -> None:
    result = qdqtool.insert(model, data, smooth=0.5, losses=0, predict=False)
    assert note_codes(result.notes).count(remark) == 1 and not result.smoothed
    assert any("fixed input sizes" in str(note) for note in result.notes) is hint
    plain = qdqtool.insert(model, data, losses=0, predict=False)
    assert result.model.SerializeToString() == plain.model.SerializeToString()
    assert run_insert(tmp_path, model, data, "{}", "--smooth", "0.5") == 0


@pytest.mark.parametrize(
    ("data", "alpha", "code", "parameter", "text"),
    [
        (list, 1.5, "out-of-range", "smooth", "`smooth=1.5`"),
        (list, float("nan"), "out-of-range", "smooth", "`smooth=nan`"),
        (iter, 0.5, "read-once", "data", "`smooth`"),
    ],
    ids=["above 1", "nan", "iterator"],
)
def test_smooth_is_refused(
    data: Callable[[Any], Any], alpha: float, code: str, parameter: str, text: str
) -> None:
    with pytest.raises(QdqtoolError, check=has(code, parameter=parameter), match=text):
        qdqtool.insert(vit(), data(samples(vit())), smooth=alpha)


@pytest.mark.parametrize(
    ("options", "code"), [(("--smooth", "{}"), 2), (("{}", "--smooth"), 0)], ids=["before", "after"]
)
def test_smooth_without_value_goes_after_model(
    options: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    assert run_insert(tmp_path, vit(), samples(vit(), 1), *options) == code
    assert (tmp_path / "q.onnx").exists() is (code == 0)


@needs_compiler
def test_tensorrt_rtx_builds_smoothed_model_as_predicted() -> None:
    answer = build(
        qdqtool.insert(add_outliers(vit()), samples(vit()), smooth=0.5, target="rtx1.7").model
    )
    assert (answer.convolutions, answer.wrong, answer.absent) == (14, [], 0)
