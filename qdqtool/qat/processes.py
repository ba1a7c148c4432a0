"""One set of statistics from the data of all processes of ``torch.distributed``."""

from __future__ import annotations

from typing import Any

from torch import distributed, nn

from calibration import TensorStatistics
from calibration.statistics import merge_all
from qdqtool.errors import DataError


def several() -> bool:
    """Whether this is one of several processes that can talk to each other."""
    return bool(distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)


def is_distributed(model: object) -> bool:
    """Whether a network is wrapped for several processes, torch.compile around it or not."""
    model = getattr(model, "_orig_mod", model)
    return isinstance(model, nn.parallel.DistributedDataParallel)


def gathered(
    statistics: dict[str, TensorStatistics], counts: tuple[int, int], failed: str
) -> tuple[dict[str, TensorStatistics], tuple[int, int]]:
    """Everybody's statistics merged and counts added, the same in every process; each of them has to call this.

    Args:
        statistics: This process's, by name; names may be missing.
        counts: This process's, to be added.
        failed: What went wrong here; an empty string where nothing did.

    Raises:
        DataError: Something went wrong in one of the processes.
    """
    everybody: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everybody, (statistics, counts, failed))
    for rank, (_, _, said) in enumerate(everybody):
        if said:
            raise DataError(f"process {rank}: {said}")
    names = list(dict.fromkeys(name for found, _, _ in everybody for name in found))
    merged = {n: merge_all([found[n] for found, _, _ in everybody if n in found]) for n in names}
    return merged, (sum(c[0] for _, c, _ in everybody), sum(c[1] for _, c, _ in everybody))
