"""ConvScaleFusion: the Gemm's bias (resnet18 line 2577); float convolution with BatchNormalization (assumed)."""

import pytest

from qdqtool.model.modelfile import load
from qdqtool.trt.outcome import simulate
from qdqtool.trt.passes.conv_scale_fusion import ConvScaleFusion, DeconvScaleFusion
from qdqtool.trt.targets import target_named
from qdqtool.types import Evidence
from tests.trt.builder import Graph
from tests.trt.passes.step import evidence_of, step


def test_what_a_convolution_takes_in(g: Graph) -> None:
    found = step(g.model(g.gemm(g.input(1, 8), "Gemm_311", 8)), ConvScaleFusion)
    assert found.rows[0] == ("Running", "Gemm_311")
    assert found.rows[1][:2] == ("Fusing", "Gemm_311")
    assert found.rows[1][2].startswith("Gemm_311.bias + (Unnamed Layer* ")
    g = Graph()
    out = g.bn(g.conv(g.input(1, 3, 8, 8), "c", scale=None, weights="float"), "bn")
    found = step(g.model(out), ConvScaleFusion)
    assert found.rows == [("Running", "c"), ("Fusing", "c", "bn")]
    assert evidence_of(found.layer("c + bn")) == Evidence.ASSUMED
    g = Graph()
    # centerpoint-a100-trt823-fp16, line 1667
    conv = g.conv(
        g.input(1, 8, 8, 8), "d", k=2, stride=2, op="ConvTranspose", weights="float", scale=None
    )
    assert step(g.model(g.bn(conv, "bn")), DeconvScaleFusion).rows == [
        ("Running", "d"),
        ("Fusing", "d", "bn"),
    ]
    g = Graph()
    assert step(g.model(g.bn(g.conv(g.input(1, 3, 8, 8), "c"), "bn")), ConvScaleFusion).rows == []
    g = Graph()
    conv = g.conv(g.input(1, 3, 8, 8), "c", scale=None, weights="float")
    assert step(g.model(g.bn(conv, "bn"), conv), ConvScaleFusion).rows == []


def test_a_normalization_behind_the_activation_stays(g: Graph) -> None:
    """Relu and scale do not commute; and what a scale with a Relu was folded into has its activation."""
    relu = g.relu(g.conv(g.input(1, 3, 8, 8), "c", scale=None, weights="float"), "r")
    assert step(g.model(g.bn(relu, "bn")), ConvScaleFusion).rows == []
    for activated in (True, False):
        g = Graph()
        out = g.bn(g.conv(g.input(1, 3, 8, 8), "c", scale=None, weights="float"), "bn")
        found = step(
            g.model(g.relu(out, "r") if activated else g.op("Neg", out, "n")), ConvScaleFusion
        )
        name = "c + bn + r" if activated else "c + bn"
        assert found.layer(name).fusion.activated is activated


@pytest.mark.parametrize(
    ("weights", "scale", "case"), [("qdq", 0.1, "bias"), ("float", None, "float")]
)
def test_the_case_that_a_bias_rests_on(
    g: Graph, weights: str, scale: float | None, case: str
) -> None:
    """Seen for a quantized fully connected layer alone."""
    trace = simulate(
        load(g.model(g.gemm(g.input(1, 8), "m", 8, scale=scale, weights=weights))),
        target_named("trt8.5"),
    )
    assert {e.case for e in trace.trace if e.pass_name == "ConvScaleFusion"} == {
        f"ConvScaleFusion/{case}"
    }
