import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from calibration.session import input_specs
from qdqtool.comparison.result import ChangeKind, Comparison
from qdqtool.ir.graph import Model
from tests.trt.builder import Graph


def network(
    blocks: int = 3,
    *,
    scale: float | None = 0.1,
    weights: str = "qdq",
    residual: bool = True,
    spoilt: Sequence[int] = (),
    spoilt_weights: str = "float",
    data: float | None = 0.1,
    names: str = "b",
    left_out: int | None = None,
) -> onnx.ModelProto:
    """Return a stem and residual blocks of two convolutions each.

    Args:
        blocks: Number of blocks.
        scale: Scale of each convolution's input. None for a float model.
        weights: Form of the weights; see the builder.
        residual: Whether the residual inputs of the Adds have Q/DQ.
        spoilt: Blocks whose first convolution has weights of the form ``spoilt_weights``.
        spoilt_weights: Form of these weights.
        data: Scale of the input of these convolutions.
        names: Prefix of the names of the blocks.
        left_out: Number of a block that is missing.
    """
    g = Graph()
    x = g.relu(
        g.conv(g.input(1, 4, 16, 16), f"{names}.stem", scale=scale, weights=weights),
        f"{names}.stem.relu",
    )
    for i in [i for i in range(blocks) if i != left_out]:
        forms = (data, spoilt_weights) if i in spoilt else (scale, weights)
        y = g.conv(x, f"{names}{i}.a", scale=forms[0], weights=forms[1])
        y = g.conv(g.relu(y, f"{names}{i}.ra"), f"{names}{i}.b", k=1, scale=scale, weights=weights)
        skip = x if scale is None or not residual else g.pair(x, f"{names}{i}.skip", scale)
        x = g.relu(g.add(y, skip, f"{names}{i}.add"), f"{names}{i}.rb")
    return g.model(x if scale is None else g.pair(x, f"{names}.end", scale))


def float_network(blocks: int = 3, names: str = "b") -> onnx.ModelProto:
    return network(blocks, scale=None, weights="float", names=names)


def with_dynamic_size(proto: onnx.ModelProto, recorded: str = "") -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    del copy.graph.value_info[:]
    for value in (*copy.graph.input, *copy.graph.output):
        for dim, name in zip(value.type.tensor_type.shape.dim[2:], "hw", strict=True):
            dim.dim_param = name
    if recorded:
        copy.metadata_props.add(key="qdqtool.size", value=recorded)
    return copy


def numbered(proto: onnx.ModelProto, first: int = 0) -> dict[str, str]:
    """Name the nodes by operator and number, as some exporters do, and return their old names."""
    old = {}
    counts = defaultdict(lambda: itertools.count(first))
    for node in proto.graph.node:
        name = f"{node.op_type}_{next(counts[node.op_type])}"
        old[name], node.name = node.name, name
    return old


def quantize(
    path: Path,
    quant_format: str,
    activations: str,
    samples: Iterable[Mapping[str, np.ndarray]] = (),
    **options: Any,
) -> Path:
    ort = pytest.importorskip("onnxruntime.quantization")
    batches = iter(
        samples
        or [{s.name: np.ones(s.shape, np.float32) for s in input_specs(Model(onnx.load(path)))}]
    )

    class Reader(ort.CalibrationDataReader):  # type: ignore[name-defined, misc]
        def get_next(self) -> Mapping[str, np.ndarray] | None:
            return next(batches, None)

    output = path.with_name("quantized.onnx")
    if quant_format == "dynamic":
        ort.quantize_dynamic(path, output)
        return output
    formats, types = ort.QuantFormat, ort.QuantType
    options |= {"quant_format": formats[quant_format], "activation_type": types[activations]}
    ort.quantize_static(path, output, Reader(), **options)
    return output


def names_of(result: Comparison, change: ChangeKind) -> set[str]:
    return {n.name for n in result.where(change)}
