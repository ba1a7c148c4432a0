"""Options of an extraction."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from qdqtool.builders.options import BUILDERS
from qdqtool.errors import QdqtoolError
from qdqtool.util.checks import check_choice, check_not_text

PREDICTED_MODELS = 2000  # default maximum number of models that are predicted
CHECKED_MODELS = 400  # default maximum if each model is also built or given to a command


@dataclass(frozen=True)
class SelectionOptions:
    """Selection of the part of the model to extract.

    Attributes:
        finding: One or several texts: ``CODE``, or ``CODE:n`` for the n-th finding with the code.
        node: Name of a node.
        hops: Maximum number of steps from `node` to other nodes. None: as many as needed to keep
            the prediction.
        inputs: Tensors at which the part begins.
        outputs: Tensors at which the part ends.
    """

    finding: str | Sequence[str] | None = ()
    node: str | None = None
    hops: int | None = None
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_not_text("inputs", self.inputs)
        check_not_text("outputs", self.outputs)
        if self.hops is not None:
            object.__setattr__(self, "hops", operator.index(self.hops))
        if self.hops is not None and self.hops < 0:
            raise QdqtoolError(
                f"`hops` is {self.hops}; give at least 0", code="out-of-range", parameter="hops"
            )
        check_not_empty("finding", self.findings)
        check_not_empty("inputs", self.inputs)
        check_not_empty("outputs", self.outputs)
        check_not_empty("node", [self.node])

    @property
    def findings(self) -> list[str]:
        """The texts of `finding` as a list."""
        return [self.finding] if isinstance(self.finding, str) else list(self.finding or ())

    @property
    def is_empty(self) -> bool:
        """Whether no findings, no node and no tensors are selected."""
        return not (self.findings or self.node or self.inputs or self.outputs)

    def check_consistency(self) -> None:
        """Raise an error if the options contradict each other.

        Raises:
            QdqtoolError: Two options contradict each other.
        """
        if self.inputs or self.outputs:
            if self.findings or self.node or self.hops is not None:
                raise QdqtoolError(
                    "`inputs` and `outputs` cannot be combined with `finding`, `node` or `hops`; "
                    "leave out either group",
                    code="option-conflict",
                    parameter="inputs" if self.inputs else "outputs",
                )
        elif self.hops is not None and (self.node is None or self.findings):
            raise QdqtoolError(
                "`hops` is a distance from a node; "
                + ("leave `hops` or `finding` out" if self.findings else "give `node`"),
                code="option-conflict" if self.findings else "missing-argument",
                parameter="hops" if self.findings else "node",
            )


@dataclass(frozen=True)
class ShrinkOptions:
    """Options of shrinking: how far to reduce the part, and which behavior to keep.

    Attributes:
        minimize: Whether to remove nodes, channels, pixels and weights.
        builder: Builder that must have the same outcome for the part as for the whole model.
        check: Command that must have the same exit code for the part as for the whole model.
        says: Text that the command must print; None if the output is not checked.
        check_timeout: Maximum time of one run of the command, in seconds.
        limit: Maximum number of models to try.
        private: Whether to replace names, weights, scales and metadata.
    """

    minimize: bool = False
    builder: str | None = None
    check: str | None = None
    says: str | None = None
    check_timeout: float | None = None
    limit: int | None = None
    private: bool = False

    def __post_init__(self) -> None:
        if self.builder is not None:
            check_choice("builder", self.builder, BUILDERS)
        if self.builder is not None and self.check is not None:
            raise QdqtoolError(
                "give a `builder` or a `check`, not both", code="option-conflict", parameter="check"
            )
        if self.limit is not None and operator.index(self.limit) < 1:
            raise QdqtoolError(
                f"`limit` is {self.limit}; give at least 1", code="out-of-range", parameter="limit"
            )
        if self.says is not None and self.check is None:
            raise QdqtoolError(
                "`says` has no effect without `check`; give the command as `check`",
                code="missing-argument",
                parameter="check",
            )
        if self.check_timeout is not None and self.check is None:
            raise QdqtoolError(
                "`check_timeout` has no effect without `check`; give `check` as well",
                code="option-without-effect",
                parameter="check_timeout",
            )
        if self.limit is not None and not (self.minimize or self.is_checked):
            raise QdqtoolError(
                "`limit` has no effect, because no models are tried; give `minimize` as well",
                code="option-without-effect",
                parameter="limit",
            )
        check_not_empty("check", [self.check])
        check_not_empty("says", [self.says])

    @property
    def is_checked(self) -> bool:
        """Whether a builder or a command tests each model."""
        return bool(self.builder or self.check)

    @property
    def tries(self) -> int:
        """Maximum number of models to try: the option `limit`, or its default."""
        if self.limit is not None:
            return operator.index(self.limit)
        return CHECKED_MODELS if self.is_checked else PREDICTED_MODELS


def check_not_empty(parameter: str, values: Sequence[str | None]) -> None:
    """Raise an error if a text in an argument is blank.

    Raises:
        QdqtoolError: A text is blank.
    """
    if any(value is not None and not value.strip() for value in values):
        raise QdqtoolError(
            f"`{parameter}` is empty; give a value, or leave `{parameter}` out",
            code="empty",
            parameter=parameter,
        )
