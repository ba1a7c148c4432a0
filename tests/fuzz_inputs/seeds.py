"""Small inputs of every kind that the commands read, written into a folder."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from calibration.cache import write_tensorrt_cache
from qdqtool import insert, predict
from qdqtool.cli import run
from qdqtool.timing.calibration import Calibration
from qdqtool.types import VERIFICATION_SCHEMA
from tests.buildlog import samples
from tests.calibration.nets import conv_net
from tests.contract import residual
from tests.fuzz.grammar import network
from tests.fuzz_logs.mutate import JSON, PROFILE
from tests.verification.synthetic import log_of

#: Which commands read a kind; FILE is the mutated file, TEXT what stands in it, OUT and MORE outputs, the others stay
#: as they are.
_INSERT = ("insert", "float.onnx", "--include", "conv", "-o", "OUT", "--no-predict")
_TUNE = ("tune", "float.onnx", "--include", "conv", "--workers", "1", "-o", "OUT")
_EXTRACT = ("extract", "FILE", "-o", "OUT", "--report", "MORE", "--minimize", "--limit", "20")
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "qdq.onnx": (
        ("predict", "FILE"), ("predict", "FILE", "--target", "rtx1.7", "--format", "json"),
        ("predict", "FILE", "--all", "--trace", "--layers", "-o", "OUT"), ("fix", "FILE", "-o", "OUT"),
        ("verify", "FILE", "build.log"),
    ),
    "own.onnx": (
        ("predict", "FILE", "--gpu", "T4", "--calibrate", "own-profile.json", "--save-calibration", "OUT"),
        ("report", "FILE", "--gpu", "RTX 3060", "--format", "json", "-o", "OUT"),
        ("report", "FILE", "own.log", "-o", "OUT"),
        ("verify", "FILE", "own.log", "--format", "json"), ("fix", "FILE", "--target", "rtx1.7", "-o", "OUT"),
        (*_EXTRACT, "--finding", "SKIP-FLOAT"), (*_EXTRACT, "--node", "c3", "--hops", "2", "--format", "json"),
        (*_EXTRACT, "--finding", "SKIP-FLOAT", "--private"), ("predict", "FILE", "--target", "trt11", "--sm", "7.5"),
    ),
    "qdq.onnx.gz": (("predict", "FILE"),),
    "float.onnx": (
        ("insert", "FILE", "--include", "conv", "--calib-table", "table.cache", "-o", "OUT"),
        ("insert", "FILE", "--include", "conv", "--calib", "samples.npz", "-o", "OUT", "--no-predict"),
        ("tune", "FILE", "--include", "conv", "--workers", "1", "--calib", "samples.npy", "--no-state", "-o", "OUT"),
        ("report", "inserted.onnx", "--float", "FILE", "-o", "OUT"), ("predict", "FILE", "--gpu", "T4"),
    ),
    "inserted.onnx": (("predict", "FILE"), ("report", "FILE", "--calib-cache", "statistics.npz", "-o", "OUT")),
    "external.onnx": (
        ("predict", "FILE"), ("insert", "FILE", "--include", "conv", "--calib", "samples.npz", "-o", "OUT"),
        ("report", "FILE", "-o", "OUT"), ("extract", "FILE", "--node", "c1", "-o", "OUT"),
    ),
    "samples.npz": ((*_INSERT, "--calib", "FILE"), (*_TUNE, "--calib", "samples.npy", "--eval", "FILE", "--no-state")),
    "packed.npz": ((*_INSERT, "--calib", "FILE"),),
    "samples.npy": ((*_INSERT, "--calib", "FILE"), (*_TUNE, "--calib", "FILE", "--no-state", "--front")),
    "inputs.npz": (("fix", "qdq.onnx", "--inputs", "FILE", "-o", "OUT"),),
    "picture.png": ((*_INSERT, "--calib", "FILE"),),
    "picture.jpg": ((*_INSERT, "--calib", "FILE"),),
    "list.txt": ((*_INSERT, "--calib", "FILE"),),
    "statistics.npz": (
        (*_INSERT, "--calib", "samples.npz", "--calib-cache", "FILE"),
        ("report", "inserted.onnx", "--calib-cache", "FILE", "-o", "OUT"),
    ),
    "state.tuning": ((*_TUNE, "--calib", "samples.npz", "--state", "FILE", "--result", "MORE"),),
    "tuning.json": (("report", "inserted.onnx", "--tuning", "FILE", "-o", "OUT"),),
    "verification.json": (
        ("extract", "own.onnx", "--finding", "SKIP-FLOAT", "-o", "OUT", "--report", "MORE", "--verification", "FILE"),
    ),
    "time.json": (("predict", "own.onnx", "--gpu", "T4", "--calibrate", "FILE"),),
    "own.log": (
        ("verify", "own.onnx", "FILE", "--format", "json"), ("report", "own.onnx", "FILE", "-o", "OUT"),
        ("engine", "FILE", "--svg", "OUT", "--dot", "MORE"), ("engine", "FILE", "--gpu", "T4", "--compare", "own.log"),
    ),
    "own-profile.json": (
        ("predict", "own.onnx", "--gpu", "T4", "--calibrate", "FILE"),
        ("report", "own.onnx", "own.log", "FILE", "-o", "OUT"),
        ("verify", "own.onnx", "own.log", "FILE", "--gpu", "T4"), ("engine", "own.log", "--profile", "FILE"),
    ),
    "lines.txt": (("explain", "TEXT"), ("explain", "TEXT", "--format", "json"), ("log", "FILE")),
    "gpu.txt": (("gpus", "TEXT"), ("predict", "own.onnx", "--gpu", "TEXT", "--format", "json")),
    "node.txt": (
        ("extract", "own.onnx", "--node", "TEXT", "-o", "OUT", "--report", "MORE"),
        ("predict", "own.onnx", "--assume", "TEXT"), ("predict", "own.onnx", "--sm", "TEXT"),
        ("log", "own.log", "--pass", "TEXT"), ("insert", "float.onnx", "--calib", "TEXT", "-o", "OUT"),
    ),
    "table.cache": ((*_INSERT, "--calib-table", "FILE"),),
    "build.log": (("log", "FILE"), ("verify", "--from-log", "FILE"), ("log", "FILE", "--to-onnx", "OUT")),
    "layers.json": (("engine", "FILE"), ("log", "FILE", "--format", "json"), ("verify", "qdq.onnx", "FILE")),
    "profile.json": (("log", "FILE"), ("engine", "layers.json", "--profile", "FILE")),
}


#: Kinds as often as they are tried: what is told in milliseconds more often than what runs a network or writes a page.
_SLOW = ("samples.npz", "samples.npy", "packed.npz", "picture.png", "picture.jpg", "list.txt", "tuning.json",
         "own.onnx", "inserted.onnx", "float.onnx", "state.tuning", "verification.json", "inputs.npz",
         "statistics.npz")
KINDS = [kind for kind in COMMANDS for _ in range(1 if kind in _SLOW else 3)]
#: How lines begin by which `tune` says what it does.
PROGRESS = tuple(f"qdqtool: {words}" for words in (*map(str, range(10)), "putting choices"))

_LINES = (
    "[11/21/2026-12:00:00] [V] [TRT] Running: ConstQDQInitializersFusion on c0.in.Q",
    "[V] [TRT] ConstWeightsQuantizeFusion: Fusing model.0.conv.weight with QuantizeLinear_7_quantize_scale_node",
    "Could not find any implementation for node {ForeignNode[a...b]}.",
    "Could not fuse 2nd input (kernel weights) of CONVOLUTION", "SKIP-FLOAT", "RTX 3060",
)


def write_seeds(folder: Path) -> None:
    """Writes one small, whole file of every kind."""
    qdq = network(11)
    (folder / "qdq.onnx").write_bytes(qdq.SerializeToString())
    (folder / "qdq.onnx.gz").write_bytes(gzip.compress(qdq.SerializeToString(), mtime=0))
    net = conv_net()
    (folder / "float.onnx").write_bytes(net.SerializeToString())
    onnx.save(conv_net(), folder / "external.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    rng = np.random.default_rng(0)
    images = rng.random((8, 3, 16, 16), np.float32)
    np.savez(folder / "samples.npz", images=images)
    np.savez_compressed(folder / "packed.npz", images=images)
    np.save(folder / "samples.npy", images)
    pixels = (rng.random((20, 24, 3)) * 255).astype(np.uint8)
    for name in ("picture.png", "picture.jpg"):
        Image.fromarray(pixels).save(folder / name)
    (folder / "list.txt").write_text("picture.png\npicture.jpg\n")
    inserted = insert(folder / "float.onnx", folder / "samples.npz", calib_cache=folder / "statistics.npz",
                      include=["conv"])
    inserted.save(folder / "inserted.onnx")
    known = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in qdq.graph.input}
    np.savez(folder / "inputs.npz", **{name: rng.random(shape, np.float32) for name, shape in known.items()})
    write_tensorrt_cache(folder / "table.cache", dict.fromkeys(("images", "a1", "s1", "c1", "c2", "r2", "out"), 0.01))
    (folder / "build.log").write_text(samples.trtexec_log())
    (folder / "layers.json").write_text(json.dumps(JSON))
    (folder / "profile.json").write_text(json.dumps(PROFILE, indent=1))
    _write_own(folder)
    (folder / "lines.txt").write_text("\n".join(_LINES))
    (folder / "gpu.txt").write_text("sm=8.6,sms=28,clock=1777,bandwidth=360,l2=3")
    (folder / "node.txt").write_text("c3")


def _write_own(folder: Path) -> None:
    """A quantized model, a build that agrees with its prediction, and what other commands say of it."""
    proto = residual()
    (folder / "own.onnx").write_bytes(proto.SerializeToString())
    predicted = predict(proto)
    (folder / "own.log").write_text("\n".join(log_of(predicted)) + "\n")
    rows = [{"name": layer.name, "timeMs": 1.0, "averageMs": 0.02, "medianMs": 0.02, "percentage": 9.0}
            for layer in predicted.layers]
    (folder / "own-profile.json").write_text(json.dumps([{"count": 50}, *rows], indent=1))
    seen = {"kind": "convolution", "name": "c3", "predicted": {"precision": "INT8"}, "built": {"precision": "FP32"}}
    (folder / "verification.json").write_text(json.dumps({
        "schema": VERIFICATION_SCHEMA, "mismatches": [seen], "build": {"tensorrt": "8.5.2", "device": "Orin"},
    }))
    (folder / "time.json").write_text(json.dumps(Calibration("Tesla T4", 1.2, 0.3, "a profile").as_json()))
    names = {"OUT": "out", "MORE": "tuning.json", "FILE": "state.tuning"}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for words in COMMANDS["state.tuning"]:
            run([str(folder / names.get(w, w)) if w in names or "." in w else w for w in words])
    (folder / "out").unlink()


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
