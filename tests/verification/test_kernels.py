"""Myelin's kernels are read by the same rules wherever they come from: a listing of TensorRT 10, or of RTX."""

from __future__ import annotations

import io
import json

from qdqtool.buildlog.read import read_build
from qdqtool.graph import Model
from qdqtool.prediction import predict
from qdqtool.types import Precision
from qdqtool.verification.api import verify
from tests.fuzz.net import Net


def two_convolutions() -> Model:
    net = Net()
    x = net.qdq(net.input((1, 8, 16, 16)))
    hidden = net.op("Relu", net.conv(x, 16, 3, name="first"))
    return Model(net.model(net.conv(net.qdq(hidden), 8, 1, name="second")))


def listing(*rows: tuple[str, str, str, str, str]) -> bytes:
    """Name, type, type of the first input, type of the output, and nodes of each layer."""
    def tensor(name: str, kind: str) -> dict[str, object]:
        return {"Name": name, "Dimensions": [1, 8, 16, 16], "Format/Datatype": kind}

    layers = [
        {"Name": name, "LayerType": kind, "Inputs": [tensor(f"t{i}", data)], "Outputs": [tensor(f"t{i + 1}", written)],
         "Constants": [tensor(f"w{i}", data)], "Metadata": "".join(f"[ONNX Layer: {n}]" for n in nodes.split())}
        for i, (name, kind, data, written, nodes) in enumerate(rows)
    ]
    return json.dumps({"Layers": layers, "Bindings": ["t0", f"t{len(rows)}"]}).encode()


def test_the_kernel_that_multiplies_is_found_and_told() -> None:
    model = two_convolutions()
    mine = predict(model, "trt10")
    written = "Int8" if mine.convolution("first").output == Precision.INT8 else "Float"
    rows = [
        ("__myl_Quant_myl0_0", "kgen", "Float", "Int8", "q first"),
        ("first_myl0_1", "correlation", "Int8", written, "first"),
        ("second_myl0_2", "correlation", "Int8", "Float", "second"),
    ]
    result = verify(model, read_build(io.BytesIO(listing(*rows))), target="trt10")
    assert (result.convolutions.agree, result.convolutions.total) == (2, 2)
    rows[2] = ("second_myl0_2", "correlation", "Float", "Float", "second")
    result = verify(model, read_build(io.BytesIO(listing(*rows))), target="trt10")
    assert [m.name for m in result.mismatches if m.kind == "convolution"] == ["second"]


def test_a_kernel_of_two_products_is_unknown() -> None:
    rows = [("__myl_CorrMulCorr_myl0_0", "kgen", "Float", "Float", "first second")]
    result = verify(two_convolutions(), read_build(io.BytesIO(listing(*rows))), target="trt10")
    assert result.convolutions.unknown_names == ("first", "second")
