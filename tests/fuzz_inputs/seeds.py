"""Small inputs of every kind that the commands read, written into a folder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from calibration.cache import write_tensorrt_cache
from qdqtool import insert
from tests.buildlog import samples
from tests.calibration.nets import conv_net
from tests.fuzz.grammar import network
from tests.fuzz_logs.mutate import JSON, PROFILE

#: Which commands read a kind; FILE is the mutated file, OUT an output, the others stay as they are.
_INSERT = ("insert", "float.onnx", "--include", "conv", "-o", "OUT", "--no-predict")
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "qdq.onnx": (
        ("predict", "FILE"), ("predict", "FILE", "--target", "rtx1.7", "--format", "json"),
        ("predict", "FILE", "--all", "--trace", "--layers", "-o", "OUT"), ("fix", "FILE", "-o", "OUT"),
        ("verify", "FILE", "build.log"),
    ),
    "qdq.onnx.gz": (("predict", "FILE"),),
    "float.onnx": (
        ("insert", "FILE", "--include", "conv", "--calib-table", "table.cache", "-o", "OUT"),
        ("insert", "FILE", "--include", "conv", "--calib", "samples.npz", "-o", "OUT", "--no-predict"),
    ),
    "external.onnx": (
        ("predict", "FILE"), ("insert", "FILE", "--include", "conv", "--calib", "samples.npz", "-o", "OUT"),
    ),
    "samples.npz": ((*_INSERT, "--calib", "FILE"),),
    "packed.npz": ((*_INSERT, "--calib", "FILE"),),
    "samples.npy": ((*_INSERT, "--calib", "FILE"),),
    "inputs.npz": (("fix", "qdq.onnx", "--inputs", "FILE", "-o", "OUT"),),
    "picture.png": ((*_INSERT, "--calib", "FILE"),),
    "picture.jpg": ((*_INSERT, "--calib", "FILE"),),
    "list.txt": ((*_INSERT, "--calib", "FILE"),),
    "statistics.npz": ((*_INSERT, "--calib", "samples.npz", "--calib-cache", "FILE"),),
    "table.cache": ((*_INSERT, "--calib-table", "FILE"),),
    "build.log": (("log", "FILE"), ("verify", "--from-log", "FILE"), ("log", "FILE", "--to-onnx", "OUT")),
    "layers.json": (("engine", "FILE"), ("log", "FILE", "--format", "json"), ("verify", "qdq.onnx", "FILE")),
    "profile.json": (("log", "FILE"), ("engine", "layers.json", "--profile", "FILE")),
}


def write_seeds(folder: Path) -> None:
    """Writes one small, whole file of every kind."""
    qdq = network(11)
    (folder / "qdq.onnx").write_bytes(qdq.SerializeToString())
    (folder / "qdq.onnx.gz").write_bytes(gzip.compress(qdq.SerializeToString(), mtime=0))
    net = conv_net()
    (folder / "float.onnx").write_bytes(net.SerializeToString())
    onnx.save(conv_net(), folder / "external.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    rng = np.random.default_rng(0)
    images = rng.random((3, 3, 16, 16), np.float32)
    np.savez(folder / "samples.npz", images=images)
    np.savez_compressed(folder / "packed.npz", images=images)
    np.save(folder / "samples.npy", images)
    pixels = (rng.random((20, 24, 3)) * 255).astype(np.uint8)
    for name in ("picture.png", "picture.jpg"):
        Image.fromarray(pixels).save(folder / name)
    (folder / "list.txt").write_text("picture.png\npicture.jpg\n")
    insert(folder / "float.onnx", folder / "samples.npz", calib_cache=folder / "statistics.npz", include=["conv"])
    known = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in qdq.graph.input}
    np.savez(folder / "inputs.npz", **{name: rng.random(shape, np.float32) for name, shape in known.items()})
    write_tensorrt_cache(folder / "table.cache", dict.fromkeys(("images", "a1", "s1", "c1", "c2", "r2", "out"), 0.01))
    (folder / "build.log").write_text(samples.trtexec_log())
    (folder / "layers.json").write_text(json.dumps(JSON))
    (folder / "profile.json").write_text(json.dumps(PROFILE, indent=1))


def hostile_tensor(model: onnx.ModelProto, number: int) -> None:
    """Puts an odd tensor where an initializer was."""
    tensors = model.graph.initializer
    if tensors:
        tensor = tensors[number % len(tensors)]
        odd = (
            TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[1 << 40, 1 << 40]),
            TensorProto(name=tensor.name, data_type=99, dims=tensor.dims),
            numpy_helper.from_array(np.full((1,), np.nan, np.float32), tensor.name),
            helper.make_tensor(tensor.name, TensorProto.FLOAT, [0], []),
            TensorProto(name=tensor.name, data_type=TensorProto.FLOAT, dims=[-1]),
        )
        tensor.CopyFrom(odd[number % len(odd)])
