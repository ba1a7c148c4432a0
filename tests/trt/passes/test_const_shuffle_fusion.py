import pytest

from qdqtool.trt.passes.const_shuffle_fusion import ConstShuffleFusion
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, run_pass


def test_bias_is_fused_with_its_shuffle(g: Graph) -> None:
    result = run_pass(
        g.model(g.gemm(g.input(1, 8), "fc", 8, scale=None, weights="float")), ConstShuffleFusion
    )
    assert [(r[0], r[1]) for r in result.lines] == [("Running", "fc.bias"), ("Fusing", "fc.bias")]
    assert result.lines[1][2].startswith("(Unnamed Layer* ") and result.lines[1][2].endswith(
        ") [Shuffle]"
    )


def test_weights_of_converted_gemm_are_fused_with_transpose(g: Graph) -> None:
    # The third turn of the pass sees the shuffle of MatMulToConvTransform.
    result = run_pass(g.model(g.gemm(g.input(1, 8), "Gemm_311", 8)), ConstShuffleFusion, turn=2)
    assert result.lines == [
        ("Running", "Gemm_311.weight + Gemm_311.w.Q"),
        ("Fusing", "Gemm_311.weight + Gemm_311.w.Q", "transpose_before_Gemm_311"),
    ]


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda g: [
                g.op("Add", [g.input(2), k := g.const("k", [1.0, 2.0])], "same-rank"),
                g.op("Add", [g.input(1, 2, name="y"), k], "other-rank"),
            ],
            id="shared constant",
        ),
        pytest.param(lambda g: [g.reshape(g.input(1, 4), "r", 4)], id="computed tensor"),
    ],
)
def test_shuffle_is_not_fused(g: Graph, build: Build) -> None:
    assert run_pass(g.model(*build(g)), ConstShuffleFusion).lines == []
