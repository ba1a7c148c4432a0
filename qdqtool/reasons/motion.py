"""Reasons why a Q cannot move up past an operator, or a DQ down."""

from qdqtool.reasons.finding import Reason
from qdqtool.reasons.tensors import TensorConsumer


class NotCommuting(Reason, key="not-commuting"):
    """A Q cannot move up past the operator."""

    op: str
    quantizer: str


class ManyConsumers(Reason, key="many-consumers"):
    """A Q or DQ cannot move past an operator because of other consumers.

    The operator's result has consumers other than the Q, or the DQ's result has consumers other
    than the operator.
    """

    op: str
    quantizer: str
    consumers: tuple[TensorConsumer, ...]


class ConcatReadElsewhere(Reason, key="output-not-only-quantized"):
    """A Q cannot pass a Concat whose result has consumers other than the Q."""

    consumers: tuple[TensorConsumer, ...]
