"""Small valid files of each kind that commands read."""

import contextlib
import functools
import gzip
import io
import json
import os
import shlex
import shutil
import tempfile
from pathlib import Path

import numpy as np
import onnx
from PIL import Image

from calibration.cache import write_tensorrt_cache
from qdqtool import insert, predict
from qdqtool.commands.cli import run
from qdqtool.timing.time_calibration import TimeCalibration
from qdqtool.verification.result import VERIFICATION_SCHEMA
from tests.calibration.nets import conv_net
from tests.contract import residual
from tests.verification.synthetic import log_of
from tools.fuzz.grammar import network
from tools.fuzz_logs.mutate import JSON, PROFILE, TRTEXEC_LOG
from tools.growth.families import FAMILIES

#: Commands for each kind of file. FILE is the damaged file, TEXT is its content, OUT and MORE are
#: outputs. Other words are not replaced.
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {}
for _line in (Path(__file__).parent / "commands.tsv").read_text("utf-8").splitlines():
    _kind, _words = _line.split("\t")
    COMMANDS[_kind] = (*COMMANDS.get(_kind, ()), tuple(shlex.split(_words)))


#: Kinds with slow commands, which run a network or write a page. KINDS lists the other kinds three
#: times, so that they are chosen more often.
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
#: First words of the lines that `tune` prints while it runs.
PROGRESS = tuple(
    f"qdqtool: {words}"
    for words in (*map(str, range(10)), "testing", "INT8 by default", "combining", "warning: only")
)

_LINES = (
    "[11/21/2026-12:00:00] [V] [TRT] Running: ConstQDQInitializersFusion on c0.in.Q",
    "[V] [TRT] ConstWeightsQuantizeFusion: Fusing model.0.conv.weight with QuantizeLinear_7_quantize_scale_node",
    "Could not find any implementation for node {ForeignNode[a...b]}.",
    "Could not fuse 2nd input (kernel weights) of CONVOLUTION",
    "SKIP-FLOAT",
    "RTX 3060",
)


def write_seeds(folder: Path) -> None:
    shutil.copytree(_valid_files().name, folder, symlinks=True, dirs_exist_ok=True)
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe")
        (folder / "loop").symlink_to("loop")


@functools.cache
def _valid_files() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="qdqtool-seeds-")
    _write(Path(folder.name))
    return folder


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
    shapes = {
        v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in qdq.graph.input
    }
    np.savez(
        folder / "inputs.npz",
        **{name: rng.random(shape, np.float32) for name, shape in shapes.items()},
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
    """Write a quantized model, a build that agrees with its prediction, and other results."""
    proto = residual()
    (folder / "own.onnx").write_bytes(proto.SerializeToString())
    predicted = predict(proto)
    (folder / "own.log").write_text("\n".join(log_of(predicted)) + "\n")
    rows = [
        {"name": layer.name, "timeMs": 1.0, "averageMs": 0.02, "medianMs": 0.02, "percentage": 9.0}
        for layer in predicted.layers
    ]
    (folder / "own-profile.json").write_text(json.dumps([{"count": 50}, *rows], indent=1))
    mismatch = {
        "kind": "convolution",
        "name": "c3",
        "predicted": {"precision": "INT8"},
        "built": {"precision": "FP32"},
    }
    (folder / "verification.json").write_text(
        json.dumps(
            {
                "schema": VERIFICATION_SCHEMA,
                "mismatches": [mismatch],
                "build": {"tensorrt": "8.5.2", "device": "Orin"},
            }
        )
    )
    (folder / "time.json").write_text(
        json.dumps(TimeCalibration("Tesla T4", 1.2, 0.3, "a profile").as_json())
    )
    names = {"OUT": "out", "MORE": "tuning.json", "FILE": "state.tuning"}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for words in COMMANDS["state.tuning"]:
            run([str(folder / names.get(w, w)) if w in names or "." in w else w for w in words])
    (folder / "out").unlink()
