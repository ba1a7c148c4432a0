"""Assignment, loss and training loop of float training and of QAT."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from detector import BINS
from shapes import CLASSES, MAX_OBJECTS
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 32


def as_input(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).float() / 255


def as_targets(objects: list[np.ndarray]) -> Tensor:
    """Return the objects as [images, MAX_OBJECTS, 5]; rows without an object have class -1."""
    targets = torch.full((len(objects), MAX_OBJECTS, 5), -1.0)
    for i, rows in enumerate(objects):
        targets[i, : len(rows)] = torch.from_numpy(rows)
    return targets


def iou(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return IoU and generalized IoU (intersection over union) of boxes [..., 4]."""
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


def compute_loss(raw: Tensor, targets: Tensor, points: Tensor, strides: Tensor) -> Tensor:
    """Return the sum of class, box and distribution loss with task-aligned assignment.

    Source: Feng et al., "TOOD: Task-aligned One-stage Object Detection", 2021.

    Args:
        raw: [N, 4 * BINS + classes, cells].
        targets: [N, MAX_OBJECTS, 5].
        points: [1, 2, cells], in strides.
        strides: [1, 1, cells].
    """
    classes = len(CLASSES)
    logits = raw[:, 4 * BINS :].transpose(1, 2)
    sides = raw[:, : 4 * BINS].transpose(1, 2).unflatten(2, (4, BINS))
    means = sides.softmax(3) @ torch.arange(BINS, dtype=raw.dtype)
    centers, step = points.transpose(1, 2), strides.transpose(1, 2)
    boxes = torch.cat((centers - means[..., :2], centers + means[..., 2:]), 2) * step
    kinds, expected = targets[..., 0].long(), targets[..., 1:]
    present = kinds >= 0

    with torch.no_grad():
        overlap = iou(boxes[:, None], expected[:, :, None])[0].clamp_min(0)
        scores = logits.sigmoid().gather(
            2, kinds.clamp_min(0)[:, None, :].expand(-1, logits.shape[1], -1)
        )
        align = scores.transpose(1, 2).sqrt() * overlap**6
        pixels = centers * step
        inside = (
            torch.minimum(
                (pixels[:, None] - expected[:, :, None, :2]).amin(-1),
                (expected[:, :, None, 2:] - pixels[:, None]).amin(-1),
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
    box = expected.gather(1, owner[..., None].expand(-1, -1, 4))[positive]
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


def run_teacher(teacher: nn.Module, x: Tensor) -> Tensor:
    """Return the raw outputs of a network in evaluation mode.

    The head is in training mode, because it returns raw values only in this mode.
    """
    teacher.eval()
    teacher.detect.training = True
    with torch.no_grad():
        return teacher(x)


def compute_distillation_loss(raw: Tensor, expected: Tensor, temperature: float = 2.0) -> Tensor:
    """Return the divergence of box distributions and class probabilities from the teacher's.

    The weight of the divergence of a box is the teacher's largest class probability.

    Args:
        raw: Outputs of the network, [N, 4 * BINS + classes, cells].
        expected: Outputs of the teacher in the same shape.
        temperature: Small probabilities count more if it is above 1 (Hinton et al., 2015).
    """
    sides, expected_sides = (
        r[:, : 4 * BINS].unflatten(1, (4, BINS)) / temperature for r in (raw, expected)
    )
    weight = expected[:, 4 * BINS :].sigmoid().amax(1)
    boxes = (
        F.kl_div(sides.log_softmax(2), expected_sides.softmax(2), reduction="none").sum(2).mean(1)
    )
    classes = F.binary_cross_entropy_with_logits(
        raw[:, 4 * BINS :], expected[:, 4 * BINS :].sigmoid(), reduction="none"
    )
    total = weight.sum().clamp_min(1.0)
    return (temperature**2 * (boxes * weight).sum() + classes.sum()) / total


def train(
    model: nn.Module,
    images: np.ndarray,
    objects: list[np.ndarray],
    *,
    steps: int,
    rate: float,
    seed: int,
    freeze_norms: bool = False,
    teacher: nn.Module | None = None,
    progress: Callable[[str], object] | None = None,
) -> None:
    """Train in place with AdamW, a cosine schedule and randomly flipped images.

    Args:
        model: A detector with the attribute ``detect``.
        images: Images, uint8 [n, 3, size, size].
        objects: Objects of each image; see :func:`shapes.generate`.
        steps: Number of batches of BATCH images.
        rate: Largest learning rate.
        seed: Seed of the order of the images and of the flips.
        freeze_norms: Whether the statistics of BatchNormalization are not updated.
        teacher: Float network whose outputs are additional targets; see
            :func:`compute_distillation_loss`.
        progress: Function that receives a line of text every 50 steps.
    """
    rng = np.random.default_rng(seed)
    targets = as_targets(objects)
    size = images.shape[-1]
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
            order = rng.permutation(len(images))
        index, order = order[:BATCH], order[BATCH:]
        x, t = as_input(images[index]), targets[index].clone()
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
        loss = compute_loss(raw, t, model.detect.points, model.detect.strides)
        if teacher is not None:
            loss = loss + compute_distillation_loss(raw, run_teacher(teacher, x))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if progress is not None and (step + 1) % 50 == 0:
            progress(f"step {step + 1} of {steps}, loss {loss.item():.2f}")
    model.eval()
