"""Makes a network on which prediction and build disagree as small as it gets while they still do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx
from onnx import helper

from tests.fuzz.driver import Answer

Disagrees = Callable[[onnx.ModelProto], bool]


def shrink(proto: onnx.ModelProto, disagrees: Disagrees, limit: int = 400) -> onnx.ModelProto:
    """The smallest network found that still disagrees.

    Args:
        proto: A network that disagrees.
        disagrees: Predicts and builds.
        limit: Number of builds to spend.
    """
    current = _typed(proto)
    spent = 0
    progress = True
    while progress and spent < limit:
        progress = False
        for candidate in _smaller(current):
            if spent >= limit:
                break
            spent += 1
            try:
                typed = _typed(candidate)
                still = disagrees(typed)
            except Exception:
                # Cutting makes models that onnx refuses; they are no candidates.
                continue
            if still:
                current = typed
                progress = True
                break
    return current


def _typed(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a type for every tensor, without unused nodes."""
    clean = onnx.ModelProto()
    clean.CopyFrom(proto)
    _prune(clean)
    return onnx.shape_inference.infer_shapes(clean, check_type=True, strict_mode=True)


def _prune(proto: onnx.ModelProto) -> None:
    graph = proto.graph
    needed = {o.name for o in graph.output}
    keep = []
    for node in reversed(graph.node):
        if needed & set(node.output):
            keep.append(node)
            needed.update(node.input)
    keep.reverse()
    del graph.node[:]
    graph.node.extend(keep)
    for field in (graph.initializer, graph.input):
        kept = [x for x in field if x.name in needed]
        del field[:]
        field.extend(kept)
    del graph.value_info[:]


def _types(proto: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    graph = proto.graph
    found = {v.name: v.type for v in (*graph.input, *graph.value_info, *graph.output)}
    found.update({t.name: helper.make_tensor_type_proto(t.data_type, list(t.dims)) for t in graph.initializer})
    return found


def _copy(proto: onnx.ModelProto) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    return result


def _smaller(proto: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """Candidates, the boldest cuts first."""
    types = _types(proto)
    graph = proto.graph
    constants = {t.name for t in graph.initializer}
    constants.update(o for n in graph.node if n.op_type == "Constant" for o in n.output)
    for node in graph.node:  # one output, high up
        if node.op_type == "Constant" or node.output[0] not in types:
            continue
        if len(graph.output) == 1 and graph.output[0].name == node.output[0]:
            continue
        candidate = _copy(proto)
        del candidate.graph.output[:]
        candidate.graph.output.append(helper.make_value_info(node.output[0], types[node.output[0]]))
        yield candidate
    for index in range(len(graph.output)):  # one output less
        if len(graph.output) > 1:
            candidate = _copy(proto)
            del candidate.graph.output[index]
            yield candidate
    for index in range(len(graph.node) - 1, -1, -1):  # a node's output becomes a network input
        node = graph.node[index]
        if node.op_type == "Constant" or any(o.name in node.output for o in graph.output):
            continue
        if all(not i or i in constants for i in node.input):
            continue
        candidate = _copy(proto)
        del candidate.graph.node[index]
        for name in node.output:
            if name in types:
                candidate.graph.input.append(helper.make_value_info(name, types[name]))
        yield candidate
    for index in range(len(graph.node) - 1, -1, -1):  # a node is left out
        node = graph.node[index]
        for source in node.input:
            if source in types and source not in constants and types[source] == types.get(node.output[0]):
                candidate = _copy(proto)
                del candidate.graph.node[index]
                for other in candidate.graph.node:
                    for place, name in enumerate(other.input):
                        if name == node.output[0]:
                            other.input[place] = source
                for output in candidate.graph.output:
                    if output.name == node.output[0]:
                        output.name = source
                yield candidate


def shrink_answer(proto: onnx.ModelProto, answer: Callable[[onnx.ModelProto], Answer]) -> onnx.ModelProto:
    """Shrinks while a disagreement of the same kind (status, or the same two precisions) stays."""
    kind = _kind(answer(proto).wrong)

    def disagrees(smaller: onnx.ModelProto) -> bool:
        return bool(kind & _kind(answer(smaller).wrong))

    return shrink(proto, disagrees) if kind else proto


def _kind(wrong: list[tuple[str, str, str]]) -> set[tuple[bool, str, str]]:
    return {(bool(name), predicted, built[:60]) for name, predicted, built in wrong}
