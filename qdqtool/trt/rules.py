"""Every case that the simulator can rest on, by its id: ``<pass>/<case>``, and ``<operator>/<case>`` for operators."""

from __future__ import annotations

import functools

from qdqtool.knowledge.evidence import Case
from qdqtool.model import operators
from qdqtool.trt.passes._infra import Pass
from qdqtool.trt.pipeline import PIPELINE, Loop


def passes() -> tuple[type[Pass], ...]:
    """The passes, each once, in the order of the pipeline."""
    found: dict[type[Pass], None] = {}
    for stage in PIPELINE:
        members = stage.passes if isinstance(stage, Loop) else (stage,)
        found.update(dict.fromkeys(kind for kind in members if issubclass(kind, Pass)))
    return tuple(found)


@functools.cache
def cases() -> dict[str, Case]:
    """All cases by id."""
    found = {f"{kind.__name__}/{case.name}": case for kind in passes() for case in kind.cases}
    for operator in operators.OPERATORS.values():
        for case in operators.cases_of(operator):
            found.setdefault(f"{operator.name}/{case.name}", case)
    found[f"Shuffle/{operators.INSERTED_SHUFFLE.case.name}"] = operators.INSERTED_SHUFFLE.case
    first: dict[Case, str] = {}
    for name, case in found.items():
        first.setdefault(case, name)  # a fact of an operator may be a pass's case as well
    return {name: case for case, name in first.items()}


@functools.cache
def _ids() -> dict[Case, str]:
    return {case: name for name, case in cases().items()}


def id_of(case: Case) -> str:
    """The id of a case.

    Raises:
        KeyError: No pass and no operator has it.
    """
    return _ids()[case]
