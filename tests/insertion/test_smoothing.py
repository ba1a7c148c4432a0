"""SmoothQuant: the same network in float, with activations whose channels are alike."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import qdqtool
from qdqtool.base.notes import Remark, remarks
from qdqtool.commands.cli import run as command
from qdqtool.errors import QdqtoolError
from qdqtool.insertion.placement import Rules, place
from qdqtool.insertion.smoothing import Smoothed, smooth
from qdqtool.model.graph import Model
from qdqtool.model.qdq import smoothed_tensors
from tests.insertion.nets import Net, copied, images, run
from tests.insertion.test_transformers import needs_compiler
from tests.insertion.transformers import WIDTH, Tokens, samples, vit

OUT = 3  # the outlier channel


def heavy(model: onnx.ModelProto, factor: float = 200.0) -> onnx.ModelProto:
    """One channel of what each LayerNormalization writes is large, and those that read it have small weights there."""
    made = copied(model)
    for tensor in made.graph.initializer:
        value = numpy_helper.to_array(tensor).copy()
        if tensor.name.endswith((".gamma", ".beta")) and tensor.name.startswith("b"):
            value[OUT] *= factor
        elif tensor.name.endswith((".q.weight", ".k.weight", ".v.weight", ".fc1.weight")):
            value[OUT] /= factor
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return made


def smoothed(model: onnx.ModelProto, alpha: float = 0.5) -> tuple[onnx.ModelProto, list[Smoothed]]:
    """The model in float after smoothing."""
    work = Model(model).copy()
    done, _ = smooth(work, place(work, Rules()), alpha, samples(model))
    return work.proto, done


def same(one: onnx.ModelProto, two: onnx.ModelProto) -> None:
    """Both compute the same, up to rounding."""
    for sample in samples(one):
        for a, b in zip(run(one, sample), run(two, sample), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * float(np.abs(a).max()))


def error(model: onnx.ModelProto, **options: Any) -> float:
    """What INT8 moves the outputs by, as a part of their spread."""
    made = qdqtool.insert(model, samples(model), predict=False, **options).model
    pairs = [(run(model, s)[0], run(made, s)[0]) for s in samples(model)]
    floats = np.concatenate([a.ravel() for a, _ in pairs])
    return float(np.sqrt(np.mean([(a - b) ** 2 for a, b in pairs]) / floats.var()))


@pytest.mark.parametrize(
    ("pieces", "alpha"), [(False, 0.0), (False, 0.5), (True, 0.5), (True, 1.0)]
)
def test_a_transformer_computes_the_same(pieces: bool, alpha: float) -> None:
    """Each block: q, k and v share one s, the last projection of an attention (whose channels went through the heads,
    to what makes the values), fc1 and fc2 (behind a Relu) have one each; and the head behind its pooling."""
    model = heavy(vit(pieces=pieces))
    made, done = smoothed(model, alpha)
    same(model, made)
    assert [len(s.linears) for s in done] == [3, 1, 1, 1, 3, 1, 1, 1, 1]
    assert next(s for s in done if s.linears == ("b0.attn.out",)).makers == ("b0.attn.v",)
    before = {t.name: t for t in model.graph.initializer}
    changed = {
        t.name for t in made.graph.initializer if t.name not in before or t != before[t.name]
    }
    assert {
        "b0.ln1.gamma",
        "b0.attn.q.weight",
        "b0.fc1.weight",
        "b0.fc2.weight",
        "b0.attn.v.bias",
        "b0.attn.out.weight",
    } <= changed
    assert not changed & {"embed.weight", "head.bias", "b0.attn.k.bias", "b0.attn.q.bias"}
    assert [n.name for n in made.graph.node] == [n.name for n in model.graph.node]


def test_s_is_that_of_the_paper() -> None:
    model = heavy(vit())
    made, (first, *_) = smoothed(model, 0.7)
    values = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    copy = copied(model)
    copy.graph.output.append(onnx.helper.make_empty_tensor_value_info("b0.ln1.out"))
    seen = np.max([np.abs(run(copy, s)[1]).max(axis=(0, 1)) for s in samples(model)], axis=0)
    weights = np.max([np.abs(values[f"b0.attn.{p}.weight"]).max(axis=1) for p in "qkv"], axis=0)
    gamma = numpy_helper.to_array(
        next(t for t in made.graph.initializer if t.name == "b0.ln1.gamma")
    )
    np.testing.assert_allclose(values["b0.ln1.gamma"] / gamma, seen**0.7 / weights**0.3, rtol=1e-4)
    assert (
        first.before == pytest.approx(seen.max() / np.median(seen), rel=1e-3)
        and first.after < first.before / 10
    )


def test_int8_loses_less_and_says_so() -> None:
    model = heavy(vit())
    assert error(model, smooth=0.5) < 0.1 * error(model)
    assert error(vit(), smooth=0.5) < 1.3 * error(
        vit()
    )  # where nothing sticks out it costs next to nothing
    result = qdqtool.insert(heavy(vit()), samples(vit()), smooth=0.5, predict=False)
    assert len(result.as_json()["smoothed"]) == len(result.smoothed) == 9
    assert smoothed_tensors(Model(result.model)) == {t for s in result.smoothed for t in s.tensors}
    plain = qdqtool.insert(vit(), samples(vit()), predict=False)
    assert plain.as_json()["smoothed"] == [] and not smoothed_tensors(Model(plain.model))


def chain(build: Callable[[Tokens, str], str], readers: int = 1) -> onnx.ModelProto:
    """Tokens of an embedding, what ``build`` makes of them, Linears on it and an output of each."""
    net = Tokens(3, 32)
    x = build(net, net.embed(8))
    for i in range(readers):
        net.output(net.linear(f"last{i}", x))
    return net.model(17)


def gelu(net: Tokens, x: str) -> str:
    x = net.linear("first", x)
    erf = net.op("Erf", "erf", net.op("Div", "by", x, net.const("root", 1.4142)))
    gate = net.op("Mul", "gate", x, net.op("Add", "one", erf, net.const("1", 1.0)))
    return str(net.op("Mul", "half", gate, net.const("0.5", 0.5)))


def windows(net: Tokens, x: str) -> str:
    """Swin's way from a normalization to its Linears: a shift and windows, which leave the channels alone."""
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


def pooled(net: Tokens, x: str) -> str:
    """Swin's way to its classes: channels in front, an average over the grid."""
    grid = net.op(
        "Reshape",
        "grid",
        net.layer_norm("ln", x),
        net.const("grid.shape", [1, 4, 4, WIDTH], np.int64),
    )
    return str(
        net.op(
            "Flatten",
            "flat",
            net.op(
                "GlobalAveragePool", "pool", net.op("Transpose", "turn", grid, perm=[0, 3, 1, 2])
            ),
        )
    )


def scaled(net: Tokens, x: str) -> str:
    """A Linear and a Mul behind a normalization, the Mul's result an output: it takes s in, as a Linear does."""
    x = net.layer_norm("ln", x)
    net.output(net.op("Mul", "mul", x, net.const("factor", net.rng.uniform(1, 2, WIDTH))))
    return x


def summed(net: Tokens, x: str) -> str:
    return str(
        net.op("Add", "sum", net.linear("one", x), net.linear("two", net.layer_norm("ln", x)))
    )


def together(net: Tokens, x: str) -> str:
    """Queries, keys and values of one Linear, as torch's MultiheadAttention is exported: parted by a Reshape whose
    shape is computed from another's, so that onnx knows no shape behind it, and a Gather for each."""
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


def test_values_and_constants_of_others() -> None:
    """s goes into the last third of the one Linear's weights and bias; queries and keys stay as they are."""
    model = chain(together)
    made, done = smoothed(model)
    same(model, made)
    assert [s.makers for s in done if "last0" in s.linears] == [("qkv",)]
    before, after = (
        {t.name: numpy_helper.to_array(t) for t in m.graph.initializer} for m in (model, made)
    )
    for name in ("qkv.weight", "qkv.bias"):
        ratio = before[name] / after[name]
        np.testing.assert_array_equal(ratio[..., : 2 * WIDTH], 1.0)
        assert np.ptp(ratio[..., 2 * WIDTH :]) > 0.1
    # ``last0`` reads the third normalization, whose scale and bias the first and second have too
    net = Tokens(3, 32)
    x = net.embed(8)
    first = net.layer_norm("ln", x)
    other = net.op(
        "LayerNormalization", "other", net.op("Tanh", "t", first), "ln.gamma", "ln.beta", axis=-1
    )
    net.output(net.linear("last0", other))
    model = net.model(17)
    made, (only,) = smoothed(model)
    same(model, made)
    assert (
        only.makers == ("other",)
        and {n.name: list(n.input) for n in made.graph.node}["ln"][1] == "ln.gamma"
    )


@pytest.mark.parametrize(
    ("build", "makers"),
    [
        (gelu, {"half"}),
        (windows, {"ln"}),
        (scaled, {"ln"}),
        (summed, {"one", "two"}),
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
        (pooled, {"ln"}),
    ],
)
def test_what_can_make_it(build: Callable[[Tokens, str], str], makers: set[str]) -> None:
    model = chain(build, 2)
    made, done = smoothed(model)
    same(model, made)
    found = next(s for s in done if "last0" in s.linears)
    assert set(found.makers) == makers and set(found.linears) >= {"last0", "last1"}


def read_outside(net: Tokens, x: str) -> str:
    x = net.layer_norm("ln", x)
    net.output(x)
    return x


def read_by_norm(net: Tokens, x: str) -> str:
    """As in a network that normalizes behind its sums: the stream itself goes on."""
    x = net.layer_norm("ln", x)
    net.output(net.layer_norm("next", net.op("Add", "sum", x, net.linear("branch", x))))
    return x


def split_channels(net: Tokens, x: str) -> str:
    x = net.layer_norm("ln", x)
    x = net.op("Tanh", "t", net.op("Reshape", "r", x, net.const("s", [1, 32, 8], np.int64)))
    return str(net.op("Reshape", "back", x, net.const("s2", [1, 16, WIDTH], np.int64)))


def mixed(net: Tokens, x: str) -> str:
    """A product that sums over the channels, as queries and keys do."""
    x = net.linear("first", x)
    turned = net.op("Transpose", "turned", net.linear("other", x), perm=[0, 2, 1])
    return str(net.op("MatMul", "qk", x, turned))


def twice(net: Tokens, x: str) -> str:
    """Both operands of a product come from one Linear: dividing it by s would divide the result by its square."""
    x = net.linear("first", x)
    return str(net.op("MatMul", "square", x, x))


@pytest.mark.parametrize(
    "build",
    [
        read_outside,
        read_by_norm,
        split_channels,
        lambda net, x: net.op("Sigmoid", "s", net.linear("first", x)),
        lambda net, x: net.op("Mul", "m", net.op("Tanh", "t", x), net.const("c", np.ones((16, 1)))),
        lambda net, x: net.op(
            "Transpose", "t", net.layer_norm("ln", x, width=WIDTH), perm=[0, 2, 1]
        ),
        lambda net, x: x,
        mixed,
        twice,
    ],
)
def test_nothing_is_moved_where_something_would_change(build: Callable[[Tokens, str], str]) -> None:
    model = chain(build)
    made, done = smoothed(model)
    same(model, made)
    assert "last0" not in {n for s in done for n in s.linears}


@pytest.mark.parametrize("kind", ["the input", "no Linear"])
def test_a_network_without_anything_to_smooth_is_told_so(kind: str, tmp_path: Path) -> None:
    """As the other options say it that change nothing: a note, and the same model."""
    model = chain(lambda net, x: x)
    if kind == "no Linear":
        net = Net()
        net.output(net.conv("c", "x"))
        model = net.model()
    data = images(2) if kind == "no Linear" else samples(model)
    result = qdqtool.insert(model, data, smooth=0.5, losses=0, predict=False)
    expected = Remark.NO_LINEAR if kind == "no Linear" else Remark.NONE_SMOOTHED
    assert remarks(result.notes).count(expected) == 1 and not result.smoothed
    plain = qdqtool.insert(model, data, losses=0, predict=False)
    assert result.model.SerializeToString() == plain.model.SerializeToString()
    onnx.save(model, tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.concatenate([next(iter(d.values())) for d in data]))
    assert (
        command(
            [
                "insert",
                str(tmp_path / "m.onnx"),
                "--calib",
                str(tmp_path / "x.npy"),
                "--losses",
                "0",
                "--smooth",
                "0.5",
            ]
        )
        == 0
    )


def test_wrong_wishes_end_in_one_line(tmp_path: Any) -> None:
    model = vit()
    for options, data in (
        ({"smooth": 1.5}, samples(model)),
        ({"smooth": float("nan")}, samples(model)),
        ({"smooth": 0.5}, iter(samples(model))),
        ({"smooth": "yes"}, samples(model)),
    ):
        with pytest.raises(QdqtoolError, match="smooth"):
            qdqtool.insert(model, data, **options)
    onnx.save(model, tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", samples(model)[0]["x"])
    arguments = [
        str(tmp_path / "m.onnx"),
        "--calib",
        str(tmp_path / "x.npy"),
        "-o",
        str(tmp_path / "q.onnx"),
    ]
    assert command(["insert", "--smooth", *arguments]) == 2 and not (tmp_path / "q.onnx").exists()
    assert command(["insert", *arguments, "--smooth", "--losses", "0"]) == 0
    assert (tmp_path / "q.onnx").exists()


@needs_compiler
def test_the_compiler_makes_the_same_of_it() -> None:
    from tools.fuzz.driver import Lab

    with Lab() as lab:
        answer = lab.answer(
            qdqtool.insert(heavy(vit()), samples(vit()), smooth=0.5, target="rtx1.7").model
        )
    assert (answer.convolutions, answer.wrong, answer.absent) == (14, [], 0)
