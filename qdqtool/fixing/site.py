"""One place where a fix can be applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qdqtool.onnxgraph.editor import Editor
from qdqtool.onnxgraph.view import View
from qdqtool.trt.targets import Target


@dataclass(frozen=True)
class Site:
    """A fix at one place.

    Attributes:
        code: The finding code that it removes.
        node: Where.
        what: What is done, in a few words, to be told to the user.
        apply: Does it.
    """

    code: str
    node: str
    what: str
    apply: Callable[[Editor], None]


@dataclass(frozen=True)
class Step:
    """Fixes that are tried together.

    Attributes:
        codes: The finding codes that it can remove.
        find: Lists the places, given the model and the target.
        noise: By how much the noise of the network's outputs against the float network may grow.
        default: Whether it is done without being asked for by ``--only``.
    """

    codes: tuple[str, ...]
    find: Callable[[View, Target], list[Site]]
    noise: float
    default: bool = True
