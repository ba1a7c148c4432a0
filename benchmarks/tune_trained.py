"""`qdqtool tune` on two trained classifiers and a trained segmentation network, by top-1 accuracy and by mean IoU.

    python benchmarks/tune_trained.py [--work FOLDER] [--only REGEX] [--gpu NAME] [--json FILE] [--docs FILE]

The networks are trained here, on drawings made here (torch and torchvision are needed; some minutes on one core):
characters on noise for a ResNet and an EfficientNet of torchvision's blocks, and disks, squares and triangles for a
fully convolutional network. `tune` gets the pictures as files and judges by labels that the metric looks up by name.
Choices are made on 128 pictures; everything in the table is measured on further ones that `tune` never saw, with the
networks' own labels. The interval is that of a paired bootstrap over these.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parent))

from marked import publish

import qdqtool
from qdqtool.runtime import open_session
from qdqtool.tuning.result import Point, Tuning

Array = npt.NDArray[Any]
CHARACTERS = "0123456789"
SIZE, SCENE, SHAPES, BATCH = 32, 48, 3, 32
CALIBRATION, CHOSEN, JUDGED, UNSEEN = 64, 128, 64, 400
RESAMPLES = 1000
BEGIN, END = "<!-- tune_trained: written by benchmarks/tune_trained.py -->", "<!-- end of tune_trained -->"


def character(rng: np.random.Generator) -> tuple[Array, int]:
    """A picture [SIZE, SIZE, 3] of 8-bit values, and the class of the character in it."""
    label = int(rng.integers(len(CHARACTERS)))
    colours = rng.permutation([rng.integers(0, 100, 3), rng.integers(140, 256, 3)])
    picture = Image.new("RGB", (SIZE, SIZE), tuple(int(c) for c in colours[0]))
    font = ImageFont.load_default(int(rng.integers(16, 28)))
    at = tuple(float(v) for v in SIZE / 2 + rng.normal(0, 2, 2))
    ImageDraw.Draw(picture).text(at, CHARACTERS[label], tuple(int(c) for c in colours[1]), font, "mm")
    turned = picture.rotate(float(rng.normal(0, 10)), fillcolor=tuple(int(c) for c in colours[0]))
    noisy = np.asarray(turned, np.float32) + rng.normal(0, rng.uniform(5, 50), (SIZE, SIZE, 3))
    return np.clip(noisy, 0, 255).astype(np.uint8), label


def scene(rng: np.random.Generator) -> tuple[Array, Array]:
    """A picture [SCENE, SCENE, 3] of 8-bit values, and what its pixels show: 0 for nothing."""
    colours = rng.integers(0, 256, (8, 3))
    picture = Image.new("RGB", (SCENE, SCENE), tuple(int(c) for c in colours[0]))
    labels = Image.new("L", (SCENE, SCENE), 0)
    for k in range(int(rng.integers(2, 6))):
        kind, radius = int(rng.integers(SHAPES)), float(rng.uniform(6, 14))
        x, y = (float(v) for v in rng.uniform(0, SCENE, 2))
        for canvas, fill in ((picture, tuple(int(c) for c in colours[k + 1])), (labels, kind + 1)):
            draw = ImageDraw.Draw(canvas)
            if kind == 0:
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill)
            else:
                draw.regular_polygon((x, y, radius), 4 if kind == 1 else 3, fill=fill)
    noisy = np.asarray(picture, np.float32) + rng.normal(0, rng.uniform(5, 30), (SCENE, SCENE, 3))
    return np.clip(noisy, 0, 255).astype(np.uint8), np.asarray(labels)


def top1(outputs: Mapping[str, Array], label: Any) -> float:
    return float(int(outputs["logits"].argmax()) == label)


def mean_iou(outputs: Mapping[str, Array], label: Any) -> float:
    """Mean over the classes that one picture shows or that are found in it."""
    found = outputs["logits"][0].argmax(axis=0)
    ious = [((found == c) & (label == c)).sum() / union
            for c in range(SHAPES + 1) if (union := ((found == c) | (label == c)).sum())]  # fmt: skip
    return float(np.mean(ious))


@dataclass(frozen=True)
class Network:
    """What is trained, on what, and how it is judged."""

    name: str
    make: Callable[[], Any]
    draw: Callable[[np.random.Generator], tuple[Array, Any]]
    judge: Callable[[Mapping[str, Array], Any], float]
    measure: str
    pictures: int
    epochs: int
    keep: float


def resnet() -> Any:
    """Three stages of torchvision's basic blocks, 16 to 64 channels."""
    from torch import nn
    from torchvision.models.resnet import BasicBlock

    def block(before: int, after: int, stride: int) -> Any:
        down = None
        if stride > 1:
            down = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        return BasicBlock(before, after, stride, down)

    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [block(16, 16, 1), block(16, 32, 2), block(32, 32, 1), block(32, 64, 2), block(64, 64, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(CHARACTERS)))


def efficientnet() -> Any:
    """torchvision's EfficientNet (MBConv, SiLU, squeeze and excitation), narrow and short."""
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    stages = [MBConvConfig(1, 3, 1, 16, 16, 1, 1.0, 1.0), MBConvConfig(4, 3, 2, 16, 24, 2, 1.0, 1.0),
              MBConvConfig(4, 5, 2, 24, 32, 2, 1.0, 1.0), MBConvConfig(4, 3, 1, 32, 48, 1, 1.0, 1.0)]  # fmt: skip
    return EfficientNet(stages, dropout=0.1, num_classes=len(CHARACTERS), last_channel=128)


def fcn() -> Any:
    """Down to a quarter and up again, with a skip connection by concatenation."""
    import torch
    from torch import nn

    def conv(before: int, after: int, stride: int = 1) -> Any:
        return nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.SiLU())

    class Fcn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine = nn.Sequential(conv(3, 16, 2), conv(16, 16))
            self.coarse = nn.Sequential(conv(16, 32, 2), conv(32, 32), conv(32, 32), conv(32, 32))
            self.up = nn.Upsample(scale_factor=2, mode="nearest")
            self.joined = nn.Sequential(conv(48, 24), nn.Conv2d(24, SHAPES + 1, 1))

        def forward(self, x: Any) -> Any:
            fine = self.fine(x)
            return self.up(self.joined(torch.cat([fine, self.up(self.coarse(fine))], 1)))

    return Fcn()


NETWORKS = (
    Network("ResNet", resnet, character, top1, "top-1", 3000, 4, 0.99),
    Network("EfficientNet", efficientnet, character, top1, "top-1", 3000, 5, 0.99),
    Network("segmentation", fcn, scene, mean_iou, "mean IoU", 1500, 9, 0.99),
)


def trained(network: Network, path: Path) -> None:
    """Trains on drawings of seed 0 and exports."""
    import torch

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    drawn = [network.draw(rng) for _ in range(network.pictures)]
    inputs = torch.from_numpy(np.stack([p for p, _ in drawn])).permute(0, 3, 1, 2).float() / 255
    labels = torch.from_numpy(np.stack([np.asarray(label, np.int64) for _, label in drawn]))
    model = network.make()
    steps = network.epochs * (len(drawn) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, steps)
    for step in range(steps):
        if step % (len(drawn) // BATCH) == 0:
            order = torch.randperm(len(drawn))
        rows = order[(step % (len(drawn) // BATCH)) * BATCH :][:BATCH]
        loss = torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"{network.name}: step {step} of {steps}, loss {float(loss.detach()):.3f}", flush=True)
    torch.onnx.export(model.eval(), (inputs[:1],), str(path), input_names=["images"], output_names=["logits"],
                      opset_version=17, dynamo=False)  # fmt: skip


def pictures(network: Network, folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Writes pictures; their labels by file name."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    labels = {}
    for i in range(count):
        picture, label = network.draw(rng)
        name = f"{seed}-{i:04d}.png"
        labels[name] = label
        Image.fromarray(picture).save(folder / name)
    return labels


def values(network: Network, model: bytes, folder: Path, labels: Mapping[str, Any]) -> Array:
    """The measure on each picture, [n]."""
    session = open_session(model, 1, optimize="basic", fold_qdq=False)
    found = []
    for name, label in labels.items():
        picture = np.asarray(Image.open(folder / name), np.float32).transpose(2, 0, 1)[None] / 255
        found.append(network.judge({"logits": session.run(["logits"], {"images": picture})[0]}, label))
    return np.asarray(found)


@dataclass
class Row:
    """A placement on the unseen pictures, and the point of the front that costs no more minus it."""

    network: str
    name: str
    int8: int
    cost: float
    mark: str
    chosen_on: float | None
    unseen: float
    difference: float | None = None
    low: float | None = None
    high: float | None = None


def measure(network: Network, work: Path, gpu: str | None) -> list[Row]:
    home = work / network.name
    home.mkdir(parents=True, exist_ok=True)
    model = home / "float.onnx"
    if not model.exists():
        trained(network, model)
    pictures(network, home / "calibration", CALIBRATION, 1)
    labels = pictures(network, home / "choose", CHOSEN + JUDGED, 2)
    unseen = pictures(network, home / "unseen", UNSEEN, 3)

    def metric(reference: Mapping[str, Array], outputs: Mapping[str, Array], image: str) -> float:
        return network.judge(outputs, labels[Path(image).name])

    tuning = qdqtool.tune(model, home / "calibration", evaluation=home / "choose", metric=metric, keep=network.keep,
                          gpu=gpu, chosen_on=CHOSEN, judged_on=JUDGED, whole_front=True, say=print)  # fmt: skip
    tuning.save_result(home / "tuning.json")
    print(f"{network.name}: {tuning.effort}", flush=True)
    return rows_of(network, tuning, lambda data: values(network, data, home / "unseen", unseen), model.read_bytes())


def rows_of(network: Network, tuning: Tuning, judge: Callable[[bytes], Array], float_model: bytes) -> list[Row]:
    rows = [Row(network.name, "float", 0, tuning.base.convolutions, "", None, float(judge(float_model).mean()))]
    judged: list[tuple[Point, Array]] = []
    ends = [p for p in tuning.others if p.name == "everything INT8" or "worst" in p.name or "float" in p.name]
    for point in [*tuning.front, *ends]:
        found = judge(tuning.model_of(point).SerializeToString())
        mark = "chosen" if point is tuning.chosen else "front" if any(p is point for p in tuning.front) else ""
        row = Row(network.name, point.name, point.cost.int8, point.cost.value, mark, point.chosen_on,
                  float(found.mean()))  # fmt: skip
        if mark:
            judged.append((point, found))
        else:
            mine = [v for p, v in judged if p.cost.value <= point.cost.value + 1e-9][-1]
            compare(row, mine - found)
        rows.append(row)
    return rows


def compare(row: Row, differences: Array) -> None:
    drawn = np.random.default_rng(0).integers(0, len(differences), (RESAMPLES, len(differences)))
    row.difference = float(differences.mean())
    row.low, row.high = (float(v) for v in np.percentile(differences[drawn].mean(axis=1), [2.5, 97.5]))


def table(rows: Sequence[Row]) -> str:
    measures = {n.name: n.measure for n in NETWORKS}
    lines = ["| network | placement | INT8 | cost | chosen on | unseen | front at no more cost |", "|---" * 7 + "|"]
    for r in rows:
        against = r.mark or "-"
        if r.difference is not None:
            against = f"{r.difference:+.3f} ({r.low:+.3f} to {r.high:+.3f})"
        chosen = "-" if r.chosen_on is None else f"{r.chosen_on:.3f}"
        lines.append(f"| {r.network} ({measures[r.network]}) | {r.name} | {r.int8} | {r.cost:.4g} | {chosen} "
                     f"| {r.unseen:.3f} | {against} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("tune-trained"))
    parser.add_argument("--only", metavar="REGEX", default="")
    parser.add_argument("--gpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path, help="write the table between its marks")
    options = parser.parse_args()
    rows: list[Row] = []
    for network in NETWORKS:
        if re.search(options.only, network.name):
            rows += measure(network, options.work, options.gpu)
    publish(rows, table(rows), options.json, options.docs, BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
