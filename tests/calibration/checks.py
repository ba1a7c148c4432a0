from collections.abc import Callable
from typing import Any

import pytest

from calibration import Statistics, TensorStatistics
from qdqtool.errors import DataError
from qdqtool.util import limits


def check_limit(
    name: str, limit: int, call: Callable[[], object], check: Callable[[BaseException], bool]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, name, limit)
        call()
        patch.setattr(limits, name, limit - 1)
        with pytest.raises(DataError, check=check):
            call()


def counts_of(part: TensorStatistics | None) -> Any:
    if part is None:
        return None
    return (
        part.count,
        part.nonfinite,
        part.minimum,
        part.maximum,
        part.counter.top,
        part.counter.counts.tolist(),
        counts_of(part.focus),
    )


def contents(statistics: Statistics) -> Any:
    tensors = [
        (
            name,
            counts_of(part),
            None if part.channels is None else part.channels.tolist(),
            sorted(map(bytes, part.spots)),
        )
        for name, part in statistics.items()
    ]
    return (
        tensors,
        statistics.images,
        statistics.fingerprint,
        statistics.warnings,
        statistics.skipped,
    )
