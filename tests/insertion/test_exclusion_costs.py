import pytest

import qdqtool
from qdqtool.insertion.exclusion_costs import predict_count_changes, remove_pair
from qdqtool.insertion.losses import ActivationLosses, TensorLoss
from qdqtool.ir.graph import Model
from tests.insertion.nets import chain, images, prediction


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((5, 1), (4, 3), (1, 2)),
        ((5, 4), (5, 3), (0, -1)),
        ((5, None), (3, 3), (2, None)),
        ((5, 1), (3, None), (2, None)),
    ],
)
def test_with_predictions_counts_difference(
    before: tuple[int, int | None],
    after: tuple[int, int | None],
    expected: tuple[int, int | None],
) -> None:
    """An activation without a pair, as that of an integer input, has no difference."""
    result = qdqtool.insert(chain(), images(1), predict=False, method="max")
    kept, removed = result.activations[:2]
    losses = ActivationLosses(0.1, [TensorLoss(t.tensor, (), 0.5) for t in (kept, removed)], 1, 2)
    old, new = (prediction(int8, int8, conversions) for int8, conversions in (before, after))
    model = remove_pair(Model(result.model), removed)
    priced = predict_count_changes(losses, model, result.activations, old, lambda _: new)
    assert [(t.convolutions, t.conversions) for t in priced.tensors] == [expected, (None, None)]
