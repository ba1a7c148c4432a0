"""A recipe makes the model that ``qdqtool.insert`` makes of the same choices."""

from __future__ import annotations

import pickle

import numpy as np

import qdqtool
from qdqtool.tuning.configuration import Configuration
from qdqtool.tuning.recipe import Recipe, first_change
from tests.insertion.nets import check, images, run
from tests.tuning.nets import branchy, planner_of


def test_the_same_model_as_insert() -> None:
    data = images(4, 16, 16)
    planner = planner_of(branchy(), data)
    for floats in ((), ("c1", "c4"), ("add",), ("c0", "c6")):
        made, _ = planner.plan(Configuration(floats=frozenset(floats))).recipe.build(planner.model)
        proto = made.proto
        inserted = qdqtool.insert(branchy(), data, method="mse", exclude=[f"^{n}$" for n in floats], residual="skip",
                                  predict=False)  # fmt: skip
        check(proto)
        assert [(n.op_type, n.name, *n.input) for n in proto.graph.node] == [
            (n.op_type, n.name, *n.input) for n in inserted.model.graph.node
        ]
        assert np.array_equal(run(proto, data[0])[0], run(inserted.model, data[0])[0])


def test_methods_and_scales_of_their_own() -> None:
    data = images(4, 16, 16)
    planner = planner_of(branchy(), data)
    changed = planner.plan(Configuration(methods=frozenset({("add.out", "max")}))).recipe
    inserted = qdqtool.insert(branchy(), data, method="mse", method_for=[("^add.out$", "max")], residual="skip",
                              predict=False)  # fmt: skip
    wanted = {q.tensor: q.scale for q in inserted.activations}
    assert {p.tensor: p.scale for p in changed.pairs} == wanted
    apart = planner.plan(Configuration(apart=frozenset({"x"}))).recipe
    assert {p.group for p in apart.pairs if p.tensor == "x"} == {None}


def test_keys_tell_models_apart_and_nothing_else() -> None:
    planner = planner_of(branchy(), images(2, 16, 16))
    one, same, other = (planner.plan(Configuration(floats=frozenset(f))).recipe for f in ((), (), ("c3",)))
    assert one.key == same.key != other.key
    back: Recipe = pickle.loads(pickle.dumps(one))
    assert back == one and back.key == one.key


def test_first_change_is_the_first_node_that_reads_something_else() -> None:
    planner = planner_of(branchy(), images(2, 16, 16))
    names = [n.name for n in planner.model.ordered]
    base = planner.plan(Configuration()).recipe
    for node in ("c0", "c2", "add", "c6"):
        other = planner.plan(Configuration(floats=frozenset({node}))).recipe
        assert names[first_change(planner.model, base, other)] == node
    assert first_change(planner.model, base, base) == len(names)
