"""The entropy method's measure, straight from its definition: what the search is held against."""

from __future__ import annotations

import numpy as np


def divergence(counts: np.ndarray, kept: int) -> float:
    """KL(P || Q) for one number of kept bins."""
    p = counts[:kept].copy()
    p[-1] += counts[kept:].sum()
    q = np.zeros(kept)
    for level in range(128):
        part = slice(level * kept // 128, (level + 1) * kept // 128)
        filled = counts[part] > 0
        q[part][filled] = counts[part].sum() / max(filled.sum(), 1)
    p, q = p / p.sum(), q / q.sum()
    used = p > 0
    return np.inf if (q[used] == 0).any() else float((p[used] * np.log(p[used] / q[used])).sum())
