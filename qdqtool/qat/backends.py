"""The two backends behind one interface: whose quantizer module is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from qdqtool.errors import QdqtoolError

# The attributes that hold quantizers, for both backends, so that a checkpoint loads with either. ModelOpt's own names
# (without the underscore) would be taken by others for a network that ModelOpt converted.
INPUT = "_input_quantizer"
RESIDUAL = "_residual_quantizer"
WEIGHT = "_weight_quantizer"


@dataclass(frozen=True)
class Backend:
    """What differs between backends.

    Attributes:
        name: As the user writes it.
        make: A quantizer for symmetric INT8; the argument is the channel axis, None for one amax.
    """

    name: str
    make: Callable[[int | None], nn.Module]


def backend_named(name: str) -> Backend:
    """The backend of that name.

    Raises:
        QdqtoolError: It is not installed.
    """
    try:
        if name == "modelopt":
            from qdqtool.qat import quantizer_modelopt

            return Backend(name, quantizer_modelopt.make)
        from qdqtool.qat import quantizer_pytorch

        return Backend(name, quantizer_pytorch.make)
    except ImportError as error:
        raise QdqtoolError(
            f"backend='{name}' cannot be imported ({str(error).splitlines()[0]}); pip install 'qdqtool[qat]'"
        ) from error
