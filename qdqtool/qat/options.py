"""Options of quantization-aware training."""

from collections.abc import Sequence
from dataclasses import dataclass

from qdqtool.insertion.options import HEADS, RESIDUALS
from qdqtool.trt.targets import DEFAULT_TARGET, Target
from qdqtool.util.checks import check_choice, check_not_text

BACKENDS = ("pytorch-quantization", "modelopt")


@dataclass(frozen=True)
class QatOptions:
    """Options that decide where quantizers are inserted.

    Attributes:
        target: TensorRT version whose rules choose the quantized inputs.
        backend: Package that provides the quantizer modules, one of :data:`BACKENDS`.
        head: Part of a detection head that remains float, as for :func:`qdqtool.insert`.
        residual: Inputs of a residual Add that are quantized, as for :func:`qdqtool.insert`.
        unify: Whether tensors share one quantizer if Concat, Split, Slice, MaxPool or Resize
            connect them.
        exclude: Regular expressions on names of modules or nodes that remain float.
        include: Regular expressions on names of modules or nodes to quantize even if `head` leaves
            them float.
        merge: Whether to merge parallel branches into one convolution first, if they are made for
            this.
    """

    target: str | Target = DEFAULT_TARGET
    backend: str = "pytorch-quantization"
    head: str = "box"
    residual: str = "auto"
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
