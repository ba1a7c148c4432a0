from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

import qdqtool
from qdqtool.errors import BuilderError
from qdqtool.extraction import reductions
from qdqtool.extraction.api import ExtractionJob
from qdqtool.extraction.invariants import choose_finding
from qdqtool.extraction.shrinking import ModelShrinker, attach_constants, detach_constants
from qdqtool.ir.graph import Model
from qdqtool.proto.external_data import has_data
from qdqtool.util import limits
from tests.extraction.networks import residual
from tests.findings.graphs import GRAPHS as REFUSAL_GRAPHS
from tests.findings.test_producers import models, prediction
from tests.insertion.nets import operators
from tests.trt.builder import Graph


def test_part_grows_from_nodes_that_the_finding_names() -> None:
    """Anchors are the node of a finding, its convolutions and the nodes of its reasons."""
    decisive = Counter[int]()
    for place, proto in enumerate(models()[: len(REFUSAL_GRAPHS)]):
        model, whole = Model(proto), prediction(place, "trt8.5")
        job = ExtractionJob(model, "trt8.5")
        constant = {model.nodes[index].name for index in job.cutter.constant}
        for finding in whole.findings:
            fields = {finding.node}, set(finding.convolutions), set(finding.nodes)
            names = set[str]().union(*fields)
            by_node = {n.name: names.intersection([n.name, *n.outputs]) for n in model.ordered}
            expected = [
                node
                for node, by in by_node.items()
                if by and (node not in constant or finding.node in by)
            ]
            assert sorted(node.name for node in job.find_anchors([finding])) == sorted(
                expected or [model.ordered[0].name]
            ), finding
            for i, field in enumerate(fields):
                decisive[i] += bool(field.difference(*fields[:i], *fields[i + 1 :]))
    assert min(decisive[i] for i in range(3)) > 0


def test_choose_counts_findings_of_a_code() -> None:
    for place in range(len(REFUSAL_GRAPHS)):
        whole, count = prediction(place, "trt8.5"), Counter[str]()
        for finding in whole.findings:
            count[finding.code] += 1
            assert choose_finding(whole, f"{finding.code}:{count[finding.code]}", None) is finding


def test_minimize_keeps_values_of_a_long_vector_of_sizes(g: Graph) -> None:
    """The sizes of a Split into 600 parts take more bytes than a constant that is detached."""
    parts = 600
    inputs = [g.input(1, 4, 8, 8), g.const("w", np.ones((2 * parts, 4, 1, 1)))]
    sizes = g.const("sizes", np.full(parts, 2, np.int64))
    first, *_ = g.ops("Split", [g.op("Conv", inputs, "wide"), sizes], "split", parts, axis=1)
    model = g.model(g.op("Conv", [first, g.const("k", np.ones((4, 2, 1, 1)))], "narrow"))
    proto = qdqtool.extract(model, outputs=["narrow:0"], minimize=True, target="trt8.6").proto
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    assert proto.graph.initializer[0].dims[0] < 2 * parts


def break_relu(proto: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    for _ in range(100):
        candidate = deepcopy(proto)
        candidate.graph.node[1].op_type = "Relu"  # has two inputs
        yield candidate


@pytest.mark.parametrize(
    ("reduction", "exhausted"), [(reductions.reduce_channels, True), (break_relu, False)]
)
def test_refused_candidates_count_the_bytes_that_they_copy(
    g: Graph, reduction: reductions.Reduction, exhausted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No candidate is tried, because the MatMul accepts no other number of channels."""
    weights = np.ones((400, 1, 3, 3), np.float32)
    x = g.op("Conv", [g.input(1, 1, 4, 4), g.const("w", weights)], "conv")
    x = g.reshape(x, "reshape", 1, 1, 1, -1)
    model = g.model(g.op("MatMul", [x, g.const("v", np.ones((1, 1, 1600, 7)))], "product"))
    monkeypatch.setattr(limits, "MINIMIZED_BYTES", weights.nbytes)
    shrinker = ModelShrinker(model, lambda proto: False, (reduction,), bounded=True)
    list(shrinker.steps())
    assert shrinker.tried == 0 and shrinker.exhausted is exhausted


@pytest.mark.parametrize("reduction", [reductions.flatten_weights, reductions.reduce_channels])
def test_reductions_copy_only_weights_that_change(
    g: Graph, reduction: reductions.Reduction
) -> None:
    x = g.input(1, 8, 8, 8)
    for i, channels in enumerate((24, 20, 12)):
        x = g.conv(x, f"c{i}", channels, k=7, scale=None, weights="float")
    apart: dict[str, onnx.TensorProto] = {}
    light = detach_constants(g.model(x), apart)
    candidates = list(reduction(light, lambda tensor: apart.get(tensor.doc_string, tensor)))
    assert [attach_constants(candidate, apart) for candidate in candidates] == list(
        reduction(attach_constants(light, apart), lambda tensor: tensor)
    )
    copies = [sum(map(has_data, candidate.graph.initializer)) for candidate in candidates]
    assert (min(copies), max(copies)) == (1, 3)


def find_ranges(proto: onnx.ModelProto) -> np.ndarray:
    (weights,) = (t for t in proto.graph.initializer if len(t.dims) == 4)
    return np.abs(onnx.numpy_helper.to_array(weights)).max(axis=(1, 2, 3))


@pytest.mark.parametrize("reduction", [reductions.flatten_weights, reductions.reduce_channels])
def test_reduced_weights_fit_their_scales(g: Graph, reduction: reductions.Reduction) -> None:
    model = g.model(g.conv(g.input(1, 8, 8, 8), "conv", 12, scale=0.05))
    candidates = list(reduction(model, lambda tensor: tensor))
    assert candidates and len(set(find_ranges(model))) == 12
    for ranges in map(find_ranges, candidates):
        np.testing.assert_array_equal(ranges, find_ranges(model)[: len(ranges)])


def test_reduced_bins_of_a_dfl_still_count_from_zero(g: Graph) -> None:
    bins = g.pair(g.const("bins", np.arange(16.0).reshape(1, 16, 1, 1)), "bins.w", 15 / 127)
    model = g.model(g.op("Conv", [g.input(1, 16, 8, 8), bins], "dfl"))
    candidate = next(reductions.reduce_channels(model, lambda tensor: tensor))
    (weights,) = (t for t in candidate.graph.initializer if len(t.dims) == 4)
    count = weights.dims[1]
    assert count < 16 and onnx.numpy_helper.to_array(weights).ravel().tolist() == [*range(count)]


def has_add(model: onnx.ModelProto) -> bool:
    return "Add" in operators(model)


def test_shrinker_keeps_a_single_node() -> None:
    shrinker = ModelShrinker(residual(), has_add)
    list(shrinker.steps())
    onnx.checker.check_model(shrinker.proto, full_check=True)
    assert operators(shrinker.proto) == ["Add"]
    for value in shrinker.proto.graph.input:
        assert {d.dim_value for d in value.type.tensor_type.shape.dim} == {1}


def test_shrinker_model_holds_after_each_step() -> None:
    def holds(model: onnx.ModelProto) -> bool:
        onnx.checker.check_model(model, full_check=True)
        return operators(model).count("Conv") >= 2

    shrinker = ModelShrinker(residual(), holds)
    for answer in shrinker.steps():
        assert isinstance(answer, bool) and holds(shrinker.proto)
    assert operators(shrinker.proto).count("Conv") == 2


def test_shrinker_tries_each_model_once_and_up_to_the_limit() -> None:
    tried: list[bytes] = []

    def holds(model: onnx.ModelProto) -> bool:
        tried.append(model.SerializeToString(deterministic=True))
        return has_add(model)

    list(ModelShrinker(residual(), holds, reductions.ALL, limit=40).steps())
    assert len(tried) == len(set(tried)) <= 40


def test_shrinker_keeps_model_if_the_check_fails() -> None:
    shrinker = ModelShrinker(residual(), Mock(side_effect=ValueError("no")), limit=5)
    list(shrinker.steps())
    assert len(shrinker.proto.graph.node) == len(residual().graph.node)


def test_shrinker_ends_if_the_builder_is_gone() -> None:
    lose_builder = Mock(side_effect=BuilderError("gone", code="crashed"))
    with pytest.raises(BuilderError, match="gone"):
        list(ModelShrinker(residual(), lose_builder).steps())


def inferred_shapes(model: onnx.ModelProto) -> list[list[int]]:
    typed = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    ends = (*typed.graph.input, *typed.graph.output)
    return [[d.dim_value for d in value.type.tensor_type.shape.dim] for value in ends]


def test_reductions_begin_with_the_smallest_sizes() -> None:
    assert inferred_shapes(next(reductions.reduce_channels(residual(), lambda tensor: tensor))) == [
        [1, 1, 16, 16],
        [1, 1, 16, 16],
    ]
    assert inferred_shapes(next(reductions.reduce_images(residual())))[-1] == [1, 8, 1, 1]
