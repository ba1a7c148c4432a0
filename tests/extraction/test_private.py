"""Private models: nothing of the original's texts and weights is left, and the prediction is the same."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import qdqtool
import qdqtool.errors
from qdqtool.extraction.masking import masked
from qdqtool.graph import Model
from qdqtool.qdq import quantizers, read_params
from tests.extraction.networks import SECRET, residual, secretive
from tests.trt.builder import Graph
from tests.trt.evidence import HOME

YOLO = HOME / "yolo-resnet18-orin-trt8502" / "model.onnx.gz"


@pytest.fixture(scope="module")
def pair() -> tuple[qdqtool.Extraction, qdqtool.Extraction]:
    """The same part, as it is and made private."""
    plain, hidden = (qdqtool.extract(secretive(), outputs=[f"{SECRET}/done"], private=p) for p in (False, True))
    return plain, hidden


def test_no_original_text_is_left(pair: tuple[qdqtool.Extraction, qdqtool.Extraction]) -> None:
    plain, hidden = pair
    assert plain.proto.SerializeToString().count(SECRET.encode()) > 100
    assert SECRET.lower().encode() not in hidden.proto.SerializeToString().lower()
    assert SECRET not in hidden.kept and SECRET not in str(hidden.as_json())


def test_the_prediction_is_the_same(pair: tuple[qdqtool.Extraction, qdqtool.Extraction]) -> None:
    plain, hidden = pair
    assert hidden.private is not None
    names = hidden.private.names
    assert len(set(names.values())) == len(names)
    one, two = plain.prediction, qdqtool.predict(hidden.proto)
    assert [(names[c.name], c.precision, c.inputs, c.output) for c in one.convolutions] == [
        (c.name, c.precision, c.inputs, c.output) for c in two.convolutions]
    assert sorted((f.code, names.get(f.node, "")) for f in one.findings) == sorted(
        (f.code, f.node) for f in two.findings)
    assert one.conversions == two.conversions


def test_the_structure_stays(pair: tuple[qdqtool.Extraction, qdqtool.Extraction]) -> None:
    plain, hidden = pair
    assert hidden.private is not None
    names = hidden.private.names
    for before, after in zip(plain.proto.graph.node, hidden.proto.graph.node, strict=True):
        assert [names.get(t, t) for t in before.input] == list(after.input)
        assert before.op_type == after.op_type or before.op_type.startswith(SECRET)
    for one, two in zip(plain.proto.graph.initializer, hidden.proto.graph.initializer, strict=True):
        assert (one.dims, one.data_type) == (two.dims, two.data_type)


def test_weights_and_scales_are_others(pair: tuple[qdqtool.Extraction, qdqtool.Extraction]) -> None:
    """Equal scales stay equal and different ones different; of each weight next to nothing is as it was."""
    plain, hidden = (Model(e.proto) for e in pair)
    old = [read_params(plain, n).scale for n in quantizers(plain)]
    new = [read_params(hidden, n).scale for n in quantizers(hidden)]
    assert len({a.tobytes() for a in old if a is not None}) == len({a.tobytes() for a in new if a is not None}) > 2
    for a, b in zip(old, new, strict=True):
        assert a is not None and b is not None and not np.any(a == b)
    for i, a in enumerate(old):
        for j in range(i):
            assert (a is not None and np.array_equal(a, old[j])) == np.array_equal(new[i], new[j])  # type: ignore[arg-type]
    weights = [(numpy_helper.to_array(a), numpy_helper.to_array(b))
               for a, b in zip(plain.proto.graph.initializer, hidden.proto.graph.initializer, strict=True)
               if len(a.dims) == 4]
    assert len(weights) > 4
    for before, after in weights:
        assert np.mean(before == after) < 0.01 and abs(np.corrcoef(before.reshape(-1), after.reshape(-1))[0, 1]) < 0.2


def test_weights_fill_the_same_part_of_their_range() -> None:
    plain, hidden = (Model(qdqtool.extract(residual(), node="b0.c1", private=p).proto) for p in (False, True))
    checked = 0
    for one, two in zip(quantizers(plain), quantizers(hidden), strict=True):
        before, after = plain.constant(one.input(0)), hidden.constant(two.input(0))
        if one.op != "QuantizeLinear" or before is None or after is None:
            continue
        shape = (-1, *[1] * (before.ndim - 1))
        scales = [read_params(m, n).scale for m, n in ((plain, one), (hidden, two))]
        assert scales[0] is not None and scales[1] is not None
        low, high = ((v / s.reshape(shape)).reshape(len(v), -1) for v, s in zip((before, after), scales, strict=True))
        np.testing.assert_allclose(low.max(axis=1), high.max(axis=1), rtol=1e-5)
        np.testing.assert_allclose(low.min(axis=1), high.min(axis=1), rtol=1e-5)
        checked += 1
    assert checked


def test_what_counts_up_is_structure() -> None:
    """The DFL's weights, 0 to 15, by which a YOLOv8 head is recognized."""
    random = np.random.default_rng(0)
    weights = random.standard_normal((4, 4)).astype(np.float32)
    bins = np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1)
    graph = onnx.helper.make_graph([], "g", [], [], [numpy_helper.from_array(bins, "bins"),
                                                     numpy_helper.from_array(weights, "weights")])
    proto = onnx.helper.make_model(graph)
    masked(proto, random)
    one, two = map(numpy_helper.to_array, proto.graph.initializer)
    np.testing.assert_array_equal(one, bins)
    assert np.mean(two == weights) < 0.2


@pytest.mark.parametrize("code", ["SKIP-FLOAT", "CONCAT-SCALE", "BN-UNFOLDED"])
def test_a_real_network(code: str) -> None:
    result = qdqtool.extract(str(YOLO), finding=code, private=True)
    whole = onnx.load_from_string(gzip.decompress(YOLO.read_bytes()))
    data = result.proto.SerializeToString()
    names = {n.name for n in whole.graph.node} | {t for n in whole.graph.node for t in (*n.input, *n.output)}
    assert not [n for n in names if len(n) > 4 and n.encode() in data]
    assert code in {f.code for f in qdqtool.predict(result.proto).findings}


def test_external_file_names_go(tmp_path: Path) -> None:
    model = residual()
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location=f"{SECRET}.bin", size_threshold=0)
    result = qdqtool.extract(str(tmp_path / "m.onnx"), finding="SKIP-FLOAT", private=True)
    assert SECRET.encode() not in result.proto.SerializeToString()
    assert all(t.raw_data for t in result.proto.graph.initializer)


def with_head(op: str = "AcmeHead", domain: str = "acme", **attributes: object) -> onnx.ModelProto:
    """A network that ends in an operator of somebody's own."""
    model = residual()
    node = onnx.helper.make_node(op, [model.graph.output[0].name], ["done"], "head", domain=domain, **attributes)
    model.graph.node.append(node)
    model.graph.output[0].name = "done"
    model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    return model


@pytest.mark.parametrize("word", ["graph", "attr", "domain", "t_b", "Opb", "main"])
def test_names_that_ours_could_be(word: str) -> None:
    """An original name that stands in a name that would be given only costs that one."""
    model = with_head(rate=3.0)
    model.graph.name = word
    model.metadata_props.add(key=word, value="1")
    data = qdqtool.extract(model, outputs=["done"], private=True).proto.SerializeToString()
    assert word.encode() not in data


def test_no_name_left_is_told() -> None:
    model = residual()
    for letter in "bcdfghjklmnpqrstvwxz":
        model.metadata_props.add(key=f"t_{letter}", value=f"n_{letter}")
    with pytest.raises(qdqtool.errors.ModelError, match="leave none free"):
        qdqtool.extract(model, finding="SKIP-FLOAT", private=True)


@pytest.mark.parametrize(("op", "kept"), [("FusedConv", True), ("AcmeDetector", False)])
def test_operators_of_a_public_domain(op: str, kept: bool) -> None:
    """onnxruntime's own keep their names; what somebody put into its domain does not."""
    model = with_head(op, "com.microsoft", acme_rate=2.0, activation="Relu")
    result = qdqtool.extract(model, outputs=["done"], private=True)
    last = result.proto.graph.node[-1]
    assert (last.op_type == op) == kept and last.domain == "com.microsoft"
    assert sum(a.name == "activation" and a.s == b"Relu" for a in last.attribute) == kept
    assert b"cme" not in result.proto.SerializeToString()


def test_words_that_are_not_the_standards() -> None:
    model = residual()
    conv = next(n for n in model.graph.node if n.op_type == "Conv")
    conv.attribute.extend([onnx.helper.make_attribute("acme_note", 1.0), onnx.helper.make_attribute("mode", "acme way"),
                           onnx.helper.make_attribute("auto_pad", "NOTSET")])
    result = qdqtool.extract(model, node=conv.name, private=True)
    data = result.proto.SerializeToString()
    assert b"acme" not in data and b"NOTSET" in data


def test_functions_go_by_other_names() -> None:
    model = with_head("AcmeBlock", "acme.fn")
    table = numpy_helper.from_array(np.linspace(1, 9, 32, dtype=np.float32), "AcmeTable")
    inside = [onnx.helper.make_node("Relu", ["AcmeX"], ["AcmeR"], "AcmeRelu", doc_string="Acme"),
              onnx.helper.make_node("Constant", [], ["AcmeC"], "AcmeConstant", value=table),
              onnx.helper.make_node("Mul", ["AcmeR", "AcmeC"], ["AcmeY"], "AcmeMul")]
    model.functions.append(onnx.helper.make_function(
        "acme.fn", "AcmeBlock", ["AcmeX"], ["AcmeY"], inside, list(model.opset_import[:1])))
    proto = qdqtool.extract(model, outputs=["done"], private=True).proto
    (function,) = proto.functions
    assert b"cme" not in proto.SerializeToString()
    assert (function.domain, function.name) == (proto.graph.node[-1].domain, proto.graph.node[-1].op_type)
    left = np.isin(numpy_helper.to_array(function.node[1].attribute[0].t), numpy_helper.to_array(table))
    assert left.sum() <= 2


def test_tables_in_attributes_are_data() -> None:
    anchors = [float(np.float32(x)) for x in np.linspace(1.1, 9.3, 12)]
    result = qdqtool.extract(with_head(anchors=anchors, table=list(range(1000, 1100))), outputs=["done"], private=True)
    tables = result.proto.graph.node[-1].attribute
    floats, ints = list(tables[0].floats), list(tables[1].ints)
    assert len(floats) == 12 and len(set(floats) & set(anchors)) <= 2
    assert len(ints) == 100 and ints != list(range(1000, 1100))


def test_one_number_a_channel_is_no_range() -> None:
    """Slopes of a PRelu or a depthwise 1x1 kernel: a range for each channel would be the number itself."""
    model = residual()
    slopes = np.random.default_rng(1).random((8, 1, 1)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(slopes, "slopes"))
    model.graph.node.append(onnx.helper.make_node("PRelu", [model.graph.output[0].name, "slopes"], ["done"], "prelu"))
    model.graph.output[0].name = "done"
    result = qdqtool.extract(model, outputs=["done"], private=True)
    new = np.concatenate([numpy_helper.to_array(t).reshape(-1) for t in result.proto.graph.initializer
                          if t.data_type == onnx.TensorProto.FLOAT])
    assert np.isin(slopes, new).sum() <= 2


def test_a_layer_made_of_two_nodes_goes_by_both_new_names() -> None:
    """A DQ that the copy of another Q in front of a Concat was fused into is one layer, named after both."""
    g = Graph()
    one, two = g.input(1, 8, 16, 16, name="one"), g.input(1, 8, 8, 8, name="two")
    first, second = g.pair(one, "acme.first", 0.048), g.pair(two, "acme.second", 0.045)
    joined = g.pair(g.concat([g.resize(second, "acme.resize"), first], "acme.concat"), "acme.joined", 0.048)
    other = g.concat([g.input(1, 8, 8, 8, name="three"), second], "acme.other")
    model = g.model(joined, other)
    whole = qdqtool.predict(model)
    places = [f.node for f in whole.findings if " + " in f.node]
    assert places == ["acme.second.DQ + acme.joined.Q_clone_0"]
    result = qdqtool.extract(model, outputs=[joined, other], private=True)
    assert result.private is not None
    new = f"{result.private.names['acme.second.DQ']} + {result.private.names['acme.joined.Q']}_clone_0"
    assert [f.node for f in result.prediction.findings if " + " in f.node] == [new]
    assert new in {f.node for f in result.shown.findings}
    assert "acme" not in str(result.as_json())
