"""What a model's parts must be for anything to read it: what onnx's own checker would refuse, and few files break."""

from __future__ import annotations

import onnx

from qdqtool.errors import ModelError
from qdqtool.subgraphs import inner_graphs

_VERSIONS = range(1000)  # of operator sets, far above any


def check_form(proto: onnx.ModelProto, what: str) -> None:
    """Looks at inputs, operator sets and references to a function's attributes.

    Args:
        proto: The model.
        what: What to call it in the message.

    Raises:
        ModelError: An input or output has no name, an input is declared twice, an operator set has a version that none
            can have, or a node outside a function takes its attribute from one.
    """
    for number in (o.version for o in proto.opset_import):
        if number not in _VERSIONS:
            raise ModelError(f"{what}: no operator set has the version {number}; the file is damaged")
    declared: set[str] = set()
    for value in proto.graph.input:
        if not value.name:
            raise ModelError(f"{what}: an input has no name; the file is damaged")
        if value.name in declared:
            raise ModelError(f"{what}: input '{value.name}' is declared twice; the file is damaged, export it again")
        declared.add(value.name)
    if not all(value.name for value in proto.graph.output):
        raise ModelError(f"{what}: an output has no name; the file is damaged")
    for nodes in (proto.graph.node, *(g.node for g in inner_graphs(proto.graph.node))):
        for node in nodes:
            for attribute in node.attribute:
                if attribute.ref_attr_name:
                    raise ModelError(f"{what}: node '{node.name}' ({node.op_type}) takes attribute '{attribute.name}' "
                                     "from a function, and is in none; the file is damaged")
