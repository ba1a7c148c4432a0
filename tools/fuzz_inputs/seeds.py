"""Small inputs of every kind that the commands read, written into a folder."""

import contextlib
import functools
import gzip
import io
import json
import math
import os
import shlex
import shutil
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from calibration.cache import write_tensorrt_cache
from qdqtool import insert, predict
from qdqtool.commands.cli import run
from qdqtool.timing.parts import Calibration
from qdqtool.types import VERIFICATION_SCHEMA
from tests.calibration.nets import conv_net
from tests.contract import residual
from tests.verification.synthetic import log_of
from tools.fuzz.grammar import network
from tools.fuzz_logs.mutate import JSON, PROFILE, TRTEXEC_LOG
from tools.growth.families import FAMILIES

#: Which commands read a kind; FILE is the mutated file, TEXT what stands in it, OUT and MORE outputs, the others stay
#: as they are.
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {}
for _line in (Path(__file__).parent / "commands.tsv").read_text("utf-8").splitlines():
    _kind, _words = _line.split("\t")
    COMMANDS[_kind] = (*COMMANDS.get(_kind, ()), tuple(shlex.split(_words)))


#: Kinds as often as they are tried: what is told in milliseconds more often than what runs a network or writes a page.
_SLOW = (
    "samples.npz",
    "samples.npy",
    "packed.npz",
    "picture.png",
    "picture.jpg",
    "list.txt",
    "tuning.json",
    "own.onnx",
    "grown.onnx",
    "inserted.onnx",
    "float.onnx",
    "state.tuning",
    "verification.json",
    "inputs.npz",
    "statistics.npz",
)
KINDS = [kind for kind in COMMANDS for _ in range(1 if kind in _SLOW else 3)]
#: How lines begin by which `tune` says what it does.
PROGRESS = tuple(f"qdqtool: {words}" for words in (*map(str, range(10)), "putting choices"))

_LINES = (
    "[11/21/2026-12:00:00] [V] [TRT] Running: ConstQDQInitializersFusion on c0.in.Q",
    "[V] [TRT] ConstWeightsQuantizeFusion: Fusing model.0.conv.weight with QuantizeLinear_7_quantize_scale_node",
    "Could not find any implementation for node {ForeignNode[a...b]}.",
    "Could not fuse 2nd input (kernel weights) of CONVOLUTION",
    "SKIP-FLOAT",
    "RTX 3060",
)


def write_seeds(folder: Path) -> None:
    """Writes one small, whole file of every kind."""
    shutil.copytree(_made().name, folder, symlinks=True, dirs_exist_ok=True)
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe")
        (folder / "loop").symlink_to("loop")


@functools.cache
def _made() -> tempfile.TemporaryDirectory[str]:
    made = tempfile.TemporaryDirectory(prefix="qdqtool-seeds-")
    _write(Path(made.name))
    return made


def _write(folder: Path) -> None:
    qdq = network(11)
    (folder / "qdq.onnx").write_bytes(qdq.SerializeToString())
    (folder / "grown.onnx").write_bytes(FAMILIES["C2f"](30).SerializeToString())
    (folder / "qdq.onnx.gz").write_bytes(gzip.compress(qdq.SerializeToString(), mtime=0))
    net = conv_net()
    (folder / "float.onnx").write_bytes(net.SerializeToString())
    onnx.save(
        conv_net(),
        folder / "external.onnx",
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
    )
    rng = np.random.default_rng(0)
    images = rng.random((8, 3, 16, 16), np.float32)
    np.savez(folder / "samples.npz", images=images)
    np.savez_compressed(folder / "packed.npz", images=images)
    np.save(folder / "samples.npy", images)
    pixels = (rng.random((20, 24, 3)) * 255).astype(np.uint8)
    for name in ("picture.png", "picture.jpg"):
        Image.fromarray(pixels).save(folder / name)
    (folder / "list.txt").write_text("picture.png\npicture.jpg\n")
    inserted = insert(
        folder / "float.onnx",
        folder / "samples.npz",
        calib_cache=folder / "statistics.npz",
        include=["conv"],
    )
    inserted.save(folder / "inserted.onnx")
    known = {
        v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in qdq.graph.input
    }
    np.savez(
        folder / "inputs.npz",
        **{name: rng.random(shape, np.float32) for name, shape in known.items()},
    )
    write_tensorrt_cache(
        folder / "table.cache", dict.fromkeys(("images", "a1", "s1", "c1", "c2", "r2", "out"), 0.01)
    )
    (folder / "build.log").write_text(TRTEXEC_LOG)
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
    rows = [
        {"name": layer.name, "timeMs": 1.0, "averageMs": 0.02, "medianMs": 0.02, "percentage": 9.0}
        for layer in predicted.layers
    ]
    (folder / "own-profile.json").write_text(json.dumps([{"count": 50}, *rows], indent=1))
    seen = {
        "kind": "convolution",
        "name": "c3",
        "predicted": {"precision": "INT8"},
        "built": {"precision": "FP32"},
    }
    (folder / "verification.json").write_text(
        json.dumps(
            {
                "schema": VERIFICATION_SCHEMA,
                "mismatches": [seen],
                "build": {"tensorrt": "8.5.2", "device": "Orin"},
            }
        )
    )
    (folder / "time.json").write_text(
        json.dumps(Calibration("Tesla T4", 1.2, 0.3, "a profile").as_json())
    )
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


def jpeg_in_scans(width: int, height: int, times: int, together: bool = False) -> bytes:
    """A grey baseline JPEG of three components, each in scans of its own (or in the same), with EXIF's thumbnail."""
    held = io.BytesIO()
    Image.new("L", (8, 8)).save(held, "JPEG")
    data = held.getvalue()
    tables = b""
    place = 2
    while (marker := data[place : place + 2]) != b"\xff\xda":
        end = place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        tables += data[place:end] if marker in (b"\xff\xdb", b"\xff\xc4") else b""
        place = end

    def segment(marker: int, *content: int) -> bytes:
        return bytes([0xFF, marker, 0, 2 + len(content), *content])

    size = (*height.to_bytes(2), *width.to_bytes(2))
    frame = segment(0xC0, 8, *size, 3, *(n for c in (1, 2, 3) for n in (c, 0x11, 0)))
    blocks = math.ceil(width / 8) * math.ceil(height / 8)
    scans = [((1, 2, 3),)] if together else [((1,), (2,), (3,))] * times
    made = (
        b"\xff\xd8" + segment(0xE1, 0xFF, 0xD8, 0xFF, 0xDA, 0xFF, 0xD9) + b"\xff" + tables + frame
    )
    for components in (c for turn in scans for c in turn):
        bits = "001010" * blocks * len(components)  # a difference of 0, and the block's end
        bits += "1" * (-len(bits) % 8)
        made += segment(0xDA, len(components), *(n for c in components for n in (c, 0)), 0, 63, 0)
        made += int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    return made + b"\xff\xd9"
