from __future__ import annotations

import pytest

from qdqtool.onnxgraph.heads import counts_up
from tests.insertion.nets import Net


@pytest.mark.parametrize(
    ("values", "expected"),
    [(range(16), True), (range(1, 17), False), (range(3), False), ([0, 1, 2, 4], False), (range(4), True)],
)
def test_counts_up(values: object, expected: bool) -> None:
    net = Net()
    net.const("k", list(values))  # type: ignore[call-overload]
    net.output(net.op("Relu", "r", "x"))
    assert counts_up(net.index(), "k") is expected
