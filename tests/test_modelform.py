"""Parts of a model that nothing could be read with: one line, by every command that reads one."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from qdqtool import cli
from qdqtool.errors import ModelError
from qdqtool.modelfile import load


def model() -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 3, 4, 4]) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Elu", ["x"], ["y"], "n", alpha=1.0)], "g", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def unnamed(proto: onnx.ModelProto) -> None:
    proto.graph.input.add().CopyFrom(proto.graph.input[0])
    proto.graph.input[1].name = ""


def twice(proto: onnx.ModelProto) -> None:
    proto.graph.input.add().CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3]))


def version(proto: onnx.ModelProto) -> None:
    proto.opset_import[0].version = 1 << 40


def referring(proto: onnx.ModelProto) -> None:
    attribute = proto.graph.node[0].attribute[0]
    attribute.ref_attr_name = "alpha"
    attribute.ClearField("f")


def referring_inside(proto: onnx.ModelProto) -> None:
    referring(proto)
    inner = helper.make_graph(proto.graph.node, "b", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    del proto.graph.node[:]
    proto.graph.node.append(helper.make_node("If", ["x"], ["y"], "outer", then_branch=inner, else_branch=inner))


DAMAGES = [
    (unnamed, "an input has no name"), (twice, "input 'x' is declared twice"),
    (version, "no operator set has the version 1099511627776"),
    (referring, r"node 'n' \(Elu\) takes attribute 'alpha' from a function"),
    (referring_inside, r"node 'n' \(Elu\) takes attribute 'alpha' from a function"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_refused_by_every_way_in(damage, said, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proto = model()
    load(proto)
    damage(proto)
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    for source in (proto, path, path.read_bytes()):
        with pytest.raises(ModelError, match=said):
            load(source)
    for command in ("predict", "predict --target rtx1.7", "predict --gpu T4", "fix -o o.onnx"):
        assert cli.run([*command.split(), str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
