"""False alarms of W-SCALE and ACT-SCALE on what quantizers write, and how many spoilt models they find.

    python benchmarks/scales.py --keep FILE.json --page docs/scales.md [--models yolov8n resnet18 ...] [--onnx FILE ...]

Networks of Ultralytics and torchvision with weights as training leaves them (``trained-like``): heavy tails, ranges of
output channels that spread by a factor of ten and more, dead channels, BatchNormalization with its own statistics.
``--onnx`` adds float models of your own with trained weights. Each is quantized by every tool that is installed, with
the tool's own defaults; nothing of it may be reported. Then the scales that ``insert`` placed are spoilt in one way at
a time; all of that should be. Four images calibrate, four others are looked at.
"""

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import numpy.typing as npt
import onnx
import torch
from accuracy import MODELOPT
from common import failure, kept_rows, publish
from common import table as markdown
from onnx import numpy_helper
from qat import pytorch_quantized
from qat_models import ULTRALYTICS, built, call, settle
from torch import nn

import qdqtool
from qdqtool.prediction import check_activations
from qdqtool.qat.networks import unwrapped
from qdqtool.qat.trace import Call, export_proto

TORCHVISION = (
    "alexnet", "vgg11_bn", "resnet18", "resnet50", "resnext50_32x4d", "squeezenet1_1", "densenet121", "googlenet",
    "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "efficientnet_b0", "mnasnet1_0", "regnet_x_400mf",
    "regnet_y_400mf", "shufflenet_v2_x1_0", "convnext_tiny", "vit_b_32", "swin_t",
)  # fmt: skip
Array = npt.NDArray[np.float32]
Feed = list[dict[str, Array]]
ABOUT_WEIGHTS = {"W-SCALE", "W-AXIS", "SCALE-COUNT", "SCALE-NONPOS", "AXIS-OPSET", "CT-AXIS"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[*ULTRALYTICS, *TORCHVISION])
    parser.add_argument("--onnx", nargs="*", type=Path, default=[], help="float models with trained weights")
    parser.add_argument("--keep", type=Path, help="a JSON file with the rows that are done")
    parser.add_argument("--page", type=Path, help="a page whose tables between marks are replaced")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    files = {f"{p.stem} (trained)": p for p in options.onnx}
    names = [*files, *(f"{m} (trained-like)" for m in options.models)]
    publish("scales", table(kept_rows(names, options.keep, lambda name: measured(name, files.get(name)))), options.page)


def measured(name: str, file: Path | None) -> dict[str, Any]:
    """For each tool and each way of spoiling: the codes that were reported, or what was raised."""
    row: dict[str, Any] = {"tools": {}, "spoilt": {}}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            subject = Subject(name, file, Path(folder))
        except Exception as error:
            return {"fails": failure(error)}
        for tool, make in TOOLS.items():
            with contextlib.suppress(ImportError):
                looked_at = None if tool.startswith("the same") else subject.others  # nobody calibrated these weights
                row["tools"][tool] = tried(lambda make=make, data=looked_at: codes(make(subject), data))  # type: ignore[misc]
        placed = subject.placed
        if placed is not None:
            for way, spoil in WEIGHTS.items():
                row["spoilt"][way] = tried(lambda spoil=spoil: codes(spoil(subject, placed), None))  # type: ignore[misc]
            for way, spoil in ACTIVATIONS.items():
                row["spoilt"][way] = tried(lambda spoil=spoil: codes(*spoil(subject, placed)))  # type: ignore[misc]
    return row


def tried(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ImportError:
        raise
    except Exception as error:
        return failure(error)


def codes(proto: onnx.ModelProto | None, data: Feed | None) -> list[str] | None:
    """The findings about scales; None where there was nothing to spoil."""
    if proto is None:
        return None
    prediction = qdqtool.predict(proto)
    if data is not None:
        check_activations(proto, prediction, data)
    return sorted({f.code for f in prediction.findings} & {*ABOUT_WEIGHTS, "ACT-SCALE"})


class Subject:
    """A float network, its ONNX file, and images: four to calibrate with, four others to look at."""

    def __init__(self, name: str, file: Path | None, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder, self.network, self.unfolded = folder, None, None
        self.name = name.partition(" (")[0]
        if file is None:
            self.network, self.shape = network_of(self.name, 0)
            self.proto = export_proto(self.network, Call((torch.rand(1, *self.shape),)), 17)
            self.unfolded = unfolded(self.network, self.shape)
        else:
            self.proto = onnx.load(file)
            dims = self.proto.graph.input[0].type.tensor_type.shape.dim
            self.shape = tuple(max(d.dim_value, size) for d, size in zip(dims[1:], (1, 256, 256), strict=True))
            for dim, value in zip(dims, (1, *self.shape), strict=True):
                dim.dim_value = value
            del self.proto.graph.value_info[:]
        self.path = folder / "float.onnx"
        onnx.save(self.proto, self.path)
        self.input = self.proto.graph.input[0].name
        images = np.stack([picture(i, self.shape) for i in range(8)])
        self.calibration = [{self.input: image[None]} for image in images[:4]]
        self.others = [{self.input: image[None]} for image in images[4:]]
        self.placed: onnx.ModelProto | None = None


def picture(seed: int, shape: tuple[int, ...]) -> Array:
    """Smooth shapes of some brightness, and grain: [channels, height, width], 0 to 1."""
    rng = np.random.default_rng(seed)
    coarse = torch.tensor(rng.random((1, shape[0], 7, 7)), dtype=torch.float32)
    smooth = nn.functional.interpolate(coarse, size=shape[1:], mode="bicubic").numpy()[0]
    image: Array = np.clip(smooth * rng.uniform(0.5, 1.2) + rng.normal(0, 0.04, shape), 0, 1).astype(np.float32)
    return image


def network_of(name: str, seed: int) -> tuple[nn.Module, tuple[int, ...]]:
    """The network in evaluation mode, BatchNormalization settled, and the shape of an input."""
    torch.manual_seed(seed)
    made, shape = built(name)
    network = unwrapped(made)
    train_like(network, seed)
    data = torch.tensor(np.stack([picture(100 + i, shape) for i in range(4)]))
    settle(network, lambda: call(network, data))
    return network.eval(), shape


def train_like(network: nn.Module, seed: int) -> None:
    """Weights as training leaves them; their overall size is that of the initialization."""
    rng = np.random.default_rng(seed)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.ConvTranspose2d):
            weight = module.weight.data
            shape = (1, -1) if isinstance(module, nn.ConvTranspose2d) else (-1, 1)
            rows = weight.shape[1] if isinstance(module, nn.ConvTranspose2d) else weight.shape[0]
            channels = np.exp(rng.normal(0, 0.5, rows)).reshape(*shape, *(1,) * (weight.ndim - 2))
            values = rng.standard_t(4, tuple(weight.shape)) * channels
            module.weight.data = torch.tensor(values / values.std() * float(weight.std()), dtype=torch.float32)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            gamma = np.exp(rng.normal(-0.2, 0.5, module.num_features))
            gamma[rng.random(module.num_features) < 0.03] = 1e-9
            module.weight.data = torch.tensor(gamma, dtype=torch.float32)
            module.bias.data = torch.tensor(rng.normal(-0.1, 0.3, module.num_features), dtype=torch.float32)


def unfolded(network: nn.Module, shape: tuple[int, ...]) -> onnx.ModelProto:
    """The same network exported with its BatchNormalization left in place."""
    return export_proto(network, Call((torch.rand(1, *shape),)), 17, training=torch.onnx.TrainingMode.PRESERVE,
                        do_constant_folding=False)


def copied(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """A copy, and its constants by name."""
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    return copy, {t.name: t for t in copy.graph.initializer}


def trained_on(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Weights that moved by a tenth of their spread after their scales were taken, as in training."""
    rng = np.random.default_rng(0)
    copy, tensors = copied(proto)
    for q in copy.graph.node:
        if q.op_type == "QuantizeLinear" and q.input[0] in tensors:
            weights = numpy_helper.to_array(tensors[q.input[0]])
            moved = weights + rng.normal(0, 0.1 * float(weights.std()), weights.shape)
            tensors[q.input[0]].CopyFrom(numpy_helper.from_array(moved.astype(weights.dtype), q.input[0]))
    return copy


def clipped(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """Scales that clip the largest hundredth of each channel's weights on purpose."""
    return rescaled(proto, lambda s, w, n: np.maximum(np.quantile(np.abs(w.reshape(len(w), -1)), 0.99, axis=1), 1e-9)
                    / 127 if s.size == len(w) else None)


# Tools ------------------------------------------------------------------------------------------------------------


def by_insert(subject: Subject) -> onnx.ModelProto:
    if subject.placed is None:
        subject.placed = qdqtool.insert(subject.path, subject.calibration, predict=False).model
    return subject.placed


def by_onnxruntime(subject: Subject, per_channel: bool) -> onnx.ModelProto:
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    rows = iter(subject.calibration)

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, Array] | None:
            return next(rows, None)

    path = subject.folder / "ort.onnx"
    quantize_static(subject.path, path, Reader(), per_channel=per_channel, weight_type=QuantType.QInt8,
                    activation_type=QuantType.QInt8, extra_options={"ActivationSymmetric": True})
    return onnx.load(path)


def by_modelopt_onnx(subject: Subject) -> onnx.ModelProto:
    """In a process of its own: it replaces parts of onnxruntime's quantization in the one that imports it."""
    if importlib.util.find_spec("onnxslim") is None:  # ModelOpt's extra "onnx"
        raise ImportError("onnxslim")
    data, path = subject.folder / "data.npy", subject.folder / "modelopt.onnx"
    np.save(data, np.concatenate([feed[subject.input] for feed in subject.calibration]))
    command = [sys.executable, "-c", MODELOPT, subject.path, data, subject.input, "max", path]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)})
    if not path.exists():
        raise RuntimeError((done.stderr.strip().splitlines() or [""])[-1])
    return onnx.load(path)


def by_modelopt_torch(subject: Subject) -> onnx.ModelProto | None:
    import modelopt.torch.quantization as mtq

    if subject.network is None:
        return None
    network, _ = network_of(subject.name, 0)
    mtq.quantize(network, mtq.INT8_DEFAULT_CFG, lambda model: [model(x) for x in tensors_of(subject)])
    return export_proto(network, Call((tensors_of(subject)[0],)), 17)


def by_pytorch_quantization(subject: Subject) -> onnx.ModelProto | None:
    if subject.network is None:
        return None
    weights, data = subject.network.state_dict(), tensors_of(subject)
    with pytorch_quantized(lambda: unwrapped(built(subject.name)[0]), weights, data) as network:
        return export_proto(network, Call((data[0],)), 17)


def tensors_of(subject: Subject) -> list[torch.Tensor]:
    return [torch.tensor(feed[subject.input]) for feed in subject.calibration]


TOOLS: dict[str, Callable[[Subject], onnx.ModelProto | None]] = {
    "qdqtool insert": by_insert,
    "the same, weights trained on": lambda s: trained_on(by_insert(s)),
    "the same, a hundredth clipped": lambda s: clipped(by_insert(s)),
    "ModelOpt (torch)": by_modelopt_torch,
    "ModelOpt (ONNX)": by_modelopt_onnx,
    "pytorch-quantization": by_pytorch_quantization,
    "onnxruntime, per channel": lambda s: by_onnxruntime(s, True),
    "onnxruntime, per tensor": lambda s: by_onnxruntime(s, False),
}

# Spoilt models ------------------------------------------------------------------------------------------------------

Change = Callable[[npt.NDArray[np.float64], npt.NDArray[np.float64], int], npt.NDArray[np.float64] | None]


def rescaled(proto: onnx.ModelProto, change: Change, dtype: Any = np.float32) -> onnx.ModelProto | None:
    """A copy with other weight scales: ``change`` gets scales, weights (channels first) and the layer's number."""
    copy, tensors = copied(proto)
    number = changed = 0
    for q in copy.graph.node:
        if q.op_type != "QuantizeLinear" or q.input[0] not in tensors:
            continue
        old, weights = (numpy_helper.to_array(tensors[q.input[i]]).astype(np.float64) for i in (1, 0))
        axis = next((a.i for a in q.attribute if a.name == "axis"), 0)
        new = change(old, np.moveaxis(weights, axis, 0), number)
        number += 1
        if new is not None:
            tensors[q.input[1]].CopyFrom(numpy_helper.from_array(new.astype(dtype).astype(np.float32), q.input[1]))
            changed += 1
    return copy if changed else None


def largest(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Scale of each channel, the first axis."""
    return np.maximum(np.abs(weights).reshape(len(weights), -1).max(axis=1), 1e-9) / 127


def along_the_other_axis(subject: Subject, placed: onnx.ModelProto) -> onnx.ModelProto | None:
    def change(scale: Any, weights: Any, number: int) -> Any:
        square = weights.ndim > 1 and weights.shape[0] == weights.shape[1] == scale.size
        return largest(np.moveaxis(weights, 1, 0)) if square else None

    return rescaled(placed, change)


def other_axis_named(subject: Subject, placed: onnx.ModelProto) -> onnx.ModelProto | None:
    copy, _ = copied(placed)
    for node in copy.graph.node:
        for attribute in node.attribute:
            if node.op_type in ("QuantizeLinear", "DequantizeLinear") and attribute.name == "axis":
                attribute.i = 1 - attribute.i
    return copy


def of_convolutions(placed: onnx.ModelProto, weights: list[npt.NDArray[Any]]) -> onnx.ModelProto | None:
    """Scales from other weights of the same convolutions, which both files hold in the same order."""
    copy, tensors = copied(placed)
    makers = {o: n for n in placed.graph.node for o in n.output}
    quantizers = []
    for node in placed.graph.node:
        if node.op_type == "Conv":
            dq = makers.get(node.input[1])
            q = makers.get(dq.input[0]) if dq is not None and dq.op_type == "DequantizeLinear" else None
            quantizers.append(q.input[1] if q is not None and q.input[0] in tensors else None)
    if len(quantizers) != len(weights):
        return None
    found = {name: largest(w.astype(np.float64)) for name, w in zip(quantizers, weights, strict=True) if name}
    for name, scale in found.items():
        if numpy_helper.to_array(tensors[name]).size == scale.size:
            tensors[name].CopyFrom(numpy_helper.from_array(scale.astype(np.float32), name))
    return copy if found else None


def conv_weights(proto: onnx.ModelProto) -> list[npt.NDArray[Any]]:
    tensors = {t.name: t for t in proto.graph.initializer}
    return [numpy_helper.to_array(tensors[n.input[1]]) for n in proto.graph.node
            if n.op_type == "Conv" and n.input[1] in tensors]


def before_folding(subject: Subject, placed: onnx.ModelProto) -> onnx.ModelProto | None:
    if subject.unfolded is None or not any(n.op_type == "BatchNormalization" for n in subject.unfolded.graph.node):
        return None
    return of_convolutions(placed, conv_weights(subject.unfolded))


def other_checkpoint(subject: Subject, placed: onnx.ModelProto) -> onnx.ModelProto | None:
    if subject.network is None:
        return None
    network, shape = network_of(subject.name, 1)
    return of_convolutions(placed, conv_weights(export_proto(network, Call((torch.rand(1, *shape),)), 17)))


def few(channels: int, factor: float) -> Callable[[Subject, onnx.ModelProto], onnx.ModelProto | None]:
    """Wrong scales in some channels of the sixth layer alone."""
    return lambda _, placed: rescaled(
        placed, lambda s, w, n: s * np.where(np.arange(s.size) < channels, factor, 1) if n == 5 else None)


def other_tensor(subject: Subject, placed: onnx.ModelProto) -> onnx.ModelProto | None:
    kept: list[Any] = []
    rescaled(placed, lambda s, w, n: kept.append(s))
    return rescaled(placed, lambda s, w, n: np.resize(kept[(n + 1) % len(kept)], s.shape))


WEIGHTS: dict[str, Callable[[Subject, onnx.ModelProto], onnx.ModelProto | None]] = {
    "scales taken along the other axis (square weights)": along_the_other_axis,
    "the other axis named": other_axis_named,
    "scales from before BatchNormalization was folded": before_folding,
    "scales of another checkpoint": other_checkpoint,
    "one scale for all channels, their mean": lambda _, p: rescaled(p, lambda s, w, n: np.full_like(s, s.mean())),
    "one layer, half": few(10**6, 0.5),
    "one layer, times 2": few(10**6, 2.0),
    "three channels of one layer, half": few(3, 0.5),
    "one channel of one layer, times 2": few(1, 2.0),
    "times 2": lambda _, p: rescaled(p, lambda s, w, n: s * 2),
    "half": lambda _, p: rescaled(p, lambda s, w, n: s / 2),
    "times 127/128": lambda _, p: rescaled(p, lambda s, w, n: s * 127 / 128),
    "scales of the next layer": other_tensor,
    "half precision, a channel rounded to zero": lambda _, p: rescaled(
        p, lambda s, w, n: np.minimum(s, np.where(np.arange(s.size) == 0, 2e-8, 1)) if n == 1 else None, np.float16),
}


def activations(
    placed: onnx.ModelProto, change: Callable[[list[float]], list[float]]
) -> onnx.ModelProto:
    """A copy with other scales of activations."""
    copy, tensors = copied(placed)
    names = list(dict.fromkeys(
        n.input[1] for n in copy.graph.node if n.op_type == "QuantizeLinear" and n.input[0] not in tensors))
    new = change([float(numpy_helper.to_array(tensors[n]).ravel()[0]) for n in names])
    for name, value in zip(names, new, strict=True):
        shape = numpy_helper.to_array(tensors[name]).shape
        tensors[name].CopyFrom(numpy_helper.from_array(np.full(shape, value, np.float32), name))
    return copy


ACTIVATIONS: dict[str, Callable[[Subject, onnx.ModelProto], tuple[onnx.ModelProto, Feed]]] = {
    "activations: half": lambda s, p: (activations(p, lambda x: [v / 2 for v in x]), s.others),
    "activations: a quarter": lambda s, p: (activations(p, lambda x: [v / 4 for v in x]), s.others),
    "activations: times 8": lambda s, p: (activations(p, lambda x: [v * 8 for v in x]), s.others),
    "activations: one, an eighth": lambda s, p: (
        activations(p, lambda x: [v / (8 if i == len(x) // 2 else 1) for i, v in enumerate(x)]), s.others),
    "activations: scales of the next tensor": lambda s, p: (activations(p, lambda x: [*x[1:], x[0]]), s.others),
    "activations: calibrated for pixels 0 to 255": lambda s, p: (p, [{k: v / 255 for k, v in f.items()}
                                                                     for f in s.others]),
}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Two tables: false alarms by tool, spoilt models found by way; with what could not be done."""
    good = [r for r in found.values() if "fails" not in r]
    tools, spoilt = [], []
    for tool in TOOLS:
        rows = [r["tools"].get(tool) for r in good]
        done = [r for r in rows if isinstance(r, list)]
        tools.append((tool, len(done), *(sum(code in r for r in done) for code in ("W-SCALE", "ACT-SCALE")),
                      sum(isinstance(r, str) for r in rows)))
    for way in [*WEIGHTS, *ACTIVATIONS]:
        done = [r for r in (g["spoilt"].get(way) for g in good) if isinstance(r, list)]
        wanted = {"ACT-SCALE"} if way in ACTIVATIONS else ABOUT_WEIGHTS
        spoilt.append((way, len(done), sum(bool(wanted & set(r)) for r in done)))
    return "\n\n".join([f"{len(good)} models.", markdown(("tool", "models", "W-SCALE", "ACT-SCALE", "failed"), tools),
                        markdown(("spoilt", "models", "found"), spoilt)])


if __name__ == "__main__":
    main()
