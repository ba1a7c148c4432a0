"""Print the table of docs/evidence.md: predictions compared with recorded builds.

    python -m benchmarks.trust

The builds are in tests/data/evidence. A convolution is right if prediction and build agree on the
types of inputs, residual and output, and on the fused Add and MaxPool. Lines are compared as a
multiset of pass, event, subject and object. If a log contains only the number of the lines of
ConstQDQInitializersFusion, these lines are left out.
"""

from collections import Counter

from benchmarks.common import table
from qdqtool.trt.targets import BUILDS
from tests.trt.evidence import CASES, WITH_TRACE, built_trace, prediction, truth
from tests.trt.test_evidence import COUNTED_ONLY, outcome


def row(case: str) -> tuple[str, ...]:
    build, predicted = BUILDS[case], {c.name: c for c in prediction(case).convolutions}
    built = truth(case)["convolutions"]
    right = 0
    for c in built:
        conv = predicted[c["name"]]
        right += outcome(conv.inputs, conv.output, conv.fused) == outcome(
            c["inputs"], c["output"], c["fused"]
        )
    logged = [n.removesuffix("_quantize_scale_node") for n in truth(case)["conversions"]]
    conversions = (Counter(logged) & Counter(prediction(case).conversion_nodes)).total()
    lines = "not logged"
    if case in WITH_TRACE:
        left_out = COUNTED_ONLY.get(case, ())
        log = Counter(e for e in built_trace(case) if e.pass_name not in left_out)
        lines = f"{(log & Counter(prediction(case).trace)).total()} of {log.total()}"
    gpu = f", {build.gpu}" if build.gpu else ""
    return (
        f"`{case}`, {build.tensorrt}{gpu}",
        f"{right} of {len(built)}",
        f"{conversions} of {len(logged)}",
        lines,
        "yes" if build.is_rule_source else "no",
    )


def main() -> None:
    cases = sorted(CASES, key=lambda c: (c not in WITH_TRACE, c))
    print(
        table(
            ("build", "convolutions right", "conversions", "pass lines", "used to make rules"),
            map(row, cases),
        )
    )


if __name__ == "__main__":
    main()
