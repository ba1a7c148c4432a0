"""Calibrate, train and export networks of Ultralytics and torchvision with qdqtool.qat.

    pip install 'qdqtool[qat]' ultralytics   # AGPL-3.0: measured here, not a part of qdqtool
    python benchmarks/qat_models.py --keep FILE.json --page docs/qat-models.md
    python benchmarks/qat_models.py --cost --page docs/qat-results.md

The networks have random weights (the script downloads nothing). The statistics of
BatchNormalization are those of noise. Each network is trained for two steps. A row has the number
of convolutions and linear layers in the plan, the number of those that are predicted as INT8 in the
exported file, the reasons why the others are not, the results of the export check (docs/qat.md) and
the noise of the network.

``--cost`` measures the time of qat.calibrate relative to that of float forward passes over the same
images. The time is the processor time of all threads. Calibration and forward passes run in turns
on the same batches. The result is the median of the ratios.
"""

import argparse
import contextlib
import copy
import io
import statistics
import string
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from common import failure, kept_rows, parser_of, publish, table
from torch import Tensor, nn

from qdqtool import qat
from qdqtool.qat.networks import unwrap_network
from qdqtool.qat.sites import WEIGHTED_MODULES
from qdqtool.reasons.placement import SkipCause
from qdqtool.trt.result import Prediction

ULTRALYTICS = (
    "yolov8n",
    "yolov8s",
    "yolov8n-seg",
    "yolov8n-pose",
    "yolov8n-obb",
    "yolov8n-cls",
    "yolov8n-p2",
    "yolov8n-ghost",
    "yolov8s-world",
    "yolov5n",
    "yolov6n",
    "yolov3-tiny",
    "yolov9t",
    "yolov10n",
    "yolo11n",
    "yolo11n-seg",
    "yolo12n",
    "yolo26n",
    "yolo26n-seg",
    "yolo26n-pose",
    "rtdetr-l",
)
TORCHVISION = (
    "alexnet",
    "vgg11_bn",
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "squeezenet1_1",
    "densenet121",
    "googlenet",
    "inception_v3",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "mnasnet1_0",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "shufflenet_v2_x1_0",
    "convnext_tiny",
    "vit_b_32",
    "swin_t",
    "swin_v2_t",
    "maxvit_t",
    "fcn_resnet50",
    "deeplabv3_mobilenet_v3_large",
    "lraspp_mobilenet_v3_large",
    "ssdlite320_mobilenet_v3_large",
    "ssd300_vgg16",
    "retinanet_resnet50_fpn",
    "fcos_resnet50_fpn",
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "maskrcnn_resnet50_fpn",
    "keypointrcnn_resnet50_fpn",
    "r3d_18",
    "r2plus1d_18",
    "s3d",
    "mvit_v1_b",
    "swin3d_t",
    "raft_small",
)
# Sizes of inputs in pixels, if they are not 64 (torchvision) or 128 (Ultralytics).
SIZES = {
    "rtdetr-l": 256,
    "yolov8s-world": 192,
    "maxvit_t": 224,
    "vit_b_32": 224,
    "raft_small": 128,
    "mvit_v1_b": 224,
    "s3d": 224,
    "alexnet": 224,
    "vgg11_bn": 224,
    "inception_v3": 299,
}
VIDEO = {"r3d_18": 4, "r2plus1d_18": 4, "s3d": 14, "mvit_v1_b": 16, "swin3d_t": 4}
DETECTION = ("ssd", "retinanet", "fcos", "fasterrcnn", "maskrcnn", "keypointrcnn")
RESIZED = 160  # size to which torchvision's detectors resize images here; their default is 800
COSTS = {
    "resnet18": 224,
    "mobilenet_v2": 224,
    "efficientnet_b0": 224,
    "shufflenet_v2_x1_0": 224,
    "squeezenet1_1": 224,
    "yolov8n": 320,
    "yolo11n": 320,
    "yolov9t": 320,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--models", nargs="+", help="names of networks. [default: all; with --cost, eight]"
    )
    parser.add_argument("--keep", type=Path, help="JSON file for finished rows")
    parser.add_argument(
        "--cost", action="store_true", help="measure the cost of calibration instead"
    )
    parser.add_argument("--images", type=int, default=128, help="number of images of --cost")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[16, 1], help="batch sizes of --cost"
    )
    parser.add_argument("--pairs", type=int, default=3, help="number of ratios of --cost")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.cost:
        head = (
            f"{options.images} images, method mse",
            "tensors",
            *(f"in batches of {b}" for b in options.batch),
        )
        rows = [costs(name, options) for name in options.models or COSTS]
        publish("calibration", table(head, rows), options.page)
        return
    found = kept_rows(options.models or [*ULTRALYTICS, *TORCHVISION], options.keep, measured)
    publish("models", page(found), options.page)


def measured(name: str) -> dict[str, Any]:
    """Return the row of a network; if a step fails, a row with the error."""
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            return _measured(name, Path(folder) / "model.onnx")
    except Exception as error:
        traceback.print_exc()
        return {"fails": failure(error)}


def _measured(name: str, path: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    made, shape = built(name)
    network = unwrap_network(made)

    def pictures(count: int) -> Any:
        return sample_of(name, shape, count)

    settle(network, lambda: losses_of(name, network, pictures(4)))
    plan = qat.prepare(made, pictures(1), report=None)
    planned = runs(network, [w.module for w in plan.weights], lambda: call(network, pictures(1)))
    qat.calibrate(made, [pictures(2), pictures(2)])
    network.train()
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], 1e-6)
    for norm in norms_of(network):
        norm.eval()
    for _ in range(2):
        losses = losses_of(name, network, pictures(2))
        optimizer.zero_grad()
        sum(losses, torch.zeros(())).backward()
        optimizer.step()
    network.eval()
    done = qat.export(made, path, pictures(1))
    return {
        "planned": planned,
        "apart": apart(network, plan, done.prediction),
        "merged": len(plan.merged),
        "unseen": len(plan.unseen),
        "pieces": done.check.pieces,
        "worst": done.check.worst,
        "difference": done.difference,
        "noise": done.noise,
        **done.summary,
    }


def apart(network: nn.Module, plan: qat.Plan, prediction: Prediction) -> dict[str, int]:
    """Return the number of float layers with weights, by reason.

    The reasons are those of the plan. Layers that are float only in the prediction count as one
    reason. Layers with constant inputs are left out, because TensorRT computes them during the
    build.
    """
    modules = dict(network.named_modules())
    reasons = Counter(
        reason.partition(" (")[0].partition("; ")[0]
        for name, reason in plan.skipped
        if isinstance(modules.get(name), WEIGHTED_MODULES)
        or reason.startswith("a function call with weights")
    )
    del reasons[SkipCause.CONSTANT_INPUT]
    left = sum(c.precision != "INT8" for c in prediction.convolutions) - reasons.total()
    if left:
        reasons["others, by the prediction"] = left
    return dict(reasons)


def built(name: str) -> tuple[Any, tuple[int, ...]]:
    """Return a network, or Ultralytics' wrapper of a network, and the shape of one input."""
    size = SIZES.get(name, 128 if name in ULTRALYTICS else 64)
    if name in ULTRALYTICS:
        from ultralytics import RTDETR, YOLO

        return (RTDETR if "rtdetr" in name else YOLO)(f"{name}.yaml"), (3, size, size)
    import torchvision

    options: dict[str, Any] = {"weights": None}
    if "_fpn" in name or name.startswith(("ssd", "fcn", "deeplab", "lraspp")):
        options["weights_backbone"] = None
    if "_fpn" in name:
        options |= {"min_size": RESIZED, "max_size": RESIZED}
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    model = torchvision.models.get_model(name, **options)
    return model, (3, VIDEO[name], size, size) if name in VIDEO else (3, size, size)


def sample_of(name: str, shape: tuple[int, ...], count: int) -> Any:
    images = torch.rand(count, *shape)
    return (images, torch.rand(count, *shape)) if name == "raft_small" else images


def runs(network: nn.Module, names: Iterable[str], forward: Callable[[], Any]) -> int:
    """Return the number of runs of the named modules in one forward pass.

    A module may run several times. For example, a detection head runs once for each level of a
    pyramid.
    """
    counted: list[nn.Module] = []
    modules = dict(network.named_modules())
    hooks = [
        modules[n].register_forward_hook(lambda module, *_: counted.append(module)) for n in names
    ]
    network.eval()
    with torch.no_grad(), qat.disabled(network):
        forward()
    for hook in hooks:
        hook.remove()
    return len(counted)


def losses_of(name: str, network: nn.Module, sample: Any) -> list[Tensor]:
    """Return the losses of a network. The training minimizes their sum.

    torchvision's detectors compute their losses themselves. For other networks, the losses are the
    mean squares of the outputs.
    """
    if not name.startswith(DETECTION):
        return [
            t.float().square().mean() for t in tensors(call(network, sample)) if t.requires_grad
        ]
    side = sample.shape[-1]
    target = {
        "boxes": torch.tensor(
            [[4.0, 4.0, side / 2, side / 2], [side / 3, side / 4, side - 2.0, side - 4.0]]
        ),
        "labels": torch.tensor([1, 1]),
        "masks": torch.ones(2, side, side, dtype=torch.uint8),
        "keypoints": torch.tensor([[[side / 3, side / 3, 1.0]] * 17] * 2),
    }
    return list(network(list(sample), [target] * len(sample)).values())


def call(network: nn.Module, sample: Any) -> Any:
    return network(*sample) if isinstance(sample, tuple) else network(sample)


def norms_of(network: nn.Module) -> list[nn.Module]:
    return [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def settle(network: nn.Module, forward: Callable[[], Any]) -> None:
    """Set statistics of BatchNormalization from noise, and constant biases to random values."""
    norms = norms_of(network)
    momenta = [m.momentum for m in norms]
    for norm in norms:
        norm.momentum = None
        norm.reset_running_stats()
    network.train()
    with torch.no_grad():
        for _ in range(2):
            forward()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    network.eval()
    for key, parameter in network.named_parameters():
        if key.endswith("bias") and float(parameter.detach().float().std(unbiased=False)) == 0:
            parameter.data += torch.randn(parameter.shape) * 0.02


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inside = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return [t for v in inside for t in tensors(v)]


def page(found: dict[str, dict[str, Any]]) -> str:
    good = [r for r in found.values() if "fails" not in r]
    letters = dict(
        zip(sorted({why for r in good for why in r["apart"]}), string.ascii_lowercase, strict=False)
    )
    rows = []
    for name, r in found.items():
        if "fails" in r:
            rows.append((name, r["fails"], *[""] * 8))
            continue
        why = ", ".join(f"{count} {letters[reason]}" for reason, count in r["apart"].items())
        rows.append(
            (
                name,
                r["planned"],
                f"{r['int8']} of {r['convolutions']}",
                why,
                r["int8_to_int8"],
                r["conversions"],
                r["pieces"],
                *(f"{r[k]:.1e}" for k in ("worst", "difference", "noise")),
            )
        )
    planned = sum(r["int8"] == r["planned"] for r in good)
    legend = "; ".join(f"{letter}: {reason}" for reason, letter in letters.items())
    return "\n\n".join(
        [
            f"{len(good)} of {len(found)} networks are exported, {planned} of them with all planned layers predicted INT8 "
            f"(trt8.5). The largest error of a piece is {max((r['worst'] for r in good), default=0):.1e} of its standard "
            "deviation (limit 2e-3).",
            table(
                (
                    "network",
                    "planned",
                    "INT8",
                    "float",
                    "INT8 in and out",
                    "conversions",
                    "pieces",
                    "worst piece",
                    "end to end",
                    "own noise",
                ),
                rows,
            ),
            f"Reasons for layers in float: {legend}.",
        ]
    )


# What calibration costs -------------------------------------------------------------------------------------------


def costs(name: str, options: argparse.Namespace) -> tuple[object, ...]:
    """Return a row with the number of calibrated tensors, and the ratio for each batch size."""
    torch.manual_seed(0)
    made, (channels, *_) = built(name)
    network = unwrap_network(made)
    size = COSTS.get(name, 224)
    settle(network, lambda: call(network, torch.rand(4, channels, size, size)))
    plain = copy.deepcopy(network).eval()
    plan = qat.prepare(made, torch.rand(1, channels, size, size), report=None)
    ratios = []
    for batch in options.batch:
        images = list(torch.rand(options.images, channels, size, size).split(batch))

        def forward(images: list[Tensor] = images) -> None:
            with torch.no_grad():
                for x in images:
                    plain(x)

        forward()
        ratios.append(
            statistics.median(
                seconds(lambda images=images: qat.calibrate(made, images)) / seconds(forward)  # type: ignore[misc]
                for _ in range(options.pairs)
            )
        )
    row = (f"{name}, {size} x {size}", len(plan.activations), *(f"{r:.2f}" for r in ratios))
    print(*row, file=sys.stderr, flush=True)
    return row


def seconds(run: Callable[[], object]) -> float:
    before = time.process_time()
    run()
    return time.process_time() - before


if __name__ == "__main__":
    main()
