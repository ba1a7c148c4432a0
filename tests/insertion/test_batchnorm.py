from __future__ import annotations

import numpy as np
import pytest

from qdqtool.graph import Model
from qdqtool.insertion.batchnorm import fold_leading
from tests.insertion.nets import Net, run


def net(kernel: int, *, group: int = 1, shift: bool = True, readers: int = 1) -> Net:
    made = Net()
    normed = made.norm("norm", "x")
    if not shift:
        for name in ("norm.beta", "norm.mean"):
            index = [t.name for t in made.initializers].index(name)
            made.initializers.pop(index)
            made.const(name, np.zeros(16))
    for number in range(readers):
        made.output(made.conv(f"c{number}", normed, group=group, kernel=kernel, bias=number == 0))
    return made


@pytest.mark.parametrize(("kernel", "group", "shift", "readers"), [
    (1, 1, True, 1), (1, 4, True, 1), (1, 16, True, 2), (3, 1, False, 1), (3, 2, False, 2),
])  # fmt: skip
def test_folding_changes_no_output(kernel: int, group: int, shift: bool, readers: int) -> None:
    proto = net(kernel, group=group, shift=shift, readers=readers).model()
    x = np.random.default_rng(1).standard_normal((1, 16, 8, 8)).astype(np.float32)
    before = run(proto, {"x": x})
    assert fold_leading(Model(proto)) == 1
    assert [n.op_type for n in proto.graph.node] == ["Conv"] * readers
    assert not any(t.name.startswith("norm.") for t in proto.graph.initializer)
    for old, new in zip(before, run(proto, {"x": x}), strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=2e-5)


def test_padding_behind_a_shift_is_not_folded() -> None:
    proto = net(3).model()
    assert fold_leading(Model(proto)) == 0 and len(proto.graph.node) == 2


def test_another_reader_keeps_the_normalization() -> None:
    made = net(1)
    made.output(made.op("Relu", "relu", "norm.out"))
    proto = made.model()
    assert fold_leading(Model(proto)) == 0


def test_an_output_keeps_the_normalization() -> None:
    made = net(1)
    made.output("norm.out")
    assert fold_leading(Model(made.model())) == 0
