from qdqtool.trt.passes.const_cast_fold import ConstCastFold
from tests.trt.builder import Graph
from tests.trt.passes.step import run_pass


def test_identity_of_constant_is_folded(g: Graph) -> None:
    bias = g.op("Identity", g.const("bn2.bias", [1.0, 2.0]), "Identity_0")
    result = run_pass(g.model(g.op("Add", [g.input(1, 2), bias], "add")), ConstCastFold)
    assert result.lines == [("Running", "bn2.bias"), ("Fusing", "bn2.bias", "Identity_0")]
    assert result.has_layer("bn2.bias + Identity_0")


def test_constant_with_other_consumers_stays(g: Graph) -> None:
    bias = g.const("b", [1.0, 2.0])
    x = g.op("Add", [g.input(1, 2), bias], "first")
    for i in range(2):
        x = g.op("Add", [x, g.op("Identity", bias, f"Identity_{i}")], f"add_{i}")
    result = run_pass(g.model(x), ConstCastFold)
    assert sorted(result.lines) == [
        ("Fusing", "b", "Identity_0"),
        ("Fusing", "b", "Identity_1"),
        ("Running", "b"),
        ("Running", "b"),
    ]
    assert (
        result.has_layer("b + Identity_0")
        and result.has_layer("b + Identity_1")
        and result.has_layer("b")
    )


def test_identity_of_computed_tensor_stays(g: Graph) -> None:
    result = run_pass(g.model(g.op("Identity", g.relu(g.input(1, 2), "r"), "i")), ConstCastFold)
    assert result.lines == []
    assert result.has_layer("i")
