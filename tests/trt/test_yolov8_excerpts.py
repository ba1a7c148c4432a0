"""A YOLOv8-style network, compared with log lines of a similar network on TensorRT 8.4.12.

These properties of model.onnx.gz follow from the lines: every name; ReLU; BatchNormalization, folded in float layers
only; C2f with two Slices; an Add with Q/DQ on both inputs; the heads of each scale, quantized or float as in the
``Merging layers`` lines; two outputs; the names of the DFL. Channels, repeats and scales are invented. Scales are equal
where a line requires it (all Qs that read the halves of a C2f), and different elsewhere. Weights are zero.
"""

import functools
import json
import re

import onnx

from qdqtool import Precision, Prediction
from qdqtool.ir.modelfile import load
from qdqtool.prediction import predict
from tests.trt.evidence import HOME

BUILD = HOME / "yolov8-orin-trt8412-excerpts"
NETWORK = load(BUILD / "model.onnx.gz").proto
Line = tuple[str, ...]
# The condition for a stomping hazard between inputs of a concatenation is unknown. No Q/DQ pass depends on it.
UNEXPLAINED = {
    (
        "",
        "Generating copy because of stomping hazard",
        "/model/taskhead22/Div_1_output_0",
        "/model/taskhead22/Concat_10_output_0",
    ),
}


def unnumbered(line: Line) -> Line:
    return tuple(re.sub(r"\(Unnamed Layer\* \d+\)", "(Unnamed Layer)", text) for text in line)


def quoted() -> set[Line]:
    return {unnumbered(tuple(line)) for line in json.loads((BUILD / "lines.json").read_text())}


@functools.cache
def prediction() -> Prediction:
    return predict(NETWORK, target="trt8.4", advice=False)


def simulated() -> set[Line]:
    return {unnumbered((e.pass_name, e.kind, e.subject, e.object)) for e in prediction().trace}


def test_network_is_valid() -> None:
    onnx.checker.check_model(NETWORK, full_check=True)


def test_quoted_lines_are_simulated() -> None:
    assert (len(quoted()), quoted() - simulated()) == (107, UNEXPLAINED)


def test_quoted_lines_cover_passes_that_move_and_fuse_quantizers() -> None:
    assert {line[0] for line in quoted()} >= {
        "SplitQAcrossPrecedingFanIn",
        "HorizontalMergeQNodes",
        "VanillaSwapWithFollowingQ",
        "QConvScaleFusion",
        "QuantizeDoubleInputNodes",
        "ConstWeightsFusion",
        "QDQToCopy",
        "EltwiseAddToPwn",
    }


def test_stem_reads_and_writes_int8() -> None:
    # Engine listing: COPY of the input Q, then backbone0/conv Int8 to Int8.
    stem = next(c for c in prediction().convolutions if c.name == "/model/backbone0/conv/Conv")
    assert (stem.inputs, stem.output) == ([Precision.INT8], Precision.INT8)
    assert stem.layer == (
        "model.model.backbone0.conv.weight + /model/backbone0/conv/_weight_quantizer/QuantizeLinear"
        " + /model/backbone0/conv/Conv"
    )
    assert "/model/backbone0/conv/_input_quantizer/QuantizeLinear" in prediction().conversion_nodes


def test_residual_add_is_a_pointwise_layer() -> None:
    # EltwiseAddToPwn converts it, so that no convolution fused it.
    add = {layer.name: layer for layer in prediction().layers}["/model/backbone2/m.0/addop/Add"]
    assert add.type == "PointWise"
    assert {str(t.precision) for t in (*add.inputs, *add.outputs)} == {"INT8"}
    assert not [c.layer for c in prediction().convolutions if "addop" in c.layer]
