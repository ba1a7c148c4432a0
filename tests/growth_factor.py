import time
from collections.abc import Callable

SHORTEST = 1 << 8  # characters
LONGEST = 1 << 14  # quadratic work for so many takes much longer than RESOLUTION
STEP = 4  # ratio of one length to the next
RESOLUTION = 0.002  # seconds; a shorter measurement is not compared
# Linear work takes 4 times as long for 4 times the length, quadratic work 16 times, cubic work 64
# times.
LINEAR, QUADRATIC = STEP**1.5, STEP**2.5


def processor_time(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def growth_factor(work: Callable[[int], object], limit: float, longest: int = LONGEST) -> float:
    """Return the factor by which `work` takes longer for `STEP` times the length.

    The length grows until the factor exceeds `limit` twice in a row, or the length reaches
    `longest`.
    """
    times: dict[int, float] = {}
    length, factor = SHORTEST, 0.0
    while length <= longest:
        times[length] = processor_time(lambda: work(length), repeats=1)  # noqa: B023
        shorter = length // STEP
        if shorter in times and times[length] > RESOLUTION:
            factor = times[length] / max(times[shorter], 1e-7)
            if factor > limit:  # measure again: other processes may have disturbed one of the two
                first = processor_time(lambda: work(shorter), repeats=5)  # noqa: B023
                factor = processor_time(lambda: work(length), repeats=3) / max(first, 1e-7)  # noqa: B023
            if factor > limit:
                return factor
        length *= STEP
    return factor
