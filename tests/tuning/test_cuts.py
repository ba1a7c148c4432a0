"""Behind any cut the same bits are computed as in the whole network."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from qdqtool.graph import Model
from qdqtool.tuning.configuration import Configuration
from qdqtool.tuning.cuts import Cuts
from tests.insertion.nets import images, run
from tests.tuning.nets import branchy, planner_of, resnet, segmentation


@pytest.mark.parametrize("make", [branchy, resnet, segmentation])
def test_every_cut_computes_what_the_whole_computes(make: object) -> None:
    proto: onnx.ModelProto = make()  # type: ignore[operator]
    channels = proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    data = images(2, channels, 16)
    planner = planner_of(proto, data)
    model = planner.model
    outputs = list(model.outputs)
    quantized, _ = planner.plan(Configuration()).recipe.build(model)
    wanted = run(quantized.proto, data[0])[0]
    everything = onnx.ModelProto()
    everything.CopyFrom(quantized.proto)
    names = [t for n in model.nodes for t in n.outputs if t not in outputs]
    everything.graph.output.extend(onnx.ValueInfoProto(name=t) for t in names)
    values = dict(zip([*outputs, *names], run(everything, data[0]), strict=True)) | data[0]
    cuts = Cuts(model, outputs)
    for position in range(len(model.ordered)):
        part = cuts.behind(quantized, position, outputs)
        feeds = {i.name: values[i.name] for i in part.graph.input}
        assert set(feeds) <= set(cuts.crossing(position))
        assert np.array_equal(run(part, feeds)[0], wanted), position
        assert cuts.usable(position) == position


def test_what_crosses_is_what_is_made_before_and_read_after() -> None:
    model = Model(branchy())
    cuts = Cuts(model, model.outputs)
    names = [n.name for n in model.ordered]
    assert cuts.crossing(0) == ("x",)
    assert set(cuts.crossing(names.index("c4"))) == {"add.out", "a3/Mul.out"}
    assert set(cuts.crossing(names.index("c5"))) == {"cat.out"}
    assert cuts.bytes_at(names.index("c5")) == 4 * 32 * 16 * 16
    assert cuts.crossing(len(names)) == ("c6.out",)


def test_an_output_that_is_made_early_is_carried_on() -> None:
    proto = branchy()
    proto.graph.output.append(onnx.helper.make_tensor_value_info("a0/Mul.out", 1, [1, 16, 16, 16]))
    model = Model(proto)
    assert "a0/Mul.out" in Cuts(model, model.outputs).crossing(len(model.ordered) - 1)
