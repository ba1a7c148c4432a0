"""The front of `qdqtool tune` against what one would try without it, on images that tune never saw.

    python benchmarks/tune.py SPLITS.toml [--gpu NAME] [--work FOLDER] [--only REGEX] [--chosen-on N] [--judge N]
                              [--json FILE] [--page docs/tune.md]
    python benchmarks/tune.py --trained [--work FOLDER] [--only REGEX] [--gpu NAME] [--json FILE] [--page docs/tune.md]

SPLITS.toml lists the splits; paths are relative to it. Models and images are the user's: nothing is downloaded.

    [[split]]
    name = "people"
    model = "yolov8s.onnx"              # float, output [1, 4 + classes, anchors]
    calibration = "photographs"         # ranges are made from these: a folder of images, or an npy of inputs
    choose = "photographs-2"            # tune gets these as --eval: it chooses on one half and judges on the other
    judge = "video"                     # nothing is chosen by these: what the table shows is measured here
    others = { "ModelOpt entropy" = "modelopt.onnx" }   # finished Q/DQ models to compare with the front, if any

Every placement is compared with the most accurate point of the front (by the images that were chosen on) that costs no
more; the interval is that of a paired bootstrap over the images to judge. What was measured is kept in the work folder.

`--trained` trains networks on drawings made here (torch and torchvision are needed; some minutes on one core):
characters on noise for a ResNet and an EfficientNet of torchvision's blocks, and disks, squares and triangles for a
fully convolutional network. `tune` gets the pictures as files and judges by labels that the metric looks up by name
(top-1 accuracy, mean IoU). Choices are made on 128 pictures; everything in the table is measured on further ones that
`tune` never saw, with the networks' own labels.
"""

import argparse
import hashlib
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import Images, detect, evenly, input_name, load_samples, paired, pooled, publish, read_splits, table

import qdqtool
from qdqtool.model.sessions import open_session
from qdqtool.tuning.configuration import Cost, cost_of
from qdqtool.tuning.metrics import match
from qdqtool.tuning.result import Tuning

Array = npt.NDArray[Any]
CHARACTERS = "0123456789"
SIZE, SCENE, SHAPES, BATCH = 32, 48, 3, 32
CALIBRATION, CHOSEN, JUDGED, UNSEEN = 64, 128, 64, 400
OBVIOUS = re.compile("everything INT8|worst|head|last|float")  # what one would try without a search, by name


@dataclass
class Row:
    """One placement on the images to judge, and the point of the front that costs no more minus it."""

    split: str
    name: str
    int8: int
    conversions: int
    cost: float
    mark: str
    chosen_on: float | None
    metric: float
    against: str = ""
    difference: float | None = None
    low: float | None = None
    high: float | None = None


def rows_of(
    split: str, tuning: Tuning, others: Mapping[str, bytes], judge: Callable[[bytes], Sequence[Any]],
    value: Callable[[Sequence[Any]], float],
) -> list[Row]:
    """The front and what it is compared with, each judged once.

    Args:
        split: A name.
        tuning: What ``tune`` found.
        others: Finished models by name.
        judge: From a model to what it does on each image.
        value: Of that over images.
    """
    front = [p for p in tuning.front if p.chosen_on is not None]
    found: list[tuple[Row, Sequence[Any]]] = []

    def add(name: str, cost: Cost, mark: str, chosen_on: float | None, model: bytes) -> None:
        seen = judge(model)
        row = Row(split, name, cost.int8, cost.conversions, cost.value, mark, chosen_on, value(seen))
        fits = [(r, s) for r, s in found if r.mark and r.cost <= row.cost + 1e-9]
        if not mark and fits:
            row.against = fits[-1][0].name
            row.difference, row.low, row.high = paired([(fits[-1][1], seen)], value)
        found.append((row, seen))
        print(f"  {row}", flush=True)

    for point in [*front, *(p for p in tuning.others if OBVIOUS.search(p.name))]:
        mark = "chosen" if point is tuning.chosen else "front" if any(p is point for p in front) else ""
        model = tuning.model_of(point).SerializeToString(deterministic=True)
        add(point.name, point.cost, mark, point.chosen_on, model)
    for name, model in others.items():
        add(name, cost_of(qdqtool.predict(model), None), "", None, model)
    return [row for row, _ in found]


def measured_split(entry: dict[str, Any], options: argparse.Namespace) -> list[Row]:
    """One split: tune, then everything on the images to judge."""
    model: Path = entry["model"]
    name = input_name(model)
    calibration, choose, unseen = (load_samples(model, entry[k]) for k in ("calibration", "choose", "judge"))

    def feeds(array: Images, wanted: int) -> list[dict[str, Images]]:
        return [{name: x} for x in evenly(array, wanted)]

    def digest_of(image: Images) -> bytes:
        return hashlib.sha256(np.ascontiguousarray(image).tobytes()).digest()

    began = time.process_time()
    tuning = qdqtool.tune(
        model, feeds(calibration, 512), evaluation=feeds(choose, 2 * max(options.chosen_on, options.judged_on)),
        keep=entry.get("keep", 0.97), gpu=options.gpu, chosen_on=options.chosen_on, judged_on=options.judged_on,
        swept_on=options.swept_on, workers=options.workers, whole_front=True, say=print, progress=True,
        state=options.work / f"{re.sub(r'[^a-z0-9]+', '-', entry['name'])}.tuning",
    )  # fmt: skip
    print(f"{entry['name']}: {tuning.effort}, {time.process_time() - began:.0f} s of processor time", flush=True)
    seen = {digest_of(x) for array in (calibration, choose) for x in array}
    samples = [x for x in evenly(unseen, options.judge) if digest_of(x[0]) not in seen]
    if not samples:
        sys.exit(f"{entry['name']}: tune was given every image to judge on")
    references = [d.above(0.25) for d in detect(model.read_bytes(), samples, options.work, 2)]
    print(f"judged on {len(samples)} images that tune was not given, {sum(len(r.scores) for r in references)} boxes")

    def judge(data: bytes) -> Sequence[Any]:
        return [match(r, f) for r, f in zip(references, detect(data, samples, options.work, 2), strict=True)]

    others = {o: (options.splits.parent / path).read_bytes() for o, path in entry.get("others", {}).items()}
    return rows_of(entry["name"], tuning, others, judge, pooled)


# Networks that are trained here -----------------------------------------------------------------------------------


def character(rng: np.random.Generator) -> tuple[Array, int]:
    """A picture [SIZE, SIZE, 3] of 8-bit values, and the class of the character in it."""
    label = int(rng.integers(len(CHARACTERS)))
    colours = rng.permutation([rng.integers(0, 100, 3), rng.integers(140, 256, 3)])
    paper, ink = (tuple(int(c) for c in colour) for colour in colours)
    picture = Image.new("RGB", (SIZE, SIZE), paper)
    font = ImageFont.load_default(int(rng.integers(16, 28)))
    at = tuple(float(v) for v in SIZE / 2 + rng.normal(0, 2, 2))
    ImageDraw.Draw(picture).text(at, CHARACTERS[label], ink, font, "mm")
    turned = picture.rotate(float(rng.normal(0, 10)), fillcolor=paper)
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
    pictures: int
    epochs: int


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
    Network("ResNet (top-1)", resnet, character, top1, 3000, 4),
    Network("EfficientNet (top-1)", efficientnet, character, top1, 3000, 5),
    Network("segmentation (mean IoU)", fcn, scene, mean_iou, 1500, 9),
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
    batches = len(drawn) // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, network.epochs * batches)
    for epoch in range(network.epochs):
        for rows in torch.randperm(len(drawn))[: batches * BATCH].split(BATCH):
            loss = torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"{network.name}: epoch {epoch + 1} of {network.epochs}, loss {float(loss.detach()):.3f}", flush=True)
    torch.onnx.export(model.eval(), (inputs[:1],), str(path), input_names=["images"], output_names=["logits"],
                      opset_version=17, dynamo=False)  # fmt: skip


def pictures(network: Network, folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Writes pictures; their labels by file name."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    labels = {}
    for i in range(count):
        name = f"{seed}-{i:04d}.png"
        picture, labels[name] = network.draw(rng)
        Image.fromarray(picture).save(folder / name)
    return labels


def measured_network(network: Network, options: argparse.Namespace) -> list[Row]:
    """One network: train, tune, then everything on the unseen pictures."""
    home = options.work / network.name.partition(" ")[0]
    home.mkdir(parents=True, exist_ok=True)
    model = home / "float.onnx"
    if not model.exists():
        trained(network, model)
    pictures(network, home / "calibration", CALIBRATION, 1)
    labels = pictures(network, home / "choose", CHOSEN + JUDGED, 2)
    unseen = pictures(network, home / "unseen", UNSEEN, 3)

    def metric(reference: Mapping[str, Array], outputs: Mapping[str, Array], image: str) -> float:
        return network.judge(outputs, labels[Path(image).name])

    def judge(data: bytes) -> list[float]:
        session = open_session(data, 1, optimize="basic", fold_qdq=False)
        found = []
        for name, label in unseen.items():
            picture = np.asarray(Image.open(home / "unseen" / name), np.float32).transpose(2, 0, 1)[None] / 255
            found.append(network.judge({"logits": session.run(["logits"], {"images": picture})[0]}, label))
        return found

    tuning = qdqtool.tune(model, home / "calibration", evaluation=home / "choose", metric=metric, keep=0.99,
                          gpu=options.gpu, chosen_on=CHOSEN, judged_on=JUDGED, whole_front=True, say=print)
    tuning.save_result(home / "tuning.json")
    print(f"{network.name}: {tuning.effort}", flush=True)
    plain = float(np.mean(judge(model.read_bytes())))
    return [Row(network.name, "float", 0, 0, tuning.base.convolutions, "", None, plain),
            *rows_of(network.name, tuning, {}, judge, lambda found: float(np.mean(found)))]


def page(rows: Sequence[Row]) -> str:
    lines = []
    for r in sorted(rows, key=lambda r: (r.split, r.cost, r.name)):
        chosen = "-" if r.chosen_on is None else f"{r.chosen_on:.3f}"
        against = r.mark or "-"
        if r.difference is not None:
            against = f"{r.difference:+.3f} ({r.low:+.3f} to {r.high:+.3f})"
        lines.append((r.split, r.name, r.int8, r.conversions, f"{r.cost:.4g}", chosen, f"{r.metric:.3f}", against))
    return table(("of", "placement", "INT8", "conversions", "cost", "chosen on", "judged on", "front at no more cost"),
                 lines)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("splits", type=Path, nargs="?", help="the TOML file, see the head of this script")
    parser.add_argument("--trained", action="store_true", help="train networks on drawings instead")
    parser.add_argument("--gpu")
    parser.add_argument("--only", metavar="REGEX", default="")
    parser.add_argument("--chosen-on", type=int, default=16)
    parser.add_argument("--swept-on", type=int, help="of these, for the sensitivity of single sites")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--judged-on", type=int, default=4, help="of tune itself; the table has images of its own")
    parser.add_argument("--judge", type=int, default=24, help="images that the table is measured on")
    parser.add_argument("--work", type=Path, default=Path("tune-work"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="write the table between its marks")
    options = parser.parse_args()
    if options.trained == bool(options.splits):
        parser.error("give SPLITS.toml or --trained")
    options.work.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    if options.trained:
        for network in NETWORKS:
            rows += measured_network(network, options) if re.search(options.only, network.name) else []
    else:
        for entry in read_splits(options.splits, ("model", "calibration", "choose", "judge")):
            rows += measured_split(entry, options) if re.search(options.only, entry["name"]) else []
    publish("tune_trained" if options.trained else "tune", page(rows), options.page, options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
