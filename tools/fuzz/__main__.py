"""Compare predictions of random networks with TensorRT-RTX.

``python -m tools.fuzz --networks N [--seed S] [--types fp8] [--sm 89]``.
"""

import argparse
import functools
import sys
import time
from collections import Counter

from onnx.printer import to_text

from qdqtool.builders.compiler_process import is_installed
from tools.fuzz.driver import Lab, run_seeds
from tools.fuzz.grammar import network
from tools.fuzz.shrink import shrink_answer

GOAL = 0.999  # fraction of convolutions for which prediction and build must agree
TOLERATED = 2  # disagreements in a short run; a disagreement in 4,700 convolutions is known
MAX_SHRUNK = 5


def main(arguments: list[str] | None = None) -> int:
    """Compare networks.

    Returns:
        0 if enough convolutions agree, 1 if not, 2 without a compiler.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--networks", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the first network (default: from the clock)"
    )
    parser.add_argument(
        "--types",
        choices=("int8", "fp8", "mixed"),
        default="int8",
        help="types of the quantizers (default int8)",
    )
    parser.add_argument(
        "--sm", type=int, default=None, help="compute capability (default 86, with FP8 89)"
    )
    parser.add_argument("--no-shrink", action="store_true", help="only count disagreements")
    parser.add_argument("--seconds", type=float, default=None, help="stop after this time")
    options = parser.parse_args(arguments)
    if not is_installed("tensorrt_rtx"):
        print(
            "TensorRT-RTX is not installed: run pip install 'qdqtool[rtx]' (this accepts NVIDIA's "
            "license)"
        )
        return 2
    first = options.seed if options.seed is not None else int(time.time()) * 10_000
    compared = absent = 0
    statuses: Counter[str] = Counter()
    wrong: list[tuple[int, tuple[str, str, str]]] = []
    start = time.monotonic()
    done = 0
    make = functools.partial(network, types=options.types)
    capability = options.sm or (86 if options.types == "int8" else 89)
    print(f"seed {first}", flush=True)
    with Lab(capability) as lab:
        for count, (seed, answer) in enumerate(
            run_seeds(iter(range(first, first + options.networks)), make, lab), 1
        ):
            done = count
            compared += answer.convolutions
            absent += answer.absent
            statuses[answer.status] += 1
            wrong += [(seed, disagreement) for disagreement in answer.wrong]
            for name, predicted, built in answer.wrong:
                print(
                    f"seed {seed}: {name or 'status'}: predicted {predicted}, built {built[:200]}",
                    flush=True,
                )
            if sys.stderr.isatty():
                print(f"\r{count}/{options.networks}", end="", file=sys.stderr)
            if options.seconds is not None and time.monotonic() - start > options.seconds:
                break
        if not options.no_shrink:
            for seed in list(dict.fromkeys(s for s, _ in wrong))[:MAX_SHRUNK]:
                print(
                    f"seed {seed}, for onnx.parser:\n{to_text(shrink_answer(make(seed), lab.answer))}",
                    flush=True,
                )
    agreed = (compared - len(wrong)) / compared if compared else 1.0
    print(
        f"seeds {first} to {first + done - 1}: {done} networks ({dict(statuses)}), {compared} "
        f"convolutions, {len(wrong)} disagree ({agreed:.3%} agree), {absent} without a layer of their own, "
        f"{time.monotonic() - start:.0f} s"
    )
    return 0 if len(wrong) <= max(TOLERATED, (1 - GOAL) * compared) else 1


if __name__ == "__main__":
    sys.exit(main())
