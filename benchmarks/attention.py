"""Compare INT8 with float for a small vision transformer and a small query-based detector.

    python benchmarks/attention.py [--page docs/attention.md]
                                   [--table vit|detector|outliers|random|onesided]

Each network is trained on generated images in a quarter of a minute. At the start of the training,
some channels of the tokens are far from 0 (outlier channels), and some gains of normalizations are
large, as in published transformers. The calibration uses the last 64 of 4,096 training images. The
evaluation uses images of another seed. For the table ``outliers``, vision transformers are trained
with several numbers of outlier channels and several seeds. For ``random``, the network is not
trained, and the outlier channels are multiplied by random factors from 1 to 10 (one over a uniform
number). ``onesided`` is like ``random``, but all outliers have the same sign.
"""

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from common import corners, parser_of, publish, table
from torch import Tensor, nn
from torch.nn import functional

import qdqtool
from calibration import collect
from qdqtool.accuracy.detections import compute_iou
from qdqtool.ir.editor import Editor
from qdqtool.ir.graph import Model
from qdqtool.runtime.sessions import open_session

SIDE, PATCH, WIDTH, HEADS, DEPTH, KINDS = 32, 8, 48, 4, 3, 4
TRAINING, CALIBRATING, JUDGED = 4096, 64, 512
OUTLIERS, OFFSET, GAIN = (
    3,
    8.0,
    20.0,
)  # number of outlier channels, their offset, and the gain of their normalizations
QUERIES = {"vit": 0, "detector": 4}
TABLES = (*QUERIES, "outliers", "random", "onesided")
COUNTS, SEEDS = (
    (0, 1, 3, 7, 14),
    3,
)  # numbers of outlier channels, of 48; networks for each (three times as many if untrained)
VARIANTS = ("Linears INT8", "the same, --smooth", "residual sums INT8 too", "attention INT8 too")
Images = npt.NDArray[np.float32]
Made = tuple[onnx.ModelProto, set[str]]


def pictures(count: int, seed: int) -> tuple[Images, Images, npt.NDArray[np.int64]]:
    """Return generated images. Each shows a striped square on noise.

    Args:
        count: Number of images.
        seed: Seed of the generator.

    Returns:
        Images, of shape [n, 3, 32, 32]; center and size of the squares from 0 to 1, [n, 4];
        direction of the stripes, [n].
    """
    rng = np.random.default_rng(seed)
    made = rng.normal(0.45, 0.12, (count, 3, SIDE, SIDE)).astype(np.float32)
    kinds = rng.integers(0, KINDS, count)
    size = rng.integers(10, 21, (count, 2))
    start = (rng.random((count, 2)) * (SIDE - size)).astype(int)
    for image, kind, (h, w), (y, x) in zip(made, kinds, size, start, strict=True):
        angle = np.pi * kind / KINDS
        rows, columns = np.mgrid[:h, :w]
        waves = np.sin(
            1.3 * (columns * np.cos(angle) + rows * np.sin(angle)) + rng.uniform(0, 6.28)
        )
        image[:, y : y + h, x : x + w] += (0.25 * waves * rng.uniform(0.6, 1.2, (3, 1, 1))).astype(
            np.float32
        )
    boxes = np.concatenate([start + size / 2, size], 1) / SIDE
    return made, boxes.astype(np.float32), kinds


class Block(nn.Module):  # type: ignore[misc]
    """Pre-norm transformer block. If `memory` is given, its attention reads `memory`."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.kv, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.one(x)
        k, v = self.kv(y if memory is None else memory).chunk(2, -1)
        q, k, v = (t.reshape(*t.shape[:2], HEADS, -1).transpose(1, 2) for t in (self.q(y), k, v))
        shares = (q @ k.transpose(-1, -2) / (WIDTH / HEADS) ** 0.5).softmax(-1)
        x = x + self.out((shares @ v).transpose(1, 2).reshape(y.shape))
        return x + self.down(functional.gelu(self.up(self.two(x))))


class Network(nn.Module):  # type: ignore[misc]
    """Network that predicts the direction of the stripes from the mean of the tokens.

    If `queries` is not 0, a decoder also predicts the box.
    """

    def __init__(
        self, queries: int, outliers: int = OUTLIERS, heavy: bool = False, one_sign: bool = False
    ) -> None:
        super().__init__()
        tokens = (SIDE // PATCH) ** 2
        self.embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.places = nn.Parameter(torch.randn(1, tokens, WIDTH) * 0.1)
        self.encoder = nn.ModuleList(Block() for _ in range(DEPTH - (queries > 0)))
        self.decoder = nn.ModuleList(Block() for _ in range(2 if queries else 0))
        self.queries = nn.Parameter(torch.randn(1, max(queries, 1), WIDTH))
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.kind, self.box = (
            nn.Linear(WIDTH, KINDS),
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)),
        )
        outlying = (torch.arange(outliers) * 13 + 5) % WIDTH
        times = 1 / (torch.rand(outliers) * 0.9 + 0.1) if heavy else torch.ones(outliers)
        signs = torch.tensor([1.0, 1.0 if one_sign else -1.0, 1.5]).repeat(WIDTH)[:outliers]
        with torch.no_grad():
            self.places[..., outlying] += OFFSET * times * signs
            for norm in (m for m in self.modules() if isinstance(m, nn.LayerNorm)):
                norm.weight[outlying] = GAIN * times
            readers = [m for b in self.modules() if isinstance(b, Block) for m in (b.q, b.kv, b.up)]
            for linear in (*readers, *((self.kind,) if heavy else ())):
                linear.weight[:, outlying] /= GAIN * times

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.places
        for block in self.encoder:
            x = block(x)
        x = self.norm(x)
        if not self.decoder:
            return (self.kind(x.mean(1)),)
        y = self.queries.expand(x.shape[0], -1, -1)
        for block in self.decoder:
            y = block(y, x)
        y = self.last(y)
        return self.kind(y).mean(1), self.box(y).sigmoid().mean(1)


def trained(queries: int, steps: int, seed: int = 0, outliers: int = OUTLIERS) -> nn.Module:
    torch.manual_seed(seed)
    images, boxes, kinds = (torch.from_numpy(a) for a in pictures(TRAINING, 1))
    network = Network(queries, outliers)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(steps):
        chosen = torch.randint(TRAINING - CALIBRATING, (64,))
        kind, *box = network(images[chosen])
        loss = functional.cross_entropy(kind, kinds[chosen])
        loss = loss + sum(5 * functional.l1_loss(b, boxes[chosen]) for b in box)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return network.eval()


def exported(network: nn.Module) -> onnx.ModelProto:
    file = io.BytesIO()
    torch.onnx.export(
        copy.deepcopy(network),
        (torch.zeros(1, 3, SIDE, SIDE),),
        file,
        dynamo=False,
        opset_version=17,
        input_names=["x"],
    )
    return onnx.load_model_from_string(file.getvalue())


def with_stream(
    model: onnx.ModelProto, floats: onnx.ModelProto, data: Sequence[dict[str, Images]]
) -> onnx.ModelProto:
    """Add Q/DQ at both inputs of each sum of the residual stream.

    The scale of an input is computed from its largest magnitude on the data.
    """
    loaded = Model(floats)
    sums = [
        n
        for n in loaded.ordered
        if n.op == "Add" and not any(loaded.is_constant(t) for t in n.inputs)
    ]
    seen = collect(loaded, data, list(dict.fromkeys(t for n in sums for t in n.inputs)))
    editor, names = Editor(Model(copy.deepcopy(model))), {n.name for n in sums}
    for node in editor.model.nodes:
        for i, tensor in enumerate(node.inputs) if node.name in names else ():
            base = f"{node.name}/stream{i}"
            more = [
                editor.add_constant(
                    f"{base}/scale", np.asarray(seen[tensor].absmax / 127, np.float32)
                ),
                editor.add_constant(f"{base}/zero", np.asarray(0, np.int8)),
            ]
            q = editor.insert_node(node, "QuantizeLinear", f"{base}/Q", [tensor, *more])
            editor.set_input(
                node, i, editor.insert_node(node, "DequantizeLinear", f"{base}/DQ", [q, *more])
            )
    return editor.finish().proto


def outputs(model: onnx.ModelProto, images: Images) -> list[list[Images]]:
    session = open_session(model.SerializeToString(), 1, optimize="none", fold_qdq=False)
    return [session.run(None, {"x": image[None]}) for image in images]


def judged(model: onnx.ModelProto) -> tuple[float, float]:
    """Return the fraction of correct directions and the mean overlap (IoU) of the boxes.

    The seed of the images differs from that of the training. The overlap is NaN if the model has no
    boxes.
    """
    images, boxes, kinds = pictures(JUDGED, 2)
    found = outputs(model, images)
    right = float(np.mean([f[0][0].argmax() == k for f, k in zip(found, kinds, strict=True)]))
    if len(found[0]) == 1:
        return right, float("nan")
    given = np.concatenate([f[1] for f in found])
    return right, float(np.diag(compute_iou(corners(given), corners(boxes))).mean())


def calibrating() -> list[dict[str, Images]]:
    return [{"x": image[None]} for image in pictures(TRAINING, 1)[0][-CALIBRATING:]]


def inserter(floats: onnx.ModelProto, data: Sequence[dict[str, Images]]) -> Callable[..., Made]:
    """Return a function that calls ``insert`` with options.

    This function returns the Q/DQ model, and the codes of the warnings about outliers.
    """

    def inserted(**options: Any) -> Made:
        result = qdqtool.insert(floats, data, losses=0, predict=False, **options)
        return result.model, {w.split(":")[0] for w in result.warnings if w.startswith("ACT-")}

    return inserted


def by_outliers(
    steps: int, one_sign: bool = False
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return head and rows of a table: the effect of INT8 by number of outlier channels.

    Each cell has the mean over the seeds, with minimum and maximum. For trained networks, the value
    is the fraction of correct directions. For others, it is the root mean square error of the
    outputs divided by their standard deviation.

    Args:
        steps: Number of training steps; 0 for no training.
        one_sign: Whether all outliers have one sign.
    """
    found, head = [], ("outlier channels", *(("float",) if steps else ()), *VARIANTS, "ACT-OUTLIER")
    for count in COUNTS:
        columns: list[list[float]] = []
        warned = 0
        for seed in range(SEEDS if steps else 3 * SEEDS):
            torch.manual_seed(seed)
            network = (
                trained(0, steps, seed, count)
                if steps
                else Network(0, count, True, one_sign).eval()
            )
            floats, data = exported(network), calibrating()
            inserted = inserter(floats, data)
            plain, said = inserted()
            models = (
                plain,
                inserted(smooth=0.5)[0],
                with_stream(plain, floats, data),
                inserted(attention="int8")[0],
            )
            warned += bool(said)
            if steps:
                columns.append([judged(m)[0] for m in (floats, *models)])
            else:
                images = pictures(CALIBRATING, 2)[0]
                first, *others = (
                    np.concatenate([o[0] for o in outputs(m, images)]) for m in (floats, *models)
                )
                columns.append(
                    [float(np.sqrt(np.mean((o - first) ** 2)) / first.std()) for o in others]
                )
        cells = [
            f"{np.mean(c):.1%} ({np.min(c):.1%} to {np.max(c):.1%})"
            for c in zip(*columns, strict=True)
        ]
        found.append((f"{count} of {WIDTH}", *cells, f"{warned} of {len(columns)}"))
    return head, found


def rows(queries: int, steps: int) -> list[tuple[str, ...]]:
    floats, data = exported(trained(queries, steps)), calibrating()
    inserted = inserter(floats, data)
    plain, said = inserted()
    made = {
        "float": (floats, set[str]()),
        "Linears INT8": (plain, said),
        "Linears INT8, --smooth": inserted(smooth=0.5),
        "Linears INT8, --method max": inserted(method="max"),
        "Linears INT8, --method max --smooth": inserted(method="max", smooth=0.5),
        "the same, attention INT8 too": inserted(method="max", smooth=0.5, attention="int8"),
        "Linears INT8, residual sums INT8 too": (with_stream(plain, floats, data), said),
    }
    found: list[tuple[str, ...]] = []
    for what, (model, warned) in made.items():
        right, overlap = judged(model)
        warned |= {"RESIDUAL-STREAM"} & set(qdqtool.predict(model).findings_by_code())
        found.append(
            (
                what,
                f"{right:.1%}",
                "" if np.isnan(overlap) else f"{overlap:.3f}",
                ", ".join(sorted(warned)),
            )
        )
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--table", choices=TABLES, action="append", help="write only this table")
    parser.add_argument("--steps", type=int, default=350, help="steps of training for each network")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.table or TABLES:
        head: tuple[str, ...] = ("quantized", "correct directions", "box overlap", "findings")
        if name in QUERIES:
            found = rows(QUERIES[name], given.steps)
        else:
            head, found = by_outliers(given.steps if name == "outliers" else 0, name == "onesided")
        publish(name, table(head, found), given.page)


if __name__ == "__main__":
    main()
