"""Options of quantization-aware training."""

from collections.abc import Sequence
from dataclasses import dataclass

from qdqtool.insertion.options import HEADS, RESIDUALS, HeadChoice, ResidualChoice
from qdqtool.trt.targets import DEFAULT_TARGET, Target
from qdqtool.util.checks import check_choice, check_not_text

BACKENDS = ("pytorch-quantization", "modelopt")


@dataclass(frozen=True)
class QatOptions:
    """Options that decide where quantizers are inserted; see :func:`qdqtool.qat.prepare`."""

    target: str | Target = DEFAULT_TARGET
    backend: str = "pytorch-quantization"
    head: HeadChoice = "box"
    residual: ResidualChoice = "auto"
    unify: bool = True
    exclude: Sequence[str] = ()
    include: Sequence[str] = ()
    merge: bool = True

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, BACKENDS)
        check_choice("head", self.head, HEADS)
        check_choice("residual", self.residual, RESIDUALS)
        check_not_text("exclude", self.exclude)
        check_not_text("include", self.include)
