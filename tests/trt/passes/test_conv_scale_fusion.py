import pytest

from qdqtool.evidence import Evidence
from qdqtool.ir.modelfile import load
from qdqtool.trt.outcome import simulate
from qdqtool.trt.passes.conv_scale_fusion import ConvScaleFusion, DeconvScaleFusion
from qdqtool.trt.targets import target_named
from tests.trt.builder import Graph
from tests.trt.passes.step import Build, run_pass, weakest_evidence


def test_bias_of_gemm_is_fused(g: Graph) -> None:
    result = run_pass(g.model(g.gemm(g.input(1, 8), "Gemm_311", 8)), ConvScaleFusion)
    assert [r[:2] for r in result.lines[:2]] == [("Running", "Gemm_311"), ("Fusing", "Gemm_311")]
    assert result.lines[1][2].startswith("Gemm_311.bias + (Unnamed Layer* ")


@pytest.mark.parametrize(
    ("op", "fused", "activated"), [("Relu", "bn + r", True), ("Neg", "bn", False)]
)
def test_batchnorm_is_fused_into_float_convolution(
    g: Graph, op: str, fused: str, activated: bool
) -> None:
    out = g.bn(g.conv(g.input(1, 3, 8, 8), "c", scale=None, weights="float"), "bn")
    result = run_pass(g.model(g.op(op, out, "r")), ConvScaleFusion)
    assert result.lines == [("Running", "c"), ("Fusing", "c", fused)]
    layer = result.layer(f"c + {fused}")
    assert layer.fusion.has_activation is activated
    assert weakest_evidence(layer) == Evidence.ASSUMED


def test_batchnorm_after_deconvolution_is_fused_by_deconv_pass(g: Graph) -> None:
    # centerpoint-a100-trt823-fp16, line 1667.
    conv = g.conv(
        g.input(1, 8, 8, 8), "d", k=2, stride=2, op="ConvTranspose", weights="float", scale=None
    )
    assert run_pass(g.model(g.bn(conv, "bn")), DeconvScaleFusion).lines == [
        ("Running", "d"),
        ("Fusing", "d", "bn"),
    ]


@pytest.mark.parametrize(
    ("weights", "scale", "case"), [("qdq", 0.1, "bias"), ("float", None, "float")]
)
def test_bias_rests_on_seen_case_for_quantized_gemm_only(
    g: Graph, weights: str, scale: float | None, case: str
) -> None:
    prediction = simulate(
        load(g.model(g.gemm(g.input(1, 8), "m", 8, scale=scale, weights=weights))),
        target_named("trt8.5"),
    )
    assert {e.case for e in prediction.trace if e.pass_name == "ConvScaleFusion"} == {
        f"ConvScaleFusion/{case}"
    }


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda g: [g.bn(g.conv(g.input(1, 3, 8, 8), "c"), "bn")],
            id="quantized convolution, of QConvScaleFusion",
        ),
        pytest.param(
            lambda g: [
                g.bn(g.conv(g.input(1, 3, 8, 8), "c", scale=None, weights="float"), "bn"),
                "c:0",
            ],
            id="second consumer",
        ),
        pytest.param(
            lambda g: [
                g.bn(
                    g.relu(g.conv(g.input(1, 3, 8, 8), "c", scale=None, weights="float"), "r"), "bn"
                )
            ],
            id="after a Relu, which does not commute",
        ),
    ],
)
def test_scale_is_not_fused(g: Graph, build: Build) -> None:
    assert run_pass(g.model(*build(g)), ConvScaleFusion).lines == []
