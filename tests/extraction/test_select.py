"""Making a part smaller while it shows the same."""

from collections import Counter
from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qdqtool
from qdqtool.base import budgets
from qdqtool.extraction import job, moves
from qdqtool.extraction.select import Shrinker, put_back
from qdqtool.model.external import has_data
from qdqtool.model.graph import Model
from tests.explain.graphs import GRAPHS as OF_REFUSALS
from tests.explain.test_producers import models, prediction
from tests.extraction.networks import residual


def test_a_part_is_grown_from_the_nodes_that_a_finding_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its node, its convolutions and those of its refusals: no others, and none of its words."""
    alone = Counter[int]()
    for place, proto in enumerate(models()[: len(OF_REFUSALS)]):
        model, whole = Model(proto), prediction(place, "trt8.5")
        monkeypatch.setattr(job, "predict", lambda *_, whole=whole: whole)
        cut, seen = job.Job(model, "trt8.5"), list[str]()
        monkeypatch.setattr(
            cut, "_narrow", lambda anchors, seen=seen: seen.extend(n.name for n in anchors)
        )
        told = Counter[str]()
        for finding in whole.findings:
            told[finding.code] += 1
            seen.clear()
            cut.select([f"{finding.code}:{told[finding.code]}"], None, None, [], [], free=False)
            parts = {finding.node}, set(finding.convolutions), set(finding.nodes)
            named = set[str]().union(*parts)
            here = {n.name: named.intersection([n.name, *n.outputs]) for n in model.ordered}
            constant = {n.name for n in model.ordered if n.index in cut.cutter.constant}
            expected = [
                n for n, by in here.items() if by and (n not in constant or finding.node in by)
            ]
            assert sorted(seen) == sorted(expected or [model.ordered[0].name]), finding
            alone.update(
                i
                for i, part in enumerate(parts)
                if named - set[str]().union(*parts[:i], *parts[i + 1 :])
            )
    assert min(alone[i] for i in range(3)) > 0, "each names what the others do not"


def test_a_vector_of_many_sizes_stays_with_what_is_tried() -> None:
    """Above 512 parts it has more bytes than weights that are put apart: the part was no model any more."""
    parts = 600
    sizes = np.full(parts, 2, np.int64)
    names = [f"s{i}" for i in range(parts)]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "wide"),
        helper.make_node("Split", ["a", "sizes"], names, "split", axis=1),
        helper.make_node("Conv", ["s0", "k"], ["z"], "narrow"),
    ]
    weights = [
        numpy_helper.from_array(np.ones(shape, np.float32), name)
        for name, shape in (("w", (2 * parts, 4, 1, 1)), ("k", (4, 2, 1, 1)))
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", [1, 4, 8, 8]), ("z", [1, 4, 8, 8]))
    ]
    graph = helper.make_graph(
        nodes, "g", ends[:1], ends[1:], [*weights, numpy_helper.from_array(sizes, "sizes")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    found = qdqtool.extract(model, outputs=["z"], minimize=True, target="trt8.6").proto
    onnx.shape_inference.infer_shapes(found, check_type=True, strict_mode=True)
    assert found.graph.initializer[0].dims[0] < 2 * parts


def test_candidates_that_are_no_models_use_up_the_bytes_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each copies the weights that it changes: 300 of 60 MB, of which none could be tried, took a minute."""
    model = residual(1)
    monkeypatch.setattr(budgets, "MINIMIZED_BYTES", model.ByteSize() // 2)
    for move, ends in (
        (moves.channels, True),
        (moves.skips, False),
    ):  # these are made without the weights
        shrinker = Shrinker(model, lambda proto: False, (move,), bounded=True)
        monkeypatch.setattr(shrinker, "_typed", lambda proto: 1 / 0)
        shrinker.run()
        assert shrinker.tried == 0 and shrinker.exhausted is ends


def test_only_weights_that_change_are_copied() -> None:
    """Each of hundreds of candidates copied all 60 MB, whatever it changed: most of a minute."""
    width = (8, 24, 20, 12)
    arrays = [
        np.arange(o * i * 49, dtype=np.float32).reshape(o, i, 7, 7) for i, o in pairwise(width)
    ]
    nodes = [
        helper.make_node("Conv", [f"x{n}", f"w{n}"], [f"x{n + 1}"], f"c{n}", pads=[3] * 4)
        for n in range(3)
    ]
    ends = [
        helper.make_tensor_value_info(f"x{n}", TensorProto.FLOAT, [1, width[n], 8, 8])
        for n in (0, 3)
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        ends[:1],
        ends[1:],
        [numpy_helper.from_array(a, f"w{n}") for n, a in enumerate(arrays)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    shrinker = Shrinker(model, lambda proto: False)
    for move in (moves.weights, moves.channels):
        made = list(move(shrinker._light, shrinker._whole))
        assert [put_back(one, shrinker._apart) for one in made] == list(move(shrinker.proto))
        copied = [sum(has_data(t) for t in one.graph.initializer) for one in made]
        assert (min(copied), max(copied)) == (1, 3)
