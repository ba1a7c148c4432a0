"""Changes of the inputs and outputs of a network, which an application reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qdqtool.ir.graph import Model, Shape
from qdqtool.ir.precision import Precision
from qdqtool.ir.qdq import precision_of
from qdqtool.util.json_text import Json
from qdqtool.util.records import to_json_fields
from qdqtool.util.text import format_shape


@dataclass(frozen=True, slots=True)
class InterfaceTensor:
    """An input or output of a network.

    Attributes:
        name: Name of the tensor.
        type: Type of the tensor.
        shape: Dimensions, each -1 if dynamic; None if even the rank is unknown.
    """

    name: str
    type: Precision
    shape: tuple[int, ...] | None

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return to_json_fields(self, "name", "type", "shape")


@dataclass(frozen=True, slots=True)
class InterfaceChange:
    """An input or output that differs between two models, or that only one of them has.

    Attributes:
        kind: ``input`` or ``output``.
        a: The tensor of the first model; None if missing there.
        b: The tensor of the second model; None if missing there.
    """

    kind: str
    a: InterfaceTensor | None
    b: InterfaceTensor | None

    @property
    def changes(self) -> tuple[str, ...]:
        """The fields that differ: ``name``, ``type``, ``shape``. Empty for one tensor."""
        if self.a is None or self.b is None:
            return ()
        differs = {
            "name": self.a.name != self.b.name,
            "type": self.a.type != self.b.type,
            "shape": _are_shapes_different(self.a.shape, self.b.shape, self.kind),
        }
        return tuple(name for name, is_different in differs.items() if is_different)

    @property
    def why(self) -> str:
        """Description of the change, such as ``input x is UINT8 instead of FP32``."""
        a, b = self.a, self.b
        if a is None or b is None:
            name = next(tensor.name for tensor in (a, b) if tensor is not None)
            return f"{self.kind} {name} is only in {'A' if b is None else 'B'}"
        values = {
            "name": f"is named {b.name} in B",
            "type": f"is {b.type} instead of {a.type}",
            "shape": f"has the shape {format_shape(b.shape or ())} instead of "
            f"{format_shape(a.shape or ())}",
        }
        return f"{self.kind} {a.name} {', '.join(values[name] for name in self.changes)}"

    def as_json(self) -> Json:
        """Return the fields of the JSON output."""
        return to_json_fields(self, "kind", "a", "b", "changes", "why")


def compare_interfaces(first: Model, second: Model) -> list[InterfaceChange]:
    """Return the inputs and outputs that differ between two models, inputs first.

    Tensors of equal names are compared. If both models have equally many other inputs (or outputs),
    these are compared in their order. Dynamic and unknown dimensions of outputs are not compared,
    because they follow from the inputs.
    """
    pairs = [
        *_pair_tensors("input", first, first.inputs, second, second.inputs),
        *_pair_tensors("output", first, first.outputs, second, second.outputs),
    ]
    return [pair for pair in pairs if pair.changes or pair.a is None or pair.b is None]


def _pair_tensors(
    kind: str, first: Model, a: Sequence[str], second: Model, b: Sequence[str]
) -> list[InterfaceChange]:
    partners: dict[str, str | None] = {name: name if name in b else None for name in a}
    others = [name for name, partner in partners.items() if partner is None]
    remaining = [name for name in b if name not in partners]
    if len(others) == len(remaining):
        partners |= zip(others, remaining, strict=True)
        remaining = []
    return [
        *(
            InterfaceChange(
                kind,
                _read_tensor(first, name),
                None if partner is None else _read_tensor(second, partner),
            )
            for name, partner in partners.items()
        ),
        *(InterfaceChange(kind, None, _read_tensor(second, name)) for name in remaining),
    ]


def _read_tensor(model: Model, name: str) -> InterfaceTensor:
    elem_type, shape = model.tensor_type(name)
    return InterfaceTensor(name, precision_of(elem_type), _mark_dynamic(shape))


def _mark_dynamic(shape: Shape | None) -> tuple[int, ...] | None:
    """Return -1 for dynamic dimensions, for which some exporters write 0."""
    return None if shape is None else tuple(size if size and size > 0 else -1 for size in shape)


def _are_shapes_different(a: tuple[int, ...] | None, b: tuple[int, ...] | None, kind: str) -> bool:
    if a is None or b is None:
        return False
    if kind == "input" or len(a) != len(b):
        return a != b
    return any(x != y for x, y in zip(a, b, strict=True) if -1 not in (x, y))
