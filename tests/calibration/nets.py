import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from PIL import Image


def conv_net(
    shape: tuple[int | str, ...] = (1, 3, 16, 16),
    dtype: int = onnx.TensorProto.FLOAT,
    seed: int = 0,
) -> onnx.ModelProto:
    rng, numpy_type = np.random.default_rng(seed), onnx.helper.tensor_dtype_to_np_dtype(dtype)

    def weight(name: str, channels: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(
            rng.normal(0, 0.5, (4, channels, 3, 3)).astype(numpy_type), name
        )

    pads = [1, 1, 1, 1]
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Conv", ["images", "w1"], ["a1"], "conv1", pads=pads),
            onnx.helper.make_node("Sigmoid", ["a1"], ["s1"], "sigmoid1"),
            onnx.helper.make_node("Mul", ["a1", "s1"], ["c1"], "mul1"),
            onnx.helper.make_node("Conv", ["c1", "w2"], ["c2"], "conv2", pads=pads),
            onnx.helper.make_node("Relu", ["c2"], ["r2"], "relu2"),
            onnx.helper.make_node("Conv", ["r2", "w3"], ["out"], "conv3", pads=pads),
        ],
        "net",
        [onnx.helper.make_tensor_value_info("images", dtype, shape)],
        [onnx.helper.make_tensor_value_info("out", dtype, None)],
        [weight("w1", 3), weight("w2", 4), weight("w3", 4)],
    )
    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9
    )


def save_external(path: Path, threshold: int = 0) -> None:
    options = {"save_as_external_data": True, "location": "w.bin", "size_threshold": threshold}
    onnx.save(conv_net(), path, **options)


def run_all(
    model: onnx.ModelProto, feeds: list[dict[str, Any]], names: list[str]
) -> dict[str, np.ndarray]:
    from tests.insertion.nets import copy_model, open_session

    copy = copy_model(model)
    inputs = {v.name for v in copy.graph.input}
    del copy.graph.output[:]
    copy.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in inputs)
    session = open_session(copy.SerializeToString())
    outputs = [o.name for o in copy.graph.output]
    values: dict[str, list[np.ndarray]] = {n: [] for n in names}
    for feed in feeds:
        result = dict(zip(outputs, session.run(outputs, feed), strict=True)) | feed
        for name in names:
            values[name].append(np.asarray(result[name]).reshape(-1))
    return {n: np.concatenate(v) for n, v in values.items()}


def write_pictures(
    folder: Path, count: int, width: int = 16, height: int = 16, suffix: str = ".png"
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for index in range(count):
        pixels = np.random.default_rng(index).integers(0, 256, (height, width, 3)).astype(np.uint8)
        path = folder / f"picture{index:03d}{suffix}"
        Image.fromarray(pixels).save(path)
        paths.append(path)
    return paths


def make_special_files(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(folder / "pipe")
    (folder / "loop").symlink_to("loop")


def png_chunk(kind: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
