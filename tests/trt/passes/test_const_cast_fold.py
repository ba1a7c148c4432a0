import pytest

from qdqtool.trt.passes.const_cast_fold import ConstCastFold
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, Line, run_pass


def two_identities(g: Graph) -> list[str]:
    bias = g.const("b", [1.0, 2.0])
    x = g.op("Add", [g.input(1, 2), bias], "first")
    for i in range(2):
        x = g.op("Add", [x, g.op("Identity", bias, f"Identity_{i}")], f"add_{i}")
    return [x]


@pytest.mark.parametrize(
    ("build", "lines", "layers"),
    [
        pytest.param(
            lambda g: [
                g.add(g.input(1, 2), g.op("Identity", g.const("b", [1.0, 2.0]), "i"), "add")
            ],
            [("Fusing", "b", "i"), ("Running", "b")],
            ["b + i"],
            id="constant",
        ),
        pytest.param(
            two_identities,
            [("Fusing", "b", "Identity_0"), ("Fusing", "b", "Identity_1"), *[("Running", "b")] * 2],
            ["b + Identity_0", "b + Identity_1", "b"],
            id="constant with other consumers, which stays",
        ),
        pytest.param(
            lambda g: [g.op("Identity", g.relu(g.input(1, 2), "r"), "i")],
            [],
            ["i"],
            id="computed tensor",
        ),
    ],
)
def test_identity_of_a_constant_is_folded(
    g: Graph, build: Build, lines: list[Line], layers: list[str]
) -> None:
    result = run_pass(g.model(*build(g)), ConstCastFold)
    assert sorted(result.lines) == lines
    assert [name for name in layers if not result.has_layer(name)] == []
