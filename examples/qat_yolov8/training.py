"""Assignment, loss and the training loop, the same for float and for quantization-aware training."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from detector import BINS
from shapes import CLASSES, MOST
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 32


def as_input(pictures: np.ndarray) -> Tensor:
    """uint8 pictures as the network's input."""
    return torch.from_numpy(pictures).float() / 255


def as_targets(objects: list[np.ndarray]) -> Tensor:
    """Objects as [N, MOST, 5], filled up with class -1."""
    targets = torch.full((len(objects), MOST, 5), -1.0)
    for i, found in enumerate(objects):
        targets[i, : len(found)] = torch.from_numpy(found)
    return targets


def iou(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union of boxes [..., 4], and the generalized one that penalizes empty space."""
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    inner = (high - low).clamp_min(0).prod(-1)
    union = (
        (a[..., 2:] - a[..., :2]).clamp_min(0).prod(-1)
        + (b[..., 2:] - b[..., :2]).clamp_min(0).prod(-1)
        - inner
    )
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).prod(-1)
    overlap = inner / union.clamp_min(1e-6)
    return overlap, overlap - (hull - union) / hull.clamp_min(1e-6)


def loss_of(raw: Tensor, targets: Tensor, points: Tensor, strides: Tensor) -> Tensor:
    """Class, box and distribution loss with task-aligned assignment (Feng et al., "TOOD", 2021).

    Args:
        raw: [N, 4 * BINS + classes, cells].
        targets: [N, MOST, 5].
        points: [1, 2, cells], in strides.
        strides: [1, 1, cells].
    """
    classes = len(CLASSES)
    logits = raw[:, 4 * BINS :].transpose(1, 2)
    sides = raw[:, : 4 * BINS].transpose(1, 2).unflatten(2, (4, BINS))
    means = sides.softmax(3) @ torch.arange(BINS, dtype=raw.dtype)
    centers, step = points.transpose(1, 2), strides.transpose(1, 2)
    boxes = torch.cat((centers - means[..., :2], centers + means[..., 2:]), 2) * step
    kinds, wanted = targets[..., 0].long(), targets[..., 1:]
    present = kinds >= 0

    with torch.no_grad():
        overlap = iou(boxes[:, None], wanted[:, :, None])[0].clamp_min(0)
        scores = logits.sigmoid().gather(
            2, kinds.clamp_min(0)[:, None, :].expand(-1, logits.shape[1], -1)
        )
        align = scores.transpose(1, 2).sqrt() * overlap**6
        pixels = centers * step
        inside = (
            torch.minimum(
                (pixels[:, None] - wanted[:, :, None, :2]).amin(-1),
                (wanted[:, :, None, 2:] - pixels[:, None]).amin(-1),
            )
            > 0
        )
        usable = inside & present[:, :, None]
        align = torch.where(usable, align + 1e-9, torch.zeros_like(align))
        best = align.topk(8, 2)
        chosen = (
            torch.zeros_like(align).scatter(2, best.indices, (best.values > 0).to(align.dtype)) > 0
        )
        overlap = torch.where(chosen, overlap, torch.full_like(overlap, -1.0))
        owner = overlap.argmax(1)
        positive = chosen.any(1)
        align = torch.where(chosen, align, torch.zeros_like(align))
        quality = (
            align
            / align.amax(2, keepdim=True).clamp_min(1e-9)
            * overlap.clamp_min(0).amax(2, keepdim=True)
        )
        weight = quality.gather(1, owner[:, None])[:, 0] * positive
        kind = kinds.gather(1, owner)
        goal = F.one_hot(kind.clamp_min(0), classes) * weight[..., None]
    total = weight.sum().clamp_min(1.0)
    class_loss = F.binary_cross_entropy_with_logits(logits, goal, reduction="sum") / total
    box = wanted.gather(1, owner[..., None].expand(-1, -1, 4))[positive]
    share = weight[positive]
    box_loss = ((1 - iou(boxes[positive], box)[1]) * share).sum() / total
    where, size = (
        centers.expand(len(raw), -1, -1)[positive],
        step.expand(len(raw), -1, -1)[positive],
    )
    distance = torch.cat((where - box[:, :2] / size, box[:, 2:] / size - where), 1).clamp(
        0, BINS - 1.01
    )
    low = distance.long()
    part = distance - low
    log = sides[positive].log_softmax(2)
    bins = (
        -log.gather(2, low[..., None])[..., 0] * (1 - part)
        - log.gather(2, low[..., None] + 1)[..., 0] * part
    )
    return 0.5 * class_loss + 7.5 * box_loss + 1.5 * (bins.mean(1) * share).sum() / total


def raw_of(teacher: nn.Module, x: Tensor) -> Tensor:
    """The raw values of a network in evaluation mode; its head gives them in training mode only."""
    teacher.eval()
    teacher.detect.training = True
    with torch.no_grad():
        return teacher(x)


def distillation(raw: Tensor, wanted: Tensor, temperature: float = 2.0) -> Tensor:
    """Divergence of the box distributions and class probabilities from the teacher's, where the teacher sees objects.

    Args:
        raw: [N, 4 * BINS + classes, cells].
        wanted: The same of the teacher.
        temperature: Above 1 the small probabilities count more (Hinton et al., 2015).
    """
    sides, wanted_sides = (
        r[:, : 4 * BINS].unflatten(1, (4, BINS)) / temperature for r in (raw, wanted)
    )
    weight = wanted[:, 4 * BINS :].sigmoid().amax(1)
    boxes = F.kl_div(sides.log_softmax(2), wanted_sides.softmax(2), reduction="none").sum(2).mean(1)
    classes = F.binary_cross_entropy_with_logits(
        raw[:, 4 * BINS :], wanted[:, 4 * BINS :].sigmoid(), reduction="none"
    )
    total = weight.sum().clamp_min(1.0)
    return (temperature**2 * (boxes * weight).sum() + classes.sum()) / total


def train(
    model: nn.Module,
    pictures: np.ndarray,
    objects: list[np.ndarray],
    *,
    steps: int,
    rate: float,
    seed: int,
    freeze_norms: bool = False,
    teacher: nn.Module | None = None,
    progress: Callable[[str], object] | None = None,
) -> None:
    """Trains in place with AdamW and a cosine schedule, pictures flipped at random.

    Args:
        model: A detector with the attribute ``detect``.
        pictures: uint8 [n, 3, size, size].
        objects: Their objects.
        steps: Batches of BATCH pictures.
        rate: The highest learning rate.
        seed: For order and flips.
        freeze_norms: Whether statistics of BatchNormalization stay as they are, as in fine-tuning.
        teacher: A float network whose results the model is drawn to as well, see :func:`distillation`.
        progress: Gets a line now and then.
    """
    rng = np.random.default_rng(seed)
    targets = as_targets(objects)
    size = pictures.shape[-1]
    decay = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, rate)
    warm = max(1, steps // 20)
    model.train()
    if freeze_norms:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
    order = np.empty(0, np.int64)
    for step in range(steps):
        if len(order) < BATCH:
            order = rng.permutation(len(pictures))
        index, order = order[:BATCH], order[BATCH:]
        x, t = as_input(pictures[index]), targets[index].clone()
        if rng.random() < 0.5:
            x = x.flip(3)
            t[..., [1, 3]] = torch.where(t[..., :1] >= 0, size - t[..., [3, 1]], t[..., [1, 3]])
        if rng.random() < 0.5:
            x = x.flip(2)
            t[..., [2, 4]] = torch.where(t[..., :1] >= 0, size - t[..., [4, 2]], t[..., [2, 4]])
        factor = min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01)
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        raw = model(x)
        loss = loss_of(raw, t, model.detect.points, model.detect.strides)
        if teacher is not None:
            loss = loss + distillation(raw, raw_of(teacher, x))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if progress is not None and (step + 1) % 50 == 0:
            progress(f"step {step + 1} of {steps}, loss {loss.item():.2f}")
    model.eval()
